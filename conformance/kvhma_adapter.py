# SPDX-License-Identifier: Apache-2.0
"""kvhma as an adapter for the conformance kit, and an example of one.

Either `python runner.py --python kvhma_adapter:answer` or `python runner.py --command 'python kvhma_adapter.py'`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import kvhma
from kvhma.oracle.cases import Case


def answer(form: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what kvhma moves for a case, or why it refuses."""
    try:
        case = Case.from_json(json.dumps(form))
        plan = kvhma.plan(case.local, case.remotes, descriptor_bytes=case.descriptor_bytes)
        transfer = plan.transfer(case.num_tokens, case.local_spans, case.remote_spans)
    except kvhma.KvhmaError as error:
        yield {"refuse": error.code}
        return
    for address, length, _ in transfer.zero.tolist():
        yield {"zero": address, "bytes": length}
    for read in transfer.reads:
        for (to, length, _), (start, _, _) in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            yield {"source": read.source, "from": start, "to": to, "bytes": length}


if __name__ == "__main__":
    for row in answer(json.load(sys.stdin)):
        print(json.dumps(row))
