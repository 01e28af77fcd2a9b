//! An engine in the test's own process, whose memory can be looked at later.

use crate::harness::Site;
use std::path::{Path, PathBuf};
use weightd_blocking::{Binding, Endpoint, Loaded, Loader};
use weightd_checkpoint::{Checkpoint, KeyOptions, Rank, ShardingOptions};
use weightd_core::content::{Key, Role};
use weightd_core::machine::AttachOptions;
use weightd_core::plan::placement::Parallel;
use weightd_gpu::Weights;
use weightd_socket::credentials::our_uid;

/// Maps rank 0, as an engine that embeds weightd does.
#[track_caller]
pub fn map(site: &Site, model: &Path, tp: u32) -> Loaded<Weights> {
    let status = site.status();
    let daemon = status.iter().find(|daemon| daemon["global_rank"] == 0).unwrap();
    let socket = PathBuf::from(daemon["socket"].as_str().unwrap());
    let options = AttachOptions::new(our_uid().unwrap());
    loader(&socket, options, key(model, tp)).attach().unwrap()
}

/// Why an engine of `role` with `key` gets nothing at `socket`.
#[track_caller]
pub fn refused(socket: &Path, key: Key, role: Role) -> String {
    let options = AttachOptions {
        role,
        ..AttachOptions::new(our_uid().unwrap())
    };
    loader(socket, options, key).attach().unwrap_err().to_string()
}

/// The key of rank 0, without options.
pub fn key(model: &Path, tp: u32) -> Key {
    key_of_rank(model, tp, 0)
}

/// The key of a rank of tensor parallelism, without options.
pub fn key_of_rank(model: &Path, tp: u32, rank: u32) -> Key {
    let checkpoint = Checkpoint::open(model).unwrap();
    let options = KeyOptions::new(sharding(tp));
    options
        .key(&checkpoint, checkpoint.identity(), rank_of(rank))
        .unwrap()
}

/// That what [`map`] mapped is what the checkpoint holds.
#[track_caller]
pub fn assert_intact(attached: &Loaded<Weights>, model: &Path, tp: u32) {
    assert_intact_rank(attached, model, tp, 0);
}

/// The same for a rank of tensor parallelism.
#[track_caller]
pub fn assert_intact_rank(attached: &Loaded<Weights>, model: &Path, tp: u32, rank: u32) {
    let checkpoint = Checkpoint::open(model).unwrap();
    let verified = weightd_checkpoint::verify(&checkpoint, &sharding(tp), rank_of(rank), attached.model());
    assert!(verified.unwrap().bytes > 0);
}

fn rank_of(tp: u32) -> Rank {
    Rank { dp: 0, pp: 0, tp }
}

fn sharding(tp: u32) -> ShardingOptions {
    ShardingOptions::new(Parallel {
        tensor: tp,
        pipeline: 1,
        data: 1,
    })
}

/// The loader of an engine that has the very files that the daemon loaded.
pub fn loader(socket: &Path, options: AttachOptions, key: Key) -> Loader {
    let same = || Err("the daemon loaded these very files".to_owned());
    Loader::from(Binding::with(
        Endpoint::socket(socket).unwrap(),
        options,
        key,
        same,
    ))
}
