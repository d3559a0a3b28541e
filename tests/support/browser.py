# SPDX-License-Identifier: Apache-2.0
"""A real browser without a screen or a network, for tests of what people look at."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-headless-shell"))), None)
COLUMN = 688  # pixels of a page's text where the theme of the documentation is widest for a window of 1220 to 1600
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no browser: apt-get install chromium-headless-shell, or Chrome"
)


def answer(page: Path, *flags: str) -> Any:
    """Open a page; what its script has written into `<pre id="answer">` is JSON."""
    command = [str(BROWSER), *FLAGS, *flags, f"--user-data-dir={page.parent}/profile", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    return json.loads(html.unescape(done.stdout.partition('<pre id="answer">')[2].partition("</pre>")[0]))
