//! Values of flags that change nothing of the weights, although other values would.

use serde_json::Value;

pub fn never(_: &str) -> bool {
    false
}

pub fn is_zero(value: &str) -> bool {
    value.parse::<f64>() == Ok(0.0)
}

pub fn is_empty_object(value: &str) -> bool {
    fields(value).is_some_and(|fields| fields.is_empty())
}

/// Overrides of what rotary embeddings are computed from.
pub fn only_rotary(value: &str) -> bool {
    const ROTARY: [&str; 4] = [
        "rope_scaling",
        "rope_theta",
        "rope_parameters",
        "max_position_embeddings",
    ];
    fields(value).is_some_and(|fields| fields.iter().all(|field| ROTARY.contains(&field.as_str())))
}

fn fields(json: &str) -> Option<Vec<String>> {
    match serde_json::from_str(json) {
        Ok(Value::Object(object)) => Some(object.into_iter().map(|(name, _)| name).collect()),
        _ => None,
    }
}
