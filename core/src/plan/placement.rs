//! Placement: which ranks a node serves, and on which device each of them is.
//!
//! Global ranks enumerate data parallel, then pipeline, then tensor parallel:
//! `global = dp * PP * TP + pp * TP + tp`. A node serves one contiguous block of them.

use serde::Serialize;
use thiserror::Error;

/// The most ranks that one node may serve; far above any machine, so that a slip in a flag is an
/// error and not an allocation.
pub const MAX_LOCAL_RANKS: u32 = 4096;

/// The sizes of the parallel dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// Tensor parallel size (TP).
    pub tensor: u32,
    /// Pipeline parallel size (PP).
    pub pipeline: u32,
    /// Data parallel size (DP).
    pub data: u32,
}

/// What one node is told about its part of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// How many nodes share the world. Above 1 they split it into equal contiguous blocks.
    pub nnodes: u32,
    /// Which of the blocks this node serves.
    pub node_rank: u32,
    /// How many DP ranks this node serves; ignored when `nnodes` is above 1.
    pub data_parallel_size_local: u32,
    /// The first DP rank of this node; ignored when `nnodes` is above 1.
    pub data_parallel_start_rank: u32,
    /// How many consecutive local ranks share a device.
    pub ranks_per_device: u32,
    /// How many ranks the node's devices hold together (devices times `ranks_per_device`);
    /// `None` where there are as many devices as ranks, as on host memory.
    pub device_slots: Option<u32>,
    /// The port that engines meet at. Nothing here listens on it.
    pub master_port: Option<u16>,
    /// The same for the draft model; by default the port after `master_port`.
    pub draft_master_port: Option<u16>,
}

impl Node {
    /// A single node that serves `data` DP ranks, one rank per device.
    pub fn single(data: u32) -> Node {
        Node {
            nnodes: 1,
            node_rank: 0,
            data_parallel_size_local: data,
            data_parallel_start_rank: 0,
            ranks_per_device: 1,
            device_slots: None,
            master_port: None,
            draft_master_port: None,
        }
    }

    /// Whether target and draft can have a port each.
    fn check_ports(&self) -> Result<(), PlacementError> {
        match (self.master_port, self.draft_master_port) {
            (Some(port), Some(draft)) if port == draft => Err(PlacementError::SamePorts { port }),
            (Some(port @ u16::MAX), None) => Err(PlacementError::NoPortAfterMaster { port }),
            _ => Ok(()),
        }
    }
}

/// Where one local rank stands in the world, and on which device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Placement {
    /// Counts this node's ranks from 0.
    pub local_rank: u32,
    /// Counts the world's ranks from 0.
    pub global_rank: u32,
    /// Data parallel rank in the world.
    pub dp_rank: u32,
    /// Pipeline stage.
    pub pp_rank: u32,
    /// Tensor parallel rank.
    pub tp_rank: u32,
    /// Data parallel rank, counted from the node's first.
    pub dp_rank_local: u32,
    /// The node's device, by its place in the order of devices.
    pub device: u32,
    /// Which of the ranks on that device this one is.
    pub slot: u32,
}

