# SPDX-License-Identifier: Apache-2.0
"""Which model an engine runs, from vLLM's own configuration objects."""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import dynamic_module_utils
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from vllm.config import CacheConfig, ModelConfig, MultiModalConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.model_executor.model_loader import utils
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM

from kvhma.errors import UnsupportedPairError
from kvhma.vllm.config.engine_config import _item_files, identity_of
from kvhma.vllm.config.identity import ModelIdentity, check_same_model, decode_extra, encode_extra
from kvhma.vllm.config.settings import Settings
from support.built import Runner
from support.identity import model_folder


def identity(where: Path, *, settings: dict[str, object] | None = None, cache: str = "auto", **more) -> ModelIdentity:
    model = ModelConfig(model=str(where), tokenizer=str(where), skip_tokenizer_init=True, **more)
    config = VllmConfig(model_config=model, cache_config=CacheConfig(block_size=16, cache_dtype=cache))
    return identity_of(config, Settings.read(settings or {}))


def differing(one: ModelIdentity, other: ModelIdentity) -> set[str]:
    return {name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)}


def test_it_goes_through_a_hello(tmp_path):
    found = identity(model_folder(tmp_path / "m"), revision="main")
    assert (found.model, found.revision) == (str(tmp_path / "m"), "main")
    assert (found.dtype, found.cache_dtype, found.quantization) == ("bfloat16", "bfloat16", None)
    assert found.overrides == "{}"
    read = decode_extra(encode_extra(found, vllm="0.32.0"))
    assert read.model == found
    check_same_model(found, read.model)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"revision": "v2"}, {"revision"}),
        ({"dtype": "float16"}, {"dtype", "cache_dtype"}),
        ({"cache": "fp8_e5m2"}, {"cache_dtype"}),
        ({"cache": "bfloat16"}, set()),
        ({"hf_overrides": {"eos_token_id": 7, "pad_token_id": 7}}, set()),
        ({"hf_overrides": {"attention_bias": True}}, {"config"}),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}, {"config"}),
        ({"hf_overrides": {"max_position_embeddings": 8192, "bos_token_id": 7}}, set()),
        ({"disable_sliding_window": True}, {"overrides"}),
        ({"settings": {"model_id": "mine"}}, {"model_id"}),
        ({"quantization": "fp8"}, {"quantization"}),
        ({"max_model_len": 512, "seed": 3, "served_model_name": "any"}, set()),
    ],
    ids=lambda one: ",".join(sorted(one)) or "nothing" if isinstance(one, set) else str(one),
)
def test_what_changes_the_values_in_a_cache_changes_the_identity(tmp_path, changes, fields):
    where = model_folder(tmp_path / "m")
    assert differing(identity(where), identity(where, **changes)) == fields


def test_a_type_of_caches_with_two_names(tmp_path):
    """A file of ModelOpt and an option of the command line name it differently."""
    where = model_folder(tmp_path / "m")
    found = [identity(where, cache=name) for name in ("fp8", "fp8_e4m3", "fp8_e5m2")]
    check_same_model(*found[:2])
    with pytest.raises(UnsupportedPairError, match=r"^cache_dtype .* is 'fp8_e4m3' here, 'fp8_e5m2'"):
        check_same_model(*found[1:])


VARIABLES = {
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "float8e4m3"}',
    "VLLM_MARLIN_INPUT_DTYPE": "fp8",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
}


@pytest.mark.parametrize(("name", "value"), VARIABLES.items(), ids=VARIABLES)
def test_variables_of_vllm_that_change_the_values_in_a_cache(tmp_path, monkeypatch, name, value):
    where = model_folder(tmp_path / "m")
    plain = identity(where)
    monkeypatch.setenv(name, value)
    changed = identity(where)
    with pytest.raises(UnsupportedPairError, match=rf"^overrides .* is '{{}}' here, '{{\"{name}\": .*' at the prefill"):
        check_same_model(plain, changed)
    check_same_model(changed, identity(where))


