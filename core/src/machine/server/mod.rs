//! The server: serves the daemons of one node, and follows the vault.
//!
//! It is a replaceable copy: what it holds came from the vault, and goes to a new server the same
//! way. It needs no device, so no fault of one can reach it.

mod control;
mod daemon;
mod machine;
mod public;
mod publishing;
mod tally;

#[cfg(any(test, feature = "faults"))]
use super::contain::faults;
use super::contain::{Panicked, contain};
use super::link::Link;
use super::reap::Reaper;
use super::{ConnId, Ends, Origin, Output};
use crate::content::{Difference, Generation};
use crate::peer::Peer;
use crate::time::{Now, Span};
use crate::wire::message::{Confinement, DaemonId, DaemonInfo, ErrorCode};
use crate::wire::{Frame, FrameError, Message};
use daemon::{Daemon, PendingRelease};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What a server allows its clients, all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections that are no lease. At the limit, the one that has been quiet longest makes room.
    pub connections: usize,
    /// Leases and watches, which may stay silent for ever.
    pub leases: usize,
    /// How many times one connection may be sent content: each time, descriptors are in flight
    /// until the client reads them, and the kernel counts those for the whole user.
    pub states_per_connection: u32,
    /// What all connections together may have sent of requests that were not answered yet, in bytes; a
    /// descriptor counts as 4 KiB. Beyond it, the connection with the most is ended.
    pub unanswered: usize,
    /// How long a connection may go without a whole request.
    pub idle: Span,
    /// How long a reply may stay unread without progress.
    pub unread: Span,
    /// How long a release, or a stop, may take before who waits for it is sent away. Closing memory
    /// takes about a second for each 4 GiB.
    pub waiting: Span,
    /// How long a new server waits for a vault to take the lead.
    pub leaderless: Span,
    /// How often a server that no vault leads any more looks whether it can be found.
    pub look: Span,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 512,
            leases: 8192,
            states_per_connection: 8,
            unanswered: 8 << 20,
            idle: Span::secs(10),
            unread: Span::secs(5),
            waiting: Span::secs(120),
            leaderless: Span::secs(30),
            look: Span::secs(5),
        }
    }
}

impl Limits {
    /// The same for a process that may have so many descriptors open: leases take up to half of what a few
    /// daemons leave, so that there are always some for who wants an answer.
    pub fn within(self, descriptors: u64) -> Limits {
        const DAEMONS: u64 = 64;
        let most = descriptors.saturating_sub(DAEMONS) / 2;
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        Limits {
            leases: self.leases.min(most),
            ..self
        }
    }
}

/// What a server tells its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent {
    /// A vault took the lead.
    Led {
        /// The launcher's process.
        pid: u32,
    },
    /// The launcher is gone; the server goes on with what it has.
    LeaderGone,
    /// The owner shall look whether an engine or the next launcher finds this server, and say
    /// [`looked`](Server::looked).
    Look,
    /// Nobody finds it, twice in a row, and so it ends.
    CutOff,
    /// A daemon serves new content.
    Serving {
        /// The daemon.
        daemon: DaemonId,
        /// The content's generation.
        generation: Generation,
    },
    /// A client published what this daemon serves now.
    Published {
        /// The daemon.
        daemon: DaemonId,
        /// The publisher's process.
        pid: u32,
        /// The content's generation.
        generation: Generation,
        /// Tensors, aliases not counted.
        tensors: u32,
        /// Bytes of all regions.
        bytes: u64,
    },
    /// Content was sent to an engine.
    Sent {
        /// The daemon.
        daemon: DaemonId,
        /// The engine's process.
        pid: u32,
        /// The content's generation.
        generation: Generation,
        /// Tensors, aliases not counted.
        tensors: u32,
        /// Aliases.
        aliases: u32,
    },
    /// An engine's key differs.
    Mismatched {
        /// The daemon.
        daemon: DaemonId,
        /// The engine's process.
        pid: u32,
        /// The fields that differ.
        fields: Vec<Difference>,
    },
    /// An engine leased a generation.
    Leased {
        /// The daemon.
        daemon: DaemonId,
        /// The engine's process.
        pid: u32,
        /// The generation.
        generation: Generation,
    },
    /// A lease ended.
    LeaseEnded {
        /// The daemon.
        daemon: DaemonId,
        /// The engine's process.
        pid: u32,
        /// The generation.
        generation: Generation,
    },
    /// A generation was let go, here and in the vault.
    Released {
        /// The daemon.
        daemon: DaemonId,
        /// The generation.
        generation: Generation,
    },
    /// An engine could not import the content.
    ImportFailed {
        /// The daemon.
        daemon: DaemonId,
        /// The engine's process.
        pid: u32,
        /// What the import said.
        why: String,
    },
    /// The device lost a generation.
    Lost {
        /// The daemon.
        daemon: DaemonId,
        /// The generation.
        generation: Generation,
    },
    /// A connection was ended for what its peer did, or failed to do.
    Ended {
        /// Where it came in.
        origin: Origin,
        /// The peer.
        peer: Peer,
        /// What was wrong.
        why: String,
    },
    /// Handling what a peer said panicked, which is a bug of weightd's: its connection was ended.
    Panicked {
        /// Where it came in.
        origin: Origin,
        /// The peer.
        peer: Peer,
        /// What the panic said.
        why: String,
    },
    /// The server shall end.
    Stop {
        /// Whether there is no launcher, so that the server itself must remove its sockets.
        orphaned: bool,
    },
}

