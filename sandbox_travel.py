"""The workspace travels: to a host that does not see this machine's files, and back by a merge.

Such a host has a mirror of the directory, in a volume that no session sees. Before a copy is filled
from it, and before a merge, which is reckoned there, static/session/receive.py makes it what the
directory is by then: only what has changed is sent. What comes back may be a lie: it is written by
the Restore of static/image/shadow.py, over nothing but what this machine has seen just before.

Imported only where a copy on such a host is made, merged or removed.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import io
import json
import os
import select
import stat
import time
import types
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sandbox
import sandbox_changes
from sandbox import (
    CALL_SECONDS,
    LONG_SECONDS,
    MIRROR_VOLUME,
    Engine,
    Output,
    SandboxError,
    Session,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

MIRROR_DIRECTORY = "/run/sandbox-mirror"
NO_ROOM_STATUS = 94
CHUNK_BYTES, WORDS_BYTES, FILE_BYTES, COMING_BYTES = 1 << 20, 256 << 20, 16 << 20, 4 << 30
DEPTH = 200
IDLE_SECONDS = 600  # for the next word of a host, as receive.py waits for ours
ERROR_BYTES, LOOK_MS = 16 << 20, 500  # of what a host says on stderr, and how often that is seen
RACY_NS = 2_000_000_000  # some file systems keep times of two seconds
READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CIPHER = "aes128-gcm@openssh.com"
START = f"""command -v python3 >/dev/null || exit {sandbox_changes.LACKING_STATUS}
exec python3 -I -S -c "$0" "$@\""""


def mirror_of(session: Session) -> str:
    """The volume with the mirror of a session's directory: that of all sessions there."""
    return our_mirrors() + hashed(sandbox.source_of(session.created()[0]))


def our_mirrors() -> str:
    """How the names of this client's mirrors begin; others have theirs on the same host."""
    return MIRROR_VOLUME + hashed(f"{os.uname().nodename}\0{os.getuid()}")


def hashed(text: str) -> str:
    import hashlib

    return hashlib.sha256(os.fsencode(text)).hexdigest()[:10]


