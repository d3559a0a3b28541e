# SPDX-License-Identifier: Apache-2.0
"""Digests of a model's weights: of the names, types and shapes of all tensors, and of samples of their bytes.

A sample is a page of 4 KiB of a tensor. The names and sizes of all tensors decide which pages, so neither the number of
ranks nor the files that hold the tensors matter::

    tensor     |page|page|page|page|page|page|page|page|page|     spans of equal length, one page of each
    spans      |--------------|--------------|--------------|
    samples         ^              ^                    ^

* With at most 4,096 tensors each tensor has a sample. Larger tensors share the rest in proportion to their size.
* With more tensors 4,096 of them have one sample.
* Up to about 16 MiB, all bytes are read.

Samples are taken in an order that depends on the names too. The text has a digest of the headers, then of the first 64,
512 and 4,096 samples. An engine that ran out of time lacks the last of them, so two engines compare what both have.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    import torch

LEVELS = (0, 64, 512, 4096)
"""Samples that each of the digests covers, besides the headers."""

DIGEST_CHARS = 16
"""Hexadecimal digits of the digest of one level."""

WeightDigests = Annotated[str, msgspec.Meta(pattern=f"^([0-9a-f]{{{DIGEST_CHARS}}}){{1,{len(LEVELS)}}}\\Z")]
"""The digests of the levels, one after the other; the last levels may be missing."""

PAGE_BYTES = 4096
SECONDS = 2.0
"""How long a start may take longer for the weights."""

_MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""

_THREADS = 32
"""Reads at a time: a network file system takes milliseconds for each."""


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: in the file.
        dtype: as safetensors names it, e.g. ``"BF16"``.
        shape: its dimensions.
        nbytes: its size, in the order of its elements.
        read: returns the bytes from a first byte to another; may block.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[int, int], bytes]


def digest_files(paths: Sequence[str | Path], deadline: float) -> WeightDigests:
    """Return the digests of the tensors in some files.

    Args:
        paths: files of safetensors, or of PyTorch. Each tensor is in one of them.
        deadline: on the clock of ``time.monotonic``. Levels that are not complete then are left out.

    Raises:
        ValueError: the headers say nothing, disagree, or could not be read in time; a file is cut.
        OSError: of a file.
    """
    stopped = threading.Event()
    pool = ThreadPoolExecutor(_THREADS, "kvhma-weights")
    headers: list[Future[list[Tensor]]] = []
    reads: list[Future[list[bytes]]] = []
    try:
        headers += [pool.submit(_read_header, Path(path)) for path in paths]
        if not _wait_all(headers, deadline):
            raise ValueError(f"the headers of {len(paths)} files could not be read in time")
        tensors = sorted((tensor for header in headers for tensor in header.result()), key=lambda tensor: tensor.name)
        digest = _digest_header(tensors)
        samples = choose_samples(tensors, digest.digest())
        found = [digest.hexdigest()]
        for first, last in pairwise(LEVELS):
            part = samples[first:last]
            reads[:] = [pool.submit(_digest_samples, part[index::_THREADS], stopped) for index in range(_THREADS)]
            if not _wait_all(reads, deadline):
                break
            for index in range(len(part)):
                digest.update(reads[index % _THREADS].result()[index // _THREADS])
            found.append(digest.hexdigest())
        return "".join(found)
    except Exception as error:
        # A future holds the error, whose frames hold the files: Python would close them only when it collects garbage.
        headers.clear()
        reads.clear()
        raise error.with_traceback(None) from None
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _wait_all(futures: Sequence[Future[Any]], deadline: float) -> bool:
    seconds = deadline - time.monotonic()
    return seconds > 0 and not wait(futures, seconds).not_done


def _digest_header(tensors: Sequence[Tensor]) -> Any:
    if not tensors:
        raise ValueError("no file has a tensor")
    for tensor, following in pairwise(tensors):
        if tensor.name == following.name:
            raise ValueError(f"tensor {tensor.name[:300]!r} is in the files twice")
    lines = (f"{tensor.name!r} {tensor.dtype} {tensor.shape}\n" for tensor in tensors)
    return hashlib.blake2b("".join(lines).encode("utf-8", "surrogatepass"), digest_size=DIGEST_CHARS // 2)


def choose_samples(tensors: Sequence[Tensor], seed: bytes) -> list[tuple[Tensor, int]]:
    """Return the pages that are read, in the order in which the levels cover them, as tensor and number of the page.

    Args:
        tensors: in the order of their names.
        seed: of the pseudo-random choice.
    """

    def draw(name: str, index: int = 0) -> bytes:
        text = f"{index} {name}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=seed, digest_size=16).digest()

    filled = [tensor for tensor in tensors if tensor.nbytes]
    filled = sorted(filled, key=lambda tensor: draw(tensor.name))[: LEVELS[-1]]
    total, spare = sum(tensor.nbytes for tensor in filled), LEVELS[-1] - len(filled)
    drawn: list[tuple[bytes, Tensor, int]] = []
    before = 0
    for tensor in filled:
        pages = -(-tensor.nbytes // PAGE_BYTES)
        after = before + tensor.nbytes
        spans = min(pages, 1 + spare * after // total - spare * before // total)
        before = after
        for index in range(spans):
            first, end = pages * index // spans, pages * (index + 1) // spans
            random = draw(tensor.name, index)
            drawn.append((random[8:], tensor, first + int.from_bytes(random[:8], "big") % (end - first)))
    return [(tensor, page) for _, tensor, page in sorted(drawn, key=lambda sample: sample[0])]


def _digest_samples(samples: Sequence[tuple[Tensor, int]], stopped: threading.Event) -> list[bytes]:
    digests = []
    for tensor, page in samples:
        if stopped.is_set():
            break
        data = tensor.read(page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, tensor.nbytes))
        digests.append(hashlib.blake2b(data, digest_size=16).digest())
    return digests


def _read_header(path: Path) -> list[Tensor]:
    return list(_read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path))


# --- safetensors -----------------------------------------------------------------------------------------------------

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Entry(msgspec.Struct):
    """A tensor in a header."""

    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[list[_Size], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Size, _Size]


class _File:
    """A file that closes when nothing reads it any more: a thread may still wait for a slow read after the deadline."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # Without this the kernel reads much more than a page.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self.nbytes = os.fstat(self._descriptor).st_size

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, start: int, first: int, last: int) -> bytes:
        """Return the bytes `first` to `last`, counted from `start`."""
        data = os.pread(self._descriptor, last - first, start + first)
        if len(data) != last - first:
            raise ValueError(f"{self._path} ends within a tensor")
        return data


