//! The command line.
//!
//! A heading of the help holds for all that follows, also outside of the group that sets it: what a command has of its
//! own stands before its groups.

use crate::logs::LogFormat;
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;
use weightd_checkpoint::{FloatDtype, Layout, digest_from_hex};
use weightd_core::plan::experts::ExpertPlacement;
use weightd_socket::path::{PathError, check_instance};

/// Keeps LLM weights on the device while engines restart.
///
/// `weightd preload` loads a checkpoint once and serves it; an engine that embeds weightd (or
/// `weightd attach`, its stand-in) maps the weights in about a millisecond.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,

    /// What to log on stderr: error, warn, info, debug or trace, also by module.
    #[arg(
        long,
        global = true,
        help_heading = "Logging",
        value_name = "FILTER",
        env = "WEIGHTD_LOG",
        default_value = "info"
    )]
    pub log: String,

    /// How lines on stderr are written: text for a person, json for a machine.
    #[arg(
        long,
        global = true,
        help_heading = "Logging",
        value_name = "FORMAT",
        env = "WEIGHTD_LOG_FORMAT",
        default_value = "text"
    )]
    pub log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Load a checkpoint and serve it until Ctrl-C.
    Preload(PreloadArgs),
    /// Serve what engines publish, until Ctrl-C.
    Serve(ServeArgs),
    /// Map what is served, as an engine would.
    Attach(AttachArgs),
    /// List the daemons of a socket directory.
    Status(StatusArgs),
    /// Prove that resident weights are those that were loaded, by their checksums.
    Scrub(ScrubArgs),
    /// Ask a daemon to let its weights go.
    Release(ReleaseArgs),
    /// End the launchers and servers of a socket directory.
    Stop(StopArgs),
    /// Print which ranks this node serves and, of a model, what each would hold.
    Plan(PlanArgs),
    /// Print the digest of a checkpoint's bytes, by which it is known wherever it lies.
    Digest(DigestArgs),
    /// The search for CUDA devices.
    #[command(hide = true)]
    Devices(DevicesArgs),
    /// The serving process of a launcher.
    #[command(hide = true)]
    Server(ServerArgs),
    /// The loading process of a launcher.
    #[command(hide = true)]
    Loader(LoaderArgs),
    /// A launcher's try at an import.
    #[command(hide = true)]
    Probe(ProbeArgs),
}

/// Where daemons are found.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Daemons")]
pub struct WhereArgs {
    /// The directory of the sockets [default: $WEIGHTD_SOCKET_DIR, else /tmp/weightd-UID]
    #[arg(long, value_name = "DIR", alias = "weight-cache-socket-dir")]
    pub socket_dir: Option<PathBuf>,

    /// A name of your own, so that several models can share a device: 1 to 32 letters, digits and dashes.
    ///
    /// Without it preload, serve, attach and plan mean the daemons that have none; status, scrub, release and stop mean
    /// all daemons of the directory, whatever instance they are of.
    #[arg(long, value_name = "NAME", value_parser = instance)]
    pub instance: Option<String>,

    /// What the weights are on: auto takes CUDA, and cpu where there is no CUDA device; one that does not work is an
    /// error.
    #[arg(long, value_name = "KIND", default_value = "auto")]
    pub device: DeviceArg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    Auto,
    Cpu,
    Cuda,
}

