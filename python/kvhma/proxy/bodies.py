# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests and answers, of which only the keys are read.

A body may have tens of millions of numbers. To read them takes seconds, in which no other request continues. So values
stay bytes, and are passed on as the client wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvhma.proxy.engines import ProxyError

Form = dict[str, Any]
"""An object of JSON, whose values may be `msgspec.Raw`: bytes that are passed on unread."""

MAX_KEYS = 1000
MAX_PROMPTS = 4096
MAX_CHAT_BYTES = 4 << 20
"""Messages of longer chats are not read, because other requests wait meanwhile: such a chat has no next turn, and D
renders it again."""


def form_of(data: bytes | msgspec.Raw) -> Form:
    """Read the keys of an object."""
    return dict(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))


def event_of(form: Form) -> bytes:
    """Return an object as an event of a stream."""
    return b"data: " + msgspec.json.encode(form) + b"\n\n"


def wrong(message: str, status: int = 400) -> ProxyError:
    """Return the error for a request that no engine gets."""
    return ProxyError(status, message, "NotFoundError" if status == 404 else "BadRequestError")


def is_computed_by_decode(body: Mapping[str, Any]) -> bool:
    """Return whether a decode engine computes the prompt itself, even if a prefill engine holds its cache.

    vLLM computes all of a prompt whose log-probabilities are requested, as for every echoed chat. It has no hand-off
    for beam searches.
    """
    echoed = body.get("echo") and ("messages" in body or body.get("logprobs") is not None)
    return bool(echoed or body.get("prompt_logprobs") is not None or body.get("use_beam_search"))


class _Text(msgspec.Struct):
    type: Literal["text"]


class _Message(msgspec.Struct):
    content: str | list[_Text] | None = None


def is_text_chat(body: Form) -> bool:
    """Return whether a body is a chat of text only. Token ids can replace its messages, but no picture in them.

    vLLM 0.31 would not look at the messages again; later versions ignore the ids if the messages have more than text.
    """
    messages = body.get("messages", b"")
    if not 0 < len(memoryview(messages)) <= MAX_CHAT_BYTES:
        return False
    try:
        return bool(msgspec.json.decode(messages, type=list[_Message]))
    except (ValueError, RecursionError):
        return False


def plain(body: Form) -> dict[str, Any]:
    """Return the keys of a body, with the values of those that are short; others are no option of a request."""
    try:
        return {key: msgspec.json.decode(value) if len(memoryview(value)) <= 32 else ... for key, value in body.items()}
    except ValueError as error:  # numbers that are too large, and text that is not UTF-8: unread values may have them
        raise wrong(f"the body has a wrong value: {error}") from error


def prompts_in(body: Form) -> list[msgspec.Raw]:
    """Return the prompts of a body that has several; a list of numbers is one prompt."""
    if "prompt" not in body or not re.match(rb'\s*\[\s*["\[]', bytes(memoryview(body["prompt"])[:64])):
        return []
    prompts = msgspec.json.decode(body["prompt"], type=list[msgspec.Raw])
    if len(prompts) > MAX_PROMPTS:
        raise wrong(f"a body has at most {MAX_PROMPTS} prompts")
    return prompts if len(prompts) > 1 else []


def object_in(data: bytes) -> Form:
    """Return a body without parameters for connectors, which name engines: only the proxy sets them."""
    try:
        body = form_of(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise wrong(f"the body is no JSON object: {error}") from error
    if len(body) > MAX_KEYS:
        raise wrong(f"a body has at most {MAX_KEYS} keys")
    body.pop("kv_transfer_params", None)
    return body


def chat_in(body: Form) -> dict[str, Any]:
    """Return what identifies a chat; empty if it is too long."""
    chat = {key: body[key] for key in ("model", "messages") if key in body}
    if sum(len(memoryview(value)) for value in chat.values()) > MAX_CHAT_BYTES:
        return {}
    try:
        return {key: msgspec.json.decode(value) for key, value in chat.items()}
    except (ValueError, RecursionError) as error:
        raise wrong(f"the messages cannot be read: {error}") from error


def renumbered(answer: bytes, first: int) -> Form:
    """Return an answer, or an event of it, whose choices are counted from `first` on."""
    form = form_of(answer)
    if "choices" in form:
        form["choices"] = msgspec.json.decode(form["choices"], type=list[dict[str, msgspec.Raw]])
        for choice in form["choices"]:
            choice["index"] = msgspec.json.decode(choice.get("index", b"0"), type=int) + first
    return form


def joined(forms: Sequence[Form]) -> Form:
    """Return one answer with the choices of all, and the sum of their usage."""
    choices = [choice for form in forms for choice in form.get("choices", ())]
    usages = [msgspec.json.decode(msgspec.json.encode(form.get("usage"))) for form in forms]
    return forms[0] | {"choices": choices, "usage": total(usages)}


def total(values: Sequence[Any]) -> Any:
    """Add numbers, and numbers in dictionaries by their keys."""
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, dict) for value in known):
        return {key: total([value.get(key) for value in known]) for key in known[0]}
    return sum(value for value in known if isinstance(value, int)) if known else None
