"""Chromium without a screen, told what to do over a pipe (the Chrome DevTools protocol)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from types import TracebackType
from typing import Any

#: Seconds for an answer; a browser that is slower hangs.
ANSWER_S = 120.0


def available() -> str | None:
    """The path of a Chromium on this machine; None without one."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One tab of a browser of its own, which ends with the context.

    Args:
        width, height: of the tab, in pixels.
        is_dark: what the user prefers.

    Raises:
        RuntimeError: there is none, or it ends or does not answer; every method raises it.
    """

    def __init__(self, width: int = 1200, height: int = 900, is_dark: bool = False) -> None:
        program = available()
        if program is None:
            raise RuntimeError("no chromium here: apt-get install chromium")
        self._folder = tempfile.TemporaryDirectory(prefix="crux-browser-")
        hears, self._to = os.pipe()
        self._from, says = os.pipe()
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        )
        # The protocol takes descriptors 3 and 4; a shell puts them there.
        command = f'exec 3<&{hears} 4>&{says}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *flags, "--remote-debugging-pipe",
             f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(hears, says), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(hears)
        os.close(says)
        self._answers = os.fdopen(self._from, "rb", buffering=1 << 16)
        self._rest = b""
        self._count = 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        self.call("Page.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        # Its own processes are in its session.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        os.close(self._to)
        self._folder.cleanup()

    def call(self, method: str, **arguments: Any) -> Any:
        """The result of one call of the protocol."""
        self._count += 1
        asked = {"id": self._count, "method": method, "params": arguments}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        watchdog = threading.Timer(ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            while True:
                answer = self._next()
                if answer.get("id") == self._count:
                    break
        finally:
            watchdog.cancel()
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            more = self._answers.read1(1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def resize(self, width: int, height: int) -> None:
        """Gives the tab another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def open(self, address: str) -> None:
        """Opens a page, and waits until it is loaded and has been painted."""
        found = self.call("Page.navigate", url=address)
        if "errorText" in found:
            raise RuntimeError(f"{address}: {found['errorText']}")
        self.wait("document.readyState === 'complete'")
        self.wait("performance.getEntriesByName('first-contentful-paint').length > 0")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise's, when it has one."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until a JavaScript expression is true."""
        looks = f"new Promise((done) => {{ const look = () => ({condition}) ? done(true) : "
        self.value(looks + "setTimeout(look, 20); look(); })")

    def press(self, key: str) -> None:
        """Presses a key, such as ``Tab`` or ``Enter``."""
        codes = {"Tab": 9, "Enter": 13}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, x: float, y: float) -> None:
        """Clicks at a place of the tab."""
        about = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **about)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **about)

    def picture(self) -> bytes:
        """A PNG of the tab."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
