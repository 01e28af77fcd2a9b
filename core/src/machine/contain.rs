//! A panic while one peer's input is handled: a bug of this crate, for which that peer's connection ends and no other.
//!
//! The machines are left in order by three rules. Whatever can panic (reading a message, making one) comes before what it
//! leads to is written down. What a message brought along is kept outside of what handles it, until it is somebody's. And
//! what may be half done belongs to the one connection, which is forgotten as if its peer had gone: a launcher's, after
//! which it arms a server anew, or a client's, of which nothing stays.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a panic said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Panicked(pub String);

/// Handles one peer's input.
pub(super) fn contain<T>(handle: impl FnOnce() -> T) -> Result<T, Panicked> {
    // By the rules above, nothing is seen later that a panic left half done.
    catch_unwind(AssertUnwindSafe(handle)).map_err(|panic| Panicked(message(&*panic)))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it did not say why").to_owned()
}

/// Panics on purpose, where a test asks for it by the id of its request.
#[cfg(any(test, feature = "faults"))]
pub mod faults {
    /// Handling a request with this id panics before anything is done.
    pub const AT_ONCE: u32 = 0x6661_6c00;
    /// Handling one with this id panics when it is answered, which is when all else may be done.
    pub const WHEN_ANSWERED: u32 = 0x6661_6c01;

    /// A point that a request passes.
    pub(crate) fn point(which: u32, request: u32) {
        assert!(which != request, "a test asked for this");
    }
}
