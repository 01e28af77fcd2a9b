//! The node that does what the model says: all machines in one world, and those who use them.

use super::reference::{Answer, Course, DAEMONS, Has, KEPT, LOADED, Memory, Model, SERVED, Said, Wanted};
use super::transition::{Ask, Process, Transition, Which};
use crate::host::Host;
use crate::ledger::{Fd, File};
use crate::wire::Dice;
use crate::world::*;
use std::collections::BTreeMap;
use weightd_core::content::{Generation, Key};
use weightd_core::machine::{AttachOptions, HandoverEvent, Held, Outcome, ServerEvent, Vault, VaultEvent};
use weightd_core::peer::{Facts, FileKind};
use weightd_core::time::{Now, Span};
use weightd_core::wire::Frame;
use weightd_core::wire::message::{
    DaemonId, Digest, ErrorCode, Expects, GetActivity, GetMemory, GetState, GetStatus, Leased, Message,
    Publish, Release, Report, Watch,
};

/// How long a reply may stay unread, and how long a client may take for a request.
const UNREAD: Span = Span::secs(5);
const IDLE: Span = Span::secs(10);

/// Who asks each daemon whenever all is quiet.
const READERS: [Wanted; 2] = [Wanted::Same, Wanted::OtherFilesOfDigest { right: true }];

/// The digest of the checkpoint, as loader and engines compute it.
const DIGEST: [u8; 32] = [9; 32];

/// Somebody who holds something of the node, or whom the node keeps waiting.
enum Client {
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

/// Something that was asked and is not answered yet.
struct Asked {
    said: Said,
    /// The client's connection; a loader and a launcher have their own.
    raw: Option<usize>,
    /// Whether a process may have died before it was answered.
    amid: bool,
}

impl Asked {
    fn is_clients_publication(&self) -> bool {
        self.raw.is_some() && matches!(self.said, Said::Publish { .. })
    }

    fn is_of(&self, daemon: DaemonId, kind: impl Fn(&Said) -> bool) -> bool {
        self.said.daemon() == daemon && kind(&self.said)
    }
}

/// What a daemon says of itself.
#[derive(Debug, PartialEq)]
struct Seen {
    holds: weightd_core::wire::message::Holds,
    leases: u32,
    leased: Vec<Leased>,
    /// What it answers those [`READERS`].
    answers: [Answer; 2],
}

pub struct Node {
    world: World,
    model: Model,
    clients: Vec<Client>,
    /// The files of manifest and region.
    files: BTreeMap<Memory, [File; 2]>,
    launchers: u64,
}

fn lines(things: &[impl std::fmt::Debug]) -> String {
    let lines: Vec<String> = things.iter().map(|thing| format!("    {thing:?}")).collect();
    lines.join("\n")
}

fn is_release(said: &Said) -> bool {
    matches!(said, Said::Release { .. })
}

fn is_publication(said: &Said) -> bool {
    matches!(said, Said::Publish { .. })
}

/// The key of a reader.
fn wanted_key(daemon: DaemonId, wanted: Wanted) -> Key {
    let mut key = key(daemon);
    match wanted {
        Wanted::Same => {}
        Wanted::AnotherModel => key.model_arch = "MixtralForCausalLM".into(),
        Wanted::OtherFiles => key.checkpoint.files = Some([2; 32]),
        Wanted::OtherFilesOfDigest { right } => {
            key.checkpoint.files = Some([2; 32]);
            key.checkpoint.digest = Some(if right { DIGEST } else { [8; 32] });
        }
    }
    key
}

fn answers_of(model: &Model, daemon: DaemonId) -> [Answer; 2] {
    READERS.map(|wanted| model.shows(daemon, wanted))
}

impl Node {
    /// A launcher, its server and its loader, and nothing loaded. With `dice`, whatever moves is late and in pieces.
    pub fn new(dice: Option<u64>) -> Node {
        let mut world = World::new();
        world.dice = dice.map(Dice);
        let mut node = Node {
            world,
            model: Model::new(0),
            clients: Vec::new(),
            files: BTreeMap::new(),
            launchers: 0,
        };
        node.start();
        node
    }

