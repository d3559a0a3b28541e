# SPDX-License-Identifier: Apache-2.0
"""Which adapter a request uses: a digest of its files, as they were when the engine loaded it.

vLLM loads an adapter when it is asked to, or with the first request that has it. It tells a connector neither this nor
when it loads the adapter anew, and names cached blocks by the name and path of their adapter. So once the files at a
path have changed, an engine may hold the old adapter, the new one, or blocks of both. No other engine can know which,
and the adapter matches none from then on.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvhma.text import one_line
from kvhma.vllm.config.weight_digests import DIGEST_CHARS, LEVELS, SECONDS, digest_files

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("vllm.kvhma")

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM loads the first of these that exists."""

_MAX_CONFIG_BYTES = 1 << 20


class _Seen(NamedTuple):
    """An adapter's digest, and the state of its files when they were read."""

    digest: str
    stamp: tuple[object, ...]


class Adapters:
    """The adapters that an engine has loaded, by name and path. Threads may share it."""

    def __init__(self) -> None:
        """Start without adapters."""
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._lock = threading.Lock()

    def is_seen(self, lora: LoRARequest) -> bool:
        """Return whether :meth:`identify` need not read the files of an adapter, unless they have changed."""
        return (lora.lora_name, lora.lora_path) in self._seen

    def identify(self, lora: LoRARequest) -> str:
        """Return a digest of an adapter's files; its path if they cannot be read, as in a repository on the hub."""
        key = lora.lora_name, lora.lora_path
        folder = Path(lora.lora_path).expanduser()
        stamp = tuple(_stamp_of(folder / name) for name in (_CONFIG, *_WEIGHTS))
        seen = self._seen.get(key)
        if seen is not None and seen.stamp == stamp:
            return seen.digest
        try:
            digest = _digest(folder)
        except Exception as error:  # of PyTorch too; vLLM itself refuses files that it cannot load
            if seen is not None:  # they were removed, or are being written
                return seen.digest
            digest = lora.lora_path
            logger.warning("kvhma: adapter %s is compared by its path: %s", *_quoted(lora.lora_name, error))
        with self._lock:
            seen = self._seen.get(key)
            if seen is not None and any(seen.stamp) and digest != seen.digest:
                digest = uuid.uuid4().hex
                logger.warning(
                    "kvhma: the files of adapter %s at %s changed after this engine had used them, so it hands off no "
                    "request with this adapter: load changed weights from another path",
                    *_quoted(lora.lora_name, lora.lora_path),
                )
            self._seen[key] = _Seen(digest, stamp)
        return digest


def _quoted(*values: object) -> list[str]:
    return [one_line(str(value), 300) for value in values]


def _stamp_of(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(folder: Path) -> str:
    """Return a digest of an adapter's settings and weights.

    Raises:
        ValueError: it has none, or they could not be read in time.
        OSError: of a file.
    """
    deadline = time.monotonic() + SECONDS
    with (folder / _CONFIG).open("rb") as file:
        config = file.read(_MAX_CONFIG_BYTES + 1)
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None or len(config) > _MAX_CONFIG_BYTES:
        raise ValueError(f"{folder} has no {_WEIGHTS[0]}, or {_CONFIG} has more than {_MAX_CONFIG_BYTES} bytes")
    digests = digest_files([weights], deadline)
    if len(digests) < DIGEST_CHARS * len(LEVELS):
        raise ValueError(f"{weights} could not be read in {SECONDS:.0f} s")
    return hashlib.blake2b(digests.encode() + config, digest_size=16).hexdigest()
