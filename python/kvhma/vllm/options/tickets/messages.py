# SPDX-License-Identifier: Apache-2.0
"""The messages about tickets: an engine follows a request that another engine computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from kvhma.errors import RequestError
from kvhma.vllm.wire.messages import Answer, Question, RandomId, Rank, Text

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

_FOLLOW_SECONDS = 2.0
"""Least time for an answer to `Follow`, after the time that the question lets it wait: a listener may be a second late.
"""

Ticket = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


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


class Follow(Question, tag="follow", frozen=True):
    """How far are the requests of these tickets? The answer is about one that has a newer version than was `seen`.

    Attributes:
        tickets: one, or several that share a connection.
        max_wait_seconds: after this time the answer comes in any case.
    """

    max_answer_bytes: ClassVar[int] = MAX_PROGRESS_BYTES
    is_long: ClassVar[bool] = True

    tickets: Annotated[list[AskedTicket], msgspec.Meta(min_length=1, max_length=MAX_TICKETS_ASKED)]
    max_wait_seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_SECONDS)]

    def answer_seconds(self, seconds: float) -> float:
        """Return how long the answer may take: the wait is part of it."""
        return max(seconds, _FOLLOW_SECONDS) + self.max_wait_seconds


class Unfollow(Question, tag="unfollow", frozen=True):
    """We do not need the request of this ticket any more."""

    ticket: Ticket


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


class Progress(Answer, tag="progress", frozen=True, omit_defaults=True):
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
    blocks: Annotated[list[Settled], msgspec.Meta(max_length=256)] = msgspec.field(default_factory=list)
    params: msgspec.Raw = NO_PARAMS
    ended: Text = ""
    ticket: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


Scalar = str | int | float | bool | None
Rows = Annotated[list[Annotated[list[Scalar], msgspec.Meta(max_length=MAX_COLUMNS)]], msgspec.Meta(max_length=MAX_ROWS)]
Own = Annotated[dict[str, Scalar | Rows], msgspec.Meta(max_length=MAX_KEYS)]
Params = Annotated[dict[str, Scalar | Rows | Own], msgspec.Meta(max_length=MAX_KEYS)]
"""``kv_transfer_params`` as followers get them. All keys are texts: hashes of other keys could be made to collide."""

_params: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(Params)


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
