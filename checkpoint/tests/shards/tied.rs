//! Output heads that are the embedding.

use super::made::execute::execute;
use super::made::{Decoder, Made, SMALL, Tensor, content, data, tensor_parallel, width, world};
use super::{plan, stored};
use serde_json::{Value, json};
use weightd_checkpoint::{Checkpoint, Layout, ShardingOptions};

#[test]
fn a_tied_head_that_the_checkpoint_lacks_is_an_alias() {
    let checkpoint = Checkpoint::open(&data("qwen3")).unwrap();
    for rank in plan(&checkpoint, &tensor_parallel(2)).unwrap().ranks() {
        let aliases: Vec<_> = rank
            .manifest
            .aliases()
            .map(|(alias, tensor)| (alias, tensor.name))
            .collect();
        assert_eq!(aliases, [("lm_head.weight", "model.embed_tokens.weight")]);
    }
}

#[test]
fn a_tied_head_that_the_checkpoint_has_is_stored_once_if_it_is_the_embedding_and_else_as_it_is() {
    let tied = |tied: Value, head: &'static str| {
        let mut config = SMALL.config();
        config["tie_word_embeddings"] = tied;
        let made = Made::filled(&config, &[SMALL.tensors()], |name, dtype, elements| {
            let name = if name == "lm_head.weight" { head } else { name };
            content(name, elements * width(dtype))
        });
        let checkpoint = made.open();
        let plan = plan(&checkpoint, &tensor_parallel(1)).unwrap();
        let held = execute(&checkpoint, &plan);
        assert_eq!(held[0]["lm_head.weight"], stored(&checkpoint, "lm_head.weight"));
        let manifest = &plan.ranks()[0].manifest;
        let aliases: Vec<String> = manifest.aliases().map(|(name, _)| name.to_owned()).collect();
        (manifest.tensors().len(), aliases)
    };
    let all = SMALL.tensors().len();
    let (copy, other) = ("model.embed_tokens.weight", "another");
    assert_eq!(
        tied(json!(true), copy),
        (all - 1, vec!["lm_head.weight".to_owned()])
    );
    assert_eq!(tied(json!(true), other), (all, vec![]), "a head of its own");
    assert_eq!(tied(json!(false), copy), (all, vec![]));
    assert_eq!(tied(json!(null), copy), (all, vec![]), "Llama's default");
}

#[test]
fn a_tied_head_is_on_the_first_and_the_last_stage_in_both_layouts() {
    let mut config = SMALL.config();
    config["tie_word_embeddings"] = json!(true);
    config["num_hidden_layers"] = json!(3);
    let mut tensors: Vec<Tensor> = Decoder { layers: 3, ..SMALL }.tensors();
    tensors.retain(|(name, ..)| name != "lm_head.weight");
    let checkpoint = Made::new(&config, &[tensors]).open();
    for layout in [Layout::Checkpoint, Layout::Vllm] {
        let options = ShardingOptions {
            layout,
            ..world(1, 3, 1)
        };
        let held = execute(&checkpoint, &plan(&checkpoint, &options).unwrap());
        let (embedding, head) = ("model.embed_tokens.weight", "lm_head.weight");
        for (stage, here) in [true, false, true].into_iter().enumerate() {
            assert_eq!(
                held[stage].contains_key(embedding),
                here,
                "{layout}, stage {stage}"
            );
            assert_eq!(
                held[stage].get(head),
                held[stage].get(embedding),
                "{layout}, stage {stage}"
            );
        }
        assert_eq!(held[0][embedding], held[2][embedding]);
        let norms: Vec<bool> = held
            .iter()
            .map(|held| held.contains_key("model.norm.weight"))
            .collect();
        assert_eq!(norms, [false, false, true], "{layout}");
    }
}

#[test]
fn a_tied_head_is_wherever_its_embedding_is() {
    // vLLM has this model's embedding on every stage.
    let mut config = SMALL.config();
    config["architectures"] = json!(["Qwen3MoeForCausalLM"]);
    config["tie_word_embeddings"] = json!(true);
    config["num_hidden_layers"] = json!(3);
    let mut tensors: Vec<Tensor> = Decoder { layers: 3, ..SMALL }.tensors();
    tensors.retain(|(name, ..)| name != "lm_head.weight");
    let checkpoint = Made::new(&config, &[tensors]).open();
    let options = ShardingOptions {
        layout: Layout::Vllm,
        ..world(1, 3, 1)
    };
    for held in execute(&checkpoint, &plan(&checkpoint, &options).unwrap()) {
        assert!(held.contains_key("model.embed_tokens.weight"));
        assert_eq!(held["lm_head.weight"], held["model.embed_tokens.weight"]);
    }
}

#[test]
fn a_model_without_a_language_head_gets_none() {
    for (architecture, aliases) in [
        ("BertForSequenceClassification", 0),
        ("LlamaModel", 0),
        ("UnknownForCausalLM", 1),
    ] {
        let mut config = SMALL.config();
        config["architectures"] = json!([architecture]);
        config["tie_word_embeddings"] = json!(true);
        let mut tensors = SMALL.tensors();
        tensors.retain(|(name, ..)| name != "lm_head.weight");
        let made = Made::new(&config, &[tensors]);
        let plan = plan(&made.open(), &tensor_parallel(1)).unwrap();
        assert_eq!(
            plan.ranks()[0].manifest.aliases().len(),
            aliases,
            "{architecture}"
        );
    }
}

#[test]
fn a_checkpoint_that_kept_only_the_tied_head_lists_the_embedding() {
    let mut config = SMALL.config();
    config["tie_word_embeddings"] = json!(true);
    let made = Made::new(&config, &[SMALL.tensors().split_off(1)]);
    let plan = plan(&made.open(), &tensor_parallel(2)).unwrap();
    let of = plan.ranks()[1]
        .manifest
        .get("model.embed_tokens.weight")
        .unwrap()
        .name;
    assert_eq!(of, "lm_head.weight");
}
