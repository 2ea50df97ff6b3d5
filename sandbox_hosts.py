"""Sessions on other machines: the hosts that the key "hosts" names.

Imported only where a host is named: who has none pays nothing for it.
"""

from __future__ import annotations

from typing import Any

import sandbox
from sandbox import Config, Engine, SandboxError


def driver_of(runtime: Any, place: str) -> type[Engine]:
    """The driver of a runtime. Raises SandboxError."""
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
