"""The web service of `sandbox serve`: gateway, API, jobs and terminals on one port.

The README, section "Web service API", describes what clients see. How it is made:

- `http.server`, a thread per connection, with a reader of our own: strict, with total deadlines
  and limits.
- One route table; what is not on ANONYMOUS needs the cookie, whatever its method.
- A job is a detached process (static/session/job.py), which writes into
  ~/.sandbox/jobs/<session>/<job>/; the server only reads there, so it may be killed and started
  again at any time.
- A terminal belongs to its session, where static/session/hold.py holds it. A thread of its own
  pumps between one client of the holder and the viewers' WebSockets, with a ring of 1 MiB whose
  positions are the holder's; a server that ends only detaches.

Files: ~/.sandbox/jobs/, ~/.sandbox/sessions/<session>.json (settings), ~/.sandbox/web/<address>.*
(lock, log, state). Knows no engine argv: sandbox.py builds them all.

All that it uses of sandbox.py (a test compares this list with the code):

    errors: SandboxError EngineProblem BrokenSession Changed NotASession FileError nearest
    data: parse_json read_json is_exact is_plain a_name random_id printable one_line quote_all
    files: asset sandbox_home make_private write_private remove_tree jobs_path
    configuration: Config Layer load_config read_config flags_layer session_config exec_env KEYS
        read_settings write_settings lock_settings lock_homes AGENTS options_of
    engines: Engine candidates engine_of present_image
    sessions: Session find_session list_everywhere lost_row create_session recreation
        check_recreation recreate_session start_session stop_session remove_session users_of
        recall has_ended generated_name spec_of check_spec check_mounts
        differences git_of check_removed check_stopped KILLED rename_session duplicate_home
        settings_beside
    network: network_of set_rules change_rules decision_of kept_decisions give_keys
    commands: exec_argv exec_script env_script compose signal_tagged ENVIRONMENT_BYTES SHELL
        wanted_turn
    terminals: hold_argv attach_argv hold_environ frame Frames numbers_of Held list_terminals
        record_terminal forget_terminal recorded_terminals title_of agent_of cannot_hold
        is_unheld forget_lost forget_terminals end_client
    processes: spawn wait_for Output end_on_signals
    people: say report Step Remedy with_remedies install_commands news notify
"""

from __future__ import annotations

import base64
import codecs
import errno
import fcntl
import gzip
import hashlib
import hmac
import ipaddress
import json
import math
import mmap
import os
import re
import secrets
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import lru_cache, partial
from heapq import nsmallest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import parse_qsl, unquote_to_bytes

import sandbox
from sandbox import Config, Engine, EngineProblem, Layer, SandboxError, Session

if TYPE_CHECKING:
    import argparse
    import ssl

    from websockets.server import ServerProtocol

DEFAULT_ADDRESS = "127.0.0.1:3000"
# A name of our own on loopback. A browser sends a cookie to every port of a name: with "localhost"
# any other program that listens there would get ours.
OWN_NAME = "sandbox.localhost"
RESOLVE_SECONDS = 1
HEAD_BYTES, TARGET_BYTES, HEADER_COUNT = 16 * 1024, 4096, 64
BODY_BYTES, ANONYMOUS_BODY_BYTES = 1024 * 1024, 8 * 1024
IDLE_SECONDS, HEAD_SECONDS, BODY_SECONDS, WRITE_SECONDS = 60, 10, 30, 30
CONNECTIONS = 600  # with more than these, one has to end
SPARE_CONNECTIONS = 50  # room beyond that, for those that are just ending
CONNECTIONS_TRIMMED = 20  # after so many have gone, the memory that they took is given back
ROOM_SECONDS = 2  # how long a new connection waits for one that was told to make room
STACK_BYTES = 1024 * 1024  # glibc keeps 40 MB of the stacks that were used, with what they hold
LOGIN_SECONDS = 7 * 86400
FREE_FAILURES, TOTAL_FAILURES, LONGEST_WAIT_SECONDS, FORGIVEN_SECONDS = 5, 60, 300, 900
SHOWN_DIRECTORIES, LOOKED_AT_ENTRIES = 50, 50_000
SHOWN_DECISIONS = 500
LOST_SECONDS = 60  # for which ports that could not be brought here are left alone
LIST_SECONDS = 0.5  # how long a list of sessions may be given again
LOG_SECONDS = 10  # how long that of a session's turns, which a run of the command line adds to
KEPT_SECONDS, KEY_CHARS = 60, 64  # of an answer, for who asks again with the same key
POLL_SECONDS = 0.015  # how often a followed job's file is looked at
HEARTBEAT_SECONDS = 15
KEPT_JOBS = 200
JOB_BYTES = 1 << 30  # of its output that is kept
STATUS_BYTES = 512
TAIL_BYTES = 16 * 1024
CHUNK_BYTES = 64 * 1024
RING_BYTES = WINDOW_BYTES = 1024 * 1024
MESSAGE_BYTES = 1024 * 1024
STALL_SECONDS = 5  # a viewer that takes nothing for so long no longer holds the program up
FLOOD_BYTES, FLOOD_SECONDS = 8192, 0.2  # at once, after which output counts as a flood for so long
REST_SECONDS = 0.004  # between two pieces of a flood, for each other one
PING_SECONDS = 30  # the kernel ends a connection whose other end is gone, however slow it was
LINGER_SECONDS = 3600  # an ended terminal waits so long for somebody to see its end
TERMINALS = 100
LAST_POSITION = 1 << 53  # what JavaScript counts exactly
STDERR_BYTES = 4096  # of an engine's client that fails
CUTS = 5  # of a holder's clients, each within a second, before its terminal is given up
STOP_SECONDS = 15
WEBSOCKETS_MAJOR = 13  # the oldest websockets that works
KEPT_NEWS = 500
LAST_WORDS_BYTES = 256 * 1024  # of a turn's output, in which its answer is looked for
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2, 60  # between two calls of the person's command for a kind
TYPING_SECONDS = 3  # in which a terminal's bell answers a key
REFUSED_HOSTS, HOST_CHARS = 1000, 280  # that one reader of a proxy's log tells
LOG_BYTES = 2 * 1024 * 1024  # then a new one is begun, and the one before it kept

Params = Mapping[str, str]

# --- Errors ---

# The one table from the code of an error to its status.
STATUS = {
    "bad_request": 400, "unauthorized": 401, "forbidden": 403, "not_found": 404,
    "method_not_allowed": 405, "timeout": 408, "conflict": 409, "image_missing": 409,
    "too_large": 413, "target_too_long": 414, "unsupported_type": 415, "expectation_failed": 417,
    "foreign_host": 421, "too_many": 429, "head_too_large": 431, "internal": 500, "failed": 500,
    "not_implemented": 501, "engine_failed": 502, "engine_unavailable": 503,
    "version_not_supported": 505, "disk_full": 507,
}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class WebError(Exception):
    """What a client is told: a key of STATUS, a message, and perhaps a hint and headers."""

    def __init__(self, code: str, message: str, hint: str = "",
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.headers = code, message, hint, headers or {}


class Malformed(WebError):
    """A request that cannot be read further: the connection is closed after the answer."""


class Gone(Exception):
    """A client that has gone or is too slow: its connection is closed without an answer."""


def as_web_error(error: Exception) -> WebError:
    """What a client is told of any exception; the unexpected goes to the log, not to the client."""
    if isinstance(error, WebError):
        return error
    if isinstance(error, SandboxError):
        code = {2: "bad_request", 125: "engine_failed"}.get(error.code, "failed")
        # What a shadow has refused, see sandbox_changes.py.
        kinds = {"missing": "not_found", "nothing": "conflict", "large": "too_large"}
        code = kinds.get(getattr(error, "kind", ""), code)
        if isinstance(error, EngineProblem):
            code = "image_missing" if error.kind in ("image", "agent") else "engine_unavailable"
        elif isinstance(error, sandbox.BrokenSession | sandbox.Changed):
            code = "conflict"
        elif isinstance(error, sandbox.NotASession):
            code = "not_found"
        elif isinstance(error, sandbox.FileError) and error.errno in NO_SPACE:
            code = "disk_full"
        return WebError(code, error.message, error.hint)
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return WebError("disk_full", "the disk of the server is full", "make room there")
    log("".join(traceback.format_exception(error)).rstrip())
    return WebError("internal", "something went wrong inside the server; its log says what")


def log(line: str) -> None:
    """Write a line to the log; a full disk, or a reader that rests, keeps nobody from an answer."""
    with suppress(OSError), LOG_LOCK:
        if sys.stderr:  # without it descriptor 2 is some other file
            when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            # A traceback may have a container's words in it.
            data = f"{when} {sandbox.printable(line)}\n".encode()
            out = 2
            with suppress(OSError):  # it is no terminal, which may have room for less than a line
                out = os.open(os.ttyname(2), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                for at in range(0, len(data), select.PIPE_BUF):
                    # A pipe that nobody reads, or a terminal that is stopped, takes no more.
                    if select.select([], [out], [], 0)[1]:
                        os.write(out, data[at : at + select.PIPE_BUF])
            finally:
                if out != 2:
                    os.close(out)
        if LOG_PATH and os.fstat(2).st_size > LOG_BYTES:
            os.replace(LOG_PATH[0], f"{LOG_PATH[0]}.1")
            open_log(LOG_PATH[0])


LOG_LOCK = threading.Lock()
LOG_PATH: list[str] = []  # set in the background only: other output is not ours to cut


def open_log(path: str) -> None:
    """Let our output go to the end of a file."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(target, fd)
    os.close(target)


# --- Requests ---

TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
ONCE = ("host", "content-length", "content-type", "origin", "authorization", "expect", "upgrade",
        "range", "sec-websocket-key", "sec-websocket-version", "sec-fetch-site", "last-event-id",
        "idempotency-key")


class Request:
    """One request: its head, checked, and the body when it has been read."""

    def __init__(self, method: str, target: str, version: str, headers: Mapping[str, str],
                 raw: bytes, address: str) -> None:
        self.method, self.target, self.version = method, target, version
        self.headers, self.raw, self.address = headers, raw, address
        self.length = int(headers.get("content-length", "0"))
        self.body = b""
        # From the gateway: the path, decoded once, and the id of the login that the cookie proves.
        self.path, self.query, self.login = "", dict[str, str](), ""

    @property
    def keeps_alive(self) -> bool:
        wish = self.headers.get("connection", "").lower()
        return self.version == "HTTP/1.1" and "close" not in wish

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """A number of the query. Raises WebError when it is none, or outside of its limits."""
        text = self.query.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 19 and low <= int(text) <= high):
            raise WebError("bad_request",
                           f"{name}: {text[:40]!r} is not a number from {low} to {high}")
        return int(text)

    def json(self) -> dict[str, Any]:
        """The body as a JSON object. Raises WebError."""
        type = self.headers.get("content-type", "").partition(";")[0]
        if type.strip().lower() != "application/json":
            raise WebError("unsupported_type", "the body must be JSON",
                           "send Content-Type: application/json")
        try:
            data = sandbox.parse_json(self.body)
            json.dumps(data, ensure_ascii=False).encode()  # a lone surrogate could not be stored
        except ValueError as error:
            raise WebError("bad_request", f"the body is not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise WebError("bad_request", "the body is not a JSON object")
        return data


def parse_head(raw: bytes, address: str) -> Request:
    """Read a request's head strictly: what could be understood in two ways is refused.

    Raises Malformed.
    """
    lines = raw.decode("latin-1").split("\r\n")
    if any(c in line for line in lines for c in "\r\n\0"):
        raise Malformed("bad_request", "a line of the head has a control character")
    words = lines[0].split(" ")
    if len(words) != 3 or not TOKEN.fullmatch(words[0]):
        raise Malformed("bad_request", "the request line is not of the form METHOD TARGET VERSION")
    if words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise Malformed("version_not_supported", "the version is neither HTTP/1.1 nor HTTP/1.0")
    if len(words[1]) > TARGET_BYTES:
        raise Malformed("target_too_long", f"the target is longer than {TARGET_BYTES} bytes")
    headers = parse_headers(lines[1:])
    if not headers.get("host"):
        raise Malformed("bad_request", "the header Host is missing")
    if "transfer-encoding" in headers:
        raise Malformed("not_implemented", "Transfer-Encoding is not supported",
                        "send Content-Length")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit() and len(length) < 12):
        raise Malformed("bad_request", "Content-Length is not a number")
    return Request(words[0], words[1], words[2], headers, raw, address)


def parse_headers(lines: Sequence[str]) -> dict[str, str]:
    """Names in lower case; values of a repeated header are joined. Raises Malformed."""
    if len(lines) > HEADER_COUNT:
        raise Malformed("head_too_large", f"there are more than {HEADER_COUNT} headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        control = any(c < " " and c != "\t" or c == "\x7f" for c in value)
        if not colon or not TOKEN.fullmatch(name) or control:
            raise Malformed("bad_request", "a header is malformed")
        if name in headers and name in ONCE:
            raise Malformed("bad_request", f"the header {name} is there twice")
        if name in headers:
            value = headers[name] + ("; " if name == "cookie" else ", ") + value
        headers[name] = value
    return headers


def split_target(target: str) -> tuple[str, dict[str, str]]:
    """Path, decoded once, and query. Raises Malformed where others might read another path."""
    path, _, query = target.partition("?")
    try:
        decoded = unquote_to_bytes(path).decode()
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=20)
        ambiguous = (not path.startswith("/") or "//" in decoded or "#" in target
                     or not all("!" <= c <= "~" for c in target)
                     or any(c < " " or c in "%\\\x7f" for c in decoded)
                     or decoded.count("/") != path.count("/")
                     or bool({".", ".."} & set(decoded.split("/")))
                     or len(dict(pairs)) < len(pairs))
    except ValueError:
        ambiguous = True
    if ambiguous:
        raise Malformed("bad_request", "the path is not in its plain form")
    return decoded, dict(pairs)


# --- Answers ---

CSP = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
       "font-src 'self'; connect-src 'self'; manifest-src 'self'; worker-src 'self'; "
       "base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
COMMON = {
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY", "Content-Security-Policy": CSP,
}
EVENTS = "text/event-stream; charset=utf-8"
TYPES = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8", "mjs": "text/javascript; charset=utf-8",
    "json": "application/json", "map": "application/json", "svg": "image/svg+xml",
    "png": "image/png", "ico": "image/x-icon", "woff2": "font/woff2", "wasm": "application/wasm",
    "webmanifest": "application/manifest+json", "txt": "text/plain; charset=utf-8",
}


class Answer:
    """A whole answer; `packed` says that the body is gzip already."""

    def __init__(self, body: bytes = b"", type: str = TYPES["txt"], status: int = 200,
                 headers: Mapping[str, str] | None = None, packed: bool = False) -> None:
        self.body, self.type, self.status, self.packed = body, type, status, packed
        self.headers = {"Cache-Control": "no-store", **(headers or {})}


class Stream:
    """An answer without an end: `run` writes until it returns, then the connection is closed.

    `close` gives back what was opened for it, also where it never runs.
    """

    def __init__(self, type: str, run: Callable[[socket.socket], None],
                 close: Callable[[], None] = lambda: None) -> None:
        self.type, self.run, self.close = type, run, close


# What takes the connection over: called with it, what was read ahead, and what to call at its end.
Upgrade = Callable[[socket.socket, bytes, Callable[[], None]], None]
Reply = Answer | Stream | Upgrade


def json_answer(data: object, status: int = 200,
                headers: Mapping[str, str] | None = None) -> Answer:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return Answer(text.encode("utf-8", "replace") + b"\n", TYPES["json"], status, headers)


def error_answer(error: WebError) -> Answer:
    detail = {"code": error.code, "message": error.message}
    detail |= {"hint": error.hint} if error.hint else {}
    return json_answer({"error": detail}, STATUS[error.code], error.headers)


def serialize(answer: Answer, request: Request | None, keep: bool, bare: bool) -> bytes:
    """Head and, unless it is to be bare, body; compressed where that helps and can be read."""
    body, headers = answer.body, dict(answer.headers)
    accepts = request is not None and "gzip" in request.headers.get("accept-encoding", "")
    packs = len(body) > 1024 and answer.type.startswith(("text/", "application/json"))
    if answer.packed and not accepts:
        body = gzip.decompress(body)
    elif accepts and packs and not answer.packed:
        body = zlib.compress(body, 5, 31)
    if accepts and (packs or answer.packed):
        headers["Content-Encoding"] = "gzip"
    headers |= {"Content-Type": answer.type, "Content-Length": str(len(body)),
                "Vary": "Accept-Encoding", "Connection": "keep-alive" if keep else "close"}
    return head_bytes(answer.status, headers) + (b"" if bare else body)


def head_bytes(status: int, headers: Mapping[str, str]) -> bytes:
    # strftime gives English names: this process never sets a locale.
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Date: {date}"]
    lines += [f"{name}: {value}" for name, value in {**COMMON, **headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


# --- Gateway ---

ANONYMOUS = ("/auth/login", "/auth/logout", "/auth/frontend/login.css", "/auth/frontend/login.js",
             "/preview/auth/login")
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


def anonymous_answer(path: str) -> Answer:
    """What a request without a login gets where one is needed: a page the login, all else a 401."""
    if f"{path}/".startswith(("/api/", "/auth/")):
        return Answer(b"Unauthorized\n", status=401)
    return Answer(status=302, headers={"Location": "/auth/login"})


def check_host(host: str, local: str, allowed: Sequence[str]) -> None:
    """Refuse names that we are not known by (DNS rebinding); `local` is the address reached."""
    found = HOST.fullmatch(host)
    name = found[1].strip("[]").lower().removesuffix(".") if found else ""
    loopback = is_loopback(local) and (name in ("localhost", OWN_NAME) or is_loopback(name))
    if not (name and (loopback or name == local or name in allowed)):
        raise Malformed("foreign_host", f"this service does not answer to the name {name[:100]!r}",
                        "start it with --allow-host <name>, or list the name in allowedHosts")


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def check_origin(request: Request, secure: bool) -> None:
    """Refuse what another site's page sends. Programs send neither of the two headers."""
    if request.method in ("GET", "HEAD") and "upgrade" not in request.headers:
        return
    origin, host = request.headers.get("origin"), request.headers["host"].lower()
    if origin is None and request.headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return
    if (origin or "").lower() not in [f"https://{host}", *([] if secure else [f"http://{host}"])]:
        raise WebError("forbidden", "the request comes from a page of another site")


class Throttle:
    """Failed logins by address and in total: after some free ones each doubles the wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failures: dict[str, tuple[int, float]] = {}
        # Failures of all addresses together, of which one a second is forgiven, and when that was.
        self.level, self.when = 0.0, 0.0
        # Addresses that have logged in: failures of other addresses do not lock them out.
        self.trusted: dict[str, None] = {}

    def attempt(self, address: str, now: float) -> float:
        """Count an attempt as failed, unless it must wait: the seconds to wait, or 0."""
        with self.lock:
            count, last = self.failures.get(address, (0, now))
            if now - last > FORGIVEN_SECONDS:
                count = 0
            self.level, self.when = max(0.0, self.level - (now - self.when)), now
            own = 0.0
            if count >= FREE_FAILURES:
                own = min(2.0 ** min(count - FREE_FAILURES, 16), LONGEST_WAIT_SECONDS)
            full = self.level >= TOTAL_FAILURES and address not in self.trusted
            wait = max(own - (now - last), self.level - TOTAL_FAILURES + 1 if full else 0.0)
            if wait > 0:
                return wait
            self.failures.pop(address, None)
            self.failures[address] = (count + 1, now)
            self.level += 1
            while len(self.failures) > 10_000:
                self.failures.pop(next(iter(self.failures)))
            return 0

    def forgive(self, address: str) -> None:
        """Take the attempt back that was counted: it was a login."""
        with self.lock:
            self.failures.pop(address, None)
            self.level = max(0.0, self.level - 1)
            self.trusted[address] = None
            while len(self.trusted) > 1000:
                self.trusted.pop(next(iter(self.trusted)))


def throttled_as(address: str) -> str:
    """What a login is throttled by: an IPv4 address, or the /64 of an IPv6 address."""
    with suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(parsed, ipaddress.IPv6Address):
            return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
    return address


class Gateway:
    """Who may pass: one account, with logins as signed cookies.

    A login ends by time, by logout or by a new password: the key of the signature comes from a
    secret of the server's and the credentials. Ended logins are kept until their time is over, so
    that a restart does not bring them back. A login that ends takes its open connections with it.
    """

    def __init__(self, user: str, password: str, path: str, address: tuple[str, int],
                 secure: bool, hosts: Sequence[str]) -> None:
        self.account = digest(user, password)
        self.path, self.secure, self.hosts = path, secure, hosts
        self.cookie = f"sandbox_{address[1]}"  # cookies know no ports: two servers would share one
        self.throttle = Throttle()
        self.lock = threading.Lock()
        self.held: dict[socket.socket, str] = {}  # open streams and terminals, and their logins
        self.secret, self.ended = self.load()
        self.key = hmac.digest(self.secret, self.account, "sha256")

    def admit(self, request: Request, local: str) -> Answer | None:
        """The checks before the route: Host, path, login or allowlist, Origin.

        Returns the answer to a request that needs a login and has none. Raises WebError for one
        that may not go on; a client has reached us at the address `local`.
        """
        check_host(request.headers["host"], local, self.hosts)
        request.path, request.query = split_target(request.target)
        request.login = self.login_of(request.headers.get("cookie", ""))
        if not request.login and request.path not in ANONYMOUS:
            return anonymous_answer(request.path)
        check_origin(request, self.secure)
        return None

    def load(self) -> tuple[bytes, dict[str, float]]:
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            data = sandbox.read_json(self.path)
            secret = bytes.fromhex(data["secret"])
            if len(secret) == 32:
                return secret, {str(id): float(expiry) for id, expiry in data["ended"].items()}
        secret = secrets.token_bytes(32)
        try:
            self.store(secret, {})
        except SandboxError as error:  # a restart will end the logins
            log(f"the secret of logins could not be stored: {error.message}")
        return secret, {}

    def store(self, secret: bytes, ended: dict[str, float]) -> None:
        """Keep what a restart must know. Raises SandboxError."""
        sandbox.write_private(self.path, json.dumps({"secret": secret.hex(), "ended": ended}))

    def sign(self, text: str) -> str:
        return hmac.digest(self.key, text.encode(), "sha256").hex()

    def cookie_header(self, value: str, seconds: int) -> str:
        text = f"{self.cookie}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={seconds}"
        return f"{text}; Secure" if self.secure else text

    def login_of(self, header: str) -> str:
        """The login that a Cookie header proves, as `<id>.<expiry>`, or ''."""
        for pair in header.split(";"):
            name, _, value = pair.strip().partition("=")
            if name != self.cookie:
                continue
            text, _, signature = value.rpartition(".")
            signed = hmac.compare_digest(self.sign(text).encode(), signature.encode())
            if signed and self.is_live(text):
                return text
        return ""

    def is_live(self, login: str) -> bool:
        id, _, expiry = login.partition(".")
        return float(expiry) > time.time() and id not in self.ended

    def log_in(self, user: str, password: str, address: str) -> str:
        """The Set-Cookie of a new login. Raises WebError, after equal work for any wrong pair."""
        where = throttled_as(address)
        wait = self.throttle.attempt(where, time.monotonic())
        if wait:
            raise WebError("too_many", f"too many failed logins; try again in {wait:.0f} seconds",
                           headers={"Retry-After": str(max(1, round(wait)))})
        if not hmac.compare_digest(digest(user, password), self.account):
            raise WebError("unauthorized", "wrong user name or password")
        self.throttle.forgive(where)
        text = f"{secrets.token_hex(16)}.{int(time.time()) + LOGIN_SECONDS}"
        return self.cookie_header(f"{text}.{self.sign(text)}", LOGIN_SECONDS)

    def log_out(self, login: str) -> None:
        """End a login for good, and the connections that it has open.

        Raises SandboxError when a restart of the server would bring it back.
        """
        id, _, expiry = login.partition(".")
        with self.lock:
            now = time.time()
            self.ended = {id: e for id, e in self.ended.items() if e > now} | {id: float(expiry)}
            self.cut_ended()
            self.store(self.secret, self.ended)

    def hold(self, login: str, sock: socket.socket) -> None:
        """Have a connection end with its login, at once where that has ended already."""
        self.held[sock] = login
        if not self.is_live(login):
            shut_down(sock)

    def cut_ended(self) -> None:
        """Shut the connections of ended logins down: it wakes who waits for them or writes."""
        for sock, login in list(self.held.items()):
            if not self.is_live(login):
                shut_down(sock)


def shut_down(sock: socket.socket) -> None:
    """End a connection that another thread uses.

    A TLS socket's own shutdown() takes its encryption away: the thread would write in the clear.
    """
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def digest(user: str, password: str) -> bytes:
    return hashlib.sha256(user.encode()).digest() + hashlib.sha256(password.encode()).digest()


# --- Connections ---


class App(ThreadingHTTPServer):
    """What one server is made of; a thread per connection, up to CONNECTIONS of them.

    Then one without a login makes room. Whatever an anonymous connection is doing (a handshake,
    half a head, half a body, an answer that it does not take), it goes before one with a login:
    first the oldest from an address that nobody is logged in from.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], config: Config,
                 tls: ssl.SSLContext | None) -> None:
        self.tls = tls
        self.password = config.get("serverPass") or secrets.token_urlsafe(12)
        state = web_path(address)
        self.gateway = Gateway(config.get("serverUser"), self.password, f"{state}.json", address,
                               tls is not None, config.all("allowedHosts"))
        self.sessions, self.terminals = Sessions(), Terminals(f"{state}.terminals")
        self.news, self.changes, self.repeats = News(), Changes(), Repeats()
        # What all sessions have used, and when that was read.
        self.usage: tuple[float, list[dict[str, Any]]] = (-math.inf, [])
        self.stopped_usage = -math.inf  # when the sessions of hosts that are stopped were asked
        self.usage_lock = threading.Lock()
        self.hidden: dict[str, Any] = {}  # of each host the sessions whose keys are hidden
        self.stopping = False
        self.room = threading.Condition()
        self.count = self.most = 0  # of connections: now, and since memory was given back
        # Whether each connection waits for a request, the oldest state first.
        self.waiting: dict[Handler, bool] = {}
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        """Bind, and do not ask the DNS for our own name as http.server does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            with self.room:
                self.count += 1
                ending = self.count > CONNECTIONS and self.end_first()
                enough = self.room.wait_for(lambda: self.count <= CONNECTIONS + SPARE_CONNECTIONS,
                                            ROOM_SECONDS if ending else 0)
            if not enough:
                raise OSError("too many connections")
            super().process_request(request, client_address)
        except (OSError, RuntimeError):  # no thread could be started
            self.count_out()
            self.shutdown_request(request)

    def end_first(self) -> bool:
        """End the connection that makes room; whether there is one."""
        known = {handler.network for handler in self.waiting if handler.login}
        anonymous = [handler for handler in self.waiting if not handler.login]
        strangers = [handler for handler in anonymous if handler.network not in known]
        idle = [handler for handler, waits in self.waiting.items() if waits and handler.login]
        chosen = next(iter([*strangers, *anonymous, *idle]), None)
        if chosen:
            del self.waiting[chosen]
            shut_down(chosen.connection)
        return chosen is not None

    def place(self, handler: Handler, waits: bool) -> None:
        """Note whether a connection waits for a request."""
        with self.room:
            self.waiting.pop(handler, None)
            self.waiting[handler] = waits

    def count_out(self, handler: Handler | None = None) -> None:
        """Make the room of a connection that is gone free."""
        with self.room:
            self.count -= 1
            if handler:
                self.waiting.pop(handler, None)
            self.room.notify()

    def service_actions(self) -> None:
        """What is to be done twice a second."""
        self.gateway.cut_ended()
        self.most = max(self.most, self.count)
        if self.most - self.count > CONNECTIONS_TRIMMED:
            self.most = self.count
            call_libc("malloc_trim", 0)  # else glibc keeps what is free between used blocks

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            log(traceback.format_exc().rstrip())


class Repeats:
    """The answers to requests that a client may send again, with the same Idempotency-Key, when it
    has lost the answer: what was asked is done once. See draft-ietf-httpapi-idempotency-key-header.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept = dict[tuple[str, ...], Kept]()

    def answer(self, key: tuple[str, ...], call: Callable[[], Reply]) -> Reply:
        """The answer to a request: that of the call, or of the one before, which may still run."""
        with self.lock:
            now = time.monotonic()
            for old in [old for old, kept in self.kept.items() if kept.until < now]:
                del self.kept[old]
            kept = self.kept.setdefault(key, Kept())
        with kept.lock:
            if kept.answer is None:
                try:
                    kept.answer = call()
                except Exception as error:
                    kept.answer = error_answer(as_web_error(error))
                kept.until = time.monotonic() + KEPT_SECONDS
            return kept.answer


