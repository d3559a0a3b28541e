// SPDX-License-Identifier: Apache-2.0
//! Block ids as text for JSON parameters: neighbours in a pool are often neighbours in a request.

use crate::error::{Error, Result, Value};

const FIELD: &str = "block ids";
const MAX_DIGITS: usize = 10;
const MAX_ID: i64 = i32::MAX as i64;
const SHOWN: usize = 60;

/// Writes ids as ascending and descending ranges.
///
/// ```text
/// ids    7  8  9  4  2  1
/// text   7-9      4  2-1
/// ```
pub fn ids_to_text(ids: &[i64]) -> String {
    let mut text = String::with_capacity(6 * ids.len().min(1 << 16));
    let step_at = |at: usize| ids.get(at + 1)?.checked_sub(ids[at]);
    let mut at = 0;
    while at < ids.len() {
        let first = at;
        if let Some(step @ (1 | -1)) = step_at(at) {
            while step_at(at) == Some(step) {
                at += 1;
            }
        }
        if first > 0 {
            text.push(',');
        }
        push_number(&mut text, ids[first]);
        if at > first {
            text.push('-');
            push_number(&mut text, ids[at]);
        }
        at += 1;
    }
    text
}

/// Half of the time for a text of single ids is spent here, so its digits are not allocated.
fn push_number(text: &mut String, number: i64) {
    let mut digits = [0; 19];
    let mut rest = number.unsigned_abs();
    let mut first = digits.len();
    while rest > 0 || first == digits.len() {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    if number < 0 {
        text.push('-');
    }
    text.extend(digits[first..].iter().map(|&digit| char::from(digit)));
}

/// Reads a text of [`ids_to_text`]. Safe on any text; at most `limit` ids are stored.
///
/// # Errors
/// The text has another form, an id has more than 31 bits, or there are more ids than `limit`.
pub fn text_to_ids(text: &str, limit: usize) -> Result<Vec<i64>> {
    // An id has at most ten digits and a separator.
    if text.len() > limit.saturating_mul(MAX_DIGITS + 1) {
        let reason = format!("there are {} characters, at most {limit} ids are expected", text.len());
        return Err(refused(text, &reason));
    }
    let mut ids = Vec::new();
    if text.is_empty() {
        return Ok(ids);
    }
    for part in text.split(',') {
        let (first, last) = part.split_once('-').map_or((part, None), |(first, last)| (first, Some(last)));
        let first = number(part, first)?;
        let last = last.map_or(Ok(first), |last| number(part, last))?;
        if ids.len() + first.abs_diff(last) as usize >= limit {
            return Err(refused(text, &format!("more than {limit} in {}", shown(text))));
        }
        if first <= last {
            ids.extend(first..=last);
        } else {
            ids.extend((last..=first).rev());
        }
    }
    Ok(ids)
}

fn number(part: &str, digits: &str) -> Result<i64> {
    let is_number = (1..=MAX_DIGITS).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
    let id = digits.parse().ok().filter(|_| is_number);
    let id: i64 = id.ok_or_else(|| refused(part, &format!("{} is neither a number nor a range", shown(part))))?;
    if id > MAX_ID {
        return Err(refused(part, &format!("{} does not fit 31 bits", shown(part))));
    }
    Ok(id)
}

/// An untrusted text in a form for error messages.
fn shown(text: &str) -> String {
    let ellipsis = if text.chars().nth(SHOWN).is_some() { "..." } else { "" };
    let letters = text.chars().take(SHOWN).flat_map(char::escape_default);
    format!("'{}{ellipsis}'", letters.collect::<String>())
}

fn refused(text: &str, reason: &str) -> Error {
    let values = (Value::Text(shown(text)), "numbers and ranges of 31 bits, separated by commas".into());
    let sentence = format!("{FIELD}: {reason}");
    Error::argument("value", FIELD, values, reason, sentence)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn runs_go_up_or_down_by_one() {
        assert_eq!(ids_to_text(&[7, 8, 9, 4, 2, 1]), "7-9,4,2-1");
        assert_eq!(ids_to_text(&[]), "");
        assert_eq!(ids_to_text(&[1, 2, 1, 1]), "1-2,1,1");
        assert_eq!(ids_to_text(&[i64::MIN, i64::MAX]), "-9223372036854775808,9223372036854775807");
    }

    #[test]
    fn the_limit_is_of_ids() {
        assert_eq!(text_to_ids("3-1,7", 4), Ok(vec![3, 2, 1, 7]));
        assert!(text_to_ids("3-1,7", 3).is_err());
        assert!(text_to_ids("0-2147483647", 1 << 20).is_err());
        assert_eq!(text_to_ids("2147483647", 1), Ok(vec![i64::from(i32::MAX)]));
        assert!(text_to_ids("2147483648", 1).is_err());
        assert_eq!(text_to_ids("", 0), Ok(vec![]));
        assert!(text_to_ids("1", 0).is_err());
    }

    #[test]
    fn what_is_refused_is_named_as_it_can_be_printed() {
        for text in ["-", "1-", "-1", "a", "1,,2", "1-2-3", " 1", "+1", "12345678901", "²", "1\n", ","] {
            assert!(text_to_ids(text, 10).is_err(), "{text}");
        }
        for text in ["\u{1b}[31mé", &"x".repeat(1000)] {
            let Err(error) = text_to_ids(text, 1000) else { panic!("{text}") };
            let error = error.to_string();
            assert!(error.is_ascii() && !error.contains('\u{1b}') && error.len() < 200, "{error}");
        }
    }

    proptest! {
        #[test]
        fn written_is_what_is_read(ids in prop::collection::vec(0i64..40, 0..200)) {
            prop_assert_eq!(text_to_ids(&ids_to_text(&ids), 200), Ok(ids));
        }
    }
}
