# SPDX-License-Identifier: Apache-2.0
"""The model that engines of the connector's tests claim to run."""

from kvhma.vllm.config.identity import ModelIdentity, encode_extra

IDENTITY = ModelIdentity(
    model="org/tiny",
    revision="0123abc",
    model_id=None,
    dtype="bfloat16",
    quantization=None,
    cache_dtype="bfloat16",
    overrides="{}",
    draft=None,
)
EXTRA = encode_extra(IDENTITY, vllm="0.32.0")
