//! Names that a cleaner of temporary files, or an operator, removes under a running launcher.

use crate::adoption::assert_loaded_nothing;
use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use crate::store::{Manager, kill_both};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;
use weightd_socket::lock::Lock;

/// Rank and generation of all that is served, without errors: while names are put back, it may be less.
fn served(site: &Site) -> Vec<(Value, Value)> {
    let ran = site.run(&["status", "--json"]);
    let daemons = ran
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let daemons = daemons.filter(has_answered);
    let served = |daemon: Value| (daemon["global_rank"].clone(), daemon["generation"].clone());
    daemons.map(served).collect()
}

/// How often names were put back.
fn put_back(launcher: &Running) -> usize {
    launcher.log().matches("is put back").count()
}

/// Waits until names were put back this often, and serve what they served.
#[track_caller]
fn served_again(site: &Site, launcher: &Running, times: usize, before: &[(Value, Value)]) {
    wait_until("the names are put back", || put_back(launcher) == times);
    wait_until("another server serves", || {
        launcher.log().matches("re-armed").count() == times && served(site) == before
    });
}

/// The launcher's control socket, where there is one.
fn control_socket(site: &Site) -> Option<PathBuf> {
    let entries = fs::read_dir(site.dir()).into_iter().flatten();
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.find(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("weightd-control") && name.ends_with(".sock")
    })
}

#[test]
fn a_directory_that_is_removed_is_made_again_and_the_same_generations_are_served_in_it() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&model, 2, &[]);
    launcher.has_loaded();
    let (before, mapped) = (served(&site), map(&site, &model, 2));
    let mut holder = site.start(site.on_model("attach", &model, 2, &["--all", "--hold", "--json"]));
    for _ in 0..2 {
        let line = holder.line();
        assert!(line.contains("generation"), "{line}");
    }
    fs::remove_dir_all(site.dir()).unwrap();
    served_again(&site, &launcher, 1, &before);
    for _ in 0..2 {
        assert!(holder.line().contains("leased_again"), "as when a server dies");
    }
    let log = launcher.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("WARN")).collect();
    let [warning] = &warnings[..] else {
        panic!("one line: {log}")
    };
    let dir = site.dir().display().to_string();
    assert!(
        warning.contains(&format!("removed or replaced the socket directory {dir}")),
        "{warning}"
    );
    assert!(
        warning.contains(&format!("exclude {dir} from cleaning")),
        "{warning}"
    );
    assert_eq!(
        log.matches("holding generation").count(),
        2,
        "nothing is loaded again"
    );
    assert_eq!(
        fs::metadata(site.dir()).unwrap().permissions().mode() & 0o7777,
        0o700
    );
    assert_intact(&mapped, &model, 2);
    site.attach_verified(&model, 2);

    // The names are as good as the first ones.
    let error = finish(site.on_model("preload", &model, 2, &[])).error(1);
    assert!(
        error.contains(&format!("launcher {} already owns", launcher.pid())),
        "{error}"
    );
    assert_eq!(site.run(&["stop"]).stdout, "stopped 2 daemons\n");
    assert_eq!(launcher.code(), 0);
    holder.signal(Signal::TERM);
    assert_eq!(holder.code(), 143);
    site.assert_clean();
}

