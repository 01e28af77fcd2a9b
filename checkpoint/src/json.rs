//! Bounds on JSON that is kept whole, told from its bytes before it is read: a number takes two bytes of text
//! and 32 of memory, an object seven and 640.

use crate::error::TooMuch;

/// The most values of a text. A quantization that names each of 60,000 experts takes some 200,000.
const VALUES_CAP: usize = 1 << 18;
/// The most objects among them.
const OBJECTS_CAP: usize = 1 << 16;

/// The text, which is UTF-8 as a whole: readers of JSON look at no more than what they are asked for.
pub(crate) fn text(json: &[u8]) -> Result<&str, String> {
    str::from_utf8(json).map_err(|error| format!("it is not UTF-8 at byte {}", error.valid_up_to()))
}

/// Whether a text may be read. One that is no JSON passes or not; its reader refuses it.
pub(crate) fn check(json: &[u8]) -> Result<(), TooMuch> {
    let (mut values, mut objects) = (0, 0);
    let (mut in_string, mut escaped) = (false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b',' | b'[' => values += 1,
            b'{' => (values, objects) = (values + 1, objects + 1),
            _ => {}
        }
    }
    let at_most = |count: usize, cap, what| match count <= cap {
        true => Ok(()),
        false => Err(TooMuch { what, cap }),
    };
    at_most(objects, OBJECTS_CAP, "objects")?;
    at_most(values, VALUES_CAP, "values")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_strings_counts_for_nothing() {
        let text = |inner: &str| format!("[\"{}\"]", inner.repeat(OBJECTS_CAP + 1));
        assert_eq!(check(text("{[,").as_bytes()), Ok(()));
        assert_eq!(check(text("\\\"{").as_bytes()), Ok(()));
        let what = |text: &str| check(text.as_bytes()).unwrap_err().what;
        assert_eq!(what(&text("\",{},\"")), "objects");
        assert_eq!(what(&"[".repeat(VALUES_CAP + 1)), "values");
        assert_eq!(check("[".repeat(VALUES_CAP).as_bytes()), Ok(()));
    }
}
