//! What a launcher starts from: nothing, a server that outlived its launcher, or what the service manager
//! kept.

use super::daemons::{Behind, Claimed, Control, Daemons, claim, server_of};
use super::digests::Digests;
use super::manager::Kept;
use super::store::{self, Store};
use crate::error::CliError;
use crate::owners::remove_stale_control;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use weightd_blocking::adopt::adopt;
use weightd_blocking::request::RequestError;
use weightd_core::content::{Comparison, Role};
use weightd_core::machine::{AskError, Inheritance};
use weightd_core::text::short;
use weightd_core::time::Span;
use weightd_core::wire::message::{DaemonInfo, ErrorCode};
use weightd_socket::connect::{ConnectError, connect};
use weightd_socket::listen::was_bound_for;
use weightd_socket::lock::{Lock, LockError, read_owner};

/// How long a server may take to hand over what it holds.
const HANDS_OVER_WITHIN: Span = Span::secs(10);
/// The most fields that an error names.
const NAMED: usize = 24;
/// The most bytes that an error has of a name.
const NAME: usize = 64;
/// How long a server may take to end that is just ending.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// What a launcher goes on with.
#[derive(Debug)]
pub enum Past {
    /// Nothing: the weights are to be loaded.
    None,
    /// All that a server holds, and the connection that it follows.
    Server(Inheritance<OwnedFd>, OwnedFd),
    /// All that the service manager kept.
    Store(Inheritance<OwnedFd>),
}

/// Takes the names of the wanted daemons, with what is behind them. What the service manager `kept` and
/// what cannot be used is let go.
pub fn begin(
    dir: &Path,
    mut wanted: Vec<DaemonInfo>,
    digests: &mut Digests<'_>,
    store: Option<&mut Store>,
    kept: Kept,
) -> Result<(Daemons, Past), CliError> {
    // A server that lives has it all as well, and must not be given a second one beside it.
    let served = !kept.is_empty() && is_served(dir, &wanted);
    if served {
        // Its locks and listeners may have been replaced since those were given away that are kept.
        if let Some(store) = store {
            store.ends_replaced();
        }
    } else if !kept.is_empty() {
        match from_store(dir, kept, &mut wanted, digests) {
            Ok((daemons, inheritance)) => return Ok((daemons, Past::Store(inheritance))),
            Err(Unfit::Halted(error)) => return Err(error),
            Err(Unfit::Because(why)) => {
                let then = match wanted.iter().any(|info| info.publish.is_none()) {
                    true => ", and loaded anew",
                    false => "",
                };
                warn!("what the service manager kept is dropped{then}: {why}");
                if let Some(store) = store {
                    store.clear();
                }
            }
        }
    }
    let until = Instant::now() + ENDS_WITHIN;
    loop {
        let orphan = match claim(dir, &wanted)? {
            Claimed::Ours(daemons) => return Ok((daemons, Past::None)),
            Claimed::Orphan(orphan) => orphan,
        };
        let (inheritance, connection) = match adopt(&dir.join(&orphan.owner.control), HANDS_OVER_WITHIN) {
            Ok(adopted) => adopted,
            Err(error) if is_passing(&error) && Instant::now() < until => {
                sleep(PAUSE);
                continue;
            }
            Err(error) => return Err(orphan.not_adopted(dir, &why_not(&error))),
        };
        match inheritance.compare(&wanted) {
            Comparison::Same => {
                let daemons = take_over(dir, &orphan.owner.control, &inheritance)
                    .map_err(|why| orphan.not_adopted(dir, &why))?;
                return Ok((daemons, Past::Server(inheritance, connection)));
            }
            Comparison::Different(fields) => {
                let why = format!("it serves {}", differing(&inheritance, &wanted, &fields));
                return Err(orphan.not_adopted(dir, &why));
            }
            Comparison::Unknown if digests.are_known() || !has_digests(&inheritance) => {
                let why = format!(
                    "it serves {}, and whether those are the same weights cannot be told, since their digest is not \
                     known",
                    running(&inheritance)
                );
                return Err(orphan.not_adopted(dir, &why));
            }
            Comparison::Unknown => {
                // It is led by nobody meanwhile.
                drop((inheritance, connection));
                digests.add_to(&mut wanted)?;
            }
        }
    }
}