/// How the model is spread over ranks and nodes. Flags have vLLM's names; its short forms of several
/// letters, such as `-tp`, are rewritten before this is parsed.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Parallelism")]
pub struct ParallelArgs {
    /// Ranks that share each layer; also -tp, as for vLLM.
    #[arg(
        long,
        short = 't',
        visible_alias = "tp",
        value_name = "N",
        default_value_t = 1
    )]
    pub tensor_parallel_size: u32,

    /// Stages that share the layers among them; also -pp.
    #[arg(
        long,
        short = 'p',
        visible_alias = "pp",
        value_name = "N",
        default_value_t = 1
    )]
    pub pipeline_parallel_size: u32,

    /// Replicas of the model; also -dp.
    #[arg(
        long,
        short = 'd',
        visible_alias = "dp",
        value_name = "N",
        default_value_t = 1
    )]
    pub data_parallel_size: u32,

    /// Replicas on this node, where there is one launcher for each node; also -dpl [default: all]
    #[arg(long, value_name = "N")]
    pub data_parallel_size_local: Option<u32>,

    /// The first replica of this node; also -dpr.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub data_parallel_start_rank: u32,

    /// The one replica of this launcher, where each replica is an engine of its own; also -dpn.
    #[arg(long, value_name = "N", conflicts_with = "data_parallel_start_rank")]
    pub data_parallel_rank: Option<u32>,

    /// Nodes that the world is split over.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 1)]
    pub nnodes: u32,

    /// Which of them this is, from 0.
    #[arg(long, short = 'r', value_name = "N", default_value_t = 0)]
    pub node_rank: u32,

    /// Spread whole experts over the tensor and data parallel ranks, instead of slicing each; also -ep.
    #[arg(long)]
    pub enable_expert_parallel: bool,

    /// How experts are spread: linear (contiguous) or round_robin.
    #[arg(long, value_name = "NAME", default_value = "linear")]
    pub expert_placement_strategy: ExpertPlacement,

    /// The layers of each stage, for example 8,8,9,7 [default: as even as they go]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    pub pp_layer_partition: Option<Vec<u64>>,

    /// Ranks that share each device.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub ranks_per_device: u32,

    /// Accepted for compatibility; nothing waits on it.
    #[arg(long, value_name = "HOST")]
    pub master_addr: Option<String>,

    /// Accepted for compatibility and checked; nothing waits on it.
    #[arg(long, value_name = "PORT")]
    pub master_port: Option<u16>,

    /// vLLM's name for the master port of what caches weights: where it is given, --master-port is the
    /// engine's.
    #[arg(long, value_name = "PORT", hide = true)]
    pub weight_cache_master_port: Option<u16>,

    /// Accepted for compatibility and checked [default: master port + 1]
    #[arg(long, value_name = "PORT", alias = "weight-cache-draft-master-port")]
    pub draft_master_port: Option<u16>,

    /// Accepted for compatibility; nothing waits on it. Also -dpa.
    #[arg(long, value_name = "HOST")]
    pub data_parallel_address: Option<String>,

    /// Accepted for compatibility; nothing waits on it. Also -dpp.
    #[arg(long, value_name = "PORT")]
    pub data_parallel_rpc_port: Option<u16>,
}

/// How weights are spread over ranks and held by them.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct ShardingArgs {
    /// Cast floating weights: auto, bfloat16, float16 or float32. Quantized ones are never cast.
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    pub dtype: FloatDtype,

    /// Hold tensors under the checkpoint's names (checkpoint), or fused and padded as vLLM's modules
    /// do (vllm).
    #[arg(long, value_name = "NAME", default_value = "checkpoint")]
    pub layout: Layout,

    /// Sharding rules of your own: a JSON file with a tensor parallel plan as transformers has them,
    /// for example {"model.layers.*.mlp.up_proj": "colwise"}.
    #[arg(long, value_name = "FILE")]
    pub tp_plan: Option<PathBuf>,

    #[command(flatten)]
    pub parallel: ParallelArgs,
}

/// Which weights.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// The directory of the checkpoint (config.json and safetensors files), or the id of a repository that
    /// the local Hugging Face cache holds. It may also come without the flag.
    #[arg(long, short = 'm', value_name = "DIR|ID")]
    pub model: PathBuf,

    #[command(flatten)]
    pub weights: WeightsArgs,

    #[command(flatten)]
    pub sharding: ShardingArgs,
}

/// What else decides which weights are meant.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct WeightsArgs {
    /// The revision of the model: a branch, tag or commit of a repository [default: main]; part of the key.
    #[arg(long, value_name = "REV", default_value = "", hide_default_value = true)]
    pub revision: String,

    /// The cache to look for repositories in [default: as HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME say, else
    /// ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR")]
    pub download_dir: Option<PathBuf>,

    /// The quantization method of the checkpoint [default: the one that its config.json names]
    #[arg(long, short = 'q', value_name = "METHOD")]
    pub quantization: Option<String>,

    /// What overrides the checkpoint's quantization at run time; part of the key.
    #[arg(long, value_name = "JSON", value_parser = json_object)]
    pub quantization_config: Option<Value>,

    /// Ties the weights to one version of an engine; part of the key.
    #[arg(long, value_name = "VERSION", default_value = "")]
    pub engine_version: String,

    /// Anything else that an engine must have in common with the daemon; part of the key.
    #[arg(long, value_name = "NAME=VALUE", value_parser = key_extra)]
    pub key_extra: Vec<(String, String)>,

    /// Speculative decoding, as vLLM is told of it: the draft of methods mtp, eagle and eagle3 is held as
    /// well, for example {"method": "eagle3", "model": "DIR"}. Also --speculative-config.method NAME and
    /// so on.
    #[arg(long, value_name = "JSON")]
    pub speculative_config: Option<String>,
}

