# SPDX-License-Identifier: Apache-2.0
"""Tiny models with seeded random weights that make good numeric oracles.

In a good oracle one wrong KV block or state changes the answer. Weights drawn at one scale do not make such a model:
attention over hundreds of tokens is then nearly uniform, and the embedding dominates what the layers add. So every
matrix is scaled by its role:

* unit variance through a layer,
* peaked attention,
* a residual stream that the layers dominate,
* logits with a standard deviation of about two (chosen tokens at log-probabilities of -1 to -4).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.engines.families import FAMILIES, SHAPES

if TYPE_CHECKING:
    import torch

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_READ: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MODELS: dict[str, dict[str, Any]] = _READ["models"]
"""By name, their ``config.json``. What is special:

gemma4: one global head, which each rank repeats, beside two sliding heads, which the ranks divide.
gpt_oss: every expert is used. If a router picked another expert for a difference in the last bit, the model is no
oracle.
qwen3_next: `head_dim` shortens the block that holds as much as a state; 64 is the smallest head of a state that the
CPU's kernel takes.
deepseek_v2: rotary embedding as in the real models. With a plain one vLLM's CPU build assumes that the rotary part of
MLA's queries and keys is contiguous, and an answer depends on the other requests of the batch.
"""
WITH_STATE = ("nemotron_h", "nemotron_h_2", "qwen3_next")
"""Models with Mamba2 or GDN state: vLLM does not serve them without HMA, and chooses their blocks."""
OTHERS: dict[str, dict[str, Any]] = _READ["others"]
"""Models for some tests of MODELS only. The token of a picture is 510. Up to 256 tokens vLLM uses the short factors of
phi3, for longer models the long ones.
"""
PICTURES: dict[str, dict[str, Any]] = _READ["pictures"]
"""Further files by model: of a picture of 56 by 56 points LLaVA makes 16 tokens, Qwen 4."""

# Standard deviation of a matrix' output for input with unit variance, by the end of the matrix' name. Scores of
# attention are products of two outputs: gains of 1.7 give the scores a standard deviation of three, so that a few
# tokens hold most of the weight.
GAINS = {
    "q_proj.weight": 1.7,
    "qkv_proj.weight": 1.7,
    "k_proj.weight": 1.7,
    "kv_a_proj_with_mqa.weight": 1.7,
    "o_proj.weight": 2.0,
    "out_proj.weight": 3.0,
    "dt_proj.weight": 0.3,  # of Mamba1; its bias says how long it remembers
    "lm_head.weight": 2.0,
}


def make(connection: Connection, names: list[str], folder: str) -> None:
    """Write the named models under `folder`, except those that exist already, and send their directories."""
    connection.send([str(_model(name, Path(folder))) for name in names])


def _model(name: str, folder: Path) -> Path:
    # The recipe is this file and the settings: a directory made by another recipe is never used.
    settings = (MODELS | OTHERS | FAMILIES)[name]
    recipe = zlib.crc32(Path(__file__).read_bytes() + json.dumps(settings).encode())
    final = folder / f"{name}-{recipe:08x}"
    if not final.exists():
        making = folder / f"{final.name}.{os.getpid()}"
        (_save_shapes if settings["model_type"] in SHAPES else _save)(settings, making)
        try:
            making.rename(final)
        except OSError:  # another process was quicker
            shutil.rmtree(making)
    return final


def _save(settings: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(**settings)
    kind = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, settings["model_type"])
    model.to(torch.bfloat16).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    # save_pretrained drops settings that equal its own defaults; an engine must see every setting.
    (folder / "config.json").write_text(json.dumps(settings | written, indent=1))
    if settings["model_type"] == "llava":
        _name_as_vllm_does(folder / "model.safetensors")
    for name, content in PICTURES.get(settings["model_type"], {}).items():
        (folder / name).write_text(json.dumps(content))


def _save_shapes(settings: dict[str, Any], folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, shape in SHAPES[settings["model_type"]](settings).items():
        # A norm multiplies by its weight, or by its weight plus one.
        tensors[name] = torch.full(shape, 0.0 if settings["model_type"] == "step3p5" else 1.0)
        _fill(name, tensors[name], settings["model_type"])
    folder.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings | {"torch_dtype": "bfloat16"}, indent=1))


def _name_as_vllm_does(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    # transformers 5 writes the tower's weights one level higher than checkpoints have them.
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(path).items()}
    save_file(named, path, metadata={"format": "pt"})


def _fill(name: str, parameter: torch.Tensor, model_type: str) -> None:
    import torch

    # By name, so that a model's weights do not depend on the order of its parameters.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape = parameter.shape

    def normal(scale: float) -> torch.Tensor:
        return torch.empty(shape).normal_(0, scale, generator=generator)

    def between(low: float, high: float) -> torch.Tensor:
        return torch.empty(shape).uniform_(math.log(low), math.log(high), generator=generator).exp()

    last = name.rpartition(".")[2]
    if last == "A_log":  # with dt below: states that forget over tens to hundreds of tokens, not at once
        parameter.copy_(between(0.3, 1.5).log())
    elif name.endswith(("dt_bias", "dt_proj.bias")):
        parameter.copy_(between(0.01, 0.1).expm1().log())  # its softplus is between the two
    elif last == "D":  # the path around the state
        parameter.fill_(0.3)
    elif name.endswith(("q_norm.weight", "k_norm.weight")):  # normed queries and keys: their gain is here
        parameter.fill_(1.7 if model_type == "exaone4" else 0.7)
    elif "embed" in name:
        # Gemma multiplies by the square root of the width.
        parameter.copy_(normal(1 / math.sqrt(shape[1]) if model_type.startswith("gemma") else 1.0))
    elif last == "sinks" or "bias" in last:
        parameter.copy_(normal(0.2))
    elif parameter.dim() > 1:
        # Fused experts: (expert, in, out) in gpt-oss, (expert, out, in) elsewhere. Convolutions: (channel, 1, width).
        fan_in = shape[1] if model_type == "gpt_oss" and parameter.dim() == 3 else shape[-1]
        gain = next((g for end, g in GAINS.items() if name.endswith(end)), 1.0)
        parameter.copy_(normal(gain / math.sqrt(fan_in)))
