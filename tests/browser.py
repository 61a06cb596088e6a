"""Drives Debian's Chromium without a package: the DevTools protocol over two pipes.

Every page has storage of its own. Hosts other than 127.0.0.1 cannot be found.
"""

from __future__ import annotations

import base64
import collections
import itertools
import json
import os
import pathlib
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from types import TracebackType
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs the chromium program")

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
_OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
_TIMEOUT_S = 30.0
# key → its code and text
_KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    "ArrowUp": (38, ""),
    "ArrowDown": (40, ""),
    "Home": (36, ""),
    "End": (35, ""),
    " ": (32, " "),
}
SHIFT = 8


class BrowserError(Exception):
    """The browser refused a command, or a script of a page failed."""


class Browser:
    """A browser process.

    Args:
        directory: for its profile.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        assert CHROMIUM is not None
        command = [CHROMIUM, *_FLAGS, _OFFLINE, f"--user-data-dir={directory}", "about:blank"]
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            # the browser expects its pipes at these numbers
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(self._answers, 1 << 20):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._replies[message["id"]].put(message)
                elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                    page.take_event(message["method"], message["params"])

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result.

        Raises:
            BrowserError: the browser refuses it, or does not answer.
        """
        number = next(self._numbers)
        replies = self._replies[number] = queue.SimpleQueue()
        command = {"id": number, "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        try:
            reply = replies.get(timeout=_TIMEOUT_S)
        except queue.Empty as error:
            self._log.seek(0)
            raise BrowserError(f"no answer to {method}; log:\n{self._log.read().decode()}") from error
        finally:
            del self._replies[number]
        if "error" in reply:
            raise BrowserError(f"{method}: {reply['error']['message']}")
        result: dict[str, Any] = reply["result"]
        return result

    def open(self, url: str, width: int = 1280, height: int = 800) -> Page:
        """A page in a window of its own, loaded."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.goto(url)
        return page

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(_TIMEOUT_S)
        os.close(self._commands)
        self._reader.join(_TIMEOUT_S)
        os.close(self._answers)
        self._log.close()


class Page:
    """A page of the browser.

    Attributes:
        requests: all that were sent: (method, URL, body or "").
        problems: uncaught exceptions, and what the browser complained about, such as the policy of contents.
    """

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.requests: list[tuple[str, str, str]] = []
        self.problems: list[str] = []
        self._statuses: collections.Counter[int] = collections.Counter()

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def take_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            request = params["request"]
            self.requests.append((request["method"], request["url"], request.get("postData", "")))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["source"] != "network":
            self.problems.append(params["entry"]["text"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression, of a promise its result.

        Raises:
            BrowserError: it throws.
        """
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description") or details["text"])
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Waits until an expression is true, and returns its value.

        Raises:
            BrowserError: it never is; the message holds what the page shows.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            if value := self.js(expression):
                return value
            time.sleep(0.02)
        raise BrowserError(f"never true: {expression}\n{self.problems}\n{self.js('document.body.innerText')}")

    def text(self, selector: str) -> str:
        """The text that an element shows."""
        shown: str = self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return shown

    def focus(self, selector: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")

    def move_to(self, selector: str) -> tuple[float, float]:
        """Moves the mouse to an element's middle.

        Raises:
            BrowserError: something else is in front of it.
        """
        found = self.js(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{block: 'nearest'}});
              const box = element.getClientRects()[0];
              const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
              const front = document.elementFromPoint(x, y);
              return [x, y, element.contains(front) || (front?.contains(element) ?? false)];
            }})()"""
        )
        if not found[2]:
            raise BrowserError(f"{selector} is covered")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=found[0], y=found[1])
        return found[0], found[1]

    def click(self, selector: str) -> None:
        x, y = self.move_to(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def fill(self, selector: str, text: str) -> None:
        """Replaces what a field holds by typing."""
        self.focus(selector)
        self.js(f"document.querySelector({json.dumps(selector)}).select()")
        self.type(text) if text else self.press("Delete")

    def choose(self, selector: str, value: str) -> None:
        """Chooses an option of a list.

        Raises:
            BrowserError: there is no such option, or it cannot be chosen.
        """
        chosen = self.js(
            f"""(() => {{
              const list = document.querySelector({json.dumps(selector)});
              const option = [...list.options].find((one) => one.value === {json.dumps(value)} && !one.disabled);
              if (option) list.value = option.value;
              list.dispatchEvent(new Event("change", {{bubbles: true}}));
              return Boolean(option);
            }})()"""
        )
        if not chosen:
            raise BrowserError(f"{selector} has no option {value}")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses a key by its name in JavaScript, with SHIFT, say."""
        code, text = _KEYS.get(key, (46 if key == "Delete" else 0, ""))
        params = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **params, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, **features: str) -> None:
        """Sets media features such as prefers_color_scheme="dark"."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=wanted)

    def accessible(self) -> list[tuple[str, str]]:
        """Roles and names of what assistive programs see."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]
        ]

    def screenshot(self, path: pathlib.Path) -> None:
        """Writes a PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