    /// A launcher starts with nothing.
    fn start(&mut self) {
        let world = &mut self.world;
        world.listeners.clear();
        self.model = Model::new(self.launchers);
        self.launchers += 1;
        let held = (0..DAEMONS).map(|daemon| {
            let open = |file| world.ledger.open(Facts { file, size: 0 }).strict();
            let (lock, listener) = (open(FileKind::Other), open(FileKind::Listener));
            world.listeners.push(listener.file);
            let info = match daemon {
                SERVED => publishable(daemon),
                daemon => info(daemon, daemon == KEPT),
            };
            Held { info, lock, listener }
        });
        let vault = Vault::new(VAULT_PID, self.model.epoch(), held.collect::<Vec<_>>());
        world.vault = Some(Host::new(vault.with_control(world.ends())));
        world.start_server();
        world.start_loader();
        world.run();
    }

    pub fn go(&mut self, transition: &Transition) {
        match *transition {
            Transition::Asks(ref asks) => {
                let asked = self.ask_all(asks, false);
                self.answered(asked, None);
            }
            Transition::Death {
                of,
                ref amid,
                turns,
                nothing_closes,
                ref meanwhile,
            } => {
                let releases = |ask: &Ask| matches!(ask, Ask::Release { .. });
                if of != Process::Server || amid.iter().chain(meanwhile).any(releases) {
                    self.catch_up();
                }
                let asked = self.ask_all(amid, true);
                self.world.hold_reaper = nothing_closes;
                self.world.some_turns(turns);
                self.world.hold_reaper = false;
                self.death(of, asked, meanwhile);
            }
            Transition::Attach(daemon) => self.attach(daemon),
            Transition::SlowRead(daemon) => self.slow_read(daemon),
            Transition::CatchUp(which) => {
                let slow = |client: &&Client| matches!(client, Client::Slow { .. });
                let count = self.clients.iter().filter(slow).count();
                if count > 0 {
                    self.catch_up_nth(which % count);
                }
            }
            Transition::Mute { daemon, after } => {
                let raw = self.world.raw(daemon);
                let request = frame(&GetMemory {}.into(), 1, 0);
                if after > 0 {
                    self.world.send(raw, &request[..after], vec![]);
                }
                let since = self.world.now;
                self.clients.push(Client::Mute { raw, since });
            }
            Transition::Dies(which) if !self.clients.is_empty() => {
                let which = which % self.clients.len();
                // Whoever waits is answered before anybody looks whether it is still there.
                if !matches!(self.clients[which], Client::Releaser { .. }) {
                    let client = self.clients.remove(which);
                    self.end(client);
                }
            }
            Transition::Dies(_) => {}
            Transition::ImportFails { daemon, which, lost } => self.import_fails(daemon, which, lost),
            Transition::Digest(daemon) => {
                let loader = self.world.loader.as_mut().expect("a loader");
                loader.digest(Digest {
                    daemon,
                    digest: DIGEST,
                });
                self.model.daemons[daemon as usize].digest_known = true;
            }
            Transition::Pass(millis) => self.pass(Span::millis(millis)),
        }
        self.world.run();
        self.hear_releasers();
        self.check();
    }

    /// Everybody ends, and nothing is left.
    pub fn finish(mut self) {
        self.clients.clear();
        self.world.finish();
    }

    // What is asked, and how it goes.

    fn ask_all(&mut self, asks: &[Ask], amid: bool) -> Vec<Asked> {
        asks.iter().map(|ask| self.ask(ask, amid)).collect()
    }

