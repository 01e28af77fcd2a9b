//! `config.json`: what planning and keys need of it.

use crate::error::{ConfigFault, excerpt};
use crate::json;
use serde_json::{Map, Value};

/// What `config.json` says of the model. Of a multimodal model, the numbers are those of its
/// language model (`text_config`).
///
/// A number is absent where the file does not give it: what needs one says which it misses.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The classes that implement the model, for example `LlamaForCausalLM`; at least one.
    pub architectures: Vec<String>,
    /// The family, for example `llama`; of the outermost configuration.
    pub model_type: Option<String>,
    /// Width of the residual stream, in elements.
    pub hidden_size: Option<u64>,
    /// Query heads.
    pub num_attention_heads: Option<u64>,
    /// Key and value heads; as many as query heads where the file does not say.
    pub num_key_value_heads: Option<u64>,
    /// Elements per head; `hidden_size / num_attention_heads` where the file does not say and
    /// that divides.
    pub head_dim: Option<u64>,
    /// Rows of the embedding.
    pub vocab_size: Option<u64>,
    /// Decoder layers.
    pub num_hidden_layers: Option<u64>,
    /// Routed experts of a layer that has any.
    pub num_experts: Option<u64>,
    /// Groups that these are in.
    pub expert_groups: Option<u64>,
    /// Whether the output head is the embedding. Where the file does not say, transformers takes
    /// the default of the model's class, which is true for some and false for others.
    pub tie_word_embeddings: Option<bool>,
    /// The type that the weights were saved in, for example `bfloat16`.
    pub dtype: Option<String>,
    /// The quantization configuration as it stands in the file, absent where the weights are not
    /// quantized.
    pub quantization_config: Option<Value>,
}

/// The largest number that a field may hold. No dimension of a model comes near, and products of
/// two fit 64 bits.
const NUMBER_CAP: u64 = u32::MAX as u64;
/// The most that a text may take, in bytes; for `architectures`, all of them joined.
const TEXT_CAP: usize = 1024;

impl ModelConfig {
    /// The name of the quantization method (`quant_method`), where the weights are quantized and
    /// the configuration names it.
    pub fn quant_method(&self) -> Option<&str> {
        self.quantization_config.as_ref()?.get("quant_method")?.as_str()
    }

    /// Reads the bytes of `config.json`.
    pub(crate) fn parse(text: &[u8]) -> Result<ModelConfig, ConfigFault> {
        json::check(text).map_err(|fault| ConfigFault::TooMuch { fault })?;
        let value: Value =
            serde_json::from_slice(&without_python_numbers(text)).map_err(|error| ConfigFault::NotJson {
                detail: excerpt(error),
            })?;
        let Value::Object(fields) = &value else {
            return Err(wrong_type("(the whole file)".to_owned(), &value, "an object"));
        };
        let outer = Scope {
            prefix: String::new(),
            fields,
        };
        let text = outer.object("text_config")?;
        // What the language model's own configuration lacks stands in the outer one.
        let scopes: Vec<&Scope> = text.iter().chain([&outer]).collect();
        let number = |name| first(&scopes, |scope| scope.number(name));

        let names = ["n_routed_experts", "num_local_experts", "num_experts"];
        let count = |name| first(&scopes, |scope| scope.count(name));
        let num_experts = names
            .iter()
            .find_map(|name| count(name).transpose())
            .transpose()?;
        let architectures = outer.texts("architectures")?;
        if architectures.is_empty() {
            return Err(ConfigFault::Missing {
                field: "architectures",
            });
        }
        let hidden_size = number("hidden_size")?;
        let num_attention_heads = number("num_attention_heads")?;
        let even_share = match (hidden_size, num_attention_heads) {
            (Some(size), Some(heads)) if size.is_multiple_of(heads) => Some(size / heads),
            _ => None,
        };
        // `dtype` since version 5 of transformers, `torch_dtype` before.
        let dtype = first(&scopes, |scope| {
            Ok(scope.text("dtype")?.or(scope.text("torch_dtype")?))
        })?;
        // `compression_config` is what compressed-tensors wrote at first.
        let quantization = ["quantization_config", "compression_config"]
            .iter()
            .find_map(|name| {
                scopes
                    .iter()
                    .rev()
                    .find_map(|scope| scope.object(name).transpose())
            })
            .transpose()?;
        if let Some(quantization) = &quantization {
            quantization.text("quant_method")?;
        }
        Ok(ModelConfig {
            architectures,
            model_type: outer.text("model_type")?,
            hidden_size,
            num_attention_heads,
            num_key_value_heads: number("num_key_value_heads")?.or(num_attention_heads),
            head_dim: number("head_dim")?.or(even_share),
            vocab_size: number("vocab_size")?,
            num_hidden_layers: number("num_hidden_layers")?,
            num_experts,
            expert_groups: count("n_group")?,
            tie_word_embeddings: first(&scopes, |scope| scope.boolean("tie_word_embeddings"))?,
            dtype,
            quantization_config: quantization.map(|scope| Value::Object(scope.fields.clone())),
        })
    }
}

