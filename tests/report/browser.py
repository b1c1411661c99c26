"""A headless chromium, driven over its own debugging protocol: real clicks, its errors, its requests."""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. Its network is a proxy that nothing listens at: whatever is asked for outside cannot be had."""

    def __init__(self, program: str, profile: Path) -> None:
        flags = [
            "--headless=new",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--window-size=1200,1000",
        ]
        flags += ["--proxy-server=127.0.0.1:1", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        flags += ["--no-sandbox"] if os.getuid() == 0 else []
        self.process = subprocess.Popen([program, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = self._wait_for(profile / "DevToolsActivePort")
        tabs = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=20).read())
        self._socket = connect(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"), max_size=None)
        self._sent = 0
        self.events: list[dict] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def _wait_for(self, file: Path) -> int:
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text().count("\n")):
            if self.process.poll() is not None:
                raise RuntimeError(f"chromium ended with {self.process.returncode} before it listened")
            if time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError("chromium did not listen within a minute")
            time.sleep(0.05)
        return int(file.read_text().split("\n")[0])

    def send(self, method: str, **parameters) -> dict:
        """A command and its result; events that come meanwhile are kept."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._sent:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a page and wait until its scripts have run."""
        for url in ("about:blank", page.as_uri() + fragment):  # a new fragment alone would not load the page anew
            self.events.clear()
            self.send("Page.navigate", url=url)
            while not any(event["method"] == "Page.loadEventFired" for event in self.events):
                self.events.append(json.loads(self._socket.recv(timeout=60)))

    def run(self, script: str):
        """The value of a JavaScript expression, after the next two frames were drawn."""
        frames = "await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"
        expression = f"(async () => {{ const value = {script}; {frames}; return value; }})()"
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def errors(self) -> list[dict]:
        """Exceptions, console errors, and what the browser itself complains of (refused scripts, failed requests)."""
        bad = [e for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        bad += [
            e for e in self.events if e["method"] == "Runtime.consoleAPICalled" and e["params"]["type"] in ("error", "warning")
        ]
        return bad + [e for e in self.events if e["method"] == "Log.entryAdded" and e["params"]["entry"]["level"] == "error"]

    def requests(self) -> list[str]:
        """Addresses asked for since the page was opened, but for those that carry their own content."""
        asked = [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "blob:"))]

    def close(self) -> None:
        self._socket.close()
        self.process.terminate()
        self.process.wait(timeout=30)