/// Whether a server that no vault leads any more can be found.
#[derive(Debug)]
struct Search {
    /// When to look next.
    at: Now,
    /// It was not found the last time.
    missed: bool,
}

#[derive(Debug)]
struct Conn<F> {
    origin: Origin,
    peer: Peer,
    link: Link<F>,
    /// A lease on a generation, or a watch without one.
    watch: Option<Option<Generation>>,
    states_sent: u32,
    /// Waits for an answer that we owe.
    waiting: bool,
    /// No more requests; closed once flushed.
    closing: bool,
    last_request: Now,
    last_write: Now,
    interest: (bool, bool),
    deadline: Option<Now>,
    /// Since when the start of a request waits for the rest of it.
    mid_frame_since: Option<Now>,
    /// What it counts for in [`Server::held`].
    held: usize,
}

/// See the module.
#[derive(Debug)]
pub struct Server<F> {
    version: String,
    pid: u32,
    uid: u32,
    started: Now,
    limits: Limits,
    confinement: Confinement,
    /// The control socket's, held for the next vault.
    control: Option<Ends<F>>,
    /// Whether names stay when this server ends without a launcher.
    names_stay: bool,
    daemons: BTreeMap<DaemonId, Daemon<F>>,
    conns: BTreeMap<ConnId, Conn<F>>,
    /// What all of them have sent and was not answered yet, as [`Limits::unanswered`] counts it.
    held: usize,
    /// Leases and watches among the connections.
    watching: usize,
    next_conn: u64,
    leader: Option<(ConnId, u32)>,
    /// Whether a vault ever led.
    was_led: bool,
    /// Whether the last vault had not loaded everything yet when it left.
    unloaded: bool,
    /// Whether a vault took over what another had left, so that all sockets have their names.
    adopted: bool,
    releases: BTreeMap<(DaemonId, Generation), PendingRelease>,
    reaper: Reaper<F, (DaemonId, Generation)>,
    deadlines: BTreeSet<(Now, ConnId)>,
    /// No connection is accepted before this moment.
    paused_until: Option<Now>,
    /// While no vault leads any more.
    search: Option<Search>,
    /// Our request to the vault to stop, while it is unanswered.
    asked_to_stop: Option<u32>,
    /// The server ends at this moment or earlier; and whether it is orphaned.
    stopping: Option<(Now, bool)>,
    stopped: bool,
    output: VecDeque<Output<F, ServerEvent>>,
}

impl<F> Server<F> {
    /// A server of process `pid` and user `uid`, without daemons, that waits for a vault.
    pub fn new(now: Now, version: impl Into<String>, pid: u32, uid: u32, limits: Limits) -> Server<F> {
        Server {
            version: version.into(),
            pid,
            uid,
            started: now,
            limits,
            confinement: Confinement::default(),
            control: None,
            names_stay: false,
            daemons: BTreeMap::new(),
            conns: BTreeMap::new(),
            held: 0,
            watching: 0,
            next_conn: 0,
            leader: None,
            was_led: false,
            unloaded: false,
            adopted: false,
            releases: BTreeMap::new(),
            reaper: Reaper::default(),
            deadlines: BTreeSet::new(),
            paused_until: None,
            search: None,
            asked_to_stop: None,
            stopping: None,
            stopped: false,
            output: VecDeque::new(),
        }
    }

    /// Says, to whoever asks for the status, that its process is confined like this.
    pub fn confined(self, confinement: Confinement) -> Server<F> {
        Server { confinement, ..self }
    }

