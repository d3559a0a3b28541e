# SPDX-License-Identifier: Apache-2.0
"""vLLM's request log and its OpenTelemetry spans, as vLLM 0.31 to 0.33 write them. Only lengths and times are read.

vLLM logs the tokens of a prompt at level DEBUG, which is their only trace in a log. Clients write prompts, names of
requests and answers, so a message counts only after the header that vLLM puts at the beginning of its line.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from kvhma.replay.columns import Columns, Row

_COLOR = re.compile(rb"\x1b\[[\d;]*m")
_HEADER = re.compile(rb"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) \[([^\]\s]*):\d+\] ")
_RECEIVED = re.compile(rb"Received request \S+: params: ")
_ASKED = re.compile(rb"Request (\S+) details: prompt: ")
_PROMPT = b", prompt_token_ids: "
_ROWS = re.compile(rb"(None|\[[\d, ]*\]), prompt_embeds shape: (?:None|torch\.Size\(\[(\d+)[\d, ]*\]\))\.")
_ANSWERED = re.compile(
    rb"Generated response (\S+)( \(streaming \w+\))? details: output_token_ids: (None|[\[(][\d, ]*[\])])"
)
_LOGGER = b"request_logger"
_YEAR = 366 * 86400.0


def is_log(form: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is a line of vLLM's log."""
    return {"asctime", "name", "message"} <= form.keys()


def read_log(columns: Columns, lines: Iterable[tuple[int, bytes]]) -> None:
    """Read the requests of vLLM's log, among other lines.

    Raises:
        RequestError: no request has a length; the text names the line of one.
    """
    known: dict[int, int] = {}
    """The number of a request by its name."""
    lengths: Counter[int] = Counter()
    received, without, is_streamed, is_text = 0, 0, False, False
    latest, years = -math.inf, 0.0
    for number, line in lines:
        seconds, message = _message(line)
        if _RECEIVED.match(message):
            received, without = received or number, without + 1
        elif (asked := _ASKED.match(message)) is not None:
            found = _ROWS.fullmatch(message.rpartition(_PROMPT)[2])
            if found is None:
                raise columns.wrong(number, "prompt_token_ids: must be a list, and the end of the line")
            length = int(found[2]) if found[2] else _count(found[1])
            if seconds + years < latest - _YEAR / 2:
                years += _YEAR
            latest = seconds + years
            is_text |= not line.startswith(b"{")
            known[hash(asked[1])] = len(columns)
            lengths[length] += 1
            columns.add(number, Row(latest, length, None))
        elif (answered := _ANSWERED.fullmatch(message)) is not None and answered[3] != b"None":
            is_streamed |= answered[2] is not None
            if (request := known.get(hash(answered[1]))) is not None:
                columns.add_answer(number, request, _count(answered[3]))
    if received and not len(columns):
        raise columns.wrong(
            received,
            "the log has requests without their lengths: vLLM writes these with VLLM_LOGGING_LEVEL=DEBUG, or in "
            "OpenTelemetry spans",
        )
    if is_text:
        columns.notes.append("the log has no year and whole seconds: it is read as of a leap year")
    if is_streamed:
        columns.notes.append("of streamed answers the log has only tokens that have a text")
    if without > len(columns):
        columns.notes.append(f"{without - len(columns):,} requests have no length in the log, and are left out")
    longest = max(lengths, default=0)
    if lengths[longest] > 1:
        columns.notes.append(
            f"{lengths[longest]:,} prompts have the most tokens, {longest:,}: vLLM cuts longer ones there if "
            "--max-log-len was that"
        )


def _count(ids: bytes) -> int:
    inside = ids.strip(b"[](), ")
    return inside.count(b",") + 1 if inside else 0


def _message(line: bytes) -> tuple[float, bytes]:
    """Return time and message of a line of vLLM's request logger; an empty message for another line."""
    if line.startswith(b"{"):
        try:
            form = json.loads(line)
            if not is_log(form) or not form["name"].endswith(_LOGGER.decode()):
                return 0.0, b""
            at = datetime.strptime(form["asctime"], "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=timezone.utc)
            return at.timestamp(), form["message"].encode("utf-8", "replace")
        except (ValueError, TypeError, AttributeError, RecursionError):
            return 0.0, b""
    line = _COLOR.sub(b"", line)
    header = _HEADER.search(line)
    if header is None or _LOGGER not in header[2]:
        return 0.0, b""
    try:
        at = datetime.strptime(f"2000-{header[1].decode()}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
    except ValueError:
        return 0.0, b""
    return at.timestamp(), line[header.end() :].rstrip(b"\r\n")


class Spans:
    """Reads the requests in lines of OTLP's JSON, as a collector writes them to a file."""

    def __init__(self, columns: Columns) -> None:
        """Start without requests."""
        self._columns = columns
        self._known: dict[int, int] = {}

    def add(self, line: int, form: Mapping[str, Any]) -> None:
        """Add the requests of a line. P and D, and each sample of a prompt, have a span of the same request.

        Raises:
            KeyError, TypeError, ValueError: a span has a wrong value.
        """
        for row, name in _requests_in(form):
            key = hash((name, row.prompt))
            if name is not None and key in self._known:
                self._columns.merge(self._known[key], row)
            else:
                self._known[key] = len(self._columns)
                self._columns.add(line, row)


def _requests_in(form: Mapping[str, Any]) -> Iterator[tuple[Row, str | None]]:
    for resource in form["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                values = {each["key"]: each["value"] for each in span.get("attributes", ())}
                if "gen_ai.usage.prompt_tokens" not in values:
                    continue
                prompt, answer = (_int(values, f"gen_ai.usage.{kind}_tokens") for kind in ("prompt", "completion"))
                name = values.get("gen_ai.request.id", {}).get("stringValue")
                started = span["startTimeUnixNano"]
                if isinstance(started, bool) or not isinstance(started, int | str):
                    raise ValueError(f"startTimeUnixNano {started!a}: must be nanoseconds")
                yield Row(int(started) / 1e9, prompt, answer), name


def _int(values: Mapping[str, Any], name: str) -> int:
    found = values[name]["intValue"]
    if isinstance(found, bool) or not isinstance(found, int | str):
        raise ValueError(f"{name} {found!a}: must be an integer")
    return int(found)
