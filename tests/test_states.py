"""What a machine can be in when the first command is given: each state is mended, or named with the
one thing to do.

`run` and `doctor` say the same of it. The machines are real, with real packages: see machine.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE, PYTHON, USER, Engine, Result
from machine import Machine, own_machine

from sandbox import Podman, version_numbers

pytestmark = pytest.mark.parametrize("engine", ["docker"], indirect=True)

RUN = ("run", "--rm-on-exit", "-x", "echo it works")
NO_DOCKER = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock"
DOCKER = ("docker.io", "docker-cli")  # the client is in the first one up to Debian 12
INSTALL = "apt-get install -y --install-recommends"


@pytest.fixture
def machine(engine: Engine, project: Path, home: Path) -> Iterator[Machine]:
    """A machine with both engines, no daemon and no image."""
    with own_machine(engine) as machine:
        yield machine


def doctor(machine: Machine, *args: str, **how: Any) -> dict[str, dict[str, Any]]:
    answer = machine.sandbox("doctor", "--json", *args, **how)
    assert answer.stdout, answer.stderr
    rows = {row["check"]: row for row in json.loads(answer.stdout)}
    assert answer.returncode == int(any(row["status"] == "fail" for row in rows.values()))
    return rows


def assert_said(machine: Machine, check: str, *parts: str, yes: bool = False, **how: Any) -> Result:
    """`run` ends with 125, `doctor` with 1, both in the same words, and nothing has come of it."""
    ran = machine.sandbox("run", *(["--yes"] if yes else []), "-x", "true", **how)
    assert (ran.returncode, ran.stdout) == (125, ""), ran.stderr
    rows = doctor(machine, **how)
    failed = [row for row in rows.values() if row["status"] == "fail"]
    assert [row["check"] for row in failed] == [check], rows
    words = f"{failed[0]['detail']}\n  {failed[0]['remedy']}\n"
    assert ran.stderr.endswith(words), ran.stderr + words
    for part in parts:
        assert part in words, words
    assert list(machine.engine.project.iterdir()) == []
    assert [path.name for path in machine.engine.home.iterdir()] == ["sandbox.json"]
    return ran


def assert_mended(machine: Machine, *commands: str, **how: Any) -> Result:
    """`run --yes` says what it does, in this order, and ends with what was asked for."""
    ran = machine.sandbox("run", "--yes", *RUN[1:], **how)
    assert (ran.returncode, ran.stdout[-9:]) == (0, "it works\n"), ran.stdout + ran.stderr
    said = [line for line in ran.stderr.splitlines() if line.startswith("sandbox: run: ")]
    assert len(said) == len(commands), said
    for line, command in zip(said, commands, strict=True):
        assert command in line, said
    return ran


# --- No engine, or half of one ---


def without_engines(machine: Machine) -> None:
    machine.load_docker()
    machine.offer(*DOCKER)
    machine.remove(*DOCKER, "podman")


def test_nothing_is_installed(machine: Machine) -> None:
    without_engines(machine)
    assert_said(machine, "engine", "neither docker nor podman is installed", f"{INSTALL} docker.io")
    assert not machine.running("dockerd")
    assert_mended(machine, f"{INSTALL} docker.io", "setsid dockerd")


def test_only_the_client_of_docker_is_installed(machine: Machine) -> None:
    machine.must("cp", "/usr/bin/docker", "/usr/local/bin/docker")
    without_engines(machine)
    assert_said(machine, "engine", NO_DOCKER, "there is no dockerd", f"{INSTALL} docker.io")
    assert_mended(machine, f"{INSTALL} docker.io", "setsid dockerd")


def test_an_ordinary_user_with_the_client_alone_is_given_podman(machine: Machine) -> None:
    machine.must("cp", "/usr/bin/docker", "/usr/local/bin/docker")
    machine.load_podman(USER)
    machine.let_sudo()
    machine.own_project()
    machine.offer("podman", "uidmap", "slirp4netns")
    machine.remove(*DOCKER, "podman")
    assert_said(machine, "engine", "there is no dockerd", "sudo apt-get update", "podman",
                user=USER)
    assert_mended(machine, f"{INSTALL} podman uidmap slirp4netns", user=USER)


def test_nobody_but_root_can_install(machine: Machine) -> None:
    machine.remove(*DOCKER, "podman")
    machine.own_project()
    ask = "ask an administrator to run: apt-get update && "
    assert_said(machine, "engine", "neither docker nor podman is installed", ask, yes=True,
                user=USER)


def test_a_docker_that_this_machine_cannot_run(machine: Machine) -> None:
    """It is for another processor."""
    machine.remove(*DOCKER, "podman")
    other = ("b = bytearray(open('/bin/true', 'rb').read()); b[18] ^= 255; "
             "open('/usr/local/bin/docker', 'wb').write(b)")
    machine.must("sh", "-c", f"python3 -c \"{other}\" && chmod 755 /usr/local/bin/docker")
    assert_said(machine, "engine", "/usr/local/bin/docker: Exec format error",
                f"{INSTALL} docker.io")


def test_podman_alone_is_enough(machine: Machine) -> None:
    machine.load_podman()
    machine.remove(*DOCKER)
    assert_mended(machine)


# --- A daemon that does not run ---


@pytest.fixture
def stopped(machine: Machine) -> Machine:
    machine.runtime = "docker"
    machine.load_docker()
    return machine


def test_what_a_killed_docker_has_left_is_no_obstacle(stopped: Machine) -> None:
    """Its pid files name processes that are others by now, and nobody listens at its socket."""
    bind = "import socket; socket.socket(socket.AF_UNIX).bind('/run/docker.sock')"
    stopped.must("sh", "-c", "mkdir -p /run/docker/containerd && echo 1 | tee /run/docker.pid "
                             # fmt: skip
                             f"/run/docker/containerd/containerd.pid && python3 -c \"{bind}\"")
    assert_said(stopped, "daemon", NO_DOCKER,
                "rm -f /var/run/docker.pid /var/run/docker/containerd/containerd.pid")
    assert_mended(stopped, "setsid dockerd")


def test_root_with_the_path_of_an_ordinary_user(stopped: Machine) -> None:
    assert_mended(stopped, "setsid dockerd", env={"PATH": "/usr/local/bin:/usr/bin:/bin"})


def test_the_last_words_of_a_daemon_that_does_not_start_are_shown(stopped: Machine) -> None:
    stopped.must("sh", "-c", "mkdir -p /etc/docker && echo oops >/etc/docker/daemon.json")
    ran = stopped.sandbox("run", "--yes", *RUN[1:])
    assert (ran.returncode, ran.stdout) == (125, "")
    words = ("unable to configure the Docker daemon with file /etc/docker/daemon.json: "
             "invalid character")
    assert words in ran.stderr
    assert "docker was started and has ended\n  mend that and try again\n" in ran.stderr
    assert not stopped.running("dockerd")


def test_a_stopped_daemon_is_the_administrators(stopped: Machine) -> None:
    stopped.own_project()
    assert_said(stopped, "daemon", NO_DOCKER, "ask an administrator to run: ", "dockerd", yes=True,
                user=USER)


# --- A daemon that is closed to the person ---


@pytest.fixture
def closed(machine: Machine) -> Machine:
    """A running docker, and a user who is no member of its group."""
    machine.runtime = "docker"
    machine.load_docker()
    machine.start_dockerd()
    machine.must("gpasswd", "--delete", USER, "docker")
    machine.own_project()
    return machine


DENIED = "permission denied while trying to connect to the Docker daemon socket"


def test_without_sudo_an_administrator_is_to_be_asked(closed: Machine) -> None:
    ask = f"ask an administrator to run: usermod -aG docker {USER} (and log in again; "
    assert_said(closed, "permission", DENIED, ask, "as good as root", yes=True, user=USER)


def test_with_sudo_the_person_joins_the_group_and_the_run_goes_on(closed: Machine) -> None:
    closed.let_sudo()
    assert_mended(closed, f"sudo usermod -aG docker {USER}", user=USER)


def test_who_became_a_member_after_the_login_needs_nobody(closed: Machine) -> None:
    closed.must("usermod", "-aG", "docker", USER)
    login: dict[str, Any] = {"user": USER, "groups": "--clear-groups"}
    assert_said(closed, "permission", DENIED, "newgrp docker", "or log in again", **login)
    assert_mended(closed, "newgrp docker", **login)


def test_a_socket_that_is_roots_alone(closed: Machine) -> None:
    closed.must("chgrp", "root", "/var/run/docker.sock")
    assert_said(closed, "permission", DENIED, "ask an administrator for access to it", yes=True,
                user=USER)


def test_from_nothing_running_to_a_session_of_an_ordinary_user(closed: Machine) -> None:
    closed.stop_dockerd()
    closed.let_sudo()
    assert_mended(closed, "setsid dockerd", f"sudo usermod -aG docker {USER}", user=USER)


# --- An address where nobody answers ---


@pytest.mark.parametrize(
    ("env", "message", "remedy"),
    [
        ({"DOCKER_HOST": "tcp://127.0.0.1:1"}, "tcp://127.0.0.1:1", "or correct DOCKER_HOST"),
        ({"DOCKER_HOST": "tcp://nowhere.invalid:2375"}, "nowhere.invalid",
         "or correct DOCKER_HOST"),
        ({"DOCKER_CONTEXT": "away"}, "unix:///nonexistent.sock", "or correct the docker context"),
        ({"DOCKER_CONTEXT": "none"}, '"none"', "docker context use default"),
    ],
)
def test_an_address_that_leads_nowhere(machine: Machine, env: dict[str, str], message: str,
                                       remedy: str) -> None:
    machine.must("docker", "context", "create", "away", "--docker", "host=unix:///nonexistent.sock")
    machine.remove("podman")
    check = "engine" if env.get("DOCKER_CONTEXT") == "none" else "daemon"
    ran = assert_said(machine, check, message, remedy, yes=True, env=env)
    assert "sandbox: run: " not in ran.stderr and not machine.running("dockerd")


# --- Podman and its helpers ---


@pytest.fixture
def podman(machine: Machine) -> Machine:
    """Podman alone, with the image, and an ordinary user with sudo."""
    machine.load_podman(USER)
    machine.let_sudo()
    machine.own_project()
    machine.remove(*DOCKER)
    return machine


NOT_ON_PATH = "executable file not found in $PATH"


@pytest.mark.parametrize(
    ("message", "helpers"),
    [
        (f'Error: command required for rootless mode: exec: "newuidmap": {NOT_ON_PATH}',
         ["newuidmap"]),
        (f'level=error msg="invalid internal status: exec: \\"newgidmap\\": {NOT_ON_PATH}"',
         ["newgidmap"]),
        ("Error: could not find pasta, the network namespace can't be configured: "
         f"exec: \"pasta\": {NOT_ON_PATH}",
         ["pasta"]),
        ("Error: netavark: nftables error: unable to execute nft: "
         "No such file or directory (os error 2)", ["nft"]),
        ('Error: could not find "netavark" in one of [/usr/libexec/podman /usr/lib/podman].',
         ["netavark"]),
        ("Error: could not find a working conmon binary "
         "(configured options: [/usr/bin/conmon]: ...)", ["conmon"]),
        ('Error: default OCI runtime "crun" not found: invalid argument', ["crun"]),
        ("runc create failed: unable to start container process: "
         f'exec: "python3": {NOT_ON_PATH}: unknown', []),
        ("Error: crun: executable file `foo` not found in $PATH: No such file or directory", []),
    ],
)
def test_what_podman_misses_is_told_from_what_a_container_misses(
    engine: Engine, message: str, helpers: list[str]
) -> None:
    assert Podman().missing_helpers(message) == helpers


@pytest.mark.parametrize("helper", ["user ids", "network"])
def test_a_helper_of_rootless_podman_is_missing(podman: Machine, helper: str) -> None:
    version = podman.must("podman", "version", "--format", "{{.Client.Version}}")
    network = "passt" if version_numbers(version) >= (5,) else "slirp4netns"
    package = network if helper == "network" else "uidmap"
    podman.offer(package)
    podman.remove(package)
    podman.log_out()
    row = doctor(podman, user=USER)["daemon"]
    assert row["status"] == "fail" and f"{INSTALL} {package}" in row["remedy"], row
    ran = podman.sandbox(*RUN, user=USER)
    assert (ran.returncode, ran.stdout) == (125, ""), ran
    assert ran.stderr.endswith(f"  {row['remedy']}\n"), ran
    assert_mended(podman, f"{INSTALL} {package}", user=USER)
    assert {row["status"] for row in doctor(podman, user=USER).values()} <= {"ok", "warn"}


def test_catatonit_is_missing(podman: Machine) -> None:
    podman.offer("catatonit")
    podman.remove("catatonit")
    assert_said(podman, "network", "catatonit",
                f"sudo env DEBIAN_FRONTEND=noninteractive {INSTALL} catatonit",
                user=USER)  # fmt: skip
    assert_mended(podman, f"{INSTALL} catatonit", user=USER)


def test_rootful_podman_without_a_packet_filter(podman: Machine) -> None:
    podman.load_podman()
    podman.own_project("root")
    podman.must("sh", "-c", "rm /usr/sbin/iptables /usr/sbin/nft || true")
    assert_said(podman, "network", "netavark", f"{INSTALL} ", "tables")


def test_user_ids_are_the_administrators_and_the_rest_is_not(machine: Machine) -> None:
    machine.own_project()
    machine.remove(*DOCKER, "sudo")
    machine.must("sed", "-i", f"/^{USER}:/d", "/etc/subuid", "/etc/subgid")
    remedy = doctor(machine, user=USER)["daemon"]["remedy"]
    assert remedy.startswith("ask an administrator to run: usermod --add-subuids ")
    assert remedy.endswith(f" {USER}, then run: podman system migrate")


def test_no_user_ids_for_rootless_podman(podman: Machine) -> None:
    podman.must("sed", "-i", f"/^{USER}:/d", "/etc/subuid", "/etc/subgid")
    podman.log_out()
    podman.must("sh", "-c", "echo other:300000:1000 >>/etc/subgid")
    detail = doctor(podman, user=USER)["daemon"]
    assert "/etc/subuid and /etc/subgid do not name this user" in detail["detail"]
    added = "sudo usermod --add-subuids 301000-366535 --add-subgids 301000-366535"
    assert added in detail["remedy"]
    # which comes no further than to a base image
    built = podman.sandbox("build", "--yes", user=USER)
    assert built.returncode == 1 and "sandbox: run: sudo usermod" in built.stderr
    assert doctor(podman, user=USER)["daemon"]["status"] == "ok"
    ids = podman.must("podman", "unshare", "cat", "/proc/self/uid_map", user=USER).split()
    assert ids[3:] == ["1", "301000", "65536"]


# --- The image ---


def test_a_full_disk_ends_the_build_and_leaves_nothing(machine: Machine) -> None:
    machine.runtime = "docker"
    machine.must("mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", "/var/lib/docker")
    machine.load_docker()
    machine.start_dockerd()
    (machine.engine.home / "sandbox.json").write_text("{}")
    machine.must("sh", "-c", "dd if=/dev/zero of=/var/lib/docker/ballast bs=4k || true")
    built = machine.sandbox("build", "--iba", f"BASE={IMAGE}")
    assert built.returncode == 1 and "make room" in built.stderr.splitlines()[-1], built.stderr
    assert machine.must("docker", "images", "-q") == machine.must("docker", "images", "-q", IMAGE)


def test_no_room_for_what_a_build_needs(machine: Machine) -> None:
    machine.runtime = "docker"
    machine.load_docker()
    machine.start_dockerd()
    (machine.engine.home / "sandbox.json").write_text(
        json.dumps({"imageBuildArgs": [f"BASE={IMAGE}"]}))
    machine.must("sh", "-c", "mkdir /small && mount -t tmpfs -o size=8k tmpfs /small")
    ran = machine.sandbox("run", "--yes", "-x", "true", env={"TMPDIR": "/small"})
    assert ran.returncode == 125 and "No space left on device" in ran.stderr, ran.stderr
    assert "make room" in ran.stderr.splitlines()[-1]
    assert machine.must("ls", "-A", "/small") == ""


def test_no_debootstrap(machine: Machine) -> None:
    machine.runtime = "docker"
    machine.start_dockerd()
    machine.remove("debootstrap", "mmdebstrap")
    (machine.engine.home / "sandbox.json").write_text("{}")
    built = machine.sandbox("build")
    hint = built.stderr.splitlines()[-1]
    assert built.returncode == 1, built.stderr
    assert INSTALL in hint, built.stderr
    assert "debian-archive-keyring" in hint, built.stderr


def test_a_base_image_takes_root(machine: Machine) -> None:
    machine.remove(*DOCKER)
    machine.own_project()
    (machine.engine.home / "sandbox.json").write_text("{}")
    ran = machine.sandbox("run", "--yes", "-x", "true", user=USER)
    assert ran.returncode == 125, ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("  ask an administrator to load debian:"), ran.stderr


# --- The web service ---


def test_a_python_without_its_virtual_environments(machine: Machine) -> None:
    """Debian has ensurepip in a package of its own, and so the remedy begins with it."""
    version = machine.must(PYTHON, "-c",
                           "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    machine.remove(f"python{version}-venv")
    machine.must("sh", "-c", f"cp -r {machine.engine.area}/app /app && rm -r /app/websockets")
    served = machine.run(PYTHON, "-S", "/app", "serve")
    assert (served.returncode, served.stdout) == (1, "")
    install, make, fill = served.stderr.splitlines()[-1].rsplit(" && ", 2)
    assert install.endswith(f"{INSTALL} python{version}-venv")
    assert make.endswith("/venv") and fill.endswith("'websockets>=13'")


# --- The doctor ---


def test_doctor_says_that_it_has_mended_nothing(stopped: Machine) -> None:
    answer = stopped.sandbox("doctor", "--fix")
    assert answer.returncode == 1
    assert "nothing was changed" in answer.stderr
    assert "--yes" in answer.stderr
    assert not stopped.running("dockerd")
    answer = stopped.sandbox("doctor", "--fix", "--yes")
    assert "nothing was changed" not in answer.stderr and stopped.running("dockerd")
