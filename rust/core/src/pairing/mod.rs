// SPDX-License-Identifier: Apache-2.0
//! What a local rank reads from its sources, for all requests.
pub(crate) mod assign;
pub(crate) mod cost;
pub(crate) mod cuts;
pub(crate) mod group_pair;
pub(crate) mod kept;
pub(crate) mod most_pieces;
pub(crate) mod page_pair;
pub(crate) mod plan;
pub(crate) mod settle;
pub(crate) mod table;
pub(crate) mod validate;
pub(crate) mod view_table;
