# SPDX-License-Identifier: Apache-2.0
"""The messages that engines exchange beside caches. A listener in each engine's scheduler answers questions.

Every message is one msgpack value in a frame, checked against its type and bounded when it is read::

    | length: u32, little-endian | msgpack, `length` bytes |

The reader checks the length before it stores any byte after it. Tags and field names of the structs go over the wire.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvhma.errors import HandshakeError, RequestError
from kvhma.nixl import MAX_HANDSHAKE_BYTES
from kvhma.text import one_line
from kvhma.vllm.wire.params import LeaseClaim, LeaseKey

PROTOCOL = 5
"""Version of these messages."""

MAX_QUESTION_BYTES = 1 << 20
MAX_ANSWER_BYTES = 1 << 20
MAX_IDENTITY_BYTES = MAX_HANDSHAKE_BYTES + 4096
"""Most bytes of a message in a frame. An answer with a worker identity is larger than the others."""

MAX_CLAIMS = 480
"""Most claims in one message: they fit one question with names of any length."""

MAX_CONTENT_BYTES = 256 << 10
MAX_CONTENTS_BYTES = 512 << 10
"""Most bytes of a digest of blocks, and of all digests in one answer. The others come with the next answer."""

MAX_TEXT = 4096
"""Most characters of a text."""

MAX_PROGRESS_BYTES = 32 << 20
"""Of an answer with the parameters of a request: a million tokens in scattered blocks of one token."""

MAX_IDS_TEXT = 16 << 20
"""Most characters of block ids of a group."""

MAX_KEYS = 64
MAX_ROWS = 4096
MAX_COLUMNS = 8
"""Most keys of a map in parameters, rows of a list in it, and values of a row."""

MAX_TICKETS_ASKED = 16
"""Most tickets of one question."""

MAX_WAIT_SECONDS = 60.0
"""Longest time that a question may wait for its answer."""

NONCE_BYTES = 16
"""Of the random number of a question. Signatures and proofs cover it, so an answer cannot be replayed."""

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


class AskEngineInfo(msgspec.Struct, tag="engine info", frozen=True):
    """Which engine is this?"""

    protocol: int


class AskWorkerIdentity(msgspec.Struct, tag="worker identity", frozen=True):
    """What is the identity of this worker, see :mod:`kvhma.nixl.handshake`? The answer is signed for this nonce."""

    pp_rank: Rank
    tp_rank: Rank
    nonce: Nonce


class Renew(msgspec.Struct, tag="renew", frozen=True, omit_defaults=True):
    """We read, or are about to read, the blocks of these requests; do you hold them for us?

    With `reader_key` the answer has a proof for this nonce, see :mod:`kvhma.vllm.wire.proofs`.
    """

    claims: Annotated[list[WireClaim], msgspec.Meta(max_length=MAX_CLAIMS)]
    reader_key: Key | None = None
    nonce: Nonce = bytes(NONCE_BYTES)
    contents: bool = False
    """Whether the answer should have the digests of the blocks."""


class Outcome(enum.Enum):
    """Why a reader releases its claim."""

    READ = "read"
    """It has read the blocks, or its request was aborted. No other reader is known."""

    READ_SHARED = "read by sibling"
    """As `READ`, but other requests with the same parameters may still come, for example samples of one prompt."""

    UNREAD = "unread"
    """It could not read the blocks. A proxy may give the same parameters to another engine."""


class Release(msgspec.Struct, tag="release", frozen=True):
    """We do not need the blocks of these requests any more; `outcome` is the reason."""

    claims: Annotated[list[WireClaim], msgspec.Meta(max_length=MAX_CLAIMS)]
    outcome: Outcome


class Finish(msgspec.Struct, tag="finish", frozen=True, omit_defaults=True):
    """We have read the blocks of these requests; did you hold them for us? If so, we do not need them any more.

    `Renew` and `Release` in one, for an engine with one reader. It has an outcome for each claim. It does not release
    claims whose blocks are not held.
    """

    claims: Annotated[list[WireClaim], msgspec.Meta(max_length=MAX_CLAIMS)]
    outcomes: Annotated[list[Outcome], msgspec.Meta(max_length=MAX_CLAIMS)]
    reader_key: Key | None = None
    nonce: Nonce = bytes(NONCE_BYTES)


class AskedTicket(msgspec.Struct, frozen=True, array_like=True):
    """A ticket that a question asks about, and what the asking engine knows of it.

    Attributes:
        ticket: a proxy has drawn it for both engines.
        seen: version of the last answer; 0 before the first.
        epoch: of the last answer that named blocks.
        tokens: number of tokens whose blocks the answers of this epoch have named.
    """

    ticket: Ticket
    seen: Version
    epoch: Version
    tokens: Tokens


class Follow(msgspec.Struct, tag="follow", frozen=True):
    """How far are the requests of these tickets? The answer is about one that has a newer version than was `seen`.

    Attributes:
        tickets: one, or several that share a connection.
        max_wait_seconds: after this time the answer comes in any case.
    """

    tickets: Annotated[list[AskedTicket], msgspec.Meta(min_length=1, max_length=MAX_TICKETS_ASKED)]
    max_wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_SECONDS)]


class Unfollow(msgspec.Struct, tag="unfollow", frozen=True):
    """We do not need the request of this ticket any more."""

    ticket: Ticket


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """We cannot read your caches; `text` is the reason. Both engines log it."""

    engine_id: Name
    text: Text


class EngineInfo(msgspec.Struct, tag="engine info", frozen=True, omit_defaults=True):
    """Which engine listens here, the pipeline and tensor ranks of its workers, and the address it advertises."""

    protocol: int
    engine_id: Name
    incarnation_id: RandomId
    ranks: Annotated[list[tuple[Rank, Rank]], msgspec.Meta(max_length=4096)]
    advertised: tuple[Name, Port] | None = None
    """Host and port; None if it advertises none."""


class SignedWorkerIdentity(msgspec.Struct, tag="worker identity", frozen=True):
    """A worker's message of :mod:`kvhma.nixl.handshake`, and its engine's key for proofs.

    The signature covers both. Its key is the one that the worker's name is derived from.
    """

    data: Annotated[bytes, msgspec.Meta(max_length=MAX_HANDSHAKE_BYTES)]
    engine_key: Key
    signature: Signature


class LeaseState(enum.Enum):
    """What P says of a claim."""

    HELD = "held"
    """P holds the blocks for this reader, and has held them since its first claim."""

    ENDED = "ended"
    """P does not hold them any more, or never did."""

    OTHER = "other"
    """The digest does not match the parameters that P handed out for these blocks."""

    FULL = "full"
    """P holds them, but they already have the maximum number of readers."""


class Leases(msgspec.Struct, tag="leases", frozen=True, omit_defaults=True):
    """The state of each claim, in the order of the question; with a proof if the question has a key."""

    states: Annotated[list[LeaseState], msgspec.Meta(max_length=MAX_CLAIMS)]
    proof: Digest | None = None
    contents: Annotated[list[Content | None], msgspec.Meta(max_length=MAX_CLAIMS)] | None = None
    """The digest of each claim, see :mod:`kvhma.digests`, if the question asks for it; None where P has none yet."""
    incarnation_id: RandomId | None = None
    """Of P, if it does not hold all claims: they may be of an earlier incarnation."""


class Settled(msgspec.Struct, frozen=True, array_like=True):
    """Blocks whose tokens are computed.

    Attributes:
        group: index of P's group.
        first: position of the first block in the request.
        ids: ranges of text, see ``ids_to_text`` of the compiled module.
    """

    group: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    first: Tokens
    ids: Annotated[str, msgspec.Meta(max_length=MAX_IDS_TEXT)]


NO_PARAMS = msgspec.Raw()
"""Of a request that P has not handed off."""


class Progress(msgspec.Struct, tag="progress", frozen=True, omit_defaults=True):
    """How far the request of a ticket is. Of an unknown ticket only the version is set.

    Attributes:
        version: grows with each change; 0 while the ticket is not known.
        engine_id: the engine that computes it.
        incarnation_id: of that engine.
        ranks: tensor-parallel ranks and pipeline stages of that engine.
        groups: its number of KV cache groups.
        total: tokens of the whole hand-off.
        prompt: digest of these tokens, see :func:`kvhma.vllm.prompts.prompt.prompt_digest`.
        epoch: of the settled tokens. After a new epoch, blocks that were read earlier may have been overwritten.
        tokens: number of settled tokens.
        blocks: of settled tokens, as far as answers of this epoch have not named them.
        params: the ``kv_transfer_params`` that P has handed out for D, a map; empty until then. It is read apart, by
            :func:`read_params`, so that other parameters end one request and no connection, if nested a little.
        ended: why there will be no hand-off; empty while it is possible.
        ticket: which request. If none has a newer version, it is the first of the question, with the version that the
            question has seen.
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
    params: msgspec.Raw = NO_PARAMS
    ended: Text = ""
    ticket: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class Done(msgspec.Struct, tag="done", frozen=True):
    """Understood."""


