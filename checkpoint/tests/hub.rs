//! Repositories of the local Hugging Face cache, as `hf download` lays them out, and what can be wrong with
//! them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use weightd_checkpoint::{Checkpoint, CheckpointError, FoundModel, HubCache, HubError};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const OTHER: &str = "fedcba9876543210fedcba9876543210fedcba98";

fn data(name: &str) -> PathBuf {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data");
    data.join(name).canonicalize().unwrap()
}

/// A cache that holds the Qwen checkpoint as `org/qwen`, at `main` and at a pull request.
struct Cache {
    temp: TempDir,
}

impl Cache {
    fn new() -> Cache {
        let cache = Cache {
            temp: tempfile::tempdir().unwrap(),
        };
        cache.hold("models--org--qwen", COMMIT);
        cache.refer("models--org--qwen", "main", COMMIT);
        cache.refer("models--org--qwen", "refs/pr/7", COMMIT);
        cache
    }

    fn path(&self) -> &Path {
        self.temp.path()
    }

    fn folder(&self) -> PathBuf {
        self.path().join("models--org--qwen")
    }

    fn snapshot(&self) -> PathBuf {
        self.folder().join("snapshots").join(COMMIT)
    }

    /// A snapshot of links into blobs.
    fn hold(&self, folder: &str, commit: &str) {
        let folder = self.path().join(folder);
        let (blobs, snapshot) = (folder.join("blobs"), folder.join("snapshots").join(commit));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        for (number, entry) in fs::read_dir(data("qwen3")).unwrap().enumerate() {
            let entry = entry.unwrap();
            let blob = format!("{number:064x}");
            fs::copy(entry.path(), blobs.join(&blob)).unwrap();
            let target = Path::new("../../blobs").join(&blob);
            symlink(target, snapshot.join(entry.file_name())).unwrap();
        }
    }

