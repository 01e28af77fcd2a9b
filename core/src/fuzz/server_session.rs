//! A server among strangers, engines and launchers that say whatever they like.

use super::Input;
use super::words::{DAEMONS, daemon, descriptors, generation, some_content, some_key, to_server};
use crate::machine::{ConnId, Limits, Machine, Origin, Server, ServerEvent};
use crate::peer::{Facts, Peer};
use crate::testing::host::Host;
use crate::testing::ledger::{Fd, Ledger};
use crate::testing::world::{self, SERVER_PID, UID, frame};
use crate::time::{Now, Span};
use crate::wire::message::{Define, Expects, Failure, GetStatus, Holds, Lead, Publish, Published, Released};
use crate::wire::{Decoder, Message};
use std::collections::{BTreeMap, VecDeque};

/// The most operations of a session: enough for anything, and quick.
const OPERATIONS: usize = 300;
/// The most deadlines that follow one another while nobody says anything.
const DEADLINES: usize = 300;
/// So many looks in a row take longer than any deadline.
const LOOKS: usize = 30;

/// Does to a server what the input says, and checks that
///
/// * nothing panics, also where the server itself would contain it, and no input has endless output;
/// * no descriptor is lost, or kept beyond what daemons hold;
/// * who says nothing more is ended by time alone, leases and launchers excepted; who hangs up is forgotten at once;
/// * leases are all given back in the end.
pub fn server_session(input: &[u8]) {
    let mut input = Input::new(input);
    let mut session = Session::new(&mut input);
    for _ in 0..OPERATIONS {
        if input.is_empty() {
            break;
        }
        session.operate(&mut input);
        session.no_bug();
    }
    session.silence();
    session.goodbye();
    session.leaves_nothing();
}

/// The other end of a connection.
#[derive(Default)]
struct Client {
    /// Said, and not delivered.
    out: VecDeque<(Vec<u8>, Vec<Fd>)>,
    decoder: Decoder<Fd>,
    /// What the server asked, of a launcher.
    asked: VecDeque<(u32, Message)>,
    /// It may stay silent.
    may_stay: bool,
    requests: u32,
}

struct Session {
    now: Now,
    ledger: Ledger,
    host: Host<Server<Fd>>,
    clients: BTreeMap<ConnId, Client>,
    limits: Limits,
}

impl Session {
    fn new(input: &mut Input<'_>) -> Session {
        let mut limits = Limits::default();
        if input.flag() {
            limits = Limits {
                connections: 3,
                leases: 2,
                states_per_connection: 2,
                unanswered: 100_000,
                ..limits
            };
        }
        let now = Now(1_000_000);
        let mut session = Session {
            now,
            ledger: Ledger::default(),
            host: Host::new(Server::new(now, "0.1.0", SERVER_PID, UID, limits)),
            clients: BTreeMap::new(),
            limits,
        };
        if input.flag() {
            session.arm(input);
        }
        session
    }

    /// A launcher does as it should: a daemon with content, and one that is published to.
    fn arm(&mut self, input: &mut Input<'_>) {
        let peer = Peer { pid: 10, uid: UID };
        let launcher = self.accept(Origin::Control, peer);
        self.say(launcher, &Lead { pid: 10 }.into(), vec![]);
        let generation = generation(input);
        let infos = [world::info(0, false), world::publishable(1)];
        for (daemon, info) in infos.into_iter().enumerate() {
            let define = Define {
                daemon: daemon as u32,
                holds: if daemon == 0 {
                    Holds::Content(generation)
                } else {
                    Holds::Empty
                },
                info,
            };
            self.say_well(launcher, define.into());
        }
        let publish = Publish {
            daemon: 0,
            generation: Some(generation),
            expects: Expects::Empty,
            key: world::key(0),
            content: world::content(64, &[10]),
        };
        self.say_well(launcher, publish.into());
        while self.deliver(launcher, usize::MAX, false) || self.read(launcher, usize::MAX) {}
    }

