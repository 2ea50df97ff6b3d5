"""The broker, run as it is: keys, strict requests, streams, use and budgets, turns, and what agents,
upstreams and clocks may do to it.

Everything is on loopback. The upstream speaks TLS with a certificate of an authority made here.
"""

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
from conftest import ROOT
from service import wait_for
from test_proxy import (
    OUTSIDE,
    SECONDS,
    Handler,
    Outside,
    Proxy,
    free_port,
    load,
    read_all,
    read_exactly,
    read_until,
)

FOLDER = ROOT / "static" / "image"
TABLE = json.loads((ROOT / "static" / "providers.json").read_text())
KEY, PLACEHOLDER = "sk-ant-the-real-key-0123456789", "sk-ant-hidden"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


# --- The program ---


class Asker:
    """A connection to the broker through `broker.py ask`, as the host has it."""

    def __init__(self, broker: "Broker") -> None:
        self.process = subprocess.Popen(broker.argv("ask"), env=broker.env(), text=True,
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

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.post("/").startswith(b"HTTP/1.1 ")
        return False

    def ask(self, **data: Any) -> Any:
        done = subprocess.run(self.argv("ask"), env=self.env(), input=json.dumps(data) + "\n",
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
        self.run("req", "-new", *self.key("own"), "-subj", f"/CN={name}",
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


def anthropic(into: int = 100, out: int = 10, model: str = "claude-opus-4-8", read: int = 0) -> bytes:
    body = json.dumps({"model": model, "content": [], "usage": {
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
    assert status(answer) == 200 and answer.endswith(vendor.answer or anthropic()[-20:])
    assert vendor.head() == [
        "POST /v1/messages?beta=true HTTP/1.1", f"Host: {vendor.place}", "anthropic-beta: a,b",
        received.replace("KEY", KEY), "Accept-Encoding: identity", "x-app: cli",
        f"Content-Length: {len(body)}", "Connection: close"]
    assert vendor.requests[-1].endswith(b"\r\n\r\n" + body)


def test_a_key_in_the_query_goes_as_a_header(given: Broker, vendor: Upstream) -> None:
    path = f"/anthropic/v1/messages?a=1&key={PLACEHOLDER}&key=other"
    assert status(given.post(path, b"{}", key="")) == 200
    head = vendor.head()
    assert head[0] == "POST /v1/messages?a=1 HTTP/1.1" and f"x-goog-api-key: {KEY}" in head


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
               "Proxy-Authorization: own")
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
])
def test_a_wrong_question_has_an_answer(given: Broker, data: dict[str, Any]) -> None:
    assert "error" in given.ask(**data)
    assert given.usage()["providers"] == ["anthropic"]


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
                            "Upgrade: websocket", "Sec-WebSocket-Key: a", "Sec-WebSocket-Version: 13")
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


def test_a_body_that_comes_in_drops_goes_on_before_its_end(given: Broker, good: ssl.SSLContext) -> None:
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
    wait_for(lambda: given.post("/anthropic/v1/messages").startswith(b"HTTP/1.1 200"))
