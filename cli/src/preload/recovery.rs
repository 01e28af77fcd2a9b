//! What follows when an engine cannot import, and when content is lost: what is tried, and loaded
//! afresh, and when.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use weightd_core::content::Generation;
use weightd_core::wire::message::DaemonId;

/// How often a daemon's content is tried, however many engines fail.
const TRY_EVERY: Duration = Duration::from_secs(10);
/// A load that fails is tried again after twice the pause before, up to a limit.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Content that an engine could not import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suspect {
    pub daemon: DaemonId,
    pub generation: Generation,
    /// What the engine said.
    pub why: String,
}

/// What a probe found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The import works: the engine failed for reasons of its own.
    Works,
    /// The device does not have this memory any more.
    Lost(String),
    /// Nothing; so nothing changes.
    Unclear(String),
}

/// What is to be tried and what is to be loaded.
#[derive(Debug, Default)]
pub struct Recovery {
    /// With the moment from which on each may be tried.
    suspects: BTreeMap<DaemonId, (Instant, Suspect)>,
    /// When each was tried last.
    tried: BTreeMap<DaemonId, Instant>,
    lost: BTreeSet<DaemonId>,
    load_at: Option<Instant>,
    /// Loads that failed, one after another.
    failures: u32,
    digest_at: Option<Instant>,
    /// Loaders that did not hand a digest over, one after another.
    without_digest: u32,
}

impl Recovery {
    /// An engine could not import this.
    pub fn suspect(&mut self, now: Instant, suspect: Suspect) {
        let last = self.tried.get(&suspect.daemon);
        let due = last.map_or(now, |last| now.max(*last + TRY_EVERY));
        self.suspects.insert(suspect.daemon, (due, suspect));
    }

    /// What to try now.
    pub fn next_suspect(&mut self, now: Instant) -> Option<Suspect> {
        let due = self.suspects.iter().find(|(_, (due, _))| *due <= now);
        let daemon = *due?.0;
        let (_, suspect) = self.suspects.remove(&daemon)?;
        self.tried.insert(daemon, now);
        Some(suspect)
    }

    /// A daemon's content is lost.
    pub fn lost(&mut self, now: Instant, daemon: DaemonId) {
        self.suspects.remove(&daemon);
        self.lost.insert(daemon);
        self.load_at.get_or_insert(now);
    }

    /// A daemon has content; true when it had lost the one before.
    pub fn stored(&mut self, daemon: DaemonId) -> bool {
        self.lost.remove(&daemon)
    }

    /// Whether there are daemons to load now.
    pub fn is_load_due(&self, now: Instant) -> bool {
        self.load_at.is_some_and(|at| at <= now)
    }

    /// The daemons to load now, while nothing else is loading.
    pub fn next_load(&mut self, now: Instant) -> Vec<DaemonId> {
        if self.load_at.take_if(|at| *at <= now).is_none() {
            return Vec::new();
        }
        self.lost.iter().copied().collect()
    }

    /// The loading of these is over. Where one of them still has nothing, the next load comes after
    /// the pause that is returned.
    pub fn load_ended(&mut self, now: Instant, daemons: &[DaemonId]) -> Option<Duration> {
        if !daemons.iter().any(|daemon| self.lost.contains(daemon)) {
            self.failures = 0;
            return None;
        }
        let pause = pause_after(&mut self.failures);
        self.load_at = Some(now + pause);
        Some(pause)
    }

    /// A loader is over and a digest is missing: the next one comes after the pause that is returned.
    pub fn digest_missing(&mut self, now: Instant) -> Duration {
        let pause = pause_after(&mut self.without_digest);
        self.digest_at = Some(now + pause);
        pause
    }

    /// Nothing is missing.
    pub fn digests_known(&mut self) {
        (self.digest_at, self.without_digest) = (None, 0);
    }

    /// Whether to make up for a digest now, while nothing is loading.
    pub fn next_digest(&mut self, now: Instant) -> bool {
        self.digest_at.take_if(|at| *at <= now).is_some()
    }

    /// When something is next to be tried, or to be loaded.
    pub fn wake_at(&self, can_try: bool, can_load: bool) -> Option<Instant> {
        let due = self.suspects.values().map(|(due, _)| *due).min();
        let due = due.filter(|_| can_try);
        let load = self.load_at.into_iter().chain(self.digest_at).min();
        let load = load.filter(|_| can_load);
        due.into_iter().chain(load).min()
    }
}

