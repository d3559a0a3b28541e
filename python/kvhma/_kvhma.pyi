# SPDX-License-Identifier: Apache-2.0
"""Types of the Rust extension. Returned arrays own their memory, but for views of `out`, and are C-contiguous."""

from collections.abc import Sequence
from types import GenericAlias
from typing import Any, Generic, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from kvhma.geometry import Geometry, Kind, Memory, Span
from kvhma.types import IdsLike, U64s

__all__ = [
    "BlockUsers",
    "CheckedGeometry",
    "DescriptorOrder",
    "Finding",
    "Loss",
    "Losses",
    "Plan",
    "Read",
    "Transfer",
    "__version__",
    "check_rows",
    "clip_blocks",
    "descriptor_ids",
    "digest_prefixes",
    "digest_tokens",
    "expand_blocks",
    "expand_views",
    "fa_descriptors",
    "fa_views",
    "first_entries",
    "first_needed_tokens",
    "first_tokens",
    "ids_to_text",
    "join_tables",
    "live_spans",
    "permuted_rows",
    "plain_rows",
    "prefix_hits",
    "shared_paths",
    "spans_to_fill",
    "spans_to_texts",
    "ssm_descriptors",
    "ssm_views",
    "text_to_ids",
    "texts_to_spans",
    "turns",
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
    """Counts the blocks that some requests hold; several requests may hold the same block."""

    def __new__(cls) -> BlockUsers: ...
    @property
    def used(self) -> int:
        """Blocks that at least one request holds."""

    def add(self, ids: NDArray[np.int64]) -> None:
        """Add a request's blocks. A repeated id counts once.

        Raises:
            RequestError: an id is not in 0..2**31; then no block is added.
        """

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Remove a request's blocks, ignoring blocks that were not added."""

    def has_own(self, ids: NDArray[np.int64]) -> bool:
        """Return whether no other request holds any of a request's blocks."""

    def __deepcopy__(self, _memo: object, /) -> BlockUsers: ...

@final
class CheckedGeometry:
    """A checked geometry, read from JSON.

    `kvhma.Geometry.core` is an instance. Fields that were left out stay out of the JSON form and the repr.

    Raises:
        GeometryError: as for `kvhma.Geometry`.
        AddressOverflowError: as for `kvhma.Geometry`.
    """

    def __new__(cls, json: bytes) -> CheckedGeometry: ...
    @staticmethod
    def from_values(geometry: Geometry) -> CheckedGeometry:
        """Check a geometry of Python values, and store equal pages of layers once."""
    def to_json(self, indent: int | None = None) -> bytes:
        """Return the JSON form in one line, or indented by a number of spaces."""
    @property
    def tp_rank(self) -> int:
        """Rank number among the tensor-parallel ranks."""
    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
    @property
    def null_block(self) -> int | None:
        """The block id that stands for "no block", or None."""
    @property
    def regions(self) -> list[tuple[int, int, Memory, int]]:
        """Arguments of a `Region`, for each region."""
    @property
    def groups(self) -> list[_Group]:
        """Arguments of a `Group`, for each group."""
    @property
    def pages(self) -> list[list[tuple[str, str, int, int, list[_Axis]]]]:
        """Arguments of a `Part` with those of each `Axis`, for each part of each page."""
    @property
    def layers(self) -> list[tuple[str, int, int, int, int, int, int, int | None]]:
        """Arguments of a `Layer` with an index into the pages, for each layer."""
    def __copy__(self) -> CheckedGeometry: ...
    def __deepcopy__(self, memo: object, /) -> CheckedGeometry: ...

@final
class Finding:
    """A difference between two geometries; `UnsupportedPairError` has the same text."""

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
        """``"error"`` if the pair is refused."""
    @property
    def place(self) -> str:
        """The object that differs, e.g. ``'layer "model.layers.0" part "kv"'``."""
    @property
    def layer(self) -> str | None:
        """Name of the layer in `place`, if it has one."""
    @property
    def part(self) -> str | None:
        """Name of the part of the layer's page, if `place` has one."""
    @property
    def axis(self) -> str | None:
        """Name of the axis of the part, if `place` has one."""
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
        """A printable sentence, the same for both orders of the two geometries."""

@final
class Read(Generic[_Item]):
    """The read of a request from one source: descriptors, or ids into prepared views.

    `Plan.transfer` returns ``Read[np.uint64]``, the default of ``Read``; `Plan.ids` returns ``Read[np.int32]``.
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
        """Index of the source in the list that the plan was made with."""
    @property
    def local(self) -> NDArray[_Item]:
        """Descriptors of shape (n, 3), sorted by address: address, length in bytes, device. Or ids of shape (n,)."""
    @property
    def remote(self) -> NDArray[_Item]:
        """Descriptors or ids of the source: row or id i is read into row or id i of `local`."""
    @property
    def bytes(self) -> int:
        """Bytes moved."""
    @property
    def descriptors(self) -> int:
        """Number of descriptors: the minimum for these bytes, or for ids the number after NIXL joins neighbours.

        NIXL joins consecutive ids in dense strided views on both sides. NIXL before 1.5 writes views out row by row,
        and may also join ids across views that touch.
        """
    @property
    def bytes_by_group(self) -> list[int]:
        """Bytes read into each local group, in the order of the local geometry's groups. Empty for ids and batches."""
    @property
    def descriptors_by_group(self) -> list[int]:
        """Descriptors of each local group, in the same order. Empty for ids and batches."""

@final
class Transfer(Generic[_Item]):
    """All reads of a request, and the ranges to zero.

    `Plan.transfer` returns ``Transfer[np.uint64]``, the default of ``Transfer``; `Plan.ids` returns
    ``Transfer[np.int32]``.
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
    def batches(self, limit: int) -> list[Read[_Item]]:
        """Split the reads for a transport that takes a limited number of descriptors at once.

        Together, the batches are the rows of `reads` in their order. Neighbours are joined already: two rows that touch
        on both sides are in different regions, which a transport registers separately.

        Args:
            limit: descriptors of a batch, at most; at least 1.

        Returns:
            Parts of `reads`, source by source. Their arrays are views of the arrays of `reads`.

        Raises:
            RequestError: `limit` is 0 or not a number; or the reads are ids, which NIXL joins.
        """
    @property
    def reads(self) -> list[Read[_Item]]:
        """One entry for each source with something to read."""
    @property
    def zero(self) -> NDArray[np.uint64]:
        """Ranges to zero before a read is posted, of shape (m, 3): local address, length in bytes, device."""
    @property
    def bytes(self) -> int:
        """Bytes moved from all sources."""
    @property
    def descriptors(self) -> int:
        """Descriptors for all sources."""
    @property
    def excess_bytes(self) -> int:
        """Bytes of tokens after the request's last token, read because a whole last block needs fewer descriptors.

        Ids always read them, because views have whole kernel blocks only.
        """
    @property
    def first_tokens(self) -> list[int]:
        """For each local group, the first token from which its blocks are filled up to the request's last token.

        A block that begins before this token has zeros before it. The block is valid for this request but not for other
        requests that share its tokens, so it must not stay in a prefix cache. 0 for groups whose blocks hold no tokens.
        """
    @property
    def bytes_by_group(self) -> list[int]:
        """Bytes read into each local group, in the order of the local geometry's groups. Their sum is ``bytes``.

        Empty for ids, which are not counted by group.
        """
    @property
    def descriptors_by_group(self) -> list[int]:
        """Descriptors of each local group, in the same order. Their sum is ``descriptors``.

        A descriptor that continues from one group's block into another group's block counts for the group of its first
        byte. Empty for ids, which are not counted by group.
        """

@final
class Loss:
    """The lost tokens of one layer."""

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
    """The losses of a request."""

    def __new__(cls, layers: Sequence[Loss], whole_prefix: int) -> Losses: ...
    @property
    def layers(self) -> list[Loss]:
        """Layers that lost data, in the order of the geometry."""
    @property
    def whole_prefix(self) -> int:
        """The longest prefix, in tokens, for which every group has all that it needs; never shorter than `cached`."""

@final
class Plan:
    """The pairing of a local rank with its sources, valid for every request. Made by `kvhma.plan`.

    A plan is immutable, so a copy is the plan itself. Pickle stores its geometries and options and plans again when it
    loads them.
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
        """Indices of the sources with something to read."""
    @property
    def findings(self) -> list[tuple[int, Finding]]:
        """Warnings, each with the index of its source."""
    def transfer(
        self, num_tokens: int, local: Sequence[Span], remote: Sequence[Span] | Sequence[Sequence[Span]]
    ) -> Transfer:
        """Compute the copies of a request, as descriptors.

        Args:
            num_tokens: number of tokens whose cache the source holds; later tokens are not read.
            local: a span for each local group with the blocks to fill. For a group that already holds all blocks, pass
                an empty span that starts at or after the last block.
            remote: a span for each group of the sources, or a list of such spans for each source.

        Returns:
            The read from each source, and the ranges to zero before the reads.

        Raises:
            RequestError: a count, type or position does not fit; two reads would write the same byte; or there are more
                descriptors than the layouts explain, or more than `max_descriptors`.
            BlockIdError: an id is negative, too large, listed twice, or the null block.
        """
    def count(self, group: int, first_token: int, num_tokens: int) -> tuple[int, int]:
        """Return the bytes and the descriptors that fill tokens ``first_token..num_tokens`` of a local group from all
        sources, in blocks with consecutive ids on both sides.

        A state group moves one state for any tokens.

        Args:
            group: index of the local group.
            first_token: first token to fill. A partial first block has only these tokens on both sides.
            num_tokens: number of tokens whose cache the source holds.

        Raises:
            RequestError: there is no such group, there are no tokens, or the caches have too few blocks.
        """  # noqa: D205 - one sentence
    @property
    def num_sources(self) -> int:
        """Number of sources, including those with nothing to read."""
    def explain(self) -> str:
        """Return a text that says which bytes are read from which source, how they are cut, and why.

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
        """Map the failed local descriptors of a request to layers and tokens.

        Args:
            num_tokens: as for the transfer.
            local: as for the transfer.
            remote: as for the transfer.
            failed: uint64 of shape (n, 3): rows of `Read.local` that did not arrive, or parts of such rows. For a read
                by ids, pass `id_descriptors`.
            cached: leading tokens that every group had before the transfer.

        Returns:
            The layers that lost tokens, with the tokens, and the length of the prefix that remains.

        Raises:
            RequestError: as for `transfer`; `failed` has another form; or a row is not part of the request's reads.
            BlockIdError: as for `transfer`.
        """
    def id_descriptors(self, source: int, ids: IdsLike) -> NDArray[np.uint64]:
        """Return the local descriptors that ids into the views of a source stand for, of shape (n, 3).

        Args:
            source: its index in the list that the plan was made with.
            ids: entries of the source's local view, as in `Read.local`.

        Raises:
            BlockIdError: an id is outside the views.
            UnsupportedPairError: the source has no views.
        """
    def views(self, source: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the local and the remote views of a source, to prepare once.

        Args:
            source: its index in the list that the plan was made with.

        Returns:
            Two arrays of shape (r, 5): address, length in bytes, device, stride in bytes, count.

        Raises:
            UnsupportedPairError: there are too many views, or blocks are not evenly spaced; use `transfer`.
        """
    def ids(
        self, num_tokens: int, local: Sequence[Span], remote: Sequence[Span] | Sequence[Sequence[Span]]
    ) -> Transfer[np.int32]:
        """Compute the copies of a request, as ids into `views`.

        Arguments, result and errors are as for `transfer`.

        Raises:
            UnsupportedPairError: `views` raises it. Or a local group reads two groups of the source whose kernel blocks
                differ, and they cut its first or last block differently; use `transfer`.
        """

def validate(local: _AnyGeometry, remote: _AnyGeometry) -> list[Finding]:
    """Compare two geometries, and return the reasons against pairing them and the warnings.

    Never raises on content. ``validate(a, b)`` and ``validate(b, a)`` return the same texts.

    Args:
        local: the rank that reads.
        remote: a rank that `local` may read from.

    Returns:
        Every difference that matters. The pair is refused if one of them is an error.

    Raises:
        RequestError: an argument has the wrong type.
    """

def first_entries(geometry: _AnyGeometry, num_tokens: int | None, cached: U64s) -> list[int]:
    """Return the first block table entry of each group that a request needs after the `cached` entries; 0 for state.

    Without `num_tokens`, returns `cached`.
    """

def first_needed_tokens(geometry: _AnyGeometry, num_tokens: int) -> list[int]:
    """Return the first token of each group that the token after `num_tokens` tokens still attends to; 0 for state.

    It is `num_tokens` if that token attends to none of them, as with a window of one token.

    Args:
        geometry: has the groups.
        num_tokens: tokens of the request.

    Raises:
        RequestError: an argument has the wrong type, or a number is out of range.
    """

def first_tokens(
    arrivals: NDArray[np.float64],
    at_prefill: NDArray[np.uint32],
    at_decode: NDArray[np.uint32],
    prefill: NDArray[np.float64],
    read: NDArray[np.float64],
    decode: NDArray[np.float64],
    expected: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return how long requests wait for their first token in the queues of engines, and which of them are handed off.

    Args:
        arrivals: float64 of shape (n,), seconds, ascending. All other arrays have the same shape.
        at_prefill: uint32, numbers of prefill engines.
        at_decode: uint32, numbers of decode engines.
        prefill: float64, seconds in which P computes what it lacks of a prompt.
        read: float64, seconds in which D reads what it lacks.
        decode: float64, seconds in which D computes what it lacks.
        expected: float64, seconds of the read that the router expects. Minus infinity always hands off, infinity never.

    Returns:
        float64 of shape (n,), seconds from the arrival to the first token, and bool of shape (n,), whether P computed.

    Raises:
        RequestError: the arrays do not fit, or a time is negative.
    """

def turns(nodes: NDArray[np.int64], offsets: NDArray[np.uint64], number: int) -> NDArray[np.uint32]:
    """Return the engine of each prompt: that of the longest earlier prompt which it continues, else the next one.

    A beginning that eight prompts have continued is a shared one, and no earlier prompt.

    Args:
        nodes: int64, the nodes of all prompts.
        offsets: uint64 of shape (n + 1,), where the nodes of a prompt begin.
        number: of engines.

    Returns:
        uint32 of shape (n,).

    Raises:
        RequestError: the arrays do not fit.
    """

def plain_rows(
    text: bytes, at: int, most: int
) -> tuple[
    tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], int, int
]:
    """Read the lines of a trace up to the first one that is no plain row: numbers, identities, and no session.

    Args:
        text: whole lines, JSON objects with ``timestamp``, ``input_length``, ``output_length`` and maybe ``hash_ids``.
        at: where the first of the lines begins.
        most: limit of the tokens of a prompt, and of an answer.

    Returns:
        float64 timestamps, int64 prompts and int64 answers of shape (rows,). Then int64 identities of all rows.
        Then int64 counts of identities of shape (rows,), or (0,) if rows have none. Then the bytes and the lines that
        were read.
    """

def shared_paths(
    nodes: NDArray[np.int64], ends: NDArray[np.uint32], offsets: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint64]]:
    """Return the paths of a trace without nearly all nodes of a single prompt, which are the last ones of each prompt.

    Args:
        nodes: int64, the nodes of all prompts.
        ends: uint32, the tokens of a prompt up to the end of each node.
        offsets: uint64 of shape (n + 1,), where the nodes of a prompt begin.

    Returns:
        The same arrays of what stays.

    Raises:
        RequestError: the arrays do not fit.
    """

def prefix_hits(
    nodes: NDArray[np.int64],
    ends: NDArray[np.uint32],
    offsets: NDArray[np.uint64],
    prompts: NDArray[np.uint32],
    answers: NDArray[np.uint32],
    engines: NDArray[np.uint32],
    geometry: CheckedGeometry,
    groups: Sequence[tuple[int, int]],
    pool: int,
    side: str,
) -> NDArray[np.uint32]:
    """Return the tokens that the groups of engines' caches hit, for each request of a trace.

    Args:
        nodes: int64, the nodes of all prompts, not negative.
        ends: uint32, the tokens of a prompt up to the end of each node, ascending.
        offsets: uint64 of shape (n + 1,), where the nodes of a prompt begin.
        prompts: uint32 of shape (n,), tokens.
        answers: uint32 of shape (n,), tokens that the engine decodes.
        engines: uint32 of shape (n,), numbers of engines.
        geometry: a rank of an engine, which has the groups.
        groups: numbers of groups, and the bytes of a block of each in all layers and ranks.
        pool: bytes of an engine's cache.
        side: ``prefill``, or ``decode``, which has two rules: one hit for all groups, and a hit of each group.

    Returns:
        uint32 of shape (rules * groups * n,).

    Raises:
        RequestError: the arrays do not fit.
    """

def window_blocks(window: int, block_size: int) -> int:
    """Return how many trailing blocks vLLM 0.32 holds of a sliding-window group: ``ceil(window / block_size) + 1``.

    Args:
        window: tokens that a query sees, including itself.
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
) -> list[NDArray[Any]]:
    """Select the blocks of each group that move, by vLLM's static rule.

    Args:
        block_ids: logical block ids of each group; null blocks at the front are removed.
        keep: number of trailing blocks to select of each group, 0 for all (see `window_blocks`).
        speculative: for a state group, the number of slots after the slot with the state, which alone is selected; None
            for other groups.
        null_block: the id that stands for "no block", or None.

    Returns:
        For each group the selected ids, in their order: of an array a view of it, of a list an int32 array. Of a list
        only the selected entries are read, and null blocks at the front if the first selected one would be one.

    Raises:
        RequestError: lists of different length or of the wrong type.
        BlockIdError: a selected id of a list does not fit int32.
    """

def expand_blocks(block_ids: IdsLike, ratio: int, *, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """Return the kernel block ids of logical block ids: ``id`` becomes ``id * ratio .. (id + 1) * ratio``.

    Args:
        block_ids: logical block ids.
        ratio: kernel blocks in a logical block.
        out: an int32 array of shape (n,) for the ids, which fill it from its front; None for a new array.

    Returns:
        Shape (len(block_ids) * ratio,): a new array, or a view of `out`.

    Raises:
        BlockIdError: an id is negative or its kernel ids do not fit int32.
        AddressOverflowError: there are more than 2**31 - 1 kernel ids.
        RequestError: `out` is no writable C-contiguous int32 array, is too short, or overlaps `block_ids`.
    """

def permuted_rows(
    local: NDArray[np.uint64],
    remote: NDArray[np.uint64],
    local_bounds: U64s,
    remote_bounds: U64s,
    permute_bytes: int,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Read rows in the order of the source where that needs fewer rows, and return the ranges to permute after arrival.

    Args:
        local: shape (n, 3), of one source, sorted by address, as in `Read.local`.
        remote: shape (n, 3), as in `Read.remote`.
        local_bounds: sorted addresses at which registered memory begins or ends; no row crosses such an address.
        remote_bounds: the same addresses of the source.
        permute_bytes: how many bytes may be permuted to save a row.

    Returns:
        Local and remote rows, each of shape (m, 3), and the ranges to permute, of shape (k, 5): address, device,
        blocks, heads, bytes of a head in a block. Such a range arrives as ``blocks x heads`` and must become
        ``heads x blocks``.

    Raises:
        RequestError: arrays of another type or shape, or of unequal length.
    """

def digest_prefixes(tokens: list[int], counts: list[int]) -> list[bytes]:
    """Return `digest_tokens` without a header for each of several prefixes of a token list, in one pass.

    Args:
        tokens: token ids. The list is read in place, not copied.
        counts: lengths of the prefixes, in ascending order.

    Raises:
        RequestError: there are fewer tokens, a token is not an integer of 32 bits, or counts decrease.
    """

def digest_tokens(header: bytes, tokens: list[int], num_tokens: int) -> bytes:
    """Return the first 16 bytes of BLAKE3 over the length of a header (u64), the header and token ids (i32).

    Numbers are little-endian.

    Args:
        header: what identifies the prompt besides its tokens.
        tokens: token ids. The list is read in place, not copied.
        num_tokens: the length of the prefix that counts.

    Raises:
        RequestError: there are fewer tokens, or a token is not an integer of 32 bits.
    """

def ids_to_text(ids: IdsLike) -> str:
    """Return block ids as a text of ascending and descending ranges, e.g. ``7-9,4,2-1``.

    Args:
        ids: block ids, list or array.

    Raises:
        RequestError: an id is not an integer of 64 bits.
    """

def text_to_ids(text: str, limit: int) -> NDArray[np.int64]:
    """Return the block ids of a text of `ids_to_text`, which may come from an untrusted peer.

    Args:
        text: the text.
        limit: the largest number of ids.

    Raises:
        RequestError: the text has another form, an id has more than 31 bits, or there are more ids than `limit`.
    """

def join_tables(tables: Sequence[IdsLike], null_block: int | None) -> NDArray[np.int64]:
    """Return the ids of several block tables, one after the other, without null blocks.

    Args:
        tables: block ids of each group.
        null_block: the id that stands for "no block", or None.

    Raises:
        RequestError: a table has the wrong type.
    """

def live_spans(
    geometry: _AnyGeometry,
    num_tokens: int | None,
    block_tables: Sequence[IdsLike],
    cached: Sequence[int] | None = None,
) -> list[Span]:
    """Return the spans of a request's live blocks, from block tables of vLLM's manager.

    Dropped blocks appear as the null block at the front of a table. Blocks wholly before the tokens that the token
    after `num_tokens` attends to are left out (the token-exact rule). Of a state group, only the slot with the state is
    used.

    Args:
        geometry: the rank whose blocks these are.
        num_tokens: number of tokens that the cache holds for the request, or will hold. None to use every block in the
            tables, for a reader whose larger blocks begin earlier.
        block_tables: logical block ids from position 0, for each group.
        cached: for each group, how many leading table entries must not be filled (a prefix hit); None for no hit.

    Returns:
        A span for each group.

    Raises:
        RequestError: a list has the wrong number of entries or the wrong type.
    """

def spans_to_fill(geometry: _AnyGeometry, num_tokens: int, tables: Sequence[Sequence[Any]]) -> tuple[Span, ...]:
    """Return the spans of the blocks that a load fills: those that its tokens need, and that are no prefix-cache hits.

    Hits, which other requests may share, and the null blocks before them come first in a table. The blocks that vLLM
    allocates for a load have no hash yet. Each group has its own hit.

    Args:
        geometry: the rank whose blocks these are.
        num_tokens: tokens that the cache will hold.
        tables: vLLM's objects of the blocks from position 0, for each group.

    Raises:
        RequestError: vLLM has allocated no block for a state; a list has the wrong number of entries.
    """

def spans_to_texts(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """Return the first entry and `ids_to_text` of each of some spans.

    Raises:
        RequestError: an id is not an integer of 64 bits.
    """

def texts_to_spans(texts: list[tuple[int, str]], limit: int, limit_of_all: int) -> tuple[Span, ...]:
    """Return the spans of texts of `spans_to_texts`, which may come from an untrusted peer.

    Args:
        texts: first entry and text of each group.
        limit: the largest number of ids of a group.
        limit_of_all: the largest number of ids of all groups together.

    Raises:
        RequestError: as for `text_to_ids`.
    """

def descriptor_ids(
    block_ids: Sequence[IdsLike],
    view_counts: U64s,
    view_groups: Sequence[int | tuple[int, ...]],
    *,
    out: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Return ids into a flat list of views: for each view the ids of its groups, shifted by the start of the view.

    These are vLLM 0.32's ids if all attention regions come first and the parts of the state regions follow. For many
    requests, `DescriptorOrder` reads the views once.

    Args:
        block_ids: block ids of each group, at the granularity of the views.
        view_counts: entries of each view.
        view_groups: the group, or the groups, whose blocks each view has.
        out: an int32 array of shape (n,) for the ids, which fill it from its front; None for a new array.

    Returns:
        The ids, view after view: a new array, or a view of `out`.

    Raises:
        BlockIdError: an id is outside one of the views.
        RequestError: a group does not exist, or lists differ in length; `out` is no writable C-contiguous int32 array,
            is too short, or overlaps `block_ids`.
        AddressOverflowError: the views have more than 2**31 - 1 entries, or there are as many ids.
    """

@final
class DescriptorOrder:
    """The ids of requests in one list of descriptors: which views the list has, and which blocks move.

    It does what `clip_blocks`, `expand_blocks` and `descriptor_ids` do one after the other, in one call for a request
    or for a batch, and reads the views once. A block that a table lists twice has its ids twice, as in vLLM.

    Args:
        keep: for each group, number of trailing blocks to select, 0 for all (see `window_blocks`).
        view_counts: entries of each view.
        view_groups: the group, or the groups, whose blocks each view has.
        speculative: for a state group, the number of slots after the slot with the state, which alone is selected; None
            for other groups.
        ratios: for each group, kernel blocks in a logical block, if views number kernel blocks; None for 1.
        null_block: the id that stands for "no block", or None.

    Raises:
        RequestError: lists of different length or of the wrong type; a group does not exist; a ratio is 0.
        AddressOverflowError: the views have more than 2**31 - 1 entries.
    """

    def __new__(
        cls,
        keep: U64s,
        view_counts: U64s,
        view_groups: Sequence[int | tuple[int, ...]],
        *,
        speculative: Sequence[int | None] | None = None,
        ratios: U64s | None = None,
        null_block: int | None = 0,
    ) -> DescriptorOrder: ...
    def ids(self, block_ids: Sequence[IdsLike], *, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
        """Return the ids of one request.

        Args:
            block_ids: the block table of each group, logical block ids.
            out: an int32 array of shape (n,) for the ids, which fill it from its front; None for a new array.

        Returns:
            The ids, view after view: a new array, or a view of `out`.

        Raises:
            BlockIdError: an id is outside one of the views.
            RequestError: another number of groups, or a table of the wrong type; `out` is no writable C-contiguous
                int32 array, is too short, or overlaps `block_ids`.
            AddressOverflowError: there are more than 2**31 - 1 ids.
        """

    def batch_ids(
        self,
        block_tables: Sequence[NDArray[np.integer]],
        num_blocks: Sequence[U64s],
        *,
        out: NDArray[np.int32] | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the ids of several requests, one after the other, and where those of each begin.

        Args:
            block_tables: for each group an array of integers of shape (requests, columns), as vLLM's workers have. Rows
                of int32 or int64 are read in place; of another type or in Fortran order, they are copied as int64.
            num_blocks: for each group the number of entries of each row.
            out: an int32 array of shape (n,) for the ids, which fill it from its front; None for a new array.

        Returns:
            The ids, and int64 offsets of shape (requests + 1,): request ``r`` has ``ids[offsets[r]:offsets[r + 1]]``.

        Raises:
            BlockIdError: an id is outside one of the views; the values of `out` are then undefined.
            RequestError: as for `ids`; or a row has fewer columns than entries.
            AddressOverflowError: there are more than 2**31 - 1 ids.
        """

def fa_views(
    bases: U64s,
    lengths: U64s,
    strides: U64s,
    counts: U64s,
    devices: U64s | None = None,
    *,
    out: NDArray[np.uint64] | None = None,
) -> NDArray[np.uint64]:
    """Return one view for each attention region, of shape (n, 5): address, length, device, stride, count.

    Args:
        bases: address of each region.
        lengths: bytes of a block.
        strides: bytes from one block to the next.
        counts: blocks of each region.
        devices: device of each region; None for 0.
        out: a uint64 array of as many columns, filled from its front; None for a new array.

    Returns:
        A new array, or a view of `out`.

    Raises:
        RequestError: a length, stride or count is 0, or lists differ in length; `out` has another form, is
            read-only, or too short.
        AddressOverflowError: a view leaves the address space, or there are more than 2**31 - 1 entries.
    """

def fa_descriptors(
    bases: U64s,
    lengths: U64s,
    strides: U64s,
    counts: U64s,
    devices: U64s | None = None,
    *,
    out: NDArray[np.uint64] | None = None,
) -> NDArray[np.uint64]:
    """Return every block of every attention region, region by region, of shape (n, 3): address, length, device.

    Arguments and errors are as for `fa_views`.
    """

def ssm_views(
    bases: U64s,
    parts: Sequence[tuple[int, int]],
    strides: U64s,
    counts: U64s,
    devices: U64s | None = None,
    *,
    out: NDArray[np.uint64] | None = None,
) -> NDArray[np.uint64]:
    """Return one view for each part of each state region. Errors are as for `fa_views`.

    Args:
        bases: address of each region.
        parts: offset and length in bytes of each part of a block, the same in all regions.
        strides: bytes from one block to the next, for each region.
        counts: blocks of each region.
        devices: device of each region; None for 0.
        out: as for `fa_views`.
    """

def ssm_descriptors(
    bases: U64s,
    parts: Sequence[tuple[int, int]],
    strides: U64s,
    counts: U64s,
    devices: U64s | None = None,
    *,
    out: NDArray[np.uint64] | None = None,
) -> NDArray[np.uint64]:
    """Return every block of every part of every state region, of shape (n, 3): address, length, device.

    Arguments and errors are as for `ssm_views`.
    """

def expand_views(views: NDArray[np.uint64], *, out: NDArray[np.uint64] | None = None) -> NDArray[np.uint64]:
    """Return the descriptors that views of shape (n, 5) stand for, of shape (sum of counts, 3).

    Args:
        views: rows of address, length in bytes, device, stride in bytes, count.
        out: a uint64 array of shape (n, 3), filled from its front; None for a new array.

    Raises:
        RequestError: an array has another form; `out` is read-only, or too short.
        AddressOverflowError: a view leaves the address space, or there are more than 2**31 - 1 entries.
    """

def check_rows(what: str, rows: NDArray[np.uint64], columns: int = 3) -> int:
    """Check rows before a call of NIXL, which accepts any array with the right number of bytes and lets addresses wrap.

    Args:
        what: a name of the rows for the error message.
        rows: address, length in bytes, device; with five columns also stride in bytes and count.
        columns: 3 or 5.

    Returns:
        The number of descriptors that the rows stand for.

    Raises:
        RequestError: not a C-contiguous uint64 array of shape (n, columns); or a length, stride or count of 0.
        AddressOverflowError: a row leaves the address space, or there are more than 2**31 - 1 entries.
    """
