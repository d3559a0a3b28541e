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


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read a safetensors file of bfloat16 as float32."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    found = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            high = np.frombuffer(raw[start:end], dtype="<u2").astype("<u4") << 16
            found[name] = high.view("<f4").reshape(entry["shape"])
    return found


def eagle(llama: Path, folder: Path) -> Path:
    """Write an EAGLE head for a tiny Llama: its first layer, over a token and the state before it."""
    folder.mkdir()
    config = json.loads((llama / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    have = {name.removeprefix("model."): tensor for name, tensor in read_tensors(llama / "model.safetensors").items()}
    head = {name: have[name] for name in have if name.startswith("layers.0.") and "input_layernorm" not in name}
    head["embed_tokens.weight"] = have["embed_tokens.weight"]
    write_tensors(folder / "model.safetensors", head | {"fc.weight": _join(have["embed_tokens.weight"].shape[1])})
    return folder


def mimo(llama: Path, folder: Path) -> Path:
    """Write a tiny MiMo, which has a layer for multi-token prediction: a Llama, and its first layer once more."""
    shutil.copytree(llama, folder)
    config = json.loads((llama / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    have = read_tensors(llama / "model.safetensors")
    first, mtp = "model.layers.0.", "model.mtp_layers.0."
    more = {mtp + name.removeprefix(first): have[name] for name in have if name.startswith(first)}
    hidden = have["model.embed_tokens.weight"].shape[1]
    more[mtp + "input_proj.weight"] = _join(hidden)
    more |= {f"{mtp}{name}_layernorm.weight": np.ones(hidden) for name in ("token", "hidden", "final")}
    for name in [name for name in have | more if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        more[name.replace(".weight", ".bias")] = np.zeros((have | more)[name].shape[0])
    write_tensors(folder / "more.safetensors", more)
    return folder


def _join(hidden: int) -> np.ndarray:
    """Weights that combine two vectors into one."""
    return np.random.default_rng(1).normal(0, (2 * hidden) ** -0.5, (hidden, 2 * hidden))


def adapter(folder: Path, *, layers: int, hidden: int, rank: int = 8, seed: int = 1) -> Path:
    """Write a LoRA adapter for the queries' projections of a Llama whose queries are as wide as its hidden state."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{stem}.lora_A.weight"] = rng.normal(0, hidden**-0.5, (rank, hidden))
        tensors[f"{stem}.lora_B.weight"] = rng.normal(0, 1, (hidden, rank))
    write_tensors(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
