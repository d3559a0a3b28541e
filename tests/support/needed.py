# SPDX-License-Identifier: Apache-2.0
"""The least that a request can move: an oracle for counts, from the plain reference's rules alone."""

from __future__ import annotations

from kvhma.cli.columns import Count
from kvhma.errors import RequestError
from kvhma.geometry import Geometry
from support.reference import cdiv, first_needed_token


def needed(geometry: Geometry, num_tokens: int) -> Count:
    """Count what `num_tokens` tokens need on this rank: live kernel blocks, and two pieces per state.

    Whole kernel blocks, padding and absent layers excluded, nothing merged. So a plan can do with fewer
    descriptors, and with fewer bytes where a last block can be cut at no cost, as that of an MLA latent.

    Raises:
        RequestError: a negative number of tokens.
    """
    if num_tokens < 0:
        raise RequestError(f"num_tokens {num_tokens}: must not be negative")
    descriptors = total = 0
    for layer in geometry.layers:
        group = geometry.groups[layer.group]
        if group.kind == "ssm":
            pieces, size = 2, layer.page.nbytes
        else:
            tokens = group.kernel_block_size
            pieces = cdiv(num_tokens, tokens) - first_needed_token(group, num_tokens) // tokens
            size = pieces * layer.page.nbytes
        descriptors += pieces
        total += size
    return Count(descriptors, total)
