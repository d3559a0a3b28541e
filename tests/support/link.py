# SPDX-License-Identifier: Apache-2.0
"""A link between two network namespaces that loses, resets, delays, reorders and duplicates packets, by a seed.

It does what the kernel's `netem` does, which is a module that many kernels lack. Each namespace has a TUN device, and
one process copies packets from one to the other. That process runs as `python -m support.link FILE FILE SEED`.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
LATE_SECONDS = 0.03
"""By how much a reordered packet is later: others overtake it."""
QUEUE_SECONDS = 1.0
"""What a link of limited rate queues; it loses what comes beyond."""
BURST = 64
"""Packets that are read from one end before the other end's turn."""


@dataclass(frozen=True)
class Fault:
    """What the link does to packets of one direction. Shares are from 0 to 1, of all packets.

    Attributes:
        loss: share that is lost; 1 is a partition.
        reset: share that becomes the RST of its TCP connection: without its payload, anywhere in a message.
        reorder: share that is `LATE_SECONDS` later.
        duplicate: share that arrives twice.
        delay: seconds that every packet takes.
        rate: bytes a second; 0 is no limit.
    """

    loss: float = 0.0
    reset: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    rate: float = 0.0


class Direction:
    """Decides what happens to each packet of one direction. Does no I/O, so that tests need no clock."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._sent = 0.0
        self.fault = Fault()
        self.counts: Counter[str] = Counter()

    def deliver(self, packet: bytes, now: float) -> list[tuple[float, bytes]]:
        """When a packet that is sent now arrives, and as what: never, once or twice."""
        fault = self.fault
        # Drawn for every packet, so that a draw depends on the packet's number only.
        loss, reset, late, twice = (self._rng.random() for _ in range(4))
        self.counts["packets"] += 1
        if loss < fault.loss:
            self.counts["lost"] += 1
            return []
        if reset < fault.reset and (cut := reset_of(packet)) is not None:
            self.counts["reset"] += 1
            packet = cut
        if fault.rate:
            sent = max(self._sent, now) + len(packet) / fault.rate
            if sent > now + QUEUE_SECONDS:
                self.counts["overflowed"] += 1
                return []
            self._sent = now = sent
        if fault.delay:
            self.counts["delayed"] += 1
            now += fault.delay
        if late < fault.reorder:
            self.counts["late"] += 1
            now += LATE_SECONDS
        if twice < fault.duplicate:
            self.counts["duplicated"] += 1
            return [(now, packet)] * 2
        return [(now, packet)]


def reset_of(packet: bytes) -> bytes | None:
    """The RST that a TCP packet is turned into; None for other packets, and those that begin or reset a connection."""
    start = (packet[0] & 15) * 4
    if packet[9] != 6 or packet[start + 13] & 0b110:  # RST and SYN
        return None
    ip = bytearray(packet[:start])
    ip[2:4] = struct.pack("!H", start + 20)
    ip[10:12] = bytes(2)
    ip[10:12] = checksum(bytes(ip))
    tcp = bytearray(packet[start : start + 20])
    tcp[12:14] = bytes((5 << 4, 0b10100))  # five words of header; RST and ACK
    tcp[16:18] = bytes(2)
    tcp[16:18] = checksum(packet[12:20] + struct.pack("!HH", 6, 20) + tcp)
    return bytes(ip + tcp)


def checksum(data: bytes) -> bytes:
    """That of IP and TCP over an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)


def copy_packets(ends: Sequence[int], directions: Sequence[Direction]) -> None:
    """Copy packets between two TUN devices until standard input ends. Each line there is a command with one reply."""
    poll = select.poll()
    for file in (0, *ends):
        poll.register(file, select.POLLIN)
    paths = {ends[0]: (directions[0], ends[1]), ends[1]: (directions[1], ends[0])}
    due: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    while True:
        wait = None if not due else max(0.0, (due[0][0] - time.monotonic()) * 1000)
        for file, _ in poll.poll(wait):
            if file == 0:
                if not (line := sys.stdin.readline()):
                    return
                command = json.loads(line)
                for way in command["directions"]:
                    directions[way].fault = Fault(**command["fault"])
                print(json.dumps([direction.counts for direction in directions]), flush=True)
                continue
            direction, out = paths[file]
            with contextlib.suppress(BlockingIOError):
                for _ in range(BURST):
                    packet = os.read(file, 1 << 16)
                    if packet[0] >> 4 == 4:  # IPv6 only announces itself here
                        for at, what in direction.deliver(packet, time.monotonic()):
                            heapq.heappush(due, (at, next(numbers), out, what))
        while due and due[0][0] <= time.monotonic():
            *_, out, packet = heapq.heappop(due)
            with contextlib.suppress(BlockingIOError):  # a full device loses packets, as cards do
                os.write(out, packet)


class NoLink(Exception):
    """This machine allows no link; the text has the reason."""


class Link:
    """Two namespaces and the link between them. The first is P's, the second D's; direction 0 is from P to D."""

    def __init__(self, seed: int = 0) -> None:
        tag = os.getpid() % 100_000
        self.namespaces = (f"link{tag}p", f"link{tag}d")
        self.addresses = ("10.79.0.1", "10.79.0.2")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        ends: list[int] = []
        try:
            for namespace, address in zip(self.namespaces, self.addresses, strict=True):
                ends.append(_open_tun(namespace))
                _ip("netns", "add", namespace)
                _ip("link", "set", namespace, "netns", namespace)
                for command in (f"addr add {address}/24 dev {namespace}", f"link set {namespace} up", "link set lo up"):
                    _ip("-n", namespace, *command.split())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.link", *map(str, ends), str(seed)],
                env=os.environ | {"PYTHONPATH": str(TESTS)},
                pass_fds=ends,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            raise NoLink(f"no TUN devices or network namespaces here (root, iproute2, module tun): {reason}") from None
        finally:
            for end in ends:
                os.close(end)

    def env(self, side: int) -> dict[str, str]:
        """Environment of an engine of a side; on one machine UCX would find other paths than the link."""
        return {
            "KVHMA_E2E_NETNS": self.namespaces[side],
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.addresses[side],
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": self.namespaces[side],
        }

    def set(self, fault: Fault, directions: Sequence[int] = (0, 1)) -> list[Counter[str]]:
        """From now on packets of these directions meet this fault. Returns counts of each direction so far."""
        with self._lock:
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"directions": list(directions), "fault": asdict(fault)}) + "\n")
            process.stdin.flush()
            return [Counter(counts) for counts in json.loads(process.stdout.readline())]

    def counts(self) -> list[Counter[str]]:
        return self.set(Fault(), ())

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()  # ends its input, which ends it
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_tun(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        # TUNSETIFF: IP packets (IFF_TUN) without a header of the device's own (IFF_NO_PI).
        fcntl.ioctl(file, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1001))
    except OSError:
        os.close(file)
        raise
    return file


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


if __name__ == "__main__":
    copy_packets([int(sys.argv[1]), int(sys.argv[2])], [Direction(f"{sys.argv[3]} {way}") for way in range(2)])
