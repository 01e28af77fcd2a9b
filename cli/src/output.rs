//! Answers on stdout.

use crate::error::CliError;
use serde_json::Value;
use std::fmt::Display;
use std::io::Write;
use weightd_core::text::is_hidden;

/// Prints one line, at once: whoever reads it may wait for it.
pub fn say(line: impl Display) -> Result<(), CliError> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{line}")
        .and_then(|()| stdout.flush())
        .map_err(|error| CliError::Failure(format!("cannot write to stdout: {error}")))
}

/// JSON on one line, which steers no terminal whatever texts are in it.
pub fn json_text(value: &Value) -> String {
    let mut text = String::new();
    for character in value.to_string().chars() {
        if !is_hidden(character) {
            text.push(character);
            continue;
        }
        // JSON itself escapes only some of them. Beyond U+FFFF it takes two escapes.
        for unit in character.encode_utf16(&mut [0; 2]) {
            text.push_str(&format!("\\u{unit:04x}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_says_what_it_was_given_and_shows_nothing_hidden() {
        let text = "ü \"a\" \\ 🦀 \n\u{1b}[2J\u{9b}31m\u{202e}\u{2028}\u{e0041}\u{1d173}\u{0}";
        let value = serde_json::json!({ text: [text, 1] });
        let line = json_text(&value);
        assert!(!line.contains(is_hidden), "{line:?}");
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), value);
    }
}
