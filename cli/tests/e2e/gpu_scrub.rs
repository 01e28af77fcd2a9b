//! Proving what is on an NVIDIA GPU, by hand: `cargo test -p weightd --test e2e gpu -- --ignored --test-threads 1`.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs;
use std::os::fd::OwnedFd;
use weightd_gpu::Device;
use weightd_gpu::testing::overwrite;

/// The descriptor of device memory that a process holds, taken from it as root can.
fn stolen(pid: u32) -> OwnedFd {
    let links = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let of_driver = |path: &std::path::PathBuf| fs::read_link(path).is_ok_and(|to| to.ends_with("nvidiactl"));
    let number = links
        .filter(of_driver)
        .find_map(|path| path.file_name()?.to_str()?.parse().ok());
    let process = pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).unwrap();
    pidfd_getfd(
        &process,
        number.expect("it holds a region"),
        PidfdGetfdFlags::empty(),
    )
    .unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_write_through_a_mapping_of_a_stolen_descriptor_is_found_and_named() {
    let (site, model) = (Site::on("cuda"), model("llama"));
    let launcher = site.preload(&model, 1, &["--checksums"]);
    launcher.has_loaded();
    let intact = || site.run(&["scrub", "--json"]).stdout.contains("\"intact\":true");
    assert!(intact());
    site.attach_verified(&model, 1);
    let device = Device::cuda().expect("an NVIDIA GPU")[0];
    let bytes = site.status()[0]["bytes"].as_u64().unwrap();
    // One of two values is another than the one there.
    let write = |byte| {
        let fd = stolen(launcher.child("server"));
        assert!(overwrite(fd, device.uuid(), bytes, 0, byte).unwrap());
        site.run(&["scrub"])
    };
    let damaged = [write(1), write(2)].into_iter().find(|ran| ran.code == Some(1));
    let ran = damaged.expect("a byte is another");
    let expected = "do not hold what was loaded, first \"model.embed_tokens.weight\"";
    assert!(ran.stdout.contains(expected), "{ran:?}");
    let error = site.attach(&model, 1, &["--all", "--verify=checksums"]).error(1);
    assert!(error.contains(expected), "{error}");
}
