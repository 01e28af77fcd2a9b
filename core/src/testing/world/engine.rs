//! What an engine is out for: one machine with a connection of its own, and the work that it asks for.

use super::{SERVER_PID, Side, UID, World, content};
use crate::machine::{
    Attach, AttachError, AttachStep, Client, ConnectFailure, Exchange, Fault, Fetched, Filled, Outcome,
    Publish, PublishError, PublishStep, Published, Query, Renewal, Renewed, Step,
};
use crate::peer::{Facts, Peer};
use crate::testing::ledger::{Fd, File};
use crate::time::{Now, Span};
use crate::wire::message::{DaemonId, Message};

/// The machine.
#[allow(clippy::large_enum_variant)]
pub enum Errand {
    Attach(Attach<Fd>),
    Query(Query<Fd>),
    Publish(Publish<Fd>),
    Renewal(Renewal<Fd>),
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)]
pub enum End {
    Done(Outcome),
    Failed(AttachError),
    Disk(AttachError),
    Answered(Message),
    Published(Published),
    NotPublished(PublishError),
    Renewed(Renewed),
}

/// What a machine asks for beyond a connection and time.
#[allow(clippy::large_enum_variant)]
enum Need {
    Digest,
    Import(Fetched<Fd>),
    Copy,
    Build,
    Fill,
    Nothing(End),
}

/// Something that an engine does by itself, between being asked and saying how it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Import,
    Copy,
    Build,
    Fill,
}

pub struct Engine {
    errand: Errand,
    daemon: DaemonId,
    pub(super) wire: Option<usize>,
    pub end: Option<End>,
    pub ended_at: Now,
    /// What the driver was asked to do.
    pub log: Vec<&'static str>,
    pub mapped: Option<Fetched<Fd>>,
    /// What was cloned.
    pub copied: Option<File>,
    /// What was filled: a manifest, and a region that the engine itself maps from then on.
    pub filled: Option<[Fd; 2]>,
    pub digest: Result<[u8; 32], String>,
    pub import: Result<(), Fault>,
    pub copy: Result<(), Fault>,
    pub build: Result<(), String>,
    /// How many bytes it publishes, or why they cannot be filled in.
    pub fill: Result<u64, Fault>,
    /// How long import and copy take, each.
    pub works: Span,
    /// While set, a build or a fill does not end.
    pub stays: bool,
    work: Option<Work>,
    busy_until: Option<Now>,
    deadline: Option<Now>,
    pub lease_ended: bool,
}

/// Whoever speaks on an engine's connection.
macro_rules! speaker {
    ($engine:expr, $exchange:ident => $said:expr) => {
        match &mut $engine.errand {
            Errand::Attach(attach) => speaker!(@ attach, $exchange => $said),
            Errand::Query(query) => speaker!(@ query, $exchange => $said),
            Errand::Publish(publish) => speaker!(@ publish, $exchange => $said),
            Errand::Renewal(renewal) => speaker!(@ renewal, $exchange => $said),
        }
    };
    (@ $machine:ident, $exchange:ident => $said:expr) => {{
        let $exchange = $machine.exchange();
        $said
    }};
}

impl Errand {
    fn step(&mut self, now: Now) -> Step<Need> {
        match self {
            Errand::Attach(attach) => then(attach.step(now), |step| match step {
                AttachStep::Digest => Need::Digest,
                AttachStep::Import(fetched) => Need::Import(fetched),
                AttachStep::Copy => Need::Copy,
                AttachStep::Build => Need::Build,
                AttachStep::LoadFromDisk { because } => Need::Nothing(End::Disk(because)),
                AttachStep::Done(Ok(outcome)) => Need::Nothing(End::Done(outcome)),
                AttachStep::Done(Err(error)) => Need::Nothing(End::Failed(error)),
            }),
            Errand::Query(query) => then(query.step(now), |answer| {
                Need::Nothing(answer.map_or_else(End::Failed, End::Answered))
            }),
            Errand::Publish(publish) => then(publish.step(now), |step| match step {
                PublishStep::Digest => Need::Digest,
                PublishStep::Fill => Need::Fill,
                PublishStep::Done(end) => Need::Nothing(end.map_or_else(End::NotPublished, End::Published)),
            }),
            Errand::Renewal(renewal) => {
                then(renewal.step(now), |renewed| Need::Nothing(End::Renewed(renewed)))
            }
        }
    }

