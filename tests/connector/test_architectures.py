# SPDX-License-Identifier: Apache-2.0
"""The config reader against what vLLM's own classes cache, for every model that both support: never another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.transformers_utils import configs

from kvhma.errors import ConfigError
from kvhma.models import Attention, Model, State
from kvhma.models.config import model_from_config, read_config
from support.cli_configs import CONFIGS
from support.families import FAMILIES
from support.public_configs import PUBLIC
from support.vllm_models import model_in_fork

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # from vLLM's imports
    pytest.mark.skipif(vllm.__version__.startswith("0.31."), reason="models are read as vLLM 0.32 reads them"),
]

NOT_MADE = {
    "deepseek-vl2-tiny": "its class wants a tokenizer",
    "dots.llm1": "vLLM had a class up to 0.23; transformers' own is not made on the meta device",
    "InternVL3-8B": "its class wants a tokenizer",
    "Phi-4-multimodal": "its class wants what remote code makes of its audio",
}
"""Models that vLLM 0.32 does not make here, with the reason."""
SAMPLE = {"AFM-4.5B", "falcon-7b", "LongCat-Flash", "llava-1.5-7b", "Nemotron-49B", "Olmo-Hybrid-7B", "Trinity-Nano"}
SAMPLE |= {"granite-4.0-micro", "Nemotron-3-Puzzle", "Step-3.5-Flash"}


def caches(model: Model) -> list[Attention | State]:
    return [cache for _, cache in model.specs]


def sampled(name: str) -> Any:
    return name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long)


@pytest.mark.parametrize("name", [sampled(name) for name in PUBLIC])
def test_public_configurations(name: str) -> None:
    found = model_in_fork(PUBLIC[name])
    if name in NOT_MADE:
        assert isinstance(found, str), f"vLLM makes {name} now: compare it"
        return
    assert isinstance(found, Model), found
    assert caches(model_from_config(PUBLIC[name])) == caches(found)


STEP = PUBLIC["Step-3.5-Flash"]


@pytest.mark.skipif(
    not hasattr(configs, "Step3p5Config"),
    reason="transformers' class, which vLLM 0.33 takes, reads other heads otherwise",
)
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_other_setting": STEP["attention_other_setting"] | {"num_attention_groups": 4, "head_dim": 64}},
        {
            "attention_other_setting": STEP["attention_other_setting"]
            | {"attention_type": "full_attention", "head_dim": 64}
        },
        {"attention_other_setting": None},
        {"layer_types": None, "partial_rotary_factors": None},
        {"layer_types": STEP["layer_types"] + ["sliding_attention"] * 3},  # as its file has it, with those of drafts
    ],
    ids=str,
)
def test_other_heads_of_step(changes: dict[str, Any]) -> None:
    form = {name: value for name, value in (STEP | changes).items() if value is not None}
    found = model_in_fork(form)
    assert isinstance(found, Model), found
    assert caches(model_from_config(form)) == caches(found)


def saved_types() -> list[tuple[str, str]]:
    """Architecture and ``model_type`` of everything that vLLM registers and transformers has a class for."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto
    from vllm import ModelRegistry

    tables = [value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    found: dict[str, str] = {}
    for table in tables:
        for kind, names in table.items():
            for name in names if isinstance(names, tuple | list) else (names,):
                if name in ModelRegistry.models and kind in CONFIG_MAPPING:
                    found.setdefault(name, kind)
    return sorted(found.items())


def saved(architecture: str, kind: str, folder: Path) -> dict[str, Any] | None:
    """What transformers writes of the class' own defaults."""
    from transformers import CONFIG_MAPPING

    try:
        one = CONFIG_MAPPING[kind](architectures=[architecture])
        one.dtype = "bfloat16"
        one.save_pretrained(folder)
    except Exception:  # composites that need arguments
        return None
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_everything_that_transformers_saves(tmp_path: Path) -> None:
    """For every architecture that vLLM registers the reader returns vLLM's layout or refuses; it reads nearly all."""
    same, wrong = [], []
    for architecture, kind in saved_types():
        folder = tmp_path / architecture
        form = saved(architecture, kind, folder)
        if form is None:
            continue
        try:
            read = read_config(folder)
        except ConfigError:
            continue
        found = model_in_fork(form)
        if isinstance(found, Model):
            (same if caches(read) == caches(found) else wrong).append(f"{architecture} ({kind})")
    assert not wrong
    assert len(same) >= 75


SOURCES = {**FAMILIES, **PUBLIC, **CONFIGS}


@pytest.mark.parametrize("name", SOURCES)
def test_saved_again_by_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5 writes layers and heads in other words than the file that it read, and defaults too."""
    from transformers import CONFIG_MAPPING, AutoConfig

    # vLLM's own class of Step-3.5 does not read the heads of layers that transformers' class writes.
    if SOURCES[name]["model_type"] not in CONFIG_MAPPING or name == "Step-3.5-Flash":
        pytest.skip("its class is remote code, or vLLM's")
    config = AutoConfig.for_model(**SOURCES[name])
    # While a process has a V3.2, vLLM changes the name of transformers' class of DeepSeek-V3.
    monkeypatch.setattr(type(config), "model_type", SOURCES[name]["model_type"])
    config.save_pretrained(tmp_path)
    assert caches(read_config(tmp_path)) == caches(model_from_config(SOURCES[name]))
