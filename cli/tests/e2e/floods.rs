//! Clients that send as much as they can of one thing: good ones are served beside them, and nothing of it is left
//! in the server, neither memory nor descriptors nor, without end, lines in the log.

use crate::checkpoints::*;
use crate::harness::*;
use crate::http::{address, health};
use crate::publisher::{Publication, of_model};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use weightd_core::wire::Message;
use weightd_core::wire::frame::Header;
use weightd_core::wire::message::{ErrorCode, GetActivity, GetMemory, Report, Watch};

pub fn frame(message: impl Into<Message>) -> Vec<u8> {
    message.into().frame(1, 0).unwrap()
}

/// The start of a request with a body of 64 KiB and this many descriptors.
pub fn long_request(descriptors: usize) -> [u8; 20] {
    let header = Header {
        kind: 999,
        request: 1,
        body: 64 * 1024,
        descriptors,
    };
    header.encode()
}

/// Sends what the socket takes.
pub fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // The server may have ended the connection by now.
    let _ = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags);
}

/// What a process holds: descriptors, and resident memory in KiB.
pub fn holds(pid: u32) -> (usize, u64) {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    let memory = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    (descriptors, memory)
}

/// Floods a process again and again: afterwards it holds as many descriptors as `idle`, and no more memory than
/// after the first rounds.
#[track_caller]
fn leaves_nothing(what: &str, process: u32, idle: usize, mut flood: impl FnMut()) {
    let mut rounds = |count| {
        for _ in 0..count {
            flood();
        }
        wait_until(what, || holds(process).0 <= idle);
        holds(process).1
    };
    // What an allocator keeps for later it has after these.
    let before = rounds(2);
    let after = rounds(3);
    assert!(
        after <= before + 8 * 1024,
        "{what}: {before} KiB, then {after} KiB"
    );
    assert!(after <= 64 * 1024, "{what}: {after} KiB");
}

const MANY: usize = 150;

#[test]
fn floods_of_every_kind_leave_nothing_behind() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&qwen, 1, &[]);
    let server = launcher.child("server");
    let path = site.socket();
    let connect = || UnixStream::connect(&path).unwrap();
    let all = || (0..MANY).map(|_| connect()).collect::<Vec<_>>();
    let good = || site.attach_verified(&qwen, 1);
    let descriptor = fs::File::open("/dev/null").unwrap();
    good();
    // The connections of those before may be on their way out.
    wait_until("only what it needs is open", || holds(server).0 <= 24);
    let idle = holds(server).0;

    leaves_nothing("connections", server, idle, || {
        let streams = all();
        good();
        drop(streams);
    });
    leaves_nothing("half frames", server, idle, || {
        let streams = all();
        for stream in &streams {
            send(stream, &long_request(0), &[]);
            send(stream, &[0; 60_000], &[]);
        }
        good();
        drop(streams);
    });
    leaves_nothing("descriptors", server, idle, || {
        let streams = all();
        for stream in &streams {
            send(stream, &long_request(16), &[descriptor.as_fd(); 16]);
        }
        good();
        for stream in &streams {
            send(stream, &[0], &[descriptor.as_fd(); 253]);
        }
        good();
        drop(streams);
    });
    leaves_nothing("their own sockets", server, idle, || {
        let streams = all();
        for stream in &streams {
            send(stream, &long_request(16), &[stream.as_fd(); 16]);
        }
        good();
        drop(streams);
    });
    leaves_nothing("answers that nobody reads", server, idle, || {
        let streams = all();
        let requests = frame(GetActivity {}).repeat(200);
        for stream in &streams {
            send(stream, &requests, &[]);
            send(stream, &requests, &[]);
        }
        good();
        drop(streams);
    });
    leaves_nothing("leases", server, idle, || {
        let mut streams = all();
        for stream in &mut streams {
            // A long request of no known kind, and then silence.
            stream.write_all(&long_request(0)).unwrap();
            stream.write_all(&[0; 64 * 1024]).unwrap();
            stream.write_all(&frame(Watch { generation: None })).unwrap();
            let mut answers = [0; 64];
            assert!(stream.read(&mut answers).unwrap() > 0);
        }
        good();
        drop(streams);
    });
    leaves_nothing("reports", server, idle, || {
        let generation = site.status()[0]["generation"].as_str().unwrap().parse().unwrap();
        let report = Report {
            daemon: 0,
            generation,
            import_failed: "\u{1b}[2J\nforged ".repeat(5000),
        };
        let (report, streams) = (frame(report), all());
        for stream in &streams {
            send(stream, &report, &[]);
        }
        good();
        drop(streams);
    });
    assert_eq!(launcher.child("server"), server);
}

