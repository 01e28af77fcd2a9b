//! An engine's attach against a daemon that says whatever it likes, and a driver that has any luck.

use super::Input;
use super::words::{descriptors, generation, some_key, to_engine};
use crate::content::{Generation, Role};
use crate::machine::{
    Attach, AttachError, AttachOptions, AttachStep, Client, ConnectFailure, Exchange, Fault, Fetched, Mode,
    Outcome, Step, check_descriptors,
};
use crate::peer::{Facts, Peer};
use crate::testing::ledger::{Fd, Ledger};
use crate::testing::world::{UID, device, frame};
use crate::time::{Now, Span};
use crate::wire::frame::HEADER_BYTES;
use crate::wire::{Header, Message};

/// The most steps once nobody answers any more: two for each try, and for the parting.
const STEPS: usize = 3000;

/// Attaches as the input says, and checks that
///
/// * nothing panics, and with a daemon that is gone the attach ends in bounded steps and within its time;
/// * nothing is asked of a daemon of another user;
/// * what is imported is what was announced, on the right device, by its descriptors' facts;
/// * what the outcome says has happened, and the disk is read only where the engine can;
/// * no descriptor is left in the end.
pub fn attach_session(input: &[u8]) {
    let mut input = Input::new(input);
    let options = options(&mut input);
    let ledger = Ledger::default();
    let mut session = Session {
        attach: Attach::new(options.clone(), some_key(&mut input, 0)),
        now: Now(1_000_000),
        ledger: ledger.clone(),
        last: Last::default(),
        mapped: None,
        trusted: false,
        options,
    };
    let end = session.live(&mut input);
    session.ends_well(&end);
    drop((session, end));
    assert_eq!(
        ledger.open_in_all(),
        0,
        "a machine that is over keeps no descriptor"
    );
}

fn options(input: &mut Input<'_>) -> AttachOptions {
    let flags = input.byte();
    let flag = |bit: u8| flags >> bit & 1 == 1;
    AttachOptions {
        mode: if flag(0) { Mode::Copy } else { Mode::ZeroCopy },
        fallback: flag(1),
        state_timeout: Span::secs(1 + input.short() % 300),
        role: if flags >> 2 & 7 == 7 {
            Role::Draft
        } else {
            Role::Target
        },
        device: flag(5).then(|| device(0)),
        is_reload: flag(6),
        current: flag(7).then(|| generation(input)),
        ..AttachOptions::new(UID)
    }
}

/// What happened last, of what the outcome speaks of.
#[derive(Default)]
struct Last {
    imported: bool,
    copied: bool,
    built: bool,
    /// A lease was offered.
    watching: bool,
}

struct Session {
    attach: Attach<Fd>,
    options: AttachOptions,
    now: Now,
    ledger: Ledger,
    last: Last,
    mapped: Option<Fetched<Fd>>,
    /// Whether whoever is behind the connection runs as our user.
    trusted: bool,
}

impl Session {
    fn live(&mut self, input: &mut Input<'_>) -> AttachStep<Fd> {
        let mut left = STEPS;
        let mut silent_since = None;
        loop {
            if input.is_empty() {
                silent_since.get_or_insert(self.now);
                left = left.checked_sub(1).expect("an attach comes to an end");
            }
            match self.attach.step(self.now) {
                Step::Connect => self.connect(input),
                Step::Io { until } => self.exchange(input, until),
                Step::Sleep { until } => {
                    assert!(until > self.now, "who sleeps has a reason");
                    let early = Span::millis(input.short() % 100);
                    self.now = if early.0 == 0 {
                        until
                    } else {
                        until.min(self.now + early)
                    };
                }
                Step::Next(end @ (AttachStep::LoadFromDisk { .. } | AttachStep::Done(_))) => {
                    let since = silent_since.unwrap_or(self.now);
                    // A digest, when it is there, starts the time anew; a parting has a time of its own.
                    let (state, connect) = (self.options.state_timeout, self.options.connect_timeout);
                    let most = Span(2 * state.0 + 3 * connect.0);
                    assert!(self.now - since <= most, "it ends within its time");
                    return end;
                }
                Step::Next(step) => self.work(step, input),
            }
        }
    }

    fn connect(&mut self, input: &mut Input<'_>) {
        let uid = match input.below(16) {
            0 => Err(ConnectFailure::Absent("refused".to_owned())),
            1 => Err(ConnectFailure::Busy),
            2 => Err(ConnectFailure::Refused("no socket".to_owned())),
            3 => Err(ConnectFailure::Other("no descriptor".to_owned())),
            4 => Ok(UID + 1),
            _ => Ok(UID),
        };
        self.last.watching = false;
        self.trusted = uid == Ok(UID);
        self.attach
            .connected(self.now, uid.map(|uid| Peer { pid: 1, uid }));
        assert!(
            self.trusted || self.attach.outgoing().is_none(),
            "a stranger is asked nothing"
        );
    }

    /// The daemon has its turn.
    fn exchange(&mut self, input: &mut Input<'_>, until: Now) {
        assert!(self.trusted && until > self.now);
        let now = self.now;
        match input.below(12) {
            0 => self.now = until,
            1 => self.now = until.min(now + Span::millis(input.short())),
            2 => self.attach.hangup(now, "gone"),
            3 => {
                let length = input.below(64);
                let garbage = input.bytes(length);
                self.attach.receive(now, garbage, None, input.below(8) == 7);
            }
            4 => {
                self.read(1 + input.below(60));
            }
            _ => {
                let request = self.read(usize::MAX).unwrap_or(input.below(4) as u32);
                self.answer(input, request);
            }
        }
    }

