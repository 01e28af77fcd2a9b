//! The launcher's side, with other children than `weightd probe`.

use super::*;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use weightd_blocking::Clock;
use weightd_core::content::Generation;
use weightd_core::machine::{Held, Origin};
use weightd_core::peer::Peer;
use weightd_core::testing::world::{content, info, publication};
use weightd_core::wire::message::{ErrorCode, Expects, Failure, Report, Reported};

const GENERATION: Generation = Generation { epoch: 5, number: 1 };

/// A vault whose one daemon holds [`GENERATION`].
fn holding() -> Driver<Vault<OwnedFd>> {
    let temp = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(temp.path().join("socket")).unwrap();
    let info = info(0, false);
    let lock = listener.as_fd().try_clone_to_owned().unwrap();
    let listener = listener.into();
    let vault = Vault::new(1, GENERATION.epoch, [Held { info, lock, listener }]);
    let (clock, mut driver) = (Clock::start(), Driver::new(vault).unwrap());
    let (loader, theirs) = pair().unwrap();
    driver
        .add(clock.now(), theirs, Origin::Loader, Peer { pid: 1, uid: 1 })
        .unwrap();
    let publish = publication(0, Expects::Empty, content(3, &[4]));
    let descriptors = [b"man".as_slice(), b"data"].map(|bytes| weightd_gpu::sealed(bytes).unwrap());
    say(&loader, &publish.into(), &descriptors).unwrap();
    while driver.machine().content(0).is_none() {
        driver.turn(clock.now()).unwrap();
    }
    driver
}

fn suspect(number: u64) -> Suspect {
    Suspect {
        daemon: 0,
        generation: Generation { number, ..GENERATION },
        why: "the engine's reason".to_owned(),
    }
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

/// Writes these bytes to the channel.
fn answers(message: impl Into<Message>) -> Command {
    let bytes = message.into().frame(1, 0).unwrap();
    let octal: String = bytes.iter().map(|byte| format!("\\{byte:03o}")).collect();
    shell(&format!("printf '{octal}' >&0; exec sleep 1000"))
}

/// Starts it, and turns until it is over.
fn outcome(command: Command) -> Verdict {
    let (mut driver, mut prober) = (holding(), Prober::default());
    let now = Instant::now();
    assert!(prober.start(&mut driver, now, suspect(1), command).unwrap());
    assert!(!prober.is_idle());
    loop {
        if let Some((about, verdict)) = prober.turn(&mut driver, now) {
            assert_eq!(about, suspect(1));
            assert!(prober.is_idle());
            return verdict;
        }
        // Woken by the channel: an answer, or its end.
        driver.wait(None).unwrap();
    }
}

#[test]
fn what_a_probe_says_is_what_counts() {
    let why = || "gone".to_owned();
    assert_eq!(outcome(answers(Reported {})), Verdict::Works);
    let report = Report {
        daemon: 0,
        generation: GENERATION,
        import_failed: why(),
    };
    assert_eq!(outcome(answers(report)), Verdict::Lost(why()));
    let failure = Failure {
        code: ErrorCode::Busy.number(),
        retryable: true,
        message: why(),
    };
    assert_eq!(outcome(answers(failure)), Verdict::Unclear(why()));
}

#[test]
fn a_probe_that_ends_or_talks_nonsense_has_found_out_nothing() {
    for script in ["exit 0", "kill -9 $$", "printf 'HTTP/1.1 200 OK\\r\\n\\r\\n' >&0"] {
        let verdict = outcome(shell(script));
        assert!(
            matches!(&verdict, Verdict::Unclear(why) if !why.is_empty()),
            "{script}: {verdict:?}"
        );
    }
}

#[test]
fn a_probe_that_hangs_is_ended_at_its_deadline_and_nobody_waits_for_it() {
    let (mut driver, mut prober) = (holding(), Prober::default());
    let now = Instant::now();
    let hangs = shell("trap '' TERM; exec sleep 1000");
    assert!(prober.start(&mut driver, now, suspect(1), hangs).unwrap());
    assert_eq!(prober.wake_at(), Some(now + ANSWERS_WITHIN));
    let before = now + ANSWERS_WITHIN - Duration::from_millis(1);
    assert_eq!(prober.turn(&mut driver, before), None);
    let (about, verdict) = prober.turn(&mut driver, now + ANSWERS_WITHIN).unwrap();
    assert_eq!(about, suspect(1));
    assert_eq!(verdict, Verdict::Unclear("no answer within 60 s".to_owned()));
    assert!(prober.is_idle());
    assert_eq!(prober.wake_at(), None);
}

#[test]
fn what_the_vault_does_not_hold_any_more_is_not_tried() {
    let (mut driver, mut prober) = (holding(), Prober::default());
    let now = Instant::now();
    let mut start = |driver: &mut _, number| prober.start(driver, now, suspect(number), shell("exit 0"));
    assert!(!start(&mut driver, 2).unwrap());
    driver.machine_mut().lost(0, GENERATION);
    assert!(!start(&mut driver, 1).unwrap());
    assert!(prober.is_idle());
}

#[test]
fn a_launcher_that_ends_takes_its_probe_along() {
    let (mut driver, mut prober) = (holding(), Prober::default());
    let hangs = shell("exec sleep 1000");
    assert!(
        prober
            .start(&mut driver, Instant::now(), suspect(1), hangs)
            .unwrap()
    );
    let pid = prober.running.as_ref().unwrap().child.id();
    drop(prober);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