/// The pause after one more failure.
fn pause_after(failures: &mut u32) -> Duration {
    let pause = LONGEST_PAUSE.min(FIRST_PAUSE * 2u32.pow((*failures).min(10)));
    *failures += 1;
    pause
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(1_000_000);

    fn suspect(daemon: DaemonId, number: u64) -> Suspect {
        Suspect {
            daemon,
            generation: Generation { epoch: 1, number },
            why: "x".to_owned(),
        }
    }

    #[test]
    fn content_is_tried_at_once_and_then_not_again_for_a_while() {
        let (mut recovery, start) = (Recovery::default(), Instant::now());
        recovery.suspect(start, suspect(0, 1));
        recovery.suspect(start, suspect(1, 2));
        assert_eq!(recovery.wake_at(true, true), Some(start));
        assert_eq!(recovery.wake_at(false, true), None);
        assert_eq!(recovery.next_suspect(start), Some(suspect(0, 1)));
        assert_eq!(recovery.next_suspect(start), Some(suspect(1, 2)));
        assert_eq!(recovery.next_suspect(start), None);

        // A later report is not forgotten: it may be the first of a real loss.
        let soon = start + Duration::from_secs(3);
        recovery.suspect(soon, suspect(0, 1));
        recovery.suspect(soon, suspect(0, 5));
        assert_eq!(recovery.next_suspect(soon), None);
        let due = start + TRY_EVERY;
        assert_eq!(recovery.wake_at(true, true), Some(due));
        assert_eq!(recovery.next_suspect(due), Some(suspect(0, 5)));
        assert_eq!(recovery.next_suspect(start + LONG), None);
    }

    #[test]
    fn what_is_lost_is_loaded_together_and_tried_no_more() {
        let (mut recovery, start) = (Recovery::default(), Instant::now());
        recovery.suspect(start, suspect(2, 1));
        recovery.lost(start, 2);
        recovery.lost(start, 0);
        assert_eq!(recovery.next_suspect(start + LONG), None);
        assert_eq!(recovery.wake_at(true, false), None);
        assert_eq!(recovery.next_load(start), [0, 2]);
        assert_eq!(recovery.next_load(start + LONG), [0; 0], "once");
        assert!(recovery.stored(0) && recovery.stored(2));
        assert!(!recovery.stored(2) && !recovery.stored(1));
        assert_eq!(recovery.load_ended(start, &[0, 2]), None);
        assert_eq!(recovery.wake_at(true, true), None);
    }

    #[test]
    fn a_load_that_fails_is_tried_again_after_longer_and_longer_pauses() {
        let (mut recovery, mut now) = (Recovery::default(), Instant::now());
        recovery.lost(now, 3);
        let mut pauses = Vec::new();
        for _ in 0..20 {
            assert_eq!(recovery.next_load(now), [3]);
            let pause = recovery.load_ended(now, &[3]).unwrap();
            assert_eq!(recovery.next_load(now), [0; 0]);
            pauses.push(pause.as_secs());
            now += pause;
        }
        assert_eq!(pauses[..8], [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pauses.last(), Some(&60));

        assert_eq!(recovery.next_load(now), [3]);
        recovery.stored(3);
        assert_eq!(recovery.load_ended(now, &[3]), None);
        recovery.lost(now, 3);
        assert_eq!(recovery.next_load(now), [3]);
        assert_eq!(recovery.load_ended(now, &[3]), Some(FIRST_PAUSE));
    }

    #[test]
    fn a_digest_that_stays_away_is_made_up_for_after_longer_and_longer_pauses() {
        let (mut recovery, mut now) = (Recovery::default(), Instant::now());
        assert!(!recovery.next_digest(now + LONG));
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            let pause = recovery.digest_missing(now);
            assert_eq!(pause.as_secs(), seconds);
            assert_eq!(recovery.wake_at(true, true), Some(now + pause));
            assert_eq!(recovery.wake_at(true, false), None);
            assert!(!recovery.next_digest(now));
            now += pause;
            assert!(recovery.next_digest(now));
            assert!(!recovery.next_digest(now), "once");
        }
        recovery.digest_missing(now);
        recovery.digests_known();
        assert_eq!(recovery.wake_at(true, true), None);
        assert_eq!(recovery.digest_missing(now), FIRST_PAUSE);
    }

    #[test]
    fn what_is_lost_while_others_load_is_loaded_after_them() {
        let (mut recovery, start) = (Recovery::default(), Instant::now());
        recovery.lost(start, 0);
        assert_eq!(recovery.next_load(start), [0]);
        recovery.lost(start, 1);
        recovery.stored(0);
        assert_eq!(recovery.load_ended(start, &[0]), None);
        assert_eq!(recovery.next_load(start), [1]);
    }
}
