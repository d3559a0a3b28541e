# SPDX-License-Identifier: Apache-2.0
"""The caches of one layer on one rank, as frozen values: keys and values, a latent, recurrent state, or opaque bytes.

A spec is checked when it is laid out, not when it is made, so that the error can name its layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from kvhma.geometry import Group, Shard
from kvhma.models.pages import ConvOrder
from kvhma.models.stride_orders import KVForm

AttentionKind: TypeAlias = Literal["full", "sliding", "chunked"]

_DIM_ORDERS: Mapping[str, str] = {"packed": "BHNC", "split": "BSNHC", "apart": "SBNHC"}
"""Default order of a view's dimensions."""


class _TokenBlocks:
    """Properties that follow from the sizes of blocks with tokens, for all kinds of tokens."""

    __slots__ = ()

    dtype: torch.dtype
    block_size: int
    kernel_block: int | None
    page_bytes: int | None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes inside a kernel block: S K and V (unless packed), H heads, N tokens, C content in items."""
        raise NotImplementedError

    @property
    def kernel_block_size(self) -> int:
        """Tokens of a kernel block."""
        return self.block_size if self.kernel_block is None else self.kernel_block

    @property
    def ratio(self) -> int:
        """Kernel blocks of a logical block."""
        return self.block_size // self.kernel_block_size

    @property
    def nbytes(self) -> int:
        """Bytes of a logical block, without padding."""
        item: int = self.dtype.itemsize
        return math.prod(self.sizes.values()) * self.ratio * item

    @property
    def padded_bytes(self) -> int:
        """Bytes of a logical block, including padding."""
        return self.nbytes if self.page_bytes is None else self.page_bytes

    def block_problem(self) -> str | None:
        """Return the error of the blocks, or None."""
        if not isinstance(self.dtype, torch.dtype):
            return f"dtype {self.dtype!r}: must be a torch.dtype"
        if found := _not_positive(block_size=self.block_size, kernel_block=self.kernel_block_size):
            return found
        if self.block_size % self.kernel_block_size:
            return f"kernel_block {self.kernel_block_size}: must divide block_size {self.block_size}"
        return _page_problem(self.page_bytes, self.nbytes, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class AttentionSpec(_TokenBlocks):
    """Keys and values of one layer.

    Attributes:
        heads: KV heads of this rank among those of all ranks.
        head_dim: items of one K or V vector.
        dtype: of K and V.
        block_size: tokens of a logical block.
        kernel_block: tokens that the kernel addresses as one block; None for `block_size`.
        kind: ``"full"``, ``"sliding"`` or ``"chunked"``.
        window: tokens that a query sees, including itself (``sliding`` only).
        chunk: tokens of an attention chunk (``chunked`` only).
        kv: ``packed``: K and V of a token and head are one content. ``split``: K, then V in each page; if heads come
            before layers or blocks, in each head's bytes. ``apart``: K of all blocks, then V of all blocks.
        dim_order: the order of the view's dimensions that the kernel wants: B kernel blocks, S two for K and V (unless
            packed), H heads, N tokens, C content. None for ``BHNC``, ``BSNHC`` or ``SBNHC``.
        page_bytes: bytes of a logical block including the padding after it; None for no padding.
    """

    heads: Shard
    head_dim: int
    dtype: torch.dtype
    block_size: int
    kernel_block: int | None = None
    kind: AttentionKind = "full"
    window: int | None = None
    chunk: int | None = None
    kv: KVForm = "packed"
    dim_order: str | None = None
    page_bytes: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes inside a kernel block: S K and V (unless packed), H heads, N tokens, C content in items."""
        inside = {"H": self.heads.held, "N": self.kernel_block_size}
        if self.kv == "packed":
            return {**inside, "C": 2 * self.head_dim}
        return {"S": 2, **inside, "C": self.head_dim}

    @property
    def dims(self) -> str:
        """Dimensions of the view."""
        return _DIM_ORDERS[self.kv] if self.dim_order is None else self.dim_order

    def group(self) -> Group:
        """Return a group for its layer."""
        return Group(self.kind, self.block_size, ratio=self.ratio, window=self.window, chunk=self.chunk)

    def problem(self) -> str | None:
        """Return the error of the spec, or None."""
        if self.kv not in _DIM_ORDERS:
            return f"kv {self.kv!r}: known are {', '.join(_DIM_ORDERS)}"
        if sorted(self.dims) != sorted(_DIM_ORDERS[self.kv]):
            return f"dim_order {self.dim_order!r}: must be an order of {_DIM_ORDERS[self.kv]}, with kv {self.kv!r}"
        return self.heads.problem("heads") or _not_positive(head_dim=self.head_dim) or self.block_problem()


