# SPDX-License-Identifier: Apache-2.0
"""The model of an engine, which decides the values in its caches and is not part of a page's description.

Caches of two fine-tunes of the same shape pair layer by layer. Only the names of the models differ.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvhma._kvhma import __version__
from kvhma.errors import HandshakeError, UnsupportedPairError
from kvhma.text import one_line
from kvhma.vllm.config.weight_digests import DIGEST_CHARS, LEVELS, WeightDigests
from kvhma.vllm.wire.built_layers import BuiltLayers, Field
from kvhma.vllm.wire.lease_board import BOARD_PLACES
from kvhma.vllm.wire.messages import Text

_Fields = Annotated[dict[Field, Text], msgspec.Meta(max_length=2048)]


TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
"""Fields that say where an answer ends. A model with embeddings of n-grams begins those anew after such a token, and
the stage that embeds holds it."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A model. Engines that exchange caches have to have the same.

    Attributes:
        model: its name or path.
        revision: commit of its repository if known, or else the requested revision.
        model_id: the operator's name of the model; None if it is not set.
        dtype: of its activations, e.g. ``"bfloat16"``.
        quantization: of its weights; None without quantization.
        cache_dtype: of its attention caches.
        config: fields of its configuration, those of objects in it with a dot, and their values.
        versions: of the software that read the configuration: another version has other fields.
        layers: what it does to caches besides its weights, as it was built.
        overrides: settings of vLLM that change what it computes, as JSON.
        draft: a draft model with separate weights, and how it drafts; None without one.
        weights: digests of the files that they were loaded from; None if the engine does not know them.
        draft_weights: the same of the draft model.
        draft_config: fields of the draft model's configuration.
    """

    model: Text
    revision: Text | None
    model_id: Text | None
    dtype: Text
    quantization: Text | None
    cache_dtype: Text
    overrides: Text
    draft: Text | None
    config: _Fields = {}
    versions: Text = ""
    layers: BuiltLayers = BuiltLayers()
    weights: WeightDigests | None = None
    draft_weights: WeightDigests | None = None
    draft_config: _Fields = {}


class EngineExtra(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine adds to the identity of each of its workers. Versions are for logs only."""

    model: ModelIdentity
    vllm: Text
    kvhma: Text
    place: Annotated[int, msgspec.Meta(ge=0, lt=BOARD_PLACES)] | None = None
    """Of the worker's :class:`kvhma.vllm.wire.lease_board.LeaseBoard`; None if the worker has no board."""
    options: Annotated[dict[Field, msgspec.Raw], msgspec.Meta(max_length=64)] = {}
    """What options say to other engines, by option; each reads and bounds its own."""


def encode_extra(
    identity: ModelIdentity, *, vllm: str, place: int | None = None, options: dict[str, Any] | None = None
) -> bytes:
    """Return the extra bytes of a worker identity.

    Args:
        identity: of the model.
        vllm: its version.
        place: of the worker's lease board.
        options: what options say, by option.
    """
    return msgspec.json.encode(EngineExtra(identity, vllm, __version__, place, options or {}))


def decode_extra(data: bytes) -> EngineExtra:
    """Read the extra bytes of another engine's worker identity.

    Raises:
        HandshakeError: they do not say which model the engine runs.
    """
    try:
        return _extras.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(
            f"the worker identity does not say which model its engine runs: {one_line(str(error))}"
        ) from error


_extras: msgspec.json.Decoder[EngineExtra] = msgspec.json.Decoder(EngineExtra)


def check_same_model(local: ModelIdentity, remote: ModelIdentity) -> None:
    """Refuse caches of another model.

    If both operators set `model_id`, it is compared instead of name and revision, and the files of the weights may have
    another format. A draft model is compared if both sides have one: if P has no draft model, its caches do not come
    from P.

    Raises:
        UnsupportedPairError: the text names the field and both values.
    """
    both_say = local.model_id is not None and remote.model_id is not None
    names = ["model_id"] if both_say else ["model", "revision"]
    names += ["dtype", "quantization", "cache_dtype", "overrides"]
    if local.draft is not None and remote.draft is not None:
        names.append("draft")
    for name in names:
        on_local, on_remote = getattr(local, name), getattr(remote, name)
        if on_local != on_remote:
            hint = "; if they are the same, set model_id on both sides" if name in ("model", "revision") else ""
            raise UnsupportedPairError(
                f"{name} of the model is {_quoted(on_local)} here, {_quoted(on_remote)} at the prefill engine: "
                f"its caches hold other values{hint}"
            )
    if (found := local.layers.difference(remote.layers)) is not None:
        raise UnsupportedPairError(f"{found}: its caches hold other values")
    for draft in ("", "draft_"):
        _check_same_config(local, remote, draft)
        name = f"{draft}weights"
        _check_same_weights(name, getattr(local, name), getattr(remote, name), other_format=both_say)


def _check_same_config(local: ModelIdentity, remote: ModelIdentity, draft: str) -> None:
    """Compare the fields that both sides have; those of one side too, if equal software has read the same format."""
    on_local, on_remote = getattr(local, f"{draft}config"), getattr(remote, f"{draft}config")
    # A loader without a digest says nothing about the format: it may have loaded the same files.
    headers = {weights[:DIGEST_CHARS] for side in (local, remote) if (weights := getattr(side, f"{draft}weights"))}
    names = on_local.keys() & on_remote.keys()
    if on_local and on_remote and local.versions == remote.versions and len(headers) < 2:
        names |= {name for name in on_local.keys() ^ on_remote.keys() if name.rpartition(".")[2] not in TOKENS}
    for name in sorted(names):
        if on_local.get(name) != on_remote.get(name):
            raise UnsupportedPairError(
                f"{name} in the {draft.replace('_', ' ')}model's configuration is {_quoted(on_local.get(name))} here, "
                f"{_quoted(on_remote.get(name))} at the prefill engine: its caches hold other values"
            )


def _check_same_weights(name: str, local: str | None, remote: str | None, *, other_format: bool) -> None:
    """Compare the levels that both sides have. With `other_format` the tensors may have other names and shapes."""
    local, remote = local or "", remote or ""
    for samples, at in zip(LEVELS, range(0, min(len(local), len(remote)), DIGEST_CHARS), strict=False):
        on_local, on_remote = local[at : at + DIGEST_CHARS], remote[at : at + DIGEST_CHARS]
        if on_local == on_remote:
            continue
        if not samples and other_format:
            return
        found, hint = f"one of {samples} samples of equal tensors differs", ""
        if not samples:
            found = "the tensors have other names, types or shapes"
            hint = "; if they are the same, set model_id on both sides"
        raise UnsupportedPairError(
            f"{name} of the model are {on_local} here, {on_remote} at the prefill engine: {found}. "
            f"Its caches hold other values{hint}"
        )


def _quoted(value: str | None) -> str:
    return "not set" if value is None else repr(one_line(value, 300))
