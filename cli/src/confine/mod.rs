//! What a process gives up that it does not need, so that whoever gets hold of it finds little.
//!
//! A server gives up all that it can: it has its listeners, its lock and its threads' work, and needs nothing else
//! of the system for the rest of its life. A launcher and its other children start programs and load drivers (libcuda
//! itself starts the setuid `nvidia-modprobe` where a device file is missing, which a bar to new privileges would
//! break), so they give up core dumps only.

mod calls;
mod files;

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::set_no_new_privs;
use std::path::Path;
use weightd_core::wire::message::Confinement;

/// What a process obtained, and why not more.
#[derive(Debug)]
pub struct Confined {
    pub confinement: Confinement,
    /// One line for each thing that is missing.
    pub failures: Vec<String>,
}

/// Keeps this process's memory out of core dumps, and from other processes of its user.
///
/// The limit alone is not enough: a kernel that pipes dumps to a program (`core_pattern`) ignores it. What cannot be
/// dumped cannot be traced either, nor can its descriptors be taken through `/proc` or `pidfd_getfd`, but by root.
pub fn no_core_dumps() -> Result<(), String> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none).map_err(|error| format!("cannot limit core dumps: {error}"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|error| format!("cannot forbid core dumps: {error}"))
}

/// Confines this thread, and those that it starts from now on, to what a server needs whose sockets are in `dir`. So
/// it comes before the first thread. What the kernel does not have is left out.
pub fn confine(dir: &Path) -> Confined {
    let mut failures = Vec::new();
    let mut noted = |result: Result<(), String>| result.map_err(|why| failures.push(why)).is_ok();
    let no_core_dumps = noted(no_core_dumps());
    let no_new_privileges =
        set_no_new_privs(true).map_err(|error| format!("cannot bar new privileges: {error}"));
    let no_new_privileges = noted(no_new_privileges);
    let mut landlock = None;
    noted(files::restrict(dir).map(|version| landlock = Some(version)));
    // The last, since it refuses what the others take.
    let seccomp = noted(calls::restrict());
    Confined {
        confinement: Confinement {
            no_new_privileges,
            no_core_dumps,
            landlock,
            seccomp,
        },
        failures,
    }
}

#[cfg(test)]
mod tests;
