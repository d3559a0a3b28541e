# SPDX-License-Identifier: Apache-2.0
"""A D whose handshake is made in a fresh thread: ``python -m gpu.reader DEVICE PAGES CHOOSE SCRATCH < payload``.

It prints, as JSON, how long the handshake took, the first read, and one of all pages. If UCX_PROTO_INFO is set, UCX
prints the protocols that it uses on the standard error.
"""

from __future__ import annotations

import json
import os
import sys

from gpu.place import PAGE, Place, Worker, device_object, done, in_fresh_thread, seconds_of


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    place, pages = Place(sys.argv[1]), int(sys.argv[2])
    choose, scratch = (argument == "yes" for argument in sys.argv[3:5])
    payload = bytes.fromhex(sys.stdin.readline())
    worker = Worker(place, place.zeros(pages * PAGE), scratch=scratch)
    device = device_object(place)
    found = {}

    def handshake() -> object:
        if choose:
            device.choose()
        peers = []
        found["handshake"] = seconds_of(lambda: peers.append(worker.agent.connect(payload)))
        return peers[0]

    def reads(peer) -> None:
        if choose:
            device.choose()
        found["first read"] = seconds_of(lambda: done(worker.read(peer, [0], [0])))
        found["second read"] = seconds_of(lambda: done(worker.read(peer, [1], [1])))
        found["all"] = seconds_of(lambda: done(worker.read(peer, [0], [0], pages * PAGE)))

    peer = in_fresh_thread(handshake)
    in_fresh_thread(lambda: reads(peer))
    place.settle()
    found["equal"] = bool((worker.content == place.labelled(pages * PAGE)).all())
    worker.agent.close()
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