/// What the first scope that has something has.
fn first<T>(
    scopes: &[&Scope<'_>],
    read: impl Fn(&Scope<'_>) -> Result<Option<T>, ConfigFault>,
) -> Result<Option<T>, ConfigFault> {
    scopes
        .iter()
        .find_map(|scope| read(scope).transpose())
        .transpose()
}

/// An object of the file, and the path to it, which errors name.
struct Scope<'a> {
    prefix: String,
    fields: &'a Map<String, Value>,
}

impl<'a> Scope<'a> {
    /// A field and its path; null is as good as absent.
    fn get(&self, name: &str) -> Option<(String, &'a Value)> {
        let value = self.fields.get(name).filter(|value| !value.is_null())?;
        Some((format!("{}{name}", self.prefix), value))
    }

    fn number(&self, name: &str) -> Result<Option<u64>, ConfigFault> {
        let Some((field, value)) = self.get(name) else {
            return Ok(None);
        };
        match value {
            Value::Number(number) if !number.is_f64() => match number.as_u64() {
                Some(number @ 1..=NUMBER_CAP) => Ok(Some(number)),
                _ => Err(ConfigFault::OutOfRange {
                    field,
                    found: number.to_string(),
                    most: NUMBER_CAP,
                }),
            },
            other => Err(wrong_type(field, other, "a whole number")),
        }
    }

    /// A number that models without the things it counts set to 0.
    fn count(&self, name: &str) -> Result<Option<u64>, ConfigFault> {
        match self.get(name) {
            Some((_, value)) if value.as_u64() == Some(0) => Ok(None),
            _ => self.number(name),
        }
    }

    fn boolean(&self, name: &str) -> Result<Option<bool>, ConfigFault> {
        let Some((field, value)) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| wrong_type(field, value, "true or false"))
    }

    fn text(&self, name: &str) -> Result<Option<String>, ConfigFault> {
        let Some((field, value)) = self.get(name) else {
            return Ok(None);
        };
        match value {
            Value::String(text) if text.len() > TEXT_CAP => Err(too_long(field, text.len())),
            Value::String(text) => Ok(Some(text.clone())),
            other => Err(wrong_type(field, other, "a text")),
        }
    }

    /// A list of texts, empty where there is none.
    fn texts(&self, name: &str) -> Result<Vec<String>, ConfigFault> {
        let Some((field, value)) = self.get(name) else {
            return Ok(Vec::new());
        };
        const EXPECTED: &str = "a list of texts";
        let items = value
            .as_array()
            .ok_or_else(|| wrong_type(field.clone(), value, EXPECTED))?;
        let (mut texts, mut bytes) = (Vec::new(), 0);
        for item in items {
            let text = item
                .as_str()
                .ok_or_else(|| wrong_type(field.clone(), item, EXPECTED))?;
            bytes += text.len() + 1;
            if bytes > TEXT_CAP {
                return Err(too_long(field, bytes));
            }
            texts.push(text.to_owned());
        }
        Ok(texts)
    }

    fn object(&self, name: &str) -> Result<Option<Scope<'a>>, ConfigFault> {
        let Some((field, value)) = self.get(name) else {
            return Ok(None);
        };
        match value {
            Value::Object(fields) => Ok(Some(Scope {
                prefix: field + ".",
                fields,
            })),
            other => Err(wrong_type(field, other, "an object")),
        }
    }
}

fn too_long(field: String, bytes: usize) -> ConfigFault {
    ConfigFault::TooLong {
        field,
        bytes,
        cap: TEXT_CAP,
    }
}

