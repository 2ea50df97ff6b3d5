"""The gateway by raw sockets, the limits, service control, and the README's words on the API."""

import base64
import concurrent.futures
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from conftest import ROOT, USER, Engine, write_config
from service import PASSWORD, Service, free_port, wait_for
from test_agents import IMAGE as REAL_IMAGE
from test_engines import SilentEngine, impatient
from test_websocket import children

import sandbox
import sandbox_web

__all__ = ["impatient"]  # a fixture

pytestmark = pytest.mark.parametrize("engine", ["docker"], indirect=True, scope="session")


@pytest.fixture(scope="module")
def service(engine: Engine) -> Iterator[Service]:
    service = Service(engine, kept=True)
    yield service
    service.end()


def head(service: Service, target: str, method: str = "GET", *headers: str,
         version: str = "HTTP/1.1") -> bytes:
    lines = [f"{method} {target} {version}", f"Host: {service.address}", *headers,
             "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


ANONYMOUS = {
    ("GET", "/auth/login"): 200,
    ("HEAD", "/auth/login"): 200,
    ("GET", "/auth/frontend/login.css"): 200,
    ("GET", "/auth/frontend/login.js"): 200,
    ("GET", "/preview/auth/login"): 200,
    ("POST", "/auth/logout"): 200,
    ("POST", "/auth/login"): 415,
    ("GET", "/auth/logout"): 405,
    ("POST", "/auth/frontend/login.css"): 405,
    ("DELETE", "/auth/login"): 405,
    ("PUT", "/preview/auth/login"): 405,
}
PAGES = [
    "/",
    "/preview",
    "/preview/",
    "/index.html",
    "/favicon.ico",
    "/ui/x/main.js",
    "/preview/x/main.js",
    "/apix",
    "/API/sessions",
    "/Api/",
    "/AUTH/login",
    "/Auth/Login",
    "/auth%20",
    "/authx/login",
    "/login",
    "/static/ui",
    "/preview/auth",
    "/preview/auth/login/",
    "/preview/auth/login.css",
    "/preview/auth/x",
    "/robots.txt",
    "/.git/config",
    "/sandbox.json",
    "/?next=/auth/login",
    "/x;/auth/login",
]
REFUSED = [
    "/api",
    "/api/",
    "/api/sessions",
    "/api/sessions/x",
    "/api/sessions/x/terminal",
    "/api/sessions/x/jobs/1/events",
    "/api/profiles",
    "/api/directories",
    "/api/directories?path=/",
    "/api/nothing",
    "/api/auth/login",
    "/%61pi/sessions",
    "/auth",
    "/auth/",
    "/auth/x",
    "/auth/login/",
    "/auth/login.js",
    "/auth/frontend",
    "/auth/frontend/",
    "/auth/frontend/login.html",
    "/auth/frontend/x.css",
    "/auth/Login",
    "/auth/LOGIN",
    "/auth/login;x",
    "/auth/login;",
    "/auth/login%20",
    "/auth/logout/x",
    "/auth/preview/auth/login",
    "/auth/login=",
    "/auth/login&x",
]
TRICKS = [
    "//",
    "//auth/login",
    "/auth//login",
    "/./auth/login",
    "/auth/./login",
    "/auth/../api/sessions",
    "/auth/login/..",
    "/auth/login/../../api/sessions",
    "/auth/%2e%2e/api/sessions",
    "/auth/%2e/login",
    "/auth%2flogin",
    "/auth%2Flogin",
    "/auth/login%2f..%2f..%2fapi",
    "/auth/login%00",
    "/auth/login%0d%0a",
    "/auth/%252e%252e/api",
    "/auth\\login",
    "/auth/login%5c..",
    "/%",
    "/%zz",
    "/%ff",
    "/%c0%ae",
    "http://h/auth/login",
    "*",
    "auth/login",
    "",
    "/auth/login#x",
    "/auth/login\t",
    "/auth/login\x80",
    "?",
    "/auth/login?x=%ff&y=1&x=2",
]


@pytest.mark.parametrize("method, path", ANONYMOUS, ids=lambda value: value)
def test_the_allowlist(service: Service, method: str, path: str) -> None:
    assert service.status(head(service, path, method)) == ANONYMOUS[method, path]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_leads_an_anonymous_to_the_login(service: Service, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "get", "X"):
        answer = service.raw(head(service, path, method))
        assert answer.startswith(b"HTTP/1.1 302 "), method
        assert b"\r\nLocation: /auth/login\r\n" in answer, method


@pytest.mark.parametrize("path", REFUSED)
def test_api_and_auth_are_a_plain_401_for_an_anonymous(service: Service, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "get", "X"):
        answer = service.raw(head(service, path, method))
        assert answer.startswith(b"HTTP/1.1 401 ") and b"Location" not in answer, method
        assert answer.endswith(b"\r\n\r\n" if method == "HEAD" else b"\r\n\r\nUnauthorized\n")


@pytest.mark.parametrize("target", TRICKS)
def test_a_path_with_a_trick_is_refused(service: Service, target: str) -> None:
    for cookie in ([], [f"Cookie: {service.cookie}"]):
        assert service.status(head(service, target, "GET", *cookie)) == 400


@pytest.mark.parametrize(
    "cookie",
    [
        "",
        "x",
        "{name}=",
        "{name}=x.y.z",
        "{name}=a.99999999999.{signature}",
        "{text}.{signature}x",
        "{name}=\x80",
        "{name}={id}.99999999999.{signature}",
        "other={value}",
        "{name}={id}.nan.{signature}",
        "{name}={id}.{expiry}.",
        "{name}={id}.{expiry}",
        "{NAME}={value}",
    ],
)
def test_a_cookie_that_is_not_ours_proves_nothing(service: Service, cookie: str) -> None:
    name, _, value = service.cookie.partition("=")
    id, expiry, signature = value.split(".")
    forged = cookie.format(
        name=name,
        NAME=name.upper(),
        value=value,
        id=id,
        expiry=expiry,
        signature=signature,
        text=f"{name}={id}.{expiry}",
    )
    assert service.status(head(service, "/api/profiles", "GET", f"Cookie: {forged}")) == 401
    asked = head(service, "/api/profiles", "GET", f"Cookie: {forged}; {service.cookie}")
    assert service.status(asked) == 200


def test_a_request_is_not_carried_out_after_its_login(service: Service) -> None:
    kept = service.cookie
    service.log_in()
    head = (f"POST /api/sessions HTTP/1.1\r\nHost: {service.address}\r\n"
            f"Cookie: {service.cookie}\r\nContent-Type: application/json\r\n"
            "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as sock:
        sock.sendall(head.encode())
        assert b" 100 Continue" in sock.recv(1000)
        assert service.post("/auth/logout").status == 200
        service.cookie = kept
        sock.sendall(b"{}")
        assert sock.recv(1000).startswith(b"HTTP/1.1 401 ")


def test_logout_ends_the_login_for_good(service: Service) -> None:
    mine = service.cookie
    other = service.log_in()
    attributes = other.headers["Set-Cookie"]
    assert all(part in attributes
               for part in ("; Path=/", "; HttpOnly", "; SameSite=Strict", "; Max-Age="))
    assert service.get("/api/profiles").status == 200
    assert service.post("/auth/logout").status == 200
    assert service.get("/api/profiles").status == 401
    ended, service.cookie = service.cookie, mine
    service.restart_after_kill()
    assert service.get("/api/profiles").status == 200  # this one outlives a restart
    assert service.get("/api/profiles", cookie=ended).status == 401  # and that one stays ended


def test_a_changed_password_ends_all_logins(engine: Engine) -> None:
    service = Service(engine)
    old = service.cookie
    service.end()
    write_config(engine.home, serverPass="ignored: the command line counts")
    with engine.popen("serve", service.address, "-P", "another") as process:
        assert process.stdout and process.stdout.readline()
        assert service.get("/api/profiles", cookie=old).status == 401
    write_config(engine.home)


def test_an_expired_cookie_proves_nothing(service: Service) -> None:
    """Signed by the server's own key, and over."""
    for seconds, status in ((60, 200), (-60, 401)):
        assert service.get("/api/profiles", cookie=service.signed_cookie(seconds)).status == status


@pytest.mark.parametrize(
    "host, status",
    [
        ("evil.example", 421),
        ("evil.example:{port}", 421),
        ("127.0.0.1.evil.example", 421),
        ("10.0.0.1:{port}", 421),
        ("localhost", 200),
        ("LOCALHOST:{port}", 200),
        ("localhost.", 200),
        ("sandbox.localhost:{port}", 200),
        ("x.sandbox.localhost", 421),
        ("other.localhost", 421),
        ("127.0.0.1", 200),
        ("[::1]:{port}", 200),
        ("localhost@evil.example", 421),
        ("", 400),
        ("local host", 421),
        ("evil.example, localhost", 421),
        ("0.0.0.0", 421),
    ],
)
def test_a_foreign_host_is_refused(service: Service, host: str, status: int) -> None:
    name = host.format(port=service.port)
    data = f"GET /auth/login HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n"
    assert service.status(data.encode()) == status


def test_the_gateway_checks_host_path_login_and_origin_in_this_order(service: Service) -> None:
    """Each of these requests has all faults that come after the one that is told, too."""
    foreign = {"Origin": "http://evil.example", "Content-Type": "application/json"}
    told = [service.request("POST", path, b"{}", {"Host": host, **foreign}, cookie).status
            for host, path, cookie in (("evil.example", "/api/%2e%2e/", ""),
                                       ("localhost", "/api/%2e%2e/", ""),
                                       ("localhost", "/api/nowhere", ""),
                                       ("localhost", "/api/nowhere", service.cookie))]
    assert told == [421, 400, 401, 403]


def test_no_host_and_two_hosts(service: Service) -> None:
    assert service.status(b"GET /auth/login HTTP/1.1\r\n\r\n") == 400
    twice = b"GET /auth/login HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"
    assert service.status(twice) == 400


def test_a_name_that_was_allowed(engine: Engine) -> None:
    write_config(engine.home, allowedHosts=["box.example"])
    service = Service(engine, "--allow-host", "Other.example")
    for host, status in (("box.example", 200), ("BOX.example:99", 200), ("other.example", 200),
                         ("third.example", 421)):
        assert service.get("/auth/login", headers={"Host": host}).status == status
    service.end()
    write_config(engine.home)


@pytest.mark.parametrize(
    "headers, allowed",
    [
        ({}, True),
        ({"Origin": "http://{address}"}, True),
        ({"Origin": "http://sandbox.localhost:{port}", "Host": "sandbox.localhost:{port}"}, True),
        ({"Origin": "http://{address}", "Host": "sandbox.localhost:{port}"}, False),
        ({"Origin": "http://sandbox.localhost:5173", "Host": "sandbox.localhost:{port}"}, False),
        ({"Origin": "https://{address}"}, True),
        ({"Origin": "null"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "http://127.0.0.1"}, False),
        ({"Origin": "http://{address}.evil.example"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "same-origin"}, True),
    ],
)
def test_a_foreign_origin_changes_nothing(service: Service, headers: dict[str, str],
                                          allowed: bool) -> None:
    known = {"address": service.address, "port": service.port}
    sent = {name: value.format(**known) for name, value in headers.items()}
    login = service.post("/auth/login", {"username": "admin", "password": PASSWORD}, headers=sent)
    assert login.status == (200 if allowed else 403)
    reply = service.post("/api/sessions", {"nonsense": 1}, headers=sent)
    assert reply.status == (400 if allowed else 403)
    assert service.request("GET", "/api/profiles", headers=sent).status == 200
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
        **sent,
    }
    reply = service.request("GET", "/api/sessions/nothing-here/terminal", headers=upgrade)
    assert reply.status == (404 if allowed else 403)


def test_logins_are_throttled(engine: Engine) -> None:
    service = Service(engine)
    for _ in range(20):
        began = time.monotonic()
        replies = [service.log_in("wrong") for _ in range(8)]
        right = service.log_in()
        assert [reply.status for reply in replies[:5]] == [401] * 5
        if time.monotonic() - began < 1:  # or the first wait may be over, which is so long
            break
        wait_for(lambda: service.log_in().status == 200)  # all begins anew
    assert [reply.status for reply in replies[5:]] == [429] * 3
    assert int(replies[-1].headers["Retry-After"]) >= 1
    assert right.status == 429  # the right one has to wait, too
    assert service.get("/api/profiles").status == 200  # who is in stays in
    wait_for(lambda: service.log_in().status == 200)
    service.end()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"username": "admin"}',
        b'{"username": 1, "password": 2}',
        b'{"username": "admin", "password": "x", "more": 1}',
        b'{"a": NaN}',
        b"[" * 8000,
        b"\xff",
        b'{"username": "\\ud800", "password": "x"}',
    ],
)
def test_a_malformed_login_is_told_so(service: Service, body: bytes) -> None:
    reply = service.request("POST", "/auth/login", body, {"Content-Type": "application/json"},
                            cookie="")
    assert reply.status == 400 and reply.json["error"]["message"], reply.body


