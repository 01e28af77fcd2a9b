//! Requests that find a bug: handling them panics. Each ends its own connection, told so, and changes nothing for others.

use crate::world::*;
use weightd_core::content::Generation;
use weightd_core::machine::faults::{AT_ONCE, WHEN_ANSWERED};
use weightd_core::machine::{
    AttachOptions, ConnId, Held, Machine, Origin, Outcome, Output, ServerEvent, Vault, VaultEvent,
};
use weightd_core::peer::{Facts, FileKind, Peer};
use weightd_core::time::Now;
use weightd_core::wire::message::{
    Activity, DaemonStatus, Defined, ErrorCode, Expects, Failure, GetActivity, GetMemory, GetState,
    GetStatus, Holds, Leading, Message, Progress, Published, Release, Report, Watch,
};

const FIRST: Generation = Generation {
    epoch: EPOCH,
    number: 1,
};

fn reload(rank: u32) -> Message {
    let request = GetState {
        is_reload: true,
        ..get_state_of(rank)
    };
    request.into()
}

/// Everything that may be asked of a daemon and changes something there, or only reads.
fn requests() -> Vec<Message> {
    vec![
        reload(0),
        reload(1),
        Watch {
            generation: Some(FIRST),
        }
        .into(),
        Watch { generation: None }.into(),
        GetMemory {}.into(),
        Report {
            daemon: 0,
            generation: FIRST,
            import_failed: "x".to_owned(),
        }
        .into(),
        GetStatus {}.into(),
        GetActivity {}.into(),
    ]
}

