//! Which files are the same checkpoint: one byte is enough to be another, and nothing else is.

use crate::checkpoints::*;
use crate::harness::*;
use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use weightd_checkpoint::Checkpoint;
use weightd_gpu::testing::MappedFile;

/// What an attach says of other weights.
const OTHER: &str = "something else: checkpoint (asked for ";
/// What it logs when it has read all bytes.
const READ_ALL: &str = "computed the digest";

/// The first and the last tensor as they are stored, and one of scales.
const PLACES: [(&str, &str); 3] = [
    ("llama", "model.embed_tokens.weight"),
    ("llama", "model.norm.weight"),
    ("llamactw8a8", "model.layers.0.self_attn.q_proj.weight_scale"),
];

#[test]
fn one_changed_byte_of_any_kind_of_file_is_another_checkpoint() {
    let site = Site::new();
    for (number, (name, tensor)) in PLACES.iter().enumerate() {
        let copy = copy_of(&model(name), &site.path().join(number.to_string()));
        let _launcher = site.preload(&copy, 1, &["--instance", &format!("i{number}")]);
        let changed = copy_of(&copy, &site.path().join(format!("changed{number}")));
        flip_in(&changed, tensor);
        let instance = ["--all", "--instance", &format!("i{number}")];
        let error = site.attach(&changed, 1, &instance).error(1);
        assert!(error.contains(OTHER), "{tensor}: {error}");
        // And the same in the files that were loaded, with their times as they were.
        flip_in(&copy, tensor);
        let error = site.attach(&copy, 1, &instance).error(1);
        assert!(error.contains(OTHER), "{tensor}: {error}");
    }
    let llama = model("llama");
    let _launcher = site.preload(&llama, 1, &[]);
    for name in ["config.json", "model.safetensors.index.json"] {
        let copy = copy_of(&llama, &site.path().join(name));
        let text = fs::read_to_string(copy.join(name)).unwrap();
        fs::write(copy.join(name), text.replacen('\n', " ", 1)).unwrap();
        let error = site.attach(&copy, 1, &["--all"]).error(1);
        assert!(error.contains(OTHER), "{name}: {error}");
    }
}

#[test]
fn stores_through_a_mapping_are_noticed_wherever_the_files_lie() {
    // The second one moves no time that a program can see: on disk until it is written back, on tmpfs never.
    let places = [std::env::temp_dir(), PathBuf::from("/dev/shm")];
    for place in places.iter().filter(|place| place.is_dir()) {
        let (site, files) = (Site::new(), tempfile::tempdir_in(place).unwrap());
        let copy = copy_of(&model("llama"), files.path());
        let path = copy.join("model-00003-of-00006.safetensors");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let last = file.metadata().unwrap().len() as usize - 1;
        let mut mapped = MappedFile::map(&file).unwrap();
        let was = fs::read(&path).unwrap()[last];
        mapped.store(last, was);
        let _launcher = site.preload(&copy, 1, &[]);
        site.attach_verified(&copy, 1);
        mapped.store(last, was ^ 1);
        let error = site.attach(&copy, 1, &["--all"]).error(1);
        assert!(error.contains(OTHER), "{}: {error}", place.display());
        mapped.store(last, was);
        let ran = site.attach(&copy, 1, &["--all"]);
        assert_eq!(ran.code, Some(0), "the bytes are the same again: {ran:?}");
    }
}

#[test]
fn a_link_that_leads_elsewhere_now_is_another_checkpoint() {
    let site = Site::new();
    let (blobs, other) = (
        copy_of(&model("llama"), &site.path().join("blobs")),
        site.path().join("other"),
    );
    let snapshot = linked(&blobs, &site.path().join("snapshot"));
    let _launcher = site.preload(&snapshot, 1, &[]);
    site.attach_verified(&snapshot, 1);
    let name = "model-00006-of-00006.safetensors";
    fs::copy(blobs.join(name), &other).unwrap();
    flip_last(&other);
    fs::remove_file(snapshot.join(name)).unwrap();
    symlink(&other, snapshot.join(name)).unwrap();
    let error = site.attach(&snapshot, 1, &["--all"]).error(1);
    assert!(error.contains(OTHER), "{error}");
    fs::remove_file(snapshot.join(name)).unwrap();
    symlink(blobs.join(name), snapshot.join(name)).unwrap();
    site.attach_verified(&snapshot, 1);
}

