//! An engine hands the weights that it made itself to a daemon that takes them.
//!
//! It asks what the daemon is and holds, has its memory filled, publishes it as one step, and leases
//! it. Whatever fails on the way, the daemon goes on with what it held, unless its operator would rather have
//! that dropped to make room.

use super::ask::Ask;
use super::client::{Client, Inquiry, NoAnswer, Step};
use super::patience::Patience;
use super::reap::Bundle;
use super::{AttachError, AttachOptions, ConnectFailure, Fault};
use crate::content::{Comparison, DeviceUuid, Difference, Generation, Key};
use crate::peer::Peer;
use crate::time::{Now, Span};
use crate::wire::message::{
    ContentInfo, DaemonStatus, ErrorCode, Expects, GetStatus, Holds, Message, Publish as Publication,
    Release, Replace, Watch,
};
use std::sync::Arc;
use thiserror::Error;

/// How long a daemon may take to close what it releases, or to hand over what it was given.
const WORKS_WITHIN: Span = Span::secs(130);

/// Why nothing was published, by cause. Each says what to do next.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum PublishError {
    #[error(transparent)]
    Daemon(#[from] AttachError),
    #[error("this daemon takes its content from its launcher only: start one with `weightd serve`")]
    NotTaken,
    #[error(
        "this daemon is for another place: {}; start it and the engine with the same parallel sizes and devices",
        Difference::list(fields)
    )]
    Misplaced { fields: Vec<Difference> },
    #[error("the daemon holds this content already, as generation {generation}: attach to it")]
    Held { generation: Generation },
    #[error("something else was published or released meanwhile: {why}; attach, or publish again")]
    Conflict { why: String },
    #[error(
        "out of memory: {why}; free memory, or let the daemon replace by `weightd serve --replace drop-first`"
    )]
    OutOfMemory { why: String },
    #[error(
        "the weights could not be copied to the daemon's memory: {why}; nothing was published: mend that, and publish again"
    )]
    FillFailed { why: String },
    #[error("the daemon may hold the content or not: {why}; attach to see")]
    Unknown { why: String },
}

/// Content of the engine's own making, in memory that others can map.
#[derive(Debug)]
pub struct Filled<F> {
    /// What the descriptors hold.
    pub content: ContentInfo,
    /// The manifest's, then those of the regions.
    pub descriptors: Vec<F>,
}

/// What has been published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The generation that it got.
    pub generation: Generation,
    /// Whether the connection is a lease now; keep it open for as long as the mapping.
    pub leased: bool,
}

/// What a publication asks of its driver, beside connecting and waiting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublishStep {
    /// Compute the digest of the checkpoint that the weights are of and report
    /// [`digested`](Publish::digested): engines that have it in other files are told apart by nothing else.
    Digest,
    /// Allocate regions of the device, fill them, and report [`filled`](Publish::filled).
    Fill,
    /// The publication is over.
    Done(Result<Published, PublishError>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Asking,
    ToDigest,
    Digesting,
    ToFill,
    Filling,
    /// The daemon closes what it has, to make room.
    Releasing(Generation),
    Publishing,
    Leasing(Generation),
}

/// See the module. It waits for the daemon as an [`Attach`](super::Attach) with the same options does.
#[derive(Debug)]
pub struct Publish<F> {
    device: Option<DeviceUuid>,
    uid: u32,
    key: Key,
    patience: Patience,
    inquiry: Inquiry<F>,
    phase: Phase,
    /// What the daemon holds, its key, and who makes room for what comes.
    expects: Expects,
    held: Option<Key>,
    held_bytes: u64,
    replace: Replace,
    /// What it held was released, to make room.
    dropped: bool,
    lease_broke: bool,
    filled: Option<(ContentInfo, Bundle<F>)>,
    end: Option<Result<Published, PublishError>>,
}

impl<F> Publish<F> {
    /// Of content of this key, which names what was done to the weights as its `processing`.
    pub fn new(options: &AttachOptions, key: Key) -> Publish<F> {
        let misplaced = options.misplaced(&key);
        Publish {
            device: options.device,
            uid: options.uid,
            patience: Patience::of(options),
            inquiry: Inquiry::default(),
            phase: Phase::Asking,
            expects: Expects::Empty,
            held: None,
            held_bytes: 0,
            replace: Replace::Keep,
            dropped: false,
            lease_broke: false,
            filled: None,
            end: misplaced.map(|role| Err(PublishError::Misplaced { fields: vec![role] })),
            key,
        }
    }

