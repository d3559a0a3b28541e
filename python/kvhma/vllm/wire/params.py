# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params``: what P sends D about a request through a proxy, and the only code that reads it.

The keys are upstream's, so existing proxies work unchanged; our own keys are in the ``kvhma`` dictionary beside them.
Block ids are ranges of text there, ``"7-12,30,9-8"``; ``remote_block_ids`` has an empty list for each group.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from kvhma._kvhma import ids_to_text, text_to_ids
from kvhma.errors import OtherPromptError, RequestError
from kvhma.geometry import Span
from kvhma.text import quote
from kvhma.vllm.wire.secrets import Secrets
from kvhma.vllm.wire.values import (
    FLAG,
    HEX_DIGITS,
    INLINE,
    NAME,
    RANDOM_ID,
    SECONDS,
    STRING,
    Key,
    integer,
    keys_of,
    read_value,
    read_values,
    rows,
)

VERSION = 3
"""Version of the ``kvhma`` dictionary."""

DIFFERS = (
    "does its chat template write the date? Then give D the prompt_token_ids of P in kv_transfer_params, or both "
    "engines the same TZ and VLLM_SYSTEM_START_DATE. Of a body with several prompts, vLLM returns the parameters of "
    "the first only"
)
"""Why one request may be another prompt at D, and what to do."""

_MAX_ID = (1 << 31) - 1

_MAX_TOKENS = 1 << 40
_MAX_GROUPS = 256
_MAX_RANKS = 1 << 16
_MAX_PREFIXES = 64
_MAX_ITEMS = 4096
_BLOCKS_PER_TOKEN = 4
"""Most blocks of all groups for each token: a few groups may have blocks of one token."""


class Address(NamedTuple):
    """Where the scheduler of an engine listens, or where other engines reach it."""

    host: Annotated[str, Key("remote_host", NAME)]
    port: Annotated[int, Key("remote_port", integer(1, 65535))]

    @property
    def is_wildcard(self) -> bool:
        """Whether the host means every address of a machine, which a listener binds to and no client connects to."""
        return _is_wildcard(self.host)

    @property
    def is_numeric(self) -> bool:
        """Whether the host is an IP address, not a name."""
        return _is_numeric(self.host)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@lru_cache(1024)  # clients name the hosts
