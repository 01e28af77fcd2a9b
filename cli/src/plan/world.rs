//! The nodes of the world, as far as one node's flags tell.

use crate::args::ParallelArgs;
use crate::error::CliError;
use crate::node::{self, LocalRank};
use weightd_core::plan::placement::{MAX_LOCAL_RANKS, Node, Placement, place};
use weightd_gpu::Device;

/// Nodes and their ranks.
pub struct World {
    pub nodes: Vec<NodeRanks>,
    /// Whether these are all nodes. Launchers with unequal numbers of replicas do not know each other's.
    pub complete: bool,
}

/// What one node serves. Of other nodes, the devices are known by number alone.
pub struct NodeRanks {
    pub node_rank: u32,
    pub ranks: Vec<LocalRank>,
    /// Whether it is this one.
    pub here: bool,
}

impl World {
    /// This node alone.
    pub fn here(args: &ParallelArgs, ranks: Vec<LocalRank>) -> World {
        let here = NodeRanks {
            node_rank: args.node_rank,
            ranks,
            here: true,
        };
        World {
            nodes: vec![here],
            complete: false,
        }
    }

    /// All nodes. Where nobody counted them, each has as many replicas as this one, if that can be.
    pub fn whole(args: &ParallelArgs, ranks: Vec<LocalRank>) -> Result<World, CliError> {
        let (parallel, here) = (node::parallel(args), node::node(args, None)?);
        let replicas = here.data_parallel_size_local;
        let start = here.data_parallel_start_rank;
        let (count, node_rank) = if here.nnodes > 1 {
            (here.nnodes, here.node_rank)
        } else if parallel.data.is_multiple_of(replicas) && start.is_multiple_of(replicas) {
            (parallel.data / replicas, start / replicas)
        } else {
            return Ok(World::here(args, ranks));
        };
        let size = u64::from(count) * ranks.len() as u64;
        if size > u64::from(MAX_LOCAL_RANKS) {
            return Err(CliError::Usage(format!(
                "--all-nodes: a world of {size} ranks is too large to print, at most {MAX_LOCAL_RANKS}: leave the flag out"
            )));
        }
        let other = |node_rank: u32| {
            let node = match here.nnodes {
                1 => Node {
                    data_parallel_start_rank: node_rank * replicas,
                    ..here
                },
                _ => Node { node_rank, ..here },
            };
            let placements = place(&parallel, &node).map_err(CliError::usage)?;
            let rank = |placement: Placement| LocalRank {
                placement,
                device: Device::host(placement.device),
            };
            Ok(NodeRanks {
                node_rank,
                ranks: placements.into_iter().map(rank).collect(),
                here: false,
            })
        };
        let mut nodes = (0..count)
            .filter(|other| *other != node_rank)
            .map(other)
            .collect::<Result<Vec<_>, CliError>>()?;
        let here = NodeRanks {
            node_rank,
            ranks,
            here: true,
        };
        nodes.insert(node_rank as usize, here);
        Ok(World {
            nodes,
            complete: true,
        })
    }
}
