//! Rules that a user passes: a tensor parallel plan as Hugging Face transformers has them.

use super::name;
use super::rule::{Rule, STYLES};
use crate::error::{TooMuch, excerpt};
use crate::files::{NotOpened, open_regular};
use crate::json;
use rustix::fs::CWD;
use serde_json::Value;
use std::cmp::Reverse;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Patterns and their styles, as in the `tp_plan` of a transformers model: `{"model.layers.*.mlp.up_proj":
/// "colwise", ...}`. `*` stands for a number. Names that the plan does not cover are whole on every
/// rank, as they are in transformers.
///
/// Patterns of a base model, without the leading `model.`, are understood too. Where several cover a
/// tensor, the one with the fewest `*` counts, and of those the one with the most parts. `colwise`
/// keeps heads whole where the module is `q_proj`, `k_proj` or `v_proj`. Beyond the styles of
/// transformers there are `replicated`, `qkv_colwise` for fused projections, and `heads_colwise` for
/// parts of whole query heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TpPlan {
    /// The most specific pattern first.
    rules: Vec<(String, Rule)>,
    hash: [u8; 32],
}

/// Why a file is no tensor parallel plan.
#[derive(Debug, thiserror::Error)]
#[error("{}: {fault}", .path.display())]
pub struct TpPlanError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: TpPlanFault,
}

/// What is wrong with a tensor parallel plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum TpPlanFault {
    /// The file cannot be read.
    #[error("cannot read the tensor parallel plan: {0}")]
    Io(#[from] std::io::Error),
    /// A directory, a pipe or a device.
    #[error("the tensor parallel plan is {0}: it has to be a regular file")]
    NotRegular(&'static str),
    /// Larger than any plan.
    #[error("more than {} bytes: a tensor parallel plan is a small JSON object", PLAN_CAP)]
    TooLarge,
    /// No JSON object.
    #[error(
        "not a JSON object of patterns and styles, for example {{\"model.layers.*.mlp.up_proj\": \"colwise\"}}: {detail}"
    )]
    NotAnObject { detail: String },
    /// More in it than in any plan.
    #[error("{0}: a tensor parallel plan is a small JSON object")]
    TooMuch(TooMuch),
    /// No rule in it.
    #[error("the tensor parallel plan is empty: name at least one module")]
    Empty,
    /// A pattern that stands for more than numbers.
    #[error("pattern {pattern:?}: `*` stands for a whole part that is a number, and for nothing else")]
    Wildcard { pattern: String },
    /// A style that is not known.
    #[error(
        "pattern {pattern:?}: style {style} is not known; use one of {}",
        known_styles()
    )]
    UnknownStyle { pattern: String, style: String },
    /// Expert parallelism is a flag.
    #[error(
        "pattern {pattern:?}: style \"{style}\" is for expert parallelism; leave it out and turn that on with \
         --enable-expert-parallel"
    )]
    ExpertStyle { pattern: String, style: String },
}

/// The most that a plan may take, in bytes.
const PLAN_CAP: u64 = 1 << 20;
/// The most patterns of a plan: each is tried on each kind of tensor.
const PATTERNS_CAP: usize = 1024;

impl TpPlan {
    /// Reads a plan from a JSON file.
    pub fn read(path: &Path) -> Result<TpPlan, TpPlanError> {
        let read = || -> Result<TpPlan, TpPlanFault> {
            let mut json = Vec::new();
            let file = open_regular(CWD, path).map_err(|error| match error {
                NotOpened::Irregular(kind) => TpPlanFault::NotRegular(kind),
                NotOpened::Io(_, errno) => TpPlanFault::Io(errno.into()),
            })?;
            File::from(file).take(PLAN_CAP + 1).read_to_end(&mut json)?;
            TpPlan::parse(&json)
        };
        let path = path.to_owned();
        read().map_err(|fault| TpPlanError { path, fault })
    }