class Kept:
    def __init__(self) -> None:
        self.lock, self.until = threading.Lock(), math.inf
        self.answer: Reply | None = None


class Handler(BaseHTTPRequestHandler):
    """One connection: its requests in turn. Every wait has a deadline for the whole of it."""

    server: App

    def setup(self) -> None:
        self.handed_over = False
        self.login = ""  # of the last request
        self.network = throttled_as(str(self.client_address[0]))
        self.buffer = bytearray()  # what was read and not used yet
        self.connection = socket.socket(fileno=self.request.detach())
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.local = self.connection.getsockname()[0]

    def finish(self) -> None:
        if not self.handed_over:
            with suppress(OSError):
                self.connection.close()
            self.leave()

    def leave(self) -> None:
        """The connection has ended, here or in a terminal."""
        self.server.gateway.held.pop(self.connection, None)
        self.server.count_out(self)

    def handle(self) -> None:
        self.server.place(self, waits=False)
        with suppress(OSError, Gone):  # an OSError is one of writing
            if tls := self.server.tls:
                self.connection.settimeout(HEAD_SECONDS)
                # In two steps, so that a handshake that hangs can be ended.
                self.connection = tls.wrap_socket(self.connection, server_side=True,
                                                  do_handshake_on_connect=False)
                self.connection.do_handshake()
            while self.serve_request():
                pass

    def serve_request(self) -> bool:
        """Read a request and answer it; whether the connection stays."""
        self.server.place(self, waits=True)
        deadline = time.monotonic() + IDLE_SECONDS
        while not self.buffer:
            self.fill(deadline)
        self.request_now: Request | None = None
        self.unread, began = False, time.monotonic()
        answer = self.answer_next()
        request = self.request_now
        self.connection.settimeout(WRITE_SECONDS)
        if isinstance(answer, Answer):
            keep = request is not None and request.keeps_alive and not self.unread
            self.connection.sendall(serialize(answer, request, keep, self.bare))
            self.log_answer(answer.status, began)
            if self.unread:
                self.linger()
            return keep
        self.server.gateway.hold(self.login, self.connection)
        self.log_answer(200 if isinstance(answer, Stream) else 101, began)
        if not isinstance(answer, Stream):
            answer(self.connection, bytes(self.buffer), self.leave)
            self.handed_over = True
            return False
        headers = {"Content-Type": answer.type, "Cache-Control": "no-store", "Connection": "close"}
        with closing(answer):
            self.connection.sendall(head_bytes(200, headers))
            if not self.bare:
                answer.run(self.connection)
        return False

    def answer_next(self) -> Reply:
        """Read and route one request; every exception becomes an answer."""
        head = b""
        try:
            head = self.read_head()
            self.request_now = request = parse_head(head, str(self.client_address[0]))
            self.unread = request.length > 0
            refused = self.server.gateway.admit(request, self.local)
            self.login = request.login
            self.server.place(self, waits=False)
            return refused or self.carry_out(request)
        except Gone:
            raise
        except Exception as error:
            if isinstance(error, Malformed):
                self.unread = True
            return error_answer(as_web_error(error))
        finally:
            # HEAD gets no body, not even with the error for a head that could not be read.
            self.bare = (head or self.buffer).startswith(b"HEAD ")

    def carry_out(self, request: Request) -> Reply:
        """Read the body of a request that the gateway has admitted, and call its function."""
        function, params = route(request.method, request.path)
        request.body = self.read_body(request)
        if request.path not in ANONYMOUS and not self.server.gateway.is_live(request.login):
            return anonymous_answer(request.path)  # the login ended while the body came
        key = request.headers.get("idempotency-key")
        if not (key and request.login) or request.method not in ("POST", "DELETE"):
            return function(self.server, request, params)
        if len(key) > KEY_CHARS:
            raise WebError("bad_request", f"Idempotency-Key: it is longer than {KEY_CHARS}")
        whole = request.login, request.method, request.path, key
        return self.server.repeats.answer(whole, lambda: function(self.server, request, params))

    def fill(self, deadline: float, late: str = "") -> None:
        """Read once. Raises Gone, and after the deadline Malformed where `late` says why."""
        try:
            if deadline <= time.monotonic():
                raise TimeoutError
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            data = self.connection.recv(CHUNK_BYTES)
        except OSError as error:
            if late and isinstance(error, TimeoutError):
                raise Malformed("timeout", late) from None
            raise Gone from None
        if not data:
            raise Gone
        self.buffer += data

    def read_head(self) -> bytes:
        """The head up to its empty line. Raises Malformed."""
        deadline = time.monotonic() + HEAD_SECONDS
        while self.buffer.startswith(b"\r\n"):  # RFC 9112, 2.2
            del self.buffer[:2]
        while (at := self.buffer.find(b"\r\n\r\n", 0, HEAD_BYTES + 4)) < 0:
            if len(self.buffer) > HEAD_BYTES:
                raise Malformed("head_too_large", f"the head is longer than {HEAD_BYTES} bytes")
            self.fill(deadline, f"the head did not come within {HEAD_SECONDS} seconds")
        head = bytes(self.buffer[:at])
        del self.buffer[: at + 4]
        return head

    def read_body(self, request: Request) -> bytes:
        """The body of a request. Raises Malformed."""
        limit = BODY_BYTES if request.login else ANONYMOUS_BODY_BYTES
        if request.length > limit:
            raise Malformed("too_large", f"the body is longer than {limit} bytes")
        expected = request.headers.get("expect", "")
        if expected and expected.lower() != "100-continue":
            raise Malformed("expectation_failed", "the header Expect may be 100-continue only")
        if expected and request.length > len(self.buffer):
            try:
                self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            except OSError:
                raise Gone from None
        deadline = time.monotonic() + BODY_SECONDS
        while len(self.buffer) < request.length:
            self.fill(deadline, f"the body did not come within {BODY_SECONDS} seconds")
        body = bytes(self.buffer[: request.length])
        del self.buffer[: request.length]
        self.unread = False
        return body

    def linger(self) -> None:
        """Let the client read our answer before it gets a reset for the rest of what it sends."""
        self.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + 1
        for _ in range(64):
            self.buffer.clear()
            self.fill(deadline)

    def log_answer(self, status: int, began: float) -> None:
        request = self.request_now
        what = "-"
        if request:  # without its path it was refused before that was read
            what = f"{request.method} {request.path or request.target.partition('?')[0]}"
        took = (time.monotonic() - began) * 1000
        log(f"{self.client_address[0]} {ascii(what)[1:-1]} {status} {took:.1f}ms")


# --- Pages ---

RELOAD = "ui/reload.js"  # is in each page, not beside it: it has to be there when others are not


def asset_names() -> list[str]:
    """Paths below static/ of what pages are made from, in a checkout, a wheel or a zipapp."""
    here = os.path.dirname(os.path.abspath(sandbox.__file__))
    if os.path.isfile(here):
        import zipfile

        with zipfile.ZipFile(here) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()
                     if name.startswith("sandbox_static/")]
    else:
        installed = f"{here}/sandbox_static"
        top = installed if os.path.isdir(installed) else f"{here}/static"
        names = [os.path.relpath(os.path.join(at, file), top) for at, _, files in os.walk(top)
                 for file in files]
    return sorted(name for name in names if name.startswith(("ui/", "preview/", "auth/")))


