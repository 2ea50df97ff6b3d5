"""The harness of the tests that drive real engines.

A test that asks for `engine` runs three times: on docker, on rootful podman and on rootless podman
of the user sandbox-test; those of sessions also on a rootless docker of that user, and those that
are marked `everywhere` on a cluster, where one was built; see cluster.py. tests/prepare makes the
machine ready; an engine that does not answer is a failure, not a skip. The code under test is a
world-readable copy of the working tree, started in a clean environment with /usr/bin/python3, or
the Python that SANDBOX_TEST_PYTHON names, because the checkout and its venv may lie where
sandbox-test cannot read.
"""

import codecs
import contextlib
import fcntl
import importlib.util
import itertools
import json
import os
import pty
import pwd
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import pytest

if TYPE_CHECKING:
    from browser import Browser
    from service import Service

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("SANDBOX_TEST_PYTHON", "/usr/bin/python3")
USER = "sandbox-test"
CONTAINERS_CONF = "/etc/sandbox-test/containers.conf"
IMAGE_NAME = "localhost/sandbox-test"
IMAGE_VERSION = "1.0-common"
IMAGE = f"{IMAGE_NAME}:{IMAGE_VERSION}"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIMEOUT_SECONDS = 300.0
HANG_SECONDS = 60.0  # for what comes at once: a busy machine takes its time

# in every name and directory of this test run, to know its containers by
TOKEN = f"t{secrets.token_hex(4)}"
COUNTER = itertools.count(1)

# What starts the tests may ignore signals (nohup, a shell's job in the background) or block them;
# what they start would inherit that. Python itself ignores SIGPIPE and SIGXFSZ, and resets them in
# what it starts.
for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
    if signal.getsignal(number) == signal.SIG_IGN:
        ctrl_c = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if ctrl_c else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())

Result = subprocess.CompletedProcess[str]


# --- Processes ---


def kill_group(pgid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)