#[test]
fn single_sockets_and_lock_files_are_put_back() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 2, &[]);
    launcher.has_loaded();
    let before = served(&site);
    let socket = PathBuf::from(site.status()[1]["socket"].as_str().unwrap());
    let lock = socket.with_extension("sock.lock");
    // It has another name each time.
    let control = || control_socket(&site).unwrap();
    let removals: [&dyn Fn() -> Vec<PathBuf>; 4] = [
        &|| vec![socket.clone()],
        &|| vec![lock.clone()],
        &|| vec![control()],
        &|| {
            vec![
                control().with_extension("sock.lock"),
                socket.clone(),
                lock.clone(),
            ]
        },
    ];
    for (times, removal) in (1..).zip(removals) {
        let removed = removal();
        for path in &removed {
            fs::remove_file(path).unwrap();
        }
        served_again(&site, &launcher, times, &before);
        let log = launcher.log();
        for path in removed {
            assert!(log.contains(path.to_str().unwrap()), "{path:?}: {log}");
        }
        site.attach_verified(&model, 2);
    }
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn what_is_in_the_way_of_names_may_go_again() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&model, 2, &[]);
    let (before, mapped) = (served(&site), map(&site, &model, 2));
    // What lies in a socket's place is replaced: the name is ours.
    let socket = PathBuf::from(site.status()[1]["socket"].as_str().unwrap());
    fs::remove_file(&socket).unwrap();
    fs::write(&socket, "").unwrap();
    // What is in the way may go again, and so is no reason to end.
    let in_the_way = socket.with_extension("tmp");
    fs::create_dir(&in_the_way).unwrap();
    wait_until("that is said", || {
        launcher.log().contains("cannot be put back yet")
    });
    launcher.says(in_the_way.to_str().unwrap());
    // Nor is it one to leave the others without a server.
    signal(launcher.child("server"), Signal::KILL);
    launcher.says("re-armed");
    assert_eq!(served(&site), before[..1]);
    assert_eq!(put_back(&launcher), 0);
    fs::remove_dir(&in_the_way).unwrap();
    wait_until("the name is put back", || put_back(&launcher) == 1);
    site.attach_verified(&model, 2);

    // A directory that is not to be trusted is not used, and as little a reason to end.
    let moved = site.path().join("moved");
    fs::rename(site.dir(), &moved).unwrap();
    symlink(&moved, site.dir()).unwrap();
    launcher.says("symbolic link");
    fs::remove_file(site.dir()).unwrap();
    wait_until("all names are put back", || put_back(&launcher) == 2);
    assert_eq!(served(&site), before);
    site.attach_verified(&model, 2);
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.code(), 143);
    site.assert_clean();
    assert_intact(&mapped, &model, 2);
}

#[test]
fn a_server_is_adopted_whose_socket_was_replaced_and_that_is_ready_when_it_is_put_back() {
    let (site, model) = (Site::new(), model("llama"));
    let (_launcher, _) = orphaned(&site, &model);
    let before = served(&site);
    let socket = PathBuf::from(site.status()[0]["socket"].as_str().unwrap());
    fs::remove_file(&socket).unwrap();
    fs::create_dir(&socket).unwrap();
    let mut next = site.start(site.on_model("preload", &model, 2, &[]));
    next.says("cannot be put back yet");
    next.says("remove it");
    fs::remove_dir(&socket).unwrap();
    next.ready();
    served_again(&site, &next, 1, &before);
    site.attach_verified(&model, 2);
}

#[test]
fn what_was_put_in_a_lock_files_place_is_named_and_may_go_again() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    let (before, mapped) = (served(&site), map(&site, &model, 1));
    let lock = site.socket().with_extension("sock.lock");
    let elsewhere = site.path().join("elsewhere");
    fs::write(&elsewhere, "somebody's").unwrap();
    let in_its_place: [(&str, &dyn Fn()); 3] = [
        ("not a regular file", &|| fs::create_dir(&lock).unwrap()),
        ("a symbolic link", &|| symlink(&elsewhere, &lock).unwrap()),
        ("also known by another name", &|| {
            fs::hard_link(&elsewhere, &lock).unwrap()
        }),
    ];
    for (times, (what, put)) in (1..).zip(in_its_place) {
        fs::remove_file(&lock).unwrap();
        put();
        launcher.says(what);
        fs::remove_file(&lock).or_else(|_| fs::remove_dir(&lock)).unwrap();
        served_again(&site, &launcher, times, &before);
    }
    assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "somebody's");
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.code(), 143);
    site.assert_clean();
    assert_intact(&mapped, &model, 1);
}

