"""A headless Chromium, driven over the pipe of its DevTools protocol; needs nothing but Python and the browser."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0
KEYS = {
    **{f"Arrow{way}": code for way, code in (("Left", 37), ("Up", 38), ("Right", 39), ("Down", 40))},
    **{"Home": 36, "End": 35, "Escape": 27, "Tab": 9, "Enter": 13, "PageUp": 33, "PageDown": 34},
}


def found() -> str | None:
    """Where the browser is, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one tab, which pages are opened in one after the other."""

    def __init__(self, program: str, folder: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self._numbers = itertools.count(1)
        self._rest = b""
        self.heard: list[dict[str, Any]] = []

        def hand_over() -> None:
            # By way of high numbers: 3 and 4 may be among the pipes themselves.
            high = [os.dup2(to_browser, 100), os.dup2(from_browser, 101)]
            for source, target in zip(high, (3, 4), strict=True):
                os.dup2(source, target, inheritable=True)

        self._process = subprocess.Popen(
            [
                program,
                *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
                *("--disable-component-update", "--hide-scrollbars", "--force-device-scale-factor=1"),
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            preexec_fn=hand_over,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session = ""
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{part}.enable")

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """One command and its answer; what the browser says meanwhile is kept in `heard`."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
        raise AssertionError(f"{method}: no answer")

    def _messages(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self._rest:
                raw, self._rest = self._rest.split(b"\0", 1)
                told = json.loads(raw)
                if "id" not in told:
                    self.heard.append(told)
                yield told
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._in, 2**20)
            assert read, "the browser has ended"
            self._rest += read

    def wait_for(self, method: str) -> None:
        """Until the browser has said this."""
        if any(told["method"] == method for told in self.heard):
            return
        for told in self._messages():
            if told.get("method") == method:
                return

    def open(
        self, page: Path, *, width: int = 1100, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> None:
        """Load a page in a window of this size, and wait until its charts stand."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.size(width, height)
        self.dark(dark)
        self.heard.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")
        if scripts:
            self.settle()

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def dark(self, wanted: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def settle(self) -> None:
        """Two frames: what was observed and asked for is drawn."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def js(self, source: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=source, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Real key events, one key after the other."""
        for key in keys:
            told: dict[str, Any] = {"key": key}
            if key in KEYS:
                told["windowsVirtualKeyCode"] = KEYS[key]
                told["code"] = key
            elif len(key) == 1:
                told["text"] = key
            if key == "Enter":
                told["text"] = "\r"
            self.call("Input.dispatchKeyEvent", type="keyDown", **told)
            self.call("Input.dispatchKeyEvent", type="keyUp", **told)
        self.settle()

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """With the left button, in a few moves."""
        held = {"button": "left", "buttons": 1}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=start[0], y=start[1])
        self.call(
            "Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], clickCount=1, **held
        )
        for part in (0.3, 0.7, 1.0):
            x, y = (a + part * (b - a) for a, b in zip(start, end, strict=True))
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **held)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], clickCount=1, **held)
        self.settle()

    def click(self, x: float, y: float, times: int = 1) -> None:
        for n in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=n)
        self.settle()

    def picture(self, file: Path, *, whole: bool = True) -> None:
        """A screenshot of the page from top to bottom."""
        options: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {**size, "scale": 1}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings that the page brought about."""
        self.settle()
        found = []
        for told in self.heard:
            values = told.get("params", {})
            if told["method"] == "Runtime.exceptionThrown":
                found.append(str(values["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(str(values["entry"]["text"]))
            elif told["method"] == "Runtime.consoleAPICalled":
                found.append(str(values["args"]))
        return found

    def requests(self) -> list[str]:
        """What the page asked for, itself and what is inside of it left out."""
        asked = [
            told["params"]["request"]["url"]
            for told in self.heard
            if told["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked[1:] if not url.startswith("data:")]

    def close(self) -> None:
        self._session = ""
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        self._process.wait(PATIENCE)
        os.close(self._out)
        os.close(self._in)
