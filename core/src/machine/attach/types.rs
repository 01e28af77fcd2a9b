//! What goes into an attach and what comes out of it.

use crate::content::manifest::Region;
use crate::content::{DeviceUuid, Difference, Generation, Key, Manifest, Role};
use crate::machine::AskError;
use crate::time::Span;
use crate::wire::FrameError;
use crate::wire::message::{ContentInfo, ErrorCode, State};
use thiserror::Error;

/// How weights reach the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The daemon's memory is mapped, read-only.
    #[default]
    ZeroCopy,
    /// Everything is cloned into the engine's own memory, and the daemon is asked to let go.
    Copy,
}

/// What an engine wants of an attach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachOptions {
    /// Mapping or copy.
    pub mode: Mode,
    /// Whether the engine has a disk loader to fall back on.
    pub fallback: bool,
    /// How long a broken connection is retried, and a reply is waited for.
    pub connect_timeout: Span,
    /// Without fallback: how long absence and daemon errors are retried, over all.
    pub state_timeout: Span,
    /// The role that the engine loads for.
    pub role: Role,
    /// The device that the engine runs on; absent means unchecked.
    pub device: Option<DeviceUuid>,
    /// Whether this replaces weights that the engine has. The daemon counts it; here it means that there is
    /// no disk load to fall back on, and that copy mode copies into tensors that are there.
    pub is_reload: bool,
    /// What the engine has mapped: in zero-copy mode, finding it again changes nothing.
    pub current: Option<Generation>,
    /// The user that the engine runs as.
    pub uid: u32,
}

impl AttachOptions {
    /// Zero-copy, with fallback, 5 s to connect, 300 s for a state, for a target, any device.
    pub fn new(uid: u32) -> AttachOptions {
        AttachOptions {
            mode: Mode::ZeroCopy,
            fallback: true,
            connect_timeout: Span::secs(5),
            state_timeout: Span::secs(300),
            role: Role::Target,
            device: None,
            is_reload: false,
            current: None,
            uid,
        }
    }

    /// That the key is for another role than the engine loads for, as a daemon of that one would say.
    pub(in crate::machine) fn misplaced(&self, key: &Key) -> Option<Difference> {
        (key.role != self.role).then(|| Difference::new("role", key.role.name(), self.role.name()))
    }
}

/// Why no connection could be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    /// Nobody listens there.
    Absent(String),
    /// The listener's backlog is full.
    Busy,
    /// The socket, or whoever is behind it, is not ours.
    Refused(String),
    /// Anything else.
    Other(String),
}

/// Why an import or a copy failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// The device has too little memory.
    #[error("{0}")]
    OutOfMemory(String),
    /// The manifest or a region is not what it should be.
    #[error("{0}")]
    Malformed(String),
    /// Nothing on this machine can map memory of this kind.
    #[error("{0}")]
    Unsupported(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// Why the cache cannot serve, by cause. Each says what to do next.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum AttachError {
    #[error("{why}")]
    Unavailable { why: String },
    #[error("this process cannot ask: {why}")]
    Local { why: String },
    #[error("the connection to the daemon broke: {why}; see the daemon's log")]
    Broken { why: String },
    #[error(
        "the daemon serves something else: {}; start it and the engine with the same model and options",
        Difference::list(fields)
    )]
    Mismatch { fields: Vec<Difference> },
    #[error("empty: {why}")]
    Empty { why: String },
    #[error("released: {why}")]
    Released { why: String },
    #[error("lost: {why}")]
    Lost { why: String },
    #[error("refused: {why}")]
    RefusedPeer { why: String },
    #[error(
        "the daemon's weights are on device {theirs}, the engine runs on {ours}: give the engine the daemon's device"
    )]
    WrongDevice { theirs: DeviceUuid, ours: DeviceUuid },
    #[error("out of memory: {why}; free memory on the device, or map instead of copying")]
    OutOfMemory { why: String },
    #[error("malformed: {why}; use the same weightd release on both sides")]
    Malformed { why: String },
    #[error("memory of this kind cannot be mapped on this machine: {why}")]
    UnsupportedPlatform { why: String },
    #[error("the import failed: {why}; the daemon was told, and its log says what its launcher finds")]
    ImportFailed { why: String },
    #[error(
        "the engine could not build its model of the cached weights: {why}; compare its options with the daemon's"
    )]
    BuildFailed { why: String },
    #[error(
        "the checkpoint's digest could not be computed: {why}; make its files readable and leave them alone"
    )]
    DigestFailed { why: String },
    #[error("no answer within {waited}; see the daemon's log")]
    Timeout { waited: Span },
    #[error("the daemon cannot serve: {why}; see its log")]
    Daemon { code: ErrorCode, why: String },
}

impl AttachError {
    /// What a daemon's failure means.
    pub(in crate::machine) fn of_daemon(code: ErrorCode, why: String) -> AttachError {
        match code {
            ErrorCode::Empty => AttachError::Empty { why },
            ErrorCode::Released => AttachError::Released { why },
            ErrorCode::Lost => AttachError::Lost { why },
            ErrorCode::RefusedPeer => AttachError::RefusedPeer { why },
            ErrorCode::Malformed | ErrorCode::Version | ErrorCode::BadDescriptors => {
                AttachError::Malformed { why }
            }
            code => AttachError::Daemon { code, why },
        }
    }
}

impl From<FrameError> for AttachError {
    fn from(error: FrameError) -> AttachError {
        let why = error.to_string();
        match error {
            // The kernel drops descriptors that a process has no room for.
            FrameError::Truncated => AttachError::Local { why },
            _ => AttachError::Malformed { why },
        }
    }
}

