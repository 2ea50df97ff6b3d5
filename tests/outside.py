"""A piece of the internet for the network tests: servers in the network namespace of a session's
proxy.

    outside.py DIRECTORY

    80, 81, 8080, 9999   HTTP: what came, as JSON; /seen all that came; /zeros/<n> n bytes;
                         /files/ of DIRECTORY
    443                  the same over TLS, with DIRECTORY/cert.pem and key.pem
    8081                 a WebSocket that echoes
    53/udp               counts what comes

They listen on every address of the namespace, to which PUBLIC is added on its loopback interface:
an address of the public internet that no packet leaves for. DIRECTORY/ready says that they listen.
"""

import http.server
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from websockets.sync.server import ServerConnection, serve

PUBLIC = "192.31.196.1"  # of the anycast block for names that should have stayed private (RFC 7535)
DIRECTORY = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
SEEN: list[Any] = []  # local address, port, Host


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, directory=str(DIRECTORY))

    def do_GET(self) -> None:
        place = [*self.connection.getsockname(), self.headers["Host"]]
        if self.path.startswith("/files/"):
            super().do_GET()
        elif self.path.startswith("/zeros/"):
            self.zeros(int(self.path.removeprefix("/zeros/")))
        elif self.path == "/seen":
            self.answer(SEEN)
        else:
            SEEN.append(place)
            self.answer(place)

    def answer(self, data: object) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def zeros(self, count: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(count))
        self.end_headers()
        piece = bytes(1 << 18)
        while count:
            count -= self.connection.send(piece[:count])

    def log_message(self, *args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True


class TlsServer(Server):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the thread of the connection, so that a handshake holds no other up."""
        try:
            with self.context.wrap_socket(request, server_side=True) as tls:
                super().finish_request(tls, client_address)
        except OSError:
            pass


def echo(connection: ServerConnection) -> None:
    for message in connection:
        connection.send(message)


def count_datagrams(sock: socket.socket) -> None:
    while True:
        sock.recv(4096)
        SEEN.append([*sock.getsockname(), "udp"])


def main() -> None:
    subprocess.run(["ip", "address", "add", f"{PUBLIC}/32", "dev", "lo"], check=True)
    with socket.socket() as here:
        here.bind((PUBLIC, 0))  # else the requests for it would leave
    TlsServer.context.load_cert_chain(DIRECTORY / "cert.pem", DIRECTORY / "key.pem")
    servers = [*(Server(("", port), Handler) for port in (80, 81, 8080, 9999)),
               TlsServer(("", 443), Handler)]
    datagrams = socket.socket(type=socket.SOCK_DGRAM)
    datagrams.bind(("", 53))
    websocket = serve(echo, "", 8081)
    for target in (*(server.serve_forever for server in servers), websocket.serve_forever):
        threading.Thread(target=target).start()
    (DIRECTORY / "ready").touch()
    os.chmod(DIRECTORY / "ready", 0o644)
    count_datagrams(datagrams)


if __name__ == "__main__":
    main()