    fn ask(&mut self, ask: &Ask, amid: bool) -> Asked {
        let memory = Memory(1000 + self.files.len() as u64);
        let said = ask.of(&self.model, || memory);
        let raw = match said {
            Said::Publish { by_loader: true, .. } | Said::Lose { .. } => None,
            _ => Some(self.world.raw(said.daemon())),
        };
        match said {
            Said::Publish {
                daemon,
                expects,
                memory,
                ..
            } => self.publish(raw, daemon, expects, memory),
            Said::Lose { daemon, generation } => {
                let vault = self.world.vault.as_mut().expect("a vault");
                vault.input(|vault| vault.lost(daemon, generation));
            }
            Said::Read { daemon, wanted } => {
                let (key, is_reload) = (wanted_key(daemon, wanted), false);
                self.world
                    .say(raw.expect("a client"), GetState { key, is_reload }, vec![]);
            }
            Said::Watch { generation, .. } => {
                self.world
                    .say(raw.expect("a client"), Watch { generation }, vec![]);
            }
            Said::Release { generation, .. } => {
                // Which daemon it is for is said by the socket.
                let release = Release {
                    daemon: 77,
                    generation,
                };
                self.world.say(raw.expect("a client"), release, vec![]);
            }
        }
        Asked { said, raw, amid }
    }

    /// A client publishes, or the loader.
    fn publish(&mut self, raw: Option<usize>, daemon: DaemonId, expects: Expects, memory: Memory) {
        let descriptors = vec![self.world.ledger.memory(64), self.world.ledger.memory(memory.0)];
        self.files
            .insert(memory, [descriptors[0].file, descriptors[1].file]);
        let publication = Publish {
            daemon,
            generation: None,
            expects,
            key: key(daemon),
            content: content(64, &[memory.0]),
        };
        match raw {
            Some(raw) => drop(self.world.say(raw, publication, descriptors)),
            None => {
                let loader = self.world.loader.as_mut().expect("a loader");
                loader.publish(publication, descriptors);
            }
        }
    }

    /// What a client heard, if anything.
    fn heard(&mut self, raw: usize) -> Option<(Answer, Frame<Fd>)> {
        let mut frames = self.world.frames(raw);
        assert!(frames.len() <= 1, "a question has one answer: {frames:?}");
        let frame = frames.pop()?;
        let answer = self.read(&frame);
        Some((answer, frame))
    }

    fn read(&self, frame: &Frame<Fd>) -> Answer {
        match Message::decode(frame.kind, &frame.body).expect("a message") {
            Message::Published(published) => Answer::Published(published.generation),
            Message::State(state) => {
                let memory = Memory(state.content.bytes());
                let files: Vec<File> = frame.descriptors.iter().map(|(_, fd)| fd.file).collect();
                assert_eq!(
                    files[..],
                    self.files[&memory],
                    "whoever is told of {memory:?} is given it"
                );
                Answer::State(state.generation, memory)
            }
            Message::Mismatch(_) => Answer::Mismatch,
            Message::NeedDigest(_) => Answer::NeedDigest,
            Message::Watching(_) => Answer::Watching,
            Message::Released(_) => Answer::Released,
            Message::Reported(_) => Answer::Noted,
            Message::Failure(failure) => Answer::Refused(ErrorCode::from_number(failure.code)),
            other => panic!("nobody asked for {other:?}"),
        }
    }

