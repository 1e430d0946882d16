"""A headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
"""path of the browser; None: there is none"""


def look(page: Path, expression: str, folder: Path, timeout_s: float = 120.0, fragment: str = "") -> Any:
    """Open a page from disk, offline, and return the value of a JavaScript expression as soon as it is not null.

    Args:
        folder: for the browser's profile.

    Raises:
        TimeoutError: it stayed null; the message has what the page shows and its errors.
    """
    return asyncio.run(_look(f"{page.resolve().as_uri()}{fragment}", expression, folder, timeout_s))


async def _look(url: str, expression: str, folder: Path, timeout_s: float) -> Any:
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    flags += ["--proxy-server=127.0.0.1:9", f"--user-data-dir={folder}"]  # nothing can be loaded
    browser = subprocess.Popen([CHROMIUM, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            ready = folder / "DevToolsActivePort"
            while not ready.exists() or not ready.read_text():
                await asyncio.sleep(0.1)
            port = ready.read_text().splitlines()[0]
            async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                target = (await answer.json())["webSocketDebuggerUrl"]
            async with session.ws_connect(target, max_msg_size=0) as socket:
                return await _value(socket, url, expression)
    finally:
        browser.kill()
        browser.wait()


async def _value(socket: aiohttp.ClientWebSocketResponse, url: str, expression: str) -> Any:
    number, said = 0, list[str]()

    async def call(method: str, **params: Any) -> Any:
        nonlocal number
        number += 1
        await socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await socket.receive_json()
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                said.append(str(message["params"])[:500])
            if message.get("id") == number:
                return message["result"]

    async def evaluate(text: str) -> Any:
        return (await call("Runtime.evaluate", expression=text, returnByValue=True))["result"].get("value")

    try:
        for domain in ("Page", "Runtime", "Log"):
            await call(f"{domain}.enable")
        await call("Page.navigate", url=url)
        while (found := await evaluate(expression)) is None:
            await asyncio.sleep(0.2)
        return found
    except asyncio.CancelledError:
        raise TimeoutError(f"{expression} stayed null; the page said {said}") from None
