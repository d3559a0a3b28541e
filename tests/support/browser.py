# SPDX-License-Identifier: Apache-2.0
"""A real browser without a screen or a network, for tests of pages and pictures."""

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
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no browser: apt-get install chromium-headless-shell, or Chrome"
)


def answer(page: Path, *flags: str) -> Any:
    """Open a page; what its script has written into `<pre id="answer">` is JSON.

    If a signal ends the browser, that says nothing about the page: the browser is started again, at most twice.
    """
    for attempt in range(3):
        profile = f"--user-data-dir={page.parent}/profile{attempt}"
        command = [str(BROWSER), *FLAGS, *flags, profile, "--dump-dom", page.as_uri()]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
        # Some installations wrap the browser in a shell, which exits with 128 + the signal's number.
        if 0 <= done.returncode < 128:
            break
    done.check_returncode()
    return json.loads(html.unescape(done.stdout.partition('<pre id="answer">')[2].partition("</pre>")[0]))