def test_a_class_that_a_plugin_registers(tmp_path, monkeypatch):
    """It computes what it likes, from equal files under an equal configuration."""
    where, draft = model_folder(tmp_path / "m"), model_folder(tmp_path / "draft")

    def with_class(kind=None):
        with monkeypatch.context() as patched:
            patched.setattr(utils, "_MODEL_ARCH_BY_HASH", {})
            patched.setitem(ModelRegistry.models, "LlamaForCausalLM", ModelRegistry.models["LlamaForCausalLM"])
            if kind is not None:
                ModelRegistry.register_model("LlamaForCausalLM", kind)
            return draft_of(where, draft)

    plain = with_class()
    own, other = (type(name, (LlamaForCausalLM,), {"__module__": "pytest.models"}) for name in ("Own", "Other"))
    check_same_model(with_class(own), with_class(own))
    named = rf"pytest.models.Own pytest {pytest.__version__}"
    assert named in with_class(own).draft
    for kind, text in ((None, "'{}'"), (other, "pytest.models.Other")):
        with pytest.raises(UnsupportedPairError, match=rf"^overrides .*{named}.* here, .*{text}.* at the prefill"):
            check_same_model(with_class(own), with_class(kind))
    assert plain == with_class(LlamaForCausalLM)


def test_classes_that_come_with_a_model(tmp_path, monkeypatch):
    """They compute what they like: another file under the same name may follow an update."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    where = model_folder(tmp_path / "m")
    model = ModelConfig(model=str(where), tokenizer=str(where), skip_tokenizer_init=True)

    def with_code(name, factor):
        (tmp_path / name).mkdir(exist_ok=True)
        text = (
            f"import torch\n\nclass Scaled(torch.nn.Module):\n    def forward(self, x):\n        return x * {factor}\n"
        )
        (tmp_path / name / "modeling.py").write_text(text)
        kind = get_class_from_dynamic_module("modeling.Scaled", str(tmp_path / name))
        return Runner(torch.nn.Sequential(kind())).register_kv_caches(VllmConfig(model_config=model), ())

    def with_import(name, factor):
        (tmp_path / name).mkdir()
        (tmp_path / name / "constants.py").write_text(f"FACTOR = {factor}\n")
        text = "import torch\n\nfrom .constants import FACTOR\n\nclass Scaled(torch.nn.Module):\n    factor = FACTOR\n"
        (tmp_path / name / "modeling.py").write_text(text)
        kind = get_class_from_dynamic_module("modeling.Scaled", str(tmp_path / name))
        assert kind.factor == factor
        return Runner(torch.nn.Sequential(kind())).register_kv_caches(VllmConfig(model_config=model), ())

    importing = with_import("importing", 2)
    check_same_model(importing, with_import("importing elsewhere", 2))
    with pytest.raises(UnsupportedPairError, match=r"^overrides .*remote_code.*Scaled"):
        check_same_model(importing, with_import("importing another", 3))
    first = with_code("one", 2)
    check_same_model(first, with_code("elsewhere", 2))
    with pytest.raises(
        UnsupportedPairError, match=r"^overrides .*remote_code.*Scaled.* here, .*Scaled.* at the prefill"
    ):
        check_same_model(first, with_code("other", 3))
    with pytest.raises(UnsupportedPairError, match=r"^overrides .*Scaled.* here, '{}' at the prefill"):
        check_same_model(first, identity(where))


ITEMS = [
    {"mm_processor_kwargs": {"image_mean": [0, 0, 0]}},
    {"mm_encoder_attn_dtype": "fp8"},
    {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
]


@pytest.mark.parametrize("changes", ITEMS, ids=str)
def test_how_an_engine_makes_embeddings_of_items(tmp_path, changes):
    """A request's own settings are part of vLLM's names of its items, those of an engine are not."""
    where = str(model_folder(tmp_path / "m"))
    config = VllmConfig(model_config=ModelConfig(model=where, tokenizer=where, skip_tokenizer_init=True))

    def with_items(items, **settings):
        config.model_config.multimodal_config = MultiModalConfig(**items)
        return identity_of(config, Settings.read(settings))

    plain = with_items({"video_pruning_rate": changes.get("video_pruning_rate")})
    with pytest.raises(UnsupportedPairError, match=r"^overrides of the model is .* at the prefill engine"):
        check_same_model(plain, with_items(changes))
    check_same_model(*(with_items(items, mm_items="trust_prefill") for items in ({}, changes)))


def test_scales_of_an_encoder(tmp_path):
    """vLLM reads them from a file: it counts what the file says."""
    where = str(model_folder(tmp_path / "m"))
    config = VllmConfig(model_config=ModelConfig(model=where, tokenizer=where, skip_tokenizer_init=True))

    def with_scales(text=None):
        given = {"mm_encoder_attn_dtype": "fp8"}
        if text is not None:
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
            path.write_text(text)
            given["mm_encoder_fp8_scale_path"] = str(path)
        config.model_config.multimodal_config = MultiModalConfig(**given)
        return identity_of(config, Settings.read({}))

    first, *others = (with_scales(text) for text in ('{"q": 1}', '{"q": 2}', None))
    check_same_model(first, with_scales('{"q": 1}'))
    for other in others:
        with pytest.raises(UnsupportedPairError, match=r"^overrides .*mm_encoder_fp8_scale_path"):
            check_same_model(first, other)


def test_where_items_are_processed_does_not_count(tmp_path):
    where = str(model_folder(tmp_path / "m"))
    config = VllmConfig(model_config=ModelConfig(model=where, tokenizer=where, skip_tokenizer_init=True))
    found = []
    for given in (None, {"device": "cuda"}):
        config.model_config.multimodal_config = MultiModalConfig(mm_processor_kwargs=given)
        found.append(identity_of(config, Settings.read({})))
    check_same_model(*found)


PROCESSORS = ["preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"]


@pytest.mark.parametrize("name", PROCESSORS)
def test_files_that_say_how_items_are_processed(tmp_path, name):
    where = model_folder(tmp_path / "m")

    def with_file(text, **settings):
        (where / name).write_text(text)
        return identity(where, settings=settings)

    none, plain = identity(where), with_file('{"image_mean": [0.5], "size": 56}')
    check_same_model(plain, with_file('{\n  "image_mean": [0.5],\n  "size": 56\n}'))
    assert differing(none, plain) == {"config"}
    changed = '{"image_mean": [0.4], "size": 56}'
    for pair in ((plain, with_file(changed)), (none, plain)):
        with pytest.raises(
            UnsupportedPairError, match=rf"^{name} in the model's configuration is ('.*\[0.5\]|not set)"
        ):
            check_same_model(*pair)
    check_same_model(with_file("{}", mm_items="trust_prefill"), with_file(changed, mm_items="trust_prefill"))


def test_processor_files_of_a_repository(tmp_path, monkeypatch):
    """The commit that is loaded counts."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = ModelConfig(
        model=str(model_folder(tmp_path / "m")), tokenizer=str(tmp_path / "m"), skip_tokenizer_init=True
    )
    model.model, model.revision = "org/tiny", "a" * 40
    for commit in "ab":
        snapshot = tmp_path / "models--org--tiny" / "snapshots" / (commit * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "preprocessor_config.json").write_text(commit)
    assert dict(_item_files(model)) == {"preprocessor_config.json": "a"}


