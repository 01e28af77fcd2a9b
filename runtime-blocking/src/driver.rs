//! The driver of a machine with many connections.

use crate::poller::{Change, Poller, Waker};
use crate::reaper::Reaper;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use weightd_core::machine::{ConnId, Ends, IN_FLIGHT_PAUSE, Machine, Origin, Output};
use weightd_core::peer::{Facts, Peer};
use weightd_core::time::Now;
use weightd_socket::listen::{AcceptError, accept};
use weightd_socket::message::{ReceiveError, SendError, receive, send};

/// Names a descriptor that is waited for.
type Token = u64;

const WAKER: Token = 0;
/// How much one read may return, and so how much one connection gets before the next has its turn.
const READ_BYTES: usize = 64 * 1024;
/// How many connections one turn accepts before others have their turn.
const ACCEPTS: usize = 64;

/// A descriptor of the caller's that the driver waits on as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watch(Token);

/// What one turn found.
#[derive(Debug)]
pub struct Turn<E> {
    /// What the machine tells its owner.
    pub events: Vec<E>,
    /// The watched descriptors that may be readable, or whose other side is gone.
    pub watched: Vec<Watch>,
    /// When to turn again, whatever else happens: now, where work is left.
    pub wake_at: Option<Now>,
}

#[derive(Debug)]
struct Socket {
    fd: OwnedFd,
    token: Token,
    readable: bool,
    writable: bool,
    /// Both directions are shut: nothing that is sent will be read.
    closed: bool,
    wants_read: bool,
    wants_write: bool,
    /// Nothing is sent for a moment.
    paused: bool,
}

#[derive(Debug)]
enum Target {
    Conn(ConnId),
    Listener(Listening, Origin),
    Watch,
}

#[derive(Debug)]
enum Listening {
    Own(OwnedFd),
    /// The machine holds it too.
    Shared(Ends<OwnedFd>),
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listening::Own(listener) => listener.as_fd(),
            Listening::Shared(ends) => ends.listener().as_fd(),
        }
    }
}

/// Moves bytes and descriptors between sockets and a machine. [`turn`](Driver::turn) never blocks;
/// wait on the driver's one descriptor ([`AsFd`]) or with [`wait`](Driver::wait).
#[derive(Debug)]
pub struct Driver<M> {
    machine: M,
    poller: Poller,
    targets: BTreeMap<Token, Target>,
    sockets: BTreeMap<ConnId, Socket>,
    /// Connections that may have something to do.
    ready: BTreeSet<ConnId>,
    /// Connections that send nothing before this moment.
    paused: BTreeSet<(Now, ConnId)>,
    /// Listeners that may have a connection.
    pending: BTreeSet<Token>,
    watched: Vec<Watch>,
    next_token: Token,
    reaper: Reaper,
    wake_at: Option<Now>,
    accepting: bool,
    buffer: Vec<u8>,
}

impl<M: Machine<OwnedFd>> Driver<M> {
    /// A driver without connections.
    pub fn new(machine: M) -> io::Result<Driver<M>> {
        let poller = Poller::new()?;
        let waker = Arc::new(Waker::new()?);
        poller.add(&*waker, WAKER, false)?;
        // Started at once: a thread that cannot be had later would end the driver and all it holds.
        let reaper = Reaper::start(waker)?;
        Ok(Driver {
            machine,
            poller,
            targets: BTreeMap::new(),
            sockets: BTreeMap::new(),
            ready: BTreeSet::new(),
            paused: BTreeSet::new(),
            pending: BTreeSet::new(),
            watched: Vec::new(),
            next_token: 1,
            reaper,
            wake_at: Some(Now(0)),
            accepting: true,
            buffer: vec![0; READ_BYTES],
        })
    }

    /// The machine, to ask it something.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// The machine, to tell it something; the next [`turn`](Driver::turn) acts on it at once.
    pub fn machine_mut(&mut self) -> &mut M {
        self.wake_at = Some(Now(0));
        &mut self.machine
    }

