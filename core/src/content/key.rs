//! The key: does a daemon's content belong to this engine?

use super::{Difference, Role, difference};
use serde::{Deserialize, Serialize};
use speedy::{Endianness, Readable, Writable};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Which bytes a checkpoint consists of, as far as one side knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Readable, Writable)]
pub struct CheckpointId {
    /// The sum of the sizes of all weight files and of `config.json`, in bytes.
    pub bytes: u64,
    /// A hash over file system, device, inode, size, mtime and ctime of every file; absent where the file
    /// system does not keep those honestly, or a file may be written just now.
    pub files: Option<[u8; 32]>,
    /// The digest of the bytes; absent until it was computed.
    pub digest: Option<[u8; 32]>,
}

impl CheckpointId {
    /// Whether two sides speak of the same bytes.
    fn compare(&self, other: &CheckpointId) -> Ternary {
        if self.bytes != other.bytes {
            return Ternary::No;
        }
        if let (Some(ours), Some(theirs)) = (self.digest, other.digest) {
            return if ours == theirs { Ternary::Yes } else { Ternary::No };
        }
        match (self.files, other.files) {
            (Some(ours), Some(theirs)) if ours == theirs => Ternary::Yes,
            _ => Ternary::Unknown,
        }
    }

    /// What tells it from another one, for a person.
    fn unlike(&self, other: &CheckpointId) -> String {
        if self.bytes != other.bytes {
            format!("{} bytes", self.bytes)
        } else if self.digest != other.digest {
            format!("digest {}", Value::Hash(self.digest))
        } else {
            format!("files {}", Value::Hash(self.files))
        }
    }
}

enum Ternary {
    Yes,
    No,
    Unknown,
}

/// Everything that decides whether content may be used, taken before loading from configuration
/// and file identity, by the same code on both sides.
///
/// Any difference means that the content may not be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Readable, Writable)]
pub struct Key {
    /// The bytes of the checkpoint.
    pub checkpoint: CheckpointId,
    /// The comma-joined `architectures` of config.json.
    #[speedy(length_type = u16)]
    pub model_arch: String,
    /// Tensor parallel size, in ranks.
    pub tp_size: u32,
    /// Tensor parallel rank.
    pub tp_rank: u32,
    /// The dtype that floating weights are held in: `auto` as stored, else for example `bfloat16`.
    #[speedy(length_type = u16)]
    pub dtype: String,
    /// The quantization method, empty for none.
    #[speedy(length_type = u16)]
    pub quantization: String,
    /// A hash of the canonical JSON of the quantization configuration; absent and empty differ.
    pub quant_config_hash: Option<[u8; 32]>,
    /// The revision that was asked for, empty for none.
    #[speedy(length_type = u16)]
    pub revision: String,
    /// The engine's version, where an operator ties content to one; empty otherwise.
    #[speedy(length_type = u16)]
    pub engine_version: String,
    /// Pipeline parallel size, in stages.
    pub pp_size: u32,
    /// Pipeline stage.
    pub pp_rank: u32,
    /// Target or draft.
    pub role: Role,
    /// Data parallel size, in ranks.
    pub dp_size: u32,
    /// Data parallel rank.
    pub dp_rank: u32,
    /// Whether experts are spread over ranks as a whole instead of being sliced.
    pub enable_expert_parallel: bool,
    /// `linear` or `round_robin`.
    #[speedy(length_type = u16)]
    pub expert_placement_strategy: String,
    /// Under which names and shapes tensors are held: `checkpoint` for those of the checkpoint, `vllm` for those
    /// of vLLM's modules.
    #[speedy(length_type = u16)]
    pub layout: String,
    /// What was done after loading: `stored` for weights as the checkpoint has them; an engine
    /// that publishes its post-processed weights names its own.
    #[speedy(length_type = u16)]
    pub processing: String,
    /// What an engine adds: KV-cache dtype, kernel choices, device capability.
    #[speedy(length_type = u16)]
    pub extra: BTreeMap<String, String>,
}

/// The outcome of comparing two keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// Every field is equal: the content may be used.
    Same,
    /// The names of all fields that differ, in the order of [`Key`]'s fields.
    Different(Vec<String>),
    /// Everything else is equal, but whether the checkpoints are takes a digest of the bytes.
    Unknown,
}

/// The most that a key may take in messages, in bytes: it shares frames of 64 KiB with what is said around it.
pub const MAX_KEY: usize = 60 * 1024;

/// The fields that say which shard of a model it is, and for which role.
const PLACEMENT: [&str; 7] = [
    "tp_size", "tp_rank", "pp_size", "pp_rank", "role", "dp_size", "dp_rank",
];

