//! What engines see of a daemon through each runtime: the time of an attach, attaches per second by many
//! engines at once, and what clients that hang cost the others. On host memory, the daemon in a process
//! of its own:
//!
//! `cargo build --release -p weightd && cargo bench -p weightd-tests --bench engines`
//!
//! WEIGHTD names the binary where it is another one. Each attach is a connect, an ask, a mapping and a lease,
//! and ends with all of them closed. Times are of single attaches, of which the slowest matter too, so this is
//! no criterion benchmark.

#[allow(dead_code)] // The other benchmark uses the rest.
mod launched;

use launched::{Daemon, Site, load_average, weightd, write_checkpoint};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use weightd_blocking::{Binding, LoadError, Loaded};
use weightd_core::machine::AttachOptions;
use weightd_core::time::Span;
use weightd_gpu::Weights;
use weightd_socket::credentials::our_uid;
use weightd_tests::binding;

/// Attaches in each measurement of single ones.
const ATTACHES: usize = 2_000;
/// Attaches in each measurement of many engines, all together.
const CROWD: usize = 4_000;
/// How many times everything is measured, in turn.
const ROUNDS: usize = 3;
/// Clients that hang.
const STALLED: usize = 100;

fn main() {
    if !weightd().exists() {
        println!("engines: not measured, since there is no {}", weightd().display());
        return;
    }
    println!("load average {}", load_average());
    let temp = tempfile::tempdir().expect("a directory");
    let model = write_checkpoint(&temp.path().join("model"), 195, 64 << 10);
    // Until then the times of the files are not believed, and both sides compare digests.
    sleep(Duration::from_secs(5));
    for more in ["--runtime=blocking", "--runtime=tokio", "--runtime=smol"] {
        println!("\nserver {more}");
        let site = Site {
            bin: weightd(),
            dir: temp.path().join(more),
            model: model.clone(),
            daemons: 1,
            more: vec![more.to_owned()],
        };
        let (launcher, _) = site.preload();
        let daemons = site.settled();
        for _ in 0..ROUNDS {
            measure(&daemons[0]);
        }
        drop(launcher);
    }
    println!("\nload average {}", load_average());
}

fn measure(daemon: &Daemon) {
    let options = AttachOptions {
        connect_timeout: Span::secs(60),
        ..AttachOptions::new(our_uid().expect("a user"))
    };
    let binding = binding(&daemon.socket, options, &daemon.status.info.key);
    for client in [Client::Blocking, Client::Tokio, Client::Smol] {
        let times = client.one_after_another(&binding, ATTACHES);
        let crowds = [1, 16, 256].map(|engines| client.crowd(&binding, engines));
        println!(
            "{client:?}: attach {}; attaches/s by 1, 16, 256 engines: {:.0}, {:.0}, {:.0}",
            spread(times),
            crowds[0],
            crowds[1],
            crowds[2]
        );
    }
    let alone = Client::Blocking.one_after_another(&binding, ATTACHES);
    let stalled = stall(daemon);
    let beside = Client::Blocking.one_after_another(&binding, ATTACHES);
    drop(stalled);
    println!(
        "alone {}; beside {STALLED} that hang {}",
        spread(alone),
        spread(beside)
    );
}

#[derive(Clone, Copy, Debug)]
enum Client {
    Blocking,
    Tokio,
    Smol,
}

impl Client {
    /// The time of each attach.
    fn one_after_another(self, binding: &Binding, count: usize) -> Vec<Duration> {
        match self {
            Client::Blocking => {
                let loader = weightd_blocking::Loader::from(binding.clone());
                (0..count).map(|_| timed(|| loader.attach())).collect()
            }
            Client::Tokio => {
                let loader = weightd_tokio::Loader::from(binding.clone());
                let runtime = tokio(1);
                let attach = || runtime.block_on(loader.attach());
                (0..count).map(|_| timed(attach)).collect()
            }
            Client::Smol => {
                let loader = weightd_smol::Loader::from(binding.clone());
                let attach = || smol::block_on(loader.attach());
                (0..count).map(|_| timed(attach)).collect()
            }
        }
    }

    /// Attaches per second by this many engines at once.
    fn crowd(self, binding: &Binding, engines: usize) -> f64 {
        let left = Arc::new(AtomicUsize::new(CROWD));
        let take = move |left: &AtomicUsize| {
            let took = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            took.is_ok()
        };
        let start = Instant::now();
        match self {
            Client::Blocking => thread::scope(|scope| {
                for _ in 0..engines {
                    let loader = weightd_blocking::Loader::from(binding.clone());
                    let left = &left;
                    scope.spawn(move || {
                        while take(left) {
                            mapped(loader.attach());
                        }
                    });
                }
            }),
            Client::Tokio => tokio(2).block_on(async {
                let engine = |_| {
                    let (loader, left) = (weightd_tokio::Loader::from(binding.clone()), Arc::clone(&left));
                    tokio::spawn(async move {
                        while take(&left) {
                            mapped(loader.attach().await);
                        }
                    })
                };
                for engine in (0..engines).map(engine).collect::<Vec<_>>() {
                    engine.await.expect("an engine");
                }
            }),
            Client::Smol => smol::block_on(async {
                let engine = |_| {
                    let (loader, left) = (weightd_smol::Loader::from(binding.clone()), Arc::clone(&left));
                    smol::spawn(async move {
                        while take(&left) {
                            mapped(loader.attach().await);
                        }
                    })
                };
                for engine in (0..engines).map(engine).collect::<Vec<_>>() {
                    engine.await;
                }
            }),
        }
        CROWD as f64 / start.elapsed().as_secs_f64()
    }
}

fn tokio(threads: usize) -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).enable_all();
    builder.build().expect("a runtime")
}

fn timed(attach: impl FnOnce() -> Result<Loaded<Weights>, LoadError>) -> Duration {
    let start = Instant::now();
    let attached = attach();
    let took = start.elapsed();
    mapped(attached);
    took
}

fn mapped(attached: Result<Loaded<Weights>, LoadError>) {
    let attached = attached.expect("the daemon serves");
    assert!(attached.lease().is_some(), "{attached:?}");
}

/// Clients that have asked for half of something, and never go on.
fn stall(daemon: &Daemon) -> Vec<UnixStream> {
    let stalled = |_| {
        let mut stream = UnixStream::connect(&daemon.socket).expect("the daemon listens");
        stream
            .write_all(b"wgtd\x01\x00\x01")
            .expect("it takes some bytes");
        stream
    };
    (0..STALLED).map(stalled).collect()
}

fn spread(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1].as_secs_f64() * 1e3;
    format!(
        "p50 {:.3} ms, p99 {:.3} ms, max {:.2} ms",
        at(50),
        at(99),
        at(100)
    )
}
