# SPDX-License-Identifier: Apache-2.0
"""What models cache in each layer, from a table or a ``config.json``, and how vLLM lays it out."""

from kvhma.models.table import (
    LATENT_KINDS,
    STATE_KINDS,
    Attention,
    CacheKind,
    Model,
    State,
    StateKind,
    hub_ids,
    model,
    models,
)

__all__ = [
    "LATENT_KINDS",
    "STATE_KINDS",
    "Attention",
    "CacheKind",
    "Model",
    "State",
    "StateKind",
    "hub_ids",
    "model",
    "models",
]
