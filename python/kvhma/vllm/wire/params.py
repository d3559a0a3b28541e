# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params``: what P sends D about a request through a proxy, and the only code that reads it.

The keys are upstream's, so existing proxies work unchanged; ``kvhma`` is the only key of our own::

    remote_engine_id, remote_request_id, ...    for routers; D refuses them unless they equal the text
    remote_host, remote_port                    a proxy may change them: each network has its names
    kvhma: signed, digest, text                 what D trusts is in the text, and the digest covers its bytes

The text is JSON, so a router that writes JSON in another way does not change it. Block ids are ranges there,
``"7-12,30,9-8"``; ``remote_block_ids`` has an empty list for each group.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from kvhma._kvhma import spans_to_texts, texts_to_spans
from kvhma.errors import OtherPromptError, RequestError
from kvhma.geometry import Span
from kvhma.text import one_line, quote
from kvhma.vllm.wire.secrets import Secrets

F = TypeVar("F")

VERSION = 4
"""Version of the text."""

DIFFERS = (
    "does its chat template write the date? Then give D the prompt_token_ids of P in kv_transfer_params, or both "
    "engines the same TZ and VLLM_SYSTEM_START_DATE. Of a body with several prompts, vLLM returns the parameters of "
    "the first only"
)
"""Why one request may be another prompt at D, and what to do."""

_MAX_GROUPS = 256
_BLOCKS_PER_TOKEN = 4
"""Most blocks of all groups for each token: a few groups may have blocks of one token."""

_MIN_LEASE_SECONDS = 1.0
_MAX_LEASE_SECONDS = 3600.0
"""Bounds of a lease's length: an untrusted client may have written the parameters."""

_MAX_EXPLAINED = 1 << 16
"""Of a longer text, a refusal does not name the value: its lists would take memory and time."""

_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_RandomId = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Hex128 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Tokens = Annotated[int, Meta(ge=1, le=1 << 40)]
_Ranks = Annotated[int, Meta(ge=1, le=65535)]
_Whole = Annotated[int, Meta(ge=1, le=65535)] | Annotated[float, Meta(ge=1, le=65535, multiple_of=1)]
"""Routers may write 5600.0: protobuf's Struct and Lua only have floats."""


class Address(NamedTuple):
    """Where the scheduler of an engine listens, or where other engines reach it."""

    host: str
    port: int

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

    request_id: _Name
    generation: _RandomId


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

    num_tokens: _Tokens
    digest: Hex128


class Item(NamedTuple):
    """A multimodal item of a prompt: a picture, for example.

    Attributes:
        identifier: of its content, in vLLM's prefix cache.
        modality: ``image``, ``audio``, ``video`` and others, as vLLM names them.
        offset: its first placeholder token in the prompt.
        length: number of its placeholder tokens.
        shape: digest of what token positions may depend on, for example a grid of patches; 32 zeros if unknown.
    """

    identifier: _Name
    modality: _Name
    offset: Annotated[int, Meta(ge=0, le=1 << 40)]
    length: _Tokens
    shape: Hex128 = "0" * 32


_SHORT = {"incarnation_id": "instance", "num_tokens": "tokens", "content_seed": "content"}


class _Text(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, rename=_SHORT):
    """What P signs: the fields of :class:`PrefillParams`. A default value is not written."""

    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    spans: Annotated[
        list[tuple[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)], str]], Meta(min_length=1, max_length=_MAX_GROUPS)
    ]
    engine_id: _Name
    incarnation_id: _RandomId
    lease_key: LeaseKey
    lease: Annotated[float, Meta(ge=0.1, le=1e9)]
    num_tokens: _Tokens
    prompt: Hex128
    tp_size: _Ranks | None = None
    pp_size: _Ranks | None = None
    prefixes: Annotated[tuple[Prefix, ...], Meta(min_length=1, max_length=64)] = ()
    epoch: _Tokens = 0
    content_seed: _RandomId | None = None
    items: Annotated[tuple[Item, ...], Meta(min_length=1, max_length=4096)] = ()


class _Proof(msgspec.Struct):
    """The ``kvhma`` dictionary."""

    signed: bool
    digest: Hex128
    text: str


class _Source(msgspec.Struct):
    """Keys of P's address."""

    remote_host: _Name
    remote_port: _Whole


class _Params(_Source):
    """The keys that D reads. Those of the text are here for routers."""

    kvhma: _Proof
    remote_engine_id: _Name
    remote_request_id: _Name
    tp_size: _Whole | None = None
    pp_size: _Whole | None = None


_encode_text = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(_Text).decode
_signed_fields = attrgetter(*_Text.__struct_fields__[2:])
_COPIES = {
    "remote_engine_id": "engine_id",
    "remote_request_id": "lease_key.request_id",
    "tp_size": "tp_size",
    "pp_size": "pp_size",
}
_copies, _copied = attrgetter(*_COPIES), attrgetter(*_COPIES.values())


