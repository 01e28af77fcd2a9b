//! What an engine may ask on a daemon's socket.

use super::daemon::{PendingRelease, Slot};
use super::{ConnId, Server, ServerEvent};
use crate::content::{Comparison, Difference, Generation};
use crate::time::Now;
use crate::wire::Message;
use crate::wire::message::{
    DaemonId, DaemonStatus, ErrorCode, GetState, Holds, Memory, Mismatch, NeedDigest, Release, Released,
    Report, Reported, State, Watching, words,
};
use std::sync::Arc;

impl<F> Server<F> {
    pub(super) fn public(&mut self, now: Now, id: ConnId, on: DaemonId, request: u32, message: Message) {
        match message {
            Message::GetState(ask) => self.get_state(id, on, request, &ask),
            Message::Watch(ask) => self.watch(id, on, request, ask.generation),
            Message::GetMemory(_) => self.get_memory(id, on, request),
            Message::Release(ask) => self.release(id, on, request, ask.generation),
            Message::Report(ask) => self.report(id, on, request, ask),
            Message::GetStatus(_) => self.get_status(now, id, on, request),
            Message::GetActivity(_) => self.get_activity(id, on, request),
            other => {
                let why = format!("unknown command {} ({})", other.kind(), other.name());
                self.refuse(id, request, ErrorCode::UnknownCommand, &why);
            }
        }
    }

