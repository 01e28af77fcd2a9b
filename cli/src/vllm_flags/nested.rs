//! Flags that are given a key at a time: `--speculative-config.method mtp`.

use serde_json::{Map, Value};

/// The object that a flag's keys make.
#[derive(Debug, Default)]
pub struct Nested(Map<String, Value>);

impl Nested {
    /// Sets `path`, keys with dots between them, to a text that is JSON or else itself. A `+` at the end
    /// of the path says that the text is a list with commas.
    ///
    /// # Errors
    /// The key that is there already.
    pub fn set(&mut self, path: &str, text: &str) -> Result<(), String> {
        let (path, value) = match path.strip_suffix('+') {
            Some(path) => (path, Value::Array(text.split(',').map(Value::from).collect())),
            None => (path, parse(text)),
        };
        let value = path.rsplit('.').fold(value, |value, key| {
            let key = key.to_owned();
            Value::Object(Map::from_iter([(key, value)]))
        });
        match value {
            Value::Object(object) => merge(&mut self.0, object, ""),
            _ => unreachable!("a path has a key"),
        }
    }

    /// Adds the keys of an object.
    ///
    /// # Errors
    /// The key that is there already.
    pub fn add(&mut self, object: Map<String, Value>) -> Result<(), String> {
        merge(&mut self.0, object, "")
    }

    pub fn json(&self) -> String {
        Value::Object(self.0.clone()).to_string()
    }
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| text.into())
}

fn merge(into: &mut Map<String, Value>, from: Map<String, Value>, under: &str) -> Result<(), String> {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (None, value) => {
                into.insert(key, value);
            }
            (Some(Value::Object(old)), Value::Object(new)) => merge(old, new, &format!("{under}{key}."))?,
            (Some(Value::Array(old)), Value::Array(new)) => old.extend(new),
            (Some(_), _) => return Err(format!("{under}{key}")),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_make_an_object() {
        let mut nested = Nested::default();
        nested.set("method", "mtp").unwrap();
        nested.set("tokens", "3").unwrap();
        nested.set("deep.er", "\"4\"").unwrap();
        nested.set("deep.list+", "a,b").unwrap();
        nested.set("deep.list+", "c").unwrap();
        nested
            .add(Map::from_iter([("model".to_owned(), json!("m"))]))
            .unwrap();
        let expected = json!({
            "method": "mtp",
            "tokens": 3,
            "deep": { "er": "4", "list": ["a", "b", "c"] },
            "model": "m",
        });
        assert_eq!(serde_json::from_str::<Value>(&nested.json()).unwrap(), expected);
    }

    #[test]
    fn a_key_given_twice_is_named() {
        let mut nested = Nested::default();
        nested.set("deep.er", "4").unwrap();
        assert_eq!(nested.set("deep.er", "5"), Err("deep.er".to_owned()));
        assert_eq!(nested.set("deep", "5"), Err("deep".to_owned()));
        assert_eq!(nested.set("deep.er.still", "5"), Err("deep.er".to_owned()));
    }
}