class PrefillParams(NamedTuple):
    """What a decode request has to know of its prefill, or the next turn's prefill of an answer.

    Attributes:
        address: P's scheduler. A proxy may change it, because each network has its names.
        spans: live blocks of each of P's groups.
        engine_id: P's name.
        incarnation_id: random number of P, see :class:`Incarnation`.
        lease_key: the request at P.
        lease: seconds that P holds its blocks after each lease renewal.
        num_tokens: tokens that P's blocks hold.
        prompt: digest of these tokens, see :func:`kvhma.vllm.prompts.prompt.prompt_digest`.
        tp_size: P's tensor-parallel ranks; None if the parameters lack them.
        pp_size: P's pipeline stages; None if the parameters lack them.
        prefixes: parts of an answer that the next turn may read if its prompt differs after them; shortest first.
        epoch: of the request's ticket when the request finished; 0 without a ticket.
        content_seed: seed of the content digests of the blocks, see :mod:`kvhma.digests`; None if P makes none.
        items: of its prompt, for a D that uses P's items; empty unless P hands them out.
        digest: of everything but the address, 16 bytes, if it was read from parameters. P accepts only claims with the
            same digest. With a secret it is a signature: only an engine could have written the parameters.
    """

    address: Address
    spans: tuple[Span, ...]
    engine_id: str
    incarnation_id: int
    lease_key: LeaseKey
    lease: float
    num_tokens: int
    prompt: str
    tp_size: int | None = None
    pp_size: int | None = None
    prefixes: tuple[Prefix, ...] = ()
    epoch: int = 0
    content_seed: int | None = None
    items: tuple[Item, ...] = ()
    digest: bytes = b""

    @property
    def incarnation(self) -> Incarnation:
        """The engine whose blocks they are."""
        return Incarnation(self.address, self.engine_id, self.incarnation_id, self.tp_size, self.pp_size)

    def claim(self, reader: int) -> LeaseClaim:
        """Return the claim of a reader."""
        return LeaseClaim(self.lease_key, reader, self.digest)

    def to_params(
        self, secrets: Secrets, *, dcp_size: int = 1, next_turn: bool = False
    ) -> tuple[dict[str, Any], bytes]:
        """Return the ``kv_transfer_params`` that a proxy passes on, and their digest.

        The proxy passes them to D; with `next_turn`, for an answer, to P.
        """
        text = _encode_text(_Text(VERSION, spans_to_texts(self.spans), *_signed_fields(self)))
        digest = secrets.sign(text)
        params: dict[str, Any] = {
            "do_remote_prefill": not next_turn,
            "do_remote_decode": next_turn,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.lease_key.request_id,
            "remote_host": self.address.host,
            "remote_port": self.address.port,
            "remote_block_ids": [[]] * len(self.spans),
            "remote_num_tokens": self.num_tokens,
            "remote_blocks_expiry_time": None,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "dcp_size": dcp_size,
            "transfer_mode": "pull",
            "kvhma": {
                "signed": secrets.enabled,
                "digest": digest.hex(),
                "text": text.decode(),
            },
        }
        return params, digest

    @classmethod
    def from_params(cls, params: Mapping[str, Any], secrets: Secrets, num_prompt_tokens: int | None) -> PrefillParams:
        """Read and check parameters. Safe on any value; `num_prompt_tokens` bounds the result.

        With `num_prompt_tokens` None it does not read the blocks: `spans` is empty.

        Raises:
            RequestError: a key is missing, of the wrong type or out of range; or the parameters were changed on the
                way, or come from an engine with another secret. The text names the key.
            OtherPromptError: they are valid, but of a longer prompt.
        """
        if not isinstance(own := params.get("kvhma"), dict):
            hint = "does the prefill engine run kvhma, and does the proxy pass on all keys?"
            raise _refused("kvhma", own, f"expected a dictionary; {hint}")
        given = convert_params(params, _Params)
        address = _reachable(given.remote_host, int(given.remote_port))
        signed = _read_text(given.kvhma, secrets)
        if _copies(given) != _copied(signed):
            raise _copies_refusal(_copies(given), _copied(signed))
        if num_prompt_tokens is not None and signed.num_tokens > num_prompt_tokens:
            raise OtherPromptError(
                f"P computed {signed.num_tokens} tokens, this prompt has {num_prompt_tokens}: {DIFFERS}"
            )
        spans: tuple[Span, ...] = ()
        if num_prompt_tokens is not None:
            tokens = signed.num_tokens
            spans = texts_to_spans(signed.spans, tokens + _MAX_GROUPS, _BLOCKS_PER_TOKEN * tokens + _MAX_GROUPS)
        return cls._make((address, spans, *_signed_fields(signed), bytes.fromhex(given.kvhma.digest)))


def read_address(params: Mapping[str, Any]) -> Address:
    """Return where P's scheduler listens, from untrusted parameters.

    Raises:
        RequestError: the address is missing, or means every address of a machine, where the reader would find itself.
    """
    source = convert_params(params, _Source)
    return _reachable(source.remote_host, int(source.remote_port))


