//! The end of a launcher: its children first, and in order.

use super::{End, Launcher, Loading, Store};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use weightd_core::machine::VaultEvent;
use weightd_core::wire::message::{DaemonId, Holds};

/// How long a server may take to end when it is asked.
const SERVER_ENDS_WITHIN: Duration = Duration::from_secs(3);

impl Launcher {
    /// Ends everything in order: no more loading, then the server; the names go last, with the
    /// daemons. False where the server did not end and had to be killed.
    pub(super) fn end_children(&mut self) -> bool {
        if let Some(Loading { child, .. }) = self.loader.take() {
            self.ending.kill(child);
        }
        let Some(server) = self.server.process.take() else {
            return true;
        };
        let in_order = self.ask_server_to_end();
        if !in_order {
            warn!("the server (pid {}) did not end and was killed", server.id());
        }
        // Gone already, unless it did not listen.
        server.end(&mut self.ending);
        in_order
    }

    /// Says why it ended, and what became of its weights. A failure says so itself.
    pub(super) fn say_end(&self, end: &End) {
        let by = match end {
            End::Signal => self.signals.last(),
            End::Asked if self.ready => "`weightd stop`",
            End::Asked | End::Failed(_) => return,
        };
        let vault = self.driver.machine();
        let mut daemons = 0..self.daemons.claims.len() as DaemonId;
        let held = daemons.any(|daemon| matches!(vault.holds(daemon), Some(Holds::Content(_))));
        let kept =
            matches!(end, End::Signal) && self.serving && self.store.as_ref().is_some_and(Store::lasts);
        let weights = match (held, kept) {
            (false, _) => "it held no weights",
            (true, true) => "the service manager keeps its weights for the next launcher",
            (true, false) => "its weights are let go, and free when no engine maps them any more",
        };
        info!("ended by {by}: {weights}");
    }

    /// Lets the server answer whoever asked for the end. A second signal does not wait for it, and is
    /// no failure of the server's. False where it did not end.
    fn ask_server_to_end(&mut self) -> bool {
        let until = Instant::now() + SERVER_ENDS_WITHIN;
        self.driver.machine_mut().stop_server(self.clock.now());
        loop {
            let Ok(turn) = self.driver.turn(self.clock.now()) else {
                return false;
            };
            let gone = |event: &VaultEvent| matches!(event, VaultEvent::ServerGone { .. });
            let again = turn.watched.contains(&self.signalled) && self.signals.take() > 0;
            if turn.events.iter().any(gone) || again || self.hurried {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let wake_at = self.clock.until(turn.wake_at).map_or(left, |wake| wake.min(left));
            if self.driver.wait(Some(wake_at)).is_err() {
                return false;
            }
        }
    }
}
