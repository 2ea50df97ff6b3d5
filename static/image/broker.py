"""Holds the keys of a session: its agents see placeholders, and their requests get the keys here.

    broker.py serve   in the companion container: all that `proxy.py serve` does, and the broker

A gate of the session (`proxy.py gate` with SANDBOX_NET_SOCKET=broker.sock, SANDBOX_NET_PORT=3129)
hands over a listener. A request for /NAME/PATH there goes to the one URL of the provider NAME, with
each placeholder in authorization, x-api-key, x-goog-api-key and ?key= replaced by the key; what
else stands there is dropped. Each connection serves one request; the next one to a provider is made
beforehand. The keys are in memory only: a broker that has restarted has none.

Over the socket that SANDBOX_BROKER names the host says a JSON object per line, and gets one for
each, {"ok": true, ...} or {"error": text}:
  {"do": "set", ...}   put in force what is given, all or nothing; what is not given stays, other
                       providers, too, whose agents may be running:
     "providers"  {NAME: {"url", "keys": {placeholder: key}, "status" of refusals, "counted",
                  "free"}}, the last two lists of "METHOD /path" as regular expressions. Counted are
                  those that use tokens: they need a key, begin turns, and a budget refuses them
     "prices"     {model: row}: see usage.py
     "budget"     {"usd", "tokens", "minutes", "per": "session" or "day"}, all optional. Tokens are
                  those not read from a cache, minutes those in which a model worked, days of UTC.
                  Checked before each request; the minutes end a stream, too
     "turns"      seconds that a request which begins a turn waits for its checkpoint by each of
                  those who watch; 0: no wait
     "ca"         certificates to trust, in PEM; the image's own where it is empty
     "session"    its name by now
     "days"       what was counted in its place before, see usage.py
  {"do": "usage"}      {"providers": [NAME], "budget", "spent": {"usd", "tokens", "minutes"},
                       "days": see usage.py}
  {"do": "watch"}      from now on who has watched longest gets {"turn": id, "provider"} when a turn
                       begins. Who has gone or does not answer in time is passed over from then on,
                       until it answers, and the next one gets it; a turn that nobody is left to
                       answer goes on, as where nobody watches
  {"do": "turn", "id", "error": text or ""}   let it go on, or refuse it for this reason

stdout has a line per request like the proxy's decisions: verdict allow with "use" {"model",
"input", "output", "read", "written", "usd", "estimated", "status", "seconds"}, or deny with the
kind key, path, budget, turn or upstream.

Environment: that of proxy.py and usage.py, and SANDBOX_BROKER (another socket).
"""

import json
import os
import re
import resource
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import proxy  # noqa: E402
import usage  # noqa: E402

CONTROL = os.environ.get("SANDBOX_BROKER", "/run/sandbox-broker.sock")
ASK_BYTES, TEXT_CHARACTERS, ASKERS, BUFFER_BYTES = 4 << 20, 500, 16, 64 * 1024
BODY_SECONDS, SPARE_SECONDS, CHECK_SECONDS, LEAVE_SECONDS = 60.0, 50.0, 1.0, 0.25
KEY_HEADERS = ("authorization", "x-api-key", "x-goog-api-key", "cookie")
# of a query's words those that are a key, or that some server may read as one
KEY_WORD = re.compile(r"(?i:key|access_token|[^=]*[%+].*?)(?:=.*)?")
HOP_HEADERS = ("connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade")
TARGET = re.compile(r"/([a-z0-9-]{1,40})(/[^?#]*)(?:\?([^#]*))?")
URL = re.compile(r"(https?)://([^/?#@\\]+)(/[^?#\\]*)?")
STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [\t -~\x80-\xff]*)?")


