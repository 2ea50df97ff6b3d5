"""A real Chromium, headless, driven over its DevTools protocol with `websockets`."""

import base64
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from conftest import HANG_SECONDS
from websockets.sync.client import connect

ARGV = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-default-apps",
        "--disable-extensions",
        "--disable-features=Translate,OptimizationHints,MediaRouter,AutofillServerCommunication",
        "--no-first-run",
        "--no-default-browser-check", "--no-pings", "--metrics-recording-only",
        "--password-store=basic",
        "--hide-scrollbars", "--remote-debugging-port=0", "about:blank"]
DESKTOP, PHONE = (1280, 800), (390, 780)
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowUp": (38, ""),
        "ArrowDown": (40, ""), "Delete": (46, "")}

# Where to press on an element; null as long as it moves, or something else is there. What comes
# into the page after that may move it: the page does not get a press on something else.
AIM = """(async () => {
    const find = () => [...document.querySelectorAll(SELECTOR)]
        .find((e) => e.checkVisibility() && !e.disabled);
    window.aim?.guard.abort();
    const aim = window.aim = { guard: new AbortController() };
    for (let frames = 0, at = []; frames < 60; frames++) {
        const last = at;
        await new Promise(requestAnimationFrame);
        const e = find();
        e?.scrollIntoView({ block: "nearest" });
        const box = e?.getClientRects()[0] ?? {};
        at = [box.x + box.width / 2, box.y + box.height / 2];
        if (at[0] !== last[0] || at[1] !== last[1]) continue;
        const there = document.elementFromPoint(...at);
        aim.there = there?.outerHTML.slice(0, 200);
        if (!e.contains(there)) {
            e.scrollIntoView({ block: "center" }); // from below what sticks to an edge
            continue;
        }
        for (const kind of ["pointerdown", "mousedown"]) window.addEventListener(kind, (event) => {
            aim.hit ??= Boolean(find()?.contains(event.target));
            if (aim.hit) return;
            event.preventDefault();
            event.stopImmediatePropagation();
        }, { capture: true, once: true, signal: aim.guard.signal });
        return at;
    }
    return null;
})()"""

# What a page's short messages have said: they go by themselves, whoever looks.
TOASTED = """document.addEventListener("DOMContentLoaded", () => {
    window.toasted = [];
    const box = document.querySelector("#toasts");
    if (box) new MutationObserver((records) => {
        for (const { addedNodes } of records)
            for (const toast of addedNodes) toasted.push(toast.textContent);
    }).observe(box, { childList: true });
});"""

# That all parts of a page have come; one that has lost some is about to load itself again.
SETTLED = ("document.readyState === 'complete' && (!location.protocol.startsWith('http') || "
           "!/[1-4]/.test(sessionStorage.getItem('reloads')))")


