# SPDX-License-Identifier: Apache-2.0
"""Host names of other engines, looked up in separate threads because a name service may be slow."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from socket import AF_INET, AF_INET6, NI_NUMERICHOST, NI_NUMERICSERV, SOCK_STREAM, gaierror, getaddrinfo, getnameinfo

from kvhma.errors import HandshakeTimeoutError
from kvhma.text import one_line
from kvhma.vllm.threads import in_thread
from kvhma.vllm.wire.params import Address

_MAX_LOOKUPS = 64
"""Names that are looked up at a time."""

_lookups: dict[Address, Future[Address]] = {}
_lookups_lock = threading.Lock()


def resolve(address: Address, timeout: float) -> Address:
    """Return the numeric form of an address; wait at most `timeout` seconds for it.

    Raises:
        HandshakeTimeoutError: the name is not known, no name service answers in time, or too many look-ups run.
    """
    if address.is_numeric:
        return address
    try:
        return look_up(address).result(timeout)
    except FutureTimeoutError as error:
        raise HandshakeTimeoutError(
            f"remote_host {one_line(address.host)!r} was not looked up in {timeout} s"
        ) from error


def look_up(address: Address) -> Future[Address]:
    """Start to look a name up in a new thread, or return the running look-up.

    Raises:
        HandshakeTimeoutError: too many look-ups run.
    """
    with _lookups_lock:
        if address in _lookups:
            return _lookups[address]
        if len(_lookups) >= _MAX_LOOKUPS:
            raise HandshakeTimeoutError(f"{len(_lookups)} other names are being looked up")
        try:
            found = _lookups[address] = in_thread("kvhma-look-up", lambda: _look_up(address))
        except RuntimeError as error:
            raise HandshakeTimeoutError(f"remote_host {one_line(address.host)!r}: {error}") from error
    return found


def _look_up(address: Address) -> Address:
    try:
        # A listener at a name binds to its first IPv4 address, if it has one.
        for family in (AF_INET, AF_INET6):
            with contextlib.suppress(gaierror):
                ((*_, place), *_) = getaddrinfo(address.host, address.port, family, SOCK_STREAM)
                return Address(getnameinfo(place, NI_NUMERICHOST | NI_NUMERICSERV)[0], address.port)
        raise OSError("the name is not known")
    except BaseException as error:
        raise HandshakeTimeoutError(f"remote_host {one_line(address.host)!r}: {error}") from error
    finally:
        with _lookups_lock:
            _lookups.pop(address, None)
