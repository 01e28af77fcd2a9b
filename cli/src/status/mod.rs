//! `weightd status`: the daemons of a socket directory, and who holds their memory. Also how other
//! commands find them.

mod holders;
mod json;
mod servers;
mod table;
mod unseen;
mod watch;

use crate::args::{StatusArgs, WhereArgs};
use crate::error::CliError;
use crate::logs;
use crate::node;
use crate::output::{json_text, say};
use crate::owners::{Living, is_silent};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use unseen::LOADING;
use weightd_blocking::request::{RequestError, request};
use weightd_core::content::Role;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{Activity, DaemonStatus, GetActivity, GetStatus, Holds};
use weightd_socket::connect::ConnectError;
use weightd_socket::path::{Named, list};

const ANSWERS_WITHIN: Span = Span::secs(5);

/// A daemon that was found, or a socket that did not answer.
pub struct Found {
    pub socket: PathBuf,
    pub status: Result<DaemonStatus, String>,
    /// Absent where the server is of an older release.
    pub activity: Option<Activity>,
    /// Of one that did not answer: what is shown of it, and who lives of those that hold its name.
    state: &'static str,
    living: Living,
}

impl Found {
    /// Whose weights it holds, where it answered.
    pub fn role(&self) -> Option<Role> {
        self.status.as_ref().ok().map(|status| status.info.key.role)
    }

    /// What is wrong with it: one that is not loaded yet will serve.
    fn fault(&self) -> Option<String> {
        let why = self.status.as_ref().err().filter(|_| self.state != LOADING)?;
        Some(format!("{}: {why}", self.socket.display()))
    }
}

pub fn run(args: &StatusArgs) -> Result<ExitCode, CliError> {
    if let Some(every) = args.watch {
        return watch::run(args, every);
    }
    let (dir, found) = all(&args.place)?;
    if args.json {
        say_json(&found)?;
    } else {
        say(text(&args.place, &dir, &found))?;
    }
    let mut code = ExitCode::SUCCESS;
    for fault in found.iter().filter_map(Found::fault) {
        code = ExitCode::FAILURE;
        logs::fail(&CliError::Failure(fault));
    }
    Ok(code)
}

/// One object for each daemon.
fn say_json(found: &[Found]) -> Result<(), CliError> {
    found.iter().try_for_each(|found| match &found.status {
        Ok(status) => say(json_text(&json::object(status, found.activity.as_ref()))),
        Err(why) => say(json_text(&json::unanswered(found, why))),
    })
}

/// Every daemon that was found, and every name that is held without one, in the order of their sockets.
fn all(place: &WhereArgs) -> Result<(PathBuf, Vec<Found>), CliError> {
    let (dir, mut found) = find(place)?;
    found.extend(unseen::find(place, &dir, &found)?);
    found.sort_by(|one, other| one.socket.cmp(&other.socket));
    Ok((dir, found))
}

/// The table, who holds each device's memory, and what the servers gave up.
fn text(place: &WhereArgs, dir: &Path, found: &[Found]) -> String {
    if found.is_empty() {
        return node::no_daemons(place, dir);
    }
    [table::lines(found), holders::lines(found), servers::lines(found)]
        .concat()
        .join("\n")
}

/// Asks every daemon of the directory, whose path comes first, or of one instance in it. A directory that
/// does not exist holds none.
pub fn find(place: &WhereArgs) -> Result<(PathBuf, Vec<Found>), CliError> {
    let dir = match node::open_dir_if_there(place)? {
        Ok(dir) => dir,
        Err(absent) => return Ok((absent, Vec::new())),
    };
    let sockets = list(dir.path()).map_err(node::cannot_list(dir.path()))?;
    let of_instance = |socket: &PathBuf| {
        let instance = Named::from_path(socket).and_then(|named| named.instance);
        place.instance.is_none() || place.instance == instance
    };
    // All at once: each may be waited for.
    thread::scope(|scope| {
        let asked: Vec<_> = sockets
            .into_iter()
            .filter(of_instance)
            .map(|socket| thread::Builder::new().spawn_scoped(scope, move || ask(socket)))
            .collect();
        let found = asked.into_iter().map(|asked| {
            let panicked = |_| CliError::failure("asking a daemon panicked; this is a bug in weightd");
            asked.map_err(CliError::failure)?.join().map_err(panicked)
        });
        let found: Vec<Option<Found>> = found.collect::<Result<_, CliError>>()?;
        Ok((dir.path().to_owned(), found.into_iter().flatten().collect()))
    })
}

/// `None` for a socket that a killed launcher and server left behind: nobody listens there.
fn ask(socket: PathBuf) -> Option<Found> {
    let mut living = Living::default();
    let status = match status(&socket) {
        Err(RequestError::Connect(ConnectError::Absent { .. })) => return None,
        Ok(Message::DaemonStatus(status)) => Ok(status),
        Ok(other) => Err(format!("answered with a {} message", other.name())),
        Err(error) => {
            living = Living::of(&socket);
            let advice = if is_silent(&error) {
                living.advice()
            } else {
                String::new()
            };
            let why = match error {
                // Whoever says it names the socket.
                RequestError::Ask { error, .. } => error.to_string(),
                error => error.to_string(),
            };
            Err(why + &advice)
        }
    };
    let activity = match status
        .is_ok()
        .then(|| request(&socket, GetActivity {}, ANSWERS_WITHIN))
    {
        Some(Ok(Message::Activity(activity))) => Some(activity),
        _ => None,
    };
    Some(Found {
        socket,
        status,
        activity,
        state: "no answer",
        living,
    })
}

fn status(socket: &Path) -> Result<Message, RequestError> {
    request(socket, GetStatus {}, ANSWERS_WITHIN)
}

/// The state's name and the generation that it is about.
fn holds(status: &DaemonStatus) -> (&'static str, Option<String>) {
    match status.holds {
        Holds::Empty => ("empty", None),
        Holds::Content(generation) => ("serving", Some(generation.to_string())),
        Holds::Released(generation) => ("released", Some(generation.to_string())),
        Holds::Lost(generation) => ("lost", Some(generation.to_string())),
    }
}
