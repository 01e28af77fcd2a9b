//! CUDA drivers that do not work: a library that is found in the driver's place.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;
use std::path::Path;
use std::process::Command;

/// `cuInit` returns `$CUINIT`, or never where that is negative.
const DRIVER: &str = r#"
#include <stdlib.h>
#include <unistd.h>
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuInit(unsigned flags) {
    int code = atoi(getenv("CUINIT"));
    while (code < 0) pause();
    return code;
}
int cuGetErrorName(int code, const char **text) { *text = "CUDA_ERROR_OF_A_TEST"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "as it was told"; return 0; }
"#;

/// The command with a driver that says this.
fn with_driver(site: &Site, mut command: Command, cuinit: i32) -> Command {
    let (source, library) = (site.path().join("driver.c"), site.path().join("libcuda.so.1"));
    std::fs::write(&source, DRIVER).unwrap();
    let mut compiler = Command::new("cc");
    compiler
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source]);
    assert!(compiler.status().unwrap().success());
    command
        .env("LD_LIBRARY_PATH", site.path())
        .env("CUINIT", cuinit.to_string());
    command
}

fn preload(site: &Site, model: &Path, cuinit: i32) -> Command {
    with_driver(site, site.on_model("preload", model, 1, &[]), cuinit)
}

#[test]
fn host_memory_is_taken_where_there_is_no_device_and_not_where_it_does_not_work() {
    const NO_DEVICE: i32 = 100;
    const NOT_READY: i32 = 802;
    let (site, model) = (Site::on("auto"), model("qwen3"));
    for (command, more) in [("preload", &[][..]), ("attach", &["--all"])] {
        let command = site.on_model(command, &model, 1, more);
        let error = finish(with_driver(&site, command, NOT_READY)).error(1);
        for part in ["cuInit failed", "fabric manager", "--device cpu"] {
            assert!(error.contains(part), "{error}");
        }
        site.assert_clean();
    }

    let mut launcher = site.start(preload(&site, &model, NO_DEVICE));
    launcher.ready();
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.code(), 143);
    site.assert_clean();
}

#[test]
fn a_driver_that_hangs_holds_up_no_signal() {
    let (site, model) = (Site::on("auto"), model("qwen3"));
    let mut launcher = site.start(preload(&site, &model, -1));
    launcher.child("devices");
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.code(), 143);
    assert_eq!(
        launcher.error(),
        "weightd: ended by SIGTERM before anything was started"
    );
    site.assert_clean();
}
