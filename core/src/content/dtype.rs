//! Element types, under the names that safetensors gives them.

/// The element type of a tensor.
///
/// Names and widths are those of the safetensors format
/// (<https://github.com/huggingface/safetensors>, `Dtype`). The numbers are the wire's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(non_camel_case_types, missing_docs)]
#[repr(u8)]
pub enum Dtype {
    BOOL = 0,
    F4 = 1,
    F6_E2M3 = 2,
    F6_E3M2 = 3,
    U8 = 4,
    I8 = 5,
    F8_E5M2 = 6,
    F8_E4M3 = 7,
    F8_E8M0 = 8,
    F8_E4M3FNUZ = 9,
    F8_E5M2FNUZ = 10,
    I16 = 11,
    U16 = 12,
    F16 = 13,
    BF16 = 14,
    I32 = 15,
    U32 = 16,
    F32 = 17,
    C64 = 18,
    F64 = 19,
    I64 = 20,
    U64 = 21,
}

impl Dtype {
    /// Every element type, in the order of their wire numbers.
    pub const ALL: [Dtype; 22] = [
        Dtype::BOOL,
        Dtype::F4,
        Dtype::F6_E2M3,
        Dtype::F6_E3M2,
        Dtype::U8,
        Dtype::I8,
        Dtype::F8_E5M2,
        Dtype::F8_E4M3,
        Dtype::F8_E8M0,
        Dtype::F8_E4M3FNUZ,
        Dtype::F8_E5M2FNUZ,
        Dtype::I16,
        Dtype::U16,
        Dtype::F16,
        Dtype::BF16,
        Dtype::I32,
        Dtype::U32,
        Dtype::F32,
        Dtype::C64,
        Dtype::F64,
        Dtype::I64,
        Dtype::U64,
    ];

    /// The width of one element in bits (4, 6, 8, 16, 32 or 64).
    pub const fn bits(self) -> u64 {
        use Dtype::*;
        match self {
            F4 => 4,
            F6_E2M3 | F6_E3M2 => 6,
            BOOL | U8 | I8 | F8_E5M2 | F8_E4M3 | F8_E8M0 | F8_E4M3FNUZ | F8_E5M2FNUZ => 8,
            I16 | U16 | F16 | BF16 => 16,
            I32 | U32 | F32 => 32,
            C64 | F64 | I64 | U64 => 64,
        }
    }

    /// The bytes that `elements` packed elements take; `None` on overflow, or where they do not
    /// fill whole bytes.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// The safetensors name, for example `BF16`.
    pub fn name(self) -> &'static str {
        use Dtype::*;
        match self {
            BOOL => "BOOL",
            F4 => "F4",
            F6_E2M3 => "F6_E2M3",
            F6_E3M2 => "F6_E3M2",
            U8 => "U8",
            I8 => "I8",
            F8_E5M2 => "F8_E5M2",
            F8_E4M3 => "F8_E4M3",
            F8_E8M0 => "F8_E8M0",
            F8_E4M3FNUZ => "F8_E4M3FNUZ",
            F8_E5M2FNUZ => "F8_E5M2FNUZ",
            I16 => "I16",
            U16 => "U16",
            F16 => "F16",
            BF16 => "BF16",
            I32 => "I32",
            U32 => "U32",
            F32 => "F32",
            C64 => "C64",
            F64 => "F64",
            I64 => "I64",
            U64 => "U64",
        }
    }

    /// The type with this safetensors name.
    pub fn from_name(name: &str) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// The type with this wire number.
    pub fn from_number(number: u8) -> Option<Dtype> {
        Dtype::ALL.get(usize::from(number)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_come_back() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            assert_eq!(Dtype::from_number(dtype as u8), Some(dtype));
        }
        assert_eq!(Dtype::from_number(22), None);
        assert_eq!(Dtype::from_name("bf16"), None);
    }

    #[test]
    fn packed_elements_must_fill_bytes() {
        assert_eq!(Dtype::F4.bytes(2), Some(1));
        assert_eq!(Dtype::F4.bytes(3), None);
        assert_eq!(Dtype::F6_E2M3.bytes(4), Some(3));
        assert_eq!(Dtype::U64.bytes(u64::MAX), None);
    }
}
