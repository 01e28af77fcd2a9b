//! What a node serves, worked out from the command line by the same code for launcher, loader and
//! engine.

use crate::args::{DeviceArg, ModelArgs, ParallelArgs, WhereArgs};
use crate::error::CliError;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use weightd_checkpoint::{Checkpoint, KeyOptions, Rank};
use weightd_core::content::{CheckpointId, Key, Role};
use weightd_core::plan::placement::{Node, Parallel, Placement, place};
use weightd_gpu::Device;
use weightd_socket::path::socket_path;

/// The environment variable that names the socket directory.
const SOCKET_DIR_VARIABLE: &str = "WEIGHTD_SOCKET_DIR";

/// The value of the environment variable that names the socket directory.
pub fn socket_dir_variable() -> Option<OsString> {
    std::env::var_os(SOCKET_DIR_VARIABLE)
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

/// Where this node's ranks are placed.
pub fn placements(args: &ParallelArgs) -> Result<Vec<Placement>, CliError> {
    let node = Node {
        nnodes: args.nnodes,
        node_rank: args.node_rank,
        data_parallel_size_local: args.data_parallel_size_local.unwrap_or(args.data_parallel_size),
        data_parallel_start_rank: args.data_parallel_start_rank,
        ranks_per_device: args.ranks_per_device,
        // There are as many host devices as one asks for.
        device_slots: None,
        master_port: args.master_port,
        draft_master_port: args.draft_master_port,
    };
    place(&parallel(args), &node).map_err(CliError::usage)
}

/// This node's ranks, in the order of their local numbers, with their devices.
pub fn local_ranks(args: &ParallelArgs, device: DeviceArg) -> Result<Vec<LocalRank>, CliError> {
    check_device(device)?;
    let on_device = |placement: Placement| LocalRank {
        placement,
        device: Device::host(placement.device),
    };
    Ok(placements(args)?.into_iter().map(on_device).collect())
}

/// Refuses a kind of device that this build does not have.
pub fn check_device(device: DeviceArg) -> Result<(), CliError> {
    match device {
        DeviceArg::Auto | DeviceArg::Cpu => Ok(()),
        DeviceArg::Cuda => Err(CliError::failure(
            "this build of weightd has host memory only: use --device cpu or auto",
        )),
    }
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
