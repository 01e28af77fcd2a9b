//! Those who hold something of the node, or whom it keeps waiting.

use super::node::Node;
use super::reference::{Answer, Memory, Said, Wanted};
use super::transition::{Ask, Which};
use crate::ledger::Fd;
use crate::world::{End, UID, key};
use weightd_core::content::Generation;
use weightd_core::machine::{AttachOptions, Outcome, VaultEvent};
use weightd_core::time::{Now, Span};
use weightd_core::wire::Frame;
use weightd_core::wire::message::{DaemonId, ErrorCode, GetState, Report};

/// How long a reply may stay unread, and how long a client may take for a request.
const UNREAD: Span = Span::secs(5);
const IDLE: Span = Span::secs(10);

/// Somebody who holds something of the node, or whom the node keeps waiting.
pub(super) enum Client {
    /// Was given content and let go of its connection.
    Reader {
        memory: Memory,
        _frame: Frame<Fd>,
    },
    Engine {
        number: usize,
        daemon: DaemonId,
        generation: Generation,
        memory: Memory,
        leases: bool,
    },
    Watcher {
        raw: usize,
        daemon: DaemonId,
        lease: Option<(Generation, Memory)>,
    },
    /// Does not read what it was answered.
    Slow {
        raw: usize,
        since: Now,
        answer: Answer,
    },
    Mute {
        raw: usize,
        since: Now,
    },
    /// Waits until a slow reader lets go of what it released.
    Releaser {
        raw: usize,
        generation: Generation,
    },
}

impl Node {
    pub(super) fn attach(&mut self, daemon: DaemonId) {
        let number = self.world.attach(daemon, AttachOptions::new(UID), key(daemon));
        self.world.run();
        let answer = self.model.shows(daemon, Wanted::Same);
        let engine = &self.world.engines[number];
        let Answer::State(generation, memory) = answer else {
            let end = &engine.end;
            assert!(
                matches!(end, Some(End::Disk(_))),
                "{end:?} where it is {answer:?}"
            );
            return;
        };
        let leased = true;
        let mapped = End::Done(Outcome::Mapped { generation, leased });
        assert_eq!(engine.end, Some(mapped));
        let regions = &engine.mapped.as_ref().expect("it maps").regions;
        assert_eq!(regions[0].file, self.files[&memory][1]);
        let leases = true;
        self.clients.push(Client::Engine {
            number,
            daemon,
            generation,
            memory,
            leases,
        });
    }

    pub(super) fn slow_read(&mut self, daemon: DaemonId) {
        let raw = self.world.raw(daemon);
        self.world.narrow(raw, 0);
        let (key, is_reload) = (key(daemon), false);
        self.world.say(raw, GetState { key, is_reload }, vec![]);
        let answer = self.model.shows(daemon, Wanted::Same);
        let since = self.world.now;
        self.clients.push(Client::Slow { raw, since, answer });
    }

    /// All slow readers read.
    pub(super) fn catch_up(&mut self) {
        while self
            .clients
            .iter()
            .any(|client| matches!(client, Client::Slow { .. }))
        {
            self.catch_up_nth(0);
        }
        self.hear_releasers();
    }

    pub(super) fn catch_up_nth(&mut self, nth: usize) {
        let slow = self.clients.iter().enumerate();
        let mut slow = slow.filter(|(_, client)| matches!(client, Client::Slow { .. }));
        let (at, _) = slow.nth(nth).expect("one of them");
        let Client::Slow { raw, answer, .. } = self.clients.remove(at) else {
            unreachable!("it is slow");
        };
        self.world.narrow(raw, 200_000);
        self.world.run();
        let (heard, _frame) = self.heard(raw).expect("it is answered");
        assert_eq!(heard, answer, "it is told what was so when it asked");
        if let Answer::State(_, memory) = heard {
            self.clients.push(Client::Reader { memory, _frame });
        }
        self.hang_up(raw);
        self.world.run();
    }

    /// Releases are answered when nobody can be sent any more what was released.
    pub(super) fn hear_releasers(&mut self) {
        for client in std::mem::take(&mut self.clients) {
            let Client::Releaser { raw, .. } = client else {
                self.clients.push(client);
                continue;
            };
            match self.heard(raw) {
                None => self.clients.push(client),
                Some((answer, _)) => {
                    assert_eq!(answer, Answer::Released);
                    self.hang_up(raw);
                }
            }
        }
        for client in &self.clients {
            if let Client::Releaser { generation, .. } = client {
                assert!(
                    self.may_be_sent(*generation),
                    "nobody keeps {generation} any more"
                );
            }
        }
        self.world.run();
    }

    pub(super) fn end(&mut self, client: Client) {
        match client {
            Client::Reader { .. } => {}
            Client::Engine { number, .. } => self.world.end_engine(number),
            Client::Watcher { raw, .. }
            | Client::Slow { raw, .. }
            | Client::Mute { raw, .. }
            | Client::Releaser { raw, .. } => self.hang_up(raw),
        }
    }

    pub(super) fn import_fails(&mut self, daemon: DaemonId, which: Which, lost: bool) {
        let ask = Ask::Lose { daemon, which };
        let said = ask.of(&self.model, || unreachable!("nothing is published"));
        let Said::Lose { generation, .. } = said else {
            unreachable!("it says what is lost");
        };
        self.world.vault.as_mut().expect("a vault").events.clear();
        let raw = self.world.raw(daemon);
        let report = Report {
            daemon: 77,
            generation,
            import_failed: "no device".into(),
        };
        self.world.say(raw, report, vec![]);
        self.world.run();
        let (answer, _) = self.heard(raw).expect("it is answered");
        assert_eq!(answer, Answer::Noted);
        self.hang_up(raw);
        let is_current = self.model.daemon(daemon).has.content();
        let is_current = is_current.is_some_and(|(current, _)| current == generation);
        let vault = self.world.vault.as_mut().expect("a vault");
        let failed = VaultEvent::ImportFailed {
            daemon,
            generation,
            why: "no device".into(),
        };
        let told: Vec<VaultEvent> = is_current.then_some(failed).into_iter().collect();
        assert_eq!(std::mem::take(&mut vault.events), told);
        if lost {
            vault.input(|vault| vault.lost(daemon, generation));
            self.model.hear(&said);
        }
    }

    /// Second by second, so that whoever is answered meanwhile goes on at once.
    pub(super) fn pass(&mut self, span: Span) {
        let until = self.world.now + span;
        while self.world.now < until {
            self.world.pass((until - self.world.now).min(Span::secs(1)));
            self.end_the_late();
            self.hear_releasers();
        }
    }

    /// Who has not read, or not spoken, for too long is not connected any more.
    fn end_the_late(&mut self) {
        let now = self.world.now;
        for client in std::mem::take(&mut self.clients) {
            match client {
                Client::Slow { raw, since, .. } if now >= since + UNREAD => self.hang_up(raw),
                Client::Mute { raw, since } if now >= since + IDLE => {
                    let (told, _) = self.heard(raw).expect("it is told");
                    assert_eq!(told, Answer::Refused(ErrorCode::Timeout));
                    assert!(self.world.raws[&raw].ended);
                    self.hang_up(raw);
                }
                client => self.clients.push(client),
            }
        }
    }
}
