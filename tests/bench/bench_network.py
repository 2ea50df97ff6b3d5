"""What a network allowlist and hidden keys cost: each figure with its quartiles and the ceiling
that the project has set itself.

    .venv/bin/python tests/bench/bench_network.py [--runtime podman] [-n 20]

Needs root, the engine, the image that tests/prepare makes, and openssl. The outside is a container
in the network namespace of the session's proxy; "direct" is a client beside it there, "proxied" one
in the session.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE_NAME, IMAGE_VERSION = "localhost/sandbox-test", "1.0-common"
IMAGE = f"{IMAGE_NAME}:{IMAGE_VERSION}"
MEGABYTES, CONNECTIONS = 200, 200

SERVER = """
import http.server, os, ssl, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        count = int(self.path[1:])
        self.send_response(200)
        self.send_header("Content-Length", str(count))
        self.end_headers()
        piece = bytes(1 << 18)
        while count:
            count -= self.connection.send(piece[:count])
    def log_message(self, *args):
        pass
class TlsServer(http.server.ThreadingHTTPServer):
    def finish_request(self, request, address):
        with context.wrap_socket(request, server_side=True) as tls:
            super().finish_request(tls, address)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/certificate/cert.pem", "/certificate/key.pem")
http.server.ThreadingHTTPServer.request_queue_size = 512
plain = http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler)
tls = TlsServer(("127.0.0.1", 8443), Handler)
if os.fork():
    plain.serve_forever()