@pytest.mark.parametrize("body", [b"[" * 2500, b'{"username":' * 600, b"[" * 70 + b"]" * 70,
                                  b'["\\"]", "]", ' + b"[" * 70])
def test_a_body_is_not_read_deeper_than_a_stack_reaches(service: Service, body: bytes) -> None:
    """From Python 3.13 on the parser would go until the process dies."""
    headers = {"Content-Type": "application/json"}
    reply = service.request("POST", "/auth/login", body, headers, cookie="")
    assert reply.status == 400 and "nested" in reply.json["error"]["message"]
    assert service.get("/api/profiles").status == 200


MALFORMED = {
    "no version": (b"GET /auth/login\r\nHost: localhost\r\n\r\n", 400),
    "http/0.9": (b"GET /auth/login HTTP/0.9\r\nHost: localhost\r\n\r\n", 505),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "four words": (b"GET /auth/login HTTP/1.1 x\r\nHost: localhost\r\n\r\n", 400),
    "two spaces": (b"GET  /auth/login HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "folded": (b"GET /auth/login HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n", 400),
    "space before colon": (b"GET /auth/login HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
    "no colon": (b"GET /auth/login HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n", 400),
    "bare lf": (b"GET /auth/login HTTP/1.1\nHost: localhost\n\n\r\n\r\n", 400),
    "bare cr": (b"GET /auth/login HTTP/1.1\r\nHost: localhost\r\nA: b\rX: y\r\n\r\n", 400),
    "nul": (b"GET /auth/login HTTP/1.1\r\nHost: localhost\r\nA: \0\r\n\r\n", 400),
    "chunked": (
        b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    "both lengths": (
        b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "two lengths": (
        b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n",
        400,
    ),
    "equal lengths": (
        b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
        400,
    ),
    "list of lengths": (
        b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4, 4\r\n\r\n", 400),
    "signed length": (b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: +4\r\n\r\n",
                      400),
    "negative length": (
        b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
    "huge length": (
        b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 99999999999999999999\r\n\r\n",
        400,
    ),
    "long body": (b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n"
                  + b"x" * 9000, 413),
    "long target": (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
    "long head": (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    "many headers": (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 100 + b"\r\n", 431),
    "expect": (
        b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\n"
        b"Expect: magic\r\nContent-Length: 1\r\n\r\nx", 417),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50) + b"\r\n\r\n", 400),
    "binary": (bytes(range(256)) + b"\r\n\r\n", 400),
}


@pytest.mark.parametrize("shape", MALFORMED)
def test_a_malformed_request_is_refused_and_the_connection_closed(service: Service,
                                                                  shape: str) -> None:
    data, status = MALFORMED[shape]
    follower = b"GET /auth/login HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = service.raw(data + follower)
    assert re.match(rb"HTTP/1.1 (\d+)", answer)[1] == str(status).encode(), answer[:200]  # type: ignore[index]
    assert len(re.findall(rb"HTTP/1.1 \d", answer)) == 1 and b"\r\nConnection: close\r\n" in answer
    assert b"Traceback" not in answer and b"sandbox_web" not in answer and b"Python" not in answer


def test_an_anonymous_body_is_not_read_as_a_request(service: Service) -> None:
    inner = b"GET /auth/login HTTP/1.1\r\nHost: localhost\r\n\r\n"
    data = (b"POST /api/sessions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: %d\r\n\r\n" % len(inner))
    assert service.raw(data + inner).count(b"HTTP/1.1 ") == 1


def test_requests_on_one_connection(service: Service) -> None:
    one = b"GET /auth/login HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /auth/login HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert service.raw(one * 3 + b"\r\n" + last).count(b"HTTP/1.1 200 ") == 4
    answer = service.raw(b"GET /auth/login HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 ") == 1


def test_the_answer_to_head_has_no_body(service: Service, engine: Engine, name: str) -> None:
    """On every route, for a head that cannot be read, and for what would be sent without an end."""
    session = service.create(name, network={"allow": ["a.test"]})["name"]
    job = service.ended(service.job(session, "echo out"))["id"]
    upgrade = ("Upgrade: websocket", f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}",
               "Sec-WebSocket-Version: 13")
    paths = [path.format(session=session, job=job, terminal="x", version="0", file="main.js")
             for path in route_patterns()]
    assert len(paths) == (ROOT / "sandbox_web.py").read_text().count('\n    ("GET",')
    for more in ((), (f"Cookie: {service.cookie}",), (f"Cookie: {service.cookie}", *upgrade),
                 ("no colon",), ("Content-Length: 99999",), (f"A: {'a' * 20_000}",)):
        for path in paths:
            answer = service.raw(head(service, path, "HEAD", *more))
            assert re.fullmatch(rb"HTTP/1.1 [2345].*\r\n\r\n", answer, re.DOTALL), (path, answer)
            assert answer.count(b"\r\n\r\n") == 1, (path, answer)
    assert service.get(f"/api/sessions/{session}/terminals").json == []
    service.request("DELETE", f"/api/sessions/{session}")


def route_patterns() -> list[str]:
    """The paths that can be asked for with GET."""
    text = (ROOT / "sandbox_web.py").read_text()
    found = re.findall(r'\("GET", (SESSION)?(?: \+ )?"?([^",]*)"?,', text)
    return [("/api/sessions/{session}" if session else "") + path.replace("{file*}", "{file}")
            for session, path in found]


def test_expect_100_continue(service: Service) -> None:
    body = json.dumps({"username": "admin", "password": PASSWORD}).encode()
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as sock:
        sock.sendall(
            b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(body)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_pages_have_one_inline_script_and_are_not_cached_and_assets_are(service: Service) -> None:
    for path in ("/", "/preview", "/auth/login", "/preview/auth/login"):
        reply = service.get(path)
        page = reply.body.decode()
        assert reply.status == 200 and reply.headers["Cache-Control"] == "no-store"
        (inline,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
        page = page.replace(inline, "").replace("<script></script>", "")
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        policy = f"script-src 'self' 'sha256-{digest}';"
        assert policy in reply.headers["Content-Security-Policy"]
        # xterm.js styles itself
        assert path == "/" or "unsafe" not in reply.headers["Content-Security-Policy"]
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|javascript:", page)
        for link in re.findall(r'<(?:script|link)[^>]*(?:src|href)="(/[^"]+)"', page):
            asset = service.get(link)
            assert asset.status == 200, link
            assert link.startswith("/auth/") or "immutable" in asset.headers["Cache-Control"]
    assert service.get("/ui/0/main.js").headers["Cache-Control"] == "no-store"
    assert service.get("/ui/0/nothing.js").status == service.get("/ui/0/main.py").status == 404


def test_answers_are_compressed_for_who_can_read_it(service: Service) -> None:
    import gzip

    plain = service.get("/auth/login")
    packed = service.get("/auth/login", headers={"Accept-Encoding": "gzip, br"})
    assert plain.headers["Content-Encoding"] is None
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body and len(packed.body) < len(plain.body)


WRONG_BODIES: list[tuple[str, str, Any]] = [
    ("POST", "/api/sessions", {}),
    ("POST", "/api/sessions", {"name": "-x", "directory": "/tmp"}),
    ("POST", "/api/sessions", {"name": "a b", "directory": "/tmp"}),
    ("POST", "/api/sessions", {"directory": "relative"}),
    ("POST", "/api/sessions", {"directory": "/nonexistent"}),
    ("POST", "/api/sessions", {"directory": 5}),
    ("POST", "/api/sessions", {"directory": "/tmp", "agent": "clod"}),
    ("POST", "/api/sessions", {"directory": "/tmp", "x": 1}),
    ("POST", "/api/sessions", {"directory": "/tmp", "agent": "c", "command": "sh"}),
    ("POST", "/api/sessions", {"directory": "/tmp", "network": ["x"]}),
    ("POST", "/api/sessions", {"directory": "/tmp", "network": {"deny": ["x.example"]}}),
    ("POST", "/api/sessions", {"directory": "/tmp", "network": {"allow": ["http://x.example/"]}}),
    ("POST", "/api/sessions", {"directory": "/tmp", "network": {"allow": "x.example"}}),
    ("POST", "/api/sessions", {"directory": "/tmp\0"}),
    ("POST", "/api/sessions", {"directory": "/var/run"}),
    ("POST", "/api/sessions", {"directory": "/tmp", "env": {"A-B": "c"}}),
    ("POST", "/api/sessions", {"directory": "/tmp", "agentPromptCommand": "no placeholder"}),
    ("POST", "/api/sessions/{name}/command", {}),
    ("POST", "/api/sessions/{name}/command", {"command": ""}),
    ("POST", "/api/sessions/{name}/command", {"command": "a\0b"}),
    ("POST", "/api/sessions/{name}/command", {"command": ["ls"]}),
    ("POST", "/api/sessions/{name}/command", {"command": "ls", "cwd": "/"}),
    ("POST", "/api/sessions/{name}/prompt", {"prompt": ""}),
    ("POST", "/api/sessions/{name}/changes/undo", []),
    ("POST", "/api/sessions/{name}/changes/undo", {"turn": 5}),
    ("POST", "/api/sessions/{name}/changes/undo", {"only": "yes"}),
    ("POST", "/api/sessions/{name}/changes/undo", {"discard": True}),
    ("POST", "/api/sessions/{name}/changes/redo", {"paths": "a"}),
    ("POST", "/api/sessions/{name}/changes/redo", {"paths": [5]}),
    ("POST", "/api/sessions/{name}/changes/redo", {"paths": [""]}),
    ("POST", "/api/sessions/{name}/changes/redo", {"paths": ["a\0b"]}),
    ("POST", "/api/sessions/{name}/changes/redo", {"paths": ['"a']}),
    ("POST", "/api/sessions/{name}/changes/merge", {"paths": ["a"]}),
    ("POST", "/api/sessions/{name}/changes/merge", {"dry": "yes"}),
    ("PUT", "/api/sessions/{name}/settings", []),
    ("PUT", "/api/sessions/{name}/settings", {"env": {"": "x"}}),
    ("PUT", "/api/sessions/{name}/settings", "text"),
    ("PUT", "/api/sessions/{name}/settings", {"autostart": ["x"]}),
]


def test_wrong_bodies_and_paths_are_4xx_with_a_message(service: Service, engine: Engine) -> None:
    name = f"{engine.area.name[-9:]}-wrong"
    service.create(name)
    for method, path, body in WRONG_BODIES:
        reply = service.post(path.format(name=name), body, method)
        assert reply.status == 400 and reply.json["error"]["message"], (path, body, reply.body)
    for path in ("jobs?limit=0", "jobs?limit=x", "jobs?limit=5&limit=6", "terminal",
                 "changes?again=2", "changes/diff?patch=yes", "changes/diff?path=",
                 "changes/diff?path=%22a", "changes/diff?path=/x", "changes/diff?path=a/../../x"):
        assert service.get(f"/api/sessions/{name}/{path}").status == 400, path
    for path in ("jobs/nope", "jobs/nope/events", "jobs/x.y", "nothing", "jobs/nope/output",
                 "terminals/nope/x"):
        assert service.get(f"/api/sessions/{name}/{path}").status == 404, path
    assert service.post("/api/sessions", {"name": name, "directory": "/tmp"}).status == 409
    assert service.get("/api/sessions/no-such-session").status == 404
    assert service.get("/api/sessions/x").status == 404  # too short for a name
    reply = service.request("PATCH", f"/api/sessions/{name}")
    assert reply.status == 405 and reply.headers["Allow"] == "DELETE, GET, HEAD"
    assert service.request("DELETE", f"/api/sessions/{name}").status == 200


def test_directories_of_the_host_are_named(engine: Engine) -> None:
    top = engine.directory()
    names = [".hidden", "a b", "alpha", "beta", "gh-ß-1", "q?&=#%", "<b>"]
    odd = ["line\nbreak", "esc\x1b", os.fsdecode(b"bytes\xff")]
    for name in (*names, *odd, "secret", "secret/inner"):
        (top / name).mkdir()
    (top / "secret").chmod(0)
    (top / "file").write_text("")
    os.mkfifo(top / "fifo")
    links = {"away": "/usr", "round": "round", "nowhere": "gone", "to-file": "file"}
    for name, target in links.items():
        (top / name).symlink_to(target)
    service = Service(engine, start=False)
    home = engine.directory(USER)
    where: dict[str, Any] = {"user": USER, "home": home, "env": {"HOME": str(top)}}
    with engine.popen("serve", service.address, "-P", PASSWORD, **where) as server:
        assert server.stdout and server.stdout.readline()
        assert service.log_in().status == 200

        def named(path: str) -> list[str]:
            reply = service.get(f"/api/directories?{urlencode({'path': path})}")
            assert reply.status == 200, reply.body
            found: list[str] = reply.json["directories"]
            return found

        shown = sorted([*names[1:], "away", "secret"])
        assert named(f"{top}/") == named("~/") == named(f"{top}/alpha/../") == shown
        assert named(f"{top}/a") == ["a b", "alpha", "away"]
        assert named(f"{top}/.") == [".hidden"]
        assert named(f"{top}/q?&") == ["q?&=#%"] and named(f"{top}/gh-ß") == ["gh-ß-1"]
        assert top.name in named(str(top))
        assert "bin" in named(f"{top}/away/") and "usr" in named("/")
        below = [f"{top}/{name}" for name in
                 ("file/", "fifo/", "secret/", "nowhere/", "round/", "\0/", "\0", "x/" * 300)]
        for nothing in (*below, "", "usr", "~", "~root/", "./", "\n/"):
            assert named(nothing) == [], nothing
        assert service.get("/api/directories").json == {"directories": []}
        assert service.get("/api/directories?path=%ff").status == 400
        for number in range(3000):
            (top / "beta" / f"{number:04}").mkdir()
        assert named(f"{top}/beta/") == [f"{number:04}" for number in range(50)]
        assert named(f"{top}/beta/29") == [f"{number:04}" for number in range(2900, 2950)]


def test_a_broken_configuration_is_reported_and_the_rest_untouched(service: Service,
                                                                   engine: Engine) -> None:
    (engine.home / "sandbox.json").write_text('{"memory": }')
    reply = service.get("/api/sessions/whatever-it-is")
    assert reply.status == 500 and "sandbox.json:1:" in reply.json["error"]["message"]
    write_config(engine.home)
    assert service.get("/api/sessions").status == 200


def test_half_sent_requests_and_idle_connections_are_bounded_and_others_served(
    engine: Engine) -> None:
    service = Service(engine)
    before = service.resources()
    held = []
    for number in range(700):
        sock = socket.create_connection(("127.0.0.1", service.port))
        if number % 2:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        held.append(sock)
    assert all(service.get("/auth/login").status == 200 for _ in range(20))
    assert service.resources()[0] < 700
    for sock in held:
        sock.close()
    wait_for(lambda: service.resources() <= before)
    service.end()


HEAD_OF_A_LOGIN = (b"POST /auth/login HTTP/1.1\r\nHost: localhost\r\n"
                   b"Content-Type: application/json\r\nContent-Length: 60\r\n\r\n")


@contextmanager
def hanging(port: int, data: bytes, count: int, source: str = "127.0.0.1") -> Iterator[None]:
    """So many connections that send this and then neither send nor read."""
    with ExitStack() as stack:
        for _ in range(count):
            sock = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
            stack.enter_context(sock)
            sock.settimeout(0.01)
            with suppress(OSError):  # it has been ended, or takes no more
                sock.sendall(data)
        yield


@pytest.mark.parametrize("data", [HEAD_OF_A_LOGIN + b'{"username"', HEAD_OF_A_LOGIN[:50], b""],
                         ids=["half a body", "half a head", "nothing"])
def test_the_owner_is_served_while_strangers_hang(engine: Engine, data: bytes) -> None:
    """From the same address, as behind a tunnel."""
    service = Service(engine)
    try:
        before = service.resources()
        kept = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        kept.request("GET", "/api/profiles", headers={"Cookie": service.cookie})
        kept.getresponse().read()
        local_port = kept.sock.getsockname()[1]
        with hanging(service.port, data, 900):
            assert [service.get("/api/profiles").status for _ in range(50)] == [200] * 50
            kept.request("GET", "/api/profiles", headers={"Cookie": service.cookie})
            assert kept.getresponse().read() and kept.sock.getsockname()[1] == local_port
            assert service.log_in().status == 200
        kept.close()
        wait_for(lambda: service.resources() <= before)
    finally:
        service.end()


def test_strangers_make_room_before_those_from_where_somebody_is_logged_in(engine: Engine) -> None:
    service = Service(engine)
    body = json.dumps({"username": "admin", "password": PASSWORD}).encode()
    head = HEAD_OF_A_LOGIN.replace(b"60", b"%d" % len(body))
    kept = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    try:
        kept.request("GET", "/api/profiles", headers={"Cookie": service.cookie})
        kept.getresponse().read()
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as second:
            second.sendall(head + body[:5])  # another login from there
            with hanging(service.port, HEAD_OF_A_LOGIN, 900, "127.0.0.2"):
                second.sendall(body[5:])
                assert second.recv(100).startswith(b"HTTP/1.1 200 ")
    finally:
        kept.close()
        service.end()


def test_a_slow_head_is_cut_off_by_a_total_deadline(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as sock:
        answer = b""
        for _ in range(300):
            try:
                sock.sendall(b"GET / HTTP/1.1\r\n"[:1])
                sock.settimeout(0.1)
                answer = sock.recv(100)
            except TimeoutError:
                continue
            except OSError:
                pass
            break
        assert answer.startswith(b"HTTP/1.1 408 ")


def frame(opcode: int, data: bytes, mask: bool = True, fin: bool = True) -> bytes:
    length = bytes([len(data) | (128 if mask else 0)])
    return bytes([opcode | (128 if fin else 0)]) + length + (bytes(4) if mask else b"") + data


@pytest.mark.parametrize(
    "broken",
    [
        frame(1, b"x", mask=False),
        frame(3, b"x"),
        frame(15, b"x"),
        b"\xf1\x81" + bytes(4) + b"x",
        frame(0, b"x"),
        frame(9, b"x", fin=False),
        b"\x82\xff" + b"\xff" * 8 + bytes(4),
        frame(1, b"\xff\xfe"),
        frame(8, b"\x00"),
        frame(8, b"\x03\xe8\xff"),
        frame(1, b"a", fin=False) + frame(1, b"b"),
        os.urandom(2000),
    ],
)
def test_broken_frames_end_the_connection_only(service: Service, engine: Engine, name: str,
                                               broken: bytes) -> None:
    service.create(name)
    key = base64.b64encode(bytes(16)).decode()
    request = head(
        service,
        f"/api/sessions/{name}/terminal",
        "GET",
        f"Cookie: {service.cookie}",
        "Upgrade: websocket",
        f"Sec-WebSocket-Key: {key}",
        "Sec-WebSocket-Version: 13",
    ).replace(b"Connection: close", b"Connection: Upgrade")
    answer = service.raw(request + broken)
    assert answer.startswith(b"HTTP/1.1 101 ") and answer.count(b"HTTP/1.1") == 1
    assert len(service.get(f"/api/sessions/{name}/terminals").json) == 1
    assert service.request("DELETE", f"/api/sessions/{name}").status == 200


def test_after_all_that_threads_and_descriptors_are_back(service: Service) -> None:
    wait_for(lambda: service.resources()[0] <= 3, 70)
    assert service.get("/auth/login").status == 200
    assert service.resources()[1] < 20


# --- Service control ---


def test_the_background_server(engine: Engine, home: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    started = engine.sandbox("serve", address, "-d")
    assert started.returncode == 0, started.stderr
    password = re.findall(r"password: (\S+)", started.stdout)[0]
    log = Path(re.findall(r"log: (\S+)", started.stdout)[0])
    reply = subprocess.run(
        [
            "curl",
            "-s",
            f"http://{address}/auth/login",
            "-H",
            "Content-Type: application/json",
            "-d",
            json.dumps({"username": "admin", "password": password}),
        ],
        capture_output=True,
        text=True,
    )
    assert reply.stdout == '{"ok":true}\n'
    wait_for(lambda: "POST /auth/login 200" in log.read_text())  # it is written behind the answer
    assert password not in log.read_text()
    again = engine.sandbox("serve", address, "-d")
    assert again.returncode == 1 and "already" in again.stderr and "--restart" in again.stderr
    restarted = engine.sandbox("serve", address, "--restart")
    assert restarted.returncode == 0 and password not in restarted.stdout
    assert engine.sandbox("serve", address, "--stop").returncode == 0
    stopped = engine.sandbox("serve", address, "--stop")
    assert stopped.returncode == 1 and "there is no server" in stopped.stderr


def test_a_restart_keeps_the_options_that_are_not_given_anew(engine: Engine, home: Path) -> None:
    write_config(home, runs={"work": {"serverUser": "work"}})
    service = Service(engine, "-U", "admin", "-r", "work", "--allow-host", "box.example",
                      start=False)
    started = engine.sandbox("serve", service.address, "-d", "-P", "kept", *service.options)
    assert started.returncode == 0, started.stderr
    lock = home / "web" / f"{service.address.replace(':', '_')}.lock"
    assert lock.stat().st_mode & 0o777 == 0o600
    assert engine.sandbox("serve", service.address, "--restart").returncode == 0
    assert service.log_in("kept").status == 200
    assert service.get("/auth/login", headers={"Host": "box.example"}).status == 200
    pid = json.loads(lock.read_text())["pid"]
    assert "kept" not in Path(f"/proc/{pid}/cmdline").read_text()
    assert engine.sandbox("serve", service.address, "--restart", "-P", "new").returncode == 0
    assert service.log_in("kept").status == 401 and service.log_in("new").status == 200
    assert engine.sandbox("serve", service.address, "--stop").returncode == 0
    assert "new" not in lock.read_text()
    again = engine.sandbox("serve", service.address, "--restart")  # none runs: nothing is kept
    assert "there was no server" in again.stderr and "(of this run)" in again.stdout
    assert engine.sandbox("serve", service.address, "--stop").returncode == 0


def test_the_log_of_a_background_server_is_bounded(engine: Engine, home: Path) -> None:
    service = Service(engine, start=False)
    assert engine.sandbox("serve", service.address, "-d").returncode == 0
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    for number in range(1200):
        connection.request("GET", f"/{number}/{'x' * 4000}")
        assert connection.getresponse().read() == b""
    connection.close()
    logs = sorted(path for path in (home / "web").iterdir() if ".log" in path.name)
    assert [path.name.partition(".log")[2] for path in logs] == ["", ".1"]
    assert all(path.stat().st_size < 2.2 * 2**20 and path.stat().st_mode & 0o777 == 0o600
               for path in logs)
    wait_for(lambda: " /1199/x" in logs[0].read_text())  # it is written behind the answer
    assert engine.sandbox("serve", service.address, "--stop").returncode == 0


def test_a_log_that_cannot_be_written_keeps_nobody_from_an_answer(engine: Engine,
                                                                  home: Path) -> None:
    (home / "web").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", home / "web"], check=True)
    try:
        service = Service(engine, start=False)
        assert engine.sandbox("serve", service.address, "-d", "-P", PASSWORD).returncode == 0
        assert service.log_in().status == 200
        with (home / "web" / "filler").open("wb") as filler:
            subprocess.run(["head", "-c", "100000", "/dev/zero"], stdout=filler,
                           stderr=subprocess.DEVNULL)
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        for _ in range(100):
            connection.request("GET", "/api/profiles", headers={"Cookie": service.cookie})
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.headers["Connection"] == "keep-alive"
            assert answer.read()
        connection.close()
        reply = service.post("/auth/logout")  # it ends, and the next start would not know it
        assert reply.status == 507 and "restart" in reply.json["error"]["message"]
        assert "Max-Age=0" in reply.headers["Set-Cookie"]
        assert service.get("/api/profiles").status == 401
        assert engine.sandbox("serve", service.address, "--stop").returncode == 0
    finally:
        subprocess.run(["umount", home / "web"], check=True)


def test_a_log_that_nobody_reads_keeps_nobody_from_an_answer(service: Service) -> None:
    """It goes to a pipe, whose reader rests; what comes when that reads again is written again."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)

    def ask(path: str) -> int:
        connection.request("GET", path, headers={"Cookie": service.cookie})
        answer = connection.getresponse()
        answer.read()
        return answer.status

    for _ in range(100):
        assert ask(f"/{'x' * 2000}") == 404
    assert service.process.stderr
    log = service.process.stderr.fileno()

    def is_written() -> bool:
        assert ask("/again") == 404
        return b" /again 404 " in os.read(log, 1 << 20)

    wait_for(is_written)
    connection.close()


def test_a_terminal_that_nobody_reads_keeps_nobody_from_an_answer(engine: Engine, home: Path,
                                                                  ) -> None:
    """Where it has room for less than a line, too."""
    address = f"127.0.0.1:{free_port()}"
    with engine.pty("serve", address, "-P", "secret") as terminal:
        terminal.expect("password")
        connection = http.client.HTTPConnection(address, timeout=60)
        for number in range(600):
            connection.request("GET", f"/none{'x' * (number % 97)}")
            connection.getresponse().read()  # or its time is over
        connection.close()


@pytest.mark.parametrize("error", [ConnectionRefusedError, TimeoutError, EOFError])
def test_what_goes_wrong_here_is_answered(home: Path, monkeypatch: pytest.MonkeyPatch,
                                          error: type[Exception]) -> None:
    """Only the client's own end of a connection ends it without an answer."""
    def get(*_: object) -> sandbox_web.Answer:
        raise error

    monkeypatch.setenv("SANDBOX_HOME", str(home))
    monkeypatch.setattr(sandbox_web, "PATHS", [("GET", re.compile("/auth/login"), get)])
    app = sandbox_web.App(("127.0.0.1", 0), sandbox.load_config(), None)
    threading.Thread(target=app.serve_forever, args=(0.01,)).start()
    connection = http.client.HTTPConnection("127.0.0.1", app.socket.getsockname()[1],
                                            timeout=60)
    try:
        connection.request("GET", "/auth/login")
        assert connection.getresponse().status == 500
    finally:
        connection.close()
        app.shutdown()
        app.server_close()


def test_a_stale_or_reused_pid_is_never_signalled(engine: Engine, home: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert engine.sandbox("serve", address, "-d").returncode == 0
    lock = home / "web" / f"{address.replace(':', '_')}.lock"
    os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: not sandbox_web.is_locked(str(lock)))  # as long as it dies, it is there
    with subprocess.Popen(["sleep", "1000"]) as innocent:
        lock.write_text(json.dumps({"pid": innocent.pid, "background": True}))
        wait_for(lambda: "there is no server" in engine.sandbox("serve", address, "--stop").stderr)
        assert innocent.poll() is None
        innocent.kill()
    assert engine.sandbox("serve", address, "-d").returncode == 0
    assert engine.sandbox("serve", address, "--stop").returncode == 0


def test_an_address_in_use_and_a_foreground_server(engine: Engine, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        for options in ([], ["-d"]):
            answer = engine.sandbox("serve", address, *options)
            assert answer.returncode == 1 and "Address already in use" in answer.stderr
    service = Service(engine)
    answer = engine.sandbox("serve", service.address, "--stop")
    assert answer.returncode == 1 and "foreground" in answer.stderr
    assert service.get("/auth/login").status == 200
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(60) == 130


@pytest.mark.parametrize(
    "address",
    [
        "3000",
        "localhost:3000",
        ":3000",
        "127.0.0.1",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "::1:3000",
        "127.0.0.1:x",
        "[127.0.0.1]:3000",
        "http://127.0.0.1:3000",
        "127.1:3000",
        "127.0.0.1:3000/",
    ],
)
def test_only_ip_and_port_is_an_address(engine: Engine, address: str) -> None:
    answer = engine.sandbox("serve", address)
    assert answer.returncode == 2 and "<ip:port>" in answer.stderr


@pytest.mark.parametrize("leads_to, printed", [("127.0.0.1", True), ("192.0.2.1", False)])
def test_the_own_name_is_printed_where_it_leads_here(
    engine: Engine, home: Path, project: Path, leads_to: str, printed: bool
) -> None:
    """With a hosts file of its own, that knows nothing but it."""
    address = f"127.0.0.1:{free_port()}"
    (project / "hosts").write_text(f"{leads_to} sandbox.localhost\n")
    mount = 'mount --bind hosts /etc/hosts && exec "$@"'
    serve = engine.sandbox_argv("serve", address, "-d", "-P", "x")
    argv = ["unshare", "-m", "sh", "-c", mount, "sh", *serve]
    where = engine.where(cwd=project, home=home)
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=60, **where)
    assert answer.returncode == 0, answer.stderr
    assert engine.sandbox("serve", address, "--stop").returncode == 0
    port = address.rpartition(":")[2]
    assert (f"http://sandbox.localhost:{port}\n" in answer.stdout) == printed


def test_where_the_credentials_come_from(engine: Engine, home: Path) -> None:
    write_config(
        home, serverUser="global", serverPass="global",
        runs={"work": {"serverUser": "work", "serverPass": "work"}}
    )
    variables = {"SANDBOX_SERVER_USER": "variable", "SANDBOX_SERVER_PASS": "variable"}
    cases: list[tuple[list[str], str]] = [
        (["-U", "flag", "-P", "flag", "-r", "work"], "flag"),
        (["-r", "work"], "work"),
        ([], "global"),
    ]
    for options, expected in cases:
        check_account(engine, options, variables, expected)
    write_config(home)
    check_account(engine, [], variables, "variable")


def check_account(engine: Engine, options: list[str], env: dict[str, str], expected: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    with engine.popen("serve", address, *options, env=env) as process:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(3)][1] == f"user: {expected}\n"
        body = json.dumps({"username": expected, "password": expected})
        reply = subprocess.run(
            ["curl", "-s", f"http://{address}/auth/login", "-H", "Content-Type: application/json",
             "-d", body],
            capture_output=True,
            text=True,
        )
        assert reply.stdout == '{"ok":true}\n'


def make_certificate(home: Path) -> None:
    """key.pem and cert.pem of 127.0.0.1."""
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", str(home / "key.pem"), "-out", str(home / "cert.pem")]
    subprocess.run(argv, check=True, capture_output=True)


HALF_A_HELLO = bytes.fromhex("160301020001")


@pytest.mark.parametrize("data", [b"", HALF_A_HELLO], ids=["nothing", "half a hello"])
def test_the_owner_is_served_while_handshakes_hang(engine: Engine, home: Path, data: bytes) -> None:
    make_certificate(home)
    port = free_port()
    cert, key = str(home / "cert.pem"), str(home / "key.pem")
    argv = ("serve", f"127.0.0.1:{port}", "-P", PASSWORD, "--cert", cert, "--key", key)
    with engine.popen(*argv) as process:
        assert process.stdout and "https://" in process.stdout.readline()
        context = ssl.create_default_context(cafile=cert)
        with hanging(port, data, 900):
            for _ in range(20):
                connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60,
                                                         context=context)
                connection.request("GET", "/auth/login")
                assert connection.getresponse().status == 200
                connection.close()


def test_tls_and_a_warning_without_it(engine: Engine, home: Path) -> None:
    make_certificate(home)
    address = f"127.0.0.1:{free_port()}"
    with engine.popen(
        "serve", address, "-P", "pw", "--cert", str(home / "cert.pem"), "--key",
        str(home / "key.pem")
    ) as process:
        assert process.stdout and "https://" in process.stdout.readline()
        reply = subprocess.run(
            [
                "curl",
                "-si",
                "--cacert",
                home / "cert.pem",
                f"https://{address}/auth/login",
                "-H",
                "Content-Type: application/json",
                "-d",
                '{"username":"admin","password":"pw"}',
            ],
            capture_output=True,
            text=True,
        )
        assert '{"ok":true}' in reply.stdout and "; Secure" in reply.stdout
        context = ssl.create_default_context(cafile=str(home / "cert.pem"))
        with (
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as sock,
            context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
        ):
            wrapped.sendall(b"GET /api/sessions HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert wrapped.recv(20).startswith(b"HTTP/1.1 401")
    answer = engine.sandbox("serve", address, "--cert", str(home / "cert.pem"))
    assert answer.returncode == 2 and "--key" in answer.stderr
    with engine.popen("serve", f"0.0.0.0:{free_port()}") as process:
        assert process.stderr and "without TLS" in process.stderr.readline()


def test_the_examples_of_the_readme(engine: Engine, project: Path, home: Path, name: str) -> None:
    section = (ROOT / "README.md").read_text().split("### Web service API")[1].split("\n## ")[0]
    script = "\n".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL))
    service = Service(engine)
    script = (
        script.replace("127.0.0.1:3000",
                       service.address).replace("/srv/shop", str(project)).replace("shop", name)
    )
    answer = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        env={"PATH": os.environ["PATH"], "PASSWORD": PASSWORD},
        cwd=project,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"hello from {name}" in answer.stdout and "unauthorized" not in answer.stdout.lower()
    service.end()


def test_changes_are_read_undone_and_refused(engine: Engine, home: Path, project: Path,
                                             name: str) -> None:
    write_config(home, imageName=REAL_IMAGE.partition(":")[0], checkpoint=True)
    service = Service(engine)
    service.create(name, agentPromptCommand="sh -c {prompt}")
    base = f"/api/sessions/{name}/changes"
    nobody = base.replace(name, f"{name}-x")
    for path in (nobody, f"{nobody}/diff"):
        assert service.get(path).status == 404
    for verb in ("undo", "redo", "merge"):
        assert service.post(f"{nobody}/{verb}").status == 404
        assert service.post(f"{base}/{verb}").status == 409, verb
    assert service.get(base).json["turns"] == []
    assert service.get(f"{base}/diff").status == 409
    odd = b"by\xfftes \"\n".decode(errors="surrogateescape")
    (project / odd).write_text("before\n")
    script = 'for file in by*; do echo after >"$file"; done; echo >new'
    job = service.ended(service.post(f"/api/sessions/{name}/prompt", {"prompt": script}).json)
    first, again = service.get(base).json, service.get(base).json
    assert [turn["id"] for turn in first["turns"]] == [job["id"]] and first == again
    assert service.get(f"{base}?again=1").json["read"] > first["read"]
    files = service.get(f"{base}/diff?turn={job['id']}&patch=1").json["files"]
    assert [file["path"] for file in files] == [odd, "new"]
    quoted = json.dumps(odd)
    for path in ("new", '"new"', quoted):
        query = urlencode({"turn": job["id"], "path": path})
        (file,) = service.get(f"{base}/diff?{query}").json["files"]
        assert file["path"] in (path, odd, "new") and "patch" not in file
    for query in ("turn=nope", f"turn={job['id']}&path=nope", "path=nope"):
        reply = service.get(f"{base}/diff?{query}")
        assert reply.status == 404 and reply.json["error"]["message"], query
    assert service.post(f"{base}/undo", {"turn": "nope"}).status == 404
    assert service.post(f"{base}/undo", {"paths": ["nope"]}).status == 404
    assert service.post(f"{base}/undo", {"paths": ["x" * 4000] * 9}).status == 413
    assert service.post(f"{base}/merge").status == 409
    dry = service.post(f"{base}/undo", {"turn": job["id"], "dry": True}).json
    assert dry["dry"] and [row["path"] for row in dry["changed"]] == [odd, "new"]
    assert (project / odd).read_text() == "after\n"
    done = service.post(f"{base}/undo", {"turn": job["id"], "only": True, "paths": [quoted]}).json
    assert [row["path"] for row in done["changed"]] == [odd] and not done["dry"]
    assert (project / odd).read_text() == "before\n" and (project / "new").exists()
    assert service.post(f"{base}/redo").json["changed"] == done["changed"]
    assert (project / odd).read_text() == "after\n"
    undo, redo = service.get(base).json["turns"][1:]  # at once, for something was undone
    assert (undo["kind"], undo["paths"], redo["kind"]) == ("undo", [odd], "redo")


@contextmanager
def locked_store(engine: Engine, name: str) -> Iterator[None]:
    """The store of a session's snapshots in use, as by a snapshot that takes long."""
    _, session = sandbox.find_session([sandbox.Docker()], name)
    assert session
    top = engine.run("volume", "inspect", "-f", "{{.Mountpoint}}", session.store).stdout.strip()
    with open(f"{top}/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def connections(service: Service) -> int:
    """How many connections to a service there are."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum((row[1], row[3]) == (f"0100007F:{service.port:04X}", "01") for row in rows)


def test_what_is_sent_again_with_its_key_is_done_once(service: Service, name: str) -> None:
    def create(key: str) -> Any:
        return service.post("/api/sessions", {"name": name, "directory": directory},
                            headers={"Idempotency-Key": key})

    directory = str(service.engine.project)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # the second comes while the first works
        first, second = pool.map(create, ['"a"', '"a"'])
    assert (first.status, first.json) == (second.status, second.json) and first.status == 201
    assert create('"b"').status == 409 and create('"a"').status == 201
    command, hello = f"/api/sessions/{name}/command", {"command": "echo hello"}
    ids = [service.post(command, hello, headers={"Idempotency-Key": key}).json["id"]
           for key in ("a", "a", "b", "b")]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    stranger = service.signed_cookie(600)
    other = service.post(command, hello, headers={"Idempotency-Key": "a"}, cookie=stranger)
    jobs = service.get(f"/api/sessions/{name}/jobs").json
    assert {job["id"] for job in jobs} == {*ids, other.json["id"]} and len(jobs) == 3
    wrong = [service.post(command, {"command": 1}, headers={"Idempotency-Key": "c"})
             for _ in range(2)]
    assert [reply.status for reply in wrong] == [400, 400] and wrong[0].json == wrong[1].json
    assert service.post(command, hello, headers={"Idempotency-Key": "k" * 65}).status == 400
    gone = [service.request("DELETE", f"/api/sessions/{name}", headers={"Idempotency-Key": key})
            for key in ("d", "d", "e")]
    assert [reply.status for reply in gone] == [200, 200, 404]


def test_one_undo_at_a_time_and_a_slow_one_holds_nobody_up(engine: Engine, home: Path,
                                                            project: Path, name: str) -> None:
    write_config(home, imageName=REAL_IMAGE.partition(":")[0], checkpoint=True)
    service = Service(engine)
    service.create(name, agentPromptCommand="sh -c {prompt}")
    service.ended(service.post(f"/api/sessions/{name}/prompt", {"prompt": "echo a >a"}).json)
    undo = f"/api/sessions/{name}/changes/undo"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with locked_store(engine, name):
            tries = [pool.submit(service.post, undo) for _ in range(20)]
            refused = wait_for(lambda: len(done := [a for a in tries if a.done()]) == 19 and done)
            assert {answer.result().status for answer in refused} == {409}
            slow = [pool.submit(service.get, f"/api/sessions/{name}/changes?again=1")
                    for _ in range(5)]
            assert service.get("/api/sessions").status == 200
            assert service.get(f"/api/sessions/{name}/jobs").status == 200
            assert not any(answer.done() for answer in slow)
            # One of the five reads, beside the undo, and the others have asked and wait for it.
            wait_for(lambda: connections(service) == 6 and service.is_idle()
                     and len(children(service)) == 2)
        (first,) = [answer.result() for answer in tries if answer not in refused]
        assert first.status == 200 and not (project / "a").exists()
        assert len({answer.result().body for answer in slow}) == 1  # one has read for all
    assert service.post(undo).status == 409  # there is nothing more


def test_the_engine_that_was_asked_for_is_the_one_that_is_asked(engine: Engine, home: Path) -> None:
    folder = engine.directory()
    (folder / "docker").symlink_to(str(shutil.which("docker")))
    service = Service(engine, "--rt", "podman", env={"PATH": str(folder)})
    reply = service.get("/api/sessions")
    assert reply.status == 503 and reply.json["error"]["message"] == "podman is not installed"
    service.end()


def test_the_list_of_sessions_makes_one_engine_call_however_many_ask(engine: Engine, project: Path,
                                                                     home: Path) -> None:
    """The engine's client is a script that notes when it begins and ends."""
    folder = engine.directory()
    notes = folder / "notes"
    client = folder / engine.runtime
    client.write_text(
        f'#!/bin/sh\necho begin >>{notes}\nsleep 0.1\n{shutil.which(engine.runtime)} "$@"\n'
        f"status=$?\necho end >>{notes}\nexit $status\n"
    )
    client.chmod(0o755)
    service = Service(engine, env={"PATH": f"{folder}:{engine.environ()['PATH']}"})
    notes.write_text("")
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: service.get("/api/sessions").status, range(40)))
    assert replies == [200] * 40
    lines = notes.read_text().split()
    lists = 2 + (time.monotonic() - began) / sandbox_web.LIST_SECONDS
    assert lines == ["begin", "end"] * (len(lines) // 2) and 1 <= len(lines) // 2 <= lists
    service.end()


def test_an_engine_that_does_not_answer_is_a_503_for_all_who_ask(
    engine: Engine, project: Path, home: Path, impatient: None
) -> None:
    """Those who ask for the list while it is asked for get the answer of that one call."""
    with SilentEngine(engine) as silent, concurrent.futures.ThreadPoolExecutor(21) as pool:
        service = Service(engine, env=silent.env)
        first = pool.submit(service.get, "/api/sessions")
        wait_for(lambda: silent.connections)
        others = [pool.submit(service.get, "/api/sessions") for _ in range(19)]
        one = pool.submit(service.get, "/api/sessions/some")
        wait_for(lambda: len(silent.clients(engine.runtime)) >= 2)
        begun = set(silent.clients(engine.runtime))
        for reply in [reply.result() for reply in (first, one, *others)]:
            assert (reply.status, reply.json["error"]["code"]) == (503, "engine_unavailable")
            assert "did not answer within 3 seconds" in reply.json["error"]["message"]
        assert set(silent.clients(engine.runtime)) <= begun
        wait_for(lambda: not silent.clients(engine.runtime))
        service.end()
