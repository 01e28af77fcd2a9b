//! Time as a plain value.

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
