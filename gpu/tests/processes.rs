//! Memory that is handed from process to process.
//!
//! The ignored tests are the bodies of the other processes, and do nothing when run by themselves. A
//! process reaches another's descriptor
//! through `/proc/PID/fd`, which is what a descriptor sent over a socket would be.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{Dtype, HandleKind, Manifest};
use weightd_gpu::{Device, Mapping, MemoryError, Weights, read_sealed, sealed};

/// Runs an ignored test of this file in a process of its own.
fn child(body: &str, argument: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", body, "--ignored", "--nocapture"]);
    command.env("WEIGHTD_TEST_ARGUMENT", argument);
    command
}

fn argument() -> Option<String> {
    std::env::var("WEIGHTD_TEST_ARGUMENT").ok()
}

fn open(path: &str) -> OwnedFd {
    File::open(path).unwrap().into()
}

const THREADS: usize = 8;
const EACH: usize = 1 << 20;

/// What thread `number` writes at its byte `at`.
fn pattern(number: usize, at: usize) -> u8 {
    (number * 37 + at * 7 % 253) as u8
}

#[test]
fn eight_threads_fill_what_another_process_reads() {
    let device = Device::host(1);
    let region = device.allocate((THREADS * EACH) as u64).unwrap();
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let region = &region;
            scope.spawn(move || {
                let bytes: Vec<u8> = (0..EACH).map(|at| pattern(number, at)).collect();
                // Pieces that end inside pages.
                for (piece, bytes) in bytes.chunks(100_001).enumerate() {
                    region
                        .write((number * EACH + piece * 100_001) as u64, bytes)
                        .unwrap();
                }
            });
        }
    });
    let export = region.export().unwrap();

    let mut builder = ManifestBuilder::new();
    let (handle, bytes, device) = (export.handle, export.bytes, device.uuid());
    let region = builder.region(Region {
        handle,
        bytes,
        device,
        legacy: None,
    });
    for number in 0..THREADS {
        let kind = if number % 2 == 0 {
            TensorKind::Buffer
        } else {
            TensorKind::Parameter
        };
        let (dtype, shape, offset) = (Dtype::U8, &[EACH as u64], (number * EACH) as u64);
        let spec = TensorSpec {
            kind,
            persistent: true,
            dtype,
            shape,
            strides: None,
            region,
            offset,
        };
        builder.tensor(&number.to_string(), spec);
    }
    let manifest = sealed(&builder.finish().unwrap().encode()).unwrap();

    let path = |fd: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
    let argument = format!("{} {}", path(&manifest), path(&export.fd));
    let status = child("reader", &argument).stdout(Stdio::null()).status().unwrap();
    assert!(status.success());
}

#[test]
#[ignore = "the other process of eight_threads_fill_what_another_process_reads"]
fn reader() {
    let Some(argument) = argument() else { return };
    let (manifest, memory) = argument.split_once(' ').unwrap();
    let manifest = Manifest::decode(&read_sealed(open(manifest), 1 << 20).unwrap()).unwrap();
    let region = manifest.regions()[0];
    let mapping = Mapping::import(region.handle, open(memory), region.bytes, region.device).unwrap();
    let weights = Weights::new(manifest, vec![mapping]).unwrap();
    assert_eq!(weights.tensors().len(), THREADS);
    for view in weights.tensors() {
        let number = view.name.parse().unwrap();
        let expected = (0..EACH).map(|at| pattern(number, at));
        assert!(
            view.contiguous().unwrap().iter().copied().eq(expected),
            "{}",
            view.name
        );
    }
}

#[test]
fn memory_outlives_a_killed_exporter() {
    let mut exporter = child("exporter", "")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(exporter.stdout.take().unwrap()).lines();
    let path = lines
        .find_map(|line| Some(line.unwrap().split_once("EXPORTED ")?.1.to_owned()))
        .unwrap();
    let fd = open(&path);
    exporter.kill().unwrap();
    exporter.wait().unwrap();
    assert!(File::open(&path).is_err(), "the exporter is gone");
    let mapping = Mapping::import(HandleKind::Memfd, fd, EACH as u64, Device::host(0).uuid()).unwrap();
    assert!(
        mapping
            .host()
            .unwrap()
            .iter()
            .copied()
            .eq((0..EACH).map(|at| pattern(5, at)))
    );
}

#[test]
#[ignore = "the other process of memory_outlives_a_killed_exporter"]
fn exporter() {
    if argument().is_none() {
        return;
    }
    let region = Device::host(0).allocate(EACH as u64).unwrap();
    let bytes: Vec<u8> = (0..EACH).map(|at| pattern(5, at)).collect();
    region.write(0, &bytes).unwrap();
    let export = region.export().unwrap();
    let mut stdout = std::io::stdout();
    writeln!(
        stdout,
        "EXPORTED /proc/{}/fd/{}",
        std::process::id(),
        export.fd.as_raw_fd()
    )
    .unwrap();
    stdout.flush().unwrap();
    // Until killed, or the test that runs it is gone.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
}

#[test]
fn a_limit_on_file_sizes_is_an_error_and_no_signal() {
    let status = child("limited", "").stdout(Stdio::null()).status().unwrap();
    assert!(status.success(), "{status}");
}

#[test]
#[ignore = "the other process of a_limit_on_file_sizes_is_an_error_and_no_signal"]
fn limited() {
    if argument().is_none() {
        return;
    }
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Fsize);
    limit.current = Some(1 << 20);
    setrlimit(Resource::Fsize, limit).unwrap();
    Device::host(0).allocate(1 << 20).unwrap();
    let error = Device::host(0).allocate((1 << 20) + 1).unwrap_err();
    assert!(matches!(error, MemoryError::OutOfMemory { .. }), "{error}");
    let error = sealed(&vec![0; (1 << 20) + 1]).unwrap_err();
    assert!(matches!(error, MemoryError::OutOfMemory { .. }), "{error}");
}
