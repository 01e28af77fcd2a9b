//! What a node is to those who use it, in as few words as possible.

use crate::world::EPOCH;
use std::fmt;
use weightd_core::content::Generation;
use weightd_core::wire::message::{DaemonId, ErrorCode, Expects, Holds};

/// A daemon that its launcher loads, one that it loads and never releases, and one that clients publish to.
pub const LOADED: DaemonId = 0;
pub const KEPT: DaemonId = 1;
pub const SERVED: DaemonId = 2;
pub const DAEMONS: u32 = 3;

/// Memory that was published: how many bytes it has, and no other has as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Memory(pub u64);

/// What is said of the checkpoint of which a reader wants the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Same,
    AnotherModel,
    /// The same, in other files.
    OtherFiles,
    OtherFilesOfDigest {
        right: bool,
    },
}

/// What somebody asks for, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    Publish {
        daemon: DaemonId,
        by_loader: bool,
        expects: Expects,
        memory: Memory,
    },
    Read {
        daemon: DaemonId,
        wanted: Wanted,
    },
    Watch {
        daemon: DaemonId,
        generation: Option<Generation>,
    },
    Release {
        daemon: DaemonId,
        generation: Option<Generation>,
    },
    /// The launcher finds that the device lost a generation.
    Lose {
        daemon: DaemonId,
        generation: Generation,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Published(Generation),
    State(Generation, Memory),
    Mismatch,
    NeedDigest,
    Watching,
    Released,
    Noted,
    Refused(ErrorCode),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Has {
    Empty,
    Content(Generation, Memory),
    Released(Generation),
    Lost(Generation),
}

#[derive(Clone, Debug)]
pub struct Daemon {
    pub has: Has,
    /// A generation that it had, or one that nobody had.
    stale: Generation,
    pub digest_known: bool,
}

#[derive(Clone, Debug)]
pub struct Model {
    epoch: u64,
    next: u64,
    /// Whether there is a launcher.
    pub led: bool,
    /// Whether a launcher took over this server from another.
    pub adopted: bool,
    pub daemons: [Daemon; DAEMONS as usize],
}

/// One way in which several things that were asked at once may go.
#[derive(Clone, Debug)]
pub struct Course {
    pub after: Model,
    /// What is answered; nothing where it was not done.
    pub answers: Vec<Option<Answer>>,
}

impl fmt::Display for Course {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has: Vec<Has> = self.after.daemons.iter().map(|daemon| daemon.has).collect();
        write!(f, "    {:?}, and then {has:?}", self.answers)
    }
}

impl Said {
    pub fn daemon(&self) -> DaemonId {
        match *self {
            Said::Publish { daemon, .. }
            | Said::Read { daemon, .. }
            | Said::Watch { daemon, .. }
            | Said::Release { daemon, .. }
            | Said::Lose { daemon, .. } => daemon,
        }
    }
}

impl Has {
    pub fn holds(self) -> Holds {
        match self {
            Has::Empty => Holds::Empty,
            Has::Content(generation, _) => Holds::Content(generation),
            Has::Released(generation) => Holds::Released(generation),
            Has::Lost(generation) => Holds::Lost(generation),
        }
    }

    /// Its generation, whether it still has the content or not.
    fn generation(self) -> Option<Generation> {
        match self {
            Has::Empty => None,
            Has::Content(generation, _) | Has::Released(generation) | Has::Lost(generation) => {
                Some(generation)
            }
        }
    }

    pub fn content(self) -> Option<(Generation, Memory)> {
        match self {
            Has::Content(generation, memory) => Some((generation, memory)),
            _ => None,
        }
    }
}

impl Daemon {
    /// The generation to name where the right one is meant.
    pub fn current(&self) -> Generation {
        self.has.generation().unwrap_or(self.stale)
    }

    pub fn stale(&self) -> Generation {
        self.stale
    }

    /// What a publication must expect to be taken.
    pub fn expects(&self) -> Expects {
        let content = self.has.content();
        content.map_or(Expects::Empty, |(generation, _)| Expects::Generation(generation))
    }
}

