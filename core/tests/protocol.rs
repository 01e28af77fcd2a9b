//! PROTOCOL.md says what the code does: its examples decode to these messages and back, and its
//! tables are complete.

use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Difference, Dtype, Generation, HandleKind, Key, Manifest};
use weightd_core::testing::world;
use weightd_core::wire::message::{
    ContentInfo, DaemonInfo, Define, ErrorCode, Expects, Failure, GetState, Holds, Message, Mismatch,
    Publish, RegionInfo, State, Watch,
};
use weightd_core::wire::{Decoder, frame};

const DOCUMENT: &str = include_str!("../PROTOCOL.md");

/// The bytes of the example with this name.
fn example(name: &str) -> Vec<u8> {
    let start = format!("```hex {name}\n");
    let from = DOCUMENT
        .find(&start)
        .unwrap_or_else(|| panic!("no example {name}"))
        + start.len();
    let block = DOCUMENT[from..].split("```").next().expect("a block");
    let bytes = block.lines().filter_map(|line| line.split(';').next());
    let bytes = bytes.flat_map(str::split_whitespace);
    bytes
        .map(|byte| u8::from_str_radix(byte, 16).expect("two hex digits"))
        .collect()
}

/// The first two cells of every row of the table under this heading.
fn table(heading: &str) -> Vec<(String, String)> {
    let from = DOCUMENT
        .find(heading)
        .unwrap_or_else(|| panic!("no table {heading}"));
    let rows = DOCUMENT[from..]
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let cells = |row: &str| -> Vec<String> { row.split('|').map(|cell| cell.trim().to_owned()).collect() };
    rows.map(cells)
        .map(|cells| (cells[1].clone(), cells[2].clone()))
        .collect()
}

fn key() -> Key {
    Key {
        revision: "main".into(),
        extra: [("kv_dtype".to_owned(), "fp8".to_owned())].into(),
        ..world::key(1)
    }
}

