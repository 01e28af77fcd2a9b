//! The key of a rank's content.

use crate::error::CheckpointError;
use crate::open::Checkpoint;
use crate::rules::{Draft, ModelPart, RULES, Rank, ShardingOptions};
use serde_json::Value;
use std::collections::BTreeMap;
use weightd_core::content::{CheckpointId, Key, Role};

/// Everything but the checkpoint that decides a key, as launcher and engine are configured.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyOptions {
    /// How the checkpoint is spread over ranks, and under which names and types they hold it.
    pub sharding: ShardingOptions,
    /// The quantization method that was asked for; absent takes the checkpoint's.
    pub quantization: Option<String>,
    /// What overrides the checkpoint's quantization configuration at run time.
    pub quantization_override: Option<Value>,
    /// The revision that was asked for, empty for none.
    pub revision: String,
    /// The engine's version, where an operator ties content to one; empty otherwise.
    pub engine_version: String,
    /// What is done after loading: `stored` for nothing.
    pub processing: String,
    /// What an engine adds.
    pub extra: BTreeMap<String, String>,
}

impl KeyOptions {
    /// Weights as stored, spread like this.
    pub fn new(sharding: ShardingOptions) -> KeyOptions {
        KeyOptions {
            sharding,
            quantization: None,
            quantization_override: None,
            revision: String::new(),
            engine_version: String::new(),
            processing: "stored".to_owned(),
            extra: BTreeMap::new(),
        }
    }
}

/// How names of `extra` begin that an engine cannot add.
const OURS: &str = "weightd.";
/// The most that one text of a key may take, in bytes.
const TEXT_CAP: usize = 1024;
/// The most that all of `extra` may take, in bytes. With it, a key fits the 64 KiB of a frame.
const EXTRA_CAP: usize = 16 * 1024;

impl KeyOptions {
    /// The same for a draft, whose quantization is its own.
    pub fn of_draft(&self, draft: Draft, quantization: Option<String>) -> KeyOptions {
        KeyOptions {
            sharding: self.sharding.of_draft(draft),
            quantization,
            quantization_override: None,
            ..self.clone()
        }
    }

    /// The key of `rank`. Where there is one pipeline stage, as for a draft, the pipeline rank counts for
    /// nothing. `checkpoint_id` is [`Checkpoint::identity`], with the digest
    /// filled in where it is known.
    ///
    /// # Errors
    /// A quantization that the checkpoint does not have; texts longer than a key carries; a name in `extra`
    /// that is kept for weightd's own; a rank outside the world.
    pub fn key(
        &self,
        checkpoint: &Checkpoint,
        checkpoint_id: CheckpointId,
        rank: Rank,
    ) -> Result<Key, CheckpointError> {
        let config = checkpoint.config();
        let extra = self.extra_fields()?;
        self.check_lengths(&extra)?;
        // Every field is named, so that a new one cannot be left out.
        let ShardingOptions {
            part,
            parallel,
            layout,
            dtype,
            experts,
            layer_partition: _,
            tp_plan: _,
        } = &self.sharding;
        if !self.sharding.has(rank) {
            let parallel = *parallel;
            return Err(CheckpointError::NoSuchRank { rank, parallel });
        }
        Ok(Key {
            checkpoint: checkpoint_id,
            model_arch: config.architectures.join(","),
            tp_size: parallel.tensor,
            tp_rank: rank.tp,
            dtype: dtype.name().to_owned(),
            quantization: self.quantization(checkpoint)?,
            quant_config_hash: hash_quantization(
                config.quantization_config.as_ref(),
                self.quantization_override.as_ref(),
            ),
            revision: self.revision.clone(),
            engine_version: self.engine_version.clone(),
            pp_size: parallel.pipeline,
            pp_rank: if parallel.pipeline == 1 { 0 } else { rank.pp },
            role: match part {
                ModelPart::Target => Role::Target,
                ModelPart::Draft(_) => Role::Draft,
            },
            dp_size: parallel.data,
            dp_rank: rank.dp,
            enable_expert_parallel: experts.is_some(),
            expert_placement_strategy: experts.unwrap_or_default().name().to_owned(),
            layout: layout.name().to_owned(),
            processing: self.processing.clone(),
            extra,
        })
    }

