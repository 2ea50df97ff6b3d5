"""Sessions with an allowlist, and the outside that they reach: see outside.py."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conftest import IMAGE, ROOT, Engine, Result, unique_name, write_config
from outside import PUBLIC
from service import wait_for

NAMES = {"api.test": PUBLIC, "sub.api.test": PUBLIC, "other.test": PUBLIC,
         "private.test": "127.0.0.3",
         "model.test": "127.0.0.1"}  # fmt: skip
LOCAL = "127.0.0.1:8080"  # a rule for the outside that needs no name


def inspected(engine: Engine, name: str, format: str) -> str:
    answer = engine.run("container", "inspect", "--format", format, name)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def proxy_of(engine: Engine, name: str) -> str:
    """The name of a session's proxy container."""
    return "sandbox-proxy-" + inspected(engine, name, '{{index .Config.Labels "sandbox.session"}}')


def shown_network(engine: Engine, name: str) -> str:
    """What `ps` says of a session's network."""
    rows = json.loads(engine.sandbox("ps", "--json").stdout)
    return next((str(row["network"]) for row in rows if row["name"] == name), "gone")


def left_of(engine: Engine, id: str) -> list[str]:
    """Containers and volumes that an id has left."""
    containers = engine.run("ps", "-a", "--filter", f"label=sandbox.session={id}", "--format",
                            "{{.Names}}")
    volumes = engine.run("volume", "ls", "-q", "--filter", f"name=sandbox-net-{id}")
    assert containers.returncode == volumes.returncode == 0, containers.stderr + volumes.stderr
    return [*containers.stdout.split(), *volumes.stdout.split()]


def add_names(engine: Engine, proxy: str, names: Mapping[str, str]) -> None:
    """Give names their addresses where the proxy looks first."""
    with open(inspected(engine, proxy, "{{.HostsPath}}"), "a") as file:
        file.writelines(f"{address} {name}\n" for name, address in names.items())


def make_certificate(directory: Path, *names: str) -> Path:
    """A key and a certificate that is its own authority."""
    alternatives = ",".join(f"DNS:{name}" for name in names)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2",
         "-subj", f"/CN={names[0]}", "-addext", f"subjectAltName={alternatives}",
         "-keyout", directory / "key.pem", "-out", directory / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    for name in ("key.pem", "cert.pem"):
        (directory / name).chmod(0o644)
    return directory / "cert.pem"


class Outside:
    """Servers in the network namespace of a session's proxy. It must go before the proxy goes."""

    def __init__(self, engine: Engine, session: str, files: Path | None = None) -> None:
        self.engine, self.names = engine, set[str]()
        self.proxy = proxy_of(engine, session)
        self.directory = files or engine.directory()
        self.certificate = make_certificate(self.directory, "api.test")
        add_names(engine, self.proxy, NAMES)
        shutil.copy(ROOT / "tests" / "outside.py", self.directory)
        self.start("python3", f"{self.directory}/outside.py", str(self.directory))
        try:
            wait_for((self.directory / "ready").exists)
        except AssertionError:
            said = [engine.run("logs", name) for name in self.names]
            self.end()
            raise AssertionError(said) from None

    def start(self, *argv: str) -> None:
        """Run a program in the namespace, in a container that end() removes."""
        app, name = self.engine.area / "app", f"{unique_name()}-outside"
        self.names.add(name)
        made = self.engine.run(
            "run", "-d", "--init", "--name", name, "--network", f"container:{self.proxy}",
            "--cap-add", "NET_ADMIN", "-v", f"{self.directory}:{self.directory}", "-v",
            f"{app}:{app}:ro",
            "-e", f"PYTHONPATH={app}", "-e", "PYTHONDONTWRITEBYTECODE=1", IMAGE, *argv,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr

    def end(self) -> None:
        self.engine.remove(self.names)


class Guarded:
    """A session with an allowlist, in a home and a project of its own."""

    def __init__(
        self, engine: Engine, *allow: str, outside: bool = True, user: str = "",
        **configuration: object
    ) -> None:
        self.engine, self.name, self.user = engine, unique_name(), user or engine.user
        self.project, self.home = engine.directory(self.user), engine.directory(self.user)
        write_config(self.home, volumes=[f"{engine.area}/app:{engine.area}/app:ro"],
                     **configuration)
        made = self.run("true", *(word for rule in allow for word in ("--allow", rule)))
        assert made.returncode == 0, made.stderr
        self.proxy = proxy_of(engine, self.name)
        self.outside = Outside(engine, self.name) if outside else None
        if self.outside:
            shutil.copy(self.outside.certificate, self.project / "ca.pem")

    @property
    def id(self) -> str:
        return self.proxy.removeprefix("sandbox-proxy-")

    @property
    def where(self) -> dict[str, Any]:
        return {"cwd": self.project, "home": self.home, "user": self.user}

    def run(self, command: str, *options: str) -> Result:
        return self.engine.sandbox("run", "-n", self.name, *options, "-x", command, **self.where)

    def python_argv(self, program: str, *options: str) -> list[str]:
        """A program inside that can import websockets, and trusts the outside's certificate."""
        path = self.project / f"{unique_name()}.py"
        path.write_text(program)
        path.chmod(0o644)
        return ["run", "-n", self.name, "-e", f"PYTHONPATH={self.engine.area}/app",
                # fmt: skip
                "-e", f"SSL_CERT_FILE={self.project}/ca.pem", *options, "-x", "python3", str(path)]

    def python(self, program: str, *options: str) -> Result:
        return self.engine.sandbox(*self.python_argv(program, *options), **self.where)

    def net(self, action: str, *hosts: str) -> Result:
        return self.engine.sandbox("net", action, self.name, *hosts, **self.where)

    def rules(self) -> Any:
        return json.loads(self.net("show").stdout)

    def answers(self, *places: str) -> list[str]:
        """The statuses that the proxy gives for plain requests; '' where it does not answer."""
        ask = ("printf 'GET http://%s/ HTTP/1.0\\r\\n\\r\\n' | nc 127.0.0.1 3128 "
               "| head -n 1 | cut -d' ' -f2; echo ,")
        answer = self.run("; ".join(ask % place for place in places))
        return [text.strip() for text in answer.stdout.split(",")[:-1]]

    def end(self) -> None:
        if self.outside:
            self.outside.end()
        removed = self.engine.sandbox("rm", self.name, **self.where)
        assert removed.returncode == 0, removed.stderr

    def __enter__(self) -> "Guarded":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