class Page:
    """One tab: what it has asked for and complained about, and hands for it."""

    def __init__(self, url: str) -> None:
        self.stack = ExitStack()
        self.target = url.rpartition("/")[2]
        self.socket = self.stack.enter_context(connect(url, max_size=None, compression=None,
                                                       ping_interval=None))
        self.number = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.bytes = 0
        self.dialogs: list[str] = []  # by their types
        self.dialog_answer = True
        self.losing: set[str] = set()  # ends of addresses, each of which is lost once; see lose()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=TOASTED)

    def close(self) -> None:
        self.call("Target.closeTarget", targetId=self.target)  # Page.close fails amid a navigation
        self.stack.close()

    def call(self, method: str, **params: Any) -> Any:
        """Carry out a command of the protocol; take in the events that come before its answer."""
        number = self.send(method, **params)
        while True:
            message = json.loads(self.socket.recv(timeout=HANG_SECONDS))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            if "method" in message:
                self.take(message["method"], message["params"])

    def send(self, method: str, **params: Any) -> int:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        return self.number

    def take(self, event: str, data: Any) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(data["request"]["url"])
        elif event == "Network.webSocketCreated":
            self.requests.append(data["url"])
        elif event == "Network.loadingFinished":
            self.bytes += data["encodedDataLength"]
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(data["exceptionDetails"].get("exception",
                                                                data["exceptionDetails"])))
        elif event == "Runtime.consoleAPICalled" and data["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description")))
                                        for a in data["args"]))
        elif event == "Fetch.requestPaused":
            lost = {end for end in self.losing if data["request"]["url"].endswith(end)}
            self.losing -= lost
            if lost:
                self.send("Fetch.failRequest", requestId=data["requestId"],
                          errorReason="ConnectionAborted")
            else:
                self.send("Fetch.continueRequest", requestId=data["requestId"])
        elif event == "Page.javascriptDialogOpening":
            self.dialogs.append(data["type"])
            self.send("Page.handleJavaScriptDialog", accept=self.dialog_answer)
        elif event == "Log.entryAdded" and data["entry"]["level"] in ("error", "warning"):
            if "ERR_NETWORK_CHANGED" in data["entry"]["text"]:
                return  # some container's interface has come or gone; the page asks again
            self.errors.append(f"{data['entry']['text']} {data['entry'].get('url', '')}")

    def eval(self, script: str) -> Any:
        """The value of an expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True,
                           returnByValue=True,
                           userGesture=True)
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = HANG_SECONDS) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(AssertionError):  # a page that is being left
                if self.eval(f"Boolean({script})"):
                    return
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{script} did not become true\n{self.errors}\n{self.text()[-3000:]}")
            time.sleep(0.03)

    def see(self, text: str, within: str = "body", seconds: float = HANG_SECONDS) -> None:
        """Wait until a text can be read in an element."""
        self.wait(
            f"document.querySelector({json.dumps(within)})?.innerText.includes({json.dumps(text)})",
            seconds)

    def told(self, text: str) -> None:
        """Wait until a short message has said a text since the page was opened."""
        self.wait(f"toasted.some((told) => told.includes({json.dumps(text)}))")

    def text(self) -> str:
        """What can be read; nothing on a page that is being left or has no body yet."""
        with suppress(AssertionError):
            return str(self.eval("document.body?.innerText ?? ''"))
        return ""

    def settle(self) -> None:
        """Take in all that the page has said and asked for, when it is there."""
        self.wait(SETTLED)

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"{SETTLED} && location.href.startsWith({json.dumps(url.split('#')[0])})")

    def lose(self, *ends: str) -> None:
        """Have the next request of each address that ends so fail on its way."""
        self.call("Network.setCacheDisabled", cacheDisabled=True)
        self.losing = set(ends)
        self.call("Fetch.enable", patterns=[{"urlPattern": f"*{end}"} for end in ends])

    def resize(self, size: tuple[int, int], dark: bool = False) -> None:
        """Be a desktop's or a phone's screen, light or dark."""
        phone = size[0] < 500
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1],
                  deviceScaleFactor=2 if phone else 1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def click(self, selector: str, amid: Callable[[], None] = lambda: None) -> None:
        """Press the mouse on the first element of a selector that can be seen, and on no other.

        amid: what happens before it is released."""
        found = json.dumps(selector)
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            with suppress(AssertionError):  # a page that is being left
                if at := self.eval(AIM.replace("SELECTOR", found)):
                    self.mouse("mousePressed", at)
                    if self.eval("window.aim?.hit"):
                        break
                    self.mouse("mouseReleased", [0, 0])  # elsewhere: nothing is clicked
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{selector} cannot be pressed: {self.eval('window.aim?.there')} is there\n"
                    f"{self.errors}\n{self.text()[-3000:]}")
        amid()
        self.mouse("mouseReleased", at)

    def mouse(self, kind: str, at: list[float], count: int = 1) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left",
                  clickCount=count)

    def press(self, name: str, text: str = "", modifiers: int = 0) -> None:
        """Press a key: a name of KEYS, or a letter."""
        code, typed = KEYS.get(name, (ord(name[0].upper()), text))
        key = {"key": name, "windowsVirtualKeyCode": code,
               "code": name if name in KEYS else f"Key{name.upper()}",
               "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text or typed, **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def fill(self, selector: str, text: str) -> None:
        """Replace what is in a field."""
        self.click(selector)
        self.eval(f"(e => (e.focus(), e.select()))(document.querySelector({json.dumps(selector)}))")
        self.type(text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


class Browser:
    """A running Chromium."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(f"http://{self.address}{path}", method=method)
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
            return json.load(answer)

    def page(self) -> Page:
        page = Page(self.get("/json/new?about:blank", "PUT")["webSocketDebuggerUrl"])
        page.resize(DESKTOP)
        return page


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser with a profile that goes again."""
    with tempfile.TemporaryDirectory(prefix="sandbox-test-chromium-",
                                     ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([*ARGV, f"--user-data-dir={profile}"], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            file = Path(profile, "DevToolsActivePort")
            deadline = time.monotonic() + HANG_SECONDS
            while not file.exists() or "\n" not in file.read_text():
                assert process.poll() is None, "chromium does not start"
                assert time.monotonic() < deadline, "chromium does not start"
                time.sleep(0.05)
            yield Browser(f"127.0.0.1:{file.read_text().splitlines()[0]}")
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
