//! Checkpoints of generated sizes, and what every rank has to hold of them.
//!
//! How tensors are shared is said here once more, tensor by tensor and in the words of the models
//! themselves, so that the rules have something to be compared with.

mod tensors;

use super::{Made, Tensor, world};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::ops::Range;
use weightd_checkpoint::{Layout, Rank, ShardingOptions, TpPlan};
use weightd_core::plan::experts::ExpertPlacement;

/// A model and the world that it is spread over.
#[derive(Clone, Debug)]
pub struct Case {
    pub family: Family,
    pub sizes: Sizes,
    pub options: ShardingOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Llama,
    Qwen3,
    Phi3,
    Mixtral,
    Qwen3Moe,
    DeepseekV3,
    GptOss,
    /// An architecture that is known by a plan alone, with a tensor for every style.
    Planned,
}

#[derive(Clone, Debug)]
pub struct Sizes {
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub intermediate: u64,
    pub experts: u64,
    pub vocabulary: u64,
}

/// A stored tensor, and how ranks share it.
#[derive(Clone, Debug)]
pub struct Shared {
    pub tensor: Tensor,
    share: Share,
    of: Of,
}

#[derive(Clone, Debug)]
enum Share {
    Whole,
    /// Sections of a dimension, each `(size, units)`: a rank holds whole units, or several the same.
    Cut {
        dim: usize,
        sections: Vec<(u64, u64)>,
    },
    Vocabulary,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Model,
    /// Beside the routed experts.
    SharedExpert,
    Expert(u64),
    /// All of them, along dimension 0.
    Experts,
}

/// What a rank holds of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// These indices of a dimension, in this order.
    Ranges(usize, Vec<Range<u64>>),
    /// Nothing under the tensor's own name.
    Absent,
}

/// Any family, any world of up to 24 ranks, either layout, with sizes that the world can share.
pub fn cases() -> impl Strategy<Value = Case> {
    use Family::*;
    let families = vec![Llama, Qwen3, Phi3, Mixtral, Qwen3Moe, DeepseekV3, GptOss, Planned];
    let placements = vec![
        None,
        Some(ExpertPlacement::Linear),
        Some(ExpertPlacement::RoundRobin),
    ];
    let world_sizes = (1u32..9, 1u32..4, 1u32..4);
    let numbers = (
        0u64..2,
        1u64..3,
        0u64..8,
        1u64..4,
        1u64..6,
        1u64..3,
        0u64..3,
        0u64..64,
    );
    let choices = (
        prop::sample::select(families),
        prop::sample::select(placements),
        any::<bool>(),
    );
    (choices, world_sizes, numbers).prop_map(|((family, placement, vllm), sizes, numbers)| {
        let vllm = vllm && family != Planned;
        let (tp, pp, dp) = (sizes.0, sizes.1, if sizes.0 > 4 { 1 } else { sizes.2 });
        let (layers, heads, kv, head_dim, hidden, intermediate, experts, vocabulary) = numbers;
        let ways = u64::from(tp * dp);
        let tp = u64::from(tp);
        let divisors: Vec<u64> = (1..=tp).filter(|divisor| tp.is_multiple_of(*divisor)).collect();
        let heads = heads * tp;
        let kv_heads = *divisors.get(kv as usize).unwrap_or(&heads);
        let (layout, vocabulary) = match vllm {
            // 64 rows, by the odd factor of the ranks: padded to that, it divides.
            true => (Layout::Vllm, (64 * (tp >> tp.trailing_zeros())) - vocabulary),
            false => (Layout::Checkpoint, 3 * tp - vocabulary % tp.min(3)),
        };
        let experts_placement = match placement {
            _ if !family.has_experts() => None,
            Some(ExpertPlacement::RoundRobin) if vllm && family != DeepseekV3 => {
                Some(ExpertPlacement::Linear)
            }
            placement => placement,
        };
        Case {
            family,
            sizes: Sizes {
                // The first may have no experts.
                layers: u64::from(pp) + layers + u64::from(pp == 1),
                hidden,
                heads,
                kv_heads,
                head_dim,
                intermediate: intermediate * ways,
                experts: ways + experts,
                vocabulary,
            },
            options: ShardingOptions {
                layout,
                experts: experts_placement,
                tp_plan: (family == Planned).then(|| TpPlan::parse(PLAN.as_bytes()).unwrap()),
                ..world(tp as u32, pp, dp)
            },
        }
    })
}

/// For [`Family::Planned`].
const PLAN: &str = r#"{
    "embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output", "layers.*.column": "colwise",
    "layers.*.row": "rowwise", "layers.*.packed_column": "packed_colwise", "layers.*.packed_row": "packed_rowwise",
    "layers.*.qkv": "qkv_colwise", "layers.*.heads": "heads_colwise", "layers.*.q_proj": "colwise",
    "layers.*.k_proj": "colwise", "layers.*.whole": "replicated"
}"#;

impl Family {
    pub fn has_experts(self) -> bool {
        matches!(
            self,
            Family::Mixtral | Family::Qwen3Moe | Family::DeepseekV3 | Family::GptOss
        )
    }

    fn architecture(self) -> &'static str {
        match self {
            Family::Llama => "LlamaForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
            Family::Phi3 => "Phi3ForCausalLM",
            Family::Mixtral => "MixtralForCausalLM",
            Family::Qwen3Moe => "Qwen3MoeForCausalLM",
            Family::DeepseekV3 => "DeepseekV3ForCausalLM",
            Family::GptOss => "GptOssForCausalLM",
            Family::Planned => "UnknownForCausalLM",
        }
    }
}