class Process(subprocess.Popen[str]):
    """A process that leads a group; the whole group is killed when its `with` statement ends."""

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        kill_group(self.pid)
        self.wait()
        for stream in filter(None, (self.stdin, self.stdout, self.stderr)):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Terminal:
    """A process on a real PTY, its controlling terminal; killed with its group on exit."""

    def __init__(self, argv: list[str], rows: int, cols: int, **popen: Any) -> None:
        self.master, slave = pty.openpty()
        self.resize(rows, cols)
        self.mode = termios.tcgetattr(slave)  # as it is before the process changes it
        os.fchown(slave, popen["user"], -1)
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            **popen,
        )
        os.close(slave)
        self.output = ""  # everything read so far
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen = 0  # how much of it an expect() has consumed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        kill_group(self.process.pid)
        self.process.wait()
        os.close(self.master)

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def expect(self, text: str, timeout: float = HANG_SECONDS) -> str:
        """Wait for text that no earlier expect() has consumed; return the output up to its end."""
        deadline = time.monotonic() + timeout
        while (at := self.output.find(text, self._seen)) < 0:
            if not self._read(deadline):
                self.fail(f"{text!r} did not come")
        start, self._seen = self._seen, at + len(text)
        return self.output[start : self._seen]

    def quiet(self, seconds: float = 1) -> None:
        """Read until nothing has come for this long: a program has drawn its screen and waits."""
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline and self._read(time.monotonic() + seconds):
            pass

    def unread(self) -> str:
        return self.output[self._seen :]

    def fail(self, why: str) -> NoReturn:
        """Fail with what tells a hang from a mistake: who of its session runs, and what he does."""
        argv = ["ps", "--forest", "-o", "pid,stat,etimes,wchan:20,args", "-s"]
        runs = subprocess.run([*argv, str(self.process.pid)], capture_output=True, text=True).stdout
        pytest.fail(f"{why}; the output since the last match is:\n{self.unread()}\n{runs}")

    def wait(self, timeout: float = HANG_SECONDS) -> int:
        """Read until the process has ended; return its status, negative for a signal."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.fail(f"still running after {timeout} s")
            self._read(time.monotonic() + 0.05)
        while self._read(time.monotonic()):
            pass
        return self.process.returncode

    def _read(self, deadline: float) -> bool:
        """Read once; False when the deadline has passed or the other end is closed."""
        ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
        try:
            data = os.read(self.master, 65536) if ready else b""
        except OSError:  # EIO: nobody has the other end open
            time.sleep(0.01)
            return False
        self.output += self._decoder.decode(data)
        return bool(data)


# --- Engines ---


@dataclass
class Engine:
    """One engine, the user who owns it, and the command line under test.

    `host` is what ends the name of each session there.

    `user` of a method is the name of the user to run as instead: the docker engine's sandbox-test,
    for example. `home` and `project`, set by the fixtures of these names, are the default
    SANDBOX_HOME and directory.
    """

    id: str
    runtime: str
    user: str
    area: Path
    home: Path = field(init=False)
    project: Path = field(init=False)
    started: list[Process] = field(default_factory=list, repr=False)
    host: str = ""

    def __post_init__(self) -> None:
        self.project = self.directory()
        self.home = self.directory()
        self.configure()

    def configure(self, **keys: object) -> None:
        """Write sandbox.json with these keys; see write_config."""
        write_config(self.home, **keys)

    @property
    def uid(self) -> int:
        return pwd.getpwnam(self.user).pw_uid

    @property
    def gid(self) -> int:
        return pwd.getpwnam(self.user).pw_gid

    def directory(self, user: str | None = None) -> Path:
        """Make a fresh directory that `user` owns, under parents that all may pass."""
        path = self.area / unique_name()
        path.mkdir(mode=0o755)
        owner = pwd.getpwnam(user or self.user)
        os.chown(path, owner.pw_uid, owner.pw_gid)
        return path

    def environ(self, user: str | None = None, home: Path | None = None) -> dict[str, str]:
        """The whole environment a command starts with."""
        owner = pwd.getpwnam(user or self.user)
        environ = {
            "HOME": owner.pw_dir,
            "LANG": "C.UTF-8",
            "LOGNAME": owner.pw_name,
            "PATH": PATH,
            "SANDBOX_HOME": str(home or self.home),
            "SANDBOX_RUNTIME": self.runtime,
            "TERM": "xterm-256color",
            "USER": owner.pw_name,
        }
        if self.runtime == "podman":
            environ["CONTAINERS_CONF"] = CONTAINERS_CONF
            # Podman 5 warns of an old kernel interface on stderr with every command.
            environ["PODMAN_IGNORE_CGROUPSV1_WARNING"] = "1"
        if self.id == "rootless-docker":
            environ["DOCKER_HOST"] = f"unix:///run/user/{owner.pw_uid}/docker.sock"
        if owner.pw_uid:
            environ["XDG_RUNTIME_DIR"] = f"/run/user/{owner.pw_uid}"
        return environ

    def sandbox_argv(self, *args: str) -> list[str]:
        return [PYTHON, str(self.area / "app"), *args]

    def run(self, *args: str, timeout: float = TIMEOUT_SECONDS, input: str | None = None,
            **where: Any) -> Result:
        """Run the engine's own command; `where` as in `where`."""
        return self._run([self.runtime, *args], input, timeout, where)

    def sandbox(self, *args: str, timeout: float = TIMEOUT_SECONDS, input: str | None = None,
                **where: Any) -> Result:
        """Run our command; stdin is empty without `input`; `where` as in `where`."""
        return self._run(self.sandbox_argv(*args), input, timeout, where)

    def popen(self, *args: str, **where: Any) -> Process:
        """Start our command with pipes; it ends with its `with` statement or with the test."""
        process = self._popen(self.sandbox_argv(*args), where)
        self.started.append(process)
        return process

    def pty(self, *args: str, rows: int = 24, cols: int = 80, **where: Any) -> Terminal:
        """Start our command on a terminal of this size; use it in a `with` statement."""
        return Terminal(self.sandbox_argv(*args), rows, cols, **self.where(**where))

    def where(
        self,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        home: Path | None = None,
        user: str | None = None,
    ) -> dict[str, Any]:
        """The arguments of Popen for a directory, more environment, a SANDBOX_HOME and a user."""
        owner = pwd.getpwnam(user or self.user)
        return {
            "cwd": cwd or self.project,
            "env": {**self.environ(user, home), **(env or {})},
            "user": owner.pw_uid,
            "group": owner.pw_gid,
            "extra_groups": os.getgrouplist(owner.pw_name, owner.pw_gid),
        }

    def _run(self, argv: list[str], input: str | None, timeout: float,
             where: dict[str, Any]) -> Result:
        with self._popen(argv, where) as process:
            stdout, stderr = process.communicate(input or "", timeout)
            return Result(argv, process.returncode, stdout, stderr)

    def _popen(self, argv: list[str], where: dict[str, Any]) -> Process:
        return Process(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            start_new_session=True,  # away from the terminal the tests run on
            **self.where(**where),
        )

    def names(self) -> list[str]:
        """The names of all containers."""
        return self.run("ps", "-a", "--format", "{{.Names}}").stdout.split()

    def label(self, name: str, key: str) -> str:
        """A label of a container."""
        answer = self.run("container", "inspect", "--format",
                          f'{{{{index .Config.Labels "{key}"}}}}', name)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    def volumes(self) -> set[str]:
        """The names of all volumes."""
        return set(self.run("volume", "ls", "-q").stdout.split())

    def session_ids(self) -> set[str]:
        """Ids of this run's sessions and proxies: a name, label or mount carries the token. Others
        stay unseen."""
        shown = "{{.ID}} {{.Names}} {{.Labels}} {{.Mounts}}"
        listing = self.run("ps", "-a", "--no-trunc", "--filter", "label=sandbox.session",
                           "--format", shown)
        assert listing.returncode == 0, listing.stderr
        return {line.split()[0] for line in listing.stdout.splitlines() if TOKEN in line}

    def remove(self, ids: set[str]) -> None:
        """Remove sessions and proxies, and what the two share."""
        if ids:
            label = '{{index .Config.Labels "sandbox.%s"}}'
            shown = f"sandbox-net-{label % 'session'} {label % 'home'}"
            volumes = set(self.run("inspect", "--format", shown, *ids).stdout.split())
            volumes |= {volume.replace("-home-", f"-{kind}-") for volume in volumes
                        for kind in ("shadow", "copy")}
            # Without a time podman lets a process that ignores SIGTERM live for ten seconds.
            grace = ["--time=0"] if self.runtime == "podman" else []
            self.run("rm", "-f", "-v", *grace, *ids)
            self.run("volume", "rm", *volumes)


