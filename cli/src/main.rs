//! Keeps LLM weights on the device while engines restart.

mod args;
mod attach;
mod confine;
mod devices;
mod digest;
mod error;
mod health;
mod loader;
mod logs;
mod models;
mod node;
mod output;
mod owners;
mod plan;
mod preload;
mod probe;
mod process;
mod release;
mod scrub;
mod server;
mod signals;
mod speculative;
mod status;
mod stop;
mod vllm_flags;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use confine::no_core_dumps;
use error::CliError;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::set_name;
use std::panic::catch_unwind;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tracing::warn;

fn main() -> ExitCode {
    // Over a limit on file sizes, a write shall fail and say so instead of ending the process.
    let over_limit = Arc::new(AtomicBool::new(false));
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, over_limit);
    // Also a panic is logged, and the log written, before the process ends.
    let code = catch_unwind(|| {
        run().unwrap_or_else(|error| {
            logs::fail(&error);
            error.exit_code()
        })
    });
    logs::flush();
    code.unwrap_or(ExitCode::from(PANICKED))
}

/// What a process of Rust's exits with that panicked.
const PANICKED: u8 = 101;

fn run() -> Result<ExitCode, CliError> {
    let translated = vllm_flags::translate(std::env::args_os(), &Cli::command())?;
    let cli = Cli::parse_from(translated.args);
    name_process(&cli.command);
    let limited = raise_descriptor_limit();
    // Before the log has its thread.
    let ground = match &cli.command {
        Command::Server(args) => Some(server::Ground::take(args)?),
        _ => None,
    };
    let dumps = match &cli.command {
        // A launcher first looks at what it was given, which older kernels let dumpable processes do alone.
        Command::Loader(_) | Command::Probe(_) => no_core_dumps(),
        _ => Ok(()),
    };
    logs::start(&cli.log, cli.log_format)?;
    if let Err(why) = dumps {
        warn!("{why}");
    }
    if let Err(error) = limited {
        warn!("cannot raise the limit of open files: {error}");
    }
    if !translated.ignored.is_empty() {
        let ignored = translated.ignored.join(", ");
        warn!("flags of vLLM that have no effect here: {ignored}");
    }
    match cli.command {
        Command::Preload(args) => preload::run(&args, &cli.log),
        Command::Serve(args) => preload::serve::run(&args, &cli.log),
        Command::Attach(args) => attach::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Scrub(args) => scrub::run(&args),
        Command::Release(args) => release::run(&args),
        Command::Stop(args) => stop::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Digest(args) => digest::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Server(args) => server::run(&args, ground.expect("a server's")),
        Command::Loader(args) => loader::run(&args),
        Command::Probe(args) => probe::run(&args),
    }
}

/// Children are started from `/proc/self/exe`, and would be called `exe` in lists of processes. Called by the main
/// thread, and before a server is confined.
fn name_process(command: &Command) {
    let name = match command {
        Command::Devices(_) => c"weightd-devices",
        Command::Server(_) => c"weightd-server",
        Command::Loader(_) => c"weightd-loader",
        Command::Probe(_) => c"weightd-probe",
        _ => return,
    };
    // It is for people alone.
    let _ = set_name(name);
}

/// Daemons and leases take some descriptors each, in launchers, servers and engines; the soft limit is often 1024.
fn raise_descriptor_limit() -> Result<(), Errno> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    )
}
