// SPDX-License-Identifier: Apache-2.0
//! Reads the plain rows of a trace: JSON objects with numbers and identities, and without a session.
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Rows, a value of each column for each, and the identities of all rows.
#[derive(Debug, Default)]
pub struct Rows {
    /// `timestamp`, in the units of the file.
    pub timestamps: Vec<f64>,
    /// `input_length`, tokens.
    pub prompts: Vec<i64>,
    /// `output_length`, tokens.
    pub answers: Vec<i64>,
    /// `hash_ids` of all rows, one row after the other.
    pub ids: Vec<i64>,
    /// Identities of each row; empty if rows have none.
    pub counts: Vec<i64>,
    /// Bytes of the lines that were read.
    pub bytes: usize,
    /// Lines that were read, the empty ones too.
    pub lines: usize,
}

#[derive(Deserialize)]
struct Row {
    timestamp: f64,
    input_length: i64,
    output_length: i64,
    hash_ids: Option<Vec<i64>>,
    session: Option<IgnoredAny>,
    session_id: Option<IgnoredAny>,
}

/// Read lines up to the first one that is no plain row, or differs from the first row in having identities.
///
/// A prompt has 1 to `most` tokens, an answer up to `most`. The reader of other forms says what is wrong with a line.
#[must_use]
pub fn plain_rows(text: &[u8], most: i64) -> Rows {
    let mut rows = Rows::default();
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        if !line.iter().all(u8::is_ascii_whitespace) {
            let Ok(row) = serde_json::from_slice::<Row>(line) else { break };
            let ids = row.hash_ids.as_deref();
            let is_first = rows.prompts.is_empty();
            let is_plain = row.session.is_none()
                && row.session_id.is_none()
                && (1..=most).contains(&row.input_length)
                && (0..=most).contains(&row.output_length)
                && ids.is_none_or(|ids| ids.iter().all(|&id| id >= 0))
                && (is_first || ids.is_some() != rows.counts.is_empty());
            if !is_plain {
                break;
            }
            rows.timestamps.push(row.timestamp);
            rows.prompts.push(row.input_length);
            rows.answers.push(row.output_length);
            if let Some(ids) = ids {
                rows.ids.extend_from_slice(ids);
                rows.counts.push(ids.len() as i64);
            }
        }
        rows.bytes += line.len();
        rows.lines += 1;
    }
    rows
}
