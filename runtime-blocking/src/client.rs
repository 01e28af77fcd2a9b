//! An engine's attach: the driver of one [`Attach`], and the blocking call on it.

use crate::clock::Clock;
use crate::line::Line;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;
use weightd_core::content::manifest::{MAX_BYTES, Region};
use weightd_core::content::{Generation, Key, Manifest};
use weightd_core::machine::{Attach, AttachError, AttachOptions, Fault, Fetched, Outcome, Step};
use weightd_core::time::Now;
use weightd_gpu::{Mapping, MemoryError, Weights, WeightsError};

/// What an engine does itself during an attach. All of it may block.
pub trait Engine {
    /// Computes the digest of the engine's checkpoint.
    fn digest(&mut self) -> Result<[u8; 32], String>;

    /// Clones what is mapped into the engine's own memory; frees what it cloned when it fails.
    /// Called in copy mode only.
    fn copy(&mut self, weights: &Weights) -> Result<(), Fault>;
}

/// What is attached.
#[derive(Debug)]
pub struct Attached {
    /// How it ended.
    pub outcome: Outcome,
    /// The daemon's memory, mapped; in copy mode too, until this is dropped.
    pub weights: Weights,
    /// The lease: keep it for as long as the weights. Absent where the daemon gave none.
    pub lease: Option<Lease>,
    /// What it took, from the connect whose content was mapped.
    pub timing: Timing,
}

/// The parts of an attach, from connect until every tensor is addressable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Connecting, asking and receiving the descriptors.
    pub fetch: Duration,
    /// Reading and decoding the manifest.
    pub decode: Duration,
    /// Importing and mapping the regions.
    pub map: Duration,
}

impl Timing {
    /// All of it.
    pub fn total(&self) -> Duration {
        self.fetch + self.decode + self.map
    }
}

impl Attached {
    /// What is attached.
    pub fn generation(&self) -> Generation {
        match self.outcome {
            Outcome::Mapped { generation, .. } | Outcome::Copied { generation, .. } => generation,
        }
    }
}

/// A connection that says by its end that the daemon instance is gone. What is mapped stays
/// mapped, whatever happens to it.
#[derive(Debug)]
pub struct Lease(pub(crate) OwnedFd);

impl AsFd for Lease {
    /// Readable once the daemon is gone.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Why nothing is attached.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The cache cannot serve, and the engine has a disk loader: load from disk.
    #[error("loading from disk: {0}")]
    LoadFromDisk(AttachError),
    /// The cache cannot serve.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// This process cannot wait.
    #[error("cannot wait for the daemon: {0}")]
    Io(#[from] io::Error),
}

/// Attaches to the daemon at `socket` and blocks until that is decided.
pub fn attach(
    socket: &Path,
    options: AttachOptions,
    key: Key,
    engine: &mut impl Engine,
) -> Result<Attached, ClientError> {
    let mut driver = AttachDriver::new(socket.to_owned(), options, key)?;
    loop {
        match driver.turn() {
            Turn::Wait { until } => driver.wait(until)?,
            Turn::Digest => {
                let digest = engine.digest();
                driver.digested(digest);
            }
            Turn::Import(fetched) => driver.import(fetched),
            Turn::Copy => {
                let copied = match driver.weights() {
                    Some(weights) => engine.copy(weights),
                    None => Err(Fault::Other("nothing was imported".to_owned())),
                };
                driver.copied(copied);
            }
            Turn::LoadFromDisk { because } => return Err(ClientError::LoadFromDisk(because)),
            Turn::Done(outcome) => return Ok(driver.finish(outcome?)),
        }
    }
}

/// What an attach needs that its driver does not do by itself.
#[derive(Debug)]
pub enum Turn {
    /// Wait on the driver's descriptor, or until the moment.
    Wait {
        /// When to turn again, whatever happens.
        until: Now,
    },
    /// Compute the digest and report it; it may block for long.
    Digest,
    /// Call [`AttachDriver::import`]; it may block.
    Import(Fetched<OwnedFd>),
    /// Clone [`AttachDriver::weights`] and report it; it may block.
    Copy,
    /// The attach is over: load from disk.
    LoadFromDisk {
        /// Why.
        because: AttachError,
    },
    /// The attach is over; call [`AttachDriver::finish`] with a good outcome.
    Done(Result<Outcome, AttachError>),
}

/// Drives one attach. [`turn`](AttachDriver::turn) never blocks.
#[derive(Debug)]
pub struct AttachDriver {
    clock: Clock,
    socket: PathBuf,
    line: Line,
    machine: Attach<OwnedFd>,
    connected: Instant,
    imported: Option<(Weights, Timing)>,
}

impl AttachDriver {
    /// An attach to the daemon at `socket`, which starts with the first turn.
    pub fn new(socket: PathBuf, options: AttachOptions, key: Key) -> io::Result<AttachDriver> {
        Ok(AttachDriver {
            clock: Clock::start(),
            socket,
            line: Line::new()?,
            machine: Attach::new(options, key),
            connected: Instant::now(),
            imported: None,
        })
    }

