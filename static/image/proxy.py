"""The one way out of a session with a network allowlist.

    proxy.py serve             in the proxy container: decide, log, connect
    proxy.py gate              in the session: hand a listener on 127.0.0.1:3128 to the proxy, and
                               another one to each proxy that comes later
    proxy.py set               check SANDBOX_RULES and put them in force
    proxy.py check HOST[:PORT] print the decision about port 443, or this one

The session has no network but its own loopback. It shares /run/sandbox-net with the proxy:
  proxy.sock   where a gate sends a *listening socket*: a socket stays in the network it was made
               in, so the proxy accepts inside the session and connects outside it, and no byte is
               relayed twice; broker.sock is the same for broker.py, which imports this program
  rules.json   {"allow": [...], "deny": [...]} of host, host:port, *.host, an address, [v6]:port;
               without a port 443 and 80; what denies wins. It is read again when it changes, and
               while it is wrong nothing is allowed.

/var/lib/sandbox-net/decisions, which the session does not see, keeps a JSON line for each host that
was asked for: the last decision, when the first one was, and how many there were.

Environment: SANDBOX_SESSION (its name), SANDBOX_RULES (JSON; `serve` uses it only where there is no
rules.json), SANDBOX_NET, SANDBOX_NET_PORT, SANDBOX_NET_SOCKET and SANDBOX_KEPT (another directory,
port, name of proxy.sock and file of decisions). stdout has one JSON line per decision.
Exit codes: 0; 1 failed, or refused (check); 2 usage.
"""

import contextlib
import fcntl
import json
import mmap
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

DIRECTORY = os.environ.get("SANDBOX_NET", "/run/sandbox-net")
PORT = int(os.environ.get("SANDBOX_NET_PORT", "3128"))
SOCKET = os.environ.get("SANDBOX_NET_SOCKET", "proxy.sock")
KEPT = os.environ.get("SANDBOX_KEPT", "/var/lib/sandbox-net/decisions")
SESSION = os.environ.get("SANDBOX_SESSION", "")
DEFAULT_PORTS = (443, 80)

GATES, CONNECTIONS, OVERFLOW, LOOKUPS = 4, 256, 64, 64
ROOMY_THREADS, SOCKET_BYTES = 10, 128 * 1024
HEADERS, ADDRESSES = 200, 32
KEPT_HOSTS, KEPT_BYTES, REASON_CHARACTERS = 2048, 2048, 300
HEAD_BYTES, LINE_BYTES, HELLO_BYTES, BUFFER_BYTES = 64 * 1024, 4096, 32 * 1024, 128 * 1024
LONG_BYTES, SPLICE_BYTES = 1024 * 1024, 1024 * 1024
STACK_BYTES, FILES, BACKLOG, IDLE_BUFFERS = 256 * 1024, 4096, 256, 8
HEAD_SECONDS, RESOLVE_SECONDS, CONNECT_SECONDS, LINGER_SECONDS = 10, 10, 10, 2
IDLE_SECONDS, TOTAL_SECONDS = 15 * 60, 24 * 60 * 60
GATE_SECONDS, RETRY_SECONDS = 10, 0.1

TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
REQUEST_LINE = re.compile(rb"(" + TOKEN + rb"+) ([!-~]+) HTTP/1\.([01])")
HEADER = re.compile(rb"(" + TOKEN + rb"+):[ \t]*([\t -~\x80-\xff]*)")
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t -~]*)?")
# What some server might read as the start of a request or of a TLS handshake (a record of any type
# and version, or SSLv2's hello, which names no host), and what may still become that.
HTTP_LIKE = re.compile(rb"[\r\n]|[!-~]*(?:[\t\x0b\x0c\x1c-\x20\x85\xa0]|\r[^\n])")
TLS_LIKE = re.compile(rb"[\x14-\x18]|[\x80-\xff].\x01[\0-\x03]", re.DOTALL)
UNDECIDED = re.compile(rb"[!-~]*\r?|[\x80-\xff](?:.\x01?)?", re.DOTALL)
LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# with such a last label, a C library reads a name as an address
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
CHANGE_CIPHER_SPEC, HANDSHAKE, RECORD_TYPES = 20, 22, range(20, 25)
CLIENT_HELLO, SERVER_HELLO, SERVER_NAME, SUPPORTED_VERSIONS, TLS_1_3 = 1, 2, 0, 43, 0x304
HELLO_RETRY_RANDOM = bytes.fromhex(
    "cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
UNNAMED_ALERT = b"\x15\x03\x03\x00\x02\x02\x70"  # TLS: fatal, unrecognized_name


class Answer(Exception):
    """The request ends here: with this status and text, or without any where the status is 0."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    def message(self) -> bytes:
        body, reason = str(self).encode(), REASONS[self.status]
        if self.status == 403:  # after a CONNECT most programs show this line and not the text
            reason += ": " + " ".join(str(self).split())
        head = (f"HTTP/1.1 {self.status} {reason}\r\nContent-Type: text/plain\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n")
        return head.encode("ascii", "replace") + body


# --- Addresses and names ---


def packed(text: str) -> bytes:
    """An address as 4 or 16 bytes, an IPv4 one inside IPv6 as 4.

    Raises ValueError, also for 127.1 and the like.
    """
    try:
        data = socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)
    except OSError:
        raise ValueError(f"{clean(text)} is not an address") from None
    return data[12:] if data[:12] == bytes(10) + b"\xff\xff" else data


def unpacked(data: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def networks(text: str) -> list[tuple[bytes, int]]:
    return [(packed(net), int(bits)) for net, bits in (word.split("/") for word in text.split())]


NAT64 = networks("64:ff9b::/96")
# IANA's special-purpose registries; of IPv6 all but 2000::/3, and 6to4 and Teredo, which can lead
# anywhere.
PRIVATE = networks(
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
    "192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
    "224.0.0.0/3 "
    "::/3 4000::/2 8000::/1 2001::/23 2001:db8::/32 2002::/16 3fff::/20"
)


def within(address: bytes, table: list[tuple[bytes, int]]) -> bool:
    number, size = int.from_bytes(address, "big"), len(address)
    return any(size == len(net) and not (number ^ int.from_bytes(net, "big")) >> (size * 8 - bits)
               for net, bits in table)


def is_private(address: str) -> bool:
    """Whether an address is none of the public internet, or stands for one that is none."""
    data = packed(address)
    return within(data[12:] if within(data, NAT64) else data, PRIVATE)


def is_address(host: str) -> bool:
    return ":" in host or bool(NUMBER.fullmatch(host.rpartition(".")[2]))


def normal_host(text: str) -> str:
    """A host name or an address in its one form. Raises ValueError for anything else."""
    host = text.removesuffix(".").lower() if text.isascii() else ""
    if is_address(host):
        return unpacked(packed(host))
    if len(host) > 253 or not all(LABEL.fullmatch(label) for label in host.split(".")):
        raise ValueError("not a legal host name")
    return host


def split_port(text: str) -> tuple[str, int | None]:
    """The host as written, without brackets, and the port if there is one. Raises ValueError."""
    port: str | None
    if match := re.fullmatch(r"\[([^]]*:[^]]*)\](?::(.*))?", text):
        host, port = match.groups()
    elif text.count(":") > 1:
        host, port = text, None
    else:
        host, colon, port = text.partition(":")
        port = port if colon else None
    if port is None:
        return host, None
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError("the port is not a number from 1 to 65535")
    return host, int(port)


def with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def clean(text: str) -> str:
    return "".join(char if " " < char < "\x7f" else "?" for char in text[:253])


# --- Rules and the decision ---


class Rule:
    """One line of the rules. Raises ValueError."""

    def __init__(self, text: str) -> None:
        self.text = text
        host, self.port = split_port(text)
        self.below = host.startswith("*.")
        self.host = normal_host(host[2:] if self.below else host)
        if self.below and is_address(self.host):
            raise ValueError(f"{text} has a * before an address")

    def matches(self, host: str, port: int) -> bool:
        if port not in ((self.port,) if self.port else DEFAULT_PORTS):
            return False
        return host.endswith("." + self.host) if self.below else host == self.host


class Rules:
    """What is allowed and denied. Raises ValueError."""

    def __init__(self, text: str | bytes) -> None:
        data = json.loads(text)
        if not isinstance(data, dict) or data.keys() - {"allow", "deny"}:
            raise ValueError('the rules are not {"allow": [...], "deny": [...]}')
        self.allow, self.deny = ([Rule(item) for item in self.texts(data, key)]
                                 for key in ("allow", "deny"))

    @staticmethod
    def texts(data: dict[str, object], key: str) -> list[str]:
        items = data.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ValueError(f'"{key}" is not a list of strings')
        return items


def first_match(rules: list[Rule], host: str, port: int) -> str:
    return next((rule.text for rule in rules if rule.matches(host, port)), "")


Entry = dict[str, str | int]  # a decision as it is written


class Decision:
    """Allowed exactly when `reason` is empty; `addresses` are what may be connected to.

    `reason` is for people. For programs there is `kind`, one word: rules, host, denied, unlisted,
    address-denied, address-private or tls, for the two of an address with the `address` itself.
    `missing` is the host or address that a rule would have to allow.
    """

    def __init__(self, host: str, port: int, reason: str = "", rule: str = "",
                 missing: str = "", kind: str = "", address: str = "") -> None:
        self.host, self.port, self.time = host, port, time.time()
        self.reason, self.rule, self.missing = reason, rule, missing
        self.kind, self.address = kind, address
        self.addresses: list[str] = []

    def entry(self) -> Entry:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.time))
        entry: Entry = {
            "time": f"{seconds}.{int(self.time % 1 * 1000):03d}Z",
            "session": SESSION, "host": clean(self.host), "port": self.port,
            "verdict": "deny" if self.reason else "allow", "rule": self.rule,
        }
        if self.reason:
            entry |= {"reason": self.reason, "kind": self.kind}
        return entry | ({"address": self.address} if self.address else {})

    def line(self) -> str:
        return json.dumps(self.entry()) + "\n"

    def refusal(self) -> str:
        text = f"sandbox: {clean(self.host)} port {self.port} is refused: {self.reason}.\n"
        if self.missing:
            rule = self.missing
            rule = rule if self.port in DEFAULT_PORTS else with_port(rule, self.port)
            text += f"To allow it: sandbox net allow {SESSION} {rule}\n"
        return text


def decide(host: str, port: int, resolve: Callable[[str, int], list[str]]) -> Decision:
    """The decision about a host as a client wrote it."""
    try:
        rules = current_rules()
    except (OSError, ValueError) as error:
        return Decision(host, port, f"the rules cannot be used ({error})", kind="rules")
    try:
        host = normal_host(host)
    except ValueError:
        return Decision(host, port, "not a legal host name or address", kind="host")
    if rule := first_match(rules.deny, host, port):
        return Decision(host, port, "a rule denies it", rule, host, "denied")
    rule = first_match(rules.allow, host, port)
    if not rule:
        return Decision(host, port, "no rule allows it", "", host, "unlisted")
    decision = Decision(host, port, rule=rule)
    found = [host] if is_address(host) else resolve(host, port)
    decision.addresses = [address for address in found if not problem(rules, address, port)[0]]
    if found and not decision.addresses:
        kind, reason = problem(rules, found[0], port)
        return Decision(host, port, reason, "", found[0], kind, found[0])
    return decision


def problem(rules: Rules, address: str, port: int) -> tuple[str, str]:
    """What speaks against connecting to an address of an allowed host: kind and reason, or ''."""
    if first_match(rules.deny, address, port):
        return "address-denied", f"a rule denies {address}, where it is"
    if is_private(address) and not first_match(rules.allow, address, port):
        reason = f"it is at {address}, which is no public address and has no rule of its own"
        return "address-private", reason
    return "", ""


# --- The rules file ---


def rules_path() -> str:
    return os.path.join(DIRECTORY, "rules.json")


def write_rules(text: str) -> None:
    """Put rules in force. Raises ValueError, and leaves the old ones then."""
    Rules(text)
    temporary = f"{rules_path()}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, rules_path())


CACHE: list[tuple[tuple[int, int, int], Rules]] = []


def current_rules() -> Rules:
    """The rules in force. Raises OSError or ValueError."""
    status = os.stat(rules_path())
    version = (status.st_mtime_ns, status.st_ino, status.st_size)
    for known, rules in CACHE:
        if known == version:
            return rules
    with open(rules_path(), "rb") as file:
        rules = Rules(file.read())
    CACHE[:] = [(version, rules)]
    return rules


# --- What is kept ---


class Kept:
    """What was decided about each host, in lines of one length that are written over.

    So many hosts have a line for what was allowed, as many for what was denied. All further ones
    share the host * and its line: what a session asks for later hides nothing of before.
    """

    def __init__(self) -> None:
        self.lock, self.fd = threading.Lock(), -1
        self.places: dict[tuple[str, int, str], int] = {}
        self.hosts = {"allow": 0, "deny": 0}
        self.entries: list[Entry] = []

    def open(self, path: str) -> None:
        """Go on where an earlier proxy of the session has ended. Raises OSError."""
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for line in os.pread(self.fd, 2 * (KEPT_HOSTS + 1) * KEPT_BYTES, 0).splitlines():
            with contextlib.suppress(ValueError):  # a power cut has left half of it
                entry = json.loads(line)
                self.add((entry["host"], entry["port"], entry["verdict"]), entry)
        for place in range(len(self.entries)):
            self.write(place)
        os.ftruncate(self.fd, len(self.entries) * KEPT_BYTES)

    def add(self, key: tuple[str, int, str], entry: Entry) -> None:
        self.hosts[key[2]] += 1
        self.places[key] = len(self.entries)
        self.entries.append(entry)

    def write(self, place: int) -> None:
        line = json.dumps(self.entries[place]).ljust(KEPT_BYTES - 1) + "\n"
        os.pwrite(self.fd, line.encode(), place * KEPT_BYTES)

    def note(self, decision: Decision) -> None:
        entry = decision.entry()
        with self.lock:
            key = self.key(entry)
            if key not in self.places:
                self.add(key, {"first": entry["time"], "count": 0})
            place = self.places[key]
            known = self.entries[place]
            entry |= {"host": key[0], "port": key[1], "first": known["first"],
                      "count": int(known["count"]) + 1}
            if decision.reason:
                entry["reason"] = decision.reason[:REASON_CHARACTERS]
            self.entries[place] = entry
            if self.fd >= 0:
                self.write(place)

    def key(self, entry: Entry) -> tuple[str, int, str]:
        key = str(entry["host"]), int(entry["port"]), str(entry["verdict"])
        has_room = key in self.places or self.hosts[key[2]] < KEPT_HOSTS
        return key if has_room else ("*", 0, key[2])


KEPT_DECISIONS = Kept()


# --- Looking up and connecting ---

LOOKUP_SLOTS = threading.Semaphore(LOOKUPS)


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, best first; none when it has none, or no answer came in time."""
    found: list[str] = []
    deadline = time.monotonic() + RESOLVE_SECONDS
    if LOOKUP_SLOTS.acquire(timeout=RESOLVE_SECONDS):
        thread = threading.Thread(target=look_up, args=(host, port, found), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit on processes
            LOOKUP_SLOTS.release()
            return []
        thread.join(max(deadline - time.monotonic(), 0))
    return found[:]


def look_up(host: str, port: int, found: list[str]) -> None:
    """getaddrinfo knows no deadline: a late thread is left behind, with its slot until it ends."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(info[4][0]).partition("%")[0] for info in infos]
        different = dict.fromkeys(unpacked(packed(address)) for address in addresses)
        found[:] = list(different)[:ADDRESSES]
    except (OSError, UnicodeError):
        pass
    finally:
        LOOKUP_SLOTS.release()


def crowded() -> bool:
    """Whether a connection must do with little memory: a few may have what the kernel gives.

    Every connection has a thread, so that never more than these few have been given much.
    """
    return threading.active_count() > ROOMY_THREADS


def bound_buffers(sock: socket.socket) -> None:
    """The kernel's own limits are of megabytes for each socket, and all of a host share them."""
    if crowded():
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)


def connect(decision: Decision) -> socket.socket:
    """A connection to the first address that takes it. Raises Answer."""
    deadline = time.monotonic() + CONNECT_SECONDS
    failure = "its name has no address"
    for index, address in enumerate(decision.addresses):
        left = (deadline - time.monotonic()) / (len(decision.addresses) - index)
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET,
                             socket.SOCK_STREAM)
        try:
            bound_buffers(sock)
            sock.settimeout(max(left, 0.1))
            sock.connect((address, decision.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            failure = f"{address}: {error.strerror or error}"
            sock.close()
    raise Answer(502, f"sandbox: {decision.host} port {decision.port} is allowed but cannot be "
                      f"reached: {failure}\n")


def log(decision: Decision) -> None:
    with contextlib.suppress(OSError):
        KEPT_DECISIONS.note(decision)
    with contextlib.suppress(OSError):
        os.write(1, decision.line().encode())


def connect_out(host: str, port: int) -> socket.socket:
    """Decide, log and connect. Raises Answer."""
    decision = decide(host, port, resolve)
    log(decision)
    if decision.reason:
        raise Answer(403, decision.refusal())
    return connect(decision)


# --- Requests ---


def bad(text: str) -> Answer:
    return Answer(400, f"sandbox: bad request: {text}\n")


def receive(sock: socket.socket, deadline: float) -> bytes:
    """What comes next, empty at the end. Raises OSError, after the deadline TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)
    return sock.recv(16 * 1024)


def read_head(sock: socket.socket, data: bytes, deadline: float) -> tuple[bytes, bytes]:
    """A head without its empty line, and what came after it. Raises Answer."""
    buffer, seen = bytearray(data), 0
    while True:
        end = buffer.find(b"\r\n\r\n", seen)
        if end > HEAD_BYTES or end < 0 and len(buffer) > HEAD_BYTES:
            raise bad("its head is too large")
        if end >= 0:
            return bytes(buffer[:end]), bytes(buffer[end + 4:])
        seen = max(len(buffer) - 3, 0)
        try:
            piece = receive(sock, deadline)
        except TimeoutError:
            piece = b""
        if not piece:
            raise bad("its head did not come in time") if buffer else Answer(0, "nothing came")
        buffer += piece


class Request:
    """A request head, read strictly. Raises Answer."""

    def __init__(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n", HEADERS + 1)
        if len(lines) > HEADERS:
            raise bad("it has too many headers")
        if not (match := REQUEST_LINE.fullmatch(first)):
            raise bad("not a request line")
        self.method, self.target, self.minor = (group.decode() for group in match.groups())
        self.headers: list[tuple[str, str]] = []
        for line in lines:
            if not (match := HEADER.fullmatch(line)):
                raise bad("not a header line")
            self.headers.append((match[1].decode(), match[2].decode("latin-1").rstrip(" \t")))
        self.chunked, self.length = self.framing()

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    def words(self, name: str) -> set[str]:
        return {word.strip().lower() for value in self.values(name) for word in value.split(",")}

    def framing(self) -> tuple[bool, int]:
        lengths, codings = self.values("content-length"), self.values("transfer-encoding")
        if len(lengths) + len(codings) > 1:
            raise bad("more than one Content-Length or Transfer-Encoding")
        if codings and (codings[0].lower() != "chunked" or self.minor == "0"):
            raise bad("a Transfer-Encoding other than chunked")
        if lengths and not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
            raise bad("not a Content-Length")
        return bool(codings), int(lengths[0]) if lengths else 0

    def check_host(self, host: str, port: int, default: int) -> None:
        hosts = self.values("host")
        if len(hosts) > 1 or not hosts and self.minor == "1" and self.method != "CONNECT":
            raise bad("it must have one Host")
        for value in hosts:
            if authority(value, default) != (host, port):
                raise bad("its Host is not that of its target")

    def upgrades(self) -> bool:
        """Only to WebSocket: over h2c requests for any other host could follow."""
        return (self.words("upgrade") == {"websocket"} and "upgrade" in self.words("connection")
                and not self.chunked and not self.length)

    def outgoing(self, path: str, host: str) -> bytes:
        """The head to send on. Raises Answer."""
        named = self.words("connection")
        if named & {"host", "content-length", "transfer-encoding"}:
            raise bad("its Connection names a header that must stay")
        gone = named | {"connection", "keep-alive", "te", "trailer", "upgrade", "host"}
        lines = [f"{self.method} {path} HTTP/1.{self.minor}", f"Host: {host.removesuffix(':80')}"]
        lines += [f"{name}: {value}" for name, value in self.headers
                  if name.lower() not in gone and not name.lower().startswith("proxy-")]
        upgrade = ["Connection: Upgrade", "Upgrade: websocket"]
        lines += upgrade if self.upgrades() else ["Connection: close"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def authority(text: str, default: int) -> tuple[str, int]:
    """The host, in its one form where it has one, and the port. Raises Answer."""
    if not text or text.count(":") > 1 and not text.startswith("[") or re.search(r"[@/?#\\]", text):
        raise bad("its host is not host or host:port")
    try:
        host, port = split_port(text)
    except ValueError as error:
        raise bad(str(error)) from None
    with contextlib.suppress(ValueError):
        host = normal_host(host)
    return host, port or default


class Body:
    """Tells the bytes of a request's body from what follows it."""

    def __init__(self, request: Request) -> None:
        self.left, self.state = request.length, "size" if request.chunked else "end"
        self.line = b""

    @property
    def done(self) -> bool:
        return self.state == "end" and not self.left

    def take(self, data: memoryview) -> int:
        """How many of these bytes belong to the body. Raises Answer when they are malformed."""
        at = 0
        while at < len(data) and not self.done:
            if self.left:
                step = min(self.left, len(data) - at)
                self.left -= step
            else:
                step = self.take_line(bytes(data[at:at + LINE_BYTES]))
            at += step
        return at

    def take_line(self, data: bytes) -> int:
        step = data.find(b"\n") + 1 or len(data)
        self.line += data[:step]
        if len(self.line) > LINE_BYTES:
            raise bad("a line of its chunks is too long")
        if self.line.endswith(b"\n"):
            if not self.line.endswith(b"\r\n"):
                raise bad("a CR or LF stands alone")
            self.next_state(self.line[:-2])
            self.line = b""
        return step

    def next_state(self, line: bytes) -> None:
        if self.state == "size" and (match := CHUNK_SIZE.fullmatch(line)):
            self.left = int(match[1], 16)
            self.state = "after" if self.left else "trailer"
        elif self.state == "after" and not line:
            self.state = "size"
        elif self.state == "trailer" and not line:
            self.state = "end"
        elif self.state != "trailer" or not HEADER.fullmatch(line):
            raise bad("its chunks are not well-formed")


# --- Relaying ---

# not from the heap, which would keep what two hundred threads once needed
BUFFERS: list[mmap.mmap] = []


class Pipe:
    """One direction. It holds at most one buffer, and none while nothing waits to be sent.

    What is long goes through a pipe of the kernel's, which hands on pages and copies nothing.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, data: bytes,
                 body: Body | None = None) -> None:
        self.source, self.sink, self.body = source, sink, body
        self.data, self.open, self.moved = memoryview(data), True, 0
        self.buffer: mmap.mmap | None = None
        # Sees what comes before the sink does, as long as it returns True.
        self.watch: Callable[[memoryview], bool] | None = None
        self.ends, self.inside = (-1, -1), 0  # of the kernel's pipe, and how many bytes are in it

    @property
    def waits(self) -> bool:
        """Whether there is something that the sink is to take."""
        return bool(self.data) or self.inside > 0

    def wants(self) -> int:
        """The events to wait for at the source; after a request's body only its end."""
        if not self.open or self.waits:
            return 0
        return select.POLLRDHUP if self.body and self.body.done else select.POLLIN

    def move(self) -> None:
        """Relay until one side would block, or for a while.

        Raises OSError, and Answer for a wrong body.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(32):
                if not (self.splice() if self.is_long() else self.send()):
                    break
        if self.buffer and not self.data:
            if len(BUFFERS) < IDLE_BUFFERS:
                BUFFERS.append(self.buffer)
            self.buffer = None

    def is_long(self) -> bool:
        """Whether the rest goes through the kernel's pipe, which is made where it is missing."""
        judged = self.body or self.watch
        if (self.ends == (-1, -1) and self.moved > LONG_BYTES and not self.data and not judged
                and not crowded()):
            with contextlib.suppress(OSError):  # no file descriptors: it goes as it went
                self.ends = os.pipe()
                fcntl.fcntl(self.ends[1], fcntl.F_SETPIPE_SZ, SPLICE_BYTES)
        return self.ends != (-1, -1)

    def splice(self) -> bool:
        flags = os.SPLICE_F_NONBLOCK
        if not self.inside:
            self.inside = os.splice(self.source.fileno(), self.ends[1], SPLICE_BYTES,
                                    flags=flags) if self.open else 0
        if not self.inside:
            return self.open and self.end()
        sent = os.splice(self.ends[0], self.sink.fileno(), self.inside, flags=flags)
        self.inside -= sent
        self.moved += sent
        return True

    def send(self) -> bool:
        if not self.data and not self.fill():
            return False
        sent = self.sink.send(self.data)
        self.moved += sent
        self.data = self.data[sent:]
        return True

    def close(self) -> None:
        for fd in self.ends:
            if fd >= 0:
                os.close(fd)

    def fill(self) -> bool:
        if not self.open or self.body and self.body.done:
            return False
        if not self.buffer:
            try:
                self.buffer = BUFFERS.pop()
            except IndexError:
                self.buffer = mmap.mmap(-1, BUFFER_BYTES)
        count = self.source.recv_into(self.buffer)
        self.data = memoryview(self.buffer)[:count]
        if self.body:
            if not count:
                raise bad("its body ends too early")
            self.data = self.data[:self.body.take(self.data)]
        if self.watch and not self.watch(self.data):
            self.watch = None
        return bool(count) or self.end()

    def end(self) -> bool:
        self.open = False
        self.sink.shutdown(socket.SHUT_WR)
        return False


def pump(up: Pipe, down: Pipe, both: bool) -> None:
    """Relay until both directions have ended, or only the one down; or nothing moved for too long.

    Raises OSError when a connection breaks: then the other one is to break, too, and not to end.
    """
    try:
        relay(up, down, both)
    except OSError:
        for sock in (up.source, up.sink):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise
    finally:
        up.close()
        down.close()


def relay(up: Pipe, down: Pipe, both: bool) -> None:
    client, server = up.source, up.sink
    client.setblocking(False)
    server.setblocking(False)
    poll, waiting = select.poll(), {client: 0, server: 0}
    end = time.monotonic() + TOTAL_SECONDS
    while down.open or down.waits or both and (up.open or up.waits):
        for sock, source, sink in ((client, up, down), (server, down, up)):
            mask = source.wants() | (select.POLLOUT if sink.waits else 0)
            if mask != waiting[sock]:
                poll.register(sock, mask) if mask else poll.unregister(sock)
                waiting[sock] = mask
        left = min(IDLE_SECONDS, end - time.monotonic())
        ready = dict(poll.poll(left * 1000)) if left > 0 else {}
        if not ready:
            return
        for pipe in (up, down):
            event = ready.get((pipe.sink if pipe.waits else pipe.source).fileno(), 0)
            if event & ~(select.POLLIN | select.POLLRDHUP if pipe.waits else select.POLLOUT):
                pipe.end() if pipe.wants() == select.POLLRDHUP else pipe.move()


# --- One client ---


def forward(client: socket.socket, request: Request, rest: bytes, server: socket.socket, path: str,
            host: str) -> None:
    """Send one request on, and nothing after it. Raises Answer and OSError."""
    head = request.outgoing(path, host)
    body = Body(request)
    if request.upgrades():
        upgrade(client, head, rest, server, body)
        return
    up = Pipe(client, server, head + rest[:body.take(memoryview(rest))], body)
    down = Pipe(server, client, b"")
    try:
        pump(up, down, both=False)
    except Answer as answer:
        raise Answer(0 if down.moved else answer.status, str(answer)) from None


def upgrade(client: socket.socket, head: bytes, rest: bytes, server: socket.socket,
            empty: Body) -> None:
    """Only after the server's 101 does anything more of the client go to it."""
    server.settimeout(HEAD_SECONDS)
    server.sendall(head)
    try:
        answer, more = read_head(server, b"", time.monotonic() + IDLE_SECONDS)
    except Answer:
        raise Answer(502, "sandbox: the server's answer cannot be read\n") from None
    down = Pipe(server, client, answer + b"\r\n\r\n" + more)
    if re.match(rb"HTTP/1\.1 101[ \r]", answer + b"\r"):
        pump(Pipe(client, server, rest), down, both=True)
    else:
        pump(Pipe(client, server, b"", empty), down, both=False)


def plain_request(client: socket.socket, request: Request, rest: bytes) -> None:
    """A request for a whole URL. Raises Answer and OSError."""
    match = re.fullmatch(r"(?i:http)://([^/?]*)(.*)", request.target)
    if not match or "#" in request.target:
        raise bad("its target is not http://host/path")
    host, port = authority(match[1], 80)
    request.check_host(host, port, 80)
    path = match[2] if match[2].startswith("/") else "/" + match[2]
    with connect_out(host, port) as server:
        forward(client, request, rest, server, path, with_port(host, port))


def tunnel(client: socket.socket, request: Request, rest: bytes) -> None:
    """Raises Answer and OSError."""
    host, port = authority(request.target, 0)
    if not port or request.chunked or request.length:
        raise bad("a CONNECT must name host:port and have no body")
    request.check_host(host, port, port)
    with connect_out(host, port) as server:
        client.settimeout(HEAD_SECONDS)
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        kind, data = first_bytes(client, server, rest)
        if kind == "http":
            tunnelled_request(client, data, server, host, port)
            return
        if kind == "tls":
            secure_tunnel(client, data, server, host, port)
        else:
            pump(Pipe(client, server, data), Pipe(server, client, b""), both=True)


def secure_tunnel(client: socket.socket, data: bytes, server: socket.socket, host: str,
                  port: int) -> None:
    """Raises Answer and OSError."""
    handshake = Handshake(host)
    try:
        up = Pipe(client, server, checked_hello(client, data, handshake))
        down = Pipe(server, client, b"")
        up.watch, down.watch = handshake.client_says, handshake.server_says
        pump(up, down, both=True)
    except ValueError as error:
        log(Decision(host, port, str(error), kind="tls"))
        client.settimeout(HEAD_SECONDS)
        client.sendall(UNNAMED_ALERT)
        raise Answer(0, "") from None


def tunnelled_request(client: socket.socket, data: bytes, server: socket.socket, host: str,
                      port: int) -> None:
    head, rest = read_head(client, data, time.monotonic() + HEAD_SECONDS)
    request = Request(head)
    if not request.target.startswith("/") and (request.method, request.target) != ("OPTIONS", "*"):
        raise bad("its target is not a path")
    request.check_host(host, port, port)
    forward(client, request, rest, server, request.target, with_port(host, port))


# --- What a tunnel begins with ---


def kind_of(data: bytes) -> str:
    """tls, http or plain; empty while that is open."""
    if TLS_LIKE.match(data):
        return "tls"
    if data.startswith(b"SSH-"):  # a greeting with a blank, and no server may take it for a request
        line, end, _ = data.partition(b"\n")
        return "http" if b"HTTP/" in line.upper() or len(line) > 255 else "plain" if end else ""
    if HTTP_LIKE.match(data):
        return "http"
    if UNDECIDED.fullmatch(data):
        return "" if len(data) < HELLO_BYTES else "http"
    return "plain"


def first_bytes(client: socket.socket, server: socket.socket, data: bytes) -> tuple[str, bytes]:
    """What the client begins with, kept back until its kind is known.

    Raises OSError, also when it stops.
    """
    poll = select.poll()
    poll.register(client, select.POLLIN)
    poll.register(server, select.POLLIN)
    deadline = time.monotonic() + (HEAD_SECONDS if data else IDLE_SECONDS)
    while not (kind := kind_of(data)):
        ready = dict(poll.poll(max(deadline - time.monotonic(), 0) * 1000))
        if server.fileno() in ready:
            return "plain", data  # the server speaks first
        piece = receive(client, deadline)
        if not piece:
            return "plain", data
        deadline = deadline if data else time.monotonic() + HEAD_SECONDS
        data += piece
    return kind, data


def checked_hello(client: socket.socket, data: bytes, handshake: "Handshake") -> bytes:
    """All that came, once a whole ClientHello that names the host is in it. Raises ValueError."""
    deadline = time.monotonic() + HEAD_SECONDS
    handshake.client_says(data)
    while not handshake.hellos:
        try:
            piece = receive(client, deadline)
        except TimeoutError:
            piece = b""
        if not piece:
            raise ValueError("no whole TLS ClientHello came")
        handshake.client_says(piece)
        data += piece
    return data


class Reader:
    """Fields out of bytes. Raises ValueError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, count: int) -> bytes:
        if count > len(self.data):
            raise ValueError("the TLS handshake is not well-formed")
        piece, self.data = self.data[:count], self.data[count:]
        return piece

    def vector(self, size: int) -> bytes:
        return self.take(int.from_bytes(self.take(size), "big"))


class Records:
    """The messages of one side of a TLS handshake, out of records in plaintext (RFC 8446, 5.1)."""

    def __init__(self) -> None:
        self.head, self.message = b"", bytearray()
        self.kind = self.left = 0  # of the record that has begun: its type, and how much is to come

    def read(self, data: bytes | memoryview) -> Iterator[tuple[int, bytes]]:
        """The type of each record, and of a handshake's each whole message. Raises ValueError."""
        while data:
            if self.left:
                piece, data = bytes(data[:self.left]), data[self.left:]
                self.left -= len(piece)
                yield from self.messages(piece) if self.kind == HANDSHAKE else ()
                continue
            missing = 5 - len(self.head)
            self.head, data = self.head + bytes(data[:missing]), data[missing:]
            if len(self.head) == 5:
                self.begin(self.head[0], int.from_bytes(self.head[3:], "big"))
                self.head = b""
                if self.kind != HANDSHAKE:
                    yield self.kind, b""

    def begin(self, kind: int, size: int) -> None:
        if kind not in RECORD_TYPES:
            raise ValueError("what follows is no TLS record")
        if self.message and kind != HANDSHAKE:
            raise ValueError("a TLS message is interrupted")
        if kind == HANDSHAKE and not 0 < size <= 16 * 1024:
            raise ValueError("a TLS record is empty or too long")
        self.kind, self.left = kind, size

    def messages(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        self.message += data
        while len(self.message) >= 4:
            end = 4 + int.from_bytes(self.message[1:4], "big")
            if end > HELLO_BYTES:
                raise ValueError("a TLS message is too long")
            if end > len(self.message):
                return
            message = bytes(self.message[:end])
            del self.message[:end]
            yield HANDSHAKE, message


class Handshake:
    """A TLS handshake as far as it can be read; every ClientHello must name the host of the tunnel.

    A server can ask for a second one and take the name of that (HelloRetryRequest). How long it
    takes one in plaintext follows from the version it chooses: with TLS 1.3 until its ServerHello,
    also after records that it skips as early data; with an older one until the client changes to
    the cipher.
    """

    def __init__(self, host: str) -> None:
        self.host, self.hellos, self.version = host, 0, 0
        self.client, self.server = Records(), Records()
        self.readable = True  # what the client says

    def client_says(self, data: bytes | memoryview) -> bool:
        """Whether what follows must be seen, too. Raises ValueError for what may not go on."""
        if not self.readable:
            return False
        for kind, message in self.client.read(data):
            if not self.hellos and (kind != HANDSHAKE or message[0] != CLIENT_HELLO):
                raise ValueError("the TLS handshake does not begin with a ClientHello")
            if message and message[0] == CLIENT_HELLO:
                self.check(server_name(Reader(message[1:]).vector(3)))
                self.hellos += 1
            if kind == CHANGE_CIPHER_SPEC and self.version:
                self.readable = False
                break
        return self.readable

    def check(self, name: str) -> None:
        if (name and normal_host(name)) != ("" if is_address(self.host) else self.host):
            named = clean(name) or "no host"
            raise ValueError(f"the TLS handshake names {named}, the tunnel {self.host}")

    def server_says(self, data: bytes | memoryview) -> bool:
        """Whether it has yet to choose. Where that is not understood the client stays watched."""
        try:
            for _, message in self.server.read(data):
                if message and message[0] == SERVER_HELLO and message[6:38] != HELLO_RETRY_RANDOM:
                    self.version = chosen_version(message)
                    self.readable = self.version != TLS_1_3
                    return False
        except ValueError:
            return False
        return True


def chosen_version(message: bytes) -> int:
    """Of a ServerHello (RFC 8446, 4.1.3 and 4.2.1). Raises ValueError."""
    fields = Reader(message[4:])
    version = fields.take(2)
    fields.take(32)
    fields.vector(1)
    fields.take(3)
    for kind, value in extensions_of(fields):
        if kind == SUPPORTED_VERSIONS:
            version = value
    return int.from_bytes(version, "big")


def extensions_of(fields: Reader) -> Iterator[tuple[int, bytes]]:
    """Those that end a message. Raises ValueError."""
    extensions = Reader(fields.vector(2) if fields.data else b"")
    while extensions.data:
        yield int.from_bytes(extensions.take(2), "big"), extensions.vector(2)


def server_name(hello: bytes) -> str:
    """The host a ClientHello names (RFC 8446, 4.1.2, and RFC 6066, 3), or ''. Raises ValueError."""
    fields = Reader(hello)
    fields.take(34)
    for size in (1, 2, 1):
        fields.vector(size)
    values = [value for kind, value in extensions_of(fields) if kind == SERVER_NAME]
    names = [Reader(Reader(value).vector(2)) for value in values]
    if not names:
        return ""
    name_type, name = names[0].take(1), names[0].vector(2)
    if len(names) > 1 or names[0].data or name_type != b"\0" or not name:
        raise ValueError("the TLS handshake names more or less than one host")
    return name.decode("latin-1")


# --- Clients and gates ---

CLIENTS = threading.Semaphore(CONNECTIONS + OVERFLOW)
SLOTS = threading.Semaphore(CONNECTIONS)
Serve = Callable[[socket.socket], None]


def serve_client(handle: Serve, client: socket.socket) -> None:
    busy = not SLOTS.acquire(blocking=False)
    try:
        with client:
            try:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                bound_buffers(client)
                if busy:
                    raise Answer(503, f"sandbox: {CONNECTIONS} connections are open already\n")
                handle(client)
            except Answer as answer:
                say(client, answer)
            hang_up(client)
    except OSError:
        pass
    finally:
        if not busy:
            SLOTS.release()
        CLIENTS.release()


def handle(client: socket.socket) -> None:
    head, rest = read_head(client, b"", time.monotonic() + HEAD_SECONDS)
    request = Request(head)
    (tunnel if request.method == "CONNECT" else plain_request)(client, request, rest)


REASONS = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway", 503: "Service Unavailable"}


def say(client: socket.socket, answer: Answer) -> None:
    if answer.status:
        client.settimeout(HEAD_SECONDS)
        client.sendall(answer.message())


def hang_up(client: socket.socket) -> None:
    """End so that the client can read all that was sent.

    Closing with unread bytes would reset the connection.
    """
    client.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + LINGER_SECONDS
    while receive(client, deadline):
        pass


def is_listener(sock: socket.socket) -> bool:
    return (sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
            and sock.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP
            and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))


def take_listener(link: socket.socket) -> socket.socket | None:
    """The listener that a gate hands over; anything else is closed."""
    link.settimeout(GATE_SECONDS)
    _, numbers, _, _ = socket.recv_fds(link, 1, 1)
    for number in numbers:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            os.close(number)
            continue
        sock = socket.socket(fileno=number)
        if is_listener(sock):
            return sock
        sock.close()
    return None


GATE_SLOTS = threading.Semaphore(GATES)


def serve_gate(handle: Serve, link: socket.socket) -> None:
    try:
        with link:
            listener = take_listener(link)
            if listener:
                with listener:
                    link.sendall(b"+")
                    accept_clients(handle, link, listener)
    except OSError:
        pass
    finally:
        GATE_SLOTS.release()


def accept_clients(handle: Serve, link: socket.socket, listener: socket.socket) -> None:
    """Until the gate goes. Raises OSError when the listener is of no use any more."""
    listener.setblocking(False)
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(listener, select.POLLIN)
    while link.fileno() not in dict(poll.poll()):
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            continue
        except OSError as error:
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise
            print(f"sandbox: accept: {error}", file=sys.stderr)
            time.sleep(RETRY_SECONDS)  # no file descriptors, or no memory
            continue
        start(partial(serve_client, handle), client, CLIENTS)


def start(target: Serve, sock: socket.socket, slots: threading.Semaphore) -> None:
    """Serve a socket in a thread of its own, or close it where there are too many."""
    if slots.acquire(blocking=False):
        try:
            threading.Thread(target=target, args=(sock,), daemon=True).start()
            return
        except RuntimeError:  # the limit on processes
            slots.release()
    sock.close()


# --- Commands ---


def cmd_serve() -> int:
    prepare()
    return serve_gates(SOCKET, handle)


def prepare() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        # the first process of a container has no default for them
        signal.signal(number, lambda *_: os._exit(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, FILES)), hard))
    threading.stack_size(STACK_BYTES)
    try:
        KEPT_DECISIONS.open(KEPT)
    except OSError as error:
        print(f"sandbox: decisions are not kept: {error}", file=sys.stderr)
    start_rules()


