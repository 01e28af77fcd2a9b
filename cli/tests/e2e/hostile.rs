//! Clients that break every rule, against good ones beside them.

use crate::checkpoints::*;
use crate::engine::*;
use crate::floods::{frame, holds, send};
use crate::harness::*;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use weightd_core::wire::Message;
use weightd_core::wire::frame::{HEADER_BYTES, Header};
use weightd_core::wire::message::{ErrorCode, GetMemory, GetState, GetStatus, Watch};

/// A request for the content that the daemon will grant.
fn get_state() -> Vec<u8> {
    let key = key(&model("qwen3"), 1);
    frame(GetState {
        key,
        is_reload: false,
    })
}

/// Reads until the daemon closes, and returns the failures that it sent before.
fn failures(mut stream: UnixStream) -> Vec<ErrorCode> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        // What it had not read when it closed.
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
    let (mut rest, mut codes) = (&bytes[..], Vec::new());
    while !rest.is_empty() {
        let header = Header::decode(rest).unwrap().unwrap();
        let body = &rest[HEADER_BYTES..HEADER_BYTES + header.body];
        if let Ok(Message::Failure(failure)) = Message::decode(header.kind, body) {
            assert_eq!(failure.message.lines().count(), 1, "{}", failure.message);
            codes.push(ErrorCode::from_number(failure.code));
        }
        rest = &rest[HEADER_BYTES + header.body..];
    }
    codes
}

#[test]
fn who_breaks_the_protocol_is_told_why_and_put_out_alone() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&qwen, 1, &[]);
    let server = launcher.child("server");
    let socket = site.socket();
    let connect = || UnixStream::connect(&socket).unwrap();
    let status = frame(GetStatus {});
    let announced = |body: u32, descriptors: u16| {
        let mut header = status[..HEADER_BYTES].to_vec();
        header[12..16].copy_from_slice(&body.to_le_bytes());
        header[16..18].copy_from_slice(&descriptors.to_le_bytes());
        header
    };
    let mut other_major = status.clone();
    other_major[4] = 99;

    let cases: [(&str, Vec<u8>, usize, ErrorCode); 7] = [
        ("garbage", vec![0x5a; 4096], 0, ErrorCode::Malformed),
        (
            "another protocol",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            0,
            ErrorCode::Malformed,
        ),
        ("a huge length", announced(u32::MAX, 0), 0, ErrorCode::Malformed),
        ("another version", other_major, 0, ErrorCode::Version),
        (
            "too few descriptors",
            announced(0, 2),
            1,
            ErrorCode::BadDescriptors,
        ),
        (
            "too many descriptors",
            status.clone(),
            3,
            ErrorCode::BadDescriptors,
        ),
        (
            "more than a frame may own",
            status.clone(),
            200,
            ErrorCode::BadDescriptors,
        ),
    ];
    for (what, bytes, descriptors, code) in cases {
        let stream = connect();
        send(&stream, &bytes, &vec![stream.as_fd(); descriptors]);
        assert_eq!(failures(stream), [code], "{what}");
        site.attach_verified(&qwen, 1);
    }

    // A body that is none, and a kind that is none, cost only the request.
    let stream = connect();
    let mut garbled = frame(GetMemory {});
    garbled[6..8].copy_from_slice(&1u16.to_le_bytes());
    let mut unknown = frame(GetMemory {});
    unknown[6..8].copy_from_slice(&999u16.to_le_bytes());
    send(&stream, &[garbled, unknown, status].concat(), &[]);
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(
        failures(stream),
        [ErrorCode::Malformed, ErrorCode::UnknownCommand]
    );
    assert!(is_alive(&server));
    assert!(launcher.children("server").contains(&server));
}

