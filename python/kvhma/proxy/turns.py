# SPDX-License-Identifier: Apache-2.0
"""The last turns of chats, which P reads from the decode engines that answered them."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from typing import Any

import msgspec


class Turns:
    """Parameters that decode engines returned with the answers of chats, for the prefill of the next turns.

    A chat is identified by its messages and the client's credentials. Chats of one client with equal messages are one
    entry; the prefill engine compares the prompts.
    """

    def __init__(self, seconds: float = 480, limit: int = 10_000) -> None:
        """Hold up to `limit` conversations, each for some seconds."""
        self._seconds, self._limit = seconds, limit
        self._kept: OrderedDict[bytes, tuple[float, dict[str, Any]]] = OrderedDict()

    @staticmethod
    def _name(body: dict[str, Any], headers: dict[str, str], messages: list[Any]) -> bytes:
        named = [headers.get("Authorization"), body.get("model"), messages]
        return hashlib.sha256(msgspec.json.encode(named, order="deterministic")).digest()

    def keep(self, body: dict[str, Any], headers: dict[str, str], params: Any) -> None:
        """Store the parameters from the answer to a body."""
        if isinstance(body.get("messages"), list) and isinstance(params, dict) and params.get("do_remote_decode"):
            name = self._name(body, headers, body["messages"])
            self._kept[name] = time.monotonic(), params
            self._kept.move_to_end(name)
            oldest = next(iter(self._kept.values()))[0]
            if len(self._kept) > self._limit or time.monotonic() - oldest > self._seconds:
                self._kept.popitem(last=False)

    def take(self, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
        """Return the parameters of the last answer in a body's messages, and remove them: they can be used once."""
        messages = body.get("messages")
        if not isinstance(messages, list):
            return None
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        if "assistant" not in roles:
            return None
        last = len(roles) - 1 - roles[::-1].index("assistant")
        since, params = self._kept.pop(self._name(body, headers, messages[:last]), (0.0, None))
        return params if time.monotonic() - since < self._seconds else None
