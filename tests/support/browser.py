# SPDX-License-Identifier: Apache-2.0
"""A real browser without a screen or a network, for tests of pages and pictures."""

from __future__ import annotations

import contextlib
import fcntl
import html
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
)
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no browser: apt-get install chromium-headless-shell, or Chrome"
)


def answer(page: Path, *flags: str) -> Any:
    """Open a page; what its script has written into `<pre id="answer">` is JSON.

    If a signal ends the browser, that says nothing about the page: the browser is started again, at most twice.
    """
    for attempt in range(3):
        profile = f"--user-data-dir={page.parent}/profile{attempt}"
        command = [str(BROWSER), *FLAGS, NO_NETWORK, *flags, profile, "--dump-dom", page.as_uri()]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
        # Some installations wrap the browser in a shell, which exits with 128 + the signal's number.
        if 0 <= done.returncode < 128:
            break
    done.check_returncode()
    return json.loads(html.unescape(done.stdout.partition('<pre id="answer">')[2].partition("</pre>")[0]))


class Tab:
    """A tab of a browser that a test steers through pipes, by Chrome's DevTools protocol.

    Every step waits for the browser's reply or event, never for a time; a loaded machine only takes longer.
    """

    WAIT = 120  # seconds; nothing that a test does takes a tenth of it on an idle machine

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._last = 0
        self._events: list[str] = []
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.call("Page.enable")

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            readable, _, _ = select.select([self._from], [], [], max(0, until - time.monotonic()))
            assert readable, f"the browser said nothing for {self.WAIT} seconds"
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        request = {"id": self._last, "method": method, "params": params, **self._session}
        data = json.dumps(request).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        until = time.monotonic() + self.WAIT
        while (message := self._message(until)).get("id") != self._last:
            self._events.append(message.get("method", ""))
        assert "error" not in message, (method, message["error"])
        return message["result"]

    def size(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Return when the page, its styles, scripts and pictures are loaded, and it has been drawn."""
        self._events.clear()
        self.call("Page.navigate", url=url)
        until = time.monotonic() + self.WAIT
        while "Page.loadEventFired" not in self._events:
            self._events.append(self._message(until).get("method", ""))
        self.run("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(() => drawn(0))))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, or what its promise comes to."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)


@contextlib.contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """A browser with one tab, which reaches this machine only."""
    commands, to_browser = os.pipe()
    from_browser, replies = os.pipe()
    # The browser reads at 3 and writes at 4; copies above them are not overwritten when these are made.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (commands, replies)]
    # A function before exec is not safe in a process with threads.
    start = "import os, sys; r, w, *command = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4)"
    start += "; os.execv(command[0], command)"
    network = f"{NO_NETWORK}, EXCLUDE 127.0.0.1"
    command = [str(BROWSER), *FLAGS, network, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    browser = subprocess.Popen(
        [sys.executable, "-c", start, *map(str, ends), *command],
        pass_fds=ends,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (commands, replies, *ends):
        os.close(end)
    try:
        yield Tab(to_browser, from_browser)
    finally:
        # Some installations wrap the browser in a shell, so it is the group that ends.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
        os.close(to_browser)
        os.close(from_browser)
