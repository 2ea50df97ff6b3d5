"""Relay stdin and stdout to a socket of a companion: ask.py SOCKET

An exec there gives the source to its python3. Who listens may just be starting.

Exit codes: 0; 1 nobody listens.
"""

import os
import select
import socket
import sys
import time

WAIT_SECONDS, RETRY_SECONDS, BUFFER_BYTES = 5, 0.02, 64 * 1024


def connected(path: str) -> socket.socket:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
            return sock
        except OSError as error:
            sock.close()
            if time.monotonic() > deadline:
                sys.exit(f"sandbox: the broker does not run: {error}")
        time.sleep(RETRY_SECONDS)


def main() -> None:
    sock, poll = connected(sys.argv[1]), select.poll()
    for fd in (0, sock.fileno()):
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            data = os.read(fd, BUFFER_BYTES)
            if fd and not data:
                return
            if fd:
                os.write(1, data)
            elif data:
                sock.sendall(data)
            else:
                poll.unregister(0)
                sock.shutdown(socket.SHUT_WR)


main()
