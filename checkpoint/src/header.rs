//! The header of a safetensors file (<https://github.com/huggingface/safetensors#format>).
//!
//! The `safetensors` crate reads headers too, but into a hash map, so that of two tensors with one
//! name the last wins, and its errors carry no numbers. So the header is parsed here; tests hold
//! that the crate accepts the layouts that are accepted here.

use crate::error::{CheckpointError, HeaderFault, excerpt};
use crate::files::SourceFile;
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use weightd_core::content::Dtype;
use weightd_core::content::manifest::{MAX_DIMS, MAX_NAME_BYTES, MAX_NAMES};
use weightd_core::text::cut;

/// Where one tensor of the checkpoint is stored. Its range lies inside the file, `bytes` is what
/// `shape` and `dtype` take, and no two tensors overlap: [`Checkpoint::open`](crate::Checkpoint::open)
/// has checked it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Index into [`Checkpoint::files`](crate::Checkpoint::files).
    pub file: usize,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Elements per dimension, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
}

/// The longest header that the format allows, in bytes (`MAX_HEADER_SIZE` of the reference
/// implementation).
const HEADER_CAP: u64 = 100_000_000;
/// The most elements of a tensor: of any type, 64 bits count their bits.
const ELEMENTS_CAP: u64 = u64::MAX / 64;
/// The length of the length that a file begins with.
const LENGTH_BYTES: u64 = 8;

/// Reads and checks the header of `file`, which is number `number` of its checkpoint: its tensors
/// in the order in which they are stored.
pub(crate) fn read(
    file: &mut SourceFile,
    number: usize,
) -> Result<Vec<(String, StoredTensor)>, CheckpointError> {
    let path = file.path.clone();
    let fault = |fault| CheckpointError::Header {
        path: path.clone(),
        fault,
    };
    let data_start = LENGTH_BYTES + header_bytes(file)?.map_err(fault)?;
    let first = file.read_first(data_start)?;
    if first[..LENGTH_BYTES as usize] != (data_start - LENGTH_BYTES).to_le_bytes() {
        return Err(file.changed(file.bytes));
    }
    let mut tensors = parse(&first[LENGTH_BYTES as usize..], file.bytes - data_start).map_err(fault)?;
    for (_, tensor) in &mut tensors {
        tensor.file = number;
        tensor.offset += data_start; // Inside the file, so this cannot overflow.
    }
    Ok(tensors)
}

/// The length that the file begins with: there are as many bytes behind it, and no more than a header
/// may have.
fn header_bytes(file: &SourceFile) -> Result<Result<u64, HeaderFault>, CheckpointError> {
    let truncated = |needed| HeaderFault::Truncated {
        needed,
        found: file.bytes,
    };
    if file.bytes < LENGTH_BYTES {
        return Ok(Err(truncated(LENGTH_BYTES)));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact_at(&mut length, 0)?;
    let bytes = u64::from_le_bytes(length);
    Ok(match LENGTH_BYTES.checked_add(bytes) {
        _ if bytes > HEADER_CAP => Err(HeaderFault::Oversized {
            bytes,
            cap: HEADER_CAP,
        }),
        Some(needed) if needed > file.bytes => Err(truncated(needed)),
        _ => Ok(bytes),
    })
}

/// The tensors of a header, in the order in which they are stored; offsets count from the start of
/// the `data` bytes of data.
fn parse(header: &[u8], data: u64) -> Result<Vec<(String, StoredTensor)>, HeaderFault> {
    let mut tensors = entries(header, data)?;
    check_names(&tensors)?;
    tensors.sort_by_key(|(_, stored)| (stored.offset, stored.bytes));
    check_layout(&tensors, data)?;
    Ok(tensors)
}

/// Checks what can be told of one tensor alone.
fn check_entry(tensor: &str, entry: Entry<'_>, data: u64) -> Result<StoredTensor, HeaderFault> {
    let name = || tensor.to_owned();
    let Some(dtype) = Dtype::from_name(&entry.dtype) else {
        return Err(HeaderFault::UnknownDtype {
            tensor: name(),
            dtype: excerpt(entry.dtype),
        });
    };
    let Numbers(offsets) = entry.data_offsets;
    let [begin, end] = offsets[..] else {
        let detail = format!("data_offsets are {} numbers, not 2", offsets.len());
        return Err(HeaderFault::BadEntry {
            tensor: name(),
            detail,
        });
    };
    let Some(bytes) = end.checked_sub(begin) else {
        return Err(HeaderFault::Backwards {
            tensor: name(),
            begin,
            end,
        });
    };
    if end > data {
        return Err(HeaderFault::OutOfRange {
            tensor: name(),
            begin,
            end,
            data,
        });
    }
    let Numbers(shape) = entry.shape;
    let product = |least: u64| {
        let mut sizes = shape.iter().map(|&dim| dim.max(least));
        sizes.try_fold(1u64, |product, dim| product.checked_mul(dim))
    };
    // The sizes beside a zero count too: strides and parts are made of them.
    let elements = product(0).filter(|_| product(1).is_some_and(|most| most <= ELEMENTS_CAP));
    let needed = elements.and_then(|elements| dtype.bytes(elements));
    if needed != Some(bytes) {
        return Err(HeaderFault::WrongSize {
            tensor: name(),
            shape,
            dtype,
            needed,
            begin,
            end,
        });
    }
    // Types narrower than a byte are packed, and begin at any.
    let width = (dtype.bits() / 8).max(1);
    if !begin.is_multiple_of(width) {
        return Err(HeaderFault::Misaligned {
            tensor: name(),
            begin,
            dtype,
            width,
        });
    }
    Ok(StoredTensor {
        file: 0,
        offset: begin,
        bytes,
        dtype,
        shape,
    })
}

fn check_names(tensors: &[(String, StoredTensor)]) -> Result<(), HeaderFault> {
    let mut seen = HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|(tensor, _)| !seen.insert(tensor.as_str())) {
        Some((tensor, _)) => Err(HeaderFault::Duplicate {
            tensor: tensor.clone(),
        }),
        None => Ok(()),
    }
}