@lru_cache
def asset_version() -> str:
    """A hash of all that pages load. It is part of its addresses: they can be cached for ever."""
    whole = hashlib.sha256()
    for name in asset_names():
        whole.update(f"{name}\0".encode() + hashlib.sha256(sandbox.asset(name)).digest())
    return whole.hexdigest()[:16]


@lru_cache(maxsize=128)
def packed_asset(name: str) -> tuple[bytes, str, bool]:
    """Body, content type, and whether the body is gzip. Raises WebError for no such asset."""
    try:
        type, body = TYPES[name.rpartition(".")[2]], sandbox.asset(name)
    except (KeyError, SandboxError):
        raise WebError("not_found", "there is no such file") from None
    if name == "auth/login.css":  # the one sheet that may be had before the login
        body = sandbox.asset("ui/tokens.css") + body
    if name.endswith(".html"):
        body = body.replace(b"{{version}}", asset_version().encode())
        body = body.replace(b"{{reload}}", sandbox.asset(RELOAD))
    packed = gzip.compress(body, 9, mtime=0)
    return (packed, type, True) if len(packed) < len(body) * 0.9 else (body, type, False)


@lru_cache
def policy_of(page: str) -> str:
    """The policy of a page: of all scripts in it, the one that loads it again may run."""
    digest = base64.b64encode(hashlib.sha256(sandbox.asset(RELOAD)).digest()).decode()
    policy = CSP.replace("script-src 'self'", f"script-src 'self' 'sha256-{digest}'")
    if page == "ui/index.html":  # xterm.js writes style elements, and takes no nonce for them
        policy = policy.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
    return policy


def asset_route(name: str) -> Callable[[App, Request, Params], Answer]:
    """A route to one file, or to those of a folder (`ui/`) at an address with their hash."""
    def get(_app: App, _request: Request, params: Params) -> Answer:
        body, type, packed = packed_asset(name + params.get("file", ""))
        headers = {"Content-Security-Policy": policy_of(name)} if name.endswith(".html") else {}
        if params.get("version") == asset_version():
            headers["Cache-Control"] = "private, max-age=31536000, immutable"
        return Answer(body, type, headers=headers, packed=packed)

    return get


def post_login(app: App, request: Request, _params: Params) -> Answer:
    data = fields(request.json(), username=str, password=str)
    if len(data) < 2:
        raise WebError("bad_request", "username and password are needed")
    cookie = app.gateway.log_in(data["username"], data["password"], request.address)
    return json_answer({"ok": True}, headers={"Set-Cookie": cookie})


def post_logout(app: App, request: Request, _params: Params) -> Answer:
    gone = {"Set-Cookie": app.gateway.cookie_header("", 0)}
    try:
        if request.login:
            app.gateway.log_out(request.login)
    except SandboxError as error:
        message = f"the login has ended, but a restart would bring it back: {error.message}"
        hint = "make room there, then restart the server with another password"
        raise WebError("disk_full", message, hint, gone) from None
    return json_answer({"ok": True}, headers=gone)


def fields(data: Mapping[str, Any], **types: type) -> dict[str, Any]:
    """The fields that are there, null left out.

    Raises WebError for an unknown one or a wrong type.
    """
    for name, value in data.items():
        if name not in types:
            raise WebError("bad_request", f"unknown field {name!r}{sandbox.nearest(name, types)}",
                           f"the fields are {', '.join(types)}")
        if value is not None and not isinstance(value, types[name]):
            raise WebError("bad_request",
                           f"{name}: {json.dumps(value)[:80]} is not a {types[name].__name__}")
    return {name: value for name, value in data.items() if value is not None}


# --- Sessions ---


@contextmanager
def as_request_error() -> Iterator[None]:
    """Have a check that fails be the client's mistake, whatever the command line makes of it."""
    try:
        yield
    except SandboxError as error:
        raise WebError("bad_request", error.message, error.hint) from None


Rows = list[dict[str, Any]]


class Sessions:
    """The list of sessions: one call of the engine at a time, however many ask."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changes = 0
        self.rows: list[dict[str, Any]] = []
        self.known = (-1, 0.0)  # the number of changes, and the time, that the rows are of
        # When the last call failed, and what is told of it: an error that is kept holds its frames.
        self.failed = (0.0, ("", "", ""))
        self.ports: dict[str, Any] = {}  # those of hosts that are brought here, by session
        self.hosts: dict[str, Any] = {}  # what each has listed

    def expire(self) -> None:
        """Have the next list be a new one: something has changed."""
        self.changes += 1

    def list(self) -> Rows:
        asked = time.monotonic()
        with self.lock:
            if self.failed[0] > asked:  # a call failed while this one waited
                raise WebError(*self.failed[1])
            changes, when = self.known
            if changes != self.changes or time.monotonic() - when > LIST_SECONDS:
                changes = self.changes
                try:
                    self.rows = self.ask()
                except SandboxError as error:
                    told = as_web_error(error)
                    self.failed = (time.monotonic(), (told.code, told.message, told.hint))
                    raise
                self.known = (changes, time.monotonic())
            return self.rows

    def ask(self) -> Rows:
        """What there is on all hosts; one that does not answer holds up none of the others."""
        rows, lost = sandbox.list_everywhere(sandbox.load_config(), aside=self.hosts)
        self.bring_ports(rows)
        return rows + [sandbox.lost_row(host, why) for host, why in lost.items()]

    def bring_ports(self, rows: Rows) -> None:
        """Have the ports of our sessions elsewhere reach this machine as long as they run."""
        wanted = {row["name"]: row for row in rows
                  if row["host"] and row["ports"] and row["state"] == "running"}
        long_ago = time.monotonic() - LOST_SECONDS
        for name in [name for name, ports in self.ports.items()
                     if name not in wanted or ports.has_ended() and ports.begun < long_ago]:
            self.ports.pop(name).__exit__()
        for name in set(wanted) - set(self.ports):
            import sandbox_hosts

            row = wanted[name]
            engine = sandbox.engine_of(row["runtime"], row["host"])
            known = sandbox.recall([engine], name)
            if not (known and known[1].is_ours):  # another person of the host chose its ports
                continue
            self.ports[name] = sandbox_hosts.Ports(engine, name, row["ports"], brief=False)
            with suppress(SandboxError, OSError):
                self.ports[name].__enter__()


def find(name: str) -> tuple[Engine, Session]:
    """The session of a name. Raises WebError when there is none."""
    with suppress(ValueError):
        name = sandbox.a_name(name)
        engine, session = sandbox.find_session(sandbox.candidates(sandbox.load_config()), name)
        if session:
            return engine, session
    raise WebError("not_found", f"there is no session {name!r}")


def find_running(name: str) -> tuple[Engine, Session]:
    engine, session = find(name)
    session.created()  # raises where its labels are not whole
    if session.state != "running":
        raise WebError("conflict", f"the session {name} is {session.state}", "start it first")
    return engine, session


SETTINGS = tuple(key.name for key in sandbox.KEYS.values() if key.setting)


def prompt_template(agent: str, configured: str | None, settings: Mapping[str, Any]) -> str:
    """A session's agentPromptCommand: set for it, configured, or its agent's; '' for none."""
    own = settings.get("agentPromptCommand")
    agents = sandbox.AGENTS[agent].prompt if agent in sandbox.AGENTS else ""
    return str(own if own is not None else configured or agents)


def has_agent_mode(row: Mapping[str, str], data: Mapping[str, Any]) -> bool:
    """Whether a session of the list can be prompted: its template has the placeholder."""
    settings: Mapping[str, Any] = {}
    with suppress(SandboxError):  # the session's own page shows the error
        settings = sandbox.read_settings(row["name"])
    profile = data.get("runs", {}).get(row["profile"])
    configured = {**data,
                  **(profile if isinstance(profile, dict) else {})}.get("agentPromptCommand")
    return "{prompt}" in prompt_template(row["agent"], configured, settings)


def recreate_lines(session: Session, config: Config) -> list[str]:
    """In what the container differs from its configuration: what needs a new container."""
    have, _ = session.created()
    want = sandbox.spec_of(config) | {key: have.get(key)
                                      for key in ("directory", "workdir", "sources")}
    return sandbox.differences(have, want | {"git": sandbox.git_of(want)})


def workdir(session: Session) -> str:
    return str(session.created()[0]["workdir"])


def session_data(session: Session, engine: Engine) -> dict[str, Any]:
    try:
        have, _ = session.created()
    except sandbox.BrokenSession:
        unknown = ("agent", "profile", "directory", "workdir", "workspace", "image", "network",
                   "keys", "agentPromptCommand")
        return {**dict.fromkeys(unknown, ""), "name": session.name, "state": "broken", "ports": [],
                "runtime": engine.name, "host": engine.host, "recreate": []}
    settings = sandbox.read_settings(session.name)
    config = sandbox.session_config(session, settings)
    return {
        "name": session.name, "state": session.state, "agent": session.agent,
        "profile": session.profile,
        "directory": session.labels.get("sandbox.directory", ""), "workdir": workdir(session),
        "image": have["image"], "ports": have["ports"],
        "network": sandbox.network_of(session, config) if session.has_rules else have["network"],
        "workspace": have.get("workspace", "mount"), "keys": have.get("keys", "visible"),
        "runtime": engine.name, "host": engine.host, "recreate": recreate_lines(session, config),
        "agentPromptCommand": prompt_template(session.agent, config.get("agentPromptCommand"),
                                              settings),
    }


def get_sessions(app: App, request: Request, _params: Params) -> Answer:
    """All sessions; ?tail=<bytes> adds the end of the last job's output."""
    tail = request.number("tail", 0, 0, TAIL_BYTES)
    rows, data = [], sandbox.read_config()
    for row in app.sessions.list():
        if row["state"] == "unreachable":  # a host
            rows.append({**row, "agentMode": False, "jobs": 0, "autostarts": 0, "terminals": 0,
                         "last": None})
            continue
        jobs = list_jobs(row["name"], 20)
        running = [job["kind"] for job in jobs if job["state"] == "running"]
        last = dict(jobs[0]) if jobs else None
        if last and tail:
            last["tail"] = output_tail(row["name"], last["id"], tail)
        rows.append({**row, "agentMode": has_agent_mode(row, data), "jobs": len(running),
                     "autostarts": running.count("autostart"),
                     "terminals": app.terminals.running(row["name"]), "last": last})
    return json_answer(rows)


def post_sessions(app: App, request: Request, _params: Params) -> Answer:
    """Create a session."""
    data = fields(request.json(), name=str, profile=str, agent=str, command=str, directory=str,
                  image=str, **{"keys": object}, **dict.fromkeys(["host"], str),
                  **dict.fromkeys(["workspace", *SETTINGS], object))
    keys = {"name": "containerName", "agent": "yolo", "directory": "hostPath",
            "image": "imageVersion"}
    settings = checked_settings({key: data.pop(key) for key in SETTINGS
                                 if key in data and key != "network"}, {})
    profile = data.pop("profile", None)
    flags = Layer({keys.get(name, name): value for name, value in data.items()}, "request", code=2,
                  places={key: name for name, key in keys.items()})
    config = sandbox.load_config(flags, profile)
    directory = config.get("hostPath")
    if not config.is_given("hostPath"):
        raise WebError("bad_request", "the directory is missing",
                       "give directory: an absolute path on the host")
    engines = sandbox.candidates(config)
    if engines[0].shares_files and not os.path.isdir(directory):
        raise WebError("bad_request", f"directory: {directory} is not a directory on the host")
    name = config.get("containerName") or sandbox.generated_name(directory)
    with CREATION_LOCK:  # of two clients that want one name the second gets the message
        check_free(engines, name)
        return create(app, engines, name, config, flags, settings)


CREATION_LOCK = threading.Lock()


def check_free(engines: Sequence[Engine], name: str) -> None:
    """Raise WebError where a container has a name."""
    try:
        taken = sandbox.find_session(engines, name)[1]
    except sandbox.NotASession as error:
        raise WebError("conflict", error.message, "choose another name") from None
    if taken:
        raise WebError("conflict", f"there is a session {name} already", "choose another name")


def create(app: App, engines: Sequence[Engine], name: str, config: Config, flags: Layer,
           settings: dict[str, Any], source: Session | None = None) -> Answer:
    """Create the container and its settings; of a duplicate the home is copied."""
    spec, home = sandbox.spec_of(config, engines), ""
    with as_request_error():
        sandbox.check_spec(spec)
        sandbox.check_mounts(spec)
    with sandbox.lock_homes():
        if source:
            home = sandbox.duplicate_home(engines[0], source, config, spec)
        engine, session = sandbox.create_session(engines, name, config, flags, spec, home, source,
                                                 settings=settings)
    return finish_start(app, engine, session, 201)


def finish_start(app: App, engine: Engine, session: Session, status: int = 200) -> Answer:
    """Do what follows every start of a container: a new list, the autostart script, the answer."""
    app.sessions.expire()
    start_autostart(engine, session)
    return json_answer(session_data(session, engine), status)


def post_recreate(app: App, _request: Request, params: Params) -> Answer:
    """Put a new container from what is configured now in the place of the old one.

    Its home, settings and jobs stay.
    """
    engine, session = find(params["session"])
    config, kept, spec = sandbox.recreation(session, Layer({}, "request"))
    with as_request_error():
        sandbox.check_recreation(session, spec)
    sandbox.present_image(engine, config)  # before anything goes
    app.terminals.close_all(session.name, "created anew")
    try:
        session = sandbox.recreate_session(engine, session, config, kept, spec)
    finally:
        app.sessions.expire()
    return finish_start(app, engine, session)


def named(data: Mapping[str, Any]) -> str:
    """The name that the fields of a request ask for, '' for none. Raises WebError."""
    name = data.get("name", "")
    try:
        return sandbox.a_name(name) if name else ""
    except ValueError as error:
        raise WebError("bad_request", f"name: {error}") from None


def post_rename(app: App, request: Request, params: Params) -> Answer:
    """Give a session another name; what runs in it goes on, and pages stay on its terminals."""
    engine, session = find(params["session"])
    name, terminals = named(fields(request.json(), name=str)), app.terminals.of(session.name)
    if not name:
        raise WebError("bad_request", "the name is missing")
    name = engine.full(name)
    check_free([engine], name)
    sandbox.rename_session(engine, session, name)
    for terminal in terminals.values():
        terminal.session.name = name
    app.sessions.expire()
    return json_answer(session_data(find(name)[1], engine))


def post_duplicate(app: App, request: Request, params: Params) -> Answer:
    """Create a session like another one, with a copy of its home; ports are its own. It may have
    another agent and workspace.
    """
    engine, source = find(params["session"])
    data = fields(request.json(), name=str, agent=str, workspace=str)
    given = {"yolo" if field == "agent" else field: value for field, value in data.items()
             if field != "name"}
    flags = Layer({"ports": [], **given}, "request", code=2, places={"yolo": "agent"})
    config, kept, _ = sandbox.recreation(source, flags)
    settings = sandbox.settings_beside(source, flags)
    if "agent" in data and config.get("yolo") != source.agent:
        settings.pop("agentPromptCommand", None)
    name = named(data) or sandbox.generated_name(config.get("hostPath"))
    with CREATION_LOCK:
        check_free([engine], name)
        return create(app, [engine], name, config, kept, settings, source)


def get_session(_app: App, _request: Request, params: Params) -> Answer:
    engine, session = find(params["session"])
    return json_answer(session_data(session, engine))


def get_users(_app: App, _request: Request, params: Params) -> Answer:
    """What would end with the session: the commands of all who use it."""
    engine, session = find(params["session"])
    return json_answer({"users": sandbox.users_of(engine, session)})


def delete_session(app: App, request: Request, params: Params) -> Answer:
    """Remove a session; with ?force=1 also work in its copy that was not merged."""
    engine, session = find(params["session"])
    if session.copy and not request.number("force", 0, 0, 1):
        import sandbox_changes

        if work := sandbox_changes.unmerged(engine, session):
            raise WebError("conflict", f"{session.name} holds work that was not merged: {work}",
                           "merge it, or remove it with ?force=1")
    sandbox.remove_session(engine, session)
    for folder in list(ENDED_JOBS):
        if folder.startswith(job_folder(session.name) + "/"):
            ENDED_JOBS.pop(folder, None)
    app.sessions.expire()
    app.terminals.close_all(session.name, "removed")
    return json_answer({"ok": True})


def post_start(app: App, _request: Request, params: Params) -> Answer:
    engine, session = find(params["session"])
    session.created()  # raises where its labels are not whole
    if session.state == "running":
        return json_answer(session_data(session, engine))
    sandbox.start_session(engine, session)
    return finish_start(app, engine, session)


def post_stop(app: App, _request: Request, params: Params) -> Answer:
    engine, session = find(params["session"])
    sandbox.stop_session(engine, session)
    sandbox.forget_terminals(session.name)
    app.sessions.expire()
    return json_answer(session_data(session, engine))


def settings_answer(session: Session) -> Answer:
    """The settings, what is in force, what would be without them, what needs a new container."""
    settings = sandbox.read_settings(session.name)
    config = sandbox.session_config(session, settings)
    without = sandbox.session_config(session, {})
    hidden = hidden_keys(session, config)
    shown = {key: settings.get(key) for key in SETTINGS}
    if shown["env"]:
        shown["env"] = {name: None if name in hidden else value
                        for name, value in shown["env"].items()}
    return json_answer({"settings": shown,
                        "effective": in_force(session, config, settings),
                        "configured": in_force(session, without, {}),
                        "hiddenKeys": hidden,
                        "recreate": recreate_lines(session, config)})


def hidden_keys(session: Session, config: Config) -> list[str]:
    """The variables whose values what runs in a session does not see."""
    if not session.hides_keys:
        return []
    import sandbox_keys

    return sandbox_keys.names(config)


def find_hidden(name: str) -> tuple[Engine, Session]:
    """A session whose keys are hidden. Raises WebError for another."""
    engine, session = find(name)
    if not session.hides_keys:
        raise WebError("conflict", f"the keys of {session.name} are visible: nothing counts",
                       "create it again with hidden keys")
    return engine, session


def get_usage(_app: App, _request: Request, params: Params) -> Answer:
    """What a session has used of its models, by day, its budget, and how its broker is."""
    import sandbox_keys

    engine, session = find_hidden(params["session"])
    return json_answer({**sandbox_keys.used_by(engine, session),
                        "broker": sandbox_keys.state_of(engine, session),
                        "hiddenKeys": hidden_keys(session, sandbox.session_config(session)),
                        "prices": sandbox_keys.table()["prices"]["date"]})


