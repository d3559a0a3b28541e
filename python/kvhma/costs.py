# SPDX-License-Identifier: Apache-2.0
"""What a hand-off costs, before any block is known: for routers, which decide for every request.

A :class:`HandOffCost` is made once for two engines. Tokens that are many blocks away from both ends of a request repeat
what other blocks cost. So each phase of a length is counted once, with the plan's own pieces, and each further period
of blocks adds the same bytes and descriptors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from math import gcd, inf, lcm
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvhma._kvhma import Plan, first_entries, first_needed_tokens
from kvhma.errors import RequestError
from kvhma.geometry import Geometry, Group
from kvhma.planning import DEFAULT_DESCRIPTOR_BYTES, plan

MAX_TOKENS = 1 << 40
"""Limit of a request's tokens, as in a plan."""
_WARM_PERIOD = 256
"""Periods up to this length are counted when the costs are made; longer ones as requests ask for them."""
_MAX_PHASES = 4096
"""Limit of the places within a period where a block may begin."""
_MAX_ROWS = 1 << 16
"""Limit of counted phases of a group."""
_MAX_ARRAY_TOKENS = 1 << 32
"""Limit of tokens in arrays, so that sums over many ranks stay integers of 64 bits."""
_PART = 1 << 16
"""Requests of an array that are computed at once: it bounds the memory."""
_MAX_LENGTHS = 1 << 22
"""Limit of the lengths that are compared one by one."""
_LINK_VERSION = 1

_Row: TypeAlias = tuple[int, int, int, int]
"""Bytes and descriptors of a rank, and what another period of tokens adds to each."""
_Term: TypeAlias = tuple[tuple[_Row, ...], int, int, tuple[int, ...]]
"""Rows of all ranks, further periods, boundaries between blocks, and for each rank the runs that go across one."""
_Terms: TypeAlias = tuple[
    list[tuple[_Row, ...]], NDArray[np.intp], NDArray[np.int64], NDArray[np.int64], tuple[int, ...]
]
"""The same of many requests, of shape (n,): different rows, and which of them is a request's; the rest as above."""


def _wrong(field: str, value: object, expected: str) -> RequestError:
    text = f"{field} {value!a}: must be {expected}"
    return RequestError(text, code="value", field=field, value=ascii(value), expected=expected)


