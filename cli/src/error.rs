//! How a command fails.

use std::fmt;
use std::process::ExitCode;

/// One line for a person, and the exit code that tells scripts what kind it is.
#[derive(Debug)]
pub enum CliError {
    /// What was asked cannot be: exit code 2.
    Usage(String),
    /// What was asked did not work: exit code 1.
    Failure(String),
    /// A signal of this name came before anything was started, with the exit code for it.
    Signal(&'static str, ExitCode),
}

impl CliError {
    pub fn usage(error: impl fmt::Display) -> CliError {
        CliError::Usage(error.to_string())
    }

    pub fn failure(error: impl fmt::Display) -> CliError {
        CliError::Failure(error.to_string())
    }

    pub fn exit_code(&self) -> ExitCode {
        match self {
            CliError::Usage(_) => ExitCode::from(2),
            CliError::Failure(_) => ExitCode::from(1),
            CliError::Signal(_, code) => *code,
        }
    }
}

impl fmt::Display for CliError {
    /// On one line, whatever the parts say: one line is one error for whoever greps.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            CliError::Usage(text) | CliError::Failure(text) => text,
            CliError::Signal(name, _) => return write!(f, "ended by {name} before anything was started"),
        };
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        f.write_str(lines.next().unwrap_or_default())?;
        lines.try_for_each(|line| write!(f, "; {line}"))
    }
}