    /// Whatever was asked is over, or its answer is lost with who `died`: it went in one of the ways in
    /// which it may go.
    fn answered(&mut self, asked: Vec<Asked>, died: Option<Process>) {
        self.world.run();
        let loaded = std::mem::take(&mut self.world.published).into_iter();
        let mut loaded = loaded.filter_map(|event| match event {
            HandoverEvent::Published { generation, .. } => Some(Answer::Published(generation)),
            HandoverEvent::Refused { .. } => Some(Answer::Refused(ErrorCode::Conflict)),
            HandoverEvent::Gone { .. } => None,
        });
        let mut frames = Vec::new();
        let mut heard = Vec::new();
        for asked in &asked {
            let (answer, frame) = match (asked.raw, &asked.said) {
                (None, Said::Lose { .. }) => (Some(Answer::Noted), None),
                (None, _) => (loaded.next(), None),
                (Some(raw), _) if self.world.raws.contains_key(&raw) => self.heard(raw).unzip(),
                (Some(_), _) => (None, None),
            };
            heard.push(answer);
            frames.push(frame);
        }
        let seen = self.seen();
        let said: Vec<Said> = asked.iter().map(|asked| asked.said.clone()).collect();
        let courses = self.model.courses(&said);
        let right = courses.iter().find(|course| {
            let mut answers = course.answers.iter().zip(&heard).zip(&asked);
            let mut seen = (0..DAEMONS).zip(&seen);
            answers.all(|((predicted, heard), one)| {
                self.agree(one, predicted.as_ref(), heard.as_ref(), course, &asked, died)
            }) && seen.all(|(daemon, seen)| {
                seen.holds == course.after.daemon(daemon).has.holds()
                    && seen.answers == answers_of(&course.after, daemon)
            })
        });
        let Some(course) = right.cloned() else {
            let may: Vec<String> = courses.iter().map(Course::to_string).collect();
            panic!(
                "what was asked:\n{}\nwas answered:\n{}\nand the daemons are:\n{}\nbut before they were\n{}\nand it may go:\n{}",
                lines(&said),
                lines(&heard),
                lines(&seen),
                lines(&self.model.daemons),
                may.join("\n")
            );
        };
        let before = std::mem::replace(&mut self.model, course.after);
        for ((asked, heard), frame) in asked.into_iter().zip(heard).zip(frames) {
            self.keep(asked, heard, frame, &before);
        }
        self.world.run();
    }

    /// Whether this may be heard where the model says that.
    fn agree(
        &self,
        asked: &Asked,
        predicted: Option<&Answer>,
        heard: Option<&Answer>,
        course: &Course,
        all: &[Asked],
        died: Option<Process>,
    ) -> bool {
        let daemon = asked.said.daemon();
        let launcher_died = matches!(died, Some(Process::Launcher { .. }));
        let others = |kind: fn(&Said) -> bool| all.iter().filter(|other| other.is_of(daemon, kind)).count();
        let silent = asked.amid
            && match died {
                Some(Process::Server | Process::Clients) => asked.raw.is_some(),
                Some(Process::Launcher { .. } | Process::Loader) => asked.raw.is_none(),
                _ => false,
            };
        if is_release(&asked.said) && predicted == Some(&Answer::Released) && died.is_none() {
            // A slow reader may be sent it still, so it is not gone.
            let released = match course.after.daemon(daemon).has {
                Has::Released(generation) => Some(generation),
                _ => None,
            };
            let replaced = self.model.daemon(daemon).has.content();
            if released.is_some_and(|generation| self.may_be_sent(generation)) {
                return heard.is_none();
            }
            if replaced.is_some_and(|(generation, _)| self.may_be_sent(generation)) {
                return heard.is_none_or(|heard| *heard == Answer::Released);
            }
        }
        match (predicted, heard) {
            (Some(predicted), Some(heard)) if predicted == heard => true,
            (_, None) => silent,
            // What it stored is gone with it, or was handed over before; who asked cannot know.
            (_, Some(Answer::Refused(ErrorCode::InDoubt))) => launcher_died && asked.is_clients_publication(),
            (None, Some(Answer::Published(_) | Answer::Noted)) => launcher_died && asked.raw.is_none(),
            (None, Some(Answer::Refused(ErrorCode::Busy))) => {
                asked.is_clients_publication() && (launcher_died || others(is_publication) > 1)
            }
            // The server has let go already, and is not given yet what replaces it.
            (_, Some(Answer::Refused(ErrorCode::Released | ErrorCode::StaleGeneration))) => {
                others(is_release) > 0
                    && others(is_publication) > 0
                    && matches!(asked.said, Said::Read { .. } | Said::Watch { .. })
            }
            _ => false,
        }
    }

    /// Whether somebody was answered with it who has not read that yet.
    fn may_be_sent(&self, generation: Generation) -> bool {
        self.clients.iter().any(
            |client| matches!(client, Client::Slow { answer: Answer::State(sent, _), .. } if *sent == generation),
        )
    }

