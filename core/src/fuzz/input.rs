//! Decisions from the bytes of an input.

/// The bytes that are left. Where there are none, every decision is the first one.
#[derive(Clone, Copy)]
pub struct Input<'a>(&'a [u8]);

/// Numbers at which arithmetic goes wrong.
const EDGES: [u64; 8] = [
    u64::MAX,
    u64::MAX - 1,
    1 << 63,
    1 << 48,
    u32::MAX as u64,
    1 << 32,
    1 << 31,
    u16::MAX as u64,
];

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Input<'a> {
        Input(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((&byte, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        byte
    }

    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// One of so many, at most 256.
    pub fn below(&mut self, count: usize) -> usize {
        usize::from(self.byte()) % count.max(1)
    }

    pub fn one_of<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    /// A number of two bytes.
    pub fn short(&mut self) -> u64 {
        u64::from(u16::from_le_bytes([self.byte(), self.byte()]))
    }

    /// Mostly a small number, sometimes one at an edge, and any at all.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            255 => (0..8).fold(0, |number, _| number << 8 | u64::from(self.byte())),
            edge @ 247..=254 => EDGES[usize::from(edge - 247)],
            small => u64::from(small),
        }
    }

    /// The next so many bytes, or what is left.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// Everything that is left.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}