def serve_gates(name: str, handle: Serve) -> int:
    with listen(os.path.join(DIRECTORY, name)) as server:
        while True:
            link, _ = server.accept()
            start(partial(serve_gate, handle), link, GATE_SLOTS)


def start_rules() -> None:
    try:
        if not os.path.exists(rules_path()):
            write_rules(os.environ.get("SANDBOX_RULES", ""))
        current_rules()
    except (OSError, ValueError) as error:
        print(f"sandbox: everything is refused: the rules cannot be used ({error})",
              file=sys.stderr)


def listen(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX)
    os.umask(0o177)
    server.bind(path)
    server.listen(GATES)
    return server


def cmd_gate() -> int:
    deadline = time.monotonic() + GATE_SECONDS
    while True:
        try:
            link = hand_over()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                print(f"sandbox: the network proxy does not take port {PORT}: {error}",
                      file=sys.stderr)
                return 1
            time.sleep(RETRY_SECONDS)
    if not os.fork():
        detach()
        keep_handing_over(link)
    return 0


def detach() -> None:
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)


def keep_handing_over(link: socket.socket) -> None:
    while True:
        with link, contextlib.suppress(OSError):
            link.settimeout(None)
            link.recv(1)
        with contextlib.suppress(OSError):
            link = hand_over()
            continue
        time.sleep(RETRY_SECONDS)


