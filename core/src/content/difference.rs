//! What two keys say differently, for a person.

use crate::text::short;
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
        let [asked, served] = told_apart(asked, served);
        Difference {
            field: match field.len() {
                0..=NAME => field.to_owned(),
                _ => short(field, SHORT),
            },
            asked,
            served,
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
        let [field, asked, served] = [&self.field, &self.asked, &self.served].map(|text| short(text, SHORT));
        write!(f, "{field} (asked for {asked}, served {served})")
    }
}

/// What two values are from where they differ, where they differ so late that both are cut before.
fn told_apart<'a>(asked: &'a str, served: &'a str) -> [String; 2] {
    let both = [asked, served].map(|value| short(value, SHORT));
    if asked == served || both[0] != both[1] {
        return both;
    }
    let same = asked.chars().zip(served.chars()).take_while(|(a, b)| a == b);
    let same: usize = same.map(|(character, _)| character.len_utf8()).sum();
    [asked, served].map(|value| short(&format!("...{}", &value[same..]), SHORT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_look_different_wherever_they_differ() {
        let long = "x".repeat(61);
        let table = [
            ("float16", "bfloat16", "float16", "bfloat16"),
            ("a\nb", "", r"a\nb", ""),
            // Neither can be told from the other by its first 61 bytes.
            (
                &*format!("{long}old1"),
                &*format!("{long}new1"),
                "...old1",
                "...new1",
            ),
            (
                &*format!("{long}üxxx"),
                &*format!("{long}öxxx"),
                "...üxxx",
                "...öxxx",
            ),
            (&*format!("{long}xxxx"), &*format!("{long}xxxxx"), "...", "...x"),
        ];
        for (asked, served, as_asked, as_served) in table {
            let told = Difference::new("f", asked, served);
            assert_eq!((&*told.asked, &*told.served), (as_asked, as_served));
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
