# SPDX-License-Identifier: Apache-2.0
"""Host names of other engines: resolved beside everything else, since a name service takes the time it likes."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from socket import AF_INET, AF_INET6, NI_NUMERICHOST, NI_NUMERICSERV, SOCK_STREAM, gaierror, getaddrinfo, getnameinfo

from kvhma.errors import HandshakeTimeoutError
from kvhma.text import one_line
from kvhma.vllm.threads import in_thread
from kvhma.vllm.wire.params import Address

_MAX_LOOKUPS = 64
"""Names that are looked up at a time, and as many that have been found before: names of a stranger's choosing, which a
name service of its own answers slowly, leave these their room."""

_MAX_FOUND = 1024

_lookups: dict[Address, Future[Address]] = {}
_found: OrderedDict[Address, None] = OrderedDict()
"""Names that have been found before."""

_lookups_lock = threading.Lock()


def is_numeric(address: Address) -> bool:
    """Return whether the host of an address is an IP address and no name."""
    host, _, scope = address.host.partition("%")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return re.fullmatch(r"[A-Za-z0-9_.-]*", scope, re.ASCII) is not None


def resolve(address: Address, timeout: float) -> Address:
    """Return the numeric form of an address; wait `timeout` seconds for it at most.

    Raises:
        HandshakeTimeoutError: the name is not known, no name service answers in time, or too many are being asked.
    """
    if is_numeric(address):
        return address
    try:
        return look_up(address).result(timeout)
    except FutureTimeoutError as error:
        raise HandshakeTimeoutError(
            f"remote_host {one_line(address.host)!r} was not looked up in {timeout} s"
        ) from error


def look_up(address: Address) -> Future[Address]:
    """Start to look a name up in a thread of its own, or return the look-up that is under way.

    Raises:
        HandshakeTimeoutError: too many are under way.
    """
    with _lookups_lock:
        if address in _lookups:
            return _lookups[address]
        others = sum((other in _found) == (address in _found) for other in _lookups)
        if others >= _MAX_LOOKUPS:
            raise HandshakeTimeoutError(f"{others} other names are being looked up")
        try:
            found = _lookups[address] = in_thread("kvhma-look-up", lambda: _look_up(address))
        except RuntimeError as error:
            raise HandshakeTimeoutError(f"remote_host {one_line(address.host)!r}: {error}") from error
    return found


def _look_up(address: Address) -> Address:
    try:
        # A listener at a name is bound to its first address of IPv4, if it has one.
        for family in (AF_INET, AF_INET6):
            with contextlib.suppress(gaierror):
                ((*_, place), *_) = getaddrinfo(address.host, address.port, family, SOCK_STREAM)
                numeric = Address(getnameinfo(place, NI_NUMERICHOST | NI_NUMERICSERV)[0], address.port)
                _note_found(address)
                return numeric
        raise OSError("the name is not known")
    except BaseException as error:
        raise HandshakeTimeoutError(f"remote_host {one_line(address.host)!r}: {error}") from error
    finally:
        with _lookups_lock:
            _lookups.pop(address, None)


def _note_found(address: Address) -> None:
    with _lookups_lock:
        _found[address] = None
        _found.move_to_end(address)
        if len(_found) > _MAX_FOUND:
            _found.popitem(last=False)
