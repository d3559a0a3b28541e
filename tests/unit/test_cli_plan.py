# SPDX-License-Identifier: Apache-2.0
"""``kvhma plan MODEL`` and ``kvhma explain`` print what the library computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvhma
from kvhma.cli.block_tables import sequence_blocks
from kvhma.models import hub_ids, model, models
from kvhma.models.config import read_config
from kvhma.models.vllm_layout import LayoutOptions, layout
from support.cli_configs import CONFIGS, NEMOTRON_3_NANO
from support.cli_run import cli, refused
from support.tiny import tiny_hybrid

NANO = "NVIDIA-Nemotron-3-Nano-30B-A3B"
PAIR = ("--prefill", "tp=2,block=16", "--decode", "tp=4,block=64", "--tokens", 8192)
MIB = 2**20


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "Nemotron-3-Nano" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(NEMOTRON_3_NANO))
    return path


def sides(blocks: int = 64) -> tuple[list[kvhma.Geometry], list[kvhma.Geometry]]:
    """The same engines, laid out by hand at other addresses."""
    one = model(NANO)
    p = [
        layout(
            one, LayoutOptions(num_blocks=blocks, tp_rank=r, tp_size=2, kernel_block="flashinfer", base=(r + 1) << 36)
        )
        for r in range(2)
    ]
    d = [
        layout(
            one,
            LayoutOptions(
                num_blocks=blocks, tp_rank=r, tp_size=4, block_size=64, kernel_block="flashinfer", base=(r + 8) << 36
            ),
        )
        for r in range(4)
    ]
    return d, p


def transfers(tokens: int, cached: list[int] | None = None) -> list[kvhma.Transfer]:
    d, p = sides()
    tables = [[table.tolist() for table in sequence_blocks(side[0], tokens)] for side in (d, p)]
    theirs = kvhma.live_spans(p[0], tokens, tables[1])
    return [
        kvhma.plan(rank, p).transfer(tokens, kvhma.live_spans(rank, tokens, tables[0], cached), theirs) for rank in d
    ]


# --- plan ------------------------------------------------------------------------------------------------------------


def test_json_is_what_the_library_computes(config: Path) -> None:
    done = cli("plan", config, *PAIR, "--json")
    assert (done.code, done.err) == (0, "")
    form, moved = done.form, transfers(8192)
    assert (form["model"], form["tokens"], form["cached"]) == ("Nemotron-3-Nano", 8192, 0)
    assert form["bytes"] == sum(one.bytes for one in moved)
    assert form["descriptors"] == sum(one.descriptors for one in moved)
    assert form["excess_bytes"] == sum(one.excess_bytes for one in moved)
    assert form["zeroed_bytes"] == sum(int(one.zero[:, 1].sum()) for one in moved)
    reads = [(d, read.source, read.bytes, read.descriptors) for d, one in enumerate(moved) for read in one.reads]
    assert [
        (row["decode_rank"], row["prefill_rank"], row["bytes"], row["descriptors"]) for row in form["pairs"]
    ] == reads
    assert [(row[0], row[1]) for row in reads] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_bytes_by_hand(config: Path) -> None:
    """23 states, cut among four ranks; 6 layers of 8,192 tokens of one head, for each of four ranks."""
    form = cli("plan", config, *PAIR, "--json").form
    state = 23 * 2134016
    attention = 4 * 6 * 8192 * 128 * 2 * 2
    assert form["bytes"] == state + attention
    assert [group["bytes"] for group in form["groups"]] == [6 * 2134016] * 3 + [5 * 2134016, attention]
    for pair in form["pairs"]:
        assert sum(group["bytes"] for group in pair["groups"]) == pair["bytes"]
    assert [form[side]["block_size"] for side in ("prefill", "decode")] == [2096, 1088]
    assert [form[side]["kernel_block"] for side in ("prefill", "decode")] == [16, 64]


def test_the_same_by_name_file_and_directory(config: Path) -> None:
    forms = [cli("plan", what, *PAIR, "--json").form for what in (config, config.parent, NANO, f"nvidia/{NANO}")]
    names = {form.pop("model") for form in forms}
    assert names == {"Nemotron-3-Nano", NANO}
    assert all(form == forms[0] for form in forms)


# MiB that are needed at 128, 1000, 5000 and 32000 tokens.
PUBLISHED = {
    "gemma-3-4b": (17.0, 133.9, 215.6, 741.0),
    "gpt-oss-20b": (6.0, 27.0, 120.8, 753.0),
    "Llama-4-Scout-17B-16E": (24.0, 189.0, 939.0, 2544.0),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (47.6, 52.7, 76.2, 234.3),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-FP8kv": (47.2, 49.8, 61.5, 140.6),
    "Nemotron-H-8B": (99.4, 113.2, 175.7, 597.4),
    "Qwen3-Next-80B-A3B": (40.7, 61.7, 155.4, 787.7),
    "granite-4.0-h-tiny": (28.7, 35.6, 66.8, 277.7),
    "Falcon-H1-7B": (72.4, 110.9, 282.8, 1441.9),
    "DeepSeek-V3": (8.6, 67.6, 335.6, 2144.5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_bytes(name: str, tmp_path: Path) -> None:
    """From the config.json, with last blocks moved whole, as in the published figures."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    for at, tokens in enumerate((128, 1000, 5000, 32000)):
        form = cli("plan", path, "--tokens", tokens, "--descriptor-bytes", 2**40, "--json").form
        needed = PUBLISHED[name][at]
        # A latent is cut at the last token at no cost: it needs up to 15 tokens of 61 layers less than whole blocks.
        least = needed - (15 * 1152 * 61 / MIB if name == "DeepSeek-V3" else 0) - 0.0501
        assert least <= form["bytes"] / MIB <= needed + 0.0501


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("pair", ["1-2", "2-1", "2-4", "4-2"])
def test_every_model_between_every_pair(name: str, pair: str) -> None:
    p, d = pair.split("-")
    done = cli("plan", name, "--prefill", f"tp={p}", "--decode", f"tp={d},block=64", "--tokens", 3000, "--json")
    if name == "Falcon-H1-34B" and "4" in pair:  # two groups of state: vLLM does not start four ranks
        assert (done.code, "tp_size 4: state.n_groups 2" in done.form["text"]) == (2, True)
        return
    assert done.code == 0, done.err
    form = done.form
    assert form["bytes"] == sum(row["bytes"] for row in form["pairs"]) > 0
    assert form["bytes"] == sum(row["bytes"] for row in form["groups"])
    assert {row["decode_rank"] for row in form["pairs"]} == set(range(int(d)))