@dataclass(frozen=True, slots=True)
class MLASpec(_TokenBlocks):
    """The latent of one MLA layer; every rank holds it whole.

    Attributes:
        width: items of a token: the latent and the rotary items.
        dtype: dtype of the items.
        block_size: tokens of a logical block.
        kernel_block: tokens that the kernel addresses as one block; None for `block_size`.
        dim_order: order of the view's dimensions: ``BNC``, or with an H for a dimension of one head.
        page_bytes: bytes of a logical block including the padding after it; None for no padding.
    """

    width: int
    dtype: torch.dtype
    block_size: int
    kernel_block: int | None = None
    dim_order: str | None = None
    page_bytes: int | None = None

    @property
    def kv(self) -> KVForm:
        """A latent is K and V at once."""
        return "packed"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes inside a kernel block: one head, N tokens, C items of the latent."""
        return {"H": 1, "N": self.kernel_block_size, "C": self.width}

    @property
    def dims(self) -> str:
        """Dimensions of the view."""
        return "BNC" if self.dim_order is None else self.dim_order

    def group(self) -> Group:
        """Return a group for its layer."""
        return Group("mla", self.block_size, ratio=self.ratio)

    def problem(self) -> str | None:
        """Return the error of the spec, or None."""
        if sorted(self.dims.replace("H", "", 1)) != sorted("BNC"):
            return f"dim_order {self.dim_order!r}: must be an order of BNC or BHNC"
        return _not_positive(width=self.width) or self.block_problem()


@dataclass(frozen=True, slots=True)
class ConvPart:
    """The channels of one part of a convolution state.

    Attributes:
        name: ``x``, ``B``, ``C`` or ``q``, ``k``, ``v``.
        channels: the channels of this rank among those of all ranks.
    """

    name: str
    channels: Shard


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State of one recurrent layer: convolution state, then SSM state, without a gap.

    Attributes:
        conv: parts of the convolution state in memory order; empty without such a state.
        conv_rows: rows of the convolution state: the taps minus one, plus one for every draft token.
        conv_dtype: its dtype.
        ssm_heads: heads of the SSM state; None without such a state.
        ssm_shape: shape of one head, e.g. ``(head_dim, d_state)``.
        ssm_dtype: its dtype.
        conv_order: ``DS``: channels, then rows; ``SD``: rows, then channels.
        block_size: tokens of a block; it only describes the manager.
        speculative: state slots after the slot with the state.
        page_bytes: bytes of a block including the padding after the state; None for no padding.
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
        """Shape of the convolution state of a block; empty without such a state."""
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
        """Bytes of one head of the SSM state."""
        item: int = self.ssm_dtype.itemsize
        return math.prod(self.ssm_shape) * item

    @property
    def nbytes(self) -> int:
        """Bytes of a block, without padding."""
        return self.conv_bytes + (self.head_bytes * self.ssm_heads.held if self.ssm_heads else 0)

    @property
    def padded_bytes(self) -> int:
        """Bytes of a block, including padding."""
        return self.nbytes if self.page_bytes is None else self.page_bytes

    def group(self) -> Group:
        """Return a group for its layer."""
        return Group("ssm", self.block_size, speculative=self.speculative)

    def problem(self) -> str | None:
        """Return the error of the spec, or None."""
        if not self.conv and self.ssm_heads is None:
            return "conv () and ssm_heads None: a state needs at least one of them"
        if not isinstance(self.speculative, int) or self.speculative < 0:
            return f"speculative {self.speculative!r}: must be an integer of at least 0"
        if problem := _not_positive(block_size=self.block_size) or self._conv_problem() or self._ssm_problem():
            return problem
        align = max(self.conv_dtype.itemsize if self.conv else 1, self.ssm_dtype.itemsize if self.ssm_heads else 1)
        return _page_problem(self.page_bytes, self.nbytes, align)

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
        return next(filter(None, found), None) or _not_positive(conv_rows=self.conv_rows)

    def _ssm_problem(self) -> str | None:
        if self.ssm_heads is None:
            return None
        if not isinstance(self.ssm_dtype, torch.dtype):
            return f"ssm_dtype {self.ssm_dtype!r}: must be a torch.dtype"
        found = (_not_positive(**{f"ssm_shape[{at}]": size}) for at, size in enumerate(self.ssm_shape))
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
        encoding: a name of the content, which both sides must share.
        block_size: tokens of a block; it only describes the manager.
    """

    nbytes: int
    encoding: str = "opaque"
    block_size: int = 1

    @property
    def padded_bytes(self) -> int:
        """Bytes of a block: padding, if any, is part of them."""
        return self.nbytes

    def group(self) -> Group:
        """Return a group for its layer."""
        return Group("opaque", self.block_size)

    def problem(self) -> str | None:
        """Return the error of the spec, or None."""
        return _not_positive(nbytes=self.nbytes, block_size=self.block_size)


TokenSpec: TypeAlias = AttentionSpec | MLASpec
Spec: TypeAlias = TokenSpec | StateSpec | OpaqueSpec


def _not_positive(**sizes: int) -> str | None:
    """Return the error of the first size that is not a positive integer, or None."""
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            return f"{name} {value!r}: must be an integer of at least 1"
    return None


def _page_problem(page_bytes: int | None, nbytes: int, align: int) -> str | None:
    """Return the error of the padded bytes of a block that holds `nbytes`, or None."""
    if page_bytes is not None and (not isinstance(page_bytes, int) or page_bytes < nbytes):
        return f"page_bytes {page_bytes!r}: a block holds {nbytes} bytes"
    padded = nbytes if page_bytes is None else page_bytes
    if padded % align:
        return f"page of {padded} bytes: must be a multiple of its items' {align} bytes; set page_bytes"
    return None