#[test]
fn the_same_files_by_another_way_match_and_nothing_is_read() {
    let site = Site::new();
    let files = copy_of(&model("llama"), &site.path().join("files"));
    let hard = site.path().join("hard");
    fs::create_dir(&hard).unwrap();
    for entry in fs::read_dir(&files).unwrap() {
        let entry = entry.unwrap();
        fs::hard_link(entry.path(), hard.join(entry.file_name())).unwrap();
    }
    let soft = linked(&files, &site.path().join("soft"));
    if !is_steady(&files) {
        eprintln!("not tested: on this file system only bytes tell");
        return;
    }
    let _launcher = site.preload(&files, 1, &[]);
    let attach = |model: &Path| site.attach(model, 1, &["--all", "--verify"]);
    for way in [&files, &hard, &soft] {
        let ran = attach(way);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(!ran.stderr.contains("digest"), "{ran:?}");
    }
    // A bind mount, as a container has it.
    let mounted = site.path().join("mounted");
    fs::create_dir(&mounted).unwrap();
    let mount = format!("mount --bind {} {}", files.display(), mounted.display());
    match in_namespace(
        &mount,
        site.on_model("attach", &mounted, 1, &["--all", "--verify"]),
    ) {
        Some(ran) => {
            assert_eq!(ran.code, Some(0), "{ran:?}");
            assert!(!ran.stderr.contains("digest"), "{ran:?}");
        }
        None => eprintln!("not tested: no mounts here"),
    }
}

#[test]
fn on_an_overlay_bytes_decide_below_and_above() {
    let site = Site::new();
    let files = copy_of(&model("llama"), &site.path().join("files"));
    let _launcher = site.preload(&files, 1, &[]);
    let dirs = ["upper", "work", "merged"].map(|name| site.path().join(name));
    dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let [upper, work, merged] = dirs.map(|dir| dir.display().to_string());
    let mount = format!(
        "mount -t overlay overlay -o lowerdir={},upperdir={upper},workdir={work} {merged}",
        files.display()
    );
    let attach = |prepare: &str| {
        let command = site.on_model("attach", Path::new(&merged), 1, &["--all", "--verify"]);
        in_namespace(&format!("{mount} && {prepare}"), command)
    };
    let Some(ran) = attach("true") else {
        eprintln!("not tested: no overlays here");
        return;
    };
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stderr.contains(READ_ALL), "{ran:?}");
    let changed =
        format!("printf x | dd of={merged}/model-00001-of-00006.safetensors bs=1 seek=9000 conv=notrunc");
    let error = attach(&changed).unwrap();
    assert_eq!(error.code, Some(1), "{error:?}");
    assert!(error.stderr.contains(OTHER), "{error:?}");
    // The file below is as it was.
    site.attach_verified(&files, 1);
}

#[test]
fn a_digest_is_computed_once_and_again_when_the_files_changed() {
    let site = Site::new();
    let (loaded, other) = (
        model("llama"),
        copy_of(&model("llama"), &site.path().join("other")),
    );
    let _launcher = site.preload(&loaded, 1, &[]);
    if !is_steady(&other) || !is_steady(&loaded) {
        eprintln!("not tested: on this file system only bytes tell");
        return;
    }
    let attach = || site.attach(&other, 1, &["--all"]);
    let (first, second) = (attach(), attach());
    assert!(first.stderr.contains(READ_ALL), "{first:?}");
    assert!(second.stderr.contains("computed before"), "{second:?}");
    assert_eq!((first.code, second.code), (Some(0), Some(0)));
    // One that was cut short is no digest, and no reason to fail.
    let cache = site.path().join("cache/weightd");
    for entry in fs::read_dir(&cache).unwrap() {
        let file = File::options().write(true).open(entry.unwrap().path()).unwrap();
        file.set_len(100).unwrap();
    }
    let third = attach();
    assert!(
        third.stderr.contains("damaged") && third.stderr.contains(READ_ALL),
        "{third:?}"
    );
    assert_eq!(third.code, Some(0), "{third:?}");
    let name = "model-00002-of-00006.safetensors";
    let times = fs::metadata(other.join(name)).unwrap().modified().unwrap();
    flip_last(&other.join(name));
    let file = File::options().write(true).open(other.join(name)).unwrap();
    file.set_times(FileTimes::new().set_modified(times)).unwrap();
    let error = attach();
    assert!(
        error.stderr.contains(READ_ALL) && error.stderr.contains(OTHER),
        "{error:?}"
    );
}

