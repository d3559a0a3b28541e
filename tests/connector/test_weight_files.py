# SPDX-License-Identifier: Apache-2.0
"""Which files vLLM reads the weights from, and their digests as part of an engine's identity."""

import json
import logging
import time
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base", reason="needs vLLM; make connector runs it")

import torch
from safetensors.torch import save_file
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import get_model_cls

from kvhma.errors import HandshakeError, UnsupportedPairError
from kvhma.vllm.config.engine_config import identity_of
from kvhma.vllm.config.identity import check_same_model, decode_extra, encode_extra
from kvhma.vllm.config.settings import Settings
from kvhma.vllm.config.weight_digests import LEVELS, digest_files
from kvhma.vllm.config.weight_files import find_weight_files
from support.built import Runner
from support.identity import IDENTITY, model_folder


def tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    names = [f"model.layers.{index}.{part}.weight" for index in range(4) for part in ("q", "k", "v")]
    found = {name: torch.randn(32, 48, generator=made).to(torch.bfloat16) for name in names}
    found["scale"] = torch.tensor(2.0)
    found["codes"] = torch.randint(-9, 9, (4, 5), generator=made, dtype=torch.int8)
    found["eight bits"] = torch.randn(8, 8, generator=made).to(torch.float8_e4m3fn)
    return found


def folder(where: Path, **files: dict[str, torch.Tensor]) -> Path:
    model_folder(where)
    for name, weights in files.items():
        save_file(weights, where / f"{name}.safetensors", metadata={"format": "pt"})
    return where


def found(where: Path, load_format: str = "auto", **more) -> list[str]:
    model = ModelConfig(model=str(where), tokenizer=str(where), skip_tokenizer_init=True, **more)
    files = find_weight_files(model, LoadConfig(load_format=load_format), None)
    return sorted(str(Path(file).relative_to(where)) for file in files)


def identity(where: Path, load_format: str = "auto", settings: dict[str, object] | None = None):
    model = ModelConfig(model=str(where), tokenizer=str(where), skip_tokenizer_init=True)
    config = VllmConfig(model_config=model, load_config=LoadConfig(load_format=load_format))
    return identity_of(config, Settings.read(settings or {}))


def digest(*paths: Path) -> str:
    return digest_files(paths, time.monotonic() + 60)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "views"])
def test_equal_weights_in_pytorchs_format(tmp_path, layout):
    whole = tensors()
    save_file(whole, tmp_path / "a.safetensors")
    if layout == "transposed":
        whole = {name: weight.t().contiguous().t() if weight.dim() == 2 else weight for name, weight in whole.items()}
    if layout == "views":
        whole = {name: torch.stack([weight, weight])[1] for name, weight in whole.items()}
    torch.save(whole, tmp_path / "pytorch_model.bin")
    assert digest(tmp_path / "pytorch_model.bin") == digest(tmp_path / "a.safetensors")
    whole["codes"][3, 4] += 1
    torch.save(whole, tmp_path / "other.bin")
    assert digest(tmp_path / "other.bin") != digest(tmp_path / "a.safetensors")