/// Checks that the tensors, sorted by offset, fill the data without overlap, hole or rest, as the
/// format demands.
fn check_layout(tensors: &[(String, StoredTensor)], data: u64) -> Result<(), HeaderFault> {
    let (mut end, mut before) = (0, None);
    for (tensor, stored) in tensors {
        let begin = stored.offset;
        if begin > end {
            return Err(HeaderFault::Hole {
                tensor: tensor.clone(),
                from: end,
                begin,
            });
        }
        if let (true, Some(other)) = (begin < end, before) {
            let (tensor, other) = (tensor.clone(), String::clone(other));
            return Err(HeaderFault::Overlap {
                tensor,
                begin,
                other,
                end,
            });
        }
        (end, before) = (begin + stored.bytes, Some(tensor));
    }
    if end < data {
        return Err(HeaderFault::TrailingBytes { from: end, data });
    }
    Ok(())
}

/// One tensor, as it is written.
#[derive(Deserialize)]
#[serde(expecting = "a map of these")]
struct Entry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Numbers,
    data_offsets: Numbers,
}

/// Reads the JSON of a header, and checks each tensor as it comes: of what is written, no more is kept than
/// is needed.
fn entries(header: &[u8], data: u64) -> Result<Vec<(String, StoredTensor)>, HeaderFault> {
    if header.first() != Some(&b'{') {
        return Err(HeaderFault::NotJson {
            detail: "it does not begin with {".to_owned(),
        });
    }
    let header = crate::json::text(header).map_err(|detail| HeaderFault::NotJson { detail })?;
    let mut reading = Reading {
        data,
        tensors: Vec::new(),
        at: None,
        fault: None,
    };
    let mut json = serde_json::Deserializer::from_str(header);
    let result = reading.deserialize(&mut json).and_then(|()| json.end());
    let detail = match (result, reading.fault) {
        (Ok(()), _) => return Ok(reading.tensors),
        (Err(_), Some(fault)) => return Err(fault),
        (Err(error), None) if error.is_data() => excerpt(error),
        (Err(error), None) => {
            return Err(HeaderFault::NotJson {
                detail: excerpt(error),
            });
        }
    };
    Err(match reading.at {
        Some(name) if name == METADATA => HeaderFault::BadMetadata { detail },
        Some(tensor) => HeaderFault::BadEntry { tensor, detail },
        None => HeaderFault::NotJson { detail },
    })
}

/// The key beside the tensors' names, under which a file keeps texts of its own.
const METADATA: &str = "__metadata__";

/// Collects tensors, twice the same name included, and remembers at which it failed and why.
struct Reading {
    /// How many bytes of data there are.
    data: u64,
    tensors: Vec<(String, StoredTensor)>,
    at: Option<String>,
    fault: Option<HeaderFault>,
}