def test_prefix_hit() -> None:
    """1,088 tokens are one block of D: for attention, but never for the state."""
    some, none = (cli("plan", NANO, *PAIR, "--cached", cached, "--json").form for cached in (1024, 0))
    assert some["groups"] == none["groups"]
    assert "--cached 1,024 is 0 whole blocks of 1,088 tokens in group 4: 0 tokens are not read" in some["notes"]
    hit = cli("plan", NANO, *PAIR, "--cached", 2176, "--json").form
    assert hit["bytes"] == sum(one.bytes for one in transfers(8192, [0, 0, 0, 0, 2]))
    assert hit["groups"][4]["what"] == "tokens 2,176 to 8,191"
    assert not any("--cached" in note for note in hit["notes"])


def test_used_pool_is_seeded() -> None:
    forms = [
        cli("plan", "gemma-3-4b", "--pool", pool, "--seed", seed, "--json").form
        for pool, seed in (("fresh", 0), ("used", 0), ("used", 0), ("used", 1))
    ]
    assert forms[1] == forms[2]
    assert len({form["bytes"] for form in forms}) == 1
    assert forms[0]["descriptors"] < forms[1]["descriptors"] != forms[3]["descriptors"]


def test_predicted_time(tmp_path: Path) -> None:
    """By hand from the constants: ranks of D in parallel, sources of a rank one after the other."""
    link = tmp_path / "link.json"
    link.write_text(
        json.dumps({"kvhma_link": 1, "seconds_per_descriptor": 1e-5, "bytes_per_second": 1e9, "source": "a guess"})
    )
    form = cli("plan", NANO, "--prefill", "tp=4", "--decode", "tp=2", "--link", link, "--json").form
    ranks = [0.0, 0.0]
    for row in form["pairs"]:
        ranks[row["decode_rank"]] += 1e-5 * row["descriptors"] + row["bytes"] / 1e9
    assert len(form["pairs"]) == 4
    assert form["seconds"] == pytest.approx(max(ranks))
    assert form["link"]["source"] == f"a guess ({link})"
    default = cli("plan", NANO, "--json").form
    assert default["link"]["bytes_per_second"] == 40e9
    assert default["link"]["source"].startswith("defaults: ")


