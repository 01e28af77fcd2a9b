//! Models by their repository's id, out of a Hugging Face cache.

use crate::checkpoints::*;
use crate::harness::*;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const LATER: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// Adds a snapshot of a checkpoint to the cache of a site, as `hf download` does, and makes it the one of
/// `revision`.
fn download(site: &Site, model: &Path, folder: &str, revision: &str, commit: &str) -> PathBuf {
    let folder = cache(site).join(folder);
    let (blobs, snapshot) = (folder.join("blobs"), folder.join("snapshots").join(commit));
    fs::create_dir_all(folder.join("refs")).unwrap();
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for entry in fs::read_dir(model).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let blob = format!("{commit}-{name}");
        fs::copy(entry.path(), blobs.join(&blob)).unwrap();
        symlink(Path::new("../../blobs").join(&blob), snapshot.join(&name)).unwrap();
    }
    fs::write(folder.join("refs").join(revision), commit).unwrap();
    snapshot
}

fn cache(site: &Site) -> PathBuf {
    site.path().join("hf/hub")
}

fn with_cache(site: &Site, mut command: Command) -> Command {
    command
        .env_remove("HF_HUB_CACHE")
        .env_remove("HUGGINGFACE_HUB_CACHE")
        .env("HF_HOME", site.path().join("hf"));
    command
}

fn by_id(site: &Site, subcommand: &str, id: &str, more: &[&str]) -> Command {
    with_cache(site, site.on_model(subcommand, Path::new(id), 1, more))
}

#[test]
fn a_repository_of_the_cache_is_served_and_attached_by_its_id() {
    let site = Site::new();
    let snapshot = download(&site, &model("qwen3"), "models--org--qwen", "main", COMMIT);
    let mut launcher = site.start(by_id(&site, "preload", "org/qwen", &[]));
    launcher.ready();
    launcher.says(&format!("org/qwen at main is {}", snapshot.display()));
    for id in ["org/qwen", snapshot.to_str().unwrap()] {
        let ran = finish(by_id(&site, "attach", id, &["--all", "--verify"]));
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
    // The cache can also be named; a revision that was asked for is part of the key.
    let named = ["--all", "--download-dir", cache(&site).to_str().unwrap()].map(str::to_owned);
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let ran = finish(site.on_model("attach", Path::new("org/qwen"), 1, &named));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let error = finish(by_id(
        &site,
        "attach",
        "org/qwen",
        &["--all", "--revision", COMMIT],
    ))
    .error(1);
    assert!(error.contains("revision"), "{error}");
    let plan = finish(by_id(&site, "plan", "org/qwen", &["--json"]));
    assert_eq!(plan.code, Some(0), "{plan:?}");
    let digest = |model: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weightd"));
        command.args(["digest", model]);
        finish(with_cache(&site, command)).stdout
    };
    assert_eq!(digest("org/qwen").trim().len(), 64);
    assert_eq!(digest("org/qwen"), digest(model("qwen3").to_str().unwrap()));

    // A branch that moves is another model for whoever comes, and the same for who serves.
    download(&site, &model("llama"), "models--org--qwen", "main", LATER);
    let error = finish(by_id(&site, "attach", "org/qwen", &["--all"])).error(1);
    assert!(error.contains("something else: checkpoint ("), "{error}");
    let ran = finish(by_id(
        &site,
        "attach",
        snapshot.to_str().unwrap(),
        &["--all", "--verify"],
    ));
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn a_draft_is_found_at_a_revision_of_its_own() {
    let site = Site::new();
    download(&site, &model("llama"), "models--llama", "main", COMMIT);
    download(&site, &model("eagle3_llama"), "models--org--draft", "v1", LATER);
    let draft = r#"{"method":"eagle3","model":"org/draft","revision":"v1"}"#;
    let drafting = ["--speculative-config", draft];
    let mut launcher = site.start(by_id(&site, "preload", "llama", &drafting));
    launcher.ready();
    for more in [&["--all", "--verify"][..], &["--all", "--verify", "--draft"]] {
        let ran = finish(by_id(&site, "attach", "llama", &[&drafting, more].concat()));
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
    let moved = draft.replace("v1", "main");
    let absent = ["--all", "--draft", "--speculative-config", &moved];
    let error = finish(by_id(&site, "attach", "llama", &absent)).error(1);
    assert!(
        error.contains("org/draft") && error.contains("hf download org/draft"),
        "{error}"
    );
}

#[test]
fn what_the_cache_lacks_is_said_with_the_command_that_downloads_it() {
    let site = Site::new();
    let hub = cache(&site);
    for subcommand in ["preload", "plan"] {
        let error = finish(by_id(&site, subcommand, "org/qwen", &["--revision", "v1"])).error(1);
        let command = format!(
            "`hf download org/qwen --revision v1 --cache-dir {}`",
            hub.display()
        );
        assert!(error.contains(&command), "{error}");
    }
    let snapshot = download(&site, &model("qwen3"), "models--org--qwen", "main", COMMIT);
    let blob = fs::canonicalize(snapshot.join("model.safetensors")).unwrap();
    fs::rename(&blob, blob.with_extension("incomplete")).unwrap();
    let error = finish(by_id(&site, "preload", "org/qwen", &[])).error(1);
    assert!(
        error.contains("symbolic link to nothing")
            && error.contains("broken off")
            && error.contains("`hf download org/qwen --revision 0123"),
        "{error}"
    );
    site.assert_clean();
}
