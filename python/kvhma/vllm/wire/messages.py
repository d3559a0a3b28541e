# SPDX-License-Identifier: Apache-2.0
"""The messages that engines exchange besides caches. A listener in each engine's scheduler answers questions.

Every message is one msgpack value, checked against its type and bounded when it is read. Tags and field names of the
structs go over the wire; where one has another name here, `rename` says so.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from kvhma.errors import HandshakeError
from kvhma.nixl import MAX_HANDSHAKE_BYTES
from kvhma.text import one_line
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey

PROTOCOL = 2
"""Version of these messages."""

MAX_QUESTION_BYTES = 1 << 20
MAX_ANSWER_BYTES = MAX_HANDSHAKE_BYTES + 4096
MAX_CLAIMS = 4096
"""Claims in one message."""

MAX_TEXT = 4096
"""Characters of a text."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
WireClaim = tuple[Name, Nonce, Nonce]
"""A claim as a message carries it: request, generation, reader."""


class AskEngineInfo(msgspec.Struct, tag="roster", frozen=True):
    """Which engine are you?"""

    protocol: int


class AskHello(msgspec.Struct, tag="hello", frozen=True):
    """What is this worker's hello, see :mod:`kvhma.nixl.handshake`?"""

    pp_rank: Rank
    tp_rank: Rank


class Renew(msgspec.Struct, tag="renew", frozen=True):
    """We read, or are about to read, the blocks of these requests; do you hold them for us?"""

    claims: Annotated[list[WireClaim], msgspec.Meta(max_length=MAX_CLAIMS)]


class Outcome(enum.Enum):
    """Why a reader releases its claim."""

    READ = "read"
    """It has read the blocks, or its request was aborted; no other reader is known."""

    READ_SHARED = "read by sibling"
    """The same, and other requests with the same parameters, for example samples of one prompt, may still come."""

    UNREAD = "unread"
    """It could not read the blocks. Another engine may be given the same parameters."""


class Release(msgspec.Struct, tag="release", frozen=True):
    """We do not need the blocks of these requests any more, and this is why."""

    claims: Annotated[list[WireClaim], msgspec.Meta(max_length=MAX_CLAIMS)]
    outcome: Outcome


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """We cannot read your caches, and this is why. Both logs should say it."""

    engine_id: Name
    text: Text


class EngineInfo(msgspec.Struct, tag="roster", frozen=True, rename={"incarnation_id": "instance"}):
    """Which engine listens here, and the pipeline and tensor ranks of its workers."""

    protocol: int
    engine_id: Name
    incarnation_id: Nonce
    ranks: Annotated[list[tuple[Rank, Rank]], msgspec.Meta(max_length=4096)]


class RankHello(msgspec.Struct, tag="hello", frozen=True):
    """A worker's message of :mod:`kvhma.nixl.handshake`."""

    data: Annotated[bytes, msgspec.Meta(max_length=MAX_HANDSHAKE_BYTES)]


class Leases(msgspec.Struct, tag="leases", frozen=True):
    """For each claim, when its lease ends by our clock; None if the blocks are not held for this reader."""

    clock: float
    expires: Annotated[list[float | None], msgspec.Meta(max_length=MAX_CLAIMS)]


class Done(msgspec.Struct, tag="done", frozen=True):
    """Understood."""


class Problem(msgspec.Struct, tag="problem", frozen=True):
    """The question was not understood, or has no answer here."""

    text: Text


Question = AskEngineInfo | AskHello | Renew | Release | Refused
Answer = EngineInfo | RankHello | Leases | Done | Problem

_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def read_question(data: bytes) -> Question:
    """Read a question.

    Raises:
        HandshakeError: it is not one; the text is bounded, to be sent back.
    """
    try:
        return _questions.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"not a question of protocol {PROTOCOL}: {error}"[:500]) from error


def read_answer(data: bytes) -> Answer:
    """Read an answer.

    Raises:
        HandshakeError: it is not one, or it is a problem, whose text is the peer's.
    """
    try:
        answer = _answers.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"the answer is not one of protocol {PROTOCOL}: {error}") from error
    if isinstance(answer, Problem):
        raise HandshakeError(f"the peer says: {one_line(answer.text)}")
    return answer


def read_claim(claim: WireClaim) -> LeaseClaim:
    """Return the claim of a message."""
    request_id, generation, reader = claim
    return LeaseClaim(LeaseKey(request_id, int.from_bytes(generation, "big")), int.from_bytes(reader, "big"))


def write_claim(claim: LeaseClaim) -> WireClaim:
    """Return a claim as messages carry it."""
    return claim.key.request_id, claim.key.generation.to_bytes(8, "big"), claim.reader.to_bytes(8, "big")
