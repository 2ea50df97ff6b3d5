"""What a run needs, missing for real: `run` and `doctor` tell the failures apart and name the
remedy of each."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE, IMAGE_NAME, PYTHON, Engine, Result, on_docker, write_config
from machine import Machine, own_machine

from sandbox import ENGINES, version_numbers

NOWHERE = "unix:///nonexistent.sock"
Rows = dict[str, dict[str, Any]]

podman_only = pytest.mark.parametrize("engine", ["podman", "rootless"], indirect=True)


def doctor(engine: Engine, *args: str, **where: Any) -> tuple[int, Rows]:
    """Exit status and lines of the doctor, by the name of the check."""
    return read_doctor(engine.sandbox("doctor", "--json", *args, **where))


def read_doctor(answer: Result) -> tuple[int, Rows]:
    assert answer.stdout, answer.stderr
    return answer.returncode, {row["check"]: row for row in json.loads(answer.stdout)}


def failed(rows: Rows) -> list[str]:
    return [name for name, row in rows.items() if row["status"] == "fail"]


def assert_refused(engine: Engine, check: str, message: str, remedy: str, **where: Any) -> None:
    """`run` ends with 125 and `doctor` with 1, both for this reason, and leave nothing."""
    where = {"cwd": engine.project, "home": engine.home, **where}
    for naming in ([], ["-n", "never-made"]):
        ran = engine.sandbox("run", *naming, "-x", "true", **where)
        assert (ran.returncode, ran.stdout) == (125, ""), ran.stderr
        *messages, hint = ran.stderr.splitlines()
        assert message in "\n".join(messages), ran.stderr
        assert hint.startswith("  "), ran.stderr
        assert remedy in hint, ran.stderr
    assert_doctor_says(doctor(engine, **where), check, message, remedy)
    assert_nothing_left(engine, where["cwd"], where["home"])


def assert_doctor_says(answer: tuple[int, Rows], check: str, message: str, remedy: str) -> None:
    status, rows = answer
    assert (status, failed(rows)) == (1, [check]), rows
    assert message in rows[check]["detail"] and remedy in rows[check]["remedy"]


def assert_nothing_left(engine: Engine, project: Path, home: Path) -> None:
    made = engine.run("ps", "-aq", "--filter", f"label=sandbox.directory={project}")
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    assert list(project.iterdir()) == []
    assert [path.name for path in home.iterdir()] == ["sandbox.json"]


def path_of(engine: Engine, *programs: str) -> str:
    """A PATH on which there are these programs only."""
    directory = engine.directory()
    for program in programs:
        (directory / program).symlink_to(f"/usr/bin/{program}")
    return str(directory)


# --- The five failures ---


@pytest.mark.usefixtures("home", "project")
class TestNoEngine:
    def test_the_one_that_was_asked_for_is_named_and_its_package(self, engine: Engine) -> None:
        package = "docker.io" if engine.runtime == "docker" else "podman"
        env = {"PATH": path_of(engine, "apt-get")}
        assert_refused(engine, "engine", f"{engine.runtime} is not installed", package, env=env)

    @pytest.mark.parametrize("engine", ["docker", "rootless"], indirect=True)
    def test_root_is_offered_docker_and_anybody_else_podman(self, engine: Engine) -> None:
        env = {"PATH": path_of(engine, "apt-get"), "SANDBOX_RUNTIME": ""}
        missing = [" docker.io"] if engine.user == "root" else [
            " podman uidmap", "ask an administrator to run: "]
        for part in missing:
            assert_refused(engine, "engine", "neither docker nor podman is installed", part,
                           env=env)

    @on_docker
    def test_with_no_package_manager_we_know_the_remedy_is_a_word(self, engine: Engine) -> None:
        env = {"PATH": path_of(engine)}
        assert_refused(engine, "engine", "docker is not installed", "install docker or podman",
                       env=env)


@on_docker
def test_a_closed_socket_names_the_group_and_what_it_means(engine: Engine, project: Path) -> None:
    where: dict[str, Any] = {"user": "nobody", "cwd": engine.directory("nobody"),
                             "home": engine.directory("nobody")}
    write_config(where["home"])
    for remedy in ("usermod -aG docker nobody", "as good as root"):
        assert_refused(engine, "permission", "permission denied", remedy, **where)


@on_docker
def test_a_docker_host_that_does_not_answer_is_named(engine: Engine, home: Path,
                                                     project: Path) -> None:
    assert_refused(engine, "daemon", f"Cannot connect to the Docker daemon at {NOWHERE}",
                   "DOCKER_HOST",
                   env={"DOCKER_HOST": NOWHERE})  # fmt: skip


def test_a_missing_image_is_named_with_the_build_that_makes_it(engine: Engine, home: Path,
                                                               project: Path) -> None:
    write_config(home, imageVersion="9.9-none")
    build = f"sandbox build --rt {engine.runtime} --iv 9.9-none --in {IMAGE_NAME}"
    assert_refused(engine, "image", f"{engine.runtime} has no image {IMAGE_NAME}:9.9-none", build)


@on_docker
@pytest.mark.parametrize(("version", "message"), [("1.10", "too old"), ("1.99", "too new")])
def test_a_client_and_a_daemon_that_do_not_fit(
    engine: Engine, home: Path, project: Path, version: str, message: str
) -> None:
    assert_refused(engine, "version", f"client version {version} is {message}", "upgrade docker",
                   env={"DOCKER_API_VERSION": version})  # fmt: skip


def test_an_engine_below_our_minimum(engine: Engine, home: Path, project: Path) -> None:
    """The real engine, under a minimum of the future."""
    code = ("import sandbox, sys; sandbox.ENGINES[sys.argv[1]].minimum = (999, 0); "
            "sys.exit(sandbox.main(sys.argv[2:]))")
    where = engine.where(env={"PYTHONPATH": str(engine.area / "app")})

    def future(*args: str) -> Result:
        argv = [PYTHON, "-c", code, engine.runtime, *args]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=60, **where)

    ran = future("run", "-x", "true")
    assert (ran.returncode, ran.stdout) == (125, "")
    message = "is too old: 999.0 is the oldest that works"
    assert message in ran.stderr and f"(upgrade {engine.runtime})" in ran.stderr
    assert_doctor_says(read_doctor(future("doctor", "--json")), "version", message,
                       f"upgrade {engine.runtime}")
    assert_nothing_left(engine, project, home)


@pytest.mark.parametrize(
    ("runtime", "version", "works"),
    [
        ("docker", "19.03.15", False),
        ("docker", "20.10.24+dfsg1", True),
        ("docker", "29.0.0-rc.1", True),
        ("podman", "3.4.4", False),
        ("podman", "4.3.1", True),
        ("podman", "5.4.0-dev", True),
    ],
)
def test_the_oldest_engines_that_work(runtime: str, version: str, works: bool) -> None:
    assert (version_numbers(version) >= ENGINES[runtime].minimum) is works


def test_a_client_that_cannot_start_is_quoted(engine: Engine, home: Path, project: Path) -> None:
    env = ({"DOCKER_CONTEXT": "nowhere"} if engine.runtime == "docker"
           else {"CONTAINERS_CONF": "/nowhere"})
    ran = engine.sandbox("run", "-x", "true", env=env)
    assert (ran.returncode, ran.stdout) == (125, "") and "nowhere" in ran.stderr
    status, rows = doctor(engine, env=env)
    assert (status, failed(rows)) == (1, ["engine"]) and "nowhere" in rows["engine"]["detail"]
    assert_nothing_left(engine, project, home)


# --- Which engine ---


@on_docker
@pytest.mark.parametrize(
    ("config", "env", "flags", "chosen"),
    [
        ({}, "", [], "docker"),
        ({"runtime": "podman"}, "", [], "podman"),
        ({}, "podman", [], "podman"),
        ({"runtime": "podman"}, "docker", [], "docker"),
        ({}, "docker", ["--runtime", "podman"], "podman"),
        ({}, "podman", ["--rt", "docker"], "docker"),
    ],
)
def test_configuration_environment_and_flag_choose(
    engine: Engine, home: Path, config: dict[str, str], env: str, flags: list[str], chosen: str
) -> None:
    write_config(home, **config)
    _, rows = doctor(engine, *flags, env={"SANDBOX_RUNTIME": env})
    assert (rows["engine"]["status"], rows["engine"]["detail"]) == ("ok", chosen)


@podman_only
def test_podman_is_used_where_docker_does_not_answer(engine: Engine, home: Path, project: Path,
                                                     name: str) -> None:
    env = {"SANDBOX_RUNTIME": "", "DOCKER_HOST": NOWHERE}
    ran = engine.sandbox("run", "-n", name, "-x", "echo from podman", env=env)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "from podman\n", "")
    assert engine.run("container", "inspect", name).returncode == 0
    status, rows = doctor(engine, env=env)
    assert (status, rows["engine"]["detail"], failed(rows)) == (0, "podman", [])


@pytest.mark.parametrize("engine", ["rootless"], indirect=True)
def test_podman_is_used_where_docker_is_closed_to_the_person(engine: Engine, home: Path,
                                                             project: Path) -> None:
    where = {**engine.where(env={"SANDBOX_RUNTIME": ""}), "extra_groups": []}
    argv = engine.sandbox_argv("run", "--rm-on-exit", "-x", "echo from podman")
    ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
                         **where)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "from podman\n", "")


# --- The daemon, started by us ---

@pytest.fixture
def machine(engine: Engine, project: Path, home: Path) -> Iterator[Machine]:
    """A machine that has docker and the test image, and where the daemon is down."""
    with own_machine(engine) as machine:
        machine.runtime = "docker"
        machine.load_docker()
        yield machine


@on_docker
class TestDaemonDown:
    def test_it_is_said_and_nothing_is_started_unasked(self, machine: Machine) -> None:
        message, remedy = "Cannot connect to the Docker daemon", "dockerd"
        ran = machine.sandbox("run", "-x", "true")
        assert (ran.returncode, ran.stdout) == (125, "")
        assert message in ran.stderr
        assert remedy in ran.stderr
        assert_doctor_says(read_doctor(machine.sandbox("doctor", "--json")), "daemon", message,
                           remedy)
        assert machine.run("pgrep", "-x", "dockerd").returncode == 1

    def test_yes_starts_it_and_the_run_goes_on(self, machine: Machine, name: str) -> None:
        ran = machine.sandbox("run", "--yes", "-n", name, "-x", "echo it works")
        assert (ran.returncode, ran.stdout) == (0, "it works\n"), ran.stderr
        assert "run: " in ran.stderr and "dockerd" in ran.stderr
        status, rows = read_doctor(machine.sandbox("doctor", "--json"))
        assert (status, rows["daemon"]["status"]) == (0, "ok")

    def test_on_a_terminal_it_is_offered(self, machine: Machine, name: str) -> None:
        with machine.pty("run", "-n", name, "-x", "echo it works") as terminal:
            terminal.expect("Do that now? [y/N] ")
            terminal.send("n\n")
            assert terminal.wait() == 125
        with machine.pty("run", "-n", name, "-x", "echo it works") as terminal:
            terminal.expect("Do that now? [y/N] ")
            terminal.send("y\n")
            terminal.expect("it works\r\n")

    def test_after_a_crash_it_is_started_and_the_session_goes_on(self, machine: Machine,
                                                                 name: str) -> None:
        machine.start_dockerd()
        assert machine.sandbox("run", "-n", name, "-x", "echo kept > /tmp/file").returncode == 0
        machine.run("pkill", "-KILL", "-x", "dockerd")
        ran = machine.sandbox("run", "--yes", "-n", name, "-x", "cat /tmp/file")
        assert (ran.returncode, ran.stdout) == (0, "kept\n"), ran.stderr


# --- The question ---


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04", "\x03"])
def test_a_remedy_that_is_declined_changes_nothing(engine: Engine, home: Path, project: Path,
                                                   answer: str) -> None:
    write_config(home, imageVersion="9.9-none")
    with engine.pty("run", "-x", "true") as terminal:
        terminal.expect("has no image")
        terminal.expect("run: sandbox build")
        terminal.expect("Do that now? [y/N] ")
        terminal.send(answer)
        assert terminal.wait() == (130 if answer == "\x03" else 125)
    assert_nothing_left(engine, project, home)
    assert engine.run("image", "inspect", f"{IMAGE_NAME}:9.9-none").returncode != 0


# --- The doctor ---


def test_doctor_finds_all_well_but_an_image_without_agents(engine: Engine, home: Path) -> None:
    status, rows = doctor(engine)
    assert status == 0
    network = ["network"] if engine.runtime == "podman" else []
    order = ["engine", "permission", "daemon", "version", "image", *network, "agents", "disk",
             "configuration"]
    assert list(rows) == order
    assert all(set(row) == {"check", "status", "detail", "remedy"} for row in rows.values())
    checked = [name for name in order if name not in ("agents", "disk")]
    assert [name for name in checked if rows[name]["status"] != "ok"] == []
    assert rows["engine"]["detail"] == engine.runtime and rows["image"]["detail"] == IMAGE
    assert rows["permission"]["detail"] == ("rootless" if engine.id == "rootless" else "rootful")
    assert rows["configuration"] == {"check": "configuration", "status": "ok", "remedy": None,
                                     "detail": str(home / "sandbox.json")}  # fmt: skip
    agents = rows["agents"]
    assert agents["status"] == "warn" and "claude, gemini, codex, opencode" in agents["detail"]
    assert "--update-agents" in agents["remedy"]


def test_doctor_prints_a_line_for_each_check_and_one_for_its_remedy(engine: Engine,
                                                                    home: Path) -> None:
    answer = engine.sandbox("doctor")
    assert (answer.returncode, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    network = ["network"] if engine.runtime == "podman" else []
    well = [["ok", check]
            for check in ("engine", "permission", "daemon", "version", "image", *network)]
    assert [line.split()[:2] for line in lines[: len(well) + 1]] == [*well, ["warn", "agents"]]
    assert lines[len(well) + 1].split()[:3] == ["run:", "sandbox", "build"]


@on_docker
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "env": {oops}\n}', "sandbox.json:2:11: "),
        ("[]", "must be JSON objects"),
        ('{"imageVersio": "1.0-common"}', "unknown key (did you mean imageVersion?)"),
        ('{"runs": {"a": {}, "b": {"volumes": "/x:/y"}}}', "runs.b.volumes: it is not an array"),
        ('{"runs": {"a": {"envFile": ["/nonexistent.env"]}}}',
         "env file /nonexistent.env: No such file"),
        ('{"runs": {"a": {"envFile": ["relative.env"]}}}',
         "'relative.env' is not an absolute path"),
    ],
)
def test_doctor_reads_all_of_the_configuration(engine: Engine, home: Path, text: str,
                                               message: str) -> None:
    (home / "sandbox.json").write_text(text)
    status, rows = doctor(engine, env={"PATH": path_of(engine)})
    assert (status, rows["configuration"]["status"]) == (1, "fail")
    assert message in rows["configuration"]["detail"]
    assert "engine" in rows  # what else is wrong is still found


@on_docker
def test_run_stops_at_broken_json_with_status_1(engine: Engine, home: Path, project: Path) -> None:
    (home / "sandbox.json").write_text('{"env": {oops}}')
    ran = engine.sandbox("run", "-x", "true")
    assert (ran.returncode, ran.stdout) == (1, "") and f"{home}/sandbox.json:1:10: " in ran.stderr
    assert_nothing_left(engine, project, home)


@on_docker
def test_doctor_makes_a_configuration_private_only_when_told(engine: Engine, home: Path) -> None:
    config, env = home / "sandbox.json", {"PATH": path_of(engine, "chmod")}
    config.chmod(0o640)
    _, rows = doctor(engine, "--fix", env=env)
    assert rows["configuration"]["status"] == "warn"
    assert f"chmod 600 {config}" in rows["configuration"]["remedy"]
    with engine.pty("doctor", "--fix", env=env) as terminal:
        terminal.expect("Do that now? [y/N] ")
        terminal.send("n\n")
        assert terminal.wait() == 1  # there is no engine on this PATH
    assert config.stat().st_mode & 0o777 == 0o640
    status, rows = doctor(engine, "--fix", "--yes", env=env)
    assert (status, rows["configuration"]["status"]) == (1, "ok")
    assert config.stat().st_mode & 0o777 == 0o600
