"""Hold a program on a terminal inside a session, so that it outlives every client.

    hold.py start ID ROWS COLUMNS TITLE COMMAND [ARGUMENT ...]
    hold.py attach ID ROWS COLUMNS POSITION
    hold.py list

The source is given to `python3 -I -S -c` by an exec in the session; exec.sh says before where it
cannot run. `start` leaves a holder behind, which has the terminal (a PTY), and goes on as its first
client. With 0 rows there is none (`start`), or one that only looks (`attach`). A client hands its
stdin and stdout to the holder, and then waits only for the status, which is its own, too.

A client speaks in frames: a letter, the length of what follows (4 bytes, the highest first), and
that. To the holder: `i` input, `r` rows and columns. From it: `h` the position in the output at
which the next `o` begins, and rows and columns; again where a slow client has lost some; `m` output
that brings a terminal to the modes it was in at that position, and that is not counted; `o` output;
`s` rows and columns, when they change; `e` the status, empty where nobody knows it; or, alone, `n`
and the reason why there is nothing. What ends a client is the end of its stdin.

FOLDER/ID has `info` (when it was started, in seconds, and TITLE), `socket`, `output` (8 bytes with
the count of all output, the lowest first, then the last RING_BYTES of it, as a ring), and, once the
program has ended, `status` (the status, and when it ended).

`list` prints for each: ID, started, ended, status, clients, rows, columns, title; `-` for none,
clients is `lost` where the holder is gone without a status.
"""

import fcntl
import mmap
import os
import select
import sys
import termios
import time
from _signal import SIG_DFL, SIGPIPE, signal
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket

FOLDER = "/run/sandbox/terminals"
RING_BYTES = 1 << 20
PIECE_BYTES = 32768  # half of what a pipe takes, so that a frame mostly goes in one call
INPUT_BYTES = 65536
FRAME_BYTES = 1 << 20  # the largest frame of a client
STALL_SECONDS = 5  # a client that takes nothing for so long no longer holds the program up
KEPT = 8  # ended terminals whose output stays


def frame(kind, data=b""):
    return kind + len(data).to_bytes(4, "big") + data


def words(*values):
    return " ".join(map(str, values)).encode()


