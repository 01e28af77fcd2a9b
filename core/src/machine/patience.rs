//! How long an engine waits for a daemon that does not serve it, and what for.

use super::{AttachError, AttachOptions};
use crate::time::{Now, Span};
use crate::wire::message::ErrorCode;

/// Pause between two tries of an engine that can wait.
const PATIENT_PAUSE: Span = Span::millis(500);
/// Pause between two tries of an engine that would rather do something else.
const HASTY_PAUSE: Span = Span::millis(50);

/// With fallback, a connection that breaks is retried for the time to connect, and nothing else is.
/// Without, absence and daemon errors are retried too, for the time of a state over all.
#[derive(Debug)]
pub(super) struct Patience {
    fallback: bool,
    connect_timeout: Span,
    state_timeout: Span,
    started: Option<Now>,
    /// With fallback: until when a broken connection is retried.
    retry_until: Option<Now>,
    /// The longest that an answer was waited for in vain.
    silence: Span,
}

impl Patience {
    pub fn of(options: &AttachOptions) -> Patience {
        Patience {
            fallback: options.fallback,
            connect_timeout: options.connect_timeout,
            state_timeout: options.state_timeout,
            started: None,
            retry_until: None,
            silence: Span(0),
        }
    }

    /// The time over all runs from the first call on.
    pub fn start(&mut self, now: Now) {
        self.started.get_or_insert(now);
    }

    /// What was done meanwhile was no waiting: all times run from now on.
    pub fn restart(&mut self, now: Now) {
        self.started = Some(now);
        self.retry_until = None;
    }

    fn over_all(&self, now: Now) -> Now {
        self.started.unwrap_or(now) + self.state_timeout
    }

    /// Until when an answer is waited for that is asked for now.
    pub fn answer_by(&self, now: Now) -> Now {
        let patience = now + self.connect_timeout;
        if self.fallback {
            patience
        } else {
            patience.min(self.over_all(now))
        }
    }

    /// When to try again after this error; `None` where that does not help, or no time is left. An error of silence
    /// then says how long the longest was: the last try may have had hardly any time.
    pub fn again(&mut self, now: Now, error: &mut AttachError) -> Option<Now> {
        if let AttachError::Timeout { waited } = error {
            self.silence = self.silence.max(*waited);
            *waited = self.silence;
        }
        if self.fallback {
            let until = *self.retry_until.get_or_insert(now + self.connect_timeout);
            return self.until(now, error, until);
        }
        let (again, next) = (is_passing(error) || may_come(error), now + PATIENT_PAUSE);
        (again && next < self.over_all(now)).then_some(next)
    }

    /// The same for something of which the end is known, and which only a broken connection delays.
    pub fn until(&self, now: Now, error: &AttachError, until: Now) -> Option<Now> {
        let next = now + HASTY_PAUSE;
        (is_passing(error) && next < until).then_some(next)
    }
}

/// Whether the same request may soon be answered otherwise: the connection broke, or the daemon
/// says so.
fn is_passing(error: &AttachError) -> bool {
    match error {
        AttachError::Broken { .. } => true,
        AttachError::Daemon { code, .. } => {
            matches!(
                code,
                ErrorCode::Busy | ErrorCode::DigestPending | ErrorCode::Timeout
            )
        }
        _ => false,
    }
}

/// Whether an engine that can only wait may hope for a daemon with content.
fn may_come(error: &AttachError) -> bool {
    use AttachError::*;
    matches!(
        error,
        Unavailable { .. }
            | Local { .. }
            | Empty { .. }
            | Released { .. }
            | Lost { .. }
            | Timeout { .. }
            | Daemon { .. }
    )
}
