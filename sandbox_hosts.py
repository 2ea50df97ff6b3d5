"""Sessions on other machines: the hosts that the key "hosts" names.

Imported only where a host is named: who has none pays nothing for it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import sandbox
from sandbox import Config, Engine, EngineProblem, Output, SandboxError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sandbox import Session

LIST_SECONDS = 8  # for a host to list its sessions


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
    for name, value in entry.items():
        if name not in ("runtime", *driver.options):
            known = ("runtime", *driver.options)
            raise SandboxError(f"{place}.{name}: unknown{sandbox.nearest(name, known)}",
                               f"a host of {driver.name} has {' and '.join(known)}")
        if value[:1] in ("", "-"):
            raise SandboxError(f"{place}.{name}: {value!r} is not a name")
    if not entry.keys() & {*driver.options}:
        raise SandboxError(f"{place}: which {driver.name} is meant is missing",
                           f"give it {' or '.join(driver.options)}")
    words = [word for option in driver.options if option in entry
             for word in (f"--{option}", entry[option])]
    return driver(host, [driver.name, *words])


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
        raise SandboxError(f"the {what} {mounts[0]} is on this machine, and {engine.host} is "
                           "another one", '"workspace": "mount" in the profile says that the '
                           f"path is meant on {engine.host}; or work on a copy: --copy", 125)
    if spec.get("workspace") == "copy":
        return dict(spec), sandbox.container_user(rootless)
    owner = owner_there(engine, spec["image"], spec["directory"])
    return {**spec, "sources": mounts, "git": None, "protect": []}, "0:0" if rootless else owner


def owner_there(engine: Engine, image: str, path: str) -> str:
    """uid:gid of a directory of the host. Raises SandboxError where there is none."""
    argv = engine.closed_argv(sandbox.step_name(), image, ["stat", "-c", "%u:%g", "/there"],
                              labels={}, limits={}, capabilities=(),
                              binds=[(path, "/there", "ro")])
    status, out, err = Output(argv, sandbox.LONG_SECONDS).result()
    if not status:
        return out.strip()
    error = engine.failure(err)
    if engine.diagnose(err) != "image":
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
            status, out, err = output.result()
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
