# SPDX-License-Identifier: Apache-2.0
"""``--layout``: what the command line prints of models whose layout comes from vLLM's own classes."""

from __future__ import annotations

import json
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")

import vllm

from kvhma.cli import asked_layout
from support.cli_run import cli, refused
from support.public_configs import MLA, PUBLIC

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # from vLLM's imports
    pytest.mark.skipif(vllm.__version__.startswith("0.31."), reason="models are read as vLLM 0.32 reads them"),
]
MINICPM3 = {
    **PUBLIC["Mistral-Small-4"],
    **MLA,
    "architectures": ["MiniCPM3ForCausalLM"],
    "model_type": "minicpm3",
    "num_hidden_layers": 4,
    "hidden_size": 2560,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "max_position_embeddings": 512,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
"""A model with a latent in the weights, whose heads vLLM caches: the table refuses it."""


def save(folder: Path, form: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(form))
    return folder


def test_vllm_is_asked_where_the_table_refuses(tmp_path: Path) -> None:
    folder = save(tmp_path, MINICPM3)
    form = cli("plan", folder, "--prefill", "tp=2", "--decode", "tp=4", "--tokens", 160, "--json").form
    assert form["layout"] == f"vLLM {vllm.__version__}"
    assert "tp_size 3: vLLM does not create it" in refused("plan", folder, "--prefill", "tp=2", "--decode", "tp=3")
    # 40 heads in 4 layers, each with a K and a V of the length of a query's head.
    assert form["bytes"] == 4 * 160 * 40 * 2 * 96 * 2


def test_the_table_alone(tmp_path: Path) -> None:
    assert "kv_lora_rank 256" in refused("plan", save(tmp_path, MINICPM3), "--layout", "table")


def test_what_neither_takes(tmp_path: Path) -> None:
    form = {**MINICPM3, "architectures": ["NobodysForCausalLM"], "model_type": "nobodys", "ssm_state_size": 16}
    line = refused("plan", save(tmp_path, form))
    assert "kv_lora_rank 256" in line
    assert "vLLM does not make this model" in line
    assert "NobodysForCausalLM" in line
    assert "Supported architectures" not in line
    assert len(line) < 600


def hangs(pipe: Connection, *_: object) -> None:
    while True:
        time.sleep(1)


def ends(pipe: Connection, *_: object) -> None:
    pipe.close()


def test_a_process_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_layout, "_answer", ends)
    assert "the vLLM process ended early" in refused("plan", save(tmp_path, MINICPM3), "--layout", "vllm")


@pytest.mark.long
def test_a_process_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_layout, "_answer", hangs)
    monkeypatch.setattr(asked_layout, "_SECONDS", 0.1)
    assert "the vLLM process said nothing" in refused("plan", save(tmp_path, MINICPM3), "--layout", "vllm")