impl<'a> DeserializeSeed<'a> for &mut Reading {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'a> Visitor<'a> for &mut Reading {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tensor names")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name.len() > MAX_NAME_BYTES {
                self.at = Some(cut(&name, 200).to_owned());
                return Err(de::Error::custom(format_args!(
                    "its name is longer than {MAX_NAME_BYTES} bytes"
                )));
            }
            let name = self.at.insert(name);
            if name == METADATA {
                map.next_value::<Option<Texts>>()?;
            } else {
                let entry = map.next_value()?;
                let checked = match self.tensors.len() {
                    MAX_NAMES => Err(HeaderFault::TooMany { cap: MAX_NAMES }),
                    _ => check_entry(name, entry, self.data),
                };
                match checked {
                    Ok(stored) => self.tensors.push((std::mem::take(name), stored)),
                    Err(fault) => {
                        self.fault = Some(fault);
                        return Err(de::Error::custom("see the fault"));
                    }
                }
            }
            self.at = None;
        }
        Ok(())
    }
}

/// A map of texts, which nobody reads.
struct Texts;

impl<'a> Deserialize<'a> for Texts {
    fn deserialize<D: Deserializer<'a>>(json: D) -> Result<Texts, D::Error> {
        struct Map;
        impl<'a> Visitor<'a> for Map {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of texts")
            }

            fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Texts, A::Error> {
                while map.next_entry::<Text, Text>()?.is_some() {}
                Ok(Texts)
            }
        }
        json.deserialize_map(Map)
    }
}

/// A text that was read over.
struct Text;

impl<'a> Deserialize<'a> for Text {
    fn deserialize<D: Deserializer<'a>>(json: D) -> Result<Text, D::Error> {
        struct Any;
        impl<'a> Visitor<'a> for Any {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: de::Error>(self, _: &str) -> Result<Text, E> {
                Ok(Text)
            }
        }
        json.deserialize_str(Any)
    }
}

/// A list of at most [`MAX_DIMS`] numbers.
struct Numbers(Vec<u64>);

impl<'a> Deserialize<'a> for Numbers {
    fn deserialize<D: Deserializer<'a>>(json: D) -> Result<Numbers, D::Error> {
        struct List;
        impl<'a> Visitor<'a> for List {
            type Value = Numbers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of whole numbers")
            }

            fn visit_seq<A: SeqAccess<'a>>(self, mut list: A) -> Result<Numbers, A::Error> {
                let mut numbers = Vec::new();
                while let Some(number) = list.next_element()? {
                    if numbers.len() == MAX_DIMS {
                        return Err(de::Error::custom(format_args!("more than {MAX_DIMS} numbers")));
                    }
                    numbers.push(number);
                }
                Ok(Numbers(numbers))
            }
        }
        json.deserialize_seq(List)
    }
}