#[test]
fn a_digest_can_be_printed_and_stated() {
    let site = Site::new();
    let llama = copy_of(&model("llama"), &site.path().join("llama"));
    let digest = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weightd"));
        command
            .arg("digest")
            .args(more)
            .env("XDG_CACHE_HOME", site.path().join("cache"));
        finish(command)
    };
    let path = llama.to_str().unwrap();
    let ran = digest(&[path]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let hex = ran.stdout.trim().to_owned();
    assert_eq!(digest(&["--model", path, "--recompute"]).stdout.trim(), hex);
    let object: serde_json::Value = serde_json::from_str(&digest(&[path, "--json"]).stdout).unwrap();
    assert_eq!(object["digest"], hex);
    assert_eq!(
        digest(&[model("llama").to_str().unwrap()]).stdout.trim(),
        hex,
        "wherever it lies"
    );
    assert_ne!(digest(&[model("qwen3").to_str().unwrap()]).stdout.trim(), hex);
    assert_eq!(digest(&["/nowhere"]).code, Some(1));

    let _launcher = site.preload(&llama, 1, &[]);
    // An image that ships it reads nothing, though nothing else tells that its files are the same.
    let copy = copy_of(&llama, &site.path().join("copy"));
    let ran = site.attach(&copy, 1, &["--all", "--wait", "20", "--checkpoint-digest", &hex]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(!ran.stderr.contains(READ_ALL), "{ran:?}");
    let wrong = hex.replace(|c: char| c.is_ascii_digit(), "a");
    for model in [&copy, &llama] {
        let error = site
            .attach(model, 1, &["--all", "--checkpoint-digest", &wrong])
            .error(1);
        assert!(error.contains(OTHER), "{error}");
    }
    let error = site.attach(&copy, 1, &["--all", "--checkpoint-digest", "12"]);
    assert_eq!(error.code, Some(2), "{error:?}");
}

/// Changes the first byte of a tensor where it is stored, and puts the file's time back.
fn flip_in(model: &Path, tensor: &str) {
    let checkpoint = Checkpoint::open(model).unwrap();
    let stored = &checkpoint.tensors()[tensor];
    flip(&checkpoint.files()[stored.file].path, stored.offset);
}

fn flip_last(path: &Path) {
    flip(path, fs::metadata(path).unwrap().len() - 1);
}

fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let times = file.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.set_times(FileTimes::new().set_modified(times)).unwrap();
}

/// A directory of links to the files of another, as in the Hugging Face cache.
fn linked(files: &Path, to: &Path) -> PathBuf {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(files).unwrap() {
        let entry = entry.unwrap();
        symlink(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to.to_owned()
}

/// Runs a command in mounts of its own, after this was done there; `None` where that is not allowed.
fn in_namespace(prepare: &str, command: Command) -> Option<Ran> {
    const NOT_ALLOWED: i32 = 99;
    let script = format!("{{ {prepare}; }} || exit {NOT_ALLOWED}; exec \"$0\" \"$@\"");
    let mut unshare = run_by(&["unshare", "--mount", "sh", "-c", &script], &command);
    let output = unshare.output().ok()?;
    // `unshare` itself says 1 where it is not allowed, and then the command said nothing.
    let refused = output.status.code() == Some(NOT_ALLOWED) || output.stderr.starts_with(b"unshare:");
    (!refused).then(|| output.into())
}
