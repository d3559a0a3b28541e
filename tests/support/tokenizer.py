# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of bytes for tiny models, written without a library. Token n is byte n, and two more tokens stand for
the end of a text and for a picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

VOCABULARY = 512
END = VOCABULARY - 1
IMAGE = VOCABULARY - 2
"""The token that stands for a picture."""


def with_tokenizer(model: Path, folder: Path) -> Path:
    """Copy a model to a folder, and write a tokenizer beside it."""
    shutil.copytree(model, folder)
    # Byte-level tokenizers write a byte that is no printable character of Latin-1 as a character from 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, VOCABULARY))
    names = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    names += [f"<unused {number}>" for number in range(256, IMAGE)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    special = [{"id": IMAGE, "content": "<image>", "special": True}, {"id": END, "content": "<end>", "special": True}]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [token | flags for token in special],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {name: n for n, name in enumerate([*names, "<image>", "<end>"])},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "model_max_length": 4096}
    config["extra_special_tokens"] = {"image_token": "<image>", "video_token": "<end>"}  # of Qwen-VL
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def text(tokens: list[int]) -> str:
    """The text that tokens stand for."""
    return bytes(token for token in tokens if token < 256).decode()
