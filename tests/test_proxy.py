"""The network proxy, run as it is: rules and decisions, strict requests, tunnels, gates, and what
clients may do to it.

Everything is on loopback, where only rules with the literal address let anyone through.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import random
import re
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
from conftest import ROOT
from service import free_port, wait_for

import sandbox

PROXY = ROOT / "static" / "image" / "proxy.py"
OUTSIDE = "127.0.0.9"
SECONDS = 30.0
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

Handler = Callable[[socket.socket], None]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("proxy", PROXY)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


proxy = load()


# --- The program ---


class Proxy:
    """A proxy and its gates, with a directory and a port of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self.log, self.errors = directory / "log", directory / "errors"
        self.processes: list[subprocess.Popen[bytes]] = []

    def env(self, rules: object = None) -> dict[str, str]:
        text = rules if isinstance(rules, str) else json.dumps(rules)
        return {"PATH": os.environ["PATH"], "SANDBOX_NET": str(self.directory),
                "SANDBOX_NET_PORT": str(self.port),
                "SANDBOX_KEPT": str(self.directory / "kept"), "SANDBOX_SESSION": "demo",
                "SANDBOX_RULES": text}

    def command(self, *words: str, rules: object = None, before: tuple[str, ...] = (),
                ) -> subprocess.CompletedProcess[str]:
        argv = [*before, sys.executable, "-I", "-S", str(PROXY), *words]
        return subprocess.run(argv, env=self.env(rules), capture_output=True, text=True, timeout=60)

    def serve(self, rules: object = None, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log, open(self.errors, "ab") as errors:
            argv = [*before, sys.executable, "-I", "-S", str(PROXY), "serve"]
            process = subprocess.Popen(argv, env=self.env(rules), stdout=log, stderr=errors)
        self.processes.append(process)
        return process

    def gate(self) -> None:
        assert self.command("gate").returncode == 0

    def allow(self, *rules: str, deny: tuple[str, ...] = ()) -> None:
        done = self.command("set", rules={"allow": rules, "deny": deny})
        assert done.returncode == 0, done.stderr

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def kept(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "kept").read_text().splitlines()]

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def send(self, data: bytes, end: bool = False) -> bytes:
        with self.connect() as sock:
            sock.sendall(data)
            if end:
                sock.shutdown(socket.SHUT_WR)
            return read_all(sock)

    def tunnel(self, host: str, port: int) -> socket.socket:
        sock = self.connect()
        sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        assert read_exactly(sock, len(ESTABLISHED)) == ESTABLISHED
        return sock

    def rss_kib(self) -> int:
        status = Path(f"/proc/{self.processes[-1].pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        mine = f"SANDBOX_NET={self.directory}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mine in entry.read_bytes().split(b"\0"):
                    os.kill(int(entry.parent.name), signal.SIGKILL)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Proxy]:
    net = Proxy(tmp_path)
    yield net
    net.end()


@pytest.fixture
def running(net: Proxy) -> Proxy:
    net.serve({"allow": [], "deny": []})
    net.gate()
    return net


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = sock.recv(65536)
        if not piece:
            raise ConnectionError(f"{data!r} and then the end")
        data += piece
    return data


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


# --- Servers outside ---


class Outside:
    """A server on an address that the proxy reaches and the session does not know."""

    def __init__(self, handler: Handler, address: str = OUTSIDE) -> None:
        self.handler, self.connections = handler, 0
        self.server = socket.create_server((address, 0), backlog=600)
        self.host, self.port = address, int(self.server.getsockname()[1])
        self.place = f"{address}:{self.port}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.server.accept()
                self.connections += 1
                threading.Thread(target=self.handle, args=(sock,), daemon=True).start()

    def handle(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(SECONDS)
            self.handler(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


def silent(sock: socket.socket) -> None:
    read_all(sock)


def echo(sock: socket.socket) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


class Sink(Outside):
    """Reads, and keeps what has come when a connection ends."""

    def __init__(self, address: str = OUTSIDE) -> None:
        self.seen: list[bytes] = []
        super().__init__(lambda sock: self.seen.append(read_all(sock)), address)


class Recorder(Outside):
    """Answers once `mark` has come, ends its own direction, and keeps all that ever comes."""

    def __init__(self, mark: bytes = b"\r\n\r\n", answer: bytes = b"HTTP/1.1 204 Fine\r\n\r\n",
                 address: str = OUTSIDE) -> None:
        self.mark, self.answer = mark, answer
        self.seen: list[bytes] = []
        super().__init__(self.record, address)

    def record(self, sock: socket.socket) -> None:
        data = read_until(sock, self.mark)
        sock.sendall(self.answer)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            data += read_all(sock)
        self.seen.append(data)

    def request(self) -> bytes:
        wait_for(lambda: len(self.seen) == 1)
        return self.seen[0]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                    "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", "-subj", "/CN=localhost", "-addext",
                    "subjectAltName=DNS:localhost,IP:127.0.0.9",
                    "-keyout", path, "-out", path.with_suffix(".crt")], check=True,
                   capture_output=True)
    with open(path, "a") as file:
        file.write(path.with_suffix(".crt").read_text())
    return path


def tls_server(certificate: Path, address: str) -> Outside:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def handler(sock: socket.socket) -> None:
        with context.wrap_socket(sock, server_side=True) as secure:
            while data := secure.recv(65536):
                secure.sendall(data)

    return Outside(handler, address)


def client_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    return context


# --- Names, addresses, rules: by value ---


@pytest.mark.parametrize("text, host", [
    ("example.org", "example.org"), ("EXAMPLE.org.", "example.org"),
    ("xn--mnchen-3ya.de", "xn--mnchen-3ya.de"),
    ("a_b.example.org", "a_b.example.org"), ("localhost", "localhost"),
    ("1password.com", "1password.com"),
    ("0x7f.example.org", "0x7f.example.org"), ("10.0.0.1", "10.0.0.1"), ("::1", "::1"),
    ("2001:DB8:0::1", "2001:db8::1"),
    ("::ffff:10.0.0.1", "10.0.0.1"), ("a" * 63 + ".org", "a" * 63 + ".org"),
])
def test_a_host_has_one_form(text: str, host: str) -> None:
    assert proxy.normal_host(text) == host


@pytest.mark.parametrize("text", [
    "", ".", "..", "example..org", "example.org..", ".example.org", "-a.org", "a-.org", "a b.org",
    "a\0.org", "a\n.org",
    "münchen.de", "\u212aernel.org", "a/b", "a@b", "a:b", "*.org", "a" * 64 + ".org",
    "a." * 127 + "org",
    "127.1", "0x7f.1", "0x7f000001", "2130706433", "017700000001", "127.0.0.01", "0177.0.0.1",
    "1.2.3", "1.2.3.4.5",
    "256.1.1.1", "example.0x7f", "example.1", "1.2.3.0x", "127.0.0.1%lo", "fe80::1%eth0", "[::1]",
    "::g",
    "\uff11.\uff12.\uff13.\uff14",
])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError):
        proxy.normal_host(text)


@pytest.mark.parametrize("address", [
    "0.0.0.0", "0.1.2.3", "10.1.2.3", "100.64.0.1", "100.127.255.255", "127.0.0.1",
    "127.255.255.255",
    "169.254.169.254",
    "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.168.1.1", "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "64:ff9b:1::1", "fe80::1", "febf::1", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1",
    "100::1", "2001:db8::1",
    "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2002:7f00:1::", "2002:808:808::1",
    "3fff::1", "5f00::1",
])
def test_addresses_off_the_public_internet(address: str) -> None:
    assert proxy.is_private(address)


@pytest.mark.parametrize("address", [
    "1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.15.0.1", "172.32.0.1", "192.0.1.1",
    "198.17.0.1",
    "198.20.0.1", "223.255.255.255", "11.0.0.1", "2606:4700::1111", "2a00:1450:4001::1",
    "64:ff9b::808:808",
    "::ffff:8.8.8.8", "2001:4860:4860::8888", "3ffe::1",
])
def test_addresses_of_the_public_internet(address: str) -> None:
    assert not proxy.is_private(address)


@pytest.mark.parametrize("rule, host, port, matches", [
    ("example.org", "example.org", 443, True), ("example.org", "example.org", 80, True),
    ("example.org", "example.org", 22, False), ("example.org", "www.example.org", 443, False),
    ("Example.ORG.", "example.org", 443, True), ("example.org:22", "example.org", 22, True),
    ("example.org:22", "example.org", 443, False), ("*.example.org", "a.b.example.org", 443, True),
    ("*.example.org", "example.org", 443, False), ("*.example.org", "notexample.org", 443, False),
    ("*.example.org:8080", "a.example.org", 8080, True),
    ("*.example.org:8080", "a.example.org", 80, False),
    ("10.0.0.1", "10.0.0.1", 80, True), ("10.0.0.1:5432", "10.0.0.1", 5432, True),
    ("[::1]:8080", "::1", 8080, True),
    ("::1", "::1", 443, True), ("2001:DB8::0:1", "2001:db8::1", 443, True),
    ("[2001:db8::1]", "2001:db8::1", 80, True),
    ("::ffff:10.0.0.1", "10.0.0.1", 443, True),
])
def test_what_a_rule_matches(rule: str, host: str, port: int, matches: bool) -> None:
    assert proxy.Rule(rule).matches(host, port) is matches


