# SPDX-License-Identifier: Apache-2.0
"""The messages that engines exchange besides caches. A listener in each engine's scheduler answers questions.

Every message is one msgpack value in a frame, checked against its type and bounded when it is read::

    | length: u32, little-endian | msgpack, `length` bytes |

The length is looked at before any byte behind it is stored. Tags and field names of the structs go over the wire; where
one has another name here, `rename` says so.
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated

import msgspec

from kvhma.errors import HandshakeError
from kvhma.nixl import MAX_HANDSHAKE_BYTES
from kvhma.text import one_line
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey

PROTOCOL = 4
"""Version of these messages."""

MAX_QUESTION_BYTES = 1 << 20
MAX_ANSWER_BYTES = 1 << 20
MAX_HELLO_BYTES = MAX_HANDSHAKE_BYTES + 4096
"""Bytes of the message in a frame at most; an answer with a hello is larger than the others."""

MAX_CLAIMS = 480
"""Claims in one message: they fit one question whatever the names of their requests are."""

MAX_CONTENT_BYTES = 256 << 10
MAX_CONTENTS_BYTES = 512 << 10
"""Of a digest of what blocks hold, and of those in one answer; the others come with the next one."""

MAX_TEXT = 4096
"""Characters of a text."""

MAX_PROGRESS_BYTES = 32 << 20
"""Of an answer with the parameters of a request: a million tokens in blocks of one, wherever they lie."""

MAX_IDS_TEXT = 16 << 20
"""Characters of block ids of a group."""

MAX_PATIENCE = 60.0
"""Seconds that an answer may be waited for."""

NONCE_BYTES = 16
"""Of the random number of a question; what signs or proves the answer covers it, so that no answer can be repeated."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
RandomId = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Content = Annotated[bytes, msgspec.Meta(max_length=MAX_CONTENT_BYTES)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Port = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Ticket = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
WireClaim = tuple[Name, RandomId, RandomId, Digest]
"""A claim as a message carries it: request, generation, reader, digest of the parameters."""


class AskEngineInfo(msgspec.Struct, tag="roster", frozen=True):
    """Which engine are you?"""

    protocol: int


class AskHello(msgspec.Struct, tag="hello", frozen=True):
    """What is this worker's hello, see :mod:`kvhma.nixl.handshake`? The answer is signed for this nonce."""

    pp_rank: Rank
    tp_rank: Rank
    nonce: Nonce


class Renew(msgspec.Struct, tag="renew", frozen=True, omit_defaults=True):
    """We read, or are about to read, the blocks of these requests; do you hold them for us?

    With `reader_key`, see :mod:`kvhma.vllm.wire.proofs`, the answer is proved for this nonce.
    """

    claims: Annotated[list[WireClaim], msgspec.Meta(max_length=MAX_CLAIMS)]
    reader_key: Key | None = None
    nonce: Nonce = bytes(NONCE_BYTES)
    contents: bool = False
    """And what are the digests of what the blocks hold?"""


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


class Finish(msgspec.Struct, tag="finish", frozen=True, omit_defaults=True):
    """We have read the blocks of these requests; did you hold them for us? If so, we do not need them any more.

    It is `Renew` and `Release` in one, for a reader that is alone in its engine. An outcome for each claim; those that
    are not held are not released.
    """

    claims: Annotated[list[WireClaim], msgspec.Meta(max_length=MAX_CLAIMS)]
    outcomes: Annotated[list[Outcome], msgspec.Meta(max_length=MAX_CLAIMS)]
    reader_key: Key | None = None
    nonce: Nonce = bytes(NONCE_BYTES)


class Follow(msgspec.Struct, tag="follow", frozen=True):
    """How far is the request of this ticket? The answer comes when there is more to say than was seen.

    Attributes:
        ticket: that a proxy has drawn for both of us.
        seen: version of the last answer; 0 for none.
        epoch: of the last answer that named blocks.
        tokens: whose blocks it named, or earlier ones of this epoch.
        patience: seconds after which the answer comes in any case.
    """

    ticket: Ticket
    seen: Version
    epoch: Version
    tokens: Tokens
    patience: Annotated[float, msgspec.Meta(ge=0, le=MAX_PATIENCE)]


class Unfollow(msgspec.Struct, tag="unfollow", frozen=True):
    """We do not need the request of this ticket any more."""

    ticket: Ticket


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """We cannot read your caches, and this is why. Both logs should say it."""

    engine_id: Name
    text: Text


class EngineInfo(msgspec.Struct, tag="roster", frozen=True, omit_defaults=True, rename={"incarnation_id": "instance"}):
    """Which engine listens here, the pipeline and tensor ranks of its workers, and where it tells others to come."""

    protocol: int
    engine_id: Name
    incarnation_id: RandomId
    ranks: Annotated[list[tuple[Rank, Rank]], msgspec.Meta(max_length=4096)]
    advertised: tuple[Name, Port] | None = None
    """Host and port; older engines do not say."""


class RankHello(msgspec.Struct, tag="hello", frozen=True):
    """A worker's message of :mod:`kvhma.nixl.handshake`, and its engine's key for proofs.

    Both are signed by the key that the worker's name stands for.
    """

    data: Annotated[bytes, msgspec.Meta(max_length=MAX_HANDSHAKE_BYTES)]
    engine_key: Key
    signature: Signature


class LeaseState(enum.Enum):
    """What P says of a claim."""

    HELD = "held"
    """The blocks are held for this reader, and were until now since its first claim."""

    ENDED = "ended"
    """They are not held any more, or never were."""

    OTHER = "other"
    """The digest is not that of the parameters that were handed out for these blocks."""

    FULL = "full"
    """They are held, but for as many readers as they can be."""


class Leases(msgspec.Struct, tag="leases", frozen=True, omit_defaults=True):
    """The state of each claim, in the order in which they were asked for; proved if the question has a key."""

    states: Annotated[list[LeaseState], msgspec.Meta(max_length=MAX_CLAIMS)]
    proof: Digest | None = None
    contents: Annotated[list[Content | None], msgspec.Meta(max_length=MAX_CLAIMS)] | None = None
    """Of each claim its digest of :mod:`kvhma.digests`, if that was asked for; None where it is not there yet."""


class Settled(msgspec.Struct, frozen=True, array_like=True):
    """Blocks whose tokens are computed.

    Attributes:
        group: index of P's group.
        first: position of the first one in the request.
        ids: ranges of text, see ``ids_to_text`` of the compiled module.
    """

    group: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    first: Tokens
    ids: Annotated[str, msgspec.Meta(max_length=MAX_IDS_TEXT)]


class Progress(msgspec.Struct, tag="progress", frozen=True, omit_defaults=True):
    """How far the request of a ticket is. Only the version is set of a ticket that is not known yet, or not any more.

    Attributes:
        version: grows with each change; 0 while the ticket is not known.
        engine_id: which engine computes it.
        incarnation_id: likewise.
        ranks: tensor-parallel ranks and pipeline stages of that engine.
        groups: how many KV cache groups it has.
        total: tokens that will be handed over.
        prompt: digest of them, see :func:`kvhma.vllm.scheduler.prompt.prompt_digest`.
        epoch: of what is settled; another one means that what was read under earlier ones may have been overwritten.
        tokens: so many are settled.
        blocks: of the settled tokens that were not named under this epoch yet.
        params: JSON of the ``kv_transfer_params`` that P has handed out for D; empty before.
        ended: why nothing is handed over; empty as long as something may be.
    """

    version: Version
    engine_id: Annotated[str, msgspec.Meta(max_length=512)] = ""
    incarnation_id: RandomId = bytes(8)
    ranks: tuple[Rank, Rank] = (1, 1)
    groups: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    total: Tokens = 0
    prompt: Annotated[str, msgspec.Meta(max_length=64)] = ""
    epoch: Version = 0
    tokens: Tokens = 0
    blocks: Annotated[list[Settled], msgspec.Meta(max_length=256)] = []
    params: bytes = b""
    ended: Text = ""


class Done(msgspec.Struct, tag="done", frozen=True):
    """Understood."""


class Problem(msgspec.Struct, tag="problem", frozen=True):
    """The question was not understood, or has no answer here."""

    text: Text


Question = AskEngineInfo | AskHello | Renew | Finish | Release | Follow | Unfollow | Refused
Answer = EngineInfo | RankHello | Leases | Progress | Done | Problem

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size

_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Question | Answer) -> bytes:
    """Return a message as it is sent, with its length."""
    data = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(data)) + data


