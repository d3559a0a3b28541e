# SPDX-License-Identifier: Apache-2.0
"""What one attention layer caches on one rank, as frozen values.

A spec is not checked when it is made but when it is laid out, so that what is wrong with it comes with the name of its
layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from kvhma.geometry import Group
from kvhma.hybrid import KVForm
from kvhma.torch.shard import Shard, bad_page, not_positive

AttentionKind: TypeAlias = Literal["full", "sliding", "chunked"]

_VIEWS: Mapping[str, str] = {"packed": "BHNC", "split": "BSNHC", "apart": "SBNHC"}
"""Order of a view's dimensions where a spec names none."""


class _TokenBlocks:
    """What follows from the sizes of blocks that hold tokens, whatever a token is."""

    __slots__ = ()

    dtype: torch.dtype
    block_size: int
    kernel_block: int | None
    page_bytes: int | None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes inside of a kernel block: S K and V, H heads, N tokens, C content in items."""
        raise NotImplementedError

    @property
    def kernel_tokens(self) -> int:
        """Tokens of a kernel block."""
        return self.block_size if self.kernel_block is None else self.kernel_block

    @property
    def ratio(self) -> int:
        """Kernel blocks of a logical block."""
        return self.block_size // self.kernel_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of a logical block, padding excluded."""
        item: int = self.dtype.itemsize
        return math.prod(self.sizes.values()) * self.ratio * item

    @property
    def padded_bytes(self) -> int:
        """Bytes of a logical block, padding included."""
        return self.nbytes if self.page_bytes is None else self.page_bytes

    def block_problem(self) -> str | None:
        """Return what is wrong with the blocks, or None."""
        if not isinstance(self.dtype, torch.dtype):
            return f"dtype {self.dtype!r}: must be a torch.dtype"
        if found := not_positive(block_size=self.block_size, kernel_block=self.kernel_tokens):
            return found
        if self.block_size % self.kernel_tokens:
            return f"kernel_block {self.kernel_tokens}: must divide block_size {self.block_size}"
        return bad_page(self.page_bytes, self.nbytes, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class AttentionSpec(_TokenBlocks):
    """Keys and values of one layer.

    Attributes:
        heads: KV heads of this rank, of those of all ranks.
        head_dim: items of one K or V vector.
        dtype: of K and V.
        block_size: tokens of a logical block.
        kernel_block: tokens that the kernel addresses as one block; None for `block_size`.
        kind: ``"full"``, ``"sliding"`` or ``"chunked"``.
        window: tokens a query sees, itself included (``sliding`` only).
        chunk: tokens of an attention chunk (``chunked`` only).
        kv: ``packed``: K and V of a token and head are one content; ``split``: K, then V in each page (where heads
            come before layers or blocks, in each head's bytes); ``apart``: K of all blocks, then V of all blocks.
        view: the order in which the kernel wants the dimensions: B kernel blocks, S two for K and V (unless packed),
            H heads, N tokens, C content. None for ``BHNC``, ``BSNHC`` or ``SBNHC``.
        page_bytes: bytes of a logical block with the padding behind it; None for no padding.
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
    view: str | None = None
    page_bytes: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes inside of a kernel block: S K and V, H heads, N tokens, C content in items."""
        packed = self.kv == "packed"
        content = self.head_dim * (2 if packed else 1)
        return {"S": 1 if packed else 2, "H": self.heads.held, "N": self.kernel_tokens, "C": content}

    @property
    def dims(self) -> str:
        """Dimensions of the view."""
        return _VIEWS[self.kv] if self.view is None else self.view

    def group(self) -> Group:
        """Return the group its layer can be in."""
        return Group(self.kind, self.block_size, ratio=self.ratio, window=self.window, chunk=self.chunk)

    def problem(self) -> str | None:
        """Return what is wrong with it, or None."""
        if self.kv not in _VIEWS:
            return f"kv {self.kv!r}: known are {', '.join(_VIEWS)}"
        if sorted(self.dims) != sorted(_VIEWS[self.kv]):
            return f"view {self.view!r}: must be an order of {_VIEWS[self.kv]}, with kv {self.kv!r}"
        return self.heads.problem("heads") or not_positive(head_dim=self.head_dim) or self.block_problem()


@dataclass(frozen=True, slots=True)
class MLASpec(_TokenBlocks):
    """The latent of one MLA layer; every rank holds it whole.

    Attributes:
        width: items of a token: the latent and the rotary items.
        dtype: of the items.
        block_size: tokens of a logical block.
        kernel_block: tokens that the kernel addresses as one block; None for `block_size`.
        view: order of the view's dimensions: ``BNC``, or with an H for a dimension of one head.
        page_bytes: bytes of a logical block with the padding behind it; None for no padding.
    """

    width: int
    dtype: torch.dtype
    block_size: int
    kernel_block: int | None = None
    view: str | None = None
    page_bytes: int | None = None

    @property
    def kv(self) -> KVForm:
        """A latent is K and V at once."""
        return "packed"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes inside of a kernel block: S and H are 1, N tokens, C items of the latent."""
        return {"S": 1, "H": 1, "N": self.kernel_tokens, "C": self.width}

    @property
    def dims(self) -> str:
        """Dimensions of the view."""
        return "BNC" if self.view is None else self.view

    def group(self) -> Group:
        """Return the group its layer can be in."""
        return Group("mla", self.block_size, ratio=self.ratio)

    def problem(self) -> str | None:
        """Return what is wrong with it, or None."""
        if sorted(self.dims.replace("H", "", 1)) != sorted("BNC"):
            return f"view {self.view!r}: must be an order of BNC or BHNC"
        return not_positive(width=self.width) or self.block_problem()
