//! Names that are held and at which no daemon is found: their launcher is loading, or somebody removed or replaced their
//! sockets.

use super::{Found, ask};
use crate::args::WhereArgs;
use crate::error::CliError;
use crate::node;
use crate::owners::{Living, control_sockets, stop_command};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_socket::seen::is_absent;

/// The state of a daemon that will serve.
pub const LOADING: &str = "loading";

/// A launcher puts back names that it lost, and one that ends removes them before it is gone.
const SETTLES_WITHIN: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);

/// Those beside what was found by the sockets.
pub fn find(place: &WhereArgs, dir: &Path, found: &[Found]) -> Result<Vec<Found>, CliError> {
    let owned = match control_sockets(dir, place.instance.as_deref()) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        owned => owned.map_err(node::cannot_list(dir))?,
    };
    let seen: BTreeSet<&PathBuf> = found.iter().map(|found| &found.socket).collect();
    let unseen = owned
        .into_values()
        .flatten()
        .filter(|socket| !seen.contains(socket));
    let until = Instant::now() + SETTLES_WITHIN;
    Ok(unseen.filter_map(|socket| look(socket, until)).collect())
}

/// `None` where nobody holds the name.
fn look(socket: PathBuf, until: Instant) -> Option<Found> {
    loop {
        let living = Living::of(&socket);
        if living == Living::default() {
            return None;
        }
        let unseen = |state, why: String| Found {
            socket: socket.clone(),
            status: Err(why),
            activity: None,
            state,
            living,
        };
        // The name that a socket has before its daemon serves.
        if living.launcher.is_some() && !is_absent(&socket.with_extension("tmp")) {
            return Some(unseen(LOADING, "its weights are not loaded yet".to_owned()));
        }
        if let Some(found) = ask(socket.clone()) {
            return Some(found);
        }
        if Instant::now() >= until {
            let dir = socket.parent().unwrap_or(Path::new("/"));
            let stop = stop_command(dir, &socket);
            let why = match living.launcher {
                None => {
                    format!("take it over with `weightd preload` or `serve` as before, or end it with {stop}")
                }
                Some(_) => format!("end it with {stop}"),
            };
            let why = format!("no socket leads to it, removed perhaps by a cleaner: {why}");
            return Some(unseen("not reached", why));
        }
        sleep(PAUSE);
    }
}