@lru_cache(1024)  # clients name the hosts
def _reachable(host: str, port: int) -> Address:
    """Return the address; raises RequestError if no other engine can reach P there."""
    address = Address(host, port)
    if not host.isprintable() or address.is_wildcard:
        raise _refused("remote_host", host, "expected where other engines reach P; set advertised_host of P")
    return address


def convert_params(params: Mapping[str, Any], form: type[F]) -> F:
    """Return the keys of untrusted parameters that a form has.

    Raises:
        RequestError: one is missing, or has another type or size. The text has its name, its value and the reason.
    """
    try:
        return msgspec.convert(params, form)
    except msgspec.ValidationError as error:
        raise _refusal(error, params) from None
    except UnicodeEncodeError as error:  # half a surrogate pair where a number belongs
        raise _refused("a value", error.object, error.reason) from None


def _refusal(error: Exception, values: Any, place: str = "") -> RequestError:
    """Return the refusal of values that msgspec refuses: with the name of one, its beginning, and the reason."""
    problem, _, path = one_line(str(error), 300).partition(" - at `$")
    for name in re.findall(r"\w+", path) + re.findall(r"field `(\w+)`", problem):
        values = values[int(name)] if isinstance(values, list) else values.get(name)
        place = f"{place}.{name}" if place else name
    return _refused(place, values, problem[:1].lower() + problem[1:])


def _refused(name: str, value: object, why: str) -> RequestError:
    return RequestError(f"kv_transfer_params: {name} is {quote(value)}, {why}")


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
    """Return a random number of 63 bits."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def _read_text(proof: _Proof, secrets: Secrets) -> _Text:
    """Return what P has signed. Refuse a text that was changed, or that an engine with another secret wrote."""
    if proof.signed != secrets.enabled:
        who = "P has a secret, this engine has none" if proof.signed else "this engine has a secret, P has none"
        raise _refused("kvhma.signed", proof.signed, f"{who}; give both the same (secret_file or KVHMA_SECRET)")
    data = proof.text.encode(errors="surrogatepass")
    if not secrets.verify(data, bytes.fromhex(proof.digest)):
        why = "it was changed on the way, or is that of another request"
        if proof.signed:
            why = f"P's secret does not match any of ours, or {why}"
        raise _refused("kvhma.digest", proof.digest, f"but not of kvhma.text: {why}")
    try:
        signed = _decode_text(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _text_refusal(error, proof.text, data) from None
    if _encode_text(signed) != data:
        raise _refused("kvhma.text", proof.text, "expected each field once, in its order, and no spaces")
    if signed.items or not (signed.engine_id + signed.lease_key.request_id).isprintable():
        _check_names(signed)
    if signed.prefixes or signed.items:
        _check_order(signed)
    signed.lease = min(max(signed.lease, _MIN_LEASE_SECONDS), _MAX_LEASE_SECONDS)
    return signed


def _text_refusal(error: Exception, text: str, data: bytes) -> RequestError:
    # The error may lead to no value: a field is there twice, or the name of an unknown field looks like a place.
    no_value = (msgspec.DecodeError, ValueError, RecursionError, AttributeError, IndexError)
    with contextlib.suppress(*no_value):
        if len(data) <= _MAX_EXPLAINED:
            return _refusal(error, msgspec.json.decode(data), "kvhma")
    return _refused("kvhma.text", text, one_line(str(error), 300))


def _check_names(signed: _Text) -> None:
    """Refuse names that would forge lines of a log."""
    names = [signed.engine_id, signed.lease_key.request_id]
    for item in signed.items:
        names += item[:2]
    if not "".join(names).isprintable():
        odd = next(name for name in names if not name.isprintable())
        raise RequestError(f"kv_transfer_params: kvhma.text has the name {quote(odd)}, expected printable characters")


def _check_order(signed: _Text) -> None:
    """Refuse parts of an answer, and items of a prompt, that are in another order or after its tokens."""
    counts = [prefix.num_tokens for prefix in signed.prefixes]
    if any(first >= second for first, second in pairwise([*counts, signed.num_tokens])):
        raise _refused("kvhma.prefixes", counts, f"expected rising numbers of tokens below {signed.num_tokens}")
    offsets = [item.offset for item in signed.items]  # audio may be inside its video
    if any(first > second for first, second in pairwise([*offsets, signed.num_tokens - 1])):
        raise _refused("kvhma.items", offsets, f"expected items in the order of their {signed.num_tokens} tokens")


def _copies_refusal(copies: tuple[object, ...], own: tuple[object, ...]) -> RequestError:
    """Return the refusal of keys for routers that differ from the text, as those of two requests do."""
    at = next(at for at, copy in enumerate(copies) if copy != own[at])
    why = f"but {quote(own[at])} in kvhma.text: it was changed on the way, or is that of another request"
    return _refused(list(_COPIES)[at], copies[at], why)