fn digest(text: &str) -> Result<[u8; 32], &'static str> {
    digest_from_hex(text).ok_or("expected the 64 hex digits that `weightd digest` prints")
}

fn instance(name: &str) -> Result<String, PathError> {
    check_instance(name).map(|()| name.to_owned())
}

fn json_object(text: &str) -> Result<Value, String> {
    match serde_json::from_str(text) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err("expected a JSON object".to_owned()),
        Err(error) => Err(format!("expected a JSON object: {error}")),
    }
}

fn pause(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse()
        .ok()
        .filter(|seconds| (0.1..=86400.0).contains(seconds));
    let seconds = seconds.ok_or("expected seconds from 0.1 to 86400, for example 2")?;
    Ok(Duration::from_secs_f64(seconds))
}

fn key_extra(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE, for example kv_cache_dtype=fp8".to_owned()),
    }
}

#[derive(Clone, Debug, Args)]
pub struct PreloadArgs {
    /// Take a checksum of each tensor while it is loaded, so that `weightd scrub` can prove what is resident.
    #[arg(long)]
    pub checksums: bool,

    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub launcher: LauncherArgs,
}

#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Serve a draft beside each target, on the last pipeline stage, for speculative decoding.
    #[arg(long)]
    pub draft: bool,

    /// What a publisher does where a device cannot hold old and new weights at once: keep the old, and
    /// fail; or drop-first, so that nothing is served until the new are there.
    #[arg(long, value_name = "HOW", default_value = "keep")]
    pub replace: ReplaceArg,

    #[command(flatten)]
    pub parallel: ParallelArgs,

    #[command(flatten)]
    pub launcher: LauncherArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReplaceArg {
    Keep,
    DropFirst,
}

/// What every launcher is told, wherever its weights come from.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Daemons")]
pub struct LauncherArgs {
    #[command(flatten)]
    pub place: WhereArgs,

    /// Refuse `weightd release` and engines that ask to let go.
    #[arg(long)]
    pub no_release: bool,

    /// Answer /health and /metrics at this port [default: at none]
    #[arg(
        long,
        value_name = "PORT",
        alias = "weight-cache-health-port",
        help_heading = "Health"
    )]
    pub health_port: Option<u16>,

    /// The address to answer them at.
    #[arg(
        long,
        value_name = "HOST",
        alias = "weight-cache-health-host",
        default_value = "127.0.0.1",
        requires = "health_port",
        help_heading = "Health"
    )]
    pub health_host: String,

    /// What the serving process runs on; they serve the same, and are there to be compared.
    #[arg(long, value_name = "NAME", default_value = "blocking", hide = true)]
    pub runtime: RuntimeArg,
}

/// What a serving process waits with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RuntimeArg {
    /// A thread of its own, which blocks.
    Blocking,
    /// tokio, on one thread.
    Tokio,
    /// smol, on one thread.
    Smol,
}

#[derive(Clone, Debug, Args)]
pub struct AttachArgs {
    #[command(flatten)]
    pub ranks: RankChoice,

    /// Map the draft of --speculative-config instead of the target.
    #[arg(long, requires = "speculative_config")]
    pub draft: bool,

    /// Compare every mapped byte: with what the checkpoint holds for this rank, or, without reading that,
    /// with the checksums that were taken while it was loaded (`preload --checksums`).
    #[arg(long, value_name = "WITH", num_args = 0..=1, require_equals = true, default_missing_value = "checkpoint")]
    pub verify: Option<VerifyArg>,

    /// The digest of the checkpoint, as `weightd digest` prints it, which you vouch for: nothing is read to find
    /// it out. Weights with this digest are mapped, whatever the files hold.
    #[arg(long, value_name = "HEX", value_parser = digest)]
    pub checkpoint_digest: Option<[u8; 32]>,

    /// Write each rank as DIR/dp{D}_pp{P}_tp{T}.safetensors; DIR must hold no checkpoint.
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,

    /// Keep the mapping and the lease until Ctrl-C, and say when a daemon goes.
    #[arg(long)]
    pub hold: bool,