class Held:
    """The engine's client for a command with `env`: a call that matches the shell's pattern is
    made, and ends no sooner than it is let go: what is to come meanwhile comes in time.
    """

    def __init__(self, engine: Engine, pattern: str) -> None:
        folder = engine.directory()
        self._made, self._go = folder / "made", folder / "go"
        self.env = {"PATH": f"{folder}:{PATH}"}
        real = shutil.which(engine.runtime, path=PATH)
        client = folder / engine.runtime
        client.write_text(f"""#!/bin/sh
case " $* " in {pattern}) ;; *) exec {real} "$@" ;; esac
{real} "$@"
status=$?
echo >>{self._made}
while [ -d {folder} ] && ! [ -e {self._go} ]; do sleep 0.05; done
exit $status
""")
        client.chmod(0o755)

    def made(self) -> int:
        """How many calls are held."""
        return self._made.read_text().count("\n") if self._made.exists() else 0

    def go(self) -> None:
        self._go.touch()


def unique_name() -> str:
    return f"{TOKEN}-{next(COUNTER)}"


def write_config(home: Path, **keys: object) -> None:
    """Write sandbox.json for the test image with these keys; `home`'s owner owns it.

    That image has no git, which snapshots need.
    """
    path = home / "sandbox.json"
    path.write_text(json.dumps({"imageName": IMAGE_NAME, "imageVersion": IMAGE_VERSION,
                                "checkpoint": False, **keys}, indent=2))
    path.chmod(0o600)
    os.chown(path, home.stat().st_uid, home.stat().st_gid)


# --- Fixtures ---


@pytest.fixture(scope="session")
def area() -> Iterator[Path]:
    """A prepared machine, and a temporary directory for all users with the code in app/."""
    if os.geteuid() != 0:
        pytest.fail(
            "the engine tests need root: they run rootful engines and switch to the user "
            "sandbox-test")
    with open("/run/sandbox-test.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other parts do the same; it goes with the file
        prepare = subprocess.run([ROOT / "tests" / "prepare"], capture_output=True, text=True,
                                 timeout=1800)
        if prepare.returncode != 0:
            pytest.fail(f"tests/prepare failed:\n{prepare.stdout}{prepare.stderr}")
        area = Path("/tmp", f"sandbox-test-{TOKEN}")
        area.mkdir()
        area.chmod(0o755)
        copy_code(area / "app")
    yield area
    shutil.rmtree(area)


def copy_code(app: Path) -> None:
    """Copy what a zipapp holds, compiled for PYTHON."""
    subprocess.run([sys.executable, ROOT / "static" / "build.py", "--libraries"], check=True,
                   timeout=300)
    app.mkdir()
    for module in ROOT.glob("sandbox*.py"):
        shutil.copy(module, app)
    (app / "__main__.py").write_text("import sandbox\n\nsandbox.entry()\n")
    shutil.copytree(ROOT / "static", app / "static",
                    ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    websockets = importlib.util.find_spec("websockets")
    assert websockets and websockets.origin, "websockets is not installed"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(websockets.origin).parent, app / "websockets", ignore=ignored)
    new_enough = "import sys; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run([PYTHON, "-c", new_enough]).returncode != 0:
        pytest.fail(f"{PYTHON} must be Python 3.11 or newer: the tests start our command with it")
    subprocess.run([PYTHON, "-m", "compileall", "-q", "-j0", app], check=True)
    subprocess.run(["chmod", "-R", "a+rX", app], check=True)


def on(*engines: str) -> pytest.MarkDecorator:
    """A test that runs on these alone."""
    return pytest.mark.parametrize("engine", engines, indirect=True)


ENGINES = ("docker", "podman", "rootless")
# What no engine decides is tested on one, and what only its client or only its user decides on two.
on_docker = on("docker")
on_both_clients = on("docker", "podman")
as_root_and_not = on("docker", "rootless")
# What a cluster decides as well, whose sessions have a copy of the directory.
everywhere = pytest.mark.everywhere
# A cluster is built by `tests/prepare kubernetes` alone: its part is there where that has begun.
HAS_CLUSTER = Path("/var/cache/sandbox-test/kubernetes").exists()
# Docker's tests are the most: these files are parts of their own, the others are in "docker". What
# prunes stays there, with what makes copies: only the tests of one part wait for each other.
SUBJECTS = {
    "agents": ("test_agents", "test_attach", "test_broker", "test_changes_page"),
    "hosts": ("test_hosts", "test_states", "test_travel"),
    "web": ("test_jobs", "test_keys", "test_terminal", "test_web", "test_websocket"),
    "pages": ("test_browser", "test_keys_page", "test_notify", "test_review"),
}
PARTS = (*(["kubernetes"] if HAS_CLUSTER else []), "rootless", "podman", "docker", *SUBJECTS,
         "plain")  # the longest first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=PARTS, action="append", default=[],
                     help="run what belongs to a part: see run.py")


