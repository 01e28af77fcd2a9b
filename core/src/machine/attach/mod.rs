//! The engine's side of one attach: connect, ask, import, lease, or go to disk.
//!
//! Every decision is made here; a driver connects, moves bytes, waits, and does the blocking parts
//! (digest, import, copy, build, loading from disk) that an [`AttachStep`] asks for.

mod types;

pub use types::{AttachError, AttachOptions, AttachStep, ConnectFailure, Fault, Fetched, Mode, Outcome};

use super::ask::AskError;
use super::client::{Client, Step};
use super::descriptors::check;
use super::link::Link;
use super::patience::Patience;
use super::{Exchange, Outgoing};
use crate::content::{Generation, Key};
use crate::peer::{Facts, Peer};
use crate::text::cut;
use crate::time::{Now, Span};
use crate::wire::Frame;
use crate::wire::message::{GetState, MAX_WORDS, Message, MessageError, Release, Report, State, Watch};

#[derive(Debug)]
enum At {
    /// To connect: to fetch a state, or to release what was fetched.
    Start,
    Connecting,
    Asking {
        until: Now,
        waits: Span,
        request: u32,
    },
    NeedsDigest,
    Digesting,
    /// Zero-copy: leasing what was fetched, before it is mapped. A lease has no deadline at the
    /// daemon, so that an import may take its time.
    Leasing {
        until: Now,
        request: u32,
    },
    Fetched,
    Importing,
    /// The import failed: the daemon is told on this connection, where it takes that at once, and then
    /// the attach goes on as it must.
    Reporting {
        until: Now,
        fault: Fault,
    },
    NeedsCopy,
    Copying,
    NeedsBuild,
    Building,
    Sleeping {
        until: Now,
    },
    Over,
}

/// Copy mode asks the daemon to let go, over a connection of its own (copying may take longer than
/// the daemon waits), and then ends.
#[derive(Debug)]
struct Parting {
    until: Now,
    /// Why the engine goes to disk; absent when everything was cloned.
    because: Option<AttachError>,
}

/// See the module.
#[derive(Debug)]
pub struct Attach<F> {
    options: AttachOptions,
    key: Key,
    link: Link<F>,
    at: At,
    patience: Patience,
    fetched: Option<Fetched<F>>,
    generation: Option<Generation>,
    leased: bool,
    lease_broke: bool,
    parting: Option<Parting>,
    end: Option<AttachStep<F>>,
}

/// How long a daemon that does not read may hold up an engine that reports to it.
const REPORT_WITHIN: Span = Span::millis(100);

impl<F> Attach<F> {
    /// An attach with the engine's own key.
    pub fn new(options: AttachOptions, key: Key) -> Attach<F> {
        let mut attach = Attach {
            at: At::Start,
            link: Link::default(),
            patience: Patience::of(&options),
            fetched: None,
            generation: None,
            leased: false,
            lease_broke: false,
            parting: None,
            end: None,
            options,
            key,
        };
        // A draft's loader with a target's key, or the reverse: a mismatch before any request.
        if let Some(role) = attach.options.misplaced(&attach.key) {
            attach.finish(AttachError::Mismatch { fields: vec![role] });
        }
        attach
    }

    /// Whether the lease was not refused: its connection broke, or nobody answered in time.
    pub fn lease_broke(&self) -> bool {
        self.lease_broke
    }

    /// Nothing about a lease fails an attach.
    fn unleased(&mut self) {
        self.lease_broke = true;
        self.at = At::Fetched;
    }

    fn time_out(&mut self, now: Now) {
        match self.at {
            At::Asking { until, waits, .. } if now >= until => {
                self.fail(now, AttachError::Timeout { waited: waits });
            }
            At::Leasing { until, .. } if now >= until => self.unleased(),
            At::Reporting { until, .. } if now >= until || self.link.is_flushed() => self.reported(now),
            _ => {}
        }
    }

