"""Hold a program on a terminal inside a session, so that it outlives every client.

    hold.py start ID ROWS COLUMNS TITLE COMMAND [ARGUMENT ...]
    hold.py attach ID ROWS COLUMNS POSITION
    hold.py list

An exec in the session gives the source to its python3. `start` leaves a holder behind, which has
the terminal (a PTY), and goes on as its first client. With 0 rows there is none (`start`), or one
that only looks (`attach`). A client hands its stdin and stdout to the holder, and then waits only
for the status, which is its own, too.

A client speaks in frames: a letter, the length of what follows (4 bytes, the highest first), and
that. To the holder: `i` input, `r` rows and columns. From it: `h` the position in the output at
which the next `o` begins, rows and columns, and where the output ended when this was said; again
where a slow client has lost some; `m` output that brings a terminal to the modes it was in at that
position, and that is not counted; `o` output; `s` rows and columns, when they change; `e` the
status, empty where nobody knows it; or, alone, `n` and the reason why nothing was started or is
there. What ends a client is the end of its stdin.

FOLDER/ID has `info` (when it was started, in seconds, and TITLE), `socket`, and `output`: numbers
of 8 bytes, the lowest first (the count of all output, the status plus 1 or 0, and when it ended,
in milliseconds), then the last RING_BYTES of the output, as a ring.

`list` prints for each: ID, started, ended, status, clients, rows, columns, title; `-` for none,
clients is `lost` where the holder is gone without a status.

Exit code: the program's status; 125 where it is not known, 1 where nothing was started or is there.

Import budget: a holder lives as long as its program, and its start is waited for; what it imports
takes 2 ms.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import sys
import termios
import time
from _signal import (  # type: ignore[import-not-found]
    SIG_DFL,
    SIGCHLD,
    SIGPIPE,
    SIGXFSZ,
    set_wakeup_fd,
    signal,
)
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

FOLDER = "/run/sandbox/terminals"
RING_BYTES = 1 << 20
HEADER_BYTES = 24
PIECE_BYTES = 32768  # half of what a pipe takes, so that a frame mostly goes in one call
INPUT_BYTES = 65536
FRAME_BYTES = 1 << 20  # the largest frame of a client
STALL_SECONDS = 5  # a client that takes nothing for so long no longer holds the program up
CLOSED_SECONDS = 0.2  # after which a terminal that nobody has open is looked at again
HANG_UP_SECONDS = 1  # the kernel hangs a terminal up when its program ends, or it is never told
CLIENTS = 64  # further ones wait
MODES = 64
KEPT = 8  # ended terminals whose output stays


def frame(kind: bytes, data: bytes = b"") -> bytes:
    return kind + len(data).to_bytes(4, "big") + data


def words(*values: object) -> bytes:
    return " ".join(map(str, values)).encode()


class Ring:
    """The last RING_BYTES of the output, in a file that outlives the holder."""

    def __init__(self, path: str) -> None:
        """Raises OSError where there is no room: later it would be a SIGBUS."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, HEADER_BYTES + RING_BYTES)
            self.map = mmap.mmap(fd, HEADER_BYTES + RING_BYTES)
        finally:
            os.close(fd)
        self.memory = memoryview(self.map)[HEADER_BYTES:]
        self.end = 0

    @property
    def start(self) -> int:
        return max(0, self.end - RING_BYTES)

    def take(self, fd: int) -> memoryview:
        """Read once, straight into the ring; what was read. Raises OSError."""
        at = self.end % RING_BYTES
        return self.took(os.readv(fd, [self.memory[at : at + PIECE_BYTES]]))

    def put(self, text: str) -> None:
        """Have a line of our own at the beginning."""
        data = os.fsencode(text)[:PIECE_BYTES]
        self.memory[: len(data)] = data
        self.took(len(data))

    def took(self, count: int) -> memoryview:
        at = self.end % RING_BYTES
        self.end += count
        self.map[:8] = self.end.to_bytes(8, "little")
        return self.memory[at : at + count]

    def piece(self, position: int) -> memoryview:
        at = position % RING_BYTES
        return self.memory[at : at + min(PIECE_BYTES, self.end - position)]

    def finish(self, status: int) -> None:
        self.map[16:24] = int(time.time() * 1000).to_bytes(8, "little")
        self.map[8:16] = (status + 1).to_bytes(8, "little")


