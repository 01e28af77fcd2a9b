//! How a step may end.

use super::{KILLED, World};
use crate::chaos::plan::Act;
use crate::harness::*;

impl World {
    /// A launcher is ready, was killed, or says on one line that a child of its own was, or that a name is gone.
    pub(super) fn has_started(&mut self, mut launcher: Running) -> bool {
        let line = launcher.line();
        let pid = launcher.pid();
        if line.starts_with("READY ") || line.starts_with("SERVING ") {
            self.leads = !self.killed.contains(&pid);
            if !self.leads {
                assert_eq!(launcher.code(), KILLED);
            }
        } else if launcher.code() != KILLED || !self.killed.contains(&pid) {
            assert!(self.killed_its_child || self.removed, "{}", launcher.log());
            assert_eq!(launcher.code(), 1);
            launcher.error();
            self.nothing_is_left();
        }
        self.launchers.push(launcher);
        true
    }

    /// A client did what it is for, or was killed, or says on one line why not: somebody was killed, or names are gone.
    /// An engine attaches unless names are gone or that was launcher and server.
    pub(super) fn has_done(&mut self, act: Act, client: &mut Running, leader: Option<u32>) -> bool {
        let code = client.code();
        let died = |pid: u32| self.killed.contains(&pid);
        let holder = self.holder.as_ref().map(Running::pid);
        let is_server = |pid| ![leader, holder, Some(client.pid())].contains(&Some(pid));
        let excused = match act {
            Act::Attach => died(leader.unwrap()) && self.killed.iter().any(|pid| is_server(*pid)),
            _ => !self.killed.is_empty(),
        };
        let excused = excused || self.removed;
        assert!(
            code == 0
                || if code == KILLED {
                    died(client.pid())
                } else {
                    excused
                },
            "{code}: {}",
            client.log()
        );
        if code == 1 {
            client.error();
        }
        let launcher = self.launchers.last_mut().unwrap();
        self.leads = !self.killed.contains(&launcher.pid());
        if self.leads {
            assert_eq!(launcher.child.try_wait().unwrap(), None, "{}", launcher.log());
        } else {
            assert_eq!(launcher.code(), KILLED);
        }
        code == 0
    }

    /// Stop is done when it says so, whoever died of those that it stopped.
    pub(super) fn has_stopped(&mut self, client: &mut Running) -> bool {
        match client.code() {
            0 => {}
            KILLED if self.killed.contains(&client.pid()) => {
                let again = self.site.run(&["stop"]);
                assert_eq!(again.code, Some(0), "{again:?}");
            }
            code => panic!("{code}, {}", client.log()),
        }
        let launcher = self.launchers.last_mut().unwrap();
        let code = launcher.code();
        assert!(
            code == 0 || (code == KILLED && self.killed.contains(&launcher.pid())),
            "{code}, {}",
            launcher.log()
        );
        self.leads = false;
        self.nothing_is_left();
        true
    }

    /// No process but the engine that holds, and no name.
    pub(super) fn nothing_is_left(&self) {
        let holder: Vec<u32> = self.holder.iter().map(Running::pid).collect();
        wait_until("all processes are gone", || self.site.processes() == holder);
        assert_eq!(self.site.left(), [""; 0]);
    }
}
