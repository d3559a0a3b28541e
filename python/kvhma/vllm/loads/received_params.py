# SPDX-License-Identifier: Apache-2.0
"""What D takes of ``kv_transfer_params``: checked, of an engine that D may read from, and within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvhma.errors import RequestError
from kvhma.vllm.config.rooms import ASKED_BY_KEY
from kvhma.vllm.holds.scheduler_context import SchedulerContext
from kvhma.vllm.wire.params import Address, PrefillParams, leads_back

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ReceivedParams:
    """Reads the parameters of requests. All methods raise a `KvhmaError` that says what is refused."""

    def __init__(self, context: SchedulerContext) -> None:
        """Read for this engine."""
        self._context = context
        # What decides it stays as it is while the process lives. Refusals are not cached.
        self.check_source = lru_cache(1024)(self._check_source)

    def read(self, request: Request, params: Mapping[str, Any]) -> PrefillParams:
        """Return the parameters of a prompt that P has computed, without items: an option uses these."""
        check_one_way(params)
        for key, option in ASKED_BY_KEY.items():
            if params.get(key) is not None:
                raise RequestError(
                    f"kv_transfer_params: {key} is set, but kvhma was installed without option {option!r}"
                )
        remote = PrefillParams.from_params(params, self._context.secrets, request.num_prompt_tokens)
        self.check_source(remote.address, remote.engine_id)
        for on_params_read in self._context.rooms.on_params_read:
            on_params_read(request, remote)
        return remote._replace(items=()) if remote.items else remote

    def read_of_rejected(self, params: Mapping[str, Any]) -> PrefillParams:
        """Return the parameters of a request that vLLM has rejected, whose prompt is not known."""
        remote = PrefillParams.from_params(params, self._context.secrets, None)
        self.check_source(remote.address)
        return remote

    def read_of_known(self, params: Mapping[str, Any], num_prompt_tokens: int) -> PrefillParams:
        """Return the parameters that P itself has sent, after :meth:`check_source`, without items."""
        return PrefillParams.from_params(params, self._context.secrets, num_prompt_tokens)._replace(items=())

    def _check_source(self, address: Address, engine_id: str = "") -> None:
        """Refuse an engine that D may not, or cannot, read from; its engine_id may be unknown yet."""
        engine = self._context.engine
        if engine_id not in ("", engine.engine_id) and engine.is_own(address):
            self._context.stats.count("refused_sources", label="itself")
            raise RequestError(leads_back(address, engine_id))
        if (refusal := self._context.sources.refusal(address)) is not None:
            self._context.stats.count("refused_sources", label="not_allowed")
            raise RequestError(f"remote_host and remote_port: {refusal}")
        if self._context.geometry is None or not self._context.geometry.groups:
            raise RequestError("this engine has registered no caches")


def check_one_way(params: Mapping[str, Any]) -> None:
    """Refuse a request that is to be loaded and handed off.

    Raises:
        RequestError: both are set.
    """
    if params.get("do_remote_decode"):
        raise RequestError("kv_transfer_params: do_remote_prefill and do_remote_decode are both set")
