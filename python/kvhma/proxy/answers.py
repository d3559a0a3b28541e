# SPDX-License-Identifier: Apache-2.0
"""Answers of engines, as clients get them: without parameters of engines, and with the cached tokens that P had."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import aiohttp
import msgspec

from kvhma.proxy.bodies import Form, form_of
from kvhma.proxy.engines import Call, Engines, ProxyError, read_all

MAX_ANSWER_BYTES = 256 << 20
_MAX_EVENT_BYTES = 64 << 20
_CHANGED = (b'"cached_tokens"', b'"kv_transfer_params"')
"""What changes an event. In the text of an answer the quotation marks are escaped."""


class Answer:
    """An engine's answer, of which the head and the first bytes are read.

    Attributes:
        handed: whether D got parameters of P for this prompt; None for what is no prompt to complete.
        params: what D returned for the next turn, once the answer was read whole.
    """

    def __init__(self, engines: Engines, call: Call, role: str, engine: str, response: aiohttp.ClientResponse) -> None:
        """Store where the answer comes from."""
        self._engines, self._call, self._role, self._engine = engines, call, role, engine
        self._response = response
        self._first = b""
        self._begun = time.monotonic()
        self._outcome = "hung_up"
        self._usage: Form = {}
        self._prefill: Mapping[str, Any] | asyncio.Task[Form] | None = None
        self._patience = 1.0
        self.handed: bool | None = None
        self.params: Any = None

    async def begin(self) -> Answer:
        """Read the first bytes: until then another engine may answer in its place."""
        try:
            with self._engines.watched(self._role, self._engine, "lost"):
                self._first = await self._response.content.readany()
        except BaseException:
            self._response.close()
            raise
        return self

    def continues(self, prefill: Mapping[str, Any] | asyncio.Task[Form], begun: float) -> Answer:
        """Store what P returns or will return, and since when D could have read it."""
        self._prefill, self._begun = prefill, begun
        return self

    @property
    def head(self) -> tuple[int, str]:
        """Return the status and the content type."""
        return self._response.status, self._response.headers.get("Content-Type", "application/json")

    @property
    def is_whole(self) -> bool:
        """Return whether it is one JSON text, not a stream."""
        return self._response.content_type == "application/json"

    async def whole(self) -> bytes:
        """Return the rest of the answer."""
        with self._reading():
            text = self._first + await read_all(self._response, MAX_ANSWER_BYTES)
        self._outcome = "ok"
        try:
            form = form_of(text)
        except msgspec.DecodeError:
            return text
        if "kv_transfer_params" in form:
            self.params = msgspec.json.decode(form["kv_transfer_params"])
        return msgspec.json.encode(await self._changed(form))

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield whole lines as they come, and the rest at the end."""
        self._engines.metrics.first_token.labels(self._engine).observe(time.monotonic() - self._begun)
        held, chunk = bytearray(), self._first
        while chunk:
            end = chunk.rfind(b"\n") + 1
            if end:
                yield await self._changed_lines(bytes(held) + chunk[:end])
                held.clear()
            held += chunk[end:]
            with self._reading():
                chunk = await self._response.content.readany()
                if len(held) > _MAX_EVENT_BYTES:
                    raise aiohttp.ClientPayloadError("an event is too long")
        if held:
            yield await self._changed_lines(bytes(held))
        self._outcome = "ok"

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except aiohttp.ClientError as error:
            self._outcome = "lost"
            raise ProxyError(502, f"the {self._role} engine broke off its answer", f"{self._role}_lost") from error

    async def _changed_lines(self, lines: bytes) -> bytes:
        if not any(key in lines for key in _CHANGED):
            return lines
        return b"".join([await self._changed_line(line) for line in lines.splitlines(keepends=True)])

    async def _changed_line(self, line: bytes) -> bytes:
        if line.startswith(b"data: {") and any(key in line for key in _CHANGED):
            with contextlib.suppress(msgspec.DecodeError):
                return b"data: " + msgspec.json.encode(await self._changed(form_of(line[6:]))) + b"\n"
        return line

    async def _changed(self, form: Form) -> Form:
        form.pop("kv_transfer_params", None)
        if "response" in form:  # an event of /v1/responses
            with contextlib.suppress(msgspec.DecodeError):
                form["response"] = await self._changed(form_of(form["response"]))
        usage = msgspec.json.decode(form.get("usage", b"null"))
        if isinstance(usage, dict):
            self._usage, details = usage, usage.get("prompt_tokens_details")
            if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
                cached = await self._cached_at_prefill()
                more = {} if cached is None else {"cached_tokens": cached}
                form["usage"] = usage | {"prompt_tokens_details": details | more}
        return form

    async def _cached_at_prefill(self) -> int | None:
        """Return how many tokens of the prompt P had cached; None if P has not answered, or computed nothing.

        For D all tokens that it loaded are cached. A client of a single engine would see and pay P's number.
        """
        if isinstance(self._prefill, asyncio.Task):
            # P ends before D, but its answer may come later; a P that D did not need does not answer.
            await asyncio.wait({self._prefill}, timeout=self._patience)
            if not self._prefill.done():
                self._patience = 0.0  # each event of a stream may have usage
                return None
            failed = self._prefill.cancelled() or self._prefill.exception()
            self._prefill = None if failed else self._prefill.result()
        cached = (self._prefill or {}).get("remote_prefill_cached_tokens")
        return cached if isinstance(cached, int) and cached >= 0 else None

    async def aclose(self) -> None:
        """End the requests that still run, so that a client that disconnects ends them too; count the outcome."""
        self._response.close()
        if isinstance(self._prefill, asyncio.Task):
            self._prefill.cancel()
            await asyncio.gather(self._prefill, return_exceptions=True)
        self._engines.count(self._role, self._engine, self._outcome)
        if self._outcome == "ok" and self.handed is not None:
            self._engines.metrics.count_prompt(self._engine, self._usage if self.handed else None, self._call.id)
