"""Sessions on other machines: the hosts that the key "hosts" names.

Imported only where a host is named: who has none pays nothing for it.
"""

from __future__ import annotations

import os
import select
import sys
import time

import sandbox
from sandbox import Check, Config, Engine, EngineProblem, Output, Remedy, SandboxError

TYPE_CHECKING = False  # as in sandbox.py, whose import budget holds here, too
if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence
    from contextlib import suppress
    from typing import Any

    from sandbox import ListOf, Session
else:
    suppress = sandbox.suppress

LIST_SECONDS = 8  # for a host to list its sessions
PATIENCE_SECONDS = 2  # for which the others of a list wait for it
FIRST_ASK_SECONDS, LONGEST_ASK_SECONDS = 5, 300  # before one that did not answer is asked again
CLOCK_SECONDS = 60  # that the clock of a host may be off


def driver_of(runtime: Any, place: str) -> type[Engine]:
    """The driver of a runtime. Raises SandboxError."""
    if runtime == "kubectl":
        import sandbox_kube

        return sandbox_kube.Kubectl
    try:
        return sandbox.ENGINES[sandbox.an_engine(runtime)]
    except ValueError as error:
        raise SandboxError(f"{place}.runtime: {error}") from None


def engine_on(config: Config, host: str) -> Engine:
    """The engine of a host. Raises SandboxError where it is unknown or its entry is wrong."""
    hosts = config.get("hosts") or {}
    place = f"{sandbox.config_path()}: hosts.{host}"
    if host not in hosts:
        named = f"the hosts are {', '.join(hosts)}" if hosts else "there are none"
        hint = f"{named}: they stand in the key hosts of {sandbox.config_path()}"
        raise SandboxError(f"there is no host {host!r}{sandbox.nearest(host, hosts)}", hint, 125)
    entry = hosts[host]
    driver = driver_of(entry.get("runtime"), place)
    known = ("runtime", *driver.options, *driver.more_options)
    for name, value in entry.items():
        if name not in known:
            raise SandboxError(f"{place}.{name}: unknown{sandbox.nearest(name, known)}",
                               f"a host of {driver.name} has {' and '.join(known)}")
        if value[:1] in ("", "-"):
            raise SandboxError(f"{place}.{name}: {value!r} is not a name")
    if not entry.keys() & {*driver.options}:
        raise SandboxError(f"{place}: which {driver.name} is meant is missing",
                           f"give it {' or '.join(driver.options)}")
    words = [word for option in driver.options if option in entry
             for word in (f"--{option}", entry[option])]
    return driver(host, [driver.name, *words],
                  {name: entry[name] for name in driver.more_options if name in entry})


def placed(engine: Engine, config: Config, spec: Mapping[str, Any],
           rootless: bool) -> tuple[dict[str, Any], str]:
    """See sandbox.placed(). What is mounted was said to be meant on the host, as it is written;
    else of a file is "sent" what is in it.
    """
    mounts = [spec["directory"], *(volume.split(":")[0] for volume in spec["volumes"])]
    meant = config.get("workspace") == "mount" and config.is_given("workspace")
    if spec.get("workspace") == "copy":
        sent = [":".join([source, *volume.split(":")[1:]]) for volume, source in
                zip(spec["volumes"], spec["sources"][1:], strict=True) if os.path.isfile(source)]
        spec = {**spec, "sent": sent}
        mounts = [path for path, source in zip(mounts[1:], spec["sources"][1:], strict=True)
                  if not os.path.isfile(source)]
    if mounts and not meant:
        what = "directory" if mounts[0] == spec["directory"] else "mounted path"
        there = engine.host or f"the service of {engine.name}"
        raise SandboxError(f"the {what} {mounts[0]} is on this machine, and {there} is on "
                           "another one", '"workspace": "mount" in the profile says that the '
                           "path is meant there; or work on a copy: --copy", 125)
    check_ports(engine, spec["ports"])
    if spec.get("workspace") == "copy":
        if (not (engine.is_named or config.is_given("workspace"))
                and engine.place().startswith(("tcp://127.", "tcp://localhost:", "tcp://[::1]:"))):
            sandbox.say(f"{engine.host} is taken for another machine, so the session works on a "
                        'copy; if it is this one: "workspace": "mount"')
        return dict(spec), sandbox.container_user(rootless)
    owner = owner_there(engine, config, spec["directory"])
    return {**spec, "sources": mounts, "git": None, "protect": []}, "0:0" if rootless else owner