    /// Wait for daemons that are not ready yet, this many seconds, at most a year.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 0,
        value_parser = clap::value_parser!(u64).range(..=31_536_000)
    )]
    pub wait: u64,

    /// Print JSON, one object for each rank.
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub place: WhereArgs,
}

/// What mapped weights are compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyArg {
    Checkpoint,
    Checksums,
}

/// Which of a node's ranks.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct RankChoice {
    /// The rank with this global number.
    #[arg(long, value_name = "N")]
    pub rank: Option<u32>,

    /// Every rank of this node.
    #[arg(long)]
    pub all: bool,
}

#[derive(Clone, Debug, Args)]
pub struct StatusArgs {
    /// Print JSON, one object for each daemon.
    #[arg(long)]
    pub json: bool,

    /// Look again every so many seconds, until Ctrl-C.
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "2",
        value_parser = pause
    )]
    pub watch: Option<Duration>,

    #[command(flatten)]
    pub place: WhereArgs,
}

#[derive(Clone, Debug, Args)]
pub struct ScrubArgs {
    /// Only the daemons of the rank with this global number [default: every rank's]
    #[arg(long, value_name = "N")]
    pub rank: Option<u32>,

    /// Print JSON, one object for each daemon.
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub place: WhereArgs,
}

#[derive(Clone, Debug, Args)]
pub struct ReleaseArgs {
    #[command(flatten)]
    pub ranks: RankChoice,

    /// Only if this generation is the current one, as `weightd status` prints it.
    #[arg(long, value_name = "GENERATION", requires = "rank")]
    pub generation: Option<String>,

    #[command(flatten)]
    pub place: WhereArgs,
}

#[derive(Clone, Debug, Args)]
pub struct StopArgs {
    #[command(flatten)]
    pub place: WhereArgs,
}

#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// The whole world: what each node serves. Nodes are counted by --nnodes, or follow from
    /// --data-parallel-size-local where its multiples fill the world.
    #[arg(long)]
    pub all_nodes: bool,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,

    /// The checkpoint, a directory or a repository's id, of which no weight is read. It may also come without
    /// the flag.
    #[arg(long, short = 'm', value_name = "DIR|ID", help_heading = "Model")]
    pub model: Option<PathBuf>,

    #[command(flatten)]
    pub weights: WeightsArgs,

    #[command(flatten)]
    pub sharding: ShardingArgs,

    #[command(flatten)]
    pub place: WhereArgs,
}

#[derive(Clone, Debug, Args)]
pub struct DigestArgs {
    /// The directory of the checkpoint, or the id of a repository that the local Hugging Face cache holds. It may
    /// also come without the flag.
    #[arg(long, short = 'm', value_name = "DIR|ID")]
    pub model: PathBuf,

    /// The revision of a repository [default: main]
    #[arg(long, value_name = "REV", default_value = "", hide_default_value = true)]
    pub revision: String,

    /// The cache to look for repositories in.
    #[arg(long, value_name = "DIR")]
    pub download_dir: Option<PathBuf>,

    /// Read every byte, also where the digest of these files was computed before.
    #[arg(long)]
    pub recompute: bool,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Debug, Args)]
pub struct DevicesArgs {}

/// The control socket's listener comes as standard input.
#[derive(Clone, Debug, Args)]
pub struct ServerArgs {
    /// The path of the control socket.
    #[arg(long)]
    pub control: PathBuf,

    /// As for `preload` and `serve`.
    #[arg(long, default_value = "blocking")]
    pub runtime: RuntimeArg,
}

/// The channel to the launcher comes as standard input.
#[derive(Clone, Debug, Args)]
pub struct LoaderArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// As for `preload`.
    #[arg(long)]
    pub device: DeviceArg,

    /// As for `preload`.
    #[arg(long)]
    pub checksums: bool,

    /// Load for these daemons alone, by local rank [default: all]
    #[arg(long = "daemon", value_name = "N")]
    pub daemons: Vec<u32>,

    /// Load nothing: hand over the digest of the checkpoint, if its files are still these
    #[arg(long, value_name = "FILES", value_parser = digest)]
    pub digest_only: Option<[u8; 32]>,
}

/// The channel to the launcher comes as standard input.
#[derive(Clone, Debug, Args)]
pub struct ProbeArgs {}

#[cfg(test)]
mod tests;
