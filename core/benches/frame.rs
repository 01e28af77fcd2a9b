//! What framing costs: encoding, and decoding in one read or byte by byte.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use weightd_core::content::Difference;
use weightd_core::wire::message::{Failure, GetMemory, Mismatch};
use weightd_core::wire::{Decoder, Header, Message};

fn encode(message: &Message) -> Vec<u8> {
    let body = message.encode().expect("a message that fits");
    let header = Header {
        kind: message.kind(),
        request: 1,
        body: body.len(),
        descriptors: 0,
    };
    [header.encode().to_vec(), body].concat()
}

fn decode(decoder: &mut Decoder<u32>, reads: std::slice::Chunks<'_, u8>) -> usize {
    let mut bytes = 0;
    for read in reads {
        decoder.push(read, None, false).expect("a good stream");
        while let Some(frame) = decoder.next_frame().expect("a good stream") {
            bytes += black_box(frame).body.len();
        }
    }
    bytes
}

fn frame(c: &mut Criterion) {
    let small = Message::from(GetMemory {});
    let usual = Message::from(Failure {
        code: 7,
        retryable: false,
        message: "x".repeat(200),
    });
    // 64 KiB in all.
    let large = Message::from(Mismatch {
        fields: vec![Difference::new(&"x".repeat(65_522), "", "")],
    });
    for (name, message) in [("0 B", small), ("200 B", usual), ("64 KiB", large)] {
        let bytes = encode(&message);
        let mut group = c.benchmark_group(format!("frame of {name}"));
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function("encode", |b| b.iter(|| encode(black_box(&message))));
        let mut decoder = Decoder::default();
        group.bench_function("decode whole", |b| {
            b.iter(|| decode(&mut decoder, black_box(&bytes).chunks(bytes.len())))
        });
        group.bench_function("decode byte by byte", |b| {
            b.iter(|| decode(&mut decoder, black_box(&bytes).chunks(1)))
        });
        let body = &bytes[20..];
        group.bench_function("decode the message", |b| {
            b.iter(|| Message::decode(message.kind(), black_box(body)).expect("a good body"))
        });
    }
}

criterion_group!(benches, frame);
criterion_main!(benches);
