//! What an engine waits for: get_state through a real socket, and a whole attach, on host memory.
//! Server, vault and engine share this process's cores.

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use weightd_blocking::client::{Attached, attach};
use weightd_blocking::request::request;
use weightd_core::machine::AttachOptions;
use weightd_core::time::Span;
use weightd_core::wire::message::GetState;
use weightd_gpu::Device;
use weightd_socket::credentials::our_uid;
use weightd_tests::{Mapper, Resident, key, shapes};

/// Connect, ask, receive the descriptors of manifest and region, close.
fn get_state(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("get_state");
    for (number, tensors) in [10, 100_000].into_iter().enumerate() {
        let device = Device::host(number as u32);
        let resident = Resident::serve(&device, &key(), &shapes::many(tensors, &[128]));
        group.bench_function(format!("{tensors} tensors"), |bencher| {
            bencher.iter(|| {
                let ask = GetState {
                    key: resident.key.clone(),
                    is_reload: false,
                };
                black_box(request(&resident.socket, ask, Span::secs(5)).expect("an answer"))
            });
        });
    }
    group.finish();
}

/// From before the connect until every name is resolved.
fn attaching(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attach");
    let cases = [(195, 65_536), (5_000, 4_096), (100_000, 256)];
    for (number, (tensors, elements)) in cases.into_iter().enumerate() {
        let device = Device::host(10 + number as u32);
        let listed = shapes::many(tensors, &[elements]);
        let resident = Resident::serve(&device, &key(), &listed);
        group.bench_function(format!("{tensors} tensors"), |bencher| {
            bencher.iter_with_large_drop(|| {
                let attached = attach_once(&resident);
                for (name, _) in &listed {
                    black_box(attached.weights.get(name).expect("every name").address());
                }
                attached
            });
        });
    }
    group.finish();
}

fn attach_once(resident: &Resident) -> Attached {
    let options = AttachOptions::new(our_uid().expect("a user"));
    attach(&resident.socket, options, resident.key.clone(), &mut Mapper).expect("attached")
}

criterion_group!(benches, get_state, attaching);
criterion_main!(benches);
