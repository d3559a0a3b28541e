# SPDX-License-Identifier: Apache-2.0
"""Memory that P offers to processes of its host: torch shares it, and D checks what it opens and maps it."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from kvhma.errors import GeometryError, HandshakeError
from kvhma.geometry import Memory
from kvhma.tensors.copying import Content, Extents
from kvhma.text import one_line

NAME = "copies"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHM = Path("/dev/shm")  # noqa: S108 - what torch shares is there
_MAX_STORAGES = 512
_HANDLE_BYTES = 80
"""Most bytes of torch's handle of memory that the driver allocated; those of expandable segments are longer."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Line = Annotated[str, msgspec.Meta(min_length=1, max_length=80)]


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
    """

    uuid: _Line
    handle: Annotated[bytes, msgspec.Meta(min_length=1, max_length=_HANDLE_BYTES)]
    offset: _Number


class SharedStorage(msgspec.Struct, frozen=True):
    """A storage of P.

    Attributes:
        address: where P has it.
        nbytes: its bytes.
        place: how another process of the host reaches it.
    """

    address: _Number
    nbytes: _Number
    place: SharedFile | SharedDevice


class Offer(msgspec.Struct, frozen=True):
    """What P offers to processes of its host.

    Attributes:
        host: identifies the host until it boots again.
        storages: those of its caches.
    """

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
        GeometryError: they cannot be shared. Some may have moved.
    """
    found = {storage._cdata: storage for storage in (cache.untyped_storage() for cache in caches) if storage.nbytes()}
    ordered = sorted(found.values(), key=lambda storage: storage.data_ptr())
    for storage, after in pairwise(ordered):
        if storage.data_ptr() + storage.nbytes() > after.data_ptr():
            raise GeometryError("two storages of the caches overlap")
    host = this_host()
    if not host or len(ordered) > _MAX_STORAGES:
        raise GeometryError(f"{len(ordered)} storages on host {host!r}, at most {_MAX_STORAGES} on a known one")
    new = sum(storage.nbytes() for storage in ordered if storage.device.type == "cpu" and not storage.is_shared())
    try:
        if new and new > (room := shutil.disk_usage(_SHM).free):  # the system would kill a process that writes beyond
            raise GeometryError(f"{_SHM} has {room} bytes free, the caches have {new}")
        return Offer(host, [_share(storage) for storage in ordered])
    except (OSError, RuntimeError) as error:  # expandable segments, and vLLM's memory for sleep mode
        raise GeometryError(one_line(str(error), 200)) from error


def _share(storage: Any) -> SharedStorage:
    nbytes = storage.nbytes()
    if storage.device.type == "cpu":
        descriptor, _ = storage._share_fd_cpu_()  # the storage keeps it open
        found = os.fstat(descriptor)
        file = SharedFile(os.getpid(), descriptor, found.st_dev, found.st_ino)
        return SharedStorage(storage.data_ptr(), nbytes, file)
    index, handle, size, offset, counter, counter_offset, *_ = storage._share_cuda_()
    # No process takes this count of torch's, and with it the storage would never be freed.
    torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
    if len(handle) > _HANDLE_BYTES:
        raise GeometryError("memory in expandable segments is not shared")
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return SharedStorage(storage.data_ptr(), size, SharedDevice(uuid, handle, offset))


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


def map_offer(offer: Offer, memory: Memory) -> Extents:
    """Map what an authenticated peer of this host offers, to be read only.

    Args:
        offer: of the peer.
        memory: where its caches are.

    Raises:
        HandshakeError: it is not what it says; the text names what was found.
        OSError: the system does not open it.
        RuntimeError: torch does not open it.
    """
    if offer.host != this_host():
        raise HandshakeError("it is on another host")
    return Extents((storage.address, _map(storage, memory)) for storage in offer.storages if storage.nbytes)


def _map(storage: SharedStorage, memory: Memory) -> Content:
    place = storage.place
    if isinstance(place, SharedFile) != (memory == "DRAM"):
        raise HandshakeError(f"its caches are in {memory}, what it offers is not")
    return _map_file(place, storage.nbytes) if isinstance(place, SharedFile) else _map_device(place, storage.nbytes)


def _map_file(place: SharedFile, nbytes: int) -> NDArray[np.uint8]:
    """Map a file if it is memory of this user without a name, and the one that the peer means.

    The peer may shorten it later, which ends this process. It is the same user's, so it can end it in any case.
    """
    # Opened as a path only, so that no driver of a device notices before the file is known to be memory.
    descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        is_own = stat.S_ISREG(found.st_mode) and not found.st_nlink and found.st_uid == os.geteuid()
        named = place.device, place.inode
        if not is_own or (found.st_dev, found.st_ino) != named or found.st_dev != _SHM.stat().st_dev:
            raise HandshakeError(f"file {place.descriptor} of process {place.pid} is not shared memory of that peer")
        if found.st_size < nbytes:
            raise HandshakeError(f"shared memory of {found.st_size} bytes, the peer names {nbytes}")
        with Path(f"/proc/self/fd/{descriptor}").open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(descriptor)


def _map_device(place: SharedDevice, nbytes: int) -> torch.Tensor:
    """Map memory of a device that this process sees, and have torch let the current device read it."""
    seen = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    if place.uuid not in seen:
        raise HandshakeError(f"its device {place.uuid} is not visible here")
    index, current = seen[place.uuid], torch.cuda.current_device()
    if index != current and not torch.cuda.can_device_access_peer(current, index):
        raise HandshakeError(f"device {current} does not reach its device {place.uuid}")
    # torch counts the users of shared memory. This process counts for itself, not in what the peer names; nothing has
    # to be waited for, because P hands blocks off after it has computed them.
    counted: Any = torch.empty(1, dtype=torch.uint8, device=f"cuda:{index}").untyped_storage()
    own = counted._share_cuda_()
    storage = torch.UntypedStorage._new_shared_cuda(
        index, place.handle, nbytes, place.offset, own[4], own[5], b"", False
    )
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    content[:1].to(f"cuda:{current}")  # torch enables access between two devices then
    return content