/// What a field holds, as far as fields are alike.
#[derive(PartialEq, Eq)]
enum Value<'a> {
    Number(u32),
    Flag(bool),
    Text(&'a str),
    Hash(Option<[u8; 32]>),
}

/// For a person: of hashes, as many digits as tell one from another.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Number(number) => write!(f, "{number}"),
            Value::Flag(flag) => write!(f, "{flag}"),
            Value::Text("") | Value::Hash(None) => f.write_str("none"),
            // What could be taken for something else.
            Value::Text(text) if *text == "none" || text.contains(['"', '\\', ',', '(', ')']) => {
                write!(f, "{text:?}")
            }
            Value::Text(text) => f.write_str(text),
            Value::Hash(Some(hash)) => hash[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

impl Key {
    /// The names of all fields of the placement that differ: which shard of a model it is, and for which
    /// role. A daemon that takes whatever is published for its place compares nothing else.
    pub fn misplaced(&self, other: &Key) -> Vec<String> {
        match self.compare(other) {
            Comparison::Different(mut fields) => {
                fields.retain(|field| PLACEMENT.contains(&field.as_str()));
                fields
            }
            Comparison::Same | Comparison::Unknown => Vec::new(),
        }
    }

    /// Whether every message that has to carry this key can.
    pub fn fits(&self) -> bool {
        let bytes = Writable::<Endianness>::bytes_needed(self);
        bytes.is_ok_and(|bytes| bytes <= MAX_KEY)
    }

    /// Compares field by field. A checkpoint that is not known to be equal is named only when it
    /// is known to differ.
    pub fn compare(&self, other: &Key) -> Comparison {
        let checkpoint = self.checkpoint.compare(&other.checkpoint);
        let mut fields = Vec::new();
        if matches!(checkpoint, Ternary::No) {
            fields.push("checkpoint".to_owned());
        }
        for ((name, ours), (_, theirs)) in self.plain().into_iter().zip(other.plain()) {
            if ours != theirs {
                fields.push(name.to_owned());
            }
        }
        let names: BTreeSet<_> = self.extra.keys().chain(other.extra.keys()).collect();
        for name in names {
            if self.extra.get(name) != other.extra.get(name) {
                fields.push(format!("extra.{name}"));
            }
        }
        match (fields.is_empty(), checkpoint) {
            (false, _) => Comparison::Different(fields),
            (true, Ternary::Unknown) => Comparison::Unknown,
            (true, _) => Comparison::Same,
        }
    }

    /// What is served, by this key, and what was asked for, in each of the `fields` that
    /// [`compare`](Key::compare) names: of the first hundred of them, which is as many as fit a message.
    pub fn differences(&self, asked: &Key, fields: &[String]) -> Vec<Difference> {
        let difference =
            |field: &String| Difference::new(field, &asked.shown(field, self), &self.shown(field, asked));
        fields.iter().take(difference::MOST).map(difference).collect()
    }

    /// What a field holds, for a person who sees another key's beside it.
    fn shown(&self, field: &str, other: &Key) -> String {
        if field == "checkpoint" {
            return self.checkpoint.unlike(&other.checkpoint);
        }
        if let Some(name) = field.strip_prefix("extra.") {
            // An entry may be empty, which is not the same as none.
            return match self.extra.get(name).map(String::as_str) {
                Some("") => "\"\"".to_owned(),
                entry => Value::Text(entry.unwrap_or_default()).to_string(),
            };
        }
        let mut plain = self.plain().into_iter();
        let value = plain.find(|(name, _)| *name == field);
        value.map_or_else(String::new, |(_, value)| value.to_string())
    }

    /// All fields but the checkpoint, which is compared by what is known of it, and `extra`, in their order.
    fn plain(&self) -> [(&'static str, Value<'_>); 17] {
        use Value::{Flag, Hash, Number, Text};
        let Key {
            checkpoint: _,
            model_arch,
            tp_size,
            tp_rank,
            dtype,
            quantization,
            quant_config_hash,
            revision,
            engine_version,
            pp_size,
            pp_rank,
            role,
            dp_size,
            dp_rank,
            enable_expert_parallel,
            expert_placement_strategy,
            layout,
            processing,
            extra: _,
        } = self;
        [
            ("model_arch", Text(model_arch)),
            ("tp_size", Number(*tp_size)),
            ("tp_rank", Number(*tp_rank)),
            ("dtype", Text(dtype)),
            ("quantization", Text(quantization)),
            ("quant_config_hash", Hash(*quant_config_hash)),
            ("revision", Text(revision)),
            ("engine_version", Text(engine_version)),
            ("pp_size", Number(*pp_size)),
            ("pp_rank", Number(*pp_rank)),
            ("role", Text(role.name())),
            ("dp_size", Number(*dp_size)),
            ("dp_rank", Number(*dp_rank)),
            ("enable_expert_parallel", Flag(*enable_expert_parallel)),
            ("expert_placement_strategy", Text(expert_placement_strategy)),
            ("layout", Text(layout)),
            ("processing", Text(processing)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        crate::testing::world::key(0)
    }

    #[test]
    fn each_field_alone_makes_a_mismatch_that_names_it() {
        type Change = (&'static str, fn(&mut Key));
        let changes: &[Change] = &[
            ("checkpoint", |k| k.checkpoint.bytes += 1),
            ("model_arch", |k| k.model_arch.push('x')),
            ("tp_size", |k| k.tp_size = 4),
            ("tp_rank", |k| k.tp_rank = 1),
            ("dtype", |k| k.dtype = "float16".into()),
            ("quantization", |k| k.quantization = "fp8".into()),
            ("quant_config_hash", |k| k.quant_config_hash = Some([0; 32])),
            ("revision", |k| k.revision = "main".into()),
            ("engine_version", |k| k.engine_version = "1".into()),
            ("pp_size", |k| k.pp_size = 2),
            ("pp_rank", |k| k.pp_rank = 1),
            ("role", |k| k.role = Role::Draft),
            ("dp_size", |k| k.dp_size = 2),
            ("dp_rank", |k| k.dp_rank = 1),
            ("enable_expert_parallel", |k| k.enable_expert_parallel = true),
            ("expert_placement_strategy", |k| {
                k.expert_placement_strategy = "round_robin".into()
            }),
            ("layout", |k| k.layout = "vllm".into()),
            ("processing", |k| k.processing = "marlin".into()),
            ("extra.kv_cache_dtype", |k| {
                k.extra.insert("kv_cache_dtype".into(), "fp8".into());
            }),
        ];
        let mut all = key();
        for (name, change) in changes {
            let mut other = key();
            change(&mut other);
            change(&mut all);
            let expected = Comparison::Different(vec![(*name).to_owned()]);
            assert_eq!(key().compare(&other), expected);
            assert_eq!(other.compare(&key()), expected);
        }
        let names = changes.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(
            key().compare(&all),
            Comparison::Different(names),
            "all fields, in order"
        );
    }

    #[test]
    fn however_much_differs_it_fits_a_message() {
        use crate::wire::message::{Message, Mismatch};
        let served = key();
        let many = (0..4000).map(|number| (format!("k{number}"), "\n".repeat(100)));
        let long = [
            ("n".repeat(50_000), "v".to_owned()),
            ("\n".repeat(9000), "v".to_owned()),
        ];
        let wide = (0..200).map(|number| (format!("{number:0>250}"), "v".repeat(100)));
        for extra in [many.collect(), long.into_iter().collect(), wide.collect()] {
            let extra: BTreeMap<String, String> = extra;
            let asked = Key {
                extra: extra.clone(),
                ..key()
            };
            let Comparison::Different(names) = served.compare(&asked) else {
                panic!("they differ")
            };
            assert_eq!(names.len(), extra.len(), "all are compared");
            let fields = served.differences(&asked, &names);
            assert_eq!(fields.len(), extra.len().min(100));
            let message = Message::from(Mismatch { fields });
            assert!(message.encode().is_ok());
        }
    }

    #[test]
    fn a_difference_says_what_is_served_and_what_was_asked_for() {
        type Change = (fn(&mut Key), &'static str);
        let hash = |byte| Some([byte; 32]);
        let mut served = key();
        served.checkpoint.digest = hash(0xab);
        served.quant_config_hash = hash(0xcd);
        served.extra.insert("kv".into(), String::new());
        let changes: &[Change] = &[
            (
                |k| k.checkpoint.bytes = 11,
                "checkpoint (asked for 11 bytes, served 100 bytes)",
            ),
            (
                |k| k.checkpoint.digest = Some([0x12; 32]),
                "checkpoint (asked for digest 12121212, served digest abababab)",
            ),
            (|k| k.tp_size = 4, "tp_size (asked for 4, served 2)"),
            (
                |k| k.dtype = "float16".into(),
                "dtype (asked for float16, served auto)",
            ),
            (
                |k| k.quantization = "fp8".into(),
                "quantization (asked for fp8, served none)",
            ),
            (
                |k| k.quant_config_hash = None,
                "quant_config_hash (asked for none, served cdcdcdcd)",
            ),
            (|k| k.role = Role::Draft, "role (asked for draft, served target)"),
            (
                |k| k.enable_expert_parallel = true,
                "enable_expert_parallel (asked for true, served false)",
            ),
            (
                |k| k.processing = "a\nb".into(),
                r"processing (asked for a\nb, served stored)",
            ),
            (
                |k| k.processing = "none".into(),
                "processing (asked for \"none\", served stored)",
            ),
            (
                |k| k.processing = "a, served b".into(),
                "processing (asked for \"a, served b\", served stored)",
            ),
            (
                |k| drop(k.extra.remove("kv")),
                "extra.kv (asked for none, served \"\")",
            ),
        ];
        for (change, expected) in changes {
            let mut asked = served.clone();
            change(&mut asked);
            let Comparison::Different(fields) = served.compare(&asked) else {
                panic!("{expected}")
            };
            let differences = served.differences(&asked, &fields);
            assert_eq!(Difference::list(&differences), *expected);
        }
        // Whether these are the same is not known, and never will be.
        let (mut served, mut asked) = (key(), key());
        let unknown = |served: &Key, asked: &Key| {
            let differences = served.differences(asked, &["checkpoint".to_owned()]);
            Difference::list(&differences)
        };
        asked.checkpoint.files = None;
        assert_eq!(
            unknown(&served, &asked),
            "checkpoint (asked for files none, served files 01010101)"
        );
        served.checkpoint.files = None;
        asked.checkpoint.digest = hash(0x12);
        assert_eq!(
            unknown(&served, &asked),
            "checkpoint (asked for digest 12121212, served digest none)"
        );
    }

    #[test]
    fn checkpoints_are_same_different_or_unknown() {
        let with = |files: Option<u8>, digest: Option<u8>| {
            let mut key = key();
            key.checkpoint.files = files.map(|byte| [byte; 32]);
            key.checkpoint.digest = digest.map(|byte| [byte; 32]);
            key
        };
        let different = Comparison::Different(vec!["checkpoint".into()]);
        let table = [
            (with(Some(1), None), with(Some(1), None), Comparison::Same),
            (with(Some(1), None), with(Some(2), None), Comparison::Unknown),
            (with(None, None), with(None, None), Comparison::Unknown),
            (with(Some(1), Some(7)), with(Some(2), None), Comparison::Unknown),
            (with(Some(1), Some(7)), with(Some(2), Some(7)), Comparison::Same),
            (with(None, Some(7)), with(None, Some(8)), different.clone()),
            (with(Some(1), Some(7)), with(Some(1), Some(8)), different),
        ];
        for (ours, theirs, expected) in table {
            assert_eq!(
                ours.compare(&theirs),
                expected,
                "{:?} {:?}",
                ours.checkpoint,
                theirs.checkpoint
            );
        }
    }

    #[test]
    fn a_key_is_misplaced_by_its_shard_and_role_and_by_nothing_else() {
        let mut other = key();
        other.checkpoint.bytes += 1;
        other.dtype = "float16".into();
        other.processing = "packed".into();
        other.extra.insert("role".into(), "else".into());
        assert_eq!(key().misplaced(&other), [""; 0]);
        other.checkpoint.bytes -= 1;
        other.checkpoint.files = None;
        assert_eq!(key().misplaced(&other), [""; 0]);
        (other.tp_size, other.tp_rank, other.pp_size, other.pp_rank) = (3, 2, 4, 3);
        (other.role, other.dp_size, other.dp_rank) = (Role::Draft, 5, 4);
        assert_eq!(key().misplaced(&other), PLACEMENT);
        assert_eq!(key().misplaced(&key()), [""; 0]);
    }

    #[test]
    fn a_key_fits_up_to_its_cap() {
        let mut key = key();
        assert!(key.fits());
        let bytes = Writable::<Endianness>::bytes_needed(&key).unwrap();
        key.revision = "r".repeat(MAX_KEY - bytes);
        let bytes = Writable::<Endianness>::bytes_needed(&key);
        assert_eq!(
            bytes.unwrap(),
            61_440,
            "with 4 KiB of a frame left for what is said around it"
        );
        assert!(key.fits());
        key.revision.push('r');
        assert!(!key.fits());
        // A text whose length its field cannot say.
        key.revision = "r".repeat(1 << 16);
        assert!(!key.fits());
    }

    #[test]
    fn a_field_that_differs_wins_over_an_unknown_checkpoint() {
        let mut other = key();
        other.checkpoint.files = None;
        other.tp_rank = 1;
        assert_eq!(
            key().compare(&other),
            Comparison::Different(vec!["tp_rank".into()])
        );
    }
}
