# SPDX-License-Identifier: Apache-2.0
"""The config reader against what vLLM's own classes cache, for every model that both support: never another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

import vllm

from kvhma.errors import ConfigError
from kvhma.models import Attention, Model, State
from kvhma.models.config import model_from_config, read_config
from kvhma.vllm.caches.meta_model import ask
from support.cli_configs import CONFIGS
from support.families import FAMILIES
from support.public_configs import EXPERTS, PUBLIC, own
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


def test_blocks_with_heads_of_their_own() -> None:
    """Remote code gives them to vLLM's class, which is made without that code here."""
    form = PUBLIC["Nemotron-3-Puzzle"]
    blocks = [
        block | ({"num_key_value_heads": 4} if number == 3 else {})
        for number, block in enumerate(form["block_configs"])
    ]
    for changed_form in ({**form, "block_configs": blocks}, {**form, "block_configs": blocks[:-1]}):
        for make in (model_from_config, lambda form: ask("puzzle", form, (1,))):
            with pytest.raises(ConfigError, match="block_configs"):
                make(changed_form)


STEP = PUBLIC["Step-3.5-Flash"]


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


ADDED = {
    "head_dim": 96,
    "num_key_value_heads": 2,
    "sliding_window": 96,
    "use_sliding_window": True,
    "layer_types": None,
    "v_head_dim": 32,
    "num_kv_shared_layers": 1,
    "attention_chunk_size": 64,
    "sliding_window_pattern": 2,
    "kv_lora_rank": 64,
}


def changed(form: dict[str, Any], field: str) -> dict[str, Any] | None:
    """The configuration with another value of a field, or with windows in every second layer."""
    name = next((name for name in ("text_config", "llm_config", "language_config") if name in form), None)
    text = dict(form[name] if name else form)
    count = text.get("num_hidden_layers", 0)
    if field == "layer_types":
        text |= {"sliding_window": 96, field: ["sliding_attention", "full_attention"] * (count // 2)}
    else:
        text[field] = ADDED[field]
    return {**form, name: text} if name else text


@pytest.mark.long
@pytest.mark.parametrize("field", ADDED)
@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NOT_MADE])
def test_no_field_leads_to_a_wrong_guess(name: str, field: str) -> None:
    """With any field added, the reader agrees with vLLM's class or refuses."""
    form = changed(PUBLIC[name], field)
    try:
        read = model_from_config(form)
    except ConfigError:
        return
    found = model_in_fork(form)
    if isinstance(found, Model):
        assert caches(read) == caches(found)


WINDOWED = {
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Starcoder2ForCausalLM": "starcoder2",
}


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"layer_types": ["sliding_attention", "full_attention"] * 4}, {"use": True}])
@pytest.mark.parametrize("architecture", WINDOWED)
def test_windows_are_those_of_the_class(architecture: str, more: dict[str, Any]) -> None:
    """Classes read different fields of windows: a field that the class does not read is refused."""
    more = {"use_sliding_window": True, "max_window_layers": 4} if "use" in more else more
    form = own(
        architecture, WINDOWED[architecture], 8, 1024, 8, 4, sliding_window=96, pad_token_id=0, **EXPERTS, **more
    )
    form["num_local_experts"] = 8
    found = model_in_fork(form)
    try:
        read = model_from_config(form)
    except ConfigError:
        return
    assert isinstance(found, Model), found
    assert caches(read) == caches(found)


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


@pytest.mark.parametrize("name", ["Zamba2", "gemma-4"])
def test_saved_in_other_words(name: str, tmp_path: Path) -> None:
    """Checks the premise of the previous test: transformers writes other words than it read."""
    from transformers import AutoConfig

    AutoConfig.for_model(**FAMILIES[name]).save_pretrained(tmp_path)
    again = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in again or "linear_attention" in again["layers_block_type"]
