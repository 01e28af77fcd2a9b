//! Several launchers in one directory.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;

#[test]
fn a_second_launcher_for_the_same_devices_is_refused_by_name() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 2, &[]);
    let error = finish(site.on_model("preload", &model, 1, &[])).error(1);
    assert!(
        error.contains(&format!("launcher {} already owns ", launcher.pid())),
        "{error}"
    );
    assert!(error.contains("weightd stop --socket-dir"), "{error}");
    site.attach_verified(&model, 2);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn of_eight_launchers_that_race_one_serves() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut racers: Vec<Running> = (0..8)
        .map(|_| site.start(site.on_model("preload", &model, 2, &[])))
        .collect();
    let mut lost = 0;
    wait_until("seven have lost", || {
        lost = racers
            .iter_mut()
            .filter_map(|racer| racer.child.try_wait().unwrap())
            .count();
        lost >= 7
    });
    assert_eq!(lost, 7);
    for mut racer in racers {
        match racer.child.try_wait().unwrap() {
            Some(status) => {
                assert_eq!(status.code(), Some(1));
                assert!(racer.error().contains("already owns"), "{}", racer.log());
                assert_eq!(racer.line(), "");
            }
            None => {
                racer.ready();
                site.attach_verified(&model, 2);
                racer.signal(Signal::TERM);
                assert_eq!(racer.code(), 143);
            }
        }
    }
    site.assert_clean();
}

#[test]
fn a_daemon_whose_lock_file_was_removed_keeps_its_name() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    for entry in std::fs::read_dir(site.dir()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "lock") {
            std::fs::remove_file(path).unwrap();
        }
    }
    let error = finish(site.on_model("preload", &model, 1, &[])).error(1);
    // The second, where its launcher was faster and has put it back.
    let says = [
        ("its lock file is gone", format!("kill {} ", launcher.pid())),
        ("already owns", format!("launcher {} ", launcher.pid())),
    ];
    assert!(
        says.iter()
            .any(|(what, whose)| error.contains(what) && error.contains(whose)),
        "{error}"
    );
    site.attach_verified(&model, 1);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
}

#[test]
fn another_instance_serves_another_model_on_the_same_devices() {
    let site = Site::new();
    let (llama, qwen) = (model("llama"), model("qwen3"));
    let mut first = site.preload(&llama, 2, &[]);
    let mut second = site.preload(&qwen, 2, &["--instance", "blue"]);
    site.attach_verified(&llama, 2);
    let ran = site.attach(&qwen, 2, &["--all", "--verify", "--instance", "blue"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(site.status().len(), 4);
    assert_eq!(site.json(&["status", "--json", "--instance", "blue"]).len(), 2);

    assert_eq!(site.run(&["stop", "--instance", "blue"]).code, Some(0));
    assert_eq!(second.code(), 0);
    site.attach_verified(&llama, 2);
    first.signal(Signal::INT);
    assert_eq!(first.code(), 130);
    site.assert_clean();
}

#[test]
fn ranks_that_share_a_device_have_a_slot_each() {
    let (site, model) = (Site::new(), model("llama"));
    let shared = ["--ranks-per-device", "2"];
    let _launcher = site.preload(&model, 4, &shared);
    let status = site.status();
    let sockets: Vec<&str> = status
        .iter()
        .map(|daemon| daemon["socket"].as_str().unwrap())
        .collect();
    assert_eq!(
        sockets
            .iter()
            .filter(|socket| socket.ends_with("_s0.sock"))
            .count(),
        2,
        "{sockets:?}"
    );
    assert_eq!(
        sockets
            .iter()
            .filter(|socket| socket.ends_with("_s1.sock"))
            .count(),
        2,
        "{sockets:?}"
    );
    let ran = site.attach(&model, 4, &["--all", "--verify", "--ranks-per-device", "2"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn every_process_calls_a_rank_by_its_number_in_the_world() {
    let (site, model) = (Site::new(), model("qwen3"));
    let second = [
        "--data-parallel-size=2",
        "--data-parallel-size-local=1",
        "--data-parallel-start-rank=1",
    ];
    let launcher = site.preload(&model, 1, &second);
    let ran = site.attach(&model, 1, &[&second[..], &["--all"]].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    // The server writes it when the engine is served, and another process reads it.
    wait_until("both lines are there", || {
        let log = launcher.log();
        log.contains("rank 1: serving on ") && log.contains("rank 1: sent ")
    });
    let log = launcher.log();
    assert!(!log.contains("rank 0") && !log.contains("daemon 0"), "{log}");
}

#[test]
fn of_two_launchers_that_start_at_the_same_moment_one_serves_each_of_a_hundred_times() {
    let (site, model) = (Site::new(), model("qwen3"));
    let start = || site.start(site.on_model("preload", &model, 1, &[]));
    for round in 0..100 {
        let mut both = [start(), start()];
        let lines = both.each_mut().map(Running::line);
        let wins = lines.each_ref().map(|line| line.starts_with("READY "));
        assert_eq!(wins.iter().filter(|wins| **wins).count(), 1, "{round}: {lines:?}");
        let [mut first, mut second] = both;
        let (winner, loser) = if wins[0] {
            (&mut first, &mut second)
        } else {
            (&mut second, &mut first)
        };
        assert_eq!(loser.code(), 1, "{round}");
        assert!(loser.error().contains("already owns"), "{round}: {}", loser.log());
        winner.signal(Signal::INT);
        assert_eq!(winner.code(), 130, "{round}: {}", winner.log());
        site.assert_clean();
    }
}

#[test]
fn lists_of_processes_call_each_child_by_what_it_is() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 256 << 20);
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    let loader = launcher.child("loader");
    wait_until("the loader has its name", || name_of(loader) == "weightd-loader");
    launcher.ready();
    assert_eq!(name_of(launcher.child("server")), "weightd-server");
    assert_eq!(name_of(launcher.pid()), "weightd");
}