/// Parses the bytes of a file, and checks what the types promise.
#[cfg(any(test, feature = "fuzz"))]
pub fn fuzz_header(file: &[u8]) {
    let Some((length, rest)) = file.split_first_chunk() else {
        return;
    };
    let Some((header, data)) = usize::try_from(u64::from_le_bytes(*length))
        .ok()
        .and_then(|length| rest.split_at_checked(length))
    else {
        return;
    };
    let Ok(tensors) = parse(header, data.len() as u64) else {
        return;
    };
    let mut end = 0;
    for (_, stored) in &tensors {
        assert_eq!(stored.offset, end, "tensors follow one another");
        assert_eq!(
            stored.dtype.bytes(stored.shape.iter().product()),
            Some(stored.bytes),
            "a shape fits its bytes"
        );
        end += stored.bytes;
    }
    assert_eq!(end, data.len() as u64, "tensors fill the data");
    use safetensors::{SafeTensorError, SafeTensors};
    match SafeTensors::deserialize(file) {
        // It reads more of fields that the format does not have, and so may stumble over them.
        Ok(_) | Err(SafeTensorError::InvalidHeaderDeserialization(_)) => {}
        Err(error) => panic!("the reference implementation refuses it: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    const VALID: &str = r#"{"__metadata__":{"format":"pt"},
        "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
        "scalar":{"dtype":"I64","shape":[],"data_offsets":[24,32]},
        "empty":{"dtype":"BF16","shape":[0,7],"data_offsets":[32,32]},
        "b\u00e9":{"dtype":"F4","shape":[4],"data_offsets":[32,34]}}   "#;

    #[test]
    fn tensors_come_in_stored_order_with_their_shapes() {
        let tensors = parse(VALID.as_bytes(), 34).unwrap();
        let names: Vec<_> = tensors.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a", "scalar", "empty", "bé"]);
        assert_eq!(tensors[0].1.shape, [2, 3]);
        assert_eq!(
            (tensors[3].1.offset, tensors[3].1.bytes, tensors[3].1.dtype),
            (32, 2, Dtype::F4)
        );
        fuzz_header(&file(VALID, 34));
    }

    #[test]
    fn a_shape_that_overflows_is_a_wrong_size() {
        for shape in [
            "4294967296,4294967296",
            "0,4294967296,4294967296",
            "4611686018427387904,0",
        ] {
            let header = format!(r#"{{"a":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,0]}}}}"#);
            let fault = parse(header.as_bytes(), 0).unwrap_err();
            assert!(
                matches!(fault, HeaderFault::WrongSize { needed: None, .. }),
                "{fault}"
            );
        }
    }

    #[test]
    fn no_more_dimensions_are_kept_than_a_tensor_can_have() {
        let dims = |n| {
            format!(
                r#"{{"a":{{"dtype":"U8","shape":[{}],"data_offsets":[0,1]}}}}"#,
                vec!["1"; n].join(",")
            )
        };
        assert_eq!(
            parse(dims(MAX_DIMS).as_bytes(), 1).unwrap()[0].1.shape.len(),
            MAX_DIMS
        );
        let fault = parse(dims(MAX_DIMS + 1).as_bytes(), 1).unwrap_err();
        assert!(fault.to_string().contains("more than 8 numbers"), "{fault}");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            fuzz_header(&bytes);
            fuzz_header(&file(&String::from_utf8_lossy(&bytes), bytes.len()));
        }

        #[test]
        fn mutated_headers_never_panic(
            edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
            digits in proptest::collection::vec((any::<proptest::sample::Index>(), b'0'..=b'9'), 0..4),
            data in 0usize..64,
        ) {
            let mut header = VALID.as_bytes().to_vec();
            for (at, byte) in &edits {
                let at = at.index(header.len());
                header[at] = *byte;
            }
            // Digits for digits: headers that are still JSON, with other numbers.
            let numbers: Vec<_> = (0..header.len()).filter(|&i| header[i].is_ascii_digit()).collect();
            for (at, digit) in &digits {
                if !numbers.is_empty() { header[*at.get(&numbers)] = *digit; }
            }
            let _ = parse(&header, data as u64);
            let mut whole = (header.len() as u64).to_le_bytes().to_vec();
            whole.extend_from_slice(&header);
            whole.resize(whole.len() + data, 0);
            fuzz_header(&whole);
        }

        #[test]
        fn what_the_reference_implementation_writes_is_read_alike(
            shapes in proptest::collection::btree_map("[a-z.]{1,8}", (0usize..5, proptest::collection::vec(0usize..4, 0..4)), 0..6),
        ) {
            use safetensors::{Dtype as D, tensor::TensorView};
            let bytes = vec![7u8; 64 * 8];
            let types = [(D::U8, 1), (D::BF16, 2), (D::F32, 4), (D::F64, 8), (D::BOOL, 1)];
            let views: Vec<_> = shapes.iter().map(|(name, (dtype, shape))| {
                let (dtype, width) = types[*dtype];
                let length = shape.iter().product::<usize>() * width;
                (name.clone(), TensorView::new(dtype, shape.clone(), &bytes[..length]).unwrap())
            }).collect();
            let written = safetensors::serialize(views.clone(), None).unwrap();
            fuzz_header(&written);
            let header = u64::from_le_bytes(written[..8].try_into().unwrap()) as usize;
            let tensors: BTreeMap<_, _> = parse(&written[8..8 + header], (written.len() - 8 - header) as u64).unwrap().into_iter().collect();
            prop_assert_eq!(tensors.len(), views.len());
            for (name, view) in &views {
                prop_assert_eq!(tensors[name].dtype.name(), view.dtype().to_string());
                let shape: Vec<u64> = view.shape().iter().map(|&dim| dim as u64).collect();
                prop_assert_eq!(&tensors[name].shape, &shape);
            }
        }
    }
}
