// SPDX-License-Identifier: Apache-2.0
//! A difference between two geometries as data; its sentence is made last.
use std::fmt;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// The pair is refused.
    Error,
    /// The pair works, but may not be what was meant.
    Warning,
}

/// The place of a finding: an axis of a part of a layer, or a larger object; all None for the whole geometry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Name of the layer.
    pub layer: Option<String>,
    /// Name of the part of its page.
    pub part: Option<String>,
    /// Name of the axis of the part.
    pub axis: Option<String>,
}

impl Place {
    pub(crate) fn layer(name: &str) -> Self {
        Self { layer: Some(name.to_owned()), ..Self::default() }
    }

    pub(crate) fn part(&self, name: &str) -> Self {
        Self { part: Some(name.to_owned()), ..self.clone() }
    }

    pub(crate) fn axis(&self, name: &str) -> Self {
        Self { axis: Some(name.to_owned()), ..self.clone() }
    }
}

/// `layer "model.layers.0" part "kv" axis "heads"`, or `geometry`.
impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(layer) = &self.layer else { return out.write_str("geometry") };
        write!(out, "layer {layer:?}")?;
        for (word, name) in [("part", &self.part), ("axis", &self.axis)] {
            if let Some(name) = name {
                write!(out, " {word} {name:?}")?;
            }
        }
        Ok(())
    }
}

/// One difference between two geometries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Stable short name, e.g. `dtype`.
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// The object that differs.
    pub place: Place,
    /// Field that differs.
    pub field: &'static str,
    /// Value on the local side.
    pub local: String,
    /// Value on the remote side.
    pub remote: String,
    /// Why it matters.
    pub reason: &'static str,
}

impl Finding {
    /// A difference that refuses the pair.
    pub(crate) fn error(
        code: &'static str,
        place: Place,
        field: &'static str,
        (local, remote): (String, String),
        reason: &'static str,
    ) -> Self {
        Self { code, severity: Severity::Error, place, field, local, remote, reason }
    }

    /// A sentence that is the same for both orders of the geometries: the smaller value comes first.
    pub fn text(&self) -> String {
        if self.local <= self.remote { self.sentence() } else { self.say(&self.remote, &self.local) }
    }

    /// The sentence with the local value first, for findings of one direction only.
    pub(crate) fn sentence(&self) -> String {
        self.say(&self.local, &self.remote)
    }

    fn say(&self, first: &str, second: &str) -> String {
        let Self { place, field, reason, .. } = self;
        format!("{place}: {field} cannot be paired: {first} with {second}; {reason}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(local: &str, remote: &str) -> Finding {
        let place = Place::layer("a\n").part("kv");
        Finding::error("dtype", place, "dtype", (local.to_owned(), remote.to_owned()), "one; two")
    }

    #[test]
    fn places_are_written_from_the_outside_in_and_names_are_quoted() {
        assert_eq!(Place::default().to_string(), "geometry");
        assert_eq!(Place::layer("a\n").to_string(), r#"layer "a\n""#);
        assert_eq!(Place::layer("a").part("kv").axis("heads").to_string(), r#"layer "a" part "kv" axis "heads""#);
    }

    #[test]
    fn the_text_is_the_same_in_both_directions() {
        let text = r#"layer "a\n" part "kv": dtype cannot be paired: bf16 with fp8; one; two"#;
        assert_eq!(finding("bf16", "fp8").text(), text);
        assert_eq!(finding("fp8", "bf16").text(), text);
    }

    #[test]
    fn a_sentence_has_the_local_value_first() {
        assert!(finding("fp8", "bf16").sentence().contains("fp8 with bf16"));
    }
}
