//! How much memory the cache holds for an engine, as a task.

use crate::binding::Binding;
use crate::dial::{Dial, Dialled};
use crate::task::{Task, Turn};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use weightd_core::machine::{AttachError, Mode, Query};
use weightd_core::wire::Message;
use weightd_core::wire::message::GetMemory;

/// Asks a daemon for the bytes of its content.
#[derive(Debug)]
pub struct Asking {
    dial: Dial<Query<OwnedFd>>,
    fallback: bool,
}

impl Asking {
    /// For an engine that maps its weights; one that copies them has them in memory of its own, and nobody
    /// is asked.
    ///
    /// # Errors
    /// This process cannot wait.
    pub fn memory(binding: &Binding) -> io::Result<Option<Asking>> {
        if binding.options.mode == Mode::Copy {
            return Ok(None);
        }
        let query = |_| Query::new(&binding.options, GetMemory {});
        Ok(Some(Asking {
            dial: Dial::new(&binding.endpoint, query)?,
            fallback: binding.options.fallback,
        }))
    }
}

impl Task for Asking {
    /// Bytes.
    type Output = Result<u64, AttachError>;

    fn turn(&mut self) -> io::Result<Turn<Asking>> {
        let answer = match self.dial.turn() {
            Dialled::Wait(timeout) => return Ok(Turn::Wait(timeout)),
            Dialled::Next(answer) => answer,
        };
        let bytes = answer.and_then(|message| match message {
            Message::Memory(memory) => Ok(memory.current),
            other => Err(AttachError::Malformed {
                why: format!("the daemon answered with a {} message", other.name()),
            }),
        });
        Ok(Turn::Done(match bytes {
            Ok(bytes) => Ok(bytes),
            Err(error) if self.fallback => {
                tracing::warn!(
                    "the cache's memory counts as none, since its daemon cannot be asked: {error}"
                );
                Ok(0)
            }
            Err(error) => Err(error),
        }))
    }
}

impl AsFd for Asking {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dial.as_fd()
    }
}