/// What the daemon says of itself, and of whoever asked.
fn says(world: &mut World) -> (DaemonStatus, Activity) {
    let raw = world.raw(0);
    world.say(raw, GetStatus {}, vec![]);
    world.run();
    world.say(raw, GetActivity {}, vec![]);
    world.run();
    let heard = world.heard(raw);
    world.hang_up(raw);
    world.run();
    match &heard[..] {
        [Message::DaemonStatus(status), Message::Activity(activity)] => (status.clone(), activity.clone()),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn is_told(heard: &[Message]) {
    let Some(Message::Failure(Failure { code, message, .. })) = heard.last() else {
        panic!("{heard:?}")
    };
    assert_eq!(ErrorCode::from_number(*code), ErrorCode::Internal);
    assert!(message.contains("bug"), "{message}");
}

/// An engine that maps, and leases, the content of daemon 0.
fn engine(world: &mut World) -> usize {
    let options = AttachOptions {
        fallback: false,
        ..AttachOptions::new(UID)
    };
    let engine = world.attach(0, options, key(0));
    world.run();
    let end = &world.engines[engine].end;
    assert!(
        matches!(end, Some(End::Done(Outcome::Mapped { leased: true, .. }))),
        "{end:?}"
    );
    engine
}

#[test]
fn a_request_that_panics_ends_its_connection_and_counts_for_nothing() {
    for request in requests() {
        for fault in [AT_ONCE, WHEN_ANSWERED] {
            let mut world = World::ready();
            let other = engine(&mut world);
            let (before, open) = (says(&mut world), world.ledger.open_in_all());
            let raw = world.raw(0);
            world.send(raw, &frame(&request, fault, 0), vec![]);
            world.run();
            is_told(&world.heard(raw));
            assert!(world.raws[&raw].ended);
            let events = &world.server.as_ref().unwrap().events;
            let told = events.iter().filter(|event| {
                matches!(event, ServerEvent::Panicked { origin: Origin::Daemon(0), peer, why }
                    if peer.uid == UID && why.contains("a test asked for this"))
            });
            assert_eq!(told.count(), 1, "{events:?}");
            let (status, mut activity) = says(&mut world);
            // The one thing that was counted: that it was refused.
            let refused = activity.refused.pop().expect("a count");
            assert_eq!((refused.code, refused.count), (ErrorCode::Internal.number(), 1));
            assert_eq!((status, activity), before, "{request:?}");
            assert_eq!(world.ledger.open_in_all(), open, "nothing of it is kept");
            world.end_engine(other);
            let next = engine(&mut world);
            world.end_engine(next);
            assert_eq!(says(&mut world).0.leases, 0);
            world.finish();
        }
    }
}

#[test]
fn what_came_with_a_request_that_panics_is_discarded() {
    let mut world = World::ready();
    let open = world.ledger.open_in_all();
    let publish = publication(0, Expects::Generation(FIRST), content(64, &[10]));
    let raw = world.raw(0);
    let descriptors = vec![world.ledger.memory(64), world.ledger.memory(10)];
    world.send(raw, &frame(&publish.into(), AT_ONCE, 2), descriptors);
    world.run();
    is_told(&world.heard(raw));
    assert_eq!(world.ledger.open_in_all(), open);
    // Nothing was dropped either, where it could have delayed others.
    world.finish();
}

/// A release is answered when vault and server have let go: who waits for that, and for nothing else, is sent away.
#[test]
fn a_release_whose_answer_panics_is_a_release() {
    let mut world = World::ready();
    let other = engine(&mut world);
    let raw = world.raw(0);
    let release = Release {
        daemon: 0,
        generation: None,
    };
    world.send(raw, &frame(&release.into(), WHEN_ANSWERED, 0), vec![]);
    world.run();
    is_told(&world.heard(raw));
    let (status, _) = says(&mut world);
    assert_eq!((status.holds, status.leases), (Holds::Released(FIRST), 1));
    assert_eq!(
        world.vault.as_ref().unwrap().machine.holds(0),
        Some(Holds::Released(FIRST))
    );
    world.end_engine(other);
    world.finish();
}

/// What waits behind another request is handled when that is answered: in the middle of what somebody else said.
#[test]
fn a_request_that_panics_behind_another_ends_nobody_else() {
    let mut world = World::ready();
    let raw = world.raw(0);
    let release = Release {
        daemon: 0,
        generation: None,
    };
    let both = [
        frame(&release.into(), 1, 0),
        frame(&GetMemory {}.into(), AT_ONCE, 0),
    ]
    .concat();
    world.send(raw, &both, vec![]);
    world.run();
    let heard = world.heard(raw);
    assert!(
        matches!(heard[..], [Message::Released(_), Message::Failure(_)]),
        "{heard:?}"
    );
    is_told(&heard);
    let events = &world.server.as_ref().unwrap().events;
    assert!(
        !events
            .iter()
            .any(|event| matches!(event, ServerEvent::LeaderGone)),
        "{events:?}"
    );
    let (status, _) = says(&mut world);
    assert_eq!(status.holds, Holds::Released(FIRST));
    assert_ne!(status.launcher_pid, 0);
    world.finish();
}

/// A vault of one daemon, with a server that follows and a loader.
struct Alone {
    vault: Vault<u32>,
    server: ConnId,
    loader: ConnId,
    closed: Vec<ConnId>,
    events: Vec<VaultEvent>,
}

impl Alone {
    fn new() -> Alone {
        let held = Held {
            info: info(0, false),
            lock: 1,
            listener: 2,
        };
        let mut vault = Vault::new(1, EPOCH, [held]);
        let peer = Peer { pid: 2, uid: UID };
        let server = vault.accept(Now(0), Origin::Server, peer);
        let loader = vault.accept(Now(0), Origin::Loader, peer);
        let mut alone = Alone {
            vault,
            server,
            loader,
            closed: Vec::new(),
            events: Vec::new(),
        };
        alone.hears(server, &Leading {}.into(), 1, &[]);
        alone.hears(server, &Defined { daemon: 0 }.into(), 2, &[]);
        alone
    }

    /// A message comes in, and what there is to say leaves.
    fn hears(&mut self, from: ConnId, message: &Message, request: u32, sizes: &[u64]) {
        let memory = |&size| {
            let file = FileKind::Memory { sealed: true };
            (Facts { file, size }, size as u32)
        };
        let bytes = frame(message, request, sizes.len());
        let descriptors = sizes.iter().map(memory);
        self.vault.receive(Now(0), from, &bytes, descriptors, false);
        loop {
            match self.vault.poll() {
                Output::Idle { .. } => break,
                Output::Close { conn } => self.closed.push(conn),
                Output::Event(event) => self.events.push(event),
                Output::Discard { id, .. } => self.vault.discarded(Now(0), id),
                _ => {}
            }
        }
        for conn in [self.server, self.loader] {
            while let Some(outgoing) = self.vault.outgoing(conn) {
                let bytes = outgoing.bytes.len();
                self.vault.wrote(Now(0), conn, bytes);
            }
        }
    }

    fn publishes(&mut self, request: u32) {
        let publish = publication(0, Expects::Empty, content(64, &[10]));
        self.hears(self.loader, &publish.into(), request, &[64, 10]);
    }
}

#[test]
fn a_loader_whose_message_panics_is_gone_and_the_server_stays() {
    let mut alone = Alone::new();
    let progress = Progress {
        daemon: 0,
        done: 1,
        total: 2,
    };
    alone.hears(alone.loader, &progress.into(), AT_ONCE, &[]);
    assert_eq!(alone.closed, [alone.loader]);
    let [.., VaultEvent::LoadFailed { why }, VaultEvent::LoaderGone] = &alone.events[..] else {
        panic!("{:?}", alone.events)
    };
    assert!(
        why.contains("bug") && why.contains("a test asked for this"),
        "{why}"
    );
    assert_eq!(alone.vault.holds(0), Some(Holds::Empty));
    assert!(alone.vault.is_armed());
}

#[test]
fn what_a_loader_published_stays_where_the_answer_panics_and_the_next_server_gets_it() {
    let mut alone = Alone::new();
    alone.publishes(WHEN_ANSWERED);
    assert_eq!(alone.vault.holds(0), Some(Holds::Content(FIRST)));
    // Whether it was told of the content is not known, so it gives way to one that is.
    assert_eq!(alone.closed, [alone.loader, alone.server]);
    let gone = alone.events.iter();
    assert_eq!(
        gone.filter(|event| matches!(event, VaultEvent::ServerGone { .. }))
            .count(),
        1
    );

    let peer = Peer { pid: 3, uid: UID };
    alone.server = alone.vault.accept(Now(0), Origin::Server, peer);
    alone.hears(alone.server, &Leading {}.into(), 1, &[]);
    alone.hears(alone.server, &Defined { daemon: 0 }.into(), 2, &[]);
    let stored = Published {
        daemon: 0,
        generation: FIRST,
    };
    alone.hears(alone.server, &stored.into(), 3, &[]);
    assert!(alone.vault.is_armed());
}

#[test]
fn a_server_whose_message_panics_gives_way_to_another() {
    let mut alone = Alone::new();
    alone.publishes(1);
    let release = Release {
        daemon: 0,
        generation: None,
    };
    alone.hears(alone.server, &release.into(), AT_ONCE, &[]);
    assert_eq!(alone.closed, [alone.server]);
    let Some(VaultEvent::ServerGone { why }) = alone.events.last() else {
        panic!("{:?}", alone.events)
    };
    assert!(why.contains("bug"), "{why}");
    assert_eq!(
        alone.vault.holds(0),
        Some(Holds::Content(FIRST)),
        "nothing was released"
    );
}