    /// The path of each daemon's socket, and the lock on it.
    pub fn sockets(&self) -> impl Iterator<Item = (&str, &F)> {
        let daemons = self.daemons.values();
        daemons.map(|daemon| (daemon.info.socket.as_str(), daemon.ends.lock()))
    }

    /// Whether another launcher will go on with the sockets: an orphaned server that ends leaves them then, and
    /// else removes those whose lock file is still that one.
    pub fn names_stay(&self) -> bool {
        self.names_stay
    }

    /// Lock and listener of the control socket, where the launcher gave them.
    pub fn control_ends(&self) -> Option<&Ends<F>> {
        self.control.as_ref()
    }

    /// What a daemon is.
    pub fn info(&self, daemon: DaemonId) -> Option<&DaemonInfo> {
        self.daemons.get(&daemon).map(|daemon| &daemon.info)
    }

    /// What the owner saw when it was told to [`Look`](ServerEvent::Look). Once may be chance: whoever moves a directory
    /// may move it back.
    pub fn looked(&mut self, now: Now, found: bool) {
        if let Some(search) = &mut self.search
            && std::mem::replace(&mut search.missed, !found)
            && !found
        {
            self.event(ServerEvent::CutOff);
            self.stop(now, true);
        }
        self.settle(now, None);
    }

    fn event(&mut self, event: ServerEvent) {
        self.output.push_back(Output::Event(event));
    }

    /// Answers what has arrived, one reply at a time: the next request waits until the last reply
    /// has left, which is what bounds a client's claim on us.
    fn serve(&mut self, now: Now, id: ConnId) {
        loop {
            let mut frame = None;
            let handled = contain(|| {
                frame = self.next_frame(now, id)?;
                if let Some(frame) = &mut frame {
                    self.frame(now, id, frame);
                }
                Ok(())
            });
            let request = frame.as_ref().map(|frame| frame.request);
            // What it brought along and nobody took.
            self.reaper
                .bury_received(frame.into_iter().flat_map(|frame| frame.descriptors));
            match handled {
                Ok(Ok(())) if request.is_some() => {}
                Ok(Ok(())) => return,
                Ok(Err(error)) => {
                    let code = match error {
                        FrameError::Version(_) => ErrorCode::Version,
                        FrameError::MissingDescriptors { .. }
                        | FrameError::StrayDescriptors(_)
                        | FrameError::Truncated => ErrorCode::BadDescriptors,
                        _ => ErrorCode::Malformed,
                    };
                    return self.expel(id, 0, code, &error.to_string());
                }
                Err(panicked) => return self.panicked(id, request.unwrap_or(0), panicked),
            }
        }
    }

    /// The next request, unless something else comes first.
    fn next_frame(&mut self, now: Now, id: ConnId) -> Result<Option<Frame<F>>, FrameError> {
        let Some(conn) = self.conns.get_mut(&id) else {
            return Ok(None);
        };
        if conn.closing || conn.waiting || !conn.link.is_flushed() {
            return Ok(None);
        }
        let frame = conn.link.next_frame()?;
        if frame.is_some() {
            conn.last_request = now;
            conn.mid_frame_since = None;
        }
        Ok(frame)
    }

    /// Answers a request that has waited for something that others did.
    fn answer(&mut self, now: Now, id: ConnId, request: u32, message: impl Into<Message>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.waiting = false;
        conn.last_request = now;
        if let Err(panicked) = contain(|| conn.link.send(request, &message.into(), None)) {
            self.panicked(id, request, panicked);
        }
    }

    /// Ends the connection whose input found a bug.
    fn panicked(&mut self, id: ConnId, request: u32, Panicked(why): Panicked) {
        let told = "this is a bug in weightd: handling the request panicked, and the daemon's log says where; \
                    please report it";
        if let Some((origin, peer)) = self.send_away(id, request, ErrorCode::Internal, told) {
            self.event(ServerEvent::Panicked { origin, peer, why });
        }
    }

    /// Does what a frame asks for, and takes what it brought along.
    fn frame(&mut self, now: Now, id: ConnId, frame: &mut Frame<F>) {
        let Frame {
            kind,
            request,
            ref body,
            ref mut descriptors,
        } = *frame;
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        #[cfg(any(test, feature = "faults"))]
        faults::point(faults::AT_ONCE, request);
        let message = match Message::decode(kind, body) {
            Ok(message) => message,
            Err(error) => return self.refuse(id, request, error.code(), &error.to_string()),
        };
        match (conn.origin, message) {
            (Origin::Daemon(daemon), Message::Publish(publish)) => {
                self.publish(id, daemon, request, publish, descriptors);
            }
            (Origin::Daemon(daemon), message) if descriptors.is_empty() => {
                self.public(now, id, daemon, request, message);
            }
            (Origin::Control, message) => self.control(now, id, request, message, descriptors),
            (_, message) => {
                let why = format!("a {} message owns no descriptors", message.name());
                self.expel(id, request, ErrorCode::BadDescriptors, &why);
            }
        }
    }

