//! What was read which way.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// How the bytes of a load came into memory. Displayed as `page cache`, `direct`, or
/// `page cache 3.2 GB, direct 12.8 GB` where both are a hundredth of the load or more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathTaken {
    /// Bytes read through the page cache.
    pub buffered: u64,
    /// Bytes read from disk past the page cache (`O_DIRECT`).
    pub direct: u64,
    /// Bytes read past the page cache beside those, because disks are read in whole blocks.
    pub slack: u64,
    /// Whether bytes that were not cached went through the page cache because the file system refused
    /// to read them past it.
    pub refused: bool,
}

impl fmt::Display for PathTaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let hundredth = self.buffered.saturating_add(self.direct) / 100;
        let counts = |bytes: u64| bytes > 0 && bytes >= hundredth;
        match (self.buffered, self.direct) {
            (_, direct) if !counts(direct) => write!(f, "page cache")?,
            (buffered, _) if !counts(buffered) => write!(f, "direct")?,
            (buffered, direct) => write!(
                f,
                "page cache {:.1} GB, direct {:.1} GB",
                gb(buffered),
                gb(direct)
            )?,
        }
        match self.refused {
            true => write!(f, " (the file system refuses O_DIRECT)"),
            false => Ok(()),
        }
    }
}

/// The same, while workers add to it.
#[derive(Debug, Default)]
pub(super) struct Counters {
    buffered: AtomicU64,
    direct: AtomicU64,
    slack: AtomicU64,
    refused: AtomicBool,
}

impl Counters {
    pub fn add(&self, path: PathTaken) {
        self.buffered.fetch_add(path.buffered, Relaxed);
        self.direct.fetch_add(path.direct, Relaxed);
        self.slack.fetch_add(path.slack, Relaxed);
        self.refused.fetch_or(path.refused, Relaxed);
    }

    pub fn sum(&self) -> PathTaken {
        PathTaken {
            buffered: self.buffered.load(Relaxed),
            direct: self.direct.load(Relaxed),
            slack: self.slack.load(Relaxed),
            refused: self.refused.load(Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_named_by_what_counts_in_it() {
        let said = |buffered: u64, direct: u64, refused: bool| {
            let slack = 0;
            PathTaken {
                buffered,
                direct,
                slack,
                refused,
            }
            .to_string()
        };
        assert_eq!(said(0, 0, false), "page cache");
        assert_eq!(said(5, 0, true), "page cache (the file system refuses O_DIRECT)");
        assert_eq!(said(0, 5, false), "direct");
        assert_eq!(said(4096, 16_000_000_000, false), "direct");
        assert_eq!(
            said(3_200_000_000, 12_800_000_000, false),
            "page cache 3.2 GB, direct 12.8 GB"
        );
        assert_eq!(said(u64::MAX, u64::MAX / 200, false), "page cache");
    }
}
