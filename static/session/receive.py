"""Makes the mirrors of a person's directories, on a host that does not see them, what these are
now; then becomes a command that uses them. Runs as root in a container of its own.

    receive.py MIRROR UID GID COMMAND…

First it prints what the mirrors have, for who sends to send no more than the rest: a line with a
length, then JSON compressed by zlib, of each path the word that came with it. stdin has a row of
JSON for each path that is new, or other by now:

    ["-", PATH]                                what is there is gone
    ["d", PATH, WORD, MODE, MTIME]             a directory
    ["l", PATH, WORD, MODE, MTIME, TARGET]     a link
    ["f", PATH, WORD, MODE, MTIME]             a file; chunks follow: offset, length, bytes
    ["?", PATH]                                it has changed while it was read: it comes again
    ["end"]                                    the rest of stdin is the command's

What has arrived is noted once a second, and what was not noted is removed by the next one: however
it ends, starting again goes on. Exit codes: those of the command; 1 failed; 94 there is no room.
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import sys
import time
import zlib
from contextlib import suppress
from typing import IO, Any

NO_ROOM_STATUS = 94
IDLE_SECONDS = 600  # for the next word of who sends


def stamp(st: os.stat_result) -> list[int]:
    return [st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino]


class Mirror:
    def __init__(self, folder: str, owner: tuple[int, int]) -> None:
        """Wait for the lock, and remove what was not noted."""
        self.owner = owner
        os.chdir(folder)
        self.lock = open("lock", "w")  # noqa: SIM115 - until the command ends
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        os.set_inheritable(self.lock.fileno(), True)
        self.have: dict[str, list[Any]] = {}  # path: its word, and its stamp where it is no folder
        if os.path.exists("have"):
            with open("have", encoding="ascii") as file:
                for line in file:
                    if line.endswith("\n"):  # else it was being written
                        path, *row = json.loads(line)
                        self.have[path] = row
        self.have = {path: row for path, row in self.have.items() if row}
        self.seen: set[str] = set()
        for name in ("from", "git"):
            self.look(name)
        for path in self.have.keys() - self.seen:
            del self.have[path]
        with open("have.new", "w", encoding="ascii") as file:
            file.writelines(json.dumps([path, *row]) + "\n" for path, row in self.have.items())
        os.rename("have.new", "have")
        self.note = open("have", "a", encoding="ascii")  # noqa: SIM115
        self.noted = time.monotonic()
        self.folders: list[list[Any]] = []
        self.real: str | None = None  # the last directory that was found to be one

    def look(self, path: str) -> None:
        try:
            st = os.lstat(path)
        except FileNotFoundError:
            return
        row = self.have.get(path)
        if not row or bool(row[1]) == stat.S_ISDIR(st.st_mode) or row[1] not in ([], stamp(st)):
            self.have.pop(path, None)
            if not stat.S_ISDIR(st.st_mode):
                os.unlink(path)
                return
        self.seen.add(path)
        if stat.S_ISDIR(st.st_mode):
            self.have.setdefault(path, ["", []])
            for name in os.listdir(path):
                self.look(f"{path}/{name}")

    def keep(self, path: str, word: str, st: os.stat_result | None) -> None:
        """Note that it is there; of an empty word that it has to come again."""
        self.note.write(json.dumps([path, *([word, stamp(st) if st else []] if word else [])])
                        + "\n")
        if time.monotonic() - self.noted > 1:
            self.note.flush()
            self.noted = time.monotonic()

    def holds(self, path: str) -> bool:
        """Whether what it lies in is a directory of the mirror: a link that has come in place of
        one leads anywhere, also to what else is mounted here.
        """
        folder = os.path.dirname(path)
        if folder != self.real:  # known not to be a link since, for drop() forgets it
            if os.path.realpath(folder) != os.path.abspath(folder):
                return False
            self.real = folder
        return True

    def drop(self, path: str) -> None:
        self.keep(path, "", None)
        if not self.holds(path):
            return
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
        self.real = None

    def take(self, kind: str, path: str, word: str, mode: int, mtime: int,
             target: str = "") -> None:
        """Raises OSError."""
        if not self.holds(path):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if kind == "d":
            if os.path.islink(path) or not os.path.isdir(path):
                os.mkdir(path, 0o700)
            self.folders.append([path, word, mode, mtime])
        elif kind == "l":
            if os.path.lexists(path):
                os.unlink(path)
            os.symlink(target, path)
            os.chown(path, *self.owner, follow_symlinks=False)
            os.utime(path, ns=(mtime, mtime), follow_symlinks=False)
            self.keep(path, word, os.lstat(path))
        else:
            self.file(path, word, mode, mtime)

    def file(self, path: str, word: str, mode: int, mtime: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            size = 0
            while length := int.from_bytes((head := exactly(16))[8:], "big"):
                offset = int.from_bytes(head[:8], "big")
                data = memoryview(exactly(length))
                while data:
                    written = os.pwrite(fd, data, offset)
                    data, offset = data[written:], offset + written
                size = offset
            end = int.from_bytes(head[:8], "big")
            if end > size:
                os.ftruncate(fd, end)
            os.fchown(fd, *self.owner)
            os.fchmod(fd, mode)
            os.utime(fd, ns=(mtime, mtime))
            st = os.fstat(fd)
        finally:
            os.close(fd)
        self.keep(path, word, st)

    def finish(self) -> None:
        """Of a directory's time what is made in it would be seen."""
        for path, word, mode, mtime in reversed(self.folders):
            if not self.holds(path):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                os.fchown(fd, *self.owner)
                os.fchmod(fd, mode)
                os.utime(fd, ns=(mtime, mtime))
            finally:
                os.close(fd)
            self.keep(path, word, None)
        self.note.close()


def exactly(size: int) -> bytes:
    signal.alarm(IDLE_SECONDS)
    data = source.read(size)
    if len(data) < size:
        raise EOFError
    return data


def receive(mirror: Mirror) -> None:
    words = zlib.compress(json.dumps({path: row[0] for path, row in mirror.have.items()}).encode())
    sys.stdout.buffer.write(b"%d\n%s" % (len(words), words))
    sys.stdout.flush()
    try:
        while (row := json.loads(source.readline() or "null")) != ["end"]:
            if not row:
                raise EOFError
            signal.alarm(IDLE_SECONDS)
            if row[0] == "-":
                mirror.drop(row[1])
            elif row[0] == "?":
                mirror.keep(row[1], "", None)
            else:
                mirror.take(*row)
    finally:
        mirror.note.flush()
    mirror.finish()


def main(argv: list[str]) -> int:
    folder, uid, gid, *command = argv
    signal.alarm(IDLE_SECONDS)
    os.umask(0o077)
    with suppress(OSError):  # who writes waits less often
        fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, 1 << 20)
    try:
        mirror = Mirror(folder, (int(uid), int(gid)))
        receive(mirror)
    except EOFError:
        print("the connection ended before all was there", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NO_ROOM_STATUS
        print(f"{os.fsencode(error.filename or folder)!r}: {error.strerror}", file=sys.stderr)
        return 1
    given = os.memfd_create("given")  # what was read ahead is the command's
    os.pwrite(given, source.read(), 0)
    os.dup2(given, 0)
    signal.alarm(0)
    os.execvp(command[0], command)


source: IO[bytes] = sys.stdin.buffer
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
