"""What the turns of a session change in its directory: snapshots outside of it, and their report.

A turn is one run of an agent, one prompt or one command. Before and after it static/image/shadow.py
takes a snapshot, in a container of its own from the session's image: it has no network and no
right but to read the directory (to restore: to write there), and a store in a volume that the
session never sees. Its program comes over stdin, so that it fits this version whatever the image.
What it answers is data of a container: it passes Asked.answer().

Imported only where a turn begins or its changes are asked for.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import sandbox
from sandbox import CALL_SECONDS, LONG_SECONDS, Output, SandboxError, say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from sandbox import Config, Engine, Session

    Row = dict[str, Any]

STORE_DIRECTORY, WORK_DIRECTORY = "/run/sandbox-store", "/run/sandbox-work"
# As root: what an agent has made with sudo is read, too, and what is restored gets its owner back.
READING, WRITING = ("DAC_OVERRIDE",), ("DAC_OVERRIDE", "CHOWN", "FOWNER", "FSETID")
LIMITS = {"memory": "2g", "pids-limit": 64}
ANSWER_BYTES = 32 << 20
REQUEST_BYTES = 32 << 10
SILENT_SECONDS = 3  # after which a person is told what is waited for
LACKING_STATUS, TURNED_STATUS = 96, 97
# Ends by itself where nobody is left to end it. The first process of a container ignores a signal
# without a handler.
PROGRAM = f"""import os, signal, sys, zlib
signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
signal.alarm({LONG_SECONDS})
size = int(sys.stdin.buffer.readline())
exec(compile(zlib.decompress(sys.stdin.buffer.read(size)), "shadow.py", "exec"))"""

START = f"""
for name in python3 git; do command -v $name >/dev/null || exit {LACKING_STATUS}; done
program=$1 verb=$2
shift 2
[ $# = 0 ] || mounts_are "$@" || exit {TURNED_STATUS}
exec python3 -I -S -c "$program" $verb {STORE_DIRECTORY} {WORK_DIRECTORY} -"""


class Refused(SandboxError):
    """What a shadow has not done, in its words; `kind` says of what sort that is, '' for none."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        message, hint, self.kind = (sandbox.one_line(str(answer.get(key, "")))[:1000]
                                    for key in ("error", "hint", "kind"))
        super().__init__(message, hint)


def closed_argv(engine: Engine, session: Session, script: bytes, words: Sequence[str],
                binds: Sequence[tuple[str, str, str]], capabilities: Sequence[str] = (),
                user: str = "0:0", name: str = "") -> list[str]:
    """The engine call for a script in a container of its own. After its words come the arguments
    of mounts_are(), with which it begins: what is mounted is to be what is meant.
    """
    spec, _ = session.created()
    text = (sandbox.asset("session/mounts.sh") + script).decode()
    return engine.closed_argv(
        name or f"{session.copy}-{sandbox.random_id()}", spec["image"],
        ["sh", "-c", text, "sandbox", *words, *sandbox.mounts_meant(binds)],
        labels={"sandbox.shadow": session.store}, limits=LIMITS, capabilities=capabilities,
        binds=binds, user=user)


def shadow_argv(engine: Engine, session: Session, name: str, verb: str,
                writable: bool, origin: bool = False) -> list[str]:
    """The engine call for a request; the program and the request follow on stdin. It is about the
    session's copy, or with `origin` about the directory that this was made of.
    """
    if not session.is_ours:  # then its labels name neither what is mounted nor what runs there
        raise SandboxError(f"{session.name} was not made from here: nothing is kept of its changes")
    if origin and not engine.shares_files:  # the path there is that of another directory
        raise SandboxError(f"the directory of {session.name} is on this machine, and what was "
                           "merged into it is not taken back from there",
                           "take it back with git or an editor")
    source = "" if origin else session.copy
    binds = [(source or sandbox.source_of(session.created()[0]), WORK_DIRECTORY,
              "" if writable else "ro"), (session.store, STORE_DIRECTORY, "")]
    return closed_argv(engine, session, START.encode(), [PROGRAM, verb], binds,
                       WRITING if writable else READING, name=name)


class Client(Output):
    """A client that would wait for its container where it is only asked to end.

    The answer is a line. Who is in a `hurry` has it without waiting until the engine has removed
    the container, and waits for that later.
    """

    hurry = told = False

    def is_whole(self, fd: int, data: bytes) -> bool:
        self.told = self.hurry and fd == self.out and data.endswith(b"\n")
        return self.told

    def wait(self) -> int:
        return 0 if self.told else super().wait()

    def end(self, number: int) -> None:
        super().end(9)