    /// Asks what this connection was made for.
    fn ask(&mut self, now: Now) {
        let (question, until) = match &self.parting {
            Some(parting) => {
                let release = Release {
                    daemon: 0,
                    generation: self.generation,
                };
                (Message::from(release), parting.until)
            }
            None => {
                let ask = GetState {
                    key: self.key.clone(),
                    is_reload: self.options.is_reload,
                };
                (ask.into(), self.patience.answer_by(now))
            }
        };
        match self.link.ask(question, None) {
            Ok(request) => {
                self.at = At::Asking {
                    until,
                    waits: until - now,
                    request,
                }
            }
            Err(error) => self.fail(
                now,
                AttachError::Malformed {
                    why: error.to_string(),
                },
            ),
        }
    }

    /// The digest is computed, or could not be.
    pub fn digested(&mut self, now: Now, result: Result<[u8; 32], String>) {
        self.expect(matches!(self.at, At::Digesting), "digested");
        // That took its time, and was no waiting.
        self.patience.restart(now);
        match result {
            Ok(digest) => {
                self.key.checkpoint.digest = Some(digest);
                self.at = At::Start;
            }
            Err(why) => self.fail(now, AttachError::DigestFailed { why }),
        }
    }

    /// The import is done, or failed.
    pub fn imported(&mut self, now: Now, result: Result<(), Fault>) {
        self.expect(matches!(self.at, At::Importing), "imported");
        match (result, self.options.mode) {
            (Ok(()), Mode::Copy) if !self.options.is_reload => self.at = At::NeedsCopy,
            (Ok(()), _) => self.at = At::NeedsBuild,
            (Err(fault), _) => self.report(now, fault),
        }
    }

    /// Tells the daemon that its content could not be imported; its answer is not waited for.
    fn report(&mut self, now: Now, fault: Fault) {
        let (Fault::OutOfMemory(why) | Fault::Malformed(why) | Fault::Unsupported(why) | Fault::Other(why)) =
            &fault;
        let report = Report {
            daemon: 0,
            generation: self.known_generation(),
            import_failed: cut(why, MAX_WORDS).to_owned(),
        };
        self.link
            .ask(report, None)
            .expect("a report of this length fits a frame");
        self.at = At::Reporting {
            until: now + REPORT_WITHIN,
            fault,
        };
    }

    /// The report has left, or will not leave.
    fn reported(&mut self, now: Now) {
        if let At::Reporting { fault, .. } = std::mem::replace(&mut self.at, At::Over) {
            self.fault(now, fault);
        }
    }

    /// Everything is cloned, or could not be; then what was cloned is freed already.
    pub fn copied(&mut self, now: Now, result: Result<(), Fault>) {
        self.expect(matches!(self.at, At::Copying), "copied");
        match result {
            Ok(()) => self.at = At::NeedsBuild,
            Err(fault) => self.fault(now, fault),
        }
    }

    /// The engine has its model, or could not build it; then it has let go of all weights.
    pub fn built(&mut self, now: Now, result: Result<(), String>) {
        self.expect(matches!(self.at, At::Building), "built");
        match (result, self.options.mode) {
            (Ok(()), Mode::ZeroCopy) => {
                let (generation, leased) = (self.known_generation(), self.leased);
                self.over(AttachStep::Done(Ok(Outcome::Mapped { generation, leased })));
            }
            (Ok(()), Mode::Copy) => self.part_after(now, None),
            (Err(why), _) => self.give_up(now, AttachError::BuildFailed { why }),
        }
    }

    fn expect(&self, right: bool, input: &str) {
        assert!(right, "{input} was reported while the attach was {:?}", self.at);
    }

    fn known_generation(&self) -> Generation {
        self.generation
            .expect("a generation is known once content was fetched")
    }

    fn frame(&mut self, now: Now, frame: Frame<F>) {
        let message = Message::decode(frame.kind, &frame.body);
        match self.at {
            // What a daemon says of the connection as a whole comes under request 0.
            At::Asking { request, .. } if frame.request == request || frame.request == 0 => {
                self.answered(now, message, frame.descriptors);
            }
            At::Asking { .. } => {
                let why = "the daemon answered what was not asked".to_owned();
                self.fail(now, AttachError::Malformed { why });
            }
            At::Leasing { request, .. } => {
                self.leased = frame.request == request && matches!(message, Ok(Message::Watching(_)));
                self.at = At::Fetched;
            }
            _ => {}
        }
    }