    /// The digest is computed, or could not be.
    pub fn digested(&mut self, now: Now, result: Result<[u8; 32], String>) {
        assert_eq!(self.phase, Phase::Digesting, "the digest was asked for");
        self.patience.restart(now);
        match result {
            Ok(digest) => {
                self.key.checkpoint.digest = Some(digest);
                self.compare();
            }
            Err(why) => self.end = Some(Err(AttachError::DigestFailed { why }.into())),
        }
    }

    /// The memory is filled, or could not be; then it is freed already.
    pub fn filled(&mut self, now: Now, result: Result<Filled<F>, Fault>) {
        assert_eq!(self.phase, Phase::Filling, "what is filled was asked for");
        self.patience.restart(now);
        match result {
            Ok(filled) => {
                self.filled = Some((filled.content, Arc::new(filled.descriptors)));
                self.go(now, Phase::Publishing);
            }
            Err(
                Fault::OutOfMemory(why) | Fault::Malformed(why) | Fault::Unsupported(why) | Fault::Other(why),
            ) => {
                self.end = Some(Err(PublishError::FillFailed { why }));
            }
        }
    }

    /// The device has no room for `wanted` bytes, of which `free` could be had; absent where it is not the
    /// device that lacks them. Nothing was filled.
    pub fn no_room(&mut self, now: Now, wanted: u64, free: Option<u64>, why: String) {
        assert_eq!(self.phase, Phase::Filling, "what is filled was asked for");
        let helps = free.is_some_and(|free| wanted <= free.saturating_add(self.held_bytes));
        match self.expects {
            // It cannot hold both, and the daemon's operator would rather have the new.
            Expects::Generation(held) if self.replace == Replace::DropFirst && helps => {
                self.go(now, Phase::Releasing(held));
            }
            _ if self.dropped => {
                let why = format!("{why} (and the content before was released to make room)");
                self.end = Some(Err(PublishError::OutOfMemory { why }));
            }
            _ => self.end = Some(Err(PublishError::OutOfMemory { why })),
        }
    }

    /// Whether the lease was not refused: its connection broke, or nobody answered in time.
    pub fn lease_broke(&self) -> bool {
        self.lease_broke
    }

    fn go(&mut self, now: Now, phase: Phase) {
        self.phase = phase;
        self.inquiry.connect_at(now);
    }

    fn answered(&mut self, now: Now, answer: Result<Message, NoAnswer>) {
        let result = match (self.phase, answer) {
            (Phase::Leasing(generation), answer) => {
                let leased = matches!(answer, Ok(Message::Watching(_)));
                let broke = |none: NoAnswer| {
                    matches!(
                        AttachError::from(none),
                        AttachError::Broken { .. }
                            | AttachError::Timeout { .. }
                            | AttachError::Unavailable { .. }
                    )
                };
                self.lease_broke = answer.is_err_and(broke);
                self.end = Some(Ok(Published { generation, leased }));
                Ok(())
            }
            (Phase::Asking, Ok(Message::DaemonStatus(status))) => self.judge(status),
            (Phase::Releasing(_), Ok(Message::Released(_))) => {
                self.expects = Expects::Empty;
                self.dropped = true;
                self.phase = Phase::ToFill;
                Ok(())
            }
            (Phase::Publishing, Ok(Message::Published(published))) => {
                self.filled = None;
                self.go(now, Phase::Leasing(published.generation));
                Ok(())
            }
            (phase, Ok(other)) => {
                let why = format!("the daemon answered with a {} message", other.name());
                Err(match phase {
                    Phase::Publishing => PublishError::Unknown { why },
                    _ => AttachError::Malformed { why }.into(),
                })
            }
            (phase, Err(none)) => match none.leaves_open() {
                // It may have been stored, so saying it again could only meet itself. Whatever else is asked may be
                // asked twice.
                Some(why) if phase == Phase::Publishing => Err(PublishError::Unknown { why }),
                _ => self.failed(now, none.into()),
            },
        };
        if let Err(error) = result {
            self.end = Some(Err(error));
        }
    }

