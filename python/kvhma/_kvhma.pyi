# SPDX-License-Identifier: Apache-2.0
"""Types of the Rust half. Arrays that come back own their memory and are C-contiguous."""

from collections.abc import Sequence
from types import GenericAlias
from typing import Generic, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from kvhma.geometry import Geometry, Kind, Memory, Span
from kvhma.types import IdsLike, U64s

__all__ = [
    "BlockUsers",
    "CheckedGeometry",
    "Finding",
    "Loss",
    "Losses",
    "Plan",
    "Read",
    "Transfer",
    "__version__",
    "check_rows",
    "clip_blocks",
    "content_keys",
    "content_sums",
    "descriptor_ids",
    "digest_prefixes",
    "digest_tokens",
    "expand_blocks",
    "expand_views",
    "fa_descriptors",
    "fa_views",
    "first_entries",
    "ids_to_text",
    "join_tables",
    "leading_nulls",
    "permuted_rows",
    "ssm_descriptors",
    "ssm_views",
    "table_lengths",
    "text_to_ids",
    "validate",
    "window_blocks",
]

__version__: str

_Item = TypeVar("_Item", bound=np.uint64 | np.int32, default=np.uint64)
_AnyGeometry: TypeAlias = Geometry | CheckedGeometry
_Axis: TypeAlias = tuple[str, int, int, int, int | None, bool, int]
_Group: TypeAlias = tuple[Kind, int, int, int | None, int | None, int, int, int, int | None]

@final
class BlockUsers:
    """How many blocks some requests keep, of whom several may keep the same."""

    def __new__(cls) -> BlockUsers: ...
    @property
    def used(self) -> int:
        """Blocks that at least one request keeps."""

    def add(self, ids: NDArray[np.int64]) -> None:
        """Add a request's blocks, each once.

        Raises:
            RequestError: an id is not in 0..2**31; none is added then.
        """

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Take a request's blocks off again; those that were not added are passed over."""

    def has_own(self, ids: NDArray[np.int64]) -> bool:
        """Return whether no other request keeps one of a request's blocks."""

    def __deepcopy__(self, _memo: object, /) -> BlockUsers: ...

@final
class CheckedGeometry:
    """A geometry that passed its checks, read from JSON.

    `kvhma.Geometry.core` holds one. What was left out is left out when it is written or shown.

    Raises:
        GeometryError: as for `kvhma.Geometry`.
        AddressOverflowError: as for `kvhma.Geometry`.
    """

    def __new__(cls, json: bytes) -> CheckedGeometry: ...
    @staticmethod
    def from_values(geometry: Geometry) -> CheckedGeometry:
        """Check a geometry of Python values. Equal pages of layers become one."""
    def to_json(self, indent: int | None = None) -> bytes:
        """Return the JSON form, in one line or with so many spaces for each level."""
    @property
    def tp_rank(self) -> int:
        """Place among the tensor-parallel ranks."""
    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
    @property
    def null_block(self) -> int | None:
        """The block id that stands for "no block", or None."""
    @property
    def regions(self) -> list[tuple[int, int, Memory, int]]:
        """For each region the arguments of a `Region`."""
    @property
    def groups(self) -> list[_Group]:
        """For each group the arguments of a `Group`."""
    @property
    def pages(self) -> list[list[tuple[str, str, int, int, list[_Axis]]]]:
        """For each page its parts: the arguments of a `Part`, with those of each `Axis`."""
    @property
    def layers(self) -> list[tuple[str, int, int, int, int, int, int, int | None]]:
        """For each layer the arguments of a `Layer`, with an index into the pages."""
    def __copy__(self) -> CheckedGeometry: ...
    def __deepcopy__(self, memo: object, /) -> CheckedGeometry: ...