class Asked:
    """A request to the shadow of a session, begun: the verbs are those of shadow.py."""

    def __init__(self, engine: Engine, session: Session, verb: str, request: Mapping[str, Any],
                 writable: bool = False) -> None:
        """What is asked of another tree than "main" is about the directory that a copy was made of.
        Raises SandboxError for a request that is too long.
        """
        import zlib

        self.engine, self.session = engine, session
        self.name = f"{session.store}-{sandbox.random_id()}"
        origin = request.get("tree", "main") != "main"
        argv = shadow_argv(engine, session, self.name, verb, writable, origin)
        place = sandbox.source_of(session.created()[0])
        place = f"a copy of {place}" if session.copy and not origin else place
        text = sandbox.to_json({**request, "directory": place}).encode()
        if len(text) > REQUEST_BYTES:
            raise Refused({"error": "these are too many paths", "kind": "large",
                           "hint": "name a directory that holds them"})
        program = zlib.compress(sandbox.asset("image/shadow.py"), 9)
        self.output = Client(argv, LONG_SECONDS,
                             stdin=b"%d\n%s%s" % (len(program), program, text))

    def answer(self) -> dict[str, Any]:
        """What it says. Raises SandboxError with the reason where it could not be done."""
        try:
            status, out, err = self.output.result(ANSWER_BYTES)
        except BaseException:
            self.remove()
            raise
        try:
            answer = sandbox.parse_json(out)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self.remove()
            raise self.failure(status, err)
        if status or "error" in answer:
            refused = Refused(answer)
            if refused.kind == "damaged":
                refused.hint = ("is a disk full? If not, this begins with an empty one: "
                                f"{self.engine.name} volume rm {self.session.store}")
            raise refused
        return answer

    def is_slow(self) -> bool:
        """Whether there is no answer after a moment."""
        import select

        answers = select.poll()
        answers.register(self.output.out, select.POLLIN)
        try:
            return not answers.poll(SILENT_SECONDS * 1000)
        except BaseException:
            self.end()
            raise

    def failure(self, status: int, err: str) -> SandboxError:
        """Why there is no answer."""
        spec, _ = self.session.created()
        if status == LACKING_STATUS:
            return SandboxError(f"{spec['image']} has no python3 or no git: snapshots need both",
                                "sandbox build, then sandbox recreate; or --no-checkpoint")
        if status == TURNED_STATUS or not os.path.isdir(spec["directory"]):
            return SandboxError(f"{spec['directory']} is gone or leads to another place by now",
                                "put it back and try again" if self.session.copy else
                                f"sandbox recreate {self.session.name}")
        if self.engine.diagnose(err) == "image":
            return SandboxError(f"{self.engine.name} has no image {spec['image']}",
                                f"build it again, or sandbox recreate {self.session.name}")
        if err.strip():
            return self.engine.failure(err)
        return SandboxError(f"what takes snapshots has ended with status {status}",
                            "has it less than 2 GB of memory, or was it ended?")

    def end(self) -> None:
        """Nobody wants the answer any more."""
        self.output.end(9)
        Output.close(self.output.out, self.output.err)
        self.remove()

    def remove(self) -> None:
        """The end of the engine's client does not end its container."""
        Output(self.engine.argv("remove", self.name), CALL_SECONDS).result()


def now() -> str:
    return sandbox.iso_seconds(time.time())


def ask_shadow(engine: Engine, session: Session, verb: str, request: Mapping[str, Any],
               writable: bool = False) -> dict[str, Any]:
    """The answer to a request: see Asked. Raises SandboxError."""
    return Asked(engine, session, verb, request, writable).answer()


# --- Turns ---

UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
SHOWN_RISKS = 20
WATCHER_SECONDS = 20  # after the end of a program, for what watches over its turn
# Waits for the process that was the first to carry a tag, which may just be starting: exec.sh notes
# that it begins. Where that has ended, process 1 is the parent of what it has left.
WAIT = """n=0
until grep -qx "$1" /run/sandbox-began || [ $n = 10 ]; do n=$((n+1)); sleep 1; done
sleep 1
pid=$(grep -ls "SANDBOX_EXEC=$1" /proc/[0-9]*/environ | cut -d/ -f3 | sort -n | head -n 1)
! grep -qsx "PPid:.1" "/proc/$pid/status" || exit 0
while [ "$pid" ] && kill -0 "$pid" 2>/dev/null; do sleep 1; done"""


def bounds(config: Config) -> dict[str, Any]:
    """What each request carries: the bounds of the store, and whose files agents obey."""
    found: dict[str, Any] = {"agents": [*sandbox.AGENTS]}
    for layer in config.layers:
        if isinstance(given := layer.values.get("checkpoint"), dict):
            found |= given
    if size := found.get("maxBytes"):
        digits = size.rstrip("bkmg")
        found["maxBytes"] = int(digits) * UNITS[size[len(digits)]] if digits != size else int(size)
    return found


def bounds_of(session: Session) -> dict[str, Any]:
    """The time and the bounds() for what is done with turns that are there: a mistake in the
    configuration, which was said, does not keep one from that, and then nothing is dropped.
    """
    try:
        found = bounds(sandbox.session_config(session))
    except SandboxError:
        found = {"agents": [*sandbox.AGENTS], "keep": sys.maxsize, "maxBytes": sys.maxsize}
    return found | {"when": now()}


