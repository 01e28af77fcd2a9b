//! The vault: the only truth about what a node holds.
//!
//! It lives in the launcher. It names generations, holds every descriptor (lock, listener,
//! manifest, regions), arms a server with them, and arms the next one when that server dies.

use super::link::Link;
use super::reap::{Bundle, DiscardId, Reaper};
use super::{ConnId, Machine, Origin, Outgoing, Output, check_descriptors};
use crate::content::{Comparison, Generation};
use crate::peer::{Facts, Peer};
use crate::time::{Now, Span};
use crate::wire::Frame;
use crate::wire::message::{
    ContentInfo, DaemonId, DaemonInfo, Define, ErrorCode, Expects, Holds, Lead, Message, MessageError,
    Publish, Published, Release, Released, Report, Reported, Stop, Stopping,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Answers that a server may leave unread, beyond what arms it.
const MAX_UNREAD: usize = 1024;
/// How long a server may take to answer before it counts as dead.
const SERVER_ANSWERS_WITHIN: Span = Span::secs(10);

/// One daemon as the launcher made it.
#[derive(Debug)]
pub struct Held<F> {
    /// What it is.
    pub info: DaemonInfo,
    /// The lock on its socket's path.
    pub lock: F,
    /// Its listening socket.
    pub listener: F,
}

/// What a vault tells its launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VaultEvent {
    /// The server holds all that the vault holds.
    Armed {
        /// Whether every daemon has content.
        complete: bool,
    },
    /// The server is gone, or was given up.
    ServerGone {
        /// What was wrong; empty for a plain end of the connection.
        why: String,
    },
    /// The loader's channel has ended.
    LoaderGone,
    /// How far the loader is with a daemon, in bytes.
    Progress {
        /// The daemon.
        daemon: DaemonId,
        /// Bytes in place.
        done: u64,
        /// Bytes of the whole region.
        total: u64,
    },
    /// The loader handed over a daemon's content.
    Stored {
        /// The daemon.
        daemon: DaemonId,
        /// The generation that it got.
        generation: Generation,
    },
    /// The loader cannot go on.
    LoadFailed {
        /// One line for a person.
        why: String,
    },
    /// A daemon's content was let go, at an engine's or an operator's wish.
    Released {
        /// The daemon.
        daemon: DaemonId,
        /// The generation that was released.
        generation: Generation,
    },
    /// An engine could not import a daemon's content.
    ImportFailed {
        /// The daemon.
        daemon: DaemonId,
        /// The generation that could not be imported.
        generation: Generation,
        /// What the import said.
        why: String,
    },
    /// An operator asked for the end.
    StopRequested,
}

#[derive(Debug)]
struct Content<F> {
    generation: Generation,
    info: ContentInfo,
    descriptors: Bundle<F>,
}

#[derive(Debug)]
struct Holding<F> {
    info: DaemonInfo,
    /// Lock and listener.
    ends: Bundle<F>,
    content: Result<Content<F>, Holds>,
    /// Whether the server holds the same.
    mirrored: bool,
}

#[derive(Debug)]
struct Conn<F> {
    origin: Origin,
    link: Link<F>,
    /// Requests of ours without an answer.
    unanswered: u32,
    /// When the peer last did something that we waited for.
    heard: Now,
    interest: (bool, bool),
}

/// Where the answer to a release goes when its descriptors are closed.
#[derive(Clone, Copy, Debug)]
struct ReleaseTicket {
    conn: ConnId,
    request: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Vault<F> {
    pid: u32,
    epoch: u64,
    next_number: u64,
    holdings: BTreeMap<DaemonId, Holding<F>>,
    conns: BTreeMap<ConnId, Conn<F>>,
    next_conn: u64,
    server: Option<ConnId>,
    was_armed: bool,
    reaper: Reaper<F, ReleaseTicket>,
    output: VecDeque<Output<F, VaultEvent>>,
}

impl<F> Vault<F> {
    /// A vault of launcher `pid`. `epoch` is random, so that no two vaults name the same generation.
    pub fn new(pid: u32, epoch: u64, daemons: impl IntoIterator<Item = Held<F>>) -> Vault<F> {
        let holding = |held: Held<F>| Holding {
            info: held.info,
            ends: Arc::new(vec![held.lock, held.listener]),
            content: Err(Holds::Empty),
            mirrored: false,
        };
        Vault {
            pid,
            epoch,
            next_number: 1,
            holdings: (0..).zip(daemons.into_iter().map(holding)).collect(),
            conns: BTreeMap::new(),
            next_conn: 0,
            server: None,
            was_armed: false,
            reaper: Reaper::default(),
            output: VecDeque::new(),
        }
    }

