# SPDX-License-Identifier: Apache-2.0
"""Tokens of a block: of the logical block that the manager allocates, and of the block that a kernel addresses."""

from __future__ import annotations

from typing import Literal, TypeAlias

from kvhma.errors import LayoutError
from kvhma.models.pages import state_bytes
from kvhma.models.shards import check_positive, kv_heads
from kvhma.models.table import Attention, Model

KernelBlock: TypeAlias = "int | Literal['flashinfer'] | None"
"""Tokens of a kernel block, ``"flashinfer"`` for that kernel's choice, or None for the whole logical block."""

_FLASHINFER_BLOCKS = (64, 32, 16)
"""FlashInfer's kernel blocks: it selects the largest that divides the logical block."""

_SMALLEST_KERNEL_BLOCK = 16
_MLA_ALIGN = 128


def token_bytes(cache: Attention, *, tp_size: int = 1) -> int:
    """Return the bytes of a token of one layer on one rank.

    Args:
        cache: heads, head size and dtype of the layer.
        tp_size: tensor-parallel ranks.

    Raises:
        LayoutError: heads do not divide over the ranks.
    """
    return kv_heads(cache, 0, tp_size).held * cache.token_bytes


def hybrid_block_size(model: Model, *, tp_size: int = 1, block_size: int = 16, align: int | None = None) -> int:
    """Return the tokens of a logical block: the smallest multiple of `align` whose page holds a state.

        state    |x B C ssm             |
        tokens   |t0|t1|t2|t3|..|t15|..            as many as needed for the bytes of a state

    The page is of layers with the model's own heads. Groups whose layers have other heads can have longer blocks.

    Args:
        model: the model.
        tp_size: tensor-parallel ranks.
        block_size: tokens per block that the user asked for; the result if the model has no state or no attention.
        align: tokens; None for the larger of `block_size` and the smallest kernel block (16, MLA 128).

    Raises:
        LayoutError: a size is not positive, or does not divide over the ranks.
    """
    check_positive(block_size=block_size, tp_size=tp_size)
    if model.state is None or not model.has_attention:
        return block_size
    token = model.token_spec()
    per_token = token_bytes(token, tp_size=tp_size)
    if align is None:
        align = max(_MLA_ALIGN if token.kind == "mla" else _SMALLEST_KERNEL_BLOCK, block_size)
    check_positive(align=align)
    return align * -(-state_bytes(model.state, tp_size=tp_size) // (align * per_token))


def kernel_block_size(kernel_block: int | str | None, block_size: int) -> int:
    """Return the tokens that the attention kernel addresses as one block of a logical one.

    Args:
        kernel_block: tokens; ``"flashinfer"`` for the largest of its sizes that divides the block; None for the whole
            block.
        block_size: tokens of a logical block.

    Raises:
        LayoutError: it does not divide the logical block, or no size of FlashInfer does.
    """
    if kernel_block == "flashinfer":
        for tokens in _FLASHINFER_BLOCKS:
            if block_size % tokens == 0:
                return tokens
        raise LayoutError(f"block_size {block_size}: FlashInfer needs a multiple of {_FLASHINFER_BLOCKS[-1]}")
    if kernel_block is None:
        return block_size
    if not isinstance(kernel_block, int) or kernel_block < 1 or block_size % kernel_block:
        raise LayoutError(f"kernel_block {kernel_block!r}: must divide the logical block of {block_size} tokens")
    return kernel_block
