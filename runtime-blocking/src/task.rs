//! What runtimes have in common: tasks, which go on by themselves but for waiting and for work that
//! blocks.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Something that a runtime carries to its end, without knowing what it is.
///
/// Call [`turn`](Task::turn), do what it says, and call it again. A turn never blocks. Waiting is
/// for the descriptor to be readable; nobody but the task reads from it, and each turn notices all
/// that made it readable before, so a runtime may wait for its edges. Dropping a task at any moment
/// closes what it has open.
pub trait Task: AsFd + Sized {
    /// What it ends with, or stops at for its owner to do something.
    type Output;

    /// Goes on as far as it can without waiting.
    ///
    /// # Errors
    /// This process cannot wait any more.
    fn turn(&mut self) -> io::Result<Turn<Self>>;

    /// Whether dropping it frees memory of regions, which takes a second for each few GiB: a runtime that
    /// must not block drops it elsewhere.
    fn holds_memory(&self) -> bool {
        false
    }
}

/// What a task needs.
#[derive(Debug)]
pub enum Turn<T: Task> {
    /// To be turned again when its descriptor is readable, or after this time; without a time, not
    /// before.
    Wait(Option<Duration>),
    /// Something to be done where it may block.
    Work(Work<T>),
    /// Nothing from the runtime: this is for who runs the task.
    Done(T::Output),
}

/// Work that may block, apart from its task; dropped undone, it leaves nothing behind.
pub struct Work<T>(Box<dyn FnOnce() -> Done<T> + Send>);

/// Work that is done, to be told to its task.
pub struct Done<T>(Box<dyn FnOnce(&mut T) + Send>);

impl<T: 'static> Work<T> {
    /// Does `work`, and then tells the task what came of it.
    pub fn new<R: Send + 'static>(
        work: impl FnOnce() -> R + Send + 'static,
        tell: impl FnOnce(&mut T, R) + Send + 'static,
    ) -> Work<T> {
        Work(Box::new(move || {
            let result = work();
            Done(Box::new(move |task| tell(task, result)))
        }))
    }
}

impl<T> Work<T> {
    /// Does it. It may block.
    pub fn run(self) -> Done<T> {
        (self.0)()
    }
}

impl<T> Done<T> {
    /// Tells the task, which is to be turned then.
    pub fn tell(self, task: &mut T) {
        (self.0)(task)
    }
}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Work")
    }
}

impl<T> fmt::Debug for Done<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Done")
    }
}

/// Carries a task to its end, or to where it stops, and blocks meanwhile.
///
/// # Errors
/// This process cannot wait.
pub fn run<T: Task>(task: &mut T) -> io::Result<T::Output> {
    loop {
        match task.turn()? {
            Turn::Done(output) => return Ok(output),
            Turn::Work(work) => work.run().tell(task),
            Turn::Wait(timeout) => drop(wait([task.as_fd()], timeout)?),
        }
    }
}

/// Blocks until one of these is readable, or the time is over; says which are.
pub(crate) fn wait<const N: usize>(
    descriptors: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> io::Result<[bool; N]> {
    let mut waiting = descriptors.map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN));
    // Too long to be said is as good as for ever.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(&mut waiting, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(waiting.map(|waited| !waited.revents().is_empty())),
        Err(errno) => Err(errno.into()),
    }
}
