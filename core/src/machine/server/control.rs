//! What the vault, or another launcher, says on the control socket.

use super::daemon::{Daemon, Served, Slot};
use super::{ConnId, Server, ServerEvent};
use crate::content::Generation;
use crate::machine::descriptors::{check_ends, taken};
use crate::machine::reap::Bundle;
use crate::machine::{Output, check_descriptors};
use crate::peer::Facts;
use crate::time::{Now, Span};
use crate::wire::Message;
use crate::wire::message::{
    Adopted, Control, DaemonId, Define, Defined, ErrorCode, Holds, Leading, Publish, Published, ServerStatus,
    Stop, Stopping,
};
use std::sync::Arc;

/// How long an ending server waits for its last answers to leave.
const STOPS_WITHIN: Span = Span::millis(500);

impl<F> Server<F> {
    pub(super) fn control(
        &mut self,
        now: Now,
        id: ConnId,
        request: u32,
        message: Message,
        descriptors: &mut Vec<(Facts, F)>,
    ) {
        let leads = self.leader.is_some_and(|(leader, _)| leader == id);
        match message {
            Message::Define(define) if leads => self.define(id, request, define, descriptors),
            Message::Publish(publish) if leads => self.arm(id, request, publish, descriptors),
            Message::Control(control) if leads => {
                self.names_stay = control.names_stay;
                self.keep_control(id, request, descriptors);
            }
            message if !descriptors.is_empty() => {
                let why = format!("a {} message owns no descriptors here", message.name());
                self.expel(id, request, ErrorCode::BadDescriptors, &why);
            }
            Message::Lead(lead) => self.lead(id, request, lead.pid),
            Message::Adopt(adopt) => self.adopt(id, request, adopt.pid),
            Message::Digest(known) if leads => {
                if let Some(daemon) = self.daemons.get_mut(&known.daemon) {
                    daemon.info.key.checkpoint.digest = Some(known.digest);
                }
            }
            Message::Lost(lost) if leads => self.lost(lost.daemon, lost.generation),
            Message::Published(published) if leads => self.stored(request, &published),
            message @ (Message::Released(_) | Message::Reported(_) | Message::Failure(_)) if leads => {
                if let Message::Failure(failure) = &message {
                    self.not_stored(request, failure);
                }
                // To a release a failure says that the vault holds another generation, hence not this one.
                for release in self.releases.values_mut() {
                    release.asked_vault.take_if(|asked| *asked == request);
                }
                for daemon in self.daemons.values_mut() {
                    daemon.reported.take_if(|asked| *asked == request);
                }
            }
            Message::Stopping(_) if leads => self.asked_to_stop = None,
            Message::Stop(_) => self.stop_request(now, id, request, leads),
            Message::GetStatus(_) => {
                let status = ServerStatus {
                    version: self.version.clone(),
                    pid: self.pid,
                    launcher_pid: self.leader.map_or(0, |(_, pid)| pid),
                    daemons: self.daemons.len() as u32,
                    uptime_s: (now - self.started).0 / 1_000_000,
                };
                self.reply(id, request, status);
            }
            Message::Define(_)
            | Message::Publish(_)
            | Message::Control(_)
            | Message::Digest(_)
            | Message::Lost(_) => {
                self.refuse(id, request, ErrorCode::NotAllowed, "take the lead first");
            }
            other => {
                let why = format!("unknown command {} ({})", other.kind(), other.name());
                self.refuse(id, request, ErrorCode::UnknownCommand, &why);
            }
        }
    }

    fn lead(&mut self, id: ConnId, request: u32, pid: u32) {
        if let Some((_, pid)) = self.leader {
            let why = format!("launcher {pid} leads this server");
            return self.refuse(id, request, ErrorCode::NotAllowed, &why);
        }
        self.leader = Some((id, pid));
        self.was_led = true;
        self.reply(id, request, Leading {});
        self.event(ServerEvent::Led { pid });
    }

