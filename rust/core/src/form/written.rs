// SPDX-License-Identifier: Apache-2.0
//! The written form of a geometry: JSON, or a caller's values. Nothing here is checked.
use serde::{Deserialize, Serialize};
use serde_json::ser::PrettyFormatter;

use crate::error::{Error, Result};
use crate::geometry::objects::{Object, objects};
use crate::geometry::types;
use crate::geometry::types::Region;

/// Version of the JSON form.
pub const SCHEMA_VERSION: u32 = 1;
/// Size limit of the JSON form.
pub const MAX_JSON_BYTES: usize = 16 << 20;

/// What the blocks of a group hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(try_from = "String", into = "&str")]
pub enum Kind {
    /// Attention to every earlier token.
    Full,
    /// Attention to the last `window` tokens.
    Sliding,
    /// Attention inside chunks of `chunk` tokens.
    Chunked,
    /// Latent attention, to every earlier token.
    Mla,
    /// Recurrent state: the last slot counts.
    Ssm,
    /// State that only its owner understands.
    Opaque,
}

impl TryFrom<String> for Kind {
    type Error = String;

    fn try_from(word: String) -> std::result::Result<Self, String> {
        let kinds = [Self::Full, Self::Sliding, Self::Chunked, Self::Mla, Self::Ssm, Self::Opaque];
        let found = kinds.into_iter().find(|kind| kind.word() == word);
        found.ok_or_else(|| format!("unknown kind {word:?}, expected one of {:?}", kinds.map(Self::word)))
    }
}

impl From<Kind> for &'static str {
    fn from(kind: Kind) -> Self {
        kind.word()
    }
}

impl Kind {
    /// The word of the JSON form.
    pub fn word(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Sliding => "sliding",
            Self::Chunked => "chunked",
            Self::Mla => "mla",
            Self::Ssm => "ssm",
            Self::Opaque => "opaque",
        }
    }
}

/// Layers that share a block table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// What the blocks hold.
    pub kind: Kind,
    /// Tokens per logical block.
    pub block_size: u64,
    /// Kernel blocks per logical block.
    #[serde(default = "one")]
    pub ratio: u64,
    /// Tokens that a query sees, including itself (`Sliding`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// Tokens per chunk (`Chunked`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<u64>,
    /// State slots after the slot with the state (`Ssm`).
    #[serde(default)]
    pub speculative: u64,
    /// Number among the context-parallel ranks.
    #[serde(default)]
    pub cp_rank: u64,
    /// Context-parallel ranks.
    #[serde(default = "one")]
    pub cp_size: u64,
    /// Tokens that a rank holds before the next rank's turn; `block_size` if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cp_interleave: Option<u64>,
}

/// An axis whose length may be left out: it then has all indices from `start` on.
pub type Axis = types::Axis<Option<u64>>;
/// A part with such axes.
pub type Part = types::Part<Option<u64>>;
/// A page with such parts.
pub type Page = types::Page<Option<u64>>;

/// Where the pages of one layer are.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Layers are paired by name.
    pub name: String,
    /// Index into the groups.
    pub group: usize,
    /// Index into the regions.
    pub region: usize,
    /// Bytes from the region's base to the page of block 0.
    pub offset: u64,
    /// Logical blocks.
    pub num_blocks: u64,
    /// Bytes between logical blocks.
    pub block_stride: u64,
    /// Index into the pages.
    pub page: usize,
    /// Bytes between kernel blocks; `block_stride / ratio` if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_stride: Option<u64>,
}

/// The written form of a geometry, not checked yet.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Form {
    /// Version of the JSON form.
    pub kvhma: u32,
    /// Number among the tensor-parallel ranks.
    #[serde(default)]
    pub tp_rank: u32,
    /// Tensor-parallel ranks.
    #[serde(default = "one_u32")]
    pub tp_size: u32,
    /// Block id that stands for "no block".
    #[serde(default = "null_zero")]
    pub null_block: Option<u64>,
    /// Registered ranges.
    #[serde(deserialize_with = "objects")]
    pub regions: Vec<Region>,
    /// Groups in the order of the block tables.
    #[serde(deserialize_with = "objects")]
    pub groups: Vec<Group>,
    /// The content of layers' pages.
    #[serde(deserialize_with = "objects")]
    pub pages: Vec<Page>,
    /// Every layer.
    #[serde(deserialize_with = "objects")]
    pub layers: Vec<Layer>,
}

