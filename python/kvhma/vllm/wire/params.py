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
from typing import Any, NamedTuple

from kvhma._kvhma import ids_to_text, text_to_ids
from kvhma.errors import OtherPromptError, RequestError
from kvhma.geometry import Span
from kvhma.text import quote
from kvhma.vllm.wire.secrets import Secrets

VERSION = 3
"""Version of the ``kvhma`` dictionary."""

_HEX_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_HEX_DIGITS = re.compile(r"[0-9a-f]{32}", re.ASCII)

_MAX_ID = (1 << 31) - 1

_MAX_TOKENS = 1 << 40
_MAX_GROUPS = 256
_MAX_NAME = 512
_MAX_RANKS = 1 << 16
_MAX_PREFIXES = 64
_MAX_ITEMS = 4096
_BLOCKS_PER_TOKEN = 4
"""Most blocks of all groups for each token: a few groups may have blocks of one token."""


class Address(NamedTuple):
    """Where the scheduler of an engine listens, or where other engines reach it."""

    host: str
    port: int

    @property
    def is_wildcard(self) -> bool:
        """Whether the host means every address of a machine, which a listener binds to and no client connects to."""
        with contextlib.suppress(OSError, ValueError):
            return not any(socket.inet_aton(self.host))  # the resolver reads "0" and "0x0" as 0.0.0.0 too
        try:
            found = ipaddress.IPv6Address(self.host.partition("%")[0])
        except ValueError:
            return False
        return not int(found.ipv4_mapped or found)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Incarnation(NamedTuple):
    """A prefill engine from one start to the next.

    Attributes:
        address: its scheduler.
        engine_id: its name.
        incarnation_id: random number; it changes with each restart.
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

    request_id: str
    generation: int


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
        digest: of these tokens, see :func:`kvhma.vllm.scheduler.prompt.prefix_digests`.
    """

    num_tokens: int
    digest: str


class Item(NamedTuple):
    """A multimodal item of a prompt: a picture, for example.

    Attributes:
        identifier: of its content, in vLLM's prefix cache.
        modality: ``image``, ``audio``, ``video`` and others, as vLLM names them.
        offset: its first placeholder token in the prompt.
        length: number of its placeholder tokens.
        shape: digest of what token positions may depend on, for example a grid of patches; 32 zeros if unknown.
    """

    identifier: str
    modality: str
    offset: int
    length: int
    shape: str = "0" * 32


