//! Whose weights are whose.

use crate::checkpoints::*;
use crate::harness::*;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

#[test]
fn a_mismatch_says_what_differs_and_how_to_the_engine_and_in_the_log() {
    let (site, llama) = (Site::new(), model("llama"));
    let launcher = site.preload(&llama, 2, &["--key-extra", "kv_cache_dtype=fp8"]);
    let error = |model: &Path, tp: u32, more: &[&str]| {
        let mut args = vec!["--rank", "0"];
        args.extend(more);
        site.attach(model, tp, &args).error(1)
    };
    let same = ["--key-extra", "kv_cache_dtype=fp8"];
    assert_eq!(
        site.attach(&llama, 2, &["--rank", "0", same[0], same[1]]).code,
        Some(0)
    );
    let bytes = |model: &Path| {
        let files = fs::read_dir(model).unwrap().map(Result::unwrap);
        let counted = files.filter(|file| {
            let name = file.file_name().into_string().unwrap();
            name == "config.json" || name.ends_with(".safetensors")
        });
        counted.map(|file| file.metadata().unwrap().len()).sum::<u64>()
    };
    let other_model = format!(
        "checkpoint (asked for {} bytes, served {} bytes), \
         model_arch (asked for Qwen3ForCausalLM, served LlamaForCausalLM)",
        bytes(&model("qwen3")),
        bytes(&llama)
    );
    let fields = [
        (error(&llama, 1, &same), "tp_size (asked for 1, served 2)"),
        (
            error(&llama, 2, &["--revision", "main", same[0], same[1]]),
            "revision (asked for main, served none)",
        ),
        (
            error(&llama, 2, &["--engine-version", "0.1", same[0], same[1]]),
            "engine_version (asked for 0.1, served none)",
        ),
        (
            error(&llama, 2, &[]),
            "extra.kv_cache_dtype (asked for none, served fp8)",
        ),
        (
            error(&llama, 2, &["--key-extra", "kv_cache_dtype=a\u{1b}[2J\n"]),
            r"extra.kv_cache_dtype (asked for a\u{1b}[2J\n, served fp8)",
        ),
        (error(&model("qwen3"), 2, &same), &other_model),
    ];
    for (error, fields) in fields {
        let expected = format!("rank 0: the daemon serves something else: {fields};");
        assert!(error.contains(&expected), "{error}");
        launcher.says(&format!(" in {fields}\n"));
    }
}

#[test]
fn equal_bytes_in_another_directory_are_the_same_checkpoint() {
    let (site, llama) = (Site::new(), model("llama"));
    let _launcher = site.preload(&llama, 2, &[]);
    let copy = copy_of(&llama, &site.path().join("copy"));
    site.attach_verified(&copy, 2);
}

#[test]
fn one_flipped_byte_in_any_file_of_a_copy_is_another_checkpoint() {
    let (site, llama) = (Site::new(), model("llama"));
    let _launcher = site.preload(&llama, 1, &[]);
    let names = fs::read_dir(&llama)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    for name in names.filter(|name| name.to_str().unwrap().ends_with(".safetensors")) {
        let copy = copy_of(&llama, &site.path().join(&name));
        flip(&copy.join(&name));
        let error = site.attach(&copy, 1, &["--all"]).error(1);
        assert!(
            error.contains("something else: checkpoint (asked for "),
            "{error}"
        );
    }
    let copy = copy_of(&llama, &site.path().join("config"));
    let config = fs::read_to_string(copy.join("config.json")).unwrap();
    fs::write(copy.join("config.json"), config.replacen('\n', " ", 1)).unwrap();
    let error = site.attach(&copy, 1, &["--all"]).error(1);
    assert!(
        error.contains("something else: checkpoint (asked for "),
        "{error}"
    );
}

#[test]
fn a_byte_that_changed_under_restored_times_is_another_checkpoint() {
    let (site, llama) = (Site::new(), model("llama"));
    let copy = copy_of(&llama, &site.path().join("copy"));
    let file = copy.join("model-00003-of-00006.safetensors");
    let launcher = site.preload(&copy, 1, &[]);
    wait_until("the loader is gone", || launcher.children("loader").is_empty());
    let modified = fs::metadata(&file).unwrap().modified().unwrap();
    flip(&file);
    File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), modified);
    let error = site.attach(&copy, 1, &["--all"]).error(1);
    assert!(
        error.contains("something else: checkpoint (asked for "),
        "{error}"
    );
    // The weights themselves are those that were loaded.
    site.attach_verified(&llama, 1);
}

/// Changes the last byte of a file, which belongs to a weight.
fn flip(path: &Path) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let last = file.metadata().unwrap().len() - 1;
    let mut byte = [0];
    file.read_exact_at(&mut byte, last).unwrap();
    file.write_all_at(&[byte[0] ^ 1], last).unwrap();
}