    fn answered(&mut self, now: Now, message: Result<Message, MessageError>, descriptors: Vec<(Facts, F)>) {
        match message {
            Ok(Message::Failure(failure)) => {
                self.fail(now, AskError::of(failure).into());
            }
            Ok(Message::Released(_)) if self.parting.is_some() => self.part(true),
            Ok(Message::State(state)) if self.parting.is_none() => self.fetch(now, state, descriptors),
            Ok(Message::Mismatch(mismatch)) => {
                self.fail(
                    now,
                    AttachError::Mismatch {
                        fields: mismatch.fields,
                    },
                );
            }
            Ok(Message::NeedDigest(_)) if self.key.checkpoint.digest.is_none() => {
                self.at = At::NeedsDigest;
            }
            Ok(other) => {
                let why = format!("the daemon answered with a {} message", other.name());
                self.fail(now, AttachError::Malformed { why });
            }
            Err(error) => self.fail(
                now,
                AttachError::Malformed {
                    why: error.to_string(),
                },
            ),
        }
    }

    fn fetch(&mut self, now: Now, state: State, descriptors: Vec<(Facts, F)>) {
        if let Some(ours) = self.options.device
            && ours != state.device_uuid
        {
            // It is not ours to release: its memory is not on our device.
            return self.fail(
                now,
                AttachError::WrongDevice {
                    theirs: state.device_uuid,
                    ours,
                },
            );
        }
        let generation = state.generation;
        self.generation = Some(generation);
        if self.options.mode == Mode::ZeroCopy && self.options.current == Some(generation) {
            return self.over(AttachStep::Done(Ok(Outcome::Unchanged { generation })));
        }
        if let Err(error) = check(&state.content, descriptors.iter().map(|(facts, _)| facts)) {
            return self.fault(now, Fault::Malformed(error.to_string()));
        }
        let mut descriptors = descriptors.into_iter().map(|(_, descriptor)| descriptor);
        let manifest = descriptors
            .next()
            .expect("the check counted the manifest's descriptor");
        self.fetched = Some(Fetched {
            state,
            manifest,
            regions: descriptors.collect(),
        });
        self.at = match self.options.mode {
            Mode::Copy => At::Fetched,
            Mode::ZeroCopy => {
                let watch = Watch {
                    generation: Some(generation),
                };
                let request = self.link.ask(watch, None).expect("a watch request fits a frame");
                At::Leasing {
                    until: now + self.options.connect_timeout,
                    request,
                }
            }
        };
    }

    fn fault(&mut self, now: Now, fault: Fault) {
        let error = match fault {
            Fault::OutOfMemory(why) => AttachError::OutOfMemory { why },
            Fault::Malformed(why) => AttachError::Malformed { why },
            // An error whatever the engine could load itself: it runs where it cannot use what it asked for.
            Fault::Unsupported(why) => {
                let error = AttachError::UnsupportedPlatform { why };
                return self.over(AttachStep::Done(Err(error)));
            }
            Fault::Other(why) => AttachError::ImportFailed { why },
        };
        self.give_up(now, error);
    }

    /// What was fetched is of no use.
    fn give_up(&mut self, now: Now, error: AttachError) {
        match self.options.mode {
            // The disk load may not fit beside the daemon's copy: it lets go of that generation
            // first. Without a disk load, what others may use is not ours to release.
            Mode::Copy if self.has_disk_load() => self.part_after(now, Some(error)),
            _ => self.fail(now, error),
        }
    }

    fn has_disk_load(&self) -> bool {
        self.options.fallback && !self.options.is_reload
    }

    /// Copy mode: asks the daemon to let go of what was fetched, then ends.
    fn part_after(&mut self, now: Now, because: Option<AttachError>) {
        self.parting = Some(Parting {
            until: now + self.options.connect_timeout,
            because,
        });
        self.link = Link::default();
        self.at = At::Start;
    }

    /// The release was answered, or will not be; that never fails an attach.
    fn part(&mut self, released: bool) {
        let Some(parting) = self.parting.take() else {
            return;
        };
        match parting.because {
            None => {
                let generation = self.known_generation();
                self.over(AttachStep::Done(Ok(Outcome::Copied { generation, released })));
            }
            Some(error) => self.finish(error),
        }
    }

