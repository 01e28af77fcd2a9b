//! Answers on stdout.

use crate::error::CliError;
use std::fmt::Display;
use std::io::Write;

/// Prints one line, at once: whoever reads it may wait for it.
pub fn say(line: impl Display) -> Result<(), CliError> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{line}")
        .and_then(|()| stdout.flush())
        .map_err(|error| CliError::Failure(format!("cannot write to stdout: {error}")))
}