/// Why a placement is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PlacementError {
    /// A size is 0.
    #[error("{name} is 0: it must be at least 1")]
    Zero {
        /// The size, as the flag spells it.
        name: &'static str,
    },
    /// The world has more ranks than a 32-bit number counts.
    #[error(
        "a world of {data} (data) x {pipeline} (pipeline) x {tensor} (tensor parallel) ranks is too large: \
         at most {} ranks",
        u32::MAX
    )]
    WorldTooLarge {
        /// Data parallel size.
        data: u32,
        /// Pipeline parallel size.
        pipeline: u32,
        /// Tensor parallel size.
        tensor: u32,
    },
    /// The nodes cannot have equal blocks.
    #[error(
        "{nnodes} nodes do not evenly divide the world of {world} ranks ({data} data x {pipeline} pipeline x \
         {tensor} tensor parallel): change --nnodes or a parallel size"
    )]
    UnevenNodes {
        /// Number of nodes.
        nnodes: u32,
        /// Ranks in the world.
        world: u32,
        /// Data parallel size.
        data: u32,
        /// Pipeline parallel size.
        pipeline: u32,
        /// Tensor parallel size.
        tensor: u32,
    },
    /// There is no such node.
    #[error("node rank {node_rank} is outside the {nnodes} nodes: node ranks count from 0")]
    NoSuchNode {
        /// The rank that was asked for.
        node_rank: u32,
        /// Number of nodes.
        nnodes: u32,
    },
    /// The node's DP ranks end beyond the world's.
    #[error(
        "data parallel start rank {start} + local size {local} = {} exceeds the data parallel size {data}",
        u64::from(*.start) + u64::from(*.local)
    )]
    BeyondData {
        /// The node's first DP rank.
        start: u32,
        /// How many DP ranks the node serves.
        local: u32,
        /// Data parallel size.
        data: u32,
    },
    /// More ranks than the node can serve at all.
    #[error("{ranks} ranks on one node are too many: at most {MAX_LOCAL_RANKS}")]
    TooManyRanks {
        /// Ranks of this node.
        ranks: u32,
    },
    /// More ranks than places on devices.
    #[error(
        "{ranks} local ranks do not fit the {slots} device slots of this node ({per_device} per device): \
         use more devices, a larger --ranks-per-device, or fewer local ranks"
    )]
    TooFewDevices {
        /// Ranks of this node.
        ranks: u32,
        /// Places on its devices.
        slots: u32,
        /// Places on each device.
        per_device: u32,
    },
    /// Target and draft would meet at the same port.
    #[error("the draft's master port {port} is the target's own: name another one, or none for {port} + 1")]
    SamePorts {
        /// The port named for both.
        port: u16,
    },
    /// The draft's default port would be above 65535.
    #[error("there is no port after master port {port} for the draft: name one, or a lower master port")]
    NoPortAfterMaster {
        /// The target's port.
        port: u16,
    },
}

/// The ranks that `node` serves in a world of `parallel` sizes, by local rank.
pub fn place(parallel: &Parallel, node: &Node) -> Result<Vec<Placement>, PlacementError> {
    let &Parallel {
        tensor,
        pipeline,
        data,
    } = parallel;
    nonzero("tensor parallel size", tensor)?;
    nonzero("pipeline parallel size", pipeline)?;
    nonzero("data parallel size", data)?;
    nonzero("ranks per device", node.ranks_per_device)?;
    node.check_ports()?;

    let too_large = PlacementError::WorldTooLarge {
        data,
        pipeline,
        tensor,
    };
    let replica = pipeline.checked_mul(tensor).ok_or(too_large)?;
    let world = data.checked_mul(replica).ok_or(too_large)?;
    let (start, ranks) = block(parallel, node, replica, world)?;

    if ranks > MAX_LOCAL_RANKS {
        return Err(PlacementError::TooManyRanks { ranks });
    }
    let per_device = node.ranks_per_device;
    if let Some(slots) = node.device_slots.filter(|&slots| ranks > slots) {
        return Err(PlacementError::TooFewDevices {
            ranks,
            slots,
            per_device,
        });
    }
    let first_dp_rank = start / replica;
    Ok((0..ranks)
        .map(|local_rank| {
            let global_rank = start + local_rank;
            let dp_rank = global_rank / replica;
            Placement {
                local_rank,
                global_rank,
                dp_rank,
                pp_rank: global_rank % replica / tensor,
                tp_rank: global_rank % tensor,
                dp_rank_local: dp_rank - first_dp_rank,
                device: local_rank / per_device,
                slot: local_rank % per_device,
            }
        })
        .collect())
}

/// The node's first global rank and the number of its ranks.
fn block(parallel: &Parallel, node: &Node, replica: u32, world: u32) -> Result<(u32, u32), PlacementError> {
    let &Parallel {
        tensor,
        pipeline,
        data,
    } = parallel;
    let &Node {
        nnodes, node_rank, ..
    } = node;
    nonzero("number of nodes", nnodes)?;
    if node_rank >= nnodes {
        return Err(PlacementError::NoSuchNode { node_rank, nnodes });
    }
    if nnodes > 1 {
        if !world.is_multiple_of(nnodes) {
            return Err(PlacementError::UnevenNodes {
                nnodes,
                world,
                data,
                pipeline,
                tensor,
            });
        }
        let ranks = world / nnodes;
        return Ok((node_rank * ranks, ranks));
    }
    let (start, local) = (node.data_parallel_start_rank, node.data_parallel_size_local);
    nonzero("local data parallel size", local)?;
    if start.checked_add(local).is_none_or(|end| end > data) {
        return Err(PlacementError::BeyondData { start, local, data });
    }
    Ok((start * replica, local * replica))
}

fn nonzero(name: &'static str, size: u32) -> Result<(), PlacementError> {
    if size == 0 {
        Err(PlacementError::Zero { name })
    } else {
        Ok(())
    }
}
