//! The launcher's child processes. They are spawned by exec, get their one descriptor as standard
//! input, and leave the launcher's session.

use super::ending::Ending;
use super::manager::hide_from;
use crate::args::{DeviceArg, ModelArgs, ParallelArgs, RuntimeArg, ShardingArgs, WeightsArgs};
use crate::logs::format_arguments;
use crate::process;
use clap::ValueEnum;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use weightd_checkpoint::digest_hex;
use weightd_core::wire::message::DaemonId;

/// How long a killed server that is not our child is waited for.
const ADOPTED_ENDS_WITHIN: Timespec = Timespec {
    tv_sec: 3,
    tv_nsec: 0,
};

/// Starts the server behind the control socket's listener.
pub fn spawn_server(control: &Path, listener: OwnedFd, runtime: RuntimeArg, log: &str) -> io::Result<Child> {
    let mut command = ourselves("server", log);
    let runtime = runtime.to_possible_value().expect("every runtime has a name");
    command
        .arg("--control")
        .arg(control)
        .arg(format!("--runtime={}", runtime.get_name()))
        .stdin(Stdio::from(listener))
        .spawn()
}

/// What a loader is started for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// To load for all daemons.
    Everything,
    /// To load for those that lost what they had.
    Afresh(Vec<DaemonId>),
    /// To hand over the digest of the checkpoint that these hold, read from these files.
    Digest(Vec<DaemonId>, [u8; 32]),
}

/// Starts the loader at the other end of a channel, for devices of this kind.
pub fn spawn_loader(
    model: &ModelArgs,
    device: DeviceArg,
    checksums: bool,
    work: &Work,
    channel: OwnedFd,
    log: &str,
) -> io::Result<Child> {
    let mut command = ourselves("loader", log);
    let (daemons, files) = match work {
        Work::Everything => (&[][..], None),
        Work::Afresh(daemons) => (&daemons[..], None),
        Work::Digest(daemons, files) => (&daemons[..], Some(files)),
    };
    command
        .args(loader_args(model, device))
        .args(checksums.then_some("--checksums"))
        .args(daemons.iter().map(|daemon| format!("--daemon={daemon}")))
        .args(files.map(|files| format!("--digest-only={}", digest_hex(files))))
        .stdin(Stdio::from(channel))
        .spawn()
}

/// The serving process: a child of ours, or one that outlived its launcher.
#[derive(Debug)]
pub enum ServerProcess {
    Child(Child),
    /// Its process id, and the descriptor that means this process and no later one of that id; absent where
    /// that cannot be told.
    Adopted(u32, Option<OwnedFd>),
}

impl ServerProcess {
    /// The server behind `control` that says it is process `pid`.
    pub fn adopted(pid: u32, control: &Path) -> ServerProcess {
        let descriptor = process::open(pid).ok();
        // In another pid namespace this id is somebody else's. Looked at after it was opened: that process.
        ServerProcess::Adopted(pid, descriptor.filter(|_| process::is_server(pid, control)))
    }

    pub fn id(&self) -> u32 {
        match self {
            ServerProcess::Child(child) => child.id(),
            ServerProcess::Adopted(pid, _) => *pid,
        }
    }

    /// Kills it, unless it has ended, and waits for its end; says how it ended.
    pub fn end(self, ending: &mut Ending) -> String {
        match self {
            ServerProcess::Child(child) => ending.kill(child),
            ServerProcess::Adopted(_, None) => "ended".to_owned(),
            ServerProcess::Adopted(_, Some(process)) => {
                let _ = pidfd_send_signal(&process, Signal::KILL);
                let mut ended = [PollFd::new(&process, PollFlags::IN)];
                let _ = poll(&mut ended, Some(&ADOPTED_ENDS_WITHIN));
                "ended".to_owned()
            }
        }
    }
}

/// The child that tries an import.
pub fn probe(log: &str) -> Command {
    ourselves("probe", log)
}

/// How a process ended, for a person.
pub fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (_, Some(code)) => format!("exited with code {code}"),
        _ => "ended".to_owned(),
    }
}

/// The running binary, also where its file was replaced meanwhile: an upgrade must not mix
/// versions.
fn ourselves(subcommand: &str, log: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(format!("weightd {subcommand}"))
        .arg("--log")
        .arg(log)
        .args(format_arguments())
        .arg(subcommand)
        .stdout(Stdio::null());
    hide_from(&mut command);
    command
}

/// Every field is named here, so that a new one cannot be forgotten.
fn loader_args(model: &ModelArgs, device: DeviceArg) -> Vec<OsString> {
    let ModelArgs {
        model,
        weights,
        sharding,
    } = model;
    let WeightsArgs {
        revision,
        // Models are directories by now.
        download_dir: _,
        quantization,
        quantization_config,
        engine_version,
        key_extra,
        speculative_config,
    } = weights;
    let ShardingArgs {
        dtype,
        layout,
        tp_plan,
        parallel,
    } = sharding;
    let ParallelArgs {
        tensor_parallel_size,
        pipeline_parallel_size,
        data_parallel_size,
        data_parallel_size_local,
        data_parallel_start_rank,
        data_parallel_rank,
        nnodes,
        node_rank,
        enable_expert_parallel,
        expert_placement_strategy,
        pp_layer_partition,
        ranks_per_device,
        // Checked already, and nothing is made of them.
        master_addr: _,
        master_port: _,
        weight_cache_master_port: _,
        draft_master_port: _,
        data_parallel_address: _,
        data_parallel_rpc_port: _,
    } = parallel;
    let mut list: Vec<OsString> = Vec::new();
    let mut add = |name: &str, value: OsString| {
        // With `=`, so that no value is taken for a flag.
        let mut argument = OsString::from(format!("--{name}="));
        argument.push(value);
        list.push(argument);
    };
    add("model", model.into());
    add("revision", revision.into());
    add("engine-version", engine_version.into());
    for (name, value) in key_extra {
        add("key-extra", format!("{name}={value}").into());
    }
    add("dtype", dtype.name().into());
    add("layout", layout.name().into());
    if let Some(method) = quantization {
        add("quantization", method.into());
    }
    if let Some(config) = quantization_config {
        add("quantization-config", config.to_string().into());
    }
    if let Some(config) = speculative_config {
        add("speculative-config", config.into());
    }
    if let Some(plan) = tp_plan {
        add("tp-plan", plan.into());
    }
    add(
        "expert-placement-strategy",
        expert_placement_strategy.name().into(),
    );
    for layers in pp_layer_partition.iter().flatten() {
        add("pp-layer-partition", layers.to_string().into());
    }
    let numbers = [
        ("tensor-parallel-size", Some(*tensor_parallel_size)),
        ("pipeline-parallel-size", Some(*pipeline_parallel_size)),
        ("data-parallel-size", Some(*data_parallel_size)),
        ("data-parallel-size-local", *data_parallel_size_local),
        (
            "data-parallel-start-rank",
            data_parallel_rank.is_none().then_some(*data_parallel_start_rank),
        ),
        ("data-parallel-rank", *data_parallel_rank),
        ("nnodes", Some(*nnodes)),
        ("node-rank", Some(*node_rank)),
        ("ranks-per-device", Some(*ranks_per_device)),
    ];
    for (name, number) in numbers {
        if let Some(number) = number {
            add(name, number.to_string().into());
        }
    }
    if let Some(device) = device.to_possible_value() {
        add("device", device.get_name().into());
    }
    if *enable_expert_parallel {
        list.push("--enable-expert-parallel".into());
    }
    list
}