impl Form {
    /// Reads the JSON form. Safe on any input.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        if json.len() > MAX_JSON_BYTES {
            return Err(Error::too_large(json.len(), MAX_JSON_BYTES));
        }
        let Object(form): Object<Self> = serde_json::from_slice(json).map_err(|_| wrong_json(json))?;
        if form.kvhma != SCHEMA_VERSION {
            return Err(Error::json(SCHEMA_VERSION, "kvhma", format!("its kvhma field is {}", form.kvhma)));
        }
        Ok(form)
    }

    /// Writes the JSON form in one line, or indented by a number of spaces.
    #[allow(clippy::missing_panics_doc, reason = "it does not")]
    pub fn to_json(&self, indent: Option<usize>) -> Vec<u8> {
        let mut out = Vec::new();
        let written = match indent {
            None => serde_json::to_writer(&mut out, self),
            Some(spaces) => {
                let spaces = vec![b' '; spaces];
                let pretty = PrettyFormatter::with_indent(&spaces);
                self.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty))
            }
        };
        written.expect("numbers and strings have a JSON form, and memory takes it");
        out
    }
}

/// The error of a JSON form, and its place. It parses again to find the place, so that a valid form is parsed once and
/// fast.
fn wrong_json(json: &[u8]) -> Error {
    let mut reader = serde_json::Deserializer::from_slice(json);
    let Err(error) = serde_path_to_error::deserialize::<_, Object<Form>>(&mut reader) else {
        // The error is after the object.
        let reason = reader.end().err().map_or_else(String::new, |error| error.to_string());
        return Error::json(SCHEMA_VERSION, "", reason);
    };
    let path = error.path().to_string();
    let field = if [".", "?"].contains(&path.as_str()) { "" } else { &path };
    Error::json(SCHEMA_VERSION, field, error.inner().to_string())
}

fn one() -> u64 {
    1
}

fn one_u32() -> u32 {
    1
}

#[allow(clippy::unnecessary_wraps, reason = "the default of an optional field")]
fn null_zero() -> Option<u64> {
    Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = concat!(
        r#"{"kvhma":1,"tp_rank":0,"tp_size":2,"null_block":null,"#,
        r#""regions":[{"base":4096,"bytes":256,"memory":"VRAM","device":3}],"#,
        r#""groups":[{"kind":"sliding","block_size":16,"ratio":2,"window":7,"speculative":0,"cp_rank":0,"cp_size":1}],"#,
        r#""pages":[{"parts":[{"name":"kv","dtype":"uint8","item_bytes":1,"offset":0,"axes":["#,
        r#"{"name":"tokens","extent":8,"stride":4,"start":0},"#,
        r#"{"name":"heads","extent":2,"stride":2,"start":1,"length":1,"may_repeat":true},"#,
        r#"{"name":"rows","extent":2,"stride":1,"start":0,"length":2,"spare":1}]}]}],"#,
        r#""layers":[{"name":"a","group":0,"region":0,"offset":0,"num_blocks":4,"block_stride":64,"page":0}]}"#
    );

    #[test]
    fn what_is_wrong_is_named() {
        for (right, wrong, field) in [
            (r#""base":4096"#, r#""base":-1"#, "regions[0].base"),
            (r#""block_size":16"#, r#""block_size":"16""#, "groups[0].block_size"),
            (r#""stride":2,"start":1"#, r#""stride":2.5,"start":1"#, "pages[0].parts[0].axes[1].stride"),
            (r#""name":"a","#, "", "layers[0]"),
            (r#""kvhma":1"#, r#""kvhma":2"#, "kvhma"),
            (r#""page":0}]}"#, r#""page":0}]}{"#, ""),
            (r#""page":0}]}"#, r#""page":0}]"#, ""),
        ] {
            assert_eq!(JSON.matches(right).count(), 1, "{right}");
            let error = Form::from_json(JSON.replace(right, wrong).as_bytes()).expect_err(wrong);
            let Error::Input(found) = error else { panic!("{error:?}") };
            assert_eq!((found.code, found.field.as_ref()), ("json", field), "{}", found.text);
            assert!(!found.reason.is_empty());
        }
    }

    #[test]
    fn what_is_read_is_written_again() {
        let form = Form::from_json(JSON.as_bytes()).expect("valid");
        assert_eq!(String::from_utf8(form.to_json(None)).expect("UTF-8"), JSON);
        assert_eq!(Form::from_json(&form.to_json(Some(2))), Ok(form));
    }
}
