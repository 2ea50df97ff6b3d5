"""The vendors' own names for the agents' tests: model_stub.py over TLS, with the keys demanded.

    vendor_stub.py DIRECTORY

Listens on 127.0.0.1:443 with DIRECTORY/cert.pem; then there is DIRECTORY/ready. Who brings none of
DIRECTORY/keys gets a 401; no argument has them, where tests search for them. Each request is a line
of DIRECTORY/requests: [method, path, [[header, value], ...], body].
"""

import fcntl
import io
import json
import ssl
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path

import model_stub

DIRECTORY = Path(sys.argv[1])
KEYS = (DIRECTORY / "keys").read_text().split()


class Handler(model_stub.Handler):
    def setup(self) -> None:
        self.request = CONTEXT.wrap_socket(self.request, server_side=True)
        super().setup()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.note(body):
            return self.send_error(401)
        lines, self.rfile = self.rfile, io.BufferedReader(io.BytesIO(body))
        super().do_POST()
        self.rfile = lines

    def do_GET(self) -> None:
        self.note(b"")
        super().do_GET()

    do_HEAD = do_GET

    def note(self, body: bytes) -> bool:
        """Whether the request has one of the keys."""
        line = [self.command, self.path, self.headers.items(), body.decode()]
        with open(DIRECTORY / "requests", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # who reads them takes whole lines
            file.write(json.dumps(line) + "\n")
        return any(value.removeprefix("Bearer ") in KEYS for value in self.headers.values())


CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
CONTEXT.load_cert_chain(DIRECTORY / "cert.pem")
server = ThreadingHTTPServer(("127.0.0.1", 443), Handler)
server.daemon_threads = True
(DIRECTORY / "ready").touch()
server.serve_forever()