    /// Connects, sends and receives until it would block, or needs what it does not do by itself.
    pub fn turn(&mut self) -> Turn {
        loop {
            let now = self.clock.now();
            match self.machine.step(now) {
                Step::Connect => self.connect(now),
                Step::Io { until, .. } => {
                    if !self.line.turn(now, &mut self.machine) {
                        return Turn::Wait { until };
                    }
                }
                Step::Sleep { until } => return Turn::Wait { until },
                Step::Digest => return Turn::Digest,
                Step::Import(fetched) => return Turn::Import(fetched),
                Step::Copy => return Turn::Copy,
                Step::LoadFromDisk { because } => return Turn::LoadFromDisk { because },
                Step::Done(outcome) => return Turn::Done(outcome),
            }
        }
    }

    /// Blocks until there is something to do, or until the moment.
    pub fn wait(&mut self, until: Now) -> io::Result<()> {
        self.line.wait(&self.clock, until)
    }

    /// Imports what was fetched. It may block.
    pub fn import(&mut self, fetched: Fetched<OwnedFd>) {
        let fetch = self.connected.elapsed();
        let imported = import(fetched).map(|(weights, decode, map)| {
            self.imported = Some((weights, Timing { fetch, decode, map }));
        });
        self.machine.imported(self.clock.now(), imported);
    }

    /// What was imported.
    pub fn weights(&self) -> Option<&Weights> {
        self.imported.as_ref().map(|(weights, _)| weights)
    }

    /// Reports the digest.
    pub fn digested(&mut self, digest: Result<[u8; 32], String>) {
        self.machine.digested(self.clock.now(), digest);
    }

    /// Reports the copy.
    pub fn copied(&mut self, copied: Result<(), Fault>) {
        self.machine.copied(self.clock.now(), copied);
    }

    /// What is attached, after a good outcome.
    ///
    /// # Panics
    /// Before a good outcome.
    pub fn finish(mut self, outcome: Outcome) -> Attached {
        let (weights, timing) = self.imported.expect("a good outcome follows an import");
        let leased = matches!(outcome, Outcome::Mapped { leased: true, .. });
        let lease = self.line.take().filter(|_| leased).map(Lease);
        Attached {
            outcome,
            weights,
            lease,
            timing,
        }
    }

    fn connect(&mut self, now: Now) {
        self.connected = Instant::now();
        let result = self.line.connect(&self.socket);
        self.machine.connected(now, result);
    }
}

impl AsRawFd for AttachDriver {
    /// Readable when there is something to do; wait on it, never read from it.
    fn as_raw_fd(&self) -> RawFd {
        self.line.as_raw_fd()
    }
}

/// From descriptors to tensors; how long decoding and mapping took.
fn import(fetched: Fetched<OwnedFd>) -> Result<(Weights, Duration, Duration), Fault> {
    let start = Instant::now();
    let Fetched {
        state,
        manifest,
        regions,
    } = fetched;
    let manifest = weightd_gpu::read_sealed(manifest, MAX_BYTES as u64).map_err(fault)?;
    let manifest = Manifest::decode(&manifest).map_err(|error| Fault::Malformed(error.to_string()))?;
    // What the descriptors were checked against must be what the manifest says.
    let stated = manifest
        .regions()
        .iter()
        .map(|region| (region.handle, region.bytes, region.device));
    let told = state
        .content
        .regions
        .iter()
        .map(|region| (region.handle, region.bytes, state.device_uuid));
    if !stated.eq(told) {
        return Err(Fault::Malformed(
            "the manifest's regions are not those that the daemon stated".to_owned(),
        ));
    }
    let decoded = start.elapsed();
    let mappings = map_regions(&manifest, regions).map_err(fault)?;
    let weights = Weights::new(manifest, mappings)
        .map_err(|error: WeightsError| Fault::Malformed(error.to_string()))?;
    Ok((weights, decoded, start.elapsed() - decoded))
}

/// Maps the regions of a manifest, in its order. `descriptors` are those of the regions that have one.
///
/// # Errors
/// What [`Mapping::import`] and [`Mapping::open_legacy`] say; [`MemoryError::Unsupported`] where a
/// descriptor is missing.
pub fn map_regions(
    manifest: &Manifest,
    descriptors: impl IntoIterator<Item = OwnedFd>,
) -> Result<Vec<Mapping>, MemoryError> {
    let mut descriptors = descriptors.into_iter();
    let map = |region: &Region| match &region.legacy {
        Some(legacy) => Mapping::open_legacy(legacy, region.bytes, region.device),
        None => {
            let (handle, device) = (region.handle, region.device);
            let fd = descriptors
                .next()
                .ok_or(MemoryError::Unsupported { handle, device })?;
            Mapping::import(handle, fd, region.bytes, device)
        }
    };
    manifest.regions().iter().map(map).collect()
}

fn fault(error: MemoryError) -> Fault {
    let why = error.to_string();
    match error {
        MemoryError::OutOfMemory { .. } => Fault::OutOfMemory(why),
        _ => Fault::Other(why),
    }
}
