//! A node in virtual time, for tests and for what is fuzzed: its processes, the sockets between them, and a ledger of all
//! descriptors.

#![allow(missing_docs, missing_debug_implementations)]

pub mod host;
pub mod ledger;
pub mod socket;
pub mod world;