class Problem(msgspec.Struct, tag="problem", frozen=True):
    """The listener does not understand the question, or cannot answer it."""

    text: Text


Question = AskEngineInfo | AskWorkerIdentity | Renew | Finish | Release | Follow | Unfollow | Refused
Answer = EngineInfo | SignedWorkerIdentity | Leases | Progress | Done | Problem

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size

_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
Scalar = str | int | float | bool | None
Rows = Annotated[list[Annotated[list[Scalar], msgspec.Meta(max_length=MAX_COLUMNS)]], msgspec.Meta(max_length=MAX_ROWS)]
Own = Annotated[dict[str, Scalar | Rows], msgspec.Meta(max_length=MAX_KEYS)]
Params = Annotated[dict[str, Scalar | Rows | Own], msgspec.Meta(max_length=MAX_KEYS)]
"""``kv_transfer_params`` as followers get them. All keys are texts: hashes of other keys could be made to collide."""

_params: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(Params)


def frame(message: Question | Answer) -> bytes:
    """Return a message with its length, as it is sent."""
    data = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(data)) + data


def frame_length(received: bytes | bytearray) -> int:
    """Return the length of the message, from the first four bytes of a frame."""
    length: int = _HEADER.unpack_from(received)[0]
    return length


def read_question(data: bytes | memoryview) -> Question:
    """Read a question.

    Raises:
        HandshakeError: it is not a question. The text is bounded, so it can be sent back.
    """
    try:
        return _questions.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"not a question of protocol {PROTOCOL}: {error}"[:500]) from error


