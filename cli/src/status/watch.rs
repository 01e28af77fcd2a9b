//! `weightd status --watch`: the same again and again, until a signal.

use super::{Found, all, say_json, text};
use crate::args::StatusArgs;
use crate::error::CliError;
use crate::logs::LINE;
use crate::output::say;
use crate::signals::Signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::tcgetwinsize;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;
use weightd_core::text::short;

/// Another screen, without a cursor and without wrapping of lines, and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// To the first corner; and what is left of earlier text: to the end of a line, and of the screen.
const HOME: &str = "\x1b[H";
const REST_OF_LINE: &str = "\x1b[K";
const REST_OF_SCREEN: &str = "\x1b[J";

pub fn run(args: &StatusArgs, every: Duration) -> Result<ExitCode, CliError> {
    let signals = Signals::catch().map_err(CliError::failure)?;
    let live = std::io::stdout().is_terminal() && !args.json;
    let screen = if live { Some(Screen::enter()?) } else { None };
    loop {
        let (dir, found) = all(&args.place)?;
        let page = || page(text(&args.place, &dir, &found), &found);
        match &screen {
            _ if args.json => say_json(&found)?,
            Some(screen) => screen.show(&page())?,
            None => say(page())?,
        }
        if ends_within(&signals, every)? {
            return Ok(signals.exit_code());
        }
    }
}

/// The text, and below it which daemons do not answer.
fn page(text: String, found: &[Found]) -> String {
    let faults = found.iter().filter_map(Found::fault);
    text + &faults
        .map(|fault| format!("\n{}", short(&fault, LINE)))
        .collect::<String>()
}

/// Waits for the next round; true where a signal came first.
fn ends_within(signals: &Signals, every: Duration) -> Result<bool, CliError> {
    let every = Timespec::try_from(every).map_err(CliError::failure)?;
    let mut waited = [PollFd::new(signals, PollFlags::IN)];
    match poll(&mut waited, Some(&every)) {
        Ok(_) | Err(Errno::INTR) => Ok(signals.take() > 0),
        Err(error) => Err(CliError::failure(error)),
    }
}

/// The terminal while this watches; it is as before when this is dropped.
struct Screen;

impl Screen {
    fn enter() -> Result<Screen, CliError> {
        let screen = Screen;
        write(ENTER)?;
        Ok(screen)
    }

    fn show(&self, text: &str) -> Result<(), CliError> {
        let rows = match tcgetwinsize(std::io::stdout()) {
            Ok(size) if size.ws_row > 1 => usize::from(size.ws_row) - 1,
            _ => usize::MAX,
        };
        // Over what was there, so that nothing flickers. What does not fit is cut off.
        let lines: String = text
            .lines()
            .take(rows)
            .map(|line| format!("{line}{REST_OF_LINE}\r\n"))
            .collect();
        write(&format!("{HOME}{lines}{REST_OF_SCREEN}"))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = write(LEAVE);
    }
}

fn write(text: &str) -> Result<(), CliError> {
    let mut stdout = std::io::stdout();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| CliError::Failure(format!("cannot write to stdout: {error}")))
}
