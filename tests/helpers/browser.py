"""A headless Chromium, spoken to in its own protocol."""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "ArrowDown": (40, ""),
    "ArrowRight": (39, ""),
    "Home": (36, ""),
}


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab."""

    def __init__(self, address: str) -> None:
        self.socket = websocket.create_connection(address, suppress_origin=True, timeout=30)
        self.sent = 0
        self.session: str | None = None
        self.log: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        self.socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            got = json.loads(self.socket.recv())
            if got.get("id") == self.sent:
                assert "error" not in got, got
                return got["result"]
            self._note(got)

    def _note(self, event: dict[str, Any]) -> None:
        """Requests, and what went wrong on the page."""
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.log.append(f"request {params['request']['url']}")
        elif event.get("method") == "Runtime.exceptionThrown":
            self.log.append(f"error {params['exceptionDetails']['text']}")
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.log.append(f"error {params['entry']['text']}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def until(self, script: str, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"never: {script}; {self.log}"
            time.sleep(0.03)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        code, text = KEYS[key]
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **shared, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    @contextlib.contextmanager
    def shown_as(self, width: int, dark: bool = False, height: int = 800) -> Iterator[None]:
        """A window of this size, in dark or light colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        yield
        self.call("Emulation.clearDeviceMetricsOverride")
        self.call("Emulation.setEmulatedMedia", features=[])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browsing(program: str, size: str = "1200,900") -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        process = subprocess.Popen(
            [program, *flags, "--remote-debugging-port=0", f"--window-size={size}", f"--user-data-dir={folder}"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stderr is not None
            address = next(m[1] for line in process.stderr if (m := re.search(r"(ws://\S+)", line)))
            browser = Browser(address)
            yield browser
            browser.socket.close()
        finally:
            process.terminate()
            process.wait(20)
            if process.stderr is not None:
                process.stderr.close()
