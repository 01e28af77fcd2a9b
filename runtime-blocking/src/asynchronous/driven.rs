//! Carrying a task to its end.

use super::Runtime;
use crate::keeper::{Keeper, Lease};
use crate::task::{Task, Turn};
use std::io;
use std::time::Duration;

/// A task on a runtime.
pub(super) struct Driven<R: Runtime, T> {
    pub task: T,
    /// The task's descriptor once more: what a runtime waits for it keeps.
    waiting: R::Waiting,
}

impl<R: Runtime, T: Task + 'static> Driven<R, T> {
    pub fn new(task: T) -> io::Result<Driven<R, T>> {
        let waiting = R::register(task.as_fd().try_clone_to_owned()?)?;
        Ok(Driven { task, waiting })
    }

    /// Until the task ends, or stops for its owner.
    pub async fn run(&mut self) -> io::Result<T::Output> {
        loop {
            match self.task.turn()? {
                Turn::Done(output) => return Ok(output),
                Turn::Work(work) => R::unblock(|| work.run()).await.tell(&mut self.task),
                // There is more to do, and others have their turn first.
                Turn::Wait(Some(Duration::ZERO)) => R::yield_now().await,
                Turn::Wait(timeout) => R::readable(&self.waiting, timeout).await?,
            }
        }
    }
}

/// Keeps a lease up in the background.
pub(super) fn keep<R: Runtime>(keeper: Keeper) -> Lease {
    Lease::kept(keeper, |keeper| {
        R::spawn(async move {
            if let Ok(mut keeper) = Driven::<R, _>::new(keeper) {
                let _ = keeper.run().await;
            }
        })
    })
}