def _check_positive(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise _wrong(field, value, "a positive number")


@dataclass(frozen=True, slots=True)
class Link:
    """Expected speed of the link between two engines, for one reader.

    Attributes:
        seconds_per_descriptor: time that an additional descriptor takes.
        bytes_per_second: bandwidth with few descriptors.
        source: where the two numbers come from.

    Raises:
        RequestError: a number is not positive.
    """

    seconds_per_descriptor: float
    bytes_per_second: float
    source: str = "given"

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_positive("seconds_per_descriptor", self.seconds_per_descriptor)
        _check_positive("bytes_per_second", self.bytes_per_second)

    def seconds(self, descriptors: int, nbytes: int) -> float:
        """Return the time that one rank's reads take, one after the other.

        Args:
            descriptors: descriptors of the rank.
            nbytes: bytes of the rank.

        Returns:
            Seconds.
        """
        return self.seconds_per_descriptor * descriptors + nbytes / self.bytes_per_second

    def to_json(self) -> str:
        """Return the form in which ``kvhma bench link`` stores a link."""
        return json.dumps({"kvhma_link": _LINK_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_form(cls, form: Any) -> Link:
        """Make a link of what :meth:`to_json` writes.

        Args:
            form: the parsed JSON.

        Returns:
            The link.

        Raises:
            RequestError: the form is something else, or a number is not positive.
        """
        if not isinstance(form, Mapping) or form.get("kvhma_link") != _LINK_VERSION:
            text = f"not written by `kvhma bench link` (version {_LINK_VERSION})"
            raise RequestError(text, code="version", field="kvhma_link", expected=_LINK_VERSION)
        per_descriptor: Any = form.get("seconds_per_descriptor")
        per_second: Any = form.get("bytes_per_second")
        return cls(per_descriptor, per_second, str(form.get("source")))


DEFAULT_LINK = Link(3e-6, 40e9, "defaults: 3 µs a descriptor, 40 GB/s; measure yours with `kvhma bench link`")
"""Roughly the speed of a 400 Gb/s network card."""


class Cost(NamedTuple):
    """The predicted cost of a hand-off.

    Attributes:
        bytes: bytes that all ranks of D read; exact for any block ids.
        descriptors: of all ranks; exact if the blocks of a group have consecutive ids, and groups are apart.
        most_descriptors: a bound for any block ids, reached if no two blocks are neighbours.
        seconds: predicted time of the slowest rank of D with `descriptors`, after `fixed_seconds`.
        most_seconds: the same with `most_descriptors`.
        compute_seconds: time in which D computes the tokens after its shortest hit; None if its speed is unknown.
        remote_compute_seconds: the same for P.
    """

    bytes: int
    descriptors: int
    most_descriptors: int
    seconds: float
    most_seconds: float
    compute_seconds: float | None
    remote_compute_seconds: float | None


class Costs(NamedTuple):
    """Predicted costs of many hand-offs: arrays of shape (n,), with the meaning of :class:`Cost`'s fields.

    Attributes:
        bytes: int64.
        descriptors: int64.
        most_descriptors: int64.
        seconds: float64.
        most_seconds: float64.
    """

    bytes: NDArray[np.int64]
    descriptors: NDArray[np.int64]
    most_descriptors: NDArray[np.int64]
    seconds: NDArray[np.float64]
    most_seconds: NDArray[np.float64]


class _Speeds(NamedTuple):
    """The link, the tokens that D and P compute in a second, and the fixed time of a hand-off."""

    link: Link
    local: float | None
    remote: float | None
    fixed_seconds: float


class HandOffCost:
    """The cost of hand-offs between two engines, for any number of requests, from any thread.

    Attributes:
        groups: groups of D, in the order in which `cached` lists tokens.
        remote_groups: groups of P, the same for `remote_cached`.
        link: speed of the link.
    """

    def __init__(
        self, ranks: Sequence[Geometry], sources: Sequence[Geometry], plans: Sequence[Plan], speeds: _Speeds
    ) -> None:
        """Count each phase of short periods; :func:`cost` makes the arguments.

        Args:
            ranks: ranks of D.
            sources: ranks of P.
            plans: the plan of each rank of D.
            speeds: what turns counts into times.
        """
        self.groups, self.remote_groups, self.link = ranks[0].groups, sources[0].groups, speeds.link
        self._local, self._remote, self._speeds = ranks[0].core, sources[0].core, speeds
        self._no_hit = [0] * len(self.remote_groups)
        # Ranks that cost the same for all that was counted so far.
        self._alike, self._lock = [list(range(len(ranks)))], Lock()
        self._blocks = [_Blocks(index, (ranks, sources), plans, self._refine) for index in range(len(self.groups))]
        for blocks in self._blocks:
            # A pool with few blocks has no room for a long request. A shorter request is counted when it comes.
            with suppress(RequestError):
                blocks.warm()

    def of(self, num_tokens: int, cached: int | Sequence[int] = 0, remote_cached: int | Sequence[int] = 0) -> Cost:
        """Return the cost of a request.

        Args:
            num_tokens: tokens that P computes and hands off.
            cached: leading tokens that D has cached: one number for all groups, or one for each group. Attention groups
                then begin to read at the next whole block. A state is read unless D has it after `num_tokens` tokens.
            remote_cached: the same for P. It changes only `remote_compute_seconds`.

        Raises:
            RequestError: a number is out of range, or a list has the wrong number of entries.
        """
        if type(num_tokens) is not int or not 1 <= num_tokens <= MAX_TOKENS:
            raise _wrong("num_tokens", num_tokens, f"an integer of 1 to {MAX_TOKENS}")
        held = _hits("cached", cached, num_tokens, len(self.groups))
        remote_held = _hits("remote_cached", remote_cached, num_tokens, len(self.remote_groups))
        terms = self._terms(num_tokens, held)
        nbytes = descriptors = scattered = 0
        seconds = most_seconds = 0.0
        for members in self._alike:
            rank = members[0]
            rank_bytes = rank_descriptors = breaks = 0
            for rows, periods, boundaries, joins in terms:
                row = rows[rank]
                rank_bytes += row[0] + periods * row[2]
                rank_descriptors += row[1] + periods * row[3]
                breaks += boundaries * joins[rank]
            nbytes += len(members) * rank_bytes
            descriptors += len(members) * rank_descriptors
            scattered += len(members) * (rank_descriptors + breaks)
            seconds = max(seconds, self.link.seconds(rank_descriptors, rank_bytes))
            most_seconds = max(most_seconds, self.link.seconds(rank_descriptors + breaks, rank_bytes))
        speeds = self._speeds
        return Cost(
            nbytes,
            descriptors,
            scattered,
            speeds.fixed_seconds + seconds,
            speeds.fixed_seconds + most_seconds,
            None if speeds.local is None else (num_tokens - min(held)) / speeds.local,
            None if speeds.remote is None else (num_tokens - min(remote_held)) / speeds.remote,
        )

    def of_each(
        self, num_tokens: NDArray[np.int64], cached: int | NDArray[np.int64] = 0, *, link: Link | None = None
    ) -> Costs:
        """Return the costs of many requests, without their computing times.

        Args:
            num_tokens: tokens of each request, of shape (n,).
            cached: as for :meth:`of`: one number, one for each request, or an array of shape (groups, n).
            link: another link than that of these costs.

        Raises:
            RequestError: a number is out of range, or the shapes do not fit.
        """
        lengths = _integers("num_tokens", num_tokens)
        held = _integers("cached", cached)
        if lengths.ndim != 1 or (lengths.size and not 1 <= lengths.min() <= lengths.max() <= _MAX_ARRAY_TOKENS):
            expected = f"an array of integers of 1 to {_MAX_ARRAY_TOKENS}, one for a request"
            raise _wrong("num_tokens", lengths.tolist()[:3] if lengths.ndim else lengths, expected)
        try:
            held = np.broadcast_to(held, (len(self.groups), len(lengths)))
        except ValueError as error:
            expected = f"of a shape that fits ({len(self.groups)}, {len(lengths)})"
            raise _wrong("cached", held.shape, expected) from error
        if (wrong := held[(held < 0) | (held > lengths)]).size:
            raise _wrong("cached", int(wrong[0]), "0 to the num_tokens of its request")
        parts = [
            self._of_part(lengths[at : at + _PART], held[:, at : at + _PART], link or self.link)
            for at in range(0, len(lengths), _PART)
        ]
        return Costs(
            *(
                np.concatenate(found)
                for found in zip(*(parts or [self._of_part(lengths, held, self.link)]), strict=True)
            )
        )

    def _of_part(self, lengths: NDArray[np.int64], held: NDArray[np.int64], link: Link) -> Costs:
        terms = [blocks.terms(lengths, hits) for blocks, hits in zip(self._blocks, held, strict=True)]
        nbytes, descriptors, scattered = np.zeros((3, len(lengths)), np.int64)
        seconds, most_seconds = np.zeros((2, len(lengths)))
        for members in self._alike:
            rank = members[0]
            rank_bytes, rank_descriptors, breaks = np.zeros((3, len(lengths)), np.int64)
            for rows, chosen, periods, boundaries, joins in terms:
                found = np.array([row[rank] for row in rows], np.int64).reshape(-1, 4)[chosen]
                rank_bytes += found[:, 0] + periods * found[:, 2]
                rank_descriptors += found[:, 1] + periods * found[:, 3]
                breaks += boundaries * joins[rank]
            nbytes += len(members) * rank_bytes
            descriptors += len(members) * rank_descriptors
            scattered += len(members) * (rank_descriptors + breaks)
            bandwidth_seconds = rank_bytes / link.bytes_per_second
            for slowest, number in ((seconds, rank_descriptors), (most_seconds, rank_descriptors + breaks)):
                np.maximum(slowest, link.seconds_per_descriptor * number + bandwidth_seconds, out=slowest)
        fixed = self._speeds.fixed_seconds
        return Costs(nbytes, descriptors, scattered, fixed + seconds, fixed + most_seconds)

    def faster_lengths(
        self, cached: int = 0, max_tokens: int = 1 << 17, *, scattered: bool = False
    ) -> list[tuple[int, int]]:
        """Return the lengths of prompts for which reading takes less time than computing on D.

        There may be many ranges: a block more costs a step, and a new chunk makes the cache of its layers short again.

        Args:
            cached: leading tokens that D has in every group.
            max_tokens: longest prompt.
            scattered: whether no two blocks are neighbours, as in a pool that was used for long (`most_seconds`).

        Returns:
            Ranges ``(first, last)`` of tokens, ascending, with both ends.

        Raises:
            RequestError: a number is out of range, or D's speed is unknown.
        """
        if self._speeds.local is None:
            raise _wrong("tokens_per_second", None, "given, to compare with computing")
        if type(max_tokens) is not int or not 1 <= max_tokens <= _MAX_LENGTHS:
            raise _wrong("max_tokens", max_tokens, f"an integer of 1 to {_MAX_LENGTHS}")
        if type(cached) is not int or not 0 <= cached < max_tokens:
            raise _wrong("cached", cached, f"an integer of 0 to {max_tokens - 1}")
        lengths = np.arange(cached + 1, max_tokens + 1)
        found = self.of_each(lengths, cached)
        seconds = found.most_seconds if scattered else found.seconds
        is_faster = np.concatenate([[False], seconds < (lengths - cached) / self._speeds.local, [False]])
        edges = np.flatnonzero(np.diff(is_faster)) + cached
        return [(int(first) + 1, int(last)) for first, last in edges.reshape(-1, 2)]

    def _terms(self, num_tokens: int, held: Sequence[int]) -> list[_Term]:
        entries = [hit // blocks.per_entry for hit, blocks in zip(held, self._blocks, strict=True)]
        firsts = first_entries(self._local, num_tokens, entries)
        needed = first_needed_tokens(self._local, num_tokens)
        remote_firsts = first_entries(self._remote, num_tokens, self._no_hit)
        terms = []
        for blocks, hit, first, token in zip(self._blocks, held, firsts, needed, strict=True):
            start = 0 if blocks.is_state else blocks.first_token(first, token, remote_firsts)
            if start < num_tokens and not (blocks.is_state and hit == num_tokens):
                terms.append(blocks.term(start, num_tokens))
        return terms

    def _refine(self, values: Sequence[Hashable]) -> None:
        """Separate ranks with different values."""
        with self._lock:
            refined: dict[tuple[int, Hashable], list[int]] = {}
            for number, members in enumerate(self._alike):
                for rank in members:
                    refined.setdefault((number, values[rank]), []).append(rank)
            self._alike = list(refined.values())


class _Blocks:
    """The costs of one group of D, for every rank.

    ```text
    tokens     start                                           num_tokens
                 |...|======|======|======|======|======|======|==|
                      period                               the phase: all that is left
                 counted:  2 to 3 periods with the phase, and the same with another period
    ```
    """

    def __init__(
        self,
        index: int,
        sides: tuple[Sequence[Geometry], Sequence[Geometry]],
        plans: Sequence[Plan],
        refine: Callable[[Sequence[Hashable]], None],
    ) -> None:
        """Find which groups of P have the group's layers, and after how many tokens the blocks repeat."""
        self._index, self._plans, self._refine = index, plans, refine
        local, remote = sides
        group = self._group = local[0].groups[index]
        self.per_entry, self.is_state = group.tokens_per_entry, group.kind == "ssm"
        names = {layer.name for rank in local for layer in rank.layers if layer.group == index}
        partners = sorted({layer.group for rank in remote for layer in rank.layers if layer.name in names})
        self._partners = [(number, remote[0].groups[number]) for number in partners]
        self._period = lcm(_step(local, index), *(_step(remote, number) for number in partners))
        sizes = {self.per_entry, *(group.tokens_per_entry for _, group in self._partners)}
        # Every boundary of a larger block that a smaller block divides is one of the smaller block's.
        self._sizes = [size for size in sizes if not any(size % smaller == 0 for smaller in sizes - {size})]
        # Where a block may begin within a period.
        steps = [] if self.is_state else [(size, self._period // gcd(size, self._period)) for size in self._sizes]
        if sum(number for _, number in steps) > _MAX_PHASES:
            expected = f"sizes of P and D that repeat within {_MAX_PHASES} blocks"
            raise _wrong(f"group {index} block_size", sorted(sizes), expected)
        self._phases = sorted({size * count % self._period for size, number in steps for count in range(number)})
        self._rows: dict[tuple[int, int], tuple[_Row, ...]] = {}

    def first_token(self, first: int, needed: int, remote_firsts: Sequence[int]) -> int:
        """Return the first token that is read: P may have dropped the beginning of D's first block."""
        start = first * self.per_entry
        held = max((remote_firsts[number] * group.tokens_per_entry for number, group in self._partners), default=0)
        return max(start, min(held, needed))

    def term(self, start: int, num_tokens: int) -> _Term:
        """Return what tokens cost."""
        if self.is_state:
            return self._row(0, 1), 0, 0, self._joins
        length, period = num_tokens - start, self._period
        periods = max(length // period - 2, 0)
        phase, length = start % period, length - periods * period
        rows = self._row(phase, length)
        boundaries = sum((num_tokens - 1) // size - start // size for size in self._sizes)
        return rows, periods, boundaries, self._joins

    def terms(self, lengths: NDArray[np.int64], hits: NDArray[np.int64]) -> _Terms:
        """Return what the tokens of many requests cost."""
        start, period = np.zeros_like(lengths), self._period
        if not self.is_state:
            needed = _needed(self._group, lengths)
            first = np.maximum(needed // self.per_entry, hits // self.per_entry) * self.per_entry
            for _, group in self._partners:
                size = group.tokens_per_entry
                start = np.maximum(start, _needed(group, lengths) // size * size)
            start = np.maximum(first, np.minimum(start, needed))
        length = lengths - start
        periods = np.zeros_like(length) if self.is_state else np.maximum(length // period - 2, 0)
        keys = start % period * (3 * period) + length - periods * period
        if self.is_state:
            keys[:] = 1
        is_read = (hits < lengths) if self.is_state else length > 0
        found, chosen = np.unique(np.where(is_read, keys, 0), return_inverse=True)
        nothing = ((0, 0, 0, 0),) * len(self._plans)
        rows = [self._row(*divmod(key, 3 * period)) if key else nothing for key in found.tolist()]
        boundaries = np.zeros_like(length)
        if not self.is_state:
            boundaries += sum((lengths - 1) // each - start // each for each in self._sizes) * is_read
        return rows, chosen, periods * is_read, boundaries, self._joins

    def _row(self, phase: int, length: int) -> tuple[_Row, ...]:
        return self._rows.get((phase, length)) or self._count_rows(phase, length)

    def warm(self) -> None:
        """Count all phases, unless they are many."""
        if self.is_state:
            self.term(0, 1)
        elif self._period <= _WARM_PERIOD:
            for start in self._phases:
                for length in range(1, 3 * self._period):
                    self.term(start, start + length)

    def _count(self, start: int, length: int) -> list[tuple[int, int]]:
        return [plan.count(self._index, start, start + length) for plan in self._plans]

    def _count_rows(self, phase: int, length: int) -> tuple[_Row, ...]:
        counted = self._count(phase, length)
        longer = self._count(phase, length + self._period) if length >= 2 * self._period else counted
        pairs = zip(counted, longer, strict=True)
        rows = tuple((short[0], short[1], long[0] - short[0], long[1] - short[1]) for short, long in pairs)
        self._refine(rows)
        if len(self._rows) >= _MAX_ROWS:
            self._rows.clear()
        self._rows[phase, length] = rows
        return rows

    @cached_property
    def _joins(self) -> tuple[int, ...]:
        """For each rank, at most how many runs continue from a block into the next if both have neighbouring ids."""
        period, around = self._period, max(self._sizes)
        joins = [0] * len(self._plans)
        for phase in self._phases:
            start = phase + period * -(-around // period) - around
            before, after = self._count(start, around), self._count(start + around, around)
            for rank, (_, together) in enumerate(self._count(start, 2 * around)):
                joins[rank] = max(joins[rank], before[rank][1] + after[rank][1] - together)
        self._refine(joins)
        return tuple(joins)


def _needed(group: Group, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first token that the token after each length attends to; 0 for state."""
    if group.window is not None:
        return np.maximum(lengths + 1 - group.window, 0)
    return np.zeros_like(lengths) if group.chunk is None else lengths // group.chunk * group.chunk


def _integers(field: str, values: Any) -> NDArray[np.int64]:
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        raise _wrong(field, str(found.dtype), "integers")
    return found.astype(np.int64)


def _ranks(field: str, ranks: Geometry | Sequence[Geometry]) -> Sequence[Geometry]:
    """Return the ranks of an engine, whose block tables are the same."""
    found = [ranks] if isinstance(ranks, Geometry) else ranks
    if not isinstance(found, Sequence) or not found or not all(isinstance(rank, Geometry) for rank in found):
        raise _wrong(field, type(ranks).__name__, "a Geometry or a list of them")
    tables = [[(group.kind, group.tokens_per_entry) for group in rank.groups] for rank in found]
    for index, groups in enumerate(tables):
        if groups != tables[0]:
            raise _wrong(f"{field}[{index}].groups", groups, f"{tables[0]}, as those of {field}[0]")
    return found


def _step(ranks: Sequence[Geometry], index: int) -> int:
    """Return after how many tokens the blocks of a group repeat on one side."""
    group = ranks[0].groups[index]
    layers = [(rank, layer) for rank in ranks for layer in rank.layers if layer.group == index]
    is_even = all(rank.kernel_stride(layer) * group.ratio == layer.block_stride for rank, layer in layers)
    is_by_kernel = is_even and group.cp_size == 1 and group.kind not in ("ssm", "opaque")
    return group.kernel_block_size if is_by_kernel else group.tokens_per_entry


def _hits(field: str, hits: int | Sequence[int], num_tokens: int, groups: int) -> Sequence[int]:
    """Return a checked number of tokens for each group."""
    found = [hits] * groups if isinstance(hits, int) else hits
    if not isinstance(found, Sequence) or len(found) != groups:
        raise _wrong(field, hits, f"one number, or one for each of {groups} groups")
    for hit in found:
        if type(hit) is not int or not 0 <= hit <= num_tokens:
            raise _wrong(field, hit, f"an integer of 0 to the {num_tokens} of num_tokens")
    return found


def cost(
    local: Geometry | Sequence[Geometry],
    remote: Geometry | Sequence[Geometry],
    link: Link = DEFAULT_LINK,
    *,
    tokens_per_second: float | None = None,
    remote_tokens_per_second: float | None = None,
    fixed_seconds: float = 0.0,
    descriptor_bytes: int = DEFAULT_DESCRIPTOR_BYTES,
) -> HandOffCost:
    """Prepare the costs of hand-offs between two engines, once for all requests.

    Args:
        local: all ranks of D.
        remote: all ranks of P.
        link: speed of the link for one rank of D.
        tokens_per_second: tokens that D computes in a second.
        remote_tokens_per_second: tokens that P computes in a second.
        fixed_seconds: time of a hand-off besides its reads: questions, queues, a step of the scheduler.
        descriptor_bytes: as for :func:`kvhma.plan`.

    Returns:
        The costs: call its ``of`` for each request.

    Raises:
        RequestError: an argument has the wrong type or is out of range. Ranks of an engine have different groups, or
            block sizes of P and D have no small common multiple.
        UnsupportedPairError: the engines cannot be paired.
    """
    ranks, sources = _ranks("local", local), _ranks("remote", remote)
    if not isinstance(link, Link):
        raise _wrong("link", link, "a Link")
    for field, speed in (
        ("tokens_per_second", tokens_per_second),
        ("remote_tokens_per_second", remote_tokens_per_second),
        ("fixed_seconds", fixed_seconds or None),
    ):
        if speed is not None:
            _check_positive(field, speed)
    plans = [plan(rank, sources, descriptor_bytes=descriptor_bytes) for rank in ranks]
    return HandOffCost(ranks, sources, plans, _Speeds(link, tokens_per_second, remote_tokens_per_second, fixed_seconds))
