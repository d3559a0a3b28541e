# SPDX-License-Identifier: Apache-2.0
"""What a recurrent layer, or one that nobody but its owner understands, caches on one rank, as frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvhma.geometry import Group
from kvhma.hybrid import ConvOrder
from kvhma.torch.shard import Shard, bad_page, not_positive


@dataclass(frozen=True, slots=True)
class ConvPart:
    """The channels of one part of a convolution state.

    Attributes:
        name: ``x``, ``B``, ``C`` or ``q``, ``k``, ``v``.
        channels: those of this rank, of those of all ranks.
    """

    name: str
    channels: Shard


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Recurrent state of one layer: convolution, then the state proper, without a gap.

    Attributes:
        conv: parts of the convolution state in memory order; empty for none.
        conv_rows: rows of it: the taps less one, and one for every draft token.
        conv_dtype: its dtype.
        ssm_heads: heads of the state proper; None for none.
        ssm_shape: shape of one head, e.g. ``(head_dim, d_state)``.
        ssm_dtype: its dtype.
        conv_order: ``DS``: channels, then rows; ``SD``: rows, then channels.
        block_size: tokens of a block; it only describes the manager.
        speculative: state slots behind the state-bearing one.
        page_bytes: bytes of a block with the padding behind the state; None for no padding.
    """

    conv: tuple[ConvPart, ...]
    conv_rows: int
    conv_dtype: torch.dtype
    ssm_heads: Shard | None
    ssm_shape: tuple[int, ...]
    ssm_dtype: torch.dtype
    conv_order: ConvOrder = "DS"
    block_size: int = 1
    speculative: int = 0
    page_bytes: int | None = None

    @property
    def conv_shape(self) -> tuple[int, ...]:
        """Shape of the convolution state of a block; empty if there is none."""
        if not self.conv:
            return ()
        width = sum(part.channels.held for part in self.conv)
        return (width, self.conv_rows) if self.conv_order == "DS" else (self.conv_rows, width)

    @property
    def conv_bytes(self) -> int:
        """Bytes of the convolution state of a block."""
        item: int = self.conv_dtype.itemsize
        return math.prod(self.conv_shape) * item if self.conv else 0

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of the state proper."""
        item: int = self.ssm_dtype.itemsize
        return math.prod(self.ssm_shape) * item

    @property
    def nbytes(self) -> int:
        """Bytes of a block, padding excluded."""
        return self.conv_bytes + (self.head_bytes * self.ssm_heads.held if self.ssm_heads else 0)

    @property
    def padded_bytes(self) -> int:
        """Bytes of a block, padding included."""
        return self.nbytes if self.page_bytes is None else self.page_bytes

    @property
    def align(self) -> int:
        """What a page has to start at a multiple of, in bytes."""
        return max(self.conv_dtype.itemsize if self.conv else 1, self.ssm_dtype.itemsize if self.ssm_heads else 1)

    def group(self) -> Group:
        """Return the group its layer can be in."""
        return Group("ssm", self.block_size, speculative=self.speculative)

    def problem(self) -> str | None:
        """Return what is wrong with it, or None."""
        if not self.conv and self.ssm_heads is None:
            return "conv () and ssm_heads None: a state has at least one of them"
        if not isinstance(self.speculative, int) or self.speculative < 0:
            return f"speculative {self.speculative!r}: must be an integer of at least 0"
        return (
            not_positive(block_size=self.block_size)
            or self._conv_problem()
            or self._ssm_problem()
            or bad_page(self.page_bytes, self.nbytes, self.align)
        )

    def _conv_problem(self) -> str | None:
        if not self.conv:
            return None
        if self.conv_order not in ("DS", "SD"):
            return f"conv_order {self.conv_order!r}: known are DS, SD"
        if not isinstance(self.conv_dtype, torch.dtype):
            return f"conv_dtype {self.conv_dtype!r}: must be a torch.dtype"
        names = [part.name for part in self.conv]
        if len(set(names)) < len(names):
            return f"conv {', '.join(names)}: must be parts of different names"
        found = (part.channels.problem(f"channels of {part.name!r}") for part in self.conv)
        return next(filter(None, found), None) or not_positive(conv_rows=self.conv_rows)

    def _ssm_problem(self) -> str | None:
        if self.ssm_heads is None:
            return None
        if not isinstance(self.ssm_dtype, torch.dtype):
            return f"ssm_dtype {self.ssm_dtype!r}: must be a torch.dtype"
        found = (not_positive(**{f"ssm_shape[{at}]": size}) for at, size in enumerate(self.ssm_shape))
        if problem := self.ssm_heads.problem("ssm_heads") or next(filter(None, found), None):
            return problem
        if self.conv_bytes % self.ssm_dtype.itemsize:
            return f"{self.conv_bytes} bytes of convolution state: must be a multiple of ssm_dtype {self.ssm_dtype}'s"
        return None


@dataclass(frozen=True, slots=True)
class OpaqueSpec:
    """Blocks that only their owner understands. They move whole, between equal caches.

    Attributes:
        nbytes: bytes of a block.
        encoding: what the bytes are, compared between the two sides.
        block_size: tokens of a block; it only describes the manager.
    """

    nbytes: int
    encoding: str = "opaque"
    block_size: int = 1

    @property
    def padded_bytes(self) -> int:
        """Bytes of a block: nobody knows of padding in it."""
        return self.nbytes

    @property
    def align(self) -> int:
        """What a page has to start at a multiple of, in bytes."""
        return 1

    def group(self) -> Group:
        """Return the group its layer can be in."""
        return Group("opaque", self.block_size)

    def problem(self) -> str | None:
        """Return what is wrong with it, or None."""
        return not_positive(nbytes=self.nbytes, block_size=self.block_size)