    /// Whether the daemon is one that takes this content.
    fn judge(&mut self, status: DaemonStatus) -> Result<(), PublishError> {
        let info = status.info;
        if let Some(ours) = self.device
            && ours != info.device_uuid
        {
            let theirs = info.device_uuid;
            return Err(AttachError::WrongDevice { theirs, ours }.into());
        }
        self.replace = info.publish.ok_or(PublishError::NotTaken)?;
        let fields = info.key.misplaced(&self.key);
        if !fields.is_empty() {
            let fields = info.key.differences(&self.key, &fields);
            return Err(PublishError::Misplaced { fields });
        }
        self.expects = match status.holds {
            Holds::Content(generation) => Expects::Generation(generation),
            Holds::Empty | Holds::Released(_) | Holds::Lost(_) => Expects::Empty,
        };
        self.held = Some(info.key);
        self.held_bytes = status.bytes;
        match self.key.checkpoint.digest {
            Some(_) => self.compare(),
            None => self.phase = Phase::ToDigest,
        }
        Ok(())
    }

    /// Whether the daemon holds this content already.
    fn compare(&mut self) {
        let held = self.held.take();
        let same = held.is_some_and(|held| held.compare(&self.key) == Comparison::Same);
        match self.expects {
            Expects::Generation(generation) if same => {
                self.end = Some(Err(PublishError::Held { generation }));
            }
            _ => self.phase = Phase::ToFill,
        }
    }

    /// Tries again where that may help, since nothing was done yet.
    fn failed(&mut self, now: Now, error: AttachError) -> Result<(), PublishError> {
        let conflict = [ErrorCode::Conflict, ErrorCode::StaleGeneration];
        match error {
            AttachError::Daemon { code, why } if conflict.contains(&code) => {
                Err(PublishError::Conflict { why })
            }
            mut error => match self.patience.again(now, &mut error) {
                Some(at) => {
                    self.inquiry.connect_at(at);
                    Ok(())
                }
                None => Err(error.into()),
            },
        }
    }

    /// What is asked on the connection that was made.
    fn question(&self, now: Now) -> (Message, Option<Bundle<F>>, Span) {
        let soon = self.patience.answer_by(now) - now;
        match (self.phase, &self.filled) {
            (Phase::Releasing(held), _) => {
                let generation = Some(held);
                (
                    Release {
                        daemon: 0,
                        generation,
                    }
                    .into(),
                    None,
                    WORKS_WITHIN,
                )
            }
            (Phase::Publishing, Some((content, descriptors))) => {
                let publication = Publication {
                    daemon: 0,
                    generation: None,
                    expects: self.expects,
                    key: self.key.clone(),
                    content: content.clone(),
                };
                (publication.into(), Some(Arc::clone(descriptors)), WORKS_WITHIN)
            }
            (Phase::Leasing(generation), _) => {
                let generation = Some(generation);
                (Watch { generation }.into(), None, soon)
            }
            _ => (GetStatus {}.into(), None, soon),
        }
    }
}

impl<F> Client<F> for Publish<F> {
    type Next = PublishStep;
    type Exchange = Inquiry<F>;

    fn step(&mut self, now: Now) -> Step<PublishStep> {
        self.patience.start(now);
        loop {
            if let Some(end) = self.end.take() {
                self.filled = None;
                return Step::Next(PublishStep::Done(end));
            }
            let (doing, next) = match self.phase {
                Phase::ToDigest => (Phase::Digesting, PublishStep::Digest),
                Phase::ToFill => (Phase::Filling, PublishStep::Fill),
                _ => match self.inquiry.step(now).next() {
                    Err(step) => return step,
                    Ok(answer) => {
                        self.answered(now, answer);
                        continue;
                    }
                },
            };
            self.phase = doing;
            return Step::Next(next);
        }
    }

    fn connected(&mut self, now: Now, result: Result<Peer, ConnectFailure>) {
        let (question, descriptors, patience) = self.question(now);
        let ask = |peer| Ask::with(now, question, descriptors, peer, self.uid, patience);
        self.inquiry.connected(result.map(ask));
    }

    fn exchange(&mut self) -> &mut Inquiry<F> {
        &mut self.inquiry
    }
}
