//! Whether what lives long holds more and more.

use std::collections::BTreeMap;
use std::fs;

/// What processes held, from time to time.
#[derive(Default)]
pub struct Trends(BTreeMap<u32, Life>);

struct Life {
    who: String,
    held: Vec<Held>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    descriptors: usize,
    kib: u64,
}

/// Steps of a life that say nothing: what an allocator keeps and a runtime starts, it has after these.
const YOUTH: usize = 6;
/// Steps from which on a life shows a trend.
const LONG: usize = YOUTH + 6;
/// How much more a process may hold, in descriptors and in KiB, in the later half than in the earlier one. Less than
/// one step of it leaks, if it leaks.
const DESCRIPTORS: usize = 0;
const KIB: u64 = 2048;

impl Trends {
    /// One step of a process's life. What of its descriptors is somebody's lease is not its own.
    pub fn sample(&mut self, who: &str, pid: u32, leases: usize) {
        let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else {
            return;
        };
        // Pages of files come and go with what else the machine does.
        let own = ["RssAnon:", "RssShmem:"].map(|name| {
            let kib = status.lines().find_map(|line| line.strip_prefix(name));
            kib.and_then(|kib| kib.split_whitespace().next()?.parse().ok())
                .unwrap_or(0)
        });
        // 0 where only root may count them.
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        let life = self.0.entry(pid).or_insert_with(|| Life {
            who: who.to_owned(),
            held: Vec::new(),
        });
        life.held.push(Held {
            descriptors: descriptors.saturating_sub(leases),
            kib: own.iter().sum(),
        });
    }

    /// That nothing that lived long grew, by the least that it held in each half of its life: what was on its way
    /// out at the end of a step does not count, and what never goes does.
    #[track_caller]
    pub fn assert_flat(&self) {
        for (pid, Life { who, held }) in self.0.iter().filter(|(_, life)| life.held.len() >= LONG) {
            let (earlier, later) = held[YOUTH..].split_at((held.len() - YOUTH) / 2);
            let least = |of: &[Held]| {
                let descriptors = of.iter().map(|held| held.descriptors).min().unwrap();
                (descriptors, of.iter().map(|held| held.kib).min().unwrap())
            };
            let (before, after) = (least(earlier), least(later));
            eprintln!(
                "{who} {pid}, {} steps: least {} descriptors and {} KiB, later {} and {}",
                held.len(),
                before.0,
                before.1,
                after.0,
                after.1
            );
            assert!(
                after.0 <= before.0 + DESCRIPTORS && after.1 <= before.1 + KIB,
                "{who} {pid} holds more and more: {held:?}"
            );
        }
    }
}