class Modes:
    """Which modes a terminal is in that had all output: private ones (as the alternate screen),
    xterm's modifyOtherKeys and what was pushed of the kitty keyboard protocol.
    """

    def __init__(self) -> None:
        self.rest = b""
        self.set: dict[bytes, tuple[int, bytes]] = {}  # by name: where, and what does it again

    def scan(self, data: bytes, end: int) -> None:
        """Look through output that ends at a position."""
        data, self.rest = self.rest + data, b""
        at = data.rfind(b"\x1b", -24)
        if at >= 0 and not data[at + 3 :].strip(b"0123456789;"):
            self.rest = data[at:]  # it may go on with the next output
        for mark in (b"\x1b[?", b"\x1b[>", b"\x1b[<"):
            at = data.find(mark)
            while at >= 0:
                part = data[at + 3 : at + 24]
                tail = part.lstrip(b"0123456789;")
                numbers = part[: len(part) - len(tail)]
                ends = end - len(data) + at + 4 + len(numbers)
                self.note(mark + numbers + tail[:1], numbers, ends)
                at = data.find(mark, at + 3)

    def note(self, sequence: bytes, numbers: bytes, end: int) -> None:
        kind = sequence[2:3] + sequence[-1:]
        if kind in (b"?h", b"?l"):
            for number in numbers.split(b";"):
                self.keep(number, b"\x1b[?" + number + kind[1:], end)
        elif kind == b">m" and numbers[:1] == b"4":
            self.keep(b"keys", sequence, end)
        elif kind == b">u":
            self.keep(b"kitty %d" % sum(name[:5] == b"kitty" for name in self.set), sequence, end)
        elif kind == b"<u":
            count = int(numbers.partition(b";")[0][:3] or 1)
            for name in [name for name in self.set if name[:5] == b"kitty"][-count:]:
                del self.set[name]

    def keep(self, name: bytes, sequence: bytes, end: int) -> None:
        self.set.pop(name, None)
        self.set[name] = end, sequence
        if len(self.set) > MODES:
            del self.set[next(iter(self.set))]

    def before(self, position: int) -> bytes:
        """What brings a terminal to the modes that were set before a position."""
        return b"".join(sequence for end, sequence in self.set.values() if end <= position)


def is_answer(data: bytes) -> bool:
    """Whether input is nothing but what a terminal sends by itself: answers, changes of focus."""
    while data:
        if data[:2] == b"\x1b[":
            rest = data[2:].lstrip(b"0123456789;:?>=$")
            if not rest or rest[:1] not in b"RcnytIO" and not (
                    rest[:1] == b"u" and data[2:3] == b"?"):
                return False
            data = rest[1:]
        elif data[:2] in (b"\x1bP", b"\x1b]", b"\x1b_"):
            ends = [(data.find(mark) + len(mark)) for mark in (b"\x1b\\", b"\a") if mark in data]
            if not ends:
                return False
            data = data[min(ends) :]
        else:
            return False
    return True


