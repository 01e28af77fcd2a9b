//! The `weightd` binary as its users run it: real processes, real sockets, real checkpoints.
//!
//! Each test has a socket directory of its own, waits for what it needs (never for time), and takes
//! down whatever it started, also when it fails.

mod bad_input;
mod checkpoints;
mod draft;
mod engine;
mod gpu;
mod harness;
mod hostile;
mod key;
mod launcher_killed;
mod launchers;
mod layouts;
mod lost;
mod plan;
mod release;
mod server_killed;
mod serving;
mod signals;
mod start_killed;
mod strangers;
