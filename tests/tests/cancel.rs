//! Futures that are dropped half-way leave nothing behind: no descriptor, no connection, no lease, no thread.
//!
//! Descriptors and threads are counted for the whole process, so these tests take turns.

use std::fs;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::thread;
use std::time::Duration;
use weightd_blocking::asynchronous::{Loader, Publisher, Runtime};
use weightd_blocking::request::request;
use weightd_blocking::serve::serve;
use weightd_blocking::{Binding, Contents, Endpoint, Filling, PublishFailed, Published};
use weightd_core::content::{Dtype, Generation, Key};
use weightd_core::machine::{AttachOptions, Limits, Mode, PublishError};
use weightd_core::testing::world;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{DaemonStatus, GetStatus, Holds, Release, Replace};
use weightd_gpu::{Device, Weights};
use weightd_socket::credentials::our_uid;
use weightd_tests::runtimes::{Executor, OnSmol, OnTokio};
use weightd_tests::{Residence, Resident};

const BYTES: u64 = 8192;

/// For longer than this, no thread of an executor waits for work.
const IDLE: Duration = Duration::from_millis(300);

/// What this process has open, by what it is.
fn descriptors() -> Vec<PathBuf> {
    let descriptors = fs::read_dir("/proc/self/fd").expect("descriptors").flatten();
    let mut leads_to: Vec<PathBuf> = descriptors
        .map(|descriptor| fs::read_link(descriptor.path()).unwrap_or_default())
        .collect();
    leads_to.sort();
    leads_to
}

/// How often memory of a daemon's is mapped.
fn mappings() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").expect("mappings");
    maps.lines().filter(|line| line.contains("memfd:weightd")).count()
}

/// Who runs in this process beside its tests, which are named by their modules, and beside the threads of smol's pool,
/// which wait for work for ever.
fn threads() -> Vec<String> {
    let threads = fs::read_dir("/proc/self/task").expect("threads").flatten();
    let names = threads.map(|thread| fs::read_to_string(thread.path().join("comm")).unwrap_or_default());
    let is_counted = |name: &String| !name.contains("::") && !name.starts_with("blocking-");
    let mut names: Vec<String> = names.filter(is_counted).collect();
    names.sort();
    names
}

/// Waits until this is so, for longer than anything takes on a busy machine.
fn comes_to(what: impl Fn() -> String, is_so: impl Fn() -> bool) {
    for _ in 0..30_000 {
        if is_so() {
            return;
        }
        thread::sleep(Duration::from_millis(2));
    }
    panic!("{}", what());
}

/// A daemon that takes publications, and an executor. What is published has a number for its processing, and the same
/// number in all of its bytes.
struct Site<E> {
    executor: E,
    resident: Resident,
    /// How many there are at rest.
    descriptors: usize,
    mappings: usize,
    threads: usize,
    leases: u32,
    _dir: tempfile::TempDir,
}

impl<E: Executor> Site<E> {
    fn start() -> Site<E> {
        let dir = tempfile::tempdir().expect("a directory");
        let resident = Resident::start(Residence {
            dir: dir.path(),
            device: Device::host(0),
            key: key("", None),
            publish: Some(Replace::Keep),
            no_release: false,
            limits: Limits::default(),
            serve: |process, signals| serve(process, signals, |_, _| {}),
        });
        let mut site = Site {
            executor: <E as Executor>::start(),
            resident,
            descriptors: 0,
            mappings: 0,
            threads: 0,
            leases: 0,
            _dir: dir,
        };
        // Whatever a runtime starts once and keeps is there from now on.
        site.publishes(0);
        site.is_served();
        site.rests();
        site
    }

    /// Takes note of what there is while nobody does anything.
    fn rests(&mut self) {
        let count = || (descriptors().len(), mappings(), threads().len());
        let mut last = (0, 0, 0);
        while last != count() {
            last = count();
            thread::sleep(IDLE);
        }
        (self.descriptors, self.mappings, self.threads) = last;
    }

    fn binding(&self, processing: &str, mode: Mode) -> Binding {
        let options = AttachOptions {
            mode,
            fallback: false,
            ..AttachOptions::new(our_uid().expect("a user"))
        };
        let endpoint = Endpoint::socket(&self.resident.socket).expect("a short path");
        // In other files, so that a digest has to be computed.
        Binding::with(endpoint, options, key(processing, Some([2; 32])), || Ok([9; 32]))
    }