    /// Takes what the engine says; returns the last request of it that was whole.
    fn read(&mut self, most: usize) -> Option<u32> {
        let mut request = None;
        while let Some(out) = self.attach.outgoing() {
            assert_eq!(out.descriptors.len(), 0, "an engine gives nothing away");
            let length = out.bytes.len();
            if let Ok(Some(header)) = Header::decode(out.bytes)
                && length == HEADER_BYTES + header.body
            {
                Message::decode(header.kind, &out.bytes[HEADER_BYTES..]).expect("a message");
                request = Some(header.request);
            }
            let taken = length.min(most);
            self.attach.wrote(self.now, taken);
            if taken < length {
                break;
            }
        }
        request
    }

    /// A message, whole or in two pieces or without its end.
    fn answer(&mut self, input: &mut Input<'_>, request: u32) {
        let message = to_engine(input);
        self.last.watching |= matches!(message, Message::Watching(_));
        let descriptors = descriptors(&message, input, &self.ledger);
        let request = if input.below(8) == 7 { request ^ 1 } else { request };
        let bytes = frame(&message, request, descriptors.len());
        let received: Vec<(Facts, Fd)> = descriptors.into_iter().map(|fd| (fd.facts, fd)).collect();
        let cut = match input.below(4) {
            0 => input.short() as usize % bytes.len(),
            _ => bytes.len(),
        };
        let (first, second) = bytes.split_at(cut);
        let mut received = Some(received).into_iter().flatten();
        if !first.is_empty() {
            self.attach.receive(self.now, first, received.by_ref(), false);
        }
        if input.below(8) != 7 && !second.is_empty() {
            self.attach.receive(self.now, second, received, false);
        }
    }

    fn work(&mut self, step: AttachStep<Fd>, input: &mut Input<'_>) {
        self.now = self.now + Span::millis(input.short());
        let (now, luck) = (self.now, input.below(8));
        let fault = || {
            let why = "x".repeat(luck * 1000);
            match luck {
                4 => Err(Fault::OutOfMemory(why)),
                5 => Err(Fault::Malformed(why)),
                6 => Err(Fault::Unsupported(why)),
                7 => Err(Fault::Other(why)),
                _ => Ok(()),
            }
        };
        let text = (luck < 6).then_some(()).ok_or_else(|| "no".to_owned());
        match step {
            AttachStep::Digest => self.attach.digested(now, text.map(|()| [9; 32])),
            AttachStep::Import(fetched) => {
                self.fetched_well(&fetched);
                self.last = Last {
                    imported: luck < 4,
                    watching: self.last.watching,
                    ..Last::default()
                };
                self.mapped = (luck < 4).then_some(fetched);
                self.attach.imported(now, fault());
            }
            AttachStep::Copy => {
                assert!(self.last.imported && self.options.mode == Mode::Copy);
                self.last.copied = luck < 4;
                self.attach.copied(now, fault());
            }
            AttachStep::Build => {
                assert!(self.last.imported);
                self.last.built = luck < 6;
                self.attach.built(now, text);
            }
            AttachStep::LoadFromDisk { .. } | AttachStep::Done(_) => unreachable!("these are ends"),
        }
    }

    fn fetched_well(&self, fetched: &Fetched<Fd>) {
        let facts: Vec<Facts> = std::iter::once(&fetched.manifest)
            .chain(&fetched.regions)
            .map(|fd| fd.facts)
            .collect();
        assert_eq!(check_descriptors(&fetched.state.content, facts.iter()), Ok(()));
        assert!(
            self.options
                .device
                .is_none_or(|ours| ours == fetched.state.device_uuid)
        );
    }

    fn ends_well(&self, end: &AttachStep<Fd>) {
        let has_disk = self.options.fallback && !self.options.is_reload;
        let fetched = self.mapped.as_ref().map(|fetched| fetched.state.generation);
        let is_of = |generation: &Generation| fetched == Some(*generation);
        match end {
            AttachStep::LoadFromDisk { .. } => assert!(has_disk),
            AttachStep::Done(Err(AttachError::UnsupportedPlatform { .. })) => {}
            AttachStep::Done(Err(error)) => assert!(!has_disk, "{error} although there is a disk"),
            AttachStep::Done(Ok(Outcome::Mapped { generation, leased })) => {
                assert!(self.options.mode == Mode::ZeroCopy && self.last.built && is_of(generation));
                assert!(!leased || self.last.watching, "who leases was told so");
            }
            AttachStep::Done(Ok(Outcome::Copied { generation, .. })) => {
                assert!(self.options.mode == Mode::Copy && self.last.built && is_of(generation));
                assert!(self.last.copied || self.options.is_reload);
            }
            AttachStep::Done(Ok(Outcome::Unchanged { generation })) => {
                assert_eq!(self.options.current, Some(*generation));
                assert!(fetched.is_none() && self.options.mode == Mode::ZeroCopy);
            }
            other => unreachable!("{other:?} is no end"),
        }
    }
}
