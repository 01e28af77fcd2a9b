//! How fast what others cause may become lines: a client in a loop must not fill the disk.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Lines of one kind that may come at once.
const AT_ONCE: u32 = 200;
/// How often one may come after those: at this pace a kind of 200 bytes a line is some 9 MB a day.
const ONE_EVERY: Duration = Duration::from_secs(2);

/// What was let through and left out, for each kind of line.
#[derive(Debug)]
pub struct Pace<K> {
    kinds: BTreeMap<K, Kind>,
}

#[derive(Debug)]
struct Kind {
    /// Lines that may still come at once, as of a moment.
    left: u32,
    at: Instant,
    left_out: u64,
}

impl<K: Ord> Pace<K> {
    pub fn new() -> Pace<K> {
        Pace {
            kinds: BTreeMap::new(),
        }
    }

    /// Whether a line of this kind may come now: with how many were left out before it.
    pub fn admit(&mut self, now: Instant, kind: K) -> Option<u64> {
        let kind = self.kinds.entry(kind).or_insert(Kind {
            left: AT_ONCE,
            at: now,
            left_out: 0,
        });
        let earned = now.saturating_duration_since(kind.at).as_secs() / ONE_EVERY.as_secs();
        let earned = u32::try_from(earned).unwrap_or(AT_ONCE).min(AT_ONCE);
        if earned > 0 {
            kind.left = (kind.left + earned).min(AT_ONCE);
            kind.at = now;
        }
        if kind.left == 0 {
            kind.left_out += 1;
            return None;
        }
        kind.left -= 1;
        Some(std::mem::take(&mut kind.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_come_at_once_and_then_few_and_those_left_out_are_counted() {
        let (mut pace, start) = (Pace::new(), Instant::now());
        let admitted = (0..1000).filter(|_| pace.admit(start, 'a').is_some()).count();
        assert_eq!(admitted, AT_ONCE as usize);
        assert_eq!(pace.admit(start, 'b'), Some(0), "another kind has its own");
        assert_eq!(pace.admit(start + ONE_EVERY, 'a'), Some(800));
        assert_eq!(pace.admit(start + ONE_EVERY, 'a'), None);
        let later = start + 1_000_000 * ONE_EVERY;
        let admitted = (0..1000).filter(|_| pace.admit(later, 'a').is_some()).count();
        assert_eq!(admitted, AT_ONCE as usize);
    }

    #[test]
    fn at_every_pace_no_more_come_than_may() {
        let (mut pace, start) = (Pace::new(), Instant::now());
        // 10 a second for an hour.
        let admitted = (0..36_000u32)
            .filter(|tenth| {
                pace.admit(start + *tenth * Duration::from_millis(100), ())
                    .is_some()
            })
            .count();
        assert!((1900..=2000).contains(&admitted), "{admitted}");
    }
}