def hand_over() -> socket.socket:
    """Give a new listener away; the connection lives as long as the proxy serves it.

    Raises OSError.
    """
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(GATE_SECONDS)
        link.connect(os.path.join(DIRECTORY, SOCKET))
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", PORT))
            listener.listen(BACKLOG)
            socket.send_fds(link, [b"L"], [listener.fileno()])
        if link.recv(1) != b"+":
            raise ConnectionError("it was refused")
    except OSError:
        link.close()
        raise
    return link


def cmd_set() -> int:
    try:
        write_rules(os.environ.get("SANDBOX_RULES", ""))
    except (OSError, ValueError) as error:
        print(f"sandbox: the rules stay as they are: {error}", file=sys.stderr)
        return 1
    return 0


def cmd_check(text: str) -> int:
    try:
        host, port = split_port(text)
    except ValueError as error:
        print(f"sandbox: {clean(text)}: {error}", file=sys.stderr)
        return 2
    decision = decide(host, port or DEFAULT_PORTS[0], resolve)
    sys.stdout.write(decision.line())
    return 1 if decision.reason else 0


COMMANDS = {"serve": cmd_serve, "gate": cmd_gate, "set": cmd_set}


def main(argv: Sequence[str]) -> int:
    if len(argv) == 1 and argv[0] in COMMANDS:
        return COMMANDS[argv[0]]()
    if len(argv) == 2 and argv[0] == "check":
        return cmd_check(argv[1])
    print("usage: proxy.py serve | gate | set | check HOST[:PORT]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