def _read_safetensors(path: Path) -> Iterator[Tensor]:
    file = _File(path)
    if file.nbytes < 8:
        raise ValueError(f"{path} has {file.nbytes} bytes, expected a header")
    nbytes = int.from_bytes(file.read(0, 0, 8), "little")
    start = 8 + nbytes
    if nbytes > _MAX_HEADER_BYTES or start > file.nbytes:
        raise ValueError(f"{path} has {file.nbytes} bytes, and a header of {nbytes}")
    entries = _decode(path, file.read(8, 0, nbytes), dict[str, msgspec.Raw])
    for name, raw in entries.items():
        if name == "__metadata__":
            continue
        entry = _decode(path, raw, _Entry)
        first, last = entry.data_offsets
        if not first <= last <= file.nbytes - start:
            raise ValueError(f"{path} has {file.nbytes} bytes, and a tensor that ends at byte {start + last}")
        yield Tensor(name, entry.dtype, tuple(entry.shape), last - first, partial(file.read, start + first))


def _decode(path: Path, data: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the header of {path} is not that of safetensors: {error}") from None


# --- PyTorch ---------------------------------------------------------------------------------------------------------


def _read_torch(path: Path) -> Iterator[Tensor]:
    import torch

    with path.open("rb") as file:
        if file.read(2) != b"PK":
            raise ValueError(f"{path} is in PyTorch's old format, of which nothing can be read alone")
    for name, tensor in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
        if isinstance(tensor, torch.Tensor):
            read = partial(_read_elements, tensor)
            yield Tensor(name, _name_of(tensor.dtype), tuple(tensor.shape), tensor.numel() * tensor.itemsize, read)


@cache
def _name_of(dtype: torch.dtype) -> str:
    """Return safetensors' name of a type: the header that it writes has it."""
    import torch
    from safetensors.torch import save

    header = msgspec.json.decode(save({"tensor": torch.empty(0, dtype=dtype)})[8:])
    return str(header["tensor"]["dtype"])


def _read_elements(tensor: torch.Tensor, first: int, last: int) -> bytes:
    """Return bytes of a tensor in the order of its elements, which its memory may not have."""
    import torch

    size = tensor.itemsize
    if size == 1:  # not every operation has floats of 8 bits
        tensor = tensor.view(torch.uint8)
    if tensor.is_contiguous():
        elements = tensor.reshape(-1)[first // size : last // size]
    else:
        elements = tensor.take(torch.arange(first // size, last // size))
    return bytes(elements.view(torch.uint8).numpy())