    /// Reads a plan from the bytes of a JSON file.
    pub fn parse(text: &[u8]) -> Result<TpPlan, TpPlanFault> {
        if text.len() as u64 > PLAN_CAP {
            return Err(TpPlanFault::TooLarge);
        }
        let detail = |detail: String| TpPlanFault::NotAnObject { detail };
        json::check(text).map_err(TpPlanFault::TooMuch)?;
        let plan = match serde_json::from_slice(text) {
            Ok(Value::Object(plan)) if plan.len() > PATTERNS_CAP => {
                let (what, cap) = ("patterns", PATTERNS_CAP);
                return Err(TpPlanFault::TooMuch(TooMuch { what, cap }));
            }
            Ok(Value::Object(plan)) => plan,
            Ok(_) => return Err(detail("it is JSON of another kind".to_owned())),
            Err(error) => return Err(detail(excerpt(error))),
        };
        let mut rules = plan
            .into_iter()
            .map(|(pattern, style)| {
                let rule = rule_of(&pattern, &style)?;
                Ok((pattern, rule))
            })
            .collect::<Result<Vec<_>, TpPlanFault>>()?;
        if rules.is_empty() {
            return Err(TpPlanFault::Empty);
        }
        let stars = |pattern: &str| pattern.split('.').filter(|part| *part == "*").count();
        let parts = |pattern: &str| Reverse(pattern.split('.').count());
        rules.sort_by(|(a, _), (b, _)| {
            let order = |pattern| (stars(pattern), parts(pattern), pattern);
            order(a).cmp(&order(b))
        });
        let mut hasher = blake3::Hasher::new();
        for (pattern, rule) in &rules {
            hasher.update(format!("{pattern:?} {rule:?}\n").as_bytes());
        }
        let hash = *hasher.finalize().as_bytes();
        Ok(TpPlan { rules, hash })
    }

    /// What tells this plan from others, in a key.
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// The patterns, in the order in which they count.
    pub(super) fn patterns(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().map(|(pattern, _)| pattern.as_str())
    }

    /// The rules, in the order of the patterns.
    pub(super) fn rules(&self) -> impl Iterator<Item = Rule> {
        self.rules.iter().map(|(_, rule)| *rule)
    }

    /// Whether a plan's pattern covers a tensor.
    pub(super) fn covers(pattern: &str, tensor: &str) -> bool {
        let base = tensor.strip_prefix("model.");
        name::covers(pattern, tensor) || base.is_some_and(|base| name::covers(pattern, base))
    }

    /// The patterns that split something.
    pub(super) fn splitting(&self) -> impl Iterator<Item = &str> {
        let splits = self.rules.iter().filter(|(_, rule)| *rule != Rule::Replicated);
        splits.map(|(pattern, _)| pattern.as_str())
    }
}

fn rule_of(pattern: &str, style: &Value) -> Result<Rule, TpPlanFault> {
    if pattern.split('.').any(|part| part != "*" && part.contains('*')) {
        let pattern = pattern.to_owned();
        return Err(TpPlanFault::Wildcard { pattern });
    }
    let known = style
        .as_str()
        .and_then(|style| STYLES.iter().find(|(name, _)| *name == style));
    let Some(&(_, rule)) = known else {
        let pattern = pattern.to_owned();
        return Err(match style.as_str() {
            Some("grouped_gemm") => TpPlanFault::ExpertStyle {
                pattern,
                style: "grouped_gemm".to_owned(),
            },
            _ => TpPlanFault::UnknownStyle {
                pattern,
                style: excerpt(style),
            },
        });
    };
    let module = pattern.rsplit('.').next();
    Ok(match (rule, module) {
        (Rule::Column, Some("q_proj")) => Rule::QueryColumn,
        (Rule::Column, Some("k_proj" | "v_proj")) => Rule::KvColumn,
        (rule, _) => rule,
    })
}

