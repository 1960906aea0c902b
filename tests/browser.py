"""A headless Chromium for tests, driven over its own DevTools protocol."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Page:
    """A tab. errors: what its script threw, and what its policy or the network kept from loading."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def listen(self) -> None:
        """Take what the browser says, until it is gone."""
        async for message in self._socket:
            said = json.loads(message.data)
            if said.get("id") in self._answers:
                self._answers.pop(said["id"]).set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        """Return what a method of the protocol gives."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await answer
        assert "error" not in said, said
        return said["result"]

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 30) -> None:
        """Wait until a JavaScript expression is true, and does not fail because something is not there yet."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await self.value(f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"):
            if asyncio.get_running_loop().time() > deadline:
                text = await self.value("document.body.innerText")
                raise AssertionError(f"{expression} is not so after {seconds} s; errors: {self.errors}; page: {text}")
            await asyncio.sleep(0.1)

    async def picture(self) -> bytes:
        """Return what the page looks like, all of it, as a PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(taken["data"])


@contextlib.asynccontextmanager
async def browsing(address: str, width: int = 1280, height: int = 900, dark: bool = False) -> AsyncIterator[Page]:
    """Open an address in a Chromium of its own while the context lasts."""
    with TemporaryDirectory(prefix="specahead-browser-", ignore_cleanup_errors=True) as folder:
        flags = (*FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank")
        silent = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *flags, stdout=silent, stderr=silent, start_new_session=True
        )
        try:
            async with aiohttp.ClientSession() as client:
                tab = await _find_tab(Path(folder) / "DevToolsActivePort", client)
                async with client.ws_connect(tab, max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    await _prepare(page, width, height, dark)
                    await page.call("Page.navigate", url=address)
                    yield page
                    listening.cancel()
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # and its own children
            await process.wait()


async def _prepare(page: Page, width: int, height: int, dark: bool) -> None:
    for domain in ("Runtime", "Log", "Page"):
        await page.call(f"{domain}.enable")
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    await page.call("Emulation.setDeviceMetricsOverride", **screen)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    await page.call("Emulation.setEmulatedMedia", features=[scheme])


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def _find_tab(told: Path, client: aiohttp.ClientSession) -> str:
    """Return the address at which the browser's tab is driven, once it is there. told: the file that names its port."""
    async with asyncio.timeout(60):
        while not _read(told):
            await asyncio.sleep(0.05)
        port = _read(told).split()[0]
        while True:
            async with client.get(f"http://127.0.0.1:{port}/json/list") as response:
                tabs = [tab for tab in await response.json() if tab["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(0.05)