def part_of(item: pytest.Item) -> str:
    """The one part of a test. Docker has several; what needs no engine is in "plain"."""
    assert isinstance(item, pytest.Function)
    engine = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
    if engine not in (None, "docker"):
        return next((part for part in ("kubernetes", "rootless") if part in str(engine)),
                    "podman")
    if engine is None:
        return "plain"
    file = item.module.__name__
    return next((part for part, files in SUBJECTS.items() if file in files), "docker")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem == "test_kube")  # its last test kills a node
    if wanted := config.getoption("part"):
        others = [item for item in items if part_of(item) not in wanted]
        items[:] = [item for item in items if part_of(item) in wanted]
        config.hook.pytest_deselected(items=others)
    elif not HAS_CLUSTER:
        others = [item for item in items if part_of(item) == "kubernetes"]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for `engine` on each of them, tests of sessions on a rootless docker, too."""
    named = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "engine" in metafunc.fixturenames and "engine" not in named:
        engines = [*ENGINES]
        if metafunc.module.__name__ == "test_engines":
            engines.append("rootless-docker")
        if metafunc.definition.get_closest_marker("everywhere"):
            engines.append("kubernetes")
        metafunc.parametrize("engine", engines, indirect=True, scope="session")


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest, area: Path) -> Iterator[Engine]:
    if request.param == "kubernetes":
        from cluster import Cluster, started  # which imports this module

        cluster = Cluster("kubernetes", "kubectl", "root", area)
        with started(cluster):
            yield cluster
        return
    runtime = "docker" if "docker" in request.param else "podman"
    engine = Engine(request.param, runtime, USER if "rootless" in request.param else "root", area)
    answer = engine.run("image", "inspect", IMAGE)
    if answer.returncode != 0:
        pytest.fail(f"{engine.id} does not answer or lacks {IMAGE}:\n{answer.stderr}")
    yield engine
    engine.remove(engine.session_ids())  # of fixtures that have failed


@pytest.fixture(autouse=True)
def _sessions_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove the sessions that a test has left; those of fixtures with a wider scope stay."""
    engine = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    before = engine.session_ids() if engine else set()
    yield
    if engine:
        while engine.started:
            engine.started.pop().end()
        engine.remove(engine.session_ids() - before)


@pytest.fixture
def project(engine: Engine) -> Path:
    """A fresh directory of the engine's user, in which commands start."""
    engine.project = engine.directory()
    return engine.project


@pytest.fixture
def home(engine: Engine) -> Iterator[Path]:
    """A fresh SANDBOX_HOME of the engine's user with the default sandbox.json; see write_config."""
    before, engine.home = engine.home, engine.directory()
    engine.configure()
    yield engine.home
    engine.home = before  # what this test has configured is no other's


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A session name no other test uses; on a cluster it is of NAME@HOST."""
    engine = request.getfixturevalue("engine") if "engine" in request.fixturenames else None
    return unique_name() + (engine.host if engine else "")


@pytest.fixture
def service(engine: Engine, home: Path, project: Path) -> "Iterator[Service]":
    """A running `sandbox serve` with its own home, and a client that is logged in."""
    from service import Service  # which imports this module

    service = Service(engine)
    yield service
    service.end()


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A Chromium for the tests of a file."""
    from browser import chromium  # which needs websockets

    with chromium() as browser:
        yield browser
