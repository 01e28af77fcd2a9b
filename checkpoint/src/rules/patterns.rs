//! Which of many patterns covers a tensor, asked for many tensors.

use super::name;
use std::collections::HashMap;

/// Patterns, of which the first that covers a tensor counts.
///
/// Most names of a checkpoint differ from others in their numbers alone, those of layers and experts.
/// Such names are a family: every pattern is tried on it once, and on its names only those that can
/// cover one of them.
pub(super) struct Patterns<'p> {
    /// Each with `*` for its numbers too.
    patterns: Vec<(&'p str, String)>,
    covers: fn(&str, &str) -> bool,
    /// The patterns that can cover its names, by a family's generic name.
    families: HashMap<String, Vec<usize>>,
}

impl<'p> Patterns<'p> {
    /// Patterns in the order in which they count, and whether one covers a tensor. Where it does, it
    /// does so too with `*` for the numbers of both.
    pub fn new(patterns: impl IntoIterator<Item = &'p str>, covers: fn(&str, &str) -> bool) -> Patterns<'p> {
        Patterns {
            patterns: patterns
                .into_iter()
                .map(|pattern| (pattern, name::generic(pattern)))
                .collect(),
            covers,
            families: HashMap::new(),
        }
    }

    /// The number of the pattern that counts for a tensor.
    pub fn first(&mut self, tensor: &str) -> Option<usize> {
        let Patterns {
            patterns,
            covers,
            families,
        } = self;
        let family = name::generic(tensor);
        let able = match families.get(&family) {
            Some(able) => able,
            None => {
                let is_able = |number: &usize| covers(&patterns[*number].1, &family);
                let able = (0..patterns.len()).filter(is_able).collect();
                families.entry(family).or_insert(able)
            }
        };
        able.iter()
            .copied()
            .find(|&number| covers(patterns[number].0, tensor))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_first_pattern_that_covers_counts_whatever_was_asked_before(
            patterns in prop::collection::vec("[ab*01.]{0,6}(\\*\\*)?", 0..6),
            tensors in prop::collection::vec("[ab*01.]{0,7}", 0..12),
        ) {
            let mut asked = Patterns::new(patterns.iter().map(String::as_str), name::covers);
            for tensor in &tensors {
                let expected = patterns.iter().position(|pattern| name::covers(pattern, tensor));
                prop_assert_eq!(asked.first(tensor), expected, "{:?} of {:?}", tensor, &patterns);
            }
        }
    }
}