/// Why what was kept is not gone on with.
enum Unfit {
    Because(String),
    /// Nor with anything else.
    Halted(CliError),
}

impl From<String> for Unfit {
    fn from(why: String) -> Unfit {
        Unfit::Because(why)
    }
}

fn from_store(
    dir: &Path,
    kept: Kept,
    wanted: &mut [DaemonInfo],
    digests: &mut Digests<'_>,
) -> Result<(Daemons, Inheritance<OwnedFd>), Unfit> {
    let inheritance = store::read(kept)?;
    let mut compared = inheritance.compare(wanted);
    if compared == Comparison::Unknown && has_digests(&inheritance) {
        digests.add_to(wanted).map_err(Unfit::Halted)?;
        compared = inheritance.compare(wanted);
    }
    match compared {
        Comparison::Same => {}
        Comparison::Unknown => {
            return Err("whether it is the same checkpoint cannot be told"
                .to_owned()
                .into());
        }
        Comparison::Different(fields) => {
            return Err(format!("it is {}", differing(&inheritance, wanted, &fields)).into());
        }
    }
    let locks = locks(&inheritance)?;
    for daemon in &inheritance.daemons {
        let socket = Path::new(&daemon.info.socket);
        if !was_bound_for(daemon.ends.listener(), socket) {
            return Err(format!("the socket that was kept is not that of {}", socket.display()).into());
        }
        // Engines come by this path; who answers there holds the lock, which is ours.
        match connect(socket) {
            Ok(_) | Err(ConnectError::Busy { .. }) => {}
            Err(error) => return Err(error.to_string().into()),
        }
    }
    for daemon in &inheritance.daemons {
        if let Some(owner) = read_owner(Path::new(&daemon.info.socket)) {
            remove_stale_control(&dir.join(owner.control));
        }
    }
    let control = Control::bind(dir).map_err(Unfit::Halted)?;
    let daemons = Daemons::inherited(dir, control, &inheritance, locks);
    Ok((daemons, inheritance))
}

/// Takes over names that a server keeps for us.
fn take_over(dir: &Path, control: &str, inheritance: &Inheritance<OwnedFd>) -> Result<Daemons, String> {
    let locks = locks(inheritance)?;
    let ends = inheritance
        .control
        .as_ref()
        .ok_or("its launcher did not give it the control socket")?;
    let control = Control::inherited(dir.join(control), ends).map_err(|error| error.to_string())?;
    Ok(Daemons::inherited(dir, control, inheritance, locks))
}

/// The locks on the names of all daemons, which must be those names' still.
fn locks(inheritance: &Inheritance<OwnedFd>) -> Result<Vec<Lock>, String> {
    let lock = |daemon: &weightd_core::machine::Inherited<OwnedFd>| {
        let copy = daemon
            .ends
            .lock()
            .try_clone()
            .map_err(|error| error.to_string())?;
        Lock::adopt(copy, Path::new(&daemon.info.socket)).map_err(|error| match error {
            LockError::Replaced { path } => format!("its lock file {} is gone", path.display()),
            error => error.to_string(),
        })
    };
    inheritance.daemons.iter().map(lock).collect()
}

fn has_digests(inheritance: &Inheritance<OwnedFd>) -> bool {
    inheritance
        .daemons
        .iter()
        .all(|daemon| daemon.info.key.checkpoint.digest.is_some())
}

/// Whether a server lives, or may, behind any of these names. One that was killed just now takes a moment to
/// be gone, and one that was never led is ended.
fn is_served(dir: &Path, wanted: &[DaemonInfo]) -> bool {
    let owners = wanted
        .iter()
        .filter_map(|info| read_owner(Path::new(&info.socket)));
    let controls: BTreeSet<PathBuf> = owners.map(|owner| dir.join(owner.control)).collect();
    for control in &controls {
        remove_stale_control(control);
    }
    let until = Instant::now() + ENDS_WITHIN;
    loop {
        let owners = wanted
            .iter()
            .filter_map(|info| read_owner(Path::new(&info.socket)));
        let behind: Vec<Behind> = owners.map(|owner| server_of(dir, &owner)).collect();
        let is_any = |is_it: fn(&Behind) -> bool| behind.iter().any(is_it);
        let is_silent = is_any(|behind| matches!(behind, Behind::Silent));
        let is_server = is_any(|behind| matches!(behind, Behind::Server(_)));
        if is_server || !is_silent || Instant::now() >= until {
            return is_server || is_silent;
        }
        sleep(PAUSE);
    }
}

