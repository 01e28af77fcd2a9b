//! Text from elsewhere, for a person: it neither ends a line nor steers a terminal, nor is any of it not seen.

/// What stands for the rest of a text.
const CUT: &str = "...";

/// As much of a text as has room in `most` bytes (at least 3), with escapes for what is [hidden](is_hidden); `...`
/// stands for the rest. A text that was made short stays as it is.
///
/// ```
/// use weightd_core::text::short;
///
/// assert_eq!(short("bfloat16", 64), "bfloat16");
/// assert_eq!(short("a\n\u{1b}[2J", 64), r"a\n\u{1b}[2J");
/// assert_eq!(short("a rather long name", 11), "a rather...");
/// ```
pub fn short(text: &str, most: usize) -> String {
    let mut short = String::new();
    let mut fits = 0;
    for character in text.chars() {
        match character {
            hidden if is_hidden(hidden) => short.extend(hidden.escape_default()),
            other => short.push(other),
        }
        if short.len() > most {
            short.truncate(fits);
            return short + CUT;
        }
        if short.len() + CUT.len() <= most {
            fits = short.len();
        }
    }
    short
}

/// As much of a text as has room in `most` bytes, as it is: for a limit, not for a person.
pub fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Whether a character is not to be seen as what it is: controls, ends of lines and paragraphs, and what Unicode
/// has shown as nothing or as a turn of the direction of writing (`Default_Ignorable_Code_Point` of
/// [DerivedCoreProperties](https://www.unicode.org/Public/16.0.0/ucd/DerivedCoreProperties.txt), and the
/// annotations U+FFF9 to U+FFFB).
pub fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_ends_the_line_steers_the_terminal_or_is_unseen() {
        let table = [
            ("a ü \\ \"b\" नमस्ते e\u{301}", "a ü \\ \"b\" नमस्ते e\u{301}"),
            ("a\nb\r\tc\0", r"a\nb\r\tc\u{0}"),
            ("\u{1b}[2J\u{9b}31m\u{7f}", r"\u{1b}[2J\u{9b}31m\u{7f}"),
            (
                "\u{2028}\u{202e}\u{2066}\u{feff}\u{3164}\u{e0041}",
                r"\u{2028}\u{202e}\u{2066}\u{feff}\u{3164}\u{e0041}",
            ),
        ];
        for (text, expected) in table {
            assert_eq!(short(text, 64), expected);
        }
    }

    #[test]
    fn what_is_too_long_is_cut_between_characters_and_no_shorter_than_need_be() {
        for text in ["x".repeat(64), "ü".repeat(32)] {
            assert_eq!(short(&text, 64), text);
        }
        let table = [
            ("x".repeat(65), "x".repeat(61)),
            ("ü".repeat(40), "ü".repeat(30)),
            ("\n".repeat(1000), r"\n".repeat(30)),
            // Of an escape there is all or nothing.
            ("x".repeat(58) + "\u{1b}xxx", "x".repeat(58)),
        ];
        for (text, expected) in table {
            let cut = short(&text, 64);
            assert_eq!(cut, expected + "...");
            assert_eq!(short(&cut, 64), cut);
        }
    }

    #[test]
    fn what_is_cut_ends_with_a_whole_character() {
        for (text, most, expected) in [
            ("abc", 3, "abc"),
            ("abc", 2, "ab"),
            ("aü", 2, "a"),
            ("aü", 3, "aü"),
            ("🦀", 3, ""),
            ("a\n", 0, ""),
        ] {
            assert_eq!(cut(text, most), expected);
        }
    }
}
