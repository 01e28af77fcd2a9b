//! Everything that an engine's author names, from whichever crate it is; `weightd-tokio` and `weightd-smol`
//! have the same at their roots.

pub use crate::binding::{BindError, Binding, EngineRank};
pub use crate::contents::{Contents, ContentsError, FillError, Filling, View};
pub use crate::endpoint::Endpoint;
pub use crate::keeper::{Lease, LeaseEvent};
pub use crate::loaded::{LoadError, Loaded};
pub use crate::loading::Timing;
pub use crate::options::{LoaderOptions, OptionsError};
pub use crate::publishing::{PublishFailed, Published};
pub use weightd_checkpoint::{Checkpoint, CheckpointError, HubCache, KeyOptions, Rank, ShardingOptions};
pub use weightd_core::content::manifest::TensorKind;
pub use weightd_core::content::{DeviceUuid, Dtype, Generation, Key, Role};
pub use weightd_core::machine::{AttachError, AttachOptions, Mode, PublishError};
pub use weightd_core::plan::placement::Parallel;
pub use weightd_gpu::{Device, MemoryError, Missing, Module, OverwriteError, TensorView, Weights};
