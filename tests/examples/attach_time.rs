//! Times an attach on a device, with its parts:
//! `attach_time cpu|cuda 8b|COUNT [REPEATS]`: the 195 tensors of an 8B Llama, or COUNT of 1 MiB each.
//!
//! The context is ready before the clock starts. After each attach every name is resolved (timed)
//! and, on CUDA, one byte of each tensor is read by a kernel (proof that all can be read; not timed).

use std::env;
use std::time::Instant;
use weightd_blocking::client::attach;
use weightd_core::machine::AttachOptions;
use weightd_gpu::cuda::Touch;
use weightd_gpu::{Device, DeviceKind};
use weightd_socket::credentials::our_uid;
use weightd_tests::{Mapper, Resident, key, shapes};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [kind, what, rest @ ..] = args.as_slice() else {
        return Err("usage: attach_time cpu|cuda 8b|COUNT [REPEATS]".into());
    };
    let repeats: usize = rest.first().map_or(Ok(20), |text| text.parse())?;
    let start = Instant::now();
    let device = if kind == "cuda" {
        Device::cuda()?[0]
    } else {
        Device::host(0)
    };
    let found = start.elapsed();
    let _opened = device.open()?;
    println!("driver {found:?}, context {:?}", start.elapsed() - found);
    let tensors = match what.as_str() {
        "8b" => shapes::llama_8b(),
        count => shapes::many(count.parse()?, &[512, 1024]),
    };
    let touch = match device.kind() {
        DeviceKind::Cuda => Some(Touch::new(device.uuid())?),
        DeviceKind::Cpu => None,
    };
    let resident = Resident::serve(&device, &key(), &tensors);
    let mut times = Vec::new();
    for _ in 0..repeats {
        let options = AttachOptions {
            device: Some(device.uuid()),
            ..AttachOptions::new(our_uid()?)
        };
        let start = Instant::now();
        let attached = attach(&resident.socket, options, resident.key.clone(), &mut Mapper)?;
        let mapped = attached.took;
        let get = |(name, _): &(String, Vec<u64>)| attached.weights.get(name).map(|view| view.address());
        let addresses: Option<Vec<u64>> = tensors.iter().map(get).collect();
        let whole = start.elapsed();
        let addresses = addresses.ok_or("a name is missing")?;
        if let Some(touch) = &touch {
            touch.read(&addresses)?;
        }
        times.push((whole, mapped));
    }
    times.sort_unstable();
    let (whole, mapped) = times[times.len() / 2];
    println!(
        "{kind} {} tensors: median of {repeats}: {:.3} ms until every name is resolved, {:.3} ms from connect to mapped; fastest {:.3} ms, slowest {:.3} ms",
        tensors.len(),
        whole.as_secs_f64() * 1e3,
        mapped.as_secs_f64() * 1e3,
        times[0].0.as_secs_f64() * 1e3,
        times[times.len() - 1].0.as_secs_f64() * 1e3
    );
    Ok(())
}
