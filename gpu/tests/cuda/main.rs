//! CUDA memory: what the host backend's tests prove there. They need an NVIDIA GPU and are run by
//! hand: `cargo test -p weightd-gpu --test cuda -- --ignored --test-threads 1`.

#![allow(unsafe_code)] // One store that must fail, and what an engine does at addresses.

mod publishing;
mod weights;

use cudarc::driver::sys;
use std::env;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use weightd_core::content::manifest::{LegacyHandle, ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{Dtype, HandleKind};
use weightd_core::peer::FileKind;
use weightd_gpu::cuda::CudaError;
use weightd_gpu::{Device, Lane, LaneMemory, Mapping, MemoryError, Rows, Weights};

const GRANULE: u64 = 2 << 20;

fn device() -> Device {
    Device::cuda().expect("an NVIDIA GPU")[0]
}

fn used(device: &Device) -> u64 {
    let (free, total) = device.memory().unwrap().unwrap();
    total - free
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count)
        .map(|number| (number * 7 + number / 251) as u8)
        .collect()
}

fn read(mapping: &Mapping) -> Vec<u8> {
    let mut copy = vec![0; mapping.bytes() as usize];
    mapping.read(0, &mut copy).unwrap();
    copy
}

/// Runs this binary's test `name` with `stdin` as its standard input; returns what it printed.
fn child(name: &str, stdin: Stdio, arguments: &str) -> String {
    let output = Command::new(env::current_exe().unwrap())
        .args([name, "--exact", "--ignored", "--nocapture"])
        .env("WEIGHTD_TEST_CHILD", arguments)
        .stdin(stdin)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_is_written_by_lanes_and_directly_is_read_through_an_import() {
    let device = device();
    let source = bytes(5 << 20);
    let region = device.allocate(source.len() as u64 + 100).unwrap();
    let mut lanes = Lane::open(&[device], 3, 1 << 20, None).unwrap();
    // Contiguous, through buffers that are used again.
    for (number, part) in source.chunks(1 << 20).enumerate() {
        let lane = &mut lanes[number % 2];
        lane.next_buffer().unwrap()[..part.len()].copy_from_slice(part);
        lane.write(&region, (number << 20) as u64, 0..part.len()).unwrap();
    }
    region.write(source.len() as u64, b"tail").unwrap();
    region.zero(source.len() as u64 + 4, 96).unwrap();
    lanes.iter_mut().for_each(|lane| lane.finish().unwrap());
    let export = region.export().unwrap();
    assert_eq!(export.handle, HandleKind::CudaFd);
    let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid()).unwrap();
    let mut expected = source;
    expected.extend_from_slice(b"tail");
    expected.resize(expected.len() + 96, 0);
    assert_eq!(read(&mapping), expected);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_land_where_they_belong() {
    let device = device();
    let (rows, width, src_pitch, dst_pitch) = (700, 333, 1001, 512);
    let source = bytes(rows * src_pitch);
    let copy = Rows {
        offset: 64,
        dst_pitch: dst_pitch as u64,
        src_pitch,
        width,
        rows,
    };
    let mut expected = vec![0; 64 + rows * dst_pitch];
    for row in 0..rows {
        expected[64 + row * dst_pitch..][..width].copy_from_slice(&source[row * src_pitch..][..width]);
    }
    for by_lane in [false, true] {
        let region = device.allocate(expected.len() as u64).unwrap();
        region.zero(0, expected.len() as u64).unwrap();
        if by_lane {
            let memory = LaneMemory::prepare(device.kind(), 1, source.len()).unwrap();
            let mut lane = Lane::open(&[device], 1, source.len(), Some(memory))
                .unwrap()
                .remove(0);
            lane.next_buffer().unwrap()[..source.len()].copy_from_slice(&source);
            lane.write_2d(&region, 0, copy).unwrap();
            lane.finish().unwrap();
        } else {
            region.write_2d(&source, copy).unwrap();
        }
        let export = region.export().unwrap();
        let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid()).unwrap();
        assert!(read(&mapping) == expected, "by lane: {by_lane}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn memory_outlives_the_process_that_made_it_and_costs_only_its_size() {
    let device = device();
    let before = used(&device);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    child(
        "child_that_makes_memory_and_exits",
        Stdio::from(OwnedFd::from(theirs)),
        "",
    );
    let (mut buffer, mut descriptors) = ([0; 16], Vec::new());
    let received = weightd_socket::message::receive(&ours, &mut buffer, &mut descriptors).unwrap();
    assert_eq!(&buffer[..received.bytes], b"made");
    let held = used(&device) - before;
    assert_eq!(
        held,
        5 * GRANULE,
        "five granules and no context of the process that is gone"
    );
    let (facts, fd) = descriptors.remove(0);
    assert!(matches!(facts.file, FileKind::CharDevice { .. }), "{facts:?}");
    let mapping = Mapping::import(HandleKind::CudaFd, fd, 4 * GRANULE + 5, device.uuid()).unwrap();
    assert!(read(&mapping) == bytes(4 * GRANULE as usize + 5));
    drop(mapping);
    assert_eq!(used(&device), before);
}

#[test]
#[ignore = "a child of another test"]
fn child_that_makes_memory_and_exits() {
    if env::var_os("WEIGHTD_TEST_CHILD").is_none() {
        return;
    }
    let source = bytes(4 * GRANULE as usize + 5);
    let region = device().allocate(source.len() as u64).unwrap();
    region.write(0, &source).unwrap();
    let export = region.export().unwrap();
    let stdin = std::io::stdin();
    weightd_socket::message::send(stdin.as_fd(), b"made", &[export.fd.as_fd()]).unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cycles_leave_device_memory_and_descriptors_flat() {
    let device = device();
    let region = device.allocate(GRANULE).unwrap();
    region.write(0, &bytes(GRANULE as usize)).unwrap();
    let export = region.export().unwrap();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let cycle = || {
        let fd = export.fd.try_clone().unwrap();
        Mapping::import(export.handle, fd, export.bytes, device.uuid()).unwrap()
    };
    // Without anybody on the device, each cycle would make its context anew.
    let _opened = device.open().unwrap();
    drop(cycle());
    let (before, open) = (used(&device), descriptors());
    for _ in 0..10_000 {
        drop(cycle());
    }
    assert_eq!((used(&device), descriptors()), (before, open));
    assert!(read(&cycle()) == bytes(GRANULE as usize));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_does_not_fit_is_an_error_of_its_own_and_takes_nothing() {
    let device = device();
    let before = used(&device);
    let error = device.allocate(1 << 45).unwrap_err();
    assert!(matches!(error, MemoryError::OutOfMemory { .. }), "{error}");
    assert!(error.to_string().contains("bytes are free"), "{error}");
    assert_eq!(used(&device), before);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn lies_about_size_and_device_are_refused_at_import() {
    let device = device();
    let fd = || device.allocate(GRANULE).unwrap().export().unwrap().fd;
    let import = |bytes, uuid| Mapping::import(HandleKind::CudaFd, fd(), bytes, uuid);
    let error = import(GRANULE + 1, device.uuid()).unwrap_err();
    assert!(
        matches!(error, MemoryError::Cuda(CudaError::Call { .. })),
        "{error}"
    );
    let error = import(GRANULE, Device::host(0).uuid()).unwrap_err();
    assert!(
        matches!(error, MemoryError::Cuda(CudaError::NotVisible { .. })),
        "{error}"
    );
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = Mapping::import(HandleKind::CudaFd, file.into(), GRANULE, device.uuid()).unwrap_err();
    assert!(
        matches!(error, MemoryError::Cuda(CudaError::Call { .. })),
        "{error}"
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_device_reads_what_was_mapped() {
    let device = device();
    let source = bytes(10_000);
    let region = device.allocate(source.len() as u64).unwrap();
    region.write(0, &source).unwrap();
    let export = region.export().unwrap();
    let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid()).unwrap();
    let touch = weightd_gpu::cuda::Touch::new(device.uuid()).unwrap();
    let places: Vec<_> = (0..source.len() as u64)
        .map(|at| mapping.place(at).unwrap())
        .collect();
    assert!(touch.read(&places).unwrap() == source);
    assert_eq!(touch.read(&[]).unwrap(), []);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tensors_are_views_into_device_memory() {
    let device = device();
    let source = bytes(1 << 20);
    let region = device.allocate(source.len() as u64).unwrap();
    region.write(0, &source).unwrap();
    let export = region.export().unwrap();
    let mut builder = ManifestBuilder::new();
    let number = builder.region(Region {
        handle: export.handle,
        bytes: export.bytes,
        device: device.uuid(),
        legacy: None,
    });
    let spec = TensorSpec {
        kind: TensorKind::Parameter,
        persistent: true,
        dtype: Dtype::U8,
        shape: &[4, 3],
        strides: Some(&[100, 2]),
        region: number,
        offset: 256,
    };
    builder.tensor("strided", spec);
    let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid()).unwrap();
    let address = mapping.address();
    let weights = Weights::new(builder.finish().unwrap(), vec![mapping]).unwrap();
    let view = weights.get("strided").unwrap();
    assert_eq!((view.address(), view.host()), (address + 256, None));
    let memory = view.fetch().unwrap();
    let elements = view.runs(&memory).collect::<Vec<_>>().concat();
    let expected: Vec<u8> = (0..4)
        .flat_map(|row| (0..3).map(move |column| 256 + row * 100 + column * 2))
        .map(|at| source[at])
        .collect();
    assert_eq!(elements, expected);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn copies_are_the_engines_own_and_are_refused_before_the_first_byte_when_they_do_not_fit() {
    let device = device();
    let _opened = device.open().unwrap();
    let source = bytes(3 << 20);
    let whole = |count: u64| {
        let region = device.allocate(count).unwrap();
        region.write(0, &source).unwrap();
        let export = region.export().unwrap();
        let mut builder = ManifestBuilder::new();
        let (handle, bytes) = (export.handle, export.bytes);
        let region = builder.region(Region {
            handle,
            bytes,
            device: device.uuid(),
            legacy: None,
        });
        let spec = TensorSpec {
            kind: TensorKind::Parameter,
            persistent: true,
            dtype: Dtype::U8,
            shape: &[1000],
            strides: None,
            region,
            offset: 512,
        };
        builder.tensor("t", spec);
        let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid()).unwrap();
        Weights::new(builder.finish().unwrap(), vec![mapping]).unwrap()
    };
    let weights = whole(source.len() as u64);
    let copy = weights.duplicate().unwrap();
    assert!(copy.get("t").unwrap().fetch().unwrap()[..] == source[512..1512]);
    let one = weights.get("t").unwrap().duplicate().unwrap();
    let mut read = vec![0; 1000];
    one.read(0, &mut read).unwrap();
    assert!(read == source[512..1512]);
    // More than half of what is free fits once and not twice.
    let (free, _) = device.memory().unwrap().unwrap();
    let large = whole(free / 2 + (1 << 30));
    let before = used(&device);
    let error = large.duplicate().unwrap_err();
    assert!(matches!(error, MemoryError::OutOfMemory { .. }), "{error}");
    assert_eq!(used(&device), before);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_store_through_a_mapping_faults_in_that_process_alone() {
    let device = device();
    let region = device.allocate(GRANULE).unwrap();
    region.write(0, &bytes(GRANULE as usize)).unwrap();
    let export = region.export().unwrap();
    let fd = export.fd.try_clone().unwrap();
    let mapping = Mapping::import(export.handle, fd, export.bytes, device.uuid()).unwrap();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    weightd_socket::message::send(&ours, b"map", &[export.fd.as_fd()]).unwrap();
    let said = child(
        "child_that_stores_through_a_mapping",
        Stdio::from(OwnedFd::from(theirs)),
        "1",
    );
    assert!(said.contains("the store was refused"), "{said}");
    assert!(
        read(&mapping) == bytes(GRANULE as usize),
        "nobody else sees any of it"
    );
    let touch = weightd_gpu::cuda::Touch::new(device.uuid()).unwrap();
    assert_eq!(
        touch.read(&[mapping.place(300).unwrap()]).unwrap(),
        [bytes(301)[300]]
    );
}

#[test]
#[ignore = "a child of another test"]
fn child_that_stores_through_a_mapping() {
    if env::var_os("WEIGHTD_TEST_CHILD").is_none() {
        return;
    }
    let (mut buffer, mut descriptors) = ([0; 16], Vec::new());
    weightd_socket::message::receive(std::io::stdin().as_fd(), &mut buffer, &mut descriptors).unwrap();
    let (_, fd) = descriptors.remove(0);
    let device = device();
    let mapping = Mapping::import(HandleKind::CudaFd, fd, GRANULE, device.uuid()).unwrap();
    let touch = weightd_gpu::cuda::Touch::new(device.uuid()).unwrap();
    assert_eq!(touch.read(&[mapping.place(0).unwrap()]).unwrap(), [bytes(1)[0]]);
    // SAFETY: the range is mapped in this process. That the device must refuse the store is the test;
    // the context is current on this thread, and nothing is done with the device afterwards.
    let results = unsafe {
        [
            sys::cuMemsetD8_v2(mapping.address(), 1, 4096),
            sys::cuCtxSynchronize(),
        ]
    };
    assert_ne!(
        results,
        [sys::CUresult::CUDA_SUCCESS; 2],
        "the device wrote to a read-only mapping"
    );
    println!("the store was refused: {results:?}");
    // The context is broken by now, and its destructors with it.
    std::process::exit(0);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_legacy_handle_is_opened_once_and_dies_with_its_publisher() {
    let device = device();
    let mut publisher = Command::new(env::current_exe().unwrap())
        .args([
            "child_that_publishes_legacy_memory",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .env("WEIGHTD_TEST_CHILD", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut reader = std::io::BufReader::new(publisher.stdout.take().unwrap());
    let line = loop {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut reader, &mut line).unwrap();
        if let Some(at) = line.find("handle ") {
            break line[at..].to_owned();
        }
    };
    let fields: Vec<&str> = line.split_whitespace().collect();
    let hex = |at: usize| u8::from_str_radix(&fields[1][2 * at..2 * at + 2], 16).unwrap();
    let handle = LegacyHandle {
        handle: std::array::from_fn(hex),
        offset: fields[2].parse().unwrap(),
    };
    let open = || Mapping::open_legacy(&handle, 1000, device.uuid());
    let (first, second) = (open().unwrap(), open().unwrap());
    assert_eq!(first.address(), second.address());
    drop(first);
    assert!(
        read(&second) == bytes(1000),
        "one holder's close does not close the other's"
    );
    let too_large = Mapping::open_legacy(&handle, 1 << 40, device.uuid()).unwrap_err();
    assert!(matches!(too_large, MemoryError::Size { .. }), "{too_large}");
    // The end of the publisher: what is mapped stays readable, and cannot be opened again.
    publisher.stdin.take().unwrap().write_all(b"\n").unwrap();
    publisher.wait().unwrap();
    assert!(read(&second) == bytes(1000));
    drop(second);
    let gone = open().unwrap_err();
    assert!(
        matches!(gone, MemoryError::Cuda(CudaError::Call { .. })),
        "{gone}"
    );
}

#[test]
#[ignore = "a child of another test"]
fn child_that_publishes_legacy_memory() {
    if env::var_os("WEIGHTD_TEST_CHILD").is_none() {
        return;
    }
    let device = device();
    let memory = weightd_gpu::cuda::Allocation::new(device.uuid(), 4096).unwrap();
    memory.write(0, &bytes(1000)).unwrap();
    let export = weightd_gpu::cuda::legacy::export(device.uuid(), memory.address()).unwrap();
    let hex: String = export
        .handle
        .handle
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    println!(
        "handle {hex} {} {}",
        export.handle.offset, export.allocation_bytes
    );
    std::io::stdin().read_line(&mut String::new()).unwrap();
}
