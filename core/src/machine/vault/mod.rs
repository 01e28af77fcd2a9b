//! The vault: the only truth about what a node holds.
//!
//! It lives in the launcher. It names generations, holds every descriptor (lock, listener,
//! manifest, regions), arms a server with them, and arms the next one when that server dies.

mod messages;

use super::link::Link;
use super::reap::{Bundle, DiscardId, Reaper};
use super::{ConnId, Machine, Origin, Outgoing, Output};
use crate::content::Generation;
use crate::peer::{Facts, Peer};
use crate::time::{Now, Span};
use crate::wire::message::{
    ContentInfo, DaemonId, DaemonInfo, ErrorCode, GetStatus, Holds, Lead, Message, Released, Stop,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Answers that a server may leave unread, beyond what arms it.
const MAX_UNREAD: usize = 1024;
/// How long a server may take to answer before it counts as dead.
const SERVER_ANSWERS_WITHIN: Span = Span::secs(10);
/// How long a server may be left alone before it is asked whether it is still there: one that was
/// stopped, or hangs, keeps its connections and answers nobody.
const SERVER_ASKED_EVERY: Span = Span::secs(5);

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
    /// The device lost a daemon's content, or its publisher took it along.
    Lost {
        /// The daemon.
        daemon: DaemonId,
        /// The generation that is lost.
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
    /// Who published it, where it lives no longer than that connection: memory of a legacy CUDA IPC
    /// handle is its publisher's own.
    lives_with: Option<ConnId>,
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
    /// Whether the server follows: it is told nothing before.
    leads: bool,
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
            leads: false,
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

    /// What a daemon holds: its generation, what is said of it, and the descriptors of the manifest and
    /// of the regions that have one.
    pub fn content(&self, daemon: DaemonId) -> Option<(Generation, &ContentInfo, &[F])> {
        let content = self.holdings.get(&daemon)?.content.as_ref().ok()?;
        Some((content.generation, &content.info, &content.descriptors))
    }

    /// The device lost a daemon's content of this generation: it is let go, and the next publication
    /// makes a new generation. Nothing happens where the daemon does not hold this generation.
    pub fn lost(&mut self, daemon: DaemonId, generation: Generation) {
        self.lose(daemon, generation);
        self.settle();
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
            Origin::Loader => {
                for (daemon, generation) in self.living_with(id) {
                    self.lose(daemon, generation);
                }
                if !why.is_empty() {
                    self.event(VaultEvent::LoadFailed { why });
                }
                self.event(VaultEvent::LoaderGone);
            }
            _ => {
                if self.server == Some(id) {
                    self.server = None;
                    self.leads = false;
                    self.was_armed = false;
                    for holding in self.holdings.values_mut() {
                        holding.mirrored = false;
                    }
                    self.event(VaultEvent::ServerGone { why });
                }
            }
        }
    }

    /// The content that ends with this connection.
    fn living_with(&self, id: ConnId) -> Vec<(DaemonId, Generation)> {
        let content = |(&daemon, holding): (&DaemonId, &Holding<F>)| {
            let content = holding.content.as_ref().ok();
            let content = content.filter(|content| content.lives_with == Some(id))?;
            Some((daemon, content.generation))
        };
        self.holdings.iter().filter_map(content).collect()
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
                self.reaper.bury_received(descriptors);
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
        let idle = self.server.and_then(|server| self.conns.get(&server));
        if idle.is_some_and(|conn| conn.unanswered == 0 && now >= conn.heard + SERVER_ASKED_EVERY) {
            self.ask_server(now, GetStatus {}, None);
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
        let wake_at = server.map(|conn| match conn.unanswered {
            0 => conn.heard + SERVER_ASKED_EVERY,
            _ => conn.heard + SERVER_ANSWERS_WITHIN,
        });
        Output::Idle {
            wake_at,
            accepting: true,
        }
    }
}