impl From<AskError> for AttachError {
    fn from(error: AskError) -> AttachError {
        match error {
            AskError::RefusedPeer { .. } => AttachError::RefusedPeer {
                why: error.to_string(),
            },
            AskError::Failed { code, why } => AttachError::of_daemon(code, why),
            AskError::Malformed(why) => AttachError::Malformed { why },
            AskError::Broken(why) => AttachError::Broken { why },
            AskError::Timeout(waited) => AttachError::Timeout { waited },
        }
    }
}

impl From<ConnectFailure> for AttachError {
    fn from(failure: ConnectFailure) -> AttachError {
        match failure {
            ConnectFailure::Absent(why) => AttachError::Unavailable { why },
            ConnectFailure::Other(why) => AttachError::Local { why },
            ConnectFailure::Refused(why) => AttachError::RefusedPeer { why },
            ConnectFailure::Busy => AttachError::Broken {
                why: "its queue of connections is full".to_owned(),
            },
        }
    }
}

/// Content that was received and checked by its descriptors' facts, to be imported.
#[derive(Debug, PartialEq, Eq)]
pub struct Fetched<F> {
    /// What the daemon says of it.
    pub state: State,
    /// The descriptor of the manifest.
    pub manifest: F,
    /// The descriptors of the regions, in order, for those that have one.
    pub regions: Vec<F>,
}

impl State {
    /// The manifest that came with this, out of its bytes.
    ///
    /// # Errors
    /// [`Fault::Malformed`] where they are no manifest, or one of other regions, on another device, or with another number
    /// of tensors than the daemon stated: the descriptors were checked against that.
    pub fn manifest(&self, bytes: &[u8]) -> Result<Manifest, Fault> {
        let manifest = Manifest::decode(bytes).map_err(|error| Fault::Malformed(error.to_string()))?;
        let on_device = |region: &Region| region.device == self.device_uuid;
        let is_stated = ContentInfo::of(&manifest, bytes.len()) == self.content
            && manifest.regions().iter().all(on_device);
        match is_stated {
            true => Ok(manifest),
            false => Err(Fault::Malformed(
                "the manifest is not of the content that the daemon stated".to_owned(),
            )),
        }
    }
}

/// How an attach ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The daemon's memory is mapped.
    Mapped {
        /// What is mapped.
        generation: Generation,
        /// Whether the connection is a lease now; keep it open for as long as the mapping.
        leased: bool,
    },
    /// Everything was cloned.
    Copied {
        /// What was cloned.
        generation: Generation,
        /// Whether the daemon said that it let go.
        released: bool,
    },
    /// What the engine has mapped is what the daemon serves.
    Unchanged {
        /// Of both.
        generation: Generation,
    },
}

/// What an attach asks of its driver, beside connecting and waiting.
#[derive(Debug, PartialEq, Eq)]
pub enum AttachStep<F> {
    /// Compute the checkpoint's digest and report [`digested`](super::Attach::digested). It may take long.
    Digest,
    /// Import what was fetched and report [`imported`](super::Attach::imported).
    Import(Fetched<F>),
    /// Clone what was imported and report [`copied`](super::Attach::copied).
    Copy,
    /// Let the engine build its model of the weights and report [`built`](super::Attach::built). In a
    /// reload in copy mode it copies from what was imported.
    Build,
    /// The cache cannot serve: load from disk. The attach is over.
    LoadFromDisk {
        /// Why.
        because: AttachError,
    },
    /// The attach is over.
    Done(Result<Outcome, AttachError>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::manifest::{ManifestBuilder, TensorKind, TensorSpec};
    use crate::content::{Dtype, HandleKind};

    const DEVICE: DeviceUuid = DeviceUuid([1; 16]);

    fn manifest(device: DeviceUuid) -> Manifest {
        let mut builder = ManifestBuilder::new();
        for bytes in [4096, 8192] {
            builder.region(Region {
                handle: HandleKind::Memfd,
                bytes,
                device,
                legacy: None,
            });
        }
        for (name, region) in [("a", 0), ("b", 1)] {
            let spec = TensorSpec {
                kind: TensorKind::Parameter,
                persistent: true,
                dtype: Dtype::U8,
                shape: &[100],
                strides: None,
                region,
                offset: 0,
            };
            builder.tensor(name, spec);
        }
        builder.finish().unwrap()
    }

    #[test]
    fn a_manifest_is_that_of_what_was_stated_down_to_its_size() {
        let manifest = manifest(DEVICE);
        let bytes = manifest.encode();
        let state = State {
            generation: Generation { epoch: 1, number: 1 },
            device_uuid: DEVICE,
            content: ContentInfo::of(&manifest, bytes.len()),
        };
        assert_eq!(state.manifest(&bytes), Ok(manifest));
        type Change = fn(&mut State);
        let changes: [Change; 7] = [
            |state| state.content.regions[1].bytes -= 1,
            |state| state.content.regions[0].handle = HandleKind::CudaFd,
            |state| state.content.regions.swap(0, 1),
            |state| state.content.regions.truncate(1),
            |state| state.content.manifest_bytes += 1,
            |state| state.content.tensors += 1,
            |state| state.device_uuid = DeviceUuid([2; 16]),
        ];
        for change in changes {
            let mut other = state.clone();
            change(&mut other);
            let refused = other.manifest(&bytes);
            assert!(
                matches!(refused, Err(Fault::Malformed(_))),
                "{other:?}: {refused:?}"
            );
        }
        assert!(matches!(state.manifest(&bytes[1..]), Err(Fault::Malformed(_))));
    }
}
