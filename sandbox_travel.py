"""The workspace travels: to a host that does not see this machine's files, and back by a merge.

Such a host has a mirror of the directory, in a volume that no session sees. Before a copy is filled
from it, and before a merge, which is reckoned there, static/session/receive.py makes it what the
directory is by then: only what has changed is sent. What comes back may be a lie: it is written by
the Restore of static/image/shadow.py, over nothing but what this machine has seen just before.

Imported only where a copy on such a host is made, merged or removed.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
import types
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sandbox
import sandbox_changes
from sandbox import LONG_SECONDS, Engine, Output, SandboxError, Session

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MIRROR_VOLUME, MIRROR_DIRECTORY = "sandbox-mirror-", "/run/sandbox-mirror"
NO_ROOM_STATUS = 94
CHUNK_BYTES, WORDS_BYTES, FILE_BYTES, COMING_BYTES = 1 << 20, 256 << 20, 16 << 20, 4 << 30
DEPTH = 200
RACY_NS = 2_000_000_000  # some file systems keep times of two seconds
READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
START = f"""command -v python3 >/dev/null || exit {sandbox_changes.LACKING_STATUS}
exec python3 -I -S -c "$0" "$@\""""


def mirror_of(session: Session) -> str:
    """The volume with the mirror of a session's directory: that of all sessions there."""
    import hashlib

    place = sandbox.source_of(session.created()[0])
    known = f"{os.uname().nodename}\0{os.getuid()}\0{place}"
    return MIRROR_VOLUME + hashlib.sha256(os.fsencode(known)).hexdigest()[:10]


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
    """What a directory of this machine holds, by path; `name` comes before each when it is sent.
    `lacking` says what cannot be sent.
    """

    def __init__(self, name: str, directory: str) -> None:
        self.name, self.stats = name, dict[str, os.stat_result]()
        self.lacking = list[str]()
        self.began = time.time_ns()
        try:
            self.root = os.open(directory, READING | os.O_DIRECTORY)
        except OSError as error:
            raise sandbox.FileError(directory, error) from None
        self.stats[""] = os.fstat(self.root)
        self.open, self.at = os.dup(self.root), ""  # the directory of the last path()
        self.look(self.root, "", 0)

    def look(self, fd: int, folder: str, depth: int) -> None:
        with os.scandir(fd) as entries:
            for entry in entries:
                path = f"{folder}{entry.name}"
                try:
                    st = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode):
                        self.stats[path] = st
                    elif not stat.S_ISDIR(st.st_mode):
                        self.lacking.append(f"{path}: it is no file")
                    elif depth == DEPTH:
                        self.lacking.append(f"{path}: it lies too deep")
                    else:
                        inner = os.open(entry.name, READING | os.O_DIRECTORY, dir_fd=fd)
                        try:
                            self.stats[path] = st
                            self.look(inner, f"{path}/", depth + 1)
                        finally:
                            os.close(inner)
                except OSError as error:
                    self.lacking.append(f"{path}: {error.strerror}")

    def word(self, path: str) -> str:
        """What tells an unchanged one; "" where that cannot be told yet."""
        st = self.stats[path]
        if stat.S_ISDIR(st.st_mode):
            return f"d {st.st_mode:o} {st.st_mtime_ns}"
        if max(st.st_mtime_ns, st.st_ctime_ns) > self.began - RACY_NS:
            return ""
        kind = "l" if stat.S_ISLNK(st.st_mode) else "f"
        return (f"{kind} {st.st_mode:o} {st.st_size} {st.st_mtime_ns} {st.st_ctime_ns} {st.st_ino}")

    def folder(self, path: str) -> int:
        """A descriptor of the directory that a path is in, no part of which is a link."""
        if self.at != (folder := os.path.dirname(path)):
            fd = os.dup(self.root)
            for part in folder.split("/") if folder else ():
                inner = os.open(part, READING | os.O_DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = inner
            os.close(self.open)
            self.open, self.at = fd, folder
        return self.open

    def rows(self, path: str) -> Iterator[bytes]:
        """What is sent of a path: see receive.py. Raises OSError before the first."""
        st, name, whole = self.stats[path], os.path.basename(path), self.whole(path)
        about = [whole, self.word(path), stat.S_IMODE(st.st_mode), st.st_mtime_ns]
        if stat.S_ISDIR(st.st_mode):
            yield row("d", *about)
        elif stat.S_ISLNK(st.st_mode):
            yield row("l", *about, os.readlink(name, dir_fd=self.folder(path)))
        else:
            fd = os.open(name, READING, dir_fd=self.folder(path))
            try:
                self.stats[path] = st = os.fstat(fd)
                if not stat.S_ISREG(st.st_mode):
                    raise OSError(0, "it is no file any more")
                yield row("f", whole, self.word(path), stat.S_IMODE(st.st_mode), st.st_mtime_ns)
                yield from chunks(fd, st)
                if key_of(os.fstat(fd)) != key_of(st):
                    yield row("?", whole)
            finally:
                os.close(fd)

    def whole(self, path: str) -> str:
        return f"{self.name}/{path}" if path else self.name


def key_of(st: os.stat_result) -> tuple[int, ...]:
    return st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino


def row(*values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


def chunks(fd: int, st: os.stat_result) -> Iterator[bytes]:
    """The content of a file without its holes, and its size."""
    at, sparse = 0, st.st_blocks * 512 < st.st_size
    while True:
        if sparse:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # no more of it
                at = max(at, st.st_size)
        if not (data := os.pread(fd, CHUNK_BYTES, at)):
            break
        yield at.to_bytes(8, "big") + len(data).to_bytes(8, "big")
        yield data
        at += len(data)
    yield at.to_bytes(8, "big") + bytes(8)


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
        self.pid = sandbox.spawn(argv, fds={0: stdin, 1: stdout, 2: self.errors})
        Output.close(stdin, stdout)
        self.to = os.fdopen(given_end, "wb", buffering=CHUNK_BYTES)
        self.back = os.fdopen(back, "rb")

    def __enter__(self) -> Helper:
        try:
            self.send()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.step.wipe()
        if kind and self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, 9)
            self.ended()
            # The end of the engine's client does not end its container.
            Output(self.engine.argv("remove", self.name), LONG_SECONDS).result()
        for tree in self.trees:
            Output.close(tree.root, tree.open)
        Output.close(self.errors)
        self.back.close()

    def ended(self) -> int:
        """Its status; where it has ended before the time, what was to be sent is lost."""
        with suppress(OSError):
            self.to.close()
        pid, self.pid = self.pid, 0
        return sandbox.wait_for(pid)

    def send(self) -> None:
        """Raises SandboxError."""
        program = zlib.compress(sandbox.asset("session/receive.py"), 9)
        try:
            self.to.write(b"%d\n%s" % (len(program), program))
            self.to.flush()
            have = self.had()
            wanted = {tree.whole(path): (tree, path) for tree in self.trees for path in tree.stats}
            for whole in sorted(have, reverse=True):
                if whole not in wanted or have[whole][:1] not in ("", kind_of(*wanted[whole])):
                    self.to.write(row("-", whole))
            new = [place for whole, place in wanted.items()
                   if not have.get(whole) or have[whole] != place[0].word(place[1])]
            self.send_all(new)
            self.to.write(row("end") + self.given)
            self.to.close()
        except BrokenPipeError:
            raise self.failure() from None
        if time.monotonic() - self.step.began > 1:
            sandbox.say(f"{self.step.head}  {self.step.elapsed()}")
        for line in [line for tree in self.trees for line in tree.lacking][:5]:
            sandbox.say(f"not copied: {line}")

    def had(self) -> dict[str, str]:
        """What the mirror has: of each path the word that was sent with it."""
        try:
            size = int(self.back.readline(20))
            words = zlib.decompressobj().decompress(self.back.read(size), WORDS_BYTES)
            return {path: str(word) for path, word in sandbox.parse_json(words).items()}
        except (ValueError, AttributeError, zlib.error):
            raise self.failure() from None

    def send_all(self, new: Sequence[tuple[Seen, str]]) -> None:
        whole = sum(tree.stats[path].st_size for tree, path in new)
        sent = 0
        for tree, path in new:
            sent += tree.stats[path].st_size
            try:
                for data in tree.rows(path):
                    self.to.write(data)
            except BrokenPipeError:
                raise
            except OSError as error:
                tree.lacking.append(f"{path}: {error.strerror}")
                self.to.write(row("-", tree.whole(path)))
            self.step.note(f"{sent / 1e6:,.1f} of {whole / 1e6:,.1f} MB")
            self.step.draw()

    def output(self) -> bytes:
        """What the command has printed. Raises SandboxError where it has failed."""
        out = self.back.read(sandbox_changes.ANSWER_BYTES)
        if status := self.ended():
            raise self.failure(status)
        return out

    def failure(self, status: int = 0) -> SandboxError:
        """Why it has ended."""
        status = status or self.ended()
        err = os.pread(self.errors, 1 << 16, 0).decode(errors="replace")
        if status == NO_ROOM_STATUS or "No space left on device" in err:
            Output(self.engine.argv("remove-volume", self.mirror), LONG_SECONDS).result()
            return SandboxError(f"there is no room for {self.directory} on {self.engine.host}",
                                sandbox.NO_ROOM_HINT, 125)
        if status == sandbox_changes.LACKING_STATUS:
            return SandboxError(f"{self.session.created()[0]['image']} has no python3",
                                "a copy needs it: sandbox build", 125)
        if status == 125 and err.strip():
            return self.engine.failure(err)
        words = sandbox.one_line(err.strip())[-500:] or f"it ended with status {status}"
        return SandboxError(f"{self.directory} is not all on {self.engine.host}: {words}",
                            "start it again: what has arrived is not sent again", 125)


def kind_of(tree: Seen, path: str) -> str:
    mode = tree.stats[path].st_mode
    return "d" if stat.S_ISDIR(mode) else "l" if stat.S_ISLNK(mode) else "f"


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


def send_files(engine: Engine, session: Session, id: str, spec: Mapping[str, Any]) -> None:
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
        argv = engine.exec_argv(id, ["sh", "-c", PUT, "sandbox", target, session.user],
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
        ask_mirror(engine, session, {**about, "dry": False, "elsewhere": True})
    changed = sandbox_changes.rows_of(answer, "changed", {"path": str})
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
        self.helper, self.seen = helper, helper.trees[0]
        self.root, self.store, self.state = self.seen.root, self, dict[str, str]()
        self.note = sandbox.kept_path("merging", helper.session.name)
        ours = sandbox.read_small(self.note) or "/"  # what a killed merge has left begins so
        self.leftovers = [os.path.split(path) for path in self.seen.stats
                          if os.path.basename(path).startswith(ours)]
        self.folders = {path for path, st in self.seen.stats.items() if stat.S_ISDIR(st.st_mode)}
        self.shadow: Any = types.ModuleType("shadow")
        exec(compile(sandbox.asset("image/shadow.py"), "shadow.py", "exec"), self.shadow.__dict__)
        self.places = dict[str, tuple[int, int]]()

    def bring(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """Returns what it has left as it is, and why. Raises SandboxError."""
        import tempfile

        rows = sandbox_changes.rows_of(answer, "changed", {"path": str, "kind": str, "mode": int,
                                                           "size": int})
        restore = self.shadow.Restore(self, False)
        with tempfile.TemporaryFile() as self.content:
            changes = []
            for item in rows:
                self.receive(item)
                new = self.shadow.Entry(item["kind"], item["mode"] & 0o7777, item["path"])
                if problem := self.problem(item["path"]):
                    restore.left[item["path"]] = problem
                elif item["kind"] in ("", "file", "link", "dir"):
                    changes.append((item["path"], self.entry(item["path"]),
                                    new if item["kind"] else None))
            self.content.flush()
            restore.changes = {path: (old, new) for path, old, new in changes}
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
        if self.content.tell() > COMING_BYTES:
            raise too_much(self.helper.engine)

    def problem(self, path: str) -> str:
        """Why nothing is written there."""
        parts = path.split("/")
        try:
            os.fsencode(path)
        except UnicodeError:
            parts = [""]
        if not {"", ".", ".."}.isdisjoint(parts) or "\0" in path or len(path) > 4096:
            return "it is no path in the directory"
        return "what is git's own does not leave a copy" if self.shadow.in_git(path) else ""

    def entry(self, path: str) -> Any:
        if path not in self.seen.stats:
            return None
        kinds = {"d": "dir", "l": "link", "f": "file"}
        return self.shadow.Entry(kinds[kind_of(self.seen, path)], 0, "")

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


def fetch_commits(engine: Engine, argv: Sequence[str], common: str, branch: str) -> str:
    """Fetch the bundle that a call prints into a repository; '' or why that failed.

    As in commits.sh git sees a repository that is made here: of the person's it has the objects and
    the refs, and no configuration or hook.
    """
    import tempfile

    if not sandbox.program("git"):
        return "there is no git on this machine: install it and merge again"
    with tempfile.TemporaryDirectory() as folder:
        bundle, ours = f"{folder}/bundle", f"{folder}/person"
        with open(bundle, "w+b") as file:
            fds = {0: sandbox.file_of(b""), 1: file.fileno(), 2: sandbox.file_of(b"")}
            status = sandbox.wait_for(sandbox.spawn(argv, fds=fds))
            err = os.pread(fds[2], 1 << 16, 0).decode(errors="replace")
            Output.close(fds[0], fds[2])
            head = os.pread(file.fileno(), 100, 0)
        if status:
            return sandbox.one_line(err.strip())[-500:] or f"git there ended with {status}"
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "LC_ALL": "C",
               "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
               "GIT_ATTR_NOSYSTEM": "1", "GIT_NO_REPLACE_OBJECTS": "1",
               "GIT_ALLOW_PROTOCOL": "file"}
        kind = ["--object-format=sha256"] if b"@object-format=sha256" in head else []
        argvs = [["init", "-q", "--bare", "--template=", *kind, ours],
                 [f"--git-dir={ours}", "-c", "transfer.fsckObjects=true",
                  "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0",
                  "-c", "maintenance.auto=false", "fetch", "--no-tags", "--no-write-fetch-head",
                  "--no-auto-gc", bundle, f"refs/heads/work:refs/heads/{branch}"]]
        for words in argvs:
            status, _, err = Output(["git", *words], LONG_SECONDS, env).result(1 << 20)
            if status:
                return (f"the branch {branch} has other commits: rename it (git branch -m)"
                        if "(non-fast-forward)" in err else sandbox.one_line(err.strip())[-500:]
                        or f"git ended with {status}")
            if words is argvs[0]:
                for part in ("objects", "refs"):
                    shutil.rmtree(f"{ours}/{part}")
                    os.symlink(f"{common}/{part}", f"{ours}/{part}")
                for part in ("packed-refs", "shallow"):
                    if os.path.isfile(f"{common}/{part}"):
                        os.symlink(f"{common}/{part}", f"{ours}/{part}")
    return ""