def test_a_geometry_is_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "rank.json"
    one = tiny_hybrid(40)
    path.write_bytes(one.to_json())
    form = cli("plan", path, "--tokens", 100, "--json").form
    tables = [table.tolist() for table in sequence_blocks(one, 100)]
    spans = kvhma.live_spans(one, 100, tables)
    moved = kvhma.plan(one, one).transfer(100, spans, spans)
    assert (form["model"], form["bytes"], form["descriptors"]) == ("rank", moved.bytes, moved.descriptors)


def test_geometries_without_block_ids(tmp_path: Path) -> None:
    d, p = sides()
    paths = []
    for index, side in enumerate([d[1], *p]):
        paths.append(tmp_path / f"{index}.json")
        paths[-1].write_bytes(side.to_json())
    form = cli("plan", "--local", paths[0], "--remote", paths[1], "--remote", paths[2], "--json").form
    assert form["bytes"] == transfers(8192)[1].bytes
    assert [(row["decode_rank"], row["prefill_rank"]) for row in form["pairs"]] == [(1, 0)]


# --- the field's words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "built_in"),
    [
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("GOOGLE/Gemma-3-27B-IT", "gemma-3-27b"),
        ("gemma-3-27b-it", "gemma-3-27b"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B"),
        ("qwen3-next-80b-a3b", "Qwen3-Next-80B-A3B"),
        ("unsloth/gpt-oss-20b", "gpt-oss-20b"),
    ],
)
def test_models_by_any_of_their_names(name: str, built_in: str) -> None:
    assert model(name) is models()[built_in]
    assert cli("plan", name, "--tokens", 100, "--json").form["model"] == built_in


def test_ids_of_the_hub() -> None:
    """Each name belongs to one model."""
    words = [hub_id.rpartition("/")[2].lower() for hub_id in hub_ids()]
    assert len(set(words)) == len(words)
    assert set(hub_ids().values()) == set(models())
    for hub_id, name in hub_ids().items():
        assert model(hub_id.rpartition("/")[2]).name == name


def test_a_name_that_is_nearly_right() -> None:
    line = refused("plan", "google/gemma3-27b-it")
    assert "Did you mean google/gemma-3-27b-it?" in line
    assert "hf download google/gemma3-27b-it config.json --local-dir DIR, and DIR as MODEL" in line
    far = refused("plan", "moonshotai/Kimi-K2")
    assert "Did you mean" not in far
    assert "hf download moonshotai/Kimi-K2 config.json" in far


def test_models() -> None:
    form = cli("models", "--json").form
    assert form["kvhma_models"] == 1
    assert [row["name"] for row in form["models"]] == list(models())
    assert {hub_id: row["name"] for row in form["models"] for hub_id in row["hub_ids"]} == dict(hub_ids())
    gemma = next(row for row in form["models"] if row["name"] == "gemma-3-27b")
    assert gemma["layers"] == {"sliding": 52, "full": 10}
    assert gemma["kv_bytes_per_token"] == 62 * 16 * 2 * 128 * 2
    nano = next(row for row in form["models"] if row["name"] == NANO)
    assert (nano["state_bytes"], nano["kv_bytes_per_token"]) == (23 * 2134016, 6 * 2 * 2 * 128 * 2)
    assert cli("models", "-q").out.split() == list(models())
    assert set(cli("models", columns=80).out.split()) > {row["hub_ids"][0] for row in form["models"]}