    /// Ends a connection for what its peer did: an error frame that names it, then the close.
    fn expel(&mut self, id: ConnId, request: u32, code: ErrorCode, why: &str) {
        if let Some((origin, peer)) = self.send_away(id, request, code, why) {
            let why = why.to_owned();
            self.event(ServerEvent::Ended { origin, peer, why });
        }
    }

    /// The same, of which the caller tells; returns whose connection it was.
    fn send_away(&mut self, id: ConnId, request: u32, code: ErrorCode, why: &str) -> Option<(Origin, Peer)> {
        let conn = self.conns.get_mut(&id)?;
        conn.link.fail(request, code, code == ErrorCode::Busy, why);
        conn.closing = true;
        // This was its last answer.
        conn.waiting = false;
        let (origin, peer) = (conn.origin, conn.peer);
        let unread = conn.link.forget_incoming();
        self.reaper.bury_all(unread);
        self.waits_no_more(id);
        self.count_refusal(origin, code);
        Some((origin, peer))
    }

    /// Forgets a connection and what hung on it.
    fn close(&mut self, id: ConnId) {
        let Some(mut conn) = self.conns.remove(&id) else {
            return;
        };
        if let Some(deadline) = conn.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        self.held -= conn.held;
        self.watching -= usize::from(conn.watch.is_some());
        self.reaper.bury_all(conn.link.close());
        self.output.push_back(Output::Close { conn: id });
        if let (Origin::Daemon(number), Some(Some(generation))) = (conn.origin, conn.watch)
            && let Some(daemon) = self.daemons.get_mut(&number)
        {
            daemon.unlease(generation);
            self.event(ServerEvent::LeaseEnded {
                daemon: number,
                pid: conn.peer.pid,
                generation,
            });
        }
        self.waits_no_more(id);
        if self.leader.is_some_and(|(leader, _)| leader == id) {
            self.lost_leader();
        }
    }

    /// What this connection waits for goes on without it.
    fn waits_no_more(&mut self, id: ConnId) {
        for release in self.releases.values_mut() {
            release.waiters.retain(|(waiter, _)| *waiter != id);
        }
        let publications = self
            .daemons
            .values_mut()
            .flat_map(|daemon| &mut daemon.publication);
        for publication in publications {
            publication.waiter.take_if(|(waiter, _)| *waiter == id);
        }
    }

    /// Brings everything that follows from state up to date: what is closed, who waits for it, and
    /// what this connection waits for.
    fn settle(&mut self, now: Now, touched: Option<ConnId>) {
        let mut touched: Vec<ConnId> = touched.into_iter().collect();
        loop {
            for id in touched {
                self.serve(now, id);
                self.refresh(now, id);
            }
            if let Some((leader, _)) = self.leader {
                self.refresh(now, leader);
            }
            self.reaper.sweep();
            for which in self.reaper.closed() {
                if let Some(release) = self.releases.get_mut(&which) {
                    release.closed_here = true;
                }
            }
            touched = self.answer_releases(now);
            touched.extend(self.answer_publications(now));
            if touched.is_empty() {
                break;
            }
        }
        self.end_if_done(now);
    }

    /// A server that holds nothing has no purpose once its launcher is gone; nor has one whose launcher
    /// had not loaded everything, since no socket has its name until then.
    fn end_if_done(&mut self, now: Now) {
        let orphaned = self.was_led && self.leader.is_none();
        let search = || Search {
            at: now + self.limits.look,
            missed: false,
        };
        self.search = orphaned.then(|| self.search.take().unwrap_or_else(search));
        let holds_nothing = !self.daemons.values().any(|daemon| daemon.content().is_some());
        if orphaned && (holds_nothing || self.unloaded) && self.releases.is_empty() {
            self.stop(now, true);
        }
        let flushed = || self.conns.values().all(|conn| conn.link.is_flushed());
        if let Some((by, orphaned)) = self.stopping
            && !self.stopped
            && (now >= by || flushed())
        {
            self.stopped = true;
            self.event(ServerEvent::Stop { orphaned });
        }
    }

