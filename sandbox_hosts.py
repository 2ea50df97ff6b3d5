"""Sessions on other machines: the hosts that the key "hosts" names.

Imported only where a host is named: who has none pays nothing for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sandbox
from sandbox import Config, Engine, Output, SandboxError

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    asked = next((layer.values["runtime"] for layer in config.layers
                  if layer.origin in ("flags", "request") and "runtime" in layer.values), None)
    if asked not in (None, driver.name):
        raise SandboxError(f"the host {host} has {driver.name} and not {asked}",
                           "leave --rt out", 2)
    words = [word for option in driver.options if option in entry
             for word in (f"--{option}", entry[option])]
    return driver(host, [driver.name, *words])


def placed(engine: Engine, config: Config, spec: Mapping[str, Any],
           rootless: bool) -> tuple[dict[str, Any], str]:
    """See sandbox.placed(). What is mounted was said to be meant on the host, as it is written."""
    mounts = [spec["directory"], *(volume.split(":")[0] for volume in spec["volumes"])]
    if spec.get("workspace") == "copy":
        mounts = mounts[1:]
    if mounts and not (config.get("workspace") == "mount" and config.is_given("workspace")):
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