class Client:
    """Who sees the terminal; with 0 rows it only looks. `sent` is its position in the output."""

    def __init__(self, waiter: socket, fds: list[int], size: tuple[int, int]) -> None:
        self.waiter, self.size = waiter, size
        self.stdin, self.stdout = fds
        self.sent = -1
        self.shown = (0, 0)  # the size that it knows of
        self.received = bytearray()
        self.pending = b""  # of a frame that was not taken whole
        self.progress = time.monotonic()
        self.gone = self.told = False
        for fd in fds:
            os.set_blocking(fd, False)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send a frame, in parts; only while nothing is pending."""
        try:
            taken = os.writev(self.stdout, parts)
            self.progress = time.monotonic()
        except BlockingIOError:
            taken = 0
        except OSError:
            taken, self.gone = 0, True
        if taken < sum(map(len, parts)):
            self.pending = b"".join(parts)[taken:]

    def push(self) -> None:
        rest, self.pending = self.pending, b""
        if rest:
            self.send(rest)

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """The whole frames that have come; at the end of the input it is gone."""
        try:
            data = os.read(self.stdin, INPUT_BYTES)
            self.gone = self.gone or not data
        except BlockingIOError:
            return
        except OSError:
            self.gone = True
            return
        self.received += data
        while len(self.received) >= 5:
            size = int.from_bytes(self.received[1:5], "big")
            if size > FRAME_BYTES:
                self.gone = True
            if self.gone or len(self.received) < 5 + size:
                return
            kind, data = bytes(self.received[:1]), bytes(self.received[5 : 5 + size])
            del self.received[: 5 + size]
            yield kind, data

    def close(self, status: int) -> None:
        """Tell the status only then: the engine waits for who has its streams open."""
        for fd in (self.stdin, self.stdout):
            os.close(fd)
        try:
            self.waiter.send(b"%d\n" % status)
        except OSError:
            self.gone = True
        self.waiter.close()


class Holder:
    def __init__(self, folder: str, listener: socket, ring: Ring, size: tuple[int, int],
                 argv: list[str]) -> None:
        self.folder, self.listener, self.ring, self.size = folder, listener, ring, size
        self.modes = Modes()
        self.clients: list[Client] = []
        self.owner: Client | None = None  # who has the size: the last to type
        self.input = bytearray()
        self.status: int | None = None
        self.ended = self.closed = 0.0
        self.woken, wake = os.pipe()
        for fd in (self.woken, wake):
            os.set_blocking(fd, False)
        signal(SIGCHLD, lambda number, frame: None)
        set_wakeup_fd(wake)
        try:
            self.pid, self.master = os.forkpty()
        except OSError as error:
            self.ring.put(f"sandbox: no terminal: {error.strerror}\r\n")
            self.pid, self.master, self.status = 0, -1, 126
            self.ring.finish(126)
            return
        if not self.pid:
            start_program(size, argv)
        os.set_blocking(self.master, False)
        os.set_inheritable(self.master, False)
        set_size(self.master, size)

    @property
    def over(self) -> bool:
        """Whether the program has ended and all of its output was taken."""
        return self.status is not None and self.master < 0

    def run(self) -> None:
        self.serve()
        unlink(self.folder + "/socket")
        self.listener.setblocking(False)
        while self.welcome():  # who came meanwhile
            pass
        self.serve()

    def serve(self) -> None:
        while not self.over or self.clients:
            self.step()

    def step(self) -> None:
        poller = select.poll()
        poller.register(self.woken, select.POLLIN)
        if len(self.clients) < CLIENTS:
            poller.register(self.listener, select.POLLIN)
        if self.master >= 0 and not self.is_closed():
            mask = (select.POLLIN if self.may_read() else 0) | (select.POLLOUT if self.input else 0)
            if mask:  # or its hang-up would make this loop spin
                poller.register(self.master, mask)
        by_fd = {}
        full = len(self.input) > INPUT_BYTES
        for client in self.clients:
            by_fd[client.stdin] = by_fd[client.stdout] = by_fd[client.waiter.fileno()] = client
            poller.register(client.stdin, 0 if full else select.POLLIN)
            poller.register(client.stdout, select.POLLOUT if client.pending else 0)
            poller.register(client.waiter, 0)  # hangs up when the client is killed
        for fd, happened in poller.poll(self.timeout_ms()):
            if fd == self.master:
                if happened & select.POLLOUT:
                    self.write_input()
                if happened & ~select.POLLOUT:
                    self.read_output()
            elif fd == self.woken:
                self.reap()
            elif fd == self.listener.fileno():
                self.welcome()
            elif fd == by_fd[fd].stdin:
                self.obey(by_fd[fd])
            elif happened & ~select.POLLOUT:
                by_fd[fd].gone = True
            else:
                by_fd[fd].push()
                self.flush(by_fd[fd])
        if self.status is not None and self.master >= 0 and self.may_read():
            self.read_output()
        self.part()

    def may_read(self) -> bool:
        """Whether the program may go on: who typed last has taken all, or nothing for long."""
        owner = self.owner
        return (owner is None or owner.sent == self.ring.end and not owner.pending
                or time.monotonic() - owner.progress > STALL_SECONDS)

    def is_closed(self) -> bool:
        """Whether nobody had the terminal open just now; to close it here would end the program."""
        return self.status is None and time.monotonic() - self.closed < CLOSED_SECONDS

    def timeout_ms(self) -> int | None:
        if self.master >= 0 and (self.status is not None or self.is_closed()):
            return 100
        behind = any(client.pending for client in self.clients)
        return STALL_SECONDS * 200 if behind else None

    def read_output(self) -> None:
        size = 0
        try:
            while size < PIECE_BYTES:
                data = self.ring.take(self.master)
                if not data:
                    raise OSError
                size += len(data)
                self.modes.scan(bytes(data), self.ring.end)
        except BlockingIOError:
            if self.status is not None and time.monotonic() - self.ended > HANG_UP_SECONDS:
                self.hang_up()
        except OSError:  # EIO: nobody has the other end open
            self.closed = time.monotonic()
            if self.status is not None:
                self.hang_up()
        self.flush_all()

    def hang_up(self) -> None:
        os.close(self.master)
        self.master = -1
        self.input.clear()
        self.ring.finish(self.status or 0)

    def reap(self) -> None:
        os.read(self.woken, 64)
        if self.status is not None:
            return
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return
        self.status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        self.ended = time.monotonic()

    def write_input(self) -> None:
        try:
            del self.input[: os.write(self.master, self.input)]
        except BlockingIOError:
            pass
        except OSError:
            self.input.clear()

    # Clients.

    def welcome(self) -> bool:
        """Take a new client in, or tell one what it asks for; False when nobody waits."""
        try:
            fd, _ = self.listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return False
        waiter, fds = socket(fileno=fd), []
        waiter.settimeout(1)
        try:
            data, rights, _, _ = waiter.recvmsg(200, 200)
            for _, _, given in rights:
                fds += [int.from_bytes(given[at : at + 4], sys.byteorder)
                        for at in range(0, len(given), 4)]
            if not fds:
                waiter.send(words(sum(client.size[0] > 0 for client in self.clients), *self.size))
            rows, columns, position = map(int, data.split())
            client = Client(waiter, fds, a_size(rows, columns))
        except (OSError, ValueError):
            for fd in fds:
                os.close(fd)
            waiter.close()
            return True
        self.clients.append(client)
        inside = self.ring.start <= position <= self.ring.end
        self.greet(client, position if inside else self.ring.start)
        if client.size[0]:
            self.own(client)
        self.flush(client)
        return True

    def greet(self, client: Client, position: int) -> None:
        client.sent, client.shown = position, self.size
        hello = frame(b"h", words(position, *self.size, self.ring.end))
        modes = self.modes.before(position) if position == self.ring.start else b""
        client.send(hello, frame(b"m", modes) if modes else b"")

    def own(self, client: Client) -> None:
        """Give the size to a client."""
        self.owner = client
        if client.size == self.size:
            return
        self.size = client.size
        if self.master >= 0:
            set_size(self.master, self.size)
        self.flush_all()

    def obey(self, client: Client) -> None:
        for kind, data in client.frames():
            if kind == b"i" and client.size[0]:
                if client is not self.owner:
                    if is_answer(data):  # to what the program asked, as the owner's has done
                        continue
                    self.own(client)
                if self.master >= 0:
                    self.input += data
            elif kind == b"r":
                try:
                    rows, columns = map(int, data.split())
                except ValueError:
                    client.gone = True
                    return
                client.size = a_size(rows, columns)
                if self.owner in (client, None):
                    self.own(client)
        if self.input:
            self.write_input()

    def flush_all(self) -> None:
        for client in self.clients:
            self.flush(client)

    def flush(self, client: Client) -> None:
        """Send what a client lacks, as far as it takes it."""
        while not client.pending and not client.gone:
            if client.sent < self.ring.start:
                self.greet(client, self.ring.start)
            elif client.shown != self.size:
                client.shown = self.size
                client.send(frame(b"s", words(*self.size)))
            elif client.sent < self.ring.end:
                data = self.ring.piece(client.sent)
                client.sent += len(data)
                client.send(b"o" + len(data).to_bytes(4, "big"), data)
            elif self.over and not client.told:
                client.told = True
                client.send(frame(b"e", words(self.status)))
            else:
                return

    def part(self) -> None:
        """Part from the clients that are gone, and from those that know of the end."""
        for client in list(self.clients):
            if not client.gone and (not client.told or client.pending):
                continue
            self.clients.remove(client)
            client.close(self.status if client.told and self.status else 0)
            if client is self.owner:
                self.owner = None
                for other in reversed(self.clients):
                    if other.size[0]:
                        self.own(other)
                        break


def a_size(rows: int | str, columns: int | str, none: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Rows and columns that a terminal can have; `none` where one of them is 0."""
    size = min(max(int(rows), 0), 1000), min(max(int(columns), 0), 1000)
    return size if all(size) else none


