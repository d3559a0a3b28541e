# SPDX-License-Identifier: Apache-2.0
"""Finds the change after which kvhma is as fast as a connector that is predicted to be faster, by trying changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvhma.cli.block_tables import main_group
from kvhma.cli.compare.selection import Count
from kvhma.cli.format import duration, size
from kvhma.cli.hand_off import NO_HMA, VLLM, Counted, HandOff, OtherCount, PlanOptions, count, of_model
from kvhma.costs import Link
from kvhma.errors import KvhmaError
from kvhma.permute import permuted_reads

PERMUTE_BYTES = 1 << 20
"""Allows every block of P to be read in P's order (docs/tuning.md)."""
_TIE = 0.995
"""Ratios up to this show as 1.00 and count as equal."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that was tried.

    Attributes:
        what: what to change, as an option of the command or a setting of the connector.
        seconds: kvhma's predicted time with the change.
        permuted_bytes: bytes that D's device permutes afterwards; this time is not counted.
    """

    what: str
    seconds: float
    permuted_bytes: int = 0

    @property
    def text(self) -> str:
        """The effect of the change, as text."""
        after = f", and D's device puts {size(self.permuted_bytes)} into order" if self.permuted_bytes else ""
        return f"{self.what} makes it {duration(self.seconds)}{after}"


@dataclass(frozen=True, slots=True)
class Slower:
    """A connector that is faster, and changes that help.

    Attributes:
        name: the other connector.
        seconds: kvhma's predicted time.
        other_seconds: the other connector's predicted time.
        changes: the changes after which kvhma is as fast; without such a change, the best change that helps.
    """

    name: str
    seconds: float
    other_seconds: float
    changes: tuple[Change, ...]

    @property
    def is_made_up_for(self) -> bool:
        """Whether the changes make kvhma as fast."""
        return bool(self.changes) and self.other_seconds >= _TIE * self.changes[0].seconds

    @property
    def advice(self) -> str:
        """What to change, without numbers of this request."""
        if not self.changes:
            return f"{self.name} is faster, and no change that was tried helps"
        what = " or ".join(change.what for change in self.changes)
        return (
            f"{what} {'makes it as fast as' if self.is_made_up_for else 'helps, but leaves it slower than'} {self.name}"
        )

    @property
    def text(self) -> str:
        """The advice with the numbers of this request, as a sentence."""
        start = f"{self.name} is predicted to take {duration(self.other_seconds)} where kvhma takes"
        start = f"{start} {duration(self.seconds)}"
        if not self.changes:
            return f"{start}; no change of block size, kernel block or layout that was tried helps"
        still = "" if self.is_made_up_for else ", which is still slower"
        return f"{start}: {'; '.join(change.text for change in self.changes)}{still}"

    def form(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "than": "vllm" if self.name == VLLM else "no_hma",
            "as_fast_with_changes": self.is_made_up_for,
            "changes": [
                {"change": change.what, "seconds": change.seconds, "permuted_bytes": change.permuted_bytes}
                for change in self.changes
            ],
        }


def slowest(counts: Sequence[Count], link: Link) -> float:
    """Return the predicted time of ranks that read in parallel, each from its sources one after the other."""
    return max(link.seconds(total.descriptors, total.bytes) for total in counts)


def own_seconds(hand_off: HandOff, counted: Counted, link: Link) -> float:
    """Return the predicted seconds of a request."""
    return slowest([counted.of_rank(index) for index in range(len(hand_off.decode))], link)


def slower(hand_off: HandOff, counted: Counted, link: Link, options: PlanOptions | None = None) -> Slower | None:
    """Return the changes that help against a faster connector, vLLM's first; None if no connector is faster.

    The changes are tried one at a time: the connector's setting, then block sizes, the kernel block and the layout.
    """
    own = own_seconds(hand_off, counted, link)
    connectors = ((name, _seconds(found, link)) for name, found in ((VLLM, counted.vllm), (NO_HMA, counted.no_hma)))
    for name, seconds in connectors:
        if seconds < _TIE * own:
            tried = [change for change in _tried(hand_off, link, options) if change.seconds < _TIE * own]
            enough = [change for change in tried if seconds >= _TIE * change.seconds]
            best = [min(tried, key=lambda change: change.seconds)] if tried else []
            return Slower(name, own, seconds, tuple(enough[:2] or best))
    return None


def _seconds(counts: OtherCount, link: Link) -> float:
    return float("inf") if counts.why_not is not None else slowest(counts.ranks, link)


def _tried(hand_off: HandOff, link: Link, options: PlanOptions | None) -> Iterator[Change]:
    yield _permuted(hand_off, link, options)
    if (asked := hand_off.asked) is None:
        return
    blocks = asked.prefill.block_size, asked.decode.block_size
    kernel = main_group(hand_off.prefill[0]).kernel_block_size
    trials: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (f"--decode block={blocks[0]}", {}, {"block_size": blocks[0]}),
        (f"--prefill block={blocks[1]}", {"block_size": blocks[1]}, {}),
        (f"--decode kernel={kernel}", {}, {"kernel_block": kernel}),
    ]
    for order in ("LBHNC", "LBNHC", "BLHNC"):
        trials.append((f"layout={order} on both sides", {"order": order}, {"order": order}))
    for what, of_prefill, of_decode in trials:
        try:
            prefill, decode = replace(asked.prefill, **of_prefill), replace(asked.decode, **of_decode)
            changed = of_model(asked.model, prefill, decode, asked.request)
            yield Change(what, own_seconds(changed, count(changed, options), link))
        except KvhmaError:
            continue  # the engine cannot be laid out so, or the pair is refused


def _permuted(hand_off: HandOff, link: Link, options: PlanOptions | None) -> Change:
    """Count reads of P's blocks in P's order, as with the connector's setting."""
    counts, permuted = [], 0
    for local in hand_off.decode:
        transfer = hand_off.plan(local, options).transfer(hand_off.tokens, *hand_off.spans(local))
        reads = permuted_reads(transfer, local, hand_off.prefill, PERMUTE_BYTES)
        counts.append(Count(sum(len(read.local) for read in reads), transfer.bytes))
        permuted += sum(int(read.permutes[:, 2:].prod(axis=1).sum()) for read in reads)
    return Change(f"permute_bytes={PERMUTE_BYTES} in D's settings", slowest(counts, link), permuted)
