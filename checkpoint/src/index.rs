//! `model.safetensors.index.json`: which tensor is in which file.

use crate::error::{IndexFault, excerpt};
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fmt;
use std::rc::Rc;
use weightd_core::content::manifest::{MAX_NAME_BYTES, MAX_NAMES};

/// An index; its file names are plain names of the directory that it is in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Index {
    /// The file of every tensor.
    pub(crate) file_of: BTreeMap<String, Rc<str>>,
    files: BTreeSet<Rc<str>>,
}

impl Index {
    pub(crate) fn parse(json: &[u8]) -> Result<Index, IndexFault> {
        #[derive(Deserialize)]
        #[serde(expecting = "a map with weight_map")]
        struct Written {
            weight_map: WeightMap,
        }
        let malformed = |detail| IndexFault::Malformed { detail };
        let json = crate::json::text(json).map_err(malformed)?;
        let Written { weight_map } = serde_json::from_str(json).map_err(|error| malformed(excerpt(error)))?;
        if let Some((tensor, first, second)) = weight_map.twice {
            return Err(IndexFault::NamedTwice {
                tensor,
                first,
                second,
            });
        }
        let WeightMap { file_of, files, .. } = weight_map;
        let index = Index { file_of, files };
        if let Some(file) = index.files().find(|file| !is_plain_name(file)) {
            return Err(IndexFault::NotAPlainName {
                tensor: index.a_tensor_of(file),
                file: excerpt(file),
            });
        }
        if index.file_of.is_empty() {
            return Err(IndexFault::Empty);
        }
        Ok(index)
    }

    /// The files that it names, in the order of their names.
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|file| &**file)
    }

    /// A tensor that is said to be in `file`, which is one of [`files`](Index::files).
    pub(crate) fn a_tensor_of(&self, file: &str) -> String {
        let (tensor, _) = self
            .file_of
            .iter()
            .find(|(_, of)| ***of == *file)
            .expect("a file is named by a tensor");
        tensor.clone()
    }
}

/// Whether `name` can only mean a file in the directory itself, and prints on one line.
fn is_plain_name(name: &str) -> bool {
    let separates = |c: char| c == '/' || c == '\\' || c.is_control();
    !name.is_empty() && name.len() <= 255 && name != "." && name != ".." && !name.contains(separates)
}

/// The map as it is written, its files, and the first name that stands in it twice.
#[derive(Default)]
struct WeightMap {
    file_of: BTreeMap<String, Rc<str>>,
    files: BTreeSet<Rc<str>>,
    twice: Option<(String, String, String)>,
}

impl<'a> Deserialize<'a> for WeightMap {
    fn deserialize<D: Deserializer<'a>>(json: D) -> Result<WeightMap, D::Error> {
        struct Entries;
        impl<'a> Visitor<'a> for Entries {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut read = WeightMap::default();
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if tensor.len() > MAX_NAME_BYTES || file.len() > MAX_NAME_BYTES {
                        return Err(de::Error::custom(format_args!(
                            "a name is longer than {MAX_NAME_BYTES} bytes"
                        )));
                    }
                    if read.file_of.len() == MAX_NAMES {
                        return Err(de::Error::custom(format_args!("more than {MAX_NAMES} tensors")));
                    }
                    match read.file_of.entry(tensor) {
                        Entry::Occupied(first) => {
                            let twice = || (first.key().clone(), first.get().to_string(), file);
                            read.twice.get_or_insert_with(twice);
                        }
                        Entry::Vacant(entry) => {
                            let known = read.files.get(file.as_str()).cloned();
                            let file = known.unwrap_or_else(|| file.into());
                            read.files.insert(entry.insert(file).clone());
                        }
                    }
                }
                Ok(read)
            }
        }
        json.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_index_names_the_file_of_every_tensor() {
        let json = br#"{"metadata":{"total_size":1.5},"weight_map":{"b":"2.safetensors","a":"1.safetensors","c":"2.safetensors"}}"#;
        let index = Index::parse(json).unwrap();
        assert_eq!(
            index.files().collect::<Vec<_>>(),
            ["1.safetensors", "2.safetensors"]
        );
        assert_eq!(&*index.file_of["c"], "2.safetensors");
        assert_eq!(index.a_tensor_of("2.safetensors"), "b");
    }

    #[test]
    fn only_plain_names_are_files() {
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "../a",
            "/a",
            "a\\b",
            "a\0b",
            "a\nb",
            &"a".repeat(256),
        ] {
            assert!(!is_plain_name(name), "{name:?}");
        }
        for name in [
            "model.safetensors",
            "..model",
            "ä b",
            "model-00001-of-00002.safetensors",
        ] {
            assert!(is_plain_name(name), "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in r#"[\[\]{}"a-c:,.0-9\\]{0,60}"#) {
            let _ = Index::parse(text.as_bytes());
            let _ = Index::parse(format!(r#"{{"weight_map":{{{text}}}}}"#).as_bytes());
        }
    }
}
