# SPDX-License-Identifier: Apache-2.0
"""Write the defaults of transformers' configuration classes for fields that a ``config.json`` leaves out.

    python tools/config_defaults.py          # writes python/kvhma/data/config_defaults.json
    python tools/config_defaults.py --check  # exit code 1 if the file differs from this transformers

A value that follows from other fields is no default: a rule derives it instead. So each class is made again with other
sizes, and only values that stay are written. A list of layers always follows from other fields, so only its existence
is written. ``lacks`` names fields that the class does not have.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "python" / "kvhma" / "data" / "config_defaults.json"
FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "sliding_window",
    "attention_chunk_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_kv_heads",
)
OPTIONAL = ("num_key_value_heads", "head_dim")
OTHER_SIZES = ({"num_hidden_layers": 12}, {"hidden_size": 3072}, {"num_attention_heads": 24, "hidden_size": 3072})
NESTED = ("thinker_config", "text_config", "llm_config")


def defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults by ``model_type``, and for a type that contains another, that type."""
    from transformers import CONFIG_MAPPING

    found: dict[str, dict[str, Any]] = {}
    for kind in sorted(_language_models()):
        own = _make(CONFIG_MAPPING, kind)
        if own is None:
            continue
        nested = own
        for name in NESTED:
            nested = getattr(nested, name, None) or nested
        if nested is not own:
            found[kind] = {"text": nested.model_type}
            kind, own = nested.model_type, _make(CONFIG_MAPPING, nested.model_type)
        if own is not None:
            fields = _constant(CONFIG_MAPPING, kind, own)
            if fields:
                found[kind] = fields
    return dict(sorted(found.items()))


def _language_models() -> set[str]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    names = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    tables = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in names]
    return {kind for table in tables for kind in table if kind in CONFIG_MAPPING}


def _make(classes: Any, kind: str, **fields: Any) -> Any:
    try:
        return classes[kind](**fields)
    except Exception:  # composites that need arguments, and sizes that do not fit each other
        return None


def _constant(classes: Any, kind: str, own: Any) -> dict[str, Any]:
    """Return the fields that are the same for all other sizes."""
    others = [(sizes, _make(classes, kind, **sizes)) for sizes in OTHER_SIZES]
    fields = {}
    for name in FIELDS:
        value = _value(own, name)
        same = all(one is None or name in sizes or _value(one, name) == value for sizes, one in others)
        if type(value) is int and same:
            fields[name] = value
    if "kv_lora_rank" in fields:  # MLA: the rotary part's
        fields.pop("head_dim", None)
    lacks = [name for name in OPTIONAL if name not in own.to_dict()]
    if lacks:
        fields["lacks"] = lacks
    if _value(own, "layer_types") is not None:
        fields["layer_types"] = "derived"
    return fields


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # another one in each layer
        return config.to_dict().get(name)


def text() -> str:
    """Return the file: one line for each type."""
    import transformers

    version = ".".join(transformers.__version__.split(".")[:2])
    rows = [f'"transformers": "{version}"']
    rows += [f'"{kind}": {json.dumps(fields)}' for kind, fields in defaults().items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = text()
    if "--check" in sys.argv:
        raise SystemExit(found != FILE.read_text("utf-8"))
    FILE.write_text(found, "utf-8")
