//! The launcher's child processes. They are spawned by exec, get their one descriptor as standard
//! input, and leave the launcher's session.

use crate::args::PreloadArgs;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

/// Starts the server behind the control socket's listener.
pub fn spawn_server(control: &Path, listener: OwnedFd, log: &str) -> io::Result<Child> {
    let mut command = ourselves("server", log);
    command
        .arg("--control")
        .arg(control)
        .stdin(Stdio::from(listener))
        .spawn()
}

/// Starts the loader at the other end of a channel.
pub fn spawn_loader(args: &PreloadArgs, channel: OwnedFd, log: &str) -> io::Result<Child> {
    let mut command = ourselves("loader", log);
    command
        .args(loader_args(args))
        .stdin(Stdio::from(channel))
        .spawn()
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
        .arg(subcommand)
        .stdout(Stdio::null());
    command
}

fn loader_args(args: &PreloadArgs) -> Vec<OsString> {
    let (model, parallel) = (&args.model, &args.model.parallel);
    let mut list: Vec<OsString> = Vec::new();
    let mut add = |name: &str, value: OsString| {
        // With `=`, so that no value is taken for a flag.
        let mut argument = OsString::from(format!("--{name}="));
        argument.push(value);
        list.push(argument);
    };
    add("model", model.model.clone().into());
    add("revision", model.revision.clone().into());
    add("engine-version", model.engine_version.clone().into());
    for (name, value) in &model.key_extra {
        add("key-extra", format!("{name}={value}").into());
    }
    let numbers = [
        ("tensor-parallel-size", parallel.tensor_parallel_size),
        ("pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("data-parallel-size", parallel.data_parallel_size),
        ("data-parallel-start-rank", parallel.data_parallel_start_rank),
        ("nnodes", parallel.nnodes),
        ("node-rank", parallel.node_rank),
        ("ranks-per-device", parallel.ranks_per_device),
    ];
    for (name, number) in numbers {
        add(name, number.to_string().into());
    }
    if let Some(local) = parallel.data_parallel_size_local {
        add("data-parallel-size-local", local.to_string().into());
    }
    list
}