WORDS = {
    "case": ("TP=2,Block=16", "tp=2"),
    "long": ("tensor-parallel-size=2,block_size=16,kv-cache-dtype=auto,kv_cache_layout=HND", "tp=2"),
    "auto": ("tp=2,kv=auto,ssm=auto", "tp=2"),
    "fp8": ("tp=2,kv=FP8_E4M3", "tp=2,kv=fp8"),
    "NHD": ("tp=2,layout=nhd", "tp=2,layout=LBNHC"),
    "spaces": (" tp = 2 , block = 16 ", "tp=2"),
    "one": ("tp=2,pp=1,dcp=1,dp=1", "tp=2"),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_of_an_engine(name: str) -> None:
    forms = [cli("plan", NANO, "--prefill", text, "--decode", text, "--json").form for text in WORDS[name]]
    assert forms[0] == forms[1]


@pytest.mark.parametrize(
    ("text", "number"), [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("8,192", 8192), ("1M", 2**20)]
)
def test_tokens_as_vllm_writes_them(text: str, number: int) -> None:
    assert cli("plan", "gpt-oss-20b", "--tokens", text, "--json").form["tokens"] == number


def test_dtypes_of_both_sides() -> None:
    auto, fp8 = (cli("plan", "gpt-oss-20b", "--kv-dtype", dtype, "--json").form for dtype in ("AUTO", "fp8_e4m3"))
    assert auto["bytes"] == cli("plan", "gpt-oss-20b", "--json").form["bytes"]
    assert 2 * fp8["bytes"] == auto["bytes"]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (3, 2), (2, 2)])