class Turn:
    """A turn of a session, from the snapshot before to the one after; where nobody takes that, the
    next snapshot is its end.

    It is a context of what runs in it: then a process of its own watches over it, which takes the
    last snapshot where we cannot, because we have left it or were killed.
    """

    def __init__(self, engine: Engine, session: Session, about: Mapping[str, Any],
                 bounds: Mapping[str, Any], must: bool) -> None:
        """`about` has id, what and command; without `must` it goes on where there is no snapshot.
        """
        self.engine, self.session, self.must = engine, session, must
        self.about, self.bounds = dict(about), dict(bounds)
        self.asked: Asked | None = None
        self.watched = self.watcher = -1
        self.begun = False
        self.lasts = False  # what runs in it goes on without us
        self.prompts = False  # before each prompt a checkpoint is made, where keys are hidden
        self.changes: dict[str, Any] | None = None  # see summary()

    @property
    def id(self) -> str:
        return str(self.about["id"])

    def start(self) -> None:
        """Ask for the first snapshot."""
        request = {**self.bounds, "turn": {**self.about, "when": now()}}
        self.asked = Asked(self.engine, self.session, "snapshot", request)

    def begin(self) -> None:
        """Have the first snapshot. Raises SandboxError."""
        try:
            if not self.asked:
                self.start()
            assert self.asked
            if self.asked.is_slow():
                spec, _ = self.session.created()
                sandbox.say(f"taking a snapshot of {spec['directory']}: Ctrl-C ends it, "
                            "--no-checkpoint goes without")
            self.asked.answer()
            self.begun = True
        except SandboxError as error:
            if self.must:
                raise SandboxError(f"nothing was started, for no snapshot could be taken: "
                                   f"{error.message}",
                                   f"{error.hint or 'mend that'}; or run with --no-checkpoint",
                                   125) from None
            sandbox.say(f"no snapshot could be taken, so there will be no undo: {error.message}")

    def before_prompt(self, provider: str) -> str:
        """Begin a turn of its own for a prompt, which the next snapshot ends; '' or why not."""
        about = {"id": sandbox.random_id(), "what": "prompt", "command": f"a prompt ({provider})"}
        turn = Turn(self.engine, self.session, about, self.bounds, self.must)
        try:
            turn.begin()
        except SandboxError as error:
            return f"{error.message}; {error.hint}"
        return ""

    def drop(self) -> None:
        """It will not begin after all."""
        if self.asked:
            self.asked.end()

    def end(self) -> None:
        """Take the last snapshot. Raises SandboxError."""
        sandbox.follow_rename(self.engine, self.session)
        known = sandbox.recall([self.engine], self.session.name)
        if known and known[1].store == self.session.store:  # else it was removed meanwhile
            request = {**self.bounds, "end": self.id, "ended": now()}
            answer = ask_shadow(self.engine, self.session, "snapshot", request)
            self.changes = summary(answer.get("turn"))

    def __enter__(self) -> Turn:
        if not self.asked:
            self.start()
        assert self.asked
        self.asked.output.hurry = True
        watched, self.watched = os.pipe()
        self.watcher = self.watch(watched)
        os.close(watched)
        try:
            self.begin()
        except BaseException:
            self.release(b"never begun")
            raise
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if self.lasts or not self.begun or isinstance(error, sandbox.Left):
            self.release(b"" if self.begun else b"never begun")
            return
        word = b""
        try:
            self.end()
            word = b"ended"
        except SandboxError as failure:
            sandbox.say(f"no snapshot could be taken after it: {failure.message}")
        finally:
            self.release(word)

    def release(self, word: bytes) -> None:
        """Tell who watches that there is nothing to do, or with b"" that it has to."""
        sandbox.wait_for(self.watcher)  # the one that watches is its child
        with suppress(OSError):
            os.write(self.watched, word)
        os.close(self.watched)
        if self.asked and self.asked.output.told:
            sandbox.wait_for(self.asked.output.pid)

    def report(self, strict: bool) -> bool:
        """Say what this machine may execute or obey now; whether it is known to be nothing. If
        `strict`, what runs on may do more later; to ask for that takes a call of the engine.
        """
        name = self.session.name
        for line in risk_lines(name, self.changes) if self.changes else ():
            sandbox.say(line)
        left = sandbox.used_by(self.engine, self.session).get(self.id) if strict else None
        if left is not None:
            sandbox.say(f"in {name} {left} runs on: what it changes from now on is in no turn")
        return self.changes is not None and not self.changes["risky"] and left is None

    def watch(self, stdin: int) -> int:
        """Start what takes the last snapshot when stdin ends and brings nothing, and what runs has
        ended; the pid of its parent, which ends at once.
        """
        with open(os.devnull, "r+b", 0) as null:
            argv = sandbox.own_argv("sandbox_changes", "carry_out", "watch")
            return sandbox.spawn(argv, fds={0: stdin, 1: null.fileno(), 2: null.fileno()},
                                 env=os.environ | self.environ(), own_group=True)

    def environ(self) -> dict[str, str]:
        """For carry_out(), and static/session/job.py: in an argv others would see a prompt."""
        session, argv = self.session, sandbox.own_argv("sandbox_changes", "carry_out")
        return {"SANDBOX_TURN_ARGV": repr(argv), "SANDBOX_TURN": sandbox.to_json({
            "runtime": f"{self.engine.name}@{self.engine.host}",
            "session": [session.name, session.labels, session.id, session.ours],
            "about": self.about, "bounds": self.bounds, "must": self.must,
            "prompts": self.prompts})}


def carry_out() -> int:
    """Begin, end or watch the turn of our environment; the end is printed as JSON."""
    given = sandbox.parse_json(os.environ.pop("SANDBOX_TURN"))
    name, labels, id, ours = given["session"]
    session = sandbox.Session(name, "", labels, id)
    session.ours = ours
    engine = sandbox.engine_of(*given["runtime"].partition("@")[::2])
    turn = Turn(engine, session, given["about"], given["bounds"], given["must"])
    turn.prompts = given.get("prompts", False)
    try:
        if sys.argv[2] == "begin":
            turn.begin()
        elif sys.argv[2] == "end":
            turn.end()
            print(sandbox.to_json(turn.changes))
        elif not os.fork():
            watch_over(turn)
    except SandboxError as error:
        sandbox.report(error)
        return error.code
    return 0


