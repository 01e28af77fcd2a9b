//! What the fuzz target `frame_decoder` runs, here so that its corpus can be replayed by a test.

use crate::peer::{Facts, FileKind};
use crate::wire::frame::{HEADER_BYTES, MAX_BODY, MAX_DESCRIPTORS};
use crate::wire::{Decoder, Frame, FrameError, Message};

/// Decodes a stream as it was cut into reads, and checks that
///
/// * nothing panics, and every message that decodes survives encoding;
/// * the frames are those of the same stream in one read;
/// * every descriptor is in a frame or is given back, in the order of arrival;
/// * no more is kept than a frame may be long.
///
/// `input` starts with a number of cuts; each cut is two bytes, the length of a read and the number
/// of descriptors that come with it. What is left is the stream; past the cuts it is read at once.
pub fn frame_decoder(input: &[u8]) {
    let Some((&cuts, rest)) = input.split_first() else {
        return;
    };
    let (cuts, mut stream) = rest.split_at((2 * usize::from(cuts)).min(rest.len()));
    let whole_stream = stream;
    let mut reads = Vec::new();
    for cut in cuts.chunks_exact(2) {
        let (read, later) = stream.split_at(usize::from(cut[0]).min(stream.len()));
        // Descriptors ride with a byte.
        if !read.is_empty() {
            reads.push((read, u32::from(cut[1])));
            stream = later;
        }
    }
    reads.push((stream, 0));
    let descriptors: u32 = reads.iter().map(|(_, descriptors)| descriptors).sum();
    let (split, split_end) = decode(&reads);
    let (whole, whole_end) = decode(&[(whole_stream, descriptors)]);
    assert!(
        whole.starts_with(&split),
        "a frame does not depend on how it was read"
    );
    if split_end.is_ok() {
        assert_eq!((split.len(), split_end), (whole.len(), whole_end));
    }
    split.iter().for_each(read_message);
}

fn decode(reads: &[(&[u8], u32)]) -> (Vec<Frame<u32>>, Result<(), FrameError>) {
    let facts = Facts {
        file: FileKind::Memory { sealed: true },
        size: 1,
    };
    let mut decoder = Decoder::default();
    let (mut frames, mut arrived) = (Vec::new(), 0);
    let mut end = Ok(());
    for &(bytes, descriptors) in reads {
        let come = (arrived..arrived + descriptors).map(|descriptor| (facts, descriptor));
        arrived += descriptors;
        end = decoder.push(bytes, come, false).and_then(|()| {
            while let Some(frame) = decoder.next_frame()? {
                frames.push(frame);
            }
            Ok(())
        });
        if end.is_err() {
            break;
        }
        assert!(
            decoder.buffered() < HEADER_BYTES + MAX_BODY,
            "what is kept is less than a frame"
        );
    }
    let given_back = decoder.clear();
    assert!(
        end.is_err() || given_back.len() <= MAX_DESCRIPTORS,
        "what is kept belongs to one frame"
    );
    let owned = frames
        .iter()
        .flat_map(|frame: &Frame<u32>| frame.descriptors.iter());
    let all: Vec<u32> = owned
        .map(|(_, descriptor)| *descriptor)
        .chain(given_back)
        .collect();
    assert!(
        all.into_iter().eq(0..arrived),
        "every descriptor is somewhere, once"
    );
    (frames, end)
}

fn read_message(frame: &Frame<u32>) {
    if let Ok(message) = Message::decode(frame.kind, &frame.body) {
        let body = message.encode().expect("what fitted a frame fits one again");
        assert_eq!(Message::decode(message.kind(), &body).as_ref(), Ok(&message));
    }
}
