# SPDX-License-Identifier: Apache-2.0
"""Memory that P offers to processes of its host: torch shares it, and D checks what it opens and maps it."""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch

from kvhma.errors import GeometryError, HandshakeError
from kvhma.tensors.copying import Piece, Pieces
from kvhma.text import one_line

NAME = "copies"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHM = Path("/dev/shm")  # noqa: S108 - what torch shares is there
_MAX_STORAGES = 1024
_HANDLE_BYTES = 128
_COUNTER = re.compile(rb"/torch_[0-9]{1,10}_[0-9]{1,20}_[0-9]{1,10}")
"""Name of the shared memory in which torch counts who has mapped memory of a device."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Bytes = Annotated[bytes, msgspec.Meta(max_length=_HANDLE_BYTES)]
_Line = Annotated[str, msgspec.Meta(max_length=_HANDLE_BYTES)]


class SharedFile(msgspec.Struct, frozen=True, tag="file"):
    """Host memory: a file without a name that its owner has open.

    Attributes:
        pid: process that has it open.
        descriptor: its number there.
        device: of the file; with `inode` it names the file on this host.
        inode: of the file.
    """

    pid: _Number
    descriptor: _Number
    device: _Number
    inode: _Number


class SharedDevice(msgspec.Struct, frozen=True, tag="device"):
    """Memory of a device, as torch's `UntypedStorage` shares it with other processes.

    Attributes:
        uuid: of the device.
        handle: of the driver.
        offset: of the storage in what the handle opens, in bytes.
        counter: name of torch's shared memory that counts its users.
        counter_offset: of the counter.
        event: handle of an event after which the memory may be used.
        waits: whether there is such an event.
    """

    uuid: _Line
    handle: _Bytes
    offset: _Number
    counter: _Bytes
    counter_offset: _Number
    event: _Bytes
    waits: bool


class SharedStorage(msgspec.Struct, frozen=True):
    """A storage: where P has it, its bytes, and how another process of the host reaches it."""

    address: _Number
    nbytes: _Number
    place: SharedFile | SharedDevice


class Offer(msgspec.Struct, frozen=True):
    """What P offers to processes of its host, which `host` identifies until it boots again."""

    host: _Line
    storages: Annotated[list[SharedStorage], msgspec.Meta(max_length=_MAX_STORAGES)]


_decoder = msgspec.json.Decoder(Offer)


def this_host() -> str:
    """Return what identifies this host until it boots again; empty if the system does not say."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def share(caches: Iterable[torch.Tensor]) -> Offer:
    """Share the storages of caches. Host memory is copied to shared memory, so its addresses are others then.

    Raises:
        GeometryError: they cannot be shared; nothing was moved.
    """
    storages = {storage.data_ptr(): storage for storage in (cache.untyped_storage() for cache in caches)}
    ordered = sorted(storages.values(), key=lambda storage: storage.data_ptr())
    end = 0
    for storage in ordered:
        if storage.data_ptr() < end:
            raise GeometryError("two storages of the caches overlap")
        end = storage.data_ptr() + storage.nbytes()
    host = this_host()
    if not host or len(ordered) > _MAX_STORAGES:
        raise GeometryError(f"{len(ordered)} storages on host {host!r}, at most {_MAX_STORAGES} on a known one")
    room = os.statvfs(_SHM)
    new = sum(storage.nbytes() for storage in ordered if storage.device.type == "cpu" and not storage.is_shared())
    if new > room.f_bavail * room.f_frsize:  # the system would kill the process as soon as it writes beyond
        raise GeometryError(f"{_SHM} has {room.f_bavail * room.f_frsize} bytes free, the caches have {new}")
    try:
        return Offer(host, [_share(storage) for storage in ordered])
    except RuntimeError as error:  # of memory that a process cannot share: expandable segments, or vLLM's for sleep
        raise GeometryError(one_line(str(error), 200)) from error


def _share(storage: torch.UntypedStorage) -> SharedStorage:
    nbytes = storage.nbytes()
    if storage.device.type == "cpu":
        descriptor, _ = storage._share_fd_cpu_()  # the storage keeps it open
        found = os.fstat(descriptor)
        file = SharedFile(os.getpid(), descriptor, found.st_dev, found.st_ino)
        return SharedStorage(storage.data_ptr(), nbytes, file)
    index, handle, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    place = SharedDevice(uuid, handle, offset, counter, counter_offset, event, waits)
    return SharedStorage(storage.data_ptr(), size, place)


def read_offer(data: bytes) -> Offer:
    """Read a peer's offer.

    Raises:
        HandshakeError: it is something else, or names more than an offer may.
    """
    try:
        offer = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"no offer of memory: {one_line(str(error))}") from error
    spans = sorted((storage.address, storage.nbytes) for storage in offer.storages)
    if any(start + nbytes > after for (start, nbytes), (after, _) in pairwise(spans)):
        raise HandshakeError("two storages of the offer overlap")
    return offer


def map_offer(offer: Offer) -> Pieces:
    """Map what an authenticated peer of this host offers, to be read only.

    Raises:
        HandshakeError: it is not what it says; the text names what was found.
        OSError: the system does not open it.
        RuntimeError: torch does not open it.
    """
    if offer.host != this_host():
        raise HandshakeError("it is on another host")
    return Pieces(
        Piece(
            storage.address,
            _map_file(storage.place, storage.nbytes)
            if isinstance(storage.place, SharedFile)
            else _map_device(storage.place, storage.nbytes),
        )
        for storage in offer.storages
        if storage.nbytes
    )


def _map_file(place: SharedFile, nbytes: int) -> np.ndarray:
    """Map a file if it is memory of this user without a name, and the one that the peer means."""
    descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        is_memory = stat.S_ISREG(found.st_mode) and not found.st_nlink and found.st_uid == os.geteuid()
        if not is_memory or (found.st_dev, found.st_ino) != (place.device, place.inode):
            raise HandshakeError(f"file {place.descriptor} of process {place.pid} is not shared memory of that peer")
        if found.st_size < nbytes:
            raise HandshakeError(f"shared memory of {found.st_size} bytes, the peer names {nbytes}")
        return np.frombuffer(mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(descriptor)


def _map_device(place: SharedDevice, nbytes: int) -> torch.Tensor:
    """Map memory of a device that this process sees, and have torch let the current device read it."""
    seen = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    if place.uuid not in seen:
        raise HandshakeError(f"its device {place.uuid} is not visible here")
    if not _COUNTER.fullmatch(place.counter):
        raise HandshakeError(f"{place.counter!r} is not the name of torch's shared memory")
    storage = torch.UntypedStorage._new_shared_cuda(
        seen[place.uuid],
        place.handle,
        nbytes,
        place.offset,
        place.counter,
        place.counter_offset,
        place.event,
        place.waits,
    )
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    content[:1].to(torch.device("cuda", torch.cuda.current_device()))  # torch enables access between two devices then
    return content