/// Whether who asks again learns more: the server ends, or another launcher came first.
fn is_passing(error: &RequestError) -> bool {
    match error {
        RequestError::Connect(error) => matches!(error, ConnectError::Absent { .. }),
        RequestError::Ask { error, .. } => matches!(
            error,
            AskError::Broken(_)
                | AskError::Failed {
                    code: ErrorCode::Busy | ErrorCode::NotAllowed,
                    ..
                }
        ),
        _ => false,
    }
}

fn why_not(error: &RequestError) -> String {
    match error {
        RequestError::Ask {
            error:
                AskError::Failed {
                    code: ErrorCode::UnknownCommand,
                    ..
                },
            ..
        } => "it is of a release of weightd that cannot hand over".to_owned(),
        RequestError::Ask { error, .. } => error.to_string(),
        error => error.to_string(),
    }
}

/// What is served, and how that is not what is wanted.
fn differing(inheritance: &Inheritance<OwnedFd>, wanted: &[DaemonInfo], fields: &[String]) -> String {
    let pairs = || inheritance.daemons.iter().zip(wanted);
    let name = |field: &String| {
        if field == "publish" {
            return "who brings the weights (`weightd preload`, or `weightd serve` and its --replace)"
                .to_owned();
        }
        // What is no field of the key has one name, and no value that helps anybody.
        let differing = pairs().find_map(|(held, wanted)| {
            let differences = held
                .info
                .key
                .differences(&wanted.key, std::slice::from_ref(field));
            differences.into_iter().find(|both| both.asked != both.served)
        });
        differing.map_or_else(|| field.clone(), |both| both.to_string())
    };
    let mut names: Vec<String> = fields.iter().take(NAMED).map(name).collect();
    if fields.len() > NAMED {
        names.push("more".to_owned());
    }
    format!("{}, which differs in {}", running(inheritance), names.join(", "))
}

/// What is served, for a person.
fn running(inheritance: &Inheritance<OwnedFd>) -> String {
    let infos = || inheritance.daemons.iter().map(|daemon| &daemon.info);
    let Some(first) = infos().next() else {
        return "nothing".to_owned();
    };
    let key = &first.key;
    let ranks = |role| {
        let ranks: BTreeSet<u32> = infos()
            .filter(|info| info.key.role == role)
            .map(|info| info.global_rank)
            .collect();
        ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
    };
    let draft = match ranks(Role::Draft) {
        ranks if ranks.is_empty() => String::new(),
        ranks => format!(", draft ranks {ranks}"),
    };
    let place = format!(
        "target ranks {}{draft}; tp {} pp {} dp {}",
        ranks(Role::Target),
        key.tp_size,
        key.pp_size,
        key.dp_size
    );
    if first.publish.is_some() {
        return format!("what engines publish ({place})");
    }
    format!(
        "{} ({place}, dtype {}, layout {}, {} bytes of checkpoint)",
        short(&key.model_arch, NAME),
        short(&key.dtype, NAME),
        short(&key.layout, NAME),
        key.checkpoint.bytes
    )
}

/// Says how a launcher began that did not load.
pub fn say(past: &Past, names: &[String]) {
    let from = match past {
        Past::None => return,
        Past::Server(inheritance, _) => {
            let pid = inheritance.server.as_ref().map_or(0, |server| server.pid);
            format!("server {pid}, whose launcher is gone")
        }
        Past::Store(_) => "the service manager".to_owned(),
    };
    info!(
        "adopted {} daemons from {from}: {}",
        names.len(),
        names.join(", ")
    );
}
