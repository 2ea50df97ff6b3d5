"""Run a command in a session so that it outlives its client, and print what it prints.

    SANDBOX_HOLD="TAG POSITION" keep.py [COMMAND ...]

An exec in the session gives the source to its python3. Without a command it has been started
before. For a tag it is run once, however often a client asks for that.

stdout has frames as those of hold.py: a letter, the length of what follows (4 bytes, the highest
first), and that. `h` says that it is still there; `o` and `m`, which count for the position, are
what the command has printed on stdout and stderr; `e` is the status, empty where nobody knows it;
`n`, first and alone, is the reason why nothing was started. It ends when a byte on stdin says that
the status has arrived, or at the end of stdin.

FOLDER/TAG has the frames that count, and is locked by who keeps them; FOLDER/TAG.status the status.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time
from _signal import SIGPIPE, SIGXFSZ  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

FOLDER = "/run/sandbox/jobs"
STATUS_BYTES = 8
PIECE_BYTES = 32768
KEPT_BYTES = 1 << 30
LOOK_MS = 100  # how often it is seen whether there is more
BEAT_SECONDS = 15


def frame(kind: bytes, data: bytes = b"") -> bytes:
    return kind + len(data).to_bytes(4, "big") + data


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def keep(log: int, path: str, tag: str, command: list[str]) -> NoReturn:
    """Run the command and keep what it prints; what finds no room is dropped."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    status = os.open(f"{path}.status", os.O_WRONLY)
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, end, fd) for end, fd in ((out_end, 1), (err_end, 2))]
    # A shell says of a program that is not there what exec.sh would, and gives its status.
    argv = ["sh", "-c", 'exec "$@"', "sandbox", *command]
    pid = os.posix_spawnp("sh", argv, {**os.environ, "SANDBOX_EXEC": tag}, setpgroup=0,
                          file_actions=actions, setsigdef=[SIGPIPE, SIGXFSZ])
    os.close(out_end)
    os.close(err_end)
    kinds, poller, left, ended = {out: b"o", err: b"m"}, select.poll(), KEPT_BYTES, (0, 0)
    for fd in kinds:
        poller.register(fd, select.POLLIN)
    while kinds:
        ready = poller.poll(LOOK_MS)
        if not ready and ended[0]:
            break  # what it has left has the pipes
        if not ready:  # what it printed meanwhile is there when one looks again
            ended = os.waitpid(pid, os.WNOHANG)
        for fd, _ in ready:
            data = os.read(fd, PIECE_BYTES)
            if not data:
                poller.unregister(fd)
                del kinds[fd]
            elif left > 0:
                left = left - len(data) if add(log, frame(kinds[fd], data)) else 0
    code = os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(pid, 0)[1])
    os.pwrite(status, b"%d" % (128 - code if code < 0 else code), 0)
    fcntl.flock(log, fcntl.LOCK_UN)
    while kinds:
        for fd, _ in poller.poll():
            if not os.read(fd, PIECE_BYTES):
                poller.unregister(fd)
                del kinds[fd]
    os._exit(0)


def add(log: int, data: bytes) -> bool:
    """Append a whole frame, or nothing of it."""
    size = os.fstat(log).st_size
    try:
        write_all(log, data)
    except OSError:
        os.ftruncate(log, size)
        return False
    return True


def is_kept(log: int) -> bool:
    try:
        fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(log, fcntl.LOCK_UN)
    return False


def show(log: int, path: str, position: int) -> None:
    """Print from the position on; the files go when all has arrived."""
    poller, beat, data, kept = select.poll(), 0.0, b"", True
    poller.register(0, select.POLLIN)
    while kept:
        kept = is_kept(log)  # before it is read: then what has ended is all there
        while more := os.pread(log, PIECE_BYTES, position + len(data)):
            data += more
            at = 0
            while len(data) - at >= 5 and len(data) - at >= (
                    size := 5 + int.from_bytes(data[at + 1 : at + 5], "big")):
                at += size
            write_all(1, data[:at])
            data, position = data[at:], position + at
            beat = time.monotonic() if at else beat
        if time.monotonic() - beat > BEAT_SECONDS or not beat:
            write_all(1, frame(b"h"))
            beat = time.monotonic()
        if kept and poller.poll(LOOK_MS):
            return
    try:
        with open(f"{path}.status", "rb") as file:
            status = file.read(STATUS_BYTES).strip()
    except OSError:
        status = b""
    write_all(1, frame(b"e", status))
    if os.read(0, 1):
        os.unlink(path)
        os.unlink(f"{path}.status")


def opened(path: str, tag: str, command: list[str]) -> int:
    """What is kept of a tag, by a keeper that is started where there was none. Raises OSError."""
    if command:
        os.makedirs(FOLDER, 0o700, exist_ok=True)
        log = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.open(f"{path}.status", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except (BlockingIOError, FileExistsError):
            pass
        else:
            write_all(status, b" " * STATUS_BYTES)  # room for it on a full disk
            if not os.fork():
                keep(log, path, tag, command)
        os.close(log)  # the lock is the keeper's now
    return os.open(path, os.O_RDONLY)


def main() -> None:
    tag, position = os.environ.pop("SANDBOX_HOLD").split()
    path, command = f"{FOLDER}/{tag}", sys.argv[1:]
    try:
        log = opened(path, tag, command)
    except OSError as error:
        why = str(error).encode("utf-8", "replace")[:999]
        os.write(1, frame(b"n", why) if command else frame(b"e"))
        return
    show(log, path, int(position))


if __name__ == "__main__":
    main()
