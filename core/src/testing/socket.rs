//! A Unix stream socket in memory, and the chaos that a kernel may make of it.

use crate::peer::Facts;
use crate::testing::ledger::Fd;
use std::collections::VecDeque;

/// A small generator, so that a seed tells the whole story.
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % below.max(1) as u64) as usize
    }
}

/// What one write put in: descriptors ride with its first byte.
#[derive(Debug)]
struct Segment {
    bytes: VecDeque<u8>,
    descriptors: Vec<Fd>,
}

/// One direction.
#[derive(Debug)]
pub struct Pipe {
    segments: VecDeque<Segment>,
    pub capacity: usize,
    /// The writer is gone.
    pub ended: bool,
    /// The reader is gone.
    pub broken: bool,
}

impl Pipe {
    pub fn new(capacity: usize) -> Pipe {
        Pipe {
            segments: VecDeque::new(),
            capacity,
            ended: false,
            broken: false,
        }
    }

    pub fn room(&self) -> usize {
        self.capacity
            .saturating_sub(self.segments.iter().map(|segment| segment.bytes.len()).sum())
    }

    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    pub fn write(&mut self, bytes: &[u8], descriptors: Vec<Fd>) {
        assert!(!bytes.is_empty(), "descriptors need a byte to ride with");
        self.segments.push_back(Segment {
            bytes: bytes.iter().copied().collect(),
            descriptors,
        });
    }

    /// One `recvmsg`: it merges segments, but stops after one with descriptors.
    pub fn read(&mut self, most: usize) -> (Vec<u8>, Vec<(Facts, Fd)>) {
        let (mut bytes, mut descriptors) = (Vec::new(), Vec::new());
        while bytes.len() < most && descriptors.is_empty() {
            let Some(segment) = self.segments.front_mut() else {
                break;
            };
            descriptors.extend(segment.descriptors.drain(..).map(|fd| (fd.facts, fd)));
            let take = segment.bytes.len().min(most - bytes.len());
            bytes.extend(segment.bytes.drain(..take));
            if segment.bytes.is_empty() {
                self.segments.pop_front();
            }
        }
        (bytes, descriptors)
    }

    /// The reader closes: what it did not read is gone.
    pub fn break_off(&mut self) {
        self.broken = true;
        self.segments.clear();
    }
}
