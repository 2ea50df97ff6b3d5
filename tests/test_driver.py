"""A third engine is one class: command line and web service run on a driver of plain namespaces.

No docker and no podman are on its PATH, and nothing of ours knows of it but the table of engines.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATH, ROOT, Engine, Result, write_config
from service import Service

pytestmark = pytest.mark.parametrize("engine", ["namespaces"], indirect=True)

LAUNCHER = """\
import namespaces
import sandbox

sandbox.ENGINES["namespaces"] = namespaces.Namespaces
sandbox.entry()
"""


class Namespaced(Engine):
    """The machine's namespaces as an engine, and the command line that knows of them."""

    def sandbox_argv(self, *args: str) -> list[str]:
        return [super().sandbox_argv()[0], str(self.area / "namespaces"), *args]

    def environ(self, user: str | None = None, home: Path | None = None) -> dict[str, str]:
        return {**super().environ(user, home), "PATH": str(self.area / "bin"),
                "NAMESPACES_HOME": str(self.area / "containers")}

    def session_ids(self) -> set[str]:
        return {path.parent.name for path in self.area.glob("containers/*/container.json")}

    def remove(self, ids: set[str]) -> None:
        if ids:
            program = [super().sandbox_argv()[0], str(self.area / "namespaces" / "namespaces.py")]
            subprocess.run([*program, "remove", *ids], check=True, **self.where())


@pytest.fixture(scope="module")
def engine(area: Path) -> Iterator[Namespaced]:
    shutil.copytree(area / "app", area / "namespaces")
    shutil.copy(ROOT / "tests" / "namespaces.py", area / "namespaces")
    (area / "namespaces" / "__main__.py").write_text(LAUNCHER)
    (area / "bin").mkdir()
    for folder in reversed(PATH.split(":")):
        for program in Path(folder).glob("*"):
            if not program.name.startswith(("docker", "podman")):
                link = area / "bin" / program.name
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    engine = Namespaced("namespaces", "namespaces", "root", area)
    yield engine
    assert not engine.session_ids()


def sessions(engine: Engine) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(engine.sandbox("ps", "--json").stdout)
    return rows


def answered(ran: Result) -> tuple[int, str, str]:
    return ran.returncode, ran.stdout, ran.stderr


def test_no_other_engine_is_there(engine: Namespaced) -> None:
    assert not shutil.which("docker", path=engine.environ()["PATH"])
    ran = engine.sandbox("ps", "--rt", "podman")
    assert ran.returncode == 1 and "podman is not installed" in ran.stderr
    assert "namespaces" in engine.sandbox("ps", "--rt", "nothing").stderr
    assert engine.sandbox("__complete", "ps", "--rt", "").stdout.split()[-1] == "namespaces"


def test_a_session_from_its_creation_to_its_removal(engine: Namespaced, project: Path, home: Path,
                                                    name: str) -> None:
    ran = engine.sandbox("run", "-n", name, "-x", "cat; echo err >&2; id -u; pwd; exit 7",
                         input="given")
    assert answered(ran) == (7, f"given0\n{project}\n", "err\n")
    (row,) = sessions(engine)
    assert (row["name"], row["state"], row["runtime"]) == (name, "running", "namespaces")
    assert row["directory"] == str(project) and row["network"] == "open"

    # A second run enters the same container: its processes and files are there.
    engine.sandbox("run", "-n", name, "-x",
                   "echo kept >/tmp/state; touch here; sleep 1000 >&- 2>&- & "
                   "until pgrep -xf 'sleep 1000'; do sleep 0.1; done")
    ran = engine.sandbox("run", "-n", name, "-x", "cat /tmp/state; pgrep -c sleep; echo $$ >here")
    assert ran.stdout == "kept\n2\n", ran  # the first command sleeps, too
    assert int((project / "here").read_text()) < 1000  # a pid of its own namespace
    assert not Path("/tmp/state").exists()

    assert answered(engine.sandbox("rm", name)) == (0, f"{name}\n", "")
    assert sessions(engine) == [] and not engine.session_ids()


def test_the_environment_is_that_of_a_run(engine: Namespaced, project: Path, home: Path,
                                          name: str) -> None:
    shown = ("-x", 'echo "$API_KEY"')
    assert engine.sandbox("run", "-n", name, "-e", "API_KEY=hush", *shown).stdout == "hush\n"
    assert engine.sandbox("run", "-n", name, *shown).stdout == "\n"


