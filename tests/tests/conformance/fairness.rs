//! An executor has other things to do: nothing of a load or a publication keeps it from them, and no daemon can.

use crate::pair::Pair;
use crate::stage::{Act, Content, Daemon, FIRST, Given, Order, Reaction, SECOND, Stage, key};
use crate::talk;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};
use weightd_blocking::asynchronous::{Loader, Publisher, Runtime};
use weightd_blocking::testing::{Fetch, Loading, Stop, Task, Turn, run};
use weightd_blocking::{Binding, Contents, Loaded};
use weightd_core::content::{Dtype, Generation};
use weightd_core::wire::Message;
use weightd_core::wire::message::{State, Watching};
use weightd_tests::runtimes::{Blocking, Executor, OnOneThread, OnSmol, Subject};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Counts how often its executor comes to it.
#[derive(Clone, Default)]
struct Ticker(Arc<AtomicU64>);

impl Ticker {
    async fn run<R: Runtime>(self) {
        loop {
            self.0.fetch_add(1, SeqCst);
            R::yield_now().await;
        }
    }

    /// Blocks until it has come to it a few times more.
    fn waits(&self) -> Result<(), String> {
        let (begun, until) = (self.0.load(SeqCst), Instant::now() + PATIENCE);
        while self.0.load(SeqCst) < begun + 10 {
            if Instant::now() > until {
                return Err("the executor does nothing else meanwhile".to_owned());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Runs a future, with the ticker beside it in the same task.
    fn beside<E: Executor, T>(&self, executor: &E, future: impl Future<Output = T>) -> T {
        let (mut future, mut ticker) = (pin!(future), pin!(self.clone().run::<E::Runtime>()));
        executor.block_on(std::future::poll_fn(|context| {
            let Poll::Pending = ticker.as_mut().poll(context) else {
                unreachable!("it ticks for ever")
            };
            future.as_mut().poll(context)
        }))
    }
}

/// An engine that has the same checkpoint in other files, so that it has to compute the digest.
fn binding<E: Executor>(stage: &Pair<E, Blocking>, ticker: &Ticker) -> Binding {
    let mut key = key();
    key.checkpoint.files = Some([77; 32]);
    let ticker = ticker.clone();
    let digest = move || ticker.waits().map(|()| [9; 32]);
    stage.binding_with(&Order::load().keyed(key), digest)
}

fn whatever_blocks_does_so_elsewhere<E: Executor>() {
    let ticker = Ticker::default();
    let executor = <E as Executor>::start();
    let mut stage = Pair::<E, Blocking>::start(Daemon::loaded());
    stage.load(FIRST);
    stage.digest([9; 32]);
    let loader = Loader::<E::Runtime>::from(binding(&stage, &ticker));
    let builds = ticker.clone();
    let load = loader.load(
        move |weights| builds.waits().map(|()| Some(weights)),
        |because| Err::<_, String>(because.to_string()),
    );
    let loaded = ticker.beside(&executor, load).expect("a model");
    assert!(matches!(loaded, Loaded::Mapped { .. }), "{loaded:?}");

    stage.go();
    let reads = ticker.clone();
    let load = loader.load(
        |weights| Ok::<_, String>(Some(weights)),
        move |_| reads.waits().map(|()| None),
    );
    let loaded = ticker.beside(&executor, load).expect("a model");
    assert!(matches!(loaded, Loaded::LoadedFromDisk { .. }), "{loaded:?}");

    let stage = Pair::<E, Blocking>::start(Daemon::publishable());
    let publisher = Publisher::<E::Runtime>::with(binding(&stage, &ticker), stage.host());
    let mut contents = Contents::new();
    contents.parameter("w", Dtype::U8, &[8192]).expect("a tensor");
    let fills = ticker.clone();
    let publish = publisher.publish(contents, move |filling| {
        fills.waits()?;
        filling.write("w", &[1; 8192]).map_err(|error| error.to_string())
    });
    ticker.beside(&executor, publish).expect("a publication");
}

#[test]
fn whatever_blocks_does_so_elsewhere_than_on_tokio() {
    whatever_blocks_does_so_elsewhere::<OnOneThread>();
}

#[test]
fn whatever_blocks_does_so_elsewhere_than_on_smol() {
    whatever_blocks_does_so_elsewhere::<OnSmol>();
}

/// Hands out content, gives leases, and says on them without end what nobody asked.
fn floods(stage: &impl Stage, content: Content) -> Act {
    let (content, given): (_, Vec<Given>) = stage.genuine(content);
    let device_uuid = stage.device();
    Box::new(move |asked| match asked {
        Some((Message::GetState(_), request)) => {
            let generation = Generation { epoch: 5, number: 6 };
            let state = State {
                generation,
                device_uuid,
                content: content.clone(),
            };
            Reaction::gives(request, state, given.clone())
        }
        Some((Message::Watch(_), request)) => Reaction {
            floods: crate::world::frame(&Watching {}.into(), 7, 0).repeat(1000),
            ..Reaction::answers(request, Watching {})
        },
        _ => Reaction::default(),
    })
}

/// Does this in a thread; it must come to an end.
fn comes_to_an_end(what: impl FnOnce() + Send + 'static) {
    let (ends, end) = channel::<()>();
    let thread = thread::spawn(move || {
        what();
        drop(ends);
    });
    match end.recv_timeout(PATIENCE) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("it is kept busy for ever"),
        _ => thread.join().expect("it ends well"),
    }
}

fn a_flood_on_a_lease_keeps_nobody_busy<S: Subject>(beside: fn(&S)) {
    comes_to_an_end(move || {
        let mut stage = Pair::<S, Blocking>::start(Daemon::loaded());
        let floods = floods(&stage, SECOND);
        stage.impersonate(true, floods);
        let (engine, end) = stage.run(Order::load());
        assert!(
            matches!(end, crate::stage::End::Mapped { leased: true, .. }),
            "{end:?}"
        );
        beside(stage.client());
        assert_eq!(stage.reads(&engine), SECOND.mark);
        stage.leave(engine);
    });
}

/// What was spawned beside the lease gets its turns.
fn ticks<E: Executor>(executor: &E) {
    executor.block_on(async {
        let ticker = Ticker::default();
        let _ticks = E::Runtime::spawn(ticker.clone().run::<E::Runtime>());
        E::Runtime::unblock(move || ticker.waits())
            .await
            .expect("the runtime goes on")
            .expect("ticks");
    });
}

#[test]
fn a_flood_on_a_lease_keeps_no_thread_busy() {
    a_flood_on_a_lease_keeps_nobody_busy::<Blocking>(|_| {});
}

#[test]
fn a_flood_on_a_lease_does_not_keep_tokio_busy() {
    a_flood_on_a_lease_keeps_nobody_busy::<OnOneThread>(ticks);
}

#[test]
fn a_flood_on_a_lease_does_not_keep_smol_busy() {
    a_flood_on_a_lease_keeps_nobody_busy::<OnSmol>(ticks);
}

#[test]
fn whoever_keeps_a_lease_lets_others_have_their_turn_after_each_word_on_it() {
    let mut stage = Pair::<Blocking, Blocking>::start(Daemon::loaded());
    let floods = floods(&stage, FIRST);
    stage.impersonate(true, floods);
    let binding = stage.binding_with(&Order::load(), || Err("the same files".to_owned()));
    let mut loading = Loading::new(&binding).expect("a load");
    let Stop::Build(_weights) = run(&mut loading).expect("to wait") else {
        panic!("it is served")
    };
    loading.built(Ok(()));
    let Ok(Stop::Over(Ok(Fetch::Mapped { keeper, .. }))) = run(&mut loading) else {
        panic!("it is mapped")
    };
    let mut keeper = keeper.expect("a lease");
    for _ in 0..1000 {
        match keeper.turn().expect("to turn") {
            Turn::Wait(Some(Duration::ZERO)) => return,
            Turn::Wait(None) => drop(talk::wait(&[&keeper])),
            other => panic!("{other:?}"),
        }
    }
    panic!("it reads on for as long as there is something to read");
}