    fn operate(&mut self, input: &mut Input<'_>) {
        match input.below(16) {
            0 | 1 => {
                let origin = match input.below(4) {
                    0 => Origin::Control,
                    _ => Origin::Daemon(daemon(input)),
                };
                let uid = UID + u32::from(input.below(16) == 15);
                self.accept(origin, Peer { pid: 50, uid });
            }
            2..=4 => {
                let Some(conn) = self.client(input) else { return };
                let message = to_server(input);
                let descriptors = descriptors(&message, input, &self.ledger);
                self.say(conn, &message, descriptors);
                if input.flag() {
                    self.deliver(conn, usize::MAX, false);
                }
            }
            5 => {
                let Some(conn) = self.client(input) else { return };
                let (most, truncated) = (1 + input.below(100), input.below(32) == 31);
                self.deliver(conn, most, truncated);
            }
            6 => {
                let Some(conn) = self.client(input) else { return };
                let length = input.below(64);
                let garbage = input.bytes(length).to_vec();
                let client = self.clients.get_mut(&conn).expect("a client");
                if !garbage.is_empty() {
                    client.out.push_back((garbage, vec![]));
                }
            }
            7 => {
                if let Some(conn) = self.client(input) {
                    self.hang_up(conn);
                }
            }
            8 => {
                if let Some(conn) = self.client(input) {
                    self.read(conn, 1 + input.below(100));
                }
            }
            9 | 10 => {
                if let Some(conn) = self.client(input) {
                    while self.deliver(conn, usize::MAX, false) || self.read(conn, usize::MAX) {}
                }
            }
            11 => {
                let now = self.now + Span::millis(input.short());
                self.pass(now);
            }
            12 => self.pass_to_the_next_deadline(),
            13 => self.reap(if input.flag() { usize::MAX } else { 1 }),
            14 => {
                let now = self.now;
                self.host.input(|server| server.accept_failed(now));
                self.forget_closed();
            }
            _ => self.answer(input),
        }
    }

    fn client(&self, input: &mut Input<'_>) -> Option<ConnId> {
        let which = input.below(self.clients.len());
        self.clients.keys().nth(which).copied()
    }

    fn accept(&mut self, origin: Origin, peer: Peer) -> ConnId {
        let now = self.now;
        let conn = self.host.input(|server| server.accept(now, origin, peer));
        let client = Client {
            may_stay: origin == Origin::Control,
            ..Client::default()
        };
        assert!(
            self.clients.insert(conn, client).is_none(),
            "ids are never reused"
        );
        self.forget_closed();
        conn
    }

    fn say(&mut self, conn: ConnId, message: &Message, descriptors: Vec<Fd>) {
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        client.requests += 1;
        // What no frame can carry nobody says.
        if message.encode().is_ok() {
            let bytes = frame(message, client.requests, descriptors.len());
            client.out.push_back((bytes, descriptors));
        }
    }

    /// With the descriptors that belong to it.
    fn say_well(&mut self, conn: ConnId, message: Message) {
        let descriptors = descriptors(&message, &mut Input::new(&[]), &self.ledger);
        self.say(conn, &message, descriptors);
    }

    /// The server reads a part of what was said, if it wants to.
    fn deliver(&mut self, conn: ConnId, most: usize, truncated: bool) -> bool {
        let (reads, _) = self.host.interest.get(&conn).copied().unwrap_or_default();
        let Some(client) = self.clients.get_mut(&conn).filter(|_| reads) else {
            return false;
        };
        let Some((bytes, descriptors)) = client.out.front_mut() else {
            return false;
        };
        let rest = bytes.split_off(most.min(bytes.len()));
        let read = std::mem::replace(bytes, rest);
        let descriptors: Vec<(Facts, Fd)> = std::mem::take(descriptors)
            .into_iter()
            .map(|fd| (fd.facts, fd.strict()))
            .collect();
        if client.out.front().is_some_and(|(rest, _)| rest.is_empty()) {
            client.out.pop_front();
        }
        let now = self.now;
        self.host
            .input(|server| server.receive(now, conn, &read, descriptors, truncated));
        self.forget_closed();
        true
    }

    /// The client reads some of what the server has for it.
    fn read(&mut self, conn: ConnId, most: usize) -> bool {
        let Some(out) = self.host.machine.outgoing(conn) else {
            return false;
        };
        assert!(
            self.host.interest.get(&conn).is_some_and(|(_, writes)| *writes),
            "who has something to send wants to write"
        );
        let bytes = out.bytes[..most.min(out.bytes.len())].to_vec();
        let descriptors: Vec<Fd> = out.descriptors.iter().map(Fd::duplicate).collect();
        let client = self.clients.get_mut(&conn).expect("a client");
        let received = descriptors.into_iter().map(|fd| (fd.facts, fd));
        client
            .decoder
            .push(&bytes, received, false)
            .expect("a server frames well");
        while let Some(frame) = client.decoder.next_frame().expect("a server frames well") {
            let message = Message::decode(frame.kind, &frame.body).expect("a server says messages");
            client.may_stay |= matches!(message, Message::Watching(_));
            client.asked.push_back((frame.request, message));
        }
        let now = self.now;
        self.host.input(|server| server.wrote(now, conn, bytes.len()));
        self.forget_closed();
        true
    }

    fn hang_up(&mut self, conn: ConnId) {
        let now = self.now;
        self.host.input(|server| server.hangup(now, conn));
        assert!(self.host.closed.contains(&conn), "who hangs up is forgotten");
        self.forget_closed();
    }