    /// What an engine adds, and what else decides which bytes a rank holds.
    fn extra_fields(&self) -> Result<BTreeMap<String, String>, CheckpointError> {
        if let Some(name) = self.extra.keys().find(|name| name.starts_with(OURS)) {
            return Err(CheckpointError::ReservedName { name: name.clone() });
        }
        let mut extra = self.extra.clone();
        let mut add = |name: &str, value: String| extra.insert(format!("{OURS}{name}"), value);
        add("rules", RULES.to_string());
        if let ModelPart::Draft(draft) = self.sharding.part {
            add("draft", draft.name().to_owned());
        }
        if let Some(plan) = &self.sharding.tp_plan {
            add("tp_plan", blake3::Hash::from_bytes(plan.hash()).to_string());
        }
        if let Some(layers) = &self.sharding.layer_partition {
            let layers: Vec<String> = layers.iter().map(u64::to_string).collect();
            add("pp_layer_partition", layers.join(","));
        }
        Ok(extra)
    }

    /// The method of the stored weights, empty for none. Only that one can be asked for: nothing
    /// is quantized while loading.
    fn quantization(&self, checkpoint: &Checkpoint) -> Result<String, CheckpointError> {
        let stored = checkpoint.config().quant_method();
        if self.quantization_override.is_some() && stored.is_none() {
            return Err(CheckpointError::OverrideOfNothing);
        }
        let asked = self.quantization.as_deref().filter(|asked| !asked.is_empty());
        match (asked.map(method_of), stored) {
            (None, stored) => Ok(stored.unwrap_or_default().to_owned()),
            (Some(asked), Some(stored)) if asked == stored => Ok(stored.to_owned()),
            (Some(asked), Some(stored)) => Err(CheckpointError::OtherQuantization {
                asked: asked.to_owned(),
                stored: stored.to_owned(),
            }),
            (Some(asked), None) => Err(CheckpointError::OnlineQuantization {
                asked: asked.to_owned(),
            }),
        }
    }

    fn check_lengths(&self, extra: &BTreeMap<String, String>) -> Result<(), CheckpointError> {
        let texts = [
            ("revision", &self.revision),
            ("engine_version", &self.engine_version),
            ("processing", &self.processing),
        ];
        let extra = extra.iter().map(|(name, value)| name.len() + value.len()).sum();
        let lengths = texts.map(|(field, text)| (field, text.len(), TEXT_CAP));
        let too_long = |&(_, bytes, cap): &(_, usize, usize)| bytes > cap;
        match lengths
            .into_iter()
            .chain([("extra", extra, EXTRA_CAP)])
            .find(too_long)
        {
            None => Ok(()),
            Some((field, bytes, cap)) => Err(CheckpointError::KeyTooLong {
                field: field.to_owned(),
                bytes,
                cap,
            }),
        }
    }
}

/// The method whose weights are asked for by the name of a kernel.
fn method_of(asked: &str) -> &str {
    const KERNELS: &[(&str, &str)] = &[
        ("gptq_marlin", "gptq"),
        ("auto_gptq", "gptq"),
        ("awq_marlin", "awq"),
        ("auto_awq", "awq"),
    ];
    let kernel = KERNELS.iter().find(|(kernel, _)| *kernel == asked);
    kernel.map_or(asked, |(_, method)| method)
}

/// A hash of what quantizes the weights: configuration and override. Neither has none, which
/// differs from an empty one.
fn hash_quantization(config: Option<&Value>, over: Option<&Value>) -> Option<[u8; 32]> {
    if config.is_none() && over.is_none() {
        return None;
    }
    let mut text = Vec::new();
    for part in [config, over] {
        match part {
            Some(value) => write_canonical(value, &mut text),
            None => text.extend_from_slice(b"absent"),
        }
        text.push(b'\n');
    }
    Some(*blake3::hash(&text).as_bytes())
}

