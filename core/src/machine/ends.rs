//! The two descriptors that make a name: the right to it, and the socket behind it.

use super::reap::Bundle;
use std::sync::Arc;

/// The lock on a socket's path and its listening socket, shared by whoever holds, sends or serves them.
#[derive(Debug, PartialEq, Eq)]
pub struct Ends<F>(Bundle<F>);

impl<F> Ends<F> {
    /// Joins the two.
    pub fn new(lock: F, listener: F) -> Ends<F> {
        Ends(Arc::new(vec![lock, listener]))
    }

    /// The lock: held, never used. It lives as long as its last descriptor.
    pub fn lock(&self) -> &F {
        &self.0[0]
    }

    /// The listening socket.
    pub fn listener(&self) -> &F {
        &self.0[1]
    }

    /// Both, in the order in which frames carry them.
    pub(super) fn bundle(&self) -> Bundle<F> {
        Arc::clone(&self.0)
    }
}

impl<F> Clone for Ends<F> {
    fn clone(&self) -> Ends<F> {
        Ends(self.bundle())
    }
}