fn known_styles() -> String {
    STYLES
        .iter()
        .map(|(name, _)| *name)
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::patterns::Patterns;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_plan_of_transformers_covers_model_and_base_model() {
        let plan = TpPlan::parse(
            br#"{"layers.*.self_attn.k_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", "lm_head": "colwise_rep",
                "layers.*.mlp.experts": "moe_tp_experts", "model.layers.0.mlp.down_proj": "replicated"}"#,
        )
        .unwrap();
        let rules: Vec<Rule> = plan.rules().collect();
        let mut patterns = Patterns::new(plan.patterns(), TpPlan::covers);
        let mut rule = |name: &str| patterns.first(name).map(|number| rules[number]);
        assert_eq!(
            rule("model.layers.3.self_attn.k_proj.weight"),
            Some(Rule::KvColumn)
        );
        assert_eq!(rule("layers.3.self_attn.k_proj.bias"), Some(Rule::KvColumn));
        assert_eq!(rule("model.layers.3.mlp.down_proj.weight"), Some(Rule::Row));
        assert_eq!(
            rule("model.layers.0.mlp.down_proj.weight"),
            Some(Rule::Replicated),
            "the one with the fewest `*`"
        );
        assert_eq!(rule("lm_head.weight"), Some(Rule::Head));
        assert_eq!(rule("model.norm.weight"), None);
        assert_eq!(
            plan.splitting().collect::<Vec<_>>(),
            ["lm_head", "layers.*.mlp.down_proj", "layers.*.self_attn.k_proj"]
        );
    }

    #[test]
    fn the_pattern_with_the_fewest_wildcards_counts_however_long_it_is() {
        let rule = |json: &str, name: &str| {
            let plan = TpPlan::parse(json.as_bytes()).unwrap();
            let number = Patterns::new(plan.patterns(), TpPlan::covers).first(name);
            plan.rules().nth(number.unwrap())
        };
        for exception in ["layers.3.up", "model.layers.3.up", "model.layers.3.up.weight"] {
            let json = format!(
                r#"{{"model.layers.*.up": "colwise", "layers.*.up.weight": "colwise", "{exception}": "rowwise"}}"#
            );
            assert_eq!(
                rule(&json, "model.layers.3.up.weight"),
                Some(Rule::Row),
                "{exception}"
            );
            assert_eq!(
                rule(&json, "model.layers.30.up.weight"),
                Some(Rule::Column),
                "{exception}"
            );
        }
        let more_parts = r#"{"layers.*.up": "colwise", "layers.*.up.bias": "replicated"}"#;
        assert_eq!(rule(more_parts, "model.layers.3.up.bias"), Some(Rule::Replicated));
        assert_eq!(rule(more_parts, "model.layers.3.up.weight"), Some(Rule::Column));
    }

    #[test]
    fn what_is_no_regular_file_is_refused_and_not_waited_for() {
        use rustix::fs::{FileType, Mode};
        let temp = tempfile::tempdir().unwrap();
        let fifo = temp.path().join("fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let fault = |path: &Path| TpPlan::read(path).unwrap_err().fault;
        assert!(matches!(fault(&fifo), TpPlanFault::NotRegular("a fifo")));
        assert!(matches!(
            fault(temp.path()),
            TpPlanFault::NotRegular("a directory")
        ));
        assert!(matches!(
            fault(Path::new("/dev/zero")),
            TpPlanFault::NotRegular("a character device")
        ));
    }

    #[test]
    fn the_hash_knows_patterns_and_rules_and_not_their_order() {
        let hash = |json: &str| TpPlan::parse(json.as_bytes()).unwrap().hash();
        let plan = hash(r#"{"a.b": "colwise", "c": "rowwise"}"#);
        assert_eq!(plan, hash(r#"{ "c": "rowwise_rep", "a.b": "colwise" }"#));
        assert_ne!(plan, hash(r#"{"a.b": "rowwise", "c": "rowwise"}"#));
        assert_ne!(plan, hash(r#"{"a.b": "colwise"}"#));
    }

    #[test]
    fn what_is_no_plan_is_refused_with_its_pattern() {
        let message = |json: &str| TpPlan::parse(json.as_bytes()).unwrap_err().to_string();
        assert!(message("[]").contains("not a JSON object"));
        assert!(message("{").contains("not a JSON object"));
        assert!(message("{}").contains("empty"));
        let unknown = message(r#"{"a.*.b": "diagonal"}"#);
        assert!(
            unknown.contains("\"a.*.b\"") && unknown.contains("\"diagonal\"") && unknown.contains("colwise"),
            "{unknown}"
        );
        let foul = message("{\"a\": \"\u{9b}2J\u{3164}\"}");
        assert!(foul.contains(r#""\u{9b}2J\u{3164}""#), "{foul}");
        for wildcard in ["model.**", "a.q_*"] {
            let message = message(&format!(r#"{{"{wildcard}": "colwise"}}"#));
            assert!(
                message.contains(wildcard) && message.contains("a number"),
                "{message}"
            );
        }
        assert!(message(r#"{"a": 3}"#).contains("style 3"));
        assert!(message(r#"{"a": "grouped_gemm"}"#).contains("--enable-expert-parallel"));
        let many: Vec<String> = (0..1025).map(|n| format!(r#""a{n}": "colwise""#)).collect();
        assert!(message(&format!("{{{}}}", many.join(","))).contains("more than 1024 patterns"));
        assert!(message(&"[".repeat(1 << 20)).contains("more than 262144 values"));
        assert!(message(&format!(r#"{{"a": [{}0]}}"#, "0,".repeat(1000))).len() < 1000);
        assert!(message(&" ".repeat(1 << 21)).contains("more than 1048576 bytes"));
        let missing = TpPlan::read(Path::new("/nowhere/plan.json"))
            .unwrap_err()
            .to_string();
        assert!(
            missing.starts_with("/nowhere/plan.json: cannot read"),
            "{missing}"
        );
    }

    proptest! {
        #[test]
        fn arbitrary_text_never_panics(text in r#"[\[\]{}"a-c:,.0-9*]{0,60}"#) {
            if let Ok(plan) = TpPlan::parse(text.as_bytes()) {
                let _ = Patterns::new(plan.patterns(), TpPlan::covers).first(&text);
            }
        }
    }
}