def mirrors(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Those of the sessions among these containers."""
    found = set[str]()
    for container in rows:
        with suppress(SandboxError):
            found.add(mirror_of(Session(container["name"], "", container["labels"])))
    return found


def drop_mirror(engine: Engine, session: Session) -> None:
    """Remove it, unless another session has the same directory."""
    mirror, (_, rows) = mirror_of(session), sandbox.list_containers([engine])
    if mirror not in mirrors(rows):
        sandbox.remove_volumes(engine, mirror)


class Seen:
    """What a directory of this machine holds, by path, and what of it cannot be sent."""

    def __init__(self, name: str, directory: str) -> None:
        """`name` is that of its mirror. Raises SandboxError."""
        self.name, self.stats, self.lacking = name, dict[str, os.stat_result](), list[str]()
        self.sent_bytes = 0
        try:
            self.root = os.open(directory, READING | os.O_DIRECTORY)
        except OSError as error:
            raise sandbox.FileError(directory, error) from None

    def send(self, had: dict[str, str], write: Callable[[bytes], object]) -> None:
        """Send what the mirror has not `had` so, from where that is taken. Raises BrokenPipeError.
        """
        self.had, self.write, self.began = had, write, time.time_ns()
        self.give(self.root, ".", "", os.fstat(self.root))
        self.look(self.root, "", 0)

    def look(self, fd: int, folder: str, depth: int) -> None:
        with os.scandir(fd) as entries:
            for entry in entries:
                path = f"{folder}{entry.name}"
                try:
                    st = entry.stat(follow_symlinks=False)
                    if kind_of(st) != "d":
                        self.give(fd, entry.name, path, st)
                        continue
                    if depth == DEPTH:
                        raise OSError(0, "it lies too deep")
                    inner = os.open(entry.name, READING | os.O_DIRECTORY, dir_fd=fd)
                except BrokenPipeError:
                    raise
                except OSError as error:  # what the mirror has of it goes
                    self.lacking.append(f"{path}: {error.strerror}")
                    if self.stats.pop(path, None):
                        self.write(row("-", f"{self.name}/{path}"))
                    continue
                try:
                    self.give(fd, entry.name, path, st)
                    self.look(inner, f"{path}/", depth + 1)
                finally:
                    os.close(inner)

    def give(self, fd: int, name: str, path: str, st: os.stat_result) -> None:
        """Send a path, unless the mirror has it so. Raises OSError where that is not whole."""
        kind = kind_of(st)
        if not kind:
            raise OSError(0, "it is no file")
        whole = f"{self.name}/{path}" if path else self.name
        self.stats[path], had = st, self.had.pop(whole, None)
        if had and had == self.word(st):
            return
        if had is not None and (had or "d")[0] != kind:
            self.write(row("-", whole))
            for gone in [other for other in self.had if other.startswith(f"{whole}/")]:
                del self.had[gone]  # with it: by its path it would be sought behind a link
        if kind != "f":
            more = [os.readlink(name, dir_fd=fd)] if kind == "l" else []
            self.write(row(kind, whole, self.word(st), *about(st), *more))
            return
        file = os.open(name, READING, dir_fd=fd)
        try:
            self.stats[path] = st = os.fstat(file)
            if kind_of(st) != "f":
                raise OSError(0, "it is no file any more")
            self.write(row(kind, whole, self.word(st), *about(st)))
            self.give_content(file, st)
            if key_of(os.fstat(file)) != key_of(st):
                self.write(row("?", whole))
        finally:
            os.close(file)

    def give_content(self, file: int, st: os.stat_result) -> None:
        """The content without its holes, and the size."""
        at, data, failed = 0, b"-", None
        while data:
            try:
                if st.st_blocks * 512 < st.st_size:
                    at = os.lseek(file, at, os.SEEK_DATA)
                data = os.pread(file, min(CHUNK_BYTES, max(0, st.st_size - at)), at)
            except OSError as error:
                at, data = max(at, st.st_size), b""
                failed = error if error.errno != errno.ENXIO else None  # no more comes but a hole
            self.write(at.to_bytes(8, "big") + len(data).to_bytes(8, "big"))
            self.write(data)
            at += len(data)
            self.sent_bytes += len(data)
        if failed:
            raise failed

    def word(self, st: os.stat_result) -> str:
        """What tells an unchanged one; "" where that cannot be told yet."""
        if kind_of(st) == "d":
            return f"d {st.st_mode:o} {st.st_mtime_ns}"
        racy = max(st.st_mtime_ns, st.st_ctime_ns) > self.began - RACY_NS
        return "" if racy else " ".join([kind_of(st), *map(str, key_of(st))])


def kind_of(st: os.stat_result) -> str:
    kinds = {stat.S_IFDIR: "d", stat.S_IFLNK: "l", stat.S_IFREG: "f"}
    return kinds.get(stat.S_IFMT(st.st_mode), "")


def key_of(st: os.stat_result) -> tuple[int, ...]:
    return st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino


def about(st: os.stat_result) -> tuple[int, int]:
    return stat.S_IMODE(st.st_mode), st.st_mtime_ns


def row(*values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


def near(engine: Engine, argv: Sequence[str]) -> list[str]:
    """The same call, by the client that its host has: the one here makes a connection for each
    request, and what is sent would go through one process more on either side.
    """
    client = engine.client_there()
    if not client:
        return [*argv]
    words = engine.ssh_words()
    there = f"exec {sandbox.quote_all([*client, *argv[len(engine.client):]])}"
    text = base64.b64encode(os.fsencode(there)).decode()  # no login shell reads that otherwise
    return ["ssh", "-T", "-o", "ConnectTimeout=30", *first_cipher(words), *words,
            f"sh -c 'eval \"$(echo {text} | base64 -d)\"'"]


def first_cipher(words: Sequence[str]) -> list[str]:
    """Of the ciphers that ssh may use the one first for which processors have instructions."""
    with suppress(SandboxError, OSError):
        for line in Output(["ssh", "-G", *words]).result()[1].splitlines():
            name, _, ciphers = line.partition(" ")
            if name == "ciphers" and CIPHER in ciphers.split(","):
                return ["-o", f"Ciphers={CIPHER},{ciphers}"]
    return []


class End(io.FileIO):
    """An end of a pipe to a host, on which `wait` waits: it may be silent for ever."""

    def __init__(self, fd: int, mode: str, wait: Callable[[int, int], None]) -> None:
        super().__init__(fd, mode)
        os.set_blocking(fd, False)
        with suppress(AttributeError, OSError):  # who reads and who writes wait less often
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        self.wait = wait

    def readinto(self, buffer: Any) -> int:
        while (count := super().readinto(buffer)) is None:
            self.wait(self.fileno(), select.POLLIN)
        return count

    def write(self, data: Any) -> int:
        while (count := super().write(data)) is None:
            self.wait(self.fileno(), select.POLLOUT)
        return count


class Helper:
    """A container on a host that makes the mirror of a session's directory what that is now, and
    then is a command with the stdin `given`, whose output is read from `back`.
    """

    def __init__(self, engine: Engine, session: Session, words: Sequence[str],
                 binds: Sequence[tuple[str, str, str]] = (), given: bytes = b"") -> None:
        spec, _ = session.created()
        self.engine, self.session, self.given = engine, session, given
        self.directory, self.mirror = sandbox.source_of(spec), mirror_of(session)
        self.trees = [Seen("from", self.directory)]
        if admin := sandbox.linked_admin(self.directory)[1]:
            self.trees.append(Seen("git", os.path.dirname(os.path.dirname(admin))))
        self.name = f"{self.mirror}-{sandbox.random_id()}"
        argv = engine.closed_argv(
            self.name, spec["image"],
            ["sh", "-c", START, sandbox_changes.PROGRAM, MIRROR_DIRECTORY,
             *session.user.split(":"), *words],
            labels={"sandbox.shadow": session.store}, limits=sandbox_changes.LIMITS,
            capabilities=sandbox_changes.WRITING,
            binds=[(self.mirror, MIRROR_DIRECTORY, ""), *binds])
        self.step = sandbox.Step(f"send {self.directory} to {engine.host}")
        self.step.began = time.monotonic()
        self.errors = sandbox.file_of(b"")  # a pipe could fill up
        (stdin, given_end), (back, stdout) = os.pipe(), os.pipe()
        self.pid = sandbox.spawn(near(engine, argv), fds={0: stdin, 1: stdout, 2: self.errors})
        Output.close(stdin, stdout)
        self.lost = ""  # why no more is awaited of it
        self.begun = False  # whether its program has answered
        self.to = io.BufferedWriter(End(given_end, "wb", self.wait), CHUNK_BYTES)
        self.back = io.BufferedReader(End(back, "rb", self.wait))

    def __enter__(self) -> Helper:
        try:
            self.send()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.step.wipe()
        if kind:  # the end of the engine's client does not end its container
            self.ended(0)
            with suppress(SandboxError):
                Output(self.engine.argv("remove", self.name), CALL_SECONDS).result()
        for tree in self.trees:
            os.close(tree.root)
        Output.close(self.errors)
        self.back.close()

    def ended(self, seconds: float = CALL_SECONDS) -> int:
        """Its status; it is killed where it does not end so soon."""
        if self.pid and not seconds:  # what is still to be sent would wait for it
            os.kill(self.pid, 9)
        with suppress(OSError, SandboxError):  # what was to be sent is lost
            self.to.close()
        until = time.monotonic() + seconds
        while self.pid:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid, self.status = 0, sandbox.exit_status(status)
            elif time.monotonic() > until:
                os.kill(self.pid, 9)
            else:
                time.sleep(0.005)
        return self.status

    def wait(self, fd: int, event: int) -> None:
        """Until it can be read or written. Raises SandboxError where that takes too long, or too
        much has come on stderr, and from then on.
        """
        poller, until = select.poll(), time.monotonic() + IDLE_SECONDS
        poller.register(fd, event)
        while not self.lost:
            if os.fstat(self.errors).st_size > ERROR_BYTES:
                self.lost = "it prints too much"
            elif poller.poll(LOOK_MS):
                return
            elif time.monotonic() > until:
                self.lost = f"it did nothing for {IDLE_SECONDS} seconds"
        raise self.not_all(self.lost)

    def not_all(self, why: str) -> SandboxError:
        self.session.new_mirror = ""
        what = "has not all come from" if self.given else "is not all on"
        return SandboxError(f"{self.directory} {what} {self.engine.host}: {why}",
                            "start it again: what has arrived is not sent again", 125)

    def send(self) -> None:
        """Raises SandboxError."""
        program = zlib.compress(sandbox.asset("session/receive.py"), 9)
        try:
            self.to.write(b"%d\n%s" % (len(program), program))
            self.to.flush()
            had, self.begun = self.had(), True
            is_new = not had
            for tree in self.trees:
                tree.send(had, self.write)
            for whole in sorted(had, reverse=True):
                self.to.write(row("-", whole))
            self.to.write(row("end") + self.given)
            self.to.close()
        except BrokenPipeError:
            raise self.failure() from None
        if is_new:  # what was cut off goes on, and so stays
            self.session.new_mirror = self.mirror
        if any(tree.sent_bytes for tree in self.trees) and time.monotonic() - self.step.began > 1:
            sandbox.say(f"{self.step.head}  {self.step.elapsed()}")
        for line in [line for tree in self.trees for line in tree.lacking][:5]:
            sandbox.say(f"not copied: {line}")

    def write(self, data: bytes) -> None:
        self.to.write(data)
        if self.step.live and len(data) > 99:
            self.step.note(f"{sum(tree.sent_bytes for tree in self.trees) / 1e6:,.1f} MB sent")
            self.step.draw()

    def had(self) -> dict[str, str]:
        """What the mirror has: of each path the word that was sent with it."""
        try:
            size = min(max(0, int(self.back.readline(20))), WORDS_BYTES)
            words = zlib.decompressobj().decompress(self.back.read(size), WORDS_BYTES)
            return {path: str(word) for path, word in sandbox.parse_json(words).items()}
        except (ValueError, AttributeError, zlib.error):
            raise self.failure() from None

    def output(self) -> bytes:
        """What the command has printed. Raises SandboxError where it has failed."""
        self.step.note("all is there: the copy is being filled")
        self.step.draw()
        out = self.back.read(sandbox_changes.ANSWER_BYTES)
        if self.ended():
            raise self.failure(out)
        return out

    def failure(self, out: bytes = b"") -> SandboxError:
        """Why it has ended."""
        status = self.ended()
        err = (os.pread(self.errors, 1 << 16, 0) + out).decode(errors="replace")
        if status == NO_ROOM_STATUS or "No space left on device" in err:
            sandbox.remove_volumes(self.engine, self.mirror)
            return SandboxError(f"there is no room for {self.directory} on {self.engine.host}",
                                self.engine.hints["no space left"], 125)
        if status == sandbox_changes.LACKING_STATUS:
            with suppress(SandboxError):  # `prune` knows it, too
                drop_mirror(self.engine, self.session)
            return SandboxError(f"{self.session.created()[0]['image']} has no python3",
                                "a copy needs it: sandbox build", 125)
        if status in (125, 126, 127, 255) and err.strip() and not self.begun:
            return self.engine.failure(err)
        return self.not_all(sandbox.one_line(err.strip())[-500:]
                            or f"it ended with status {status}")


def fill_copy(engine: Engine, session: Session) -> None:
    """Fill the copy of a new session. Raises SandboxError."""
    admin = sandbox.linked_admin(sandbox.source_of(session.created()[0]))[1]
    script = (sandbox.asset("session/mounts.sh") + sandbox.asset("session/copy.sh")).decode()
    words = ["env", *(f"{name}={MIRROR_DIRECTORY}/{name.lower()}" for name in ("FROM", "GIT")),
             "sh", "-c", script, "sandbox", os.path.basename(admin)]
    with Helper(engine, session, words,
                [(session.copy, sandbox_changes.WORK_DIRECTORY, "")]) as helper:
        out = helper.output()
    for line in out.decode(errors="replace").split("\n"):
        if line.startswith("not copied: "):
            sandbox.say(sandbox.one_line(line))


SENT_BYTES = 1 << 20
PUT = """until [ -e /run/sandbox-ready ]; do sleep 0.05; done
umask 022
folder=$(dirname "$1")
[ -d "$folder" ] || { mkdir -p "$folder" && chown "$2" "$folder"; } || exit 1
umask 077
cat >"$1.$$" && chown "$2" "$1.$$" && mv -f "$1.$$" "$1\""""


def send_files(engine: Engine, session: Session, spec: Mapping[str, Any]) -> None:
    """Put what is in files of this machine into a session's container, for none but its user to
    read. Raises SandboxError.
    """
    for source, target, *_ in (volume.split(":") for volume in spec["sent"]):
        try:
            with open(os.open(source, READING), "rb") as file:
                data = file.read(SENT_BYTES + 1)
        except OSError as error:
            raise sandbox.FileError(source, error) from None
        if len(data) > SENT_BYTES:
            raise SandboxError(f"{source} is too large to be sent to {engine.host}",
                               "put it into the directory, or mount a path of the host", 125)
        argv = engine.exec_argv(session.id, ["sh", "-c", PUT, "sandbox", target, session.user],
                                user="0:0", stdin=True)
        status, _, err = Output(argv, LONG_SECONDS, stdin=data).result(1 << 16)
        if status:
            raise SandboxError(f"{source} could not be put at {target} on {engine.host}: "
                               f"{sandbox.one_line(err.strip())[-300:]}", "choose another place",
                               125)


# --- Merging ---


def ask_mirror(engine: Engine, session: Session, request: Mapping[str, Any],
               ) -> tuple[dict[str, Any], dict[str, str]]:
    """What a shadow answers to a merge into the mirror of a session's directory; with "send" the
    content goes into the directory, and the second is what has not come, and why.
    """
    program = zlib.compress(sandbox.asset("image/shadow.py"), 9)
    place = sandbox.source_of(session.created()[0])
    text = sandbox.to_json({**request, "tree": "origin", "directory": place}).encode()
    words = ["python3", "-I", "-S", "-c", sandbox_changes.PROGRAM, "merge",
             sandbox_changes.STORE_DIRECTORY, f"{MIRROR_DIRECTORY}/from", "-"]
    with Helper(engine, session, words, [(session.store, sandbox_changes.STORE_DIRECTORY, "")],
                b"%d\n%s%s" % (len(program), program, text)) as helper:
        try:
            answer = sandbox.parse_json(helper.back.readline(sandbox_changes.ANSWER_BYTES))
        except ValueError:
            raise helper.failure() from None
        if not isinstance(answer, dict) or "error" in answer:
            helper.ended()
            raise sandbox_changes.Refused(answer if isinstance(answer, dict) else {})
        left = Bring(helper).bring(answer) if request.get("send") else {}
        helper.ended()
    return answer, left


def merge(engine: Engine, session: Session, about: Mapping[str, Any], dry: bool) -> dict[str, Any]:
    """What a shadow answers to merge, for a directory that its host does not see. Raises
    SandboxError.
    """
    answer, left = ask_mirror(engine, session, {**about, "dry": True, "send": not dry})
    if not dry:  # what has come is noted only now that it is here
        ask_mirror(engine, session, {**about, "dry": False, "elsewhere": True,
                                     "lost": sorted(left)})
    changed = [item for item in sandbox_changes.rows_of(answer, "changed", {"path": str})
               if item["path"]]  # see Bring.bring()
    rows = sandbox_changes.rows_of(answer, "left", {"path": str})
    return {**answer, "dry": dry,
            "changed": [item for item in changed if item["path"] not in left],
            "left": [*rows, *({"path": path, "why": why, "conflict": True}
                              for path, why in left.items())]}


class Bring:
    """Writes what a host has sent into the directory that a helper has seen, by the Restore of
    shadow.py, for which this is its walk and its store.
    """

    def __init__(self, helper: Helper) -> None:
        from importlib.abc import InspectLoader

        self.helper, self.seen = helper, helper.trees[0]
        self.root, self.store, self.state = self.seen.root, self, dict[str, str]()
        self.note = sandbox.kept_path("merging", helper.session.name)
        ours = sandbox.read_small(self.note) or "/"  # what a killed merge has left begins so
        self.leftovers = [os.path.split(path) for path in self.seen.stats
                          if os.path.basename(path).startswith(ours)]
        self.folders = {path for path, st in self.seen.stats.items() if stat.S_ISDIR(st.st_mode)}
        self.shadow: Any = types.ModuleType("shadow")
        exec(InspectLoader.source_to_code(sandbox.asset("image/shadow.py")), self.shadow.__dict__)
        self.places = dict[str, tuple[int, int]]()

    def bring(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """Returns what it has left as it is, and why. Raises SandboxError."""
        import tempfile

        rows = sandbox_changes.rows_of(answer, "changed", {"path": str, "kind": str, "mode": int,
                                                           "size": int})
        restore = self.shadow.Restore(self)
        with tempfile.TemporaryFile() as self.content:
            changes = []
            for item in rows:
                self.receive(item)
                new = self.shadow.Entry(item["kind"], item["mode"] & 0o7777, item["path"])
                if not item["path"]:
                    continue  # the mode of the directory itself is the person's
                if problem := self.problem(item["path"], item["kind"]):
                    restore.left[item["path"]] = problem
                elif item["kind"] in ("", "file", "link", "dir"):
                    changes.append((item["path"], self.entry(item["path"]),
                                    new if item["kind"] else None))
            restore.changes = {path: (old, new) for path, old, new in changes
                               if path not in restore.left}
            try:
                restore.apply()
            except self.shadow.Failure as error:
                raise SandboxError(str(error), error.hint) from None
            with suppress(OSError):
                os.unlink(self.note)
        left: dict[str, str] = restore.left
        return left

    def receive(self, item: Mapping[str, Any]) -> None:
        size = item["size"] if item["kind"] in ("file", "link") else 0
        if not 0 <= size <= FILE_BYTES:
            raise too_much(self.helper.engine)
        data = self.helper.back.read(size)
        if len(data) < size:
            raise self.helper.failure()
        self.places[item["path"]] = self.content.tell(), size
        self.content.write(data)
        self.content.flush()  # get() reads the file itself
        self.helper.step.note(f"{self.content.tell() / 1e6:,.1f} MB received")
        self.helper.step.draw()
        if self.content.tell() > COMING_BYTES:
            raise too_much(self.helper.engine)

    def problem(self, path: str, kind: str) -> str:
        """Why nothing of this kind is written there."""
        parts = path.split("/")
        try:
            os.fsencode(path)
        except UnicodeError:
            parts = [""]
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in path or len(path) > 4096:
            return "it is no path in the directory"
        if kind == "link" and not self.can_be_target(self.get(path)):
            return "it is a link that cannot be"
        return "what is git's own does not leave a copy" if self.shadow.in_git(path) else ""

    def can_be_target(self, target: bytes) -> bool:
        return b"\0" not in target and 0 < len(target) < os.fpathconf(self.root, "PC_PATH_MAX")

    def entry(self, path: str) -> Any:
        if path not in self.seen.stats:
            return None
        kinds = {"d": "dir", "l": "link", "f": "file"}
        return self.shadow.Entry(kinds[kind_of(self.seen.stats[path])], 0, "")

    # what Restore asks for

    def key(self, path: str) -> Any:
        st = self.seen.stats.get(path)
        if st is None or stat.S_ISDIR(st.st_mode):
            return st and ""
        return self.shadow.row_of(os.path.basename(path), st)

    def get(self, path: str) -> bytes:
        start, size = self.places[path]
        return os.pread(self.content.fileno(), size, start)

    def save(self) -> None:
        sandbox.write_private(self.note, self.state["temporary"])


def too_much(engine: Engine) -> SandboxError:
    return SandboxError(f"{engine.host} sends more than a merge may bring",
                        "look at it there: sandbox diff")


# --- Commits ---


def mirrored_git(session: Session) -> tuple[str, list[tuple[str, str, str]]]:
    """Where the mirror has the person's repository, and what is mounted for commits.sh."""
    admin = sandbox.linked_admin(sandbox.source_of(session.created()[0]))[1]
    return (f"{MIRROR_DIRECTORY}/{'git' if admin else 'from/.git'}",
            [(session.copy, sandbox_changes.WORK_DIRECTORY, "ro"),
             (mirror_of(session), MIRROR_DIRECTORY, "ro")])


def fetch_commits(argv: Sequence[str], common: str, branch: str) -> tuple[int, str]:
    """Fetch the bundle that a call prints into a repository; the status and what git has said."""
    import tempfile

    script = sandbox.asset("session/commits.sh").decode()
    with tempfile.TemporaryDirectory() as folder:
        (end, out), null, err = os.pipe(), os.open(os.devnull, os.O_RDONLY), sandbox.file_of(b"")
        env = {"PATH": os.environ.get("PATH", os.defpath), "FOLDER": folder}
        pids = [sandbox.spawn(argv, fds={0: null, 1: out, 2: err}),
                sandbox.spawn(["sh", "-c", script, "sandbox", branch, "3", common], env=env,
                              fds={0: end, 1: 2, 2: err})]
        Output.close(end, out, null)
        printed, problem = wait_for_bundle(pids[0], f"{folder}/bundle", err)
        fetched = sandbox.wait_for(pids[1])
    text = os.pread(err, 1 << 16, 0).decode(errors="replace")
    os.close(err)
    return (125, problem) if problem else (printed or fetched, text)


def wait_for_bundle(pid: int, bundle: str, errors: int) -> tuple[int, str]:
    """Wait for the process that prints a bundle: its status, and why it was killed."""
    problem, size, until = "", -1, time.monotonic() + IDLE_SECONDS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        with suppress(OSError):
            if (now := os.stat(bundle).st_size) != size:
                size, until = now, time.monotonic() + IDLE_SECONDS
        if os.fstat(errors).st_size > ERROR_BYTES:
            problem = "the host prints too much"
        elif time.monotonic() > until:
            problem = f"the host did nothing for {IDLE_SECONDS} seconds"
        if problem:
            os.kill(pid, 9)
            return sandbox.wait_for(pid), problem
        time.sleep(0.02)
    return sandbox.exit_status(ended[1]), ""
