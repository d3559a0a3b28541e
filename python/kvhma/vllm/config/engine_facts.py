# SPDX-License-Identifier: Apache-2.0
"""Facts of vLLM's configuration that decide how requests are handed off. They are read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvhma.vllm.config.net_devices import is_loopback
from kvhma.vllm.config.rooms import WITHOUT_SETTING
from kvhma.vllm.wire.params import Address


@dataclass(frozen=True)
class EngineFacts:
    """What the connector in the scheduler's process has to know of its engine.

    Attributes:
        engine_id: name of the engine.
        address: where other engines reach its listener; its parameters advertise this address.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        has_state: whether any group has recurrent state, which is valid at one position only.
        has_windows: whether any group frees blocks that are before its window or chunk.
        backoff: tokens at the end of a prompt that D computes itself.
        recompute: whether a failed load falls back to local prefill instead of failing the request.
        host_staged: whether blocks go through host memory.
        transfer_groups: indices of the transferred groups.
        drafted_state: whether decoding moves the state with the accepted drafts: to another slot, to later rows, or in
            a ring. Another engine finds the state only directly after the prompt.
        max_model_len: most tokens of a request.
        options: that the engine has, if their folders are there.
        pcp_size: prefill context-parallel ranks.
        dcp_size: ranks that share the tokens of a cache.
        drafts: whether it decodes speculatively. Then a step's results may arrive before its drafts: vLLM 0.32 first
            copies the sampled tokens, while the layers of a draft model still write their caches.
        positions_depend_on_items: whether the positions of tokens depend on the multimodal items before them (M-RoPE).
        may_wait: whether a step with nothing to compute may wait without delaying other engines or stages.
        step_timeout: seconds after which vLLM takes a step for hung.
        bind: where its listener binds; None for `address`.
        extras: what options have read of the configuration, by option.
        applies_adapters: settings that decide to which modules vLLM applies an adapter, as JSON.
    """

    engine_id: str
    address: Address
    tp_size: int
    pp_size: int
    has_state: bool
    backoff: int
    recompute: bool
    host_staged: bool
    transfer_groups: tuple[int, ...]
    drafted_state: bool = False
    has_windows: bool = False
    max_model_len: int = 0
    options: tuple[str, ...] = WITHOUT_SETTING
    pcp_size: int = 1
    dcp_size: int = 1
    drafts: bool = False
    positions_depend_on_items: bool = False
    may_wait: bool = True
    step_timeout: float = 300.0
    bind: Address | None = None
    applies_adapters: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)

    def is_own(self, address: Address) -> bool:
        """Return whether an address leads, from this host, obviously to this engine's own listener."""
        bind = self.bind or self.address
        on_all = bind.is_wildcard and bind.port == address.port and is_loopback(address.host)
        return on_all or address in (self.address, bind)

    def loadable_tokens(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt D loads at most: it computes the last `backoff` itself."""
        return max(0, num_prompt_tokens - self.backoff)

    def is_ahead(self, num_tokens: int, num_prompt_tokens: int) -> bool:
        """Return whether what P has of `num_tokens` tokens is good for no fewer, and D can load only fewer.

        A state is that of one position, and the first block of a window may have been freed.
        """
        return num_tokens > self.loadable_tokens(num_prompt_tokens) and (self.has_state or self.has_windows)

    def why_ahead(self, num_tokens: int, num_prompt_tokens: int) -> str:
        """Return the text for a prompt of which P has computed too many tokens, see :meth:`is_ahead`."""
        return (
            f"P's states and windows are those of {num_tokens} tokens, but at most "
            f"{self.loadable_tokens(num_prompt_tokens)} of this prompt can be loaded. D computes the last "
            f"{self.backoff} itself, for a state, for a window or for num_speculative_tokens. With equal settings and "
            "without prompt_logprobs P leaves as many to D"
        )

    @cached_property
    def workers(self) -> int:
        """Number of workers of the engine."""
        return self.tp_size * self.pp_size * self.pcp_size

    @cached_property
    def ranks_of_stage(self) -> int:
        """Number of workers of a stage with different worker identities.

        vLLM numbers prefill context-parallel ranks only if they have different tokens. Otherwise all have the same
        tokens, and one of each tensor-parallel rank is enough.
        """
        return self.tp_size * (self.pcp_size if self.dcp_size > 1 else 1)