class Refusal(proxy.Answer):
    """In the form that makes each agent show the text, and try only the 502 again."""

    def message(self) -> bytes:
        error: dict[str, Any] = {"type": "invalid_request_error", "code": self.status,
                                 "message": str(self), "status": "FAILED_PRECONDITION"}
        if self.status == 429:  # whose client knows by this that trying again is of no use
            error["status"] = "RESOURCE_EXHAUSTED"  # others try that again
            error["details"] = [{"@type": "type.googleapis.com/google.rpc.QuotaFailure",
                                 "violations": [{"quotaId": "BudgetPerDay"}]}]
        body = json.dumps({"type": "error", "error": error}).encode()
        again = "true" if self.status == 502 else "false"
        return (f"HTTP/1.1 {self.status} Refused\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nX-Should-Retry: {again}\r\n"
                "Connection: close\r\n\r\n").encode() + body


class Used(proxy.Decision):
    """About a request that was let through: `use` is what it has used."""

    use: dict[str, Any] = {}

    def entry(self) -> Any:
        return super().entry() | ({"use": self.use} if self.use else {})


# --- Providers ---


class Provider:
    """Where its requests go, and what its placeholders stand for. Raises ValueError, KeyError."""

    def __init__(self, name: str, row: Mapping[str, Any], tls: ssl.SSLContext) -> None:
        match = URL.fullmatch(row["url"])
        if not match or not TARGET.fullmatch(f"/{name}/"):
            raise ValueError(f"{proxy.clean(name)} has no URL http(s)://host/path")
        host, port = proxy.split_port(match[2])
        self.name, self.host = name, proxy.normal_host(host)
        self.tls = tls if match[1] == "https" else None
        self.port = port or (443 if self.tls else 80)
        self.place = proxy.with_port(self.host, self.port) if port else self.host
        self.base, self.status = (match[3] or "").rstrip("/"), int(row["status"])
        self.keys: dict[str, str] = dict(row["keys"])
        if not all(re.fullmatch("[!-~]+", text) for pair in self.keys.items() for text in pair):
            raise ValueError(f"a key of {name} is empty, or has other than printable ASCII")
        self.counted, self.free = ([re.compile(text) for text in row[kind]]
                                   for kind in ("counted", "free"))
        self.spares: list[tuple[float, socket.socket]] = []
        self.making = threading.Lock()  # a spare
        self.turn = 0  # the checksum of the request that began the last one

    def refusal(self, kind: str, reason: str, status: int = 0) -> Refusal:
        reason = reason[:TEXT_CHARACTERS]
        proxy.log(proxy.Decision(self.host, self.port, reason, kind=kind))
        return Refusal(status or self.status, f"sandbox: {reason}")

    def connect(self) -> socket.socket:
        """The spare connection where it still lives, or a new one. Raises Answer."""
        with suppress(IndexError):
            born, sock = self.spares.pop()
            try:
                sock.setblocking(False)
                sock.recv(1)
            except (ssl.SSLWantReadError, BlockingIOError):
                if time.monotonic() - born < SPARE_SECONDS:
                    return sock
            except OSError:
                pass
            sock.close()
        try:
            return self.open()
        except ssl.SSLCertVerificationError as error:  # trying again mends nothing
            reason = f"{self.host} is not trusted: {error.verify_message}"
            raise self.refusal("upstream", reason) from None
        except OSError as error:
            reason = f"no TLS with {self.host}: {error.strerror or error}"
            raise self.refusal("upstream", reason, 502) from None

    def open(self) -> socket.socket:
        target = proxy.Decision(self.host, self.port)
        target.addresses = ([self.host] if proxy.is_address(self.host)
                            else proxy.resolve(self.host, self.port))
        sock = proxy.connect(target)
        try:
            sock.settimeout(proxy.CONNECT_SECONDS)
            return self.tls.wrap_socket(sock, server_hostname=self.host,
                                        suppress_ragged_eofs=False) if self.tls else sock
        except OSError:
            sock.close()
            raise

    def make_spare(self) -> None:
        if not self.making.acquire(blocking=False):
            return  # one for both requests
        try:
            if not self.spares:
                self.spares.append((time.monotonic(), self.open()))
        except (OSError, proxy.Answer):
            pass
        finally:
            self.making.release()

    def with_keys(self, request: proxy.Request, query: str) -> tuple[str, bool]:
        """The query without a key, and whether one was known; the headers get the real ones."""
        words = query.split("&") if query else []
        asked = [("x-goog-api-key", word[4:]) for word in words if word.startswith("key=")]
        headers, known = [], False
        for name, value in [*request.headers, *asked]:
            if name.lower() in KEY_HEADERS:
                scheme, blank, word = value.rpartition(" ")
                if word not in self.keys:
                    continue
                value, known = scheme + blank + self.keys[word], True
            elif name.lower() == "accept-encoding":
                value = "identity"  # or what was used could not be read
            if name.lower() != "expect":
                headers.append((name, value))
        request.headers = headers
        query = "&".join(word for word in words if not KEY_WORD.fullmatch(word))
        return f"?{query}" if query else "", known