@pytest.mark.parametrize("rules", [
    "", "[]", "{", '{"allow": "example.org"}', '{"allow": [1]}', '{"alow": []}', '{"allow": ["*"]}',
    '{"allow": ["*."]}',
    '{"allow": ["a.*.org"]}', '{"allow": ["*.1.2.3.4"]}', '{"allow": ["a:0"]}',
    '{"allow": ["a:65536"]}',
    '{"allow": ["a:"]}', '{"allow": ["a:http"]}', '{"allow": ["127.1"]}', '{"allow": ["[::1"]}',
    '{"allow": ["[::1]x"]}',
    '{"allow": ["[1.2.3.4]:80"]}', '{"allow": ["*.::1"]}', '{"allow": ["http://a"]}',
    '{"allow": [""]}',
    '{"deny": ["a b"]}', '{"allow": ["10.0.0.0/8"]}',
])
def test_wrong_rules(rules: str) -> None:
    with pytest.raises(ValueError):
        proxy.Rules(rules)


# What rules may be made of: names that end in digits, what some C library reads as an address,
# letters that only lower() makes ASCII, and lengths around the limits.
LABELS = ("a", "example", "EXAMPLE", "3com", "123", "0", "0x7f", "0X7F", "0x", "0xg", "x_y", "_a",
          "-a", "a-", "a--b", "\u212aelvin", "\xfc", "\u0663", "*", "", " ", "a b", "a/b", "127",
          "255", "256", "01", "x" * 62, "x" * 63, "x" * 64)
ADDRESSES = ("1.2.3.4", "01.2.3.4", "127.1", "::", "::1", "::1.", "2001:DB8::0:1",
             "::ffff:10.0.0.1", "::FFFF:a00:1", "::7f00:1", "::1.2.3.4", "64:ff9b::808:808",
             "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8:9", "fe80::1%eth0", "a::b", ":::", "12345::",
             "::g")
PORTS = (*[""] * 4, ":1", ":80", ":443", ":0443", ":65535", ":65536", ":000443", ":0", ":", ":http",
         ":\u0663", ":+1", ":-1", ": 1", ":1_0", ":80\n", ":1:2")
FRAMES = (*["{}"] * 4, "*.{}", "[{}]", "*.[{}]", "[*.{}]", "[{}", "{}]", "[[{}]]", "{}.", "{}..",
          ".{}", " {}", "{}\n", "http://{}", "{}/", "[{}].", "[]{}")


def some_rule(chance: random.Random) -> str:
    host = ".".join(chance.choices(LABELS, k=chance.choice((1, 1, 2, 2, 3, 5))))
    if chance.random() < 0.3:
        host = chance.choice(ADDRESSES)
    elif chance.random() < 0.1:  # around the 253 characters of a name
        host = ".".join([*["x" * 49] * 5, "y" * chance.randrange(1, 8)])
    text = chance.choice(FRAMES).format(host) + chance.choice(PORTS)
    if chance.random() < 0.2:
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice("*.:[]-a0 \0\t%/") + text[at + chance.randrange(2) :]
    return text


def as_proxy_reads(text: str) -> str:
    """A rule in its one form, or '' for none."""
    try:
        rule = proxy.Rule(text)
    except ValueError:
        return ""
    host = f"[{rule.host}]" if ":" in rule.host else rule.host
    return ("*." if rule.below else "") + host + (f":{rule.port}" if rule.port else "")


def as_sandbox_reads(text: str) -> str:
    try:
        return sandbox.a_rule(text)
    except ValueError:
        return ""


def test_a_rule_is_the_same_to_the_command_line_and_the_proxy() -> None:
    """What one takes the other takes, and means the same by; a rule's one form stays as it is."""
    chance = random.Random(20261122)
    texts = {some_rule(chance) for _ in range(30_000)} | {*LABELS, *ADDRESSES}
    different = {text: (as_sandbox_reads(text), as_proxy_reads(text)) for text in texts
                 if as_sandbox_reads(text) != as_proxy_reads(text)}
    assert not different
    rules = set(filter(None, map(as_proxy_reads, texts)))
    assert len(rules) > 300 and len(texts) > 10_000
    for rule in rules:
        assert as_sandbox_reads(rule) == as_proxy_reads(rule) == rule


# --- Decisions ---


def decide(net: Proxy, where: str, allow: tuple[str, ...] = (),
           deny: tuple[str, ...] = ()) -> dict[str, Any]:
    net.allow(*allow, deny=deny)
    done = net.command("check", where)
    line: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if line["verdict"] == "allow" else 1)
    return line


def test_a_decision_says_what_decided(net: Proxy) -> None:
    line = decide(net, "127.0.0.9:8080", ("a.org", "127.0.0.9:8080"))
    assert line.pop("time")[10] == "T"
    assert line == {"session": "demo", "host": "127.0.0.9", "port": 8080, "verdict": "allow",
                    "rule": "127.0.0.9:8080"}
    line = decide(net, "x.a.org", ("*.a.org",), ("x.a.org",))
    assert (line["verdict"], line["rule"], line["reason"], line["port"]) == (
        "deny", "x.a.org", "a rule denies it", 443)


@pytest.mark.parametrize("where, allow, deny, kind, address", [
    ("example.org", (), (), "unlisted", None),
    ("example.org", ("example.org",), ("*.org",), "denied", None),
    ("0x7f.1", ("127.0.0.1",), (), "host", None),
    ("127.0.0.9", ("127.0.0.9",), (), None, None),
    ("localhost", ("localhost",), (), "address-private", ("127.0.0.1", "::1")),
    ("localhost", ("localhost",), ("127.0.0.1", "::1"), "address-denied", ("127.0.0.1", "::1")),
])
def test_a_refusal_has_a_kind_for_programs(net: Proxy, where: str, allow: tuple[str, ...],
                                           deny: tuple[str, ...], kind: str | None,
                                           address: tuple[str, ...] | None) -> None:
    line = decide(net, where, allow, deny)
    assert line.get("kind") == kind
    assert line.get("address") in (address or (None,))


def test_rules_that_cannot_be_used_are_a_kind(net: Proxy) -> None:
    (net.directory / "rules.json").write_text("{")
    assert json.loads(net.command("check", "a.org").stdout)["kind"] == "rules"


@pytest.mark.parametrize("where, allow, deny, verdict, reason", [
    ("example.org", (), (), "deny", "no rule allows it"),
    ("127.0.0.1", ("localhost",), (), "deny", "no rule allows it"),
    ("localhost", ("localhost",), (), "deny", "which is no public address"),
    ("localhost", ("localhost", "127.0.0.1", "::1"), (), "allow", ""),
    ("localhost:81", ("localhost:81", "127.0.0.1", "::1"), (), "deny",
     "which is no public address"),
    ("localhost", ("localhost", "127.0.0.1", "::1"), ("127.0.0.1", "::1"), "deny", "where it is"),
    ("nowhere.invalid", ("nowhere.invalid",), (), "allow", ""),
    ("169.254.169.254:80", ("a.org",), (), "deny", "no rule allows it"),
    ("[::ffff:127.0.0.1]:80", ("127.0.0.1",), (), "allow", ""),
    ("0x7f.1", ("127.0.0.1",), (), "deny", "not a legal host name or address"),
    ("2130706433", ("127.0.0.1",), (), "deny", "not a legal host name or address"),
    ("a b", ("127.0.0.1",), (), "deny", "not a legal host name or address"),
])
def test_decisions(net: Proxy, where: str, allow: tuple[str, ...], deny: tuple[str, ...],
                   verdict: str,
                   reason: str) -> None:
    line = decide(net, where, allow, deny)
    assert line["verdict"] == verdict
    assert reason in line.get("reason", "")


def decided(net: Proxy, monkeypatch: pytest.MonkeyPatch, found: list[str], *allow: str) -> Any:
    net.allow(*allow)
    monkeypatch.setattr(proxy, "DIRECTORY", str(net.directory))
    return proxy.decide("Mixed.example.org.", 443, lambda host, port: found)


