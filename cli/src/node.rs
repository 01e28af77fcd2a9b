//! What a node serves, worked out from the command line by the same code for launcher, loader and
//! engine.

use crate::args::{DeviceArg, ModelArgs, ParallelArgs, WhereArgs};
use crate::devices::{Devices, Finder};
use crate::error::CliError;
use std::path::{Path, PathBuf};
use weightd_checkpoint::{Checkpoint, KeyOptions, NodePlan, Rank};
use weightd_core::content::{CheckpointId, HandleKind, Key, Role};
use weightd_core::plan::placement::{Node, Parallel, Placement, place};
use weightd_gpu::{Device, DeviceKind};
use weightd_socket::dir::{DirError, SocketDir};
use weightd_socket::path::socket_path;

/// The environment variable that names the socket directory.
const SOCKET_DIR_VARIABLE: &str = "WEIGHTD_SOCKET_DIR";

/// The socket directory of a launcher, made if it is not there.
pub fn create_dir(place: &WhereArgs) -> Result<SocketDir, DirError> {
    let variable = std::env::var_os(SOCKET_DIR_VARIABLE);
    SocketDir::create(place.socket_dir.as_deref(), variable.as_deref())
}

/// The socket directory of a client.
pub fn open_dir(place: &WhereArgs) -> Result<SocketDir, DirError> {
    let variable = std::env::var_os(SOCKET_DIR_VARIABLE);
    SocketDir::open(place.socket_dir.as_deref(), variable.as_deref())
}

/// The same; `None` where there is no directory, and so no daemon.
pub fn open_dir_if_there(place: &WhereArgs) -> Result<Option<SocketDir>, CliError> {
    match open_dir(place) {
        Ok(dir) => Ok(Some(dir)),
        Err(DirError::Absent { .. }) => Ok(None),
        Err(error) => Err(CliError::failure(error)),
    }
}

/// One rank of this node and the device that it is on.
#[derive(Clone, Copy, Debug)]
pub struct LocalRank {
    pub placement: Placement,
    pub device: Device,
}

/// The parallel sizes of the whole world.
pub fn parallel(args: &ParallelArgs) -> Parallel {
    Parallel {
        tensor: args.tensor_parallel_size,
        pipeline: args.pipeline_parallel_size,
        data: args.data_parallel_size,
    }
}

/// Where this node's ranks are placed. `devices` is how many it has, where that is limited.
fn placements(args: &ParallelArgs, devices: Option<u32>) -> Result<Vec<Placement>, CliError> {
    let node = Node {
        nnodes: args.nnodes,
        node_rank: args.node_rank,
        data_parallel_size_local: args.data_parallel_size_local.unwrap_or(args.data_parallel_size),
        data_parallel_start_rank: args.data_parallel_start_rank,
        ranks_per_device: args.ranks_per_device,
        device_slots: devices.map(|devices| devices.saturating_mul(args.ranks_per_device)),
        master_port: args.master_port,
        draft_master_port: args.draft_master_port,
    };
    place(&parallel(args), &node).map_err(CliError::usage)
}

/// This node's ranks, in the order of their local numbers, with their devices.
pub fn local_ranks(
    args: &ParallelArgs,
    device: DeviceArg,
    finder: Finder,
) -> Result<Vec<LocalRank>, CliError> {
    let devices = Devices::find(device, finder)?;
    let on_device = |placement: Placement| LocalRank {
        placement,
        device: devices.get(placement.device),
    };
    Ok(placements(args, devices.count())?
        .into_iter()
        .map(on_device)
        .collect())
}

/// Opens the checkpoint and plans what of it goes to which of these ranks: all that can be refused
/// before a byte of the weights is read.
pub fn open_and_plan(args: &ModelArgs, ranks: &[LocalRank]) -> Result<(Checkpoint, NodePlan), CliError> {
    let checkpoint = Checkpoint::open(&args.model).map_err(CliError::failure)?;
    let placed: Vec<_> = ranks
        .iter()
        .map(|rank| (rank.placement, rank.device.uuid()))
        .collect();
    let handle = match ranks.first().map(|rank| rank.device.kind()) {
        Some(DeviceKind::Cuda) => HandleKind::CudaFd,
        _ => HandleKind::Memfd,
    };
    let plan =
        NodePlan::new(&checkpoint, &parallel(&args.parallel), &placed, handle).map_err(CliError::failure)?;
    Ok((checkpoint, plan))
}

/// The socket of one rank's daemon.
pub fn socket_of(
    dir: &Path,
    rank: &LocalRank,
    ranks_per_device: u32,
    place: &WhereArgs,
) -> Result<PathBuf, CliError> {
    let slot = (ranks_per_device > 1).then_some(rank.placement.slot);
    let instance = place.instance.as_deref();
    socket_path(dir, &rank.device.uuid(), slot, instance, Role::Target).map_err(CliError::usage)
}

/// The key of one rank's content.
pub fn key_of(
    args: &ModelArgs,
    checkpoint: &Checkpoint,
    identity: &CheckpointId,
    placement: &Placement,
) -> Result<Key, CliError> {
    let parallel = parallel(&args.parallel);
    let options = KeyOptions {
        revision: args.revision.clone(),
        engine_version: args.engine_version.clone(),
        extra: args.key_extra.iter().cloned().collect(),
        tp_size: parallel.tensor,
        pp_size: parallel.pipeline,
        dp_size: parallel.data,
        ..KeyOptions::default()
    };
    let rank = Rank {
        dp: placement.dp_rank,
        pp: placement.pp_rank,
        tp: placement.tp_rank,
    };
    options
        .key(checkpoint, identity.clone(), rank, Role::Target)
        .map_err(CliError::failure)
}