def get_all_usage(app: App, _request: Request, _params: Params) -> Answer:
    """What all sessions with hidden keys have used. It is given again for a few seconds."""
    import sandbox_keys

    with app.usage_lock:
        if time.monotonic() - app.usage[0] > USAGE_SECONDS:
            hidden, _ = sandbox_keys.hidden_sessions(sandbox.load_config(), app.hidden)
            # A host may have to start something for the counts of a session that is stopped.
            kept = {entry["name"]: entry for entry in app.usage[1]}
            recent = time.monotonic() - app.stopped_usage < STOPPED_USAGE_SECONDS
            asked = [(engine, session) for engine, session in hidden if session.name not in kept
                     or not (recent and engine.host and session.state != "running")]
            if not recent:
                app.stopped_usage = time.monotonic()
            kept |= {entry["name"]: entry for entry in sandbox_keys.used(asked)}
            app.usage = (time.monotonic(), [kept[session.name] for _, session in hidden])
        return json_answer({"sessions": app.usage[1], "day": iso(time.time())[:10],
                            "prices": sandbox_keys.table()["prices"]["date"]})


USAGE_SECONDS, STOPPED_USAGE_SECONDS = 5, 300


def post_budget(app: App, request: Request, params: Params) -> Answer:
    """Change what agents may use, from the next request on; amounts that are not named stay."""
    import sandbox_keys

    data = fields(request.json(), budget=object)
    if "budget" not in data:
        raise WebError("bad_request", "the budget is missing",
                       'give budget: such as "10usd", or "" for none')
    engine, session = find_hidden(params["session"])
    sandbox_keys.change_budget(engine, session, data["budget"])
    app.usage = (-math.inf, [])
    return get_usage(app, request, params)