@final
class Finding:
    """One difference between two geometries; `UnsupportedPairError` carries the same words."""

    def __new__(
        cls,
        code: str,
        severity: Literal["error", "warning"],
        place: str,
        layer: str | None,
        part: str | None,
        axis: str | None,
        field: str,
        local: str,
        remote: str,
        reason: str,
        text: str,
    ) -> Finding: ...
    @property
    def code(self) -> str:
        """Stable short name, e.g. ``"dtype"``."""
    @property
    def severity(self) -> Literal["error", "warning"]:
        """``"error"`` refuses the pair."""
    @property
    def place(self) -> str:
        """Object it is about, e.g. ``'layer "model.layers.0" part "kv"'``."""
    @property
    def layer(self) -> str | None:
        """Name of the layer that `place` is about, if it is about one."""
    @property
    def part(self) -> str | None:
        """Name of the part of the layer's page, if it is about one."""
    @property
    def axis(self) -> str | None:
        """Name of the axis of the part, if it is about one."""
    @property
    def field(self) -> str:
        """Field that differs."""
    @property
    def local(self) -> str:
        """Value on the local side."""
    @property
    def remote(self) -> str:
        """Value on the remote side."""
    @property
    def reason(self) -> str:
        """Why it matters."""
    @property
    def text(self) -> str:
        """One printable sentence, the same whichever side is local."""

@final
class Read(Generic[_Item]):
    """What a request reads from one source: descriptors, or ids into prepared views.

    ``Read[np.uint64]``, or just ``Read``, is of `Plan.transfer`, ``Read[np.int32]`` of `Plan.ids`.
    """

    def __new__(
        cls,
        source: int,
        local: NDArray[_Item],
        remote: NDArray[_Item],
        bytes: int,  # noqa: A002
        descriptors: int,
        bytes_by_group: Sequence[int],
        descriptors_by_group: Sequence[int],
    ) -> Read[_Item]: ...
    def __class_getitem__(cls, key: object) -> GenericAlias: ...
    @property
    def source(self) -> int:
        """Index of the source in the list the plan was made with."""
    @property
    def local(self) -> NDArray[_Item]:
        """Descriptors of shape (n, 3): address, length in bytes, device; sorted by address. Or ids of shape (n,)."""
    @property
    def remote(self) -> NDArray[_Item]:
        """The same of the source: row or id i is read into row or id i of `local`."""
    @property
    def bytes(self) -> int:
        """Bytes moved."""
    @property
    def descriptors(self) -> int:
        """Descriptors: of rows the fewest for these bytes, of ids those that are left after NIXL has joined neighbours.

        NIXL joins ids that follow each other in dense strided views on both sides. Where views are written out row by
        row (NIXL before 1.5), it may also join across views that touch.
        """
    @property
    def bytes_by_group(self) -> list[int]:
        """Bytes read into each local group, in the order of the local geometry's groups. Empty for ids."""
    @property
    def descriptors_by_group(self) -> list[int]:
        """Descriptors of each local group, in the same order. Empty for ids."""

@final
class Transfer(Generic[_Item]):
    """What a request moves and zeroes.

    ``Transfer[np.uint64]``, or just ``Transfer``, is of `Plan.transfer`, ``Transfer[np.int32]`` of `Plan.ids`.
    """

    def __new__(
        cls,
        reads: Sequence[Read[_Item]],
        zero: NDArray[np.uint64],
        bytes: int,  # noqa: A002
        descriptors: int,
        excess_bytes: int,
        first_tokens: Sequence[int],
        bytes_by_group: Sequence[int],
        descriptors_by_group: Sequence[int],
    ) -> Transfer[_Item]: ...
    def __class_getitem__(cls, key: object) -> GenericAlias: ...
    @property
    def reads(self) -> list[Read[_Item]]:
        """One entry for each source that something is read from."""
    @property
    def zero(self) -> NDArray[np.uint64]:
        """Shape (m, 3): local address, length in bytes, device; to be zeroed before a read is posted."""
    @property
    def bytes(self) -> int:
        """Bytes moved from all sources."""
    @property
    def descriptors(self) -> int:
        """Descriptors for all sources."""
    @property
    def excess_bytes(self) -> int:
        """Bytes of tokens behind the request's that come along because the last block is cheaper whole.

        Ids always bring them: views have whole kernel blocks only.
        """
    @property
    def first_tokens(self) -> list[int]:
        """For each local group, the first token from which on its blocks are filled up to the request's last token.

        A block that begins before it holds zeros there: it is good for this request, but not for every other one that
        shares its tokens, so it must not be left in a prefix cache. 0 for groups whose blocks hold no tokens.
        """
    @property
    def bytes_by_group(self) -> list[int]:
        """Bytes read into each local group, in the order of the local geometry's groups; their sum is ``bytes``.

        Empty for ids, which are not counted by group.
        """
    @property
    def descriptors_by_group(self) -> list[int]:
        """Descriptors of each local group, in the same order; their sum is ``descriptors``.

        A descriptor that goes on from one group's block to another's counts for the group of its first byte. Empty for
        ids, which are not counted by group.
        """

