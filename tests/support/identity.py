# SPDX-License-Identifier: Apache-2.0
"""The model that engines of the connector's tests claim to run, and a folder of a model for vLLM's configuration."""

import json
from pathlib import Path

from kvhma.vllm.config.identity import ModelIdentity, encode_extra

IDENTITY = ModelIdentity(
    model="org/tiny",
    revision="0123abc",
    model_id=None,
    dtype="bfloat16",
    quantization=None,
    cache_dtype="bfloat16",
    overrides="{}",
    draft=None,
)
EXTRA = encode_extra(IDENTITY, vllm="0.32.0")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def model_folder(where: Path, **more: object) -> Path:
    """Write the configuration of a llama, with other fields if given, and return its folder."""
    where.mkdir(exist_ok=True)
    (where / "config.json").write_text(json.dumps(LLAMA | more))
    return where
