// SPDX-License-Identifier: Apache-2.0
//! Python bindings: convert, call the core, convert back.
#![deny(unsafe_code)]
// Extracted arguments are owned, because PyO3 passes them by value.
#![allow(clippy::needless_pass_by_value)]
// Python docstrings, equal to those of `_kvhma.pyi`: names have no backticks there.
#![allow(clippy::doc_markdown)]

mod block_tables;
mod block_users;
mod convert;
mod digest;
mod error;
mod functions;
mod geometry;
mod ids;
mod output;
mod plan;
mod replay;
mod results;
mod spans;
mod values;

use pyo3::prelude::*;

/// The Rust half of kvhma. The `kvhma` package re-exports public names. It needs the GIL, because lists are read
/// through borrowed items.
#[pymodule(gil_used = true)]
mod _kvhma {
    #[pymodule_export]
    use super::block_users::BlockUsers;
    #[pymodule_export]
    use super::digest::{digest_prefixes, digest_tokens};
    #[pymodule_export]
    use super::functions::{
        check_rows, expand_views, fa_descriptors, fa_views, first_entries, first_needed_tokens, ids_to_text,
        join_tables, permuted_rows, ssm_descriptors, ssm_views, text_to_ids, validate, window_blocks,
    };
    #[pymodule_export]
    use super::geometry::CheckedGeometry;
    #[pymodule_export]
    use super::ids::{DescriptorOrder, clip_blocks, descriptor_ids, expand_blocks};
    #[pymodule_export]
    use super::plan::Plan;
    #[pymodule_export]
    use super::replay::{first_tokens, plain_rows, prefix_hits, shared_paths, turns};
    #[pymodule_export]
    use super::results::{Finding, Loss, Losses, Read, Transfer};
    #[pymodule_export]
    use super::spans::{live_spans, spans_to_fill, spans_to_texts, texts_to_spans};
    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