class PrefillParams(NamedTuple):
    """What a decode request has to know of its prefill, or the next turn's prefill of an answer.

    Attributes:
        address: P's scheduler. A proxy may change it, because each network has its names.
        engine_id: P's name.
        incarnation_id: random number of P, which changes with each restart.
        lease_key: the request at P.
        lease: seconds that P holds its blocks after each lease renewal.
        num_tokens: tokens that P's blocks hold.
        prompt: digest of these tokens, see :func:`kvhma.vllm.scheduler.prompt.prompt_digest`.
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
    engine_id: str
    incarnation_id: int
    lease_key: LeaseKey
    lease: float
    num_tokens: int
    prompt: str
    spans: tuple[Span, ...]
    tp_size: int | None = None
    pp_size: int | None = None
    digest: bytes = b""
    prefixes: tuple[Prefix, ...] = ()
    epoch: int = 0
    content_seed: int | None = None
    items: tuple[Item, ...] = ()

    @property
    def incarnation(self) -> Incarnation:
        """The engine whose blocks they are."""
        return Incarnation(self.address, self.engine_id, self.incarnation_id, self.tp_size, self.pp_size)

    def claim(self, reader: int) -> LeaseClaim:
        """Return the claim of a reader."""
        return LeaseClaim(self.lease_key, reader, self.digest)

    def _signed_bytes(self, spans: list[list[Any]]) -> bytes:
        """Return the bytes that the digest covers, with the spans as the parameters write them."""
        fields = [VERSION, self.engine_id, self.incarnation_id, self.lease_key.request_id, self.lease_key.generation]
        fields += [self.lease, self.num_tokens, self.prompt, spans]
        if self.prefixes:
            fields.append(self.prefixes)
        if self.epoch:
            fields.append({"epoch": self.epoch})
        if self.content_seed is not None:
            fields.append(["content", self.content_seed])
        if self.items:
            fields.append(["items", *self.items])
        return json.dumps(fields).encode()

    def to_params(
        self, secrets: Secrets, *, pp_size: int, dcp_size: int = 1, next_turn: bool = False
    ) -> tuple[dict[str, Any], bytes]:
        """Return the ``kv_transfer_params`` that a proxy passes on, and their digest.

        The proxy passes them to D; with `next_turn`, for an answer, to P.
        """
        spans = [[span.first, ids_to_text(span.ids)] for span in self.spans]
        digest = secrets.sign(self._signed_bytes(spans))
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
                "instance": f"{self.incarnation_id:016x}",
                "generation": f"{self.lease_key.generation:016x}",
                "lease": self.lease,
                "tokens": self.num_tokens,
                "prompt": self.prompt,
                "signed": secrets.enabled,
                "digest": digest.hex(),
                "spans": spans,
            },
        }
        if self.prefixes:
            params["kvhma"]["prefixes"] = [list(prefix) for prefix in self.prefixes]
        if self.epoch:
            params["kvhma"]["epoch"] = self.epoch
        if self.content_seed is not None:
            params["kvhma"]["content"] = f"{self.content_seed:016x}"
        if self.items:
            params["kvhma"]["items"] = [list(item) for item in self.items]
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
        _integer(own, "kvhma.version", VERSION, VERSION)
        tokens = _integer(own, "kvhma.tokens", 1, _MAX_TOKENS)
        tp_size, pp_size = (
            None if params.get(name) is None else _integer(params, name, 1, _MAX_RANKS)
            for name in ("tp_size", "pp_size")
        )
        remote = cls(
            address=read_address(params),
            engine_id=_text(params, "remote_engine_id"),
            incarnation_id=_random_id(own, "kvhma.instance"),
            lease_key=LeaseKey(_text(params, "remote_request_id"), _random_id(own, "kvhma.generation")),
            lease=_seconds(own, "kvhma.lease"),
            num_tokens=tokens,
            prompt=hex_digits(own, "kvhma.prompt"),
            spans=(),
            tp_size=tp_size,
            pp_size=pp_size,
            prefixes=_prefixes(own, tokens) if "prefixes" in own else (),
            epoch=_integer(own, "kvhma.epoch", 1, _MAX_TOKENS) if "epoch" in own else 0,
            content_seed=_random_id(own, "kvhma.content") if "content" in own else None,
            items=_items(own, tokens) if "items" in own else (),
        )
        rows = _span_rows(own)
        digest = bytes.fromhex(hex_digits(own, "kvhma.digest"))
        _check_digest(own, secrets, remote._signed_bytes(rows), digest)
        remote = remote._replace(digest=digest)
        if num_prompt_tokens is None:
            return remote
        if tokens > num_prompt_tokens:
            raise OtherPromptError(f"P computed {tokens} tokens, this prompt has {num_prompt_tokens}")
        return remote._replace(spans=_spans(rows, tokens))


def read_address(params: Mapping[str, Any]) -> Address:
    """Return where P's scheduler listens, from untrusted parameters.

    Raises:
        RequestError: the address is missing, or means every address of a machine, where the reader would find itself.
    """
    address = Address(_text(params, "remote_host"), _integer(params, "remote_port", 1, 65535))
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


def hex_digits(values: Mapping[str, Any], key: str) -> str:
    """Return the 32 hexadecimal digits of 16 bytes in untrusted parameters.

    Raises:
        RequestError: the value is something else.
    """
    value = _get(values, key)
    if not isinstance(value, str) or not _HEX_DIGITS.fullmatch(value):
        raise RequestError(f"kv_transfer_params: {key} is {quote(value)}, expected 32 hexadecimal digits")
    return value


def random_id() -> int:
    """Return a random number of 64 bits."""
    return int.from_bytes(os.urandom(8), "little")


def _check_digest(own: Mapping[str, Any], secrets: Secrets, signed: bytes, digest: bytes) -> None:
    """Refuse parameters that were changed, or that an engine with another secret wrote."""
    has_secret = own.get("signed")
    if not isinstance(has_secret, bool):
        raise RequestError(f"kv_transfer_params: kvhma.signed is {quote(has_secret)}, expected true or false")
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


def _span_rows(own: Mapping[str, Any]) -> list[list[Any]]:
    """Return the position and the text of each group's blocks, without reading the texts."""
    rows = own.get("spans")
    if not isinstance(rows, list) or not 0 < len(rows) <= _MAX_GROUPS:
        raise RequestError(f"kv_transfer_params: kvhma.spans is {quote(rows)}, expected a list of 1..{_MAX_GROUPS}")
    found: list[list[Any]] = []
    for row in rows:
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[1], str)):
            raise RequestError(f"kv_transfer_params: kvhma.spans has {quote(row)}, expected [first, ids]")
        found.append([_integer({"first": row[0]}, "kvhma.spans.first", 0, _MAX_ID), row[1]])
    return found


