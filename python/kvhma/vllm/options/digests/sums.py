# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and its workers tell each other about digests."""

from __future__ import annotations

from typing import NamedTuple

from kvhma.digests import ContentDigest
from kvhma.errors import KvhmaError
from kvhma.geometry import Span
from kvhma.vllm.metadata import merged
from kvhma.vllm.wire.params import LeaseKey

NAME = "digests"
"""The name of this option in `extras`."""


class DigestOrder(NamedTuple):
    """A finished request whose blocks P's workers sum, for their readers.

    Attributes:
        key: identifies it to its readers.
        seed: of the digest.
        num_tokens: tokens that the blocks hold.
        spans: the blocks of each group.
    """

    key: LeaseKey
    seed: int
    num_tokens: int
    spans: tuple[Span, ...]


class StepDigests(NamedTuple):
    """From the scheduler to its workers.

    Attributes:
        orders: requests whose blocks they sum.
        verdicts: loads that need not wait any longer: the error of each, or None.
    """

    orders: list[DigestOrder]
    verdicts: dict[str, KvhmaError | None]


class RankSums(NamedTuple):
    """The sums of some ranks of an engine.

    Attributes:
        digest: of a request's blocks.
        ranks: number of the ranks.
        prefill: P's digest, if these ranks have loaded the blocks from P.
    """

    digest: ContentDigest
    ranks: int = 1
    prefill: ContentDigest | None = None

    def joined(self, more: RankSums) -> RankSums:
        """Add the sums of more ranks. If they cannot be added, the sum is empty, and the load fails.

        It must not raise, because it runs in vLLM's own thread.
        """
        try:
            digest = self.digest + more.digest
        except KvhmaError:
            digest = ContentDigest(self.digest.num_tokens, 1, {}, {})
        return RankSums(digest, self.ranks + more.ranks, self.prefill)


class ReportedSums(dict[LeaseKey | str, RankSums]):
    """From the workers to their scheduler: by lease key what P's ranks hold, by request what D's ranks have loaded."""

    def joined(self, more: ReportedSums) -> ReportedSums:
        """Add the sums of another rank."""
        return ReportedSums(merged(self, more, RankSums.joined))