#[test]
fn a_name_that_another_took_meanwhile_is_left_to_it() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    let socket = site.socket();
    let other = site.path().join("other");
    fs::create_dir(&other).unwrap();
    let name = socket.file_name().unwrap();
    let _taken = Lock::acquire(&other.join(name)).unwrap();
    fs::rename(site.dir(), site.path().join("gone")).unwrap();
    fs::rename(&other, site.dir()).unwrap();
    assert_eq!(launcher.code(), 1);
    let error = launcher.error();
    assert!(error.contains("already owns"), "{error}");
    assert!(error.contains(socket.to_str().unwrap()), "{error}");
    wait_until("all processes are gone", || site.processes().is_empty());
    assert!(socket.with_extension("sock.lock").exists());
}

#[test]
fn names_that_are_removed_while_weights_are_loaded_are_there_in_time() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 64 << 20);
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    let loader = launcher.child("loader");
    signal(loader, Signal::STOP);
    fs::remove_dir_all(site.dir()).unwrap();
    wait_until("the names are put back", || put_back(&launcher) == 1);
    assert!(served(&site).is_empty(), "nothing is served yet");
    // Once more, and perhaps too late to be noticed before all is loaded.
    fs::remove_dir_all(site.dir()).unwrap();
    signal(loader, Signal::CONT);
    launcher.ready();
    assert_eq!(put_back(&launcher), 2);
    site.attach_verified(&model, 1);
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.code(), 143);
    site.assert_clean();
}

#[test]
fn names_that_are_removed_again_and_again_are_there_when_that_ends() {
    for while_loading in [true, false] {
        let site = Site::new();
        let model = large_checkpoint(&site.path().join("model"), 16 << 20);
        let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
        let loader = launcher.child("loader");
        if while_loading {
            signal(loader, Signal::STOP);
        } else {
            launcher.ready();
        }
        // Every step of the launcher meets names that are gone.
        for removal in 0..8 {
            // At once: a server is started behind the new names.
            while control_socket(&site).is_none() && is_alive(&launcher.pid()) {
                sleep(Duration::from_micros(100));
            }
            sleep(Duration::from_micros(400 * removal));
            let _ = fs::remove_dir_all(site.dir());
        }
        if while_loading {
            signal(loader, Signal::CONT);
            launcher.ready();
        }
        assert!(put_back(&launcher) > 0);
        wait_until("it serves", || !served(&site).is_empty());
        site.attach_verified(&model, 1);
        launcher.signal(Signal::TERM);
        assert_eq!(launcher.code(), 143);
        site.assert_clean();
    }
}

#[test]
fn a_socket_that_cannot_get_its_name_ends_the_start() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 16 << 20);
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    let loader = launcher.child("loader");
    signal(loader, Signal::STOP);
    let temporary = |name: &str| name.starts_with("weightd_") && name.ends_with(".tmp");
    let name = site.left().into_iter().find(|name| temporary(name)).unwrap();
    let in_the_way = site.dir().join(name).with_extension("sock");
    fs::create_dir(&in_the_way).unwrap();
    signal(loader, Signal::CONT);
    assert_eq!(launcher.code(), 1);
    let error = launcher.error();
    assert!(error.contains(in_the_way.to_str().unwrap()), "{error}");
    assert_eq!(put_back(&launcher), 0);
    fs::remove_dir(&in_the_way).unwrap();
    site.assert_clean();
}

/// A launcher of two daemons with their server's lines in its log, that is killed; with that server.
fn orphaned(site: &Site, model: &Path) -> (Running, u32) {
    let mut launcher = site.preload(model, 2, &["--log", "debug"]);
    launcher.has_loaded();
    let server = launcher.child("server");
    launcher.kill();
    (launcher, server)
}

