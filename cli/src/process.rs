//! Other processes, by their ids.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

/// A descriptor that means the process which has this id now, and no later one, and becomes readable when that ends.
/// (Kernels before 5.3 have none.)
pub fn open(pid: u32) -> Result<OwnedFd, Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pidfd_open(pid.ok_or(Errno::SRCH)?, PidfdFlags::empty())
}

/// Whether no process has this id here, or one that has ended and that nobody has waited for. One of another pid namespace
/// is not here.
pub fn has_ended(pid: u32) -> bool {
    match open(pid) {
        Ok(process) => {
            let mut ended = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut ended, Some(&Timespec::default())) == Ok(1)
        }
        Err(error) => error == Errno::SRCH,
    }
}

/// Whether this is a server that was started behind this control socket, whose number no other has; by its arguments,
/// so that it need not answer.
pub fn is_server(pid: u32, control: &Path) -> bool {
    let names_it = |words: &[OsString]| {
        words[0] == "--control" && Path::new(&words[1]).file_name() == control.file_name()
    };
    arguments(pid).windows(2).any(names_it)
}

/// The server that was started behind this control socket, where it is ours to end and in our pid namespace.
pub fn server_behind(control: &Path) -> Option<u32> {
    let pids = fs::read_dir("/proc").into_iter().flatten();
    let mut pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.find(|pid| is_server(*pid, control) && is_ours(*pid))
}

/// Whether this is a launcher; what had its id may have ended long ago.
pub fn is_launcher(pid: u32) -> bool {
    let words = arguments(pid);
    let program = words
        .first()
        .and_then(|word| Path::new(word).file_name())
        .and_then(OsStr::to_str);
    let is_weightd = program.is_some_and(|name| name.starts_with("weightd"));
    is_weightd && words.iter().any(|word| word == "preload" || word == "serve")
}

/// What a process was started with; nothing of one that has ended.
fn arguments(pid: u32) -> Vec<OsString> {
    let text = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    text.split(|byte| *byte == 0)
        .map(|word| OsString::from_vec(word.to_vec()))
        .collect()
}

fn is_ours(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| test_kill_process(pid).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_has_ended_also_before_somebody_waits_for_it() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(!has_ended(child.id()));
        child.kill().unwrap();
        let process = open(child.id()).unwrap();
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
        assert!(has_ended(child.id()));
        child.wait().unwrap();
        assert!(has_ended(child.id()) && has_ended(0));
        assert!(!has_ended(std::process::id()));
    }

    #[test]
    fn a_server_is_known_by_the_name_of_its_control_socket_wherever_its_directory_is_mounted() {
        let control = Path::new("/a/weightd-control_00000000075bcd15.sock");
        let shell = |script: &str, words: &[&str]| {
            let mut command = Command::new("sh");
            let child = command
                .args(["-c", script, "sh"])
                .args(words)
                .stdin(std::process::Stdio::piped());
            child.spawn().unwrap()
        };
        let elsewhere = "/b/weightd-control_00000000075bcd15.sock";
        let mut looks = shell("read line", &[elsewhere]);
        assert_eq!(server_behind(control), None);
        let mut server = shell("read line", &["--control", elsewhere]);
        while !is_server(server.id(), control) {
            std::thread::yield_now();
        }
        assert_eq!(server_behind(control), Some(server.id()));
        assert!(!is_server(
            server.id(),
            Path::new("/b/weightd-control_00000000075bcd16.sock")
        ));
        for child in [&mut looks, &mut server] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(server_behind(control), None);
        assert!(!is_launcher(std::process::id()));
    }
}
