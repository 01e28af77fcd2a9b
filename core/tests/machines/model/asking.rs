//! What is asked at once, and which of the ways in which it may go it went.

use super::clients::Client;
use super::node::Node;
use super::quiet::answers_of;
use super::reference::{Answer, Course, DAEMONS, Has, Memory, Model, Said, Wanted};
use super::transition::{Ask, Process};
use crate::ledger::{Fd, File};
use crate::world::{content, key, publication};
use weightd_core::content::{Generation, Key};
use weightd_core::machine::HandoverEvent;
use weightd_core::wire::Frame;
use weightd_core::wire::message::{DaemonId, ErrorCode, Expects, GetState, Message, Release, Watch};

/// The digest of the checkpoint, as loader and engines compute it.
pub(super) const DIGEST: [u8; 32] = [9; 32];

/// Something that was asked and is not answered yet.
pub(super) struct Asked {
    pub(super) said: Said,
    /// The client's connection; a loader and a launcher have their own.
    pub(super) raw: Option<usize>,
    /// Whether a process may have died before it was answered.
    pub(super) amid: bool,
}

impl Asked {
    fn is_clients_publication(&self) -> bool {
        self.raw.is_some() && matches!(self.said, Said::Publish { .. })
    }

    fn is_of(&self, daemon: DaemonId, kind: impl Fn(&Said) -> bool) -> bool {
        self.said.daemon() == daemon && kind(&self.said)
    }
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
pub(super) fn wanted_key(daemon: DaemonId, wanted: Wanted) -> Key {
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

impl Node {
    pub(super) fn ask_all(&mut self, asks: &[Ask], amid: bool) -> Vec<Asked> {
        asks.iter().map(|ask| self.ask(ask, amid)).collect()
    }

    pub(super) fn ask(&mut self, ask: &Ask, amid: bool) -> Asked {
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
    pub(super) fn publish(&mut self, raw: Option<usize>, daemon: DaemonId, expects: Expects, memory: Memory) {
        let descriptors = vec![self.world.ledger.memory(64), self.world.ledger.memory(memory.0)];
        self.files
            .insert(memory, [descriptors[0].file, descriptors[1].file]);
        let publication = publication(daemon, expects, content(64, &[memory.0]));
        match raw {
            Some(raw) => drop(self.world.say(raw, publication, descriptors)),
            None => {
                let loader = self.world.loader.as_mut().expect("a loader");
                loader.publish(publication, descriptors);
            }
        }
    }

    /// What a client heard, if anything.
    pub(super) fn heard(&mut self, raw: usize) -> Option<(Answer, Frame<Fd>)> {
        let mut frames = self.world.frames(raw);
        assert!(frames.len() <= 1, "a question has one answer: {frames:?}");
        let frame = frames.pop()?;
        let answer = self.read(&frame);
        Some((answer, frame))
    }

    pub(super) fn read(&self, frame: &Frame<Fd>) -> Answer {
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
    pub(super) fn answered(&mut self, asked: Vec<Asked>, died: Option<Process>) {
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
            if released.is_some_and(|generation| self.may_be_sent(generation)) {
                return heard.is_none();
            }
            // Or it was replaced at once, but it is the one that was asked for.
            if self.may_be_sent(self.model.daemon(daemon).current()) {
                return heard.is_none_or(|heard| *heard == Answer::Released);
            }
        }
        match (predicted, heard) {
            (Some(predicted), Some(heard)) if predicted == heard => true,
            (_, None) => silent,
            // What it stored is gone with it, or was handed over before; who asked cannot know.
            (_, Some(Answer::Refused(ErrorCode::InDoubt))) => launcher_died && asked.is_clients_publication(),
            // What a launcher told its loader is as good as nothing once both are gone.
            (None, Some(_)) if launcher_died && asked.raw.is_none() => true,
            (None, Some(Answer::Refused(ErrorCode::Busy))) => {
                asked.is_clients_publication() && (launcher_died || others(is_publication) > 1)
            }
            // The server has let go already, and is not given yet what replaces it; or it dies before the vault
            // hears of a release, which then was none.
            (_, Some(Answer::Refused(ErrorCode::Released | ErrorCode::StaleGeneration))) => {
                let comes_back = others(is_publication) > 0 || died == Some(Process::Server);
                let may_miss = matches!(asked.said, Said::Read { .. } | Said::Watch { .. });
                may_miss && comes_back && others(is_release) > 0
            }
            _ => false,
        }
    }

    /// Whether somebody was answered with it who has not read that yet.
    pub(super) fn may_be_sent(&self, generation: Generation) -> bool {
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

    pub(super) fn hang_up(&mut self, raw: usize) {
        self.world.hang_up(raw);
        self.world.raws.remove(&raw);
    }
}
