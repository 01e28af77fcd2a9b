//! Decoding takes memory in proportion to what was received, whatever numbers stand in it.
//!
//! One test, because all of the process's memory is counted.

use peak_alloc::PeakAlloc;
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Difference, Dtype, HandleKind, Manifest};
use weightd_core::peer::Facts;
use weightd_core::wire::message::{GetMemory, Mismatch, Report};
use weightd_core::wire::{Decoder, Header, Message};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The most memory that decoding takes for each byte, and for anything at all.
const TIMES: usize = 12;
const ANYTHING: usize = 4096;

/// The most bytes that `work` has at once, beyond what there was, and what it leaves.
fn peak<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let result = work();
    (MEMORY.peak_usage().saturating_sub(before), result)
}

#[track_caller]
fn check(what: &str, peak: usize, received: usize) {
    assert!(
        peak <= TIMES * received + ANYTHING,
        "{what}: {peak} of {received}"
    );
}

#[test]
fn memory_stays_within_a_small_multiple_of_what_was_received() {
    messages();
    manifests();
    frames();
}

fn messages() {
    const BODY: usize = 64 * 1024;
    let numbers = |number: &[u8]| number.iter().copied().cycle().take(BODY).collect::<Vec<u8>>();
    let bodies = [
        vec![],
        vec![0xff; 4],
        vec![0xff; BODY],
        vec![0; BODY],
        vec![1; BODY],
        numbers(&[0xff, 0xff, 0, 0]),
        numbers(&[0, 0, 0, 0x80]),
        numbers(&[1, 0, 0, 0]),
        numbers(&[1, 0, 0, 0, b'a']),
    ];
    for &kind in Message::KINDS {
        for body in &bodies {
            // What comes before the counts of a list or a map varies by message.
            for skip in 0..200.min(body.len().max(1)) {
                let body = [&vec![0; skip][..], &body[skip.min(body.len())..]].concat();
                let (bytes, _) = peak(|| Message::decode(kind, &body));
                check(&format!("kind {kind}"), bytes, body.len());
            }
        }
    }
    // As many small things as a body holds.
    let fields = vec![Difference::new("", "", ""); 5_400];
    let text = "x".repeat(60_000);
    let generation = "0000000000000001-1".parse().unwrap();
    let large: [Message; 2] = [
        Mismatch { fields }.into(),
        Report {
            daemon: 0,
            generation,
            import_failed: text,
        }
        .into(),
    ];
    for message in large {
        let body = message.encode().unwrap();
        let (bytes, decoded) = peak(|| Message::decode(message.kind(), &body));
        assert_eq!(decoded, Ok(message));
        check("a full message", bytes, body.len());
    }
}

fn manifests() {
    let region = Region {
        handle: HandleKind::Memfd,
        bytes: 1 << 20,
        device: DeviceUuid([1; 16]),
        legacy: None,
    };
    let mut builder = ManifestBuilder::new();
    let region = builder.region(region);
    for number in 0..20_000 {
        let spec = TensorSpec {
            kind: TensorKind::Parameter,
            persistent: true,
            dtype: Dtype::U8,
            shape: &[0, 1, 2, 3, 4, 5, 6, 7],
            strides: None,
            region,
            offset: 0,
        };
        builder.tensor(&format!("{number:x}"), spec);
    }
    let whole = builder.finish().unwrap().encode();
    let (bytes, decoded) = peak(|| Manifest::decode(&whole).map(|manifest| manifest.tensors().len()));
    assert_eq!(decoded, Ok(20_000));
    check("a manifest", bytes, whole.len());
    // Each count of the header, too large.
    for at in (12..40).step_by(4) {
        for count in [u32::MAX, 1_000_000, 0x8000_0000, 15, 256] {
            let mut lying = whole.clone();
            lying[at..at + 4].copy_from_slice(&count.to_le_bytes());
            for length in [40, 4096, lying.len()] {
                let (bytes, decoded) = peak(|| Manifest::decode(&lying[..length]).is_ok());
                assert!(!decoded || lying == whole, "count at {at}: {count}");
                check("a lying manifest", bytes, length);
            }
        }
    }
}

fn frames() {
    // A long frame leaves nothing behind on a connection that stays.
    let none = || std::iter::empty::<(Facts, u32)>();
    let long = Header {
        kind: 999,
        request: 1,
        body: 64 * 1024,
        descriptors: 0,
    };
    let long = [&long.encode()[..], &vec![0; 64 * 1024]].concat();
    let message = Message::from(GetMemory {});
    let short = Header {
        kind: message.kind(),
        request: 2,
        body: 0,
        descriptors: 0,
    };
    let (_, decoders) = peak(|| {
        let mut decoders: Vec<Decoder<u32>> = (0..100).map(|_| Decoder::default()).collect();
        for decoder in &mut decoders {
            for bytes in [&long[..1000], &long[1000..], &short.encode()] {
                decoder.push(bytes, none(), false).unwrap();
                while decoder.next_frame().unwrap().is_some() {}
            }
        }
        decoders
    });
    let with = MEMORY.current_usage();
    let count = decoders.len();
    drop(decoders);
    let each = (with - MEMORY.current_usage()) / count;
    assert!(each <= ANYTHING, "{each} bytes for a connection that is silent");
}