def test_only_checked_addresses_are_connected_to(net: Proxy,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["10.0.0.1", "1.1.1.1", "fd00:ec2::254", "2606:4700::1111", "127.0.0.1"]
    decision = decided(net, monkeypatch, found, "mixed.example.org", "10.0.0.1")
    assert decision.addresses == ["10.0.0.1", "1.1.1.1", "2606:4700::1111"]
    decision = decided(net, monkeypatch, ["10.0.0.1"], "mixed.example.org")
    assert (decision.addresses, decision.missing) == ([], "10.0.0.1")
    assert "10.0.0.1, which is no public address" in decision.reason


def test_a_lookup_has_a_deadline(net: Proxy, tmp_path: Path) -> None:
    resolv = tmp_path / "resolv.conf"
    server = f"127.77.{random.randrange(256)}.{random.randrange(1, 255)}"  # of this run only
    resolv.write_text(f"nameserver {server}\noptions timeout:30 attempts:5\n")
    script = f'mount --bind {resolv} /etc/resolv.conf; exec "$@"'
    net.allow("slow.example.org")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((server, 53))
        done = net.command("check", "slow.example.org",
                           before=("unshare", "-m", "sh", "-c", script, "-"))
        assert silent.recv(512)
    assert json.loads(done.stdout)["verdict"] == "allow"


def test_of_many_addresses_only_some_are_tried(net: Proxy, tmp_path: Path) -> None:
    """Each takes its time when nobody answers there."""
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"127.0.7.{number} many.example\n" for number in range(1, 100)))
    script = f'mount --bind {hosts} /etc/hosts; exec "$@"'
    program = f"""
import runpy
print(len(runpy.run_path({str(PROXY)!r})["resolve"]("many.example", 443)))
"""
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, "-", sys.executable, "-c", program],
                          capture_output=True, text=True, timeout=60)
    assert done.stdout == "32\n", done.stderr


