# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for tests: tiny models, engines in separate processes, and access to what they hold."""

from support.engines.engine import REMOTE_DECODE, Answer, Engine, EngineFailed, engines, free_port, make_models
from support.engines.zygote import Zygote

__all__ = ["REMOTE_DECODE", "Answer", "Engine", "EngineFailed", "Zygote", "engines", "free_port", "make_models"]
