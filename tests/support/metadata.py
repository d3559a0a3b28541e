# SPDX-License-Identifier: Apache-2.0
"""NIXL's metadata of an agent, taken apart and put together as an attacker would."""

from __future__ import annotations

from dataclasses import dataclass

from kvhma.geometry import Region

_LIST = b"nixlSDList|"


@dataclass(frozen=True)
class Metadata:
    """The metadata of an agent with host memory and one backend.

    Attributes:
        before: the name, the addresses of the transports, and the head of the list of regions.
        regions: each region's record: address, bytes and device, each u64, then the transport's key.
    """

    before: bytes
    regions: tuple[bytes, ...]

    @classmethod
    def parse(cls, data: bytes) -> Metadata:
        """Take apart: ``... nixlSDList | t <4, type> | n <8, count> | (<bytes> <record> |)*``, each number u64."""
        at = data.index(_LIST) + len(_LIST) + (1 + 8 + 4 + 1) + (1 + 8 + 8 + 1)
        regions, before = [], data[:at]
        while at < len(data):
            nbytes = int.from_bytes(data[at : at + 8], "little")
            regions.append(data[at + 8 : at + 8 + nbytes])
            at += 8 + nbytes + 1
        return cls(before, tuple(regions))

    def encode(self) -> bytes:
        """Put together; the inverse of :meth:`parse`."""
        count = len(self.regions).to_bytes(8, "little")
        records = [len(record).to_bytes(8, "little") + record + b"|" for record in self.regions]
        return b"".join([self.before[:-9], count, b"|", *records])

    def with_name(self, old: str, new: str) -> Metadata:
        """Return the metadata under another name."""
        start = b"nixlSerDes|Agent"
        own, other = (start + len(name.encode()).to_bytes(8, "little") + name.encode() + b"|" for name in (old, new))
        assert self.before.startswith(own)
        return Metadata(other + self.before[len(own) :], self.regions)


def moved(record: bytes, region: Region) -> bytes:
    """Return the record of a region with another address and length, and the same key of the transport."""
    return region.base.to_bytes(8, "little") + region.bytes.to_bytes(8, "little") + record[16:]