    /// Takes over a non-blocking, connected socket.
    pub fn add(&mut self, now: Now, socket: OwnedFd, origin: Origin, peer: Peer) -> io::Result<ConnId> {
        let token = self.register(&socket, true)?;
        let conn = self.machine.accept(now, origin, peer);
        self.targets.insert(token, Target::Conn(conn));
        self.sockets.insert(
            conn,
            Socket {
                fd: socket,
                token,
                readable: true,
                writable: true,
                closed: false,
                wants_read: false,
                wants_write: false,
                paused: false,
            },
        );
        self.wake_at = Some(Now(0));
        Ok(conn)
    }

    /// Accepts connections on a non-blocking listener.
    pub fn listen(&mut self, listener: OwnedFd, origin: Origin) -> io::Result<()> {
        self.listen_on(Listening::Own(listener), origin)
    }

    fn listen_on(&mut self, listener: Listening, origin: Origin) -> io::Result<()> {
        let token = self.register(&listener, false)?;
        self.targets.insert(token, Target::Listener(listener, origin));
        self.pending.insert(token);
        Ok(())
    }

    /// Waits on a descriptor of the caller's too, which must outlive the driver or be given to
    /// [`unwatch`](Driver::unwatch).
    pub fn watch(&mut self, descriptor: impl AsFd) -> io::Result<Watch> {
        let token = self.register(&descriptor, false)?;
        self.targets.insert(token, Target::Watch);
        Ok(Watch(token))
    }

    /// Waits on it no more, before it is closed.
    pub fn unwatch(&mut self, watch: Watch, descriptor: impl AsFd) -> io::Result<()> {
        self.targets.remove(&watch.0);
        self.poller.remove(descriptor)
    }

