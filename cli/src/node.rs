//! What a node serves, worked out from the command line by the same code for launcher, loader and
//! engine.

use crate::args::{DeviceArg, ModelArgs, ParallelArgs, ShardingArgs, WhereArgs};
use crate::devices::{Devices, Finder};
use crate::error::CliError;
use std::io;
use std::path::{Path, PathBuf};
use weightd_blocking::SOCKET_DIR_VARIABLE;
use weightd_checkpoint::{KeyOptions, NodePlan, Sharding, ShardingOptions, TpPlan};
use weightd_core::content::{HandleKind, Role};
use weightd_core::plan::placement::{Node, Parallel, Placement, place};
use weightd_gpu::{Device, DeviceKind};
use weightd_socket::dir::{DirError, SocketDir};
use weightd_socket::path::socket_path;

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

/// The same; where there is no directory, and so no daemon, its path is the error.
pub fn open_dir_if_there(place: &WhereArgs) -> Result<Result<SocketDir, PathBuf>, CliError> {
    match open_dir(place) {
        Ok(dir) => Ok(Ok(dir)),
        Err(DirError::Absent { path }) => Ok(Err(path)),
        Err(error) => Err(CliError::failure(error)),
    }
}

/// For `map_err`: what the socket directory holds cannot be told.
pub fn cannot_list(dir: &Path) -> impl Fn(io::Error) -> CliError {
    move |error| {
        let advice = match error.kind() {
            io::ErrorKind::PermissionDenied => ": chmod 0700 it",
            _ => "",
        };
        let dir = dir.display();
        CliError::Failure(format!("cannot list the socket directory {dir}: {error}{advice}"))
    }
}

/// That no daemon was found, and where.
pub fn no_daemons(place: &WhereArgs, dir: &Path) -> String {
    let of = match &place.instance {
        Some(instance) => format!(" of instance {instance}"),
        None => String::new(),
    };
    format!("no daemons{of} in {}", dir.display())
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

/// How weights are spread and held, with the plan's file read.
pub fn sharding(args: &ShardingArgs) -> Result<ShardingOptions, CliError> {
    let parallel_args = &args.parallel;
    let tp_plan = args.tp_plan.as_deref().map(TpPlan::read).transpose();
    Ok(ShardingOptions {
        layout: args.layout,
        dtype: args.dtype,
        experts: parallel_args
            .enable_expert_parallel
            .then_some(parallel_args.expert_placement_strategy),
        layer_partition: parallel_args.pp_layer_partition.clone(),
        tp_plan: tp_plan.map_err(CliError::failure)?,
        ..ShardingOptions::new(parallel(parallel_args))
    })
}

/// What this node is told of its part of the world. `devices` is how many it has, where that is limited.
pub fn node(args: &ParallelArgs, devices: Option<u32>) -> Result<Node, CliError> {
    let (start, local) = match (args.data_parallel_rank, args.data_parallel_size_local) {
        (Some(rank), None | Some(1)) => (rank, 1),
        (Some(rank), Some(local)) => {
            return Err(CliError::Usage(format!(
                "--data-parallel-rank {rank} is one replica, but --data-parallel-size-local is {local}: leave one of \
                 them out, or name the first replica with --data-parallel-start-rank"
            )));
        }
        (None, local) => (
            args.data_parallel_start_rank,
            local.unwrap_or(args.data_parallel_size),
        ),
    };
    Ok(Node {
        nnodes: args.nnodes,
        node_rank: args.node_rank,
        data_parallel_size_local: local,
        data_parallel_start_rank: start,
        ranks_per_device: args.ranks_per_device,
        device_slots: devices.map(|devices| devices.saturating_mul(args.ranks_per_device)),
        // With both, the engines' own port is the other one.
        master_port: args.weight_cache_master_port.or(args.master_port),
        draft_master_port: args.draft_master_port,
    })
}

/// This node's ranks, in the order of their local numbers, with their devices.
pub fn local_ranks(
    args: &ParallelArgs,
    device: DeviceArg,
    finder: Finder<'_>,
) -> Result<Vec<LocalRank>, CliError> {
    let devices = Devices::find(device, finder)?;
    let on_device = |placement: Placement| LocalRank {
        placement,
        device: devices.get(placement.device),
    };
    let node = node(args, devices.count())?;
    let placements = place(&parallel(args), &node).map_err(CliError::usage)?;
    Ok(placements.into_iter().map(on_device).collect())
}

/// Plans what of a checkpoint goes to which of these ranks.
pub fn plan(sharding: &Sharding<'_>, ranks: &[LocalRank]) -> Result<NodePlan, CliError> {
    let placed: Vec<_> = ranks
        .iter()
        .map(|rank| (rank.placement, rank.device.uuid()))
        .collect();
    let handle = match ranks.first().map(|rank| rank.device.kind()) {
        Some(DeviceKind::Cuda) => HandleKind::CudaFd,
        _ => HandleKind::Memfd,
    };
    NodePlan::new(sharding, &placed, handle).map_err(CliError::failure)
}

/// The socket of one rank's daemon.
pub fn socket_of(
    dir: &Path,
    rank: &LocalRank,
    role: Role,
    ranks_per_device: u32,
    place: &WhereArgs,
) -> Result<PathBuf, CliError> {
    let slot = (ranks_per_device > 1).then_some(rank.placement.slot);
    let instance = place.instance.as_deref();
    socket_path(dir, &rank.device.uuid(), slot, instance, role).map_err(CliError::usage)
}

/// What beside the checkpoint decides the keys of a model.
pub fn key_options(args: &ModelArgs, sharding: &ShardingOptions) -> KeyOptions {
    let weights = &args.weights;
    KeyOptions {
        quantization: weights.quantization.clone(),
        quantization_override: weights.quantization_config.clone(),
        revision: weights.revision.clone(),
        engine_version: weights.engine_version.clone(),
        extra: weights.key_extra.iter().cloned().collect(),
        ..KeyOptions::new(sharding.clone())
    }
}