@final
class Loss:
    """What of one layer did not arrive."""

    def __new__(cls, group: int, layer: str, tokens: Sequence[tuple[int, int]]) -> Loss: ...
    @property
    def group(self) -> int:
        """Local group."""
    @property
    def layer(self) -> str:
        """Name of the layer."""
    @property
    def tokens(self) -> list[tuple[int, int]]:
        """Half-open ranges of absolute token positions, sorted; empty for state, which is lost as a whole."""

@final
class Losses:
    """What a request lost."""

    def __new__(cls, layers: Sequence[Loss], whole_prefix: int) -> Losses: ...
    @property
    def layers(self) -> list[Loss]:
        """Layers that lost anything, in the order of the geometry."""
    @property
    def whole_prefix(self) -> int:
        """The most leading tokens for which every group has all it needs; never less than `cached`."""

@final
class Plan:
    """What a local rank reads from its sources, whatever the request. Made by `kvhma.plan`.

    It cannot be changed, so copies are the plan itself. It is pickled as its geometries and options, and made again
    from these.
    """

    def __new__(
        cls,
        local: _AnyGeometry,
        remote: _AnyGeometry | Sequence[_AnyGeometry],
        *,
        descriptor_bytes: int,
        max_descriptors: int,
    ) -> Plan: ...
    def __copy__(self) -> Plan: ...
    def __deepcopy__(self, memo: object, /) -> Plan: ...
    def __getnewargs_ex__(self) -> tuple[tuple[CheckedGeometry, list[CheckedGeometry]], dict[str, int]]: ...
    @property
    def sources(self) -> list[int]:
        """Indices of the sources that anything is read from."""
    @property
    def findings(self) -> list[tuple[int, Finding]]:
        """Warnings, each with the index of the source it is about."""
    def transfer(
        self, num_tokens: int, local: Sequence[Span], remote: Sequence[Span] | Sequence[Sequence[Span]]
    ) -> Transfer:
        """Compute what a request moves, as descriptors.

        Args:
            num_tokens: tokens whose cache the source holds; later ones are not read.
            local: a span for each local group, of the blocks to fill. A group that holds everything already has an
                empty span that starts at or behind the last block.
            remote: a span for each group of the sources, or a list of such for each source.

        Returns:
            What to read from each source, and what to zero before.

        Raises:
            RequestError: a count, type or position does not fit, or two reads would write the same byte; or there
                are more descriptors than the layouts explain, or than `max_descriptors`.
            BlockIdError: an id is negative, too large, listed twice, or the null block.
        """
    @property
    def num_sources(self) -> int:
        """Number of sources, read from or not."""
    def explain(self) -> str:
        """Return in sentences and numbers what is read from which source, how it is cut, and why.

        Ranges such as ``heads 4..8`` are half-open.
        """
    def losses(
        self,
        num_tokens: int,
        local: Sequence[Span],
        remote: Sequence[Span] | Sequence[Sequence[Span]],
        failed: NDArray[np.uint64],
        *,
        cached: int = 0,
    ) -> Losses:
        """Map failed local descriptors of a request back to layers and tokens.

        Args:
            num_tokens: as for the transfer.
            local: as for the transfer.
            remote: as for the transfer.
            failed: uint64 of shape (n, 3): the rows of `Read.local` that did not arrive, or parts of them; of an id
                read, `id_descriptors`.
            cached: leading tokens that every group had before the transfer.

        Returns:
            The layers that lost something, with the tokens, and what is left of the prefix.

        Raises:
            RequestError: as for `transfer`, `failed` has another form, or a row is no part of what the request reads.
            BlockIdError: as for `transfer`.
        """
    def id_descriptors(self, source: int, ids: IdsLike) -> NDArray[np.uint64]:
        """Return the local descriptors that ids into the views of a source stand for: shape (n, 3).

        Args:
            source: its index in the list that the plan was made with.
            ids: entries of its local view, as `Read.local` has them.

        Raises:
            BlockIdError: an id is outside the views.
            UnsupportedPairError: the source has no views.
        """
    def views(self, source: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the local and the remote views of a source, to be prepared once.

        Args:
            source: its index in the list that the plan was made with.

        Returns:
            Two arrays of shape (r, 5): address, length in bytes, device, stride in bytes, count.

        Raises:
            UnsupportedPairError: there are too many, or blocks are not evenly spaced; use `transfer`.
        """
    def ids(
        self, num_tokens: int, local: Sequence[Span], remote: Sequence[Span] | Sequence[Sequence[Span]]
    ) -> Transfer[np.int32]:
        """Compute what a request moves, as ids into `views`.

        Arguments, result and errors are as for `transfer`.
        """

def validate(local: _AnyGeometry, remote: _AnyGeometry) -> list[Finding]:
    """Compare two geometries: what keeps them from being paired, and what is worth knowing.

    Never raises on content. ``validate(a, b)`` and ``validate(b, a)`` have the same texts.

    Args:
        local: the rank that reads.
        remote: a rank that it may read from.

    Returns:
        Every difference that matters; the pair is refused if one of them is an error.

    Raises:
        RequestError: an argument has the wrong type.
    """

def first_entries(geometry: _AnyGeometry, num_tokens: int | None, cached: U64s) -> list[int]:
    """Return the first block table entry of each group that a request needs behind the `cached` ones; 0 for state.

    Without `num_tokens` that is `cached`.
    """

def table_lengths(block_tables: Sequence[IdsLike]) -> list[int]:
    """Return how many ids each of some block tables has.

    Raises:
        RequestError: a table is no list or array of integers.
    """

def window_blocks(window: int, block_size: int) -> int:
    """Return the trailing blocks that vLLM 0.32 keeps of a sliding-window group: ``ceil(window / block_size) + 1``.

    Args:
        window: tokens that a query sees, itself included.
        block_size: tokens of a block.

    Raises:
        RequestError: a number is out of range.
    """

def clip_blocks(
    block_ids: Sequence[IdsLike],
    keep: U64s,
    *,
    speculative: Sequence[int | None] | None = None,
    null_block: int | None = 0,
) -> list[list[int]]:
    """Keep the blocks of each group that are moved, by vLLM's static rule.

    Args:
        block_ids: logical block ids of each group; null blocks at the front are dropped.
        keep: trailing blocks to keep of each group, 0 for all (see `window_blocks`).
        speculative: for a state group the number of slots behind the state-bearing one, which alone is kept;
            None for the others.
        null_block: the id that stands for "no block", or None.

    Returns:
        For each group the ids that are left, in their order.

    Raises:
        RequestError: lists of different length, or of the wrong type.
    """

def expand_blocks(block_ids: IdsLike, ratio: int) -> NDArray[np.int32]:
    """Return the kernel block ids of logical ones: ``id`` becomes ``id * ratio .. (id + 1) * ratio``.

    Args:
        block_ids: logical block ids.
        ratio: kernel blocks in a logical block.

    Returns:
        Shape (len(block_ids) * ratio,).

    Raises:
        BlockIdError: an id is negative or its kernel ids do not fit int32.
        AddressOverflowError: there are more than 2**31 - 1 kernel ids.
    """

def permuted_rows(
    local: NDArray[np.uint64],
    remote: NDArray[np.uint64],
    local_bounds: U64s,
    remote_bounds: U64s,
    permute_bytes: int,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Read rows as they lie in the source where that takes fewer of them, to be permuted where they arrive.

    Args:
        local: shape (n, 3), of one source, sorted by address; as `Read.local`.
        remote: shape (n, 3), as `Read.remote`.
        local_bounds: sorted addresses at which registered memory begins or ends: no row goes on over one.
        remote_bounds: the same of the source.
        permute_bytes: bytes that may be permuted to save a row.

    Returns:
        Local and remote rows, each of shape (m, 3), and ranges to permute, of shape (k, 5): address, device, blocks,
        heads, bytes of a head in a block. There ``blocks x heads`` arrive, where ``heads x blocks`` belong.

    Raises:
        RequestError: arrays of another type or shape, or of unequal length.
    """

def content_sums(
    of: _AnyGeometry | Plan,
    num_tokens: int,
    spans: Sequence[Span],
    seed: int,
    *,
    first_tokens: U64s | None = None,
    cp_tp_size: int = 1,
    memory: Sequence[NDArray[np.uint8]] | None = None,
) -> list[tuple[str, int, int, int, list[int], tuple[int, int, list[int]] | None, list[int]]]:
    """Sum what a request's blocks hold, the same whatever the layout is; `kvhma.digests` says how.

    Args:
        of: geometry of a rank, or the plan it reads with.
        num_tokens: tokens that the blocks hold.
        spans: blocks of each group.
        seed: that the keys of coordinates are made from.
        first_tokens: for each group the first token that counts; None for all that are needed.
        cp_tp_size: neighbouring tensor-parallel ranks that share the tokens of context-parallel groups.
        memory: the bytes of each region; None to read them where the regions are, which have to be host memory.

    Returns:
        For each kind of layers: kind, window or chunk, first token that is needed, first that counts, sums, place and
        places of heads that may repeat with their sums, extents of the heads.

    Raises:
        GeometryError: a shard is no equal share, or the regions are not host memory.
        RequestError: spans or numbers do not fit.
        BlockIdError: a block id is none of a group's.
    """

def content_keys(seed: int, axis: str, count: int) -> list[int]:
    """Return the keys of the first indices of an axis, with which sums of repeated heads are multiplied."""

def digest_prefixes(tokens: list[int], counts: list[int]) -> list[bytes]:
    """Return `digest_tokens` without a header for each of some counts of a list's first ids, in one pass over them.

    Args:
        tokens: token ids. The list is read in place, not copied.
        counts: how many of them count, none less than the one before.

    Raises:
        RequestError: there are fewer, one is not an integer of 32 bits, or counts go down.
    """

def digest_tokens(header: bytes, tokens: list[int], num_tokens: int) -> bytes:
    """Return the first 16 bytes of BLAKE3 over the length of a header (u64), the header and token ids (i32).

    Numbers are little-endian.

    Args:
        header: what belongs to the prompt besides its tokens.
        tokens: token ids. The list is read in place, not copied.
        num_tokens: how many of them count, from the first.

    Raises:
        RequestError: there are fewer, or one is not an integer of 32 bits.
    """

def ids_to_text(ids: IdsLike) -> str:
    """Return block ids as ranges of text that go up or down by one, e.g. ``7-9,4,2-1``.

    Args:
        ids: block ids, list or array.

    Raises:
        RequestError: one is not an integer of 64 bits.
    """

def text_to_ids(text: str, limit: int) -> NDArray[np.int64]:
    """Return the block ids of a text of ids_to_text, which may be a stranger's.

    Args:
        text: the text.
        limit: how many ids are stored at most.

    Raises:
        RequestError: it is no such text, an id has more than 31 bits, or there are more.
    """

def join_tables(tables: Sequence[IdsLike], null_block: int | None) -> NDArray[np.int64]:
    """Return the ids of several block tables, one after the other, without null blocks.

    Args:
        tables: block ids of each group.
        null_block: the id that stands for "no block", or None.

    Raises:
        RequestError: a table has the wrong type.
    """

def leading_nulls(table: IdsLike, start: int, null_block: int) -> int:
    """Return how many entries of a block table from `start` on are null blocks, up to the first that is none.

    Args:
        table: block ids, list or array.
        start: entry to begin with.
        null_block: the id that stands for "no block".

    Raises:
        RequestError: the table has the wrong type.
    """

def descriptor_ids(
    block_ids: Sequence[IdsLike], view_counts: U64s, view_groups: Sequence[int | tuple[int, ...]]
) -> NDArray[np.int32]:
    """Return ids into a flat list of views: for each view the ids of its groups, shifted by the view's start.

    With all attention regions first and the parts of the state regions behind them, these are vLLM 0.32's ids.

    Args:
        block_ids: block ids of each group, at the granularity of the views.
        view_counts: entries of each view.
        view_groups: the group, or the groups, whose blocks each view holds.

    Returns:
        The ids, view after view.

    Raises:
        BlockIdError: an id is outside one of its views.
        RequestError: a group does not exist, or lists differ in length.
        AddressOverflowError: the list has more than 2**31 - 1 entries.
    """

def fa_views(
    bases: U64s, lengths: U64s, strides: U64s, counts: U64s, devices: U64s | None = None
) -> NDArray[np.uint64]:
    """Return views of attention regions, one each: shape (n, 5), address, length, device, stride, count.

    Args:
        bases: address of each region.
        lengths: bytes of a block.
        strides: bytes from one block to the next.
        counts: blocks of each region.
        devices: device of each region; None for 0.

    Raises:
        RequestError: a length, stride or count is 0, or lists differ in length.
        AddressOverflowError: a view leaves the address space, or there are more than 2**31 - 1 entries.
    """

def fa_descriptors(
    bases: U64s, lengths: U64s, strides: U64s, counts: U64s, devices: U64s | None = None
) -> NDArray[np.uint64]:
    """Return every block of every attention region, region after region: shape (n, 3), address, length, device.

    Arguments and errors are as for `fa_views`.
    """

def ssm_views(
    bases: U64s,
    parts: Sequence[tuple[int, int]],
    strides: U64s,
    counts: U64s,
    devices: U64s | None = None,
) -> NDArray[np.uint64]:
    """Return views of state regions: for each region one for each part. Errors are as for `fa_views`.

    Args:
        bases: address of each region.
        parts: offset and length in bytes of each part of a block, the same in all regions.
        strides: bytes from one block to the next, for each region.
        counts: blocks of each region.
        devices: device of each region; None for 0.
    """

def ssm_descriptors(
    bases: U64s,
    parts: Sequence[tuple[int, int]],
    strides: U64s,
    counts: U64s,
    devices: U64s | None = None,
) -> NDArray[np.uint64]:
    """Return every block of every part of every state region: shape (n, 3), address, length, device.

    Arguments and errors are as for `ssm_views`.
    """

def expand_views(views: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the descriptors that views of shape (n, 5) stand for, shape (sum of counts, 3).

    Args:
        views: rows of address, length in bytes, device, stride in bytes, count.

    Raises:
        RequestError: the array has another form.
        AddressOverflowError: a view leaves the address space, or there are more than 2**31 - 1 entries.
    """

def check_rows(what: str, rows: NDArray[np.uint64], columns: int = 3) -> int:
    """Check rows before NIXL gets them: it copies whatever has the right number of bytes, and lets addresses wrap.

    Args:
        what: what the rows are, for the message.
        rows: address, length in bytes, device; with five columns also stride in bytes and count.
        columns: 3 or 5.

    Returns:
        How many descriptors they stand for.

    Raises:
        RequestError: no C-contiguous uint64 array of shape (n, columns); a length, stride or count of 0.
        AddressOverflowError: a row leaves the address space, or there are more than 2**31 - 1 entries.
    """
