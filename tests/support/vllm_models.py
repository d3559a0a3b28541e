# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own model classes cache, and how vLLM's allocator groups it, on a rank of any engine."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvhma.models import Model
from kvhma.vllm.caches.meta_model import cache_groups, layer_specs, model_of_specs


@dataclass(frozen=True)
class Allocated:
    """What an engine would allocate.

    Attributes:
        config: vLLM's configuration, with the block size the platform chose.
        specs: vLLM's spec of every layer, as its model class says, in its order.
        groups: vLLM's groups of them.
    """

    config: Any
    specs: dict[str, Any]
    groups: list[Any]


def allocate(
    form: dict[str, Any], tp_size: int, order: str = "LBNHC", tp_rank: int = 0, *, gpu: bool = False, **arguments: Any
) -> Allocated:
    """Make vLLM's model of a configuration for one rank, and let its allocator group the layers.

    Args:
        form: the model's ``config.json``.
        tp_size: ranks of the engine.
        order: of the cache.
        tp_rank: which of them.
        gpu: whether attention is that of a GPU.
        arguments: more of vLLM's ``EngineArgs``.
    """
    with _same_log():
        config, specs = layer_specs(form, tp_size, tp_rank, gpu=gpu, **{"max_model_len": 2048, **arguments})
        return Allocated(config, specs, cache_groups(config, specs, order))


@contextlib.contextmanager
def _same_log() -> Iterator[None]:
    """Keep vLLM's logger as it is: vLLM sets it up for an engine's process, and other tests would see no records."""
    logger = logging.getLogger("vllm")
    before = logger.propagate, logger.level, [*logger.handlers]
    try:
        yield
    finally:
        logger.propagate, logger.level, logger.handlers[:] = before
        logger.setLevel(logger.level)  # forgets for which levels it is enabled


def model_in_fork(form: dict[str, Any]) -> Model | str:
    """Return what vLLM's class caches of a configuration, or why vLLM does not make it, from a separate process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(200)
        try:
            found: Model | str = model_of_specs("", layer_specs(form)[1])
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(answer) if answer else "the process ended"
