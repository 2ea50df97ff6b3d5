"""A session that the version before has made is used by this one.

before/session.json holds what commit 0c6d4d5 gave to each engine for `run -r work --allow api.test`
and the files that it and its service left, taken from a run of it; before/proxy.py.gz the network
proxy of its images. Names, ids and paths are put in where there is an @NAME@. The boot id is that
of no machine: devices may have other numbers here.
"""

import gzip
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE, IMAGE_VERSION, ROOT, TOKEN, Engine, Result, unique_name, write_config
from network import left_of
from service import Service, wait_for

BEFORE = ROOT / "tests" / "before"
OLD_IMAGE = f"localhost/{TOKEN}-before"
PLACE = "127.0.0.1:9"  # of the proxy: a rule for it needs no name

pytestmark = pytest.mark.parametrize("engine", ["docker", "podman"], indirect=True,
                                     scope="session")


@pytest.fixture(scope="module")
def old_image(engine: Engine) -> Iterator[str]:
    """The test image with the proxy of before: a session keeps its image when we are replaced."""
    image, made = f"{OLD_IMAGE}:{IMAGE_VERSION}", unique_name()
    program = gzip.decompress((BEFORE / "proxy.py.gz").read_bytes()).decode()
    copied = engine.run("run", "-i", "--name", made, IMAGE, "sh", "-c",
                        "cat >/usr/local/lib/sandbox/proxy.py", input=program)
    assert copied.returncode == 0, copied.stderr
    assert engine.run("commit", made, image).returncode == 0
    engine.run("rm", made)
    yield image
    engine.run("rmi", image)


class Old:
    """The session, its proxy and its files, as they were left."""

    def __init__(self, engine: Engine, name: str, image: str, home: Path, project: Path) -> None:
        self.engine, self.name, self.home = engine, name, home
        self.id, self.data = secrets.token_hex(5), engine.directory()
        self.words = {"NAME": name, "ID": self.id, "PROJECT": str(project), "IMAGE": image,
                      "DATA": str(self.data), "ENGINE": engine.runtime}
        write_config(home, imageName=OLD_IMAGE, runs={"work": {
            "env": {"GREETING": "hello"}, "memory": "512m", "volumes": [f"{self.data}:/data:ro"]}})
        session = json.loads((BEFORE / "session.json").read_text())
        for argv in session["calls"][engine.runtime]:
            made = engine.run(*map(self.filled, argv))
            assert made.returncode == 0, made.stderr
            self.words["CONTAINER"] = made.stdout.strip()
        for path, text in session["files"].items():
            self.write(home / self.filled(path), self.filled(text))

    def filled(self, text: str) -> str:
        for word, value in self.words.items():
            text = text.replace(f"@{word}@", value)
        return text

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
        path.chmod(0o600)

    def sandbox_run(self, command: str) -> Result:
        return self.engine.sandbox("run", "-n", self.name, "-r", "work", "-x", command)

    def run(self, command: str) -> str:
        """What a command printed in the session: nothing is said about the container."""
        ran = self.sandbox_run(command)
        assert (ran.returncode, ran.stderr) == (0, "")
        return ran.stdout

    def row(self) -> Any:
        rows = json.loads(self.engine.sandbox("ps", "--json").stdout)
        return next(row for row in rows if row["name"] == self.name)


@pytest.fixture
def old(engine: Engine, old_image: str, home: Path, project: Path, name: str) -> Iterator[Old]:
    yield Old(engine, name, old_image, home, project)
    write_config(home)  # a test that asks for no home of its own gets this one


@pytest.fixture
def service(old: Old) -> Iterator[Service]:
    service = Service(old.engine)
    yield service
    service.end()


def began(project: Path) -> str:
    """What the autostart script has written, beside the commands."""
    return path.read_text() if (path := project / "began").exists() else ""


def test_it_is_listed_and_runs_commands(old: Old, project: Path) -> None:
    shown = {key: old.row()[key] for key in ("state", "profile", "directory", "network", "image")}
    assert shown == {"state": "running", "profile": "work", "directory": str(project),
                     "network": "allow", "image": old.words["IMAGE"]}
    assert old.run("echo $GREETING; pwd; touch made /tmp/kept") == f"from the page\n{project}\n"
    assert (project / "made").exists()
    wait_for(lambda: began(project) == "began\n")
    old.engine.run("stop", "-t", "0", old.name, f"sandbox-proxy-{old.id}")
    assert old.row()["state"] == "exited"
    assert old.run("echo $GREETING; ls /tmp/kept") == "from the page\n/tmp/kept\n"
    wait_for(lambda: began(project) == "began\n" * 2)
    removed = old.engine.sandbox("rm", old.name)
    assert (removed.returncode, removed.stderr) == (0, "")
    assert left_of(old.engine, old.id) == []
    assert not [path for path in old.home.rglob(f"*{old.name}*") if path.suffix != ".lock"]