    fn broke(&mut self, now: Now, error: AttachError) {
        match self.at {
            At::Asking { .. } => self.fail(now, error),
            At::Leasing { .. } => self.unleased(),
            At::Reporting { .. } => self.reported(now),
            _ => {}
        }
    }

    /// Tries again where that may help and time is left; else ends.
    fn fail(&mut self, now: Now, mut error: AttachError) {
        self.link = Link::default();
        let again = match &self.parting {
            Some(parting) => self.patience.until(now, &error, parting.until),
            None => self.patience.again(now, &mut error),
        };
        match again {
            Some(until) => self.at = At::Sleeping { until },
            None if self.parting.is_some() => self.part(false),
            None => self.finish(error),
        }
    }

    fn finish(&mut self, error: AttachError) {
        self.over(if self.has_disk_load() {
            AttachStep::LoadFromDisk { because: error }
        } else {
            AttachStep::Done(Err(error))
        });
    }

    fn over(&mut self, end: AttachStep<F>) {
        self.at = At::Over;
        self.end = Some(end);
    }
}

impl<F> Client<F> for Attach<F> {
    type Next = AttachStep<F>;
    type Exchange = Self;

    /// # Panics
    /// When the last step was not reported on, or was the last: a bug in the driver.
    fn step(&mut self, now: Now) -> Step<AttachStep<F>> {
        self.patience.start(now);
        self.time_out(now);
        if let Some(end) = self.end.take() {
            return Step::Next(end);
        }
        match self.at {
            At::Sleeping { until } if now < until => Step::Sleep { until },
            At::Start | At::Sleeping { .. } => {
                self.link = Link::default();
                self.at = At::Connecting;
                Step::Connect
            }
            At::Asking { until, .. } | At::Leasing { until, .. } | At::Reporting { until, .. } => {
                Step::Io { until }
            }
            At::NeedsDigest => {
                self.at = At::Digesting;
                Step::Next(AttachStep::Digest)
            }
            At::Fetched => {
                self.at = At::Importing;
                let fetched = self.fetched.take().expect("content stays until it is imported");
                Step::Next(AttachStep::Import(fetched))
            }
            At::NeedsCopy => {
                self.at = At::Copying;
                Step::Next(AttachStep::Copy)
            }
            At::NeedsBuild => {
                self.at = At::Building;
                Step::Next(AttachStep::Build)
            }
            At::Connecting | At::Digesting | At::Importing | At::Copying | At::Building | At::Over => {
                panic!(
                    "an attach that is {:?} waits for its report, not for a step",
                    self.at
                )
            }
        }
    }

    fn connected(&mut self, now: Now, result: Result<Peer, ConnectFailure>) {
        self.expect(matches!(self.at, At::Connecting), "connected");
        match result {
            Ok(peer) if !peer.is_trusted_by(self.options.uid) => {
                let (theirs, ours) = (peer.uid, self.options.uid);
                let why =
                    format!("the daemon runs as user {theirs}, this engine as {ours}: run both as one user");
                self.fail(now, AttachError::RefusedPeer { why });
            }
            Ok(_) => self.ask(now),
            Err(failure) => self.fail(now, failure.into()),
        }
    }

    fn exchange(&mut self) -> &mut Self {
        self
    }
}

impl<F> Exchange<F> for Attach<F> {
    fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        self.link.outgoing()
    }

    fn wrote(&mut self, _now: Now, bytes: usize) {
        self.link.wrote(bytes);
    }

    fn receive(
        &mut self,
        now: Now,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    ) {
        if let Err(error) = self.link.receive(bytes, descriptors, truncated) {
            return self.broke(now, error.into());
        }
        loop {
            match self.link.next_frame() {
                Ok(None) => return,
                Ok(Some(frame)) => self.frame(now, frame),
                Err(error) => return self.broke(now, error.into()),
            }
        }
    }

    fn hangup(&mut self, now: Now, why: &str) {
        self.broke(now, AttachError::Broken { why: why.to_owned() });
    }
}
