//! Command lines made for `vllm preload`, as ours.
//!
//! vLLM's parser takes underscores for dashes in the names of flags, short forms of several letters
//! (`-tp 4`), keys of JSON flags (`--speculative-config.method mtp`), a model without a flag, and some two
//! hundred flags that do not concern weights. Here all of that becomes what clap is told of.

mod harmless;
mod nested;
mod table;

use crate::error::CliError;
use nested::Nested;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use table::{FLAGS, Flag, SHORT, Takes, Weights};

/// The commands that take a model, or at least its parallel sizes, as vLLM does.
const TRANSLATED: [&str; 5] = ["preload", "attach", "plan", "digest", "serve"];

/// The flag whose keys have flags of their own as well.
const SPECULATIVE: &str = "speculative-config";

/// A command line for clap.
#[derive(Debug, PartialEq, Eq)]
pub struct Translated {
    pub args: Vec<OsString>,
    /// Flags that were left out, since they do not concern weights.
    pub ignored: Vec<String>,
}

/// Translates a command line, that of `cli` or of vLLM; the first argument is the program.
///
/// # Errors
/// A flag of vLLM's that would change the weights in a way that is not supported, without its value, or
/// at odds with another one. Flags of neither are left to clap.
pub fn translate(
    args: impl IntoIterator<Item = OsString>,
    cli: &clap::Command,
) -> Result<Translated, CliError> {
    let mut input: VecDeque<OsString> = args.into_iter().collect();
    let mut args: Vec<OsString> = input.pop_front().into_iter().collect();
    let globals = Known::of(cli);
    while let Some(arg) = input.pop_front() {
        let text = arg.to_str().unwrap_or_default().to_owned();
        args.push(arg);
        if text.starts_with('-') {
            let value = globals.takes_next(&text).then(|| input.pop_front());
            args.extend(value.flatten());
            continue;
        }
        let command = cli.find_subcommand(&text);
        let Some(command) = command.filter(|_| TRANSLATED.contains(&text.as_str())) else {
            break;
        };
        let translation = Translation {
            known: globals.and(command),
            input,
            args,
            ignored: Vec::new(),
            nested: BTreeMap::new(),
            loose: Vec::new(),
            strange: false,
        };
        return translation.run();
    }
    args.extend(input);
    Ok(Translated {
        args,
        ignored: Vec::new(),
    })
}

/// The flags of a command of ours, as they are spelled.
struct Known(BTreeMap<String, Value>);

/// How a flag of ours takes a value.
enum Value {
    None,
    Next,
    /// Tied to it by `=`, or none; and which there are.
    Tied(Vec<String>),
}

impl Known {
    fn of(command: &clap::Command) -> Known {
        let mut known = BTreeMap::new();
        for arg in command.get_arguments() {
            let value = || match (arg.get_action().takes_values(), arg.is_require_equals_set()) {
                (false, _) => Value::None,
                (true, false) => Value::Next,
                (true, true) => {
                    let values = arg.get_possible_values().into_iter();
                    Value::Tied(values.map(|value| value.get_name().to_owned()).collect())
                }
            };
            let long = arg.get_long().into_iter();
            for name in long.chain(arg.get_all_aliases().into_iter().flatten()) {
                known.insert(format!("--{name}"), value());
            }
            if let Some(short) = arg.get_short() {
                known.insert(format!("-{short}"), value());
            }
        }
        Known(known)
    }

    fn and(mut self, command: &clap::Command) -> Known {
        self.0.append(&mut Known::of(command).0);
        self
    }

    /// Whether this argument is a flag whose value is the next one.
    fn takes_next(&self, arg: &str) -> bool {
        matches!(self.0.get(arg), Some(Value::Next))
    }

    /// Whether this argument is a flag that is tied to its value, and has none.
    fn is_untied(&self, arg: &str) -> bool {
        matches!(self.0.get(arg), Some(Value::Tied(_)))
    }

    /// Whether a word is a value of this flag that had to be tied to it.
    fn unties(&self, arg: &str, word: &str) -> bool {
        matches!(self.0.get(arg), Some(Value::Tied(values)) if values.iter().any(|value| value == word))
    }

    /// Whether this argument is one of these flags, perhaps with its value.
    fn has(&self, arg: &str) -> bool {
        let name = arg.split_once('=').map_or(arg, |(name, _)| name);
        let attached = || !arg.starts_with("--") && arg.get(..2).is_some_and(|short| self.takes_next(short));
        self.0.contains_key(name) || attached()
    }
}

struct Translation {
    known: Known,
    input: VecDeque<OsString>,
    args: Vec<OsString>,
    ignored: Vec<String>,
    /// By the name of the flag.
    nested: BTreeMap<&'static str, Nested>,
    /// What is no flag and no value of one.
    loose: Vec<OsString>,
    /// There was a flag that nobody knows.
    strange: bool,
}