    /// Hands all that the server holds to a new launcher, which leads from then on: whatever clients
    /// change meanwhile is told to it after that.
    fn adopt(&mut self, id: ConnId, request: u32, pid: u32) {
        if let Some((_, pid)) = self.leader {
            let why = format!("launcher {pid} leads this server");
            return self.refuse(id, request, ErrorCode::NotAllowed, &why);
        }
        if !self.was_led || self.stopping.is_some() {
            let why = "this server has just started, or is ending: try again";
            return self.refuse(id, request, ErrorCode::Busy, why);
        }
        if let Some(conn) = self.conns.get_mut(&id) {
            let link = &mut conn.link;
            if let Some(control) = &self.control {
                let names_stay = self.names_stay;
                link.send(request, &Control { names_stay }.into(), Some(control.bundle()));
            }
            for (&number, daemon) in &self.daemons {
                link.send(request, &daemon.define(number).into(), Some(daemon.ends.bundle()));
            }
            for (&number, daemon) in &self.daemons {
                if let Some((publish, descriptors)) = daemon.publish(number) {
                    link.send(request, &publish.into(), Some(descriptors));
                }
            }
            link.send(request, &Adopted { pid: self.pid }.into(), None);
        }
        self.leader = Some((id, pid));
        self.adopted = true;
        self.event(ServerEvent::Led { pid });
    }

    fn define(&mut self, id: ConnId, request: u32, define: Define, descriptors: &mut Vec<(Facts, F)>) {
        let Define { daemon, info, holds } = define;
        let ends = match check_ends(std::mem::take(descriptors)) {
            Ok(ends) if !self.daemons.contains_key(&daemon) => ends,
            refused => {
                let (got, descriptors) = match refused {
                    Ok(ends) => ("them again".to_owned(), ends.bundle()),
                    Err((facts, descriptors)) => (format!("{facts:?}"), Arc::new(descriptors)),
                };
                self.reaper.bury(descriptors, None);
                let why = format!("daemon {daemon} takes a lock and a listener, once; got {got}");
                return self.expel(id, request, ErrorCode::BadDescriptors, &why);
            }
        };
        let slot = if matches!(holds, Holds::Content(_)) {
            Slot::Awaited
        } else {
            let ends = ends.clone();
            self.output.push_back(Output::Listen { daemon, ends });
            Slot::Without(holds)
        };
        self.daemons.insert(daemon, Daemon::new(info, slot, ends));
        self.reply(id, request, Defined { daemon });
    }

    /// Holds the control socket's lock and listener, for whoever adopts.
    fn keep_control(&mut self, id: ConnId, request: u32, descriptors: &mut Vec<(Facts, F)>) {
        match check_ends(std::mem::take(descriptors)) {
            Ok(ends) => {
                if let Some(old) = self.control.replace(ends) {
                    self.reaper.bury(old.bundle(), None);
                }
            }
            Err((facts, descriptors)) => {
                self.reaper.bury_all(descriptors);
                let why = format!("the control socket has a lock and a listener; got {facts:?}");
                self.expel(id, request, ErrorCode::BadDescriptors, &why);
            }
        }
    }