    /// What a daemon is.
    pub fn info(&self, daemon: DaemonId) -> Option<&DaemonInfo> {
        self.holdings.get(&daemon).map(|holding| &holding.info)
    }

    /// Whether every daemon was given content at least once.
    pub fn is_loaded(&self) -> bool {
        self.holdings
            .values()
            .all(|holding| !matches!(holding.content, Err(Holds::Empty)))
    }

    /// Asks the server to end.
    pub fn stop_server(&mut self, now: Now) {
        self.ask_server(now, Stop {}, None);
        self.settle();
    }

    fn event(&mut self, event: VaultEvent) {
        self.output.push_back(Output::Event(event));
    }

    fn ask_server(&mut self, now: Now, message: impl Into<Message>, descriptors: Option<Bundle<F>>) {
        if let Some(conn) = self.server.and_then(|server| self.conns.get_mut(&server)) {
            if conn.unanswered == 0 {
                conn.heard = now;
            }
            match conn.link.ask(message, descriptors) {
                Ok(_) => conn.unanswered += 1,
                Err(error) => {
                    let server = self
                        .server
                        .expect("the connection that was asked is the server's");
                    self.give_up(server, error.to_string());
                }
            }
        }
    }

    fn reply(&mut self, id: ConnId, request: u32, message: impl Into<Message>) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.link.send(request, &message.into(), None);
        }
    }

    fn refuse(&mut self, id: ConnId, request: u32, code: ErrorCode, why: &str) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.link.fail(request, code, false, why);
        }
    }

    fn frame(&mut self, now: Now, id: ConnId, origin: Origin, frame: Frame<F>) {
        let Frame {
            kind,
            request,
            body,
            descriptors,
        } = frame;
        let message = match Message::decode(kind, &body) {
            Ok(message) => message,
            Err(error) => {
                self.reaper.bury_all(
                    descriptors
                        .into_iter()
                        .map(|(_, descriptor)| descriptor)
                        .collect(),
                );
                let code = match error {
                    MessageError::UnknownKind(_) => ErrorCode::UnknownCommand,
                    _ => ErrorCode::Malformed,
                };
                return self.refuse(id, request, code, &error.to_string());
            }
        };
        match (origin, message) {
            (Origin::Loader, Message::Publish(publish)) => {
                self.publish(now, id, request, publish, descriptors)
            }
            (_, message) if !descriptors.is_empty() => {
                self.reaper.bury_all(
                    descriptors
                        .into_iter()
                        .map(|(_, descriptor)| descriptor)
                        .collect(),
                );
                let why = format!("a {} message owns no descriptors here", message.name());
                self.refuse(id, request, ErrorCode::BadDescriptors, &why);
            }
            (Origin::Loader, Message::Progress(progress)) => {
                let (daemon, done, total) = (progress.daemon, progress.done, progress.total);
                self.event(VaultEvent::Progress { daemon, done, total });
            }
            (Origin::Loader, Message::Digest(known)) => {
                if let Some(holding) = self.holdings.get_mut(&known.daemon) {
                    holding.info.key.checkpoint.digest = Some(known.digest);
                    if let Some(conn) = self.server.and_then(|server| self.conns.get_mut(&server)) {
                        // It has no answer, so none is counted.
                        conn.link.ask(known, None).expect("a digest fits a frame");
                    }
                }
            }
            (Origin::Loader, Message::LoadFailed(failed)) => {
                self.event(VaultEvent::LoadFailed { why: failed.message });
            }
            (Origin::Server, message) => self.from_server(now, id, request, message),
            (_, other) => {
                let why = format!("unknown command {} ({})", other.kind(), other.name());
                self.refuse(id, request, ErrorCode::UnknownCommand, &why);
            }
        }
    }

    fn from_server(&mut self, now: Now, id: ConnId, request: u32, message: Message) {
        let answers = !matches!(
            message,
            Message::Release(_) | Message::Report(_) | Message::Stop(_)
        );
        if let Some(conn) = self.conns.get_mut(&id)
            && answers
        {
            conn.unanswered = conn.unanswered.saturating_sub(1);
            conn.heard = now;
        }
        match message {
            Message::Leading(_) => {
                let daemons: Vec<DaemonId> = self.holdings.keys().copied().collect();
                for daemon in daemons {
                    self.define(now, daemon);
                    self.arm(now, daemon);
                }
            }
            Message::Defined(defined) => {
                if let Some(holding) = self.holdings.get_mut(&defined.daemon) {
                    holding.mirrored = holding.content.is_err();
                }
            }
            Message::Published(published) => {
                if let Some(holding) = self.holdings.get_mut(&published.daemon) {
                    let current = holding.content.as_ref().ok().map(|content| content.generation);
                    holding.mirrored = current.is_none_or(|current| current == published.generation);
                }
            }
            Message::Release(release) => self.release(id, request, &release),
            Message::Report(Report {
                daemon,
                generation,
                import_failed: why,
            }) => {
                self.reply(id, request, Reported {});
                self.event(VaultEvent::ImportFailed {
                    daemon,
                    generation,
                    why,
                });
            }
            Message::Stop(_) => {
                self.reply(id, request, Stopping {});
                self.event(VaultEvent::StopRequested);
            }
            Message::Stopping(_) => {}
            Message::Failure(failure) => self.give_up(id, failure.message),
            other => self.give_up(id, format!("it sent a {} message", other.name())),
        }
    }

    /// Gives the server a daemon, with lock and listener.
    fn define(&mut self, now: Now, daemon: DaemonId) {
        let Some(holding) = self.holdings.get(&daemon) else {
            return;
        };
        let holds = match &holding.content {
            Err(holds) => *holds,
            // It is armed next; until then the server lets nobody in.
            Ok(content) => Holds::Content(content.generation),
        };
        let define = Define {
            daemon,
            info: holding.info.clone(),
            holds,
        };
        let ends = Arc::clone(&holding.ends);
        self.ask_server(now, define, Some(ends));
    }

    /// Gives the server a daemon's content.
    fn arm(&mut self, now: Now, daemon: DaemonId) {
        let Some(Holding {
            info,
            content: Ok(content),
            ..
        }) = self.holdings.get(&daemon)
        else {
            return;
        };
        let publish = Publish {
            daemon,
            generation: Some(content.generation),
            expects: Expects::Empty,
            key: info.key.clone(),
            content: content.info.clone(),
        };
        let descriptors = Arc::clone(&content.descriptors);
        self.ask_server(now, publish, Some(descriptors));
    }

    fn publish(
        &mut self,
        now: Now,
        id: ConnId,
        request: u32,
        publish: Publish,
        descriptors: Vec<(Facts, F)>,
    ) {
        let checked = check_descriptors(&publish.content, descriptors.iter().map(|(facts, _)| facts));
        let descriptors = Arc::new(
            descriptors
                .into_iter()
                .map(|(_, descriptor)| descriptor)
                .collect(),
        );
        let daemon = publish.daemon;
        let refusal = match (self.holdings.get(&daemon), checked) {
            (None, _) => Some((ErrorCode::Malformed, format!("there is no daemon {daemon}"))),
            (_, Err(error)) => Some((ErrorCode::BadDescriptors, error.to_string())),
            (Some(holding), Ok(())) => conflict(holding, &publish).map(|why| (ErrorCode::Conflict, why)),
        };
        if let Some((code, why)) = refusal {
            self.reaper.bury(descriptors, None);
            return self.refuse(id, request, code, &why);
        }
        let generation = Generation {
            epoch: self.epoch,
            number: self.next_number,
        };
        self.next_number += 1;
        if let Some(holding) = self.holdings.get_mut(&daemon) {
            let known = holding.info.key.checkpoint.digest;
            let same = holding.info.key.compare(&publish.key) == Comparison::Same;
            holding.info.key = publish.key;
            // A digest that came before the content is still that of the same files.
            if same && holding.info.key.checkpoint.digest.is_none() {
                holding.info.key.checkpoint.digest = known;
            }
            holding.mirrored = false;
            let content = Content {
                generation,
                info: publish.content,
                descriptors,
            };
            if let Ok(old) = std::mem::replace(&mut holding.content, Ok(content)) {
                self.reaper.bury(old.descriptors, None);
            }
        }
        self.was_armed = false;
        self.reply(id, request, Published { daemon, generation });
        self.event(VaultEvent::Stored { daemon, generation });
        self.arm(now, daemon);
    }

    fn release(&mut self, id: ConnId, request: u32, release: &Release) {
        let Some(holding) = self.holdings.get_mut(&release.daemon) else {
            let why = format!("there is no daemon {}", release.daemon);
            return self.refuse(id, request, ErrorCode::Malformed, &why);
        };
        let current = match &holding.content {
            Ok(content) => content.generation,
            Err(_) => return self.reply(id, request, Released {}),
        };
        if release.generation.is_some_and(|generation| generation != current) {
            let why = format!("nothing was released: the current generation is {current}");
            return self.refuse(id, request, ErrorCode::StaleGeneration, &why);
        }
        if let Ok(content) = std::mem::replace(&mut holding.content, Err(Holds::Released(current))) {
            self.reaper
                .bury(content.descriptors, Some(ReleaseTicket { conn: id, request }));
        }
        self.event(VaultEvent::Released {
            daemon: release.daemon,
            generation: current,
        });
    }

    /// Ends the connection to a server that does not do its part.
    fn give_up(&mut self, id: ConnId, why: String) {
        if let Some(mut conn) = self.conns.remove(&id) {
            self.reaper.bury_all(conn.link.close());
            self.output.push_back(Output::Close { conn: id });
            self.gone(id, conn.origin, why);
        }
    }

    fn gone(&mut self, id: ConnId, origin: Origin, why: String) {
        match origin {
            Origin::Loader if why.is_empty() => self.event(VaultEvent::LoaderGone),
            Origin::Loader => self.event(VaultEvent::LoadFailed { why }),
            _ => {
                if self.server == Some(id) {
                    self.server = None;
                    self.was_armed = false;
                    for holding in self.holdings.values_mut() {
                        holding.mirrored = false;
                    }
                    self.event(VaultEvent::ServerGone { why });
                }
            }
        }
    }

    fn serve(&mut self, now: Now, id: ConnId) {
        while let Some(conn) = self.conns.get_mut(&id) {
            let origin = conn.origin;
            // A loader's next request waits until the last answer has left. A server is always
            // heard, lest both wait for each other; what it may leave unread is bounded instead.
            if origin == Origin::Loader && !conn.link.is_flushed() {
                return;
            }
            if conn.link.queued() > MAX_UNREAD + 2 * self.holdings.len() {
                return self.give_up(id, "it does not read what it is sent".to_owned());
            }
            match conn.link.next_frame() {
                Ok(None) => return,
                Ok(Some(frame)) => self.frame(now, id, origin, frame),
                Err(error) => return self.give_up(id, error.to_string()),
            }
        }
    }

    fn settle(&mut self) {
        self.reaper.sweep();
        for ticket in self.reaper.closed() {
            self.reply(ticket.conn, ticket.request, Released {});
        }
        let armed = self.server.is_some() && self.holdings.values().all(|holding| holding.mirrored);
        if armed && !self.was_armed {
            let complete = self.holdings.values().all(|holding| holding.content.is_ok());
            self.event(VaultEvent::Armed { complete });
        }
        self.was_armed = armed;
        for (&id, conn) in &mut self.conns {
            let flushed = conn.link.is_flushed();
            let interest = (flushed || conn.origin != Origin::Loader, !flushed);
            if interest != conn.interest {
                conn.interest = interest;
                self.output.push_back(Output::Interest {
                    conn: id,
                    read: interest.0,
                    write: interest.1,
                });
            }
        }
    }
}