#[test]
fn no_flood_fills_the_log() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&qwen, 1, &[]);
    let path = site.socket();
    let before = launcher.log().len();
    let garbage = "GET / HTTP/1.1\r\n\u{1b}[2Jforged\n".repeat(10);
    for _ in 0..3000 {
        let mut stream = UnixStream::connect(&path).unwrap();
        let _ = stream.write_all(garbage.as_bytes());
        // Until it was put out.
        match stream.read_to_end(&mut Vec::new()) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }
    // Other lines have a pace of their own.
    site.attach_verified(&qwen, 1);
    launcher.says("sent ");
    let log = launcher.log();
    let ended = log.matches("ended the connection").count();
    // Of 3000; how many come after the first 200 is a matter of time.
    assert!((200..1000).contains(&ended), "{ended}");
    let written = log.len() - before;
    assert!(written < 300_000, "{written} bytes for 3000 connections");
    assert!(!log.contains("\u{1b}[2J") && !log.lines().any(|line| line.starts_with("forged")));
    // The next that may come says how many did not.
    wait_until("a line comes again", || {
        let mut stream = UnixStream::connect(&path).unwrap();
        let _ = stream.write_all(b"x");
        let _ = stream.read_to_end(&mut Vec::new());
        launcher.log().contains("lines like the next were left out")
    });
}

#[test]
fn good_clients_are_served_where_descriptors_of_others_fill_the_table() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let plain = site.on_model("preload", &qwen, 1, &[]);
    let limited = run_by(&["sh", "-c", r#"ulimit -n 256; exec "$0" "$@""#], &plain);
    let mut launcher = site.start(limited);
    launcher.ready();
    let (server, path) = (launcher.child("server"), site.socket());
    let descriptor = fs::File::open("/dev/null").unwrap();
    let hoarders: Vec<UnixStream> = (0..100)
        .map(|_| {
            let stream = UnixStream::connect(&path).unwrap();
            send(&stream, &long_request(16), &[descriptor.as_fd(); 16]);
            stream
        })
        .collect();
    for _ in 0..5 {
        site.attach_verified(&qwen, 1);
    }
    assert_eq!(launcher.child("server"), server);
    drop(hoarders);
    site.attach_verified(&qwen, 1);
}

#[test]
fn floods_of_http_leave_nothing_behind() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&qwen, 1, &["--health-port", "0"]);
    let address = address(&launcher);
    let chunks = "10000\r\n".to_owned() + &"a".repeat(0x10000);
    let start = "GET /metrics HTTP/1.1\r\nHost: x\r\n";
    let requests = [
        format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20)),
        format!("{start}{}\r\n", "a: b\r\n".repeat(10_000)),
        format!("{start}a: {}\r\n\r\n", "b".repeat(1 << 20)),
        format!("{start}Content-Length: 18446744073709551615\r\n\r\n{chunks}"),
        format!("{start}Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef"),
        format!("POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}"),
        format!("{start}\r\n").repeat(1000),
        "\0\u{1b}[2J\n\nforged".repeat(1000),
    ];
    // Before anybody asked it has yet to start threads and to open what it asks with.
    for _ in 0..5 {
        assert_eq!(health(&address).0, 200);
    }
    wait_until("its questions are over", || holds(launcher.pid()).0 <= 40);
    let idle = holds(launcher.pid()).0;
    leaves_nothing("requests", launcher.pid(), idle, || {
        for request in &requests {
            for _ in 0..10 {
                let mut stream = TcpStream::connect(&address).unwrap();
                // It may have heard enough before the end.
                let _ = stream.write_all(request.as_bytes());
                let mut answer = Vec::new();
                let _ = stream.take(1 << 20).read_to_end(&mut answer);
                let answers = String::from_utf8_lossy(&answer).matches("HTTP/1.1 ").count();
                assert!(answers <= 1, "{answers} answers on one connection");
            }
        }
        assert_eq!(health(&address).0, 200);
    });
    assert!(!launcher.log().contains("forged"), "{}", launcher.log());
}

/// Sealed memory of this size, all zeros, which takes no room.
fn sealed(bytes: u64) -> OwnedFd {
    let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, bytes).unwrap();
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&memory, seals).unwrap();
    memory
}

#[test]
fn publications_as_large_as_they_may_be_leave_nothing_behind() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let mut launcher = site.start(site.weightd(&["serve"]));
    assert!(launcher.line().starts_with("SERVING "));
    let server = launcher.child("server");
    let huge = |site: &Site, model: &Path, bytes: u64| {
        let mut publication = of_model(site, model, 1).remove(0);
        publication.descriptors[0] = sealed(bytes);
        publication.publish.content.manifest_bytes = bytes;
        publication
    };
    let (code, why) = huge(&site, &qwen, (256 << 20) + 1).publish().unwrap_err();
    assert_eq!(code, ErrorCode::BadDescriptors, "{why}");
    let expecting = |publication: Publication| match site.status()[0]["generation"].as_str() {
        Some(generation) => publication.instead_of(generation),
        None => publication,
    };
    expecting(huge(&site, &qwen, 256 << 20)).publish().unwrap();
    for process in [server, launcher.pid()] {
        let idle = holds(process).0 + 1;
        leaves_nothing("publications", process, idle, || {
            expecting(huge(&site, &qwen, 256 << 20)).publish().unwrap();
        });
    }
    // What is no manifest is an error for whoever maps it, and in the way of nobody.
    let error = site.attach(&qwen, 1, &["--all"]).error(1);
    assert!(error.contains("manifest's header"), "{error}");
    expecting(of_model(&site, &qwen, 1).remove(0)).publish().unwrap();
    site.attach_verified(&qwen, 1);
    assert_eq!(launcher.child("server"), server);
    let mut stream = UnixStream::connect(site.socket()).unwrap();
    stream.write_all(&frame(GetMemory {})).unwrap();
    assert!(stream.read(&mut [0; 64]).unwrap() > 0);
}
