//! Bodies of messages.

use crate::content::{Comparison, HandleKind};
use crate::machine::check_descriptors;
use crate::peer::{Facts, FileKind};
use crate::wire::Message;
use crate::wire::frame::MAX_BODY;
use crate::wire::message::{ContentInfo, ErrorCode, MessageError};

/// Reads `body` as a message of every kind, and checks that
///
/// * nothing panics, and what decodes encodes to a body that means the same, and that fits a frame where this one did;
/// * no beginning of that body is a message too, nor is the body with a byte more;
/// * the descriptors that a message with content announces are taken, and no others.
pub fn message(body: &[u8]) {
    for &kind in Message::KINDS {
        match Message::decode(kind, body) {
            Ok(message) => {
                assert_eq!(message.kind(), kind);
                survives(&message, body);
                means_something(&message);
            }
            Err(MessageError::Malformed { bytes, .. }) => assert_eq!(bytes, body.len()),
            Err(error) => panic!("a body is malformed or is not: {error}"),
        }
    }
    let unknown = Message::decode(0, body);
    assert_eq!(unknown, Err(MessageError::UnknownKind(0)));
}

fn survives(message: &Message, body: &[u8]) {
    let again = match message.encode() {
        Ok(again) => again,
        Err(error) => {
            assert!(
                matches!(error, MessageError::TooLong { .. }) && body.len() > MAX_BODY,
                "what fitted a frame fits one again: {error}"
            );
            return;
        }
    };
    assert!(again.len() <= MAX_BODY);
    let decode = |body: &[u8]| Message::decode(message.kind(), body);
    assert_eq!(decode(&again).as_ref(), Ok(message));
    if let Some((_, shorter)) = again.split_last() {
        assert!(decode(shorter).is_err() && decode(&again[..again.len() / 2]).is_err());
    }
    assert!(decode(&[again.as_slice(), &[0]].concat()).is_err());
}

fn means_something(message: &Message) {
    match message {
        Message::Failure(failure) => {
            assert_eq!(ErrorCode::from_number(failure.code).number(), failure.code);
        }
        Message::GetState(ask) => {
            let own = ask.key.compare(&ask.key);
            assert!(
                !matches!(own, Comparison::Different(_)),
                "a key does not differ from itself"
            );
        }
        Message::Publish(publish) => takes_what_it_announces(&publish.content),
        Message::State(state) => takes_what_it_announces(&state.content),
        _ => {}
    }
}

fn takes_what_it_announces(content: &ContentInfo) {
    let sealed = |size| Facts {
        file: FileKind::Memory { sealed: true },
        size,
    };
    let regions = content.regions.iter().filter_map(|region| match region.handle {
        HandleKind::Memfd => Some(sealed(region.bytes)),
        HandleKind::CudaFd => Some(Facts {
            file: FileKind::CharDevice { major: 195 },
            size: 0,
        }),
        HandleKind::CudaIpc => None,
    });
    let mut facts: Vec<Facts> = std::iter::once(sealed(content.manifest_bytes))
        .chain(regions)
        .collect();
    let is_within_caps = content.regions.len() <= 15 && content.manifest_bytes <= 256 << 20;
    assert_eq!(check_descriptors(content, facts.iter()).is_ok(), is_within_caps);
    facts.push(sealed(0));
    assert!(
        check_descriptors(content, facts.iter()).is_err(),
        "one is too many"
    );
    facts.pop();
    let last = facts.pop().expect("the manifest's at least");
    assert!(
        check_descriptors(content, facts.iter()).is_err(),
        "one is missing"
    );
    facts.push(Facts {
        file: FileKind::Other,
        ..last
    });
    assert!(
        check_descriptors(content, facts.iter()).is_err(),
        "one is of another kind"
    );
}