#[test]
fn good_clients_are_served_beside_a_hundred_that_stall_at_every_byte_of_a_request() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&qwen, 1, &[]);
    let server = launcher.child("server");
    let (socket, request) = (site.socket(), get_state());
    let mut stalled = Vec::new();
    for number in 0..100 {
        let mut stream = UnixStream::connect(&socket).unwrap();
        // From nothing at all to all but the last byte.
        let bytes = number * (request.len() - 1) / 99;
        stream.write_all(&request[..bytes]).unwrap();
        stalled.push(stream);
    }
    for _ in 0..5 {
        site.attach_verified(&qwen, 1);
    }
    // And some that ask for ever and never read.
    for _ in 0..20 {
        let stream = UnixStream::connect(&socket).unwrap();
        stream.set_nonblocking(true).unwrap();
        while (&stream)
            .write(&request)
            .is_ok_and(|written| written == request.len())
        {}
        stalled.push(stream);
    }
    for _ in 0..5 {
        site.attach_verified(&qwen, 1);
    }
    assert_eq!(launcher.child("server"), server);
    drop(stalled);
    site.attach_verified(&qwen, 1);
}

/// A launcher whose processes may have so many descriptors.
fn preload_with_descriptors(site: &Site, model: &std::path::Path, most: u32) -> Running {
    let limit = format!(r#"ulimit -n {most}; exec "$0" "$@""#);
    let plain = site.on_model("preload", model, 1, &[]);
    let mut launcher = site.start(run_by(&["sh", "-c", &limit], &plain));
    launcher.ready();
    launcher
}

#[test]
fn good_clients_are_served_beside_as_many_leases_as_there_are_descriptors() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    for most in [64, 100, 256, 1024] {
        let mut launcher = preload_with_descriptors(&site, &qwen, most);
        launcher.says(&format!(
            "leases: raise the limit of open files, which is {most} (ulimit -n)"
        ));
        let socket = site.socket();
        let watch = frame(Watch { generation: None });
        let leases: Vec<UnixStream> = (0..most)
            .map(|_| {
                let mut stream = UnixStream::connect(&socket).unwrap();
                // Who is put out before it has asked is put out.
                let _ = stream.write_all(&watch);
                stream
            })
            .collect();
        for _ in 0..3 {
            site.attach_verified(&qwen, 1);
        }
        assert_eq!(site.status().len(), 1);
        drop(leases);
        launcher.signal(rustix::process::Signal::INT);
        assert_eq!(launcher.code(), 130);
        site.assert_clean();
    }
}

