//! Tensor names: which module a tensor belongs to, which layer and which expert that is.

/// Whether `pattern` names the tensor itself, or the module that it belongs to. `*` stands for one
/// number, and a last `**` for anything.
pub(super) fn covers(pattern: &str, tensor: &str) -> bool {
    let mut there = parts(tensor);
    for wanted in parts(pattern) {
        let Some(part) = there.next() else { return false };
        match wanted {
            "**" => return true,
            "*" if number(part).is_some() => {}
            _ if part == wanted => {}
            _ => return false,
        }
    }
    // Nothing may be left, or the tensor's own name within its module.
    there.next().is_none() || there.next().is_none()
}

/// A name with `*` for every number: what a pattern for it and its kin looks like.
pub(super) fn generic(tensor: &str) -> String {
    let mut generic = String::with_capacity(tensor.len());
    for (place, part) in parts(tensor).enumerate() {
        generic.push_str(if place > 0 { "." } else { "" });
        generic.push_str(if number(part).is_some() { "*" } else { part });
    }
    generic
}

/// The decoder layer that a tensor belongs to.
pub(super) fn layer(tensor: &str) -> Option<u64> {
    numbered(tensor, &["layers", "layer", "h"])
}

/// The expert that a tensor belongs to, or of which it holds all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expert {
    /// One of them.
    One(u64),
    /// All of a layer, along dimension 0.
    Stacked,
}

pub(super) fn expert(tensor: &str) -> Option<Expert> {
    match numbered(tensor, &[EXPERTS]) {
        Some(number) => Some(Expert::One(number)),
        None => parts(tensor)
            .any(|part| part == EXPERTS)
            .then_some(Expert::Stacked),
    }
}

/// The last part of the name of the module that a tensor belongs to.
pub(super) fn module(tensor: &str) -> &str {
    let module = tensor.rsplit_once('.').map_or("", |(module, _)| module);
    module.rsplit('.').next().unwrap_or(module)
}

/// The name without the expert's number.
pub(super) fn without_expert(tensor: &str) -> String {
    let mut after = false;
    let keep = |part: &&str| {
        let is_number = after && number(part).is_some();
        after = *part == EXPERTS;
        !is_number
    };
    parts(tensor).filter(keep).collect::<Vec<_>>().join(".")
}

const EXPERTS: &str = "experts";

/// The number after the first of `words` that has one.
fn numbered(tensor: &str, words: &[&str]) -> Option<u64> {
    let mut is_after = false;
    parts(tensor).find_map(|part| {
        let number = number(part).filter(|_| is_after);
        is_after = words.contains(&part);
        number
    })
}

/// What stands between the dots.
fn parts(name: &str) -> impl Iterator<Item = &str> {
    // One of several characters is looked for one by one: faster than a search, so close as dots are.
    name.split(['.'])
}

fn number(part: &str) -> Option<u64> {
    let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| part.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_covers_the_tensors_of_its_modules_alone() {
        let pattern = "model.layers.*.mlp.up_proj";
        assert!(covers(pattern, "model.layers.0.mlp.up_proj.weight"));
        assert!(covers(pattern, "model.layers.126.mlp.up_proj.bias"));
        assert!(covers(pattern, "model.layers.0.mlp.up_proj"), "the tensor itself");
        for other in [
            "model.layers.0.mlp.up_proj.lora.weight",
            "model.layers.x.mlp.up_proj.weight",
            "model.layers..mlp.up_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
            "model.layers.0.mlp.up_proj_bias",
            "draft.model.layers.0.mlp.up_proj.weight",
            "weight",
            "",
        ] {
            assert!(!covers(pattern, other), "{other}");
        }
        assert!(covers("lm_head", "lm_head.weight"));
        assert!(covers("**", "anything.at.all"));
        assert!(covers("model.**", "model.norm.weight") && !covers("model.**", "lm_head.weight"));
    }

    #[test]
    fn names_say_layer_and_expert() {
        let name = "model.layers.12.mlp.experts.255.gate_proj.weight";
        assert_eq!((layer(name), expert(name)), (Some(12), Some(Expert::One(255))));
        assert_eq!(
            expert("model.layers.1.mlp.experts.gate_up_proj"),
            Some(Expert::Stacked)
        );
        assert_eq!(expert("model.layers.1.mlp.shared_experts.up_proj.weight"), None);
        assert_eq!(layer("encoder.layer.3.output.dense.bias"), Some(3));
        assert_eq!(
            (layer("model.norm.weight"), layer("layers.x.weight")),
            (None, None)
        );
        assert_eq!(generic(name), "model.layers.*.mlp.experts.*.gate_proj.weight");
        assert_eq!(
            without_expert(name),
            "model.layers.12.mlp.experts.gate_proj.weight"
        );
        let long = format!("layers.{}9.weight", u64::MAX);
        assert_eq!(layer(&long), None);
    }
}
