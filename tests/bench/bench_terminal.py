"""The terminal's WebSocket against a bare PTY on the same `docker exec -it`, paired, on this machine.

    python3 tests/bench/bench_terminal.py PORT SESSION PASSWORD

Wants a running `sandbox serve` and a running docker session. Prints the echo of a keystroke (median and p99),
the speed of 50 MB of text, and how soon Ctrl-C stops a flood.
"""

import base64
import http.client
import json
import os
import pty
import socket
import statistics
import struct
import subprocess
import sys
import time
import tty
from collections.abc import Iterator

ROUNDS, KEYS = 5, 200
FLOOD = b"yes 0123456789abcdef0123456789abcdef0123456789abcdef | head -c 50000000; echo do''ne\n"


class Bare:
    """The engine's own client on a PTY of ours."""

    def __init__(self, session: str) -> None:
        self.master, slave = pty.openpty()
        tty.setraw(slave)
        argv = ["docker", "exec", "-it", session, "sh"]
        self.process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)

    def read(self) -> bytes:
        return os.read(self.master, 65536)

    def write(self, data: bytes) -> None:
        os.write(self.master, data)


class WebSocket:
    """A client with as little of its own as possible: no masking work, one buffer."""

    def __init__(self, port: int, session: str, cookie: str) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.seq = self.acked = 0
        head = {"Host": "localhost", "Cookie": cookie, "Upgrade": "websocket", "Connection": "Upgrade",
                "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode()}
        lines = [f"GET /api/sessions/{session}/terminal HTTP/1.1", *(f"{k}: {v}" for k, v in head.items())]
        self.sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        self.buffer = bytearray()
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self.sock.recv(65536)
        assert self.buffer.startswith(b"HTTP/1.1 101"), bytes(self.buffer)
        del self.buffer[: self.buffer.index(b"\r\n\r\n") + 4]
        self.frames = self.parse()

    def send(self, opcode: int, data: bytes) -> None:
        self.sock.sendall(bytes([128 | opcode, 128 | len(data)]) + bytes(4) + data)

    def write(self, data: bytes) -> None:
        self.send(2, data)

    def read(self) -> bytes:
        return next(self.frames)

    def need(self, size: int) -> None:
        while len(self.buffer) < size:
            self.buffer += self.sock.recv(262144)

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
                self.seq += size
                if self.seq - self.acked > 200_000:
                    self.acked = self.seq
                    self.send(1, json.dumps({"type": "ack", "seq": self.seq}).encode())
                yield data


Client = Bare | WebSocket


def until(client: Client, mark: bytes) -> int:
    """Read until the mark has come; how many bytes that were."""
    tail, size = b"", 0
    while mark not in tail:
        data = client.read()
        size += len(data)
        tail = tail[-len(mark) :] + data
    return size


def ready(client: Client, line: bytes) -> Client:
    time.sleep(0.5)
    client.write(line + b"; echo rea''dy" + (b"; exec cat\n" if b"raw" in line else b"\n"))
    until(client, b"ready")
    time.sleep(0.3)
    return client


def echo_ms(client: Client) -> list[float]:
    times = []
    for _ in range(KEYS):
        began = time.perf_counter()
        client.write(b"x")
        until(client, b"x")
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.002)
    return times


def flood_mb_per_second(client: Client) -> float:
    began = time.perf_counter()
    client.write(FLOOD)
    return until(client, b"done") / (time.perf_counter() - began) / 1e6


def log_in(port: int, password: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"username": "admin", "password": password})
    connection.request("POST", "/auth/login", body, {"Content-Type": "application/json"})
    return str(connection.getresponse().headers["Set-Cookie"]).partition(";")[0]


def p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


def main(port: int, session: str, password: str) -> None:
    cookie = log_in(port, password)
    web, bare = (ready(c, b"stty raw -echo") for c in (WebSocket(port, session, cookie), Bare(session)))
    pairs = [(echo_ms(web), echo_ms(bare)) for _ in range(ROUNDS)]
    ours = [ms for pair in pairs for ms in pair[0]]
    theirs = [ms for pair in pairs for ms in pair[1]]
    added = statistics.median(ours) - statistics.median(theirs)
    print(f"echo: {statistics.median(ours):.2f} ms, bare {statistics.median(theirs):.2f}, added {added:.2f}; "
          f"p99 {p99(ours):.2f} ms, bare {p99(theirs):.2f}, {p99(ours) / p99(theirs):.2f}x")
    web, bare = (ready(c, b"stty -echo") for c in (WebSocket(port, session, cookie), Bare(session)))
    speeds = [(flood_mb_per_second(web), flood_mb_per_second(bare)) for _ in range(ROUNDS)]
    fast, reference = (statistics.median(speed) for speed in zip(*speeds, strict=True))
    print(f"flood: {fast:.1f} MB/s, bare {reference:.1f}, {fast / reference:.2f}x")
    web.write(b"yes 0123456789abcdef\n")
    for _ in range(200):
        web.read()
    began = time.perf_counter()
    web.write(b"\x03")
    web.write(b"echo stop''ped\n")
    until(web, b"stopped")
    print(f"Ctrl-C: the flood has stopped after {(time.perf_counter() - began) * 1000:.1f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
