# SPDX-License-Identifier: Apache-2.0
"""Models of pictures without torchvision, which transformers wants for films, and for pictures that a GPU resizes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType


class NoFilms(dict):  # type: ignore[type-arg]
    """A processor of films for who has none."""

    patch_size = 14
    merge_size = temporal_patch_size = 2
    valid_kwargs = type("NoKeywords", (), {})


def install() -> None:
    """Let LLaVA and Qwen-VL be imported; nothing is changed where torchvision is there."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers import ProcessorMixin

    # LLaVA's module asks for another model's pictures.
    pixtral = ModuleType("transformers.models.pixtral.image_processing_pixtral")
    pixtral._num_image_tokens = None  # type: ignore[attr-defined]
    # Qwen's has a twin that needs PIL only.
    twin = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    sys.modules |= {
        pixtral.__name__: pixtral,
        "transformers.models.qwen2_vl.image_processing_qwen2_vl": twin,
    }
    films = importlib.import_module("transformers.models.auto.video_processing_auto")
    films.AutoVideoProcessor.from_pretrained = lambda *_, **__: NoFilms()
    ProcessorMixin.check_argument_for_proper_class = lambda *_: None
