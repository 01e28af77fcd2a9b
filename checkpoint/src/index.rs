//! `model.safetensors.index.json`: which tensor is in which file.

use crate::error::{IndexFault, excerpt};
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use weightd_core::content::manifest::MAX_NAME_BYTES;

/// An index; its file names are plain names of the directory that it is in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Index {
    /// The file of every tensor.
    pub(crate) file_of: BTreeMap<String, String>,
}

impl Index {
    pub(crate) fn parse(json: &[u8]) -> Result<Index, IndexFault> {
        #[derive(Deserialize)]
        #[serde(expecting = "a map with weight_map")]
        struct Written {
            weight_map: WeightMap,
        }
        let Written { weight_map } = serde_json::from_slice(json).map_err(|error| IndexFault::Malformed {
            detail: excerpt(error),
        })?;
        if let Some((tensor, first, second)) = weight_map.twice {
            return Err(IndexFault::NamedTwice {
                tensor,
                first,
                second,
            });
        }
        let file_of = weight_map.file_of;
        if let Some((tensor, file)) = file_of.iter().find(|(_, file)| !is_plain_name(file)) {
            return Err(IndexFault::NotAPlainName {
                tensor: tensor.clone(),
                file: excerpt(file),
            });
        }
        if file_of.is_empty() {
            return Err(IndexFault::Empty);
        }
        Ok(Index { file_of })
    }

    /// The files that it names, in the order of their names.
    pub(crate) fn files(&self) -> BTreeSet<&str> {
        self.file_of.values().map(String::as_str).collect()
    }

    /// A tensor that is said to be in `file`, which is one of [`files`](Index::files).
    pub(crate) fn a_tensor_of(&self, file: &str) -> String {
        let (tensor, _) = self
            .file_of
            .iter()
            .find(|(_, of)| *of == file)
            .expect("a file is named by a tensor");
        tensor.clone()
    }
}

/// Whether `name` can only mean a file in the directory itself, and prints on one line.
fn is_plain_name(name: &str) -> bool {
    let separates = |c: char| c == '/' || c == '\\' || c.is_control();
    !name.is_empty() && name.len() <= 255 && name != "." && name != ".." && !name.contains(separates)
}

/// The map as it is written, and the first name that stands in it twice.
struct WeightMap {
    file_of: BTreeMap<String, String>,
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
                let (mut file_of, mut twice) = (BTreeMap::new(), None);
                while let Some((tensor, file)) = map.next_entry::<String, String>()? {
                    if tensor.len() > MAX_NAME_BYTES || file.len() > MAX_NAME_BYTES {
                        return Err(de::Error::custom(format_args!(
                            "a name is longer than {MAX_NAME_BYTES} bytes"
                        )));
                    }
                    if let Some(first) = file_of.insert(tensor.clone(), file.clone()) {
                        twice.get_or_insert((tensor, first, file));
                    }
                }
                Ok(WeightMap { file_of, twice })
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
            index.files().into_iter().collect::<Vec<_>>(),
            ["1.safetensors", "2.safetensors"]
        );
        assert_eq!(index.file_of["c"], "2.safetensors");
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
