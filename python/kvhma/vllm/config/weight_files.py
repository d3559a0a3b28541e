# SPDX-License-Identifier: Apache-2.0
"""The files from which vLLM has loaded weights, as vLLM's own loader finds them. Nothing is downloaded."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import get_model_cls

from kvhma.text import one_line
from kvhma.vllm.caches.module_values import held_modules
from kvhma.vllm.config.weight_digests import WeightDigests, digest_files

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

logger = logging.getLogger("vllm.kvhma")


def digest_weights(model: ModelConfig, load: LoadConfig, revision: str | None, deadline: float) -> WeightDigests | None:
    """Return the digests of a model's weights, read now; None if its loader reads no files, and the log has the reason.

    Args:
        model: that the engine has loaded.
        load: how it was loaded.
        revision: the commit, if it is known.
        deadline: as for :func:`kvhma.vllm.config.weight_digests.digest_files`.
    """
    began = time.monotonic()
    try:
        files = find_weight_files(model, load, revision)
        digests = digest_files(files, deadline)
    except Exception as error:  # of vLLM, of the hub, of PyTorch: an engine that works has to start
        logger.warning(
            "kvhma: no digest of the weights of %s, so engines compare only names and settings: %s",
            one_line(model.model, 300),
            one_line(str(error), 500),
        )
        return None
    took = time.monotonic() - began
    logger.info("kvhma: weights of %s: %s, %d files, %.2f s", one_line(model.model, 300), digests, len(files), took)
    return digests


def find_weight_files(model: ModelConfig, load: LoadConfig, revision: str | None) -> list[str]:
    """Return the files that vLLM reads for a model, as the loaded model names them if a caller holds it.

    Raises:
        ValueError: vLLM reads no files of tensors, or makes its weights up.
        Exception: of vLLM or the hub: the files are not where vLLM looks for them.
    """
    loader = _LOAD_FORMAT_TO_MODEL_LOADER.get(load.load_format)
    if loader is None or not issubclass(loader, DefaultModelLoader):
        raise ValueError(f"load_format is {load.load_format}, which reads no files of tensors")
    kind = get_model_cls(model)
    patterns = [
        getattr(kind, "fall_back_to_pt_during_load", True),
        getattr(kind, "allow_patterns_overrides", None),
    ]
    places: list[Any] = [(model.model, None, revision, *patterns)]
    # Some multimodal models load a tower, or the language model itself, from another place.
    loaded = next((module for module in held_modules() if isinstance(module, kind)), None)
    for more in getattr(loaded, "secondary_weights", ()):
        patterns = [more.fall_back_to_pt, more.allow_patterns_overrides]
        places.append((more.model_or_path, more.subfolder, more.revision, *patterns))
    files: list[str] = []
    for folder, subfolder, commit, *patterns in places:
        if not Path(folder).is_dir():
            folder = snapshot_download(folder, revision=commit, cache_dir=load.download_dir, local_files_only=True)
        _, found, *_ = loader(load)._prepare_weights(folder, subfolder, commit, *patterns)
        files += found
    return list(dict.fromkeys(files))