def watch_over(turn: Turn) -> None:
    os.setsid()
    os.chdir("/")
    command = ["sh", "-c", WAIT, "sandbox", turn.id]
    wait = turn.engine.exec_argv(turn.session.id, command, user=turn.session.user)
    watches = turn.prompts and turn.session.hides_keys
    if watches:
        import sandbox_keys

        if sandbox_keys.watch_prompts(turn.engine, turn.session, turn.before_prompt, wait):
            return
    elif os.read(0, 1):
        return
    if turn.engine.host:  # also where what watched the prompts was cut off
        import sandbox_hosts

        sandbox_hosts.await_end(turn.engine, turn.session, wait)
    elif not watches:
        sandbox.call(wait)
    turn.end()


# --- What a turn has changed ---


def summary(event: Any) -> dict[str, Any] | None:
    """What is told of an ended turn: its id as `turn`, the counts files, added, deleted and risky,
    and `risks`, the first ones, each a path and reasons. None for what is no such thing.
    """
    try:
        return {"turn": str(event["id"])[:100],
                **{key: int(event[key]) for key in ("files", "added", "deleted", "risky")},
                "risks": [{"path": sandbox.one_line(str(risk["path"]))[:1000],
                           "risk": [sandbox.one_line(str(why))[:200] for why in risk["risk"]][:9]}
                          for risk in event["risks"]][:50]}
    except (KeyError, TypeError, ValueError):
        return None


def risk_lines(name: str, changes: Mapping[str, Any]) -> list[str]:
    """A line for each changed path that this machine may execute or obey, as far as they are told.
    """
    lines = [f"{name} has changed {risk['path']}: {'; '.join(risk['risk'])}"
             for risk in changes["risks"][:SHOWN_RISKS]]
    more = changes["risky"] - len(lines)
    return [*lines, *([f"and {more} more: sandbox diff {name} {changes['turn']}"] * (more > 0))]


def report_turn(engine: Engine, session: Session, id: str, just: bool) -> None:
    """Say what this machine may execute or obey of what a program has changed that ran without a
    client, if it was a turn. Of one that has just ended the last snapshot is waited for, which is
    taken by what watches over it.
    """
    if not session.is_ours or session.store not in engine.ask(engine.argv("volumes")).split():
        return
    until = time.monotonic() + just * WATCHER_SECONDS
    while True:
        turns = rows_of(ask_shadow(engine, session, "log", {}), "turns", TURN)
        turn = next((turn for turn in turns if turn["id"] == id), None)
        if not turn or turn["after"] or time.monotonic() >= until:
            break
        time.sleep(1)
    if turn and not turn["after"]:
        say(f"what it has changed is not known yet: sandbox log {session.name}")
    for line in risk_lines(session.name, changes) if (changes := summary(turn)) else ():
        say(line)