def _is_wildcard(host: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return not any(socket.inet_aton(host))  # the resolver reads "0" and "0x0" as 0.0.0.0 too
    try:
        found = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return False
    return not int(found.ipv4_mapped or found)


@lru_cache(1024)  # clients name the hosts
def _is_numeric(host: str) -> bool:
    host, _, scope = host.partition("%")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return re.fullmatch(r"[A-Za-z0-9_.-]*", scope, re.ASCII) is not None


class Incarnation(NamedTuple):
    """A prefill engine from one start, or reset of its caches, to the next.

    Attributes:
        address: its scheduler.
        engine_id: its name.
        incarnation_id: random number; it changes with each restart and each reset of its caches.
        tp_size: its tensor-parallel ranks; None if unknown.
        pp_size: its pipeline stages; None if unknown.
    """

    address: Address
    engine_id: str
    incarnation_id: int
    tp_size: int | None
    pp_size: int | None = None


class LeaseKey(NamedTuple):
    """A finished request whose blocks P holds for its readers.

    Attributes:
        request_id: P's name of the request.
        generation: random number, which tells requests with the same id apart.
    """

    request_id: Annotated[str, Key("remote_request_id", NAME)]
    generation: Annotated[int, Key("kvhma.generation", RANDOM_ID)]


class LeaseClaim(NamedTuple):
    """A request that P holds, and one of its readers.

    Attributes:
        key: the request at P.
        reader: random number of the request at D.
        digest: of the parameters that P handed out for it, 16 bytes.
    """

    key: LeaseKey
    reader: int
    digest: bytes


class Prefix(NamedTuple):
    """The first tokens of an answer and its prompt, which a reader may read without the rest.

    Attributes:
        num_tokens: number of these tokens.
        digest: of these tokens, see :func:`kvhma.vllm.prompts.prompt.prefix_digests`.
    """

    num_tokens: Annotated[int, Key("tokens", integer(1, _MAX_TOKENS))]
    digest: Annotated[str, Key("digest", HEX_DIGITS)]


class Item(NamedTuple):
    """A multimodal item of a prompt: a picture, for example.

    Attributes:
        identifier: of its content, in vLLM's prefix cache.
        modality: ``image``, ``audio``, ``video`` and others, as vLLM names them.
        offset: its first placeholder token in the prompt.
        length: number of its placeholder tokens.
        shape: digest of what token positions may depend on, for example a grid of patches; 32 zeros if unknown.
    """

    identifier: Annotated[str, Key("identifier", NAME)]
    modality: Annotated[str, Key("modality", NAME)]
    offset: Annotated[int, Key("offset", integer(0, _MAX_TOKENS))]
    length: Annotated[int, Key("length", integer(1, _MAX_TOKENS))]
    shape: Annotated[str, Key("shape", HEX_DIGITS)] = "0" * 32


class _WrittenSpan(NamedTuple):
    """A span with its ids as text, which is read only once the digest is known to be right."""

    first: Annotated[int, Key("first", integer(0, _MAX_ID))]
    ids: Annotated[str, Key("ids", STRING)]


class PrefillParams(NamedTuple):
    """What a decode request has to know of its prefill, or the next turn's prefill of an answer.

    A field with a `Key` is written, signed and read as its annotation says; a new one needs nothing else, and is
    optional. A default value is not written. The digest covers the fields in this order.

    Attributes:
        address: P's scheduler. A proxy may change it, because each network has its names.
        engine_id: P's name.
        incarnation_id: random number of P, see :class:`Incarnation`.
        lease_key: the request at P.
        lease: seconds that P holds its blocks after each lease renewal.
        num_tokens: tokens that P's blocks hold.
        prompt: digest of these tokens, see :func:`kvhma.vllm.prompts.prompt.prompt_digest`.
        spans: live blocks of each of P's groups.
        tp_size: P's tensor-parallel ranks; None if the parameters lack them.
        pp_size: P's pipeline stages; None if the parameters lack them.
        digest: of everything but the address and the ranks, 16 bytes, if it was read from parameters. P accepts only
            claims with the same digest. With a secret it is a signature: only an engine could have written the
            parameters.
        content_seed: seed of the content digests of the blocks, see :mod:`kvhma.digests`; None if P makes none.
        prefixes: parts of an answer that the next turn may read if its prompt differs after them; shortest first.
        epoch: of the request's ticket when the request finished; 0 without a ticket.
        items: of its prompt, for a D that uses P's items; empty unless P hands them out.
    """

    address: Address
    engine_id: Annotated[str, Key("remote_engine_id", NAME)]
    incarnation_id: Annotated[int, Key("kvhma.instance", RANDOM_ID)]
    lease_key: Annotated[LeaseKey, INLINE]
    lease: Annotated[float, Key("kvhma.lease", SECONDS)]
    num_tokens: Annotated[int, Key("kvhma.tokens", integer(1, _MAX_TOKENS))]
    prompt: Annotated[str, Key("kvhma.prompt", HEX_DIGITS)]
    spans: tuple[Span, ...]
    tp_size: int | None = None
    pp_size: int | None = None
    digest: bytes = b""
    prefixes: Annotated[tuple[Prefix, ...], Key("kvhma.prefixes", rows(Prefix, _MAX_PREFIXES), list)] = ()
    epoch: Annotated[int, Key("kvhma.epoch", integer(1, _MAX_TOKENS))] = 0
    content_seed: Annotated[int | None, Key("kvhma.content", RANDOM_ID, lambda seed: ["content", seed])] = None
    items: Annotated[tuple[Item, ...], Key("kvhma.items", rows(Item, _MAX_ITEMS), lambda items: ["items", *items])] = ()

    @property
    def incarnation(self) -> Incarnation:
        """The engine whose blocks they are."""
        return Incarnation(self.address, self.engine_id, self.incarnation_id, self.tp_size, self.pp_size)

    def claim(self, reader: int) -> LeaseClaim:
        """Return the claim of a reader."""
        return LeaseClaim(self.lease_key, reader, self.digest)

    def _optional(self) -> list[tuple[Key, Any]]:
        """Return the optional keys whose values are written, and the values."""
        values = zip(_OPTIONAL.items(), _optional_values(self), strict=True)
        return [(key, value) for (name, key), value in values if value != self._field_defaults[name]]

    def _signed_bytes(self, spans: list[list[Any]], optional: list[tuple[Key, Any]]) -> bytes:
        """Return the bytes that the digest covers, with the spans as the parameters write them."""
        signed = [key.signed(value) for key, value in optional]
        return json.dumps([VERSION, *_required_values(self), spans, *signed]).encode()

    def to_params(
        self, secrets: Secrets, *, pp_size: int, dcp_size: int = 1, next_turn: bool = False
    ) -> tuple[dict[str, Any], bytes]:
        """Return the ``kv_transfer_params`` that a proxy passes on, and their digest.

        The proxy passes them to D; with `next_turn`, for an answer, to P.
        """
        spans = [[span.first, ids_to_text(span.ids)] for span in self.spans]
        optional = self._optional()
        digest = secrets.sign(self._signed_bytes(spans, optional))
        required = zip(_REQUIRED.values(), _required_values(self), strict=True)
        params: dict[str, Any] = {
            "do_remote_prefill": not next_turn,
            "do_remote_decode": next_turn,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.lease_key.request_id,
            "remote_host": self.address.host,
            "remote_port": self.address.port,
            "remote_block_ids": [[] for _ in self.spans],
            "remote_num_tokens": self.num_tokens,
            "remote_blocks_expiry_time": None,
            "tp_size": self.tp_size,
            "pp_size": pp_size,
            "dcp_size": dcp_size,
            "transfer_mode": "pull",
            "kvhma": {
                "version": VERSION,
                **{key.short: key.form.write(value) for key, value in required if key.is_own},
                "signed": secrets.enabled,
                "digest": digest.hex(),
                "spans": spans,
                **{key.short: key.form.write(value) for key, value in optional},
            },
        }
        return params, digest

    @classmethod
    def from_params(
        cls, params: Mapping[str, Any], secrets: Secrets, *, num_prompt_tokens: int | None
    ) -> PrefillParams:
        """Read and check parameters. Safe on any value; `num_prompt_tokens` bounds the result.

        With `num_prompt_tokens` None it does not read the blocks: `spans` is empty.

        Raises:
            RequestError: a key is missing, of the wrong type or out of range; or the parameters were changed on the
                way, or come from an engine with another secret. The text names the key.
            OtherPromptError: they are valid, but of a longer prompt.
        """
        own = params.get("kvhma")
        if not isinstance(own, dict):
            raise RequestError(
                f"kv_transfer_params: kvhma is {quote(own)}, expected a dictionary; does the prefill engine run kvhma, "
                "and does the proxy pass on all keys?"
            )
        _VERSION.read(own)
        given = {name: key for name, key in _OPTIONAL.items() if key.short in own}
        given |= {name: key for name, key in _RANKS.items() if params.get(name) is not None}
        found = read_values(_ALL_REQUIRED | given, params, own)
        lease_key = LeaseKey(found.pop("request_id"), found.pop("generation"))
        address = _not_wildcard(Address(found.pop("host"), found.pop("port")))
        spans, digest = list(map(list, found.pop("spans"))), bytes.fromhex(found.pop("digest"))
        has_secret = found.pop("signed")
        remote = cls(address, lease_key=lease_key, spans=(), **found)
        _check_order(remote)
        _check_digest(has_secret, secrets, remote._signed_bytes(spans, remote._optional()), digest)
        if num_prompt_tokens is None:
            return remote._replace(digest=digest)
        if remote.num_tokens > num_prompt_tokens:
            raise OtherPromptError(
                f"P computed {remote.num_tokens} tokens, this prompt has {num_prompt_tokens}: {DIFFERS}"
            )
        return remote._replace(digest=digest, spans=_spans(spans, remote.num_tokens))


_ADDRESS = keys_of(Address)
_VERSION = Key("kvhma.version", integer(VERSION, VERSION))
_PROOF = {
    "spans": Key("kvhma.spans", rows(_WrittenSpan, _MAX_GROUPS)),
    "digest": Key("kvhma.digest", HEX_DIGITS),
    "signed": Key("kvhma.signed", FLAG),
}
_RANKS = {name: Key(name, integer(1, _MAX_RANKS)) for name in ("tp_size", "pp_size")}
_KEYS = keys_of(PrefillParams)
_OPTIONAL = {name: key for name, key in _KEYS.items() if name in PrefillParams._field_defaults}
_REQUIRED = {name: key for name, key in _KEYS.items() if name not in _OPTIONAL}
_ALL_REQUIRED = _REQUIRED | _ADDRESS | _PROOF
_optional_values = attrgetter(*_OPTIONAL)
_required_values = attrgetter(*(f"lease_key.{name}" if name in LeaseKey._fields else name for name in _REQUIRED))


def read_address(params: Mapping[str, Any]) -> Address:
    """Return where P's scheduler listens, from untrusted parameters.

    Raises:
        RequestError: the address is missing, or means every address of a machine, where the reader would find itself.
    """
    return _not_wildcard(Address(**read_values(_ADDRESS, params, {})))


def _not_wildcard(address: Address) -> Address:
    if address.is_wildcard:
        raise RequestError(
            f"kv_transfer_params: remote_host is {quote(address.host)}, expected where other engines reach P; set "
            "advertised_host of P"
        )
    return address


def leads_back(address: Address, engine_id: str) -> str:
    """Return the error text for an address of P that leads to D itself."""
    return (
        f"remote_host and remote_port {address} lead to this engine itself, but the parameters are of prefill engine "
        f"{quote(engine_id)}: set its advertised_host and advertised_port to where this host reaches it"
    )


def not_the_engine(field: str, expected: object, found: object, address: Address) -> str:
    """Return the error text for an engine that is not that of the parameters, or not any more."""
    difference = f"{field} is {expected!r} in kv_transfer_params, {found!r} at {address}"
    return f"{difference}: the blocks are gone, or were never there"


def random_id() -> int:
    """Return a random number of 64 bits."""
    return int.from_bytes(os.urandom(8), "little")


def _check_digest(has_secret: bool, secrets: Secrets, signed: bytes, digest: bytes) -> None:
    """Refuse parameters that were changed, or that an engine with another secret wrote."""
    if has_secret != secrets.enabled:
        who = "P has a secret, this engine has none" if has_secret else "this engine has a secret, P has none"
        raise RequestError(
            f"kv_transfer_params: kvhma.signed is {has_secret}: {who}; give both the same (secret_file or KVHMA_SECRET)"
        )
    if not secrets.verify(signed, digest):
        why = "they were changed on the way, or are those of two requests"
        if has_secret:
            why = f"P's secret does not match any of ours, or {why}"
        raise RequestError(f"kv_transfer_params: kvhma.digest is {digest.hex()}, but not of these parameters: {why}")


def _check_order(remote: PrefillParams) -> None:
    """Refuse parts of an answer, and items of a prompt, that are in another order or after its tokens."""
    lowest = 1
    for prefix in remote.prefixes:
        lowest = 1 + read_value(integer(lowest, remote.num_tokens - 1), prefix.num_tokens, "kvhma.prefixes.tokens")
    lowest = 0
    for item in remote.items:  # audio may be inside its video
        lowest = read_value(integer(lowest, remote.num_tokens - 1), item.offset, "kvhma.items.offset")


def _spans(written: list[list[Any]], tokens: int) -> tuple[Span, ...]:
    spans = []
    left = _BLOCKS_PER_TOKEN * tokens + _MAX_GROUPS
    for first, text in written:
        ids = text_to_ids(text, min(left, tokens + _MAX_GROUPS))
        left -= len(ids)
        spans.append(Span(first, ids))
    return tuple(spans)
