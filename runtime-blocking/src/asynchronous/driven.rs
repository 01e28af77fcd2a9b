//! Carrying a task to its end.

use super::Runtime;
use crate::keeper::{Keeper, Lease};
use crate::line::advised;
use crate::task::{Task, Turn};
use std::io;
use std::time::Duration;

/// A task on a runtime.
pub(super) struct Driven<R: Runtime, T: Task + Send + 'static> {
    /// There until this is dropped.
    task: Option<T>,
    /// The task's descriptor once more: what a runtime waits for it keeps.
    waiting: R::Waiting,
}

impl<R: Runtime, T: Task + Send + 'static> Driven<R, T> {
    pub fn new(task: T) -> io::Result<Driven<R, T>> {
        let waiting = R::register(task.as_fd().try_clone_to_owned()?)?;
        Ok(Driven {
            task: Some(task),
            waiting,
        })
    }

    pub fn task(&mut self) -> &mut T {
        self.task.as_mut().expect("it is there until this is dropped")
    }

    /// Until the task ends, or stops for its owner.
    pub async fn run(&mut self) -> io::Result<T::Output> {
        loop {
            match self.task().turn()? {
                Turn::Done(output) => return Ok(output),
                Turn::Work(work) => R::unblock(|| work.run()).await?.tell(self.task()),
                // There is more to do, and others have their turn first.
                Turn::Wait(Some(Duration::ZERO)) => R::yield_now().await,
                Turn::Wait(timeout) => R::readable(&self.waiting, timeout).await?,
            }
        }
    }
}

impl<R: Runtime, T: Task + Send + 'static> Drop for Driven<R, T> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take_if(|task| task.holds_memory()) {
            R::detach(move || drop(task));
        }
    }
}

/// Keeps a lease up in the background.
pub(super) fn keep<R: Runtime>(keeper: Keeper) -> Lease {
    Lease::kept(keeper, |keeper| {
        R::spawn(async move {
            match Driven::<R, _>::new(keeper) {
                Ok(mut keeper) => {
                    if let Err(error) = keeper.run().await {
                        keeper.task().give_up(&error);
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        "a lease is given up, since it cannot be waited for: {}",
                        advised(&error)
                    );
                }
            }
        })
    })
}
