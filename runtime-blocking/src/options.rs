//! What an operator says to an engine's loader.

use serde::{Deserialize, Deserializer};
use std::path::PathBuf;
use thiserror::Error;
use weightd_checkpoint::digest_from_hex;
use weightd_core::content::Role;
use weightd_core::machine::Mode;
use weightd_core::time::Span;

/// How an engine loads its weights, as vLLM's `--model-loader-extra-config` takes it.
///
/// ```
/// use weightd_blocking::LoaderOptions;
///
/// let options: LoaderOptions = r#"{"mode": "copy", "instance": "chat", "connect_timeout_s": 2}"#.parse()?;
/// assert!(options.fallback);
///
/// let error = r#"{"socket": "/run/x.sock"}"#.parse::<LoaderOptions>().unwrap_err();
/// assert!(error.to_string().contains("unknown field `socket`"));
/// # Ok::<(), weightd_blocking::OptionsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoaderOptions {
    /// The daemon's socket; absent finds it by device.
    pub socket_path: Option<PathBuf>,
    /// The directory of the sockets; absent takes `$WEIGHTD_SOCKET_DIR`, else `/tmp/weightd-UID`.
    pub socket_dir: Option<PathBuf>,
    /// The name that the daemons were started with, where several models share a device.
    pub instance: Option<String>,
    /// `zero_copy` maps the daemon's memory; `copy` clones it and asks the daemon to let go.
    #[serde(deserialize_with = "mode")]
    pub mode: Mode,
    /// Whether the engine has something else to do where the cache cannot serve: to load from disk, or to go
    /// on without. Without, it waits, also for a reload, a publication, and an answer about memory.
    pub fallback: bool,
    /// How long an answer is waited for, and a connection that broke is retried, in seconds.
    pub connect_timeout_s: f64,
    /// Without fallback, how long a daemon is waited for over all, in seconds.
    pub state_timeout_s: f64,
    /// Whether this is the draft of speculative decoding.
    pub is_draft: bool,
    /// The digest of the checkpoint, as `weightd digest` prints it, where an operator vouches for it: an image
    /// that ships both need not read the weights to attach. Weights with this digest are mapped, whatever the
    /// engine's own files hold. Absent computes it where that is needed. A publisher always computes it.
    pub checkpoint_digest: Option<String>,
}

/// Why options are none.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// No JSON of this form; the message names the field.
    #[error("loader options: {0}")]
    Json(#[from] serde_json::Error),
    /// Two that exclude each other, or a value that cannot be.
    #[error("loader options: {0}")]
    Value(String),
}

impl Default for LoaderOptions {
    fn default() -> LoaderOptions {
        LoaderOptions {
            socket_path: None,
            socket_dir: None,
            instance: None,
            mode: Mode::ZeroCopy,
            fallback: true,
            connect_timeout_s: 5.0,
            state_timeout_s: 300.0,
            is_draft: false,
            checkpoint_digest: None,
        }
    }
}

impl std::str::FromStr for LoaderOptions {
    type Err = OptionsError;

    /// Reads JSON.
    fn from_str(json: &str) -> Result<LoaderOptions, OptionsError> {
        // A list would be taken for the fields in their order.
        if !json.trim_start().starts_with('{') {
            let why = "give a JSON object, such as {\"mode\": \"copy\"}";
            return Err(OptionsError::Value(why.to_owned()));
        }
        let options: LoaderOptions = serde_json::from_str(json)?;
        options.check()?;
        Ok(options)
    }
}

impl LoaderOptions {
    /// The role that is loaded.
    pub fn role(&self) -> Role {
        match self.is_draft {
            false => Role::Target,
            true => Role::Draft,
        }
    }

