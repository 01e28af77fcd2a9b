//! The vault: the only truth about what a node holds.
//!
//! It lives in the launcher. It names generations, holds every descriptor (lock, listener,
//! manifest, regions), arms a server with them, and arms the next one when that server dies.

mod adopt;
mod ends;
mod event;
mod inherit;
mod inventory;
mod messages;
mod publishing;

pub use adopt::Adopt;
pub use event::VaultEvent;
pub use inherit::{Follower, InheritError, Inheritance, Inherited};
pub use inventory::{Inventory, MAX_DESCRIPTION, inventory_names, is_end_name};

use super::contain::{Panicked, contain};
use super::link::Link;
use super::reap::{Bundle, DiscardId, Reaper};
use super::{ConnId, Ends, Machine, Origin, Outgoing, Output};
use crate::content::Generation;
use crate::peer::{Facts, Peer};
use crate::time::{Now, Span};
use crate::wire::FrameError;
use crate::wire::message::{
    ContentInfo, Control, DaemonId, DaemonInfo, Define, ErrorCode, Expects, GetStatus, Holds, Lead, Lost,
    Message, Publish, Released, Stop,
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
    ends: Ends<F>,
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
    /// From this revision on, the vault does not hold it.
    revision: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Vault<F> {
    pid: u32,
    epoch: u64,
    next_number: u64,
    control: Option<Ends<F>>,
    names_stay: bool,
    holdings: BTreeMap<DaemonId, Holding<F>>,
    /// Counts the changes of what is held.
    revision: u64,
    /// Copies are kept elsewhere, and those are of this revision.
    kept_elsewhere: Option<u64>,
    /// A server that came along, until the driver gives its connection.
    follower: Option<Link<F>>,
    conns: BTreeMap<ConnId, Conn<F>>,
    next_conn: u64,
    server: Option<ConnId>,
    /// Whether the server follows: it is told nothing before.
    leads: bool,
    was_armed: bool,
    reaper: Reaper<F, ReleaseTicket>,
    /// Releases whose descriptors are closed here, and perhaps not elsewhere.
    released: Vec<ReleaseTicket>,
    output: VecDeque<Output<F, VaultEvent>>,
}

impl<F> Holding<F> {
    fn holds(&self) -> Holds {
        match &self.content {
            Ok(content) => Holds::Content(content.generation),
            Err(holds) => *holds,
        }
    }

    /// Whether its content comes from the launcher, and not from whoever publishes.
    fn is_the_loaders(&self) -> bool {
        self.info.publish.is_none()
    }

    /// What gives it to a server. Where it holds content, that follows; until then the server lets
    /// nobody in.
    fn define(&self, daemon: DaemonId) -> Define {
        Define {
            daemon,
            info: self.info.clone(),
            holds: self.holds(),
        }
    }

    /// What gives its content to a server.
    fn publish(&self, daemon: DaemonId) -> Option<(Publish, Bundle<F>)> {
        let content = self.content.as_ref().ok()?;
        let publish = Publish {
            daemon,
            generation: Some(content.generation),
            expects: Expects::Empty,
            key: self.info.key.clone(),
            content: content.info.clone(),
        };
        Some((publish, Arc::clone(&content.descriptors)))
    }
}

impl<F> Vault<F> {
    /// A vault of launcher `pid`. `epoch` is random, so that no two vaults name the same generation.
    pub fn new(pid: u32, epoch: u64, daemons: impl IntoIterator<Item = Held<F>>) -> Vault<F> {
        let holding = |held: Held<F>| Holding {
            info: held.info,
            ends: Ends::new(held.lock, held.listener),
            content: Err(Holds::Empty),
            mirrored: false,
        };
        Vault::holding(pid, epoch, daemons.into_iter().map(holding))
    }

    /// A vault of launcher `pid` that goes on with what another left. What it holds keeps its
    /// generation; `epoch` is for what is published from now on.
    ///
    /// Where a server came along, the next [`Origin::Server`] is the connection that it came with, and it
    /// follows already.
    pub fn inheriting(pid: u32, epoch: u64, inheritance: Inheritance<F>) -> Vault<F> {
        let holding = |inherited: Inherited<F>| Holding {
            info: inherited.info,
            ends: inherited.ends,
            content: inherited.content,
            mirrored: false,
        };
        let daemons = inheritance.daemons.into_iter().map(holding);
        Vault {
            control: inheritance.control,
            follower: inheritance.server.map(|server| server.link),
            ..Vault::holding(pid, epoch, daemons)
        }
    }

    /// Has each server keep the lock and the listener of the control socket too, so that a later
    /// launcher can adopt it.
    pub fn with_control(self, control: Ends<F>) -> Vault<F> {
        Vault {
            control: Some(control),
            ..self
        }
    }

    fn holding(pid: u32, epoch: u64, daemons: impl Iterator<Item = Holding<F>>) -> Vault<F> {
        Vault {
            pid,
            epoch,
            next_number: 1,
            control: None,
            names_stay: false,
            holdings: (0..).zip(daemons).collect(),
            revision: 0,
            kept_elsewhere: None,
            follower: None,
            conns: BTreeMap::new(),
            next_conn: 0,
            server: None,
            leads: false,
            was_armed: false,
            reaper: Reaper::default(),
            released: Vec::new(),
            output: VecDeque::new(),
        }
    }

    /// What a daemon is.
    pub fn info(&self, daemon: DaemonId) -> Option<&DaemonInfo> {
        self.holdings.get(&daemon).map(|holding| &holding.info)
    }

    /// What a daemon holds; `None` where there is no such daemon.
    pub fn holds(&self, daemon: DaemonId) -> Option<Holds> {
        self.holdings.get(&daemon).map(Holding::holds)
    }

    /// Counts the changes of what is held, and of what is known of it.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Says that copies of all that is held, as of `revision` and of nothing older, are kept elsewhere.
    /// After the first call, a release is answered when that is true of a revision without the content.
    pub fn kept_elsewhere(&mut self, revision: u64) {
        self.kept_elsewhere = Some(revision);
        self.settle();
    }

    /// Whether the names of the daemons stay also when the server ends without a launcher, since others have
    /// copies of their locks and listeners. They do not, until this is said.
    pub fn names_stay(&mut self, stay: bool) {
        if self.names_stay != stay {
            self.names_stay = stay;
            self.give_control();
            self.settle();
        }
    }

    /// Gives a server that follows what the next launcher needs to reach it.
    fn give_control(&mut self) {
        if let Some(control) = &self.control {
            let ends = control.bundle();
            let names_stay = self.names_stay;
            self.tell_server(Control { names_stay }, Some(ends));
        }
    }

    /// Whether a server serves all that is held. One that stops to answer is noticed within 15 s.
    pub fn is_armed(&self) -> bool {
        self.server.is_some() && self.leads && self.holdings.values().all(|holding| holding.mirrored)
    }

    /// Whether every daemon was given content at least once, but for those that take it from whoever
    /// publishes.
    pub fn is_loaded(&self) -> bool {
        let unloaded = |holding: &Holding<F>| matches!(holding.content, Err(Holds::Empty));
        !self
            .holdings
            .values()
            .any(|holding| holding.is_the_loaders() && unloaded(holding))
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

    /// The server's process has ended. One that had answered ends its connection, with what it said last; one
    /// that had not may never have accepted it, and the listener, which we hold too, keeps it open.
    pub fn server_ended(&mut self) {
        if let Some(server) = self.server.filter(|_| !self.leads) {
            self.give_up(server, String::new());
        }
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

    /// A server that came along holds what we hold.
    fn follow(&mut self, now: Now, id: ConnId) {
        self.leads = true;
        self.give_control();
        let mut lost = Vec::new();
        for (&daemon, holding) in &mut self.holdings {
            holding.mirrored = true;
            if let Err(Holds::Lost(generation)) = holding.content {
                lost.push(Lost { daemon, generation });
            }
        }
        for lost in lost {
            self.tell_server(lost, None);
        }
        self.serve(now, id);
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
            let mut frame = None;
            let handled = contain(|| {
                if let Some(conn) = self.conns.get_mut(&id) {
                    frame = conn.link.next_frame()?;
                }
                if let Some(frame) = &mut frame {
                    self.frame(now, id, origin, frame);
                }
                Ok::<_, FrameError>(())
            });
            let is_over = frame.is_none();
            // What it brought along and nobody took.
            self.reaper
                .bury_received(frame.into_iter().flat_map(|frame| frame.descriptors));
            match handled {
                Ok(Ok(())) if is_over => return,
                Ok(Ok(())) => {}
                Ok(Err(error)) => return self.give_up(id, error.to_string()),
                Err(panicked) => return self.panicked(id, panicked),
            }
        }
    }

    /// Ends the connection whose input found a bug. What is held is the truth; whether the server was told all of it
    /// is not known, so where it may not have been, another one is told anew.
    fn panicked(&mut self, id: ConnId, Panicked(why): Panicked) {
        let why =
            format!("this is a bug in weightd, please report it: handling what it said panicked: {why}");
        self.give_up(id, why);
        if let Some(server) = self.server.filter(|_| self.leads && !self.is_armed()) {
            self.give_up(server, "it may not have been told all".to_owned());
        }
    }

    fn settle(&mut self) {
        self.reaper.sweep();
        self.released.extend(self.reaper.closed());
        let kept = self.kept_elsewhere.unwrap_or(u64::MAX);
        let done: Vec<ReleaseTicket> = self
            .released
            .extract_if(.., |ticket| ticket.revision <= kept)
            .collect();
        for ticket in done {
            self.reply(ticket.conn, ticket.request, Released {});
        }
        let armed = self.is_armed();
        if armed && !self.was_armed {
            let gone = |holding: &Holding<F>| matches!(holding.content, Err(Holds::Empty | Holds::Lost(_)));
            let to_load = |holding: &Holding<F>| holding.is_the_loaders() && gone(holding);
            let complete = !self.holdings.values().any(to_load);
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
        let follower = self.follower.take_if(|_| origin == Origin::Server);
        let follows = follower.is_some();
        let link = follower.unwrap_or_default();
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
            if follows {
                self.follow(now, id);
            } else {
                self.ask_server(now, Lead { pid: self.pid }, None);
            }
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
            self.give_up(
                server,
                format!("it did not answer within {SERVER_ANSWERS_WITHIN}"),
            );
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
