# SPDX-License-Identifier: Apache-2.0
"""Answers of decode engines, as clients get them: without parameters, and with the cached tokens that P had."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec

from kvhma.proxy.bodies import Form, event_of, form_of
from kvhma.proxy.engines import Call, Engines, Usage, logger, read_all

MAX_ANSWER_BYTES = 256 << 20
MAX_EVENT_BYTES = 64 << 20
_CHANGED = (b'"cached_tokens"', b'"kv_transfer_params"')
"""What changes an event. In the text of an answer the quotation marks are escaped."""
_RETURNED = ("Content-Type", "endpoint-load-metrics")
_EVENT_END = re.compile(rb"\n\r?\n|\r\r")
"""An empty line. Lines of a stream may end in LF, CR LF or CR."""


class Answer:
    """A decode engine's answer, of which the first event is read, or all if it is no stream.

    Attributes:
        status: of the answer.
        headers: what clients see of its headers.
        params: what D returned for the next turn, once a whole answer was changed.
    """

    def __init__(self, engines: Engines, call: Call, engine: str, answer: aiohttp.ClientResponse) -> None:
        """Store where the answer comes from."""
        self._engines, self._call, self._engine, self._answer = engines, call, engine, answer
        self._first, self._read = b"", bytearray()
        self._has_usage = False
        self.status = answer.status
        self.headers = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
        self.headers.setdefault("Content-Type", "application/json")
        self.params: Any = None

    @property
    def is_stream(self) -> bool:
        """Return whether it comes in events."""
        return self._answer.content_type == "text/event-stream"

    async def begin(self) -> Answer:
        """Read what the client gets first: until then an engine may be asked once more.

        An answer that is no stream is read as a whole. vLLM sends it in one piece, with what has to be changed at its
        end: `usage` and `kv_transfer_params` come after the choices. If it breaks off, another engine can answer.
        """
        try:
            with self._engines.watched("decode", self._engine):
                self._first = await (self._event() if self.is_stream else read_all(self._answer, MAX_ANSWER_BYTES))
        except BaseException:
            self._answer.close()
            raise
        return self

    async def _event(self) -> bytes:
        """Return the next event, or what the stream ends with. An event may be long: only new bytes are searched."""
        searched = 0
        while True:
            end = _EVENT_END.search(self._read, searched)
            length = end.end() if end else len(self._read)
            if length > MAX_EVENT_BYTES:
                raise aiohttp.ClientPayloadError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
            chunk = b"" if end else await self._answer.content.readany()
            if not chunk:
                event = bytes(self._read[:length])
                del self._read[:length]
                return event
            self._read += chunk
            searched = max(0, length - 2)

    async def whole(self) -> bytes:
        """Return an answer that is no stream."""
        try:
            form = form_of(self._first)
        except msgspec.DecodeError:
            return self._first
        if "kv_transfer_params" in form:
            self.params = msgspec.json.decode(form["kv_transfer_params"])
        return msgspec.json.encode(await self._changed(form))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream as they come."""
        event = self._first
        while event:
            name, _, text = event.partition(b"data: {")
            if any(key in text for key in _CHANGED) or (
                self._call.traced is not None and b'"completion_tokens"' in text
            ):
                with contextlib.suppress(msgspec.DecodeError):
                    event = name + event_of(await self._changed(form_of(b"{" + text)))
            yield event
            with self._engines.watched("decode", self._engine, "lost"):
                event = await self._event()

    async def _changed(self, form: Form) -> Form:
        form.pop("kv_transfer_params", None)
        if "response" in form:  # an event of /v1/responses
            with contextlib.suppress(msgspec.DecodeError):
                form["response"] = await self._changed(form_of(form["response"]))
        usage = msgspec.json.decode(form.get("usage", b"null"))
        if self._call.traced is not None:
            with contextlib.suppress(msgspec.ValidationError):
                self._call.traced.usage = msgspec.convert(usage, Usage)
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            cached = await self._cached_at_prefill(details["cached_tokens"], usage.get("prompt_tokens"))
            form["usage"] = usage | {"prompt_tokens_details": details | {"cached_tokens": cached}}
        return form

    async def _cached_at_prefill(self, at_decode: int, prompt: Any) -> int:
        """Return how many tokens of the prompt P had cached; D's number if P has not answered, or computed nothing.

        For D all tokens that it loaded are cached. A client of a single engine would see and pay P's number.
        """
        prefill = self._call.prefill
        if prefill is None:
            return at_decode
        first, self._has_usage = not self._has_usage, True  # each event of a stream may have usage
        if first and at_decode == 0 and isinstance(prompt, int) and prompt >= 3:  # fewer are not transferred
            logger.warning(
                "request %r: no cache was transferred: decode engine %s computed all %d tokens of the prompt; see "
                "its log, and its metrics vllm:kvhma_failed_loads and vllm:kvhma_local_prefills",
                self._call.id,
                self._engine,
                prompt,
            )
        # P ends before D, but its answer may come later; a P that D did not need does not answer.
        await asyncio.wait({prefill}, timeout=1 if first else 0)
        if not prefill.done() or prefill.cancelled() or prefill.exception():
            return at_decode
        cached = prefill.result().get("remote_prefill_cached_tokens")
        return cached if isinstance(cached, int) and cached >= 0 else at_decode

    async def aclose(self) -> None:
        """End the requests that still run, so that a client that disconnects ends them too."""
        self._answer.close()
        if self._call.traced is not None:
            self._call.traced.end()
        if self._call.prefill is not None:
            self._call.prefill.cancel()
            await asyncio.gather(self._call.prefill, return_exceptions=True)
