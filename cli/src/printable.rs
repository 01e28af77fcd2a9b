//! Text from elsewhere, for a person's line: it neither ends the line nor steers the terminal, and is no longer
//! than anybody reads.

use std::fmt::{self, Write};

/// The most bytes of a line.
const SHOWN: usize = 4096;

/// Writes text so that it stays on its line.
pub fn write(mut to: impl Write, text: &str) -> fmt::Result {
    let shown = cut(text);
    for character in shown.chars() {
        match character {
            hidden if is_hidden(hidden) => write!(to, "{}", hidden.escape_default())?,
            other => to.write_char(other)?,
        }
    }
    match text.len() - shown.len() {
        0 => Ok(()),
        more => write!(to, "... ({more} bytes more)"),
    }
}

/// The same as a text.
pub fn printable(text: &str) -> String {
    let mut printed = String::with_capacity(text.len().min(SHOWN));
    write(&mut printed, text).expect("a String takes everything");
    printed
}

/// As much of a text as anybody reads.
pub fn cut(text: &str) -> &str {
    let mut end = text.len().min(SHOWN);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Whether a character is none to be seen: control characters, and those that end lines, turn the direction of
/// writing around or have no width (Unicode's Zl, Zp and the Cf of general punctuation).
pub fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_ends_the_line_or_steers_the_terminal() {
        let table = [
            ("a ü \\ \"b\"", "a ü \\ \"b\""),
            ("a\nb\r\tc\0", r"a\nb\r\tc\u{0}"),
            ("\u{1b}[2J\u{9b}31m\u{7f}", r"\u{1b}[2J\u{9b}31m\u{7f}"),
            (
                "\u{2028}\u{202e}\u{2066}\u{feff}",
                r"\u{2028}\u{202e}\u{2066}\u{feff}",
            ),
        ];
        for (text, expected) in table {
            assert_eq!(printable(text), expected);
        }
        let long = printable(&"ü".repeat(10_000));
        assert!(long.ends_with("ü... (15904 bytes more)"), "{}", &long[4000..]);
    }
}
