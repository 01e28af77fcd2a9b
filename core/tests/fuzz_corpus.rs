//! The seeds in the corpora of `frame_decoder` and `message`. All of them are replayed by `tests/tests/fuzz_corpus.rs`.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::path::PathBuf;
use weightd_core::content::{CheckpointId, DeviceUuid, Difference, Generation, HandleKind, Key, Role};
use weightd_core::testing::world;
use weightd_core::wire::message::{Activity, CodeCount, FieldCount, Lease, Leased, Loaded};
use weightd_core::wire::message::{
    ContentInfo, DaemonInfo, Define, Expects, GetState, Publish, RegionInfo, Replace,
};
use weightd_core::wire::message::{
    Failure, GetMemory, GetStatus, Holds, Lead, Message, Mismatch, Report, State,
};

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/frame_decoder")
}

#[test]
fn the_seeds_are_in_the_corpus() {
    for (name, bytes) in seeds() {
        let path = corpus().join(name);
        let found = std::fs::read(&path).unwrap_or_default();
        assert_eq!(
            found, bytes,
            "{name}: run `cargo test -p weightd-core --test fuzz_corpus -- --ignored`"
        );
    }
}

#[test]
fn every_kind_of_message_is_in_the_corpus_of_message() {
    let corpus = corpus().with_file_name("message");
    let inputs: Vec<Vec<u8>> = std::fs::read_dir(corpus)
        .expect("a corpus")
        .map(|entry| std::fs::read(entry.expect("an entry").path()).expect("an input"))
        .collect();
    let has = |kind: &u16| inputs.iter().any(|body| Message::decode(*kind, body).is_ok());
    let missing: Vec<&u16> = Message::KINDS.iter().filter(|kind| !has(kind)).collect();
    assert_eq!(missing, [] as [&u16; 0], "an input that is the body of one");
}

#[test]
#[ignore = "writes the seeds into fuzz/corpus/frame_decoder"]
fn write_the_seeds() {
    for (name, bytes) in seeds() {
        std::fs::write(corpus().join(name), bytes).expect("a writable corpus");
    }
}

fn frame(message: impl Into<Message>, descriptors: usize) -> Vec<u8> {
    let frame = message.into().frame(1, descriptors);
    frame.expect("a message that fits")
}

/// Cuts and a stream, as the target reads them.
fn input(cuts: &[(u8, u8)], stream: &[u8]) -> Vec<u8> {
    let mut bytes = vec![cuts.len() as u8];
    bytes.extend(
        cuts.iter()
            .flat_map(|(length, descriptors)| [*length, *descriptors]),
    );
    bytes.extend_from_slice(stream);
    bytes
}

fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let key = Key {
        checkpoint: CheckpointId {
            bytes: 9,
            files: Some([1; 32]),
            digest: Some([2; 32]),
        },
        model_arch: "Qwen3ForCausalLM".into(),
        quant_config_hash: Some([3; 32]),
        revision: "main".into(),
        role: Role::Draft,
        enable_expert_parallel: true,
        extra: [("kv_cache_dtype".to_owned(), "fp8".to_owned())].into(),
        ..world::key(1)
    };
    let generation = Generation { epoch: 7, number: 1 };
    let device_uuid = DeviceUuid([4; 16]);
    let regions = vec![RegionInfo {
        handle: HandleKind::Memfd,
        bytes: 4096,
    }];
    let content = ContentInfo {
        manifest_bytes: 64,
        regions,
        tensors: 2,
        aliases: 1,
        checksums: true,
    };
    let get_state = frame(
        GetState {
            key: key.clone(),
            is_reload: true,
        },
        0,
    );
    let state = frame(
        State {
            generation,
            device_uuid,
            content: content.clone(),
        },
        2,
    );
    let expects = Expects::Generation(generation);
    let publish = Publish {
        daemon: 1,
        generation: Some(generation),
        expects,
        key: key.clone(),
        content,
    };
    let publish = frame(publish, 2);
    let info = DaemonInfo {
        socket: "/run/x.sock".into(),
        global_rank: 1,
        device_uuid,
        no_release: true,
        publish: Some(Replace::Keep),
        key,
    };
    let define = frame(
        Define {
            daemon: 1,
            info,
            holds: Holds::Lost(generation),
        },
        2,
    );
    let report = frame(
        Report {
            daemon: 0,
            generation,
            import_failed: "no memory".into(),
        },
        0,
    );
    let failure = frame(
        Failure {
            code: 7,
            retryable: true,
            message: "empty".into(),
        },
        0,
    );
    let mismatch = frame(
        Mismatch {
            fields: ["dtype", "extra.x"]
                .map(|field| Difference::new(field, "none", "auto"))
                .into(),
        },
        0,
    );
    let activity = frame(
        Activity {
            need_digest: 1,
            mismatches: 2,
            mismatched: vec![FieldCount {
                field: "dtype".into(),
                count: 2,
            }],
            refused: vec![CodeCount { code: 7, count: 3 }],
            generations: vec![Leased {
                generation,
                bytes: 4096,
                leases: 2,
            }],
            leases: vec![Lease { pid: 9, generation }; 2],
            more_generations: 0,
            more_leases: 1,
        },
        0,
    );
    let loaded = frame(
        Loaded {
            daemon: 1,
            checkpoint: "/models/x".into(),
            tensors: 2,
            bytes: 4096,
            buffered: 8192,
            direct: 4096,
            daemons: 2,
            micros: 1,
            path: "direct".into(),
        },
        0,
    );
    let two = [frame(GetMemory {}, 0), state.clone()].concat();
    let changed = |change: fn(&mut Vec<u8>)| {
        let mut bytes = frame(GetStatus {}, 0);
        change(&mut bytes);
        bytes
    };
    vec![
        ("get_state", input(&[], &get_state)),
        ("state_with_two_descriptors", input(&[(255, 2)], &state)),
        (
            "state_byte_by_byte",
            input(&[(1, 2), (1, 0), (1, 0), (17, 0), (1, 0), (200, 0)], &state),
        ),
        (
            "descriptors_with_an_earlier_frame",
            input(&[(25, 2), (200, 0)], &two),
        ),
        ("publish", input(&[(100, 2), (100, 0), (255, 0)], &publish)),
        ("define", input(&[(20, 2), (255, 0)], &define)),
        ("report", input(&[], &report)),
        ("failure", input(&[(19, 0), (1, 0)], &failure)),
        ("mismatch", input(&[], &mismatch)),
        ("activity", input(&[(30, 0), (255, 0)], &activity)),
        ("loaded", input(&[], &loaded)),
        ("lead", input(&[], &frame(Lead { pid: 9 }, 0))),
        ("half_a_header", input(&[], &state[..11])),
        ("half_a_body", input(&[(20, 2)], &state[..40])),
        ("missing_descriptors", input(&[(255, 1)], &state)),
        ("stray_descriptors", input(&[(255, 3)], &state)),
        ("a_flood_of_descriptors", input(&[(1, 200), (1, 200)], &state)),
        ("descriptors_too_late", input(&[(20, 0), (1, 2)], &state)),
        ("garbage", input(&[], b"GET / HTTP/1.1\r\n\r\n")),
        ("another_major", input(&[], &changed(|bytes| bytes[4] = 2))),
        ("reserved", input(&[], &changed(|bytes| bytes[19] = 1))),
        (
            "huge_length",
            input(&[], &changed(|bytes| bytes[12..16].fill(255))),
        ),
        (
            "too_many_descriptors",
            input(&[(255, 17)], &changed(|bytes| bytes[16] = 17)),
        ),
        ("unknown_kind", input(&[], &changed(|bytes| bytes[6] = 250))),
        ("hostile_counts", {
            let mut bytes = frame(Mismatch { fields: vec![] }, 0);
            bytes[20..].fill(255);
            input(&[], &bytes)
        }),
    ]
}