    /// What who asked goes on with.
    fn keep(&mut self, asked: Asked, heard: Option<Answer>, frame: Option<Frame<Fd>>, before: &Model) {
        let Some(raw) = asked.raw.filter(|raw| self.world.raws.contains_key(raw)) else {
            return;
        };
        let daemon = asked.said.daemon();
        match (&asked.said, heard) {
            (Said::Watch { generation, .. }, Some(Answer::Watching)) if !self.world.raws[&raw].ended => {
                let lease = generation.map(|generation| {
                    let contents = [before, &self.model].map(|model| model.daemon(daemon).has.content());
                    let mut contents = contents.into_iter().flatten();
                    contents
                        .find(|(has, _)| *has == generation)
                        .expect("it was leased")
                });
                self.clients.push(Client::Watcher { raw, daemon, lease });
            }
            (Said::Release { .. }, None) if !self.world.raws[&raw].ended => {
                let ends = [before, &self.model].map(|model| model.daemon(daemon).current());
                let generation = ends.into_iter().find(|generation| self.may_be_sent(*generation));
                let generation = generation.expect("who waits for nobody is answered");
                self.clients.push(Client::Releaser { raw, generation });
            }
            (_, Some(Answer::State(_, memory))) => {
                let _frame = frame.expect("it was heard");
                self.clients.push(Client::Reader { memory, _frame });
                self.hang_up(raw);
            }
            _ => self.hang_up(raw),
        }
    }

    fn hang_up(&mut self, raw: usize) {
        self.world.hang_up(raw);
        self.world.raws.remove(&raw);
    }

    // Who dies, and who comes after.

    fn death(&mut self, of: Process, mut asked: Vec<Asked>, meanwhile: &[Ask]) {
        match of {
            Process::Server => {
                self.world.kill_server();
                asked.extend(self.ask_all(meanwhile, false));
                self.world.run();
                self.server_died();
                self.world.start_server();
                self.answered(asked, Some(of));
                self.model.adopted = false;
            }
            Process::Launcher { successor_dies_after } => {
                self.world.kill_vault();
                self.world.kill_loader();
                self.model.led = false;
                // Until now there was one to hear it.
                let mut model = self.model.clone();
                model.led = true;
                std::mem::swap(&mut self.model, &mut model);
                self.answered(asked, Some(of));
                self.model.led = false;
                self.serve_alone(meanwhile, successor_dies_after);
            }
            Process::ServerAndLauncher => {
                self.world.kill_server();
                self.world.kill_vault();
                self.world.kill_loader();
                self.world.run();
                self.forget(asked);
                self.world.published.clear();
                self.server_died();
                self.start();
            }
            Process::Loader => {
                self.world.kill_loader();
                self.answered(asked, Some(of));
                self.world.start_loader();
            }
            Process::Clients => {
                let raws: Vec<usize> = asked.iter().filter_map(|asked| asked.raw).collect();
                raws.into_iter().for_each(|raw| self.hang_up(raw));
                self.answered(asked, Some(of));
            }
        }
    }

    fn forget(&mut self, asked: Vec<Asked>) {
        for raw in asked.into_iter().filter_map(|asked| asked.raw) {
            self.hang_up(raw);
        }
    }

