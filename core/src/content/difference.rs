//! What two keys say differently, for a person.

use speedy::{Readable, Writable};
use std::fmt;

/// A field of the key in which what is served is not what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Difference {
    /// The field's name; that of an entry of `extra` is `extra.NAME`.
    pub field: String,
    /// What was asked for: short, and for a person.
    pub asked: String,
    /// What is served: likewise.
    pub served: String,
}

/// The most bytes of a name or a value that a line has.
const SHORT: usize = 64;
/// The most bytes that the name of a field has in a message.
const NAME: usize = 256;
/// The most fields that a line has.
const LISTED: usize = 24;
/// The most fields that are said: with the longest names and values, two thirds of a frame.
pub(super) const MOST: usize = 100;

impl Difference {
    /// Of the values of a field, which are cut where they are longer than anybody reads, as its name is.
    pub fn new(field: &str, asked: &str, served: &str) -> Difference {
        Difference {
            field: match field.len() {
                0..=NAME => field.to_owned(),
                _ => short(field),
            },
            asked: short(asked),
            served: short(served),
        }
    }

    /// All of them on a line, unless there are more than anybody reads.
    pub fn list(differences: &[Difference]) -> String {
        let listed: Vec<String> = differences
            .iter()
            .take(LISTED)
            .map(Difference::to_string)
            .collect();
        let listed = listed.join(", ");
        match differences.len() > LISTED {
            true => listed + " and more",
            false => listed,
        }
    }
}

impl fmt::Display for Difference {
    /// Whoever made it, it neither ends a line nor steers a terminal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [field, asked, served] = [&self.field, &self.asked, &self.served].map(|text| short(text));
        write!(f, "{field} (asked for {asked}, served {served})")
    }
}

/// As much of a text as has room on a line, with escapes for what is not to be seen. A text that is short
/// stays as it is.
fn short(text: &str) -> String {
    const CUT: &str = "...";
    let mut short = String::new();
    let mut fits = 0;
    for character in text.chars() {
        match character {
            '\\' | '"' | '\'' => short.push(character),
            other => short.extend(other.escape_debug()),
        }
        if short.len() > SHORT {
            short.truncate(fits);
            return short + CUT;
        }
        if short.len() <= SHORT - CUT.len() {
            fits = short.len();
        }
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_short_and_harmless_however_often_it_is_made_so() {
        let table = [
            ("float16", "float16"),
            ("a ü \\ \"b\"", "a ü \\ \"b\""),
            ("a\nb\u{1b}[2J\u{202e}", r"a\nb\u{1b}[2J\u{202e}"),
        ];
        for (text, expected) in table {
            assert_eq!(short(text), expected);
        }
        for text in [&"x".repeat(64), &"ü".repeat(32)] {
            assert_eq!(short(text), *text);
        }
        for text in ["x".repeat(65), "ü".repeat(40), "\n".repeat(1000)] {
            let cut = short(&text);
            assert!((58..=64).contains(&cut.len()) && cut.ends_with("..."), "{cut}");
            assert_eq!(short(&cut), cut);
        }
    }

    #[test]
    fn a_line_has_room_for_all_that_usually_differs_and_is_bounded() {
        let difference = |number: usize| Difference {
            field: format!("f{number}\n"),
            asked: "a".repeat(1000),
            served: "b".repeat(1000),
        };
        let few: Vec<_> = (0..24).map(difference).collect();
        let line = Difference::list(&few);
        assert!(line.contains("f23\\n (") && !line.contains("more"), "{line}");
        let many: Vec<_> = (0..1000).map(difference).collect();
        let line = Difference::list(&many);
        assert!(line.ends_with(" and more") && line.len() < 5000, "{line}");
        let one = Difference::new("dtype", "float16", "bfloat16");
        assert_eq!(
            Difference::list(&[one]),
            "dtype (asked for float16, served bfloat16)"
        );
    }
}