def check_ports(engine: Engine, ports: Sequence[str]) -> None:
    """Raise SandboxError for ports that cannot be brought to this machine."""
    for port in ports:
        if port.endswith("/udp"):
            raise SandboxError(f"-p {port} would be of {engine.host}, and ssh brings no UDP here",
                               "leave it out", 125)
    if ports and not forward_argv(engine, "", ports):
        number = ports[0].split(":")[-2]
        raise SandboxError(f"-p {ports[0]} would be of {engine.host}, which is not reached by ssh",
                           "leave it out, and if you can log in there, do this once it listens: "
                           f"ssh -N -L {number}:CONTAINER-ADDRESS:PORT {engine.host}", 125)


def forward_argv(engine: Engine, id: str, ports: Sequence[str]) -> list[str]:
    """Has ports that a session publishes on a host listen on the loopback of this machine, by the
    engine's client or by ssh, which wants a command or -N; [] where neither can.
    """
    own = engine.forward_argv(id, ports)
    words = [] if own else engine.ssh_words()
    if not words:
        return own
    ends = []
    for port in ports:
        address, _, number = port.rsplit(":", 1)[0].rpartition(":")
        address = "127.0.0.1" if address in ("", "0.0.0.0", "[::]") else address
        ends.append(f"127.0.0.1:{number}:{address}:{number}")
    return ["ssh", "-o", "ExitOnForwardFailure=yes", "-o", "BatchMode=yes",
            *sandbox.each("-L", ends), *words]


class Ports:
    """The ports of a session, on this machine as long as it is held; said how where it is brief."""

    def __init__(self, engine: Engine, name: str, ports: Sequence[str], brief: bool) -> None:
        self.engine, self.name, self.ports, self.brief, self.pid = engine, name, ports, brief, 0
        self.begun = time.monotonic()

    def __enter__(self) -> None:
        if not self.ports:
            return
        known = sandbox.recall([self.engine], self.name)
        argv = forward_argv(self.engine, known[1].id if known else "", self.ports)
        if not argv:
            return
        is_ssh = argv[0] == "ssh"
        if self.brief or any(is_taken(port) for port in self.ports):
            sandbox.say(f"the ports of {self.name} are those of {self.engine.host}"
                        f"{'' if self.brief else ', and one of them is taken here'}: "
                        + sandbox.quote_all([*argv, "-N"] if is_ssh else argv))
            return
        held, self.end = os.pipe()  # which also ends when we are killed
        with open(os.devnull, "wb") as null:
            self.pid = sandbox.spawn([*argv, "cat"] if is_ssh else argv,
                                     fds={0: held, 1: null.fileno()}, own_group=True)
        os.close(held)

    def has_ended(self) -> bool:
        """Whether nothing brings them any more, or never did."""
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            os.close(self.end)
            self.pid = 0
        return not self.pid

    def __exit__(self, *_: object) -> None:
        if self.pid and not self.has_ended():
            sandbox.terminate(self.pid)
            os.close(self.end)


def is_taken(port: str) -> bool:
    """Whether something listens on a port of this machine already."""
    import socket

    try:
        socket.create_server(("127.0.0.1", int(port.split(":")[-2]))).close()
    except OSError:
        return True
    return False


