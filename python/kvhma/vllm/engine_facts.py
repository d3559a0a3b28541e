# SPDX-License-Identifier: Apache-2.0
"""What is read from vLLM's configuration once and decides how requests are handed over."""

from __future__ import annotations

from dataclasses import dataclass

from kvhma.vllm.devices import is_loopback
from kvhma.vllm.slots import NO_SLOTS, SlotRanges
from kvhma.vllm.wire.params import Address


@dataclass(frozen=True)
class EngineFacts:
    """What the connector in the scheduler's process has to know of its engine.

    Attributes:
        engine_id: name of the engine.
        address: where other engines reach its listener, as its parameters say.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        has_state: whether any group keeps recurrent state, which is good for one position only.
        has_windows: whether any group frees blocks that windows or chunks have passed.
        backoff: tokens at the end of a prompt that D computes itself.
        recompute: whether a load that failed is recomputed instead of failing the request.
        host_staged: whether blocks go through host memory.
        transfer_groups: which groups of the engine take part.
        staging: slots of the pool in host memory; none if blocks do not go through it.
        drafted_state: whether decoding leaves a state where the drafts that were accepted ended: in another slot, some
            rows further, or in a ring. Only right after a prompt it is where another engine looks for it.
        max_model_len: tokens of a request at most.
        keeps_answers: whether answers are kept for the next turns of their conversations, and read.
        pcp_size: prefill context-parallel ranks.
        dcp_size: ranks that share the tokens of a cache.
        drafts: whether it decodes speculatively. A step's results may be back then before its drafts are: vLLM 0.32
            copies what was sampled first, and the layers of a draft model write their caches meanwhile.
        positions_depend_on_items: whether the positions of tokens depend on the multimodal items before them (M-RoPE).
        may_wait: whether a step with nothing to compute may wait without keeping other engines or stages from theirs.
        bind: where its listener binds; None for `address`.
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
    staging: SlotRanges = NO_SLOTS
    drafted_state: bool = False
    has_windows: bool = False
    max_model_len: int = 0
    keeps_answers: bool = False
    pcp_size: int = 1
    dcp_size: int = 1
    drafts: bool = False
    positions_depend_on_items: bool = False
    may_wait: bool = True
    bind: Address | None = None

    def is_own(self, address: Address) -> bool:
        """Return whether an address, looked at from this host, is plainly that of this engine's own listener."""
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

    @property
    def workers(self) -> int:
        """How many workers the engine has."""
        return self.tp_size * self.pp_size * self.pcp_size

    @property
    def worker_releases(self) -> bool:
        """Whether one worker alone loads a request, so that it tells P itself when the blocks are not needed."""
        return self.workers == 1

    @property
    def ranks_of_stage(self) -> int:
        """Workers of a stage that say hello, each with a rank of its own.

        vLLM numbers prefill context-parallel ranks only where they keep different tokens; else all of them keep the
        same, and one of each tensor-parallel rank is enough.
        """
        return self.tp_size * (self.pcp_size if self.dcp_size > 1 else 1)