#[test]
fn good_clients_are_served_where_silent_ones_take_every_descriptor() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let mut launcher = preload_with_descriptors(&site, &qwen, 64);
    let server = launcher.child("server");
    let socket = site.socket();
    let silent: Vec<UnixStream> = (0..200).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    for _ in 0..5 {
        site.attach_verified(&qwen, 1);
    }
    assert_eq!(launcher.child("server"), server);
    drop(silent);
    launcher.signal(rustix::process::Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn numbers_and_names_beyond_all_measure_are_refused_or_mean_nothing() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    for wait in [
        "18446744073709551615",
        "9223372036854775807",
        "-1",
        "NaN",
        "1e400",
    ] {
        let ran = site.attach(&qwen, 1, &["--all", &format!("--wait={wait}")]);
        assert_eq!(ran.code, Some(2), "{ran:?}");
    }
    for args in [
        &["--tensor-parallel-size", "4294967295"][..],
        &["--nnodes", "4294967295", "--all-nodes"],
        &["--data-parallel-size", "4294967295", "--all-nodes"],
        &["--pipeline-parallel-size", "4294967295"],
    ] {
        let error = site.run(&[&["plan"], args].concat()).error(2);
        assert!(error.contains("4294967295"), "{error}");
    }
    // What a service manager says of itself, if it is none.
    let long = format!("/{}", "n".repeat(5000));
    let cases: [&[(&str, &str)]; 6] = [
        &[
            ("NOTIFY_SOCKET", "/nowhere"),
            ("WATCHDOG_USEC", "18446744073709551615"),
        ],
        &[("NOTIFY_SOCKET", &long), ("WATCHDOG_USEC", "1")],
        &[
            ("NOTIFY_SOCKET", "@"),
            ("FDSTORE", "-1"),
            ("WATCHDOG_USEC", "NaN"),
        ],
        &[
            ("NOTIFY_SOCKET", "/dev/null"),
            ("FDSTORE", "18446744073709551616"),
        ],
        &[
            ("LISTEN_FDS", "4294967296"),
            ("LISTEN_FDNAMES", "\u{1b}[2J:a\nforged:"),
        ],
        &[("LISTEN_FDS", "-5"), ("LISTEN_FDNAMES", &long)],
    ];
    for variables in cases {
        let plain = site.on_model("preload", &qwen, 1, &[]);
        // The process id is what sd_listen_fds(3) tells it to be.
        let mut command = run_by(&["sh", "-c", r#"LISTEN_PID=$$ exec "$0" "$@""#], &plain);
        command.envs(variables.iter().copied());
        let mut launcher = site.start(command);
        launcher.ready();
        launcher.says("serving on ");
        site.attach_verified(&qwen, 1);
        launcher.signal(rustix::process::Signal::INT);
        assert_eq!(launcher.code(), 130, "{variables:?}: {}", launcher.log());
        let log = launcher.log();
        assert!(!log.contains('\u{1b}') && !log.contains("panicked"), "{log}");
        site.assert_clean();
    }
}

#[test]
fn names_in_a_checkpoint_steer_no_terminal_and_forge_no_line() {
    let site = Site::new();
    let dir = site.path().join("model");
    std::fs::create_dir(&dir).unwrap();
    let config = r#"{ "architectures": ["Plain\u001b[2J\nforged"], "model_type": "plain" }"#;
    std::fs::write(dir.join("config.json"), config).unwrap();
    let header = r#"{"w\u001b]0;x\u0007\u009b2J\nforged\u202e\u0000":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7]].concat();
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
    let is_clean = |text: &str| {
        let hidden = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!text.contains(hidden), "{text:?}");
        assert!(!text.lines().any(|line| line.starts_with("forged")), "{text:?}");
    };
    let plan = finish(site.on_model("plan", &dir, 1, &[]));
    assert_eq!(plan.code, Some(0), "{plan:?}");
    assert!(
        plan.stdout
            .contains(r"w\u{1b}]0;x\u{7}\u{9b}2J\nforged\u{202e}\u{0}"),
        "{plan:?}"
    );
    is_clean(&plan.stdout);
    let plan = finish(site.on_model("plan", &dir, 1, &["--json"]));
    assert!(plan.stdout.contains(r"\u009b2J"), "{plan:?}");
    is_clean(&plan.stdout);
    let launcher = site.preload(&dir, 1, &[]);
    let wrong = site.attach(&dir, 1, &["--all", "--dtype", "float16"]);
    for text in [&wrong.stderr, &site.run(&["status"]).stdout, &launcher.log()] {
        is_clean(text);
    }
    site.attach_verified(&dir, 1);
}

#[test]
fn ten_thousand_engines_that_die_at_every_step_leave_a_server_as_it_was() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&qwen, 1, &[]);
    let server = launcher.child("server");
    let socket = site.socket();
    let attach = get_state();
    let generation = site.status()[0]["generation"].as_str().unwrap().parse().unwrap();
    let generation = Some(generation);
    let watch = frame(Watch { generation });
    let leased = [&attach[..], &watch].concat();
    // The kernel closes what a process had that was killed, as it closes these.
    let die = |cycle: usize| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        let said: &[u8] = match cycle % 5 {
            0 => &[],
            1 => &attach[..cycle % attach.len()],
            2 => &attach,
            _ => &leased,
        };
        stream.write_all(said).unwrap();
        if cycle % 5 == 4 {
            // It has heard both answers, and its lease is counted.
            let mut header = [0; HEADER_BYTES];
            for _ in 0..2 {
                stream.read_exact(&mut header).unwrap();
                let header = Header::decode(&header).unwrap().unwrap();
                stream.read_exact(&mut vec![0; header.body]).unwrap();
            }
        }
    };
    let at_rest = || wait_until("no lease is left", || site.status()[0]["leases"] == 0);
    (0..1000).for_each(die);
    at_rest();
    let before = holds(server);
    (0..10_000).for_each(die);
    at_rest();
    wait_until("as many descriptors as before", || holds(server).0 <= before.0);
    // Far less than a byte of each request that was forgotten would come to.
    let more = holds(server).1.saturating_sub(before.1);
    assert!(more < 1 << 10, "{more} KiB more than after a thousand");
    site.attach_verified(&qwen, 1);
}
