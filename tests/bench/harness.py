"""What the benchmarks share: statistics, a server of their own with sessions, and clients with
little of their own."""

import base64
import http.client
import json
import os
import pty
import re
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import tty
from collections.abc import Iterator, Sequence
from email.message import Message
from pathlib import Path
from typing import Any, Self

IMAGE_NAME, IMAGE_VERSION = "localhost/sandbox-test", "1.0-common"
BUILD = Path(__file__).resolve().parents[2] / "static" / "build.py"
PASSWORD = "bench"


# --- Statistics ---


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def quartiles(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"({low:.2f}-{high:.2f})"


class Table:
    """Prints a row for each figure with its ceiling or floor; remembers whether all were kept."""

    def __init__(self) -> None:
        self.fine = True

    def row(self, title: str, value: float, unit: str, note: str = "", *, most: float | None = None,
            least: float | None = None) -> None:
        kept = (most is None or value <= most) and (least is None or value >= least)
        limit = f"at least {least:g}" if least is not None else ""
        if most is not None:
            limit = f"at most {most:g}"
        self.fine = self.fine and kept
        print(f"{title:50} {value:9.2f} {unit:5} {limit:14} {'' if kept else 'MISSED':7}{note}",
              flush=True)


# --- The zipapp and its server ---


def build_zipapp(folder: str) -> list[str]:
    """The command that starts a fresh zipapp, made for the running interpreter."""
    path = os.path.join(folder, "sandbox.pyz")
    subprocess.run([sys.executable, BUILD, path], check=True, stdout=subprocess.DEVNULL)
    return [sys.executable, "-I", "-S", path]


class Server:
    """`sandbox serve` on docker with a home of its own; its `with` statement removes all of it."""

    def __init__(self, sandbox: Sequence[str]) -> None:
        """`sandbox` is what build_zipapp() gave."""
        self.sandbox = sandbox
        self.folder = tempfile.TemporaryDirectory(prefix="sandbox-bench-")
        self.home = Path(self.folder.name)
        self.port, self.cookie, self.sessions = free_port(), "", list[str]()

    def __enter__(self) -> Self:
        config = {"imageName": IMAGE_NAME, "imageVersion": IMAGE_VERSION, "runtime": "docker"}
        (self.home / "sandbox.json").write_text(json.dumps(config))
        argv = [*self.sandbox, "serve", f"127.0.0.1:{self.port}", "-P", PASSWORD]
        self.log = open(self.home / "log", "wb")
        self.process = subprocess.Popen(argv, env={**os.environ, "SANDBOX_HOME": str(self.home)},
                                        cwd=self.home,
                                        stdout=subprocess.PIPE, stderr=self.log,
                                        start_new_session=True)
        assert self.process.stdout and self.process.stdout.readline().startswith(b"sandbox serves")
        self.log_in()
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()
        if self.sessions:
            argv = ["docker", "rm", "-f", "-v", *self.sessions]
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.folder.cleanup()

    def request(self, method: str, path: str, body: bytes | None = None,
                type: str = "") -> tuple[Message, bytes]:
        """Headers and body of an answer, on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Cookie": self.cookie, "Content-Type": type}
        connection.request(method, path, body, {k: v for k, v in headers.items() if v})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        assert answer.status < 400, (path, answer.status, data)
        return answer.headers, data

    def get(self, path: str) -> Any:
        return json.loads(self.request("GET", path)[1])

    def post(self, path: str, data: object) -> Any:
        return json.loads(self.request("POST", path, json.dumps(data).encode(),
                                       "application/json")[1])

    def log_in(self) -> None:
        body = json.dumps({"username": "admin", "password": PASSWORD}).encode()
        headers, _ = self.request("POST", "/auth/login", body, "application/json")
        self.cookie = str(headers["Set-Cookie"]).partition(";")[0]

    def session(self) -> str:
        """The name of a new session."""
        name = f"bench-{os.getpid()}-{len(self.sessions)}"
        self.post("/api/sessions", {"name": name, "directory": str(self.home), "network": "none"})
        self.sessions.append(name)
        return name

    # What the kernel says of it.

    @property
    def proc(self) -> Path:
        return Path(f"/proc/{self.process.pid}")

    def resident_mb(self) -> float:
        found = re.search(r"VmRSS:\s*(\d+) kB", (self.proc / "status").read_text())
        assert found
        return int(found[1]) * 1024 / 1e6

    def threads(self) -> int:
        return len(os.listdir(self.proc / "task"))

    def descriptors(self) -> int:
        return len(os.listdir(self.proc / "fd"))

    def children(self) -> set[int]:
        found = set[int]()
        for task in list((self.proc / "task").iterdir()):
            try:
                found |= {int(pid) for pid in (task / "children").read_text().split()}
            except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                continue
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- Terminals ---


class Bare:
    """The engine's own client on a PTY of ours."""

    def __init__(self, session: str) -> None:
        self.master, slave = pty.openpty()
        tty.setraw(slave)
        argv = ["docker", "exec", "-it", session, "sh"]
        self.process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True)
        os.close(slave)

    def read(self) -> bytes:
        return os.read(self.master, 65536)

    def write(self, data: bytes) -> None:
        os.write(self.master, data)

    def close(self) -> None:
        """End the client; what it has started ends with the container."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)


class Frames:
    """A client of a WebSocket with as little of its own as possible: no masking work, one buffer.
    """

    def __init__(self, port: int, path: str, **headers: str) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = {"Host": "localhost", "Upgrade": "websocket", "Connection": "Upgrade",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(), **headers}
        lines = [f"GET {path} HTTP/1.1", *(f"{k}: {v}" for k, v in head.items())]
        self.sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        self.buffer = bytearray()
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self.sock.recv(65536)
        assert self.buffer.startswith(b"HTTP/1.1 101"), bytes(self.buffer)
        del self.buffer[: self.buffer.index(b"\r\n\r\n") + 4]
        self.frames = self.parse()

    def send(self, opcode: int, data: bytes) -> None:
        self.sock.sendall(bytes([128 | opcode, 128 | len(data)]) + bytes(4) + data)

    def need(self, size: int) -> None:
        while len(self.buffer) < size:
            data = self.sock.recv(262144)
            if not data:
                raise EOFError
            self.buffer += data

    def parse(self) -> Iterator[bytes]:
        while True:
            self.need(2)
            opcode, size, start = self.buffer[0] & 15, self.buffer[1] & 127, 2
            for short, width, form in ((126, 2, ">H"), (127, 8, ">Q")):
                if size == short and start == 2:
                    self.need(2 + width)
                    size, start = struct.unpack(form, self.buffer[2 : 2 + width])[0], 2 + width
            self.need(start + size)
            data = bytes(self.buffer[start : start + size])
            del self.buffer[: start + size]
            if opcode == 2:
                yield data
            elif opcode == 9:
                self.send(10, data)
            elif opcode == 8:
                raise EOFError


class WebSocket(Frames):
    """A terminal of the server's; `query` as `id=…`."""

    def __init__(self, server: Server, session: str, query: str = "") -> None:
        self.seq = self.acked = 0
        self.began = time.perf_counter()
        path = f"/api/sessions/{session}/terminal?{query}"
        super().__init__(server.port, path, Cookie=server.cookie)

    def write(self, data: bytes) -> None:
        self.send(2, data)

    def read(self) -> bytes:
        data = next(self.frames)
        self.seq += len(data)
        if self.seq - self.acked > 200_000:
            self.acked = self.seq
            self.send(1, json.dumps({"type": "ack", "seq": self.seq}).encode())
        return data

    def close(self) -> None:
        """End what runs in the terminal, and see it end."""
        self.send(1, b'{"type":"close"}')
        try:
            while True:
                self.read()
        except EOFError:
            self.sock.close()