    fn refer(&self, folder: &str, revision: &str, content: impl AsRef<[u8]>) {
        let path = self.path().join(folder).join("refs").join(revision);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn find(&self, model: &str, revision: &str) -> Result<FoundModel, HubError> {
        HubCache::at(self.path()).find(Path::new(model), revision)
    }

    /// The error of looking; its message is one line with all of `expected`.
    #[track_caller]
    fn error(&self, model: &str, revision: &str, expected: &[&str]) -> HubError {
        let error = self.find(model, revision).unwrap_err();
        let message = error.to_string();
        for part in expected {
            assert!(message.contains(part), "{part:?} is missing in: {message}");
        }
        assert!(message.chars().all(|c| !c.is_control()), "{message:?}");
        error
    }

    /// The error of opening the snapshot.
    #[track_caller]
    fn incomplete(&self, expected: &[&str]) -> CheckpointError {
        let dir = self.find("org/qwen", "").unwrap().dir;
        let error = Checkpoint::open(&dir).unwrap_err();
        let message = error.to_string();
        for part in expected {
            assert!(message.contains(part), "{part:?} is missing in: {message}");
        }
        let CheckpointError::InSnapshot { fault, .. } = error else {
            panic!("{error:?}");
        };
        *fault
    }
}

#[test]
fn a_repository_is_found_by_branch_pull_request_and_commit() {
    let cache = Cache::new();
    for (revision, at) in [
        ("", "main"),
        ("main", "main"),
        ("refs/pr/7", "refs/pr/7"),
        (COMMIT, COMMIT),
    ] {
        let found = cache.find("org/qwen", revision).unwrap();
        assert_eq!(found.dir, cache.snapshot(), "{revision}");
        assert_eq!(found.repository, Some(("org/qwen".into(), at.into())));
    }
    // Some tools end the line.
    cache.refer("models--org--qwen", "v1.0", format!("{COMMIT}\n"));
    assert_eq!(cache.find("org/qwen", "v1.0").unwrap().dir, cache.snapshot());
    cache.hold("models--gpt2", OTHER);
    cache.refer("models--gpt2", "main", OTHER);
    assert!(cache.find("gpt2", "").unwrap().dir.ends_with(OTHER));
}

#[test]
fn a_snapshot_is_the_checkpoint_of_its_blobs() {
    let cache = Cache::new();
    let through_links = Checkpoint::open(&cache.find("org/qwen", "").unwrap().dir).unwrap();
    let plain = Checkpoint::open(&data("qwen3")).unwrap();
    assert_eq!(
        through_links
            .digest(&Default::default(), &Default::default())
            .unwrap(),
        plain.digest(&Default::default(), &Default::default()).unwrap(),
        "the same bytes"
    );
    // Another snapshot that shares the blobs consists of the same files.
    let other = cache.folder().join("snapshots").join(OTHER);
    fs::create_dir(&other).unwrap();
    for entry in fs::read_dir(cache.snapshot()).unwrap() {
        let link = entry.unwrap().path();
        symlink(
            fs::read_link(&link).unwrap(),
            other.join(link.file_name().unwrap()),
        )
        .unwrap();
    }
    let other = Checkpoint::open(&other).unwrap();
    assert_eq!(through_links.identity().files, other.identity().files);
}

#[test]
fn a_directory_comes_before_a_repository_and_other_paths_are_left_alone() {
    let cache = Cache::new();
    for folder in ["models--src", "models--src--rules"] {
        cache.hold(folder, OTHER);
        cache.refer(folder, "main", OTHER);
    }
    for given in [
        "src",
        "src/rules",
        "./org/qwen",
        "/org/qwen",
        "a/b/c",
        "../qwen",
        "a/",
        "",
    ] {
        let found = cache.find(given, "no such revision").unwrap();
        assert_eq!(found.dir, Path::new(given));
        assert_eq!(found.repository, None);
    }
}

#[test]
fn what_the_cache_lacks_comes_with_the_command_that_downloads_it() {
    let cache = Cache::new();
    let dir = cache.path().to_str().unwrap();
    let error = cache.error(
        "org/llama",
        "",
        &[
            "org/llama: no such directory",
            &format!("`hf download org/llama --cache-dir {dir}`"),
        ],
    );
    assert!(matches!(error, HubError::NotCached { .. }), "{error:?}");
    let error = cache.error(
        "org/qwen",
        "v2",
        &[
            "\"v2\"",
            &format!("`hf download org/qwen --revision v2 --cache-dir {dir}`"),
        ],
    );
    assert!(matches!(error, HubError::RevisionNotCached { .. }), "{error:?}");
    let error = cache.error("org/qwen", OTHER, &[OTHER]);
    assert!(matches!(error, HubError::RevisionNotCached { .. }), "{error:?}");
    // A reference to a snapshot that was removed.
    cache.refer("models--org--qwen", "old", OTHER);
    let error = cache.error("org/qwen", "old", &["--revision old"]);
    assert!(matches!(error, HubError::RevisionNotCached { .. }), "{error:?}");
}

#[test]
fn a_download_that_was_broken_off_says_how_it_goes_on() {
    let command = format!("`hf download org/qwen --revision {COMMIT} --cache-dir ");
    let without = |name: &str| {
        let cache = Cache::new();
        fs::remove_file(cache.snapshot().join(name)).unwrap();
        cache
    };
    let cache = without("config.json");
    let fault = cache.incomplete(&["no config.json", "complete the download of org/qwen", &command]);
    assert!(matches!(fault, CheckpointError::NoConfig { .. }), "{fault:?}");

    let cache = without("model.safetensors");
    fs::write(cache.folder().join("blobs/abc.incomplete"), "half").unwrap();
    let fault = cache.incomplete(&["is under way or was broken off", &command]);
    assert!(
        matches!(fault, CheckpointError::NoSafetensors { .. }),
        "{fault:?}"
    );

    let cache = Cache::new();
    let blob = fs::canonicalize(cache.snapshot().join("model.safetensors")).unwrap();
    fs::remove_file(&blob).unwrap();
    let fault = cache.incomplete(&["symbolic link to nothing", &command]);
    assert!(matches!(fault, CheckpointError::DanglingLink { .. }), "{fault:?}");

    // What is there counts as downloaded, however short it is.
    fs::write(&blob, "short").unwrap();
    let fault = cache.incomplete(&["truncated", "--force-download`"]);
    assert!(matches!(fault, CheckpointError::Header { .. }), "{fault:?}");

    let cache = without("model.safetensors");
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors"}}"#;
    fs::write(cache.snapshot().join("model.safetensors.index.json"), index).unwrap();
    let fault = cache.incomplete(&["model-00001-of-00002.safetensors", &command]);
    assert!(matches!(fault, CheckpointError::Index { .. }), "{fault:?}");
}

#[test]
fn revisions_that_lead_elsewhere_are_refused() {
    let cache = Cache::new();
    let long = "r".repeat(256);
    for revision in [
        "..",
        "../main",
        "a/../main",
        "/etc/passwd",
        "a//b",
        "a/",
        ".hidden",
        "a/.b",
        "-x",
        "a b",
        "a\nb",
        "a\0b",
        "\u{1b}[2J",
        "a\u{202e}b",
        "a:b",
        "a^",
        "a*",
        "a\\b",
        &long,
    ] {
        let error = cache.error("org/qwen", revision, &["revision "]);
        assert!(
            matches!(error, HubError::BadRevision { .. }),
            "{revision:?}: {error:?}"
        );
    }
}

#[test]
fn names_that_lead_elsewhere_are_no_repositories() {
    let cache = Cache::new();
    let long = "n".repeat(97);
    for model in [
        "../qwen",
        "org/..",
        "org/../qwen",
        ".org/qwen",
        "org/qwen/..",
        "or g/qwen",
        "org/qw\nen",
        "org--qwen",
        "a--b/c",
        "org/qwen-",
        &long,
        "org/qwen\0",
        "org\\qwen",
    ] {
        let found = cache.find(model, "").unwrap();
        assert_eq!(found.repository, None, "{model:?}");
        let error = Checkpoint::open(&found.dir).unwrap_err();
        assert!(
            matches!(
                error,
                CheckpointError::NoSuchDirectory { .. } | CheckpointError::Io { .. }
            ),
            "{model:?}: {error:?}"
        );
    }
}

#[test]
fn references_that_are_no_commits_are_refused() {
    let cache = Cache::new();
    let reference = cache.folder().join("refs/main");
    let bad: [&[u8]; 8] = [
        b"",
        b"../../..",
        b"/etc",
        b"main",
        b"0123456789abcdef0123456789abcdef0123456",
        b"0123456789ABCDEF0123456789ABCDEF01234567",
        b"0123456789abcdef0123456789abcdef01234567 more",
        &[0xff; 40],
    ];
    let huge = vec![b'0'; 64 << 20];
    for content in bad.into_iter().chain([&huge[..]]) {
        fs::write(&reference, content).unwrap();
        let error = cache.error(
            "org/qwen",
            "",
            &["refs/main", "40 hexadecimal digits", "hf download"],
        );
        assert!(matches!(error, HubError::BadReference { .. }), "{error:?}");
    }
    // A link, also to what would be a good one; a directory; a fifo that nobody writes to.
    let elsewhere = cache.path().join("elsewhere");
    fs::write(&elsewhere, COMMIT).unwrap();
    fs::remove_file(&reference).unwrap();
    symlink(&elsewhere, &reference).unwrap();
    let error = cache.error("org/qwen", "", &["symbolic link"]);
    assert!(matches!(error, HubError::BadReference { .. }), "{error:?}");
    fs::remove_file(&reference).unwrap();
    fs::create_dir(&reference).unwrap();
    let error = cache.error("org/qwen", "", &["not a file"]);
    assert!(matches!(error, HubError::BadReference { .. }), "{error:?}");
    fs::remove_dir(&reference).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, &reference, rustix::fs::Mode::RWXU).unwrap();
    let error = cache.error("org/qwen", "", &["not a file"]);
    assert!(matches!(error, HubError::BadReference { .. }), "{error:?}");
}