/// JSON with the keys of every object in byte order and no white space. Written here and not by
/// `serde_json`, whose order of keys is turned by a feature that any crate of a build can set.
fn write_canonical(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Array(items) => {
            out.push(b'[');
            for (i, item) in items.iter().enumerate() {
                out.extend_from_slice(if i == 0 { b"" } else { b"," });
                write_canonical(item, out);
            }
            out.push(b']');
        }
        Value::Object(fields) => {
            out.push(b'{');
            let sorted: BTreeMap<&String, &Value> = fields.iter().collect();
            for (i, (name, item)) in sorted.into_iter().enumerate() {
                out.extend_from_slice(if i == 0 { b"" } else { b"," });
                out.extend_from_slice(Value::from(name.as_str()).to_string().as_bytes());
                out.push(b':');
                write_canonical(item, out);
            }
            out.push(b'}');
        }
        leaf => out.extend_from_slice(leaf.to_string().as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{copy_of, data};
    use crate::{FloatDtype, Layout, TpPlan};
    use serde_json::json;
    use std::fs;
    use weightd_core::content::Comparison;
    use weightd_core::plan::experts::ExpertPlacement;
    use weightd_core::plan::placement::Parallel;

    fn world(tensor: u32, pipeline: u32, data: u32) -> ShardingOptions {
        ShardingOptions::new(Parallel {
            tensor,
            pipeline,
            data,
        })
    }

    fn key(checkpoint: &Checkpoint, options: &KeyOptions) -> Result<Key, CheckpointError> {
        options.key(checkpoint, checkpoint.identity(), Rank::default())
    }

    /// A copy of the Llama checkpoint with this quantization configuration.
    fn quantized(config: &Value) -> (tempfile::TempDir, Checkpoint) {
        let copy = copy_of("llama");
        let path = copy.path().join("config.json");
        let mut all: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        all["quantization_config"] = config.clone();
        fs::write(&path, all.to_string()).unwrap();
        let checkpoint = Checkpoint::open(copy.path()).unwrap();
        (copy, checkpoint)
    }

    #[test]
    fn a_key_says_what_is_loaded_where() {
        let checkpoint = Checkpoint::open(&data("llama")).unwrap();
        let sharding = ShardingOptions {
            dtype: FloatDtype::Float16,
            layout: Layout::Vllm,
            experts: Some(ExpertPlacement::RoundRobin),
            layer_partition: Some(vec![1, 3]),
            tp_plan: Some(TpPlan::parse(br#"{"a.b": "colwise"}"#).unwrap()),
            ..world(4, 5, 6)
        };
        let options = KeyOptions {
            revision: "main".into(),
            extra: BTreeMap::from([("kv_cache_dtype".into(), "fp8".into())]),
            ..KeyOptions::new(sharding.clone())
        };
        let rank = Rank { dp: 1, pp: 2, tp: 3 };
        let key = options.key(&checkpoint, checkpoint.identity(), rank).unwrap();
        let expected = Key {
            checkpoint: checkpoint.identity(),
            model_arch: "LlamaForCausalLM".into(),
            tp_size: 4,
            tp_rank: 3,
            dtype: "float16".into(),
            quantization: String::new(),
            quant_config_hash: None,
            revision: "main".into(),
            engine_version: String::new(),
            pp_size: 5,
            pp_rank: 2,
            role: Role::Target,
            dp_size: 6,
            dp_rank: 1,
            enable_expert_parallel: true,
            expert_placement_strategy: "round_robin".into(),
            layout: "vllm".into(),
            processing: "stored".into(),
            extra: BTreeMap::from([
                ("kv_cache_dtype".into(), "fp8".into()),
                ("weightd.rules".into(), RULES.to_string()),
                ("weightd.pp_layer_partition".into(), "1,3".into()),
                (
                    "weightd.tp_plan".into(),
                    blake3::Hash::from_bytes(sharding.tp_plan.as_ref().unwrap().hash()).to_string(),
                ),
            ]),
        };
        assert_eq!(key, expected);
    }

    #[test]
    fn the_key_of_a_draft_knows_its_kind_and_one_stage() {
        let checkpoint = Checkpoint::open(&data("llama")).unwrap();
        let target = KeyOptions {
            quantization: Some("fp8".into()),
            quantization_override: Some(json!({ "bits": 4 })),
            ..KeyOptions::new(world(2, 3, 1))
        };
        let key = |draft| {
            let rank = Rank { dp: 0, pp: 2, tp: 1 };
            let options = target.of_draft(draft, None);
            options.key(&checkpoint, checkpoint.identity(), rank).unwrap()
        };
        let (mtp, eagle) = (key(Draft::Mtp), key(Draft::Eagle));
        assert_eq!(
            (mtp.role, mtp.pp_size, mtp.pp_rank, mtp.tp_rank),
            (Role::Draft, 1, 0, 1)
        );
        assert_eq!(
            mtp.compare(&eagle),
            Comparison::Different(vec!["extra.weightd.draft".into()])
        );
    }

    #[test]
    fn ranks_outside_the_world_and_reserved_names_have_no_key() {
        let checkpoint = Checkpoint::open(&data("llama")).unwrap();
        let mut options = KeyOptions::new(world(2, 2, 2));
        for rank in [
            Rank { dp: 2, pp: 0, tp: 0 },
            Rank { dp: 0, pp: 2, tp: 0 },
            Rank { dp: 0, pp: 0, tp: 2 },
        ] {
            let error = options.key(&checkpoint, checkpoint.identity(), rank).unwrap_err();
            assert!(matches!(error, CheckpointError::NoSuchRank { .. }), "{error}");
        }
        options.extra.insert("weightd.rules".into(), "0".into());
        let error = key(&checkpoint, &options).unwrap_err();
        assert!(matches!(error, CheckpointError::ReservedName { .. }), "{error}");
    }

    #[test]
    fn equal_bytes_elsewhere_are_unknown_until_the_digests_are_compared() {
        let (ours, copy) = (Checkpoint::open(&data("llama")).unwrap(), copy_of("llama"));
        let theirs = Checkpoint::open(copy.path()).unwrap();
        let options = KeyOptions::new(world(1, 1, 1));
        let (mut a, mut b) = (key(&ours, &options).unwrap(), key(&theirs, &options).unwrap());
        assert_eq!(a.compare(&b), Comparison::Unknown);
        a.checkpoint.digest = Some(ours.digest(&Default::default(), &Default::default()).unwrap());
        b.checkpoint.digest = Some(theirs.digest(&Default::default(), &Default::default()).unwrap());
        assert_eq!(a.compare(&b), Comparison::Same);
    }

    #[test]
    fn the_quantization_hash_ignores_the_order_of_keys_and_nothing_else() {
        let config = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let [a, b] = [
            r#"{"bits":4,"sub":{"x":[1,2],"y":null}}"#,
            r#"{"sub":{"y":null,"x":[1,2]},"bits":4}"#,
        ]
        .map(config);
        assert_eq!(
            hash_quantization(Some(&a), None),
            hash_quantization(Some(&b), None)
        );
        let empty = json!({});
        let all = [
            hash_quantization(None, None),
            hash_quantization(Some(&empty), None),
            hash_quantization(None, Some(&empty)),
            hash_quantization(Some(&empty), Some(&empty)),
            hash_quantization(Some(&a), None),
            hash_quantization(Some(&a), Some(&empty)),
            hash_quantization(Some(&config(r#"{"bits":4,"sub":{"x":[2,1],"y":null}}"#)), None),
            hash_quantization(Some(&config(r#"{"bits":"4","sub":{"x":[1,2],"y":null}}"#)), None),
        ];
        for (i, hash) in all.iter().enumerate() {
            assert!(!all[..i].contains(hash), "case {i}");
        }
        assert_eq!(all[0], None);
    }

    #[test]
    fn canonical_json_has_sorted_keys_and_escapes() {
        let value = json!({"b": [true, null, 1.5, "q\"\n"], "a\"": {}, "A": []});
        let mut text = Vec::new();
        write_canonical(&value, &mut text);
        assert_eq!(
            String::from_utf8(text).unwrap(),
            r#"{"A":[],"a\"":{},"b":[true,null,1.5,"q\"\n"]}"#
        );
    }

    #[test]
    fn only_the_stored_quantization_can_be_asked_for() {
        let asking = |asked: &str| KeyOptions {
            quantization: Some(asked.into()),
            ..KeyOptions::new(world(1, 1, 1))
        };
        let plain = Checkpoint::open(&data("llama")).unwrap();
        assert_eq!(key(&plain, &asking("")).unwrap().quantization, "");
        let error = key(&plain, &asking("fp8")).unwrap_err();
        assert!(
            matches!(error, CheckpointError::OnlineQuantization { .. }),
            "{error}"
        );
        assert!(
            error.to_string().contains("\"fp8\"") && error.to_string().contains("quantization_config"),
            "{error}"
        );

        let (_dir, gptq) = quantized(&json!({"quant_method": "gptq", "bits": 4}));
        assert_eq!(
            key(&gptq, &KeyOptions::new(world(1, 1, 1))).unwrap().quantization,
            "gptq"
        );
        let asked = key(&gptq, &asking("gptq")).unwrap();
        assert_eq!(asked.quantization, "gptq");
        assert!(asked.quant_config_hash.is_some());
        let error = key(&gptq, &asking("awq")).unwrap_err();
        assert!(
            matches!(error, CheckpointError::OtherQuantization { .. }),
            "{error}"
        );
    }

    #[test]
    fn texts_up_to_their_caps_are_taken_and_not_a_byte_more() {
        let checkpoint = Checkpoint::open(&data("llama")).unwrap();
        let taken = |change: &dyn Fn(&mut KeyOptions)| {
            let mut options = KeyOptions::new(world(1, 1, 1));
            change(&mut options);
            match key(&checkpoint, &options) {
                Ok(_) => None,
                Err(CheckpointError::KeyTooLong { field, bytes, cap }) => Some((field, bytes, cap)),
                Err(other) => panic!("{other}"),
            }
        };
        for bytes in [1024, 1025] {
            let text = "t".repeat(bytes);
            let refused = |field: &str| (bytes > 1024).then(|| (field.to_owned(), bytes, 1024));
            assert_eq!(
                taken(&|options| options.revision = text.clone()),
                refused("revision")
            );
            assert_eq!(
                taken(&|options| options.engine_version = text.clone()),
                refused("engine_version")
            );
            assert_eq!(
                taken(&|options| options.processing = text.clone()),
                refused("processing")
            );
        }
        // Names and values count, and so do weightd's own.
        let ours = "weightd.rules".len() + RULES.to_string().len();
        for bytes in [16_384, 16_385] {
            let refused = (bytes > 16_384).then(|| ("extra".to_owned(), bytes, 16_384));
            let extra = [
                ("names".to_owned(), "v".repeat(1000)),
                ("n".repeat(1000), "v".repeat(bytes - ours - 2005)),
            ];
            assert_eq!(taken(&|options| options.extra = extra.clone().into()), refused);
        }
    }

    #[test]
    fn methods_go_by_the_names_of_their_kernels_too() {
        for (method, kernels) in [
            ("gptq", ["gptq", "gptq_marlin", "auto_gptq"]),
            ("awq", ["awq", "awq_marlin", "auto_awq"]),
        ] {
            let (_dir, checkpoint) = quantized(&json!({ "quant_method": method, "bits": 4 }));
            for kernel in kernels {
                let options = KeyOptions {
                    quantization: Some(kernel.into()),
                    ..KeyOptions::new(world(1, 1, 1))
                };
                assert_eq!(
                    key(&checkpoint, &options).unwrap().quantization,
                    method,
                    "{kernel}"
                );
            }
        }
    }

    #[test]
    fn texts_too_long_for_a_frame_are_refused_by_name() {
        let checkpoint = Checkpoint::open(&data("llama")).unwrap();
        let long = KeyOptions {
            revision: "r".repeat(1025),
            ..KeyOptions::new(world(1, 1, 1))
        };
        let message = key(&checkpoint, &long).unwrap_err().to_string();
        assert!(message.contains("revision: 1025 bytes"), "{message}");
        let extra = (0..20).map(|n| (n.to_string(), "v".repeat(1000))).collect();
        let message = key(
            &checkpoint,
            &KeyOptions {
                extra,
                ..KeyOptions::new(world(1, 1, 1))
            },
        )
        .unwrap_err()
        .to_string();
        assert!(message.contains("extra: "), "{message}");
    }
}
