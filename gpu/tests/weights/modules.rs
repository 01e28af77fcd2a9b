//! Taking weights apart, and finding that nothing is missing.

use crate::*;
use weightd_gpu::{Missing, Module};

fn model() -> Weights {
    mapped(&[b"0123456789"], |builder| {
        builder.tensor("model.layers.1.mlp.up.weight", u8s(&[2], None, 0, 0));
        builder.tensor("model.layers.10.mlp.up.weight", u8s(&[2], None, 0, 2));
        builder.tensor("model.layers.1.norm", u8s(&[1], None, 0, 4));
        builder.tensor("model.layers.1", u8s(&[1], None, 0, 5));
        builder.tensor("model.embed.weight", u8s(&[4], None, 0, 6));
        builder.alias("model.layers.1.head.weight", "model.embed.weight");
    })
}

fn names<'a>(module: &Module<'a>) -> Vec<(&'a str, Vec<u8>)> {
    let tensors = module.tensors();
    tensors.map(|(name, view)| (name, packed(&view))).collect()
}

#[test]
fn a_module_has_its_tensors_and_aliases_and_no_neighbours() {
    let weights = model();
    let layer = weights.module("model.layers.1");
    assert_eq!(layer.path(), "model.layers.1");
    let expected = [
        ("head.weight", b"6789".to_vec()),
        ("mlp.up.weight", b"01".to_vec()),
        ("norm", b"4".to_vec()),
    ];
    assert_eq!(names(&layer), expected);
    assert_eq!(
        layer.get("norm").unwrap().address(),
        weights.get("model.layers.1.norm").unwrap().address()
    );
    assert_eq!(layer.get("head.weight").unwrap().name, "model.embed.weight");
    assert!(layer.get("").is_none() && layer.get("mlp").is_none() && layer.get("0.norm").is_none());
    assert!(!layer.is_empty());
    for absent in [
        "model.layers.2",
        "model.layers.1.",
        "layers.1",
        "model.layers.1.norm",
    ] {
        assert!(weights.module(absent).is_empty(), "{absent}");
    }
}

#[test]
fn modules_nest_and_what_they_give_outlives_them() {
    let weights = model();
    let up = weights.module("model").module("layers.1").module("mlp");
    assert_eq!(up.path(), "model.layers.1.mlp");
    let view = {
        let up = up.module("up");
        up.get("weight").unwrap()
    };
    assert_eq!(packed(&view), b"01");
    assert_eq!(up.module("").path(), up.path());
    let all = weights.module("");
    assert_eq!((all.path(), names(&all).len()), ("", 6));
    assert_eq!(all.module("model").path(), "model");
    assert_eq!(packed(&all.get("model.layers.1").unwrap()), b"5");
}

#[test]
fn a_module_sees_what_the_engine_made_its_own() {
    let mut weights = model();
    weights
        .make_writable(|name| name == "model.layers.1.norm")
        .unwrap();
    weights.get_mut("model.layers.1.norm").unwrap()[0] = b'!';
    assert_eq!(
        names(&weights.module("model.layers.1"))[2],
        ("norm", b"!".to_vec())
    );
}

#[test]
fn tensors_of_the_model_without_data_are_all_named() {
    let weights = model();
    weights.require([]).unwrap();
    weights
        .require(["model.layers.1.norm", "model.layers.1.head.weight"])
        .unwrap();
    let missing = weights.require(["b", "model.layers.1.norm", "a"]).unwrap_err();
    let names = ["b", "a"].map(str::to_owned).to_vec();
    assert_eq!(missing, Missing { names });
    assert_eq!(
        missing.to_string(),
        "no data for 2 of the model's tensors: b, a; make them in the engine, or load a checkpoint and layout \
         that has them"
    );
    let many: Vec<String> = (0..20).map(|number| number.to_string()).collect();
    let missing = weights.require(many.iter().map(String::as_str)).unwrap_err();
    assert_eq!(missing.names, many);
    let text = missing.to_string();
    assert!(
        text.starts_with("no data for 20 of the model's tensors: 0, 1, 2, 3, 4, 5, 6, 7 and 12 more; "),
        "{text}"
    );
}

/// Any thread may use and drop them: the compiler checks it.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Weights>();
    shared::<Module<'_>>();
    shared::<TensorView<'_>>();
    shared::<weightd_gpu::Owned>();
    shared::<Mapping>();
};