    fn connected(&mut self, now: Now, result: Result<Peer, ConnectFailure>) {
        match self {
            Errand::Attach(attach) => attach.connected(now, result),
            Errand::Query(query) => query.connected(now, result),
            Errand::Publish(publish) => publish.connected(now, result),
            Errand::Renewal(renewal) => renewal.connected(now, result),
        }
    }

    fn attach(&mut self) -> &mut Attach<Fd> {
        match self {
            Errand::Attach(attach) => attach,
            _ => unreachable!("only an attach asks for this"),
        }
    }
}

fn then<T>(step: Step<T>, need: impl FnOnce(T) -> Need) -> Step<Need> {
    match step {
        Step::Connect => Step::Connect,
        Step::Io { until } => Step::Io { until },
        Step::Sleep { until } => Step::Sleep { until },
        Step::Next(next) => Step::Next(need(next)),
    }
}

impl End {
    /// Whether the connection is a lease from now on.
    fn is_leased(&self) -> bool {
        matches!(
            self,
            End::Done(Outcome::Mapped { leased: true, .. })
                | End::Published(Published { leased: true, .. })
                | End::Renewed(Renewed::Leased)
        )
    }
}

impl Engine {
    pub(super) fn new(now: Now, daemon: DaemonId, errand: Errand) -> Engine {
        Engine {
            errand,
            daemon,
            wire: None,
            end: None,
            ended_at: now,
            log: Vec::new(),
            mapped: None,
            copied: None,
            filled: None,
            digest: Ok([9; 32]),
            import: Ok(()),
            copy: Ok(()),
            build: Ok(()),
            fill: Ok(1),
            works: Span(0),
            stays: false,
            work: None,
            busy_until: None,
            deadline: None,
            lease_ended: false,
        }
    }

    /// Whether nobody looks after its connection meanwhile.
    pub(super) fn works(&self) -> bool {
        self.work.is_some()
    }

    /// Whether it builds or fills.
    pub fn is_at_work(&self) -> bool {
        matches!(self.work, Some(Work::Build | Work::Fill))
    }

    /// When there is something to do for it, whatever else happens.
    pub(super) fn deadline(&self) -> Option<Now> {
        match self.work {
            _ if self.end.is_some() => None,
            Some(_) => self.busy_until,
            None => self.deadline,
        }
    }

    pub(super) fn outgoing(&mut self) -> Option<(Vec<u8>, Vec<Fd>)> {
        speaker!(self, exchange => exchange.outgoing().map(super::turn::copy))
    }

    pub(super) fn wrote(&mut self, now: Now, bytes: usize) {
        speaker!(self, exchange => exchange.wrote(now, bytes));
    }

    pub(super) fn receive(&mut self, now: Now, bytes: &[u8], descriptors: Vec<(Facts, Fd)>) {
        speaker!(self, exchange => exchange.receive(now, bytes, descriptors, false));
    }

    /// The other side is gone.
    pub(super) fn hangup(&mut self, now: Now) {
        speaker!(self, exchange => exchange.hangup(now, "the daemon closed the connection"));
        self.lease_ended |= self.end.is_some();
        self.wire = None;
    }

    /// Says how its work went, where that is over; false while it is not.
    fn finish(&mut self, now: Now) -> bool {
        let Some(work) = self.work else { return true };
        let stays = self.stays && matches!(work, Work::Build | Work::Fill);
        if stays || self.busy_until.is_some_and(|until| now < until) {
            return false;
        }
        (self.work, self.busy_until) = (None, None);
        match (work, &mut self.errand) {
            (Work::Import, errand) => {
                errand.attach().imported(now, self.import.clone());
                self.mapped.take_if(|_| self.import.is_err());
            }
            (Work::Copy, errand) => {
                errand.attach().copied(now, self.copy.clone());
                let mapped = self.mapped.take().filter(|_| self.copy.is_ok());
                self.copied = mapped.map(|mapped| mapped.regions[0].file);
            }
            (Work::Build, errand) => {
                self.mapped.take_if(|_| self.build.is_err());
                errand.attach().built(now, self.build.clone());
            }
            (Work::Fill, Errand::Publish(publish)) => {
                let filled = self.fill.clone().map(|bytes| Filled {
                    content: content(64, &[bytes]),
                    descriptors: self.filled.iter().flatten().map(Fd::duplicate).collect(),
                });
                self.filled.take_if(|_| filled.is_err());
                publish.filled(now, filled);
            }
            (Work::Fill, _) => unreachable!("only a publication is filled"),
        }
        true
    }
}