/// Why this publish may not replace what the holding has.
fn conflict<F>(holding: &Holding<F>, publish: &Publish) -> Option<String> {
    if publish.generation.is_some() {
        return Some("only the vault names generations".to_owned());
    }
    if let Comparison::Different(fields) = holding.info.key.compare(&publish.key) {
        return Some(format!(
            "the content's key differs from the daemon's in {}",
            fields.join(", ")
        ));
    }
    let current = holding.content.as_ref().ok().map(|content| content.generation);
    match (publish.expects, current) {
        (Expects::Empty, None) => None,
        (Expects::Generation(expected), Some(current)) if expected == current => None,
        (_, Some(current)) => Some(format!("generation {current} was published meanwhile")),
        (_, None) => Some("the content that this was to replace is gone".to_owned()),
    }
}

impl<F> Machine<F> for Vault<F> {
    type Event = VaultEvent;

    fn accept(&mut self, now: Now, origin: Origin, _peer: Peer) -> ConnId {
        let id = ConnId(self.next_conn);
        self.next_conn += 1;
        if let Some(old) = self.server.filter(|_| origin == Origin::Server) {
            self.give_up(old, "another server takes its place".to_owned());
        }
        let link = Link::default();
        self.conns.insert(
            id,
            Conn {
                origin,
                link,
                unanswered: 0,
                heard: now,
                interest: (false, false),
            },
        );
        if origin == Origin::Server {
            self.server = Some(id);
            self.ask_server(now, Lead { pid: self.pid }, None);
        }
        self.settle();
        id
    }

