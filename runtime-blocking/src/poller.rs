//! Waiting for many descriptors by one, which can itself be waited for.

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

/// How many changes are told at a time; the others are told next time.
const EVENTS: usize = 256;

/// Tells what has changed: each descriptor is told once for each change, so whoever is told goes on until
/// a call would block.
#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
    changes: Vec<Change>,
}

/// What has changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    /// Names the descriptor.
    pub token: u64,
    pub readable: bool,
    pub writable: bool,
    /// Both directions are shut.
    pub closed: bool,
}

impl Poller {
    pub fn new() -> io::Result<Poller> {
        Ok(Poller {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            changes: Vec::new(),
        })
    }

    /// Waits for reading, and with `writes` for writing too. It ends with the last copy of the descriptor.
    pub fn add(&self, descriptor: impl AsFd, token: u64, writes: bool) -> io::Result<()> {
        let mut flags = EventFlags::ET | EventFlags::IN | EventFlags::RDHUP;
        if writes {
            flags |= EventFlags::OUT;
        }
        Ok(epoll::add(
            &self.epoll,
            descriptor,
            EventData::new_u64(token),
            flags,
        )?)
    }

    /// Waits for it no more.
    pub fn remove(&self, descriptor: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, descriptor)?)
    }

    /// Blocks until something changes, or the time is over.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<&[Change]> {
        // Too long to be said is as good as for ever.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events = [const { MaybeUninit::uninit() }; EVENTS];
        self.changes.clear();
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((events, _)) => self.changes.extend(events.iter().map(Change::from)),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(&self.changes)
    }
}

impl From<&Event> for Change {
    fn from(event: &Event) -> Change {
        let has = |flag| { event.flags }.contains(flag);
        let broken = has(EventFlags::ERR);
        let hung_up = has(EventFlags::HUP);
        Change {
            token: { event.data }.u64(),
            readable: has(EventFlags::IN) || has(EventFlags::RDHUP) || hung_up || broken,
            writable: has(EventFlags::OUT) || broken,
            closed: hung_up || broken,
        }
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl AsRawFd for Poller {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

/// Makes a poller tell a change, from another thread.
#[derive(Debug)]
pub(crate) struct Waker(OwnedFd);

impl Waker {
    pub fn new() -> io::Result<Waker> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Waker(eventfd(0, flags)?))
    }

    /// Fails only where nobody reads a counter that is as good as endless.
    pub fn wake(&self) -> io::Result<()> {
        rustix::io::write(&self.0, &1u64.to_ne_bytes())?;
        Ok(())
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