def frame_length(received: bytes | bytearray) -> int:
    """Return the bytes of the message that a frame announces in its first four bytes."""
    length: int = _HEADER.unpack_from(received)[0]
    return length


def read_question(data: bytes | memoryview) -> Question:
    """Read a question.

    Raises:
        HandshakeError: it is not one; the text is bounded, to be sent back.
    """
    try:
        return _questions.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"not a question of protocol {PROTOCOL}: {error}"[:500]) from error


def read_answer(data: bytes | memoryview) -> Answer:
    """Read an answer.

    Raises:
        HandshakeError: it is not one, or it is a problem, whose text is the peer's.
    """
    try:
        answer = _answers.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"the answer is not one of protocol {PROTOCOL}: {error}"[:500]) from error
    if isinstance(answer, Problem):
        raise HandshakeError(f"the peer says: {one_line(answer.text)}")
    return answer


def read_claim(claim: WireClaim) -> LeaseClaim:
    """Return the claim of a message."""
    request_id, generation, reader, digest = claim
    key = LeaseKey(request_id, int.from_bytes(generation, "big"))
    return LeaseClaim(key, int.from_bytes(reader, "big"), digest)


def write_claim(claim: LeaseClaim) -> WireClaim:
    """Return a claim as messages carry it."""
    generation, reader = claim.key.generation.to_bytes(8, "big"), claim.reader.to_bytes(8, "big")
    return claim.key.request_id, generation, reader, claim.digest
