"""What the turns of a session change in its directory: snapshots outside of it, and their report.

A turn is one run of an agent, one prompt or one command. Before and after it static/image/shadow.py
takes a snapshot, in a container of its own from the session's image: it has no network and no
right but to read the directory (to restore: to write there), and a store in a volume that the
session never sees. Its program comes over stdin, so that it fits this version whatever the image.
What it answers is data of a container: it passes Asked.answer().

Imported only where a turn begins or its changes are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sandbox
from sandbox import CALL_SECONDS, LONG_SECONDS, Output, SandboxError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
                writable: bool) -> list[str]:
    """The engine call for a request; the program and the request follow on stdin."""
    spec, _ = session.created()
    source = spec["sources"][0] if spec.get("sources") else sandbox.resolved(spec["directory"])
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
                 writable: bool = False) -> None:
        """Raises SandboxError for a request that is too long."""
        import zlib

        self.engine, self.session = engine, session
        self.name = f"{session.store}-{sandbox.random_id()}"
        text = sandbox.to_json(request).encode()
        if len(text) > REQUEST_BYTES:
            raise SandboxError("these are too many paths", "name a directory that holds them")
        program = zlib.compress(sandbox.asset("image/shadow.py"), 9)
        self.output = Output(shadow_argv(engine, session, self.name, verb, writable), LONG_SECONDS,
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
               writable: bool = False) -> dict[str, Any]:
    """The answer to a request: see Asked. Raises SandboxError."""
    return Asked(engine, session, verb, request, writable).answer()
