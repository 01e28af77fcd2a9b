//! Time as a plain value.

use std::fmt;
use std::ops::{Add, Sub};

/// A moment on a monotonic clock that the driver reads: microseconds since an arbitrary start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Now(pub u64);

/// A span of time in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(pub u64);

impl Span {
    /// `n` milliseconds.
    pub const fn millis(n: u64) -> Span {
        Span(n.saturating_mul(1_000))
    }

    /// `n` seconds.
    pub const fn secs(n: u64) -> Span {
        Span(n.saturating_mul(1_000_000))
    }
}

/// In seconds, to the millisecond: `5 s`, `0.5 s`. Only nothing at all is `0 s`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.div_ceil(1_000);
        let digits = format!("{}.{:03}", millis / 1_000, millis % 1_000);
        write!(f, "{} s", digits.trim_end_matches('0').trim_end_matches('.'))
    }
}

impl Add<Span> for Now {
    type Output = Now;

    fn add(self, span: Span) -> Now {
        Now(self.0.saturating_add(span.0))
    }
}

impl Sub<Now> for Now {
    type Output = Span;

    /// The span since `earlier`; zero when it is not earlier.
    fn sub(self, earlier: Now) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_said_in_seconds() {
        for (span, text) in [
            (Span(0), "0 s"),
            (Span(1), "0.001 s"),
            (Span::millis(20), "0.02 s"),
            (Span::millis(500), "0.5 s"),
            (Span(999_001), "1 s"),
            (Span::millis(1_250), "1.25 s"),
            (Span::secs(10), "10 s"),
            (Span::secs(300), "300 s"),
        ] {
            assert_eq!(span.to_string(), text);
        }
    }
}
