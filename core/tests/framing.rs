//! Frames, byte for byte and at their limits.

use weightd_core::peer::{Facts, FileKind};
use weightd_core::wire::frame::{HEADER_BYTES, MAX_BODY, MAX_DESCRIPTORS};
use weightd_core::wire::{Decoder, Frame, FrameError, Header};

const FACTS: Facts = Facts {
    file: FileKind::Memory { sealed: true },
    size: 1,
};

fn header(body: usize, descriptors: usize) -> [u8; HEADER_BYTES] {
    let header = Header {
        kind: 0x1234,
        request: 0x5678_9abc,
        body,
        descriptors,
    };
    header.encode()
}

fn with(numbers: std::ops::Range<u32>) -> impl Iterator<Item = (Facts, u32)> {
    numbers.map(|number| (FACTS, number))
}

/// What one read of these bytes, with so many descriptors, is the beginning of.
fn read(bytes: &[u8], descriptors: u32) -> (Decoder<u32>, Result<Option<Frame<u32>>, FrameError>) {
    let mut decoder = Decoder::default();
    decoder.push(bytes, with(0..descriptors), false).unwrap();
    let next = decoder.next_frame();
    (decoder, next)
}

#[test]
fn a_header_is_read_as_it_was_written() {
    let bytes = header(7, 2);
    assert_eq!(
        bytes,
        *b"wgtd\x01\x00\x34\x12\xbc\x9a\x78\x56\x07\x00\x00\x00\x02\x00\x00\x00"
    );
    let expected = Header {
        kind: 0x1234,
        request: 0x5678_9abc,
        body: 7,
        descriptors: 2,
    };
    assert_eq!(Header::decode(&bytes), Ok(Some(expected)));
    for part in 0..HEADER_BYTES {
        assert_eq!(Header::decode(&bytes[..part]), Ok(None), "{part} bytes");
    }
}

#[test]
fn what_is_no_header_is_refused_at_the_first_byte_that_shows_it() {
    let changed = |at: usize, byte: u8| {
        let mut bytes = header(0, 0);
        bytes[at] = byte;
        Header::decode(&bytes[..=at])
    };
    for at in 0..4 {
        assert_eq!(changed(at, b'x'), Err(FrameError::Magic), "byte {at}");
    }
    assert_eq!(changed(4, 2), Err(FrameError::Version(2)));
    assert_eq!(changed(5, 200), Ok(None), "any minor version is understood");
    let whole = |at: usize| {
        let mut bytes = header(0, 0);
        bytes[at] = 1;
        Header::decode(&bytes)
    };
    assert_eq!(
        (whole(18), whole(19)),
        (Err(FrameError::Reserved), Err(FrameError::Reserved))
    );
}

#[test]
fn the_largest_frame_is_taken_and_one_more_of_anything_is_refused() {
    let largest = [&header(MAX_BODY, MAX_DESCRIPTORS)[..], &[7; MAX_BODY]].concat();
    let (_, frame) = read(&largest, MAX_DESCRIPTORS as u32);
    let frame = frame.unwrap().unwrap();
    assert_eq!(
        (frame.body.len(), frame.descriptors.len()),
        (MAX_BODY, MAX_DESCRIPTORS)
    );
    assert_eq!(
        read(&header(MAX_BODY + 1, 0), 0).1,
        Err(FrameError::BodyTooLong(MAX_BODY as u32 + 1))
    );
    assert_eq!(
        read(&header(0, MAX_DESCRIPTORS + 1), MAX_DESCRIPTORS as u32 + 1).1,
        Err(FrameError::TooManyDescriptors(MAX_DESCRIPTORS as u16 + 1))
    );
}