fn wrong_type(field: String, found: &Value, expected: &'static str) -> ConfigFault {
    let found = match found {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("the text \"{}\"", excerpt(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    ConfigFault::WrongType {
        field,
        found,
        expected,
    }
}

/// Python writes numbers that JSON does not have (`NaN`, `Infinity`, `-Infinity`), for example for the
/// `time_step_limit` of Mamba 2. Nothing that is read here is one, so they become `null`.
fn without_python_numbers(json: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(json.len());
    let mut rest = json;
    let mut in_string = false;
    while let Some((&byte, after)) = rest.split_first() {
        let number = [&b"-Infinity"[..], b"Infinity", b"NaN"]
            .into_iter()
            .find(|word| rest.starts_with(word));
        match number {
            Some(word) if !in_string => {
                out.extend_from_slice(b"null");
                rest = &rest[word.len()..];
                continue;
            }
            _ => {}
        }
        out.push(byte);
        rest = after;
        if in_string && byte == b'\\' {
            if let Some((&escaped, after)) = rest.split_first() {
                out.push(escaped);
                rest = after;
            }
        } else if byte == b'"' {
            in_string = !in_string;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(json: &str) -> Result<ModelConfig, ConfigFault> {
        ModelConfig::parse(json.as_bytes())
    }

    #[test]
    fn numbers_that_only_python_writes_are_read_over() {
        let config = parse(
            r#"{"architectures":["Infinity"],"time_step_limit":[0.0,Infinity,-Infinity],"x":NaN,"model_type":"a\"NaN"}"#,
        )
        .unwrap();
        assert_eq!(config.architectures, ["Infinity"]);
        assert_eq!(config.model_type.as_deref(), Some("a\"NaN"));
        assert!(matches!(
            parse(r#"{"architectures":[Infinit]}"#),
            Err(ConfigFault::NotJson { .. })
        ));
    }

    #[test]
    fn absent_numbers_follow_from_others_or_stay_absent() {
        let config = parse(
            r#"{"architectures":["A","B"],"hidden_size":64,"num_attention_heads":4,"head_dim":null,"torch_dtype":"float16"}"#,
        )
        .unwrap();
        assert_eq!(config.architectures, ["A", "B"]);
        assert_eq!((config.num_key_value_heads, config.head_dim), (Some(4), Some(16)));
        assert_eq!(
            (config.vocab_size, config.tie_word_embeddings, config.model_type),
            (None, None, None)
        );
        assert_eq!(config.dtype.as_deref(), Some("float16"));
        let uneven = parse(r#"{"architectures":["A"],"hidden_size":65,"num_attention_heads":4}"#).unwrap();
        assert_eq!(uneven.head_dim, None);
    }

    #[test]
    fn the_language_model_of_a_multimodal_one_comes_first() {
        let config = parse(
            r#"{"architectures":["Llava"],"model_type":"llava","hidden_size":7,"vocab_size":9,"dtype":"float32",
                "text_config":{"model_type":"llama","hidden_size":64,"num_attention_heads":2,"num_key_value_heads":1,
                               "dtype":"bfloat16","quantization_config":{"quant_method":"fp8"}}}"#,
        )
        .unwrap();
        assert_eq!(
            (config.hidden_size, config.vocab_size, config.num_key_value_heads),
            (Some(64), Some(9), Some(1))
        );
        assert_eq!(
            (config.model_type.as_deref(), config.dtype.as_deref()),
            (Some("llava"), Some("bfloat16"))
        );
        assert_eq!(config.quant_method(), Some("fp8"));
    }

    #[test]
    fn a_wrong_field_is_named_with_its_path() {
        let with = |field: &str| {
            parse(&format!(r#"{{"architectures":["A"],{field}}}"#))
                .unwrap_err()
                .to_string()
        };
        let table = [
            (r#""hidden_size":"64""#, "field hidden_size: is the text \"64\""),
            (r#""hidden_size":0"#, "field hidden_size: 0 is out of range"),
            (r#""vocab_size":-1"#, "field vocab_size: -1 is out of range"),
            (
                r#""vocab_size":4294967296"#,
                "field vocab_size: 4294967296 is out of range",
            ),
            (r#""head_dim":1.5"#, "field head_dim: is 1.5"),
            (
                r#""text_config":{"num_hidden_layers":[]}"#,
                "field text_config.num_hidden_layers: is a list",
            ),
            (r#""text_config":3"#, "field text_config: is 3"),
            (r#""tie_word_embeddings":1"#, "field tie_word_embeddings: is 1"),
            (
                r#""quantization_config":[]"#,
                "field quantization_config: is a list",
            ),
            (
                r#""text_config":{"quantization_config":{"quant_method":4}}"#,
                "field text_config.quantization_config.quant_method: is 4",
            ),
            (r#""model_type":{}"#, "field model_type: is an object"),
        ];
        for (field, expected) in table {
            let message = with(field);
            assert!(message.contains(expected), "{message}");
        }
        assert_eq!(
            parse("{}").unwrap_err(),
            ConfigFault::Missing {
                field: "architectures"
            }
        );
        assert!(matches!(parse("[1"), Err(ConfigFault::NotJson { .. })));
        assert!(matches!(parse("[1]"), Err(ConfigFault::WrongType { .. })));
        let long = format!(r#"{{"architectures":["{}"]}}"#, "A".repeat(1024));
        assert!(matches!(parse(&long), Err(ConfigFault::TooLong { .. })));
    }

    proptest! {
        #[test]
        fn arbitrary_fields_never_panic(
            name in "architectures|hidden_size|text_config|quantization_config|head_dim|dtype",
            value in r#"[\[\]{}"a-c:,.0-9e-]{0,30}"#,
        ) {
            let _ = parse(&value);
            let _ = parse(&format!(r#"{{"architectures":["A"],"{name}":{value}}}"#));
        }
    }
}
