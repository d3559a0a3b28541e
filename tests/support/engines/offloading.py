# SPDX-License-Identifier: Apache-2.0
"""What vLLM's OffloadingConnector needs to run without a GPU: a spec and a manager that copy within host memory.

vLLM's worker copies on CUDA streams, and its spec refuses every other platform. A configuration names this one as
`"spec_name": "HostSpec", "spec_module_path": "support.engines.offloading"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies synchronously, so every job has ended when the caller asks.

    Args:
        caches: the engine's tensors, one row of bytes a block, and for each group the tensors that it uses.
        chunks: most blocks that are stored.
    """

    def __init__(self, caches: Any, chunks: int) -> None:
        self._groups = [[reference.tensor_idx for reference in group] for group in caches.group_data_refs]
        self._engine = [cache.tensor for cache in caches.tensors]
        self._kept = [torch.empty((chunks, row.shape[1]), dtype=row.dtype) for row in self._engine]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, block, chunk in self._rows(src_spec, dst_spec.block_ids):
            self._kept[tensor][chunk] = self._engine[tensor][block]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        for tensor, block, chunk in self._rows(dst_spec, src_spec.block_ids):
            self._engine[tensor][block] = self._kept[tensor][chunk]
        return self._end(job_id)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def _rows(self, engine: Any, chunks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        at = 0
        for tensors, size in zip(self._groups, engine.group_sizes, strict=True):
            for index in range(at, at + size):
                for tensor in tensors:
                    yield tensor, int(engine.block_ids[index]), int(chunks[index])
            at += size

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, success=True))
        return True


class HostSpec(CPUOffloadingSpec):
    """vLLM's spec, whose chunks are one block each."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            self._worker = HostWorker(kv_caches, self.num_chunks)
        return self._worker