#[test]
fn frames_come_in_order_with_their_own_descriptors() {
    let body = |text: &[u8], descriptors| [&header(text.len(), descriptors)[..], text].concat();
    let stream = [body(b"one", 2), body(b"", 0), body(b"three", 1)].concat();
    let (mut decoder, first) = read(&stream, 3);
    let mut frames = vec![first.unwrap().unwrap()];
    while let Some(frame) = decoder.next_frame().unwrap() {
        frames.push(frame);
    }
    let seen: Vec<_> = frames
        .iter()
        .map(|frame| {
            let numbers: Vec<u32> = frame.descriptors.iter().map(|(_, number)| *number).collect();
            assert_eq!((frame.kind, frame.request), (0x1234, 0x5678_9abc));
            (&frame.body[..], numbers)
        })
        .collect();
    assert_eq!(
        seen,
        [(&b"one"[..], vec![0, 1]), (b"", vec![]), (b"three", vec![2])]
    );
}

#[test]
fn a_decoder_knows_how_much_it_keeps_and_whether_that_is_the_middle_of_a_frame() {
    let bytes = [&header(10, 1)[..], b"0123456789"].concat();
    let mut decoder = Decoder::default();
    let keeps = |decoder: &Decoder<u32>| (decoder.buffered(), decoder.is_mid_frame());
    assert_eq!(keeps(&decoder), (0, false));
    decoder.push(&bytes[..5], with(0..1), false).unwrap();
    assert_eq!(decoder.next_frame(), Ok(None));
    assert_eq!(keeps(&decoder), (5, true));
    decoder.push(&bytes[5..HEADER_BYTES], [], false).unwrap();
    assert_eq!(decoder.next_frame(), Ok(None));
    assert_eq!(
        keeps(&decoder),
        (0, true),
        "the header is read, and its body is not there"
    );
    decoder
        .push(&bytes[HEADER_BYTES..HEADER_BYTES + 9], [], false)
        .unwrap();
    assert_eq!(decoder.next_frame(), Ok(None));
    assert_eq!(keeps(&decoder), (9, true));
    decoder.push(b"9wg", [], false).unwrap();
    assert_eq!(decoder.next_frame().unwrap().unwrap().body, b"0123456789");
    assert_eq!(keeps(&decoder), (2, true));
    assert_eq!(decoder.next_frame(), Ok(None));
    let rest = header(0, 0);
    decoder.push(&rest[2..], [], false).unwrap();
    assert_eq!(decoder.next_frame().unwrap().unwrap().body, b"");
    assert_eq!(keeps(&decoder), (0, false));
}

#[test]
fn descriptors_that_no_frame_owns_are_found_at_once() {
    assert_eq!(read(&header(0, 2), 1).1.unwrap_err(), {
        let (announced, arrived) = (2, 1);
        FrameError::MissingDescriptors { announced, arrived }
    });
    // As many as a frame may own may belong to the header that has begun, and no more.
    assert_eq!(read(b"wg", MAX_DESCRIPTORS as u32).1, Ok(None));
    assert_eq!(
        read(b"wg", MAX_DESCRIPTORS as u32 + 1).1,
        Err(FrameError::StrayDescriptors(MAX_DESCRIPTORS + 1))
    );
    assert_eq!(read(b"", 1).1, Err(FrameError::StrayDescriptors(1)));
    // A body owns none.
    let (mut decoder, next) = read(&header(3, 0), 0);
    assert_eq!(next, Ok(None));
    decoder.push(b"ab", with(0..1), false).unwrap();
    assert_eq!(decoder.next_frame(), Err(FrameError::StrayDescriptors(1)));
    let mut decoder: Decoder<u32> = Decoder::default();
    assert_eq!(decoder.push(b"", [], true), Err(FrameError::Truncated));
}

#[test]
fn what_no_frame_was_returned_for_is_given_back_in_order() {
    let (mut decoder, next) = read(&header(3, 2), 2);
    assert_eq!(next, Ok(None));
    decoder.push(b"", with(2..4), false).unwrap();
    assert_eq!(decoder.clear(), [0, 1, 2, 3]);
    assert_eq!(decoder.clear(), [0; 0]);
}
