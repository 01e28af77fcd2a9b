//! Patterns over tensor names.

/// Whether `pattern` names the module that `tensor` belongs to.
pub(super) fn covers(pattern: &str, tensor: &str) -> bool {
    let Some((module, _)) = tensor.rsplit_once('.') else {
        return false;
    };
    let mut parts = module.split('.');
    let all = pattern.split('.').all(|wanted| {
        parts.next().is_some_and(|part| match wanted {
            "*" => !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()),
            _ => part == wanted,
        })
    });
    all && parts.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::covers;

    #[test]
    fn a_pattern_covers_the_tensors_of_its_modules_alone() {
        let pattern = "model.layers.*.mlp.up_proj";
        assert!(covers(pattern, "model.layers.0.mlp.up_proj.weight"));
        assert!(covers(pattern, "model.layers.126.mlp.up_proj.bias"));
        for other in [
            "model.layers.0.mlp.up_proj",
            "model.layers.0.mlp.up_proj.lora.weight",
            "model.layers.x.mlp.up_proj.weight",
            "model.layers..mlp.up_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
            "draft.model.layers.0.mlp.up_proj.weight",
            "weight",
            "",
        ] {
            assert!(!covers(pattern, other), "{other}");
        }
        assert!(covers("lm_head", "lm_head.weight"));
    }
}