def test_wrong_rules_refuse_everything(net: Proxy) -> None:
    net.allow("127.0.0.1")
    (net.directory / "rules.json").write_text('{"allow": ["127.0.0.1"')
    done = net.command("check", "127.0.0.1")
    assert done.returncode == 1
    assert "the rules cannot be used" in json.loads(done.stdout)["reason"]
    net.serve({"allow": ["127.0.0.1"]})
    net.gate()
    assert b" 403 " in net.send(b"GET http://127.0.0.1/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert "everything is refused" in net.errors.read_text()


def test_rules_of_the_start_are_only_for_the_start(net: Proxy) -> None:
    net.serve({"allow": ["10.0.0.1"]}).poll()
    net.gate()
    assert json.loads((net.directory / "rules.json").read_text()) == {"allow": ["10.0.0.1"]}
    net.allow("10.0.0.2")
    net.processes[-1].kill()
    net.processes[-1].wait()
    net.serve({"allow": ["10.0.0.1"]})
    wait_for(lambda: connects(net))
    assert json.loads((net.directory / "rules.json").read_text())["allow"] == ["10.0.0.2"]


def test_wrong_new_rules_leave_the_old(net: Proxy) -> None:
    net.allow("10.0.0.1")
    done = net.command("set", rules={"allow": ["10.0.0.0/8"]})
    assert done.returncode == 1
    assert "stay as they are" in done.stderr
    assert json.loads((net.directory / "rules.json").read_text())["allow"] == ["10.0.0.1"]
    assert sorted(path.name for path in net.directory.glob("rules*")) == ["rules.json"]


def test_usage(net: Proxy) -> None:
    for words in ((), ("check",), ("serve", "x"), ("bogus",), ("check", "a:b")):
        assert net.command(*words).returncode == 2


# --- Requests ---


def test_a_request_goes_on_in_origin_form(running: Proxy) -> None:
    with Recorder(answer=b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nhello") as outside:
        running.allow(outside.place)
        answer = running.send(
            (f"GET http://{outside.place}/a?b=c HTTP/1.1\r\nHost: {outside.place}\r\n"
             "Accept:  */* \r\n"
             "Connection: keep-alive, X-Mine, Upgrade\r\nX-Mine: 1\r\nTE: trailers\r\n"
             "Keep-Alive: 5\r\n"
             "Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\nTrailer: X\r\n"
             "Upgrade: h2c\r\nCookie: a=\xe4\r\n\r\n").encode("latin-1"))
        assert answer == b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nhello"
        assert outside.request() == (f"GET /a?b=c HTTP/1.1\r\nHost: {outside.place}\r\n"
                                     "Accept: */*\r\n"
                                     "Cookie: a=\xe4\r\nConnection: close\r\n\r\n").encode(
                                         "latin-1")


@pytest.mark.parametrize("target, path", [
    ("", "/"), ("/", "/"), ("?q", "/?q"), ("/a//b/../c?d=http://x/", "/a//b/../c?d=http://x/"),
])
def test_the_path_stays_as_it_is(running: Proxy, target: str, path: str) -> None:
    with Recorder() as outside:
        running.allow(outside.place)
        running.send(
            f"GET HTTP://{outside.place}{target} HTTP/1.1\r\n"
            f"Host: {outside.place}\r\n\r\n".encode())
        assert outside.request().startswith(f"GET {path} HTTP/1.1\r\n".encode())


BODIES = [
    (b"Content-Length: 5\r\n\r\n", b"hello", b"GET http://other/ HTTP/1.1\r\nHost: other\r\n\r\n"),
    (b"Content-Length: 0\r\n\r\n", b"", b"extra"),
    (b"\r\n", b"", b"GET / HTTP/1.1\r\n\r\n"),
    (b"Transfer-Encoding: chunked\r\n\r\n",
     b"5\r\nhello\r\nA;x=\"y\"\r\n0123456789\r\n000\r\nX-T: 1\r\n\r\n", b"0\r\n\r\n"),
    (b"Transfer-Encoding: Chunked\r\n\r\n", b"0\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"),
    # More than is read along with the head.
    (b"Content-Length: 40000\r\n\r\n", b"x" * 39_990 + b"0123456789", b"POST / HTTP/1.1\r\n\r\n"),
    (b"Transfer-Encoding: chunked\r\n\r\n", b"9c40\r\n" + b"x" * 40_000 + b"\r\n0\r\n\r\n",
     b"0\r\n\r\n"),
]


@pytest.mark.parametrize("step", [3, 100_000])
@pytest.mark.parametrize("head, body, after", BODIES)
def test_a_body_goes_on_exactly_and_nothing_after_it(running: Proxy, head: bytes, body: bytes,
                                                     after: bytes,
                                                     step: int) -> None:
    with Recorder(mark=b"\r\n\r\n" + body) as outside:
        running.allow(outside.place)
        with running.connect() as sock:
            line = f"POST http://{outside.place}/ HTTP/1.1\r\nHost: {outside.place}\r\n"
            data = line.encode() + head + body + after
            with contextlib.suppress(ConnectionError):  # what is after it is not waited for long
                for at in range(0, len(data), step):
                    sock.sendall(data[at:at + step])
            assert read_all(sock) == outside.answer
        assert outside.request().partition(b"\r\n\r\n")[2] == body
    assert len(running.lines()) == 1


BAD_HEADS = [
    b"GET http://H/ HTTP/1.1\nHost: H\n\n",
    b"GET http://H/ HTTP/1.1\r\nHost: H\nX: y\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost: H\r\nX: a\rb\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost: H\r\nX: a\r\n folded\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost : H\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\n Host: H\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost: H\r\nno colon\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost: H\r\n: empty\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost: H\r\nX: a\0b\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost: H\r\nHost: H\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost: other\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost: H@other\r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\nHost: \r\n\r\n",
    b"GET http://H/ HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET H HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET https://H/ HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http://u@H/ HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http://u:p@H/ HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http://other\\@H/ HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http:///H HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http://H/#f HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http://H:x/ HTTP/1.1\r\nHost: H:x\r\n\r\n",
    b"GET http://::1/ HTTP/1.1\r\nHost: ::1\r\n\r\n",
    b"GET  http://H/ HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http://H/ HTTP/1.1 \r\nHost: H\r\n\r\n",
    b"GET\thttp://H/\tHTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http://H/a b HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http://H/\xe4 HTTP/1.1\r\nHost: H\r\n\r\n",
    b"GET http://H/ HTTP/2.0\r\nHost: H\r\n\r\n",
    b"GET http://H/ HTTP/1.2\r\nHost: H\r\n\r\n",
    b"GET http://H/\r\n\r\n",
    b"\r\nGET http://H/ HTTP/1.1\r\nHost: H\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nContent-Length: 1, 1\r\n\r\nx",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nContent-Length: +1\r\n\r\nx",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nContent-Length: -1\r\n\r\nx",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nContent-Length: 0x1\r\n\r\nx",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nContent-Length:\r\n\r\nx",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nTransfer-Encoding: chunked\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST http://H/ HTTP/1.0\r\nHost: H\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST http://H/ HTTP/1.1\r\nHost: H\r\nX: " + b"a" * 65536 + b"\r\n\r\n",
    b"CONNECT localhost HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT H HTTP/1.1\r\nHost: other:443\r\n\r\n",
    b"CONNECT H/ HTTP/1.1\r\nHost: H\r\n\r\n",
    b"CONNECT http://H HTTP/1.1\r\nHost: H\r\n\r\n",
    b"CONNECT u@H HTTP/1.1\r\nHost: H\r\n\r\n",
    b"CONNECT H HTTP/1.1\r\nHost: H\r\nContent-Length: 3\r\n\r\nabc",
    b"CONNECT H HTTP/1.1\r\nHost: H\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"\x00\x01\x02\r\n\r\n",
]


def test_ambiguous_requests_are_refused_and_never_connect(running: Proxy) -> None:
    with Outside(echo) as outside:
        running.allow(outside.place, "localhost", "127.0.0.1")
        for head in BAD_HEADS:
            answer = running.send(re.sub(rb"\bH\b", outside.place.encode(), head), end=True)
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n"), head
            assert b"\r\nConnection: close\r\n" in answer
        assert outside.connections == 0
    assert running.lines() == []


@pytest.mark.parametrize("connection", ["Content-Length", "close, transfer-encoding", "HOST"])
def test_connection_cannot_take_away_what_frames_a_request(running: Proxy, connection: str) -> None:
    with Sink() as outside:
        running.allow(outside.place)
        answer = running.send(f"POST http://{outside.place}/ HTTP/1.1\r\nHost: {outside.place}\r\n"
                              f"Connection: {connection}\r\nContent-Length: 4\r\n\r\nGET ".encode())
        assert answer.startswith(b"HTTP/1.1 400 ")
        wait_for(lambda: outside.seen == [b""])


@pytest.mark.parametrize("body", [
    b"5 \r\nhello\r\n0\r\n\r\n", b"5\nhello\r\n0\r\n\r\n", b"5\r\nhello0\r\n\r\n",
    b"5\r\nhelloX\r\n0\r\n\r\n",
    b"x\r\n\r\n",
    b"-5\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b"\r\n0\r\n\r\n", b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    b"fffffffffffffffff\r\n",
    b"0\r\nnot a trailer\r\n\r\n", b"0\r\nX: y\n\r\n\r\n", b"5;" + b"a" * 5000 + b"\r\n",
    b"5\r\nhello\n0\r\n\r\n",
])
def test_wrong_chunks_are_refused(running: Proxy, body: bytes) -> None:
    with Outside(silent) as outside:
        running.allow(outside.place)
        answer = running.send(f"POST http://{outside.place}/ HTTP/1.1\r\nHost: {outside.place}\r\n"
                              "Transfer-Encoding: chunked\r\n\r\n".encode() + body)
        assert answer.startswith(b"HTTP/1.1 400 "), answer


def test_a_body_that_ends_too_early_is_refused(running: Proxy) -> None:
    with Outside(silent) as outside:
        running.allow(outside.place)
        with running.connect() as sock:
            sock.sendall(f"POST http://{outside.place}/ HTTP/1.1\r\nHost: {outside.place}\r\n"
                         "Content-Length: 10\r\n\r\nhello".encode())
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock).startswith(b"HTTP/1.1 400 ")


# --- Refusals and failures ---


@pytest.mark.parametrize("line, place, reason, command", [
    ("GET http://example.org/ HTTP/1.1", "example.org",
     "example.org port 80 is refused: no rule allows it.",
     "sandbox net allow demo example.org\n"),
    ("CONNECT example.org:443 HTTP/1.1", "example.org:443",
     "example.org port 443 is refused: no rule allows it.",
     "sandbox net allow demo example.org\n"),
    ("CONNECT example.org:22 HTTP/1.1", "example.org:22",
     "example.org port 22 is refused: no rule allows it.",
     "sandbox net allow demo example.org:22\n"),
    ("CONNECT [::1]:22 HTTP/1.1", "[::1]:22", "::1 port 22 is refused: no rule allows it.",
     "sandbox net allow demo [::1]:22\n"),
])
def test_a_refusal_says_how_to_allow_it(running: Proxy, line: str, place: str, reason: str,
                                        command: str) -> None:
    answer = running.send(f"{line}\r\nHost: {place}\r\n\r\n".encode()).decode()
    head, _, text = answer.partition("\r\n\r\n")
    assert head.startswith(
        f"HTTP/1.1 403 Forbidden: {' '.join(text.split())}\r\nContent-Type: text/plain\r\n")
    assert text == f"sandbox: {reason}\nTo allow it: {command}"


def test_a_refused_address_is_what_to_allow(running: Proxy) -> None:
    running.allow("localhost:81", deny=("[::1]:81",))
    answer = running.send(b"CONNECT localhost:81 HTTP/1.1\r\n\r\n").decode()
    assert answer.startswith("HTTP/1.1 403 ")
    assert re.search(r"localhost port 81 is refused: (a rule denies ::1|it is at 127\.0\.0\.1), ",
                     answer)
    assert re.search(r"To allow it: sandbox net allow demo (\[::1\]|127\.0\.0\.1):81\n$", answer)


def test_an_illegal_host_is_refused_and_never_looked_up(running: Proxy) -> None:
    running.allow("127.0.0.1", "10.0.0.1")
    for host in ("0x7f.1", "127.1", "2130706433", "017700000001", "127.0.0.1%25lo", "a..b",
                 "127.0.0.01"):
        request = f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n"
        assert b" 403 " in running.send(request.encode())[:16]
    assert {line["reason"] for line in running.lines()} == {"not a legal host name or address"}


def test_an_allowed_host_that_cannot_be_reached_is_502(running: Proxy) -> None:
    port = free_port()
    running.allow(f"127.0.0.1:{port}", "nowhere.invalid")
    for place, text in ((f"127.0.0.1:{port}", b"Connection refused"),
                        ("nowhere.invalid:443", b"its name has no address")):
        answer = running.send(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert text in answer
    assert [line["verdict"] for line in running.lines()] == ["allow", "allow"]


def test_all_addresses_are_tried(running: Proxy) -> None:
    """localhost is ::1 and 127.0.0.1, and only one of them listens."""
    with Recorder(address="127.0.0.1") as outside:
        running.allow(f"localhost:{outside.port}", f"127.0.0.1:{outside.port}",
                      f"[::1]:{outside.port}")
        place = f"localhost:{outside.port}"
        request = f"GET http://{place}/ HTTP/1.1\r\nHost: {place}\r\n\r\n"
        assert running.send(request.encode()) == outside.answer


def test_every_line_of_the_log_is_one_json_object(running: Proxy) -> None:
    running.allow("*.example.org")
    for host in ("a" * 3000, "\x7f".join("ab"), 'a"b', "a'b\\"):
        running.send(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n".encode())
    lines = running.lines()
    assert [line["host"] for line in lines] == ["a" * 253, 'a"b']
    assert all(set(line) == {"time", "session", "host", "port", "verdict", "rule", "reason", "kind"}
               for line in lines)


# --- What is kept ---


def ask(net: Proxy, *hosts: str) -> None:
    for host in hosts:
        net.send(f"CONNECT {host}:443 HTTP/1.1\r\n\r\n".encode())


def counts(entries: list[dict[str, Any]]) -> list[str]:
    return [f"{entry['host']} {entry['verdict']} {entry['count']}" for entry in entries]


def test_each_host_is_kept_with_its_first_and_last_time(running: Proxy) -> None:
    running.allow("127.0.0.1")
    ask(running, "127.0.0.1", "a.example", "A.example.", "b.example", "a.example")
    entries = running.kept()
    assert counts(entries) == ["127.0.0.1 allow 1", "a.example deny 3", "b.example deny 1"]
    lines = running.lines()
    assert (entries[1]["first"], entries[1]["time"]) == (lines[1]["time"], lines[4]["time"])
    assert {"port": 443, "rule": "", "reason": "no rule allows it"}.items() <= entries[1].items()
    running.processes[-1].kill()
    running.processes[-1].wait()
    with open(running.directory / "kept", "a") as file:
        file.write('{"host": "half')  # as when the disk was full
    running.serve()
    wait_for(lambda: connects(running))
    running.allow("127.0.0.1", "b.example")
    ask(running, "a.example", "b.example", "c.example")
    now = running.kept()
    assert counts(now) == ["127.0.0.1 allow 1", "a.example deny 4", "b.example deny 1",
                           "b.example allow 1", "c.example deny 1"]
    assert [entry["first"] for entry in now[:3]] == [entry["first"] for entry in entries]


def test_noise_hides_nothing_that_was_decided_before(net: Proxy) -> None:
    def noted(verdict: str, count: int) -> None:
        for number in range(count):
            reason = "x" * 999 if verdict == "deny" else ""
            kept.note(proxy.Decision(f"{verdict}{number}.example", 443, reason))

    kept = proxy.Kept()
    kept.open(str(net.directory / "kept"))
    noted("allow", 5)
    noted("deny", 3000)
    noted("allow", 6)
    entries = net.kept()
    assert [entry["host"] for entry in entries if entry["verdict"] == "allow"] == [
        f"allow{number}.example" for number in range(6)]
    denied = [entry for entry in entries if entry["verdict"] == "deny"]
    assert len(denied) == proxy.KEPT_HOSTS + 1 and denied[0]["host"] == "deny0.example"
    assert (denied[-1]["host"], denied[-1]["count"]) == ("*", 3000 - proxy.KEPT_HOSTS)
    assert (net.directory / "kept").stat().st_size == len(entries) * proxy.KEPT_BYTES


def test_the_longest_line_has_room(net: Proxy) -> None:
    kept = proxy.Kept()
    kept.open(str(net.directory / "kept"))
    address = "2001:db8:1111:2222:3333:4444:5555:6666"
    kept.note(proxy.Decision('"' * 300, 65535, '"' * 3000, "*." + "a" * 253 + ":65535",
                             kind="address-private", address=address))
    kept.note(proxy.Decision("a.example", 443))
    assert [entry["host"] for entry in net.kept()] == ['"' * 253, "a.example"]


def test_what_is_kept_is_for_root_alone(running: Proxy) -> None:
    assert (running.directory / "kept").stat().st_mode & 0o777 == 0o600


# --- Tunnels ---


def test_tls_with_the_name_of_the_tunnel(running: Proxy, certificate: Path) -> None:
    with tls_server(certificate, "127.0.0.1") as outside:
        running.allow(f"localhost:{outside.port}", f"127.0.0.1:{outside.port}")
        with (running.tunnel("LocalHost", outside.port) as sock,
              client_context(certificate).wrap_socket(sock, server_hostname="localhost") as secure):
            secure.sendall(b"hello")
            assert read_exactly(secure, 5) == b"hello"


def test_tls_to_an_address_names_no_host(running: Proxy, certificate: Path) -> None:
    with tls_server(certificate, OUTSIDE) as outside:
        running.allow(outside.place)
        context = client_context(certificate)
        with running.tunnel(OUTSIDE, outside.port) as sock, context.wrap_socket(sock) as secure:
            secure.sendall(b"hello")
            assert read_exactly(secure, 5) == b"hello"
        with (running.tunnel(OUTSIDE, outside.port) as sock,
              pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name")):
            context.wrap_socket(sock, server_hostname="localhost")


@pytest.mark.parametrize("name", ["other.example.org", "localhost.example.org", None])
def test_tls_with_another_name_is_refused(running: Proxy, certificate: Path,
                                          name: str | None) -> None:
    with Sink("127.0.0.1") as outside:
        running.allow(f"localhost:{outside.port}", f"127.0.0.1:{outside.port}", "other.example.org")
        with (running.tunnel("localhost", outside.port) as sock,
              pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name")):
            client_context(certificate).wrap_socket(sock, server_hostname=name)
        wait_for(lambda: outside.seen == [b""])
        line = running.lines()[-1]
        assert (line["verdict"], line["host"], line["rule"]) == ("deny", "localhost", "")
        named = name or "no host"
        assert line["reason"] == f"the TLS handshake names {named}, the tunnel localhost"
        assert line["kind"] == "tls"


def client_hello(name: str, record_bytes: int = 16384) -> bytes:
    """A real ClientHello, cut into records of this size."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    message = outgoing.read()[5:]
    pieces = [message[at:at + record_bytes] for at in range(0, len(message), record_bytes)]
    return b"".join(b"\x16\x03\x01" + struct.pack(">H", len(piece)) + piece for piece in pieces)


@pytest.mark.parametrize("record_bytes", [1, 3, 50, 16384])
@pytest.mark.parametrize("segment_bytes", [1, 7, 100000])
def test_a_client_hello_in_pieces(running: Proxy, record_bytes: int, segment_bytes: int) -> None:
    with Outside(echo, "127.0.0.1") as outside:
        running.allow(f"localhost:{outside.port}", f"127.0.0.1:{outside.port}")
        for name, arrives in (("localhost", True), ("evil.example.org", False)):
            hello = client_hello(name, record_bytes) + b"\x17\x03\x03\0\x04more"
            with running.tunnel("localhost", outside.port) as sock:
                with contextlib.suppress(ConnectionError):
                    for at in range(0, len(hello), segment_bytes):
                        sock.sendall(hello[at:at + segment_bytes])
                answer = read_exactly(sock, len(hello) if arrives else 7)
                assert answer == (hello if arrives else b"\x15\x03\x03\x00\x02\x02\x70")


def extensions(*pairs: tuple[int, bytes]) -> bytes:
    return b"".join(struct.pack(">HH", kind, len(value)) + value for kind, value in pairs)


def sni(*names: bytes, kind: int = 0) -> tuple[int, bytes]:
    entries = b"".join(struct.pack(">BH", kind, len(name)) + name for name in names)
    return 0, struct.pack(">H", len(entries)) + entries


def hello_with(tail: bytes, handshake: int = 1, content: int = 22) -> bytes:
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0" + tail
    message = bytes([handshake]) + len(body).to_bytes(3, "big") + body
    return bytes([content]) + b"\x03\x01" + struct.pack(">H", len(message)) + message


def with_extensions(*pairs: tuple[int, bytes]) -> bytes:
    data = extensions(*pairs)
    return hello_with(struct.pack(">H", len(data)) + data)


LOCALHOST = sni(b"localhost")
WRONG_HELLOS = {
    "no extensions": hello_with(b""), "none of them a name": with_extensions((16, b"\0\x03\x02h2")),
    "two names": with_extensions(sni(b"localhost", b"evil.org")),
    "two extensions": with_extensions(LOCALHOST, LOCALHOST),
    "second extension": with_extensions(LOCALHOST, sni(b"evil.org")),
    "empty name": with_extensions(sni(b"")),
    "other type": with_extensions(sni(b"localhost", kind=1)),
    "empty list": with_extensions((0, b"\0\0")),
    "NUL": with_extensions(sni(b"localhost\0.org")), "too short": hello_with(b"\x00\x20\0\0"),
    "not ASCII": with_extensions(sni(b"\xe4.org")),
    "not a ClientHello": hello_with(b"", handshake=2),
    "an alert before it": b"\x15\x03\x01\0\x02\x01\x5a" + with_extensions(LOCALHOST),
    "SSLv2's": b"\x80\x1c\x01\x03\x03\0\x03\0\0\0\x10\0\0\x2f" + bytes(16),
    "any version, another name": b"\x16\0\0" + with_extensions(sni(b"evil.org"))[3:],
    "escapes": with_extensions(sni(b"\x1b]0;x\x07:1")),
    "empty record": b"\x16\x03\x01\0\0", "long record": b"\x16\x03\x01\xff\xff",
    "no hello at all": b"\x16\x03\x01\0\x04\x01\0\0\0",
    "another record between": b"\x16\x03\x01\0\x05"
    + with_extensions(LOCALHOST)[5:10] + b"\x17\x03\x03\0\x01x",
    "never ends": b"\x16\x03\x01\x40\0\x01\xff\xff\xff"
    + bytes(16380) + (b"\x16\x03\x01\x40\0" + bytes(16384)) * 2,
}


def test_wrong_client_hellos_are_refused(running: Proxy) -> None:
    with Outside(echo, "127.0.0.1") as outside:
        running.allow(f"localhost:{outside.port}", f"127.0.0.1:{outside.port}")
        for what, hello in WRONG_HELLOS.items():
            with running.tunnel("localhost", outside.port) as sock:
                sock.sendall(hello)
                assert read_all(sock) == b"\x15\x03\x03\x00\x02\x02\x70", what
        with running.tunnel("localhost", outside.port) as sock:
            good = with_extensions((43, b"\x02\x03\x04"), LOCALHOST)
            sock.sendall(good)
            assert read_exactly(sock, len(good)) == good
    denied = [line for line in running.lines() if line["verdict"] == "deny"]
    assert len(denied) == len(WRONG_HELLOS) and all(line["reason"].isprintable() for line in denied)


class Vhosts(Outside):
    """A TLS server that notes the name of every ClientHello and asks for one with another key."""

    def __init__(self, certificate: Path, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        self.names: list[str | None] = []
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate)
        self.context.set_ecdh_curve("secp384r1")
        self.context.maximum_version = most
        self.context.sni_callback = lambda _tls, name, _context: self.names.append(name)
        super().__init__(self.serve, "127.0.0.1")

    def serve(self, sock: socket.socket) -> None:
        with self.context.wrap_socket(sock, server_side=True) as secure:
            echo(secure)


CCS, SKIPPED = b"\x14\x03\x03\0\x01\x01", b"\x17\x03\x03\0\x03abc"


def in_records(data: bytes, record_bytes: int) -> bytes:
    """The last of some records, cut into smaller ones."""
    at = data.rindex(b"\x16\x03\x03")
    places = range(at + 5, len(data), record_bytes)
    return data[:at] + b"".join(record(22, data[place:place + record_bytes]) for place in places)


@pytest.mark.parametrize("change", [
    lambda data: data, lambda data: in_records(data, 7), lambda data: data.removeprefix(CCS),
    lambda data: SKIPPED + data, lambda data: CCS + SKIPPED + CCS + in_records(data, 1),
], ids=["as it is", "in pieces", "no change of cipher", "after early data", "all of that"])
def test_the_second_client_hello_names_the_host_too(running: Proxy, certificate: Path,
                                                    change: Callable[[bytes], bytes]) -> None:
    """Whose name a server takes that has asked for it (HelloRetryRequest)."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_context(certificate).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with Vhosts(certificate) as outside:
        running.allow(f"localhost:{outside.port}", f"127.0.0.1:{outside.port}", deny=("otherhost",))
        with running.tunnel("localhost", outside.port) as sock:
            with pytest.raises(ssl.SSLWantReadError):
                tls.do_handshake()
            sock.sendall(outgoing.read())
            incoming.write(sock.recv(65536))
            with pytest.raises(ssl.SSLWantReadError):
                tls.do_handshake()
            second = outgoing.read()
            assert second.count(b"localhost") == 1
            sock.sendall(change(second.replace(b"localhost", b"otherhost")))
            assert read_all(sock).endswith(b"\x15\x03\x03\x00\x02\x02\x70")
    assert "otherhost" not in outside.names
    reason = running.lines()[-1]["reason"]
    assert reason == "the TLS handshake names otherhost, the tunnel localhost"


def open_pipes(net: Proxy) -> int:
    folder = f"/proc/{net.processes[-1].pid}/fd"
    paths = [os.readlink(f"{folder}/{number}") for number in os.listdir(folder)]
    return sum(path.startswith("pipe:") for path in paths)


@pytest.mark.parametrize("version, hellos", [("TLSv1_2", 1), ("TLSv1_3", 2)])
def test_after_the_handshake_nothing_is_read(running: Proxy, certificate: Path, version: str,
                                             hellos: int) -> None:
    """Both ways it goes through pipes of the kernel's where it is long."""
    data, before = random.Random(5).randbytes(3_000_000), open_pipes(running)
    with Vhosts(certificate, ssl.TLSVersion[version]) as outside:
        running.allow(f"localhost:{outside.port}", f"127.0.0.1:{outside.port}")
        with (running.tunnel("localhost", outside.port) as sock,
              client_context(certificate).wrap_socket(sock, server_hostname="localhost") as secure):
            assert secure.version() == version.replace("_", ".")
            for at in range(0, len(data), 100_000):
                secure.sendall(data[at:at + 100_000])
                assert read_exactly(secure, 100_000) == data[at:at + 100_000]
            assert open_pipes(running) == before + 4
    assert outside.names == ["localhost"] * hellos


def record(kind: int, data: bytes) -> bytes:
    return bytes([kind]) + b"\x03\x03" + struct.pack(">H", len(data)) + data


def message(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + len(body).to_bytes(3, "big") + body


def server_hello(random: bytes, *pairs: tuple[int, bytes]) -> bytes:
    data = extensions(*pairs)
    body = b"\x03\x03" + random + b"\0" + b"\x13\x01\0" + struct.pack(">H", len(data)) + data
    return record(22, message(2, body))


TLS_1_3 = (43, b"\x03\x04")
GOOD, EVIL = with_extensions(LOCALHOST), with_extensions(sni(b"evil.org"))
OLD, NEW = server_hello(bytes(32)), server_hello(bytes(32), TLS_1_3)
RETRY = server_hello(proxy.HELLO_RETRY_RANDOM, TLS_1_3)
KEYS, ALERT = record(22, message(16, b"key")), record(21, b"\x01\0")
ANYTHING = b"\x16\x03\x03\0\x03\x01evil\xff"


@pytest.mark.parametrize("first, answer, second, goes", [
    (GOOD, b"", GOOD, True), (GOOD, b"", EVIL, False), (GOOD, b"", CCS + EVIL, False),
    (GOOD, b"", ALERT + EVIL, False), (GOOD, RETRY, CCS + GOOD, True),
    (GOOD, RETRY, CCS + EVIL, False), (GOOD, RETRY + CCS, SKIPPED + EVIL, False),
    (GOOD, RETRY + CCS + NEW, CCS + SKIPPED + ANYTHING, True), (GOOD, NEW, ANYTHING, True),
    (GOOD, OLD, EVIL, False), (GOOD, OLD, KEYS + EVIL, False),
    (GOOD, OLD, KEYS + CCS + ANYTHING, True),
    (GOOD, ALERT + OLD, CCS + ANYTHING, True),
    (GOOD, RETRY + CCS + OLD, KEYS + CCS + ANYTHING, True),
    (GOOD, b"HTTP/1.1 400 \r\n", CCS + EVIL, False), (GOOD, GOOD + NEW, ANYTHING, True),
    (GOOD, OLD[:-2] + b"\0\x2b", CCS + EVIL, False), (GOOD, b"", b"GET / HTTP/1.1\r\n", False),
    (GOOD, b"", record(22, b""), False), (GOOD, b"", KEYS[:-1] + ALERT, False),
    (GOOD, RETRY, EVIL[:9] + CCS + EVIL[9:], False), (GOOD + CCS + EVIL, b"", b"", False),
    (GOOD, b"", record(22, GOOD[5:9]) + ALERT + record(22, GOOD[9:]), False),
    (GOOD, OLD, record(22, KEYS[5:] + EVIL[5:]), False),
    (GOOD, b"", record(22, b"\x0b\xff\xff\xff"), False),
])
@pytest.mark.parametrize("step", [1, 3, 100_000])
def test_every_client_hello_in_plaintext_is_checked(first: bytes, answer: bytes, second: bytes,
                                                    goes: bool, step: int) -> None:
    handshake = proxy.Handshake("localhost")

    def say(says: Callable[[bytes], bool], data: bytes) -> None:
        for at in range(0, len(data), step):
            if not says(data[at:at + step]):
                break

    def all_of_it() -> None:
        say(handshake.client_says, first)
        say(handshake.server_says, answer)
        say(handshake.client_says, second)

    if goes:
        all_of_it()
    else:
        with pytest.raises(ValueError, match=r"TLS|legal"):
            all_of_it()


def test_a_request_in_a_tunnel(running: Proxy) -> None:
    with Recorder() as outside:
        running.allow(outside.place)
        with running.tunnel(OUTSIDE, outside.port) as sock:
            sock.sendall(f"GET /a HTTP/1.1\r\nHost: {outside.place}\r\n\r\n"
                         "GET /b HTTP/1.1\r\nHost: other\r\n\r\n".encode())
            assert read_all(sock) == outside.answer
        expected = f"GET /a HTTP/1.1\r\nHost: {outside.place}\r\nConnection: close\r\n\r\n"
        assert outside.request() == expected.encode()


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\nHost: other\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.9\r\nHost: other\r\n\r\n",
    b"GET http://other/ HTTP/1.1\r\nHost: other\r\n\r\n",
    b"GET http://127.0.0.9/ HTTP/1.1\r\nHost: 127.0.0.9\r\n\r\n",
    b"\r\nGET / HTTP/1.1\r\nHost: other\r\n\r\n", b"\nGET / HTTP/1.1\r\nHost: other\r\n\r\n",
    b" GET / HTTP/1.1\r\nHost: other\r\n\r\n", b"GET\t/ HTTP/1.1\r\nHost: other\r\n\r\n",
    b"GET\x0b/ HTTP/1.1\r\n\r\n",
    b"GET\r/ HTTP/1.1\r\nHost: other\r\n\r\n", b"SSH-2.0-x / HTTP/1.1\r\nHost: other\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
    b"GET /\r\n\r\n",
    b"get / HTTP/1.1\r\n\r\n", b"G(T / HTTP/1.1\r\nHost: other\r\n\r\n",
    b"SSH-2.0-x / http/1.1\r\n\r\n",
    b"SSH-" + b"X" * 300 + b" / HTTP/1.1\r\nHost: other\r\n\r\n",
    b"X" * 40000 + b" / HTTP/1.1\r\nHost: other\r\n\r\n",
], ids=lambda data: repr(data[:40]))
@pytest.mark.parametrize("step", [1, 1000])
def test_no_other_host_slips_through_a_tunnel(running: Proxy, data: bytes, step: int) -> None:
    with Sink() as outside:
        running.allow(outside.place)
        with running.tunnel(OUTSIDE, outside.port) as sock:
            with contextlib.suppress(OSError):
                for at in range(0, len(data), step):
                    sock.sendall(data[at:at + step])
                sock.shutdown(socket.SHUT_WR)
            assert read_all(sock).startswith(b"HTTP/1.1 400 ")
        wait_for(lambda: outside.seen == [b""])


def banner(sock: socket.socket) -> None:
    sock.sendall(b"220 ready\r\n")
    echo(sock)


def test_a_server_that_speaks_first(running: Proxy) -> None:
    with Outside(banner) as outside:
        running.allow(outside.place)
        with running.tunnel(OUTSIDE, outside.port) as sock:
            assert read_exactly(sock, 11) == b"220 ready\r\n"
            sock.sendall(b"GET x y\r\n")
            assert read_exactly(sock, 9) == b"GET x y\r\n"


@pytest.mark.parametrize("data", [
    b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", b"\0\0\0\x08\x04\xd2\x16\x2f", b"*1\r\n$4\r\nPING\r\n",
    b"PING\r\n",
    b"\x13\x02ab", b"{\"json\":1}\n", b"\xff\xfb\x1f", b"\xff\xfd\x01\xff",
])
@pytest.mark.parametrize("step", [1, 1000])
def test_other_protocols_are_relayed_as_they_are(running: Proxy, data: bytes, step: int) -> None:
    with Outside(echo) as outside:
        running.allow(outside.place)
        with running.tunnel(OUTSIDE, outside.port) as sock:
            for at in range(0, len(data), step):
                sock.sendall(data[at:at + step])
            assert read_exactly(sock, len(data)) == data


def switching(sock: socket.socket) -> None:
    """Switches protocols, but says first whether anything came before it did."""
    head, _, early = read_until(sock, b"\r\n\r\n").partition(b"\r\n\r\n")
    early += sock.recv(100) if select.select([sock], [], [], 0.3)[0] else b""
    wanted = b"Connection: Upgrade" in head and b"Upgrade: websocket" in head and b"h2c" not in head
    if wanted and not early:
        sock.sendall(
            b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nfirst")
        echo(sock)
    else:
        sock.sendall(b"HTTP/1.1 426 No\r\n\r\n" + early)


@pytest.mark.parametrize("tunnelled", [False, True])
def test_a_websocket_upgrade(running: Proxy, tunnelled: bool) -> None:
    with Outside(switching) as outside:
        running.allow(outside.place)
        with running.tunnel(OUTSIDE, outside.port) if tunnelled else running.connect() as sock:
            target = "/" if tunnelled else f"http://{outside.place}/"
            sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {outside.place}\r\nUpgrade: WebSocket\r\n"
                         "Connection: keep-alive, upgrade\r\n\r\nearly".encode())
            assert read_until(sock, b"firstearly").startswith(b"HTTP/1.1 101 Switching\r\n")
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert read_exactly(sock, 18) == b"GET / HTTP/1.1\r\n\r\n"


def test_without_a_101_nothing_more_goes_up(running: Proxy) -> None:
    with Recorder(answer=b"HTTP/1.1 400 No\r\n\r\n") as outside:
        running.allow(outside.place)
        with running.connect() as sock:
            sock.sendall(
                f"GET http://{outside.place}/ HTTP/1.1\r\nHost: {outside.place}\r\n"
                "Upgrade: websocket\r\n"
                         "Connection: upgrade\r\n\r\nGET /second HTTP/1.1\r\n\r\n".encode())
            assert read_all(sock) == outside.answer
        assert b"second" not in outside.request()


# --- Relaying ---


def test_ten_megabytes_both_ways_at_once(running: Proxy) -> None:
    up = b"\0" + random.Random(1).randbytes(10_000_000)
    down = random.Random(2).randbytes(10_000_000)
    seen: list[str] = []

    def handler(sock: socket.socket) -> None:
        sender = threading.Thread(target=sock.sendall, args=(down,))
        sender.start()
        seen.append(hashlib.sha256(read_all(sock)).hexdigest())
        sender.join()

    with Outside(handler) as outside:
        running.allow(outside.place)
        with running.tunnel(OUTSIDE, outside.port) as sock:
            sender = threading.Thread(target=sock.sendall, args=(up,))
            sender.start()
            received = hashlib.sha256(read_exactly(sock, len(down))).digest()
            assert received == hashlib.sha256(down).digest()
            sender.join()
        wait_for(lambda: seen == [hashlib.sha256(up).hexdigest()])


def test_ten_megabytes_in_a_chunked_request(running: Proxy) -> None:
    data = random.Random(3).randbytes(10_000_000)
    pieces = [data[at:at + 70_001] for at in range(0, len(data), 70_001)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    with Recorder(mark=b"\r\n0\r\n\r\n") as outside:
        running.allow(outside.place)
        with running.connect() as sock:
            sock.sendall(f"PUT http://{outside.place}/ HTTP/1.1\r\nHost: {outside.place}\r\n"
                         "Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n")
            assert read_all(sock) == outside.answer
        body = outside.request().partition(b"\r\n\r\n")[2]
        assert hashlib.sha256(body).digest() == hashlib.sha256(chunks + b"0\r\n\r\n").digest()


def test_half_of_a_connection_can_end(running: Proxy) -> None:
    def handler(sock: socket.socket) -> None:
        data = read_all(sock)
        sock.sendall(b"after the end: " + data)

    with Outside(handler) as outside:
        running.allow(outside.place)
        with running.tunnel(OUTSIDE, outside.port) as sock:
            sock.sendall(b"question\n")
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == b"after the end: question\n"


def test_a_broken_connection_breaks_on_the_other_side(running: Proxy) -> None:
    """A reset must not look like the end of the data."""
    def handler(sock: socket.socket) -> None:
        sock.sendall(b"half")
        sock.recv(1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with Outside(handler) as outside:
        running.allow(outside.place)
        with running.tunnel(OUTSIDE, outside.port) as sock:
            assert read_exactly(sock, 4) == b"half"
            sock.sendall(b"xy")
            with pytest.raises(ConnectionResetError):
                read_all(sock)


def test_a_client_that_goes_is_told_to_the_server(running: Proxy) -> None:
    """Also while the server is thinking, and nothing is being sent."""
    ends: list[bytes] = []

    def handler(sock: socket.socket) -> None:
        read_until(sock, b"\r\n\r\n")
        ends.append(sock.recv(1))

    with Outside(handler) as outside:
        running.allow(outside.place)
        with running.connect() as sock:
            sock.sendall(
                f"GET http://{outside.place}/ HTTP/1.1\r\nHost: {outside.place}\r\n\r\n".encode())
            wait_for(lambda: outside.connections == 1)
        wait_for(lambda: ends == [b""])


@pytest.mark.parametrize("body", [b"", b"hello"])
def test_a_client_that_waits_is_not_taken_for_gone(running: Proxy, body: bytes) -> None:
    def handler(sock: socket.socket) -> None:
        read_until(sock, b"\r\n\r\n" + body)
        sock.sendall(b"the end" if select.select([sock], [], [], 0.3)[0] else b"waits")

    with Outside(handler) as outside:
        running.allow(outside.place)
        with running.connect() as sock:
            sock.sendall(f"POST http://{outside.place}/ HTTP/1.1\r\nHost: {outside.place}\r\n"
                         f"Content-Length: {len(body)}\r\n\r\n".encode())
            wait_for(lambda: outside.connections == 1)
            sock.sendall(body)
            assert read_all(sock) == b"waits"


def test_new_rules_are_for_new_connections(running: Proxy) -> None:
    with Outside(echo) as outside:
        running.allow(outside.place)
        with running.tunnel(OUTSIDE, outside.port) as sock:
            sock.sendall(b"one\n")
            assert read_exactly(sock, 4) == b"one\n"
            running.allow("example.org")
            assert b" 403 " in running.send(f"CONNECT {outside.place} HTTP/1.1\r\n\r\n".encode())
            sock.sendall(b"two\n")
            assert read_exactly(sock, 4) == b"two\n"
        running.allow(outside.place)
        running.tunnel(OUTSIDE, outside.port).close()


# --- Gates ---


def test_the_listener_comes_from_another_network(net: Proxy) -> None:
    """A session's network has nothing but loopback, and the proxy serves it from outside."""
    with Outside(echo) as outside:
        net.serve({"allow": [outside.place]})
        session = f"""
import os, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run([sys.executable, {str(PROXY)!r}, "gate"], check=True)
try:
    socket.create_connection(("{OUTSIDE}", {outside.port}), 5)
except OSError:
    print("no way around")
sock = socket.create_connection(("127.0.0.1", {net.port}), 30)
sock.sendall(b"CONNECT {outside.place} HTTP/1.1\\r\\n\\r\\n")
print(sock.recv(100))
sock.sendall(b"\\0hello")
print(sock.recv(100))
"""
        done = subprocess.run(["unshare", "-n", sys.executable, "-c", session], env=net.env(),
                              capture_output=True,
                              text=True, timeout=60)
        assert done.stdout.splitlines() == ["no way around",
                                            r"b'HTTP/1.1 200 Connection established\r\n\r\n'",
                                            r"b'\x00hello'"], done.stderr
        with pytest.raises(ConnectionRefusedError):
            net.connect()  # it is there, and only there


def test_when_the_proxy_dies_nothing_listens_until_it_is_back(running: Proxy) -> None:
    with Outside(echo) as outside:
        running.allow(outside.place)
        for _ in range(3):
            sock = running.tunnel(OUTSIDE, outside.port)
            running.processes[-1].kill()
            running.processes[-1].wait()
            with sock, contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            # a gate that has just handed a listener over may be about to close its own end
            wait_for(lambda: refuses(("127.0.0.1", running.port)))
            running.serve()
            wait_for(lambda: connects(running))
        running.tunnel(OUTSIDE, outside.port).close()


def connects(net: Proxy) -> bool:
    try:
        net.connect().close()
    except OSError:
        return False
    return True


def test_a_gate_waits_for_its_proxy_and_says_when_none_comes(net: Proxy) -> None:
    done = net.command("gate")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"the network proxy does not take port {net.port}" in done.stderr
    late = threading.Timer(1, net.serve, [{"allow": []}])
    late.start()
    net.gate()
    assert connects(net)


def test_a_gate_that_goes_takes_its_listener_along(running: Proxy) -> None:
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(running.directory / "proxy.sock"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
        socket.send_fds(link, [b"L"], [listener.fileno()])
        assert link.recv(1) == b"+"
    with socket.create_connection(place, SECONDS) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")
    link.close()
    wait_for(lambda: refuses(place))
    assert connects(running)


def refuses(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, SECONDS).close()
    except ConnectionRefusedError:
        return True
    return False


def test_what_is_no_listener_is_closed(running: Proxy, tmp_path: Path) -> None:
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "other.sock"))
    unix.listen()
    connected, peer = socket.socketpair()
    reader, writer = os.pipe()
    things: list[Any] = [socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM), unix,
                         connected,
              open(tmp_path / "file", "w")]  # noqa: SIM115
    before = open_files(running)
    for number in (*(thing.fileno() for thing in things), writer):
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(SECONDS)
            link.connect(str(running.directory / "proxy.sock"))
            socket.send_fds(link, [b"L"], [number])
            assert link.recv(1) == b"", number
    os.close(writer)
    assert os.read(reader, 1) == b""  # no copy is left in the proxy
    connected.close()
    assert peer.recv(1) == b""
    wait_for(lambda: open_files(running) == before)
    assert connects(running)


def open_files(net: Proxy) -> int:
    return len(os.listdir(f"/proc/{net.processes[-1].pid}/fd"))


def test_four_gates_and_no_more(running: Proxy) -> None:
    links = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for link in links:
        link.settimeout(SECONDS)
        link.connect(str(running.directory / "proxy.sock"))
    assert links[3].recv(1) == b""
    for link in links:
        link.close()
    wait_for(lambda: gate_works(running))


def gate_works(net: Proxy) -> bool:
    with socket.socket(socket.AF_UNIX) as link, socket.create_server(("127.0.0.1", 0)) as listener:
        link.settimeout(SECONDS)
        link.connect(str(net.directory / "proxy.sock"))
        with contextlib.suppress(OSError):
            socket.send_fds(link, [b"L"], [listener.fileno()])
            return link.recv(1) == b"+"
    return False


def test_its_socket_is_for_root_alone(running: Proxy) -> None:
    assert (running.directory / "proxy.sock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("before", [(), ("unshare", "--pid", "--fork")])
def test_sigterm_ends_it(net: Proxy, before: tuple[str, ...]) -> None:
    """As an ordinary process, and as the first of a container, which has no default for it."""
    process = net.serve({"allow": []}, before=before)
    net.gate()
    pid = process.pid
    if before:
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    os.kill(pid, signal.SIGTERM)
    assert process.wait(SECONDS) == 0


# --- Many clients, and bad ones ---


def test_two_hundred_tunnels_at_once(running: Proxy) -> None:
    with Outside(echo, "127.0.0.1") as outside, contextlib.ExitStack() as stack:
        running.allow(f"localhost:{outside.port}", f"127.0.0.1:{outside.port}")
        hello = client_hello("localhost")
        socks = [stack.enter_context(running.tunnel("localhost", outside.port)) for _ in range(200)]
        for sock in socks:
            sock.sendall(hello)
        for sock in socks:
            assert read_exactly(sock, len(hello)) == hello
        block = b"\x17\x03\x03\x4e\x20" + random.Random(4).randbytes(20_000)
        for sock in socks:
            sock.sendall(block)
        for sock in socks:
            assert read_exactly(sock, len(block)) == block
        assert running.rss_kib() <= 30 * 1024
        files = open_files(running)
    wait_for(lambda: open_files(running) <= files - 400)


def test_the_one_too_many_is_told(running: Proxy) -> None:
    with (socket.create_server((OUTSIDE, 0), backlog=600) as outside,
          contextlib.ExitStack() as stack):
        port = outside.getsockname()[1]
        running.allow(f"{OUTSIDE}:{port}")
        for _ in range(proxy.CONNECTIONS):
            stack.enter_context(running.tunnel(OUTSIDE, port))
        assert running.send(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503 ")
    wait_for(lambda: running.send(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 "))


def kernel_bytes(net: Proxy) -> list[int]:
    """What the kernel keeps of data for each socket of the proxy."""
    pid = net.processes[-1].pid
    lines = subprocess.run(["ss", "-HtmnpO"], capture_output=True, text=True, check=True).stdout
    mine = [line for line in lines.splitlines() if "ESTAB" in line and f"pid={pid}," in line]
    return [sum(int(size) for size in re.findall(r"[(,](?:r|t|f|w)(\d+)", line)) for line in mine]


def test_what_nobody_reads_takes_little_of_the_hosts_memory(running: Proxy) -> None:
    """Of a few connections as much as the kernel gives, of all others a part of a megabyte."""
    def flood(sock: socket.socket) -> None:
        while select.select([], [sock], [], 1)[1]:
            sock.send(bytes(65536))
        stuck.append(sock)
        read_all(sock)

    stuck: list[socket.socket] = []
    with Outside(flood) as outside, contextlib.ExitStack() as stack:
        running.allow(outside.place)
        for _ in range(100):
            stack.enter_context(running.tunnel(OUTSIDE, outside.port)).sendall(b"\0")
        wait_for(lambda: len(stuck) == 100)
        sizes = sorted(kernel_bytes(running))
        assert len(sizes) == 200 and sizes[-24] <= 3 * proxy.SOCKET_BYTES, sizes
        assert open_pipes(running) <= 4 * proxy.ROOMY_THREADS
        assert running.rss_kib() <= 40 * 1024


@pytest.mark.parametrize("count, status", [(200, b" 502 "), (201, b" 400 ")])
def test_a_head_has_not_any_number_of_headers(running: Proxy, count: int, status: bytes) -> None:
    """Each costs many times its own size."""
    running.allow(f"127.0.0.1:{(port := free_port())}")
    head = f"GET http://127.0.0.1:{port}/ HTTP/1.0\r\n".encode() + b"a:\r\n" * count
    assert status in running.send(head + b"\r\n")


def test_bad_clients_do_not_stop_others(running: Proxy) -> None:
    stop = threading.Event()

    def flood(sock: socket.socket) -> None:
        while not stop.is_set():
            sock.sendall(bytes(65536))

    with Outside(flood) as outside, Recorder() as fine, contextlib.ExitStack() as stack:
        running.allow(outside.place, fine.place)
        head = f"GET http://{fine.place}/ HTTP/1.1\r\nHost: {fine.place}\r\n".encode()
        for number in range(150):
            sock = stack.enter_context(running.connect())
            sock.sendall((b"", head, b"\x16\x03\x01", b"CONNECT ", b"\r")[number % 5])
        for _ in range(20):  # the server floods them, and they do not read
            stack.enter_context(running.tunnel(OUTSIDE, outside.port)).sendall(b"\0")
        for _ in range(50):
            running.connect().close()
        for _ in range(10):
            assert running.send(head + b"\r\n") == fine.answer
        stop.set()


def test_after_a_deadline_not_a_byte_more_is_taken() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"x")
        with pytest.raises(TimeoutError):
            proxy.receive(other, time.monotonic() - 1)


def test_what_comes_too_slowly_is_refused(running: Proxy) -> None:
    with Outside(echo, "127.0.0.1") as outside:
        running.allow(f"localhost:{outside.port}", f"127.0.0.1:{outside.port}")
        half_head, half_hello, half_method = running.connect(), *(
            running.tunnel("localhost", outside.port) for _ in range(2))
        half_head.sendall(b"GET http://a/ HTTP/1.1\r\n")
        half_hello.sendall(client_hello("localhost")[:100])
        half_method.sendall(b"GET")
        end = time.monotonic() + SECONDS
        with half_head, half_hello, half_method:
            while time.monotonic() < end and not select.select([half_head], [], [], 0.0005)[0]:
                half_head.sendall(b"X")  # every byte counts, none gives more time
            assert b" 400 " in read_all(half_head)
            assert read_all(half_hello) == b"\x15\x03\x03\x00\x02\x02\x70"
            with contextlib.suppress(ConnectionResetError):
                assert read_all(half_method) == b""
        assert running.lines()[-1]["reason"] == "no whole TLS ClientHello came"
