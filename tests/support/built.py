# SPDX-License-Identifier: Apache-2.0
"""Models that vLLM builds here with real tensors on the CPU, and what kvhma reads from their modules."""

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader import utils

from kvhma.vllm.caches import meta_model
from kvhma.vllm.config.engine_config import identity_of
from kvhma.vllm.config.identity import ModelIdentity
from kvhma.vllm.config.settings import Settings
from support.engines.tiny import COMMON

TINY = COMMON | {"num_hidden_layers": 2, "torch_dtype": "bfloat16"}

meta_model._prepare()  # its process group lasts as long as the process, so that no test leaves it


def form(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    """Return a tiny model's ``config.json``."""
    return TINY | {"architectures": [architecture], "model_type": model_type} | more


class Runner:
    """Holds a model, as vLLM's model runner does."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def register_kv_caches(self, config: Any, layers: Any) -> ModelIdentity:
        return identity_of(config, Settings.read({}), layers)


def built(of: dict[str, Any], tp_size: int = 1, **arguments: Any) -> ModelIdentity:
    """Build a model for one rank, and return the identity that its worker would send.

    Args:
        of: its ``config.json``.
        tp_size: ranks of the engine.
        arguments: more of vLLM's ``EngineArgs``.
    """
    models: list[Any] = []
    build = utils.initialize_model

    def initialize(*args: Any, **kwargs: Any) -> Any:
        # A model that holds another one builds it within its own call.
        models.append(build(*args, **kwargs))
        return models[-1]

    rotary_embedding._ROPE_DICT.clear()  # a process has one engine
    with (
        mock.patch.object(utils, "initialize_model", initialize),
        mock.patch.object(meta_model, "_WITH_VALUES", set(of["architectures"])),
    ):
        config, specs = meta_model.layer_specs(of, tp_size, gpu=False, **arguments)
    return Runner(models[-1]).register_kv_caches(config, specs)
