//! What `/health` and `/metrics` say, and that asking harms nobody.

use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use crate::http::*;
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

fn launch(site: &Site, model: &Path, tp: u32) -> (Running, String) {
    let launcher = site.preload(model, tp, &["--health-port", "0"]);
    let address = address(&launcher);
    (launcher, address)
}

#[test]
fn health_is_bad_until_all_serve_and_while_the_server_hangs_and_after_a_release() {
    let site = Site::new();
    let large = large_checkpoint(&site.path().join("model"), 256 << 20);
    let mut launcher = site.start(site.on_model("preload", &large, 1, &["--health-port", "0"]));
    let loader = launcher.child("loader");
    signal(loader, Signal::STOP);
    let address = address(&launcher);
    for _ in 0..3 {
        let (code, body) = health(&address);
        assert_eq!((code, &body["status"]), (503, &"starting".into()), "{body}");
        assert_eq!(body["daemons"][0]["state"], "loading");
    }
    let early = metrics(&address);
    assert_eq!(early.value("weightd_ready", &[]), 0.0);
    assert_eq!(
        early.value("weightd_up", &[("rank", "0"), ("role", "target")]),
        0.0
    );
    signal(loader, Signal::CONT);
    launcher.ready();
    wait_until("health is good", || health(&address).0 == 200);
    let (_, body) = health(&address);
    assert_eq!(body["status"], "ok");
    let daemon = &body["daemons"][0];
    assert_eq!(
        (&daemon["rank"], &daemon["role"], &daemon["state"]),
        (&0.into(), &"target".into(), &"serving".into())
    );

    let server = launcher.child("server");
    signal(server, Signal::STOP);
    let mut body = body;
    wait_until("health tells", || {
        let (code, now) = health(&address);
        body = now;
        code == 503
    });
    assert_eq!(body["status"], "unavailable");
    assert_eq!(body["daemons"][0]["state"], "unreachable");
    assert!(
        body["daemons"][0]["why"]
            .as_str()
            .unwrap()
            .contains("no answer within 2 s"),
        "{body}"
    );
    signal(server, Signal::CONT);
    wait_until("health is good again", || health(&address).0 == 200);

    assert_eq!(site.run(&["release", "--rank", "0"]).code, Some(0));
    wait_until("health tells", || health(&address).0 == 503);
    let (_, body) = health(&address);
    assert_eq!(body["daemons"][0]["state"], "released");
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn metrics_say_what_is_served_and_count_what_engines_ask() {
    let (site, llama) = (Site::new(), model("llama"));
    let (launcher, address) = launch(&site, &llama, 2);
    let rank_1 = [("rank", "1"), ("role", "target")];
    let status = site.status();
    let daemon = status.iter().find(|daemon| daemon["global_rank"] == 1).unwrap();

    let before = metrics(&address);
    assert_eq!(before.all("weightd_up").len(), 2);
    assert_eq!(before.value("weightd_up", &rank_1), 1.0);
    assert_eq!(
        before.value("weightd_content_bytes", &rank_1),
        daemon["bytes"].as_f64().unwrap()
    );
    assert_eq!(
        before.value("weightd_tensors", &rank_1),
        daemon["tensors"].as_f64().unwrap()
    );
    assert_eq!(before.value("weightd_leases", &rank_1), 0.0);
    let generation = daemon["generation"].as_str().unwrap();
    let labels = [rank_1[0], rank_1[1], ("generation", generation)];
    assert_eq!(before.value("weightd_generation_info", &labels), 1.0);
    assert!(before.value("weightd_load_seconds", &rank_1) > 0.0);
    let read = |path| before.value("weightd_load_bytes", &[rank_1[0], rank_1[1], ("path", path)]);
    assert!(read("page_cache") + read("direct") > 0.0);
    assert!(before.value("weightd_request_seconds_count", &rank_1) >= 1.0);
    let version = before.all("weightd_build_info")[0];
    assert_eq!(
        version.0,
        [("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]
    );

    let mapped = map(&site, &llama, 2);
    for name in ["a", "b", "hostile\nname{}=\""] {
        let extra = format!("{name}=1");
        let ran = site.attach(
            &llama,
            2,
            &["--rank", "1", "--dtype", "float16", "--key-extra", &extra],
        );
        ran.error(1);
    }
    let attaches = |metrics: &Metrics, rank: &str, outcome: &str| {
        metrics.value(
            "weightd_attaches_total",
            &[("rank", rank), ("role", "target"), ("outcome", outcome)],
        )
    };
    let mut after = metrics(&address);
    wait_until("they are counted", || {
        after = metrics(&address);
        attaches(&after, "1", "mismatch") == 3.0
    });
    assert_eq!(
        (attaches(&after, "0", "sent"), attaches(&after, "1", "sent")),
        (1.0, 0.0)
    );
    let mismatches = after.all("weightd_mismatches_total");
    let mut fields: Vec<_> = mismatches
        .iter()
        .map(|(labels, count)| (labels[0].1.as_str(), labels[1].1.as_str(), *count))
        .collect();
    fields.sort_by(|a, b| a.partial_cmp(b).unwrap());
    assert_eq!(
        fields,
        [("dtype", "1", 3.0), ("extra", "1", 3.0)],
        "hostile names make no series"
    );
    let rank_0 = [("rank", "0"), ("role", "target")];
    assert_eq!(after.value("weightd_leases", &rank_0), 1.0);
    assert_eq!(
        after.value("weightd_leased_bytes", &rank_0),
        after.value("weightd_content_bytes", &rank_0)
    );

    assert_eq!(site.run(&["release", "--rank", "0"]).code, Some(0));
    site.attach(&llama, 2, &["--rank", "0"]).error(1);
    wait_until("the release shows", || {
        after = metrics(&address);
        after.value("weightd_content_bytes", &rank_0) == 0.0
    });
    assert!(
        after.value("weightd_leased_bytes", &rank_0) > 0.0,
        "an engine still has it"
    );
    wait_until("who comes too late is counted", || {
        attaches_or_0(&metrics(&address), "released") == 1.0
    });
    assert_eq!(after.find("weightd_generation_info", &rank_0), None);
    drop(mapped);

    signal(launcher.child("server"), Signal::KILL);
    wait_until("another server serves", || {
        let now = metrics(&address);
        let counted =
            now.value("weightd_rearms_total", &[]) + now.value("weightd_server_restarts_total", &[]);
        counted == 2.0 && now.value("weightd_up", &rank_1) == 1.0
    });
}

fn attaches_or_0(metrics: &Metrics, outcome: &str) -> f64 {
    let labels = [("rank", "0"), ("role", "target"), ("outcome", outcome)];
    metrics.find("weightd_attaches_total", &labels).unwrap_or(0.0)
}

#[test]
fn a_port_in_use_and_a_host_that_is_not_ours_are_refused_before_anything_is_started() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let error = finish(site.on_model("preload", &qwen, 1, &["--health-port", &port])).error(1);
    assert!(
        error.contains(&format!("127.0.0.1 port {port}")) && error.contains("in use"),
        "{error}"
    );
    let more = ["--health-port", "0", "--health-host", "192.0.2.1"];
    let error = finish(site.on_model("preload", &qwen, 1, &more)).error(1);
    assert!(
        error.contains("192.0.2.1") && error.contains("--health-host"),
        "{error}"
    );
    site.assert_clean();
}

#[test]
fn other_paths_and_methods_are_answered_and_garbage_ends_its_connection() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let (_launcher, address) = launch(&site, &qwen, 1);
    let (code, body) = get(&address, "/");
    assert_eq!(code, 404);
    assert!(body.contains("/health"), "{body}");
    let said = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // What it had not read when it closed.
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    assert!(said(b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").contains(" 405 "));
    assert!(said(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n").contains(" 200 "));
    assert!(said(b"\x00\x01 nonsense\r\n\r\n").contains(" 400 "));
    let long = [&b"GET /"[..], &vec![b'a'; 100_000], b" HTTP/1.1\r\n\r\n"].concat();
    assert!(!said(&long).contains(" 200 "));
    assert_eq!(health(&address).0, 200);
}

#[test]
fn a_flood_and_clients_that_never_ask_hold_up_neither_health_nor_engines() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let (launcher, address) = launch(&site, &qwen, 1);
    // More than are served at a time, silent or half-way; they are put out after a while.
    let stalled: Vec<TcpStream> = (0..200)
        .map(|number| {
            let mut stream = TcpStream::connect(&address).unwrap();
            if number % 2 == 0 {
                stream.write_all(b"GET /health HTT").unwrap();
            }
            stream
        })
        .collect();
    site.attach_verified(&qwen, 1);
    let old = launcher.child("server");
    signal(old, Signal::KILL);
    wait_until("supervision goes on", || {
        let status = site.status();
        !status.is_empty() && status[0]["pid"] != old
    });
    assert_eq!(health(&address).0, 200);
    let asked = metrics(&address).value("weightd_request_seconds_count", &[]);
    for _ in 0..300 {
        assert_eq!(health(&address).0, 200);
    }
    let probes = metrics(&address).value("weightd_request_seconds_count", &[]) - asked;
    assert!(probes < 150.0, "{probes} probes for 300 questions");
    drop(stalled);
}

#[test]
fn a_host_without_a_port_is_refused() {
    let site = Site::new();
    for host in ["--health-host", "--weight-cache-health-host"] {
        let ran = site.run(&["serve", host, "0.0.0.0"]);
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.stderr.contains("--health-port <PORT>"), "{ran:?}");
    }
    site.assert_clean();
}