impl World {
    /// An engine's machine says what it wants next, and gets it.
    pub(super) fn step(&mut self, number: usize) -> bool {
        let now = self.now;
        let engine = &mut self.engines[number];
        if engine.end.is_some() || !engine.finish(now) {
            return false;
        }
        match engine.errand.step(now) {
            Step::Connect => self.dial(number),
            Step::Io { until } | Step::Sleep { until } => {
                engine.deadline = Some(until);
                return false;
            }
            Step::Next(need) => self.provide(number, need),
        }
        true
    }

    fn dial(&mut self, number: usize) {
        let now = self.now;
        let engine = &mut self.engines[number];
        engine.log.push("connect");
        let (daemon, old) = (engine.daemon, engine.wire.take());
        if let Some(old) = old {
            self.close_end(old, 0);
        }
        let client = Peer {
            pid: 40 + number as u32,
            uid: UID,
        };
        let wire = self.connect(daemon, Side::Engine(number), client);
        let server = Peer {
            pid: SERVER_PID,
            uid: self.server_uid,
        };
        let engine = &mut self.engines[number];
        engine.wire = wire.as_ref().ok().copied();
        engine.errand.connected(now, wire.map(|_| server));
    }

    fn provide(&mut self, number: usize, need: Need) {
        let (now, room) = (self.now, self.room());
        let engine = &mut self.engines[number];
        let mut begins = |name, work, busy_until| {
            engine.log.push(name);
            (engine.work, engine.busy_until) = (Some(work), busy_until);
        };
        match need {
            Need::Digest => {
                engine.log.push("digest");
                match &mut engine.errand {
                    Errand::Publish(publish) => publish.digested(now, engine.digest.clone()),
                    errand => errand.attach().digested(now, engine.digest.clone()),
                }
            }
            Need::Import(fetched) => {
                begins("import", Work::Import, Some(now + engine.works));
                engine.mapped = Some(fetched);
            }
            Need::Copy => begins("copy", Work::Copy, Some(now + engine.works)),
            Need::Build => begins("build", Work::Build, None),
            Need::Fill => match &engine.fill {
                Ok(bytes) if *bytes > room => {
                    engine.log.push("no room");
                    let Errand::Publish(publish) = &mut engine.errand else {
                        unreachable!("only a publication is filled")
                    };
                    publish.no_room(now, *bytes, Some(room), format!("{room} bytes are free"));
                }
                fill => {
                    let bytes = *fill.as_ref().unwrap_or(&1);
                    engine.filled = Some([self.ledger.memory(64), self.ledger.memory(bytes)]);
                    begins("fill", Work::Fill, None);
                }
            },
            Need::Nothing(end) => {
                engine.ended_at = now;
                if matches!(end, End::Done(Outcome::Copied { .. })) {
                    // In a reload it was copied from the daemon's memory into what was there.
                    let mapped = engine.mapped.take().map(|mapped| mapped.regions[0].file);
                    engine.copied = mapped.or(engine.copied);
                }
                let leased = end.is_leased();
                engine.end = Some(end);
                if !leased && let Some(wire) = engine.wire.take() {
                    self.close_end(wire, 0);
                }
            }
        }
    }

    /// What the device has free.
    fn room(&self) -> u64 {
        let Some(vault) = &self.vault else {
            return self.device_bytes;
        };
        let held = (0..).map_while(|daemon| vault.machine.holds(daemon).map(|_| daemon));
        let held = held.filter_map(|daemon| vault.machine.content(daemon));
        self.device_bytes - held.map(|(_, content, _)| content.bytes()).sum::<u64>()
    }
}