class Ttyd(Frames):
    """A terminal of ttyd's on the engine's own client; a server of it for each."""

    def __init__(self, session: str) -> None:
        port = free_port()
        argv = ["ttyd", "-i", "127.0.0.1", "-p", str(port), "-W", "-d", "1",
                "docker", "exec", "-it", session, "sh"]
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, start_new_session=True)
        while True:
            try:
                super().__init__(port, "/ws", **{"Sec-WebSocket-Protocol": "tty"})
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        self.began = time.perf_counter()
        self.send(2, json.dumps({"AuthToken": "", "columns": 80, "rows": 24}).encode())

    def write(self, data: bytes) -> None:
        self.send(2, b"0" + data)

    def read(self) -> bytes:
        while not (data := next(self.frames)).startswith(b"0"):
            pass
        return data[1:]

    def close(self) -> None:
        self.sock.close()
        self.process.terminate()
        self.process.wait()


Client = Bare | WebSocket | Ttyd


def until(client: Client, mark: bytes) -> int:
    """Read until the mark has come; how many bytes that were."""
    tail, size = b"", 0
    while mark not in tail:
        data = client.read()
        size += len(data)
        tail = tail[-len(mark) :] + data
    return size


def ready(client: Client, line: bytes = b"true") -> Any:
    """The client, when the shell has carried out the line and waits; in raw mode it echoes."""
    time.sleep(0.5)
    client.write(line + b"; echo rea''dy" + (b"; exec cat\n" if b"raw" in line else b"\n"))
    until(client, b"ready")
    time.sleep(0.3)
    return client
