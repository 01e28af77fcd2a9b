//! The digests of what is asked for, computed only where the times of files do not tell.

use crate::error::CliError;
use crate::models::Model;
use crate::signals::Signals;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;
use tracing::info;
use weightd_blocking::digest;
use weightd_checkpoint::{Checkpoint, LoadOptions, Progress};
use weightd_core::wire::message::DaemonInfo;

/// How often a signal is looked for meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The models, each with its checkpoint, until that was read.
#[derive(Debug)]
pub struct Digests<'a> {
    models: &'a [Model],
    /// Opened already; given away to whoever reads them.
    checkpoints: Vec<Checkpoint>,
    signals: &'a Signals,
}

impl<'a> Digests<'a> {
    /// The digests of these models, in the order of their checkpoints.
    pub fn new(models: &'a [Model], checkpoints: Vec<Checkpoint>, signals: &'a Signals) -> Digests<'a> {
        Digests {
            models,
            checkpoints,
            signals,
        }
    }

    /// Whether they were computed.
    pub fn are_known(&self) -> bool {
        self.checkpoints.is_empty()
    }

    /// Computes those that are not remembered, which reads every byte, and adds them to the keys of the daemons. A signal ends that.
    pub fn add_to(&mut self, wanted: &mut [DaemonInfo]) -> Result<(), CliError> {
        let checkpoints = std::mem::take(&mut self.checkpoints);
        for (model, checkpoint) in self.models.iter().zip(checkpoints) {
            info!(
                "taking the digest of {}: whether it is what is served already cannot be told by its files",
                model.path.display()
            );
            let (send, digest) = channel();
            let how = (LoadOptions::default(), Progress::default());
            let work = move || send.send(digest::digest(&checkpoint, &how.0, &how.1));
            // Not waited for where a signal comes: it ends with the process.
            thread::Builder::new()
                .name("digest".to_owned())
                .spawn(work)
                .map_err(CliError::failure)?;
            let digest = loop {
                match digest.recv_timeout(LOOK_EVERY) {
                    Ok(digested) => break digested.map_err(|error| model.failure(error))?.digest,
                    Err(RecvTimeoutError::Timeout) => self.signals.check()?,
                    Err(RecvTimeoutError::Disconnected) => {
                        let why = "reading for the digest panicked; this is a bug in weightd";
                        return Err(CliError::failure(why));
                    }
                }
            };
            for (daemon, _) in &model.members {
                if let Some(info) = wanted.get_mut(*daemon as usize) {
                    info.key.checkpoint.digest = Some(digest);
                }
            }
        }
        Ok(())
    }
}
