//! What a seed decides.

use std::time::Duration;

/// What an era is of: one socket directory, and who brings the weights.
#[derive(Debug)]
pub struct Era {
    seed: u64,
    pub source: Source,
    pub tp: u32,
    /// Who lives through the era unhurt, so that what it gathers with every death of the other shows.
    pub spared: Option<Victim>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `weightd preload` of a model, and perhaps of a draft beside it.
    Loader {
        model: &'static str,
        draft: Option<&'static str>,
        checksums: bool,
    },
    /// `weightd serve`, to which two models with the same shapes are published.
    Publishers,
}

/// What happens in a step.
#[derive(Debug)]
pub struct Step {
    pub act: Act,
    /// Release every rank, or rank 0 alone.
    pub all: bool,
    /// The next launcher comes before the server can have noticed that its own is gone.
    pub hasty: bool,
    /// A launcher that is left after the act is killed too.
    pub one_more: bool,
    /// Hostile clients do what they can meanwhile.
    pub flood: Option<Dice>,
    pub blows: Vec<Blow>,
    pub comes: Option<Comes>,
    /// The engine that has mapped for longest lets go.
    pub one_goes: bool,
}

/// What is done when the blows come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// A launcher starts in an empty directory.
    Start,
    /// An engine attaches, perhaps while what was loaded is not yet digested.
    Attach,
    /// A process publishes all ranks of the other model.
    Publish,
    Release,
    Scrub,
    Stop,
    /// A launcher goes on with the server of one that was killed.
    Adopt,
}

/// Who maps before the act, and stays.
#[derive(Clone, Copy, Debug)]
pub enum Comes {
    /// An engine in the test's own process.
    Engine,
    /// `attach --hold`.
    Holder,
}

#[derive(Debug)]
pub struct Blow {
    pub victim: Victim,
    pub moment: Moment,
    pub how: How,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// kill -9.
    Kill,
    /// It stands still for so long, less than anybody's patience.
    Stand(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The launcher that leads, or is about to.
    Launcher,
    Server,
    Loader,
    /// The process of the act.
    Client,
    /// An engine that has mapped before.
    Holder,
    /// Nobody: the socket directory is removed.
    Names,
}

/// When a blow comes: so long after something was seen.
#[derive(Debug)]
pub struct Moment {
    pub seen: Seen,
    pub later: Duration,
}

#[derive(Debug)]
pub enum Seen {
    /// The act has begun, or the blow before.
    Nothing,
    /// The victim lives.
    Victim,
    /// There is a file with such a name in the socket directory.
    File(fn(&str) -> bool),
    /// So many lines more in the log of the launcher and its server.
    Lines(usize),
    /// So many lines with these words, in that log.
    Words(&'static str, usize),
}

impl Era {
    pub fn of(seed: u64) -> Era {
        let mut dice = Dice::of(seed, 0);
        let (source, tps) = match dice.below(8) {
            // In turn, so that few seeds have both.
            _ if seed % 3 == 2 => (Source::Publishers, &[1, 2][..]),
            // Its heads can be split in so many parts.
            0..5 => {
                let draft = (dice.below(3) == 0).then_some("eagle3_llama");
                let checksums = dice.below(2) == 0;
                let model = "llama";
                (
                    Source::Loader {
                        model,
                        draft,
                        checksums,
                    },
                    &[1, 2, 4][..],
                )
            }
            _ => {
                let (model, draft, checksums) = ("qwen3", None, true);
                (
                    Source::Loader {
                        model,
                        draft,
                        checksums,
                    },
                    &[1, 2][..],
                )
            }
        };
        Era {
            seed,
            source,
            tp: dice.pick(tps),
            spared: dice.pick(&[None, None, Some(Victim::Launcher), Some(Victim::Server)]),
        }
    }

    /// How many daemons there are.
    pub fn daemons(&self) -> usize {
        let drafts = matches!(self.source, Source::Loader { draft: Some(_), .. });
        self.tp as usize * if drafts { 2 } else { 1 }
    }

