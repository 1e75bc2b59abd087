"""Chromium without a window, driven through its debugging pipe: what a page computes, shows and complains about."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
).split()
PATIENCE = 120.0  # seconds, for a machine that does much else


class Browser:
    """One tab. ``complaints`` are errors of scripts, of the console and of requests since the last ``open``."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._sent, self._received = 0, b""
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._sent:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            piece = os.read(self._answers, 1 << 16)
            assert piece, "Chromium has ended"
            self._received += piece
        first, _, self._received = self._received.partition(b"\0")
        return json.loads(first)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:400])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.complaints.append(json.dumps(params["args"])[:400])
        elif event.get("method") == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url.startswith("http") and "//127.0.0.1" not in url:
                self.complaints.append(f"a request leaves the site: {url}")

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.complaints.clear()
        self.call("Page.navigate", url=url)
        self.until(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """The first value of the expression that is true."""
        end = time.monotonic() + PATIENCE
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)
        return found


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A fresh browser with its profile in the folder; the test is skipped where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("SOFTSM_NEEDS_CHROMIUM"):
            pytest.fail("SOFTSM_NEEDS_CHROMIUM is set, but there is no Chromium")
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    its_commands, commands = os.pipe()
    answers, its_answers = os.pipe()
    # Chromium reads file descriptor 3 and writes 4.
    script = f'exec "$@" 3<&{its_commands} 4>&{its_answers}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", found, *FLAGS, f"--user-data-dir={folder / 'profile'}"],
        pass_fds=(its_commands, its_answers),
        stderr=subprocess.DEVNULL,
    )
    os.close(its_commands)
    os.close(its_answers)
    try:
        yield Browser(commands, answers)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
