# SPDX-License-Identifier: Apache-2.0
"""Reads vLLM's configuration, and refuses unsupported features of an engine at its start."""

import sys
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.config.aux_output import AuxOutputConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvhma.errors import SettingsError, UnsupportedPairError
from kvhma.versions import series
from kvhma.vllm.caches.formats import Writer
from kvhma.vllm.config import engine_config
from kvhma.vllm.config.engine_config import check_config, writer_of
from kvhma.vllm.config.settings import Settings
from support.attention_backends import fake_backend


def config(**more):
    speculative = more.get("speculative_config")
    names = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    parallel = dict.fromkeys(names, 1)
    model = {"disable_cascade_attn": True}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{name: more.get(name, value) for name, value in parallel.items()}),
        model_config=SimpleNamespace(**{name: more.get(name, value) for name, value in model.items()}),
        speculative_config=speculative,
        aux_output_config=more.get("aux_output_config", AuxOutputConfig()),
    )


FLAGS = [name for name, kind in AuxOutputConfig.__annotations__.items() if kind is bool]


@pytest.mark.parametrize("flag", FLAGS)
def test_auxiliary_outputs(flag):
    """With them vLLM's scheduler may load less than the connector has promised (`cap_external_hit`)."""
    assert "enable_return_routed_experts" in FLAGS
    said = "enable_return_routed_experts is True, the kvhma connector supports only False"
    with pytest.raises(UnsupportedPairError, match=said):
        check_config(config(aux_output_config=AuxOutputConfig(**{flag: True})))


def test_cascade_attention():
    """0.31 counts the users of a block, including held blocks: it took those of some requests for those of all."""
    asked = config(disable_cascade_attn=False)
    if series(vllm.__version__) < (0, 32):
        with pytest.raises(UnsupportedPairError, match=r"disable_cascade_attn is False, .* supports only True"):
            check_config(asked)
    else:
        check_config(asked)


def test_context_parallelism():
    draft = SimpleNamespace(method="mtp")
    check_config(config(speculative_config=draft))
    check_config(config(decode_context_parallel_size=2))
    check_config(config(decode_context_parallel_size=2, speculative_config=draft))
    check_config(config(prefill_context_parallel_size=2))
    with pytest.raises(
        UnsupportedPairError, match="prefill_context_parallel_size is 2 and speculative_config is 'mtp'"
    ):
        check_config(config(prefill_context_parallel_size=2, speculative_config=draft))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"tensor_parallel_size": 2}, ""),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"decode_context_parallel_size": 4}, "decode_context_parallel_size is 4"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
    ],
    ids=str,
)
def test_where_no_answers_are_kept(monkeypatch, changes, why):
    monkeypatch.setattr(engine_config, "host_staged", lambda config: False)
    assert engine_config.no_answers(config(**changes)) == why
    monkeypatch.setattr(engine_config, "host_staged", lambda config: True)
    assert engine_config.no_answers(config(**changes)) == "blocks go through host memory"


@pytest.mark.parametrize(
    ("given", "staged", "traces", "option"),
    [(0.5, False, None, "digests"), (0, True, None, "staging"), (0, False, "http://collector", "spans")],
)
def test_an_option_that_is_asked_for_must_be_installed(monkeypatch, given, staged, traces, option):
    monkeypatch.setattr(engine_config, "host_staged", lambda config: staged)
    engine, settings = config(), Settings(content_digests=given)
    engine.observability_config = SimpleNamespace(otlp_traces_endpoint=traces)
    assert engine_config.options_of(engine, settings) == ("tickets", option)
    monkeypatch.setitem(sys.modules, f"kvhma.vllm.options.{option}", None)
    with pytest.raises(SettingsError, match=f"without the option '{option}'"):
        engine_config.options_of(engine, settings)


class Gpu:
    """A platform with one of these names."""

    def __init__(self, name, capability=None, fp8=torch.float8_e4m3fn):
        self._name, self._capability, self._fp8 = name, capability, fp8

    def __getattr__(self, name):
        return lambda: name == f"is_{self._name}"

    def get_device_capability(self):
        return self._capability

    def fp8_dtype(self):
        return self._fp8


def layer(backend, **more):
    return SimpleNamespace(get_attn_backend=lambda: fake_backend(backend), **more)


def written(monkeypatch, found, platform, *, indexer="fp8", mx=False):
    monkeypatch.setattr(engine_config, "current_platform", platform)
    monkeypatch.setattr(engine_config, "_indexer_has_mx_scales", lambda: mx)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": found}),
        attention_config=SimpleNamespace(resolve_indexer_kv_dtype=lambda _: indexer),
    )
    return writer_of(config)("a")


HOPPER = Gpu("cuda", DeviceCapability(9, 0))
MI300 = Gpu("rocm", DeviceCapability(9, 4), torch.float8_e4m3fnuz)


def test_who_writes_a_layer_on_this_machine():
    """vLLM's own platform and backend; its runner stores on the layer what the CPU kernel packs for."""
    own = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend, kv_cache_dtype="auto", isa="vec")
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"a.attn": own}))
    found = writer_of(config)("a.attn")
    assert found == Writer("CPU_ATTN", "cpu", "", "auto", vllm.__version__, "vec")
    assert found.classes == (SimpleNamespace, CPUAttentionBackend)


@pytest.mark.parametrize(
    ("kept", "platform", "cache_dtype"),
    [
        ("auto", HOPPER, "auto"),
        ("fp8", HOPPER, "fp8_e4m3/float8_e4m3fn"),
        ("fp8_e4m3", MI300, "fp8_e4m3/float8_e4m3fnuz"),
        ("fp8_ds_mla", HOPPER, "fp8_ds_mla/float8_e4m3fn"),
        ("nvfp4", HOPPER, "nvfp4"),
    ],
)
def test_the_cache_type_of_a_layer(monkeypatch, kept, platform, cache_dtype):
    assert written(monkeypatch, layer("FLASHMLA", kv_cache_dtype=kept), platform).cache_dtype == cache_dtype
    own = layer("DEEPSEEK_SPARSE_SWA", cache_config=SimpleNamespace(cache_dtype=kept))
    assert written(monkeypatch, own, platform).cache_dtype == cache_dtype


def test_an_indexer_has_a_cache_type_of_its_own(monkeypatch):
    indexer = layer("DEEPSEEK_V32_INDEXER", cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla"))
    found = written(monkeypatch, indexer, HOPPER)
    assert found == Writer(
        "DEEPSEEK_V32_INDEXER", "cuda", "9.0", "indexer-fp8/float32/float8_e4m3fn", vllm.__version__, None
    )
    assert written(monkeypatch, indexer, HOPPER, mx=True).cache_dtype == "indexer-fp8/mx/float8_e4m3fn"
    assert written(monkeypatch, indexer, HOPPER, indexer="mxfp4").cache_dtype.startswith("indexer-mxfp4/")
    assert written(monkeypatch, indexer, MI300).platform == "rocm"


def test_a_layer_that_nobody_knows_is_nobody_s(monkeypatch):
    assert written(monkeypatch, None, HOPPER) == Writer(platform="cuda", capability="9.0", version=vllm.__version__)