def test_a_new_container_and_a_duplicate_have_what_is_in_its_home(old: Old) -> None:
    other, traced = f"{old.name}-2", {"SANDBOX_TRACE": "1"}
    old.run("cd; echo kept >file; mkdir .agent; ln -s ../file .agent/link; echo gone >/tmp/file")
    copied = old.engine.sandbox("run", "--from", old.name, "-n", other, "-x", "cat ~/.agent/link",
                                env=traced)
    assert (copied.returncode, copied.stdout) == (0, "kept\n"), copied.stderr
    assert old.run("cat ~/file") == "kept\n"
    made = old.engine.sandbox("recreate", old.name, "--memory", "256m", env=traced)
    assert made.returncode == 0, made.stderr
    assert old.run("cat ~/.agent/link; ls /data; echo $GREETING") == "kept\nfrom the page\n"
    assert old.sandbox_run("ls /tmp/file").returncode == 1
    for trace in (copied.stderr, made.stderr):  # nothing is left of the way
        image = next(line.split()[-1] for line in trace.splitlines() if " image rm " in line)
        assert old.engine.run("image", "inspect", image).returncode != 0
    assert json.loads(old.engine.sandbox("net", "show", old.name).stdout) == {"allow": ["api.test"]}
    assert left_of(old.engine, old.id) == []  # it has another proxy now


def test_its_network_rules_hold_and_change(old: Old) -> None:
    def net(*words: str) -> Any:
        answer = old.engine.sandbox("net", words[0], old.name, *words[1:])
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def asked() -> tuple[str, str]:
        """The status of the answer to a request, and what is said of it."""
        request = f"printf 'GET http://{PLACE}/ HTTP/1.0\\r\\n\\r\\n' | nc 127.0.0.1 3128"
        ran = old.sandbox_run(f"{request} | head -n 1")
        return ran.stdout.split()[1], ran.stderr

    assert json.loads(net("show")) == {"allow": ["api.test"]}
    status, said = asked()
    assert status == "403" and f"{old.name} was refused 127.0.0.1 port 9: no rule" in said
    assert "127.0.0.1" in net("log")
    net("allow", PLACE)
    assert json.loads(net("show")) == {"allow": ["api.test", PLACE]}
    assert asked() == ("502", "")  # nobody listens


def test_the_web_service_shows_its_jobs_and_settings(old: Old, service: Service) -> None:
    path = f"/api/sessions/{old.name}"
    shown = service.get(path).json
    assert (shown["state"], shown["network"], shown["recreate"]) == (
        "running", {"allow": ["api.test"]}, [])
    settings = service.get(f"{path}/settings").json
    assert settings["settings"] == {
        "env": {"GREETING": "from the page"}, "network": None, "budget": None,
        "autostart": "echo began >>began", "agentPromptCommand": "echo asked {prompt}"}
    assert settings["recreate"] == []
    prompt, command = service.get(f"{path}/jobs").json
    assert (prompt["kind"], prompt["prompt"], prompt["exit"]) == ("prompt", "it's me", 0)
    assert (command["kind"], command["state"], command["exit"]) == ("command", "ended", 3)
    assert command["started"] < command["ended"]
    events = [(event, data) for event, data, _ in service.events(command)][1:-1]
    assert events == [("stdout", "out\n"), ("stderr", "err\n"), ("stdout", "from the page\n")]
    assert service.get(f"{path}/jobs/{prompt['id']}/output").body == b"asked it's me\n"


def test_the_web_service_uses_stops_starts_and_removes_it(old: Old, service: Service,
                                                          project: Path) -> None:
    path = f"/api/sessions/{old.name}"
    asked = service.post(f"{path}/prompt", {"prompt": "again"}).json
    assert service.ended(asked)["exit"] == 0
    assert service.get(f"{path}/jobs/{asked['id']}/output").body == b"asked again\n"
    with service.terminal(old.name) as screen:
        screen.type("echo $GREETING; touch /tmp/kept\n")
        screen.expect("from the page")
    assert service.post(f"{path}/stop").json["state"] == "exited"
    assert service.post(f"{path}/start").json["state"] == "running"
    assert service.ended(service.job(old.name, "ls /tmp/kept"))["exit"] == 0
    wait_for(lambda: began(project) == "began\n" * 2)
    assert len([job for job in service.get(f"{path}/jobs").json if job["kind"] != "autostart"]) == 4
    assert service.request("DELETE", path).status == 200
    assert left_of(old.engine, old.id) == []
    assert service.get(path).status == 404
    assert not [path for path in old.home.rglob(f"*{old.name}*") if path.suffix != ".lock"]
