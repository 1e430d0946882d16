"""A headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
"""path of the browser; None: there is none"""
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


def look(page: Path, expression: str, folder: Path, timeout_s: float = 120.0, fragment: str = "") -> Any:
    """Open a page from disk, offline, and return the value of a JavaScript expression as soon as it is not null.

    Args:
        folder: for the browser's profile.

    Raises:
        TimeoutError: it stayed null; the message has the errors of the page.
    """

    async def found() -> Any:
        async with browser(folder) as tab:
            await tab.open(page, fragment)
            return await tab.value(expression, timeout_s)

    return asyncio.run(found())


class Tab:
    """The only tab of a browser that can load nothing but files.

    Attributes:
        said: exceptions, console output and failed requests since the last ``open``.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.said: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("method") in COMPLAINTS:
                self.said.append(str(message["params"])[:500])
            if message.get("id") == self._number:
                return message["result"]

    async def open(self, page: Path, fragment: str = "") -> None:
        self.said.clear()
        await self.call("Page.navigate", url=f"{page.resolve().as_uri()}{fragment}")

    async def value(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Return the value of an expression as soon as it is not null.

        Raises:
            TimeoutError: it stayed null.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (found := await self._evaluated(expression)) is None:
                    await asyncio.sleep(0.1)
                return found
        except TimeoutError:
            raise TimeoutError(f"{expression} stayed null; the page said {self.said}") from None

    async def _evaluated(self, expression: str) -> Any:
        return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")

    async def resize(self, width: int, scheme: str) -> None:
        """Set the width in pixels, and ``light`` or ``dark`` as the preferred colors."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        taken = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """Run a browser with its profile in ``folder``."""
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    flags += ["--proxy-server=127.0.0.1:9", f"--user-data-dir={folder}"]  # nothing can be loaded
    process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with aiohttp.ClientSession() as session:
            ready = folder / "DevToolsActivePort"
            while not ready.exists() or not ready.read_text():
                await asyncio.sleep(0.1)
                assert process.poll() is None, "the browser ended"
            port = ready.read_text().splitlines()[0]
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                target = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(target, max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
    finally:
        process.kill()
        process.wait()
