# SPDX-License-Identifier: Apache-2.0
"""Adapters: two engines have the same if the files were the same when each of them first used them."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from kvhma.vllm.config.engine_config import applies_adapters
from kvhma.vllm.prompts import adapters as module
from kvhma.vllm.prompts import prompt_digests
from kvhma.vllm.prompts.adapters import Adapters
from kvhma.vllm.prompts.prompt_digests import PromptDigests
from support import weights
from support.schedulers import bind, request, scheduler


def write(folder, seed=1):
    shutil.rmtree(folder, ignore_errors=True)
    return weights.adapter(folder, layers=2, hidden=64, seed=seed)


def lora(folder, name="fine", number=1):
    return LoRARequest(name, number, str(folder))


def test_equal_files_under_two_paths(tmp_path):
    p, d = Adapters(), Adapters()
    one, other, third = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", seed=2)
    assert p.identify(lora(one)) == d.identify(lora(other, number=7)) != d.identify(lora(third))
    torch.save(load_file(other / "adapter_model.safetensors"), other / "adapter_model.bin")
    (other / "adapter_model.safetensors").unlink()
    assert Adapters().identify(lora(other)) == p.identify(lora(one)), "in another format"


def test_its_settings_count(tmp_path):
    folder = write(tmp_path / "a")
    before = Adapters().identify(lora(folder))
    config = json.loads((folder / "adapter_config.json").read_text()) | {"lora_alpha": 64}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert Adapters().identify(lora(folder)) != before


@pytest.mark.parametrize("number", [1, 2], ids=["in place", "unloaded and loaded"])
def test_files_that_changed_after_they_were_used_match_no_engine(tmp_path, caplog, number):
    """P may have the old adapter, the new one, or cached blocks of both: vLLM names blocks by name and path."""
    p, folder = Adapters(), tmp_path / "a"
    old = p.identify(lora(write(folder)))
    write(folder, seed=2)
    changed = p.identify(lora(folder, number=number))
    new = Adapters().identify(lora(folder))
    assert len({old, changed, new}) == 3
    assert p.identify(lora(folder, number=number)) == changed
    assert caplog.text.count("changed after this engine had used them") == 1
    write(folder)
    assert p.identify(lora(folder)) not in (old, changed, new), "it is not known either which of them it is now"
    assert p.identify(lora(write(tmp_path / "b", seed=2))) == new, "under another path"


def test_files_that_changed_between_loading_and_the_first_request(tmp_path):
    """As `/v1/load_lora_adapter` does, or `--lora-modules`: vLLM loads an adapter before a request has it."""
    p, folder = scheduler(), write(tmp_path / "a")

    class Engine(EngineCore):
        def __init__(self):
            self.model_executor = SimpleNamespace(add_lora=lambda lora: True)
            bind(p, 100)  # within vLLM's constructor of the engine

    old = Adapters().identify(lora(folder))
    assert Engine().add_lora(lora(folder)) is True
    write(folder, seed=2)
    new = Adapters().identify(lora(folder))
    assert p.context.prompts.adapters.identify(lora(folder)) not in (old, new)
    p.close()


def test_a_link_that_moves(tmp_path):
    p, current = Adapters(), tmp_path / "current"
    current.symlink_to(write(tmp_path / "a"))
    old = p.identify(lora(current))
    current.unlink()
    current.symlink_to(write(tmp_path / "b", seed=2))
    assert p.identify(lora(current)) not in (old, Adapters().identify(lora(current)))


def test_files_that_were_touched_copied_or_removed_are_those_that_were_used(tmp_path):
    p, folder = Adapters(), write(tmp_path / "a")
    used = p.identify(lora(folder))
    os.utime(folder / "adapter_model.safetensors", (1, 1))
    assert p.identify(lora(folder)) == used
    write(folder)
    assert p.identify(lora(folder)) == used
    shutil.rmtree(folder)
    assert p.identify(lora(folder)) == used
    write(folder, seed=2)
    assert p.identify(lora(folder)) not in (used, Adapters().identify(lora(folder)))


@pytest.mark.parametrize("broken", ["no folder", "no weights", "cut", "long settings"])
def test_without_files_the_path_counts(tmp_path, caplog, broken):
    p, folder = Adapters(), write(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    if broken == "no folder":
        shutil.rmtree(folder)
    elif broken == "no weights":
        file.unlink()
    elif broken == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        (folder / "adapter_config.json").write_text(" " * 2_000_000)
    for _ in range(3):
        assert p.identify(lora(folder)) == str(folder)
    assert caplog.text.count("is compared by its path") == 1
    if broken == "no folder":
        write(folder)
        assert p.identify(lora(folder)) == Adapters().identify(lora(folder)), "vLLM could not load it before"


def test_slow_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "digest_files", lambda *_: "0" * 32)
    assert Adapters().identify(lora(write(tmp_path / "a"))) == str(tmp_path / "a")


def test_a_thread_reads_what_is_new(tmp_path, monkeypatch):
    """The scheduler does not wait for storage."""
    monkeypatch.setattr(prompt_digests, "_LONG_TOKENS", 1 << 20)
    prompts, asked = PromptDigests(), request(tokens=40)
    asked.lora_request = lora(write(tmp_path / "a"))
    assert prompts.begin_digest(asked, 40)
    first = prompts.take_digest(asked, 40)
    assert not prompts.begin_digest(asked, 40)
    assert prompts.take_digest(asked, 40) == first
    write(tmp_path / "a", seed=2)
    assert prompts.take_digest(asked, 40) != first
    assert prompts.make_prefix_digests(asked, [40]) != PromptDigests().make_prefix_digests(asked, [40])
    prompts.close()


@pytest.mark.parametrize("change", [{"target_modules": ["q_proj"]}, {"lora_dtype": "float16"}], ids=str)
def test_settings_that_leave_out_a_part_of_an_adapter(tmp_path, change):
    """vLLM applies an adapter only to the modules that its engine names."""
    folder = write(tmp_path / "a")

    def digest(**settings):
        config = SimpleNamespace(lora_config=LoRAConfig(**settings))
        prompts, asked = PromptDigests(applies_adapters(config)), request(tokens=40)
        base = prompts.make_digest(asked, 40)
        asked.lora_request = lora(folder)
        found = prompts.make_digest(asked, 40)
        prompts.close()
        return base, found

    (plain, full), (same, part) = digest(), digest(**change)
    assert plain == same
    assert full == digest(max_loras=3)[1] != part
