# SPDX-License-Identifier: Apache-2.0
"""vLLM's own log of requests and its spans are read, as its classes write them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.logger
from vllm import SamplingParams
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.logging_utils import ColoredFormatter, NewLineFormatter
from vllm.lora.request import LoRARequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import RequestStateStats

from kvhma.errors import RequestError
from kvhma.replay.traces import read_trace

LOGGER = logging.getLogger("vllm.entrypoints.serve.utils.request_logger")


# --- vLLM's log -----------------------------------------------------------------------------------------------------


def formatters() -> dict[str, logging.Formatter]:
    made: dict[str, logging.Formatter] = {
        kind.__name__: kind(vllm.logger._FORMAT, vllm.logger._DATE_FORMAT, log_level=level)
        for kind, level in ((NewLineFormatter, "DEBUG"), (ColoredFormatter, "INFO"))
    }
    if hasattr(vllm.logger, "_JSON_FORMAT"):  # since 0.32
        from pythonjsonlogger.json import JsonFormatter

        made["JSON"] = JsonFormatter(vllm.logger._JSON_FORMAT)
    return made


def logged(
    path: Path, monkeypatch: pytest.MonkeyPatch, formatter: logging.Formatter, level: int = logging.DEBUG
) -> None:
    """Log three prompts of 5, 300 and 7 tokens, with answers of 4 tokens and of a stream."""
    handler = logging.FileHandler(path)
    handler.setFormatter(formatter)
    handler.addFilter(lambda record: setattr(record, "vllm_process_name", "APIServer") is None)
    monkeypatch.setattr(LOGGER, "level", level)
    LOGGER.addHandler(handler)
    LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
    try:
        log = RequestLogger(max_log_len=None)
        params = SamplingParams(max_tokens=4)
        log.log_inputs(
            "chatcmpl-a",
            "a\nrequest, prompt_token_ids: [1], prompt_embeds shape: None.",
            list(range(5)),
            None,
            params,
            None,
        )
        log.log_inputs("chatcmpl-b", None, list(range(300)), None, params, None)
        log.log_outputs("chatcmpl-a", "text\n", [5, 6, 7, 8], "stop")
        log.log_outputs("chatcmpl-b", "t", [5, 6], None, is_streaming=True, delta=True)
        log.log_outputs("chatcmpl-b", "text", None, "streaming_complete", is_streaming=True)
        log.log_inputs("cmpl-c-0", "c", list(range(7)), None, params, LoRARequest("l", 1, "/l"))
    finally:
        LOGGER.removeHandler(handler)
        handler.close()
        monkeypatch.undo()
        LOGGER.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", formatters())
def test_vllms_log_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    logged(path, monkeypatch, formatters()[name])
    found = read_trace(path)
    assert found.form == "vLLM's log"
    assert (found.prompts.tolist(), found.answers.tolist()) == ([5, 300, 7], [4, 2, 0])
    assert (found.paths, found.sessions) == (None, None)
    assert ("no year" in " ".join(found.notes)) == (name != "JSON")
    assert "1 answers have no length in the file, and count as 0 tokens" in found.notes


def test_vllms_log_without_lengths_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As most have it: vLLM's default level is INFO."""
    path = tmp_path / "log"
    logged(path, monkeypatch, formatters()["NewLineFormatter"], logging.INFO)
    assert "Received request chatcmpl-a" in path.read_text()
    with pytest.raises(RequestError, match=r"line \d+: the log has requests without their lengths"):
        read_trace(path)


# --- vLLM's spans ---------------------------------------------------------------------------------------------------


def test_vllms_spans_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's function makes them, OpenTelemetry's encoder writes them; a collector has a line for each export."""
    pytest.importorskip("opentelemetry.sdk")
    from google.protobuf.json_format import MessageToJson
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from vllm.tracing import otel

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel.trace, "get_tracer", provider.get_tracer)
    for name, arrived, prompt, answer in (("p", 1000.25, 400, 1), ("q", 1001.5, 7, 3), ("p", 1000.5, 400, 30)):
        stats = RequestStateStats(arrival_time=arrived, num_generation_tokens=answer)
        state: dict[str, Any] = {"stats": stats, "prompt_token_ids": [0] * prompt, "prompt_embeds": None}
        state |= {"external_req_id": name, "top_p": 1.0, "max_tokens_param": 5, "temperature": 0.5, "n": 1}
        output = SimpleNamespace(trace_headers=None)
        timing = SimpleNamespace(iteration_timestamp=arrived + 1)
        OutputProcessor.do_tracing(None, output, SimpleNamespace(**state), timing)  # type: ignore[arg-type]
    path = tmp_path / "spans.jsonl"
    lines = [json.dumps(json.loads(MessageToJson(encode_spans([span])))) for span in exporter.get_finished_spans()]
    path.write_text("\n".join(lines))
    found = read_trace(path)
    assert (found.form, found.seconds.tolist()) == ("OpenTelemetry", [0, 1.25])
    assert (found.prompts.tolist(), found.answers.tolist()) == ([400, 7], [30, 3])