    /// Tells the driver what this connection is waiting for, and sets its deadline.
    fn refresh(&mut self, now: Now, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let held = conn.link.held();
        self.held = self.held - conn.held + held;
        conn.held = held;
        let flushed = conn.link.is_flushed();
        if conn.closing && flushed {
            return self.close(id);
        }
        if !flushed && !conn.interest.1 {
            conn.last_write = now;
        }
        let unflushed = (!flushed).then(|| conn.last_write + self.limits.unread);
        let mid_frame = flushed && !conn.waiting && conn.link.is_mid_frame();
        conn.mid_frame_since = mid_frame.then(|| conn.mid_frame_since.unwrap_or(now));
        let leads = self.leader.is_some_and(|(leader, _)| leader == id);
        let silent = match conn.watch {
            _ if conn.closing => None,
            _ if conn.waiting => Some(conn.last_request + self.limits.waiting),
            None if !leads => Some(conn.last_request + self.limits.idle),
            // A lease may be silent for ever, but not in the middle of a request.
            Some(_) => conn.mid_frame_since.map(|since| since + self.limits.idle),
            None => None,
        };
        let deadline = unflushed.into_iter().chain(silent).min();
        if deadline != conn.deadline {
            if let Some(old) = conn.deadline {
                self.deadlines.remove(&(old, id));
            }
            self.deadlines.extend(deadline.map(|deadline| (deadline, id)));
            conn.deadline = deadline;
        }
        let read = !conn.closing && !conn.waiting && flushed;
        let interest = (read, !flushed);
        if interest != conn.interest {
            conn.interest = interest;
            self.output.push_back(Output::Interest {
                conn: id,
                read: interest.0,
                write: interest.1,
            });
        }
    }

    /// Closes one connection that is about to end anyway.
    fn close_an_ending_one(&mut self) -> bool {
        let ending = self
            .conns
            .iter()
            .find(|(_, conn)| conn.closing)
            .map(|(&id, _)| id);
        ending.inspect(|&id| self.close(id)).is_some()
    }

    /// Ends the connection that has been quiet longest. It is told why, unless its descriptor is
    /// needed `at_once`. False where there is none.
    fn evict_quietest(&mut self, now: Now, at_once: bool) -> bool {
        let leader = self.leader.map(|(leader, _)| leader);
        let quietest = self
            .conns
            .iter()
            .filter(|(id, conn)| conn.watch.is_none() && !conn.waiting && Some(**id) != leader)
            .min_by_key(|(id, conn)| (conn.last_request, **id));
        let Some((&id, conn)) = quietest else {
            return false;
        };
        let why = "closed to make room: too many connections, and this one was quiet longest: try again";
        if at_once || !conn.link.is_flushed() {
            let (origin, peer) = (conn.origin, conn.peer);
            self.event(ServerEvent::Ended {
                origin,
                peer,
                why: why.to_owned(),
            });
            self.close(id);
        } else {
            self.expel(id, 0, ErrorCode::Busy, why);
            self.refresh(now, id);
        }
        true
    }

    /// Ends the connections that have sent most of what is not answered, until the rest is within bounds.
    fn end_hoarders(&mut self, now: Now) {
        let leader = self.leader.map(|(leader, _)| leader);
        while self.held > self.limits.unanswered {
            let holding = |(id, conn): &(&ConnId, &Conn<F>)| conn.held > 0 && Some(**id) != leader;
            let others = self.conns.iter().filter(holding);
            let Some((&id, _)) = others.max_by_key(|(_, conn)| conn.held) else {
                return;
            };
            let why = "too much was sent here at once that is not answered, most of it on this connection: try again";
            self.expel(id, 0, ErrorCode::Busy, why);
            self.refresh(now, id);
        }
    }

    /// How many connections count against their limit, whatever the number of leases.
    fn connection_count(&self) -> usize {
        let leading = self.leader.and_then(|(leader, _)| self.conns.get(&leader));
        let leads = leading.is_some_and(|conn| conn.watch.is_none());
        let count = self.conns.len() - self.watching - usize::from(leads);
        debug_assert_eq!(count, self.connections().count(), "as counted one by one");
        count
    }

    /// Connections that count against their limit: no leases, and not the vault's.
    fn connections(&self) -> impl Iterator<Item = &Conn<F>> {
        let leader = self.leader.map(|(leader, _)| leader);
        self.conns
            .iter()
            .filter(move |(id, conn)| conn.watch.is_none() && Some(**id) != leader)
            .map(|(_, conn)| conn)
    }
}