impl Case {
    /// The checkpoint, in two files.
    pub fn make(&self) -> Made {
        let (first, second) = self.files();
        Made::new(&self.config(), &[first, second])
    }

    pub fn files(&self) -> (Vec<Tensor>, Vec<Tensor>) {
        let mut first: Vec<Tensor> = self.tensors().into_iter().map(|shared| shared.tensor).collect();
        let second = first.split_off(first.len() / 2);
        (first, second)
    }

    pub fn config(&self) -> Value {
        let Sizes {
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            intermediate,
            experts,
            vocabulary,
        } = self.sizes;
        json!({
            "architectures": [self.family.architecture()], "model_type": "generated", "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "intermediate_size": intermediate, "vocab_size": vocabulary, "num_hidden_layers": layers,
            "num_local_experts": experts, "n_group": if self.family == Family::DeepseekV3 { 2 } else { 1 },
            "tie_word_embeddings": false, "dtype": "bfloat16",
        })
    }

    /// What `rank` holds of a tensor under the name that the checkpoint has for it.
    pub fn expected(&self, shared: &Shared, rank: Rank) -> Expected {
        let (name, _, shape) = &shared.tensor;
        let parallel = self.options.parallel;
        let (tp, dp) = (u64::from(parallel.tensor), u64::from(parallel.data));
        let vllm = self.options.layout == Layout::Vllm;
        if !self.is_on_stage(name, rank.pp) {
            return Expected::Absent;
        }
        let whole = |dim: usize| one(dim, 0..shape[dim]);
        let (all, number) = (tp * dp, u64::from(rank.dp) * tp + u64::from(rank.tp));
        match (self.options.experts, shared.of) {
            (Some(placement), Of::Expert(expert)) => {
                return match owner(expert, self.sizes.experts, all, placement) == number {
                    true => whole(0),
                    false => Expected::Absent,
                };
            }
            (Some(placement), Of::Experts) => {
                let experts = self.sizes.experts;
                let local = (0..experts).filter(|&expert| owner(expert, experts, all, placement) == number);
                return Expected::Ranges(0, local.map(|expert| expert..expert + 1).collect());
            }
            // vLLM adds up what all of these ranks make of the same tokens.
            (Some(_), Of::SharedExpert) if vllm && tp > 1 && dp > 1 => return whole(0),
            (None, Of::Experts) if vllm && name.ends_with("down_proj_bias") && number > 0 => {
                return Expected::Absent;
            }
            _ => {}
        }
        let (ways, index) = match shared.of {
            Of::Expert(_) | Of::Experts if vllm => (all, number),
            _ => (tp, u64::from(rank.tp)),
        };
        match &shared.share {
            Share::Whole => whole(0),
            Share::Vocabulary => {
                let per_rank = if vllm {
                    shape[0].next_multiple_of(64) / tp
                } else {
                    shape[0].div_ceil(tp)
                };
                one(
                    0,
                    (index * per_rank).min(shape[0])..((index + 1) * per_rank).min(shape[0]),
                )
            }
            Share::Cut { dim, sections } => {
                let mut start = 0;
                let mut ranges = Vec::new();
                for &(size, units) in sections {
                    let held = (units / ways).max(1);
                    let first = index * units / ways * (size / units);
                    ranges.push(start + first..start + first + held * (size / units));
                    start += size;
                }
                Expected::Ranges(*dim, ranges)
            }
        }
    }

    fn is_on_stage(&self, name: &str, stage: u32) -> bool {
        let (stages, layers) = (self.options.parallel.pipeline, self.sizes.layers);
        let every = matches!(self.family, Family::Mixtral | Family::Qwen3Moe | Family::GptOss);
        if let Some(rest) = name.strip_prefix("model.layers.") {
            let layer: u64 = rest.split('.').next().unwrap().parse().unwrap();
            let (pp, remainder) = (u64::from(stages), layers % u64::from(stages));
            // The remainder goes to the stages before the last, from the back.
            let size = |stage: u64| layers / pp + u64::from(stage + 1 < pp && stage + 1 + remainder >= pp);
            let first: u64 = (0..u64::from(stage)).map(size).sum();
            return (first..first + size(stage.into())).contains(&layer);
        }
        match name {
            _ if every && self.options.layout == Layout::Vllm => true,
            "model.embed_tokens.weight" => stage == 0,
            _ => stage + 1 == stages,
        }
    }
}

impl Shared {
    /// Whether it is of a single expert.
    pub fn is_of_one_expert(&self) -> bool {
        matches!(self.of, Of::Expert(_))
    }
}

fn one(dim: usize, range: Range<u64>) -> Expected {
    Expected::Ranges(dim, std::iter::once(range).collect())
}

/// The rank that holds an expert, counted one by one.
fn owner(expert: u64, experts: u64, ranks: u64, placement: ExpertPlacement) -> u64 {
    match placement {
        ExpertPlacement::RoundRobin => expert % ranks,
        ExpertPlacement::Linear => {
            let mut counts = vec![experts / ranks; ranks as usize];
            (0..experts % ranks).for_each(|rank| counts[rank as usize] += 1);
            let mut owners = (0..)
                .zip(counts)
                .flat_map(|(rank, count)| (0..count).map(move |_| rank));
            owners.nth(expert as usize).unwrap()
        }
    }
}