impl Translation {
    fn run(mut self) -> Result<Translated, CliError> {
        while let Some(arg) = self.input.pop_front() {
            match arg.to_str() {
                Some("--") => self.loose.extend(std::mem::take(&mut self.input)),
                Some(text) if is_flag(text) => {
                    let text = text.to_owned();
                    self.flag(&text)?;
                }
                // What is no text is a path: a model, or one that its flag is tied to by `=`.
                None if arg.as_encoded_bytes().starts_with(b"-") => self.args.push(arg),
                _ => self.loose.push(arg),
            }
        }
        self.join_speculative()?;
        for (name, nested) in std::mem::take(&mut self.nested) {
            let flag = named(name).expect("it was looked up before");
            self.take(flag, vec![nested.json().into()], &format!("--{name}"))?;
        }
        if self.strange {
            // clap says which.
            self.args.append(&mut self.loose);
        }
        self.model()?;
        Ok(Translated {
            args: self.args,
            ignored: self.ignored,
        })
    }

    /// Keys of the speculative configuration that were given one by one join those of its JSON.
    fn join_speculative(&mut self) -> Result<(), CliError> {
        let Some(keys) = self.nested.get_mut(SPECULATIVE) else {
            return Ok(());
        };
        let json = |arg: &OsString| {
            let json = arg.to_str()?.strip_prefix("--")?.strip_prefix(SPECULATIVE)?;
            serde_json::from_str(json.strip_prefix('=')?).ok()
        };
        let whole = self.args.iter().position(|arg| json(arg).is_some());
        if let Some(object) = whole.and_then(|at| json(&self.args.remove(at))) {
            keys.add(object).map_err(|key| twice(SPECULATIVE, &key))?;
        }
        Ok(())
    }

    /// The one argument that needs no flag.
    fn model(&mut self) -> Result<(), CliError> {
        let mut loose = std::mem::take(&mut self.loose).into_iter();
        let Some(model) = loose.next() else {
            return Ok(());
        };
        if !self.takes_model() {
            return Err(no_model(&format!("{model:?}")));
        }
        let given = |arg: &OsString| {
            let bytes = arg.as_encoded_bytes();
            bytes == b"--model" || bytes.starts_with(b"--model=") || bytes.starts_with(b"-m")
        };
        let given = self.args.iter().any(given);
        let (named, extra) = match given {
            true => (String::new(), Some(model.clone())),
            false => (format!(", {model:?}"), loose.next()),
        };
        if let Some(extra) = extra {
            let mut flags = self.args.iter().filter_map(|arg| arg.to_str());
            // Perhaps it was meant for a value.
            let untied = flags.find(|flag| self.known.is_untied(flag));
            let hint = match untied {
                Some(flag) => tie(flag, "VALUE"),
                None => "if one of them was meant for a flag's value, that flag takes none".to_owned(),
            };
            return Err(CliError::Usage(format!(
                "unexpected argument {extra:?}: the model is named already{named}; {hint}"
            )));
        }
        self.args.push(with_value("--model", &model));
        Ok(())
    }

    fn takes_model(&self) -> bool {
        self.known.0.contains_key("--model")
    }

    /// One flag, and the values that follow it.
    fn flag(&mut self, arg: &str) -> Result<(), CliError> {
        let arg = canonical(arg);
        let (name, attached) = match arg.split_once('=') {
            Some((name, value)) => (name, Some(OsString::from(value))),
            None => (&arg[..], None),
        };
        let (name, path) = match name.split_once('.') {
            Some((name, path)) => (name, Some(path)),
            None => (name, None),
        };
        let long = name.strip_prefix("--").unwrap_or_default();
        let Some(flag) = named(long) else {
            match long.strip_prefix("no-").and_then(named) {
                Some(flag) if flag.takes == Takes::Switch => self.switch_off(flag, name),
                _ if long == "config" => {
                    return Err(CliError::usage(
                        "--config is not supported: weightd reads flags from the command line alone, give those of \
                         the file there",
                    ));
                }
                _ => self.foreign(arg)?,
            }
            return Ok(());
        };
        let values = match attached {
            Some(value) => vec![value],
            None => self.values(flag, path.is_some(), name)?,
        };
        match path {
            Some(path) => self.key(flag.name, path, values.first()),
            None => self.take(flag, values, name),
        }
    }

    /// One key of a flag's object.
    fn key(&mut self, of: &'static str, path: &str, value: Option<&OsString>) -> Result<(), CliError> {
        let text = value.and_then(|value| value.to_str());
        let text =
            text.ok_or_else(|| CliError::Usage(format!("the value of {path} for --{of} is not UTF-8")))?;
        let nested = self.nested.entry(of).or_default();
        nested.set(path, text).map_err(|key| twice(of, &key))
    }

