//! What a machine, a disk or a release does wrong: one clear line each, and what serves goes on.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use weightd_core::wire::Message;
use weightd_core::wire::frame::{HEADER_BYTES, Header, MAJOR, MINOR};
use weightd_core::wire::message::{ErrorCode, GetStatus};

/// Where the major and the minor version are in a header.
const VERSION: [usize; 2] = [4, 5];

#[test]
fn a_part_of_a_checkpoint_that_cannot_be_read_ends_the_start_before_anything_is_loaded() {
    let part = "model-00004-of-00006.safetensors";
    type Make<'a> = &'a dyn Fn(&Path);
    let breaks: [(&str, Make<'_>); 6] = [
        ("a directory", &|path| fs::create_dir(path).unwrap()),
        ("a link to nothing", &|path| symlink("nowhere", path).unwrap()),
        ("a FIFO", &|path| {
            mknodat(CWD, path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        }),
        ("nothing in it", &|path| fs::write(path, "").unwrap()),
        ("the start of it", &|path| {
            let whole = fs::read(model("llama").join(part)).unwrap();
            fs::write(path, &whole[..whole.len() - 1]).unwrap();
        }),
        // A regular file by its type, whose every read fails with EIO.
        ("memory of a process", &|path| {
            symlink("/proc/self/mem", path).unwrap()
        }),
    ];
    for (what, make) in breaks {
        let site = Site::new();
        let copy = copy_of(&model("llama"), &site.path().join("llama"));
        fs::remove_file(copy.join(part)).unwrap();
        make(&copy.join(part));
        let ran = finish(site.on_model("preload", &copy, 2, &[]));
        let error = ran.error(1);
        assert!(error.contains(part), "{what}: {error}");
        assert!(!ran.stderr.contains("loading"), "{what}: {ran:?}");
        assert!(!site.dir().exists(), "{what}");
        site.assert_clean();
    }
}

#[test]
fn a_file_that_ends_while_it_is_loaded_ends_the_start() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 256 << 20);
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    let loader = launcher.child("loader");
    signal(loader, Signal::STOP);
    let file = File::options().write(true).open(model.join("model.safetensors"));
    file.unwrap().set_len(1 << 20).unwrap();
    signal(loader, Signal::CONT);
    assert_eq!(launcher.code(), 1);
    let error = launcher.error();
    assert!(error.contains("model.safetensors"), "{error}");
    assert_eq!(launcher.line(), "", "it was never ready");
    site.assert_clean();
}

#[test]
fn weights_that_do_not_fit_are_refused_with_what_they_need_and_what_there_is() {
    let site = Site::new();
    // A sparse file has as many bytes, and no machine's memory; half as many could be there.
    let bytes = 1u64 << 42;
    let model = large_checkpoint(&site.path().join("model"), bytes);
    let ran = finish(site.on_model("preload", &model, 1, &["--data-parallel-size", "2"]));
    let error = ran.error(1);
    let needed = format!("no room for {} bytes: ", 2 * bytes);
    assert!(error.contains(&needed), "both ranks: {error}");
    assert!(error.contains("bytes of host memory are available"), "{error}");
    assert!(!ran.stderr.contains("loading"), "nothing was read: {ran:?}");
    site.assert_clean();
}

#[test]
fn a_launcher_with_few_descriptors_serves_or_says_so_in_a_line() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let plain = site.on_model("preload", &qwen, 2, &[]);
    let (mut refused, mut served) = (0, 0);
    // With less, not even its libraries are loaded.
    for limit in 6..40 {
        let script = format!(r#"ulimit -n {limit}; exec "$0" "$@""#);
        let mut launcher = site.start(run_by(&["sh", "-c", &script], &plain));
        if launcher.line().starts_with("READY ") {
            served += 1;
            site.attach_verified(&qwen, 2);
            launcher.signal(Signal::INT);
            assert_eq!(launcher.code(), 130, "{limit}");
        } else {
            refused += 1;
            assert_eq!(launcher.code(), 1, "{limit}");
            let error = launcher.error();
            assert!(error.contains("ulimit -n"), "{limit}: {error}");
        }
        site.assert_clean();
    }
    assert!(refused > 0 && served > 0, "{refused} {served}");
}