def set_size(fd: int, size: tuple[int, int]) -> None:
    cells = b"".join(number.to_bytes(2, sys.byteorder) for number in (*size, 0, 0))
    fcntl.ioctl(fd, termios.TIOCSWINSZ, cells)


def start_program(size: tuple[int, int], argv: list[str]) -> NoReturn:
    """Become the program; this process has the terminal already."""
    try:
        set_size(0, size)
        for number in (SIGPIPE, SIGXFSZ):  # Python ignores them
            signal(number, SIG_DFL)
        with open("/proc/self/environ", "rb") as file:
            if b"\0LC_CTYPE=" not in b"\0" + file.read():
                os.environ.pop("LC_CTYPE", None)  # Python sets it where no locale is set
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, os.fsencode(f"sandbox: {argv[0]}: {error.strerror}\n"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os._exit(126)


def start(id: str, rows: str, columns: str, title: str, *argv: str) -> None:
    """Leave a holder behind, and be its first client."""
    folder = FOLDER + "/" + id
    try:
        os.makedirs(folder, 0o700)
        ring = Ring(folder + "/output")
        with open(folder + "/info", "w", errors="surrogateescape") as file:
            file.write(f"{time.time():.3f} {title}")
        listener = socket(AF_UNIX, SOCK_STREAM)
        listener.bind(folder + "/socket")
        listener.listen(64)
        # Before the program begins, which may end at once, or remove the socket.
        holder = hand_over(id, rows, columns, "0") if int(rows) else None
        first = os.fork()
    except FileExistsError:
        refuse(f"there is a terminal {id} already")
    except OSError as error:
        remove(folder)
        refuse(f"no terminal can be held here: {error.strerror}")
    if not first:
        try:
            if holder:
                holder.close()
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.environ["SANDBOX_EXEC"] = id  # the holder itself is not to have the program's mark
            Holder(folder, listener, ring, a_size(rows, columns, (24, 80)), [*argv]).run()
        finally:
            os._exit(0)
    listener.close()
    forget_ended()  # while the program starts
    if holder:
        wait_for(holder)


def refuse(reason: str) -> NoReturn:
    write_all(frame(b"n", reason.encode()))
    sys.exit(1)


def attach(id: str, rows: str, columns: str, position: str) -> None:
    """Be a client, which ends with the status that the holder tells."""
    wait_for(hand_over(id, rows, columns, position))


def hand_over(id: str, rows: str, columns: str, position: str) -> socket:
    """Give stdin and stdout to the holder; where it has ended, show what is left and end."""
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1))
    while holder := connect(FOLDER + "/" + id):
        try:
            holder.sendmsg([words(rows, columns, position)], [(SOL_SOCKET, SCM_RIGHTS, rights)])
            return holder
        except ConnectionError:  # it waits for us only so long, or has ended
            holder.close()
    show_kept(FOLDER + "/" + id, int(position))