    /// The values that follow a flag.
    fn values(&mut self, flag: &Flag, of_key: bool, name: &str) -> Result<Vec<OsString>, CliError> {
        let (least, most) = match flag.takes {
            _ if of_key => (1, 1),
            Takes::Nothing | Takes::Switch => (0, 0),
            Takes::One => (1, 1),
            Takes::AtMostOne => (0, 1),
            Takes::Many => (1, usize::MAX),
        };
        let is_value = |arg: &OsString| !arg.to_str().is_some_and(is_flag);
        let count = self
            .input
            .iter()
            .take(most)
            .take_while(|arg| is_value(arg))
            .count();
        if count < least {
            return Err(CliError::Usage(format!("{name} needs a value")));
        }
        Ok(self.input.drain(..count).collect())
    }

    /// A flag of vLLM's with its values.
    fn take(&mut self, flag: &'static Flag, mut values: Vec<OsString>, name: &str) -> Result<(), CliError> {
        let value = values.pop();
        let text = value
            .as_ref()
            .and_then(|value| value.to_str())
            .unwrap_or_default();
        let long = format!("--{}", flag.name);
        match flag.weights {
            Weights::Refused { harmless, why } if !harmless(text) => {
                let given = if text.is_empty() {
                    long
                } else {
                    format!("{long} {text}")
                };
                return Err(CliError::Usage(format!("{given} is not supported: {why}")));
            }
            Weights::Speculative(key) => self.key(SPECULATIVE, key, value.as_ref())?,
            Weights::Ours if self.known.0.contains_key(&long) => match value {
                Some(value) => self.args.push(with_value(&long, &value)),
                None => self.args.push(long.into()),
            },
            // It would decide which weights are meant, and nobody would heed it.
            Weights::Ours if !self.takes_model() => return Err(no_model(&long)),
            _ => self.ignore(name),
        }
        Ok(())
    }

    /// `--no-NAME`: the last word of several counts.
    fn switch_off(&mut self, flag: &Flag, name: &str) {
        match flag.weights {
            Weights::Ours => {
                let long = format!("--{}", flag.name);
                self.args.retain(|arg| *arg != *long);
            }
            _ => self.ignore(name),
        }
    }

    fn ignore(&mut self, name: &str) {
        if !self.ignored.iter().any(|ignored| ignored == name) {
            self.ignored.push(name.to_owned());
        }
    }

    /// A flag that vLLM does not have.
    fn foreign(&mut self, arg: String) -> Result<(), CliError> {
        self.strange |= !self.known.has(&arg);
        let next = self.input.front().and_then(|next| next.to_str());
        if let Some(word) = next.filter(|word| self.known.unties(&arg, word)) {
            let tie = tie(&arg, word);
            return Err(CliError::Usage(format!(
                "{tie} (a model of that name takes --model)"
            )));
        }
        let value = self.known.takes_next(&arg).then(|| self.input.pop_front());
        self.args.push(arg.into());
        self.args.extend(value.flatten());
        Ok(())
    }
}

fn named(name: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.name == name)
}

/// Whether an argument is a flag, and no value: numbers may be negative, and `-` alone is one too.
fn is_flag(arg: &str) -> bool {
    let is_number = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit() || first == '.');
    arg.strip_prefix('-')
        .is_some_and(|rest| !rest.is_empty() && !is_number(rest))
}

/// A flag by its long name, with dashes.
fn canonical(arg: &str) -> String {
    let end = arg.find(['.', '=']).unwrap_or(arg.len());
    let (name, rest) = arg.split_at(end);
    if name.starts_with("--") {
        return format!("{}{rest}", name.replace('_', "-"));
    }
    if let Some(level) = name.strip_prefix("-O") {
        let tie = if level.is_empty() { "" } else { "=" };
        return format!("--optimization-level{tie}{level}{rest}");
    }
    match SHORT
        .iter()
        .find(|(short, _)| name.strip_prefix('-') == Some(short))
    {
        Some((_, long)) => format!("--{long}{rest}"),
        None => arg.to_owned(),
    }
}

fn with_value(long: &str, value: &OsStr) -> OsString {
    // With `=`, so that no value is taken for a flag.
    let mut arg = OsString::from(format!("{long}="));
    arg.push(value);
    arg
}

/// How a value is given that had to be tied to its flag.
fn tie(flag: &str, value: &str) -> String {
    format!("a value of {flag} takes `=`, as in {flag}={value}")
}

/// `weightd serve` is told of a model.
fn no_model(given: &str) -> CliError {
    CliError::Usage(format!(
        "{given} is not for `weightd serve`, whose publishers say what their weights are: it takes parallel sizes, \
         and --draft for a draft's daemons"
    ))
}

fn twice(flag: &str, key: &str) -> CliError {
    CliError::Usage(format!("--{flag}: {key:?} is given twice, by different flags"))
}

#[cfg(test)]
mod tests;
