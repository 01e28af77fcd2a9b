//! Several CUDA devices in one machine. These need two NVIDIA GPUs, watch their memory, and are run by hand:
//! `cargo test -p weightd-gpu --test devices -- --ignored --test-threads 1`.

use rustix::event::{PollFd, PollFlags, poll};
use std::env;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use weightd_core::content::{DeviceUuid, HandleKind};
use weightd_gpu::{Device, Mapping};
use weightd_socket::message::{receive, send};

const BYTES: u64 = 4 << 20;

/// The devices as this process counts them. Asking takes no memory of any.
fn devices() -> Vec<DeviceUuid> {
    let devices = Device::cuda().expect("two NVIDIA GPUs");
    assert!(devices.len() > 1, "two NVIDIA GPUs, and there is one");
    devices.iter().map(Device::uuid).collect()
}

/// As `CUDA_VISIBLE_DEVICES` and nvidia-smi write it.
fn name(uuid: DeviceUuid) -> String {
    let hex = uuid.hex();
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32].map(|group| &hex[group]);
    format!("GPU-{}", groups.join("-"))
}

/// What each device has given away, in MiB, by the name of the device.
fn used() -> Vec<(String, u64)> {
    let output = Command::new("nvidia-smi")
        .args(["--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"])
        .output()
        .expect("nvidia-smi");
    let text = String::from_utf8(output.stdout).expect("text");
    let line = |line: &str| {
        let (name, used) = line.split_once(", ").expect("two columns");
        (name.to_owned(), used.trim().parse().expect("a number"))
    };
    text.lines().map(line).collect()
}

fn pattern(device: DeviceUuid) -> Vec<u8> {
    (0..BYTES)
        .map(|at| (at / 251) as u8 ^ device.0[at as usize % 16])
        .collect()
}

/// A process that sees these devices, in this order, and does what the test `body` says with `device`.
fn child(body: &str, visible: &str, order: &str, device: DeviceUuid, socket: OwnedFd) -> Child {
    Command::new(env::current_exe().expect("this binary"))
        .args([body, "--exact", "--ignored", "--nocapture"])
        .env("CUDA_VISIBLE_DEVICES", visible)
        .env("CUDA_DEVICE_ORDER", order)
        .env("WEIGHTD_TEST_DEVICE", device.hex())
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .spawn()
        .expect("a process")
}

/// The device that this child is about.
fn told() -> Option<DeviceUuid> {
    let hex = env::var("WEIGHTD_TEST_DEVICE").ok()?;
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("hex");
    Some(DeviceUuid(std::array::from_fn(byte)))
}

fn wait_for(socket: &impl AsFd) -> OwnedFd {
    poll(&mut [PollFd::new(socket, PollFlags::IN)], None).expect("a wait");
    let mut descriptors = Vec::new();
    receive(socket, &mut [0; 16], &mut descriptors).expect("memory");
    descriptors.remove(0).1
}

/// Memory on `device`, of a process that saw no other and has ended.
fn made(device: DeviceUuid) -> OwnedFd {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let mut maker = child(
        "child_that_makes_memory",
        &name(device),
        "PCI_BUS_ID",
        device,
        theirs.into(),
    );
    let memory = wait_for(&ours);
    assert!(maker.wait().expect("its end").success());
    memory
}

#[test]
#[ignore = "a child of another test"]
fn child_that_makes_memory() {
    let Some(uuid) = told() else { return };
    let [device] = Device::cuda().expect("a GPU")[..] else {
        panic!("one GPU")
    };
    assert_eq!((device.ordinal(), device.uuid()), (0, uuid));
    let region = device.allocate(BYTES).expect("room");
    region.write(0, &pattern(uuid)).expect("a copy");
    let export = region.export().expect("a descriptor");
    assert_eq!(export.handle, HandleKind::CudaFd);
    send(std::io::stdin().as_fd(), b"made", &[export.fd.as_fd()]).expect("sent");
}

/// Maps the memory in a process that sees the devices so, and does `meanwhile` while it has it.
fn mapped(memory: &OwnedFd, visible: &str, order: &str, device: DeviceUuid, meanwhile: impl FnOnce()) {
    let (mut ours, theirs) = UnixStream::pair().expect("a pair");
    send(&ours, b"map", &[memory.as_fd()]).expect("sent");
    let mut mapper = child("child_that_maps_memory", visible, order, device, theirs.into());
    let mut word = [0];
    ours.read_exact(&mut word)
        .unwrap_or_else(|_| panic!("it was not mapped under {order} {visible}"));
    meanwhile();
    ours.write_all(b"!").expect("it listens");
    assert!(mapper.wait().expect("its end").success(), "{order} {visible}");
}

#[test]
#[ignore = "a child of another test"]
fn child_that_maps_memory() {
    let Some(uuid) = told() else { return };
    let stdin = std::io::stdin();
    let memory = wait_for(&stdin);
    let mapping = Mapping::import(HandleKind::CudaFd, memory, BYTES, uuid).expect("a mapping");
    let mut bytes = vec![0; BYTES as usize];
    mapping.read(0, &mut bytes).expect("a copy");
    assert!(bytes == pattern(uuid));
    send(stdin.as_fd(), b"!", &[]).expect("said");
    stdin.lock().read_exact(&mut [0]).expect("the end");
}

/// Every form that names all devices, and the orders that the driver numbers them in.
fn forms(devices: &[DeviceUuid]) -> Vec<(String, &'static str)> {
    let numbers: Vec<String> = (0..devices.len()).map(|number| number.to_string()).collect();
    let names: Vec<String> = devices.iter().map(|device| name(*device)).collect();
    let reversed = |list: &[String]| list.iter().rev().cloned().collect::<Vec<_>>().join(",");
    let lists = [
        numbers.join(","),
        reversed(&numbers),
        names.join(","),
        reversed(&names),
    ];
    let both = |list: String| ["FASTEST_FIRST", "PCI_BUS_ID"].map(|order| (list.clone(), order));
    lists.into_iter().flat_map(both).collect()
}

#[test]
#[ignore = "needs two NVIDIA GPUs"]
fn memory_is_found_on_its_device_whatever_order_and_form_the_devices_are_named_in() {
    let devices = devices();
    for device in &devices {
        let memory = made(*device);
        for (visible, order) in forms(&devices) {
            mapped(&memory, &visible, order, *device, || {});
        }
    }
}

#[test]
#[ignore = "needs two NVIDIA GPUs"]
fn who_maps_memory_of_one_device_takes_nothing_of_the_others() {
    let devices = devices();
    for device in &devices {
        let memory = made(*device);
        let of_others = || {
            let mut used = used();
            used.retain(|(other, _)| *other != name(*device));
            used
        };
        let before = of_others();
        assert_eq!(before.len(), devices.len() - 1);
        for (visible, order) in forms(&devices) {
            mapped(&memory, &visible, order, *device, || {
                assert_eq!(of_others(), before, "{order} {visible}");
            });
        }
    }
}

#[test]
#[ignore = "needs two NVIDIA GPUs"]
fn memory_is_not_mapped_as_another_devices() {
    let devices = devices();
    let memory = made(devices[1]);
    assert!(Mapping::import(HandleKind::CudaFd, memory, BYTES, devices[0]).is_err());
}
