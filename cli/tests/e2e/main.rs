//! The `weightd` binary as its users run it: real processes, real sockets, real checkpoints.
//!
//! Each test has a socket directory of its own, waits for what it needs (never for time), and takes
//! down whatever it started, also when it fails.

// Files are stamped by the clock that may be set, and tests wait for their stamps to be old.
#![allow(clippy::disallowed_methods)]

mod adoption;
mod bad_input;
mod chaos;
mod checkpoints;
mod confined;
mod descriptors;
mod draft;
mod drivers;
mod engine;
mod examples;
mod faults;
mod flags;
mod floods;
mod gpu;
mod gpu_adoption;
mod gpu_publisher;
mod gpu_scrub;
mod harness;
mod health;
mod hostile;
mod http;
mod hub;
mod identity;
mod key;
mod launcher_killed;
mod launchers;
mod layouts;
mod logs;
mod lost;
mod nodes;
mod plan;
mod publisher;
mod release;
mod removed;
mod scrub;
mod serve;
mod server_killed;
mod serving;
mod signals;
mod start_killed;
mod status;
mod store;
mod strangers;
mod unreachable;
mod words;