def check_there(engine: Engine, config: Config) -> list[Check]:
    """Room and clock of a host, as a container sees them."""
    script = "df -Pk / | tail -n 1; date +%s"
    try:
        out = engine.ask(engine.try_argv(config.image, ["sh", "-c", script], "none"))
        device, clock = out.strip().split("\n")
        free, off = int(device.split()[3]) / 1e6, int(clock) - time.time()
    except (SandboxError, LookupError, ValueError):
        return []  # as without an image, which another line says
    room = Remedy([], note=f"make room on {engine.host}: the image and its build need 8 GB")
    right = Remedy([], note=f"set the clock of {engine.host}")
    return [Check("disk", "warn" if free < 8 else "ok", f"{free:.0f} GB free on {engine.host}",
                  room if free < 8 else None),
            Check("clock", "warn" if abs(off) > CLOCK_SECONDS else "ok",
                  f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} this machine's",
                  right if abs(off) > CLOCK_SECONDS else None)]


def owner_there(engine: Engine, config: Config, path: str) -> str:
    """uid:gid of a directory of the host. Raises SandboxError where there is none."""
    argv = engine.closed_argv(sandbox.step_name(), config.image, ["stat", "-c", "%u:%g", "/there"],
                              labels={}, limits={}, capabilities=(),
                              binds=[(path, "/there", "ro")])
    status, out, err = Output(argv, sandbox.LONG_SECONDS).result()
    owner = out.strip()
    if not status and len(owner) < 22 and all(map(str.isdecimal, owner.split(":"))):
        return owner
    if engine.diagnose(err) == "image":
        raise sandbox.missing_image(engine, config)
    error = engine.failure(err)
    if not isinstance(error, EngineProblem):
        error.hint = f"make the directory on {engine.host}, or correct the path"
    raise error


class Listed:
    """What a host has listed last, and why it does not say more."""

    def __init__(self, name: str, of: ListOf) -> None:
        self.name, self.of, self.why = name, of, ""
        self.rows: list[Any] = []
        self.asked: tuple[Engine, Output] | None = None
        # Of one that is asked aside: by whom, when again, and whether nobody waits for that.
        self.thread: threading.Thread | None = None
        self.pause, self.again, self.aside = FIRST_ASK_SECONDS, 0.0, False
        self.seen = ""

    def begin(self, config: Config) -> None:
        self.asked, self.why = None, ""
        try:
            engine = engine_on(config, self.name)
            if config.given("runtime") in (None, engine.name):
                self.asked = engine, Output(sandbox.containers_argv(engine), LIST_SECONDS)
        except (SandboxError, OSError) as error:
            self.why = silent(self.name, error)

    def finish(self) -> str:
        """What is wrong with its answer, if anything."""
        if not self.asked:
            return self.why
        (engine, output), self.asked = self.asked, None
        try:
            status, out, err = output.result()
            if status:
                raise engine.failure(err)
            found = sandbox.read_containers(engine, out)
            self.rows = self.of(engine, found)
            had = ", ".join(f"{row['name']} {row['state']}" for row in found
                            if not sandbox.is_proxy(row)) or "no session"
            self.seen = f"; at {time.strftime('%H:%M')} it had {had}"[:1000]
        except (SandboxError, AttributeError, LookupError, RecursionError, TypeError,
                ValueError) as error:
            self.why = silent(self.name, error)
        return self.why

    def ask_aside(self, config: Config) -> None:
        """Have it asked, unless it is being asked or left alone for a while."""
        if time.monotonic() > self.again and not (self.thread and self.thread.is_alive()):
            import threading

            self.thread = threading.Thread(target=self.ask, args=(config,), daemon=True)
            self.thread.start()

    def ask(self, config: Config) -> None:
        began, now = time.monotonic(), Listed(self.name, self.of)
        now.begin(config)
        if now.finish():
            self.again = time.monotonic() + self.pause
            self.pause = min(2 * self.pause, LONGEST_ASK_SECONDS)
            now.why += self.seen
        else:
            self.rows, self.seen, self.pause = now.rows, now.seen, FIRST_ASK_SECONDS
        self.why = now.why
        self.aside = bool(self.why) or time.monotonic() - began > PATIENCE_SECONDS

    def wait(self, until: float) -> str:
        """Wait for the answer of one that has answered soon before; why there is nothing of it."""
        if self.thread and not self.aside:
            self.thread.join(max(0, until - time.monotonic()))
        new = not (self.seen or self.why) and self.thread and self.thread.is_alive()
        return f"{self.name} has not answered yet" if new else self.why


