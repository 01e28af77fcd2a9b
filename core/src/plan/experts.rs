//! Expert parallel: which experts of a layer each rank holds.
//!
//! Its ranks are those of all tensor and data parallel ranks together: of a TP size `tp_size`, rank
//! `dp_rank * tp_size + tp_rank`. Experts are then whole, not sliced.

use std::ops::Range;
use std::str::FromStr;
use thiserror::Error;

/// How experts are spread over ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ExpertPlacement {
    /// Contiguous runs, as equal as can be; the first ranks have the remainder, one each.
    #[default]
    Linear,
    /// Expert `e` on rank `e % ep_size`.
    RoundRobin,
}

/// A name that no placement has.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("there is no expert placement strategy {given:?}: use linear or round_robin")]
pub struct UnknownPlacement {
    /// The name.
    pub given: String,
}

impl ExpertPlacement {
    /// Its name, as vLLM's `expert_placement_strategy` spells it.
    pub fn name(self) -> &'static str {
        match self {
            ExpertPlacement::Linear => "linear",
            ExpertPlacement::RoundRobin => "round_robin",
        }
    }
}

impl FromStr for ExpertPlacement {
    type Err = UnknownPlacement;

    fn from_str(given: &str) -> Result<ExpertPlacement, UnknownPlacement> {
        match given {
            "linear" => Ok(ExpertPlacement::Linear),
            "round_robin" => Ok(ExpertPlacement::RoundRobin),
            _ => Err(UnknownPlacement { given: given.into() }),
        }
    }
}

/// Why experts cannot be spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ExpertError {
    /// There is no rank to hold an expert.
    #[error("expert parallel size is 0: it must be at least 1")]
    NoRanks,
    /// There is no such rank.
    #[error("expert parallel rank {ep_rank} is outside the {ep_size} ranks: ranks count from 0")]
    NoSuchRank {
        /// The rank that was asked for.
        ep_rank: u32,
        /// Number of ranks.
        ep_size: u32,
    },
}

/// The experts of one rank. Its local slots hold them in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalExperts {
    first: u64,
    /// From each to the next.
    step: u64,
    count: u64,
}

/// Which of `experts` experts rank `ep_rank` of `ep_size` holds; none where there are fewer experts
/// than ranks and this one goes without.
///
/// # Errors
///
/// No ranks, or not this one.
pub fn local_experts(
    experts: u64,
    ep_size: u32,
    ep_rank: u32,
    placement: ExpertPlacement,
) -> Result<LocalExperts, ExpertError> {
    if ep_size == 0 {
        return Err(ExpertError::NoRanks);
    }
    if ep_rank >= ep_size {
        return Err(ExpertError::NoSuchRank { ep_rank, ep_size });
    }
    let (size, rank) = (u64::from(ep_size), u64::from(ep_rank));
    let (base, remainder) = (experts / size, experts % size);
    // Either way the first ranks have one more.
    let count = base + u64::from(rank < remainder);
    let (first, step) = match placement {
        ExpertPlacement::Linear => (rank * base + rank.min(remainder), 1),
        ExpertPlacement::RoundRobin => (rank, size),
    };
    Ok(LocalExperts { first, step, count })
}

impl LocalExperts {
    /// How many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The local slot of an expert, counted from 0; `None` where another rank holds it.
    pub fn slot_of(&self, expert: u64) -> Option<u64> {
        let steps = expert.checked_sub(self.first)?;
        let slot = steps / self.step;
        (steps.is_multiple_of(self.step) && slot < self.count).then_some(slot)
    }

    /// The experts in the order of their slots, as the longest contiguous runs.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let LocalExperts { first, step, count } = *self;
        let (runs, len) = match step {
            1 => (count.min(1), count),
            _ => (count, 1),
        };
        (0..runs).map(move |run| {
            let start = first + run * step;
            start..start + len
        })
    }
}
