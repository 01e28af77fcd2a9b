//! The monotonic clock, as the core's integers.

use std::time::{Duration, Instant};
use weightd_core::time::Now;

/// Reads the machine's monotonic clock. The moments of two clocks do not compare.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Clock {
        Clock(Instant::now())
    }

    /// The present moment.
    pub fn now(&self) -> Now {
        Now(u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// How long to wait for a moment; `None` is for ever. Rounded up, so that a wait that ends has
    /// reached it.
    pub fn until(&self, moment: Option<Now>) -> Option<Duration> {
        moment.map(|moment| match (moment - self.now()).0 {
            0 => Duration::ZERO,
            micros => Duration::from_millis(micros.div_ceil(1000)),
        })
    }
}