def list_everywhere(config: Config, of: ListOf,
                    aside: dict[str, Listed] | None) -> tuple[list[Any], dict[str, str]]:
    """See sandbox.list_everywhere(): one call for each, side by side."""
    until, names = time.monotonic() + PATIENCE_SECONDS, sorted(config.get("hosts"))
    hosts = {} if aside is None else aside
    for name in names:
        host = hosts.setdefault(name, Listed(name, of))
        host.begin(config) if aside is None else host.ask_aside(config)
    # An engine of this machine, or the host that our environment means.
    rows: list[Any] = []
    lost: dict[str, str] = {}
    try:
        engine, found = sandbox.list_containers(sandbox.engines_here(config))
        rows += of(engine, found) if engine.host not in names else []
    except SandboxError as error:
        if not isinstance(error, EngineProblem) or error.kind != "engine":
            lost[""] = error.message
    for name in names:
        if why := hosts[name].finish() if aside is None else hosts[name].wait(until):
            lost[name] = why
        else:
            rows += hosts[name].rows
    return rows, lost


def silent(host: str, error: Exception) -> str:
    """The line for a host that has not answered."""
    lines = str(error).strip().splitlines() or ["it answers nonsense"]
    return f"{host} did not answer: {lines[-1][:300]}"


PROBE_SECONDS, UNANSWERED_SECONDS = 30, 120
CUT_STATUS = 255  # as that of ssh


def wait_for(engine: Engine, pid: int) -> int:
    """Wait for a client of the engine, which leads a group: its status, or CUT_STATUS where it was
    ended because its host does not answer any more. It would never know: a network that loses all
    packets closes no connection.
    """
    from _thread import allocate_lock, start_new_thread  # what threading adds takes 1 ms

    runs, cut = allocate_lock(), False

    def watch() -> None:
        nonlocal cut
        answered = time.monotonic()
        while not runs.acquire(timeout=PROBE_SECONDS):
            if answers(engine):
                answered = time.monotonic()
            elif time.monotonic() - answered > UNANSWERED_SECONDS and runs.locked():
                cut = True
                with suppress(ProcessLookupError):
                    os.killpg(pid, 9)
                return

    runs.acquire()
    start_new_thread(watch, ())
    try:
        status = sandbox.wait_for(pid)
    finally:
        runs.release()
    return CUT_STATUS if cut else status


def answers(engine: Engine) -> bool:
    """Whether a host says anything at all."""
    try:
        status, _, err = Output(engine.argv("ping"), PROBE_SECONDS).result()
    except (SandboxError, OSError):
        return False
    return not status or engine.diagnose(err) != "daemon"


# Prints the tag of a command whose first process, which has none above it inside, is still there.
LEADS = """\
for environ in $(grep -ls "SANDBOX_EXEC=$1" /proc/[0-9]*/environ); do
  ! grep -q '^PPid:[[:space:]]*0$' "${environ%environ}status" || { echo "$1"; exit; }
done 2>/dev/null"""


def check_cut(engine: Engine, session: Session, tag: str, held: bool = False) -> None:
    """Raise SandboxError where the connection was cut, and what ran there goes on or may do so."""
    again = f"sandbox attach {session.name}" if held else f"sandbox run -n {session.name} -x ps"
    cut = f"the connection to {engine.host} was cut"
    argv = engine.exec_argv(session.id or session.name, ["sh", "-c", LEADS, "sandbox", tag],
                            user=session.user)
    try:
        status, out, err = Output(argv).result()
    except EngineProblem as error:
        status, out, err = 1, "", error.message
        lost = True
    else:
        lost = status != 0 and engine.diagnose(err) == "daemon"
    if lost:
        raise SandboxError(f"{err.strip()}\n{cut}, and what ran in {session.name} may go on",
                           f"when {engine.host} answers again: {again}", 125)
    if out.strip() == tag and not held:
        raise SandboxError(f"{cut}, and what ran in {session.name} goes on; its output is lost",
                           f"to look at it: {again}", 125)