    fn accept_failed(&mut self, _now: Now) {}

    fn receive(
        &mut self,
        now: Now,
        id: ConnId,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    ) {
        let received = match self.conns.get_mut(&id) {
            Some(conn) => conn.link.receive(bytes, descriptors, truncated),
            None => {
                let late = descriptors
                    .into_iter()
                    .map(|(_, descriptor)| descriptor)
                    .collect();
                self.reaper.bury_all(late);
                Ok(())
            }
        };
        match received {
            Ok(()) => self.serve(now, id),
            Err(error) => self.give_up(id, error.to_string()),
        }
        self.settle();
    }

    fn outgoing(&self, conn: ConnId) -> Option<Outgoing<'_, F>> {
        self.conns.get(&conn)?.link.outgoing()
    }

    fn wrote(&mut self, now: Now, id: ConnId, bytes: usize) {
        if let Some(conn) = self.conns.get_mut(&id)
            && bytes > 0
        {
            conn.link.wrote(bytes);
            conn.heard = now;
            self.serve(now, id);
        }
        self.settle();
    }

    fn hangup(&mut self, _now: Now, id: ConnId) {
        self.give_up(id, String::new());
        self.settle();
    }

    fn discarded(&mut self, _now: Now, id: DiscardId) {
        self.reaper.discarded(id);
        self.settle();
    }

    fn tick(&mut self, now: Now) {
        let late = self.server.filter(|server| {
            self.conns
                .get(server)
                .is_some_and(|conn| conn.unanswered > 0 && now >= conn.heard + SERVER_ANSWERS_WITHIN)
        });
        if let Some(server) = late {
            let seconds = SERVER_ANSWERS_WITHIN.0 / 1_000_000;
            self.give_up(server, format!("it did not answer within {seconds} s"));
        }
        self.settle();
    }

    fn poll(&mut self) -> Output<F, VaultEvent> {
        if let Some(output) = self.output.pop_front() {
            return output;
        }
        if let Some((id, descriptor)) = self.reaper.next_discard() {
            return Output::Discard { id, descriptor };
        }
        let server = self.server.and_then(|server| self.conns.get(&server));
        let wake_at = server
            .filter(|conn| conn.unanswered > 0)
            .map(|conn| conn.heard + SERVER_ANSWERS_WITHIN);
        Output::Idle {
            wake_at,
            accepting: true,
        }
    }
}