    /// What a launcher would say to what it was asked.
    fn answer(&mut self, input: &mut Input<'_>) {
        let Some(conn) = self.client(input) else { return };
        let client = self.clients.get_mut(&conn).expect("a client");
        let Some((request, message)) = client.asked.pop_front() else {
            return;
        };
        let generation = generation(input);
        let mut answers: Vec<Message> = Vec::new();
        match message {
            Message::Publish(publish) if input.below(4) > 0 => {
                let daemon = publish.daemon;
                answers.push(Published { daemon, generation }.into());
                let arms = Publish {
                    generation: Some(generation),
                    ..publish
                };
                answers.push(arms.into());
            }
            Message::Release(_) => answers.push(Released {}.into()),
            Message::Publish(_) => answers.push(
                Failure {
                    code: 14,
                    retryable: false,
                    message: String::new(),
                }
                .into(),
            ),
            _ => answers.push(
                Publish {
                    daemon: daemon(input),
                    generation: Some(generation),
                    expects: Expects::Empty,
                    key: some_key(input, 0),
                    content: some_content(input),
                }
                .into(),
            ),
        }
        for answer in answers {
            let descriptors = descriptors(&answer, input, &self.ledger);
            let client = self.clients.get_mut(&conn).expect("a client");
            if answer.encode().is_ok() {
                let bytes = frame(&answer, request, descriptors.len());
                client.out.push_back((bytes, descriptors));
            }
        }
        while self.deliver(conn, usize::MAX, false) {}
    }

    fn pass(&mut self, now: Now) {
        self.now = now;
        let before = self.host.events.len();
        self.host.tick(now);
        if self.host.events[before..].contains(&ServerEvent::Look) {
            self.host.input(|server| server.looked(now, true));
        }
        self.forget_closed();
    }

    fn pass_to_the_next_deadline(&mut self) {
        if let Some(at) = self.host.wake_at {
            self.pass(at.max(self.now));
        }
    }

    fn reap(&mut self, most: usize) {
        for _ in 0..most {
            let Some((id, descriptor)) = self.host.discards.pop() else {
                return;
            };
            descriptor.close();
            let now = self.now;
            self.host.input(|server| server.discarded(now, id));
            self.forget_closed();
        }
    }

    /// The other ends of what the server has closed.
    fn forget_closed(&mut self) {
        for conn in std::mem::take(&mut self.host.closing) {
            self.clients.remove(&conn).expect("a connection");
        }
    }

    fn no_bug(&self) {
        for event in &self.host.events {
            assert!(!matches!(event, ServerEvent::Panicked { .. }), "{event:?}");
        }
        // Beyond connections and leases: the one that is told so, and the launcher's.
        let most = self.limits.connections + self.limits.leases + 2;
        assert!(self.clients.len() <= most, "connections are within their limits");
    }

    /// Nobody says anything, until no time will change anything: who waits for a launcher looks around again and again.
    fn silence(&mut self) {
        let mut looks_in_a_row = 0;
        for _ in 0..DEADLINES {
            self.reap(usize::MAX);
            if self.host.wake_at.is_none() || looks_in_a_row == LOOKS {
                let stuck = self.clients.values().filter(|client| !client.may_stay);
                assert_eq!(stuck.count(), 0, "who says nothing is ended");
                return self.no_bug();
            }
            let before = self.host.events.len();
            self.pass_to_the_next_deadline();
            looks_in_a_row = match &self.host.events[before..] {
                [ServerEvent::Look] => looks_in_a_row + 1,
                _ => 0,
            };
        }
        panic!("a silent server waits for something again and again");
    }

    /// Everybody hangs up, and leases are given back.
    fn goodbye(&mut self) {
        while let Some(&conn) = self.clients.keys().next() {
            self.hang_up(conn);
        }
        self.silence();
        for daemon in 0..DAEMONS as u32 {
            let conn = self.accept(Origin::Daemon(daemon), Peer { pid: 51, uid: UID });
            self.say(conn, &GetStatus {}.into(), vec![]);
            while self.deliver(conn, usize::MAX, false) || self.read(conn, usize::MAX) {}
            if let Some(client) = self.clients.get(&conn) {
                for (_, answer) in &client.asked {
                    if let Message::DaemonStatus(status) = answer {
                        assert_eq!((status.leases, status.launcher_pid), (0, 0));
                    }
                }
                self.hang_up(conn);
            }
        }
        self.reap(usize::MAX);
        self.no_bug();
    }

    fn leaves_nothing(self) {
        let Session { ledger, host, .. } = self;
        assert_eq!(ledger.lost(), [], "descriptors are discarded, never dropped");
        let daemons = (0..DAEMONS as u32).filter(|daemon| host.machine.info(*daemon).is_some());
        let most = daemons.count() * (2 + crate::wire::frame::MAX_DESCRIPTORS) + 2;
        assert!(
            ledger.open_in_all() <= most,
            "nothing but what daemons hold is open"
        );
        ledger.killing(host);
        assert_eq!(ledger.open_in_all(), 0, "the server had all of it");
    }
}