# --- Jobs ---
# What runs a job is in its session, see static/session/keep.py. Here it is followed by a child of
# the job's supervisor, which comes back where it was cut.

SILENT_SECONDS = 60  # after which a connection is given up: who keeps it says more often that he is
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60
TRIES = 3  # of a call that does not begin though its host answers
ERROR_BYTES, LOOK_MS = 1 << 20, 250  # of what a call says on stderr, and how often that is seen
END_MS = 20_000  # for a call to end after all: then what its session has kept is gone
CANCEL_SECONDS = 600  # for which a host that does not answer keeps a job that was cancelled


def followed(engine: Engine, session: Session, workdir: str, tag: str, command: Sequence[str],
             cancel: str) -> tuple[list[str], dict[str, str]]:
    """The call that runs a command in a session of a host to its end, whatever becomes of the
    connection, unless there is the file `cancel`; and what its environment needs besides
    SANDBOX_ENV.
    """
    about = sandbox.to_json({
        "runtime": f"{engine.name}@{engine.host}", "workdir": workdir, "tag": tag,
        "cancel": cancel,
        "session": [session.name, "", {"sandbox.user": session.user}, session.id]})
    return sandbox.own_argv("sandbox_hosts", "follow", *command), {"SANDBOX_FOLLOW": about}


def follow() -> int:
    """Run what followed() says, with its output on ours: its exit status."""
    about = sandbox.parse_json(os.environ.pop("SANDBOX_FOLLOW"))
    engine = sandbox.engine_of(*about["runtime"].partition("@")[::2])
    kept = Kept(engine, sandbox.Session(*about["session"]), about, sys.argv[2:])
    pause, tries, had, cancelled = FIRST_PAUSE_SECONDS, 0, None, 0.0
    while True:
        status, err = kept.attempt()
        if kept.ended:
            return status
        gone = is_gone(engine, kept.session)
        tries += gone is False
        if gone or not kept.begun and tries >= TRIES:
            os.write(2, err)
            return sandbox.KILLED if gone else status
        if os.path.exists(about["cancel"]):  # whoever asked for that could not reach it
            cancelled = cancelled or time.monotonic()
            if gone is False:
                sandbox.signal_tagged(engine, kept.session, kept.tag, "TERM", 3)
            elif time.monotonic() - cancelled > CANCEL_SECONDS:
                return sandbox.KILLED
        pause = FIRST_PAUSE_SECONDS if had != kept.position else pause
        had = kept.position
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class Kept:
    """A command that a session keeps, and how far its output has come."""

    def __init__(self, engine: Engine, session: Session, about: Mapping[str, Any],
                 command: Sequence[str]) -> None:
        self.engine, self.session = engine, session
        self.position, self.begun, self.ended, self.raw = 0, False, False, False
        # All that may be called, for an upgrade may put other programs in the place of ours.
        workdir, tag = about["workdir"], about["tag"]
        keep = ["python3", "-I", "-S", "-c", sandbox.asset("session/keep.py").decode()]
        begin = ["sh", "-c", sandbox.exec_script(), "sandbox", "hold", "0", *keep, *command]
        self.begin = engine.exec_argv(session.id, begin, user=session.user, workdir=workdir,
                                      stdin=True, env=["SANDBOX_ENV", f"SANDBOX_EXEC={tag}",
                                                       "SANDBOX_HOLD"])
        self.again = engine.exec_argv(session.id, keep, user=session.user, stdin=True,
                                      env=["SANDBOX_HOLD"])
        self.plain = sandbox.exec_argv(engine, session, workdir, tag, command)
        self.tag = tag

    def attempt(self) -> tuple[int, bytes]:
        """Follow it until it or the connection ends: its status, and what came on stderr."""
        errors, (stdin, given), (out, stdout) = sandbox.file_of(b""), os.pipe(), os.pipe()
        pid = sandbox.spawn(self.again if self.begun else self.begin, own_group=True,
                            fds={0: stdin, 1: stdout, 2: errors},
                            env={**os.environ, "SANDBOX_HOLD": f"{self.tag} {self.position}"})
        Output.close(stdin, stdout)
        hangs, status = True, -1
        try:
            hangs, status = self.read(out, given, errors)
        finally:
            if hangs:
                with suppress(ProcessLookupError):
                    os.killpg(pid, 9)
            Output.close(given, out)
            ended = sandbox.wait_for(pid)
        err = os.pread(errors, ERROR_BYTES, 0)
        os.close(errors)
        return ended if status < 0 else status, err

    def read(self, out: int, given: int, errors: int) -> tuple[bool, int]:
        """Whether the call has not ended; and the status, -1 for that of the call."""
        frames, poller, heard = sandbox.Frames(), select.poll(), time.monotonic()
        poller.register(out, select.POLLIN)
        while (time.monotonic() - heard < SILENT_SECONDS
               and os.fstat(errors).st_size < ERROR_BYTES):
            if not poller.poll(LOOK_MS):
                continue
            data, heard = os.read(out, 65536), time.monotonic()
            if not data:
                return False, -1
            try:
                found = [] if self.raw else frames.feed(data)
            except ValueError:  # it is of static/session/exec.sh, or a lie
                self.raw, data, found = True, bytes(frames.rest), []
            if self.raw:
                self.ended = True
                os.write(1, data)
            for kind, content in found:
                self.begun = self.begun or kind != b"n"
                if kind in b"om":
                    os.write(1 if kind == b"o" else 2, content)
                    self.position += 5 + len(content)
                elif kind == b"n" and not self.begun:  # it cannot be kept
                    os.execvp(self.plain[0], self.plain)
                elif kind == b"e":
                    self.ended = True
                    with suppress(OSError):
                        os.write(given, b"!")
                    poller.poll(END_MS)
                    if content.isdigit() and len(content) < 4:
                        return True, int(content) & 255
                    sandbox.say("what kept it in its session has ended: how it did is not known")
                    return True, 125
        return True, -1