#[test]
fn the_soft_limit_of_descriptors_limits_neither_daemons_nor_engines() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let limited = |subcommand, more: &[&str]| {
        let plain = site.on_model(subcommand, &qwen, 1, &[&["-dp", "32"], more].concat());
        run_by(&["sh", "-c", r#"ulimit -Sn 48; exec "$0" "$@""#], &plain)
    };
    let mut launcher = site.start(limited("preload", &[]));
    launcher.ready();
    let mut engine = site.start(limited("attach", &["--all", "--hold", "--verify"]));
    for _ in 0..32 {
        let line = engine.line();
        assert!(line.contains(", verified "), "{line:?} {}", engine.log());
    }
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130, "{}", launcher.log());
}

/// A frame of another version.
fn frame(message: impl Into<Message>, request: u32, [major, minor]: [u8; 2]) -> Vec<u8> {
    let mut bytes = message.into().frame(request, 0).unwrap();
    (bytes[VERSION[0]], bytes[VERSION[1]]) = (major, minor);
    bytes
}

/// The next frame, as it came; `None` at the end.
pub fn next_frame(stream: &mut UnixStream) -> Option<(Header, Vec<u8>)> {
    let mut bytes = vec![0; HEADER_BYTES];
    stream.read_exact(&mut bytes).ok()?;
    let header = Header::decode(&bytes).unwrap().unwrap();
    bytes.resize(HEADER_BYTES + header.body, 0);
    stream.read_exact(&mut bytes[HEADER_BYTES..]).unwrap();
    Some((header, bytes))
}

fn message(stream: &mut UnixStream) -> Option<(u32, Message)> {
    let (header, bytes) = next_frame(stream)?;
    let message = Message::decode(header.kind, &bytes[HEADER_BYTES..]).unwrap();
    Some((header.request, message))
}

#[test]
fn an_engine_of_the_next_minor_release_is_served_and_one_of_another_major_is_told() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&qwen, 1, &[]);
    let socket = site.socket();
    let next = [MAJOR, MINOR + 1];

    let mut engine = UnixStream::connect(&socket).unwrap();
    // What that release has added, and what it has in common with ours.
    let mut added = frame(GetStatus {}, 1, next);
    added[6..8].copy_from_slice(&60_000u16.to_le_bytes());
    engine
        .write_all(&[added, frame(GetStatus {}, 2, next)].concat())
        .unwrap();
    let Some((1, Message::Failure(failure))) = message(&mut engine) else {
        panic!("a defined answer to what is unknown")
    };
    assert_eq!(ErrorCode::from_number(failure.code), ErrorCode::UnknownCommand);
    assert!(matches!(
        message(&mut engine),
        Some((2, Message::DaemonStatus(_)))
    ));

    let mut stranger = UnixStream::connect(&socket).unwrap();
    stranger
        .write_all(&frame(GetStatus {}, 3, [MAJOR + 1, 0]))
        .unwrap();
    let Some((_, Message::Failure(failure))) = message(&mut stranger) else {
        panic!("it is told why")
    };
    assert_eq!(ErrorCode::from_number(failure.code), ErrorCode::Version);
    assert!(
        failure.message.contains(&(MAJOR + 1).to_string()),
        "{}",
        failure.message
    );
    assert!(message(&mut stranger).is_none(), "and put out");
    site.attach_verified(&qwen, 1);
}

#[test]
fn a_daemon_of_the_next_minor_release_is_understood() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&qwen, 1, &[]);
    let socket = site.socket();
    // It answers as ours does, and says that it is newer.
    let newer = site.path().join("newer");
    fs::create_dir(&newer).unwrap();
    let listener = UnixListener::bind(newer.join(socket.file_name().unwrap())).unwrap();
    let theirs = socket.clone();
    thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            let mut daemon = UnixStream::connect(&theirs).unwrap();
            while let Some((_, request)) = next_frame(&mut client) {
                daemon.write_all(&request).unwrap();
                let (_, mut answer) = next_frame(&mut daemon).unwrap();
                answer[VERSION[1]] = MINOR + 1;
                client.write_all(&answer).unwrap();
            }
        }
    });
    let status = site.json(&["status", "--json", "--socket-dir", newer.to_str().unwrap()]);
    assert_eq!(status.len(), 1);
    assert_eq!(status[0]["generation"], site.status()[0]["generation"]);
}
