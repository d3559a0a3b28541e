# SPDX-License-Identifier: Apache-2.0
"""Models of pictures without torchvision, which transformers needs only for videos and for resizing on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType


class NoFilms(dict):  # type: ignore[type-arg]
    """A processor of videos for machines without torchvision."""

    patch_size = 14
    merge_size = temporal_patch_size = 2
    valid_kwargs = type("NoKeywords", (), {})


def install() -> None:
    """Make LLaVA and Qwen-VL importable; change nothing where torchvision is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers import ProcessorMixin

    # LLaVA's module imports another model's picture processor.
    pixtral = ModuleType("transformers.models.pixtral.image_processing_pixtral")
    pixtral._num_image_tokens = None  # type: ignore[attr-defined]
    # Qwen's processor has a variant that needs only PIL.
    twin = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    sys.modules |= {
        pixtral.__name__: pixtral,
        "transformers.models.qwen2_vl.image_processing_qwen2_vl": twin,
    }
    films = importlib.import_module("transformers.models.auto.video_processing_auto")
    films.AutoVideoProcessor.from_pretrained = lambda *_, **__: NoFilms()
    ProcessorMixin.check_argument_for_proper_class = lambda *_: None
