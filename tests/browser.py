"""Headless Chromium, spoken to over its pipe, for tests of pages: what is asked for, what is said, what is seen."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The protocol's ends have to be the browser's descriptors 3 and 4, whatever numbers they have here.
_LAUNCH = """
import os, sys
ends = [os.dup(int(end)) for end in sys.argv[1:3]]
for number, end in enumerate(ends, start=3):
    os.dup2(end, number)
    os.set_inheritable(number, True)
os.execvp(sys.argv[3], sys.argv[3:])
"""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """The program, if there is one on PATH."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `events` has everything that the browser reported of it."""

    def __init__(self, writing: int, reading: int) -> None:
        self._writing, self._reading, self._rest = writing, reading, b""
        self._calls, self._session = 0, None
        self.events: list[dict[str, Any]] = []
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._calls:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """A file in a window of some size, until it is loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Of some JavaScript."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, path: Path, **clip: float) -> None:
        """A PNG of a part (x, y, width, height) of the page, or of what the window shows."""
        area = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **area)["data"]))

    @property
    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    @property
    def complaints(self) -> list[str]:
        """What went to the console as an error or warning."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._reading, 1 << 16)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def opened(program: str, profile: Path) -> Iterator[Page]:
    """A tab of a browser of its own, whose profile lies in a folder."""
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
        "--disable-background-networking", "--no-first-run", f"--user-data-dir={profile}",
    ]  # fmt: skip

    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _LAUNCH, str(to_browser), str(from_browser), *command],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(writing, reading)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(writing)
        os.close(reading)
