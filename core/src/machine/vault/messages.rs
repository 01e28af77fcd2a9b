//! What loader and server say to the vault, and what it says to a server that follows.

use super::{ReleaseTicket, Vault, VaultEvent};
use crate::content::Generation;
#[cfg(any(test, feature = "faults"))]
use crate::machine::contain::faults;
use crate::machine::reap::Bundle;
use crate::machine::{ConnId, Origin};
use crate::time::Now;
use crate::wire::Frame;
use crate::wire::message::{
    DaemonId, ErrorCode, Holds, Lost, Message, Release, Released, Report, Reported, Stopping, words,
};

impl<F> Vault<F> {
    /// Does what a frame asks for, and takes what it brought along.
    pub(super) fn frame(&mut self, now: Now, id: ConnId, origin: Origin, frame: &mut Frame<F>) {
        let Frame {
            kind,
            request,
            ref body,
            ref mut descriptors,
        } = *frame;
        #[cfg(any(test, feature = "faults"))]
        faults::point(faults::AT_ONCE, request);
        let message = match Message::decode(kind, body) {
            Ok(message) => message,
            Err(error) => return self.refuse(id, request, error.code(), &error.to_string()),
        };
        match (origin, message) {
            (Origin::Loader | Origin::Server, Message::Publish(publish)) => {
                self.publish(now, (id, origin), request, publish, descriptors);
            }
            (_, message) if !descriptors.is_empty() => {
                let why = format!("a {} message owns no descriptors here", message.name());
                self.refuse(id, request, ErrorCode::BadDescriptors, &why);
            }
            (Origin::Loader, Message::Progress(progress)) => {
                let (daemon, done, total) = (progress.daemon, progress.done, progress.total);
                self.event(VaultEvent::Progress { daemon, done, total });
            }
            (Origin::Loader, Message::Digest(known)) => {
                if let Some(holding) = self.holdings.get_mut(&known.daemon) {
                    holding.info.key.checkpoint.digest = Some(known.digest);
                    self.revision += 1;
                    self.tell_server(known, None);
                }
            }
            (Origin::Loader, Message::Loaded(loaded)) => self.event(VaultEvent::Loaded(loaded)),
            (Origin::Loader, Message::LoadFailed(failed)) => {
                self.event(VaultEvent::LoadFailed {
                    why: words(&failed.message),
                });
            }
            (Origin::Server, message) => self.server_says(now, id, request, message),
            (_, other) => {
                let why = format!("unknown command {} ({})", other.kind(), other.name());
                self.refuse(id, request, ErrorCode::UnknownCommand, &why);
            }
        }
    }

    fn server_says(&mut self, now: Now, id: ConnId, request: u32, message: Message) {
        let answers = !matches!(
            message,
            Message::Release(_) | Message::Report(_) | Message::Stop(_)
        );
        if let Some(conn) = self.conns.get_mut(&id)
            && answers
        {
            conn.unanswered = conn.unanswered.saturating_sub(1);
            conn.heard = now;
        }
        match message {
            Message::Leading(_) => {
                self.leads = true;
                self.give_control();
                let daemons: Vec<DaemonId> = self.holdings.keys().copied().collect();
                // The server owns every listener before it gets any content: should we die meanwhile,
                // it can still answer for all.
                for &daemon in &daemons {
                    self.define(now, daemon);
                }
                for daemon in daemons {
                    self.arm(now, daemon);
                }
            }
            Message::Defined(defined) => {
                if let Some(holding) = self.holdings.get_mut(&defined.daemon) {
                    holding.mirrored = holding.content.is_err();
                }
            }
            Message::Published(published) => {
                if let Some(holding) = self.holdings.get_mut(&published.daemon) {
                    let current = holding.content.as_ref().ok().map(|content| content.generation);
                    holding.mirrored = current.is_none_or(|current| current == published.generation);
                }
            }
            Message::Release(release) => self.release(id, request, &release),
            Message::Report(Report {
                daemon,
                generation,
                import_failed,
            }) => {
                let why = words(&import_failed);
                self.reply(id, request, Reported {});
                self.event(VaultEvent::ImportFailed {
                    daemon,
                    generation,
                    why,
                });
            }
            Message::Stop(_) => {
                self.reply(id, request, Stopping {});
                self.event(VaultEvent::StopRequested);
            }
            Message::Stopping(_) | Message::ServerStatus(_) => {}
            Message::Failure(failure) => self.give_up(id, failure.why()),
            other => self.give_up(id, format!("it sent a {} message", other.name())),
        }
    }

    /// Says what has no answer, so none is counted, to a server that follows.
    pub(super) fn tell_server(&mut self, message: impl Into<Message>, descriptors: Option<Bundle<F>>) {
        if self.leads
            && let Some(conn) = self.server.and_then(|server| self.conns.get_mut(&server))
        {
            conn.link
                .ask(message, descriptors)
                .expect("these messages fit a frame");
        }
    }

    /// Gives the server a daemon, with lock and listener.
    fn define(&mut self, now: Now, daemon: DaemonId) {
        let Some(holding) = self.holdings.get(&daemon) else {
            return;
        };
        let (define, ends) = (holding.define(daemon), holding.ends.bundle());
        self.ask_server(now, define, Some(ends));
    }

    /// Gives the server a daemon's content.
    pub(super) fn arm(&mut self, now: Now, daemon: DaemonId) {
        if !self.leads {
            return;
        }
        if let Some((publish, descriptors)) = self
            .holdings
            .get(&daemon)
            .and_then(|holding| holding.publish(daemon))
        {
            self.ask_server(now, publish, Some(descriptors));
        }
    }

    pub(super) fn lose(&mut self, daemon: DaemonId, generation: Generation) {
        let Some(holding) = self.holdings.get_mut(&daemon) else {
            return;
        };
        match &holding.content {
            Ok(content) if content.generation == generation => {}
            _ => return,
        }
        if let Ok(content) = std::mem::replace(&mut holding.content, Err(Holds::Lost(generation))) {
            self.reaper.bury(content.descriptors, None);
        }
        self.revision += 1;
        self.tell_server(Lost { daemon, generation }, None);
        self.event(VaultEvent::Lost { daemon, generation });
    }

    fn release(&mut self, id: ConnId, request: u32, release: &Release) {
        let Some(holding) = self.holdings.get_mut(&release.daemon) else {
            let why = format!("there is no daemon {}", release.daemon);
            return self.refuse(id, request, ErrorCode::Malformed, &why);
        };
        let current = match &holding.content {
            Ok(content) => content.generation,
            Err(_) => return self.reply(id, request, Released {}),
        };
        if release.generation.is_some_and(|generation| generation != current) {
            let why = format!("nothing was released: the current generation is {current}");
            return self.refuse(id, request, ErrorCode::StaleGeneration, &why);
        }
        self.revision += 1;
        if let Ok(content) = std::mem::replace(&mut holding.content, Err(Holds::Released(current))) {
            let ticket = ReleaseTicket {
                conn: id,
                request,
                revision: self.revision,
            };
            self.reaper.bury(content.descriptors, Some(ticket));
        }
        self.event(VaultEvent::Released {
            daemon: release.daemon,
            generation: current,
        });
    }
}