def _prefixes(own: Mapping[str, Any], tokens: int) -> tuple[Prefix, ...]:
    rows = own["prefixes"]
    if not isinstance(rows, list) or not 0 < len(rows) <= _MAX_PREFIXES:
        raise RequestError(
            f"kv_transfer_params: kvhma.prefixes is {quote(rows)}, expected a list of 1..{_MAX_PREFIXES}"
        )
    found: list[Prefix] = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 2:
            raise RequestError(f"kv_transfer_params: kvhma.prefixes has {quote(row)}, expected [tokens, digest]")
        values = {"tokens": row[0], "digest": row[1]}
        lowest = found[-1].num_tokens + 1 if found else 1
        count = _integer(values, "kvhma.prefixes.tokens", lowest, tokens - 1)
        found.append(Prefix(count, hex_digits(values, "kvhma.prefixes.digest")))
    return tuple(found)


def _items(own: Mapping[str, Any], tokens: int) -> tuple[Item, ...]:
    rows = own["items"]
    if not isinstance(rows, list) or not 0 < len(rows) <= _MAX_ITEMS:
        raise RequestError(f"kv_transfer_params: kvhma.items is {quote(rows)}, expected a list of 1..{_MAX_ITEMS}")
    found: list[Item] = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(Item._fields):
            raise RequestError(f"kv_transfer_params: kvhma.items has {quote(row)}, expected {list(Item._fields)}")
        values = dict(zip(Item._fields, row, strict=True))
        # Audio may be inside its video.
        offset = _integer(values, "kvhma.items.offset", found[-1].offset if found else 0, tokens - 1)
        length = _integer(values, "kvhma.items.length", 1, _MAX_TOKENS)
        identifier, modality = _text(values, "kvhma.items.identifier"), _text(values, "kvhma.items.modality")
        found.append(Item(identifier, modality, offset, length, hex_digits(values, "kvhma.items.shape")))
    return tuple(found)


def _spans(rows: list[list[Any]], tokens: int) -> tuple[Span, ...]:
    spans = []
    left = _BLOCKS_PER_TOKEN * tokens + _MAX_GROUPS
    for first, text in rows:
        ids = text_to_ids(text, min(left, tokens + _MAX_GROUPS))
        left -= len(ids)
        spans.append(Span(first, ids))
    return tuple(spans)


def _get(values: Mapping[str, Any], key: str) -> Any:
    return values.get(key.rsplit(".", 1)[-1])


def _text(values: Mapping[str, Any], key: str) -> str:
    value = _get(values, key)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise RequestError(f"kv_transfer_params: {key} is {quote(value)}, expected 1..{_MAX_NAME} printable characters")
    return value


def _integer(values: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """Return an integer, even if a router has written it as 387.0: protobuf's Struct and Lua only have floats."""
    value = _get(values, key)
    whole = value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        raise RequestError(f"kv_transfer_params: {key} is {quote(value)}, expected an integer in {low}..{high}")
    return int(value)


def _seconds(values: Mapping[str, Any], key: str) -> float:
    value = _get(values, key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.1 <= value <= 1e9:  # nan is in no range
        raise RequestError(f"kv_transfer_params: {key} is {quote(value)}, expected seconds")
    return float(value)


def _random_id(values: Mapping[str, Any], key: str) -> int:
    value = _get(values, key)
    if not isinstance(value, str) or not _HEX_ID.fullmatch(value):
        raise RequestError(f"kv_transfer_params: {key} is {quote(value)}, expected 16 hexadecimal digits")
    return int(value, 16)