    /// A server without a launcher, until another adopts it; where it would end, everything starts anew.
    fn serve_alone(&mut self, meanwhile: &[Ask], successor_dies_after: Option<usize>) {
        if self.model.outlives_its_launcher() {
            assert!(!self.stops(), "it has something to serve");
            let without_launcher = |ask: &&Ask| !matches!(ask, Ask::Load { .. } | Ask::Lose { .. });
            let meanwhile: Vec<Ask> = meanwhile.iter().filter(without_launcher).cloned().collect();
            let asked = self.ask_all(&meanwhile, false);
            self.answered(asked, None);
        }
        let goes_on = self.model.outlives_its_launcher();
        assert_eq!(self.stops(), !goes_on, "in {:#?}", self.model);
        if !goes_on {
            self.world.kill_server();
            self.world.run();
            self.server_died();
            return self.start();
        }
        if let Some(turns) = successor_dies_after {
            let adopter = self.world.adopt(100);
            self.world.some_turns(turns);
            self.world.kill_adopter(adopter);
            self.world.run();
        }
        let adopter = self.world.adopt(101);
        self.world.run();
        let inheritance = self.world.adopted(adopter).expect("a server without a launcher");
        self.model.adopt(self.launchers);
        self.launchers += 1;
        self.world.follow(adopter, 101, self.model.epoch(), inheritance);
        self.world.start_loader();
        self.world.published.clear();
    }

    fn stops(&self) -> bool {
        let server = self.world.server.as_ref().expect("a server");
        server
            .events
            .iter()
            .any(|event| matches!(event, ServerEvent::Stop { .. }))
    }

    /// Whoever was connected to it notices. What is mapped stays mapped.
    fn server_died(&mut self) {
        for client in std::mem::take(&mut self.clients) {
            match client {
                Client::Reader { .. } => self.clients.push(client),
                Client::Engine {
                    number,
                    daemon,
                    generation,
                    memory,
                    ..
                } => {
                    let engine = &self.world.engines[number];
                    assert!(engine.lease_ended, "its lease is gone with the server");
                    let leases = false;
                    self.clients.push(Client::Engine {
                        number,
                        daemon,
                        generation,
                        memory,
                        leases,
                    });
                }
                Client::Slow { raw, .. } => self.hang_up(raw),
                Client::Watcher { raw, .. } | Client::Mute { raw, .. } | Client::Releaser { raw, .. } => {
                    assert!(
                        self.world.raws[&raw].ended,
                        "its connection is gone with the server"
                    );
                    self.hang_up(raw);
                }
            }
        }
    }

    // Those who stay.

