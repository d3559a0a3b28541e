# SPDX-License-Identifier: Apache-2.0
"""Print what the openai package reads of a server, as JSON: `python openai_client.py http://HOST:PORT`."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI


def asked(url: str) -> dict[str, Any]:
    """A completion, a chat and a stream of it with its usage."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    given: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    chat = given | {"messages": [{"role": "user", "content": "What moves between two engines, and when?"}]}
    completion = client.completions.create(prompt="What moves, and when?", **given)
    whole = client.chat.completions.create(**chat)
    parts = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    return {
        "completion": completion.choices[0].text,
        "chat": whole.choices[0].message.content,
        "stream": "".join(part.choices[0].delta.content or "" for part in parts if part.choices),
        "tokens": [completion.usage.total_tokens, whole.usage.total_tokens, parts[-1].usage.total_tokens],
    }


if __name__ == "__main__":
    print(json.dumps(asked(sys.argv[1])))
