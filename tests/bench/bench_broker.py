"""What a request through the broker costs beside one that goes to its provider itself.

    .venv/bin/python tests/bench/bench_broker.py [-n 300]

What hidden keys cost a new session is in bench_network.py. Needs openssl. The provider is a server
with TLS on loopback, in a process of its own; a direct client keeps its connection, as agents do,
and verifies the certificate. Pairs run A B A B …; a row is the median of the pairs' differences or
quotients, with the ceiling that the project has set.
"""

import argparse
import contextlib
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness import Table, free_port, quartiles

FOLDER = Path(__file__).resolve().parents[2] / "static" / "image"
HOST, KEY, MEGABYTES, CHUNKS, STREAMS = "127.0.0.9", "sk-bench", 50, 200, 100

# Answers on connections that it keeps: /first at once, /bytes N, /chunks that say when each was
# sent, /hold after whose first chunk nothing comes.
SERVER = r"""
import re, socket, ssl, sys, threading, time
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1])
server = socket.create_server(("127.0.0.9", 0), backlog=600)
print(server.getsockname()[1], flush=True)
def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)
def serve(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock = context.wrap_socket(sock, server_side=True)
    while True:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = sock.recv(65536)
            if not piece:
                return
            data += piece
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        kind = data.split(b" ")[1].rpartition(b"?")[2]
        if kind == b"first":
            sock.sendall(chunk(b"x"))
        elif kind == b"hold":
            sock.sendall(chunk(b"x"))
            sock.recv(1)
        elif kind == b"chunks":
            for _ in range(200):
                time.sleep(0.005)
                sock.sendall(chunk(b"%.9f\n" % time.monotonic()))
        else:
            piece = chunk(bytes(16000))
            for _ in range(int(kind) // 16000):
                sock.sendall(piece)
        sock.sendall(b"0\r\n\r\n")
        if b"Connection: close" in data:
            sock.close()
            return
def guarded(sock):
    try:
        serve(sock)
    except OSError:
        pass
while True:
    threading.Thread(target=guarded, args=(server.accept()[0],), daemon=True).start()
"""


