//! The tensors of the generated checkpoints.

use super::{Case, Family, Of, Share, Shared, Sizes};

impl Case {
    pub fn tensors(&self) -> Vec<Shared> {
        let Sizes {
            layers,
            hidden,
            vocabulary,
            ..
        } = self.sizes;
        let mut list = List(Vec::new());
        list.add(
            "model.embed_tokens.weight",
            &[vocabulary, hidden],
            Share::Vocabulary,
            Of::Model,
        );
        for layer in 0..layers {
            let prefix = format!("model.layers.{layer}");
            if self.family == Family::Planned {
                self.planned(&mut list, &prefix);
                continue;
            }
            self.attention(&mut list, &format!("{prefix}.self_attn"));
            match self.family.has_experts() && !(self.family == Family::DeepseekV3 && layer == 0) {
                true => self.experts(&mut list, &prefix),
                false => self.mlp(&mut list, &format!("{prefix}.mlp"), Of::Model),
            }
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                list.add(
                    &format!("{prefix}.{norm}.weight"),
                    &[hidden],
                    Share::Whole,
                    Of::Model,
                );
            }
        }
        list.add("model.norm.weight", &[hidden], Share::Whole, Of::Model);
        list.add(
            "lm_head.weight",
            &[vocabulary, hidden],
            Share::Vocabulary,
            Of::Model,
        );
        list.0
    }

    /// A tensor for every style.
    fn planned(&self, list: &mut List, layer: &str) {
        let Sizes {
            hidden,
            heads,
            kv_heads,
            head_dim,
            intermediate,
            ..
        } = self.sizes;
        let (q, kv, part) = (
            heads * head_dim,
            kv_heads * head_dim,
            (intermediate, intermediate),
        );
        let mut add =
            |name: &str, shape: &[u64], share| list.add(&format!("{layer}.{name}"), shape, share, Of::Model);
        let cut = |dim, sections: &[(u64, u64)]| Share::Cut {
            dim,
            sections: sections.to_vec(),
        };
        add("column.weight", &[intermediate, hidden], cut(0, &[part]));
        add("column.bias", &[intermediate], cut(0, &[part]));
        add("column.deep", &[2, 3, intermediate, hidden], cut(2, &[part]));
        add("row.weight", &[hidden, intermediate], cut(1, &[part]));
        add("row.bias", &[hidden], Share::Whole);
        add(
            "packed_column.weight",
            &[2 * intermediate, hidden],
            cut(0, &[part, part]),
        );
        add("packed_column.bias", &[2 * intermediate], cut(0, &[part, part]));
        add(
            "packed_row.weight",
            &[hidden, 2 * intermediate],
            cut(1, &[part, part]),
        );
        add("packed_row.bias", &[hidden], Share::Whole);
        let (heads_of, kv_heads_of) = ((q, heads), (kv, kv_heads));
        add(
            "qkv.weight",
            &[q + 2 * kv, hidden],
            cut(0, &[heads_of, kv_heads_of, kv_heads_of]),
        );
        add(
            "heads.weight",
            &[5 * heads, hidden],
            cut(0, &[(5 * heads, heads)]),
        );
        add("q_proj.weight", &[q, hidden], cut(0, &[heads_of]));
        add("k_proj.weight", &[kv, hidden], cut(0, &[kv_heads_of]));
        add("whole.weight", &[3, hidden], Share::Whole);
        add("unnamed.weight", &[3, hidden], Share::Whole);
    }

    fn attention(&self, list: &mut List, module: &str) {
        let Sizes {
            hidden,
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.sizes;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let input = |size: u64| Share::Cut {
            dim: 1,
            sections: vec![(size, heads)],
        };
        match self.family {
            Family::DeepseekV3 => {
                list.linear(&format!("{module}.q_a_proj"), 5, hidden, Share::Whole, Of::Model);
                list.add(
                    &format!("{module}.q_a_layernorm.weight"),
                    &[5],
                    Share::Whole,
                    Of::Model,
                );
                list.linear(
                    &format!("{module}.q_b_proj"),
                    q,
                    5,
                    outputs(&[(q, heads)]),
                    Of::Model,
                );
                list.linear(
                    &format!("{module}.kv_a_proj_with_mqa"),
                    7,
                    hidden,
                    Share::Whole,
                    Of::Model,
                );
                list.add(
                    &format!("{module}.kv_a_layernorm.weight"),
                    &[3],
                    Share::Whole,
                    Of::Model,
                );
                list.linear(
                    &format!("{module}.kv_b_proj"),
                    2 * q,
                    3,
                    outputs(&[(2 * q, heads)]),
                    Of::Model,
                );
            }
            Family::Phi3 => {
                let sections = outputs(&[(q, heads), (kv, kv_heads), (kv, kv_heads)]);
                list.linear(
                    &format!("{module}.qkv_proj"),
                    q + 2 * kv,
                    hidden,
                    sections,
                    Of::Model,
                );
            }
            _ => {
                for (name, size, units) in [("q", q, heads), ("k", kv, kv_heads), ("v", kv, kv_heads)] {
                    let name = format!("{module}.{name}_proj");
                    list.linear(&name, size, hidden, outputs(&[(size, units)]), Of::Model);
                    if matches!(self.family, Family::Llama | Family::GptOss) {
                        list.add(
                            &format!("{name}.bias"),
                            &[size],
                            outputs(&[(size, units)]),
                            Of::Model,
                        );
                    }
                }
            }
        }
        list.linear(&format!("{module}.o_proj"), hidden, q, input(q), Of::Model);
        match self.family {
            Family::Llama => list.add(
                &format!("{module}.o_proj.bias"),
                &[hidden],
                Share::Whole,
                Of::Model,
            ),
            Family::GptOss => list.add(
                &format!("{module}.sinks"),
                &[heads],
                outputs(&[(heads, heads)]),
                Of::Model,
            ),
            Family::Qwen3 | Family::Qwen3Moe => {
                for norm in ["q_norm", "k_norm"] {
                    list.add(
                        &format!("{module}.{norm}.weight"),
                        &[head_dim],
                        Share::Whole,
                        Of::Model,
                    );
                }
            }
            _ => {}
        }
    }

    fn mlp(&self, list: &mut List, module: &str, of: Of) {
        let Sizes {
            hidden, intermediate, ..
        } = self.sizes;
        let part = (intermediate, intermediate);
        match self.family {
            Family::Phi3 => {
                let both = outputs(&[part, part]);
                list.linear(
                    &format!("{module}.gate_up_proj"),
                    2 * intermediate,
                    hidden,
                    both,
                    of,
                );
            }
            _ => {
                for name in ["gate_proj", "up_proj"] {
                    list.linear(
                        &format!("{module}.{name}"),
                        intermediate,
                        hidden,
                        outputs(&[part]),
                        of,
                    );
                }
            }
        }
        let input = Share::Cut {
            dim: 1,
            sections: vec![part],
        };
        list.linear(&format!("{module}.down_proj"), hidden, intermediate, input, of);
    }

    fn experts(&self, list: &mut List, layer: &str) {
        let Sizes {
            hidden,
            intermediate,
            experts,
            ..
        } = self.sizes;
        let input = |dim| Share::Cut {
            dim,
            sections: vec![(intermediate, intermediate)],
        };
        let output = || outputs(&[(intermediate, intermediate)]);
        match self.family {
            Family::GptOss => {
                list.linear(
                    &format!("{layer}.mlp.router"),
                    experts,
                    hidden,
                    Share::Whole,
                    Of::Model,
                );
                list.add(
                    &format!("{layer}.mlp.router.bias"),
                    &[experts],
                    Share::Whole,
                    Of::Model,
                );
                let of = |name: &str| format!("{layer}.mlp.experts.{name}");
                // Gate and up alternate: pairs stay together.
                let pairs = |dim| Share::Cut {
                    dim,
                    sections: vec![(2 * intermediate, intermediate)],
                };
                list.add(
                    &of("gate_up_proj"),
                    &[experts, hidden, 2 * intermediate],
                    pairs(2),
                    Of::Experts,
                );
                list.add(
                    &of("gate_up_proj_bias"),
                    &[experts, 2 * intermediate],
                    pairs(1),
                    Of::Experts,
                );
                list.add(
                    &of("down_proj"),
                    &[experts, intermediate, hidden],
                    input(1),
                    Of::Experts,
                );
                list.add(
                    &of("down_proj_bias"),
                    &[experts, hidden],
                    Share::Whole,
                    Of::Experts,
                );
            }
            Family::Mixtral => {
                let module = format!("{layer}.block_sparse_moe");
                list.linear(
                    &format!("{module}.gate"),
                    experts,
                    hidden,
                    Share::Whole,
                    Of::Model,
                );
                for expert in 0..experts {
                    let of = |name: &str| format!("{module}.experts.{expert}.{name}");
                    list.linear(&of("w1"), intermediate, hidden, output(), Of::Expert(expert));
                    list.linear(&of("w2"), hidden, intermediate, input(1), Of::Expert(expert));
                    list.linear(&of("w3"), intermediate, hidden, output(), Of::Expert(expert));
                }
            }
            _ => {
                list.linear(
                    &format!("{layer}.mlp.gate"),
                    experts,
                    hidden,
                    Share::Whole,
                    Of::Model,
                );
                if self.family == Family::DeepseekV3 {
                    let bias = format!("{layer}.mlp.gate.e_score_correction_bias");
                    list.add(&bias, &[experts], Share::Whole, Of::Model);
                    list.0.last_mut().unwrap().tensor.1 = "F32";
                    self.mlp(list, &format!("{layer}.mlp.shared_experts"), Of::SharedExpert);
                }
                for expert in 0..experts {
                    self.mlp(list, &format!("{layer}.mlp.experts.{expert}"), Of::Expert(expert));
                }
            }
        }
    }
}

fn outputs(sections: &[(u64, u64)]) -> Share {
    Share::Cut {
        dim: 0,
        sections: sections.to_vec(),
    }
}

struct List(Vec<Shared>);

impl List {
    fn add(&mut self, name: &str, shape: &[u64], share: Share, of: Of) {
        self.0.push(Shared {
            tensor: (name.to_owned(), "BF16", shape.to_vec()),
            share,
            of,
        });
    }

    fn linear(&mut self, module: &str, out: u64, input: u64, share: Share, of: Of) {
        self.add(&format!("{module}.weight"), &[out, input], share, of);
    }
}
