//! The `weightd` binary as its users run it: real processes, real sockets, real checkpoints.
//!
//! Each test has a socket directory of its own, waits for what it needs (never for time), and takes
//! down whatever it started, also when it fails.

mod adoption;
mod bad_input;
mod checkpoints;
mod draft;
mod engine;
mod faults;
mod flags;
mod gpu;
mod gpu_adoption;
mod harness;
mod health;
mod hostile;
mod http;
mod key;
mod kills;
mod launcher_killed;
mod launchers;
mod layouts;
mod logs;
mod lost;
mod nodes;
mod plan;
mod release;
mod removed;
mod server_killed;
mod serving;
mod signals;
mod start_killed;
mod status;
mod store;
mod strangers;