def test_files_that_vllm_does_not_read_do_not_count(tmp_path):
    whole = tensors()
    names = sorted(whole)
    where = folder(tmp_path / "m", one={n: whole[n] for n in names[::2]}, other={n: whole[n] for n in names[1::2]})
    assert found(where) == ["one.safetensors", "other.safetensors"]
    index = {name: ("one" if at % 2 == 0 else "other") + ".safetensors" for at, name in enumerate(names)}
    (where / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file(whole, where / "again.safetensors")
    torch.save(whole, where / "pytorch_model.bin")
    assert found(where) == ["one.safetensors", "other.safetensors"]
    assert found(where, "npcache") == ["pytorch_model.bin"]
    save_file(whole, where / "consolidated.safetensors")
    assert found(where, "mistral") == ["consolidated.safetensors"]
    assert identity(where, "mistral").weights == identity(where, "safetensors").weights


def test_a_link_that_moves(tmp_path):
    old, new = (folder(tmp_path / name, model=tensors(seed)) for seed, name in enumerate(["v1", "v2"]))
    current = tmp_path / "current"
    current.symlink_to(old)
    at_p = identity(current)
    check_same_model(identity(current), at_p)
    current.unlink()
    current.symlink_to(new)
    assert len(at_p.weights) == 16 * len(LEVELS)
    with pytest.raises(UnsupportedPairError, match=r"weights of the model are [0-9a-f]{16} here, [0-9a-f]{16} at the"):
        check_same_model(identity(current), at_p)
    mine = {"model_id": "mine"}
    with pytest.raises(UnsupportedPairError, match=r"one of 64 samples of equal tensors differs"):
        check_same_model(identity(new, settings=mine), identity(old, settings=mine))


def test_a_link_to_weights_that_the_model_itself_names(tmp_path):
    """Ultravox has its language model elsewhere: the files at its own path hold what is between its towers."""
    where = folder(tmp_path / "m", model={"projector": torch.ones(4)})
    for seed, name in enumerate(["v1", "v2"]):
        (tmp_path / name / "tower").mkdir(parents=True)
        save_file(tensors(seed), tmp_path / name / "tower" / "model.safetensors")
    current = tmp_path / "current"

    def loaded_from(name):
        current.unlink(missing_ok=True)
        current.symlink_to(tmp_path / name)
        model = ModelConfig(model=str(where), tokenizer=str(where), skip_tokenizer_init=True)
        loaded = torch.nn.Module.__new__(get_model_cls(model))
        torch.nn.Module.__init__(loaded)
        source = DefaultModelLoader.Source(str(current), None, subfolder="tower", prefix="language_model.")
        loaded.secondary_weights = [source, source]
        return Runner(loaded).register_kv_caches(VllmConfig(model_config=model), [])

    at_p = loaded_from("v1")
    check_same_model(loaded_from("v1"), at_p)
    with pytest.raises(UnsupportedPairError, match=r"one of 64 samples of equal tensors differs"):
        check_same_model(loaded_from("v2"), at_p)


def test_another_format_of_the_same_weights(tmp_path):
    renamed = {f"transformer.{name}": weight for name, weight in tensors().items()}
    one, other = folder(tmp_path / "a", model=tensors()), folder(tmp_path / "b", model=renamed)
    with pytest.raises(
        UnsupportedPairError, match=r"other names, types or shapes. Its.*if they are the same, set model_id"
    ):
        check_same_model(identity(one), msgspec.structs.replace(identity(other), model=str(one)))
    mine = {"model_id": "mine"}
    check_same_model(identity(one, settings=mine), identity(other, settings=mine))


def test_each_of_vllms_formats_has_files_or_says_so(tmp_path, caplog):
    where = folder(tmp_path / "m", model=tensors())
    for load_format, loader in _LOAD_FORMAT_TO_MODEL_LOADER.items():
        if issubclass(loader, DefaultModelLoader):
            continue
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert identity(where, load_format).weights is None
        assert f"no digest of the weights of {where}" in caplog.text
        assert f"load_format is {load_format}, which" in caplog.text
    one = identity(where, "dummy")
    check_same_model(one, identity(where))
    check_same_model(identity(where), one)


@pytest.mark.parametrize("broken", ["cut", "none", "no folder"])
def test_files_that_cannot_be_read_stop_no_engine(tmp_path, monkeypatch, caplog, broken):
    where = folder(tmp_path / "m", model=tensors())
    file = where / "model.safetensors"
    if broken == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    monkeypatch.setattr(ModelConfig, "hf_config", None, raising=False)
    model = ModelConfig(model=str(where), tokenizer=str(where), skip_tokenizer_init=True)
    config = VllmConfig(model_config=model)
    if broken == "no folder":
        model.model = "org/not-in-the-cache"
    assert identity_of(config, Settings.read({})).weights is None
    text = {"cut": "a tensor that ends at byte", "none": "Cannot find any model weights", "no folder": "org/not-in-the"}
    assert f"no digest of the weights of {model.model}" in caplog.text
    assert text[broken] in caplog.text


def test_a_repository_is_found_in_the_cache_and_never_downloaded(tmp_path, monkeypatch):
    """The commit that is loaded counts, even if the branch has moved since."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    repository = tmp_path / "models--org--tiny"
    for commit, seed in (("a" * 40, 1), ("b" * 40, 2)):
        (repository / "snapshots").mkdir(parents=True, exist_ok=True)
        folder(repository / "snapshots" / commit, model=tensors(seed))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("b" * 40)
    local = repository / "snapshots" / ("a" * 40)
    model = ModelConfig(model=str(local), tokenizer=str(local), skip_tokenizer_init=True)
    model.model = "org/tiny"
    load = LoadConfig(download_dir=str(tmp_path))
    assert find_weight_files(model, load, "a" * 40) == [str(local / "model.safetensors")]
    assert find_weight_files(model, load, None) == [str(repository / "snapshots" / ("b" * 40) / "model.safetensors")]


DIGESTS = "0123456789abcdef" * 4
LEVELS_OF = {
    "equal": ({"weights": DIGESTS}, {"weights": DIGESTS}, None),
    "one ran out of time": ({"weights": DIGESTS[:32]}, {"weights": DIGESTS}, None),
    "the other ran out of time": ({"weights": DIGESTS}, {"weights": DIGESTS[:16]}, None),
    "one has no files": ({"weights": None}, {"weights": DIGESTS}, None),
    "the other has no files": ({"weights": DIGESTS}, {"weights": None}, None),
    "in 64 samples": ({"weights": DIGESTS}, {"weights": DIGESTS[:16] + "f" * 48}, "one of 64 samples"),
    "in 4096 samples": ({"weights": DIGESTS}, {"weights": DIGESTS[:48] + "f" * 16}, "one of 4096 samples"),
    "a draft on one side": ({"draft": "d", "draft_weights": DIGESTS}, {}, None),
    "two drafts": (
        {"draft": "d", "draft_weights": DIGESTS},
        {"draft": "d", "draft_weights": DIGESTS[:16] + "f" * 48},
        "^draft_weights of the model are 0123456789abcdef here, ffffffffffffffff at the prefill engine",
    ),
}


@pytest.mark.parametrize(("here", "there", "text"), LEVELS_OF.values(), ids=LEVELS_OF)
def test_the_levels_that_both_have_are_compared(here, there, text):
    local, remote = (msgspec.structs.replace(IDENTITY, **changes) for changes in (here, there))
    remote = decode_extra(encode_extra(remote, vllm="0.32.0")).model
    if text is None:
        check_same_model(local, remote)
        return
    with pytest.raises(UnsupportedPairError, match=text):
        check_same_model(local, remote)


@pytest.mark.parametrize("sent", ["", "0" * 15, "0" * 80, "x" * 16, "0" * 16 + "\n", "F" * 16])
def test_digests_of_another_form_are_refused(sent):
    extra = encode_extra(msgspec.structs.replace(IDENTITY, weights=sent), vllm="0.32.0")
    with pytest.raises(HandshakeError, match=r"weights"):
        decode_extra(extra)
