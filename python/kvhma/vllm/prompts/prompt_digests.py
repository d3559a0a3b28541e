# SPDX-License-Identifier: Apache-2.0
"""Digests of the prompts of an engine; a thread makes those of long prompts while the scheduler continues."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

from kvhma.vllm.prompts.adapters import Adapters
from kvhma.vllm.prompts.prompt import prefix_digests, prompt_digest

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LONG_TOKENS = 16384
"""From this length on a digest takes longer than to start it in a thread: 8 ns for each token scattered in memory."""


class _Begun(NamedTuple):
    """A digest that the thread makes, and the number of its tokens."""

    num_tokens: int
    digest: Future[str]


class PromptDigests:
    """Makes the digests of :mod:`kvhma.vllm.prompts.prompt`, with the adapters that this engine has seen.

    Attributes:
        begun: digests that the thread makes or has made, by request, until they are taken.
    """

    def __init__(self, applies_adapters: str = "") -> None:
        """Start without a thread; `applies_adapters` is as in :class:`kvhma.vllm.config.engine_facts.EngineFacts`."""
        self.adapters = Adapters()
        self._applies_adapters = applies_adapters
        self.begun: dict[str, _Begun] = {}
        self._thread = ThreadPoolExecutor(1, "kvhma-digests")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin_digest(self, request: Request, num_tokens: int) -> bool:
        """Let the thread make a digest that takes long; return whether it does.

        That is so with many tokens, and with an adapter whose files were not read yet.
        """
        lora = request.lora_request
        if num_tokens < _LONG_TOKENS and (lora is None or self.adapters.is_seen(lora)):
            return False
        try:
            digest = self._thread.submit(self.make_digest, request, num_tokens)
        except RuntimeError:  # the process can start no more threads, or the engine stops
            return False
        self.begun[request.request_id] = _Begun(num_tokens, digest)
        return True

    def is_ready(self, request_id: str, wait_seconds: float = 0.0) -> bool:
        """Return whether the thread has finished a request's digest; wait for it at most `wait_seconds`."""
        begun = self.begun.get(request_id)
        if begun is None or begun.digest.done():
            return True
        return wait_seconds > 0 and bool(wait([begun.digest], wait_seconds).done)

    def take_digest(self, request: Request, num_tokens: int) -> str:
        """Return the digest of a request's first tokens; wait if the thread is making it.

        Raises:
            RequestError: as for :func:`kvhma.vllm.prompts.prompt.prompt_digest`.
        """
        begun = self.begun.pop(request.request_id, None)
        # A digest that the thread has not started would wait for those of other requests: make it here.
        if begun is not None and begun.num_tokens == num_tokens and not begun.digest.cancel():
            return begun.digest.result()
        return self.make_digest(request, num_tokens)

    def peek_digest(self, request: Request, num_tokens: int) -> str:
        """Return what :meth:`take_digest` does, and keep it for the next call."""
        digest: Future[str] = Future()
        digest.set_result(self.take_digest(request, num_tokens))
        self.begun[request.request_id] = _Begun(num_tokens, digest)
        return digest.result()

    def cancel_digest(self, request_id: str) -> None:
        """Cancel the digest of a request, if the thread has not started it, and drop it."""
        begun = self.begun.pop(request_id, None)
        if begun is not None:
            begun.digest.cancel()

    def make_digest(self, request: Request, num_tokens: int) -> str:
        """Return the digest of a request's first tokens, made at once."""
        adapter = None if request.lora_request is None else self._identify_adapter(request)
        return prompt_digest(request, num_tokens, adapter)

    def make_prefix_digests(self, request: Request, counts: Sequence[int]) -> list[str]:
        """Return the digests of some numbers of first tokens of a request, made at once."""
        return prefix_digests(request, counts, self._identify_adapter(request))

    def _identify_adapter(self, request: Request) -> str | None:
        lora = request.lora_request
        return None if lora is None else f"{self.adapters.identify(lora)} {self._applies_adapters}"
