# SPDX-License-Identifier: Apache-2.0
"""The messages that engines exchange beside caches. A listener in each engine's scheduler answers questions.

Every message is one msgpack value in a frame, checked against its type and bounded when it is read::

    | length: u32, little-endian | msgpack, `length` bytes |

The reader checks the length before it stores any byte after it. Tags and field names of the structs go over the wire.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union

import msgspec

from kvhma.errors import HandshakeError
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
WireClaim = tuple[Name, RandomId, RandomId, Digest]
"""A claim as a message carries it: request, generation, reader, digest of the parameters."""


class Question(msgspec.Struct, frozen=True):
    """A question, and what its answer may cost the engine that asks.

    Attributes:
        max_answer_bytes: most bytes of the answer.
        is_long: whether the listener decides when it answers.
    """

    max_answer_bytes: ClassVar[int] = MAX_ANSWER_BYTES
    is_long: ClassVar[bool] = False

    def answer_seconds(self, seconds: float) -> float:
        """Return how long the answer may take, if one that the listener knows at once may take some `seconds`."""
        return seconds


class Answer(msgspec.Struct, frozen=True):
    """An answer."""


AnswerT = TypeVar("AnswerT", bound=Answer)


class AskEngineInfo(Question, tag="engine info", frozen=True):
    """Which engine is this?"""

    protocol: int


class AskWorkerIdentity(Question, tag="worker identity", frozen=True):
    """What is the identity of this worker, see :mod:`kvhma.nixl.handshake`? The answer is signed for this nonce."""

    max_answer_bytes: ClassVar[int] = MAX_IDENTITY_BYTES

    pp_rank: Rank
    tp_rank: Rank
    nonce: Nonce


class Renew(Question, tag="renew", frozen=True, omit_defaults=True):
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


class Release(Question, tag="release", frozen=True):
    """We do not need the blocks of these requests any more; `outcome` is the reason."""

    claims: Annotated[list[WireClaim], msgspec.Meta(max_length=MAX_CLAIMS)]
    outcome: Outcome


class Finish(Question, tag="finish", frozen=True, omit_defaults=True):
    """We have read the blocks of these requests; did you hold them for us? If so, we do not need them any more.

    `Renew` and `Release` in one, for an engine with one reader. It has an outcome for each claim. It does not release
    claims whose blocks are not held.
    """

    claims: Annotated[list[WireClaim], msgspec.Meta(max_length=MAX_CLAIMS)]
    outcomes: Annotated[list[Outcome], msgspec.Meta(max_length=MAX_CLAIMS)]
    reader_key: Key | None = None
    nonce: Nonce = bytes(NONCE_BYTES)


class Refused(Question, tag="refused", frozen=True):
    """We cannot read your caches; `text` is the reason. Both engines log it."""

    engine_id: Name
    text: Text


class EngineInfo(Answer, tag="engine info", frozen=True, omit_defaults=True):
    """Which engine listens here, the pipeline and tensor ranks of its workers, and the address it advertises."""

    protocol: int
    engine_id: Name
    incarnation_id: RandomId
    ranks: Annotated[list[tuple[Rank, Rank]], msgspec.Meta(max_length=4096)]
    advertised: tuple[Name, Port] | None = None
    """Host and port; None if it advertises none."""


class SignedWorkerIdentity(Answer, tag="worker identity", frozen=True):
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


class Leases(Answer, tag="leases", frozen=True, omit_defaults=True):
    """The state of each claim, in the order of the question; with a proof if the question has a key."""

    states: Annotated[list[LeaseState], msgspec.Meta(max_length=MAX_CLAIMS)]
    proof: Digest | None = None
    contents: Annotated[list[Content | None], msgspec.Meta(max_length=MAX_CLAIMS)] | None = None
    """The digest of each claim, see :mod:`kvhma.digests`, if the question asks for it; None where P has none yet."""
    incarnation_id: RandomId | None = None
    """Of P, if it does not hold all claims: they may be of an earlier incarnation."""


class Done(Answer, tag="done", frozen=True):
    """Understood."""


class Problem(Answer, tag="problem", frozen=True):
    """The listener does not understand the question, or cannot answer it."""

    text: Text


class Later(NamedTuple):
    """There is no answer yet.

    Attributes:
        topics: what the answer waits for: it is asked for again when one of them has progressed.
        seconds: after this time it is asked for again in any case.
        ask_again: takes how many seconds ago the question came.
    """

    topics: tuple[bytes, ...]
    seconds: float
    ask_again: Callable[[float], Answer | Later]


Handler = Callable[[Any, float], "Answer | Later"]
"""Answers questions of a kind: takes a question, and how many seconds ago it came; for the listener's thread."""

QUESTIONS = (AskEngineInfo, AskWorkerIdentity, Renew, Finish, Release, Refused)
"""The questions that every listener answers. An option may have more."""

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size


def frame(message: Question | Answer) -> bytes:
    """Return a message with its length, as it is sent."""
    data = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(data)) + data


def frame_length(received: bytes | bytearray) -> int:
    """Return the length of the message, from the first four bytes of a frame."""
    length: int = _HEADER.unpack_from(received)[0]
    return length


@functools.cache
def _decoder(kinds: tuple[type[Question | Answer], ...]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Union[kinds])  # noqa: UP007 - known only now


def read_question(data: bytes | memoryview, kinds: tuple[type[Question], ...]) -> Question:
    """Read a question of one of some kinds.

    Raises:
        HandshakeError: it is not. The text is bounded, so it can be sent back.
    """
    try:
        question: Question = _decoder(kinds).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"not a question of protocol {PROTOCOL}: {error}"[:500]) from error
    return question


def read_answer(data: bytes | memoryview, kind: type[AnswerT]) -> AnswerT:
    """Read an answer of a kind.

    Raises:
        HandshakeError: it is not, or it is a `Problem`, whose text the error repeats.
    """
    try:
        answer: AnswerT | Problem = _decoder((kind, Problem)).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(
            f"the answer is not one of protocol {PROTOCOL}, expected {kind.__name__}: {error}"[:500]
        ) from error
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
