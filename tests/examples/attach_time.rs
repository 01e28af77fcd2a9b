//! Times an attach on a device, with its parts:
//! `attach_time cpu|cuda 8b|COUNT [REPEATS [copy]]`: the 195 tensors of an 8B Llama, or COUNT of 1 MiB
//! each. With `copy`, everything is cloned into memory of this process after each attach.
//!
//! The context is ready before the clock starts. After each attach every name is resolved (timed)
//! and, on CUDA, one byte of each tensor is read by a kernel (proof that all can be read; not timed).

use std::env;
use std::time::{Duration, Instant};
use weightd_core::machine::AttachOptions;
use weightd_gpu::cuda::Touch;
use weightd_gpu::{Device, DeviceKind};
use weightd_socket::credentials::our_uid;
use weightd_tests::{Resident, key, loader, shapes};

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
    let copy = rest.get(1).is_some_and(|word| word == "copy");
    let mut times = Vec::new();
    let mut copies = Vec::new();
    for _ in 0..repeats {
        let options = AttachOptions {
            device: Some(device.uuid()),
            ..AttachOptions::new(our_uid()?)
        };
        let loader = loader(&resident.socket, options, &resident.key);
        let start = Instant::now();
        let attached = loader.attach()?;
        let timing = attached.timing().unwrap_or_default();
        let get = |(name, _): &(String, Vec<u64>)| attached.model().get(name);
        let views: Option<Vec<_>> = tensors.iter().map(get).collect();
        let whole = start.elapsed();
        let views = views.ok_or("a name is missing")?;
        if let Some(touch) = &touch {
            let places: Vec<_> = views.iter().filter_map(|view| view.place()).collect();
            touch.read(&places)?;
        }
        if copy {
            let start = Instant::now();
            let cloned = attached.model().duplicate()?;
            copies.push(start.elapsed());
            drop(cloned);
        }
        times.push((whole, timing));
    }
    times.sort_unstable_by_key(|(whole, _)| *whole);
    let (whole, timing) = times[times.len() / 2];
    let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
    println!(
        "{kind} {} tensors: median of {repeats}: {:.3} ms until every name is resolved (connect and ask {:.3}, decode {:.3}, map {:.3}); fastest {:.3}, slowest {:.3}",
        tensors.len(),
        ms(whole),
        ms(timing.fetch),
        ms(timing.decode),
        ms(timing.map),
        ms(times[0].0),
        ms(times[times.len() - 1].0)
    );
    copies.sort_unstable();
    if let Some(median) = copies.get(copies.len() / 2) {
        let bytes: u64 = tensors
            .iter()
            .map(|(_, shape)| shape.iter().product::<u64>() * 2)
            .sum();
        let (gb, seconds) = (bytes as f64 / 1e9, median.as_secs_f64());
        println!(
            "copied {gb:.2} GB in {:.2} ms, allocation included: {:.0} GB/s",
            seconds * 1e3,
            gb / seconds
        );
    }
    Ok(())
}
