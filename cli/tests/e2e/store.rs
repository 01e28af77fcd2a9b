//! A service manager that keeps descriptors: a socket of the test's own stands in for it.

use crate::adoption::assert_loaded_nothing;
use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use crate::start_killed::never_led;
use command_fds::{CommandFdExt, FdMapping};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, memfd_create};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use weightd_socket::lock::read_owner;
use weightd_socket::message::{ReceiveError, receive};

/// Does what sd_notify(3) says, for one unit.
pub struct Manager {
    address: PathBuf,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    over: AtomicBool,
    /// It reads nothing.
    hangs: AtomicBool,
    kept: Mutex<Vec<(String, OwnedFd)>>,
    /// Every message, in order.
    said: Mutex<Vec<String>>,
}

impl Manager {
    pub fn new(site: &Site) -> Manager {
        let address = site.path().join("notify");
        let socket = UnixDatagram::bind(&address).unwrap();
        let state = Arc::new(State::default());
        let theirs = Arc::clone(&state);
        let thread = Some(thread::spawn(move || theirs.serve(&socket)));
        Manager {
            address,
            state,
            thread,
        }
    }

    /// Starts the unit, with what was kept.
    pub fn start(&self, site: &Site, launcher: &Command) -> Running {
        let kept = self.state.kept.lock().unwrap();
        // The numbers and the process id are what sd_listen_fds(3) tells them to be.
        let mut command = run_by(&["sh", "-c", r#"LISTEN_PID=$$ exec "$0" "$@""#], launcher);
        let names: Vec<&str> = kept.iter().map(|(name, _)| name.as_str()).collect();
        let mappings = (3..).zip(kept.iter()).map(|(child_fd, (_, fd))| FdMapping {
            parent_fd: fd.try_clone().unwrap(),
            child_fd,
        });
        command
            .env("NOTIFY_SOCKET", &self.address)
            .env("FDSTORE", "64")
            .env("LISTEN_FDS", kept.len().to_string())
            .env("LISTEN_FDNAMES", names.join(":"))
            .env("WATCHDOG_USEC", "50000")
            .fd_mappings(mappings.collect())
            .unwrap();
        drop(kept);
        site.start(command)
    }

    #[track_caller]
    pub fn preload(&self, site: &Site, model: &Path, tp: u32) -> Running {
        let mut launcher = self.start(site, &site.on_model("preload", model, tp, &[]));
        launcher.ready();
        launcher
    }

    pub fn names(&self) -> Vec<String> {
        let kept = self.state.kept.lock().unwrap();
        kept.iter().map(|(name, _)| name.clone()).collect()
    }

    fn keeps(&self, part: &str) -> usize {
        self.names().iter().filter(|name| name.contains(part)).count()
    }

    /// Waits until all that `tp` daemons have is kept.
    #[track_caller]
    pub fn has_all(&self, tp: usize) {
        wait_until("all is kept", || {
            self.keeps("content") == 2 * tp
                && self.keeps("daemon") == 2 * tp
                && self.keeps("description") == 1
        });
    }

    /// Who may do what with the files that have such names.
    fn modes(&self, part: &str) -> BTreeSet<u32> {
        let kept = self.state.kept.lock().unwrap();
        let files = kept.iter().filter(|(name, _)| name.contains(part));
        files.map(|(_, fd)| fstat(fd).unwrap().st_mode).collect()
    }

    fn said(&self, what: &str) -> usize {
        let said = self.state.said.lock().unwrap();
        said.iter()
            .filter(|message| message.lines().any(|line| line == what))
            .count()
    }

    fn change(&self, change: impl FnOnce(&mut Vec<(String, OwnedFd)>)) {
        change(&mut self.state.kept.lock().unwrap());
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

impl State {
    fn serve(&self, socket: &UnixDatagram) {
        let patience = Timespec {
            tv_sec: 0,
            tv_nsec: 20_000_000,
        };
        while !self.over.load(Ordering::Relaxed) {
            poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&patience)).unwrap();
            while !self.hangs.load(Ordering::Relaxed) {
                let (mut buffer, mut descriptors) = ([0; 4096], Vec::new());
                match receive(socket, &mut buffer, &mut descriptors) {
                    Ok(received) => {
                        let text = String::from_utf8(buffer[..received.bytes].to_vec()).unwrap();
                        self.take(&text, descriptors.into_iter().map(|(_, fd)| fd).collect());
                    }
                    Err(ReceiveError::WouldBlock) => break,
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    fn take(&self, text: &str, descriptors: Vec<OwnedFd>) {
        let value = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
        };
        let mut kept = self.kept.lock().unwrap();
        if value("FDSTORE") == Some("1") {
            assert_eq!(value("FDPOLL"), Some("0"), "{text:?}");
            let name = value("FDNAME").unwrap();
            assert!(!name.contains(':') && !descriptors.is_empty());
            kept.extend(descriptors.into_iter().map(|fd| (name.to_owned(), fd)));
        } else if value("FDSTOREREMOVE") == Some("1") {
            kept.retain(|(name, _)| Some(name.as_str()) != value("FDNAME"));
        }
        // The descriptor of a barrier is closed here.
        drop(kept);
        self.said.lock().unwrap().push(text.to_owned());
    }
}

pub fn kill_both(launcher: &mut Running) {
    let server = launcher.child("server");
    launcher.kill();
    signal(server, Signal::KILL);
    wait_until("the server is gone", || !is_alive(&server));
}

#[test]
fn a_unit_that_was_killed_serves_at_once_and_engines_waited_meanwhile() {
    let (site, model) = (Site::new(), model("llama"));
    let manager = Manager::new(&site);
    let mut launcher = manager.preload(&site, &model, 2);
    wait_until("it is ready and well", || {
        manager.said("READY=1") == 1 && manager.said("WATCHDOG=1") > 2
    });
    manager.has_all(2);
    let as_content = manager.modes("content");
    assert_eq!(manager.modes("description"), as_content, "nothing is executable");
    let (before, mapped) = (site.generations(), map(&site, &model, 2));
    for _ in 0..2 {
        launcher.has_loaded();
        kill_both(&mut launcher);
        // The manager has the listener, so this one waits in its queue.
        let mut between = site.start(site.on_model("attach", &model, 2, &["--all", "--verify"]));
        launcher = manager.preload(&site, &model, 2);
        assert_loaded_nothing(&launcher);
        assert_eq!(between.code(), 0, "{}", between.log());
        assert_eq!(site.generations(), before);
        assert_intact(&mapped, &model, 2);
        site.attach_verified(&model, 2);
        manager.has_all(2);
    }
    // A server that dies is armed with it too.
    let server = launcher.child("server");
    signal(server, Signal::KILL);
    wait_until("another server serves", || {
        let status = site.status();
        !status.is_empty() && status.iter().all(|daemon| daemon["pid"] != server)
    });
    site.attach_verified(&model, 2);
    assert_eq!(site.generations(), before);
}

#[test]
fn a_unit_that_is_restarted_keeps_its_names_and_one_that_is_asked_to_stop_leaves_nothing() {
    let (site, model) = (Site::new(), model("llama"));
    let manager = Manager::new(&site);
    let mut launcher = manager.preload(&site, &model, 2);
    manager.has_all(2);
    let before = site.generations();
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.code(), 143);
    wait_until("all processes are gone", || site.processes().is_empty());
    launcher.says("ended by SIGTERM: the service manager keeps its weights for the next launcher");
    assert_eq!(manager.said("STOPPING=1"), 1);
    assert_eq!(
        site.left().len(),
        2,
        "the sockets of the daemons, and not that of the server: {:?}",
        site.left()
    );
    let mut between = site.start(site.on_model("attach", &model, 2, &["--all", "--verify"]));
    let mut launcher = manager.preload(&site, &model, 2);
    assert_loaded_nothing(&launcher);
    assert_eq!(between.code(), 0, "{}", between.log());
    assert_eq!(site.generations(), before);
    let ran = site.run(&["stop"]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (Some(0), "stopped 2 daemons\n"),
        "{ran:?}"
    );
    assert_eq!(launcher.code(), 0);
    launcher.says("ended by `weightd stop`: its weights are let go");
    assert_eq!(manager.names(), [""; 0]);
    site.assert_clean();
}

#[test]
fn a_release_is_answered_when_the_manager_has_let_go_and_is_not_undone_by_a_restart() {
    let (site, model) = (Site::new(), model("qwen3"));
    let manager = Manager::new(&site);
    let mut launcher = manager.start(&site, &site.on_model("preload", &model, 1, &["--log", "debug"]));
    launcher.ready();
    manager.has_all(1);
    let generation = site.generations();
    manager.state.hangs.store(true, Ordering::Relaxed);
    let mut release = site.start(site.weightd(&["release", "--rank", "0"]));
    wait_until("the launcher has let go", || {
        launcher.log().contains("rank 0: released")
    });
    assert!(
        release.child.try_wait().unwrap().is_none(),
        "the manager still holds it"
    );
    manager.state.hangs.store(false, Ordering::Relaxed);
    assert_eq!(release.code(), 0, "{}", release.log());
    assert_eq!(manager.keeps("content"), 0, "{:?}", manager.names());
    launcher.has_loaded();
    kill_both(&mut launcher);
    let launcher = manager.preload(&site, &model, 1);
    assert_loaded_nothing(&launcher);
    assert_eq!(site.status()[0]["state"], "released");
    assert_eq!(site.generations(), generation);
    let error = site.attach(&model, 1, &["--all"]).error(1);
    assert!(error.contains("was released"), "{error}");
}

/// What was kept is changed while nobody runs; the next launcher says why it drops it, and loads.
#[track_caller]
fn is_dropped(tp: u32, more: &[&str], change: impl FnOnce(&Site, &mut Vec<(String, OwnedFd)>), why: &str) {
    let (site, model) = (Site::new(), model("llama"));
    let manager = Manager::new(&site);
    let mut launcher = manager.preload(&site, &model, 2);
    manager.has_all(2);
    launcher.has_loaded();
    let before = site.generations();
    kill_both(&mut launcher);
    manager.change(|kept| change(&site, kept));
    let mut launcher = manager.start(&site, &site.on_model("preload", &model, tp, more));
    launcher.ready();
    let log = launcher.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("is dropped")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains(why), "{log}");
    manager.has_all(tp as usize);
    assert_ne!(site.generations(), before);
    if more.is_empty() {
        site.attach_verified(&model, tp);
    }
    // It is as good as any.
    kill_both(&mut launcher);
    let mut launcher = manager.start(&site, &site.on_model("preload", &model, tp, more));
    launcher.ready();
    launcher.says("adopted");
}

fn position(kept: &[(String, OwnedFd)], part: &str) -> usize {
    kept.iter().position(|(name, _)| name.contains(part)).unwrap()
}

fn memory(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let mut file = File::from(memory);
    file.write_all(bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file.into()
}

const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

#[test]
fn another_key_is_dropped() {
    is_dropped(2, &["--revision", "x"], |_, _| {}, "differs in revision");
    is_dropped(1, &[], |_, _| {}, "differs in daemons, tp_size");
}

#[test]
fn a_description_that_is_broken_is_dropped() {
    let broken = |bytes: &'static [u8], seals| {
        move |_: &Site, kept: &mut Vec<(String, OwnedFd)>| {
            let at = position(kept, "description");
            kept[at].1 = memory(bytes, seals);
        }
    };
    is_dropped(2, &[], broken(b"", SEALS), "cut off");
    is_dropped(
        2,
        &[],
        broken(b"nonsense, and quite a lot of it", SEALS),
        "description is broken",
    );
    is_dropped(2, &[], broken(b"wgtd", SealFlags::empty()), "no sealed memfd");
}

#[test]
fn descriptors_that_are_missing_or_others_are_dropped() {
    let without = |part: &'static str| {
        move |_: &Site, kept: &mut Vec<(String, OwnedFd)>| {
            let at = position(kept, part);
            kept.remove(at);
        }
    };
    is_dropped(2, &[], without("description"), "description is missing");
    is_dropped(2, &[], without("daemon1-lock"), "daemon1-lock is missing");
    is_dropped(2, &[], without("-1-1"), "-1-1 is missing");
    let swapped = |one: &'static str, other: &'static str| {
        move |_: &Site, kept: &mut Vec<(String, OwnedFd)>| {
            let (one, other) = (position(kept, one), position(kept, other));
            let name = std::mem::take(&mut kept[one].0);
            kept[one].0 = std::mem::replace(&mut kept[other].0, name);
        }
    };
    is_dropped(2, &[], swapped("daemon0-lock", "daemon1-lock"), "lock file");
    is_dropped(
        2,
        &[],
        swapped("daemon0-listener", "daemon1-listener"),
        "is not that of",
    );
    is_dropped(
        2,
        &[],
        swapped("daemon0-listener", "-1-0"),
        "instead of a lock and a listener",
    );
    let shorter = |_: &Site, kept: &mut Vec<(String, OwnedFd)>| {
        let at = position(kept, "-2-1");
        kept[at].1 = memory(b"too short", SEALS);
    };
    is_dropped(2, &[], shorter, "region 0's descriptor");
}

#[test]
fn names_that_are_gone_or_lead_nowhere_are_dropped() {
    let remove = |ends: &'static str| {
        move |site: &Site, _: &mut Vec<(String, OwnedFd)>| {
            let entries = fs::read_dir(site.dir())
                .unwrap()
                .map(|entry| entry.unwrap().path());
            for path in entries.filter(|path| path.to_str().unwrap().ends_with(ends)) {
                fs::remove_file(path).unwrap();
            }
        }
    };
    is_dropped(2, &[], remove("0.sock"), "no daemon serves");
    is_dropped(2, &[], remove("1.sock.lock"), "lock file");
}

#[test]
fn a_server_that_lives_is_adopted_and_what_is_kept_beside_it_is_not_served_twice() {
    let (site, model) = (Site::new(), model("llama"));
    let manager = Manager::new(&site);
    let mut launcher = manager.preload(&site, &model, 2);
    manager.has_all(2);
    launcher.has_loaded();
    let before = site.generations();
    let server = launcher.child("server");
    launcher.kill();
    let mut launcher = manager.preload(&site, &model, 2);
    assert_loaded_nothing(&launcher);
    assert!(launcher.children("server").is_empty());
    assert!(site.status().iter().all(|daemon| daemon["pid"] == server));
    assert_eq!(site.generations(), before);
    manager.has_all(2);
    // From then on as ever.
    launcher.kill();
    signal(server, Signal::KILL);
    wait_until("the server is gone", || !is_alive(&server));
    let launcher = manager.preload(&site, &model, 2);
    assert_loaded_nothing(&launcher);
    assert_eq!(site.generations(), before);
    site.attach_verified(&model, 2);
}

#[test]
fn a_server_that_was_never_led_does_not_cost_what_the_manager_keeps() {
    let (site, model) = (Site::new(), model("qwen3"));
    let manager = Manager::new(&site);
    let mut launcher = manager.preload(&site, &model, 1);
    manager.has_all(1);
    launcher.has_loaded();
    let before = site.generations();
    let socket = site.socket();
    let control = site.dir().join(read_owner(&socket).unwrap().control);
    kill_both(&mut launcher);
    let mut never_led = never_led(&control);
    let launcher = manager.preload(&site, &model, 1);
    assert_loaded_nothing(&launcher);
    assert_eq!(site.generations(), before);
    never_led.wait().unwrap();
    site.attach_verified(&model, 1);
}