class Ring:
    """The last RING_BYTES of the output, in a file that outlives the holder."""

    def __init__(self, path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        size = 8 + RING_BYTES
        try:  # on a full disk a page that is not there yet would kill the holder
            os.posix_fallocate(fd, 0, size)
            self.map = mmap.mmap(fd, size)
        except OSError:
            self.map = mmap.mmap(-1, size)
        os.close(fd)
        self.memory = memoryview(self.map)[8:]
        self.end = 0

    @property
    def start(self):
        return max(0, self.end - RING_BYTES)

    def take(self, fd):
        """Read once, straight into the ring; what was read. Raises OSError."""
        at = self.end % RING_BYTES
        count = os.readv(fd, [self.memory[at : at + PIECE_BYTES]])
        self.end += count
        self.map[:8] = self.end.to_bytes(8, "little")
        return self.memory[at : at + count]

    def piece(self, position):
        at = position % RING_BYTES
        return self.memory[at : at + min(PIECE_BYTES, self.end - position)]


class Modes:
    """Which private modes (as the alternate screen) the output has set or reset, and where."""

    def __init__(self):
        self.rest = b""
        self.modes = {}

    def scan(self, data, end):
        """Look through output that ends at a position."""
        data = self.rest + data
        self.rest = b""
        at = data.find(b"\x1b", -20)
        while at >= 0 and not data[at + 3 :].strip(b"0123456789;"):
            self.rest = data[at:]  # it may go on with the next output
            break
        for part in data.split(b"\x1b[?")[1:]:
            numbers = part[:20].lstrip(b"0123456789;")
            if numbers[:1] in (b"h", b"l"):
                for number in part[: len(part[:20]) - len(numbers)].split(b";"):
                    self.modes.pop(number, None)
                    self.modes[number] = end, numbers[:1]

    def before(self, position):
        """What brings a terminal to the modes that were set before a position."""
        return b"".join(b"\x1b[?" + number + what for number, (end, what) in self.modes.items()
                        if end <= position)


class Client:
    def __init__(self, waiter, stdin, stdout, size, position):
        self.waiter, self.stdin, self.stdout, self.size = waiter, stdin, stdout, size
        self.sent = position
        self.received = bytearray()
        self.pending = b""  # of a frame that was not taken whole
        self.progress = time.monotonic()
        self.gone = self.told = False
        for fd in (stdin, stdout):
            os.set_blocking(fd, False)

    def send(self, *parts):
        if self.pending:
            self.pending += b"".join(parts)
            return
        try:
            taken = os.writev(self.stdout, parts)
            self.progress = time.monotonic()
        except BlockingIOError:
            taken = 0
        except OSError:
            taken, self.gone = 0, True
        if taken < sum(map(len, parts)):
            self.pending = b"".join(parts)[taken:]

    def push(self):
        rest, self.pending = self.pending, b""
        if rest:
            self.send(rest)

    def frames(self):
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
            kind, data = self.received[:1], bytes(self.received[5 : 5 + size])
            del self.received[: 5 + size]
            yield kind, data

    def close(self, status):
        for fd in (self.stdin, self.stdout):
            os.close(fd)
        try:
            self.waiter.send(b"%d\n" % status)
        except OSError:
            pass
        self.waiter.close()


class Holder:
    def __init__(self, folder, listener, size, argv):
        self.folder, self.listener, self.size = folder, listener, size
        self.ring, self.modes = Ring(folder + "/output"), Modes()
        self.clients, self.owner, self.input = [], None, bytearray()
        self.status = None
        self.pid, self.master = os.forkpty()
        if not self.pid:
            start_program(size, argv)
        os.set_blocking(self.master, False)
        os.set_inheritable(self.master, False)

    def run(self):
        while self.status is None or self.clients:
            self.step()
        os.unlink(self.folder + "/socket")

    def step(self):
        poller = select.poll()
        poller.register(self.listener, select.POLLIN)
        if self.master >= 0:
            mask = (select.POLLIN if self.may_read() else 0) | (select.POLLOUT if self.input else 0)
            if mask:  # or its hang-up would make this loop spin
                poller.register(self.master, mask)
        by_fd = {}
        for client in self.clients:
            by_fd[client.stdin] = by_fd[client.stdout] = client
            full = len(self.input) > INPUT_BYTES
            poller.register(client.stdin, 0 if full else select.POLLIN)
            poller.register(client.stdout, select.POLLOUT if client.pending else 0)
        for fd, happened in poller.poll(self.timeout_ms()):
            if fd == self.master:
                if happened & select.POLLOUT:
                    self.write_input()
                if happened & ~select.POLLOUT:
                    self.read_output()
            elif fd == self.listener.fileno():
                self.welcome()
            elif fd == by_fd[fd].stdin:
                self.obey(by_fd[fd])
            elif happened & select.POLLERR:
                by_fd[fd].gone = True
            else:
                by_fd[fd].push()
                self.flush(by_fd[fd])
        if self.master < 0 and self.status is None:
            self.reap()
        self.look_after_clients()

    def may_read(self):
        """Whether the program may go on: who typed last has taken all, or nothing for long."""
        owner = self.owner
        return (owner is None or owner.sent == self.ring.end and not owner.pending
                or time.monotonic() - owner.progress > STALL_SECONDS)

    def timeout_ms(self):
        if self.status is None and self.master < 0:
            return 20  # the program has closed its terminal and has not ended
        return None if all(client.sent == self.ring.end for client in self.clients) else 1000

    def read_output(self):
        size = 0
        try:
            while size < PIECE_BYTES:
                data = self.ring.take(self.master)
                if not data:
                    break
                size += len(data)
                self.modes.scan(bytes(data), self.ring.end)
        except BlockingIOError:
            pass
        except OSError:  # EIO: nobody has the other end open any more
            os.close(self.master)
            self.master = -1
        for client in self.clients:
            self.flush(client)

    def reap(self):
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        with open(self.folder + "/status.new", "w") as file:
            file.write("%d %.3f\n" % (code, time.time()))
        os.rename(self.folder + "/status.new", self.folder + "/status")
        self.status = code

    def write_input(self):
        try:
            del self.input[: os.write(self.master, self.input)]
        except BlockingIOError:
            pass
        except OSError:
            self.input.clear()

    # Clients.

    def welcome(self):
        fd, _ = self.listener._accept()
        waiter = socket(fileno=fd)
        waiter.settimeout(1)
        try:
            data, rights, _, _ = waiter.recvmsg(200, 200)
            if not rights:
                waiter.send(words(len(self.clients), *self.size))
                waiter.close()
                return
            rows, columns, position = map(int, data.split())
            fds = [int.from_bytes(rights[0][2][at : at + 4], sys.byteorder) for at in (0, 4)]
        except (OSError, ValueError):
            waiter.close()
            return
        client = Client(waiter, *fds, (rows, columns), position)
        self.clients.append(client)
        if not self.ring.start <= position <= self.ring.end:
            client.sent = self.ring.start
        self.greet(client)
        if rows:
            self.own(client)
        self.flush(client)

    def greet(self, client):
        client.send(frame(b"h", words(client.sent, *self.size)))
        modes = self.modes.before(client.sent) if client.sent == self.ring.start else b""
        if modes:
            client.send(frame(b"m", modes))

    def own(self, client):
        """Give the size to a client."""
        self.owner = client
        if client.size == self.size:
            return
        self.size = client.size
        if self.master >= 0:
            set_size(self.master, self.size)
        for other in self.clients:
            other.send(frame(b"s", words(*self.size)))

    def obey(self, client):
        for kind, data in client.frames():
            if kind == b"i":
                if client is not self.owner and client.size[0]:
                    self.own(client)
                if self.master >= 0:
                    self.input += data
            elif kind == b"r":
                try:
                    rows, columns = (min(max(int(word), 1), 1000) for word in data.split())
                except ValueError:
                    client.gone = True
                    return
                client.size = rows, columns
                if self.owner in (client, None):
                    self.own(client)
        if self.input:
            self.write_input()

    def flush(self, client):
        """Send what a client lacks, as far as it takes it."""
        while client.sent < self.ring.end and not client.pending and not client.gone:
            if client.sent < self.ring.start:
                client.sent = self.ring.start
                self.greet(client)
                continue
            data = self.ring.piece(client.sent)
            client.sent += len(data)
            client.send(b"o" + len(data).to_bytes(4, "big"), data)

    def look_after_clients(self):
        """Tell the end, and part from those that are gone."""
        for client in list(self.clients):
            if self.status is not None and client.sent == self.ring.end and not client.told:
                client.told = True
                client.send(frame(b"e", words(self.status)))
            if not client.gone and (not client.told or client.pending):
                continue
            self.clients.remove(client)
            client.close(0 if self.status is None else self.status)
            if client is self.owner:
                self.owner = None
                for other in reversed(self.clients):
                    if other.size[0]:
                        self.own(other)
                        break


def set_size(fd, size):
    cells = b"".join(number.to_bytes(2, sys.byteorder) for number in (*size, 0, 0))
    fcntl.ioctl(fd, termios.TIOCSWINSZ, cells)


def start_program(size, argv):
    """Become the program; this process has the terminal already."""
    set_size(0, size)
    signal(SIGPIPE, SIG_DFL)  # Python ignores it
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, os.fsencode("sandbox: %s: %s\n" % (argv[0], error.strerror)))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def start(id, rows, columns, title, *argv):
    """Leave a holder behind, and be its first client."""
    folder = FOLDER + "/" + id
    os.makedirs(FOLDER, 0o700, exist_ok=True)
    forget_ended()
    os.mkdir(folder, 0o700)
    with open(folder + "/info", "w", errors="surrogateescape") as file:
        file.write("%.3f %s" % (time.time(), title))
    listener = socket(AF_UNIX, SOCK_STREAM)
    listener.bind(folder + "/socket")
    listener.listen(16)
    if not os.fork():
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.environ["SANDBOX_EXEC"] = id  # the holder itself is not to have the mark of the program
        try:
            Holder(folder, listener, (int(rows) or 24, int(columns) or 80), argv).run()
        finally:
            os._exit(0)
    listener.close()
    if int(rows):
        attach(id, rows, columns, "0")


