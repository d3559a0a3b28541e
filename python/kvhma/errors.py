# SPDX-License-Identifier: Apache-2.0
"""Every error kvhma raises on purpose. Rust raises the same classes."""

from __future__ import annotations


class KvhmaError(Exception):
    """Base of all errors of kvhma."""


class GeometryError(KvhmaError, ValueError):
    """A geometry contradicts itself; the text names the field and both values."""


class UnsupportedPairError(KvhmaError, NotImplementedError):
    """Two geometries cannot be paired; the text names the field and both values."""


class RequestError(KvhmaError, ValueError):
    """A request does not fit the plan: group count, positions, token count, types."""


class BlockIdError(KvhmaError, IndexError):
    """A block id is negative, too large, doubled or the null block."""


class AddressOverflowError(KvhmaError, OverflowError):
    """An address, size or count does not fit its type."""


class TransferError(KvhmaError, RuntimeError):
    """The transfer library refused or lost a transfer."""


class PeerLostError(TransferError, ConnectionError):
    """The other side is gone; a new handshake is needed before the next transfer."""


class HandshakeError(KvhmaError, ValueError):
    """A handshake message is not one, is of another version, or is too large."""


class HandshakeTimeoutError(HandshakeError):
    """Nobody answered; it may be worth another try."""


class LeaseEndedError(TransferError):
    """P may have used the blocks for something else while they were read."""


class LeaseUnknownError(LeaseEndedError):
    """P may have, and does not say."""


class OtherPromptError(RequestError):
    """What P holds is not of this prompt. Nothing is wrong with either of them."""


class ConfigError(KvhmaError, ValueError):
    """A configuration cannot be read as a model's; the text names the field and its value."""


class UnknownModelError(KvhmaError, LookupError):
    """No model of that name is in the table; the text lists those that are."""


class LayoutError(KvhmaError, ValueError):
    """A model cannot be laid out as asked; the text names the field and its value."""


class AllocationError(KvhmaError, MemoryError):
    """There is not enough memory for all buffers; none was kept."""


class SettingsError(KvhmaError, ValueError):
    """A setting has a value it cannot have; the text names it and both values."""


class OracleError(KvhmaError, AssertionError):
    """A transfer is wrong; the text says where, what was expected and what was found."""
