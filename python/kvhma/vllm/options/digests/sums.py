# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and its workers tell each other about digests, and the digest that P sends to D."""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from kvhma.digests import ContentDigest, Layers
from kvhma.errors import KvhmaError, RequestError
from kvhma.geometry import Span
from kvhma.vllm.metadata import merged
from kvhma.vllm.wire.params import LeaseKey

NAME = "digests"
"""The name of this option in `extras`."""

_Ranks: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
_Form: TypeAlias = tuple[int, _Ranks, list[tuple[Layers, int, tuple[int, ...]]], list[tuple[Layers, int]]]
"""Tokens, ranks, sums by layers and heads, and from which token on they count."""

_FORM = msgspec.msgpack.Decoder(_Form)


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


def write_digest(digest: ContentDigest) -> bytes:
    """Return the wire format, which :func:`read_digest` reads."""
    layers = [(*name, sums) for name, sums in digest.layers.items()]
    return msgspec.msgpack.encode((digest.num_tokens, digest.ranks, layers, list(digest.from_tokens.items())))


def read_digest(data: bytes) -> ContentDigest:
    """Read a digest. Safe on any bytes.

    Raises:
        RequestError: the bytes are not a digest.
    """
    try:
        num_tokens, ranks, sums, from_tokens = _FORM.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"digest: {len(data)} bytes cannot be read: {error}") from error
    digest = ContentDigest(num_tokens, ranks, {(layers, heads): of for layers, heads, of in sums}, dict(from_tokens))
    lengths = {layers: len(digest.layers.get((layers, 0), ())) for layers in digest.from_tokens}
    if 0 in lengths.values() or any(lengths.get(layers) != len(of) for (layers, _), of in digest.layers.items()):
        raise RequestError(f"digest: {len(data)} bytes cannot be read: a number of sums that does not fit the others")
    return digest