def test_pipeline_stages(prefill: int, decode: int) -> None:
    """Pipeline stages change no bytes: each layer moves between the stages that have it."""
    whole = cli("plan", NANO, "--prefill", "tp=2", "--decode", "tp=4", "--json").form
    sides = ("--prefill", f"tp=2,pp={prefill}", "--decode", f"tp=4,pp={decode}")
    form = cli("plan", NANO, *sides, "--json").form
    assert (form["bytes"], form["groups"][4]["layers"]) == (whole["bytes"], 6)
    assert [row["bytes"] for row in form["groups"]] == [row["bytes"] for row in whole["groups"]]
    assert (form["prefill"]["pp"], form["decode"]["pp"]) == (prefill, decode)
    for column in ("whole_blocks", "whole_prompt"):
        assert [form[column][field] for field in ("bytes", "descriptors")] == [
            whole[column][field] for field in ("bytes", "descriptors")
        ]
    assert not any("one side lacks" in note for note in form["notes"])
    one = model(NANO)

    def stages(count: int) -> list[set[str]]:
        options = [LayoutOptions(num_blocks=2, pp_rank=rank, pp_size=count) for rank in range(count)]
        return [{layer.name for layer in layout(one, stage).layers} for stage in options]

    held = stages(prefill), stages(decode)
    assert set.union(*held[0]) == set.union(*held[1]) == {name for name, _ in one.specs}
    # Ranks are counted as vLLM counts them: those of a stage are neighbours.
    meet = {(d, p) for d, names in enumerate(held[1]) for p, others in enumerate(held[0]) if names & others}
    assert {(row["decode_rank"] // 4, row["prefill_rank"] // 2) for row in form["pairs"]} == meet
    text = cli("plan", NANO, *sides).words
    assert "engine TP PP tensors" in text
    if decode > 1:
        assert f"{decode} pipeline stages of 4 ranks" in cli("explain", NANO, *sides).words


def test_data_parallel_engines_are_reported() -> None:
    one, some = (cli("plan", NANO, "--decode", f"dp={size}", "--json").form for size in (1, 4))
    assert some.pop("notes") == [
        *one.pop("notes"),
        "decode dp=4: a request is on one of 4 engines, and these are the numbers of one",
    ]
    assert one == some


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_is_the_plans_text(config: Path) -> None:
    done = cli("explain", config, *PAIR, "--rank", 2)
    assert (done.code, done.err) == (0, "")
    d, p = sides()
    assert kvhma.plan(d[2], p).explain().strip() in done.out
    assert "a state of 1.0 MiB has to fit the page of a block" in done.out
    assert "This was rank 2 of 4" in done.out
    form = cli("explain", config, *PAIR, "--all-ranks", "--json").form
    assert [row["text"] for row in form["ranks"]] == [kvhma.plan(rank, p).explain() for rank in d]
    assert form["refusals"] == []


REFUSALS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kv": ("tp=2,kv=fp8", "tp=4", {"field": "dtype", "decode": "bfloat16", "prefill": "float8_e4m3fn"}),
    "ssm": ("tp=2,ssm=bf16", "tp=4", {"field": "dtype", "decode": "float32", "prefill": "bfloat16"}),
}
FIXES = {
    "kv": "give both engines the same --kv-cache-dtype",
    "ssm": "give both engines the same --mamba-ssm-cache-dtype",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_has_field_values_and_fix(name: str) -> None:
    prefill, decode, expected = REFUSALS[name]
    done = cli("explain", NANO, "--prefill", prefill, "--decode", decode, "--json")
    assert (done.code, done.err) == (1, "")
    (row,) = done.form["refusals"]
    assert {key: row[key] for key in expected} == expected
    assert row["fix"].startswith(FIXES[name])
    text = cli("explain", NANO, "--prefill", prefill, "--decode", decode)
    assert text.code == 1
    assert f"field {expected['field']}: {expected['decode']} on D, {expected['prefill']} on P" in text.out
    assert f"fix: {FIXES[name]}" in text.out
    assert expected["decode"] in refused("plan", NANO, "--prefill", prefill, "--decode", decode)


@pytest.mark.parametrize("conv", ["SD", "DS"])
def test_drafts_on_one_side(conv: str) -> None:
    """Rows and slots that only one side has for its drafts are not moved; those that both have cost no descriptor."""

    def moved(prefill: int, decode: int) -> tuple[int, int]:
        sides = (f"tp=2,conv={conv},spec={prefill}", f"tp=4,conv={conv},spec={decode}")
        form = cli("plan", NANO, "--prefill", sides[0], "--decode", sides[1], "--json").form
        return form["bytes"], form["descriptors"]

    plain = moved(0, 0)
    assert moved(0, 2)[0] == moved(2, 0)[0] == moved(1, 3)[0] == plain[0]
    # Five rows of a rank's channels each instead of three, or as many items more of every channel.
    assert 3 * moved(2, 2)[1] <= (5 if conv == "SD" else 3) * plain[1]
    # Contiguous rows leave no gap at all, channels leave one each.
    assert (moved(0, 2)[1] < 2 * plain[1]) == (conv == "SD")


def test_ranges_of_ranks() -> None:
    sides = ("--prefill", "tp=2", "--decode", "tp=4")
    form = cli("explain", NANO, *sides, "--rank", "0-1,3", "--json").form
    every = cli("explain", NANO, *sides, "--all-ranks", "--json").form
    assert [row["rank"] for row in form["ranks"]] == [0, 1, 3]
    assert form["ranks"] == [every["ranks"][rank] for rank in (0, 1, 3)]
    assert "This was rank 0–1, 3 of 4" in cli("explain", NANO, *sides, "--rank", "0-1,3").out


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    """D needs two heads, and only a rank with one of them is given: no finding, and yet refused."""
    one = model("granite-4.0-h-tiny")
    whole, half = (
        layout(one, LayoutOptions(num_blocks=40)),
        layout(one, LayoutOptions(num_blocks=40, tp_rank=0, tp_size=2)),
    )
    (tmp_path / "d.json").write_bytes(whole.to_json())
    (tmp_path / "p.json").write_bytes(half.to_json())
    done = cli("explain", "--local", tmp_path / "d.json", "--remote", tmp_path / "p.json", "--json", "--tokens", 500)
    assert done.code == 1
    (row,) = done.form["refusals"]
    assert (row["code"], row["place"]) == ("no-source", 'layer "model.layers.0.mixer" part "x"')
    assert (row["decode"], row["prefill"]) == ("channels 1536..3072, rows 0..3", "1 sources")
    assert row["reason"] == "no source holds these items"
    assert row["fix"] == "list every rank and pipeline stage of the prefill engine"
    text = cli("explain", "--local", tmp_path / "d.json", "--remote", tmp_path / "p.json", "--tokens", 500).out
    assert 'refused: layer "model.layers.0.mixer" part "x"\n' in text


def two_files(tmp_path: Path, both: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> tuple[object, ...]:
    """Options for two engines that have the geometry `both`; at P it is changed."""
    (tmp_path / "d.json").write_text(json.dumps(both))
    change(both)
    (tmp_path / "p.json").write_text(json.dumps(both))
    return "--local", tmp_path / "d.json", "--remote", tmp_path / "p.json", "--tokens", 100


def test_a_pipeline_stage_without_layers_of_d_is_no_refusal(tmp_path: Path) -> None:
    whole = tiny_hybrid(40)
    stages = [replace(whole, layers=whole.layers[at : at + 3]) for at in (0, 3)]
    other = json.loads(stages[0].to_json())
    other["pages"][0]["parts"][0]["dtype"] = "float16"
    for name, text in (("d", stages[0].to_json()), ("p", stages[1].to_json()), ("q", json.dumps(other).encode())):
        (tmp_path / f"{name}.json").write_bytes(text)
    d = ("--tokens", 100, "--local", tmp_path / "d.json")
    p, q = ("--remote", tmp_path / "p.json"), ("--remote", tmp_path / "q.json")
    same = ("--remote", tmp_path / "d.json")
    assert (done := cli("explain", *d, *p, *same, "--json")).code == 0, done
    assert [row["code"] for row in cli("explain", *d, *p, *q, "--json").form["refusals"]] == ["dtype"]
    assert [row["code"] for row in cli("explain", *d, *p, "--json").form["refusals"]] == ["no-common-layer"]


@pytest.mark.parametrize(
    ("page", "part", "fix"),
    [(0, 0, "the same --kv-cache-dtype"), (1, 0, "the same --mamba-cache-dtype"), (1, 1, "the same --mamba-ssm-cache")],
)
@pytest.mark.parametrize("name", ["{}", "model.{}.self_attn"])
def test_dtype_of_state_or_attention_for_any_names(page: int, part: int, fix: str, name: str, tmp_path: Path) -> None:
    """Kimi's states are in layers called self_attn, and other caches have parts called k and v."""
    both = json.loads(tiny_hybrid(40).to_json())
    both["pages"][0]["parts"][0]["name"] = "k"
    for layer in both["layers"]:
        layer["name"] = name.format(layer["name"])

    def change(form: dict[str, Any]) -> None:
        form["pages"][page]["parts"][part]["dtype"] = "float16"

    rows = cli("explain", *two_files(tmp_path, both, change), "--json").form["refusals"]
    assert rows
    assert all(fix in row["fix"] for row in rows)


def test_vllm_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhma.cli.asked_layout.find_spec", lambda _: None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**NEMOTRON_3_NANO, "model_type": "foo"}))
    assert "--layout vllm: vLLM is not installed here" in refused("plan", file, "--layout", "vllm")
    assert "install vLLM to use its own classes" in refused("plan", file)


def test_geometries_of_a_model_are_planned_alike(tmp_path: Path) -> None:
    """A model's ranks as files: the same hand-off as of the model itself."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(NEMOTRON_3_NANO))
    one = read_config(file)
    for name, ranks, base in (("p", 2, 1 << 40), ("d", 4, 2 << 40)):
        for rank in range(ranks):
            sizes = {"tp_size": ranks, "tp_rank": rank, "base": base + (rank << 36)}
            made = layout(one, LayoutOptions(num_blocks=100, kernel_block="flashinfer", **sizes))
            (tmp_path / f"{name}-{rank}.json").write_bytes(made.to_json())
    remotes = [word for rank in range(2) for word in ("--remote", tmp_path / f"p-{rank}.json")]
    read = cli("plan", "--local", tmp_path / "d-1.json", *remotes, "--tokens", 3000, "--json").form
    whole = cli("plan", file, "--prefill", "tp=2", "--decode", "tp=4", "--tokens", 3000, "--json").form
    assert read["layout"] is None
    assert read["bytes"] == sum(pair["bytes"] for pair in whole["pairs"] if pair["decode_rank"] == 1)
    assert "give HOST:PORT, or --case" in cli("export", "--case", file, "10.0.0.1:5600").err