tls.serve_forever()
"""

# Prints seconds: of one download, or of one new TLS connection with an answer of one byte.
CLIENT = """
import socket, ssl, sys, time
kind, proxied, count = sys.argv[1], sys.argv[2] == "proxied", int(sys.argv[3])
port = 8080 if kind == "download" else 8443
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
def once():
    start = time.perf_counter()
    sock = socket.create_connection(("127.0.0.1", 3128 if proxied else port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url = "/%d" % count
    if proxied and kind == "tls":
        sock.sendall(b"CONNECT 127.0.0.1:8443 HTTP/1.1\\r\\n\\r\\n")
        assert b" 200 " in sock.recv(4096)
    elif proxied:
        url = "http://127.0.0.1:8080" + url
    if kind == "tls":
        sock = context.wrap_socket(sock)
    request = f"GET {url} HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\nConnection: close\\r\\n\\r\\n"
    sock.sendall(request.encode())
    head, _, body = sock.recv(65536).partition(b"\\r\\n\\r\\n")
    assert b" 200 " in head, head
    left, buffer = count - len(body), bytearray(1 << 18)
    while left:
        left -= sock.recv_into(buffer)
    sock.close()
    return time.perf_counter() - start
for line in sys.stdin:
    print(once(), flush=True)
"""

HOLD = """
import socket, sys
socks = [socket.create_connection(("127.0.0.1", 3128)) for _ in range(int(sys.argv[1]))]
for sock in socks:
    sock.sendall(b"CONNECT 127.0.0.1:8443 HTTP/1.1\\r\\n\\r\\n")
assert all(b" 200 " in sock.recv(4096) for sock in socks)
print(len(socks), flush=True)
sys.stdin.read()
"""


class Bench:
    """A session with an allowlist, its outside, and a client beside that; end() removes all."""

    def __init__(self, engine: str, home: str) -> None:
        self.engine, self.home, self.stem = engine, home, f"bench-net-{os.getpid()}"
        self.sandbox = [sys.executable, "-I", f"{home}/sandbox.pyz"]
        self.count = 0
        self.others: list[str] = []
        quiet([sys.executable, str(ROOT / "static/build.py"), f"{home}/sandbox.pyz"])

    def run(self, name: str, *options: str) -> None:
        image = ["--in", IMAGE_NAME, "--iv", IMAGE_VERSION]
        quiet([*self.sandbox, "run", "-n", name, *image, *options, "-x", "true"])

    def open(self) -> None:
        self.run(self.stem, "--allow", "127.0.0.1:8080", "--allow", "127.0.0.1:8443")
        label = '{{index .Config.Labels "sandbox.session"}}'
        session = self.ask("container", "inspect", "--format", label, self.stem)
        self.proxy = f"sandbox-proxy-{session}"
        quiet(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
               "/CN=127.0.0.1",
               "-keyout", f"{self.home}/key.pem", "-out", f"{self.home}/cert.pem"])  # fmt: skip
        self.start("server", "python3", "-c", SERVER)
        self.start("client", "sleep", "infinity")

    def start(self, name: str, *argv: str) -> None:
        self.others.append(f"{self.stem}-{name}")
        self.ask("run", "-d", "--init", "--name", self.others[-1], "--network",
                 f"container:{self.proxy}",
                 "-v", f"{self.home}:/certificate:ro", IMAGE, *argv)  # fmt: skip

    def ask(self, *argv: str) -> str:
        return subprocess.run([self.engine, *argv], check=True, capture_output=True,
                              text=True).stdout.strip()

    def inside(self, name: str, program: str, *args: str) -> subprocess.Popen[str]:
        argv = [self.engine, "exec", "-i", name, "python3", "-c", program, *args]
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def created(self, *options: str) -> float:
        """Seconds until a new session has run a command."""
        self.count += 1
        name = f"{self.stem}-{self.count}"
        start = time.perf_counter()
        self.run(name, *options)
        taken = time.perf_counter() - start
        quiet([*self.sandbox, "rm", name])
        return taken

    def memory_megabytes(self) -> float:
        """The proxy's resident memory while it holds its connections."""
        holder = self.inside(self.stem, HOLD, str(CONNECTIONS))
        assert read(holder) == str(CONNECTIONS)
        pid = self.ask("container", "inspect", "--format", "{{.State.Pid}}", self.proxy)
        status = Path("/proc", pid, "status")
        kilobytes = next(int(line.split()[1]) for line in status.read_text().splitlines()
                         if line.startswith("VmRSS"))
        holder.communicate()
        return kilobytes / 1024

    def end(self) -> None:
        for name in self.others:
            subprocess.run([self.engine, "rm", "-f", name], stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
        subprocess.run([*self.sandbox, "rm", self.stem], stdout=subprocess.DEVNULL)


def quiet(argv: Sequence[str]) -> None:
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, check=True)


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def paired(bench: Bench, kind: str, size: int, count: int) -> list[tuple[float, float]]:
    """Seconds of a client beside the server and of one in the session, in turn."""
    clients = [bench.inside(f"{bench.stem}-client", CLIENT, kind, "direct", str(size)),
               bench.inside(bench.stem, CLIENT, kind, "proxied", str(size))]  # fmt: skip

    def once(client: subprocess.Popen[str]) -> float:
        assert client.stdin
        client.stdin.write("\n")
        client.stdin.flush()
        return float(read(client))

    rows = [(once(clients[0]), once(clients[1])) for _ in range(count + 1)][1:]
    for client in clients:
        client.communicate()
    return rows


def show(title: str, rows: Sequence[tuple[float, float]], figure: Callable[[float, float], float],
         unit: str,
         ceiling: float, least: bool = False) -> bool:
    """Print the medians of both sides and of each pair's figure; whether that keeps its limit."""
    low, middle, high = statistics.quantiles([figure(a, b) for a, b in rows], n=4)
    plain, ours = (1000 * statistics.median(column) for column in zip(*rows, strict=True))
    limit = f"{'at least' if least else 'at most'} {ceiling:g}{unit}"
    print(
        f"{title:38} {plain:8.1f} ms {ours:8.1f} ms  "
        f"{middle:6.2f}{unit} ({low:.2f}-{high:.2f})  {limit}")
    return middle >= ceiling if least else middle <= ceiling


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure what a network allowlist costs.")
    parser.add_argument("--runtime", choices=("docker", "podman"), default="docker")
    parser.add_argument("-n", type=int, default=20, dest="count", help="pairs per row (default 20)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(SANDBOX_HOME=home, SANDBOX_RUNTIME=args.runtime)
        os.chdir(home)
        bench = Bench(args.runtime, home)
        print(f"{args.runtime:38} {'without':>11} {'with':>11}  figure (quartiles)")
        starts = [(bench.created(), bench.created("--allow", "127.0.0.1"))
                  for _ in range(args.count + 1)][1:]
        fine = [show("a new session / with an allowlist", starts, lambda a, b: b / a, "x", 2)]
        starts = [(bench.created("--allow", "127.0.0.1"),
                   bench.created("--keys", "hidden", "-e", "ANTHROPIC_API_KEY=bench"))
                  for _ in range(args.count)]
        fine.append(show("with an allowlist / with hidden keys", starts, lambda a, b: b / a, "x",
                         1.3))
        try:
            bench.open()
            rows = paired(bench, "download", MEGABYTES * 1_000_000, args.count)
            fine.append(show(f"{MEGABYTES} MB / through the proxy", rows, lambda a, b: a / b, "x",
                             0.5, least=True))
            rows = paired(bench, "tls", 1, 10 * args.count)
            fine.append(show("a TLS connection / through the proxy", rows, lambda a,
                             b: 1000 * (b - a), " ms", 3))
            memory = bench.memory_megabytes()
            print(f"{f'VmRSS with {CONNECTIONS} connections':38} {memory:28.1f} MB  at most 30 MB")
            fine.append(memory <= 30)
        finally:
            bench.end()
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main())
