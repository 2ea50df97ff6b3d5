"""Sessions on other machines: the hosts that the key "hosts" names.

Imported only where a host is named: who has none pays nothing for it.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sandbox
from sandbox import Check, Config, Engine, EngineProblem, Output, Remedy, SandboxError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sandbox import Session

LIST_SECONDS, LIST_BYTES = 8, 32 << 20  # for a host to list its sessions
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
    engine = driver(host, [driver.name, *words])
    engine.more = {name: entry[name] for name in driver.more_options if name in entry}
    return engine


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


def list_everywhere(config: Config, known: Mapping[str, str],
                    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """See sandbox.list_everywhere(): one call for each, side by side."""
    asked, lost = {}, dict(known)
    for name in sorted(set(config.get("hosts")) - set(known)):
        try:
            engine = engine_on(config, name)
            if config.given("runtime") in (None, engine.name):
                asked[name] = engine, Output(sandbox.containers_argv(engine), LIST_SECONDS)
        except (SandboxError, OSError) as error:
            lost[name] = silent(name, error)
    rows = []
    try:
        rows = [row for row in sandbox.list_sessions(sandbox.engines_here(config))
                if row["host"] not in asked]
    except SandboxError as error:
        if not isinstance(error, EngineProblem) or error.kind != "engine":
            lost[""] = error.message
    for name, (engine, output) in asked.items():
        try:
            status, out, err = output.result(LIST_BYTES)
            if status:
                raise engine.failure(err)
            rows += sandbox.session_rows(engine, sandbox.read_containers(engine, out))
        except (SandboxError, LookupError, TypeError, ValueError) as error:
            lost[name] = silent(name, error)
    return rows, lost


def silent(host: str, error: Exception) -> str:
    """The line for a host that has not answered."""
    lines = str(error).strip().splitlines() or ["it answers nonsense"]
    return f"{host} did not answer: {lines[-1][:300]}"


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