class Bench:
    """A provider, and the broker before it."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        words = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                 "-nodes", "-days", "2", "-subj", "/CN=bench", "-addext",
                 f"subjectAltName=IP:{HOST}", "-keyout", "key.pem", "-out", "cert.pem")
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
        self.pem = (folder / "cert.pem").read_text()
        (folder / "both.pem").write_text((folder / "key.pem").read_text() + self.pem)
        self.env: dict[str, str] | None = None
        server = self.start([sys.executable, "-c", SERVER, str(folder / "both.pem")])
        assert server.stdout
        self.server_port, self.port = int(server.stdout.readline()), free_port()
        self.env = {"PATH": os.environ["PATH"], "SANDBOX_NET": str(folder),
                    "SANDBOX_NET_PORT": str(self.port), "SANDBOX_NET_SOCKET": "broker.sock",
                    "SANDBOX_KEPT": str(folder / "kept"), "SANDBOX_RULES": '{"allow": []}',
                    "SANDBOX_BROKER": str(folder / "control"),
                    "SANDBOX_COUNTS": str(folder / "counts.json")}
        self.broker = self.start([*self.program("broker.py"), "serve"], subprocess.DEVNULL)
        while not (folder / "broker.sock").exists() or not (folder / "control").exists():
            time.sleep(0.01)
        gate = [*self.program("proxy.py"), "gate"]
        subprocess.run(gate, env=self.env, check=True)
        row = {"url": f"https://{HOST}:{self.server_port}", "keys": {"placeholder": KEY},
               "status": 400, "counted": ["POST /v1"], "free": []}
        said = json.dumps({"do": "set", "providers": {"bench": row}, "ca": self.pem}) + "\n"
        ask = [*self.program("../session/ask.py"), str(folder / "control")]
        answer = subprocess.run(ask, input=said, capture_output=True, text=True, check=True)
        assert json.loads(answer.stdout) == {"ok": True}, answer.stdout

    def program(self, name: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(FOLDER / name)]

    def start(self, argv: Sequence[str],
              stdout: int = subprocess.PIPE) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(argv, env=self.env, stdout=stdout)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def rss_megabytes(self) -> float:
        status = Path(f"/proc/{self.broker.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def direct(self) -> socket.socket:
        context = ssl.create_default_context(cadata=self.pem)
        sock = socket.create_connection((HOST, self.server_port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context.wrap_socket(sock, server_hostname=HOST)

    def through(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def request(kind: str, path: str) -> bytes:
    body = b'{"messages": [{"role": "user", "content": "' + b"a" * 40_000 + b'"}]}'
    if kind not in ("first", "chunks"):
        body = b"{}"
    head = (f"POST {path}?{kind} HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: placeholder\r\n"
            f"Content-Length: {len(body)}\r\n\r\n")
    return head.encode() + body


def pieces(sock: socket.socket) -> Iterator[bytes]:
    """What comes, until the last chunk has."""
    buffer, tail = bytearray(1 << 16), b""
    while count := sock.recv_into(buffer):
        yield bytes(buffer[:count])
        tail = (tail + bytes(buffer[:count]))[-5:]
        if tail == b"0\r\n\r\n":
            return


def first_byte(sock: socket.socket, path: str) -> float:
    """Milliseconds to the first byte of the answer."""
    data, start = request("first", path), time.perf_counter()
    sock.sendall(data)
    taken = 0.0
    for _ in pieces(sock):
        taken = taken or time.perf_counter() - start
    return taken * 1000


def chunk_delay(sock: socket.socket, path: str) -> float:
    """Milliseconds from the server to here, the median of many chunks."""
    sock.sendall(request("chunks", path))
    delays, left = [], b""
    for piece in pieces(sock):
        now = time.monotonic()
        *lines, left = (left + piece).split(b"\n")
        delays += [now - float(line) for line in lines if b"." in line and line[:1].isdigit()]
    return statistics.median(delays) * 1000


def download(sock: socket.socket, path: str) -> float:
    """Megabytes a second."""
    start = time.perf_counter()
    sock.sendall(request(str(MEGABYTES * 1_000_000), path))
    size = sum(len(piece) for piece in pieces(sock))
    assert size >= MEGABYTES * 1_000_000
    return size / 1e6 / (time.perf_counter() - start)


def pairs(bench: Bench, count: int,
          measure: Callable[[socket.socket, str], float]) -> list[tuple[float, float]]:
    """Direct on one connection, and through the broker on one each time, in turn."""
    rows = []
    with bench.direct() as direct:
        for _ in range(count + 1):
            plain = measure(direct, "/v1")
            start = time.perf_counter()
            with bench.through() as sock:
                connecting = (time.perf_counter() - start) * 1000
                ours = measure(sock, "/bench/v1")
            rows.append((plain, ours + (connecting if measure is first_byte else 0)))
            time.sleep(0.05)  # between requests an agent's tools run
    return rows[1:]


def difference(table: Table, title: str, most: float, rows: list[tuple[float, float]]) -> None:
    more = [ours - plain for plain, ours in rows]
    note = f"{quartiles(more)} of {statistics.median(plain for plain, _ in rows):.2f} ms"
    table.row(title, statistics.median(more), "ms", note, most=most)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure what the broker costs.")
    parser.add_argument("-n", type=int, default=300, dest="count", help="pairs (default 300)")
    args = parser.parse_args(argv)
    table = Table()
    with (tempfile.TemporaryDirectory(prefix="sandbox-bench-") as folder,
          contextlib.ExitStack() as stack):
        bench = Bench(Path(folder), stack)
        table.row("the broker at rest", bench.rss_megabytes(), "MB")
        difference(table, "first byte, later than direct", 3, pairs(bench, args.count, first_byte))
        difference(table, "a chunk, later than direct", 1,
                   pairs(bench, max(args.count // 30, 3), chunk_delay))
        rows = pairs(bench, max(args.count // 30, 3), download)
        quotients = [ours / plain for plain, ours in rows]
        plain = statistics.median(plain for plain, _ in rows)
        table.row(f"{MEGABYTES} MB of stream / direct", statistics.median(quotients), "x",
                  f"{quartiles(quotients)} of {plain:.0f} MB/s", least=0.5)
        held = [stack.enter_context(bench.through()) for _ in range(STREAMS)]
        for sock in held:
            sock.sendall(request("hold", "/bench/v1"))
        for sock in held:
            while b"\r\nx\r\n" not in sock.recv(4096):
                pass
        table.row(f"the broker with {STREAMS} streams", bench.rss_megabytes(), "MB", most=40)
    return 0 if table.fine else 1


if __name__ == "__main__":
    sys.exit(main())
