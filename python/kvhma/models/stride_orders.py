# SPDX-License-Identifier: Apache-2.0
"""Stride orders: the nesting of the dimensions of a cache.

L layer slot, B block, K kernel block inside its block, S keys or values, H head, N token, C content.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Order: TypeAlias = Literal["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
"""Stride order, outermost first: layer slot, block, head, token, content."""

KVForm: TypeAlias = Literal["packed", "split", "apart"]
"""``packed``: K and V of a token are one content; ``split``: in each page K, then V; ``apart``: K of all blocks, then V
of all blocks."""

PAGE_ORDERS = tuple(order for order in get_args(Order) if set(order[:2]) == {"L", "B"})
"""Orders in which the page of a layer is contiguous."""


def stride_axes(order: str, kv: str, *, kernel_blocks_in_page: bool) -> str:
    """Return all axes of a cache, outermost first: a stride order with K inserted, and S unless K and V are packed.

        order   kv      kernel blocks in the page   as smaller blocks
        LBNHC   packed  LBKNHC                      LBKNHC
        BLHNC   split   BLKSHNC                     BKLSHNC
        BHLNC   split                               BKHLSNC
        LHBNC   apart                               LSHBKNC

    Args:
        order: stride order.
        kv: where K and V are. ``apart`` means a buffer for each layer slot, so L is outermost.
        kernel_blocks_in_page: whether a contiguous page stays contiguous if its block has several kernel blocks, so
            that a state page can alias it. Otherwise, and in orders without contiguous pages, kernel blocks are placed
            like blocks of a smaller size.
    """
    before_k = "L" if kernel_blocks_in_page and order in PAGE_ORDERS and order[0] == "B" else "B"
    axes = order.replace(before_k, before_k + "K")
    if kv == "apart":
        return "LS" + axes.replace("L", "")
    page = 1 + max(axes.index("L"), axes.index("K"))
    return axes[:page] + "S" + axes[page:] if kv == "split" else axes