    fn arm(&mut self, id: ConnId, request: u32, publish: Publish, descriptors: &mut Vec<(Facts, F)>) {
        let checked = check_descriptors(&publish.content, descriptors.iter().map(|(facts, _)| facts));
        let descriptors = taken(descriptors);
        let Publish {
            daemon: number,
            generation: Some(generation),
            content: info,
            ..
        } = publish
        else {
            self.reaper.bury_all(descriptors);
            return self.refuse(
                id,
                request,
                ErrorCode::Malformed,
                "the vault names the generation",
            );
        };
        let daemon = match (self.daemons.get_mut(&number), checked) {
            (Some(daemon), Ok(())) => daemon,
            (_, checked) => {
                self.reaper.bury_all(descriptors);
                let why = checked
                    .err()
                    .map_or(format!("there is no daemon {number}"), |error| error.to_string());
                return self.expel(id, request, ErrorCode::BadDescriptors, &why);
            }
        };
        daemon.info.key = publish.key;
        let served = Served {
            generation,
            info,
            descriptors: Arc::new(descriptors),
        };
        daemon.reported = None;
        match std::mem::replace(&mut daemon.slot, Slot::Content(served)) {
            Slot::Content(old) => self.reaper.bury(old.descriptors, None),
            Slot::Awaited => self.output.push_back(Output::Listen {
                daemon: number,
                ends: daemon.ends.clone(),
            }),
            Slot::Without(_) => {}
        }
        self.reply(
            id,
            request,
            Published {
                daemon: number,
                generation,
            },
        );
        self.event(ServerEvent::Serving {
            daemon: number,
            generation,
        });
        self.served(number, generation);
    }

    /// The content is of no use any more. Who leases it is still counted.
    ///
    /// Where it was released here meanwhile, the vault has no content to release, and this is what it holds.
    fn lost(&mut self, number: DaemonId, generation: Generation) {
        let Some(daemon) = self.daemons.get_mut(&number) else {
            return;
        };
        if ![Holds::Content(generation), Holds::Released(generation)].contains(&daemon.holds()) {
            return;
        }
        let lost = Slot::Without(Holds::Lost(generation));
        if let Slot::Content(served) = std::mem::replace(&mut daemon.slot, lost) {
            self.reaper.bury(served.descriptors, None);
        }
        self.event(ServerEvent::Lost {
            daemon: number,
            generation,
        });
    }

    /// A launcher is asked first, since it would bring an ended server back. Who asked may stay
    /// until the end.
    fn stop_request(&mut self, now: Now, id: ConnId, request: u32, by_leader: bool) {
        if !self.was_led {
            let why = "this server has just started and has no launcher yet: try again";
            return self.refuse(id, request, ErrorCode::Busy, why);
        }
        self.reply(id, request, Stopping {});
        if by_leader || self.leader.is_none() {
            return self.stop(now, !by_leader);
        }
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.waiting = true;
        }
        if self.asked_to_stop.is_none() {
            self.asked_to_stop = self.ask_leader(Stop {}, None);
        }
    }

    /// Ends the server once its answers have left, or after a short while.
    pub(super) fn stop(&mut self, now: Now, orphaned: bool) {
        self.stopping.get_or_insert((now + STOPS_WITHIN, orphaned));
    }

    /// Asks the vault, where there is one; returns the request's id.
    pub(super) fn ask_leader(
        &mut self,
        message: impl Into<Message>,
        descriptors: Option<Bundle<F>>,
    ) -> Option<u32> {
        let (leader, _) = self.leader?;
        let conn = self.conns.get_mut(&leader)?;
        conn.link.ask(message, descriptors).ok()
    }

    /// The launcher is gone, and with it what it held.
    pub(super) fn lost_leader(&mut self) {
        // What clients publish may come or not; its socket has its name all the same.
        let unloaded = |daemon: &Daemon<F>| {
            daemon.info.publish.is_none() && matches!(daemon.slot, Slot::Without(Holds::Empty))
        };
        self.unloaded = !self.adopted && self.daemons.values().any(unloaded);
        self.nobody_stores();
        self.leader = None;
        self.asked_to_stop = None;
        for release in self.releases.values_mut() {
            release.asked_vault = None;
        }
        for (&number, daemon) in &mut self.daemons {
            daemon.reported = None;
            // What it did not hand over will not come.
            if let Slot::Awaited = daemon.slot {
                daemon.slot = Slot::Without(Holds::Empty);
                self.output.push_back(Output::Listen {
                    daemon: number,
                    ends: daemon.ends.clone(),
                });
            }
        }
        self.event(ServerEvent::LeaderGone);
    }
}
