# SPDX-License-Identifier: Apache-2.0
"""Every error that kvhma raises on purpose. The Rust extension raises the same classes.

Texts are for people; programs read the attributes, from which the text was made. Attributes have raw values: a peer's
names in them are not made printable, unlike in the text. Pickle and copies preserve them. Ranges such as ``4..8`` are
half-open.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass


@dataclass(eq=False, repr=False)
class KvhmaError(Exception):
    """Base of all errors of kvhma.

    Attributes:
        code: stable short name of the error, e.g. ``"dtype"`` or ``"null-block"``; the code of the class if nothing
            more is known. docs/errors.md lists the codes.
        place: the object with the error, e.g. ``'layer "model.layers.0" part "kv"'``; empty if unknown.
        field: the field or argument that is wrong; empty if unknown.
        reason: why it is wrong; the whole text if nothing more is known.
    """

    text: InitVar[str] = ""
    _: KW_ONLY
    code: str = "error"
    place: str = ""
    field: str = ""
    reason: str = ""

    def __post_init__(self, text: str) -> None:
        """Derive missing attributes from the class and the text."""
        super().__init__(text)
        if self.code == KvhmaError.code:
            self.code = type(self).code
        self.reason = self.reason or text


@dataclass(eq=False, repr=False)
class InputError(KvhmaError):
    """A value is not as required.

    Attributes:
        value: the value that was found; a number if Rust had read a number. Empty if unknown.
        expected: the required value, as a number or in words; empty if unknown.
    """

    code = "input"
    _: KW_ONLY
    value: int | str = ""
    expected: int | str = ""


class GeometryError(InputError, ValueError):
    """A geometry contradicts itself; the text names the field and both values."""

    code = "geometry"


@dataclass(eq=False, repr=False)
class UnsupportedPairError(KvhmaError, NotImplementedError):
    """Two geometries cannot be paired; the text names the field and both values.

    It has the same text as the :class:`kvhma.Finding` of that difference.

    Attributes:
        local: value on the local side.
        remote: value on the remote side.
        layer: name of the layer in `place`, if it has one.
        part: name of the part of the layer's page, if `place` has one.
        axis: name of the axis of the part, if `place` has one.
    """

    code = "pair"
    _: KW_ONLY
    local: str = ""
    remote: str = ""
    layer: str | None = None
    part: str | None = None
    axis: str | None = None


class RequestError(InputError, ValueError):
    """A request does not fit the plan: group count, positions, token count, types."""

    code = "request"


class OtherPromptError(RequestError):
    """P's blocks are not of this prompt. Neither of them is wrong."""

    code = "other-prompt"


class BlockIdError(InputError, IndexError):
    """A block id is negative, too large, listed twice or the null block."""

    code = "block-id"


class AddressOverflowError(InputError, OverflowError):
    """An address, size or count does not fit its type."""

    code = "address"


class TransferError(KvhmaError, RuntimeError):
    """The transfer library refused or lost a transfer."""

    code = "transfer"


class PeerLostError(TransferError, ConnectionError):
    """The other side is gone; a new handshake is needed before the next transfer."""

    code = "peer-lost"


class LeaseEndedError(TransferError):
    """P may have reused the blocks while they were read."""

    code = "lease-ended"


class LeaseUnknownError(LeaseEndedError):
    """P may have reused the blocks, and does not reply."""

    code = "lease-unknown"


class DigestError(TransferError):
    """After a load, D's content differs from P's, or P does not send its digest."""

    code = "digest"


class HandshakeError(KvhmaError, ValueError):
    """A handshake message has another form or version, or is too large."""

    code = "handshake"


class HandshakeTimeoutError(HandshakeError):
    """The peer did not reply; a retry may succeed."""

    code = "handshake-timeout"


class ConfigError(KvhmaError, ValueError):
    """A configuration cannot be read as a model's; the text names the field and its value."""

    code = "config"


class UnknownModelError(KvhmaError, LookupError):
    """The table has no model of that name; the text lists its models."""

    code = "unknown-model"


class LayoutError(KvhmaError, ValueError):
    """A model cannot be laid out as requested; the text names the field and its value."""

    code = "layout"


class AllocationError(KvhmaError, MemoryError):
    """There is not enough memory for all buffers; no buffer was kept."""

    code = "allocation"


class SettingsError(KvhmaError, ValueError):
    """A setting has an invalid value; the text names it and both values."""

    code = "settings"


class OracleError(KvhmaError, AssertionError):
    """A transfer is wrong; the text says where, and has the expected and the found value."""

    code = "oracle"


class ConnectionEnded(Exception):  # noqa: N818
    """A connection of the side channel must be closed. It never leaves the listener and is no error of kvhma.

    Attributes:
        refused: why the peer was refused, as a label for a metric; empty if it was not refused.
    """

    def __init__(self, refused: str = "") -> None:
        """Store why."""
        super().__init__(refused)
        self.refused = refused
