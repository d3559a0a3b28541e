# SPDX-License-Identifier: Apache-2.0
"""Methods of a worker for tests, through vLLM's `worker_extension_cls` and collective calls."""

from __future__ import annotations

import os
import threading
from typing import Any

from support.engines.engine_core import follow, install, plain

# VLLM spawns the engine core if its front end has opened a device, and then imports only this module into it.
install()


class Extension:
    """Methods added to vLLM's worker. Results are plain data."""

    model_runner: Any

    def e2e_groups(self) -> list[dict[str, Any]]:
        """KV cache groups: kind, layers, block size, page size in bytes."""
        return [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "layers": list(group.layer_names),
                "block_size": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
            }
            for group in self.model_runner.kv_cache_config.kv_cache_groups
        ]

    def e2e_new_weights(self) -> None:
        """Change weights in place, as a trainer does, and alike in each engine: those that CPU kernels do not copy."""
        for name, parameter in self.model_runner.get_model().named_parameters():
            if name.endswith("norm.weight"):
                parameter.data[::2] *= 1.5

    def e2e_right_drafts(self) -> None:
        """Make Mamba2 decode with drafts as vLLM's GPU kernels do.

        The CPU kernels of 0.32 read the convolution's rows for drafts as rows of the state. They also store the state
        after the last draft in the slot of the state before the drafts. So an engine with speculation answers wrongly
        even without kvhma.
        """
        from vllm.model_executor.layers.mamba import mamba_mixer2

        from support.engines import mamba_kernels

        mamba_mixer2.causal_conv1d_update = mamba_kernels.causal_conv1d_update
        mamba_mixer2.selective_state_update = mamba_kernels.selective_state_update

    def e2e_mamba_1(self) -> None:
        """Make Mamba1 compute: on CPUs vLLM has no prefill kernel for it, and a decode kernel for Mamba2 only."""
        from vllm.model_executor.layers.mamba import mamba_mixer

        from support.engines import mamba_kernels

        mamba_mixer.selective_scan_fn = mamba_kernels.selective_scan
        mamba_mixer.selective_state_update = mamba_kernels.mamba_1_step

    def e2e_mamba_2(self) -> None:
        """Make Mamba2 prefill with a prefix cache: vLLM's CPU kernel returns too few of the states."""
        from vllm.model_executor.layers.mamba import mamba_mixer2

        from support.engines import mamba_kernels

        mamba_mixer2.mamba_chunk_scan_combined_varlen = mamba_kernels.chunk_scan
        mamba_mixer2.store_prefill_checkpoint = mamba_kernels.store_prefill_checkpoint

    def e2e_overwrite(self, layer: str, block: int, how: str = "noise") -> None:
        """Corrupt what one layer stores in one block.

        Args:
            layer: its name.
            block: block id of its group.
            how: "noise" (normal, with the spread of what is there), or "block N" (what block N holds).
        """
        import torch

        for tensor in self._e2e_parts(layer):
            target = tensor[block]
            if how == "noise":
                generator = torch.Generator().manual_seed(0)
                spread = target.float().std().clamp(min=1e-3)
                target.copy_(torch.empty(target.shape).normal_(generator=generator) * spread)
            else:
                target.copy_(tensor[int(how.removeprefix("block "))])

    def e2e_census(self) -> dict[str, Any]:
        """Resources of this process: threads (Python's by name, all by number), open files, resident bytes."""
        with open("/proc/self/statm") as statm:  # noqa: PTH123
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "pid": os.getpid(),
            "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
            "python_threads": sorted(thread.name for thread in threading.enumerate()),
            "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
            "resident": resident,
        }

    def e2e_connector(self, path: str = "") -> Any:
        """An attribute of the worker's connector by its dotted path, called if it is callable, as plain data."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return plain(follow(get_kv_transfer_group(), path))

    def e2e_sleep_as_gpus_do(self) -> bool:
        """Make this worker, which ignores `sleep` and `wake_up` on CPUs, treat its caches as vLLM's GPU worker does.

        Does nothing and returns False if vLLM does not notify its connectors of it.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

        if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            return False
        connector = get_kv_transfer_group()
        layers = self.model_runner.compilation_config.static_forward_context

        def sleep(level: int = 1) -> None:
            connector.unregister_kv_caches()
            for part in (part for name in layers for part in self._e2e_parts(name)):
                part.fill_(3)

        def wake_up(tags: list[str] | None = None) -> None:
            connector.restore_kv_caches()

        self.sleep, self.wake_up = sleep, wake_up
        return True

    def e2e_graphs(self) -> int:
        """Graphs that this process has captured."""
        from vllm.compilation.counter import compilation_counter

        return int(compilation_counter.num_cudagraph_captured)

    def e2e_kernels(self) -> list[str]:
        """Instruction sets that the CPU's attention packs the blocks of its layers for."""
        layers = self.model_runner.compilation_config.static_forward_context.values()
        return sorted({layer.isa for layer in layers if hasattr(layer, "isa")})

    def _e2e_parts(self, layer: str) -> list[Any]:
        # Attention has one tensor, a state layer one for each of its parts; the first axis is the block.
        kept = self.model_runner.compilation_config.static_forward_context[layer].kv_cache
        return list(kept) if isinstance(kept, list | tuple) else [kept]