def attach(id, rows, columns, position):
    """Give stdin and stdout to the holder, and end with the status that it tells."""
    folder = FOLDER + "/" + id
    holder = socket(AF_UNIX, SOCK_STREAM)
    try:
        holder.connect(folder + "/socket")
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1))
        holder.sendmsg([words(rows, columns, position)], [(SOL_SOCKET, SCM_RIGHTS, rights)])
    except OSError:
        show_kept(folder, int(position))
    os.dup2(holder.fileno(), 0)
    # The shell takes less memory, for as long as the client is there.
    os.execvp("sh", ["sh", "-c", "read -r status; exit ${status:-125}"])


def show_kept(folder, position):
    """Show what is left of a terminal whose holder has ended."""
    try:
        with open(folder + "/output", "rb") as file:
            data = file.read()
    except OSError:
        write_all(frame(b"n", b"there is no such terminal"))
        sys.exit(125)
    status, _ = status_of(folder)
    end, ring = int.from_bytes(data[:8], "little"), data[8:]
    start = max(0, end - RING_BYTES)
    position = position if start <= position <= end else start
    write_all(frame(b"h", words(position, 0, 0)))
    while position < end:
        at = position % RING_BYTES
        piece = ring[at : at + end - position]
        write_all(frame(b"o", piece))
        position += len(piece)
    write_all(frame(b"e", words(status).replace(b"-", b"")))
    sys.exit(125 if status == "-" else int(status))


