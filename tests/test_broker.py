"""The broker, run as it is: keys, strict requests, streams, use and budgets, turns, and what
agents, upstreams and clocks may do to it.

Everything is on loopback. The upstream speaks TLS with a certificate of an authority made here.
"""

import contextlib
import fcntl
import json
import re
import shlex
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from conftest import ROOT, Engine, Result, on_docker, unique_name
from service import free_port, wait_for
from test_agents import each_agent, image
from test_proxy import (
    OUTSIDE,
    SECONDS,
    Handler,
    Outside,
    Proxy,
    read_all,
    read_exactly,
    read_until,
)

__all__ = ["image"]  # a fixture

FOLDER = ROOT / "static" / "image"
TABLE = json.loads((ROOT / "static" / "providers.json").read_text())
ASK = ROOT / "static" / "session" / "ask.py"
KEY, PLACEHOLDER = "sk-ant-the-real-key-0123456789", "sk-ant-hidden"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


# --- The program ---


class Asker:
    """A connection to the broker through ask.py, as the host has it."""

    def __init__(self, broker: "Broker") -> None:
        self.process = subprocess.Popen(broker.ask_argv(), env=broker.env(), text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(self, **data: Any) -> Any:
        self.write(**data)
        return self.read()

    def write(self, **data: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(data) + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def read_until(self, field: str) -> Any:
        """The next line that has a field."""
        while field not in (data := self.read()):
            pass
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


class Broker(Proxy):
    """A broker and its gate, with a directory and a port of their own."""

    def __init__(self, directory: Path, ca: str = "") -> None:
        super().__init__(directory)
        self.ca = ca

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(FOLDER / "broker.py"), *words]

    def ask_argv(self) -> list[str]:
        return [sys.executable, "-I", "-S", str(ASK), str(self.directory / "control")]

    def env(self, rules: object = None) -> dict[str, str]:
        return {**super().env({"allow": []}), "SANDBOX_BROKER": str(self.directory / "control"),
                "SANDBOX_COUNTS": str(self.directory / "counts.json"),
                "SANDBOX_NET_SOCKET": "broker.sock", "PYTHONDONTWRITEBYTECODE": "1"}

    def begin(self) -> None:
        with open(self.log, "ab") as log, open(self.errors, "ab") as errors:
            self.processes.append(subprocess.Popen(self.argv("serve"), env=self.env(), stdout=log,
                                                   stderr=errors))
        wait_for((self.directory / "control").exists)
        wait_for((self.directory / "broker.sock").exists)

    def restart(self) -> None:
        self.processes[-1].kill()
        self.processes[-1].wait()
        for name in ("control", "broker.sock"):
            (self.directory / name).unlink()
        self.begin()
        wait_for(self.answers)

    def answers(self, path: str = "/", status: bytes = b"") -> bool:
        with contextlib.suppress(OSError):
            return self.post(path).startswith(b"HTTP/1.1 " + status)
        return False

    def ask(self, **data: Any) -> Any:
        done = subprocess.run(self.ask_argv(), env=self.env(), input=json.dumps(data) + "\n",
                              capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def give(self, url: str, name: str = "anthropic", **more: Any) -> None:
        row = {**TABLE["providers"][name], "url": url, "keys": {PLACEHOLDER: KEY}}
        answer = self.ask(do="set", providers={name: row}, ca=self.ca,
                          prices=TABLE["prices"]["models"], **more)
        assert answer == {"ok": True}, answer

    def post(self, path: str, body: bytes = b"{}", *headers: str, key: str = PLACEHOLDER) -> bytes:
        return self.send(self.request("POST", path, body, *headers, key=key))

    def request(self, method: str, path: str, body: bytes = b"", *headers: str,
                key: str = PLACEHOLDER) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}",
                 *([f"x-api-key: {key}"] if key else []), *headers]
        if not any(line.lower().startswith("transfer-encoding") for line in headers):
            lines.append(f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    def usage(self) -> Any:
        return self.ask(do="usage")

    def uses(self) -> list[dict[str, Any]]:
        return [line["use"] for line in self.lines() if "use" in line]


# --- Upstreams ---


class Ca:
    """An authority, and certificates of it, good and bad."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run("req", "-x509", *self.key("ca"), "-subj", "/CN=ca", "-days", "2",
                 "-out", "ca.crt")
        self.pem = (directory / "ca.crt").read_text()
        (directory / "index").write_text("")
        (directory / "config").write_text(
            "[ca]\ndefault_ca=own\n[own]\ndatabase=index\nnew_certs_dir=.\nrand_serial=yes\n"
            "default_md=sha256\npolicy=any\ncopy_extensions=copy\nunique_subject=no\n"
            "[any]\ncommonName=supplied\n")

    def key(self, name: str) -> list[str]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-keyout", f"{name}.key"]

    def run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.directory, check=True, capture_output=True)

    def context(self, name: str, end: str = "20991231000000Z") -> ssl.SSLContext:
        """For a server that calls itself so."""
        self.run("req", "-new", *self.key("own"), "-subj", "/CN=own",
                 "-addext", f"subjectAltName={name}", "-out", "own.csr")
        self.run("ca", "-batch", "-config", "config", "-cert", "ca.crt", "-keyfile", "ca.key",
                 "-in", "own.csr", "-out", "own.crt", "-notext", "-startdate", "20200101000000Z",
                 "-enddate", end)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / "own.crt", self.directory / "own.key")
        return context


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Ca:
    return Ca(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def good(ca: Ca) -> ssl.SSLContext:
    return ca.context(f"IP:{OUTSIDE}")


class Upstream(Outside):
    """A vendor. It notes each whole request, and `answers` is what it says, by default in JSON."""

    def __init__(self, tls: ssl.SSLContext | None, answer: bytes | Handler = b"") -> None:
        self.tls, self.answer = tls, answer
        self.requests: list[bytes] = []
        self.ends: list[str] = []
        super().__init__(self.serve)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.place}"

    def serve(self, sock: socket.socket) -> None:
        if self.tls:
            sock = self.tls.wrap_socket(sock, server_side=True)
        with sock:
            head = read_until(sock, b"\r\n\r\n")
            head, _, body = head.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            if length:
                body += read_exactly(sock, int(length[1]) - len(body))
            while b"chunked" in head.lower() and not body.endswith(b"0\r\n\r\n"):
                body += sock.recv(65536)
            self.requests.append(head + b"\r\n\r\n" + body)
            if isinstance(self.answer, bytes):
                sock.sendall(self.answer or anthropic())
            else:
                self.answer(sock)

    def head(self, index: int = -1) -> list[str]:
        wait_for(lambda: self.requests)
        return self.requests[index].partition(b"\r\n\r\n")[0].decode().split("\r\n")


def anthropic(into: int = 100, out: int = 10, read: int = 0) -> bytes:
    body = json.dumps({"model": "claude-opus-4-8", "content": [], "usage": {
        "input_tokens": into, "output_tokens": out, "cache_read_input_tokens": read,
        "cache_creation_input_tokens": 0}}).encode()
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture
def broker(tmp_path: Path, ca: Ca) -> Iterator[Broker]:
    broker = Broker(tmp_path, ca.pem)
    broker.begin()
    broker.gate()
    yield broker
    broker.end()


@pytest.fixture
def vendor(good: ssl.SSLContext) -> Iterator[Upstream]:
    with Upstream(good) as upstream:
        yield upstream


@pytest.fixture
def given(broker: Broker, vendor: Upstream) -> Broker:
    broker.give(vendor.url)
    return broker


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def text(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"])


# --- Keys ---


@pytest.mark.parametrize("sent, received", [
    ("x-api-key: PLACEHOLDER", "x-api-key: KEY"),
    ("Authorization: Bearer PLACEHOLDER", "Authorization: Bearer KEY"),
    ("X-Goog-Api-Key: PLACEHOLDER", "X-Goog-Api-Key: KEY"),
])
def test_the_key_stands_where_the_placeholder_stood(given: Broker, vendor: Upstream, sent: str,
                                                    received: str) -> None:
    body = b'{"model": "claude", "messages": []}'
    sent = sent.replace("PLACEHOLDER", PLACEHOLDER)
    answer = given.post("/anthropic/v1/messages?beta=true", body, "anthropic-beta: a,b", sent,
                        "Accept-Encoding: br", "x-app: cli", key="")
    assert status(answer) == 200 and answer.endswith(anthropic()[-20:])
    assert vendor.head() == [
        "POST /v1/messages?beta=true HTTP/1.1", f"Host: {vendor.place}", "anthropic-beta: a,b",
        received.replace("KEY", KEY), "Accept-Encoding: identity", "x-app: cli",
        f"Content-Length: {len(body)}", "Connection: close"]
    assert vendor.requests[-1].endswith(b"\r\n\r\n" + body)


def test_a_key_in_the_query_goes_as_a_header(given: Broker, vendor: Upstream) -> None:
    query = f"a=1%2B&key={PLACEHOLDER}&key=o&%6bey=o&Key=o&access_token=o&k%65y"
    assert status(given.post(f"/anthropic/v1/messages?{query}", b"{}", key="")) == 200
    head = vendor.head()
    assert head[0] == "POST /v1/messages?a=1%2B HTTP/1.1" and f"x-goog-api-key: {KEY}" in head


@pytest.mark.parametrize("headers", [
    [], ["x-api-key: sk-ant-own"], ["Authorization: Bearer own"], ["Authorization: own"],
    [f"x-api-key: {PLACEHOLDER}x"], [f"x-other: {PLACEHOLDER}"], ["x-api-key: "],
])
def test_without_a_placeholder_nothing_is_sent(given: Broker, vendor: Upstream,
                                               headers: list[str]) -> None:
    answer = given.post("/anthropic/v1/messages", b"{}", *headers, key="")
    assert status(answer) == 401 and "placeholder" in text(answer)
    assert vendor.requests == [] and given.lines()[-1]["kind"] == "key"


def test_what_else_stands_where_keys_stand_is_dropped(given: Broker, vendor: Upstream) -> None:
    given.post("/anthropic/v1/messages", b"{}", "Authorization: Bearer own", "X-Goog-Api-Key: own",
               "Proxy-Authorization: own", "Cookie: own")
    assert "own" not in "".join(vendor.head())


def test_what_needs_no_key_goes_without_one(given: Broker, vendor: Upstream) -> None:
    assert status(given.send(given.request("GET", "/anthropic/v1/models", key="own"))) == 200
    assert vendor.head() == ["GET /v1/models HTTP/1.1", f"Host: {vendor.place}",
                             "Content-Length: 0", "Connection: close"]


def test_a_base_url_with_a_path_and_two_providers(broker: Broker, good: ssl.SSLContext) -> None:
    with Upstream(good) as one, Upstream(None) as other:
        rows = {"anthropic": {**TABLE["providers"]["anthropic"], "url": f"{one.url}/gate/way/",
                              "keys": {"a": "key-a"}},
                "openai": {**TABLE["providers"]["openai"], "url": f"{other.url}/v1",
                           "keys": {"b": "key-b"}}}
        assert broker.ask(do="set", providers=rows, ca=broker.ca) == {"ok": True}
        assert status(broker.post("/anthropic/v1/messages", key="a")) == 200
        assert status(broker.post("/openai/responses", key="b")) == 200
        assert one.head()[0] == "POST /gate/way/v1/messages HTTP/1.1"
        assert other.head()[0] == "POST /v1/responses HTTP/1.1"
        assert "x-api-key: key-a" in one.head() and "x-api-key: key-b" in other.head()
        assert status(broker.post("/openai/responses", key="a")) == 401  # of another provider


def test_a_session_that_was_renamed_is_named_so(given: Broker) -> None:
    assert given.ask(do="set", session="other") == {"ok": True}
    assert "sandbox run -n other" in text(given.post("/nobody/"))


def test_what_is_given_later_takes_no_provider_away(given: Broker, vendor: Upstream) -> None:
    """One agent may be running while another is started with a key of its own."""
    given.give(f"https://127.0.0.1:{vendor.port}", "openai")
    assert status(given.post("/anthropic/v1/messages")) == 200
    assert given.usage()["providers"] == ["anthropic", "openai"]


def test_a_restarted_broker_has_no_key_and_says_what_to_do(given: Broker, vendor: Upstream) -> None:
    given.restart()
    answer = given.post("/anthropic/v1/messages")
    assert status(answer) == 401 and "sandbox run -n demo" in text(answer)
    given.give(vendor.url)
    assert status(given.post("/anthropic/v1/messages")) == 200


def test_the_key_is_in_the_memory_of_the_broker_and_nowhere_else(given: Broker) -> None:
    given.post("/anthropic/v1/messages")
    given.post("/anthropic/v1/other")
    pid = given.processes[-1].pid
    for name in ("cmdline", "environ"):
        assert KEY.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    kept = [path.read_bytes() for path in given.directory.iterdir() if path.is_file()]
    assert len(kept) >= 4 and not [data for data in kept if KEY.encode() in data]
    assert KEY not in json.dumps(given.usage())
    assert (given.directory / "control").stat().st_mode & 0o777 == 0o600
    assert "Max core file size        0 " in Path(f"/proc/{pid}/limits").read_text()


@pytest.mark.parametrize("row, said", [
    ({"keys": {"p": ""}}, "empty"), ({"keys": {"p": "a\nb"}}, "printable"),
    ({"keys": {"p": "a b"}}, "printable"), ({"keys": {"p": "ä"}}, "printable"),
    ({"url": "ftp://a.org"}, "http(s)"), ({"url": "a.org"}, "http(s)"),
    ({"url": "https://user@a.org"}, "http(s)"), ({"url": "https://a.org/?b"}, "http(s)"),
    ({"url": "https://a.org:x"}, "port"), ({"url": "https://127.1"}, "address"),
    ({"status": None}, "int"), ({"counted": ["("]}, "pattern"),
])
def test_a_wrong_setting_changes_nothing(given: Broker, row: dict[str, Any], said: str) -> None:
    wrong = {**TABLE["providers"]["anthropic"], "url": "https://a.org", "keys": {"p": "k"}, **row}
    answer = given.ask(do="set", providers={"anthropic": wrong}, budget={"usd": 0})
    assert said in answer["error"] and "a\nb" not in answer["error"], answer
    assert status(given.post("/anthropic/v1/messages")) == 200


@pytest.mark.parametrize("data", [
    {"do": "set", "budget": {"per": "week"}}, {"do": "set", "budget": {"usd": "x"}},
    {"do": "set", "turns": "x"}, {"do": "other"}, {}, {"do": "turn", "id": "x", "error": ""},
    {"do": "set", "providers": []}, {"do": "set", "prices": {"a": 1}},
    {"do": "set", "days": {"2001-01-01": {}}},
    {"do": "set", "turns": "x", "days": {"2001-01-01": {"seconds": 1, "models": {}}}},
])
def test_a_wrong_question_has_an_answer(given: Broker, data: dict[str, Any]) -> None:
    assert "error" in given.ask(**data)
    usage = given.usage()
    assert usage["providers"] == ["anthropic"] and "2001-01-01" not in usage["days"]


# --- Strict requests ---


@pytest.mark.parametrize("method, path", [
    ("GET", "/anthropic/v1/messages"), ("PUT", "/anthropic/v1/messages"),
    ("TRACE", "/anthropic/v1/messages"), ("CONNECT", "/anthropic/v1/messages"),
    ("post", "/anthropic/v1/messages"), ("POST", "/anthropic/v1/messages/"),
    ("POST", "/anthropic/v1//messages"), ("POST", "/anthropic/v1/messages/../files"),
    ("POST", "/anthropic/v1/%6dessages"), ("POST", "/anthropic/v1/messages%2f..%2ffiles"),
    ("POST", "/anthropic/v1/files"), ("GET", "/anthropic/v1/organizations/keys"),
    ("POST", "/anthropic/v1/messages;a"), ("GET", "/anthropic/v1/models/.."),
    ("GET", "/anthropic/v1/models/../../files"), ("POST", "/anthropic"), ("POST", "/"),
    ("POST", "/v1/messages"), ("POST", "/openai/v1/messages"), ("POST", "//anthropic/v1/messages"),
    ("POST", "/Anthropic/v1/messages"), ("POST", "/anthropic/../anthropic/v1/messages"),
    ("POST", "/anthropic@127.0.0.1/v1/messages"), ("OPTIONS", "*"),
    ("POST", "http://127.0.0.1/anthropic/v1/messages"), ("POST", "/anthropic/v1/messages#a"),
    ("POST", "http://example.org/anthropic/v1/messages"), ("CONNECT", "example.org:443"),
    ("POST", "/anthropic/v1/messages\\..\\files"),
])
def test_no_other_path_method_or_host(given: Broker, vendor: Upstream, method: str,
                                      path: str) -> None:
    assert status(given.send(given.request(method, path, b"{}"))) in (400, 404)
    assert vendor.requests == []


@pytest.mark.parametrize("host", ["api.anthropic.com", "127.0.0.2", "localhost.example.org",
                                  "127.0.0.1:1, a", "127.0.0.1\r\nHost: 127.0.0.1", ""])
def test_no_other_host(given: Broker, vendor: Upstream, host: str) -> None:
    """A page in a browser whose name leads here is a stranger."""
    request = given.request("POST", "/anthropic/v1/messages", b"{}")
    request = request.replace(f"127.0.0.1:{given.port}".encode(), host.encode(), 1)
    assert status(given.send(request)) in (400, 421) and vendor.requests == []


@pytest.mark.parametrize("headers", [
    ["Content-Length: 2"], ["Transfer-Encoding: chunked", "Content-Length: 2"],
    ["Transfer-Encoding: gzip, chunked"], ["Transfer-Encoding: chunked",
                                           "Transfer-Encoding: chunked"],
    ["Content-Length: +2"], ["Transfer-Encoding : chunked"], [" folded: a"], ["a b: c"],
    ["x: a\rb"], ["x: a\nInjected: b"], ["x: a\0b"], [": empty"],
    ["Connection: content-length"], ["Connection: host"],
])
def test_a_request_that_can_be_read_in_two_ways_is_refused(given: Broker, vendor: Upstream,
                                                           headers: list[str]) -> None:
    assert status(given.post("/anthropic/v1/messages", b"{}", *headers)) == 400
    assert vendor.requests == []


@pytest.mark.parametrize("body", [b"x\r\n", b"2\r\n{}", b"2\r\n{}x\r\n0\r\n\r\n", b"-2\r\n{}\r\n",
                                  b"2\n{}\n0\n\n", b"0\r\nContent-Length\r\n\r\n"])
def test_wrong_chunks_never_become_a_whole_request(given: Broker, vendor: Upstream,
                                                   body: bytes) -> None:
    request = given.request("POST", "/anthropic/v1/messages", body, "Transfer-Encoding: chunked")
    answer = given.send(request, end=True)
    assert not answer or status(answer) in (400, 502)
    assert vendor.requests == []


def test_chunks_go_as_they_come(given: Broker, vendor: Upstream) -> None:
    body = b"2\r\n{}\r\n1;a=b\r\n \r\n0\r\n\r\n"
    given.post("/anthropic/v1/messages", body, "Transfer-Encoding: chunked")
    assert vendor.requests[-1].endswith(b"Connection: close\r\n\r\n" + body)


def test_what_is_pipelined_behind_a_request_goes_nowhere(given: Broker, vendor: Upstream) -> None:
    one = given.request("POST", "/anthropic/v1/messages", b"{}")
    other = given.request("GET", "/anthropic/v1/models")
    answer = given.send(one + other)
    assert answer.count(b"HTTP/1.1 ") == 1 and len(vendor.requests) == 1
    assert vendor.requests[0].endswith(b"\r\n\r\n{}")


def test_a_websocket_is_refused_at_once(given: Broker, vendor: Upstream) -> None:
    """Codex tries it first."""
    request = given.request("GET", "/anthropic/responses", b"", "Connection: Upgrade",
                            "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    assert status(given.send(request)) == 426
    assert vendor.connections == 0 and given.lines() == []


@pytest.mark.parametrize("head", [b"x-big: " + b"a" * 70_000, b"a: b\r\n" * 300 + b"c: d",
                                  b"", b"\0" * 1000])
def test_giant_and_broken_heads(given: Broker, vendor: Upstream, head: bytes) -> None:
    request = b"POST /anthropic/v1/messages HTTP/1.1\r\n" + head + b"\r\n\r\n"
    with contextlib.suppress(ConnectionError):
        assert status(given.send(request)) in (400, 421)
    assert vendor.requests == []
    assert status(given.post("/anthropic/v1/messages")) == 200


def test_a_body_that_comes_in_drops_goes_on_before_its_end(given: Broker,
                                                           good: ssl.SSLContext) -> None:
    """It is not held: but for its last piece it is upstream while it still comes."""
    came = threading.Event()

    def handler(sock: socket.socket) -> None:
        with good.wrap_socket(sock, server_side=True) as tls:
            read_until(tls, b"a" * 1000)
            came.set()
            read_until(tls, b"\r\n0\r\n\r\n")
            tls.sendall(anthropic())

    with Outside(handler) as outside, given.connect() as sock:
        given.give(f"https://{outside.place}")
        sock.sendall(given.request("POST", "/anthropic/v1/messages", b"",
                                   "Transfer-Encoding: chunked"))
        while not came.is_set():
            sock.sendall(b"4000\r\n" + b"a" * 0x4000 + b"\r\n")
        sock.sendall(b"0\r\n\r\n")
        assert status(read_all(sock)) == 200


def test_thousands_of_connections_leave_room_for_the_next(given: Broker, vendor: Upstream) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(3000):
            with contextlib.suppress(OSError):
                sock = stack.enter_context(given.connect())
                sock.sendall((b"", b"POST /anthropic/v1/messages HTTP/1.1\r\n")[number % 2])
        assert given.rss_kib() <= 60 * 1024
    wait_for(partial(given.answers, "/anthropic/v1/messages", b"200 "))  # they go in a moment


# --- Streams ---

SSE = OK.replace(b"application/json", b"text/event-stream") + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_each_event_comes_before_the_next_is_made(given: Broker, good: ssl.SSLContext) -> None:
    went = threading.Semaphore(0)

    def stream(sock: socket.socket) -> None:
        sock.sendall(SSE)
        for number in range(20):
            assert went.acquire(timeout=SECONDS)
            sock.sendall(chunk(b"data: %d\n\n" % number))
        assert went.acquire(timeout=SECONDS)
        sock.sendall(b"0\r\n\r\n")

    with Upstream(good, stream) as upstream, given.connect() as sock:
        given.give(upstream.url)
        sock.sendall(given.request("POST", "/anthropic/v1/messages", b"{}"))
        read_until(sock, b"\r\n\r\n")
        for number in range(20):
            went.release()
            assert read_until(sock, b"\n\n\r\n").endswith(b"data: %d\n\n\r\n" % number)
        went.release()
        assert read_all(sock) == b"0\r\n\r\n"


def test_an_agent_that_goes_ends_the_stream(given: Broker, good: ssl.SSLContext) -> None:
    ended = threading.Event()

    def stream(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(SSE)
            read_all(sock)
        ended.set()

    with Upstream(good, stream) as upstream:
        given.give(upstream.url)
        with given.connect() as sock:
            sock.sendall(given.request("POST", "/anthropic/v1/messages", b"{}"))
            read_until(sock, b"\r\n\r\n")
        assert ended.wait(SECONDS)
        wait_for(lambda: given.uses() and given.uses()[-1]["estimated"])


def test_a_reset_in_a_stream_is_no_end_of_it(given: Broker, good: ssl.SSLContext) -> None:
    """Also where the answer has no length, and its end would look like any other."""
    came = threading.Event()

    def stream(sock: socket.socket) -> None:
        sock.sendall(OK + b"\r\nhalf of it")
        assert came.wait(SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with Upstream(good, stream) as upstream, given.connect() as sock:
        given.give(upstream.url)
        sock.sendall(given.request("POST", "/anthropic/v1/messages", b"{}"))
        assert read_until(sock, b"half of it")
        came.set()
        with pytest.raises(ConnectionResetError):
            read_all(sock)


@pytest.mark.parametrize("code", [429, 529, 500, 400])
def test_a_vendors_refusal_is_passed_on_with_its_headers(given: Broker, good: ssl.SSLContext,
                                                         code: int) -> None:
    body = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
    head = (f"HTTP/1.1 {code} Whatever it is\r\nretry-after: 7\r\nx-should-retry: true\r\n"
            f"anthropic-ratelimit-requests-remaining: 0\r\nContent-Length: {len(body)}\r\n")
    with Upstream(good, head.encode() + b"Keep-Alive: timeout=5\r\n\r\n" + body) as upstream:
        given.give(upstream.url)
        answer = given.post("/anthropic/v1/messages")
    assert answer == head.encode() + b"Connection: close\r\n\r\n" + body
    wait_for(given.lines)
    assert given.lines()[-1]["verdict"] == "allow" and given.usage()["spent"]["tokens"] == 0


@pytest.mark.parametrize("place", ["https://stranger.example/", "/v1/other", "http://127.0.0.1:1/"])
def test_no_redirect_is_followed_or_passed_on(given: Broker, good: ssl.SSLContext,
                                              place: str) -> None:
    with Upstream(good, f"HTTP/1.1 307 A\r\nLocation: {place}\r\n\r\n".encode()) as upstream:
        given.give(upstream.url)
        answer = given.post("/anthropic/v1/messages")
        assert status(answer) == 402 and b"Location" not in answer
        assert "leads to another place" in text(answer) and len(upstream.requests) == 1


@pytest.mark.parametrize("length, body", [(1000, b"short"), (3, b"longer than it says")])
def test_an_upstream_that_lies_about_lengths(given: Broker, good: ssl.SSLContext, length: int,
                                             body: bytes) -> None:
    """The agent sees the lie as it is, and its next request is not touched by it."""
    head = OK + b"Content-Length: %d\r\n" % length
    with Upstream(good, head + b"\r\n" + body) as upstream:
        given.give(upstream.url)
        for _ in range(3):
            answer = given.post("/anthropic/v1/messages")
            assert answer == head + b"Connection: close\r\n\r\n" + body


@pytest.mark.parametrize("answer", [
    b"", b"nothing of HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", b"HTTP/2 200\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 70_000 + b"\r\n\r\n", b"HTTP/1.1 200 O",
    b"HTTP/1.1 200 OK\r\na: b\rc\r\n\r\n",
])
def test_a_broken_answer_is_said_to_be_one(given: Broker, good: ssl.SSLContext,
                                           answer: bytes) -> None:
    with Upstream(good, lambda sock: sock.sendall(answer)) as upstream:
        given.give(upstream.url)
        got = given.post("/anthropic/v1/messages")
    assert status(got) == 502 and "head" in text(got)


def test_what_comes_before_the_answer_is_skipped(given: Broker, good: ssl.SSLContext) -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
    with Upstream(good, early + anthropic()) as upstream:
        given.give(upstream.url)
        answer = given.post("/anthropic/v1/messages", b"{}", "Expect: 100-continue")
    assert status(answer) == 200 and b"Link" not in answer
    assert "Expect" not in "".join(upstream.head())


def test_an_upstream_that_refuses_and_one_that_is_not_there(given: Broker) -> None:
    given.give(f"https://{OUTSIDE}:{free_port()}")
    assert status(given.post("/anthropic/v1/messages")) == 502
    given.give("https://nobody.invalid")
    answer = given.post("/anthropic/v1/messages")
    assert status(answer) == 502 and b"no address" in answer


@pytest.mark.parametrize("name, end, said", [
    ("IP:127.0.0.8", "20991231000000Z", "mismatch"),
    ("DNS:localhost", "20991231000000Z", "mismatch"),
    (f"IP:{OUTSIDE}", "20210101000000Z", "expired"),
])
def test_a_wrong_certificate_gets_no_byte(given: Broker, ca: Ca, name: str, end: str,
                                          said: str) -> None:
    with Upstream(ca.context(name, end)) as upstream:
        given.give(upstream.url)
        answer = given.post("/anthropic/v1/messages")
        assert status(answer) == 402 and said in text(answer), answer
        assert upstream.requests == [] and given.lines()[-1]["kind"] == "upstream"


def test_an_unknown_authority_and_plain_text_get_no_byte(given: Broker, vendor: Upstream) -> None:
    given.ca = ""
    given.give(vendor.url)
    answer = given.post("/anthropic/v1/messages")
    assert status(answer) == 402 and "self-signed" in text(answer) or "issuer" in text(answer)
    with Upstream(None) as plain:
        given.give(f"https://{plain.place}")
        assert status(given.post("/anthropic/v1/messages")) == 502 and plain.requests == []
    assert vendor.requests == []


def test_the_first_byte_may_be_slow_and_the_next_request_is_faster(given: Broker,
                                                                   good: ssl.SSLContext) -> None:
    """The connection of the next request is there already."""
    go = threading.Event()

    def slow(sock: socket.socket) -> None:
        assert go.wait(SECONDS)
        sock.sendall(anthropic())

    with Upstream(good, slow) as upstream, given.connect() as sock:
        given.give(upstream.url)
        sock.sendall(given.request("POST", "/anthropic/v1/messages", b"{}"))
        wait_for(lambda: upstream.connections == 2)
        go.set()
        assert status(read_all(sock)) == 200
        assert status(given.post("/anthropic/v1/messages")) == 200
        wait_for(lambda: upstream.connections == 3)
        assert len(upstream.requests) == 2


def test_a_spare_connection_that_has_died_is_not_used(given: Broker, good: ssl.SSLContext) -> None:
    spares: list[socket.socket] = []

    class Keeper(Upstream):
        def serve(self, sock: socket.socket) -> None:
            if self.connections == 2:
                good.wrap_socket(sock, server_side=True).close()
                spares.append(sock)
            else:
                super().serve(sock)

    with Keeper(good) as upstream:
        given.give(upstream.url)
        assert status(given.post("/anthropic/v1/messages")) == 200
        wait_for(lambda: spares)
        assert status(given.post("/anthropic/v1/messages")) == 200
        assert len(upstream.requests) == 2


def test_one_spare_is_made_for_two_requests() -> None:
    row = {**TABLE["providers"]["anthropic"], "url": f"http://{OUTSIDE}", "keys": {}}
    provider = load_module("broker").Provider("anthropic", row, None)
    opened, go = threading.Semaphore(0), threading.Event()

    def open_late() -> socket.socket:
        opened.release()
        assert go.wait(SECONDS)
        return socket.socket()

    provider.open = open_late
    other = threading.Thread(target=provider.make_spare)
    other.start()
    assert opened.acquire(timeout=SECONDS)
    provider.make_spare()
    go.set()
    other.join()
    assert len(provider.spares) == 1 and not opened.acquire(blocking=False)
    provider.spares[0][1].close()


# --- Use ---


def events(*data: Any) -> bytes:
    body = b"".join(b"event: %s\ndata: %s\n\n" % (item.get("type", "x").encode(),
                                                 json.dumps(item).encode()) for item in data)
    return SSE + chunk(body) + b"0\r\n\r\n"


def plain(data: Any) -> bytes:
    body = json.dumps(data).encode()
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + body


CLAUDE = {"input_tokens": 7, "cache_read_input_tokens": 1000, "cache_creation_input_tokens": 300,
          "cache_creation": {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200}}
CLAUDE_COUNTS = [7, 50, 1000, 100, 200]
CLAUDE_USD = (7 * 5 + 50 * 25 + 1000 * 0.5 + 100 * 6.25 + 200 * 10) / 1e6
RESPONSES = {"input_tokens": 1500, "input_tokens_details": {
    "cached_tokens": 1000, "cache_write_tokens": 100}, "output_tokens": 50,
    "output_tokens_details": {"reasoning_tokens": 20}, "total_tokens": 1550}
RESPONSES_USD = (400 * 2 + 50 * 10 + 1000 * 0.1 + 100 * 2.5) / 1e6
CHAT = {"prompt_tokens": 1500, "completion_tokens": 50, "total_tokens": 1550,
        "prompt_tokens_details": {"cached_tokens": 1000}}
GEMINI = {"promptTokenCount": 1500, "candidatesTokenCount": 30, "thoughtsTokenCount": 20,
          "cachedContentTokenCount": 1000, "toolUsePromptTokenCount": 100}
GEMINI_USD = (600 * 1.25 + 50 * 10 + 1000 * 0.125) / 1e6


@pytest.mark.parametrize("answer, model, counts, usd", [
    (plain({"model": "claude-opus-4-8", "usage": {**CLAUDE, "output_tokens": 50}}),
     "claude-opus-4-8", CLAUDE_COUNTS, CLAUDE_USD),
    (events({"type": "message_start", "message": {"model": "claude-opus-4-8-20260101",
                                                  "usage": {**CLAUDE, "output_tokens": 1}}},
            {"type": "content_block_delta", "delta": {"text": '"usage": {"input_tokens": 9999}'}},
            {"type": "message_delta", "usage": {"output_tokens": 50}}),
     "claude-opus-4-8-20260101", CLAUDE_COUNTS, CLAUDE_USD),
    (plain({"model": "gpt-6.1-sol", "usage": RESPONSES}), "gpt-6.1-sol", [400, 50, 1000, 100, 0],
     RESPONSES_USD),
    (events({"type": "response.created", "response": {"model": "gpt-6.1-sol", "usage": None}},
            {"type": "response.completed", "response": {"output": ["a"] * 9999,
                                                        "usage": RESPONSES}}),
     "gpt-6.1-sol", [400, 50, 1000, 100, 0], RESPONSES_USD),
    (events({"model": "some/model", "choices": []}, {"model": "some/model", "usage": CHAT}),
     "some/model", [500, 50, 1000, 0, 0], None),
    (events({"candidates": [], "usageMetadata": {"promptTokenCount": 1500},
             "modelVersion": "gemini-2.5-pro"}, {"usageMetadata": GEMINI}),
     "gemini-2.5-pro", [600, 50, 1000, 0, 0], GEMINI_USD),
    (plain([{"usageMetadata": GEMINI, "modelVersion": "gemini-2.5-pro-preview-06-05"}]),
     "gemini-2.5-pro-preview-06-05", [600, 50, 1000, 0, 0], GEMINI_USD),
], ids=["claude", "claude stream", "responses", "responses stream", "chat stream", "gemini stream",
        "gemini"])
def test_what_was_used_is_what_the_vendor_says(given: Broker, good: ssl.SSLContext, answer: bytes,
                                               model: str, counts: list[int],
                                               usd: float | None) -> None:
    """Also where it comes byte by byte."""
    def slowly(sock: socket.socket) -> None:
        for at in range(0, len(answer), 1 if len(answer) < 2000 else 999):
            sock.sendall(answer[at:at + (1 if len(answer) < 2000 else 999)])

    for way in (answer, slowly):
        with Upstream(good, way) as upstream:
            given.give(upstream.url)
            assert status(given.post("/anthropic/v1/messages")) == 200
    wait_for(lambda: len(given.uses()) == 2)
    names = ("input", "output", "read", "written", "written_long")
    for use in given.uses():
        assert (use["model"], [use[name] for name in names]) == (model, counts)
        assert use["usd"] == (usd and pytest.approx(usd)) and not use["estimated"]
    (day,) = given.usage()["days"].values()
    assert day["models"] == {model: [2, *(2 * count for count in counts),
                                     usd and pytest.approx(2 * usd)]}


def test_long_prompts_cost_more() -> None:
    usage = load_module("usage")
    row = {"m": [2, 10, 0.2, 2.5, 5, 1000, 2, 1.5]}
    assert usage.dollars(row, "m", [500, 100, 400, 100, 0]) == pytest.approx(
        (500 * 2 + 100 * 10 + 400 * 0.2 + 100 * 2.5) / 1e6)
    assert usage.dollars(row, "m", [501, 100, 400, 100, 0]) == pytest.approx(
        ((501 * 2 + 400 * 0.2 + 100 * 2.5) * 2 + 100 * 10 * 1.5) / 1e6)


def load_module(name: str) -> Any:
    import importlib.util
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model, known", [
    ("claude-opus-5", True), ("claude-opus-5-5", True), ("claude-opus-5-20260724", True),
    ("claude-opus-5-9", False), ("claude-sonnet-4@20250514", True), ("gpt-6.1-sol", True),
    ("gpt-5-2025-08-07", True), ("gpt-5-turbo", False), ("gemini-3.1-pro-preview", True),
    ("gemini-2.5-flash-lite", True), ("", False), ("stub", False),
])
def test_a_model_without_a_price_has_none(model: str, known: bool) -> None:
    usd = load_module("usage").dollars(TABLE["prices"]["models"], model, [10**6, 0, 0, 0, 0])
    assert (usd is not None) == known
    if known:
        assert 0 < usd <= 100


def test_the_table_of_prices_is_whole() -> None:
    for model, row in TABLE["prices"]["models"].items():
        assert len(row) in (5, 8) and all(price > 0 for price in row), model
        into, out, read, written, long = row[:5]
        assert read <= into <= out and into <= written <= long, model
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", TABLE["prices"]["date"])


@pytest.mark.parametrize("usage", [
    '"usage": {"input_tokens": -5, "output_tokens": 1e99}', '"usage": {"input_tokens": true}',
    '"usage": {"input_tokens": 99999999999999999999}', '"usage": {"input_tokens": "7"}',
    '"usage": {', '"usage": {' * 3000, '"usage": {"a": ' + "[" * 3000, '"usage": null',
])
def test_wrong_counts_are_estimated(given: Broker, good: ssl.SSLContext, usage: str) -> None:
    length = b"Content-Length: %d\r\n\r\n{" % (len(usage) + 1)
    with Upstream(good, OK + length + usage.encode()) as upstream:
        given.give(upstream.url)
        body = b'{"messages": "' + b"a" * 4000 + b'"}'
        assert status(given.post("/anthropic/v1/messages", body)) == 200
    wait_for(lambda: given.uses())
    use = given.uses()[-1]
    assert use["estimated"] and use["input"] == len(body) // 4 and use["usd"] is None
    assert given.usage()["days"].popitem()[1]["models"]["unknown"][:2] == [1, len(body) // 4]


def test_who_breaks_off_before_the_count_has_used_something(given: Broker,
                                                            good: ssl.SSLContext) -> None:
    def stream(sock: socket.socket) -> None:
        sock.sendall(SSE + chunk(b"data: " + b"a" * 8000))
        read_all(sock)

    with Upstream(good, stream) as upstream:
        given.give(upstream.url)
        with given.connect() as sock:
            sock.sendall(given.request("POST", "/anthropic/v1/messages", b"{" + b" " * 3998 + b"}"))
            read_until(sock, b"a" * 8000)
        wait_for(lambda: given.uses())
    assert given.uses()[0]["estimated"] and given.uses()[0]["input"] == 1000
    assert given.uses()[0]["output"] >= 1000


def test_what_costs_nothing_is_not_counted(given: Broker, vendor: Upstream) -> None:
    assert status(given.post("/anthropic/v1/messages/count_tokens")) == 200
    assert given.usage()["days"] == {} and given.uses() == []


# --- Budgets ---


def test_one_request_may_cross_a_budget_and_the_next_is_refused(given: Broker,
                                                                vendor: Upstream) -> None:
    given.ask(do="set", budget={"tokens": 150, "per": "session"})
    for _ in range(2):
        assert status(given.post("/anthropic/v1/messages")) == 200
        wait_for(lambda: len(given.uses()) == len(vendor.requests))
    refused = given.post("/anthropic/v1/messages")
    assert status(refused) == 402 and b"X-Should-Retry: false" in refused
    assert "220.00 of 150 tokens" in text(refused)
    assert "sandbox budget demo 300tokens" in text(refused)
    assert len(vendor.requests) == 2 and given.lines()[-1]["kind"] == "budget"
    assert status(given.post("/anthropic/v1/messages/count_tokens")) == 200
    given.ask(do="set", budget={"tokens": 300})
    assert status(given.post("/anthropic/v1/messages")) == 200


@pytest.mark.parametrize("name, code", [("anthropic", 402), ("openai", 400), ("gemini", 429),
                                        ("google", 400), ("openrouter", 400)])
def test_a_refusal_has_the_status_that_stops_its_agents(broker: Broker, vendor: Upstream, name: str,
                                                        code: int) -> None:
    broker.give(vendor.url, name, budget={"usd": 0})
    path = {"anthropic": "v1/messages", "openai": "responses", "openrouter": "chat/completions",
            "gemini": "v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse",
            "google": "models/gemini-2.5-pro:generateContent"}[name]
    answer = broker.post(f"/{name}/{path}")
    assert status(answer) == code and "budget" in text(answer) and vendor.requests == []


def used(broker: Broker, count: int) -> bool:
    return len(broker.uses()) == count


def test_dollars_and_tokens_from_a_cache(given: Broker, good: ssl.SSLContext) -> None:
    """What was read from a cache costs dollars, and counts for no tokens."""
    with Upstream(good, anthropic(10, 0, read=1_000_000)) as upstream:
        given.give(upstream.url, budget={"usd": 0.9, "tokens": 100})
        for number in range(2):
            assert status(given.post("/anthropic/v1/messages")) == 200
            wait_for(partial(used, given, number + 1))
        assert "1.00 of 0.9 usd" in text(given.post("/anthropic/v1/messages"))
        spent = given.usage()["spent"]
        assert (spent["usd"], spent["tokens"]) == (pytest.approx(1.0001), 20)


def test_ten_agents_on_one_budget(given: Broker, vendor: Upstream) -> None:
    """Of each at most the request that is under way comes through when it is spent."""
    given.ask(do="set", budget={"tokens": 5500})
    answers: list[int] = []

    def work() -> None:
        while (code := status(given.post("/anthropic/v1/messages"))) == 200:
            answers.append(code)

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert 50 <= len(answers) <= 50 + 9
    wait_for(lambda: len(given.uses()) == len(answers))
    assert given.usage()["spent"]["tokens"] == 110 * len(answers)


def test_counts_and_budgets_outlive_a_restart(given: Broker, vendor: Upstream) -> None:
    given.post("/anthropic/v1/messages")
    wait_for(lambda: given.uses())
    before = given.usage()
    given.restart()
    assert given.usage()["days"] == before["days"] != {}
    given.give(vendor.url, budget={"tokens": 110})
    assert status(given.post("/anthropic/v1/messages")) == 402
    assert sorted(path.name for path in given.directory.glob("counts*")) == ["counts.json"]
    (given.directory / "counts.json").unlink()
    given.restart()  # another broker in its place
    assert given.ask(do="set", days=before["days"]) == {"ok": True}
    given.restart()
    assert given.usage()["days"] == before["days"]


@pytest.mark.parametrize("shift, code", [(-86400, 200), (86400, 402), (-3650 * 86400, 200),
                                         (3650 * 86400, 402)])
def test_a_day_has_a_budget_and_a_clock_that_goes_back_gives_none(
    broker: Broker, vendor: Upstream, shift: float, code: int
) -> None:
    """The counts are of a day before, or of one that the clock has been at and is not any more."""
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + shift))
    counts = {"days": {day: {"seconds": 1, "models": {"a": [1, 100, 0, 0, 0, 0, None]}}}}
    (broker.directory / "counts.json").write_text(json.dumps(counts))
    broker.restart()
    broker.give(vendor.url, budget={"tokens": 100, "per": "day"})
    assert status(broker.post("/anthropic/v1/messages")) == code
    broker.give(vendor.url, budget={"tokens": 100, "per": "session"})
    assert status(broker.post("/anthropic/v1/messages")) == 402


@pytest.mark.parametrize("content", ["", "{", "[]", '{"days": 1}', '{"days": {"a": {}}}', "\0",
                                     '{"days": {"a": {"seconds": 1, "models": {"a": [1]}}}}'])
def test_counts_that_cannot_be_read_close_a_budget(broker: Broker, vendor: Upstream,
                                                   content: str) -> None:
    (broker.directory / "counts.json").write_text(content)
    broker.restart()
    broker.give(vendor.url, budget={"tokens": 10**9})
    answer = broker.post("/anthropic/v1/messages")
    assert status(answer) == 402 and "cannot be read" in text(answer)
    broker.give(vendor.url, budget={})
    assert status(broker.post("/anthropic/v1/messages")) == 200


def test_minutes_end_a_running_stream(given: Broker, good: ssl.SSLContext) -> None:
    def stream(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(SSE)
            while True:
                sock.sendall(chunk(b"data: a\n\n"))
                time.sleep(0.01)

    with Upstream(good, stream) as upstream, given.connect() as sock:
        given.give(upstream.url, budget={"minutes": 0.5 / 60})
        sock.sendall(given.request("POST", "/anthropic/v1/messages", b"{}"))
        with pytest.raises(ConnectionResetError):
            read_all(sock)
        assert "minutes" in text(given.post("/anthropic/v1/messages"))
        assert given.usage()["spent"]["minutes"] * 60 >= 0.5


# --- Turns ---

PROMPT = b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "b"}]}'


def test_a_turn_waits_for_its_checkpoint(given: Broker, vendor: Upstream) -> None:
    given.ask(do="set", turns=SECONDS)
    with Asker(given) as host, given.connect() as sock:
        assert host.say(do="watch") == {"ok": True}
        sock.sendall(given.request("POST", "/anthropic/v1/messages", PROMPT))
        turn = host.read_until("turn")
        assert turn["provider"] == "anthropic" and vendor.requests == []
        host.write(do="turn", id=turn["turn"], error="")
        assert status(read_all(sock)) == 200
        # what is tried again is the same turn
        assert status(given.post("/anthropic/v1/messages", PROMPT)) == 200
        other = given.connect()
        other.sendall(given.request("POST", "/anthropic/v1/messages", PROMPT + b" "))
        assert host.read_until("turn")["turn"] != turn["turn"]
        other.close()


def test_a_turn_without_its_checkpoint_is_refused_with_the_reason(given: Broker,
                                                                  vendor: Upstream) -> None:
    given.ask(do="set", turns=SECONDS)
    with Asker(given) as host, given.connect() as sock:
        host.say(do="watch")
        sock.sendall(given.request("POST", "/anthropic/v1/messages", PROMPT))
        host.write(do="turn", id=host.read_until("turn")["turn"], error="the disk is full")
        answer = read_all(sock)
    assert status(answer) == 402 and text(answer) == "sandbox: the disk is full"
    assert vendor.requests == [] and given.lines()[-1]["kind"] == "turn"
    assert given.usage()["days"] in ({}, given.usage()["days"])
    assert given.usage()["spent"]["tokens"] == 0


def test_a_turn_that_nobody_answers_goes_on_after_its_deadline(given: Broker,
                                                               vendor: Upstream) -> None:
    """As where nobody watches: who did has gone, and the end of its connection was lost."""
    given.ask(do="set", turns=0.5)
    with Asker(given) as host:
        host.say(do="watch")
        began = time.monotonic()
        assert status(given.post("/anthropic/v1/messages", PROMPT)) == 200
        assert time.monotonic() - began >= 0.5
        given.ask(do="set", turns=SECONDS)  # nobody is asked again who is silent
        assert status(given.post("/anthropic/v1/messages", PROMPT + b" ")) == 200
        assert time.monotonic() - began < SECONDS
        host.write(do="turn", id=host.read_until("turn")["turn"], error="")  # it was only slow
        assert "KeyError" in host.read()["error"]
        with given.connect() as sock:
            sock.sendall(given.request("POST", "/anthropic/v1/messages", PROMPT + b"  "))
            host.write(do="turn", id=host.read_until("turn")["turn"], error="the disk is full")
            assert status(read_all(sock)) == 402


def test_a_turn_is_handed_on_by_who_is_silent(given: Broker, vendor: Upstream) -> None:
    given.ask(do="set", turns=0.5)
    with (Asker(given) as silent, Asker(given) as host, given.connect() as sock,
          contextlib.ExitStack() as stack):
        assert silent.say(do="watch") == host.say(do="watch") == {"ok": True}
        for _ in range(12):  # are asked behind the host, which has their time too
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.connect(str(given.directory / "control"))
            other.sendall(b'{"do": "watch"}\n')
            assert read_until(other, b"\n") == b'{"ok": true}\n'
        sock.sendall(given.request("POST", "/anthropic/v1/messages", PROMPT))
        host.write(do="turn", id=host.read_until("turn")["turn"], error="the disk is full")
        assert status(read_all(sock)) == 402 and vendor.requests == []


def test_a_turn_is_handed_on_by_who_goes(given: Broker, vendor: Upstream) -> None:
    given.ask(do="set", turns=SECONDS)
    with Asker(given) as host, given.connect() as sock:
        with Asker(given) as other:
            assert other.say(do="watch") == host.say(do="watch") == {"ok": True}
            sock.sendall(given.request("POST", "/anthropic/v1/messages", PROMPT))
            id = other.read_until("turn")["turn"]
        assert host.read_until("turn")["turn"] == id
        host.write(do="turn", id=id, error="")
        assert status(read_all(sock)) == 200


def test_a_turn_goes_on_when_the_last_one_goes(given: Broker, vendor: Upstream) -> None:
    given.ask(do="set", turns=SECONDS)
    with given.connect() as sock:
        with Asker(given) as host:
            host.say(do="watch")
            sock.sendall(given.request("POST", "/anthropic/v1/messages", PROMPT))
            host.read_until("turn")
        assert status(read_all(sock)) == 200


def test_of_two_who_watch_one_makes_the_checkpoint(given: Broker, vendor: Upstream) -> None:
    given.ask(do="set", turns=SECONDS)
    with Asker(given) as host, Asker(given) as other, given.connect() as sock:
        assert host.say(do="watch") == other.say(do="watch") == {"ok": True}
        sock.sendall(given.request("POST", "/anthropic/v1/messages", PROMPT))
        host.write(do="turn", id=host.read_until("turn")["turn"], error="")
        assert status(read_all(sock)) == 200
        assert other.say(do="usage")["ok"] is True  # and nothing before that


def test_who_watches_later_hears_of_a_turn_that_waits(given: Broker, vendor: Upstream) -> None:
    given.ask(do="set", turns=SECONDS)
    with Asker(given) as silent, given.connect() as sock:
        silent.say(do="watch")
        sock.sendall(given.request("POST", "/anthropic/v1/messages", PROMPT))
        wait_for(lambda: waiting(given))
        with Asker(given) as host:
            host.write(do="watch")
            host.write(do="turn", id=host.read_until("turn")["turn"], error="")
            assert status(read_all(sock)) == 200


def waiting(broker: Broker) -> bool:
    with Asker(broker) as host:
        host.write(do="watch")
        return "turn" in host.read()


def turn(name: str, body: bytes, size: int = 10**6) -> bool:
    marks = load_module("usage").Marks()
    for at in range(0, len(body), size):
        marks.see(body[at:at + size])
    return bool(marks.begins_turn)


USER = {"role": "user", "content": "a"}
TOOLS = {"tools": [{"name": "a"}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "content": "a"}]}
HEARD = {"parts": [{"functionResponse": {"name": "a"}}], "role": "user"}


@pytest.mark.parametrize("body, begins", [
    ({"messages": [USER], **TOOLS}, True),
    ({"messages": [USER]}, False),  # an agent's own, for a title
    ({"messages": [USER], "tools": []}, False),
    ({"messages": [USER, {"role": "system", "content": "a"}], **TOOLS}, True),
    ({"messages": [USER, {"role": "assistant", "content": "a"}, RESULT], **TOOLS}, False),
    ({"messages": [USER, {"role": "assistant", "content": "a"}, USER], **TOOLS}, True),
    ({"messages": [USER, {"role": "assistant", "content": "a"}], **TOOLS}, False),
    ({"messages": [{"role": "user", "content": '"role": "assistant"'}], **TOOLS}, True),
    ({"messages": [USER, {"role": "assistant"}, {"role": "tool", "content": "a"}], **TOOLS}, False),
    ({"input": [{"type": "additional_tools", **TOOLS}, USER]}, True),
    ({"input": [{**TOOLS}, USER, {"type": "custom_tool_call_output", "output": "a"}]}, False),
    ({"input": [{**TOOLS}, USER, {"type": "function_call_output", "output": "a"}, USER]}, True),
    ({"text": {"format": {"type": "json_schema"}}, "input": [{**TOOLS}, USER]}, False),  # a title
    ({"contents": [{"parts": [{"text": "a"}], "role": "user"}], **TOOLS}, True),
    ({"contents": [{"parts": [], "role": "user"}, {"parts": [], "role": "model"}, HEARD], **TOOLS},
     False),
    ({"contents": [{"parts": [], "role": "user"}, {"parts": [], "role": "model"}, HEARD],
      "systemInstruction": {"parts": [{"text": "a"}], "role": "user"}, **TOOLS}, False),
    ({"systemInstruction": {"parts": [{"text": "a"}]},
      "contents": [{"parts": [], "role": "user"}], **TOOLS}, True),
    ({"contents": [HEARD, {"parts": [], "role": "model"}, {"parts": [], "role": "user"}], **TOOLS},
     True),
])
def test_a_turn_begins_where_the_last_message_is_the_persons(body: Any, begins: bool) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        for size in (10**6, 1, 7):
            assert turn("", json.dumps(body, separators=separators).encode(), size) == begins


# --- With the proxy ---


def test_the_companion_is_the_proxy_too(given: Broker) -> None:
    """One program serves both, each on a listener of its own."""
    proxy_env = {**given.env(), "SANDBOX_NET_SOCKET": "proxy.sock",
                 "SANDBOX_NET_PORT": str(port := free_port())}
    program = [sys.executable, "-I", "-S", str(FOLDER / "proxy.py"), "gate"]
    assert subprocess.run(program, env=proxy_env, timeout=60).returncode == 0
    with socket.create_connection(("127.0.0.1", port), SECONDS) as sock:
        sock.sendall(b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n")
        assert b"HTTP/1.1 403 " in read_all(sock)
    assert given.lines()[-1]["kind"] == "unlisted"


def test_who_asks_waits_for_a_broker_that_is_starting(given: Broker) -> None:
    given.processes[-1].kill()
    given.processes[-1].wait()
    (given.directory / "broker.sock").unlink()
    (given.directory / "control").unlink()
    with Asker(given) as host:
        host.write(do="usage")
        given.begin()
        assert host.read()["providers"] == []


def test_sigterm_ends_it(given: Broker) -> None:
    given.processes[-1].send_signal(signal.SIGTERM)
    assert given.processes[-1].wait(SECONDS) == 0


# --- The four agents ---
# In one container without a network, with the vendors' names on its loopback: once they go there
# with a key, and once through the broker with a placeholder.

VENDORS = ("api.anthropic.com", "api.openai.com", "generativelanguage.googleapis.com")
REAL = {"ANTHROPIC_API_KEY": "sk-ant-api03-the-real-key", "OPENAI_API_KEY": "sk-the-real-key",
        "GEMINI_API_KEY": "AIza-the-real-key"}
ALWAYS = {"HOME": "/home/agent", "IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1",
          "GEMINI_CLI_TRUST_WORKSPACE": "true", "GEMINI_MODEL": "gemini-2.5-pro",
          "OPENCODE_DISABLE_AUTOUPDATE": "true", "OPENCODE_PERMISSION": '{"*":"allow"}',
          "NODE_EXTRA_CA_CERTS": "/lab/ca.crt", "SSL_CERT_FILE": "/lab/ca.crt"}
COMMANDS = {"c": "claude --dangerously-skip-permissions -p", "gm": "gemini --yolo -p",
            "cx": "codex exec --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check",
            "oc": "opencode run"}


def opencode(url: str = "") -> str:
    models = {"model": "anthropic/claude-sonnet-4-5", "small_model": "anthropic/claude-haiku-4-5"}
    options = {"provider": {"anthropic": {"options": {"baseURL": url}}}} if url else {}
    return json.dumps({**models, **options})


def equip(directory: Path, ca: Ca, keys: Iterable[str]) -> None:
    """Lay out what the vendors need: their program, their certificates and the keys they take."""
    ca.context(",".join(f"DNS:{name}" for name in VENDORS))
    pem = [(ca.directory / f"own.{kind}").read_text() for kind in ("key", "crt")]
    (directory / "cert.pem").write_text("".join(pem))
    (directory / "ca.crt").write_text(ca.pem)
    (directory / "keys").write_text("\n".join(keys))
    for name in ("model_stub.py", "vendor_stub.py"):
        shutil.copy(ROOT / "tests" / name, directory)


def taken(path: Path) -> list[Any]:
    """The requests that the vendors have noted, which are gone then; more may come meanwhile."""
    if not path.exists():
        return []
    with open(path, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = [json.loads(line) for line in file]
        file.truncate(0)
    return lines


class Lab:
    """A container with the agents, the vendors and the broker."""

    def __init__(self, engine: Engine, image: str, ca: Ca) -> None:
        self.engine, self.name = engine, unique_name()
        self.directory = engine.directory()
        equip(self.directory, ca, REAL.values())
        for name in ("static/image/proxy.py", "static/image/broker.py", "static/image/usage.py",
                     "static/session/ask.py"):
            shutil.copy(ROOT / name, self.directory)
        made = engine.run("run", "-d", "--init", "--name", self.name, "--network", "none",
                          *(f"--add-host={name}:127.0.0.1" for name in VENDORS),
                          "-v", f"{self.directory}:/lab", image, "python3", "-B",
                          "/lab/vendor_stub.py", "/lab")
        assert made.returncode == 0, made.stderr
        wait_for((self.directory / "ready").exists)
        self.execute("sh", "-c", "cd /lab && exec python3 -I -S -B broker.py serve >log 2>&1",
                     detached=True)
        wait_for(lambda: self.ask(do="usage"))
        gate = self.execute("python3", "-I", "-S", "/lab/proxy.py", "gate",
                            env={"SANDBOX_NET_SOCKET": "broker.sock", "SANDBOX_NET_PORT": "3129"})
        assert gate.returncode == 0, gate.stderr

    def execute(self, *argv: str, input: str = "", detached: bool = False, user: str = "0",
                env: Mapping[str, str] = {}) -> Result:
        given = {"SANDBOX_NET": "/run", "SANDBOX_KEPT": "/run/kept", "SANDBOX_SESSION": "demo",
                 "SANDBOX_COUNTS": "/run/counts", "SANDBOX_RULES": '{"allow": []}', **env}
        flags = [word for name, value in given.items() for word in ("-e", f"{name}={value}")]
        return self.engine.run("exec", "-d" if detached else "-i", "-u", user, *flags, self.name,
                               *argv, input=input)

    def ask(self, **data: Any) -> Any:
        answer = self.execute("python3", "-I", "-S", "/lab/ask.py", "/run/sandbox-broker.sock",
                              input=json.dumps(data) + "\n")
        return json.loads(answer.stdout) if answer.returncode == 0 else None

    def give(self, **more: Any) -> None:
        rows = {name: {**row, "keys": {placeholder: REAL[variable] for variable, placeholder
                                       in row["keys"].items() if variable in REAL}}
                for name, row in TABLE["providers"].items()}
        answer = self.ask(do="set", providers={name: row for name, row in rows.items()
                                               if row["keys"]},
                          ca=(self.directory / "ca.crt").read_text(),
                          prices=TABLE["prices"]["models"], **more)
        assert answer == {"ok": True}

    def run(self, agent: str, prompt: str, hidden: bool) -> Result:
        """One prompt, in a home as new."""
        env = {**ALWAYS, **REAL, "OPENCODE_CONFIG_CONTENT": opencode()}
        if hidden:
            env["OPENCODE_CONFIG_CONTENT"] = opencode("http://127.0.0.1:3129/anthropic/v1")
            for name in ("anthropic", "openai", "gemini"):
                row = TABLE["providers"][name]
                env |= row.get("env", {}) | {row["variable"]: f"http://127.0.0.1:3129/{name}"}
                env |= row["keys"]
            del env["CLAUDE_CODE_OAUTH_TOKEN"], env["ANTHROPIC_AUTH_TOKEN"], env["GOOGLE_API_KEY"]
        self.execute("sh", "-c", "rm -rf /home/agent /work; cp -r /etc/skel /home/agent; "
                     "mkdir /work; chown -R 1000:1000 /home/agent /work")
        script = f"cd /work && timeout 100 {COMMANDS[agent]} {shlex.quote(prompt)} </dev/null 2>&1"
        return self.execute("sh", "-c", script, user="1000:1000", env=env)

    def requests(self) -> list[Any]:
        """Those to the vendors since the last call."""
        return taken(self.directory / "requests")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "log").read_text().splitlines()]


@pytest.fixture(scope="module")
def lab(engine: Engine, image: str, ca: Ca) -> Iterator[Lab]:
    lab = Lab(engine, image, ca)
    yield lab
    engine.run("rm", "-f", lab.name)


# What is another one with each start of an agent, and the key.
CHANGING = re.compile(
    r"\b(?:ses|msg|toolu|fc|call|ctco|run_shell_command)_[\w-]+|"
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|"
    r"\b[0-9a-f]{32,64}\b|\b1[78]\d{8}(?:\d{3}\b|\.\d+)|\d{4}-\d\d-\d\dT[\d:.]+Z?|"
    r"PGID: \d+|Wall time [\d.]+|"
    r"\b\d\d:\d\d:\d\d\b|cch=\w+|Bash=\d+|traceparent.{60}|"
    + "|".join(map(re.escape, [*REAL.values(), *(text for row in TABLE["providers"].values()
                                                for text in row["keys"].values())])))
HOP = {"host", "connection", "accept-encoding", "content-length"}


# The one header field that Claude Code 2.1.330 leaves out for a base URL that is not its vendor's,
# also where it is told to take that for its vendor's.
LOST = ",mid-conversation-system-clear-at-2026-08-21"


def seen(requests: list[Any]) -> list[Any]:
    """The requests to models, without what changes and what each hop says for itself."""
    return [(method, path, [(name, CHANGING.sub("*", value).replace(LOST, ""))
                            for name, value in headers if name.lower() not in HOP],
             CHANGING.sub("*", in_order(body)))
            for method, path, headers, body in requests if method == "POST" and "/v1" in path]


def in_order(body: str) -> str:
    """Codex writes one object in an order that is another with each request."""
    data = json.loads(body)
    if "client_metadata" not in data:
        return body
    data["client_metadata"] = sorted(data["client_metadata"].items())
    return json.dumps(data)


@on_docker
@each_agent
def test_an_agent_sends_the_same_bytes_with_the_broker_as_without(lab: Lab, agent: str) -> None:
    lab.give(budget={}, turns=0)
    lab.requests()
    taken = []
    for hidden in (False, True):
        answer = lab.run(agent, "please run: echo hello", hidden)
        assert "pong tool" in answer.stdout and "hello" in answer.stdout, answer.stdout
        taken.append(seen(lab.requests()))
    direct, through = (sorted(requests, key=str) for requests in taken)
    assert len(direct) >= 2 and through == direct


@on_docker
@each_agent
def test_a_turn_of_an_agent_is_announced_once_and_waits(lab: Lab, agent: str) -> None:
    lab.give(budget={}, turns=60)
    lab.requests()
    argv = [lab.engine.runtime, "exec", "-i", lab.name, "python3", "-I", "-S", "/lab/ask.py",
            "/run/sandbox-broker.sock"]
    turns = []
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdin and host.stdout
        host.stdin.write('{"do": "watch"}\n')
        host.stdin.flush()
        assert json.loads(host.stdout.readline()) == {"ok": True}
        with ThreadPoolExecutor() as pool:
            running = pool.submit(lab.run, agent, "please run: echo hello", True)
            running.add_done_callback(lambda _: host.stdin and host.stdin.close())
            for line in host.stdout:
                if "turn" in (data := json.loads(line)):
                    turns.append((data["provider"], len(tools_used(lab.requests()))))
                    host.stdin.write(json.dumps({"do": "turn", "id": data["turn"], "error": ""}))
                    host.stdin.write("\n")
                    host.stdin.flush()
            answer = running.result()
    assert "pong tool" in answer.stdout, answer.stdout
    name = {"c": "anthropic", "gm": "gemini", "cx": "openai", "oc": "anthropic"}[agent]
    assert turns == [(name, 0)]
    assert len(tools_used(lab.requests())) >= 2


def tools_used(requests: list[Any]) -> list[Any]:
    return [body for method, _, _, body in requests if method == "POST" and '"tools"' in body]


@on_docker
@each_agent
def test_over_its_budget_an_agent_stops_and_says_why(lab: Lab, agent: str) -> None:
    lab.give(budget={"usd": 0}, turns=0)
    lab.requests()
    before = len(lab.lines())
    answer = lab.run(agent, "say nothing", True)
    assert "sandbox budget demo" in answer.stdout and "pong" not in answer.stdout, answer.stdout
    refused = [line for line in lab.lines()[before:] if line["verdict"] == "deny"]
    assert 1 <= len(refused) <= (2 if agent == "oc" else 1), refused  # and its title
    assert {line["kind"] for line in refused} == {"budget"}
    assert seen(lab.requests()) == []
    lab.give(budget={})
    assert "pong" in lab.run(agent, "say nothing", True).stdout
    # No key is left behind, by the tests before either: in a home, a file of the broker, or a log.
    found = lab.execute("grep", "-rlE", "|".join(REAL.values()), "/home/agent", "/work", "/tmp",
                        "/run", "/lab/log")
    assert (found.returncode, found.stdout) == (1, "")
