"""A running `sandbox serve` and its clients: HTTP, raw sockets, server-sent events, WebSockets."""

import hashlib
import hmac
import http.client
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from conftest import HANG_SECONDS, TIMEOUT_SECONDS, Engine, Process
from websockets.sync.client import ClientConnection, connect

PASSWORD = "s3cret"
PORTS: list[socket.socket] = []  # each holds a name as long as it is open
PORTS_KEPT = 50


def free_port() -> int:
    """A port that no other test begins with, and below those that the kernel gives to clients:
    between now and its use it would give one of these to somebody else.
    """
    while True:
        port = 20000 + secrets.randbelow(12000)
        lock = socket.socket(socket.AF_UNIX)
        PORTS.append(lock)
        with suppress(OSError):
            lock.bind(f"\0sandbox-test-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
            if len(PORTS) > PORTS_KEPT:
                PORTS.pop(0).close()
            return port


def wait_for(condition: Callable[[], Any], seconds: float = HANG_SECONDS) -> Any:
    """Poll until the condition is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


class Reply:
    """An HTTP answer, read whole."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Service:
    """A server in the foreground, with its account, and a logged-in client."""

    def __init__(self, engine: Engine, *options: str, kept: bool = False,
                 env: dict[str, str] | None = None,
                 start: bool = True) -> None:
        """`kept`: it does not end with the test that is running, but with end()."""
        self.engine, self.port, self.options = engine, free_port(), options
        self.kept, self.env = kept, env
        self.address = f"127.0.0.1:{self.port}"
        self.cookie = ""
        if start:
            self.start()
            self.log_in()

    def start(self) -> None:
        self.process: Process = self.engine.popen("serve", self.address, "-P", PASSWORD,
                                                  *self.options, env=self.env)
        if self.kept:
            self.engine.started.remove(self.process)
        assert self.process.stdout
        self.said = [self.process.stdout.readline() for _ in range(3)]
        if not self.said[0].strip().endswith(self.address):
            raise AssertionError(self.said, self.process.communicate(timeout=HANG_SECONDS))

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(HANG_SECONDS)
        self.process.end()

    def restart_after_kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.end()
        self.start()

    def log_in(self, password: str = PASSWORD) -> Reply:
        reply = self.post("/auth/login", {"username": "admin", "password": password}, cookie="")
        if reply.status == 200:
            self.cookie = reply.headers["Set-Cookie"].partition(";")[0]
        return reply

    def signed_cookie(self, seconds: float) -> str:
        """A login by the server's own key that is over in so many seconds."""
        state = self.engine.home / "web" / f"127.0.0.1_{self.port}.json"
        account = b"".join(hashlib.sha256(text.encode()).digest() for text in ("admin", PASSWORD))
        key = hmac.digest(bytes.fromhex(json.loads(state.read_text())["secret"]), account, "sha256")
        text = f"{secrets.token_hex(16)}.{int(time.time() + seconds)}"
        return f"sandbox_{self.port}={text}.{hmac.digest(key, text.encode(), 'sha256').hex()}"

    def said_at_the_end(self) -> str:
        """End it; what it has printed on stderr."""
        self.process.terminate()
        return self.process.communicate(timeout=HANG_SECONDS)[1]

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        cookie: str | None = None,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        try:
            sent = {"Cookie": self.cookie if cookie is None else cookie, **(headers or {})}
            connection.request(method, path, body, {k: v for k, v in sent.items() if v})
            return Reply(connection.getresponse())
        except ConnectionError as error:
            error.add_note(f"the status of the service is {self.process.poll()}")
            raise
        finally:
            connection.close()

    def get(self, path: str, **more: Any) -> Reply:
        return self.request("GET", path, **more)

    def post(self, path: str, data: object = None, method: str = "POST", **more: Any) -> Reply:
        body = json.dumps({} if data is None else data).encode()
        return self.request(method, path, body,
                            {"Content-Type": "application/json", **more.pop("headers", {})}, **more)

    def raw(self, data: bytes, seconds: float = HANG_SECONDS) -> bytes:
        """Send bytes on a connection of their own, and all that comes back until it is closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as sock:
            with suppress(OSError):
                sock.sendall(data)
            received = b""
            with suppress(OSError):
                while more := sock.recv(65536):
                    received += more
            return received

    def status(self, data: bytes) -> int:
        """The status of the first answer to raw bytes, 0 when none came."""
        found = re.match(rb"HTTP/1.1 (\d+)", self.raw(data))
        return int(found[1]) if found else 0

    def create(self, name: str, **fields: Any) -> Any:
        reply = self.post("/api/sessions",
                          {"name": name, "directory": str(self.engine.project), **fields})
        assert reply.status == 201, reply.body
        return reply.json

    def job(self, session: str, command: str) -> Any:
        reply = self.post(f"/api/sessions/{session}/command", {"command": command})
        assert reply.status == 201, reply.body
        return reply.json

    def ended(self, job: Any) -> Any:
        """The job when it is over."""
        path = f"/api/sessions/{job['session']}/jobs/{job['id']}"
        return wait_for(lambda: (found := self.get(path).json)["state"] != "running" and found)

    def events(self, job: Any, start: int | None = None) -> Iterator[tuple[str, Any, int]]:
        """Server-sent events of a job: name, data, id."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        headers = {"Cookie": self.cookie,
                   **({} if start is None else {"Last-Event-ID": str(start)})}
        connection.request("GET", f"/api/sessions/{job['session']}/jobs/{job['id']}/events",
                           headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        event: dict[str, str] = {}
        try:
            for line in answer:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name:
                    event[name] = value
                elif "event" in event:
                    yield event["event"], json.loads(event["data"]), int(event.get("id", -1))
                    event = {}
        finally:
            connection.close()

    @contextmanager
    def terminal(self, session: str, query: str = "") -> Iterator["Screen"]:
        url = f"ws://{self.address}/api/sessions/{session}/terminal?{query}"
        with connect(
            url, additional_headers={"Cookie": self.cookie}, compression=None, max_size=None,
            ping_interval=None
        ) as socket:
            yield Screen(socket)

    @property
    def pid(self) -> int:
        return self.process.pid

    def resources(self) -> tuple[int, int]:
        """Threads and descriptors of the server."""
        process = Path(f"/proc/{self.pid}")
        return len(os.listdir(process / "task")), len(os.listdir(process / "fd"))

    def is_idle(self) -> bool:
        """Whether it has used no processor for a moment: it waits for others."""
        def used() -> list[str]:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]

        before = used()
        time.sleep(0.3)
        return used() == before

    def resident_bytes(self) -> int:
        found = re.search(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024


class Screen:
    """A terminal's WebSocket: collects output, acknowledges it, and keeps the control messages."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.output = bytearray()
        self.messages: list[Any] = []
        self.acked = 0
        self.hello = self.message("hello")
        self.seq = self.hello["seq"]
        self.at = 0

    def receive(self, timeout: float = HANG_SECONDS) -> None:
        data = self.socket.recv(timeout=timeout)
        if isinstance(data, str):
            self.messages.append(json.loads(data))
            return
        self.output += data
        self.seq += len(data)
        if self.seq - self.acked > 100_000:
            self.acked = self.seq
            self.send(type="ack", seq=self.seq)

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def type(self, text: str | bytes) -> None:
        self.socket.send(text.encode() if isinstance(text, str) else text)

    def expect(self, text: str, timeout: float = HANG_SECONDS) -> bytes:
        """Read until the text has come after what was expected before; the output up to its end."""
        wanted, start, looked = text.encode(), self.at, self.at
        while (found := self.output.find(wanted, looked)) < 0:
            looked = max(start, len(self.output) - len(wanted))
            self.receive(timeout)
        self.at = found + len(wanted)
        return bytes(self.output[start : self.at])

    def quiet(self, seconds: float = 1) -> None:
        """Read until nothing has come for this long."""
        with suppress(TimeoutError):
            while True:
                self.receive(seconds)

    def message(self, type: str) -> Any:
        """The next control message of a type."""
        while True:
            for message in self.messages:
                if message["type"] == type:
                    self.messages.remove(message)
                    return message
            self.receive()