impl Model {
    /// A launcher and its server, and nothing loaded.
    pub fn new(epoch: u64) -> Model {
        let nobodys = Generation { epoch: 1, number: 1 };
        let daemon = || Daemon {
            has: Has::Empty,
            stale: nobodys,
            digest_known: false,
        };
        Model {
            epoch: EPOCH + epoch,
            next: 1,
            led: true,
            adopted: false,
            daemons: [daemon(), daemon(), daemon()],
        }
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn daemon(&self, daemon: DaemonId) -> &Daemon {
        &self.daemons[daemon as usize]
    }

    /// What a reader of the daemon's checkpoint is answered.
    pub fn shows(&self, daemon: DaemonId, wanted: Wanted) -> Answer {
        self.clone().hear(&Said::Read { daemon, wanted })
    }

    /// Another launcher goes on with the server, and names its own generations.
    pub fn adopt(&mut self, epoch: u64) {
        (self.epoch, self.next) = (EPOCH + epoch, 1);
        (self.led, self.adopted) = (true, true);
    }

    /// Whether the server goes on when its launcher ends: it has something, and all sockets have their names.
    pub fn outlives_its_launcher(&self) -> bool {
        let named = self.adopted
            || [LOADED, KEPT]
                .iter()
                .all(|&daemon| self.daemon(daemon).has != Has::Empty);
        named && self.daemons.iter().any(|daemon| daemon.has.content().is_some())
    }

    /// Does what is asked.
    pub fn hear(&mut self, said: &Said) -> Answer {
        let led = self.led;
        let at = said.daemon();
        let daemon = &mut self.daemons[at as usize];
        let refused = Answer::Refused;
        match *said {
            Said::Publish { by_loader: false, .. } if at != SERVED => refused(ErrorCode::NotAllowed),
            Said::Publish { .. } if !led => refused(ErrorCode::Busy),
            Said::Publish { expects, .. } if expects != daemon.expects() => refused(ErrorCode::Conflict),
            Said::Publish { memory, .. } => {
                let generation = Generation {
                    epoch: self.epoch,
                    number: self.next,
                };
                self.next += 1;
                daemon.stale = daemon.current();
                daemon.has = Has::Content(generation, memory);
                Answer::Published(generation)
            }
            Said::Read { .. } if at == SERVED && daemon.has == Has::Empty => refused(ErrorCode::Empty),
            Said::Read { wanted, .. } => match wanted {
                Wanted::AnotherModel => Answer::Mismatch,
                // Its publisher did not say the digest.
                Wanted::OtherFiles | Wanted::OtherFilesOfDigest { .. } if at == SERVED => Answer::Mismatch,
                Wanted::OtherFiles => Answer::NeedDigest,
                Wanted::OtherFilesOfDigest { .. } if !daemon.digest_known => {
                    refused(ErrorCode::DigestPending)
                }
                Wanted::OtherFilesOfDigest { right: false } => Answer::Mismatch,
                Wanted::Same | Wanted::OtherFilesOfDigest { right: true } => match daemon.has {
                    Has::Empty => refused(ErrorCode::Empty),
                    Has::Released(_) => refused(ErrorCode::Released),
                    Has::Lost(_) => refused(ErrorCode::Lost),
                    Has::Content(generation, memory) => Answer::State(generation, memory),
                },
            },
            Said::Watch { generation, .. } => match (generation, daemon.has) {
                (None, _) => Answer::Watching,
                (Some(named), Has::Content(current, _)) if named == current => Answer::Watching,
                (Some(_), _) => refused(ErrorCode::StaleGeneration),
            },
            Said::Release { .. } if at == KEPT => refused(ErrorCode::NotAllowed),
            Said::Release { generation, .. } => match (generation, daemon.has.generation()) {
                (_, None) => Answer::Released,
                (Some(named), Some(current)) if named != current => refused(ErrorCode::StaleGeneration),
                (_, Some(current)) => {
                    if daemon.has.content().is_some() {
                        daemon.has = Has::Released(current);
                    }
                    Answer::Released
                }
            },
            Said::Lose { generation, .. } => {
                if daemon
                    .has
                    .content()
                    .is_some_and(|(current, _)| current == generation)
                {
                    daemon.has = Has::Lost(generation);
                }
                Answer::Noted
            }
        }
    }

    /// All ways in which this may go: in any order, and each is done or not.
    pub fn courses(&self, said: &[Said]) -> Vec<Course> {
        let mut courses = Vec::new();
        let start = Course {
            after: self.clone(),
            answers: vec![None; said.len()],
        };
        self.go_on(said, start, (0..said.len()).collect(), &mut courses);
        courses
    }

    fn go_on(&self, said: &[Said], course: Course, left: Vec<usize>, courses: &mut Vec<Course>) {
        for &next in &left {
            let left: Vec<usize> = left.iter().copied().filter(|other| *other != next).collect();
            let mut done = course.clone();
            done.answers[next] = Some(done.after.hear(&said[next]));
            self.go_on(said, done, left.clone(), courses);
            if self.is_gone_already(&said[next], &course.after) {
                let mut done = course.clone();
                done.answers[next] = Some(Answer::Released);
                self.go_on(said, done, left, courses);
            }
        }
        // Whatever is left is not done.
        courses.push(course);
    }

    /// Whether a release meant what there was when it was asked for, and that was replaced meanwhile: what
    /// replaced it stays.
    fn is_gone_already(&self, said: &Said, meanwhile: &Model) -> bool {
        let Said::Release { daemon, generation } = *said else {
            return false;
        };
        let asked_for = self.daemon(daemon).has.content();
        let asked_for = asked_for.filter(|(current, _)| generation.is_none_or(|named| named == *current));
        let now = meanwhile.daemon(daemon).has;
        daemon != KEPT && asked_for.is_some_and(|(current, _)| now.generation() != Some(current))
    }
}
