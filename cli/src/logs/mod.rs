//! What a process says on stderr: lines for a person or for a machine, and bars while weights load.
//! stdout is for answers.
//!
//! A log that cannot be written is lost, and no reason to end or to wait: a server outlives the terminal
//! that started it, and nobody may read the pipe.

mod bars;
mod format;
mod output;
pub mod pace;

use crate::error::CliError;
use clap::ValueEnum;
use format::{Json, MessageOnly};
use output::Output;
use pace::Pace;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;
use tracing::Level;
use tracing_subscriber::EnvFilter;
use weightd_core::content::Role;
use weightd_core::text::short;
use weightd_core::wire::message::{DaemonId, DaemonInfo};

/// How lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For a person: time, level and message.
    #[default]
    Text,
    /// One JSON object a line: timestamp, level, target, message and, where the line is about a daemon, its
    /// rank and role.
    Json,
}

#[derive(Debug)]
struct Logs {
    format: LogFormat,
    output: Output,
}

/// The most bytes of a line that is not all ours, and of each of its values.
pub const LINE: usize = 4096;

/// One for the process, as its stderr is.
static LOGS: OnceLock<Logs> = OnceLock::new();

/// Logs from now on what `filter` lets through.
pub fn start(filter: &str, format: LogFormat) -> Result<(), CliError> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| CliError::Usage(format!("cannot read the log filter {filter:?}: {error}")))?;
    let output =
        Output::start().map_err(|error| CliError::Failure(format!("cannot log to stderr: {error}")))?;
    let logs = LOGS.get_or_init(|| Logs { format, output });
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| &logs.output)
        .log_internal_errors(false);
    match format {
        LogFormat::Json => builder.event_format(Json).init(),
        LogFormat::Text => builder
            .with_ansi(io::stderr().is_terminal())
            .with_target(false)
            .fmt_fields(MessageOnly)
            .init(),
    }
    // The standard hook writes to stderr itself, and waits for whoever reads it.
    let pace = Mutex::new(Pace::new());
    std::panic::set_hook(Box::new(move |panic| {
        let mut pace = pace.lock().unwrap_or_else(PoisonError::into_inner);
        if pace.admit(Instant::now(), ()).is_none() {
            return;
        }
        drop(pace);
        let text = panic.to_string().replace('\n', " ");
        tracing::error!("a bug in weightd, please report it: {text}");
    }));
    Ok(())
}

/// Says why the process fails, whatever is filtered.
pub fn fail(error: &CliError) {
    let text = format!("weightd: {}\n", short(&error.to_string(), LINE));
    match LOGS.get() {
        Some(logs) => logs.output.line(match logs.format {
            LogFormat::Text => text.into_bytes(),
            LogFormat::Json => format::json_line(Level::ERROR, "weightd", &error.to_string()).into_bytes(),
        }),
        // Where nobody can be told, the exit code still says it.
        None => drop(io::stderr().write_all(text.as_bytes())),
    }
}

/// Waits until everything is written, for a short while.
pub fn flush() {
    if let Some(logs) = LOGS.get() {
        logs.output.flush();
    }
}

/// Lines that stderr did not take.
pub fn lost_lines() -> u64 {
    LOGS.get().map_or(0, |logs| logs.output.lost())
}

/// The arguments that make a child log as this process does.
pub fn format_arguments() -> [&'static str; 2] {
    let json = LOGS.get().is_some_and(|logs| logs.format == LogFormat::Json);
    ["--log-format", if json { "json" } else { "text" }]
}

/// Shows how far something is, in bytes; false where there is no terminal for a person to see it.
pub fn show_progress(name: &impl fmt::Display, done: u64, total: u64) -> bool {
    let Some(logs) = LOGS.get() else { return false };
    if logs.format != LogFormat::Text || !io::stderr().is_terminal() {
        return false;
    }
    logs.output.progress(name.to_string(), done, total);
    true
}

/// Nothing loads any more.
pub fn end_progress() {
    if let Some(logs) = LOGS.get() {
        logs.output.end_progress();
    }
}

/// Logs a line about a daemon: its name, then the text; rank and role are fields too.
macro_rules! about {
    ($level:ident, $name:expr, $($text:tt)+) => {{
        let name = $name;
        tracing::$level!(rank = name.rank, role = name.role, "{name}: {}", format_args!($($text)+));
    }};
}
pub(crate) use about;

/// Who a line is about. Displayed as `rank 1`, or `rank 1 draft`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DaemonName {
    number: DaemonId,
    /// The global rank; like the role, absent of a daemon that is not known.
    pub rank: Option<u32>,
    pub role: Option<&'static str>,
}

impl DaemonName {
    pub fn new(number: DaemonId, info: Option<&DaemonInfo>) -> DaemonName {
        DaemonName {
            number,
            rank: info.map(|info| info.global_rank),
            role: info.map(|info| info.key.role.name()),
        }
    }
}

impl fmt::Display for DaemonName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank}")?,
            None => write!(f, "daemon {}", self.number)?,
        }
        match self.role {
            Some(role) if role == Role::Draft.name() => write!(f, " {role}"),
            _ => Ok(()),
        }
    }
}
