//! A load as its runtime sees it, for tests. Not for use.

pub use crate::loading::{Fetch, Loading, Stop};
pub use crate::task::{Task, Turn, run};