    fn loader(&self, processing: &str) -> Loader<E::Runtime> {
        Loader::from(self.binding(processing, Mode::ZeroCopy))
    }

    fn publisher(&self, processing: &str) -> Publisher<E::Runtime> {
        Publisher::with(self.binding(processing, Mode::ZeroCopy), Device::host(0))
    }

    fn publishes(&self, number: u8) -> Generation {
        let publisher = self.publisher(&number.to_string());
        let publication = publish(&publisher, number, &Arc::default());
        let published = self.executor.block_on(publication);
        published.expect("a publication").generation
    }

    fn releases(&self) {
        let release = Release {
            daemon: 0,
            generation: None,
        };
        request(&self.resident.socket, release, Span::secs(60)).expect("a release");
    }

    fn status(&self) -> DaemonStatus {
        match request(&self.resident.socket, GetStatus {}, Span::secs(60)) {
            Ok(Message::DaemonStatus(status)) => status,
            other => panic!("{other:?}"),
        }
    }

    /// An engine that loads what there is gets all of that.
    fn is_served(&self) {
        comes_to(
            || "what the daemon says it has is not served".to_owned(),
            || {
                let processing = self.status().info.key.processing;
                // What was sent before it was dropped may take its place in between.
                let loaded = self.executor.block_on(self.loader(&processing).attach());
                loaded.is_ok_and(|loaded| {
                    assert_eq!(mark(loaded.model()).to_string(), processing);
                    loaded.lease().is_some()
                })
            },
        );
    }

    /// The daemon counts nothing of what was dropped.
    fn is_let_go(&self, of: &str) {
        comes_to(
            || format!("{of}: there are {} leases", self.status().leases),
            || self.status().leases == self.leases,
        );
    }

    /// Nothing is left of what was dropped.
    fn nothing_is_left(&self, of: &str) {
        self.is_let_go(of);
        comes_to(
            || {
                let open = descriptors();
                format!(
                    "{of}: {} descriptors are left of {}: {open:?}",
                    open.len(),
                    self.descriptors
                )
            },
            || descriptors().len() <= self.descriptors,
        );
        comes_to(
            || format!("{of}: {} mappings are left of {}", mappings(), self.mappings),
            || mappings() <= self.mappings,
        );
    }

    /// Nor is any thread left, once those that wait for work have waited for long enough.
    fn nobody_is_left(&self) {
        comes_to(
            || format!("{:?} are left of {}", threads(), self.threads),
            || threads().len() <= self.threads,
        );
    }
}

fn key(processing: &str, files: Option<[u8; 32]>) -> Key {
    let mut key = world::key(0);
    key.checkpoint.files = files;
    key.processing = processing.to_owned();
    key
}

fn publish<R: Runtime>(
    publisher: &Publisher<R>,
    mark: u8,
    filled: &Arc<AtomicBool>,
) -> impl Future<Output = Result<Published, PublishFailed>> + use<R> {
    let mut contents = Contents::new();
    contents.parameter("w", Dtype::U8, &[BYTES]).expect("a tensor");
    let (publisher, filled) = (publisher.clone(), Arc::clone(filled));
    async move {
        let fill = move |filling: &Filling| {
            filling
                .write("w", &[mark; BYTES as usize])
                .map_err(|error| error.to_string())?;
            filled.store(true, SeqCst);
            Ok::<_, String>(())
        };
        publisher.publish(contents, fill).await
    }
}

/// The value of all bytes.
fn mark(weights: &Weights) -> u8 {
    let tensor = weights.get("w").expect("a tensor");
    let memory = tensor.host().expect("host memory");
    let bytes: Vec<u8> = tensor.runs(memory).flatten().copied().collect();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "all of one content");
    bytes[0]
}

/// Polls a future so many times at most.
async fn at_most<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    std::future::poll_fn(|context| {
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Polls a future until another ends.
async fn until<F: Future>(end: impl Future, future: F) -> Option<F::Output> {
    let (mut end, mut future) = (pin!(end), pin!(future));
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => end.as_mut().poll(context).map(|_| None),
    })
    .await
}