def write_all(data):
    while data:
        data = data[os.write(1, data) :]


def status_of(folder):
    """The status and when the program ended; two times "-" where neither is known."""
    try:
        with open(folder + "/status") as file:
            status, ended = file.read().split()
        return status, ended
    except OSError:
        return "-", "-"


def ask(folder):
    """Clients, rows and columns, as a holder says; None where there is none."""
    holder = socket(AF_UNIX, SOCK_STREAM)
    holder.settimeout(1)
    try:
        holder.connect(folder + "/socket")
        holder.send(b"?")
        return holder.recv(100).decode()
    except OSError:
        return None
    finally:
        holder.close()


def folders():
    """Of all terminals, the oldest first."""
    try:
        return sorted((entry.path for entry in os.scandir(FOLDER)),
                      key=lambda path: os.stat(path).st_ctime)
    except FileNotFoundError:
        return []


def show_list():
    for folder in folders():
        status, ended = status_of(folder)
        now = "- - -" if status != "-" else ask(folder) or "lost - -"
        with open(folder + "/info", errors="surrogateescape") as file:
            started, _, title = file.read().partition(" ")
        line = " ".join((os.path.basename(folder), started, ended, status, now, title))
        sys.stdout.write("".join(c if c.isprintable() else "?" for c in line) + "\n")


def forget_ended():
    ended = [folder for folder in folders() if os.path.exists(folder + "/status")]
    for folder in ended[:-KEPT]:
        for name in os.listdir(folder):
            os.unlink(folder + "/" + name)
        os.rmdir(folder)


def main(what, *args):
    {"start": start, "attach": attach, "list": show_list}[what](*args)


if __name__ == "__main__":
    main(*sys.argv[1:])
