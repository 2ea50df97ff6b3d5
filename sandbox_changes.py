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
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sandbox
from sandbox import CALL_SECONDS, LONG_SECONDS, Output, SandboxError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sandbox import Engine, Session

STORE_DIRECTORY, WORK_DIRECTORY = "/run/sandbox-store", "/run/sandbox-work"
# As root: what an agent has made with sudo is read, too, and what is restored gets its owner back.
READING, WRITING = ("DAC_OVERRIDE",), ("DAC_OVERRIDE", "CHOWN", "FOWNER", "FSETID")
LIMITS = {"memory": "2g", "pids-limit": 64}
ANSWER_BYTES = 32 << 20
REQUEST_BYTES = 32 << 10  # with the program it must fit into a pipe
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


def shadow_argv(engine: Engine, session: Session, name: str, verb: str,
                writable: bool, origin: bool) -> list[str]:
    """The engine call for a request; the program and the request follow on stdin. It is about the
    session's copy, or with `origin` about the directory that this was made of.
    """
    spec, _ = session.created()
    source = spec["sources"][0] if spec.get("sources") else sandbox.resolved(spec["directory"])
    source = source if origin or not session.copy else session.copy
    bind = (source, WORK_DIRECTORY, "" if writable else "ro")
    script = sandbox.asset("session/mounts.sh").decode() + START
    return engine.closed_argv(
        name, spec["image"],
        ["sh", "-c", script, "sandbox", PROGRAM, verb, *sandbox.mounts_meant([bind])],
        labels={"sandbox.shadow": session.store}, limits=LIMITS,
        capabilities=WRITING if writable else READING, binds=[bind],
        volumes=[f"{session.store}:{STORE_DIRECTORY}"])