def mark_overlaps(turns: Sequence[dict[str, Any]]) -> None:
    """Give each turn `beside`, the ids of those that ran at the same time: it has their changes,
    too. One that was not ended does not run any more.
    """
    def began_within(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        end = other.get("ended") or ("" if other.get("state") == "not ended" else "~")
        return str(other.get("when")) <= str(one.get("when")) < str(end)

    spans = [turn for turn in turns if turn.get("kind") == "turn"]
    for turn in spans:
        turn["beside"] = [other["id"] for other in spans if other is not turn and (
            began_within(turn, other) or began_within(other, turn))]


# --- Log, diff, undo and redo ---

LISTED = 100  # warnings, and paths of an undo
LINE_CHARS, WHAT_CHARS = 2000, 60
BOLD, YELLOW, COLOURS = "1", "33", {"@": "36", "+": "32", "-": "31"}
FILE = {"path": str, "status": str, "oldMode": str | None, "newMode": str | None,
        "size": int | None, "binary": bool, "added": int, "deleted": int, "risk": list}
TURN = {"id": str, "kind": str, "tree": str, "what": str | None, "command": str | None,
        "when": str | None, "after": str | None, "files": int | None, "added": int | None,
        "deleted": int | None, "risky": int | None, "turns": list | None, "undone": bool | None,
        "paths": list | None}


def rows_of(answer: Mapping[str, Any], key: str, shape: Mapping[str, Any]) -> list[Row]:
    """The rows of an answer, with fields of these types. Raises SandboxError."""
    rows = answer.get(key)
    if isinstance(rows, list) and all(isinstance(row, dict) and all(
            isinstance(row.get(name), kind) for name, kind in shape.items()) for row in rows):
        return [dict.fromkeys(shape) | row for row in rows]
    raise SandboxError("what reads the snapshots has answered nonsense",
                       "make the image anew: sandbox build")


def visible(c: str) -> str:
    """A character that is not printable: ^M, <9B> for a byte that is not UTF-8, <U+202E>."""
    code = ord(c)
    if code < 32 or code == 127:
        return f"^{chr(code ^ 64)}"
    return f"<{code - 0xDC00:02X}>" if 0xDC80 <= code <= 0xDCFF else f"<U+{code:04X}>"


def shown_line(text: str, code: str = "", colour: bool = False) -> str:
    """A line as a terminal may get it: what it would obey is visible, in colour also reversed."""
    text, more = text[:LINE_CHARS], len(text) - LINE_CHARS
    if not text.replace("\t", "").isprintable():
        form = "\x1b[7m{}\x1b[27m" if colour else "{}"
        text = "".join(c if c.isprintable() or c == "\t" else form.format(visible(c))
                       for c in text)
    text = f"\x1b[{code}m{text}\x1b[m" if colour and code and text else text
    return f"{text} … and {more:,} more characters" if more > 0 else text


def quoted(path: str) -> str:
    """A path on one line: with quotes and escapes where it has unusual characters."""
    plain = path.isprintable() and "\\" not in path and path[:1] not in "'\""
    return path if plain else repr(path)


def page(lines: Iterable[tuple[str, str]]) -> None:
    """Print lines, each with its colour; on a terminal through the person's pager, as git does."""
    import shutil
    import signal

    terminal = os.isatty(1)
    colour = terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    text = "".join(f"{shown_line(line, code, colour)}\n" for line, code in lines)
    pager = os.environ.get("PAGER", "less -R" if shutil.which("less") else "")
    status = 127
    if terminal and pager:
        source, sink = os.pipe()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pager's
        pid = sandbox.spawn(["sh", "-c", pager], env={"LESS": "FRX", "LV": "-c", **os.environ},
                            fds={0: source})
        os.close(source)
        with suppress(BrokenPipeError), open(sink, "w", encoding="utf-8") as pipe:
            pipe.write(text)
        status = sandbox.wait_for(pid)
    if status in (126, 127):  # there is no such pager
        print(text, end="")


def warnings(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """What the host may execute or obey, and what was not kept."""
    found = [f"warning: {quoted(row['path'])}: {'; '.join(map(str, row['risk']))}"
             for row in rows if row["risk"]]
    found += [f"not kept: {quoted(row['path'])}: {row.get('why') or row.get('seen')}"
              for row in rows if row.get("kept") is False]
    yield from ((line, YELLOW) for line in found[:LISTED])
    if found[LISTED:]:
        yield f"… and {len(found) - LISTED:,} more such lines: --json has them all", YELLOW


def patch_lines(row: Row) -> Iterator[tuple[str, str]]:
    """A file's part of a patch, in git's format; what was not kept has none."""
    if row.get("kept") is False:
        return
    old, new, patch = row["oldMode"], row["newMode"], str(row.get("patch") or "")
    a, b = (quoted(f"{side}/{row['path']}") for side in "ab")
    before, after = a if old else "/dev/null", b if new else "/dev/null"
    head = [f"diff --git {a} {b}"]
    if old and new and old != new:
        head += [f"old mode {old}", f"new mode {new}"]
    elif not (old and new) and (old or new):
        head.append(f"new file mode {new}" if new else f"deleted file mode {old}")
    if row["binary"]:
        head.append(f"Binary files {before} and {after} differ")
    elif patch:
        tab = "\t" * (" " in row["path"])  # as git ends such a name, for others to know its end
        head += [f"--- {before}{tab}", f"+++ {after}{tab}"]
    yield from ((line, BOLD) for line in head)
    for line in patch.removesuffix("\n").split("\n") if patch else ():
        yield line, COLOURS.get(line[:1], "")
    if row.get("truncated"):
        yield "… the rest is left out: all of the patch is too long; name this path", YELLOW


def stat_lines(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    for row in rows:
        counts = "binary" if row["binary"] else f"+{row['added']} -{row['deleted']}"
        yield f"{row['status']:8}  {counts:>12}  {quoted(row['path'])}", ""
    added, deleted = (sum(row[key] for row in rows) for key in ("added", "deleted"))
    yield f"{len(rows):,} changed, +{added} -{deleted}", BOLD


def pick_turn(turns: Sequence[Row], word: str, exists: bool) -> Row | None:
    """The turn that a word means: an id, the beginning of one, -1 for the last; None for a path."""
    number, real = word[1:] if word[:1] == "-" else "", [t for t in turns if t["kind"] == "turn"]
    if number.isdecimal() and 0 < int(number[:9]) <= len(real):
        return real[-int(number)]
    found = [turn for turn in turns if turn["id"].startswith(word)] if word else []
    found = [turn for turn in found if turn["id"] == word] or found
    if len(found) > 1 or found and exists and found[0]["id"] != word:
        names = ", ".join(turn["id"] for turn in found[:5])
        raise SandboxError(f"{word} may be {names}{' or a path' if exists else ''}",
                           f"write more of the id{f', or ./{word}' if exists else ''}", 2)
    if number.isdecimal():
        raise SandboxError(f"there is no turn {word}: {len(real)} are kept")
    return found[0] if found else None


def in_workspace(session: Session, path: str) -> str:
    """A path of the command line, relative to the workspace."""
    spec, _ = session.created()
    tops = [*(spec.get("sources") or ())[:1], spec["directory"], spec["workdir"]]
    with suppress(FileNotFoundError):
        if any(sandbox.within(os.getcwd(), top) is not None for top in tops):
            path = os.path.join(os.getcwd(), path)
    for top in tops:
        inner = sandbox.within(os.path.normpath(os.path.join(top, path)), top)
        if inner is not None:
            return inner or "."
    raise SandboxError(f"{path} is not in the workspace {tops[0]}", code=2)


def asked_for(args: argparse.Namespace, session: Session,
              turns: Sequence[Row]) -> tuple[Row | None, list[str]]:
    """The turn and the paths, relative to the workspace, that a command was given."""
    words = [word for word in (args.turn, *args.paths) if word is not None]
    if "" in words:  # of a variable that is not set
        raise SandboxError("an empty word is no turn and no path", "leave it out", 2)
    paths = [in_workspace(session, word) for word in words]
    if not words:
        return None, []
    exists = os.path.lexists(os.path.join(session.created()[0]["directory"], paths[0]))
    turn = pick_turn(turns, words[0], exists)
    return turn, paths[turn is not None:]


def ask_about(engine: Engine, session: Session, verb: str, request: Mapping[str, Any],
              word: str | None, writable: bool = False) -> dict[str, Any]:
    """The answer; `word` stood where a turn may stand."""
    try:
        return ask_shadow(engine, session, verb, request, writable)
    except Refused as error:
        if word and error.kind == "missing":
            error.hint = f"{word} is no turn either: sandbox log {session.name} lists them"
        raise


def turns_of(engine: Engine, session: Session) -> list[Row]:
    """What the store keeps, the oldest first, each with its state."""
    turns = rows_of(ask_shadow(engine, session, "log", {}), "turns", TURN)
    runs = dict[str, str]()
    if any(turn["kind"] == "turn" and not turn["after"] for turn in turns):
        runs = sandbox.used_by(engine, session) | {
            job["id"]: job["what"] for job in sandbox.read_jobs(session.name)
            if job["state"] == "running"}
    for turn in turns:
        ended = turn["kind"] != "turn" or turn["after"]
        turn["state"] = ("undone" if turn["undone"] else "" if ended else
                         "running" if turn["id"] in runs else "not ended")
    mark_overlaps(turns)
    return turns


def what_of(turn: Row) -> str:
    """An agent and its prompt or command, or which turns were undone, and where."""
    lines = (turn["command"] or "").strip().split("\n")
    text = ": ".join(filter(None, (turn["what"], lines[0])))
    if turn["kind"] != "turn":
        text = " ".join([turn["kind"], *map(str, turn["turns"] or ()),
                         *filter(None, map(str, turn["paths"] or ()))])
    return text if len(text) <= WHAT_CHARS else f"{text[:WHAT_CHARS - 1]}…"


def cmd_log(args: argparse.Namespace) -> int:
    turns = turns_of(*sandbox.find_given(sandbox.engines_of(args), args.session, "log"))[::-1]
    if args.json:
        print(sandbox.to_json(turns, indent=2))
    elif turns:
        sandbox.print_columns(("id", "when", "what", "files", "lines", "warnings", "state"), [
            turn | {"when": sandbox.local_time(turn["when"] or ""), "what": what_of(turn),
                    "lines": None if turn["added"] is None
                    else f"+{turn['added']} -{turn['deleted']}",
                    "warnings": turn["risky"] or None} for turn in turns])
    else:
        say(f"no turn of {args.session} is kept: those of agents and prompts are, and with "
            "--checkpoint those of other commands")
    return 0


def cmd_diff(args: argparse.Namespace) -> int:
    engine, session = sandbox.find_given(sandbox.engines_of(args), args.session, "diff")
    turn, paths = asked_for(args, session, turns_of(engine, session) if args.turn else [])
    request = {"turn": turn["id"] if turn else "", "tree": turn["tree"] if turn else "main",
               "paths": paths, "now": True, "agents": list(sandbox.AGENTS),
               "patch": not (args.stat or args.json)}
    answer = ask_about(engine, session, "diff", request, None if turn else args.turn)
    rows, more = rows_of(answer, "files", FILE), answer.get("more")
    if args.json:
        print(sandbox.to_json({"from": answer.get("from"), "to": answer.get("to"), "files": rows,
                               "more": more}, indent=2))
        return 0
    lines = [*warnings(rows), *(stat_lines(rows) if args.stat else
                                (line for row in rows for line in patch_lines(row)))]
    page([*lines, *([(f"… and {more} more files", YELLOW)] if more else [])])
    return 0


def cmd_undo(args: argparse.Namespace) -> int:
    engine, session = sandbox.find_given(sandbox.engines_of(args), args.session, "undo")
    turns = [turn for turn in turns_of(engine, session) if turn["kind"] in ("turn", "merge")]
    turn, paths = asked_for(args, session, turns)
    left = [one for one in turns if one["kind"] == "turn" and not one["undone"]]
    if not (turn or left):
        raise SandboxError("there is nothing to undo", f"sandbox log {session.name}")
    first = turn or left[-1]
    runs = [one["id"] for one in turns if one["state"] == "running" and (
        one["id"] in first.get("beside", ()) or turns.index(one) >= turns.index(first))]
    if runs and not (args.dry_run or args.in_use):
        question = f"{sandbox.one_line(runs[-1])} still runs. Undo what it has done so far? [y/N] "
        if not (sandbox.can_ask() and sandbox.ask_person(question).lower() in ("y", "yes")):
            raise SandboxError(f"nothing was undone, for {runs[-1]} still runs",
                               "wait for its end, or add -f to undo what it has done so far")
    request = bounds_of(session) | {
        "turn": first["id"], "tree": first["tree"], "only": not turn, "paths": paths,
        "dry": args.dry_run}
    answer = ask_about(engine, session, "undo", request, None if turn else args.turn,
                       writable=not args.dry_run)
    say(f"turn {first['id']}{' and all since' if turn else ''}: {what_of(first)}")
    status = tell(answer, args.dry_run)
    users = [] if args.dry_run else sandbox.users_of(engine, session)
    if users:
        say(f"what runs in {session.name} may change it again: {'; '.join(users[:3])}")
    return status


def cmd_redo(args: argparse.Namespace) -> int:
    engine, session = sandbox.find_given(sandbox.engines_of(args), args.session, "redo")
    undos = [turn for turn in turns_of(engine, session)
             if turn["kind"] == "undo" and not turn.get("redone")]
    request = bounds_of(session) | {"tree": undos[-1]["tree"] if undos else "main"}
    return tell(ask_shadow(engine, session, "redo", request, True))


def tell(answer: Mapping[str, Any], dry: bool = False) -> int:
    """Say what an undo or redo has changed, or would, and what stays; 1 for a conflict."""
    changed = rows_of(answer, "changed", {"path": str, "status": str})
    left = rows_of(answer, "left", {"path": str, "why": str})
    for row in changed[:LISTED]:
        show(f"{row['status']:8}  {quoted(row['path'])}")
    for row in left[:LISTED]:
        say(f"{quoted(row['path'])} {'would stay' if dry else 'was left'} as it is: {row['why']}")
    for rows, where in ((changed, show), (left, say)):
        if rows[LISTED:]:
            where(f"… and {len(rows) - LISTED:,} more")
    if not (changed or left):
        say("there was nothing to change")
    return 1 if any(row.get("conflict", True) for row in left) else 0


# --- Copies ---
# A session of its own copy has it in a volume. Nothing of the copy is mounted together with what
# is the person's, but for the commits: see static/session/commits.sh.

FROM_DIRECTORY, GIT_DIRECTORY = "/run/sandbox-from", "/run/sandbox-git"
DIVERGED_STATUS = 98


def copy_argvs(engine: Engine, session: Session, source: Session | None,
               name: str = "") -> list[list[str]]:
    """The engine calls that fill the copy of a new session: from the directory, or what a source
    has in its own copy, with the snapshots that tell what of it was not merged.
    """
    spec, _ = session.created()
    admin = sandbox.linked_admin(spec["sources"][0])[1]
    if source and source.copy:
        pairs = [[(source.copy, FROM_DIRECTORY, "ro"), (session.copy, WORK_DIRECTORY, "")],
                 [(source.store, FROM_DIRECTORY, "ro"), (session.store, WORK_DIRECTORY, "")]]
        admin = ""
    else:
        pairs = [[(spec["sources"][0], FROM_DIRECTORY, "ro"), (session.copy, WORK_DIRECTORY, "")]]
        if admin:
            pairs[0].append((os.path.dirname(os.path.dirname(admin)), GIT_DIRECTORY, "ro"))
    script = sandbox.asset("session/copy.sh")
    return [closed_argv(engine, session, script, [os.path.basename(admin)], binds, WRITING,
                        name=name)
            for binds in pairs]


def make_copy(engine: Engine, session: Session, source: Session | None = None) -> None:
    """Fill the copy of a session that is to be created, and take its first snapshot: what differs
    from that is its work. Raises SandboxError.
    """
    if engine.shares_files or source and source.copy:
        with sandbox.lock_session(engine, source) if source else nullcontext():
            fill_copy(engine, session, source)
    else:
        import sandbox_travel

        sandbox_travel.fill_copy(engine, session)
    ask_shadow(engine, session, "snapshot", {})


def fill_copy(engine: Engine, session: Session, source: Session | None) -> None:
    directory = session.labels["sandbox.directory"]
    name = f"{session.copy}-{sandbox.random_id()}"
    remove = engine.argv("remove", name)
    for argv in copy_argvs(engine, session, source, name):
        step = sandbox.Step(f"copy {directory}", ended_by=remove)
        try:
            step.run(argv, silent_seconds=1)
        except BaseException as error:
            Output(remove, LONG_SECONDS).result()
            if isinstance(error, SandboxError) and "No space left on device" in error.message:
                raise SandboxError(f"there is no room for a copy of {directory}",
                                   sandbox.NO_ROOM_HINT, 125) from None
            raise
        for line in step.tail:
            if line.startswith("not copied: "):
                say(line)


def merge_copy(engine: Engine, session: Session, dry: bool = False) -> dict[str, Any]:
    """Bring what was done in the copy of a session into its directory: what a shadow answers to
    merge, and "commits" with their "count", the "branch" and a "problem". Raises SandboxError.
    """
    if not session.copy:
        raise Refused({"error": f"{session.name} works on the directory itself: nothing is to "
                       "merge", "hint": "sandbox run --copy makes a session that works on a copy",
                       "kind": "nothing"})
    volumes = engine.ask(engine.argv("volumes")).split()
    if session.copy not in volumes:  # an engine would make it, and of an empty one all is deleted
        raise SandboxError(f"the copy of {session.name} is gone: nothing is to merge",
                           f"sandbox rm -f {session.name} removes the rest")
    if session.store not in volumes:
        raise SandboxError(f"the snapshots of {session.name} are gone, and so is what tells its "
                           "work", f"copy what you want to keep: sandbox cp {session.name}:. .")
    bounds = bounds_of(session)
    ask_shadow(engine, session, "snapshot", bounds)
    if engine.shares_files:
        answer = ask_shadow(engine, session, "merge", {**bounds, "tree": "origin", "dry": dry},
                            not dry)
    else:
        import sandbox_travel

        answer = sandbox_travel.merge(engine, session, bounds, dry)
    changed = rows_of(answer, "changed", {"path": str, "status": str, "risk": list})
    left = [row for row in rows_of(answer, "left", {"path": str, "why": str, "conflict": bool})
            if row["path"] != ".git"]  # of it only commits can come, which are counted
    return {"dry": dry, "changed": changed, "left": left,
            "commits": bring_commits(engine, session, dry)}


def bring_commits(engine: Engine, session: Session, dry: bool) -> dict[str, Any]:
    """Bring the commits of a copy as a branch into the person's repository."""
    spec, _ = session.created()
    directory, branch = spec["sources"][0], branch_of(session.name)
    admin = sandbox.linked_admin(directory)[1]
    common = os.path.dirname(os.path.dirname(admin)) if admin else f"{directory}/.git"
    found = {"branch": branch, "count": 0, "more": 0, "problem": ""}
    if os.path.isdir(f"{common}/reftable"):
        return found | {"problem": f"{common} has another format than git's files of refs"}
    folders = (common, f"{common}/objects", f"{common}/refs", f"{common}/refs/heads")
    if not all(os.path.isdir(folder) and os.path.realpath(folder) == folder for folder in folders):
        return found
    problem = ""
    if branch in checked_out(common):
        problem = f"the branch {branch} is checked out: check another one out"
    elif not all(map(sandbox.is_folder_of_ours, folders)):
        problem = f"{common} is not yours"
    ours, counts_only = GIT_DIRECTORY, dry or problem != ""
    binds = [(session.copy, WORK_DIRECTORY, "ro"), (common, GIT_DIRECTORY, "ro"),
             *((f"{common}/{part}", f"{GIT_DIRECTORY}/{part}", "ro" if counts_only else "")
               for part in ("objects", "refs"))]
    if not engine.shares_files:
        import sandbox_travel

        ours, binds = sandbox_travel.mirrored_git(session)
        counts_only = True

    def asked(how: str) -> list[str]:
        return closed_argv(engine, session, sandbox.asset("session/commits.sh"),
                           [branch, how, ours], binds, user=session.user)

    argv = asked("01"[counts_only])
    status, out, err = Output(argv, LONG_SECONDS).result(ANSWER_BYTES)
    counts = out.split()
    if len(counts) == 2 and all(count.isdecimal() and len(count) < 10 for count in counts):
        found["count"], found["more"] = map(int, counts)
    if found["count"] and not (status or dry or problem or engine.shares_files):
        status, err = sandbox_travel.fetch_commits(asked("2"), common, branch)
    if status == DIVERGED_STATUS:
        found["problem"] = f"the branch {branch} has other commits: rename it (git branch -m)"
    elif status:
        found["problem"] = sandbox.one_line(err.strip())[-500:] or f"git ended with {status}"
    elif found["count"]:
        found["problem"] = problem
    return found


def branch_of(name: str) -> str:
    """The branch for the commits of a session: not each name is one, see git-check-ref-format."""
    name = name.replace("..", "._")
    return f"sandbox/{name}{'_' * name.endswith(('.', '.lock'))}"


def checked_out(common: str) -> set[str]:
    """The branches that a repository and its worktrees are on."""
    folders = [common]
    with suppress(OSError):
        folders += [entry.path for entry in os.scandir(f"{common}/worktrees")]
    return {sandbox.read_small(f"{folder}/HEAD").strip().removeprefix("ref: refs/heads/")
            for folder in folders}


def unmerged(engine: Engine, session: Session) -> str:
    """What a copy holds that its directory does not have, in words; '' for nothing."""
    try:
        answer = merge_copy(engine, session, dry=True)
    except SandboxError as error:
        return f"it is not known how much, for {error.message}"
    paths = len(answer["changed"]) + sum(row["conflict"] for row in answer["left"])
    commits, more, problem = map(answer["commits"].get, ("count", "more", "problem"))
    return " and ".join([*(counted(number, *what) for number, *what in
                           ((paths, "file"), (commits, "commit"),
                            (more, "commit", " on other branches or stashed")) if number),
                         *([problem] if problem and not commits else [])])


def counted(number: int, what: str, where: str = "") -> str:
    return f"{number} {what}{'s' * (number != 1)}{where}"


def cmd_merge(args: argparse.Namespace) -> int:
    engine, session = sandbox.find_given(sandbox.engines_of(args), args.session, "merge")
    answer = merge_copy(engine, session, args.dry_run)
    users = [] if args.dry_run else sandbox.users_of(engine, session)
    if users:
        say(f"what goes on in {session.name} comes with the next merge: {'; '.join(users[:3])}")
    status, commits = tell(answer, args.dry_run), answer["commits"]
    for line, _ in warnings(answer["changed"]):
        say(line)
    if commits["problem"]:
        say(f"its commits did not come: {commits['problem']}")
    elif commits["count"]:
        come = "would come" if args.dry_run else "came"
        say(f"{counted(commits['count'], 'commit')} {come} as the branch {commits['branch']}")
    return 1 if commits["problem"] else status
