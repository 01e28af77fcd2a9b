//! `/health` and `/metrics` of a launcher, over HTTP.
//!
//! They run in a thread of their own, and know of the launcher only what its [`Board`] says: whoever asks,
//! however often or slowly, cannot hold up supervision. What the daemons do is asked of their sockets, as an
//! engine would ask.

mod board;
mod http;
mod metrics;
mod probe;
mod report;

pub use board::Board;

use crate::args::LauncherArgs;
use crate::error::CliError;
use probe::Prober;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use tokio::sync::oneshot;
use tracing::info;

/// A port that is taken, and a thread that waits to answer at it.
#[derive(Debug)]
pub struct Health {
    address: SocketAddr,
    board: oneshot::Sender<Board>,
}

/// Takes the port that was asked for, where one was; all that can fail fails here. Port 0 stands for any that
/// is free.
pub fn start(args: &LauncherArgs) -> Result<Option<Health>, CliError> {
    let Some(port) = args.health_port else {
        return Ok(None);
    };
    let host = args.health_host.as_str();
    listen(host, port).map(Some).map_err(|error| {
        CliError::Failure(format!(
            "cannot answer /health at {host} port {port}: {error}; choose another --health-port or --health-host"
        ))
    })
}

fn listen(host: &str, port: u16) -> io::Result<Health> {
    let listener = TcpListener::bind((host, port))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = http::runtime()?;
    let (board, awaited) = oneshot::channel();
    thread::Builder::new().name("health".to_owned()).spawn(move || {
        runtime.block_on(async {
            // Without a launcher there is nothing to be said.
            if let Ok(board) = awaited.await {
                http::serve(listener, Arc::new(Prober::new(board))).await;
            }
        });
    })?;
    Ok(Health { address, board })
}

impl Health {
    /// Answers from now on, until the process ends.
    pub fn answer(self, board: Board) {
        // It waits for as long as this is there.
        let _ = self.board.send(board);
        info!(
            "health on http://{}/health, metrics on http://{0}/metrics",
            self.address
        );
    }
}
