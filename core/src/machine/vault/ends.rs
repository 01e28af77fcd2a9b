//! Names that somebody removed and the launcher made again.

use super::Vault;
use crate::machine::Ends;
use crate::wire::message::DaemonId;

impl<F> Vault<F> {
    /// A daemon's name has another lock and listener; what it holds stays, with its generation. The server
    /// that there is keeps those from before, so it must be [asked to end](Vault::stop_server): the next one
    /// gets these.
    ///
    /// # Panics
    /// Where there is no such daemon.
    pub fn replace_ends(&mut self, daemon: DaemonId, ends: Ends<F>) {
        let holding = self.holdings.get_mut(&daemon).expect("a daemon of this vault");
        let old = std::mem::replace(&mut holding.ends, ends);
        self.reaper.bury(old.bundle(), None);
        self.revision += 1;
        self.settle();
    }

    /// The same for the control socket. Copies that are kept elsewhere do not have it.
    pub fn replace_control(&mut self, ends: Ends<F>) {
        if let Some(old) = self.control.replace(ends) {
            self.reaper.bury(old.bundle(), None);
        }
        self.settle();
    }
}
