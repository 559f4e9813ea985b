"""A headless Chromium that a test drives over its debugging port."""

import base64
import itertools
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest
import urllib.request

import websocket


class Browser:
    def __init__(self, program, folder):
        self.numbers, self.messages = itertools.count(1), []
        profile = pathlib.Path(folder) / "profile"
        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0",
             "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True)
        port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + 60
        while not (port_file.exists() and "\n" in port_file.read_text()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.close()
                raise RuntimeError(f"{program} opened no debugging port within a minute")
            time.sleep(0.05)
        port = port_file.read_text().split("\n")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answer:
            page = next(target for target in json.load(answer) if target["type"] == "page")
        self.socket = websocket.create_connection(page["webSocketDebuggerUrl"], timeout=60)
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(domain + ".enable")

    def close(self, patience=20):
        """Ends the browser and waits for its children too, which write to the profile for a while after it has ended.

        What has not ended after `patience` seconds is killed.
        """
        self.process.terminate()
        # Every child has inherited the pipe, so its end comes with the last of them.
        try:
            self.process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate(timeout=patience)

    def receive(self):
        message = json.loads(self.socket.recv())
        if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(json.dumps(message["params"]))
        return message

    def call(self, method, **parameters):
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = self.receive()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def size(self, width, height=900, phone=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, media="", **features):
        self.call("Emulation.setEmulatedMedia", media=media,
                  features=[{"name": name.replace("_", "-"), "value": value} for name, value in features.items()])

    def open(self, address):
        self.messages.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + 30
        while self.value("document.readyState") != "complete" or self.value("location.href") == "about:blank":
            if time.monotonic() > deadline:
                raise RuntimeError(f"{address} did not load within 30 s")
            time.sleep(0.02)

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait_until(self, expression, patience=20):
        """Waits until the page shows what an input changes; fails if it does not within `patience` seconds."""
        deadline = time.monotonic() + patience
        while not self.value(expression):
            if time.monotonic() > deadline:
                raise AssertionError(f"after {patience} s still not: {expression}")
            time.sleep(0.02)

    def key(self, key, code=0, text=""):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **({"text": text} if kind == "keyDown" and text else {}))

    def screenshot(self, file, **clip):
        parameters = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        pathlib.Path(file).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **parameters)["data"]))


class PageCase(unittest.TestCase):
    """Tests of pages, in a folder and a browser of their own."""

    PROGRAM = None  # set before the tests run

    @classmethod
    def setUpClass(cls):
        if cls.PROGRAM is None:
            raise RuntimeError("no Chromium on this machine, which would draw the page; scripts/setup --tests installs it")
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        cls.browser = Browser(cls.PROGRAM, cls.folder)
        cls.addClassCleanup(cls.browser.close)