#[test]
fn snapshots_that_are_links_are_refused() {
    let cache = Cache::new();
    let elsewhere = cache.path().join("elsewhere");
    fs::rename(cache.snapshot(), &elsewhere).unwrap();
    symlink(&elsewhere, cache.snapshot()).unwrap();
    for revision in ["", COMMIT] {
        let error = cache.error("org/qwen", revision, &["not a directory"]);
        assert!(matches!(error, HubError::BadReference { .. }), "{error:?}");
    }
}

#[test]
fn the_cache_is_where_the_environment_says() {
    let cache = |set: &[(&str, &str)]| {
        let set: BTreeMap<&str, OsString> = set.iter().map(|(name, value)| (*name, value.into())).collect();
        HubCache::of(|name| set.get(name).cloned())
    };
    let all = [
        ("HF_HUB_CACHE", "/a"),
        ("HUGGINGFACE_HUB_CACHE", "/b"),
        ("HF_HOME", "/c"),
        ("XDG_CACHE_HOME", "/d"),
    ];
    let expected = ["/a", "/b", "/c/hub", "/d/huggingface/hub"];
    for (first, expected) in expected.into_iter().enumerate() {
        assert_eq!(cache(&all[first..]), HubCache::at(Path::new(expected)));
    }
    assert_eq!(
        cache(&[("HF_HUB_CACHE", ""), ("HF_HOME", "~/x"), ("HOME", "/home/u")]),
        HubCache::at(Path::new("/home/u/x/hub"))
    );
    // Where nothing is set, the command need not say where.
    let error = |cache: HubCache| cache.find(Path::new("no/where"), "").unwrap_err().to_string();
    let default = error(cache(&[("HOME", "/home/nobody")]));
    assert!(
        default.contains("cache /home/nobody/.cache/huggingface/hub;")
            && default.contains("`hf download no/where`"),
        "{default}"
    );
    assert!(error(cache(&[])).contains("HF_HOME"), "{}", error(cache(&[])));
    let spaced = error(HubCache::at(Path::new("/my cache/it's")));
    assert!(spaced.contains(r"--cache-dir '/my cache/it'\''s'`"), "{spaced}");
}
