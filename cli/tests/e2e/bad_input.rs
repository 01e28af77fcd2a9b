//! One clear line each, the right exit code, and nothing left behind.

use crate::checkpoints::*;
use crate::harness::*;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A launcher that must fail with this code, and what it said.
#[track_caller]
fn refused(site: &Site, model: &Path, tp: u32, code: i32) -> String {
    let error = finish(site.on_model("preload", model, tp, &[])).error(code);
    site.assert_clean();
    error
}

#[track_caller]
fn assert_says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{part:?} is missing in {error}");
    }
}

fn broken(site: &Site, change: impl FnOnce(&Path)) -> PathBuf {
    let copy = copy_of(&model("qwen3"), &site.path().join("model"));
    change(&copy);
    copy
}

#[test]
fn a_model_directory_that_is_not_there() {
    let site = Site::new();
    let absent = site.path().join("absent");
    assert_says(&refused(&site, &absent, 1, 1), &[absent.to_str().unwrap()]);
}

#[test]
fn a_machine_without_the_device_that_is_asked_for() {
    let (site, model) = (Site::on("cuda"), model("qwen3"));
    for command in ["preload", "attach", "serve"] {
        let mut command = match command {
            "preload" => site.on_model(command, &model, 1, &[]),
            "attach" => site.on_model(command, &model, 1, &["--all"]),
            _ => site.weightd(&[command]),
        };
        // Also where there is one.
        command.env("CUDA_VISIBLE_DEVICES", "");
        let error = finish(command).error(1);
        assert_says(&error, &["CUDA driver"]);
        site.assert_clean();
    }
}

#[test]
fn a_directory_without_a_config() {
    let site = Site::new();
    let model = broken(&site, |model| fs::remove_file(model.join("config.json")).unwrap());
    assert_says(&refused(&site, &model, 1, 1), &["config.json"]);
}

#[test]
fn only_other_formats() {
    let site = Site::new();
    let model = broken(&site, |model| {
        fs::rename(model.join("model.safetensors"), model.join("pytorch_model.bin")).unwrap();
    });
    assert_says(
        &refused(&site, &model, 1, 1),
        &["pytorch_model.bin", "safetensors"],
    );
}

#[test]
fn a_truncated_file() {
    let site = Site::new();
    let model = broken(&site, |model| {
        let file = File::options()
            .write(true)
            .open(model.join("model.safetensors"))
            .unwrap();
        file.set_len(1000).unwrap();
    });
    assert_says(&refused(&site, &model, 1, 1), &["model.safetensors"]);
}

#[test]
fn an_index_that_names_a_missing_file() {
    let site = Site::new();
    let copy = copy_of(&model("llama"), &site.path().join("llama"));
    fs::remove_file(copy.join("model-00004-of-00006.safetensors")).unwrap();
    assert_says(
        &refused(&site, &copy, 1, 1),
        &["model-00004-of-00006.safetensors"],
    );
}

#[test]
fn a_tensor_parallel_size_that_does_not_divide() {
    let site = Site::new();
    assert_says(&refused(&site, &model("llama"), 3, 1), &["3"]);
}

#[test]
fn a_size_of_zero() {
    let site = Site::new();
    assert_says(&refused(&site, &model("llama"), 0, 2), &["0"]);
}

#[test]
fn a_socket_path_that_is_too_long() {
    let site = Site::new();
    let long = site.path().join("d".repeat(100));
    for subcommand in ["preload", "attach"] {
        fs::create_dir_all(&long).unwrap();
        let all = if subcommand == "attach" {
            vec!["--all"]
        } else {
            vec![]
        };
        let mut args = vec!["--socket-dir", long.to_str().unwrap()];
        args.extend(all);
        let error = finish(site.on_model(subcommand, &model("qwen3"), 1, &args)).error(2);
        assert_says(&error, &["107", "--socket-dir"]);
        assert_eq!(fs::read_dir(&long).unwrap().count(), 0);
    }
}

#[test]
fn an_instance_name_of_another_form() {
    let site = Site::new();
    for name in ["a/b", "draft", ""] {
        let instance = ["--instance", name];
        for command in [
            "status", "stop", "scrub", "release", "preload", "serve", "attach", "plan",
        ] {
            let ran = site.run(&[&[command][..], &instance].concat());
            assert_eq!(ran.code, Some(2), "{ran:?}");
            assert!(ran.stderr.contains("--instance <NAME>"), "{ran:?}");
            assert!(ran.stderr.contains(&format!("instance name {name:?}")), "{ran:?}");
        }
    }
    site.assert_clean();
}

#[test]
fn a_symlinked_socket_directory() {
    let site = Site::new();
    fs::create_dir(site.path().join("real")).unwrap();
    symlink(site.path().join("real"), site.dir()).unwrap();
    let error = finish(site.on_model("preload", &model("qwen3"), 1, &[])).error(1);
    assert_says(&error, &[site.dir().to_str().unwrap(), "symbolic link"]);
    let error = site.attach(&model("qwen3"), 1, &["--all"]).error(1);
    assert_says(&error, &["symbolic link"]);
    let error = site.run(&["status"]).error(1);
    assert_says(&error, &["symbolic link"]);
    assert_eq!(fs::read_dir(site.path().join("real")).unwrap().count(), 0);
}

#[test]
fn a_foreign_socket_directory() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can make a directory of another user");
        return;
    }
    let site = Site::new();
    fs::create_dir(site.dir()).unwrap();
    std::os::unix::fs::chown(site.dir(), Some(12_345), None).unwrap();
    let error = refused(&site, &model("qwen3"), 1, 1);
    assert_says(&error, &[site.dir().to_str().unwrap(), "12345"]);
}

#[test]
fn a_socket_directory_that_is_not_there() {
    let site = Site::new();
    let error = site.attach(&model("qwen3"), 1, &["--all"]).error(1);
    assert_says(&error, &["no socket directory", site.dir().to_str().unwrap()]);
    assert_eq!(site.run(&["status"]).stdout, site.no_daemons());
    assert_eq!(site.run(&["stop"]).stdout, site.no_daemons());
    let of_instance = site.no_daemons().replace("daemons", "daemons of instance a");
    for command in ["status", "stop"] {
        assert_eq!(site.run(&[command, "--instance", "a"]).stdout, of_instance);
    }
    assert!(!site.dir().exists());
}

#[test]
fn a_log_filter_that_cannot_be_read() {
    let site = Site::new();
    let error = site.run(&["status", "--log", "a=b=c"]).error(2);
    assert_says(&error, &["a=b=c"]);
}

#[test]
fn names_that_were_locked_are_free_again_when_a_later_rank_is_taken() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let _holder = site.preload(&qwen, 2, &[]);
    let status = site.status();
    let of = |rank: u64| {
        let daemon = status
            .iter()
            .find(|daemon| daemon["global_rank"] == rank)
            .unwrap();
        PathBuf::from(daemon["socket"].as_str().unwrap())
    };
    // Somebody else has the second rank's name, and nobody the first's.
    site.run(&["stop"]);
    let second = weightd_socket::lock::Lock::acquire(&of(1)).unwrap();
    let error = refused(&site, &qwen, 2, 1);
    assert_says(&error, &["already owns", of(1).to_str().unwrap()]);
    drop(second);
    let mut next = site.preload(&qwen, 2, &[]);
    next.signal(rustix::process::Signal::INT);
    assert_eq!(next.code(), 130);
    site.assert_clean();
}
