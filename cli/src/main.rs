//! Keeps LLM weights on the device while engines restart.

mod args;
mod attach;
mod devices;
mod error;
mod loader;
mod models;
mod node;
mod output;
mod owners;
mod plan;
mod preload;
mod probe;
mod release;
mod server;
mod signals;
mod speculative;
mod status;
mod stop;

use args::{Cli, Command};
use clap::Parser;
use error::CliError;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    // Over a limit on file sizes, a write shall fail and say so instead of ending the process.
    let over_limit = Arc::new(AtomicBool::new(false));
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, over_limit);
    run(Cli::parse()).unwrap_or_else(|error| {
        // Where nobody can be told, the exit code still says it.
        let _ = writeln!(std::io::stderr(), "weightd: {error}");
        error.exit_code()
    })
}

fn run(cli: Cli) -> Result<ExitCode, CliError> {
    log_to_stderr(&cli.log)?;
    match cli.command {
        Command::Preload(args) => preload::run(&args, &cli.log),
        Command::Attach(args) => attach::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Release(args) => release::run(&args),
        Command::Stop(args) => stop::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Server(args) => server::run(&args),
        Command::Loader(args) => loader::run(&args),
        Command::Probe(args) => probe::run(&args),
    }
}

/// Logs go to stderr: stdout is for answers. A log that cannot be written is lost, and no reason to
/// end: the server outlives the terminal that started it.
fn log_to_stderr(filter: &str) -> Result<(), CliError> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| CliError::Usage(format!("cannot read the log filter {filter:?}: {error}")))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        .log_internal_errors(false)
        .init();
    Ok(())
}
