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