    fn attach(&mut self, daemon: DaemonId) {
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

    fn slow_read(&mut self, daemon: DaemonId) {
        let raw = self.world.raw(daemon);
        self.world.narrow(raw, 0);
        let (key, is_reload) = (key(daemon), false);
        self.world.say(raw, GetState { key, is_reload }, vec![]);
        let answer = self.model.shows(daemon, Wanted::Same);
        let since = self.world.now;
        self.clients.push(Client::Slow { raw, since, answer });
    }

    /// All slow readers read.
    fn catch_up(&mut self) {
        while self
            .clients
            .iter()
            .any(|client| matches!(client, Client::Slow { .. }))
        {
            self.catch_up_nth(0);
        }
        self.hear_releasers();
    }

    fn catch_up_nth(&mut self, nth: usize) {
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
    fn hear_releasers(&mut self) {
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

    fn end(&mut self, client: Client) {
        match client {
            Client::Reader { .. } => {}
            Client::Engine { number, .. } => self.world.end_engine(number),
            Client::Watcher { raw, .. }
            | Client::Slow { raw, .. }
            | Client::Mute { raw, .. }
            | Client::Releaser { raw, .. } => self.hang_up(raw),
        }
    }

    fn import_fails(&mut self, daemon: DaemonId, which: Which, lost: bool) {
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
    fn pass(&mut self, span: Span) {
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

    // What must be so whenever nothing moves.

    /// What the daemons say of themselves.
    fn seen(&mut self) -> Vec<Seen> {
        let ask = |daemon| {
            let raw = self.world.raw(daemon);
            self.world.say(raw, GetStatus {}, vec![]);
            self.world.say(raw, GetActivity {}, vec![]);
            for wanted in READERS {
                let (key, is_reload) = (wanted_key(daemon, wanted), false);
                self.world.say(raw, GetState { key, is_reload }, vec![]);
            }
            raw
        };
        let raws: Vec<usize> = (0..DAEMONS).map(ask).collect();
        self.world.run();
        let mut seen = Vec::new();
        for raw in raws {
            let frames = self.world.frames(raw);
            self.hang_up(raw);
            let decode = |frame: &Frame<Fd>| Message::decode(frame.kind, &frame.body).expect("a message");
            let (status, activity) = match (decode(&frames[0]), decode(&frames[1])) {
                (Message::DaemonStatus(status), Message::Activity(activity)) => (status, activity),
                other => panic!("{other:?}"),
            };
            let mut leased = activity.generations;
            leased.sort_by_key(|leased| leased.generation);
            seen.push(Seen {
                holds: status.holds,
                leases: status.leases,
                leased,
                answers: [self.read(&frames[2]), self.read(&frames[3])],
            });
        }
        self.world.run();
        seen
    }

    /// Who leases what, of this daemon.
    fn leased(&self, of: DaemonId) -> Vec<Leased> {
        let mut leased: BTreeMap<Generation, (u64, u32)> = BTreeMap::new();
        for client in &self.clients {
            let lease = match *client {
                Client::Engine {
                    daemon,
                    generation,
                    memory,
                    leases: true,
                    ..
                } if daemon == of => Some((generation, memory)),
                Client::Watcher { daemon, lease, .. } if daemon == of => lease,
                _ => None,
            };
            if let Some((generation, memory)) = lease {
                leased.entry(generation).or_insert((memory.0, 0)).1 += 1;
            }
        }
        let leased = leased.into_iter();
        leased
            .map(|(generation, (bytes, leases))| Leased {
                generation,
                bytes,
                leases,
            })
            .collect()
    }

    fn check(&mut self) {
        assert_eq!(
            self.world.ledger.lost(),
            [],
            "descriptors are discarded, never dropped"
        );
        let vault = &self.world.vault.as_ref().expect("a vault").machine;
        assert!(vault.is_armed());
        for daemon in 0..DAEMONS {
            let has = self.model.daemon(daemon).has;
            assert_eq!(
                vault.holds(daemon),
                Some(has.holds()),
                "the vault's daemon {daemon}"
            );
        }
        for (daemon, seen) in (0..DAEMONS).zip(self.seen()) {
            let leased = self.leased(daemon);
            let said = Seen {
                holds: self.model.daemon(daemon).has.holds(),
                leases: leased.iter().map(|leased| leased.leases).sum(),
                leased,
                answers: answers_of(&self.model, daemon),
            };
            assert_eq!(seen, said, "the server's daemon {daemon}");
        }
        for (memory, files) in &self.files {
            let held = self.holders(*memory);
            for file in files {
                assert_eq!(
                    self.world.ledger.open_of(*file),
                    held,
                    "descriptors of {memory:?}"
                );
            }
        }
        let connected = |client: &&Client| match client {
            Client::Reader { .. } => false,
            Client::Engine { leases, .. } => *leases,
            _ => true,
        };
        let connected = self.clients.iter().filter(connected).count();
        let server = self.world.server.as_ref().expect("a server");
        assert_eq!(server.interest.len(), 1 + connected, "connections of the server");
    }

    /// How many have it.
    fn holders(&self, of: Memory) -> usize {
        let content = |daemon: DaemonId| self.model.daemon(daemon).has.content();
        let is_current = (0..DAEMONS).filter_map(content).any(|(_, memory)| memory == of);
        let has = |client: &&Client| match client {
            Client::Reader { memory, .. } | Client::Engine { memory, .. } => *memory == of,
            _ => false,
        };
        let mappings = self.clients.iter().filter(has).count();
        let is_sent = self.clients.iter().any(
            |client| matches!(client, Client::Slow { answer: Answer::State(_, memory), .. } if *memory == of),
        );
        let server = usize::from(is_current || is_sent);
        usize::from(is_current) + server + mappings
    }

    /// Whether everything that was to be loaded is.
    pub fn load_all(&mut self) {
        for daemon in [LOADED, KEPT] {
            let expects = Which::Current;
            self.go(&Transition::Asks(vec![Ask::Load { daemon, expects }]));
        }
    }
}
