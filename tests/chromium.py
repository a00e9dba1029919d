"""A headless Chromium, driven over a pipe by the DevTools protocol: what a reader's browser makes of a page."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

# What the browser writes about itself when something on the page is wrong, or is fetched.
_WATCHED = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Network.requestWillBeSent", "Network.loadingFailed")


def unavailable_reason() -> str | None:
    return None if shutil.which("chromium") else "chromium: not installed"


class Browser:
    """`with Browser() as browser`: one page. It and its profile are gone afterwards."""

    def __enter__(self) -> Browser:
        self._home = tempfile.TemporaryDirectory(prefix="untax-chromium-", ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # The protocol is on descriptors 3 and 4 of the browser; a shell puts them there, whatever numbers they have here.
        command = (
            f"exec chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-background-networking "
            f"--hide-scrollbars --user-data-dir={self._home.name} --remote-debugging-pipe about:blank 3<&{to_read} 4>&{to_write}"
        )
        env = {**os.environ, "HOME": self._home.name}
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._session = ""
            self._send("Browser.close")
        except (OSError, EOFError):
            self._process.kill()
        os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._home.cleanup()

    def open(self, page: Path | str, *, width: int, is_dark: bool = False) -> None:
        """Show a file, or what is at a URL, as a reader with this window and colour scheme sees it."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=2 if width < 500 else 1, mobile=width < 500
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def call(self, method: str, **parameters: Any) -> Any:
        return self._send(method, parameters)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Everything the console shows, and every request but the page's own."""
        found = []
        for event in self.events:
            if event["method"] not in _WATCHED:
                continue
            url = event["params"].get("request", {}).get("url", "")
            if event["method"] == "Network.requestWillBeSent" and (url == self.evaluate("location.href") or url.startswith("data:")):
                continue
            found.append(json.dumps(event))
        return found

    def screenshot(self, file: Path, *, selector: str = "html") -> None:
        box = self.evaluate(
            f"(() => {{const b = document.querySelector({selector!r}).getBoundingClientRect(); return [b.x + scrollX, b.y + scrollY, b.width, b.height]}})()"
        )
        clip = {"x": box[0], "y": box[1], "width": box[2], "height": box[3], "scale": 1}
        answer = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def _send(self, method: str, parameters: dict[str, Any] | None = None) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters or {}}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message; events are kept."""
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 20)
            if not data:
                raise EOFError("the browser has gone")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message