# --- What the host says, and what it is told ---


class Settings:
    """What the host has set. Raises ValueError, KeyError and the like."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        rows = data.get("providers", {})
        tls = ssl.create_default_context(cadata=data.get("ca") or None) if rows else None
        if tls:  # Python 3.13 alone refuses authorities that other programs trust
            tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
        self.providers = {name: Provider(name, row, tls) for name, row in rows.items() if tls}
        self.prices = {str(name): [float(price) for price in row]
                       for name, row in data.get("prices", {}).items()}
        self.budget = data.get("budget", {})
        self.limits = {name: float(self.budget[name])
                       for name in ("usd", "tokens", "minutes") if name in self.budget}
        self.per = {"session": "session", "day": "day"}[self.budget.get("per", "session")]
        self.turn_seconds = float(data.get("turns", 0))
        proxy.SESSION = str(data.get("session", proxy.SESSION))


class Turn:
    """A prompt that waits for its checkpoint by one of those who watch, until a time."""

    def __init__(self, provider: str) -> None:
        self.id, self.provider, self.error = os.urandom(8).hex(), provider, ""
        self.decided, self.until = threading.Event(), 0.0
        self.watcher: socket.socket | None = None
        self.told = set[socket.socket]()  # who has had it before gets it no second time


class Broker:
    def __init__(self) -> None:
        self.settings, self.ledger = Settings({}), usage.Ledger()
        self.lock = self.ledger.lock  # of all that is here
        self.watchers: list[socket.socket] = []
        self.silent: list[socket.socket] = []  # were such, and have not answered in time
        self.waiting: dict[str, Turn] = {}

    def answer(self, sock: socket.socket, line: bytes) -> dict[str, Any]:
        data = json.loads(line)
        do = data.pop("do")
        with self.lock:
            if do == "set":
                days = data.pop("days", None)
                rows = self.settings.data.get("providers", {}) | data.get("providers", {})
                settings = Settings(self.settings.data | data | {"providers": rows})
                if days:
                    self.ledger.begin(days)
                    self.ledger.write()
                self.settings = settings
            elif do == "usage":
                return {"ok": True, "providers": [*self.settings.providers],
                        "budget": self.settings.budget, "days": self.ledger.days,
                        "spent": self.ledger.spent(self.settings.per)}
            elif do == "watch":
                self.watchers.append(sock)
                for turn in self.waiting.values():
                    self.tell(sock, turn)
            elif do == "turn":
                if sock in self.silent:  # it was only slow
                    self.silent.remove(sock)
                    self.watchers.append(sock)
                turn = self.waiting[data["id"]]
                turn.error = str(data["error"])
                turn.decided.set()
            else:
                raise ValueError(f"there is no {do}")
        return {"ok": True}

    def send(self, sock: socket.socket, data: Mapping[str, Any]) -> None:
        with self.lock:
            try:
                sock.sendall(json.dumps(data).encode() + b"\n")
            except OSError:  # it has gone, or does not read
                self.forget(sock)

    def forget(self, sock: socket.socket) -> None:
        with self.lock:
            self.silent = [other for other in self.silent if other is not sock]
            self.pass_over(sock)

    def pass_over(self, sock: socket.socket | None) -> None:
        """Have the next one make the checkpoints that are awaited of this one."""
        self.watchers = [other for other in self.watchers if other is not sock]
        for turn in [*self.waiting.values()]:
            if turn.watcher is sock:
                self.hand_on(turn)

    def hand_on(self, turn: Turn) -> None:
        """Have who watches longest make its checkpoint; where nobody does it goes on."""
        if not self.watchers:
            turn.decided.set()
            return
        turn.watcher = self.watchers[0]
        turn.until = time.monotonic() + self.settings.turn_seconds
        self.tell(turn.watcher, turn)

    def tell(self, sock: socket.socket, turn: Turn) -> None:
        if sock not in turn.told:
            turn.told.add(sock)
            self.send(sock, {"turn": turn.id, "provider": turn.provider})

    def over(self, names: Sequence[str] = ("usd", "tokens", "minutes")) -> str:
        """Why nothing more may be used, or ''."""
        with self.lock:
            limits = self.settings.limits
            if limits and self.ledger.problem:
                return f"a budget is set, and {self.ledger.problem}"
            spent = self.ledger.spent(self.settings.per)
            for name in names:
                if name in limits and spent[name] >= limits[name]:
                    day = " of this day" if self.settings.per == "day" else ""
                    return (f"the budget{day} is spent: {spent[name]:.2f} of {limits[name]:g} "
                            f"{name}. To go on: sandbox budget {proxy.SESSION} "
                            f"{2 * limits[name]:g}{name}")
        return ""

    def hold(self, provider: Provider) -> None:
        """Announce a turn, and wait until its checkpoint is there. Raises Answer."""
        turn = Turn(provider.name)
        with self.lock:
            self.waiting[turn.id] = turn
            self.hand_on(turn)
        while not turn.decided.wait(max(0, turn.until - time.monotonic())):
            with self.lock:
                if turn.watcher and turn.until <= time.monotonic() and not turn.decided.is_set():
                    self.silent.append(turn.watcher)
                    self.pass_over(turn.watcher)
        with self.lock:
            del self.waiting[turn.id]
        if turn.error:
            raise provider.refusal("turn", turn.error)


BROKER = Broker()
ASK_SLOTS = threading.Semaphore(ASKERS)


def serve_asker(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
    try:
        with sock, sock.makefile("rb") as lines, suppress(OSError):
            while line := lines.readline(ASK_BYTES):
                try:
                    answer = BROKER.answer(sock, line)
                except Exception as error:  # whatever the line has: the host is told
                    answer = {"error": f"{type(error).__name__}: {error}"[:TEXT_CHARACTERS]}
                BROKER.send(sock, answer)
    finally:
        BROKER.forget(sock)
        ASK_SLOTS.release()


# --- One request ---


def handle(client: socket.socket) -> None:
    """Raises Answer and OSError."""
    head, rest = proxy.read_head(client, b"", time.monotonic() + proxy.HEAD_SECONDS)
    request = proxy.Request(head)
    if request.words("upgrade"):
        raise Refusal(426, "sandbox: no other protocol goes through here")
    if [proxy.authority(value, 80)[0] for value in request.values("host")] != ["127.0.0.1"]:
        raise Refusal(421, "sandbox: its Host is not 127.0.0.1")
    match = TARGET.fullmatch(request.target)
    provider = BROKER.settings.providers.get(match[1]) if match else None
    if not match or not provider:
        raise Refusal(404 if BROKER.settings.providers else 401, NO_KEYS + proxy.SESSION)
    place = f"{request.method} {match[2]}"
    counted = any(pattern.fullmatch(place) for pattern in provider.counted)
    if not counted and not any(pattern.fullmatch(place) for pattern in provider.free):
        raise provider.refusal("path", f"agents need no {request.method} of "
                               f"{proxy.clean(match[2])}", 404)
    query, known = provider.with_keys(request, match[3] or "")
    if counted and not known:
        raise provider.refusal("key", "the request has no placeholder of this session's keys", 401)
    if counted and (reason := BROKER.over()):
        raise provider.refusal("budget", reason)
    outgoing = request.outgoing(provider.base + match[2] + query, provider.place)
    Exchange(client, provider, request, counted).run(outgoing, rest)


NO_KEYS = ("sandbox: no such provider, or its key was lost when the session's companion restarted."
           " To give it again: sandbox run -n ")


class Exchange:
    """A request on its way to its provider, and the answer."""

    def __init__(self, client: socket.socket, provider: Provider, request: proxy.Request,
                 counted: bool) -> None:
        self.client, self.provider, self.counted = client, provider, counted
        self.body, self.marks, self.meter = proxy.Body(request), usage.Marks(), usage.Meter()
        self.held, self.head = b"", b""  # what is not yet sent, and what of the answer's has come
        self.sent = self.status = 0
        self.asked = self.ended = self.gone = self.framed = False
        self.started = self.checked = time.monotonic()

    def run(self, outgoing: bytes, rest: bytes) -> None:
        """Raises Answer and OSError."""
        with self.provider.connect() as self.server:
            with BROKER.lock:
                BROKER.ledger.work(self.counted)
            try:
                self.server.setblocking(False)
                self.client.settimeout(proxy.IDLE_SECONDS)
                self.held = outgoing
                self.take(rest)
                self.relay()
            except (OSError, proxy.Answer) as error:
                if self.status:  # an answer that has begun breaks off
                    self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                                           struct.pack("ii", 1, 0))
                    raise ConnectionError from error
                if isinstance(error, proxy.Answer):
                    raise
                reason = f"no answer: {error.strerror or error}"
                raise self.provider.refusal("upstream", reason, 502) from None
            finally:
                self.settle()

    def relay(self) -> None:
        poll, end = select.poll(), self.deadline()
        poll.register(self.server, select.POLLIN)
        while not self.ended and (left := end - time.monotonic()) > 0:
            if not self.gone:
                poll.register(self.client, select.POLLRDHUP if self.body.done else select.POLLIN)
            ready = dict(poll.poll(min(left, CHECK_SECONDS) * 1000))
            if self.client.fileno() in ready:
                piece = b"" if self.body.done else self.client.recv(BUFFER_BYTES)
                if not piece:  # it goes as soon as it has all, often before the server
                    self.gone = True
                    poll.unregister(self.client)
                    end = time.monotonic() + LEAVE_SECONDS
                self.take(piece)
            while self.server.fileno() in ready and not self.ended and self.receive():
                self.check()
            self.check()
            if ready and not self.gone:
                end = self.deadline()
        if not self.ended:
            raise ConnectionError("the agent has gone" if self.gone else "nothing came")

    def deadline(self) -> float:
        """Until when something more must come: an answer may take long, a request may not."""
        return time.monotonic() + (proxy.IDLE_SECONDS if self.body.done else BODY_SECONDS)

    def check(self) -> None:
        """Raises Answer when the minutes of the budget are over."""
        if self.counted and time.monotonic() - self.checked > CHECK_SECONDS:
            self.checked = time.monotonic()
            if reason := BROKER.over(["minutes"]):
                raise self.provider.refusal("budget", reason)

    def take(self, data: bytes) -> None:
        """Send what came of the request, but for its last piece until that may go."""
        piece = data[:self.body.take(memoryview(data))]
        self.marks.see(piece)
        self.sent += len(piece)
        if len(self.held) + len(piece) > BUFFER_BYTES:
            self.send(self.held)
            self.held = b""
        self.held += piece
        if self.body.done and not self.asked:
            turns = self.counted and self.marks.begins_turn and BROKER.settings.turn_seconds
            if turns and self.provider.turn != self.marks.sum:  # else it is tried again
                BROKER.hold(self.provider)
                self.provider.turn = self.marks.sum
            self.send(self.held)
            self.asked = True
            with suppress(RuntimeError):  # the limit on processes
                threading.Thread(target=self.provider.make_spare, daemon=True).start()

    def send(self, data: bytes) -> None:
        self.server.settimeout(proxy.IDLE_SECONDS)
        self.server.sendall(data)
        self.server.setblocking(False)

    def receive(self) -> bool:
        """Pass on what has come; whether there may be more."""
        data, waits, failure = b"", False, None
        try:
            while len(data) < BUFFER_BYTES and not self.ended:
                piece = self.server.recv(BUFFER_BYTES)
                data += piece
                self.ended = not piece
        except (ssl.SSLWantReadError, BlockingIOError):
            waits = True
        except OSError as error:  # what came before it goes on first
            self.ended, failure = True, error
        if data and self.counted:
            self.meter.see(data)
        if data and not self.status:
            data = self.begin(data)
        if data and not self.gone:
            self.client.sendall(data)
        cut = self.status and not self.framed  # its end is all that says that it is whole
        if failure and (cut or not isinstance(failure, ssl.SSLEOFError)):
            raise failure
        if self.ended and not self.status:
            raise ConnectionError("it ended before its head did")
        return not waits

    def begin(self, data: bytes) -> bytes:
        """The answer's head as it goes to the agent, and what is behind it; b'' before its end."""
        self.head += data
        head, end, rest = self.head.partition(b"\r\n\r\n")
        if len(head) > proxy.HEAD_BYTES:
            raise ConnectionError("its head is too large")
        if not end:
            return b""
        first, *lines = head.split(b"\r\n")
        match, fields = STATUS_LINE.fullmatch(first), [*map(proxy.HEADER.fullmatch, lines)]
        if not match or not all(fields):
            raise ConnectionError("its head is not well-formed")
        if match[1].startswith(b"1"):
            self.head = b""
            return self.begin(rest)
        if match[1].startswith(b"3"):
            raise self.provider.refusal("upstream", f"{self.provider.host} leads to another place")
        self.status = int(match[1])
        names = [field[1].decode().lower() for field in fields if field]
        self.framed = bool({"content-length", "transfer-encoding"} & {*names})
        kept = [line for name, line in zip(names, lines, strict=True) if name not in HOP_HEADERS]
        return b"\r\n".join([first, *kept, b"Connection: close", b"", rest])

    def settle(self) -> None:
        """Count what was used, and say it. What broke off before it said so is estimated."""
        line = Used(self.provider.host, self.provider.port, rule="keys")
        used = self.counted and self.asked and (self.status or 200) // 100 == 2
        counts, model = self.meter.counts(), self.meter.model
        if estimated := not (self.ended and self.meter.fields):
            counts[0] = max(counts[0], 0 if self.meter.fields else self.sent // 4)
            counts[1] = max(counts[1], self.meter.size // 8)
        with BROKER.lock:
            BROKER.ledger.work(-self.counted)
            if used:
                usd = usage.dollars(BROKER.settings.prices, model, counts)
                BROKER.ledger.add(model or "unknown", counts, usd)
        if used:
            BROKER.ledger.write()
            names = ("input", "output", "read", "written", "written_long")
            line.use = {"model": model, **dict(zip(names, counts, strict=True)), "usd": usd,
                        "estimated": estimated, "status": self.status,
                        "seconds": round(time.monotonic() - self.started, 3)}
        if self.asked:
            proxy.log(line)


# --- The program ---


def serve() -> int:
    proxy.prepare()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the keys
    BROKER.ledger.open()
    for target, *args in ((proxy.serve_gates, "proxy.sock", proxy.handle), (serve_askers,)):
        threading.Thread(target=target, args=args, daemon=True).start()
    return proxy.serve_gates("broker.sock", handle)


def serve_askers() -> None:
    with proxy.listen(CONTROL) as server:
        while True:
            proxy.start(serve_asker, server.accept()[0], ASK_SLOTS)


def main(argv: list[str]) -> int:
    if argv == ["serve"]:
        return serve()
    print("usage: broker.py serve", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