/// After so many microseconds.
async fn after<R: Runtime>(micros: u64) {
    R::unblock(move || thread::sleep(Duration::from_micros(micros)))
        .await
        .expect("the runtime goes on");
}

/// Some moments within the time that a load or a publication takes, and a little more.
fn moments() -> impl Iterator<Item = u64> {
    (0..40_u64).map(|number| number * number * 7919 % 6000)
}

static TURN: Mutex<()> = Mutex::new(());

/// Drops a future after each number of polls that it takes, and after some times. `check` is told after what, and what
/// it came to, where it did come to its end.
fn drop_half_way<E: Executor, F: Future>(
    site: &Site<E>,
    future: impl Fn() -> F,
    mut check: impl FnMut(&str, Option<F::Output>),
) {
    for polls in 1.. {
        let output = site.executor.block_on(at_most(polls, future()));
        let is_over = output.is_some();
        check(&format!("dropped after {polls} polls"), output);
        if is_over {
            break;
        }
    }
    for micros in moments() {
        let end = after::<E::Runtime>(micros);
        let output = site.executor.block_on(until(end, future()));
        check(&format!("dropped after {micros} us"), output);
    }
    site.nobody_is_left();
}

fn a_load_that_is_dropped_leaves_nothing<E: Executor>() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let site = Site::<E>::start();
    let load = || async {
        let loader = site.loader("0");
        let loaded = loader.load(Ok::<_, String>, |because| Err(because.to_string()));
        loaded.await.expect("it is served")
    };
    drop_half_way(&site, load, |after, loaded| {
        drop(loaded);
        site.nothing_is_left(after);
    });
    let copy = || async {
        // What is let go then has to be published again.
        let loader = Loader::<E::Runtime>::from(site.binding("0", Mode::Copy));
        loader.attach().await.map(|copied| mark(copied.model()))
    };
    for polls in 1..40 {
        let copied = site.executor.block_on(at_most(polls, copy()));
        assert!(copied.is_none_or(|mark| mark.is_ok_and(|mark| mark == 0)));
        site.nothing_is_left(&format!("a copy that was dropped after {polls} polls"));
        if let Holds::Released(_) = site.status().holds {
            site.publishes(0);
        }
    }
    site.is_served();
}

/// Work that an engine does for as long as the test wants.
struct Busy {
    begins: Sender<()>,
    may_end: Receiver<()>,
}

impl Busy {
    fn new() -> (Busy, Receiver<()>, Sender<()>) {
        let ((begins, begun), (ends, may_end)) = (channel(), channel());
        (Busy { begins, may_end }, begun, ends)
    }

    fn work(&self) {
        let _ = self.begins.send(());
        let _ = self.may_end.recv();
    }
}

/// When there is something.
async fn some<R: Runtime>(receiver: Receiver<()>) {
    let _ = R::unblock(move || receiver.recv()).await;
}

fn what_is_dropped_while_its_engine_works_is_over_at_once<E: Executor>() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let site = Site::<E>::start();
    let before = site.status().holds;

    let (busy, begun, end) = Busy::new();
    let loader = site.loader("0");
    let build = move |weights| {
        busy.work();
        Ok::<Weights, String>(weights)
    };
    let load = loader.load(build, |because| Err(because.to_string()));
    let loaded = site.executor.block_on(until(some::<E::Runtime>(begun), load));
    assert!(loaded.is_none(), "it builds");
    site.is_let_go("a load whose engine builds on");
    assert!(
        mappings() > site.mappings,
        "what it builds of is there until it ends"
    );
    drop(end);
    site.nothing_is_left("a load whose engine has built");

    let (busy, begun, end) = Busy::new();
    let publisher = site.publisher("1");
    let mut contents = Contents::new();
    contents.parameter("w", Dtype::U8, &[BYTES]).expect("a tensor");
    let fill = move |filling: &Filling| {
        busy.work();
        filling.write("w", &[1; BYTES as usize])
    };
    let publication = publisher.publish(contents, fill);
    let published = site
        .executor
        .block_on(until(some::<E::Runtime>(begun), publication));
    assert!(published.is_none(), "it is filled");
    site.is_let_go("a publication whose engine fills on");
    drop(end);
    site.nothing_is_left("a publication whose engine has filled");
    site.nobody_is_left();
    assert_eq!(site.status().holds, before, "nothing was published");
    site.is_served();
}

