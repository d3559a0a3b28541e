# SPDX-License-Identifier: Apache-2.0
"""Every error kvhma raises on purpose. Rust raises the same classes.

Texts are for people. What a program wants to know is in attributes: they are what the text was made from, as it was
found, so a peer's names in them are not made printable as they are in the text. They are kept by pickle and by copies.
Ranges such as ``4..8`` are half-open.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass


@dataclass(eq=False, repr=False)
class KvhmaError(Exception):
    """Base of all errors of kvhma.

    Attributes:
        code: short name of what is wrong, which stays as it is, e.g. ``"dtype"`` or ``"null-block"``; that of the class
            where nothing more is known. docs/errors.md lists them.
        place: the object it is about, e.g. ``'layer "model.layers.0" part "kv"'``; empty if that is not known.
        field: the field or argument that is wrong; empty if that is not known.
        reason: why it is wrong; the whole text where nothing more is known.
    """

    text: InitVar[str] = ""
    _: KW_ONLY
    code: str = "error"
    place: str = ""
    field: str = ""
    reason: str = ""

    def __post_init__(self, text: str) -> None:
        """Take from the class and from the text what was not given."""
        super().__init__(text)
        if self.code == KvhmaError.code:
            self.code = type(self).code
        self.reason = self.reason or text


@dataclass(eq=False, repr=False)
class InputError(KvhmaError):
    """A value is not what it has to be.

    Attributes:
        value: what was found, a number if it was one that Rust had read; empty if that is not known.
        expected: what it has to be, a number or in words; empty if that is not known.
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

    It says the same as the :class:`kvhma.Finding` of that difference, in the same words.

    Attributes:
        local: value on the local side.
        remote: value on the remote side.
        layer: name of the layer that `place` is about, if it is about one.
        part: name of the part of the layer's page, if it is about one.
        axis: name of the axis of the part, if it is about one.
    """

    code = "pair"
    _: KW_ONLY
    local: str = ""
    remote: str = ""
    layer: str | None = None
    part: str | None = None
    axis: str | None = None


class NotCountedError(UnsupportedPairError):
    """What another connector would move is not known: nothing is said of whether it refuses."""

    code = "not-counted"


class RequestError(InputError, ValueError):
    """A request does not fit the plan: group count, positions, token count, types."""

    code = "request"


class OtherPromptError(RequestError):
    """What P holds is not of this prompt. Nothing is wrong with either of them."""

    code = "other-prompt"


class BlockIdError(InputError, IndexError):
    """A block id is negative, too large, doubled or the null block."""

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
    """P may have used the blocks for something else while they were read."""

    code = "lease-ended"


class LeaseUnknownError(LeaseEndedError):
    """P may have, and does not say."""

    code = "lease-unknown"


class DigestError(TransferError):
    """What D has after a load is not what P holds, or P does not say what it holds."""

    code = "digest"


class HandshakeError(KvhmaError, ValueError):
    """A handshake message is not one, is of another version, or is too large."""

    code = "handshake"


class HandshakeTimeoutError(HandshakeError):
    """Nobody answered; it may be worth another try."""

    code = "handshake-timeout"


class ConfigError(KvhmaError, ValueError):
    """A configuration cannot be read as a model's; the text names the field and its value."""

    code = "config"


class UnknownModelError(KvhmaError, LookupError):
    """No model of that name is in the table; the text lists those that are."""

    code = "unknown-model"


class LayoutError(KvhmaError, ValueError):
    """A model cannot be laid out as asked; the text names the field and its value."""

    code = "layout"


class AllocationError(KvhmaError, MemoryError):
    """There is not enough memory for all buffers; none was kept."""

    code = "allocation"


class SettingsError(KvhmaError, ValueError):
    """A setting has a value it cannot have; the text names it and both values."""

    code = "settings"


class OracleError(KvhmaError, AssertionError):
    """A transfer is wrong; the text says where, what was expected and what was found."""

    code = "oracle"


class ConnectionEnded(Exception):  # noqa: N818
    """A connection of the side channel is to be closed; it is no error of ours and leaves no listener.

    Attributes:
        refused: why the peer was refused, in a word for a metric; empty if it was not.
    """

    def __init__(self, refused: str = "") -> None:
        """Store why."""
        super().__init__(refused)
        self.refused = refused