    /// Whether they fit together.
    pub(crate) fn check(&self) -> Result<(), OptionsError> {
        if self.socket_path.is_some() && self.is_draft {
            let why = "socket_path names the target's socket: leave it out with is_draft, or use socket_dir";
            return Err(OptionsError::Value(why.to_owned()));
        }
        if self.socket_path.is_some() && (self.socket_dir.is_some() || self.instance.is_some()) {
            let why = "socket_path says all: leave out socket_dir and instance";
            return Err(OptionsError::Value(why.to_owned()));
        }
        for (name, path) in [
            ("socket_path", &self.socket_path),
            ("socket_dir", &self.socket_dir),
        ] {
            let bytes = path.as_ref().map(|path| path.as_os_str().as_encoded_bytes());
            if bytes.is_some_and(|bytes| bytes.is_empty() || bytes.contains(&0)) {
                let why = format!("{name} is empty or no path: name one, or leave it out");
                return Err(OptionsError::Value(why));
            }
        }
        if self.connect_timeout()? < Span::millis(1) {
            let why = "connect_timeout_s leaves no time for any answer: give 0.001 or more";
            return Err(OptionsError::Value(why.to_owned()));
        }
        self.state_timeout()?;
        self.stated_digest().map(drop)
    }

    pub(crate) fn stated_digest(&self) -> Result<Option<[u8; 32]>, OptionsError> {
        let parse = |text: &String| {
            let why = || "checkpoint_digest is none: give the 64 hex digits that `weightd digest` prints";
            digest_from_hex(text).ok_or_else(|| OptionsError::Value(why().to_owned()))
        };
        self.checkpoint_digest.as_ref().map(parse).transpose()
    }

    pub(crate) fn connect_timeout(&self) -> Result<Span, OptionsError> {
        span("connect_timeout_s", self.connect_timeout_s)
    }

    pub(crate) fn state_timeout(&self) -> Result<Span, OptionsError> {
        span("state_timeout_s", self.state_timeout_s)
    }
}

fn span(name: &str, seconds: f64) -> Result<Span, OptionsError> {
    if !seconds.is_finite() || seconds < 0.0 {
        let why = format!("{name} is {seconds}: give a number of seconds, 0 or more");
        return Err(OptionsError::Value(why));
    }
    Ok(Span((seconds * 1e6) as u64))
}

fn mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Mode, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Name {
        ZeroCopy,
        Copy,
    }
    Ok(match Name::deserialize(deserializer)? {
        Name::ZeroCopy => Mode::ZeroCopy,
        Name::Copy => Mode::Copy,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_has_the_name_that_vllm_users_know() {
        let json = r#"{"socket_dir": "/run/w", "instance": "a", "mode": "zero_copy", "fallback": false,
            "connect_timeout_s": 0.5, "state_timeout_s": 10, "is_draft": true}"#;
        let options: LoaderOptions = json.parse().unwrap();
        assert_eq!(options.role(), Role::Draft);
        assert_eq!(options.connect_timeout().unwrap(), Span::millis(500));
        assert_eq!(options.state_timeout().unwrap(), Span::secs(10));
        assert_eq!("{}".parse::<LoaderOptions>().unwrap(), LoaderOptions::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (json, named) in [
            (r#"{"sockets": 1}"#, "sockets"),
            (r#"{"mode": "move"}"#, "move"),
            (r#"{"socket_path": "/x", "is_draft": true}"#, "socket_path"),
            (r#"{"socket_path": "/x", "instance": "a"}"#, "socket_path"),
            (r#"{"connect_timeout_s": -1}"#, "connect_timeout_s"),
            (r#"{"connect_timeout_s": 0}"#, "connect_timeout_s"),
            (r#"{"socket_dir": ""}"#, "socket_dir"),
            (r#"{"socket_path": "/run/\u0000x"}"#, "socket_path"),
            (r#"{"state_timeout_s": 1e999}"#, "number out of range"),
            (r#"{"fallback": "yes"}"#, "yes"),
            (r#"{"checkpoint_digest": "abc"}"#, "checkpoint_digest"),
            ("[]", "JSON object"),
            ("", "JSON object"),
            ("{", "EOF"),
        ] {
            let error = json.parse::<LoaderOptions>().unwrap_err().to_string();
            assert!(error.contains(named), "{json}: {error}");
        }
    }
}