def test_a_stopped_session_is_started(engine: Namespaced, project: Path, home: Path,
                                      name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "echo kept >/tmp/state")
    (id,) = engine.session_ids()
    program = [*engine.sandbox_argv()[:1], str(engine.area / "namespaces" / "namespaces.py")]
    subprocess.run([*program, "stop", name], check=True, **engine.where())
    assert [row["state"] for row in sessions(engine)] == ["exited"]
    ran = engine.sandbox("run", "-n", name, "-x", "cat /tmp/state")
    assert (ran.returncode, ran.stdout) == (0, "kept\n") and engine.session_ids() == {id}


def test_the_printed_commands_make_a_working_session(engine: Namespaced, project: Path, home: Path,
                                                     name: str) -> None:
    for _ in range(2):  # of a new session, and of one that is there
        lines = engine.sandbox("config", "command", "-n", name, "-x", "pwd").stdout
        pasted = subprocess.run(["sh", "-ec", lines], capture_output=True, text=True,
                                **engine.where())
        assert pasted.stdout == f"{project}\n", lines + pasted.stderr
    assert engine.sandbox("run", "-n", name, "-x", "pwd").stdout == pasted.stdout


def test_a_session_without_a_network(engine: Namespaced, project: Path, home: Path,
                                     name: str) -> None:
    ran = engine.sandbox("run", "-n", name, "--net", "none", "-x", "grep -c : /proc/net/dev")
    assert ran.stdout == "1\n" and sessions(engine)[0]["network"] == "none"  # its loopback


def test_what_runs_on_a_terminal_is_left_and_come_back_to(
    engine: Namespaced, project: Path, home: Path, name: str
) -> None:
    with engine.pty("run", "-n", name, "-x", "echo ready; cat; exit 5") as terminal:
        terminal.expect("ready")
        terminal.send("\x1cd")
        assert terminal.wait() == 0
    (row,) = [row for row in sessions(engine) if row["name"] == name]
    assert row["running"]
    with engine.pty("attach", name) as terminal:
        terminal.expect("ready")
        terminal.send("\x04")
        assert terminal.wait() == 5
    assert engine.sandbox("logs", name).stdout.startswith("ready\n")
    assert engine.sandbox("cp", f"{name}:/run/sandbox-began", "began").returncode == 0
    assert (project / "began").read_text().startswith("sandbox\n")
    assert answered(engine.sandbox("stop", name)) == (0, f"{name}\n", "")
    assert answered(engine.sandbox("start", name)) == (0, f"{name}\n", "")


def test_what_a_container_is_not_created_from_is_said(engine: Namespaced, project: Path, home: Path,
                                                      name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    write_config(home, volumes=[f"{home}:/more"])
    ran = engine.sandbox("run", "-n", name, "-x", "true")
    assert ran.returncode == 0 and f"it lacks {home}:/more" in ran.stderr
    (home / "note").write_text("here")
    engine.sandbox("rm", name)
    ran = engine.sandbox("run", "-n", name, "-x", "cat /more/note")
    assert answered(ran) == (0, "here", "")


def test_the_doctor(engine: Namespaced, project: Path, home: Path) -> None:
    rows = {row["check"]: row for row in json.loads(engine.sandbox("doctor", "--json").stdout)}
    assert [rows[check]["detail"] for check in ("engine", "permission", "version")] == [
        "namespaces", "rootful", "1.0"]
    assert rows["image"]["status"] == "ok" and rows["agents"]["remedy"]


def test_the_web_service(engine: Namespaced, service: Service, name: str) -> None:
    assert service.get("/api/sessions", cookie="").status == 401
    service.create(name)
    (row,) = service.get("/api/sessions").json
    assert (row["name"], row["state"], row["runtime"]) == (name, "running", "namespaces")

    job = service.job(name, "echo out; echo err >&2; exit 3")
    assert service.ended(job)["exit"] == 3
    events = [(kind, data) for kind, data, _ in service.events(job)]
    assert ("stdout", "out\n") in events and ("stderr", "err\n") in events

    with service.terminal(name) as screen:
        screen.type("echo $((6*7))\n")
        screen.expect("42")
    sleeping = service.job(name, "echo ready; sleep 1000")
    next(event for event in service.events(sleeping) if event[1] == "ready\n")
    assert service.request("DELETE", f"/api/sessions/{name}/jobs/{sleeping['id']}").status == 202
    assert service.ended(sleeping)["exit"] == 130

    assert service.post(f"/api/sessions/{name}/stop").json["state"] == "exited"
    assert service.post(f"/api/sessions/{name}/command", {"command": "true"}).status == 409
    assert service.post(f"/api/sessions/{name}/start").json["state"] == "running"
    before = engine.session_ids()
    assert service.post(f"/api/sessions/{name}/recreate").status == 200
    assert len(engine.session_ids()) == 1 and engine.session_ids() != before
    assert service.request("DELETE", f"/api/sessions/{name}").status == 200
    assert not engine.session_ids() and os.listdir(engine.area / "containers") == ["lock"]