def wait_for(holder: socket) -> NoReturn:
    os.dup2(holder.fileno(), 0)
    # The shell takes less memory, for as long as the client is there.
    os.execvp("sh", ["sh", "-c", "read -r status; exit ${status:-125}"])


def connect(folder: str) -> socket | None:
    """The holder of a terminal, None where there is none any more."""
    holder = socket(AF_UNIX, SOCK_STREAM)
    try:
        holder.connect(folder + "/socket")
        return holder
    except OSError:
        holder.close()
        return None


def show_kept(folder: str, position: int) -> NoReturn:
    """Show what is left of a terminal whose holder has ended."""
    try:
        with open(folder + "/output", "rb") as file:
            data = file.read()
    except OSError:
        refuse("there is no such terminal")
    status, _ = ended(folder)
    end, ring = int.from_bytes(data[:8], "little"), data[HEADER_BYTES:]
    first = max(0, end - RING_BYTES)
    position = position if first <= position <= end else first
    write_all(frame(b"h", words(position, 24, 80, end)))
    while position < end:
        at = position % RING_BYTES
        piece = ring[at : at + min(PIECE_BYTES, end - position)]
        write_all(frame(b"o", piece))
        position += len(piece) or end
    write_all(frame(b"e", b"" if status is None else words(status)))
    sys.exit(125 if status is None else status)