def test_fields_of_the_models_own_file(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048}
    plain = identity(model_folder(tmp_path / "m"))
    edited = identity(model_folder(tmp_path / "m", rope_parameters=rope))
    given = identity(model_folder(tmp_path / "m"), hf_overrides={"rope_parameters": rope})
    assert differing(plain, edited) == {"config"}
    with pytest.raises(UnsupportedPairError, match=r"^rope_parameters in .* is .*default.* here"):
        check_same_model(plain, edited)
    assert differing(edited, given) == set(), "however it is said"


@pytest.mark.parametrize(
    "overrides", [{"clip_qkv": 8.0}, {"rope_is_neox_style": False}, {"architectures": ["GemmaForCausalLM"]}], ids=str
)
def test_a_field_that_only_one_side_sets(tmp_path, overrides):
    """vLLM's models read fields that their configuration need not have."""
    plain = identity(model_folder(tmp_path / "m", clip_qkv=None))
    given = identity(tmp_path / "m", hf_overrides=overrides)
    for pair in ((plain, given), (given, plain)):
        with pytest.raises(UnsupportedPairError, match=f"^{next(iter(overrides))} in the model's configuration is "):
            check_same_model(*pair)


@pytest.mark.parametrize("digests", [("a" * 64, None), (None, "a" * 64), ("a" * 64, "a" * 16)])
def test_a_field_of_one_side_beside_a_loader_without_digests(tmp_path, digests):
    """As Run:ai's streamer, or storage that is too slow: both may have loaded the same files."""
    plain = identity(model_folder(tmp_path / "m", clip_qkv=None))
    given = identity(tmp_path / "m", hf_overrides={"clip_qkv": 8.0})
    pair = [msgspec.structs.replace(one, weights=of) for one, of in zip((plain, given), digests, strict=True)]
    with pytest.raises(UnsupportedPairError, match=r"^clip_qkv in the model's configuration is not set here, '8\.0'"):
        check_same_model(*pair)


