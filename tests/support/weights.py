# SPDX-License-Identifier: Apache-2.0
"""Weights of tiny models and adapters, written without torch."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 arrays as a safetensors file."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor, dtype="<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def fine_tune(model: Path, folder: Path) -> Path:
    """Copy a model with other weights in its attention: each value of its projections to keys a quarter larger."""
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    for name, entry in header.items():
        if name.endswith("k_proj.weight"):
            assert entry["dtype"] == "BF16"
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            high = np.frombuffer(raw[start:end], dtype="<u2").astype("<u4") << 16
            larger = (high.view("<f4") * np.float32(1.25)).view("<u4") >> 16
            raw[start:end] = larger.astype("<u2").tobytes()
    path.write_bytes(raw)
    return folder


def adapter(folder: Path, *, layers: int, hidden: int, rank: int = 8) -> Path:
    """Write a LoRA adapter for the queries' projections of a Llama whose queries are as wide as its hidden state."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    tensors = {}
    for layer in range(layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{stem}.lora_A.weight"] = rng.normal(0, hidden**-0.5, (rank, hidden))
        tensors[f"{stem}.lora_B.weight"] = rng.normal(0, 1, (hidden, rank))
    write_tensors(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
