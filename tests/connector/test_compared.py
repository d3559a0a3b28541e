# SPDX-License-Identifier: Apache-2.0
"""Every setting of vLLM that could decide a cache is compared, or stands where it decides none."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.config import CacheConfig, ModelConfig, ParallelConfig
from vllm.envs import compile_factors
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.attention.backend import AttentionImpl

from kvhma.vllm.config.engine_config import _VARIABLES
from kvhma.vllm.config.identity import ModelIdentity
from support.compared import ABSENT, CLASSES, FACTS, OVERRIDES, names_of, table

ROOT = Path(__file__).parents[2]


def names_in_vllm(kind: Any) -> set[str]:
    if kind is compile_factors:
        return {name for name in compile_factors() if not name.startswith("RAY_")}
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    found = inspect.signature(kind.__init__).parameters.values()
    return {parameter.name for parameter in found if parameter.kind is not parameter.VAR_KEYWORD} - {"self"}


KINDS = [ModelConfig, CacheConfig, ParallelConfig, Attention, MLAAttention, AttentionImpl, compile_factors]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_vllm_is_classified_and_no_other(kind):
    """If this fails: find out whether the field decides bytes or values, and compare it if it does."""
    classified = Counter(names_of(kind.__name__))
    assert [name for name, count in classified.items() if count > 1] == []
    series = vllm.__version__.rpartition(".")[0]
    assert names_in_vllm(kind) == classified.keys() - set(ABSENT.get(series, "").split())


def test_every_variable_that_decides_values_is_compared():
    assert set(_VARIABLES) == set(CLASSES["compile_factors"][OVERRIDES].split()) - {"VLLM_PLUGINS"}


def test_every_fact_has_a_test_and_a_row_on_the_page():
    for fact in FACTS:
        path, _, name = fact.test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), fact.test
    page = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    assert table() in page, f"docs/how-it-works.md needs this table:\n{table()}"


def test_every_field_of_an_identity_is_a_fact():
    said = {name for fact in FACTS for name in fact.fields.split()}
    assert said == set(ModelIdentity.__struct_fields__)