/// The files that are, or are not, of the control socket.
fn remove(site: &Site, is_control: bool, is_it: fn(&str) -> bool) {
    for entry in fs::read_dir(site.dir()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("weightd-control") == is_control && is_it(name) {
            fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn a_server_without_a_launcher_that_nobody_finds_ends() {
    let removals: [fn(&Site); 2] = [
        |site| fs::remove_dir_all(site.dir()).unwrap(),
        // A launcher finds the control socket by the lock files of the daemons.
        |site| remove(site, false, |_| true),
    ];
    for removal in removals {
        let (site, model) = (Site::new(), model("llama"));
        let (launcher, server) = orphaned(&site, &model);
        let mapped = map(&site, &model, 2);
        removal(&site);
        wait_until("nobody holds what nobody finds", || !is_alive(&server));
        launcher.says("so that nobody can find what is held here");
        assert_intact(&mapped, &model, 2);
        site.assert_clean();
    }
}

#[test]
fn a_start_waits_for_a_server_to_end_that_nobody_finds() {
    let (site, model) = (Site::new(), model("llama"));
    let (_launcher, server) = orphaned(&site, &model);
    remove(&site, true, |_| true);
    remove(&site, false, |name| name.ends_with(".sock"));
    let mut next = site.preload(&model, 2, &[]);
    next.says("waiting for the server of a launcher that was killed");
    assert!(!is_alive(&server));
    site.attach_verified(&model, 2);
    next.signal(Signal::TERM);
    assert_eq!(next.code(), 143);
    site.assert_clean();
}

#[test]
fn a_server_without_a_launcher_that_an_engine_or_the_next_launcher_finds_goes_on() {
    // An engine finds it. A launcher does not, and leaves it alone.
    let (site, model) = (Site::new(), model("llama"));
    let (launcher, server) = orphaned(&site, &model);
    remove(&site, true, |_| true);
    remove(&site, false, |name| name.ends_with(".lock"));
    let error = finish(site.on_model("preload", &model, 2, &[])).error(1);
    assert!(
        error.contains("is served although its lock file is gone"),
        "{error}"
    );
    // Also where it does not say so at once: nobody who listens is none.
    signal(server, Signal::STOP);
    let error = finish(site.on_model("preload", &model, 2, &[])).error(1);
    signal(server, Signal::CONT);
    assert!(error.contains("does not say who"), "{error}");
    let looks = || launcher.log().matches("looking whether").count();
    let before = looks();
    wait_until("it has looked", || looks() >= before + 3);
    assert!(is_alive(&server));
    site.attach_verified(&model, 2);
    signal(server, Signal::TERM);
    wait_until("it ends", || !is_alive(&server));

    // A launcher finds it, and an engine does not.
    let site = Site::new();
    let (launcher, server) = orphaned(&site, &model);
    let before = served(&site);
    remove(&site, false, |name| name.ends_with(".sock"));
    let looks = || launcher.log().matches("looking whether").count();
    wait_until("it has looked", || looks() >= 3);
    assert!(is_alive(&server));
    let mut next = site.preload(&model, 2, &[]);
    next.says("adopted 2 daemons");
    served_again(&site, &next, 1, &before);
    next.signal(Signal::TERM);
    assert_eq!(next.code(), 143);
    site.assert_clean();
}

#[test]
fn what_a_service_manager_keeps_follows_the_names() {
    let (site, model) = (Site::new(), model("llama"));
    let manager = Manager::new(&site);
    let mut launcher = manager.preload(&site, &model, 2);
    launcher.has_loaded();
    manager.has_all(2);
    let (before, kept) = (served(&site), manager.names());
    fs::remove_dir_all(site.dir()).unwrap();
    served_again(&site, &launcher, 1, &before);
    let is_other = |name: &String| name.starts_with("description") && !kept.contains(name);
    wait_until("it has another description", || {
        manager.names().iter().any(is_other)
    });
    manager.has_all(2);

    kill_both(&mut launcher);
    let launcher = manager.preload(&site, &model, 2);
    assert_loaded_nothing(&launcher);
    assert_eq!(served(&site), before);
    site.attach_verified(&model, 2);
}