def write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def ended(folder: str) -> tuple[int | None, float]:
    """The status and when the program ended; None and 0 where neither is known."""
    try:
        with open(folder + "/output", "rb") as file:
            head = file.read(HEADER_BYTES)
    except OSError:
        head = b""
    status = int.from_bytes(head[8:16], "little")
    return (status - 1 if status else None), int.from_bytes(head[16:24], "little") / 1000


def ask(folder: str) -> str:
    """Clients, rows and columns, as a holder says."""
    holder = connect(folder)
    if not holder:
        return "lost - -"
    try:
        holder.settimeout(1)
        holder.send(b"?")
        return holder.recv(100).decode() or "0 - -"
    except OSError:  # it is busy
        return "0 - -"
    finally:
        holder.close()


def folders() -> list[str]:
    """Of all terminals, the oldest first."""
    names = os.listdir(FOLDER) if os.path.isdir(FOLDER) else []
    paths = [f"{FOLDER}/{name}" for name in names]
    return sorted((path for path in paths if os.path.exists(path + "/info")), key=started)


def started(folder: str) -> float:
    try:
        return os.stat(folder + "/info").st_mtime
    except OSError:  # it was forgotten just now
        return 0.0


def show_list() -> None:
    for folder in folders():
        now = ask(folder)
        status, when = ended(folder)  # read last: it may have ended just now
        over = ["-", "-"] if status is None else [f"{when:.3f}", str(status)]
        try:
            with open(folder + "/info", errors="surrogateescape") as file:
                started, _, title = file.read().partition(" ")
        except OSError:  # it was forgotten just now
            continue
        now = now if status is None else "- - -"
        line = " ".join((os.path.basename(folder), started, *over, now, title))
        os.write(1, "".join(c if c.isprintable() else "?" for c in line).encode() + b"\n")


def forget_ended() -> None:
    """Keep the last that have ended."""
    over = []
    for folder in folders():
        holder = None if ended(folder)[0] is not None else connect(folder)
        if holder:
            holder.close()
        else:
            over.append(folder)
    for folder in over[:-KEPT]:
        remove(folder)


def remove(folder: str) -> None:
    for name in ("socket", "output", "info"):
        unlink(f"{folder}/{name}")
    try:
        os.rmdir(folder)
    except OSError:
        return


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def main(what: str, *args: str) -> None:
    if what == "start":
        start(*args)
    elif what == "attach":
        attach(*args)
    else:
        show_list()


if __name__ == "__main__":
    main(*sys.argv[1:])
