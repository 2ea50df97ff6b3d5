"""What a program in a session with an allowlist may try, and what must come of it.

    probe.py JSON    {"api": the address of the allowed name,
                      "own": addresses of the host and of the proxy}

Prints a JSON list of [what was tried, what came, what should have come]. Errors are named as
errno.h does, answers of the proxy by their status. `|` stands between what is equally right:
engines differ in how they say no.
"""

import ctypes
import errno
import json
import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PROXY = ("127.0.0.1", 3128)
NET = "/run/sandbox-net"
UNREACHABLE = "ENETUNREACH"
FORBIDDEN = "EPERM|EACCES"
LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_REMOUNT, MS_BIND, CLONE_NEWNS, CLONE_NEWUSER = 1, 32, 4096, 0x20000, 0x10000000
SEQUENCE = "GET http://api.test/ HTTP/1.1\r\n"

Try = tuple[str, str, Callable[[], object]]


def outcome(action: Callable[[], object]) -> str:
    try:
        return str(action())
    except ssl.SSLError as error:
        return f"tls {error.reason}"
    except socket.gaierror:
        return "no address"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)


# --- Direct sockets ---


def connect(family: int, kind: int, protocol: int, address: object, data: bytes = b"x") -> str:
    with socket.socket(family, kind, protocol) as sock:
        sock.settimeout(5)
        sock.connect(address)  # type: ignore[arg-type]
        sock.send(data)
        return "sent"


def tcp(address: str, port: int) -> str:
    return connect(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 0,
                   (address, port))


def direct(api: str, own: list[str]) -> Iterator[Try]:
    for address in (api, *own, "169.254.169.254"):
        for port in (80, 443, 3128):
            yield f"tcp {address}:{port}", UNREACHABLE, lambda a=address, p=port: tcp(a, p)  # type: ignore[misc]
        for port in (53, 443):
            yield f"udp {address}:{port}", UNREACHABLE, lambda a=address, p=port: connect(  # type: ignore[misc]
                socket.AF_INET, socket.SOCK_DGRAM, 0, (a, p)
            )
    echo = b"\x08\x00\xf7\xff" + bytes(4)
    for kind, title in ((socket.SOCK_RAW, "raw"), (socket.SOCK_DGRAM, "ping")):
        yield f"icmp {title}", f"{UNREACHABLE}|{FORBIDDEN}", lambda k=kind: connect(  # type: ignore[misc]
            socket.AF_INET, k, socket.IPPROTO_ICMP, (api, 0), echo
        )
    yield "raw tcp", FORBIDDEN, lambda: connect(
        socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP, (api, 0))
    every = ("255.255.255.255", 67)
    yield "broadcast", "EACCES|ENETUNREACH", lambda: connect(
        socket.AF_INET, socket.SOCK_DGRAM, 0, every)
    for address in ("2001:db8::1", "fe80::1", "::ffff:" + api):
        yield f"tcp {address}", f"{UNREACHABLE}|EADDRNOTAVAIL|EINVAL", lambda a=address: tcp(a, 80)  # type: ignore[misc]
    for name in ("api.test", "other.test", "host.docker.internal", "host.containers.internal"):
        yield f"lookup {name}", "no address|ENETUNREACH", lambda n=name: tcp(n, 80)  # type: ignore[misc]
    for port in (9999, 8080, 80):  # what listens in another session, and in the proxy's namespace
        yield f"tcp 127.0.0.1:{port}", "ECONNREFUSED", lambda p=port: tcp("127.0.0.1", p)  # type: ignore[misc]
    yield "abstract socket", "ECONNREFUSED", lambda: connect(
        socket.AF_UNIX, socket.SOCK_STREAM, 0, "\0neighbour")


# --- Through the proxy ---