fn a_reload_that_is_dropped_leaves_the_engine_what_it_has<E: Executor>() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut site = Site::<E>::start();
    let engine = site.executor.block_on(site.loader("0").attach());
    let engine = engine.expect("it is served");
    let old = engine.generation();
    site.releases();
    let new = site.publishes(0);
    site.leases = 1;
    site.rests();
    let reload = || async {
        let loader = site.loader("0");
        loader.reload(old, Ok::<_, String>).await.expect("it is served")
    };
    drop_half_way(
        &site,
        || sent(reload()),
        |after, reloaded| {
            if let Some(reloaded) = reloaded {
                assert_eq!(reloaded.and_then(|reloaded| reloaded.generation()), Some(new));
            }
            site.nothing_is_left(after);
            assert_eq!(mark(engine.model()), 0);
            assert!(engine.lease().is_some_and(|lease| !lease.is_lost()));
        },
    );
}

fn a_publication_that_is_dropped_is_whole_or_none<E: Executor>() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let site = Site::<E>::start();
    let (number, filled) = (AtomicU8::new(0), Arc::new(AtomicBool::new(false)));
    let publication = || {
        filled.store(false, SeqCst);
        let number = number.fetch_add(1, SeqCst) + 1;
        publish(&site.publisher(&number.to_string()), number, &filled)
    };
    drop_half_way(&site, publication, |after, published| {
        let was_filled = filled.load(SeqCst);
        match published {
            None => {}
            Some(Ok(published)) => drop(published),
            // One that was sent before it was dropped may have come in between.
            Some(Err(PublishFailed::Publish(PublishError::Conflict { .. }))) => {}
            Some(Err(other)) => panic!("{after}: {other}"),
        }
        site.nothing_is_left(after);
        if !was_filled {
            let unfilled = number.load(SeqCst).to_string();
            assert_ne!(site.status().info.key.processing, unfilled, "{after}");
        }
        site.is_served();
    });
}

/// An engine may have any of its threads go on with these.
fn sent<T: Send>(future: T) -> T {
    future
}

fn whoever_is_dropped_while_it_waits_is_not_waited_for<E: Executor>() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut site = Site::<E>::start();
    // Connections wait for a server then.
    site.resident.kill_server();
    for polls in 1..4 {
        let loader = site.loader("0");
        let load = sent(loader.attach());
        assert!(
            site.executor
                .block_on(wait_a_moment::<E, _>(polls, load))
                .is_none()
        );
        let memory = sent(loader.external_memory());
        assert!(
            site.executor
                .block_on(wait_a_moment::<E, _>(polls, memory))
                .is_none()
        );
        let filled = Arc::default();
        let publication = sent(publish(&site.publisher("1"), 1, &filled));
        assert!(
            site.executor
                .block_on(wait_a_moment::<E, _>(polls, publication))
                .is_none()
        );
    }
    site.resident.start_server();
    site.nothing_is_left("what was dropped while there was no server");
    site.is_served();
}

/// Polls a future so many times, or for a moment where it is not woken as often.
async fn wait_a_moment<E: Executor, F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let moment = after::<E::Runtime>(5000);
    until(moment, at_most(polls, future)).await.flatten()
}

macro_rules! on {
    ($($name:ident: $executor:ident)*) => {
        $(mod $name {
            use super::*;

            #[test]
            fn a_load_that_is_dropped_leaves_nothing() {
                super::a_load_that_is_dropped_leaves_nothing::<$executor>();
            }

            #[test]
            fn what_is_dropped_while_its_engine_works_is_over_at_once() {
                super::what_is_dropped_while_its_engine_works_is_over_at_once::<$executor>();
            }

            #[test]
            fn a_reload_that_is_dropped_leaves_the_engine_what_it_has() {
                super::a_reload_that_is_dropped_leaves_the_engine_what_it_has::<$executor>();
            }

            #[test]
            fn a_publication_that_is_dropped_is_whole_or_none() {
                super::a_publication_that_is_dropped_is_whole_or_none::<$executor>();
            }

            #[test]
            fn whoever_is_dropped_while_it_waits_is_not_waited_for() {
                super::whoever_is_dropped_while_it_waits_is_not_waited_for::<$executor>();
            }
        })*
    };
}

on! {
    tokio: OnTokio
    smol: OnSmol
}