def test_a_special_token_that_decides_embeddings(tmp_path):
    """Qwen4's and LongCat's embeddings of n-grams begin anew after it."""
    where = model_folder(tmp_path / "m")

    def with_token(token, module):
        given = {"eos_token_id": token}
        model = ModelConfig(model=str(where), tokenizer=str(where), skip_tokenizer_init=True, hf_overrides=given)
        return Runner(torch.nn.Sequential(module)).register_kv_caches(VllmConfig(model_config=model), ())

    n_grams = torch.nn.Linear(1, 1)
    n_grams.eos_token_id = 5
    with pytest.raises(UnsupportedPairError, match=r"^eos_token_id in the model's configuration is '5' here, '7'"):
        check_same_model(with_token(5, n_grams), with_token(7, n_grams))
    later_stage = torch.nn.Linear(1, 1)
    for module in (later_stage, n_grams):
        check_same_model(with_token(5, later_stage), with_token(5 if module is n_grams else 7, module))


def test_fields_of_one_side_of_other_software_or_another_format(tmp_path):
    plain = identity(model_folder(tmp_path / "m"))
    more = msgspec.structs.replace(plain, config=plain.config | {"a_field_of_later_transformers": "1"})
    check_same_model(plain, msgspec.structs.replace(more, versions="later"))
    named = [msgspec.structs.replace(one, model_id="mine") for one in (plain, more)]
    check_same_model(*(msgspec.structs.replace(one, weights=of * 16) for one, of in zip(named, "ab", strict=True)))


def test_a_map_of_modules_is_one_field(tmp_path):
    """As files quantized with other bits in some modules have."""
    bits = {f"model.layers.{index}.mlp.gate": {"bits": 16} for index in range(3000)}
    found = identity(model_folder(tmp_path / "m", extra_config=bits))
    assert decode_extra(encode_extra(found, vllm="0.32.0")).model == found
    other = identity(model_folder(tmp_path / "m", extra_config=bits | {"lm_head": {"bits": 8}}))
    assert differing(found, other) == {"config"}


def draft_of(where: Path, draft: Path, method: str = "draft_model", tokens: int = 2, **more: object) -> ModelIdentity:
    model = ModelConfig(model=str(where), tokenizer=str(where), skip_tokenizer_init=True)
    parallel = ParallelConfig()
    speculative = SpeculativeConfig(
        target_model_config=model,
        target_parallel_config=parallel,
        model=str(draft),
        method=method,
        num_speculative_tokens=tokens,
    )
    for name, value in more.items():
        setattr(speculative, name, value)
    config = VllmConfig(model_config=model, cache_config=CacheConfig(block_size=16), parallel_config=parallel)
    config.speculative_config = speculative
    return identity_of(config, Settings.read({}))


def test_how_a_draft_drafts_is_compared(tmp_path):
    """With equal weights it computes its keys from other inputs."""
    where, draft = model_folder(tmp_path / "m"), model_folder(tmp_path / "draft")
    one, other = draft_of(where, draft), draft_of(where, draft, parallel_drafting=True)
    assert differing(one, draft_of(where, draft, tokens=3)) == set()
    assert differing(one, identity(where)) == {"draft", "draft_config"}
    assert differing(one, other) == {"draft"}
    assert differing(one, draft_of(where, draft, "eagle")) == {"draft", "draft_config"}
    for pair in ((one, other), (one, draft_of(where, draft, "eagle"))):
        with pytest.raises(UnsupportedPairError, match="draft of the model is"):
            check_same_model(*pair)
    for pair in ((one, identity(where)), (identity(where), one)):
        check_same_model(*pair)


EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 512, "num_hidden_layers": 1}
DRAFTS = [
    {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    {"eagle_config": {"use_aux_hidden_state": False}},
    {"norm_before_residual": True},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
]


@pytest.mark.parametrize("change", DRAFTS, ids=str)
def test_fields_of_a_drafts_own_file(tmp_path, change):
    """EAGLE-3 computes its keys from those hidden states of the model that its file names."""
    where, draft = model_folder(tmp_path / "m"), tmp_path / "draft"

    def drafts(**fields):
        return draft_of(where, model_folder(draft, **EAGLE3 | fields), "eagle3")

    one, other = drafts(), drafts(**change)
    field = next(iter(change))
    for pair in ((one, other), (other, one)):
        with pytest.raises(UnsupportedPairError, match=rf"^{field}.* in the draft model's configuration is .* here, "):
            check_same_model(*pair)
    for same in (drafts(), drafts(max_position_embeddings=8192), identity(where)):
        check_same_model(one, same)
        check_same_model(same, one)


def test_long_values_are_bounded(tmp_path):
    where = model_folder(tmp_path / "m")
    one, other = (identity(where, hf_overrides={"x": ["y" * 90_000, last]}) for last in (1, 2))
    assert len(one.config["x"]) < 200
    assert differing(one, other) == {"config"}
