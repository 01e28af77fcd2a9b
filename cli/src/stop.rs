//! `weightd stop`: ends launchers and servers, also a server whose launcher was killed.

use crate::args::StopArgs;
use crate::error::CliError;
use crate::node;
use crate::status::find;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_blocking::request::request;
use weightd_core::time::Span;
use weightd_core::wire::message::{GetStatus, Stop};
use weightd_socket::dir::SocketDir;
use weightd_socket::lock::read_owner;

const ENDS_WITHIN: Duration = Duration::from_secs(30);

pub fn run(args: &StopArgs) -> Result<ExitCode, CliError> {
    // By server: several daemons share one, and its control socket.
    let mut servers: BTreeMap<PathBuf, u32> = BTreeMap::new();
    for found in find(&args.place)? {
        let pid = found
            .status
            .map_err(|why| CliError::Failure(format!("{}: {why}", found.socket.display())))?
            .pid;
        let owner = read_owner(&found.socket).ok_or_else(|| {
            CliError::Failure(format!(
                "{}: its lock file does not say who owns it",
                found.socket.display()
            ))
        })?;
        servers.insert(PathBuf::from(owner.control), pid);
    }
    if servers.is_empty() {
        println!("no daemons");
        return Ok(ExitCode::SUCCESS);
    }
    let dir = SocketDir::open(
        args.place.socket_dir.as_deref(),
        node::socket_dir_variable().as_deref(),
    )
    .map_err(CliError::failure)?;
    for (control, pid) in servers {
        let control = dir.path().join(control);
        request(&control, Stop {}, Span::secs(5)).map_err(CliError::failure)?;
        wait_until_gone(&control, pid)?;
        println!("stopped server {pid}");
    }
    Ok(ExitCode::SUCCESS)
}

fn wait_until_gone(control: &Path, pid: u32) -> Result<(), CliError> {
    let start = Instant::now();
    while request(control, GetStatus {}, Span::secs(1)).is_ok() {
        if start.elapsed() > ENDS_WITHIN {
            return Err(CliError::Failure(format!(
                "server {pid} does not end: kill it with `kill -9 {pid}`"
            )));
        }
        sleep(Duration::from_millis(20));
    }
    Ok(())
}