def is_gone(engine: Engine, session: Session) -> bool | None:
    """Whether a session has ended; None where the host does not say so."""
    try:
        status, out, err = Output(engine.inspect_argv(session.id)).result()
        if status:
            return engine.is_absent(err) or None
        state = engine.read_inspected(out)[2]
        return None if state == "lost" else state not in ("running", "paused")
    except (SandboxError, LookupError, ValueError, TypeError):
        return None


def await_end(engine: Engine, session: Session, argv: Sequence[str]) -> None:
    """Make a call that ends with something in a session, until it was not cut off before that."""
    pause, tries, began = FIRST_PAUSE_SECONDS, 0, time.monotonic()
    while wait_for(engine, sandbox.spawn(argv, own_group=True)) and tries < TRIES:
        if time.monotonic() - began > LONGEST_PAUSE_SECONDS:  # it was made, and cut later
            pause, tries = FIRST_PAUSE_SECONDS, 0
        gone = is_gone(engine, session)
        if gone:
            return
        tries += gone is False
        time.sleep(pause)
        pause, began = min(2 * pause, LONGEST_PAUSE_SECONDS), time.monotonic()


def take_over(engine: Engine, session: Session) -> None:
    """Take what an earlier version has kept of a session by its name alone."""
    bare = engine.bare(session.name)
    note = os.path.join(sandbox.sandbox_home(), "known", f"{engine.name}-{bare}.json")
    try:
        if sandbox.read_json(note)["id"] != session.id:
            return
    except (OSError, ValueError, LookupError, TypeError):
        return
    moved = [(path_of(bare), path_of(session.name)) for path_of in
             (sandbox.jobs_path, sandbox.terminals_path, sandbox.settings_path)]
    for old, new in [*moved, (note, sandbox.memory_path(engine, session.name))]:
        with suppress(OSError):
            sandbox.make_private(os.path.dirname(new))
            os.rename(old, new)
