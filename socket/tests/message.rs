//! Bytes and descriptors arrive whole or as a typed error, and no descriptor leaks.

mod common;

use common::*;
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weightd_core::peer::{Facts, FileKind};
use weightd_socket::connect::pair;
use weightd_socket::message::{MAX_DESCRIPTORS, ReceiveError, Received, SendError, receive, send};

fn sizes(received: &[(Facts, OwnedFd)]) -> Vec<u64> {
    received.iter().map(|(facts, _)| facts.size).collect()
}

#[test]
fn sixteen_descriptors_arrive_in_order_with_their_facts_and_close_on_exec() {
    let (ours, theirs) = pair().unwrap();
    let memories: Vec<_> = (1..=16).map(memory).collect();
    let borrowed: Vec<_> = memories.iter().map(AsFd::as_fd).collect();
    assert_eq!(send(&ours, b"hello", &borrowed).unwrap(), 5);
    let (mut buffer, mut received) = ([0; 64], Vec::new());
    let message = receive(&theirs, &mut buffer, &mut received).unwrap();
    assert_eq!(
        message,
        Received {
            bytes: 5,
            truncated: false
        }
    );
    assert_eq!(&buffer[..5], b"hello");
    assert_eq!(sizes(&received), (1..=16).collect::<Vec<_>>());
    for (facts, descriptor) in &received {
        assert_eq!(facts.file, FileKind::Memory { sealed: true });
        assert!(fcntl_getfd(descriptor).unwrap().contains(FdFlags::CLOEXEC));
    }
}

#[test]
fn seventeen_descriptors_and_descriptors_without_a_byte_are_refused_untried() {
    let (ours, theirs) = pair().unwrap();
    let memory = memory(1);
    let many = [memory.as_fd(); MAX_DESCRIPTORS + 1];
    assert!(matches!(
        send(&ours, b"x", &many),
        Err(SendError::TooManyDescriptors { count: 17 })
    ));
    assert!(matches!(
        send(&ours, b"", &many[..1]),
        Err(SendError::NothingToCarry)
    ));
    assert_eq!(send(&ours, b"", &[]).unwrap(), 0);
    assert!(matches!(
        receive(&theirs, &mut [0], &mut Vec::new()),
        Err(ReceiveError::WouldBlock)
    ));
}

#[test]
fn descriptors_come_with_the_first_byte_of_a_message_that_is_read_in_pieces() {
    let (ours, theirs) = pair().unwrap();
    send(&ours, b"abc", &[memory(1).as_fd(), memory(2).as_fd()]).unwrap();
    send(&ours, b"d", &[memory(3).as_fd()]).unwrap();
    let mut seen = Vec::new();
    for _ in 0..4 {
        let (mut byte, mut received) = ([0], Vec::new());
        receive(&theirs, &mut byte, &mut received).unwrap();
        seen.push((byte[0], sizes(&received)));
    }
    assert_eq!(
        seen,
        [
            (b'a', vec![1, 2]),
            (b'b', vec![]),
            (b'c', vec![]),
            (b'd', vec![3])
        ]
    );
}

#[test]
fn descriptors_of_several_messages_are_appended_and_none_is_lost() {
    let (ours, theirs) = pair().unwrap();
    for size in 1..=5 {
        send(&ours, b"ab", &[memory(size).as_fd()]).unwrap();
    }
    let (mut bytes, mut received) = (0, Vec::new());
    while bytes < 10 {
        bytes += receive(&theirs, &mut [0; 64], &mut received).unwrap().bytes;
    }
    assert_eq!(sizes(&received), [1, 2, 3, 4, 5]);
}

#[test]
fn after_a_partial_write_the_descriptors_are_on_their_way() {
    let (ours, theirs) = pair().unwrap();
    let bytes = vec![7; 16 << 20];
    let written = send(&ours, &bytes, &[memory(9).as_fd()]).unwrap();
    assert!(written < bytes.len());
    assert!(matches!(
        send(&ours, &bytes[written..], &[]),
        Err(SendError::WouldBlock)
    ));
    let (mut buffer, mut received) = (vec![0; 1 << 20], Vec::new());
    let mut read = 0;
    while read < written {
        read += receive(&theirs, &mut buffer, &mut received).unwrap().bytes;
    }
    assert_eq!(read, written);
    assert_eq!(sizes(&received), [9]);
}

#[test]
fn the_end_is_zero_bytes_and_a_reset_is_an_error_of_its_own() {
    let (ours, theirs) = pair().unwrap();
    send(&ours, b"last", &[]).unwrap();
    drop(ours);
    let mut buffer = [0; 64];
    assert_eq!(receive(&theirs, &mut buffer, &mut Vec::new()).unwrap().bytes, 4);
    let end = Received {
        bytes: 0,
        truncated: false,
    };
    assert_eq!(receive(&theirs, &mut buffer, &mut Vec::new()).unwrap(), end);

    let (ours, theirs) = pair().unwrap();
    send(&theirs, b"never read", &[]).unwrap();
    drop(ours);
    assert!(matches!(
        receive(&theirs, &mut buffer, &mut Vec::new()),
        Err(ReceiveError::Closed)
    ));
}

#[test]
fn sending_to_a_closed_peer_is_an_error_and_no_signal() {
    let signalled = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGPIPE, Arc::clone(&signalled)).unwrap();
    let (ours, theirs) = pair().unwrap();
    drop(theirs);
    assert!(matches!(
        send(&ours, b"x", &[memory(1).as_fd()]),
        Err(SendError::Closed)
    ));
    assert!(!signalled.load(Ordering::SeqCst));
    // The handler does see the signal that a send without the flag raises.
    sendmsg(
        &ours,
        &[IoSlice::new(b"x")],
        &mut SendAncillaryBuffer::default(),
        SendFlags::empty(),
    )
    .unwrap_err();
    assert!(signalled.load(Ordering::SeqCst));
}

#[test]
fn more_descriptors_than_there_is_room_for_are_reported_as_truncated() {
    let (ours, theirs) = pair().unwrap();
    let memory = memory(1);
    send_unchecked(&ours, &[memory.as_fd(); 17]);
    let mut received = Vec::new();
    assert!(!receive(&theirs, &mut [0], &mut received).unwrap().truncated);
    assert_eq!(received.len(), 17, "one too many is seen as that");
    for count in [64, 253] {
        send_unchecked(&ours, &vec![memory.as_fd(); count]);
        received.clear();
        let message = receive(&theirs, &mut [0], &mut received).unwrap();
        assert_eq!(
            message,
            Received {
                bytes: 1,
                truncated: true
            }
        );
        assert!(
            (32..count).contains(&received.len()),
            "{} arrived",
            received.len()
        );
    }
}