def read_answer(data: bytes | memoryview) -> Answer:
    """Read an answer.

    Raises:
        HandshakeError: it is not an answer, or it is a `Problem`, whose text the error repeats.
    """
    try:
        answer = _answers.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"the answer is not one of protocol {PROTOCOL}: {error}"[:500]) from error
    if isinstance(answer, Problem):
        raise HandshakeError(f"the peer says: {one_line(answer.text)}")
    return answer


def write_params(params: Mapping[str, Any]) -> msgspec.Raw:
    """Return ``kv_transfer_params`` as messages carry them."""
    return msgspec.Raw(msgspec.msgpack.encode(params))


def read_params(data: msgspec.Raw) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of a message. The receiver of the message has bounded its length.

    Raises:
        RequestError: they are not `Params`.
    """
    try:
        return _params.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"P's parameters are not a map: {error}"[:500]) from error


def read_claim(claim: WireClaim) -> LeaseClaim:
    """Return the claim of a message."""
    request_id, generation, reader, digest = claim
    key = LeaseKey(request_id, int.from_bytes(generation, "big"))
    return LeaseClaim(key, int.from_bytes(reader, "big"), digest)


def write_claim(claim: LeaseClaim) -> WireClaim:
    """Return a claim as messages carry it."""
    generation, reader = claim.key.generation.to_bytes(8, "big"), claim.reader.to_bytes(8, "big")
    return claim.key.request_id, generation, reader, claim.digest