    pub(super) fn reply(&mut self, id: ConnId, request: u32, message: impl Into<Message>) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.link.send(request, &message.into(), None);
        }
    }

    pub(super) fn refuse(&mut self, id: ConnId, request: u32, code: ErrorCode, why: &str) {
        if let Some(conn) = self.conns.get_mut(&id) {
            let retryable = matches!(code, ErrorCode::DigestPending | ErrorCode::Busy);
            conn.link.fail(request, code, retryable, why);
            let origin = conn.origin;
            self.count_refusal(origin, code);
        }
    }

    fn get_state(&mut self, id: ConnId, on: DaemonId, request: u32, ask: &GetState) {
        let Some(daemon) = self.daemons.get_mut(&on) else {
            return;
        };
        let is_publishable = daemon.info.publish.is_some();
        if is_publishable && daemon.holds() == Holds::Empty {
            // Until the first publication there is no key to compare with.
            let why = "nothing was published here yet: load from disk, and publish what you loaded";
            return self.refuse(id, request, ErrorCode::Empty, why);
        }
        match daemon.info.key.compare(&ask.key) {
            Comparison::Same => {}
            Comparison::Different(fields) => {
                let fields = daemon.info.key.differences(&ask.key, &fields);
                return self.mismatch(id, on, request, fields);
            }
            // Only its publisher could have said it, and did not.
            Comparison::Unknown if is_publishable && daemon.info.key.checkpoint.digest.is_none() => {
                let fields = daemon.info.key.differences(&ask.key, &["checkpoint".to_owned()]);
                return self.mismatch(id, on, request, fields);
            }
            Comparison::Unknown if ask.key.checkpoint.digest.is_none() => {
                self.reply(id, request, NeedDigest {});
                if let Some(daemon) = self.daemons.get_mut(&on) {
                    daemon.tally.need_digest += 1;
                }
                return;
            }
            Comparison::Unknown => {
                let why = "this daemon's own digest of the checkpoint is not ready yet: ask again";
                return self.refuse(id, request, ErrorCode::DigestPending, why);
            }
        }
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let served = match &daemon.slot {
            Slot::Content(served) => served,
            Slot::Without(Holds::Released(generation)) if is_publishable => {
                let why = format!("generation {generation} was released: publish again");
                return self.refuse(id, request, ErrorCode::Released, &why);
            }
            Slot::Without(Holds::Lost(generation)) if is_publishable => {
                let why = format!("the device lost generation {generation}: publish again");
                return self.refuse(id, request, ErrorCode::Lost, &why);
            }
            Slot::Without(Holds::Released(generation)) => {
                let why = format!(
                    "generation {generation} was released: end its launcher (`weightd stop`) and run `weightd preload` again"
                );
                return self.refuse(id, request, ErrorCode::Released, &why);
            }
            Slot::Without(Holds::Lost(generation)) => {
                let why = format!("the device lost generation {generation}: it is being loaded afresh");
                return self.refuse(id, request, ErrorCode::Lost, &why);
            }
            Slot::Awaited | Slot::Without(_) => {
                let why = "this daemon holds no content yet: load from disk, or ask again once `weightd status` \
                           says that it serves";
                return self.refuse(id, request, ErrorCode::Empty, why);
            }
        };
        if conn.states_sent == self.limits.states_per_connection {
            let why = "content was sent on this connection too often: open a new one";
            return self.expel(id, request, ErrorCode::Busy, why);
        }
        let state = State {
            generation: served.generation,
            device_uuid: daemon.info.device_uuid,
            content: served.info.clone(),
        };
        let sent = ServerEvent::Sent {
            daemon: on,
            pid: conn.peer.pid,
            generation: served.generation,
            tensors: served.info.tensors,
            aliases: served.info.aliases,
        };
        conn.link
            .send(request, &state.into(), Some(Arc::clone(&served.descriptors)));
        conn.states_sent += 1;
        daemon.served += 1;
        daemon.reloads += u64::from(ask.is_reload);
        self.event(sent);
    }

    fn mismatch(&mut self, id: ConnId, on: DaemonId, request: u32, fields: Vec<Difference>) {
        let Some(daemon) = self.daemons.get_mut(&on) else {
            return;
        };
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        let pid = conn.peer.pid;
        let mismatch = Mismatch {
            fields: fields.clone(),
        };
        conn.link.send(request, &mismatch.into(), None);
        daemon.tally.mismatched(&fields);
        self.event(ServerEvent::Mismatched {
            daemon: on,
            pid,
            fields,
        });
    }

    fn watch(&mut self, id: ConnId, on: DaemonId, request: u32, generation: Option<Generation>) {
        let leases = self.watching;
        let Some(daemon) = self.daemons.get_mut(&on) else {
            return;
        };
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        if conn.watch.is_some() {
            let why = "this connection is a watch already: open another";
            return self.refuse(id, request, ErrorCode::NotAllowed, why);
        }
        if leases >= self.limits.leases {
            let why =
                format!("{leases} leases are open, which is the limit: end engines that are not needed");
            return self.refuse(id, request, ErrorCode::Busy, &why);
        }
        if let Some(generation) = generation
            && !daemon.serves(generation)
        {
            let why = format!("generation {generation} is not the current one");
            return self.refuse(id, request, ErrorCode::StaleGeneration, &why);
        }
        conn.link.send(request, &Watching {}.into(), None);
        conn.watch = Some(generation);
        self.watching += 1;
        let pid = conn.peer.pid;
        if let Some(generation) = generation {
            daemon.lease();
            self.event(ServerEvent::Leased {
                daemon: on,
                pid,
                generation,
            });
        }
    }

    fn get_memory(&mut self, id: ConnId, on: DaemonId, request: u32) {
        let Some(daemon) = self.daemons.get(&on) else {
            return;
        };
        let current = daemon.content().map_or(0, |served| served.info.bytes());
        let leased = daemon.leased_bytes();
        self.reply(id, request, Memory { current, leased });
    }

    fn report(&mut self, id: ConnId, on: DaemonId, request: u32, ask: Report) {
        let Some(daemon) = self.daemons.get_mut(&on) else {
            return;
        };
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.link.send(request, &Reported {}.into(), None);
        let pid = conn.peer.pid;
        let current = daemon
            .content()
            .is_some_and(|served| served.generation == ask.generation);
        // One at a time, however many engines fail. A later one may have another cause.
        if current && daemon.reported.is_none() {
            let why = words(&ask.import_failed);
            let asked = self.ask_leader(Report { daemon: on, ..ask }, None);
            if let Some(daemon) = self.daemons.get_mut(&on) {
                daemon.reported = asked;
            }
            self.event(ServerEvent::ImportFailed { daemon: on, pid, why });
        }
    }

    fn get_status(&mut self, now: Now, id: ConnId, on: DaemonId, request: u32) {
        let Some(daemon) = self.daemons.get(&on) else {
            return;
        };
        let content = daemon.content().map(|served| &served.info);
        let status = DaemonStatus {
            version: self.version.clone(),
            pid: self.pid,
            launcher_pid: self.leader.map_or(0, |(_, pid)| pid),
            info: daemon.info.clone(),
            holds: daemon.holds(),
            bytes: content.map_or(0, |info| info.bytes()),
            tensors: content.map_or(0, |info| info.tensors),
            aliases: content.map_or(0, |info| info.aliases),
            checksums: content.is_some_and(|info| info.checksums),
            leases: daemon.open_leases(),
            served: daemon.served,
            reloads: daemon.reloads,
            uptime_s: (now - self.started).0 / 1_000_000,
            confinement: self.confinement,
        };
        self.reply(id, request, status);
    }

    /// Lets the content go: first out of reach, then closed here and in the vault, then answered.
    fn release(&mut self, id: ConnId, on: DaemonId, request: u32, generation: Option<Generation>) {
        let Some(daemon) = self.daemons.get_mut(&on) else {
            return;
        };
        if daemon.info.no_release {
            let why = "this daemon was started with --no-release: stop its launcher to free the memory";
            return self.refuse(id, request, ErrorCode::NotAllowed, why);
        }
        let current = match daemon.holds() {
            Holds::Content(current) | Holds::Released(current) | Holds::Lost(current) => current,
            Holds::Empty => return self.reply(id, request, Released {}),
        };
        if generation.is_some_and(|generation| generation != current) {
            let why = format!("nothing was released: the current generation is {current}");
            return self.refuse(id, request, ErrorCode::StaleGeneration, &why);
        }
        if matches!(daemon.slot, Slot::Content(_)) {
            let release = Release {
                daemon: on,
                generation: Some(current),
            };
            let pending = PendingRelease {
                asked_vault: self.ask_leader(release, None),
                ..PendingRelease::default()
            };
            self.releases.insert((on, current), pending);
            let without = Slot::Without(Holds::Released(current));
            if let Some(daemon) = self.daemons.get_mut(&on)
                && let Slot::Content(served) = std::mem::replace(&mut daemon.slot, without)
            {
                self.reaper.bury(served.descriptors, Some((on, current)));
            }
        }
        match self.releases.get_mut(&(on, current)) {
            None => self.reply(id, request, Released {}),
            Some(pending) => {
                pending.waiters.push((id, request));
                if let Some(conn) = self.conns.get_mut(&id) {
                    conn.waiting = true;
                }
            }
        }
    }

    /// Answers the releases that are done; returns the connections that got an answer.
    pub(super) fn answer_releases(&mut self, now: Now) -> Vec<ConnId> {
        let done: Vec<(DaemonId, Generation)> = self
            .releases
            .iter()
            .filter(|(_, release)| release.closed_here && release.asked_vault.is_none())
            .map(|(which, _)| *which)
            .collect();
        let mut answered = Vec::new();
        for (daemon, generation) in done {
            let Some(release) = self.releases.remove(&(daemon, generation)) else {
                continue;
            };
            for (id, request) in release.waiters {
                self.answer(now, id, request, Released {});
                answered.push(id);
            }
            self.event(ServerEvent::Released { daemon, generation });
        }
        answered
    }
}
