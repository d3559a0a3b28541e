# SPDX-License-Identifier: Apache-2.0
"""What a client reads of a stream of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[Any]:
    """The events of a stream that has ended well."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert found.pop() == "[DONE]", text
    return [json.loads(event) for event in found]
