//! `--speculative-config`: what vLLM is told of speculative decoding.

use crate::error::CliError;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use weightd_checkpoint::{Checkpoint, CheckpointError, Draft};

/// What weights matter to of it; the rest is the engine's.
#[derive(Debug, Deserialize)]
struct Config {
    method: Option<String>,
    model: Option<PathBuf>,
    #[serde(default)]
    revision: Option<String>,
    draft_tensor_parallel_size: Option<u32>,
    quantization: Option<String>,
}

/// How an engine drafts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Speculative {
    /// With weights that are cached.
    Drafted(Drafted),
    /// Otherwise: by a method of this name.
    NotCached(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drafted {
    pub kind: Draft,
    /// Its checkpoint, where that is not the target's.
    pub model: Option<PathBuf>,
    /// The revision of that which was asked for, empty for none.
    pub revision: String,
    /// The quantization method that was asked for.
    pub quantization: Option<String>,
}

impl Speculative {
    /// Reads the JSON that vLLM takes. `tp` is the target's tensor parallel size.
    pub fn parse(json: &str, tp: u32) -> Result<Speculative, CliError> {
        let config = Config::parse(json)?;
        let method = match (config.method, &config.model) {
            (Some(method), _) => method,
            (None, Some(model)) => method_of(model).map_err(|error| {
                usage(format!(
                    "the method cannot be told from the draft: {error}; name it"
                ))
            })?,
            (None, None) => return Err(usage("name a method: mtp, eagle or eagle3".to_owned())),
        };
        let Some(kind) = kind_of(&method) else {
            return Ok(Speculative::NotCached(method));
        };
        if kind == Draft::Eagle && config.model.is_none() {
            return Err(usage(format!(
                "method {method} needs the draft's checkpoint: give \"model\""
            )));
        }
        match config.draft_tensor_parallel_size {
            Some(size) if size != tp => Err(usage(format!(
                "draft_tensor_parallel_size {size} is not the target's {tp}: the draft is held by the target's ranks, leave \
                 it out"
            ))),
            _ => Ok(Speculative::Drafted(Drafted {
                kind,
                model: config.model,
                revision: config.revision.unwrap_or_default(),
                quantization: config.quantization,
            })),
        }
    }
}

/// The same JSON with the directory that `find` says in the place of the draft's repository, where the draft
/// is cached.
pub fn located(
    json: &str,
    find: impl Fn(&Path, &str) -> Result<PathBuf, CliError>,
) -> Result<String, CliError> {
    let config = Config::parse(json)?;
    let (Some(model), true) = (
        config.model,
        config.method.is_none_or(|name| kind_of(&name).is_some()),
    ) else {
        return Ok(json.to_owned());
    };
    let dir = find(&model, &config.revision.unwrap_or_default())?;
    let mut located: Value = serde_json::from_str(json).map_err(CliError::usage)?;
    located["model"] = serde_json::to_value(dir).map_err(CliError::usage)?;
    Ok(located.to_string())
}

impl Config {
    fn parse(json: &str) -> Result<Config, CliError> {
        serde_json::from_str(json).map_err(|error| {
            usage(format!(
                "{error}; expected JSON such as {{\"method\": \"eagle3\", \"model\": \"DIR\"}}"
            ))
        })
    }
}

fn usage(why: String) -> CliError {
    CliError::Usage(format!("--speculative-config: {why}"))
}

/// The draft that a method has, where it is cached.
fn kind_of(method: &str) -> Option<Draft> {
    match method {
        "eagle" | "eagle3" => Some(Draft::Eagle),
        // vLLM also takes `deepseek_mtp` and the like.
        "mtp" => Some(Draft::Mtp),
        other => other.ends_with("_mtp").then_some(Draft::Mtp),
    }
}

/// The method that a draft's checkpoint is for, by its architecture; any other model just drafts.
fn method_of(model: &Path) -> Result<String, CheckpointError> {
    let checkpoint = Checkpoint::open(model)?;
    let architecture = checkpoint.config().architectures.join(",").to_lowercase();
    let known = ["eagle3", "eagle", "mtp"];
    let found = known.into_iter().find(|method| architecture.contains(method));
    Ok(found.unwrap_or("draft_model").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Speculative, String> {
        Speculative::parse(json, 2).map_err(|error| error.to_string())
    }

    #[test]
    fn methods_with_weights_to_cache_are_told_from_others() {
        let draft = |kind, model: Option<&str>| {
            Ok(Speculative::Drafted(Drafted {
                kind,
                model: model.map(PathBuf::from),
                revision: String::new(),
                quantization: None,
            }))
        };
        assert_eq!(
            parse(r#"{"method":"mtp","num_speculative_tokens":1}"#),
            draft(Draft::Mtp, None)
        );
        assert_eq!(
            parse(r#"{"method":"deepseek_mtp","model":"m"}"#),
            draft(Draft::Mtp, Some("m"))
        );
        assert_eq!(
            parse(r#"{"method":"eagle3","model":"m","draft_tensor_parallel_size":2}"#),
            draft(Draft::Eagle, Some("m"))
        );
        assert_eq!(
            parse(r#"{"method":"ngram"}"#),
            Ok(Speculative::NotCached("ngram".to_owned()))
        );
    }

    #[test]
    fn only_drafts_that_are_cached_are_looked_for() {
        let located = |json: &str| {
            let find = |model: &Path, revision: &str| Ok(Path::new("/found").join(revision).join(model));
            located(json, find).map(|json| parse(&json)).unwrap()
        };
        let Ok(Speculative::Drafted(draft)) = located(r#"{"method":"eagle3","model":"a/b","revision":"v1"}"#)
        else {
            panic!("a draft");
        };
        assert_eq!(draft.model, Some(PathBuf::from("/found/v1/a/b")));
        assert_eq!(draft.revision, "v1");
        assert_eq!(
            located(r#"{"method":"draft_model","model":"a/b"}"#),
            Ok(Speculative::NotCached("draft_model".to_owned()))
        );
        let error = located(r#"{"model":"a/b"}"#).unwrap_err();
        assert!(error.contains("/found/a/b"), "{error}");
    }

    #[test]
    fn what_is_missing_or_wrong_is_said() {
        let error = |json: &str| parse(json).unwrap_err();
        assert!(error("{").contains("--speculative-config"), "{}", error("{"));
        assert!(error(r#"{"num_speculative_tokens":1}"#).contains("name a method"));
        assert!(error(r#"{"model":"/nowhere"}"#).contains("/nowhere"));
        assert!(error(r#"{"method":"eagle"}"#).contains("\"model\""));
        assert!(error(r#"{"method":3}"#).contains("expected JSON"));
        assert!(error(r#"{"method":"mtp","draft_tensor_parallel_size":1}"#).contains("target's 2"));
    }
}
