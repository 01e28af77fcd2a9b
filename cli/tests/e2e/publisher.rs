//! An engine that publishes, down to the bytes on the socket: it holds what a checkpoint holds for each rank.

use crate::harness::Site;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use weightd_checkpoint::{
    Checkpoint, KeyOptions, LoadOptions, NodePlan, Progress, Rank, Sharding, ShardingOptions, load,
};
use weightd_core::content::{Generation, HandleKind};
use weightd_core::plan::placement::{Node, Parallel, place};
use weightd_core::wire::frame::{HEADER_BYTES, Header};
use weightd_core::wire::message::{ContentInfo, ErrorCode, Expects, Message, Publish, RegionInfo};
use weightd_gpu::DeviceKind;
use weightd_socket::connect::connect;
use weightd_socket::message::{receive, send};

/// Content for one daemon. Its memory lives as long as this, or as long as anyone has it.
pub struct Publication {
    pub socket: PathBuf,
    pub publish: Publish,
    pub descriptors: Vec<OwnedFd>,
}

/// What the targets of this world hold of a model, for the daemons that are there; each replaces nothing.
pub fn of_model(site: &Site, model: &Path, tp: u32) -> Vec<Publication> {
    let parallel = Parallel {
        tensor: tp,
        pipeline: 1,
        data: 1,
    };
    let devices = site.devices(tp);
    let kind = devices[0].kind();
    let (ranks_per_device, handle) = match kind {
        DeviceKind::Cpu => (1, HandleKind::Memfd),
        DeviceKind::Cuda => (tp, HandleKind::CudaFd),
    };
    let node = Node {
        nnodes: 1,
        node_rank: 0,
        data_parallel_size_local: 1,
        data_parallel_start_rank: 0,
        ranks_per_device,
        device_slots: Some(tp),
        master_port: None,
        draft_master_port: None,
    };
    let checkpoint = Checkpoint::open(model).unwrap();
    let options = KeyOptions::new(ShardingOptions::new(parallel));
    let mut identity = checkpoint.identity();
    identity.digest = Some(
        checkpoint
            .digest(&Default::default(), &Default::default())
            .unwrap(),
    );
    let placed: Vec<_> = place(&parallel, &node)
        .unwrap()
        .into_iter()
        .map(|placement| (placement, devices[placement.global_rank as usize].uuid()))
        .collect();
    let sharding = Sharding::new(&checkpoint, &options.sharding).unwrap();
    let plan = NodePlan::new(&sharding, &placed, handle).unwrap();
    let load_options = LoadOptions::of(kind);
    let _opened: Vec<_> = devices.iter().map(|device| device.open().unwrap()).collect();
    let progress = Progress::new(&plan);
    let loaded = load(&checkpoint, &plan, &devices, &load_options, None, &progress).unwrap();
    let status = site.status();
    let publication = |rank: weightd_checkpoint::LoadedRank| {
        let is_its = |daemon: &&serde_json::Value| {
            daemon["global_rank"] == rank.placement.global_rank && daemon["role"] == "target"
        };
        let daemon = status.iter().find(is_its).unwrap();
        let manifest = rank.manifest.encode();
        let key = options.key(&checkpoint, identity.clone(), Rank::of(&rank.placement));
        Publication {
            socket: PathBuf::from(daemon["socket"].as_str().unwrap()),
            publish: Publish {
                daemon: 0,
                generation: None,
                expects: Expects::Empty,
                key: key.unwrap(),
                content: ContentInfo {
                    manifest_bytes: manifest.len() as u64,
                    regions: vec![RegionInfo {
                        handle: rank.region.handle,
                        bytes: rank.region.bytes,
                    }],
                    tensors: rank.manifest.tensors().len() as u32,
                    aliases: rank.manifest.aliases().len() as u32,
                    checksums: rank.manifest.checksums().is_some(),
                },
            },
            descriptors: vec![weightd_gpu::sealed(&manifest).unwrap(), rank.region.fd],
        }
    };
    loaded.ranks.into_iter().map(publication).collect()
}

impl Publication {
    /// The same, in place of this generation.
    pub fn instead_of(self, generation: &str) -> Publication {
        let expects = Expects::Generation(generation.parse().unwrap());
        Publication {
            publish: Publish {
                expects,
                ..self.publish
            },
            ..self
        }
    }

    /// Publishes it.
    pub fn publish(&self) -> Result<Generation, (ErrorCode, String)> {
        answer(&self.say(1.0))
    }

    /// Says a part of it, with all descriptors, over a connection of its own.
    pub fn say(&self, part: f64) -> OwnedFd {
        let (connection, _) = connect(&self.socket).unwrap();
        let message = Message::from(self.publish.clone());
        let bytes = message.frame(1, self.descriptors.len()).unwrap();
        let bytes = &bytes[..(part * bytes.len() as f64) as usize];
        let descriptors: Vec<_> = self.descriptors.iter().map(AsFd::as_fd).collect();
        assert_eq!(send(&connection, bytes, &descriptors).unwrap(), bytes.len());
        connection
    }
}

/// What is answered to a publication that was said.
pub fn answer(connection: &OwnedFd) -> Result<Generation, (ErrorCode, String)> {
    let patience = Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    let mut heard = Vec::new();
    loop {
        let ready = poll(&mut [PollFd::new(connection, PollFlags::IN)], Some(&patience)).unwrap();
        assert!(ready > 0, "no answer");
        let mut buffer = [0; 4096];
        let received = receive(connection, &mut buffer, &mut Vec::new()).unwrap();
        assert!(received.bytes > 0, "the connection ended before an answer");
        heard.extend(&buffer[..received.bytes]);
        let Ok(Some(header)) = Header::decode(&heard) else {
            continue;
        };
        if heard.len() < HEADER_BYTES + header.body {
            continue;
        }
        return match Message::decode(header.kind, &heard[HEADER_BYTES..]).unwrap() {
            Message::Published(published) => Ok(published.generation),
            Message::Failure(failure) => Err((ErrorCode::from_number(failure.code), failure.message)),
            other => panic!("{other:?}"),
        };
    }
}
