//! What a seed decides.

use std::time::Duration;

/// What happens in a round.
#[derive(Debug)]
pub struct Plan {
    pub act: Act,
    pub model: &'static str,
    pub tp: u32,
    /// The model of a draft, beside the target.
    pub draft: Option<&'static str>,
    /// Release every rank, or rank 0 alone.
    pub all: bool,
    /// `attach --hold` holds all ranks as well.
    pub holder: bool,
    /// The next launcher comes before the server can have noticed that its own is gone.
    pub hasty: bool,
    /// A launcher that is left after the act is killed too.
    pub one_more: bool,
    pub kills: Vec<Kill>,
}

/// What is done when the kills come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// A launcher starts in an empty directory.
    Start,
    /// An engine attaches, while all is loaded but perhaps not yet digested.
    Attach,
    Release,
    Stop,
    /// A launcher goes on with the server of one that was killed.
    Adopt,
}

#[derive(Debug)]
pub struct Kill {
    pub victim: Victim,
    pub moment: Moment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The launcher that leads, or is about to.
    Launcher,
    Server,
    Loader,
    /// The process of the act.
    Client,
}

/// When a kill comes: so long after something was seen.
#[derive(Debug)]
pub struct Moment {
    pub seen: Seen,
    pub later: Duration,
}

#[derive(Debug)]
pub enum Seen {
    /// The act has begun, or the kill before.
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

impl Plan {
    pub fn of(seed: u64) -> Plan {
        let mut dice = Dice(seed);
        let act = dice.pick(&[Act::Start, Act::Attach, Act::Release, Act::Stop, Act::Adopt]);
        // Its heads can be split in so many parts.
        let (model, tps) = dice.pick(&[("llama", &[1, 2, 4][..]), ("qwen3", &[1, 2])]);
        let draft = (model == "llama" && dice.below(3) == 0).then_some("eagle3_llama");
        let mut plan = Plan {
            act,
            model,
            tp: dice.pick(tps),
            draft,
            all: dice.below(2) == 0,
            holder: dice.below(3) == 0,
            hasty: dice.below(2) == 0,
            one_more: dice.below(2) == 0,
            kills: Vec::new(),
        };
        for _ in 0..1 + usize::from(dice.below(3) == 0) {
            plan.kills.push(Kill::of(act, plan.daemons(), &mut dice));
        }
        plan
    }

    /// How many daemons there are.
    pub fn daemons(&self) -> usize {
        self.tp as usize * if self.draft.is_some() { 2 } else { 1 }
    }
}

impl Kill {
    fn of(act: Act, daemons: usize, dice: &mut Dice) -> Kill {
        use Victim::{Client, Launcher, Loader, Server};
        let victims: &[Victim] = match act {
            Act::Start => &[Launcher, Launcher, Server, Loader],
            Act::Attach => &[Launcher, Server, Server, Loader, Client],
            Act::Release | Act::Stop => &[Launcher, Server, Server, Client],
            Act::Adopt => &[Launcher, Launcher, Server],
        };
        Kill {
            victim: dice.pick(victims),
            moment: Moment::of(act, daemons, dice),
        }
    }
}

impl Moment {
    fn of(act: Act, daemons: usize, dice: &mut Dice) -> Moment {
        let words: &[&str] = match act {
            Act::Start => &["loaded", "holding generation", "holding generation", "serving on"],
            Act::Attach => &["sent", "leases generation", "ended its lease"],
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
            Seen::Nothing if act == Act::Start => 120_000,
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
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}