def ask(data: str | bytes, port: int = PROXY[1]) -> str:
    """The status of the last answer: a request may have been smuggled behind an allowed one."""
    with socket.create_connection((PROXY[0], port), timeout=20) as sock:
        sock.sendall(data if isinstance(data, bytes) else data.encode())
        sock.shutdown(socket.SHUT_WR)
        received = b""
        while more := sock.recv(65536):
            received += more
    statuses = [line.split()[1] for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    return b" ".join(statuses).decode() or "nothing"


def tls(name: str, tunnel: str = "api.test:443") -> str:
    with socket.create_connection(PROXY, timeout=20) as sock:
        sock.sendall(f"CONNECT {tunnel} HTTP/1.1\r\n\r\n".encode())
        answer = sock.recv(4096)
        if b" 200 " not in answer:
            return answer.split()[1].decode()
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with context.wrap_socket(sock, server_hostname=name or None) as shaken:
            shaken.sendall(b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n")
            return shaken.recv(4096).split()[1].decode()


def get(url: str) -> str:
    host = url.removeprefix("http://").partition("/")[0]
    return f"GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n"


def proxied(api: str, own: list[str]) -> Iterator[Try]:
    yield "allowed name", "200", lambda: ask(get("http://api.test/"))
    yield "its TLS", "200", lambda: tls("api.test")
    refused = ["other.test", "sub.api.test", "api.test.other.test", "api.test:81", "api.test:8080",
               "private.test",
               "private.test:8080", api, f"[::ffff:{api}]", "127.0.0.1", "127.0.0.1:9999",
               "localhost", "[::1]",
               "0.0.0.0", "169.254.169.254", *own]  # fmt: skip
    for host in refused:
        yield f"http://{host}/", "403", lambda h=host: ask(get(f"http://{h}/"))  # type: ignore[misc]
        authority = host if host.rpartition(":")[2].isdigit() else f"{host}:443"
        yield f"CONNECT {host}", "403", lambda a=authority: ask(f"CONNECT {a} HTTP/1.1\r\n\r\n")  # type: ignore[misc]
    for host in ("2130706433", "0x7f.1", "127.1", "api.test%00.other.test"):
        yield f"http://{host}/", "403|400", lambda h=host: ask(get(f"http://{h}/"))  # type: ignore[misc]
    for name in ("other.test", "API.TEST.other.test", ""):
        yield f"TLS for {name or 'no name'}", "tls TLSV1_UNRECOGNIZED_NAME", lambda n=name: tls(n)  # type: ignore[misc]
    yield "TLS to another port", "403", lambda: tls("api.test", "api.test:8443")


def smuggled() -> Iterator[Try]:
    other = "GET http://other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n"
    inner = "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n"
    chunked = "Transfer-Encoding: chunked\r\n"
    wrong = {
        "another Host": f"{SEQUENCE}Host: other.test\r\n\r\n",
        "two Hosts": f"{SEQUENCE}Host: api.test\r\nHost: other.test\r\n\r\n",
        "no Host": f"{SEQUENCE}\r\n",
        "a user name": "GET http://api.test@other.test/ HTTP/1.1\r\nHost: other.test\r\n\r\n",
        "another name in CONNECT": "CONNECT api.test:443 HTTP/1.1\r\nHost: other.test:443\r\n\r\n",
        "a bare LF": f"{SEQUENCE}Host: api.test\r\nX: y\nHost: other.test\r\n\r\n",
        "a folded line": f"{SEQUENCE}Host: api.test\r\n other.test\r\n\r\n",
        "a blank before the colon": f"{SEQUENCE}Host : other.test\r\nHost: api.test\r\n\r\n",
        "two lengths":
            f"{SEQUENCE}Host: api.test\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n{other}",
        "length and chunks":
            f"{SEQUENCE}Host: api.test\r\nContent-Length: 9\r\n{chunked}\r\n{other}",
        "a strange coding":
            f"{SEQUENCE}Host: api.test\r\nTransfer-Encoding: xchunked\r\n\r\n{other}",
        "Connection: Host": f"{SEQUENCE}Host: api.test\r\nConnection: Host\r\n\r\n",
        "a path alone": "GET / HTTP/1.1\r\nHost: api.test\r\n\r\n",
        "another scheme": "GET ftp://api.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n",
        "SOCKS": b"\x05\x01\x00",
        "SOCKS and a name": b"\x05\x01\x00\r\n\r\n",
    }
    for title, data in wrong.items():
        yield title, "400", lambda d=data: ask(d)  # type: ignore[misc]
    # Only the first request counts: what follows is neither answered nor sent on.
    yield "a second request", "200", lambda: ask(get("http://api.test/") + other)
    yield "a second one in a tunnel", "200 200", lambda: ask(
        "CONNECT api.test:80 HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nHost: api.test\r\n\r\n" + inner
    )
    yield "another Host in a tunnel", "200 400", lambda: ask(
        "CONNECT api.test:80 HTTP/1.1\r\n\r\n" + inner)
    yield "another Host in a tunnel to 443", "200 400", lambda: ask(
        "CONNECT api.test:443 HTTP/1.1\r\n\r\n" + inner)


# --- The shared directory, and root ---


def system(number: int, text: str = "done") -> str:
    if number:
        raise OSError(ctypes.get_errno(), "")
    return text


def in_child(action: Callable[[], object]) -> str:
    """What an action came to in a process of its own, for what cannot be undone."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os.write(writing, outcome(action).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def own_namespace() -> str:
    """Root of a new user namespace makes the directory writable."""
    system(LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNS))
    system(LIBC.mount(b"none", NET.encode(), None, MS_REMOUNT | MS_BIND, None))
    return "writable"


def hand_over(port: int | None) -> str:
    """Give the proxy a listener of ours, or our standard output; ask for a host through it."""
    with socket.socket(socket.AF_UNIX) as link, socket.socket() as listener:
        link.settimeout(10)
        link.connect(f"{NET}/proxy.sock")
        listener.bind(("127.0.0.1", port or 0))
        if port:
            listener.listen()
        socket.send_fds(link, [b"L"], [listener.fileno() if port is not None else 1])
        if link.recv(1) != b"+":
            return "not taken"
        return " ".join(ask(get(f"http://{host}/"), port or 0)
                        for host in ("api.test", "other.test", "127.0.0.1"))


def shared_directory(root: bool) -> Iterator[Try]:
    yield "rules.json", "EROFS|EACCES", lambda: os.open(f"{NET}/rules.json", os.O_WRONLY)
    yield "a new file", "EROFS|EACCES", lambda: os.open(f"{NET}/new", os.O_WRONLY | os.O_CREAT)
    yield "unlink the socket", "EROFS|EACCES", lambda: os.unlink(f"{NET}/proxy.sock")
    yield "another socket", "EROFS|EACCES", lambda: os.rename(
        f"{NET}/rules.json", f"{NET}/proxy.sock")
    yield "chmod", "EROFS|EPERM", lambda: os.chmod(f"{NET}/proxy.sock", 0o666)
    remount, mount = MS_REMOUNT | MS_BIND, NET.encode()
    yield "remount", "EPERM", lambda: system(LIBC.mount(b"none", mount, None, remount, None))
    yield "mount over it", "EPERM", lambda: system(LIBC.mount(b"/tmp", mount, None, MS_BIND, None))
    yield "unmount", "EPERM", lambda: system(LIBC.umount2(mount, 2))
    yield "user namespace", "EPERM|ENOSYS|EINVAL", lambda: in_child(own_namespace)
    taken = "200 403 403" if root else "EACCES"
    yield "hand over a listener", taken, lambda: hand_over(3199)
    yield "hand over what is none", "not taken" if root else "EACCES", lambda: hand_over(None)
    expected = "not taken" if root else "EACCES"
    yield "hand over one that does not listen", expected, lambda: hand_over(0)


def shell(command: str) -> str:
    return "done" if os.system(f"{command} >/dev/null 2>&1") == 0 else "failed"


def network_administration() -> Iterator[Try]:
    yield "packet socket", FORBIDDEN, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    for command in ("ip link add d0 type dummy", "ip route add default dev lo",
                    "ip address add 192.31.196.1/32 dev lo",
                    "ip link set lo down", "nsenter -t 1 -n true", "unshare -n true"):  # fmt: skip
        yield command, "failed", lambda c=command: shell(c)  # type: ignore[misc]
    yield "interfaces", "lo", lambda: " ".join(sorted(os.listdir("/sys/class/net")))
    yield "routes", "1", lambda: len(Path("/proc/net/route").read_text().splitlines())
    yield "sockets of the proxy", "0", lambda: sum(
        "proxy.py\0serve" in command for command in commands())


def commands() -> Iterator[str]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as file:
                yield file.read()
        except OSError:
            continue


def main() -> None:
    given = json.loads(sys.argv[1])
    tries = [*direct(given["api"], given["own"]), *proxied(given["api"], given["own"]), *smuggled(),
             *shared_directory(os.geteuid() == 0), *network_administration()]  # fmt: skip
    print(json.dumps([(title, outcome(action), expected) for title, expected, action in tries]))


if __name__ == "__main__":
    main()