class Asked:
    """A request to the shadow of a session, begun: the verbs are those of shadow.py."""

    def __init__(self, engine: Engine, session: Session, verb: str, request: Mapping[str, Any],
                 writable: bool = False, origin: bool = False) -> None:
        """Raises SandboxError for a request that is too long."""
        import zlib

        self.engine, self.session = engine, session
        self.name = f"{session.store}-{sandbox.random_id()}"
        text = sandbox.to_json(request).encode()
        if len(text) > REQUEST_BYTES:
            raise SandboxError("these are too many paths", "name a directory that holds them")
        program = zlib.compress(sandbox.asset("image/shadow.py"), 9)
        argv = shadow_argv(engine, session, self.name, verb, writable, origin)
        self.output = Output(argv, LONG_SECONDS,
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
            raise SandboxError(sandbox.one_line(str(answer.get("error")))[:1000],
                               sandbox.one_line(str(answer.get("hint", "")))[:1000])
        return answer

    def failure(self, status: int, err: str) -> SandboxError:
        """Why there is no answer."""
        spec, _ = self.session.created()
        if status == LACKING_STATUS:
            return SandboxError(f"{spec['image']} has no python3 or no git: snapshots need both",
                                "sandbox build, then sandbox recreate; or --no-checkpoint")
        if status == TURNED_STATUS:
            return SandboxError(f"{spec['directory']} is gone or leads to another place by now",
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


def ask_shadow(engine: Engine, session: Session, verb: str, request: Mapping[str, Any],
               writable: bool = False, origin: bool = False) -> dict[str, Any]:
    """The answer to a request: see Asked. Raises SandboxError."""
    return Asked(engine, session, verb, request, writable, origin).answer()


# --- Copies ---
# A session of its own copy has it in a volume. Nothing of the copy is mounted together with what
# is the person's, but for the commits: see static/session/commits.sh.

FROM_DIRECTORY, GIT_DIRECTORY = "/run/sandbox-from", "/run/sandbox-git"
DIVERGED_STATUS = 98


def closed_argv(engine: Engine, session: Session, script: str, words: Sequence[str],
                binds: Sequence[tuple[str, str, str]], capabilities: Sequence[str] = (),
                user: str = "0:0") -> list[str]:
    """The engine call for a script of static/session/ in a container of its own. It begins by
    checking that what is mounted is what is meant.
    """
    spec, _ = session.created()
    text = (sandbox.asset("session/mounts.sh") + sandbox.asset(f"session/{script}")).decode()
    paths = [bind for bind in binds if bind[0].startswith("/")]
    return engine.closed_argv(
        f"{session.copy}-{sandbox.random_id()}", spec["image"],
        ["sh", "-c", text, "sandbox", *words, *(sandbox.mounts_meant(paths) if paths else ())],
        labels={"sandbox.shadow": session.store}, limits=LIMITS, capabilities=capabilities,
        binds=binds, user=user)


def copy_argvs(engine: Engine, session: Session, source: Session | None) -> list[list[str]]:
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
    return [closed_argv(engine, session, "copy.sh", [os.path.basename(admin)], binds, WRITING)
            for binds in pairs]


def make_copy(engine: Engine, session: Session, source: Session | None = None) -> None:
    """Fill the copy of a session that is to be created, and take its first snapshot: what differs
    from that is its work. Raises SandboxError.
    """
    directory = session.labels["sandbox.directory"]
    for argv in copy_argvs(engine, session, source):
        step = sandbox.Step(f"copy {directory}")
        try:
            step.run(argv, silent_seconds=1)
        except BaseException as error:  # the end of the engine's client does not end its container
            Output(engine.argv("remove", argv[argv.index("--name") + 1]), LONG_SECONDS).result()
            if isinstance(error, SandboxError) and "No space left on device" in error.message:
                raise SandboxError(f"there is no room for a copy of {directory}",
                                   sandbox.NO_ROOM_HINT, 125) from None
            raise
        for line in step.tail:
            if line.startswith("not copied: "):
                sandbox.say(line)
    ask_shadow(engine, session, "snapshot", {})


def merge_copy(engine: Engine, session: Session, dry: bool = False) -> dict[str, Any]:
    """Bring what was done in the copy of a session into its directory: the answer of the shadow's
    merge, and "commits" with their number, the branch and a "problem". Raises SandboxError.
    """
    if not session.copy:
        raise SandboxError(f"{session.name} works on the directory itself: nothing is to merge",
                           "sandbox run --copy makes a session that works on a copy")
    if session.store not in engine.ask(engine.argv("volumes")).split():
        raise SandboxError(f"the snapshots of {session.name} are gone, and so is what tells its "
                           "work", f"copy what you want to keep: sandbox cp {session.name}:. .")
    ask_shadow(engine, session, "snapshot", {})
    answer = ask_shadow(engine, session, "merge", {"tree": "origin", "dry": dry},
                        not dry, origin=True)
    return {**answer, "commits": bring_commits(engine, session, dry)}


def bring_commits(engine: Engine, session: Session, dry: bool) -> dict[str, Any]:
    """Bring the commits of a copy as a branch into the person's repository."""
    spec, _ = session.created()
    directory, branch = spec["sources"][0], f"sandbox/{session.name}"
    admin = sandbox.linked_admin(directory)[1]
    common = os.path.dirname(os.path.dirname(admin)) if admin else f"{directory}/.git"
    found = {"branch": branch, "count": 0, "problem": ""}
    folders = (common, f"{common}/objects", f"{common}/refs", f"{common}/refs/heads")
    if not all(os.path.isdir(folder) and os.path.realpath(folder) == folder for folder in folders):
        return found
    problem = ""
    if branch in checked_out(common):
        problem = f"the branch {branch} is checked out: check another one out"
    elif not all(map(sandbox.is_folder_of_ours, folders)):
        problem = f"{common} is not yours"
    binds = [(session.copy, WORK_DIRECTORY, "ro"), (common, GIT_DIRECTORY, "ro"),
             *((f"{common}/{part}", f"{GIT_DIRECTORY}/{part}", "ro" if dry or problem else "")
               for part in ("objects", "refs"))]
    argv = closed_argv(engine, session, "commits.sh", [branch, "01"[dry or problem != ""]],
                       binds, user=session.user)
    status, out, err = Output(argv, LONG_SECONDS).result(ANSWER_BYTES)
    count = out.strip()
    if count.isdecimal() and len(count) < 10:
        found["count"] = int(count)
    if status == DIVERGED_STATUS:
        found["problem"] = f"the branch {branch} has other commits: rename it (git branch -m)"
    elif status:
        found["problem"] = sandbox.one_line(err.strip())[-500:] or f"git ended with {status}"
    elif found["count"]:
        found["problem"] = problem
    return found


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
    paths = len(answer["changed"]) + sum(bool(row.get("conflict")) for row in answer["left"])
    commits = answer["commits"]["count"]
    return " and ".join(counted(number, what) for number, what in
                        ((paths, "file"), (commits, "commit")) if number)


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def show_merge(engine: Engine, session: Session, dry: bool) -> int:
    """Merge, and print what has come; the exit status, 1 where something is left to a person."""
    if session.state == "running" and not dry:
        sandbox.say(f"{session.name} runs: what it writes from now on comes with the next merge")
    answer = merge_copy(engine, session, dry)
    conflicts = [row for row in answer["left"] if row.get("conflict")]
    commits = answer["commits"]
    for row in answer["changed"]:
        print(f"{row['status']:9} {sandbox.one_line(row['path'])}")
    for row in answer["changed"]:
        for risk in row.get("risk", ()):
            sandbox.say(f"look at {sandbox.one_line(row['path'])}: {sandbox.one_line(risk)}")
    for row in answer["left"]:
        if row["path"] != ".git":  # of it only commits can come, and they are counted
            sandbox.say(sandbox.one_line(f"{row['path']} was left as it is: {row['why']}"))
    if commits["problem"]:
        sandbox.say(f"its commits did not come: {commits['problem']}")
    elif commits["count"]:
        come = "would come" if dry else "came"
        sandbox.say(f"{counted(commits['count'], 'commit')} {come} as the branch "
                    f"{commits['branch']}")
    if not (answer["changed"] or answer["left"] or commits["count"]):
        sandbox.say("there is nothing to merge")
    return 1 if conflicts or commits["problem"] else 0