def in_force(session: Session, config: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    template = prompt_template(session.agent, config.get("agentPromptCommand"), settings)
    values = {key: config.get(key) for key in SETTINGS if key != "env"}
    return values | {"agentPromptCommand": template}


def get_settings(_app: App, _request: Request, params: Params) -> Answer:
    return settings_answer(find(params["session"])[1])


def put_settings(_app: App, request: Request, params: Params) -> Answer:
    """Change settings: a key that is left out stays, null takes it back to what is configured."""
    data = request.json()
    engine, session = find(params["session"])
    with sandbox.lock_settings(session.name):
        settings = checked_settings(data, sandbox.read_settings(session.name))
        config = sandbox.session_config(session, settings)
        with as_request_error():
            sandbox.check_spec(sandbox.spec_of(config) | {"workdir": workdir(session)})
            sandbox.env_script(sandbox.exec_env(config, session.created()[0]))
        sandbox.write_settings(session.name, settings)
        if session.has_rules and session.state == "running" and "network" in data:
            sandbox.set_rules(engine, session, sandbox.network_of(session, config))
        if session.hides_keys and session.state == "running":
            sandbox.give_keys(engine, session, config)
    return settings_answer(session)


def checked_settings(changes: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Old settings with the changes, checked as the command line checks them.

    Raises SandboxError or WebError.
    """
    fields(changes, **dict.fromkeys(SETTINGS, object))
    given = {key: value for key, value in changes.items() if value is not None}
    if isinstance(env := given.get("env"), dict):  # a value that is not shown stays
        had = old.get("env", {})
        given["env"] = {name: had.get(name) if value is None else value
                        for name, value in env.items()}
    # An empty template means no AGENT mode, where null would mean the default.
    none = {key: "" for key in ("agentPromptCommand",) if given.get(key) == ""}
    values = {key: value for key, value in given.items() if key not in none}
    checked = Layer(values, "check", code=2).values
    return {key: value for key, value in old.items() if key not in changes} | checked | none


# --- Network ---

def find_allowlist(name: str) -> tuple[Engine, Session]:
    """A session whose network is an allowlist. Raises WebError for another."""
    engine, session = find(name)
    if not session.has_rules:
        raise WebError("conflict", f"the session {name} has no allowlist",
                       "set its network in the settings, then create it again")
    return engine, session


def get_network(_app: App, _request: Request, params: Params) -> Answer:
    _, session = find_allowlist(params["session"])
    return json_answer(sandbox.network_of(session, sandbox.session_config(session)))


def post_network(_app: App, request: Request, params: Params) -> Answer:
    """Allow or deny one more host, in force for the next connection."""
    rules = {key: [rule] for key, rule in fields(request.json(), allow=str, deny=str).items()}
    if not rules:
        raise WebError("bad_request", "the host is missing", "give allow or deny: <host>[:<port>]")
    checked = Layer({"network": {"allow": [], **rules}}, "check", code=2).values["network"]
    engine, session = find_allowlist(params["session"])
    return json_answer(sandbox.change_rules(engine, session, checked))


def get_decisions(app: App, _request: Request, params: Params) -> Stream:
    """Server-sent events: what the proxy has decided of late, and what it decides."""
    engine, session = find(params["session"])
    if not session.proxy:
        find_allowlist(session.name)  # raises
    argv = engine.logs_argv(session.proxy, follow=True, tail=SHOWN_DECISIONS)
    kept = sorted(sandbox.kept_decisions(engine, session), key=lambda entry: str(entry["time"]))
    return Stream(EVENTS, lambda sock: follow_log(sock, kept[-SHOWN_DECISIONS:], argv, app))


def follow_log(sock: socket.socket, kept: Sequence[Any], argv: Sequence[str], app: App) -> None:
    """Send what is kept, then each JSON line of a command, until it ends or the client has gone."""
    (out, out_end), null = os.pipe(), os.open(os.devnull, os.O_RDWR)
    pid = sandbox.spawn(argv, fds={0: null, 1: out_end, 2: null})
    sandbox.Output.close(out_end, null)
    poller, rest, quiet = select.poll(), b"", time.monotonic()
    poller.register(sock, select.POLLIN)
    poller.register(out, select.POLLIN)
    try:
        sock.sendall(b": the log\n\n" + b"".join(event_bytes("decision", item) for item in kept))
        while not app.stopping:
            ready = [fd for fd, _ in poller.poll(1000)]
            if sock.fileno() in ready and not sock.recv(4096):
                return
            if out in ready:
                data = os.read(out, CHUNK_BYTES)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                rest = rest if len(rest) < CHUNK_BYTES else b""  # no decision is that long
                decisions = filter(None, map(sandbox.decision_of, lines))
                sock.sendall(b"".join(event_bytes("decision", decision) for decision in decisions))
                quiet = time.monotonic()
            elif time.monotonic() - quiet > HEARTBEAT_SECONDS:
                sock.sendall(b": still here\n\n")
                quiet = time.monotonic()
    finally:
        os.close(out)
        os.kill(pid, signal.SIGTERM)
        sandbox.wait_for(pid)


def get_profiles(_app: App, _request: Request, _params: Params) -> Answer:
    """What a session can be created from."""
    data = sandbox.read_config()
    profiles = []
    for name in data.get("runs", {}):
        try:
            config = sandbox.load_config(profile=name, data=data)
            own = config.is_given("hostPath")
            profiles.append({"name": name, "agent": config.get("yolo") or "", "image": config.image,
                             "directory": config.get("hostPath") if own else "", "error": None})
        except SandboxError as error:
            profiles.append({"name": name, "agent": "", "image": "", "directory": "",
                             "error": error.message})
    directory = sandbox.load_config().get("hostPath") or ""
    details = [{"name": agent.program, "title": agent.title, "shortcuts": agent.shortcuts,
                "agentPromptCommand": agent.prompt, "events": agent.events}
               for agent in sandbox.AGENTS.values()]
    return json_answer({"profiles": profiles, "agents": list(sandbox.AGENTS),
                        "agentDetails": details, "directory": directory})


def get_directories(_app: App, request: Request, _params: Params) -> Answer:
    """Names of the host's directories that ?path= may go on with; none where it cannot be read."""
    path = request.query.get("path", "")
    if path.startswith("~/"):
        path = os.path.expanduser(path)
    parent, _, begun = path.rpartition("/")
    names: list[str] = []
    if path.startswith("/"):
        with suppress(OSError, ValueError), os.scandir(f"{parent}/") as entries:
            names = nsmallest(SHOWN_DIRECTORIES, (
                entry.name for entry in islice(entries, LOOKED_AT_ENTRIES)
                if entry.name.startswith(begun) and (begun or not entry.name.startswith("."))
                and sandbox.is_exact(entry.name) and os.path.isdir(entry.path)))
    return json_answer({"directories": names})


# --- Jobs ---
# ~/.sandbox/jobs/<session>/<job>/: job.json what it is, output the bytes of both streams as they
# came, runs the lengths of their runs, status how it ended, lock held by the supervisor, cancel
# when asked. See static/session/job.py.

# Both are read when the service starts: an upgrade may put others in their place.
SUPERVISOR = sandbox.asset("session/job.py")
sandbox.exec_script()


def job_folder(session: str, job: str = "") -> str:
    return os.path.join(sandbox.jobs_path(session), job).rstrip("/")


def iso(seconds: float) -> str:
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{text}.{int(seconds * 1000) % 1000:03d}Z"


def start_job(engine: Engine, session: Session, kind: str, command: str, shown: Mapping[str, Any],
              extra_env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a shell command line in a session, under a supervisor, which takes the snapshots of its
    turn, too; the job as clients see it.
    """
    config = sandbox.session_config(session)
    env = {**sandbox.exec_env(config, session.created()[0]), **(extra_env or {})}
    with as_request_error():
        script = sandbox.env_script(env)
    sandbox.give_keys(engine, session, config)
    if len(command.encode()) > sandbox.ENVIRONMENT_BYTES:
        raise WebError("too_large", f"the command is longer than {sandbox.ENVIRONMENT_BYTES} bytes")
    prune_jobs(session.name)
    now = time.time()
    id, tag = f"{int(now * 1000):011x}-{sandbox.random_id()}", sandbox.random_id()
    folder = job_folder(session.name, id)
    argv, more = sandbox.compose(command, []), dict[str, str]()
    if engine.host:
        import sandbox_hosts

        argv, more = sandbox_hosts.followed(engine, session, workdir(session), tag, argv,
                                            f"{folder}/cancel")
    else:
        argv = sandbox.exec_argv(engine, session, workdir(session), tag, argv)
    job = {"id": id, "session": session.name, "kind": kind, "command": command, **shown,
           "started": iso(now)}
    try:
        turn = None
        if kind != "autostart":
            title = sandbox.one_line(shown.get("prompt", command).strip().split("\n")[0][:200])
            about = {"id": id, "what": kind, "command": title}
            turn = sandbox.wanted_turn(config, engine, session, about, kind == "prompt")
        write_job(folder, {"job": job, "tag": tag})
        start_supervisor([folder, str(JOB_BYTES), *argv], script,
                         {**(turn.environ() if turn else {}), **more})
    except BaseException:
        sandbox.remove_tree(folder)
        raise
    return read_job(session.name, id)


def write_job(folder: str, job: Mapping[str, Any]) -> None:
    """Make the folder of a job, which others see when it is supervised.

    The room for its status is taken now, so that it fits on a full disk.
    """
    sandbox.make_private(folder)
    for name, content in (("output", b""), ("runs", b""), ("lock", b""),
                          ("status", b" " * STATUS_BYTES)):
        with open(f"{folder}/{name}", "wb") as file:
            file.write(content)
    sandbox.write_private(f"{folder}/job.json.new", json.dumps(job))


def start_supervisor(args: Sequence[str], script: str, more: Mapping[str, str] = {}) -> None:
    """Run static/session/job.py and wait until it has detached itself.

    It is read from a pipe, because in a zipapp it is no file that Python could be given.
    """
    source, end = os.pipe()
    with suppress(BrokenPipeError), open(end, "wb") as program:
        with open(source, "rb") as stdin, open(os.devnull, "r+b", 0) as null:
            fds = {0: stdin.fileno(), 1: null.fileno(), 2: null.fileno()}
            pid = sandbox.spawn([sys.executable, "-I", "-S", "-", *args], fds=fds, own_group=True,
                                env={**os.environ, "SANDBOX_ENV": script, **more})
        program.write(SUPERVISOR)
    if sandbox.wait_for(pid):
        raise WebError("internal", "the supervisor of the job could not be started")


def start_autostart(engine: Engine, session: Session) -> None:
    """Start the session's autostart script as a job.

    Raises WebError when the container runs without it.
    Where this is not reached, the session's next command starts it: see static/session/exec.sh.
    """
    try:
        if script := sandbox.session_config(session).get("autostart"):
            start_job(engine, session, "autostart", script, {}, {"SANDBOX_AUTOSTART": "job"})
    except (WebError, SandboxError, OSError) as error:
        cause = as_web_error(error)
        raise WebError(cause.code,
                       f"{session.name} was started, but not its autostart script: {cause.message}",
                       cause.hint) from None


ENDED_JOBS: dict[str, dict[str, Any]] = {}  # by folder; an ended job does not change


def read_job(session: str, id: str) -> dict[str, Any]:
    """A job as clients see it. Raises WebError when there is none."""
    folder = job_folder(session, id)
    if folder in ENDED_JOBS:
        return ENDED_JOBS[folder]
    try:
        kept = sandbox.read_json(f"{folder}/job.json")["job"]
        job: dict[str, Any] = {key: value for key, value in kept.items() if isinstance(value, str)}
        if not {"kind", "command", "started"} <= job.keys():
            raise ValueError("it describes no job")
        alive = is_locked(f"{folder}/lock")
        status = kept_status(f"{folder}/status")
        size = os.stat(f"{folder}/output").st_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise WebError("not_found", f"there is no job {id!r}") from None
    state = "running" if alive else "lost"
    if status:
        state = "cancelled" if os.path.exists(f"{folder}/cancel") else "ended"
    job |= {"id": id, "session": session, "state": state, "size": size,
            **{key: status.get(key) for key in STATUS_TYPES}}
    if changes := kept_changes(f"{folder}/changes"):
        job["changes"] = changes
    if state == "lost":
        job["error"] = "the job's supervisor was killed; what came after is not known"
    if state != "running":
        while len(ENDED_JOBS) > 500:
            ENDED_JOBS.pop(next(iter(ENDED_JOBS)), None)
        ENDED_JOBS[folder] = job
    return job


def kept_changes(path: str) -> dict[str, Any] | None:
    """What the turn of a job has changed, None where that is not known, or not yet."""
    with suppress(OSError, ValueError):
        data = sandbox.read_json(path)
        return data if isinstance(data, dict) else None
    return None


STATUS_TYPES = {"exit": int, "ended": str, "error": str}


def kept_status(path: str) -> dict[str, Any]:
    """How a job ended; {} while its status is empty, or when it makes no sense. Raises OSError."""
    with open(path, "rb") as file:
        text = file.read(2 * STATUS_BYTES).strip()
    with suppress(ValueError):
        data = sandbox.parse_json(text or b"{}")
        if isinstance(data, dict) and type(data.get("exit")) is int:
            return {key: data[key] for key, type in STATUS_TYPES.items()
                    if isinstance(data.get(key), type)}
    return {}


def is_locked(path: str) -> bool:
    """Whether a process holds the lock of a file."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def job_ids(session: str) -> list[str]:
    """Newest first."""
    try:
        return sorted(os.listdir(job_folder(session)), reverse=True)
    except OSError:
        return []


def list_jobs(session: str, limit: int) -> list[dict[str, Any]]:
    jobs = []
    for id in job_ids(session)[:limit]:
        with suppress(WebError):
            jobs.append(read_job(session, id))
    return jobs


def prune_jobs(session: str) -> None:
    """Remove the oldest jobs that are over."""
    for id in job_ids(session)[KEPT_JOBS:]:
        with suppress(WebError):
            if read_job(session, id)["state"] == "running":
                continue
        sandbox.remove_tree(job_folder(session, id))


def job_of(params: Params) -> dict[str, Any]:
    """The job that a path names. Raises WebError."""
    if not sandbox.is_plain(params["job"], "-"):
        raise WebError("not_found", "there is no such job")
    return read_job(session_name(params), params["job"])


def session_name(params: Params) -> str:
    """The name in a path, of a session that may be gone. Raises WebError for what is no name."""
    with suppress(ValueError):
        return str(sandbox.a_name(params["session"]))
    raise WebError("not_found", "there is no such session")


STREAMS = ("stdout", "stderr")


class Follower:
    """Reads a job's output from an offset on, run by run."""

    def __init__(self, folder: str, offset: int) -> None:
        self.position = offset
        self.start, self.stream = 0, 0  # of the run at hand
        # The last runs before the one at hand, by stream, as (start, end).
        self.passed = [deque[tuple[int, int]](maxlen=3) for _ in STREAMS]
        self.unparsed = b""
        fds: list[int] = []
        try:
            for name in ("output", "runs"):
                fds.append(os.open(f"{folder}/{name}", os.O_RDONLY))
        except OSError:
            sandbox.Output.close(*fds)
            raise WebError("not_found", "the job's output is not there any more") from None
        self.output, self.runs = fds

    def close(self) -> None:
        sandbox.Output.close(self.output, self.runs)

    def next(self) -> tuple[int, bytes] | None:
        """The next piece as (stream, bytes); None when there is nothing yet, or no more."""
        # Ask for the size before reading runs: what is below it has its runs written.
        size = os.fstat(self.output).st_size
        if self.position >= size:
            return None
        self.to_run()
        length = self.run_length()
        end = size if length is None else min(self.start + length, size)
        data = os.pread(self.output, min(CHUNK_BYTES, end - self.position), self.position)
        self.position += len(data)
        return self.stream, data

    def to_run(self) -> None:
        """Go to the run that the position lies in."""
        while (length := self.run_length()) is not None and self.position >= self.start + length:
            self.passed[self.stream].append((self.start, self.start + length))
            self.start, self.stream = self.start + length, 1 - self.stream
            self.unparsed = self.unparsed[varint(self.unparsed)[1] :]

    def before(self, stream: int) -> bytes:
        """The last bytes of a stream before the position: a character may have begun in them."""
        self.to_run()
        here = [(self.start, self.position)] if stream == self.stream else []
        spans = [(max(start, end - 3), end) for start, end in [*self.passed[stream], *here]]
        return b"".join(os.pread(self.output, end - start, start) for start, end in spans)[-3:]

    def run_length(self) -> int | None:
        """The length of the run at hand; None while it still grows."""
        if not varint(self.unparsed)[1]:
            self.unparsed += os.read(self.runs, 4096)
        value, used = varint(self.unparsed)
        return value if used else None


def varint(data: bytes) -> tuple[int, int]:
    """The number at the beginning (LEB128) and how many bytes it takes; 0 bytes: not whole."""
    value = 0
    for index, byte in enumerate(data[:10]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, index + 1
    return 0, 0


def output_tail(session: str, id: str, size: int) -> str:
    """The end of a job's output, both streams together."""
    with suppress(OSError), open(f"{job_folder(session, id)}/output", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size).decode(errors="replace")
    return ""


def event_bytes(name: str, data: object, id: int | None = None) -> bytes:
    head = f"event: {name}\n" if id is None else f"id: {id}\nevent: {name}\n"
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


def job_now(job: dict[str, Any]) -> dict[str, Any]:
    """A job that is being followed, as it is now; its files may have been removed meanwhile."""
    try:
        return read_job(job["session"], job["id"])
    except WebError:
        error = "the job's files were removed; what came after is not known"
        return job | {"state": "lost", "error": error}


def follow_job(sock: socket.socket, job: dict[str, Any], follower: Follower, app: App) -> None:
    """Send a job's output as server-sent events, until the job has ended or the client has gone."""
    # One decoder for each stream: output of the other may come between the bytes of a character.
    # An offset may lie between them as well.
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in STREAMS]
    for stream, decoder in enumerate(decoders):
        decoder.decode(follower.before(stream))
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    sock.sendall(event_bytes("job", job_now(job)))
    quiet = time.monotonic()
    while not app.stopping:
        job = job_now(job)  # before the output: what an ended job has written is all there
        events, size = [], 0
        while size < CHUNK_BYTES and (piece := follower.next()):
            size += len(piece[1])
            if text := decoders[piece[0]].decode(piece[1]):
                events.append(event_bytes(STREAMS[piece[0]], text, follower.position))
        if not events and job["state"] != "running":
            for name, decoder in zip(STREAMS, decoders, strict=True):
                if rest := decoder.decode(b"", True):
                    sock.sendall(event_bytes(name, rest, follower.position))
            sock.sendall(event_bytes("end", job, follower.position))
            return
        if not events and time.monotonic() - quiet > HEARTBEAT_SECONDS:
            events.append(b": still here\n\n")
        if events:
            sent = b"".join(events)
            events.clear()  # a reader may take long: hold the bytes once and not twice
            sock.sendall(sent)
            quiet = time.monotonic()
        if poller.poll(0 if size >= CHUNK_BYTES else POLL_SECONDS * 1000) and not sock.recv(4096):
            return


def only_text(request: Request, name: str, what: str) -> str:
    """The one field of a body, which must have text in it. Raises WebError."""
    text = str(fields(request.json(), **{name: str}).get(name, ""))
    if not text.strip() or "\0" in text:
        raise WebError("bad_request", f"the {name} is missing", f"give {name}: {what}")
    return text


def post_command(app: App, request: Request, params: Params) -> Answer:
    command = only_text(request, "command", "a line for a shell")
    engine, session = find_running(params["session"])
    return json_answer(start_job(engine, session, "command", command, {}), 201)


def post_prompt(app: App, request: Request, params: Params) -> Answer:
    prompt = only_text(request, "prompt", "what the agent is asked")
    engine, session = find_running(params["session"])
    settings = sandbox.read_settings(session.name)
    config = sandbox.session_config(session, settings)
    template = prompt_template(session.agent, config.get("agentPromptCommand"), settings)
    if "{prompt}" not in template:
        reason = "lacks the placeholder {prompt}" if template else "has no agentPromptCommand"
        raise WebError("conflict", f"the session {session.name} {reason}",
                       "set agentPromptCommand in its settings")
    agents = template == prompt_template(session.agent, None, {})
    shown = {"prompt": prompt, "agent": session.agent if agents else ""}
    job = start_job(engine, session, "prompt", insert_prompt(template), shown,
                    {"SANDBOX_PROMPT": prompt})
    app.news.expect(engine, session, job)
    return json_answer(job, 201)


def insert_prompt(template: str) -> str:
    """The template with {prompt} as one shell word.

    The word is a variable, so that no character of a prompt is shell syntax.
    """
    words = {"": '"$SANDBOX_PROMPT"', '"': "${SANDBOX_PROMPT}", "'": "'\"$SANDBOX_PROMPT\"'"}
    quoted, at, result = "", 0, ""
    while at < len(template):
        if template.startswith("{prompt}", at):
            result, at = result + words[quoted], at + len("{prompt}")
            continue
        char = template[at : at + 2] if template[at] == "\\" and quoted != "'" else template[at]
        if char in ("'", '"') and quoted in ("", char):
            quoted = "" if quoted else char
        result, at = result + char, at + len(char)
    return result


def get_jobs(_app: App, request: Request, params: Params) -> Answer:
    limit = request.number("limit", 50, 1, KEPT_JOBS)
    return json_answer(list_jobs(session_name(params), limit))


def get_job(_app: App, _request: Request, params: Params) -> Answer:
    return json_answer(job_of(params))


def get_events(app: App, request: Request, params: Params) -> Stream:
    """Server-sent events of a job, from ?from=<offset> or Last-Event-ID on."""
    job = job_of(params)
    if "last-event-id" in request.headers:
        request.query["from"] = request.headers["last-event-id"]
    offset = request.number("from", 0, 0, 1 << 60)
    follower = Follower(job_folder(job["session"], job["id"]), offset)
    return Stream(EVENTS, lambda sock: follow_job(sock, job, follower, app), follower.close)


def get_output(_app: App, request: Request, params: Params) -> Stream:
    """The output's bytes as they were, of both streams or of ?stream=stdout|stderr."""
    job = job_of(params)
    wanted = request.query.get("stream", "")
    if wanted not in ("", *STREAMS):
        raise WebError("bad_request", "stream: it is neither stdout nor stderr")
    follower = Follower(job_folder(job["session"], job["id"]), 0)

    def send(sock: socket.socket) -> None:
        while piece := follower.next():
            if wanted in ("", STREAMS[piece[0]]):
                sock.sendall(piece[1])

    return Stream("application/octet-stream", send, follower.close)


def delete_job(app: App, _request: Request, params: Params) -> Answer:
    """Cancel: interrupt, then terminate, then kill what the job has started in the container."""
    job = job_of(params)
    if job["state"] != "running":
        raise WebError("conflict", f"the job is not running: it has {job['state']}")
    engine, session = find(params["session"])
    folder = job_folder(job["session"], job["id"])
    try:
        tag = str(sandbox.read_json(f"{folder}/job.json")["tag"])
    except (OSError, ValueError, KeyError, TypeError):
        raise WebError("not_found", "the job's files are not there any more") from None
    first = not os.path.exists(f"{folder}/cancel")
    # On a full disk there may be no such file, and the job that fills it has to end all the same.
    with suppress(OSError), open(f"{folder}/cancel", "w"):
        pass
    threading.Thread(target=cancel, args=(engine, session, folder, tag, first), daemon=True).start()
    return json_answer(job, 202)


def cancel(engine: Engine, session: Session, folder: str, tag: str, gently: bool) -> None:
    """Interrupt, and where the job does not end or was asked before, terminate and kill."""
    if gently:
        sandbox.signal_tagged(engine, session, tag, "INT", 0)
        deadline = time.monotonic() + 3
        with suppress(OSError):  # its files may go meanwhile
            while time.monotonic() < deadline and is_locked(f"{folder}/lock"):
                time.sleep(0.05)
    sandbox.signal_tagged(engine, session, tag, "TERM", 3)


# --- Changes ---
# What turns have changed: the answers of static/image/shadow.py. A container starts for each, so
# the log is kept for a moment, unless a job has begun or ended, or something was undone.


class Changes:
    """The logs that were read, and the sessions in which something is being undone."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reading = dict[str, threading.Lock]()
        self.undoing = set[str]()
        # With the state of the session, and the time, that they are of.
        self.logs = dict[str, tuple[list[Any], float, dict[str, Any]]]()

    def log(self, engine: Engine, session: Session, anew: bool) -> dict[str, Any]:
        """The turns, and when they were read; who asks while they are read gets the same."""
        with self.lock:
            reading = self.reading.setdefault(session.name, threading.Lock())
        asked = self.logs.get(session.name)
        with reading:
            kept = self.logs.get(session.name)
            state = [session.id, *((job["id"], job["state"]) for job in list_jobs(session.name, 9))]
            if (not kept or kept[0] != state or time.monotonic() - kept[1] > LOG_SECONDS
                    or (anew and kept is asked)):
                from sandbox_changes import turns_of

                read = {"turns": turns_of(engine, session), "read": iso(time.time())}
                kept = self.logs[session.name] = state, time.monotonic(), read
            return kept[2]

    def ask(self, engine: Engine, session: Session, verb: str, request: Mapping[str, Any],
            writable: bool = False) -> Answer:
        """What the shadow answers about a turn. Raises SandboxError."""
        import sandbox_changes

        known = self.log(engine, session, False)["turns"] if session.copy else []
        tree = next((turn["tree"] for turn in known if turn["id"] == request["turn"]), "main")
        request = {**sandbox_changes.bounds_of(session), "tree": tree, **request}
        return changes_answer(sandbox_changes.ask_shadow(engine, session, verb, request, writable))

    @contextmanager
    def alone(self, session: Session) -> Iterator[None]:
        """Nobody else undoes or merges something in it. Raises WebError where somebody does."""
        with self.lock:
            if session.name in self.undoing:
                raise WebError("conflict", f"something is being undone or merged in {session.name}",
                               "try again when it is done")
            self.undoing.add(session.name)
        try:
            yield
        finally:
            self.undoing.discard(session.name)
            self.logs.pop(session.name, None)


def changes_answer(data: object) -> Answer:
    """JSON in ASCII: bytes of paths that are no UTF-8 stay what they are, as lone surrogates."""
    return Answer(json.dumps(data, separators=(",", ":")).encode(), TYPES["json"])


def a_path(text: Any) -> str:
    """A path below a session's directory, or as a JSON string, for bytes that are no UTF-8."""
    with suppress(ValueError, TypeError):
        value = sandbox.parse_json(text) if str(text).startswith('"') else text
        top = os.path.normpath(value).split("/")[0]  # "" of an absolute path
        if value and "\0" not in value and top not in ("", ".."):
            return str(value)
    raise WebError("bad_request", f"{json.dumps(text)[:80]} is no path",
                   "paths begin at the top of the session's directory")


def get_changes(app: App, request: Request, params: Params) -> Answer:
    """The turns; ?again=1 reads them again."""
    anew = request.number("again", 0, 0, 1) == 1
    return changes_answer(app.changes.log(*find(params["session"]), anew))


def get_diff(app: App, request: Request, params: Params) -> Answer:
    """The files of a turn, or of all; ?path= is of one, ?patch=1 with their patches."""
    query = request.query
    wanted = {"turn": query.get("turn", ""), "patch": request.number("patch", 0, 0, 1) == 1,
              "paths": [a_path(query["path"])] if "path" in query else []}
    return app.changes.ask(*find(params["session"]), "diff", wanted)


def change_route(verb: str) -> Callable[[App, Request, Params], Answer]:
    """A route that undoes or does again."""
    def post(app: App, request: Request, params: Params) -> Answer:
        data = {"turn": "", **fields(request.json(), turn=str, only=bool, paths=list, dry=bool)}
        data["paths"] = [a_path(path) for path in data.get("paths", [])]
        engine, session = find(params["session"])
        with app.changes.alone(session):
            return app.changes.ask(engine, session, verb, data, not data.get("dry"))

    return post


def post_merge(app: App, request: Request, params: Params) -> Answer:
    """Bring the work of a session on a copy into its directory."""
    from sandbox_changes import merge_copy

    dry = fields(request.json(), dry=bool).get("dry", False)
    engine, session = find(params["session"])
    with app.changes.alone(session):
        return changes_answer(merge_copy(engine, session, dry))


# --- News ---
# What a person comes back for: a turn that has ended, an agent that waits, a refusal, an error.
# Pages ask for it; the person's own command (`notify`) is called for it, page or no page.


class News:
    """The last news of each kind in each session.

    Where many of a kind come, what was said before the last one goes: the command is called for a
    kind after a pause, which grows as long as more come, and once at a time for a session.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.last: dict[tuple[str, str], dict[str, Any]] = {}
        # What the caller of a kind has to say next, and whose turn it is to call.
        self.waiting: dict[tuple[str, str], dict[str, Any] | None] = {}
        self.turns: dict[str, threading.Lock] = {}
        # How many want to hear of the refusals of a session, and the process that reads them.
        self.listeners: dict[str, int] = {}
        self.readers: dict[str, int] = {}

    def tell(self, session: Session, what: str, text: str, **more: Any) -> None:
        event = sandbox.news(session.name, what, text, **more)
        key, now = (session.name, what), time.time()
        with self.lock:
            self.number = max(self.number + 1, int(now * 1000))  # also after a restart of ours
            self.last.pop(key, None)
            self.last[key] = {**event, "number": self.number, "time": iso(now)}
            while len(self.last) > KEPT_NEWS:
                del self.last[next(iter(self.last))]
            called = key in self.waiting
            self.waiting[key] = event
        if not called:
            threading.Thread(target=self.call, args=(session, key), daemon=True).start()

    def call(self, session: Session, key: tuple[str, str]) -> None:
        """Call the person's command for a kind until there is nothing more to say."""
        pause = PAUSE_SECONDS
        while event := self.next(key):
            failure = ""
            with self.lock:
                turn = self.turns.setdefault(session.name, threading.Lock())
            try:
                if command := sandbox.session_config(session).get("notify"):
                    with turn:
                        failure = sandbox.notify(command, event)
            except SandboxError as error:
                failure = f"notify: {error.message}"
            if failure:
                log(f"{session.name}: {failure}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def next(self, key: tuple[str, str]) -> dict[str, Any] | None:
        with self.lock:
            event = self.waiting.pop(key, None)
            if event:
                self.waiting[key] = None
            elif not any(session == key[0] for session, _ in self.waiting):
                self.turns.pop(key[0], None)  # nobody calls for it any more
            return event

    def leave(self) -> None:
        """End what reads refusals, now that the server ends."""
        with self.lock:
            for pid in self.readers.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            self.readers.clear()

    # Turns.

    def expect(self, engine: Engine, session: Session, job: Mapping[str, Any]) -> None:
        """Tell the end of a turn; where this server ends before, the next one does."""
        with suppress(OSError), open(f"{job_folder(session.name, job['id'])}/untold", "wb"):
            pass
        threading.Thread(target=self.wait_for_turn, args=(engine, session, job["id"]),
                         daemon=True).start()

    def resume(self) -> None:
        """Go on with what another server has expected."""
        for name in job_ids(""):
            for id in job_ids(name):
                with suppress(WebError, SandboxError):
                    if os.path.exists(f"{job_folder(name, id)}/untold"):
                        self.expect(*find(name), read_job(name, id))

    def wait_for_turn(self, engine: Engine, session: Session, id: str) -> None:
        folder = job_folder(session.name, id)
        with suppress(OSError, WebError):
            with self.refusals(engine, session), open(f"{folder}/lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)  # which its supervisor has until it ends
            job = read_job(session.name, id)
            os.unlink(f"{folder}/untold")  # of several servers one tells it
            if job["state"] != "cancelled":
                failed = job["exit"] != 0
                out, err = last_output(folder)
                text = last_words(f"{out}\n{err}" if failed else f"{err}\n{out}",
                                  job.get("agent", ""), failed)
                self.tell(session, "error" if failed else "turn", text or job["error"] or "",
                          turn=id, status=job["exit"])

    # Refusals.

    @contextmanager
    def refusals(self, engine: Engine, session: Session) -> Iterator[None]:
        """Tell meanwhile what the session's proxy refuses; one reader serves all who want that."""
        name = session.name
        with self.lock:
            self.listeners[name] = self.listeners.get(name, 0) + 1
            if session.proxy and self.listeners[name] == 1:
                with suppress(OSError):
                    self.read_refusals(engine, session)
        try:
            yield
        finally:
            with self.lock:
                self.listeners[name] -= 1
                if not self.listeners[name]:
                    del self.listeners[name]
                    if pid := self.readers.pop(name, 0):
                        os.kill(pid, signal.SIGTERM)

    def read_refusals(self, engine: Engine, session: Session) -> None:
        argv = engine.logs_argv(session.proxy, follow=True, since=time.time())
        out, end = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        try:
            pid = sandbox.spawn(argv, fds={0: null, 1: end, 2: null}, own_group=True)
        except OSError:
            os.close(out)
            raise
        finally:
            sandbox.Output.close(null, end)
        self.readers[session.name] = pid

        def read() -> None:
            told: set[str] = set()
            with open(out, "rb") as lines:
                while line := lines.readline(CHUNK_BYTES):
                    entry = sandbox.decision_of(line) or {}
                    host = f"{entry.get('host')} port {entry.get('port')}"[:HOST_CHARS]
                    kind = f"{host} {entry.get('kind')}"[:2 * HOST_CHARS]  # a budget is another
                    if (entry.get("verdict") == "deny" and kind not in told
                            and len(told) < REFUSED_HOSTS):
                        told.add(kind)
                        self.tell(session, "refused", f"{host}: {entry.get('reason')}")
            with self.lock:
                if self.readers.get(session.name) == pid:
                    del self.readers[session.name]
            sandbox.wait_for(pid)

        threading.Thread(target=read, daemon=True).start()


def last_output(folder: str) -> list[str]:
    """The end of what a job has printed, of each stream: a line of one may cut one of the other."""
    parts = [bytearray(), bytearray()]
    size = os.stat(f"{folder}/output").st_size
    with closing(Follower(folder, max(0, size - LAST_WORDS_BYTES))) as follower:
        while piece := follower.next():
            parts[piece[0]] += piece[1]
    return [part.decode(errors="replace") for part in parts]


CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")


def last_words(output: str, agent: str, failed: bool) -> str:
    """What the end of a turn's output says: an agent's answer, or else its last line.

    Of a turn that has failed the last line that is no event comes first.
    """
    answer, goes_on, plain = "", False, ""
    says = sandbox.AGENTS[agent].says if agent in sandbox.AGENTS else []
    for line in output.split("\n"):
        event: Any = None
        with suppress(ValueError):
            event = sandbox.parse_json(line) if says and line.startswith("{") else None
        if not isinstance(event, dict):
            plain = line if line.strip() else plain
            continue
        found: Any = event if event.get("role") != "user" else None
        for key in says:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, str) and found.strip():
            answer = answer + found if goes_on else found
        goes_on = event.get("delta") is True
    return CONTROL.sub("", plain or answer if failed else answer or plain)


class Calls:
    """Hears a terminal call for its person: a bell, or a notification (OSC 9 or 777)."""

    OSC = re.compile(rb"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
    CALL = re.compile(rb"\x1b\](?:9;(?!\d+;)|777;notify;(?:([^;\x07\x1b]*);)?)"
                      rb"([^\x07\x1b]*)(?:\x07|\x1b\\)")  # OSC 9;4 is a progress bar
    UNFINISHED = re.compile(rb"\x1b(\][^\x07\x1b]{0,4096}\x1b?)?\Z")

    def __init__(self, terminal: Terminal) -> None:
        self.terminal, self.rest = terminal, b""
        self.typed = -TYPING_SECONDS * 1.0  # when something was typed last

    def hear(self, data: bytes) -> None:
        """Take what the program has printed just now, and never again what was there before."""
        if not self.rest and b"\x07" not in data and b"\x1b" not in data:
            return
        data = self.rest + data
        unfinished = self.UNFINISHED.search(data, max(0, len(data) - 4200))
        self.rest = unfinished[0] if unfinished else b""
        data = data[: len(data) - len(self.rest)]
        if calls := self.CALL.findall(data):
            self.tell("waits", (calls[-1][1] or calls[-1][0]).decode(errors="replace"))
        elif (b"\x07" in self.OSC.sub(b"", data)
              and time.monotonic() - self.typed > TYPING_SECONDS):
            self.tell("waits", "the terminal rang its bell")

    def ended(self, status: int | None) -> None:
        """Tell the end of an agent, unless a person has closed its terminal."""
        if self.terminal.run == "agent" and not self.terminal.closing:
            self.tell("error" if status else "end", "", status=status)

    def tell(self, what: str, text: str, status: int | None = None) -> None:
        terminal = self.terminal
        terminal.app.news.tell(terminal.session, what, text, turn=terminal.id, status=status)


def get_news(app: App, request: Request, _params: Params) -> Answer:
    """What has happened ?after=<number> of the last one that is known."""
    after = request.number("after", 0, 0, 1 << 60)
    with app.news.lock:
        rows = [row for row in app.news.last.values() if row["number"] > after]
        return json_answer({"number": app.news.number, "news": rows})


# --- Terminals ---


class Ring:
    """The last RING_BYTES of an output; `start` and `end` count from its first byte.

    A mapping of its own: it grows page by page with what is printed, and all of it goes back to the
    system when the terminal ends.
    """

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, RING_BYTES))
        self.begin(0)

    def begin(self, position: int) -> None:
        """Go on at another position, with nothing before it."""
        self.first = self.end = position

    @property
    def start(self) -> int:
        return max(self.first, self.end - RING_BYTES)

    def put(self, data: bytes) -> None:
        """Add at most RING_BYTES."""
        at = self.end % RING_BYTES
        room = RING_BYTES - at
        if len(data) <= room:
            self.memory[at : at + len(data)] = data
        else:
            self.memory[at:], self.memory[: len(data) - room] = data[:room], data[room:]
        self.end += len(data)

    def read(self, position: int) -> bytes:
        """A piece of what follows a position that lies within the ring."""
        at = position % RING_BYTES
        return bytes(self.memory[at : at + min(CHUNK_BYTES, self.end - position)])


    def last(self, count: int) -> bytes:
        """The last bytes of it."""
        at = (self.end - count) % RING_BYTES
        first = bytes(self.memory[at : at + count])
        return first + bytes(self.memory[: count - len(first)])


class Viewer:
    """A WebSocket that shows a terminal; `sent` and `acked` are positions in its output."""

    def __init__(self, sock: socket.socket, protocol: ServerProtocol, leave: Callable[[], None],
                 wants_to_write: bool, position: int, size: tuple[int, int] | None) -> None:
        """`size` is that of its window, where it has said so."""
        self.sock, self.protocol, self.leave = sock, protocol, leave
        self.wants_to_write, self.size = wants_to_write, size
        self.pending = b""
        self.text: bytearray | None = None  # a text message that is not complete
        # Whether the next frame goes on with a message, and how many bytes the protocol has of a
        # frame that is not whole.
        self.goes_on, self.unparsed = False, 0
        self.sent = self.acked = position
        self.progress = self.seen = self.pinged = time.monotonic()
        self.gone = False

    def control(self, **message: object) -> None:
        if self.open:
            self.protocol.send_text(json.dumps(message).encode())
            self.push()

    @property
    def open(self) -> bool:
        return not self.gone and self.protocol.state.name == "OPEN"

    @property
    def has_room(self) -> bool:
        """Whether it may be told one thing more; a holder that lies may have any number of them."""
        return len(self.pending) < CHUNK_BYTES * 2

    def push(self) -> None:
        """Write as much of what waits as the socket takes."""
        if data := self.protocol.data_to_send():
            self.pending += b"".join(data)
        try:
            while self.pending:
                taken = self.sock.send(self.pending)
                self.pending, self.progress = self.pending[taken:], time.monotonic()
        except OSError as error:
            self.gone = self.gone or not has_to_wait(error)

    def receive(self) -> tuple[bytes, Sequence[Any]]:
        """What was typed, where no more has come, or else the frames that have."""
        try:
            while data := self.sock.recv(CHUNK_BYTES):
                self.seen = time.monotonic()
                if typed := self.only_typed(data):
                    return typed, ()
                self.feed(data)
                if len(data) < CHUNK_BYTES and not getattr(self.sock, "pending", int)():
                    break
            else:
                self.gone = True
        except OSError as error:
            self.gone = self.gone or not has_to_wait(error)
        return b"", self.frames()

    def feed(self, data: bytes) -> None:
        self.unparsed += len(data)
        self.protocol.receive_data(data)

    def frames(self) -> Sequence[Any]:
        """The frames in what was fed."""
        frames = self.protocol.events_received()
        for frame in frames:
            size = len(frame.data)  # type: ignore[union-attr]
            self.unparsed -= 6 + size + (0 if size < 126 else 2 if size < 65536 else 8)
            if frame.opcode.name in ("TEXT", "BINARY", "CONT"):  # type: ignore[union-attr]
                self.goes_on = not frame.fin  # type: ignore[union-attr]
        return frames

    def only_typed(self, data: bytes) -> bytes:
        """The content of one short binary frame; b"" where the data is anything else.

        Nearly all that is typed comes so, and the parser of websockets takes 20 µs for it.
        """
        size = len(data) - 6
        if (not 0 < size < 126 or data[0] != 0x82 or data[1] != 0x80 | size or self.unparsed
                or self.goes_on or not self.open):
            return b""
        mask = int.from_bytes((data[2:6] * 32)[:size], "big")
        return (int.from_bytes(data[6:], "big") ^ mask).to_bytes(size, "big")

    def show(self, data: bytes) -> None:
        """Send output as one binary frame, around the protocol, which takes longer for it."""
        size = len(data)
        head = (bytes((0x82, size)) if size < 126 else b"\x82\x7e" + size.to_bytes(2, "big")
                if size < 65536 else b"\x82\x7f" + size.to_bytes(8, "big"))
        self.pending += head + data
        self.push()


def has_to_wait(error: OSError) -> bool:
    """Whether a socket, in the clear or of TLS, is only not ready yet."""
    return type(error).__name__ in ("BlockingIOError", "SSLWantReadError", "SSLWantWriteError")


class Terminal:
    """A program on a terminal, pumped by one thread: one poll over its client and the viewers.

    The client is one of the terminal's holder, over pipes. Where a session can hold none it is the
    engine's own on a PTY, and the program ends with the server.
    """

    def __init__(self, app: App, engine: Engine, session: Session, run: str,
                 size: tuple[int, int], id: str = "", title: str = "",
                 started: float = 0) -> None:
        """With an id it is one that is there."""
        self.app, self.engine, self.session, self.run, self.size = app, engine, session, run, size
        self.id, self.started = id or sandbox.random_id(), started or time.time()
        command = sandbox.AGENTS[session.agent].yolo if run == "agent" else sandbox.SHELL
        self.command, self.title = command, title or sandbox.title_of(command)
        self.is_new, self.held, self.pid = not id, False, 0
        self.ring, self.input = Ring(), bytearray()
        self.viewers: list[Viewer] = []
        self.writer: Viewer | None = None
        self.arriving: deque[Viewer] = deque()
        self.status: int | None = None
        self.ended = self.closing = False
        self.reason = ""  # why it has ended, where that is not by itself
        self.cuts = 0  # of clients, one soon after the other
        self.flooding = self.resting = 0.0  # until when it counts as a flood, and reads nothing
        self.end_seen = 0.0  # when a viewer was last told of the end
        self.thread = threading.Thread(target=self.pump, daemon=True)
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)
        self.calls = Calls(self)

    # The client.

    def start(self) -> None:
        """Start the program, or attach to it; raises OSError, SandboxError."""
        try:
            if self.is_new:
                self.begin_turn()
            if self.is_new and sandbox.is_unheld(self.session):
                self.start_unheld()
            elif self.is_new:
                argv = sandbox.hold_argv(self.engine, self.session, workdir(self.session), self.id)
                self.spawn(argv, sandbox.hold_environ(self.script(), "start", self.id, *self.size,
                                                      self.title, *self.command))
                sandbox.record_terminal(self.session.name, self.id, self.title)
            else:
                self.attach_client()
        except BaseException:
            sandbox.Output.close(self.wake_read, self.wake_write)
            raise

    def begin_turn(self) -> None:
        """Take the first snapshot where an agent is started; the last one takes a process that the
        server's end does not touch.
        """
        about = {"id": self.id, "what": "agent", "command": self.title}
        config = sandbox.session_config(self.session)
        if self.run == "agent" and (
                turn := sandbox.wanted_turn(config, self.engine, self.session, about, True)):
            turn.prompts = True
            with turn:
                turn.lasts = True

    def attach_client(self) -> None:
        """Attach to the holder where the ring ends."""
        self.spawn(sandbox.attach_argv(self.engine, self.session),
                   sandbox.hold_environ("", "attach", self.id, *self.size, self.ring.end))

    def script(self) -> str:
        env = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        config = sandbox.session_config(self.session)
        env |= sandbox.exec_env(config, self.session.created()[0])
        sandbox.give_keys(self.engine, self.session, config)
        return sandbox.env_script(env)

    def start_unheld(self) -> None:
        """Start the engine's client on a new PTY, without a line discipline of ours in between."""
        import tty

        argv = sandbox.exec_argv(self.engine, self.session, workdir(self.session), self.id,
                                 self.command, stdin=True, size=self.size)
        environ = {**os.environ, "TERM": "xterm-256color", "SANDBOX_ENV": self.script()}
        master, slave = os.openpty()
        try:
            tty.setraw(slave)
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *self.size, 0, 0))
            self.pid = sandbox.spawn(argv, env=environ, fds={0: slave, 1: slave, 2: slave},
                                     own_group=True)
        except OSError:
            os.close(master)
            raise
        finally:
            os.close(slave)
        self.connect(master, master)

    def spawn(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a client of the holder."""
        (stdin, ours), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
        try:
            self.pid = sandbox.spawn(argv, env=environ, fds={0: stdin, 1: stdout, 2: stderr},
                                     own_group=True)
        except OSError:
            sandbox.Output.close(ours, out, err)
            raise
        finally:
            sandbox.Output.close(stdin, stdout, stderr)
        self.connect(ours, out, err)

    def connect(self, master: int, out: int, err: int = -1) -> None:
        """Have a client: `master` takes input, `out` gives output, or frames of a holder."""
        self.master, self.out, self.err, self.held = master, out, err, err >= 0
        for fd in self.fds():
            os.set_blocking(fd, False)
        self.frames, self.failure, self.attached = sandbox.Frames(), b"", time.monotonic()
        self.modes: tuple[int, bytes] = (-1, b"")
        self.asked_size = self.size
        # Where the output was when the holder greeted this client, whether it did, and what it
        # said of the end.
        self.awaited = 0 if self.is_new else LAST_POSITION
        self.greeted = self.told = False
        self.refused = ""

    def fds(self) -> set[int]:
        return {self.master, self.out, self.err} - {-1}

    def data(self) -> dict[str, Any]:
        return {"id": self.id, "session": self.session.name, "run": self.run, "title": self.title,
                "started": iso(self.started), "rows": self.size[0], "cols": self.size[1],
                "viewers": len(self.viewers), "ended": self.ended, "exit": self.status,
                "seq": self.ring.end}

    def resize(self, size: tuple[int, int] | None) -> None:
        """Ask for a size: of the clients of a holder the last to type has its own."""
        if self.ended or size in (None, self.asked_size):
            return
        self.asked_size = rows, cols = size
        if self.held and not self.greeted:
            return
        if self.held:
            self.input += sandbox.frame(b"r", b"%d %d" % size)
            self.write_input()
            return
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        with suppress(OSError):  # the engine's client has no terminal that would signal this
            os.kill(self.pid, signal.SIGWINCH)
        self.set_size(rows, cols)

    def set_size(self, rows: int, cols: int) -> None:
        if 0 < rows <= 1000 and 0 < cols <= 1000 and (rows, cols) != self.size:
            self.size = rows, cols
            for viewer in self.viewers:
                if viewer.has_room:
                    viewer.control(type="size", rows=rows, cols=cols)

    # What other threads may call.

    def wake(self) -> None:
        with suppress(OSError):
            os.write(self.wake_write, b"w")

    def attach(self, viewer: Viewer) -> None:
        self.arriving.append(viewer)
        self.wake()

    def hang_up(self) -> None:
        """End everything that was started in this terminal, inside the container."""
        self.closing = True
        if not self.ended:
            sandbox.signal_tagged(self.engine, self.session, self.id, "HUP", 2)
            if not self.ended:
                with suppress(OSError):
                    os.kill(self.pid, signal.SIGHUP)
        sandbox.forget_terminal(self.session.name, self.id)
        self.wake()

    # The pump.

    def pump(self) -> None:
        try:
            with self.app.news.refusals(self.engine, self.session):
                while not self.is_done():
                    self.step()
        except Exception:
            log(traceback.format_exc().rstrip())
        finally:
            self.finish()

    def is_done(self) -> bool:
        if not self.ended:
            return self.app.stopping
        over = self.closing or self.end_seen and not self.viewers or self.app.stopping
        return bool(over) and not self.arriving or time.monotonic() - self.end_time > LINGER_SECONDS

    def step(self) -> None:
        for fd, happened in self.what_waits().poll(self.timeout() * 1000):
            if fd in (self.master, self.out) and not self.ended:
                if happened & select.POLLOUT:
                    self.write_input()
                if happened & ~select.POLLOUT:
                    self.read_output()
            elif fd == self.wake_read:
                with suppress(OSError):
                    os.read(fd, 4096)
            elif fd == self.err:
                self.read_failure()
            elif viewer := next((v for v in self.viewers if v.sock.fileno() == fd), None):
                self.serve_viewer(viewer, happened)
        while self.arriving and self.is_ready():
            self.welcome(self.arriving.popleft())
        self.look_after_viewers()

    def what_waits(self) -> select.poll:
        """All that is to be waited for.

        A PTY that is not to be read is not registered: its hang-up would make the loop spin.
        """
        poller = select.poll()
        poller.register(self.wake_read, select.POLLIN)
        if not self.ended:
            reads = select.POLLIN if self.may_read() and not self.rest_seconds() else 0
            writes = select.POLLOUT if self.input and (self.greeted or not self.held) else 0
            if self.held:
                for fd, mask in ((self.out, reads), (self.master, writes), (self.err, 1)):
                    if mask and fd >= 0:
                        poller.register(fd, mask)
            elif reads or writes:
                poller.register(self.master, reads | writes)
        for viewer in self.viewers:
            full = viewer is self.writer and len(self.input) > CHUNK_BYTES
            mask = 0 if full else select.POLLIN
            poller.register(viewer.sock, mask | (select.POLLOUT if viewer.pending else 0))
        return poller

    def may_read(self) -> bool:
        """Whether the program may go on: the writer has taken all, or nothing for a long time."""
        writer = self.writer
        return (writer is None or writer.sent >= self.ring.end
                or time.monotonic() - writer.progress > STALL_SECONDS)

    def timeout(self) -> float:
        """Seconds until something may have to be done without an event."""
        if self.ended:
            return 1.0 if self.viewers else 60.0
        most = PING_SECONDS if self.may_read() and not self.arriving else 1
        return self.rest_seconds() or float(most)

    def rest_seconds(self) -> float:
        """How long to leave the output where it is.

        Several floods together go on at some 10 MB/s, faster than anybody reads: at full speed they
        would take all processors, and what is typed in another terminal would wait for them.
        """
        return max(0.0, self.resting - time.monotonic())

    def rest(self) -> None:
        """After a piece of a flood: the longer, the more there are."""
        now = time.monotonic()
        self.flooding = now + FLOOD_SECONDS
        others = sum(terminal.flooding > now for terminal in self.app.terminals.all()) - 1
        self.resting = now + REST_SECONDS * others

    def is_ready(self) -> bool:
        """Whether the ring has what the holder had kept when it greeted us; else a viewer waits."""
        return (self.ended or self.ring.end >= self.awaited
                or time.monotonic() - self.attached > STALL_SECONDS)

    def read_output(self) -> None:
        """Read until there is nothing more for now, and send it as one frame."""
        size, over, before = 0, False, self.ring.end
        try:
            while size < CHUNK_BYTES and not over:
                data = os.read(self.out, CHUNK_BYTES)
                size, over = size + len(data), not data
                if self.held:  # a pipe gives all at once that it has
                    self.take_frames(data)
                    break
                self.ring.put(data)
        except BlockingIOError:
            pass
        except (OSError, ValueError):  # EIO: nobody has the other end open any more
            over = True
        if size:
            if size >= FLOOD_BYTES:
                self.rest()
            for viewer in self.viewers:
                self.flush(viewer)
            new = self.ring.end - max(before, self.awaited, self.ring.first)
            if new > 0:  # and not what was there when we came
                self.calls.hear(self.ring.last(new))
        if over:
            self.lose_client()

    def take_frames(self, data: bytes) -> None:
        """Carry out what the holder has sent. Raises ValueError."""
        if (data[:1] == b"o" and not self.frames.rest
                and int.from_bytes(data[1:5], "big") == len(data) - 5):
            self.ring.put(data[5:])  # one whole frame, as for an echo
            return
        for kind, content in self.frames.feed(data):
            self.take_frame(kind, content)

    def take_frame(self, kind: bytes, data: bytes) -> None:
        """Carry out a frame of the holder. Raises ValueError for one that no holder sends."""
        if kind == b"o":
            self.ring.put(data)
        elif kind == b"h":
            position, rows, cols, self.awaited = sandbox.numbers_of(data)
            if max(position, self.awaited) > LAST_POSITION:
                raise ValueError(position)
            if position != self.ring.end:
                self.ring.begin(position)
                for viewer in self.viewers:
                    self.reset(viewer)
            self.set_size(rows, cols)
            if not self.greeted:
                self.greet()
        elif kind == b"m":
            self.modes = self.ring.end, data[:STDERR_BYTES]
            for viewer in self.viewers:
                self.tell_modes(viewer)
        elif kind == b"s":
            rows, cols = sandbox.numbers_of(data)
            self.set_size(rows, cols)
        elif kind == b"e":
            self.told, status = True, sandbox.numbers_of(data)
            self.status = status[0] & 255 if status else None
        elif kind == b"n":
            self.refused = data.decode(errors="replace")[:STDERR_BYTES] or "it does not say why"

    def greet(self) -> None:
        """The holder is there: give it the size that is asked for, and what was typed before."""
        self.greeted, typed = True, bytes(self.input)
        self.input[:] = sandbox.frame(b"r", b"%d %d" % self.asked_size)
        for at in range(0, len(typed), CHUNK_BYTES):
            self.input += sandbox.frame(b"i", typed[at : at + CHUNK_BYTES])
        self.write_input()

    def read_failure(self) -> None:
        """Keep what an engine's client says on stderr, or the beginning of it."""
        try:
            data = os.read(self.err, CHUNK_BYTES)
        except OSError:
            data = b""
        self.failure = (self.failure + data)[:STDERR_BYTES]
        if not data:
            os.close(self.err)
            self.err = -1

    def lose_client(self) -> None:
        """The client has ended: with the program, or cut off, or it could not begin."""
        while self.err >= 0 and select.select([self.err], [], [], 0)[0]:
            self.read_failure()
        self.cuts = self.cuts + 1 if time.monotonic() - self.attached < 1 else 0
        typed = bytes(self.input)
        self.close_client()
        status = sandbox.end_client(self.pid)
        try:
            if self.held and self.refused and self.is_new and not self.closing:
                sandbox.cannot_hold(self.session, self.id, self.refused, status)
                self.ring.put(f"sandbox: this terminal ends with its server: {self.refused}\r\n"
                              .encode())
                self.start_unheld()
                self.input += typed
                self.app.terminals.write_down()
                return
            if (self.held and self.greeted and not (self.told or self.closing)
                    and self.cuts < CUTS):
                self.is_new = False
                self.attach_client()
                return
        except (OSError, SandboxError) as error:
            self.failure = str(error).encode()
        if not (self.told or self.closing) and (self.held or status == sandbox.KILLED):
            self.look_why(status)
        if not self.held:
            self.status = status
        elif self.is_new and not (self.told or self.greeted):
            self.ring.put(self.failure.replace(b"\n", b"\r\n"))
            self.status = status
        self.end()

    def look_why(self, status: int) -> None:
        """Find out whether the session has ended, and not this program alone."""
        try:
            sandbox.check_removed(self.engine, self.session, status)
            sandbox.check_stopped(self.engine, self.session, status)
        except SandboxError as error:
            self.reason = self.reason or error.message

    def discard(self) -> None:
        """End what was started and is not to be: its container is not what it was."""
        self.hang_up()
        self.close_client()
        sandbox.end_client(self.pid)
        sandbox.Output.close(self.wake_read, self.wake_write)

    def close_client(self) -> None:
        sandbox.Output.close(*self.fds())
        self.master = self.out = self.err = -1
        self.input.clear()

    def end(self) -> None:
        """The program has ended, and all it has printed is in the ring."""
        self.ended, self.end_time = True, time.monotonic()
        if self.status is not None:
            self.calls.ended(self.status)
        self.app.terminals.write_down()

    def write_input(self) -> None:
        if not self.input or self.held and not self.greeted:  # or it would go with a client
            return
        try:
            del self.input[: os.write(self.master, self.input[:CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self.input.clear()

    # Viewers.

    def welcome(self, viewer: Viewer) -> None:
        """Begin to serve a viewer: where it was, or at the oldest byte that is left."""
        resumed = self.ring.start <= viewer.sent <= self.ring.end
        if not resumed:
            viewer.sent = viewer.acked = self.ring.start
        self.viewers.append(viewer)
        if viewer.wants_to_write:
            self.writer = viewer
            self.resize(viewer.size)
        viewer.control(type="hello", id=self.id, session=self.session.name, run=self.run,
                       seq=viewer.sent, start=self.ring.start, end=self.ring.end, resumed=resumed,
                       window=WINDOW_BYTES, rows=self.size[0], cols=self.size[1])
        self.tell_modes(viewer)
        self.tell_roles()
        self.take(viewer, viewer.frames())
        self.flush(viewer)

    def tell_roles(self) -> None:
        for viewer in self.viewers:
            viewer.control(type="role", writer=viewer is self.writer, viewers=len(self.viewers))

    def tell_modes(self, viewer: Viewer) -> None:
        """Bring a viewer that begins where output is missing to the terminal's modes there."""
        position, data = self.modes
        if viewer.sent == position and viewer.has_room:
            viewer.control(type="modes", data=data.decode("ascii", "replace"))

    def reset(self, viewer: Viewer) -> None:
        """Tell a viewer that output is missing, and go on with the oldest that is there."""
        viewer.sent = viewer.acked = self.ring.start
        viewer.control(type="reset", seq=viewer.sent)

    def serve_viewer(self, viewer: Viewer, happened: int) -> None:
        if happened & ~select.POLLOUT:
            typed, frames = viewer.receive()
            if typed:
                self.type(viewer, typed)
                self.write_input()
            self.take(viewer, frames)
        viewer.push()
        self.flush(viewer)

    def take(self, viewer: Viewer, frames: Sequence[Any]) -> None:
        """Carry out frames of a viewer: binary ones are input, text ones control messages."""
        for frame in frames:
            kind = frame.opcode.name
            if kind == "TEXT" or kind == "CONT" and viewer.text is not None:
                viewer.text = (viewer.text or bytearray()) + frame.data
                if frame.fin:
                    text, viewer.text = viewer.text, None
                    self.take_message(viewer, text)
            elif kind in ("BINARY", "CONT"):
                self.type(viewer, frame.data)
        if frames:
            self.write_input()

    def type(self, viewer: Viewer, data: bytes) -> None:
        if viewer is not self.writer or self.ended:
            return
        self.calls.typed = time.monotonic()
        if not (self.held and self.greeted):
            self.input += data
            return
        for at in range(0, len(data), CHUNK_BYTES):
            self.input += sandbox.frame(b"i", data[at : at + CHUNK_BYTES])

    def take_message(self, viewer: Viewer, text: bytes | bytearray) -> None:
        try:
            self.obey(viewer, sandbox.parse_json(text))
        except (ValueError, TypeError, KeyError):
            with suppress(Exception):  # it may be closing already
                viewer.protocol.fail(1008, "a control message that is not understood")

    def obey(self, viewer: Viewer, message: Mapping[str, Any]) -> None:
        """Carry out a control message.

        Raises ValueError, TypeError or KeyError for one that is not understood.
        """
        kind = message["type"]
        if kind == "ack":
            seq = whole_number(message["seq"], 0, viewer.sent)
            viewer.acked, viewer.progress = max(seq, viewer.acked), time.monotonic()
        elif kind == "resize":
            viewer.size = (whole_number(message["rows"], 1, 1000),
                           whole_number(message["cols"], 1, 1000))
            if viewer is self.writer:
                self.resize(viewer.size)
        elif kind == "take":
            self.writer = viewer
            self.resize(viewer.size)
            self.tell_roles()
        elif kind == "close":
            if viewer is self.writer:
                threading.Thread(target=self.hang_up, daemon=True).start()
        else:
            raise ValueError(kind)

    def flush(self, viewer: Viewer) -> None:
        """Send what the viewer lacks, as far as its window and its socket allow."""
        stuck = len(self.input) > CHUNK_BYTES  # its acknowledgements wait behind its own input
        while viewer.open and not viewer.pending and viewer.sent < self.ring.end:
            if viewer.sent - viewer.acked >= WINDOW_BYTES and not stuck:
                return
            if viewer.sent < self.ring.start:
                self.reset(viewer)
                continue
            if viewer.sent == viewer.acked:
                viewer.progress = time.monotonic()
            data = self.ring.read(viewer.sent)
            viewer.sent += len(data)
            viewer.show(data)

    def look_after_viewers(self) -> None:
        """Tell the end, ping the silent, and part from those that are gone."""
        now = time.monotonic()
        for viewer in list(self.viewers):
            if self.ended and viewer.open and viewer.sent == self.ring.end:
                viewer.control(type="exit", status=self.status, reason=self.reason)
                viewer.protocol.send_close(1000)
                viewer.push()
                if not self.end_seen:
                    sandbox.forget_terminal(self.session.name, self.id)
                self.end_seen = now
            elif viewer.open and now - max(viewer.seen, viewer.pinged) > PING_SECONDS:
                viewer.pinged = now
                viewer.protocol.send_ping(b"")
                viewer.push()
            closing = not viewer.open and not viewer.pending
            if viewer.gone or closing:
                self.part(viewer)

    def part(self, viewer: Viewer) -> None:
        self.viewers.remove(viewer)
        with suppress(OSError):
            viewer.sock.shutdown(socket.SHUT_WR)
        viewer.sock.close()
        # The parser refers to the protocol: without this only a garbage collection frees the two.
        viewer.protocol.parser.close()
        viewer.leave()
        if viewer is self.writer:
            self.writer = None
        self.tell_roles()

    def finish(self) -> None:
        """Leave nothing behind: a program that only we hold, viewers, descriptors, and the entry in
        the list.
        """
        if not self.ended and not self.held:
            with suppress(sandbox.SandboxError, OSError):
                self.hang_up()  # while it is in the list: the server's end waits for what is there
        self.app.terminals.remove(self)
        for viewer in [*self.viewers, *self.arriving]:
            with suppress(OSError):
                viewer.sock.close()
            viewer.leave()
        self.viewers.clear()
        if not self.ended:
            self.close_client()
            sandbox.end_client(self.pid)
        sandbox.Output.close(self.wake_read, self.wake_write)
        del self.calls  # which refers to us: only a garbage collection would free the two


def whole_number(value: object, low: int, high: int) -> int:
    """A number of a control message. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(value)
    return value


class Terminals:
    """The terminals that this server has a client of.

    The tags of those that end with it are kept in a file, so that the next server hangs up what a
    killed one has left.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.by_id: dict[str, Terminal] = {}

    def all(self) -> list[Terminal]:
        with self.lock:
            return list(self.by_id.values())

    def of(self, session: str) -> dict[str, Terminal]:
        return {terminal.id: terminal for terminal in self.all()
                if terminal.session.name == session}

    def running(self, session: str) -> int:
        """How many run in a session, as far as that is known without asking it."""
        ours = self.of(session)
        ids = {*ours, *sandbox.recorded_terminals(session)}
        return len(ids - {id for id, terminal in ours.items() if terminal.ended})

    def come_back(self, app: App, name: str, id: str, size: tuple[int, int] | None) -> Terminal:
        """A terminal that is there. Raises WebError where it is not."""
        if terminal := self.of(name).get(id):
            return terminal
        row = next((row for row in held_terminals(name)[1] if row.id == id), None)
        if row is None:
            raise WebError("not_found", f"there is no terminal {id[:20]!r} any more")
        engine, session = find_running(name)
        return self.open(Terminal(app, engine, session, run_of(session, row.title),
                                  size or (row.rows or 24, row.columns or 80), id, row.title,
                                  row.started))

    def begin(self, app: App, name: str, run: str, size: tuple[int, int]) -> Terminal:
        """Start a program in a session as it was last seen, while we look whether it still is so.

        Raises WebError, SandboxError.
        """
        known, early = None, None
        with suppress(ValueError):
            known = sandbox.recall(sandbox.candidates(sandbox.load_config()), sandbox.a_name(name))
        if known and known[1].id and (run == "shell" or known[1].agent):
            self.make_room()
            early = Terminal(app, *known, run, size)
            early.start()
            # Where its first process is seen to run there is nothing to look for.
            if known[1].process and not sandbox.has_ended(known[1]):
                return self.open(early)
        try:
            engine, session = find_running(name)
            if run == "agent" and not session.agent:
                raise WebError("conflict", f"the session {name} has no agent",
                               "open a shell instead")
        except BaseException:
            if early:
                early.discard()
            raise
        if early and early.session.id == session.id:
            return self.open(early)
        if early:
            early.discard()
        return self.open(Terminal(app, engine, session, run, size))

    def make_room(self) -> None:
        """Raise WebError where there are too many terminals."""
        over = [terminal for terminal in self.all() if terminal.ended]
        if len(self.by_id) - len(over) >= TERMINALS:
            raise WebError("too_many", f"there are {TERMINALS} terminals already", "close some")
        if len(self.by_id) >= TERMINALS:  # no longer wait for somebody to see the end of some
            for ended in over:
                ended.hang_up()

    def open(self, terminal: Terminal) -> Terminal:
        """Have a terminal served, and begun where it is not. Raises WebError, SandboxError."""
        try:
            if not terminal.pid:
                self.make_room()
        except WebError:
            sandbox.Output.close(terminal.wake_read, terminal.wake_write)
            raise
        with self.lock:
            if other := self.by_id.get(terminal.id):  # another page came back to it just now
                sandbox.Output.close(terminal.wake_read, terminal.wake_write)
                return other
            if not terminal.pid:
                terminal.start()
            self.by_id[terminal.id] = terminal
        self.write_down()
        terminal.thread.start()
        return terminal

    def remove(self, terminal: Terminal) -> None:
        with self.lock:
            self.by_id.pop(terminal.id, None)
        self.write_down()

    def write_down(self) -> None:
        """Write down what would have to be cleaned up."""
        with self.lock, suppress(SandboxError):
            rows = [{"session": t.session.name, "tag": t.id} for t in self.by_id.values()
                    if not t.ended and not t.held]
            if rows or os.path.exists(self.path):
                sandbox.write_private(self.path, json.dumps(rows))

    def clean_up(self) -> None:
        """Hang up what a killed server has left."""
        rows = []
        with suppress(OSError, ValueError):
            rows = sandbox.read_json(self.path)
        for row in rows:
            with suppress(WebError, SandboxError, OSError, KeyError, TypeError):
                engine, session = find_running(row["session"])
                sandbox.signal_tagged(engine, session, row["tag"], "HUP", 2)
        self.write_down()

    def close_all(self, session: str, how: str) -> None:
        """Hang up all terminals of a session, which was removed or the like, and wait for that."""
        sandbox.forget_terminals(session)
        for terminal in self.of(session).values():
            terminal.reason = f"the session {session} was {how}"
        threads = [threading.Thread(target=terminal.hang_up, daemon=True)
                   for terminal in self.of(session).values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(STOP_SECONDS)

    def leave(self) -> None:
        """Detach from all of them, now that the server ends, and wait until they have gone."""
        terminals = self.all()  # each leaves the list while it goes
        for terminal in terminals:
            terminal.wake()
        for terminal in terminals:
            with suppress(RuntimeError):  # it has not been started yet
                terminal.thread.join(STOP_SECONDS)


def run_of(session: Session, title: str) -> str:
    """What `run` was asked for, by what runs; "" for another command."""
    if session.agent and sandbox.agent_of(title) == session.agent:
        return "agent"
    return "shell" if title == sandbox.title_of(sandbox.SHELL) else ""


def held_terminals(name: str) -> tuple[Session | None, list[sandbox.Held]]:
    """A session, and its terminals that run, or whose end nobody has seen; lost records go."""
    records = sandbox.recorded_terminals(name, ended=True)
    if not records:
        return None, []
    engine, session = find(name)
    if session.state != "running":
        return None, []
    rows = {row.id: row for row in sandbox.list_terminals(engine, session)}
    sandbox.forget_lost(name, records, rows)
    return session, [row for row in rows.values() if row.runs or row.id in records]


def get_terminals(app: App, _request: Request, params: Params) -> Answer:
    name = params["session"]
    rows = {id: terminal.data() for id, terminal in app.terminals.of(name).items()}
    session, held = held_terminals(name)
    if not (rows or session or any(row["name"] == name for row in app.sessions.list())):
        find(name)  # raises, unless it is new
    for row in held:
        clients = max(0, row.clients or 0)
        if row.id in rows:
            rows[row.id]["viewers"] += max(0, clients - 1)  # one is ours
        elif session:
            rows[row.id] = {
                "id": row.id, "session": name, "run": run_of(session, row.title),
                "title": row.title, "started": iso(row.started), "rows": row.rows,
                "cols": row.columns, "viewers": clients, "ended": not row.runs,
                "exit": row.status, "seq": None}
    return json_answer(sorted(rows.values(), key=lambda row: str(row["started"])))


def delete_terminal(app: App, _request: Request, params: Params) -> Answer:
    name, id = params["session"], params["terminal"]
    if terminal := app.terminals.of(name).get(id):
        terminal.hang_up()
        return json_answer({"ok": True})
    if not any(row.id == id for row in held_terminals(name)[1]):
        raise WebError("not_found", f"there is no terminal {id[:20]!r} any more")
    engine, session = find_running(name)
    sandbox.signal_tagged(engine, session, id, "HUP", 2)
    sandbox.forget_terminal(name, id)
    return json_answer({"ok": True})


def get_terminal(app: App, request: Request, params: Params) -> Upgrade:
    """The WebSocket: ?id=<terminal>&from=<seq> comes back to one, else a new one is opened."""
    if "upgrade" not in request.headers:
        raise WebError("bad_request", "this is the address of a WebSocket", "connect to it as one")
    size = (request.number("rows", 24, 1, 1000), request.number("cols", 80, 1, 1000))
    given = size if "rows" in request.query and "cols" in request.query else None
    position = request.number("from", 0, 0, 1 << 60)
    protocol, response = accept_websocket(request)
    id, run = request.query.get("id", ""), request.query.get("run", "shell")
    if run not in ("shell", "agent"):
        raise WebError("bad_request", "run: it is neither shell nor agent")
    if id:
        terminal = app.terminals.come_back(app, params["session"], id, given)
    else:
        terminal = app.terminals.begin(app, params["session"], run, size)

    def attach(sock: socket.socket, buffered: bytes, leave: Callable[[], None]) -> None:
        protocol.send_response(response)
        viewer = Viewer(sock, protocol, leave, request.query.get("view", "") != "1", position,
                        given)
        sock.setblocking(False)
        viewer.feed(buffered)
        viewer.push()
        terminal.attach(viewer)

    return attach


def accept_websocket(request: Request) -> tuple[ServerProtocol, Any]:
    """Protocol and answer for an admitted request for a WebSocket. Raises WebError."""
    from websockets.server import ServerProtocol

    protocol = ServerProtocol(max_size=MESSAGE_BYTES)
    protocol.receive_data(request.raw + b"\r\n\r\n")
    events = protocol.events_received()
    response = protocol.accept(events[0]) if events else None  # type: ignore[arg-type]
    if response is None or response.status_code != 101:
        raise WebError("bad_request", "the WebSocket handshake is not a valid one")
    return protocol, response


# --- Routes ---

Route = Callable[[App, Request, Params], Reply]
SESSION = "/api/sessions/{session}"
ROUTES: list[tuple[str, str, Route]] = [
    ("GET", "/", asset_route("ui/index.html")),
    ("GET", "/preview", asset_route("preview/index.html")),
    ("GET", "/auth/login", asset_route("auth/login.html")),
    ("GET", "/preview/auth/login", asset_route("auth/login.html")),
    ("GET", "/auth/frontend/login.css", asset_route("auth/login.css")),
    ("GET", "/auth/frontend/login.js", asset_route("auth/login.js")),
    ("POST", "/auth/login", post_login),
    ("POST", "/auth/logout", post_logout),
    ("GET", "/ui/{version}/{file*}", asset_route("ui/")),
    ("GET", "/preview/{version}/{file*}", asset_route("preview/")),
    ("GET", "/api/profiles", get_profiles),
    ("GET", "/api/directories", get_directories),
    ("GET", "/api/news", get_news),
    ("GET", "/api/usage", get_all_usage),
    ("GET", "/api/sessions", get_sessions),
    ("POST", "/api/sessions", post_sessions),
    ("GET", SESSION, get_session),
    ("DELETE", SESSION, delete_session),
    ("GET", SESSION + "/users", get_users),
    ("POST", SESSION + "/start", post_start),
    ("POST", SESSION + "/stop", post_stop),
    ("POST", SESSION + "/recreate", post_recreate),
    ("POST", SESSION + "/rename", post_rename),
    ("POST", SESSION + "/duplicate", post_duplicate),
    ("GET", SESSION + "/settings", get_settings),
    ("PUT", SESSION + "/settings", put_settings),
    ("GET", SESSION + "/network", get_network),
    ("POST", SESSION + "/network", post_network),
    ("GET", SESSION + "/network/events", get_decisions),
    ("GET", SESSION + "/usage", get_usage),
    ("POST", SESSION + "/budget", post_budget),
    ("POST", SESSION + "/command", post_command),
    ("POST", SESSION + "/prompt", post_prompt),
    ("GET", SESSION + "/jobs", get_jobs),
    ("GET", SESSION + "/jobs/{job}", get_job),
    ("DELETE", SESSION + "/jobs/{job}", delete_job),
    ("GET", SESSION + "/jobs/{job}/events", get_events),
    ("GET", SESSION + "/jobs/{job}/output", get_output),
    ("GET", SESSION + "/changes", get_changes),
    ("GET", SESSION + "/changes/diff", get_diff),
    ("POST", SESSION + "/changes/undo", change_route("undo")),
    ("POST", SESSION + "/changes/redo", change_route("redo")),
    ("POST", SESSION + "/changes/merge", post_merge),
    ("GET", SESSION + "/terminals", get_terminals),
    ("DELETE", SESSION + "/terminals/{terminal}", delete_terminal),
    ("GET", SESSION + "/terminal", get_terminal),
]


def regex_of(pattern: str) -> re.Pattern[str]:
    """What a path has to be: `{name}` is one part of it, `{name*}` is all the rest."""
    pattern = re.sub(r"{(\w+)\*}", r"(?P<\1>.+)", pattern)
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", pattern))


PATHS = [(verb, regex_of(pattern), function) for verb, pattern, function in ROUTES]


def route(method: str, path: str) -> tuple[Route, dict[str, str]]:
    """The function for a request. Raises WebError when there is none."""
    fitting = {verb: (function, found.groupdict()) for verb, regex, function in reversed(PATHS)
               if (found := regex.fullmatch(path))}  # of two the first in the table counts
    if not fitting:
        raise WebError("not_found", "there is nothing at this address")
    verb = "GET" if method == "HEAD" else method
    if verb not in fitting:
        allowed = ", ".join(sorted([*fitting, *(["HEAD"] if "GET" in fitting else [])]))
        raise WebError("method_not_allowed", f"this address knows {allowed} only",
                       headers={"Allow": allowed})
    return fitting[verb]


# --- Service control ---

Tell = Callable[[str], None]


def parse_address(text: str) -> tuple[str, int]:
    """IP and port of `<ip:port>`; IPv6 in brackets. Raises SandboxError."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(bare)
        if not (colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536
                and host.startswith("[") == (address.version == 6)):
            raise ValueError
    except ValueError:
        hint = f"for example {DEFAULT_ADDRESS} or [::1]:3000"
        raise SandboxError(f"{text!r} is not a listen address <ip:port>", hint, 2) from None
    return str(address), int(port)


def address_text(address: tuple[str, int]) -> str:
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"


def web_path(address: tuple[str, int]) -> str:
    """Where the files of the server at an address begin."""
    return os.path.join(os.path.abspath(sandbox.sandbox_home()), "web",
                        f"{address[0].replace(':', '_')}_{address[1]}")


class Lock:
    """The file that a server holds locked as long as it lives: its pid is never another's."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.path = f"{web_path(address)}.lock"
        sandbox.make_private(os.path.dirname(self.path))
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)

    def take(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, record: Mapping[str, Any]) -> None:
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps(record).encode(), 0)

    def read(self) -> dict[str, Any]:
        """What the holder, or the last one, has written."""
        for _ in range(20):  # the holder may be about to write it
            with suppress(ValueError):
                data = sandbox.parse_json(os.pread(self.fd, 1 << 20, 0))
                if isinstance(data, dict):
                    return data
            time.sleep(0.05)
        return {}

    def close(self) -> None:
        os.close(self.fd)


def stop_server(address: tuple[str, int]) -> bool:
    """Stop the background server at an address; False when there is none. Raises SandboxError."""
    where = address_text(address)
    with closing(Lock(address)) as lock:
        if lock.take():
            return False
        record = lock.read()
        pid = record.get("pid")
        if not isinstance(pid, int):
            raise SandboxError(f"a server holds {lock.path} and has not said which process it is",
                               "try again")
        if not record.get("background"):
            message = f"the server at {where} runs in the foreground of a terminal (process {pid})"
            raise SandboxError(message, "press Ctrl-C there")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS + 5
        while not lock.take():
            if time.monotonic() > deadline:
                raise SandboxError(f"the server at {where} (process {pid}) does not end",
                                   f"run: kill -9 {pid}")
            time.sleep(0.02)
        return True


# The options that --restart takes over: kept in the lock file, which its owner alone can read.
KEPT_OPTIONS = [name for name, (flags, settings) in sandbox.options_of("serve").items()
                if flags and settings.get("action") != "store_true"]


def keep_options(args: argparse.Namespace, address: tuple[str, int]) -> None:
    """Take what is not given now from the server that runs at an address."""
    with closing(Lock(address)) as lock:
        kept = {} if lock.take() else lock.read().get("options", {})
    for key in KEPT_OPTIONS:
        setattr(args, key, getattr(args, key) or kept.get(key))


def tls_context(args: argparse.Namespace) -> ssl.SSLContext | None:
    """The certificate that was given, loaded. Raises SandboxError."""
    if not args.cert and not args.key:
        return None
    if not args.cert or not args.key:
        raise SandboxError("--cert and --key go together", "give both", 2)
    args.cert, args.key = os.path.abspath(args.cert), os.path.abspath(args.key)
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.cert, args.key)
    except OSError as error:
        reason = error.strerror or "not a certificate with its key"
        raise SandboxError(f"{args.cert}, {args.key}: {reason}", "give PEM files") from None
    return context


def serve(args: argparse.Namespace) -> int:
    """The command `serve`."""
    address = parse_address(args.address or DEFAULT_ADDRESS)
    if args.stop:
        if not stop_server(address):
            raise SandboxError(f"there is no server at {address_text(address)}",
                               "sandbox serve -d starts one")
        print(f"stopped {address_text(address)}")
        return 0
    if args.restart:
        keep_options(args, address)
    config = sandbox.load_config(sandbox.flags_layer(args), args.profile)
    if args.runtime:
        # Every configuration that is read from now on has it.
        os.environ["SANDBOX_RUNTIME"] = args.runtime
    if args.host is not None:
        os.environ["SANDBOX_HOST"] = args.host
    tls = tls_context(args)
    sandbox.with_remedies(import_websockets, args.yes)
    if not is_loopback(address[0]) and not tls:
        sandbox.say(f"warning: without TLS everyone on the way to {address[0]} can read the "
                    "password and the terminals; give --cert and --key, or listen on 127.0.0.1 "
                    "and come through ssh -L")
    fetch_libraries()
    if args.restart and not stop_server(address):
        sandbox.say(f"there was no server at {address_text(address)}")
    background = args.background or args.restart
    record = {"background": background,
              "options": {key: getattr(args, key) for key in KEPT_OPTIONS}}
    run = partial(run_server, address, config, tls, record)
    return run_in_background(address, run) if background else run(partial(print, flush=True))


def import_websockets() -> None:
    """Import websockets: the installed one, or else our own. Raises EngineProblem."""
    import glob
    import importlib.util
    from shutil import which

    home = os.path.join(os.path.abspath(sandbox.sandbox_home()), "venv")
    if has_websockets():
        return
    # What another version of Python has installed there will do: its compiled parts are optional.
    for path in glob.glob(os.path.join(glob.escape(home), "lib", "python3.*", "site-packages")):
        sys.path.insert(0, path)
        if has_websockets():
            return
        sys.path.remove(path)
    packages = []
    if importlib.util.find_spec("ensurepip") is None:  # Debian has it in a package of its own
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        packages = sandbox.install_commands(f"{python}-venv" if which("apt-get") else "python3-pip")
    commands = [*packages, *venv_commands(home)]
    raise EngineProblem("websockets", "the Python package websockets is not installed, or too old",
                        sandbox.Remedy(commands, lambda: make_venv(home, packages)))


def has_websockets() -> bool:
    """Whether a websockets that is new enough can be imported; one that is too old is dropped."""
    import importlib

    try:
        from websockets.server import ServerProtocol  # noqa: F401
        from websockets.version import version

        if int(version.partition(".")[0]) >= WEBSOCKETS_MAJOR:
            return True
    except (ImportError, ValueError):
        pass
    for name in [name for name in sys.modules if name.partition(".")[0] == "websockets"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    return False


def venv_commands(home: str) -> list[list[str]]:
    # -I: modules in the current directory are not to be imported.
    pip = [os.path.join(home, "bin", "python"), "-I", "-m", "pip", "install", "--quiet"]
    return [[sys.executable, "-I", "-m", "venv", home], [*pip, f"websockets>={WEBSOCKETS_MAJOR}"]]


def make_venv(home: str, packages: Sequence[Sequence[str]]) -> None:
    """Make our virtual environment whole, or leave nothing of it. Raises SandboxError."""
    import shutil

    sandbox.end_on_signals()
    sandbox.Remedy(packages).carry_out()
    partial = f"{home}.{sandbox.random_id()}"
    env = {name: value for name, value in os.environ.items()
           if name not in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")}
    try:
        sandbox.make_private(os.path.dirname(home))
        commands = venv_commands(partial)
        for number, command in enumerate(commands, 1):
            step = sandbox.Step(sandbox.quote_all(command), number, len(commands))
            step.run(command, {**env, "PIP_USER": "0"})
        shutil.rmtree(home, ignore_errors=True)
        os.rename(partial, home)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fetch_libraries() -> None:
    """In a checkout, bring what the pages load from npm up to date; wheel and zipapp have it."""
    build = os.path.join(os.path.dirname(os.path.abspath(sandbox.__file__)), "static", "build.py")
    if os.path.isfile(build):
        step = sandbox.Step("fetch the libraries of the web pages")
        try:
            step.run([sys.executable, "-I", build, "--libraries"], silent_seconds=1)
        except SandboxError:
            step.forget_log()
            words = "\n".join(step.tail)
            sandbox.say(f"{words}\nwarning: the terminal and Markdown in the web pages are missing "
                        "until then")


def run_server(address: tuple[str, int], config: Config, tls: ssl.SSLContext | None,
               record: Mapping[str, Any], tell: Tell) -> int:
    """Serve until a signal comes; once the service answers, `tell` gets what a person must know.

    `record` is kept in the lock file as long as the server runs.
    """
    where = address_text(address)
    lock = Lock(address)
    if not lock.take():
        pid = lock.read().get("pid")
        raise SandboxError(f"a sandbox server runs at {where} already (process {pid})",
                           f"sandbox serve {where} --restart, or --stop")
    named = leads_here(OWN_NAME, address[0])
    # One heap for all threads, and large buffers out of it: what is freed goes back to the system.
    call_libc("mallopt", -8, 1)  # M_ARENA_MAX
    call_libc("mallopt", -3, 2 * CHUNK_BYTES)  # M_MMAP_THRESHOLD, which would grow
    threading.stack_size(STACK_BYTES)
    sys.setswitchinterval(0.0001)
    try:
        app = App(address, config, tls)
    except OSError as error:
        what = "port" if error.errno == errno.EADDRINUSE else "address"
        raise SandboxError(f"cannot listen on {where}: {error.strerror}",
                           f"choose another {what}") from None
    lock.write({"pid": os.getpid(), **record})
    for begin in (app.terminals.clean_up, app.news.resume):
        threading.Thread(target=begin, daemon=True).start()
    status = 0

    def stop(number: int, _frame: object) -> None:
        nonlocal status
        status = 130 if number == signal.SIGINT else 0
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    scheme = "https" if tls else "http"
    generated = app.password != config.get("serverPass")
    lines = [f"sandbox serves at {scheme}://{where}", f"user: {config.get('serverUser')}",
             f"password: {app.password} (of this run)" if generated else "password: as configured"]
    if named:
        lines.append(f"better open: {scheme}://{OWN_NAME}:{address[1]}")
    if record["background"]:
        lines.append(f"log: {web_path(address)}.log")
    tell("\n".join(lines))
    with suppress(KeyboardInterrupt):
        app.serve_forever(0.5)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    app.stopping = True
    app.server_close()
    app.terminals.leave()
    app.news.leave()
    with suppress(OSError):
        lock.write({"pid": os.getpid(), "background": record["background"]})
    return status


def leads_here(name: str, address: str) -> bool:
    """Whether a name soon resolves to loopback addresses only, where we listen among them."""
    found: set[str] = set()

    def resolve() -> None:
        with suppress(OSError):
            found.update(str(entry[4][0]) for entry in socket.getaddrinfo(name, None))

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(RESOLVE_SECONDS)
    reached = {address} if is_loopback(address) else {"127.0.0.1", "::1"}
    return all(map(is_loopback, found)) and bool(found & reached)


def call_libc(name: str, *numbers: int) -> None:
    """Call a function that glibc has; elsewhere nothing happens."""
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        getattr(ctypes.CDLL(None), name)(*numbers)


def run_in_background(address: tuple[str, int], run: Callable[[Tell], int]) -> int:
    """Run in a process of its own session, and return when it serves or has failed."""
    read, write = os.pipe()
    sys.stdout.flush()
    if not (child := os.fork()):
        os.close(read)
        os.setsid()
        if os.fork():
            os._exit(0)
        run_daemon(f"{web_path(address)}.log", write, run)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, encoding="utf-8") as pipe:
        told = pipe.read()
    if told.startswith("["):
        raise SandboxError(*sandbox.parse_json(told))
    if not told:
        raise SandboxError("the server ended before it could answer",
                           f"see {web_path(address)}.log")
    print(told)
    return 0


def run_daemon(log_path: str, write: int, run: Callable[[Tell], int]) -> NoReturn:
    """Be the background process: output goes to the log, what a person must know to the pipe."""
    status = 1
    try:
        sandbox.make_private(os.path.dirname(log_path))
        open_log(log_path)
        LOG_PATH.append(log_path)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)

        def tell(text: str) -> None:
            os.write(write, text.encode())
            os.close(write)

        status = run(tell)
    except SandboxError as error:
        sandbox.report(error)
        os.write(write, json.dumps([error.message, error.hint, error.code]).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(status)