    /// What happens in the step of this number; its number and the seed decide, and nothing that was met.
    pub fn step(&self, number: u64) -> Step {
        let mut dice = Dice::of(self.seed, 1 + number);
        let act = dice.pick(&self.acts());
        let blows = [0, 1, 1, 1, 2, 2];
        let mut step = Step {
            act,
            all: dice.below(2) == 0,
            hasty: dice.below(2) == 0,
            one_more: self.spared != Some(Victim::Launcher) && dice.below(4) == 0,
            flood: (dice.below(4) == 0).then(|| Dice(dice.next())),
            blows: Vec::new(),
            comes: dice.pick(&[
                None,
                Some(Comes::Engine),
                Some(Comes::Engine),
                Some(Comes::Holder),
            ]),
            one_goes: dice.below(4) == 0,
        };
        for _ in 0..dice.pick(&blows) {
            step.blows.push(self.blow(act, &mut dice));
        }
        step
    }

    fn acts(&self) -> Vec<Act> {
        use Act::{Adopt, Attach, Publish, Release, Scrub, Start, Stop};
        let mut acts = match self.source {
            Source::Publishers => vec![Publish, Publish, Publish, Attach, Release],
            Source::Loader { checksums: true, .. } => vec![Attach, Attach, Scrub],
            Source::Loader { .. } => vec![Attach, Attach],
        };
        if self.spared != Some(Victim::Launcher) {
            acts.extend([Adopt, Adopt]);
        }
        if self.spared.is_none() {
            acts.extend([Start, Start, Stop]);
            if self.source != Source::Publishers {
                // What was loaded and released comes with another launcher and server.
                acts.push(Release);
            }
        }
        acts
    }

    fn blow(&self, act: Act, dice: &mut Dice) -> Blow {
        use Victim::{Client, Holder, Launcher, Loader, Names, Server};
        let victims: &[Victim] = match act {
            Act::Start => &[Launcher, Launcher, Server, Loader, Names],
            Act::Attach => &[Launcher, Server, Server, Loader, Client, Holder, Names],
            Act::Publish => &[Launcher, Server, Client, Client, Holder, Names],
            Act::Release | Act::Scrub => &[Launcher, Server, Server, Client, Names],
            // What is not found is not stopped.
            Act::Stop => &[Launcher, Server, Server, Client],
            Act::Adopt => &[Launcher, Launcher, Server, Names],
        };
        let victim = match dice.pick(victims) {
            // Names are put back with another server.
            Names if self.spared == Some(Server) => Client,
            victim => victim,
        };
        let moment = Moment::of(act, self.daemons(), dice);
        let longest = dice.pick(&[10, 100, 1000]);
        let stand = How::Stand(Duration::from_millis(1 + dice.below(longest)));
        let how = dice.pick(&[How::Kill, How::Kill, stand]);
        Blow {
            victim,
            moment,
            how: if self.spared == Some(victim) { stand } else { how },
        }
    }
}

impl Moment {
    fn of(act: Act, daemons: usize, dice: &mut Dice) -> Moment {
        let words: &[&str] = match act {
            Act::Start => &["loaded", "holding generation", "holding generation", "serving on"],
            Act::Attach | Act::Scrub => &["sent", "leases generation", "ended its lease"],
            Act::Publish => &["published: holding", "published by", "serving"],
            Act::Release => &["released generation", "released"],
            Act::Stop => &["stopping", "asked"],
            Act::Adopt => &["adopted", "serving on", "led by"],
        };
        let files: &[fn(&str) -> bool] = &[
            |name| name.ends_with(".lock"),
            |name| name.starts_with("weightd-control") && name.ends_with(".sock"),
            |name| name.starts_with("weightd_") && name.ends_with(".sock"),
        ];
        let seen = match dice.below(6) {
            0 | 1 => Seen::Nothing,
            2 => Seen::Victim,
            3 if act == Act::Start => Seen::File(dice.pick(files)),
            3 | 4 => Seen::Lines(1 + dice.below(12) as usize),
            _ => {
                let words = dice.pick(words);
                // What is said of each daemon, by the launcher and by its server.
                Seen::Words(words, 1 + dice.below(2 * daemons as u64) as usize)
            }
        };
        // All of an act takes some tens of milliseconds; what follows on a step, far less.
        let longest = match seen {
            Seen::Nothing if matches!(act, Act::Start | Act::Publish) => 120_000,
            Seen::Nothing => 15_000,
            _ => 2_000,
        };
        // Most of it happens soon.
        let longest = dice.pick(&[longest, longest / 10, longest / 100]);
        Moment {
            seen,
            later: Duration::from_micros(dice.below(longest)),
        }
    }
}

/// Numbers that follow from a seed: splitmix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Those of one step of a seed.
    fn of(seed: u64, step: u64) -> Dice {
        let mut dice = Dice(seed);
        Dice(dice.next() ^ step.wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}