    /// Blocks until there is something to do, or until the time is over.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let changes: Vec<Change> = self.poller.wait(timeout)?.to_vec();
        for change in changes {
            self.note(change);
        }
        Ok(())
    }

    /// Does everything that can be done without waiting, once for each connection that is ready.
    pub fn turn(&mut self, now: Now) -> io::Result<Turn<M::Event>> {
        let mut events = Vec::new();
        self.wait(Some(Duration::ZERO))?;
        while let Some(id) = self.reaper.closed() {
            self.machine.discarded(now, id);
        }
        if self.wake_at.is_some_and(|at| at <= now) {
            self.machine.tick(now);
        }
        self.drain(&mut events)?;
        self.end_pauses(now);
        for conn in std::mem::take(&mut self.ready) {
            self.serve(now, conn, &mut events)?;
        }
        for token in std::mem::take(&mut self.pending) {
            self.accept(now, token, &mut events)?;
        }
        let paused = self.paused.first().map(|(until, _)| *until);
        let idle = self.ready.is_empty() && (self.pending.is_empty() || !self.accepting);
        let wake_at = if idle {
            self.wake_at.into_iter().chain(paused).min()
        } else {
            Some(now)
        };
        Ok(Turn {
            events,
            watched: std::mem::take(&mut self.watched),
            wake_at,
        })
    }

    fn register(&mut self, descriptor: &impl AsFd, writes: bool) -> io::Result<Token> {
        let token = self.next_token;
        self.next_token += 1;
        self.poller.add(descriptor, token, writes)?;
        Ok(token)
    }

    /// Readiness is told once for each change, so it is kept until a call would block.
    fn note(&mut self, change: Change) {
        match self.targets.get(&change.token) {
            Some(Target::Conn(conn)) => {
                if let Some(socket) = self.sockets.get_mut(conn) {
                    socket.readable |= change.readable;
                    socket.writable |= change.writable;
                    socket.closed |= change.closed;
                    self.ready.insert(*conn);
                }
            }
            Some(Target::Listener(..)) => {
                self.pending.insert(change.token);
            }
            Some(Target::Watch) => self.watched.push(Watch(change.token)),
            None => {}
        }
    }

    fn end_pauses(&mut self, now: Now) {
        while let Some(&(until, conn)) = self.paused.first()
            && until <= now
        {
            self.paused.pop_first();
            if let Some(socket) = self.sockets.get_mut(&conn) {
                socket.paused = false;
                self.ready.insert(conn);
            }
        }
    }

    /// One read, and then all writes that the socket takes.
    fn serve(&mut self, now: Now, conn: ConnId, events: &mut Vec<M::Event>) -> io::Result<()> {
        let Some(socket) = self.sockets.get_mut(&conn) else {
            return Ok(());
        };
        if socket.wants_read && socket.readable {
            let mut descriptors: Vec<(Facts, OwnedFd)> = Vec::new();
            match receive(&socket.fd, &mut self.buffer, &mut descriptors) {
                Ok(received) if received.bytes == 0 && !received.truncated => self.machine.hangup(now, conn),
                Ok(received) => {
                    let bytes = &self.buffer[..received.bytes];
                    self.machine
                        .receive(now, conn, bytes, descriptors, received.truncated);
                }
                Err(ReceiveError::WouldBlock) => socket.readable = false,
                Err(_) => self.machine.hangup(now, conn),
            }
            self.drain(events)?;
        }
        self.write(now, conn, events)?;
        if let Some(socket) = self.sockets.get(&conn) {
            if socket.closed && !socket.wants_read {
                self.machine.hangup(now, conn);
                self.drain(events)?;
            } else if socket.wants_read && socket.readable {
                self.ready.insert(conn);
            }
        }
        Ok(())
    }

    fn write(&mut self, now: Now, conn: ConnId, events: &mut Vec<M::Event>) -> io::Result<()> {
        while let Some(socket) = self.sockets.get_mut(&conn)
            && socket.wants_write
            && socket.writable
            && !socket.paused
        {
            let Some(outgoing) = self.machine.outgoing(conn) else {
                return Ok(());
            };
            let descriptors: Vec<_> = outgoing.descriptors.iter().map(AsFd::as_fd).collect();
            match send(&socket.fd, outgoing.bytes, &descriptors) {
                Ok(bytes) => self.machine.wrote(now, conn, bytes),
                Err(SendError::WouldBlock) => socket.writable = false,
                Err(SendError::TooManyInFlight) => {
                    socket.paused = true;
                    self.paused.insert((now + IN_FLIGHT_PAUSE, conn));
                }
                // What the peer sent before it left may still be read.
                Err(_) if socket.readable && socket.wants_read => {
                    socket.writable = false;
                    self.ready.insert(conn);
                }
                Err(_) => self.machine.hangup(now, conn),
            }
            self.drain(events)?;
        }
        Ok(())
    }

    fn accept(&mut self, now: Now, token: Token, events: &mut Vec<M::Event>) -> io::Result<()> {
        for _ in 0..ACCEPTS {
            if !self.accepting {
                break;
            }
            let Some(Target::Listener(listener, origin)) = self.targets.get(&token) else {
                return Ok(());
            };
            let origin = *origin;
            match accept(listener) {
                Ok(None) => return Ok(()),
                Ok(Some((socket, peer))) => match self.add(now, socket, origin, peer) {
                    Ok(conn) => {
                        self.drain(events)?;
                        // Most clients have sent their request by now.
                        self.serve(now, conn, events)?;
                    }
                    Err(_) => self.accept_failed(now, events)?,
                },
                Err(AcceptError::Exhausted) => self.accept_failed(now, events)?,
                // That one connection; the next may be fine.
                Err(AcceptError::Io(_)) => {}
            }
        }
        self.pending.insert(token);
        Ok(())
    }

    fn accept_failed(&mut self, now: Now, events: &mut Vec<M::Event>) -> io::Result<()> {
        self.machine.accept_failed(now);
        self.drain(events)
    }

    /// Does what the machine wants until it is idle.
    fn drain(&mut self, events: &mut Vec<M::Event>) -> io::Result<()> {
        loop {
            match self.machine.poll() {
                Output::Idle { wake_at, accepting } => {
                    self.wake_at = wake_at;
                    self.accepting = accepting;
                    return Ok(());
                }
                Output::Event(event) => events.push(event),
                Output::Interest { conn, read, write } => {
                    if let Some(socket) = self.sockets.get_mut(&conn) {
                        (socket.wants_read, socket.wants_write) = (read, write);
                        self.ready.insert(conn);
                    }
                }
                Output::Close { conn } => {
                    if let Some(socket) = self.sockets.remove(&conn) {
                        self.targets.remove(&socket.token);
                        self.ready.remove(&conn);
                    }
                }
                Output::Listen { daemon, ends } => {
                    self.listen_on(Listening::Shared(ends), Origin::Daemon(daemon))?
                }
                Output::Discard { id, descriptor } => self.reaper.discard(id, descriptor),
            }
        }
    }
}

impl<M> AsFd for Driver<M> {
    /// Readable when there is something to do; wait on it, never read from it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }
}
