//! The paths that weights take, on host memory.
//!
//! What needs a daemon runs where WEIGHTD_BIN names one:
//!
//! ```sh
//! cargo build --release --manifest-path ../../Cargo.toml --package weightd
//! WEIGHTD_BIN=$PWD/../../target/release/weightd cargo test -- --include-ignored
//! ```

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

fn llama() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/llama")
}

/// What an engine printed.
#[derive(Debug)]
struct Ran {
    ids: String,
    /// The path that its weights took.
    weights: String,
}

fn engine(model: &Path, more: &[&str]) -> Ran {
    let mut engine = Command::new(env!("CARGO_BIN_EXE_weightd-example-candle"));
    engine.args(["--prompt-ids", "1,17,230,999,4"]).args(more);
    let output = engine.arg("--model").arg(model).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (ids, log) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{log}");
    assert_eq!(ids.split(',').count(), 16, "{ids}");
    assert!(log.contains("since the process started: device "), "{log}");
    let weights = log
        .lines()
        .find_map(|line| line.strip_prefix("weights "))
        .unwrap();
    Ran {
        ids,
        weights: weights.to_owned(),
    }
}

fn from_disk(model: &Path) -> Ran {
    let ran = engine(model, &["--disk"]);
    assert_eq!(ran.weights, "loaded from disk");
    ran
}

/// Daemons that serve a model, in a directory of their own.
struct Daemons {
    sockets: TempDir,
    launcher: Child,
}

impl Daemons {
    fn of(model: &Path) -> Daemons {
        let sockets = tempfile::tempdir().unwrap();
        let mut launcher = Daemons::weightd("preload", sockets.path());
        let launcher = launcher.arg("--model").arg(model).stdout(Stdio::piped());
        let mut daemons = Daemons {
            launcher: launcher.spawn().unwrap(),
            sockets,
        };
        let mut ready = String::new();
        let stdout = daemons.launcher.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut ready).unwrap();
        assert!(ready.starts_with("READY "), "{ready}");
        daemons
    }

    fn weightd(command: &str, sockets: &Path) -> Command {
        let weightd = std::env::var_os("WEIGHTD_BIN").expect("WEIGHTD_BIN names no weightd");
        let mut weightd = Command::new(weightd);
        weightd
            .args([command, "--device", "cpu", "--socket-dir"])
            .arg(sockets);
        weightd
    }

    /// How an engine is told of them.
    fn with(&self, more: &str) -> String {
        format!(r#"{{"socket_dir": {:?}{more}}}"#, self.sockets.path())
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        let _ = Daemons::weightd("stop", self.sockets.path()).status();
        let _ = self.launcher.wait();
    }
}

#[test]
fn without_a_daemon_it_loads_from_disk_and_says_why() {
    let sockets = tempfile::tempdir().unwrap();
    let config = format!(r#"{{"socket_dir": {:?}}}"#, sockets.path());
    let ran = engine(&llama(), &["--loader-config", &config]);
    let why = "loaded from disk, since the cache could not serve: no daemon serves here";
    assert!(ran.weights.starts_with(why), "{ran:?}");
    assert_eq!(ran.ids, from_disk(&llama()).ids);
}

#[test]
#[ignore = "needs WEIGHTD_BIN"]
fn it_generates_the_same_from_the_cache_as_from_disk() {
    let daemons = Daemons::of(&llama());
    let disk = from_disk(&llama());
    for _ in 0..2 {
        let mapped = engine(&llama(), &["--cache", "--loader-config", &daemons.with("")]);
        assert!(mapped.weights.starts_with("mapped from the cache"), "{mapped:?}");
        assert_eq!(mapped.ids, disk.ids);
    }
}

#[test]
#[ignore = "needs WEIGHTD_BIN"]
fn it_generates_the_same_from_a_copy_of_the_cache_which_the_daemon_lets_go() {
    let daemons = Daemons::of(&llama());
    let copying = daemons.with(r#", "mode": "copy""#);
    let copied = engine(&llama(), &["--loader-config", &copying]);
    assert!(copied.weights.starts_with("copied from the cache"), "{copied:?}");
    assert!(copied.weights.ends_with("let go of its own"), "{copied:?}");
    assert_eq!(copied.ids, from_disk(&llama()).ids);

    let next = engine(&llama(), &["--loader-config", &daemons.with("")]);
    assert!(
        next.weights.contains("the daemon's content was released"),
        "{next:?}"
    );
    assert_eq!(next.ids, copied.ids);
}

#[test]
#[ignore = "needs WEIGHTD_BIN"]
fn a_model_that_cannot_be_built_of_the_cache_is_loaded_from_disk() {
    // The disk loader reads what the model asks for. From the cache this example takes everything or nothing,
    // and of a tensor of this type it takes nothing.
    let model = tempfile::tempdir().unwrap();
    for file in fs::read_dir(llama()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), model.path().join(file.file_name())).unwrap();
    }
    let index = model.path().join("model.safetensors.index.json");
    let more = r#""weight_map": {"extra": "extra.safetensors","#;
    let listed = fs::read_to_string(&index).unwrap();
    fs::write(&index, listed.replacen(r#""weight_map": {"#, more, 1)).unwrap();
    let header = r#"{"extra":{"dtype":"I8","shape":[8],"data_offsets":[0,8]}}"#;
    let mut extra = fs::File::create(model.path().join("extra.safetensors")).unwrap();
    extra.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    extra.write_all(header.as_bytes()).unwrap();
    extra.write_all(&[0; 8]).unwrap();
    drop(extra);

    let daemons = Daemons::of(model.path());
    let ran = engine(model.path(), &["--loader-config", &daemons.with("")]);
    let why = "the engine could not build its model of the cached weights: cannot use extra";
    assert!(ran.weights.contains(why), "{ran:?}");
    assert_eq!(ran.ids, from_disk(&llama()).ids);
}