fn messages() -> Vec<(Message, usize)> {
    let generation = Generation {
        epoch: 0x1122_3344_5566_7788,
        number: 3,
    };
    let device_uuid = DeviceUuid([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
    let regions = vec![RegionInfo {
        handle: HandleKind::Memfd,
        bytes: 1 << 20,
    }];
    let content = ContentInfo {
        manifest_bytes: 4096,
        regions,
        tensors: 195,
        aliases: 1,
        checksums: true,
    };
    let info = DaemonInfo {
        socket: "/run/weightd/x.sock".into(),
        global_rank: 1,
        device_uuid,
        no_release: false,
        publish: None,
        key: key(),
    };
    let empty = ErrorCode::Empty.number();
    let message = "this daemon holds no content yet".to_owned();
    let fields = vec![Difference::new("dtype", "float16", "auto")];
    let (daemon, expects) = (0, Expects::Empty);
    vec![
        (
            GetState {
                key: key(),
                is_reload: false,
            }
            .into(),
            0,
        ),
        (
            State {
                generation,
                device_uuid,
                content: content.clone(),
            }
            .into(),
            2,
        ),
        (
            Failure {
                code: empty,
                retryable: false,
                message,
            }
            .into(),
            0,
        ),
        (Mismatch { fields }.into(), 0),
        (
            Watch {
                generation: Some(generation),
            }
            .into(),
            0,
        ),
        (
            Publish {
                daemon,
                generation: Some(generation),
                expects,
                key: key(),
                content,
            }
            .into(),
            2,
        ),
        (
            Define {
                daemon,
                info,
                holds: Holds::Content(generation),
            }
            .into(),
            2,
        ),
    ]
}

/// Something for each section.
fn manifest() -> Manifest {
    let mut builder = ManifestBuilder::new();
    let region = builder.region(Region {
        handle: HandleKind::Memfd,
        bytes: 18,
        device: DeviceUuid([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]),
        legacy: None,
    });
    let parameter = TensorSpec {
        kind: TensorKind::Parameter,
        persistent: true,
        dtype: Dtype::U8,
        shape: &[3, 3],
        strides: None,
        region,
        offset: 0,
    };
    builder.tensor("w", parameter);
    let strides = Some(&[1, 3][..]);
    builder.tensor("w.T", TensorSpec { strides, ..parameter });
    let buffer = TensorSpec {
        kind: TensorKind::Buffer,
        persistent: false,
        shape: &[9],
        offset: 9,
        ..parameter
    };
    builder.tensor("b", buffer);
    builder.alias("v", "w");
    builder.attr("tied", true);
    let checksums = vec![0xae8b_1486_0a79_9888; 2];
    let manifest = builder.finish().expect("a good manifest");
    manifest.with_checksums(checksums).expect("two extents")
}

#[test]
fn the_examples_are_the_bytes_of_these_messages() {
    for (message, descriptors) in messages() {
        let bytes = message.frame(1, descriptors).expect("a message that fits");
        assert_eq!(example(message.name()), bytes, "{}", message.name());
    }
    assert_eq!(example("Manifest"), manifest().encode());
    let examples = DOCUMENT.matches("```hex ").count();
    assert_eq!(examples, messages().len() + 1, "every example is checked");
}

#[test]
fn the_examples_decode() {
    use weightd_core::peer::{Facts, FileKind};
    for (message, descriptors) in messages() {
        let facts = Facts {
            file: FileKind::Other,
            size: 0,
        };
        let mut decoder = Decoder::default();
        let come = (0..descriptors).map(|descriptor| (facts, descriptor));
        decoder
            .push(&example(message.name()), come, false)
            .expect("good bytes");
        let frame = decoder
            .next_frame()
            .expect("a good frame")
            .expect("a whole frame");
        assert_eq!((frame.request, frame.descriptors.len()), (1, descriptors));
        assert_eq!(Message::decode(frame.kind, &frame.body), Ok(message));
    }
    assert_eq!(Manifest::decode(&example("Manifest")), Ok(manifest()));
}

#[test]
fn the_table_of_messages_is_complete() {
    let listed = table("| kind | message | body |");
    let kinds: Vec<u16> = listed
        .iter()
        .map(|(kind, _)| kind.parse().expect("a number"))
        .collect();
    assert_eq!(kinds, Message::KINDS);
    for (message, _) in messages() {
        assert!(listed.contains(&(message.kind().to_string(), message.name().to_owned())));
    }
    // A message whose body is empty decodes from nothing: that proves its name.
    for (kind, name) in &listed {
        if let Ok(message) = Message::decode(kind.parse().expect("a number"), &[]) {
            assert_eq!(message.name(), name);
        }
    }
}

#[test]
fn the_table_of_failures_is_complete() {
    let listed = table("| code | name | meaning | the connection |");
    for (code, name) in &listed {
        let code = ErrorCode::from_number(code.parse().expect("a number"));
        assert_eq!(&format!("{code:?}"), name);
    }
    let next = ErrorCode::from_number(listed.len() as u16 + 1);
    assert!(
        matches!(next, ErrorCode::Unknown(_)),
        "{next:?} is not in the table"
    );
}

#[test]
fn the_table_of_dtypes_is_complete() {
    let listed = table("| number | dtype |");
    let known: Vec<(String, String)> = Dtype::ALL
        .iter()
        .map(|dtype| ((*dtype as u8).to_string(), dtype.name().to_owned()))
        .collect();
    assert_eq!(listed, known);
}

#[test]
fn the_limits_are_those_of_the_code() {
    let limits = weightd_core::machine::Limits::default();
    assert!(DOCUMENT.contains(&format!("at most {}", frame::MAX_BODY)));
    assert!(DOCUMENT.contains(&format!("at most {} |", frame::MAX_DESCRIPTORS)));
    assert!(DOCUMENT.contains(&format!("takes at most {} bytes", weightd_core::content::MAX_KEY)));
    assert!(DOCUMENT.contains(&format!("a whole server | {};", limits.connections)));
    assert!(DOCUMENT.contains(&format!("a whole server | {} |", limits.leases)));
    assert!(DOCUMENT.contains(&format!(
        "without a whole request | {} s",
        limits.idle.0 / 1_000_000
    )));
    assert!(DOCUMENT.contains(&format!("without progress | {} s", limits.unread.0 / 1_000_000)));
    assert!(DOCUMENT.contains(&format!(
        "content on one connection | {} times",
        limits.states_per_connection
    )));
    assert!(DOCUMENT.contains(&format!("a release took {} s", limits.waiting.0 / 1_000_000)));
    assert!(DOCUMENT.contains(&format!("without an answer | {} s", limits.waiting.0 / 1_000_000)));
    assert!(DOCUMENT.contains(&format!(
        "nobody leads within {} s",
        limits.leaderless.0 / 1_000_000
    )));
}

#[test]
fn bools_and_options_are_off_at_0_only_and_an_enum_is_one_of_its_numbers() {
    let mut bytes = example("Failure")[frame::HEADER_BYTES..].to_vec();
    bytes[2] = 2;
    let Ok(Message::Failure(failure)) = Message::decode(42, &bytes) else {
        panic!("a bool of 2")
    };
    assert!(failure.retryable);
    let mut bytes = example("Watch")[frame::HEADER_BYTES..].to_vec();
    bytes[0] = 2;
    let Ok(Message::Watch(watch)) = Message::decode(2, &bytes) else {
        panic!("an option of 2")
    };
    assert!(watch.generation.is_some());
    let mut bytes = example("State")[frame::HEADER_BYTES..].to_vec();
    bytes[41] = 3;
    assert!(Message::decode(33, &bytes).is_err(), "a handle kind of 3");
}
