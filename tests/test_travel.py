"""A directory on a host that does not see this machine's files, and what comes back from there."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import USER, Engine, Process, Result, write_config
from elsewhere import HOSTS, Elsewhere, configure, elsewhere
from service import free_port, wait_for
from test_agents import IMAGE as AGENTS_IMAGE
from test_agents import image
from test_copy import LOOK, fill, git_state
from test_git import git_in

__all__ = ["image"]  # a fixture

pytestmark = pytest.mark.parametrize("engine", ["docker"], indirect=True, scope="session")


@pytest.fixture(scope="module")
def there(engine: Engine, image: str) -> Iterator[Elsewhere]:
    with elsewhere(engine) as machine:
        archive = machine.folder / "image.tar"
        assert engine.run("save", "-o", str(archive), image, timeout=600).returncode == 0
        machine.machine.must("docker", "load", "-qi", str(archive), seconds=600)
        archive.chmod(0o644)
        config = machine.folder / "config"  # as who has many calls over ssh has it
        config.write_text(config.read_text() + " ControlMaster auto\n ControlPersist 60\n"
                          f" ControlPath {machine.folder}/master\n")
        yield machine
        machine.client("ssh", "-O", "exit", "root@big")


class Far:
    """A directory of the person's, and sessions on the other machine."""

    def __init__(self, there: Elsewhere, project: Path) -> None:
        self.there, self.project, self.engine = there, project, there.engine
        self.names: list[str] = []

    def sandbox(self, *words: str, fails: int | None = 0,
                env: dict[str, str] | None = None) -> Result:
        answer = self.there.sandbox(*words, cwd=self.project, env=env)
        assert fails is None or answer.returncode == fails, answer.stdout + answer.stderr
        return answer

    def run(self, name: str, command: str, *options: str) -> str:
        self.names.append(name)
        return self.sandbox("run", "--on", "big", "-n", name, *options,
                            "-x", "sh", "-c", command).stdout

    def merge(self, name: str, *options: str, fails: int | None = 0) -> list[str]:
        answer = self.sandbox("merge", f"{name}@big", *options, fails=fails)
        return [line.split(maxsplit=1)[1] for line in answer.stdout.splitlines()]

    def git(self, *words: str, cwd: Path | None = None) -> str:
        return git_in(cwd or self.project, *words, engine=self.engine)

    def docker(self, *words: str) -> str:
        return self.there.machine.must("docker", *words)

    def volumes(self, kind: str) -> list[str]:
        return [name for name in self.docker("volume", "ls", "-q").split()
                if name.startswith(f"sandbox-{kind}-")]

    def files(self, volume: str) -> Path:
        """The content of a volume, as this machine sees that of the other."""
        inner = self.docker("volume", "inspect", "--format", "{{.Mountpoint}}", volume).strip()
        pid = self.there.machine.prefix[1].removeprefix("--target=")
        return Path(f"/proc/{pid}/root{inner}")


@pytest.fixture
def far(there: Elsewhere, home: Path, project: Path) -> Iterator[Far]:
    write_config(home, imageName=AGENTS_IMAGE.partition(":")[0])
    configure(home)
    far = Far(there, project)
    yield far
    for name in far.names:
        far.sandbox("rm", "-f", f"{name}@big", fails=None)
    far.sandbox("prune", "--on", "big", "--copies", fails=None)


@pytest.fixture
def repository(far: Far) -> Far:
    far.git("init", "-q", "-b", "main")
    (far.project / "a").write_text("one\n2\nthree\n4\n5\n")
    (far.project / "b").write_text("b\n")
    (far.project / ".gitignore").write_text("ignored\n")
    (far.project / "ignored").write_text("mine\n")
    far.git("add", ".")
    far.git("commit", "-qm", "first")
    return far


def tree_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path.relative_to(folder)): (
        path.lstat().st_mode, os.readlink(path).encode() if path.is_symlink()
        else path.read_bytes() if path.is_file() else b"") for path in folder.rglob("*")}


# --- There and back ---


def test_a_directory_is_there_byte_for_byte(far: Far, engine: Engine, name: str) -> None:
    fill(far.project, engine)
    (far.project / "deep" / "hard").unlink()
    (far.project / "fifo").unlink()
    (far.project / "s").unlink()
    os.utime(far.project / "deep", ns=(1, 1_000_000_000_123_456_789))
    here = subprocess.run(["python3", "-c", LOOK], cwd=far.project, capture_output=True, text=True)
    os.mkfifo(far.project / "fifo")
    (far.project / "none").mkdir(mode=0)
    times = far.project.stat().st_mtime_ns
    far.names.append(name)
    ran = far.sandbox("run", "--on", "big", "-n", name, "-x", "python3", "-c", LOOK)
    lines, expected = ran.stdout.splitlines(), here.stdout.splitlines()
    assert [line for line in lines if "./none" not in line][1:] == expected[1:]
    assert "not copied: fifo: it is no file" in ran.stderr
    assert far.project.stat().st_mtime_ns == times
    took = far.sandbox("run", "--on", "big", "-n", name, "-x", "du -k sparse").stdout
    assert int(took.split()[0]) < 100  # of three million


def test_work_comes_back_and_nothing_else(repository: Far, name: str) -> None:
    far, project = repository, repository.project
    far.run(name, "sed -i s/2/two/ a; rm b; mkdir -p n/empty; echo new >n/f; chmod 700 n/f;"
            "ln -s /etc/passwd n/l; echo theirs >ignored; printf x >\"$(printf 'n/\\377\\n')\";"
            "echo evil >.git/hooks/pre-commit; git config core.fsmonitor /evil; echo m >mine;"
            "git add -A; git -c user.name=a -c user.email=a@b commit -qm work")
    (project / "a").write_text("one\n2\nthree\n4\nfive\n")
    (project / "mine").write_text("the person's\n")
    kept = git_state(project / ".git")
    brought = far.merge(name, "--dry-run", fails=1)
    assert not (project / "n").exists()
    assert far.merge(name, fails=1) == brought
    assert (project / "a").read_text() == "one\ntwo\nthree\n4\nfive\n"
    assert not (project / "b").exists()
    assert (project / "ignored").read_text() == "theirs\n"
    assert (project / "mine").read_text() == "the person's\n"
    assert [path.lstat().st_mode & 0o777 for path in (project / "n" / "f", project / "n")] == [
        0o700, 0o755]
    assert os.readlink(project / "n" / "l") == "/etc/passwd"
    assert (project / "n" / os.fsdecode(b"\xff")).read_text() == "x"
    assert (project / "n" / "empty").is_dir()
    now = git_state(project / ".git")
    assert {path for path in now.keys() | kept.keys() if now.get(path) != kept.get(path)} == {
        str(project / ".git" / "refs" / "heads" / "sandbox"),
        str(project / ".git" / "refs" / "heads" / "sandbox" / f"{name}@big")}
    assert far.git("log", "-1", "--format=%s", f"sandbox/{name}@big") == "work\n"
    (project / "mine").unlink()
    assert far.merge(name) == ["mine"]
    assert far.merge(name) == []


def test_turns_of_a_session_there(repository: Far, name: str) -> None:
    far = repository
    far.run(name, "echo more >>a", "--checkpoint")
    place = f"{name}@big"
    assert json.loads(far.sandbox("log", place, "--json").stdout)[0]["files"] == 1
    assert "+more" in far.sandbox("diff", place).stdout
    far.sandbox("undo", place)
    assert far.run(name, "cat a") == (far.project / "a").read_text()
    far.sandbox("redo", place)
    assert far.run(name, "tail -1 a") == "more\n"
    assert far.merge(name) == ["a"]


def test_a_linked_worktree_and_a_submodule(repository: Far, name: str) -> None:
    far, main = repository, repository.project
    far.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(main), "sub")
    far.git("commit", "-qm", "second")
    tree = main.parent / f"{name}-tree"
    far.git("worktree", "add", "-q", "-b", "side", str(tree))
    far.project = tree
    out = far.run(name, "git status --short; git log -1 --format=%s; echo w >w; git add w;"
                  "git -c user.name=a -c user.email=a@b commit -qm work")
    assert out == "second\n"
    assert far.merge(name) == ["w"]
    assert far.git("log", "-1", "--format=%s", f"sandbox/{name}@big", cwd=main) == "work\n"
    far.project = main
    far.names.append(f"{name}s")
    far.run(f"{name}s", "git -C sub log -1 --format=%s >c; rm .git/index")
    assert far.merge(f"{name}s") == ["c"]
    assert (main / "c").read_text() == "first\n"


def test_credentials_and_env_files_travel(far: Far, name: str) -> None:
    secret, env = far.engine.home / "auth.json", far.engine.home / "keys.env"
    secret.write_bytes(b"secret\0\n")
    env.write_text("export KEY='a b'\n")
    out = far.run(name, "stat -c '%a %U' ~/.codex/auth.json ~/.codex; od -c ~/.codex/auth.json;"
                  "echo more >>~/.codex/auth.json; echo $KEY",
                  "-v", f"{secret}:/home/agent/.codex/auth.json:ro", "--ef", str(env))
    assert out.splitlines()[0].startswith("600 ")
    assert out.splitlines()[0].split()[1] == out.splitlines()[1].split()[1]
    assert "s   e   c   r   e   t  \\0  \\n" in out
    assert out.endswith("a b\n")
    assert secret.read_bytes() == b"secret\0\n"
    far.run(name, "true", "-v", f"{secret}:/home/agent/.codex/auth.json:ro")
    (far.project / "inner").mkdir()
    refused = far.sandbox("run", "--on", "big", "-n", f"{name}x", "-v",
                          f"{far.project}/inner:/data", "-x", "true", fails=125)
    assert "is on this machine" in refused.stderr
    secret.unlink()
    refused = far.sandbox("run", "--on", "big", "-n", f"{name}x", "-v",
                          f"{secret}:/data", "-x", "true", fails=125)
    assert "is on this machine" in refused.stderr
    assert len(far.volumes("copy")) == 1


def test_what_is_used_there_is_counted_here(far: Far, name: str) -> None:
    """`usage` without a name is of all hosts, and says which did not answer."""
    far.run(name, "true", "--keys", "hidden", "--budget", "1usd", "-e", "ANTHROPIC_API_KEY=k")
    told = far.sandbox("usage", "--json", "--on", "big")
    assert [entry["name"] for entry in json.loads(told.stdout)] == [f"{name}@big"]
    lost = {"big": HOSTS["big"], "lost": {"runtime": "docker", "context": "lost"}}
    configure(far.engine.home, hosts=lost)
    everywhere = far.sandbox("usage", "--json", fails=1)
    entries = json.loads(everywhere.stdout)  # also those of this machine, which others use
    assert [one for one in entries if "@" in one["name"]] == json.loads(told.stdout)
    assert "lost did not answer" in everywhere.stderr


# --- Only what has changed ---


def test_only_what_has_changed_is_sent(far: Far, name: str) -> None:
    for file in ("same", "other", "gone"):
        (far.project / file).write_text(file)
        os.utime(far.project / file, (1, 1))
    (far.project / "kind").mkdir()
    (far.project / "kind" / "inner").write_text("x")
    far.run(name, "true")
    mirror = far.files(far.volumes("mirror")[0]) / "from"
    wait_for(lambda: is_settled(far.project))
    far.merge(name)
    before = (mirror / "same").stat()
    (far.project / "other").write_text("OTHER")
    (far.project / "gone").unlink()
    (far.project / "kind" / "inner").unlink()
    (far.project / "kind").rmdir()
    (far.project / "kind").write_text("a file")
    assert far.run(f"{name}2", "cat *") == "a fileOTHERsame"
    assert (mirror / "same").stat() == before
    assert tree_of(mirror) == tree_of(far.project)
    far.sandbox("rm", "-f", f"{name}@big")
    assert mirror.is_dir()  # the other session has it
    far.sandbox("rm", "-f", f"{name}2@big")
    assert far.volumes("mirror") == far.volumes("copy") == []


def is_settled(folder: Path) -> bool:
    """Whether nothing was changed in the last two seconds, so that a time tells all."""
    import time

    newest = max(path.lstat().st_ctime for path in folder.rglob("*"))
    return time.time() - newest > 2.1


# --- What goes wrong ---


def children(process: int) -> list[int]:
    found: list[str] = []
    with contextlib.suppress(OSError):  # it has ended
        found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [inner for child in map(int, found) for inner in (child, *children(child))]


def program_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    return ""


def cut(process: Process) -> None:
    """Kill what connects a client with its engine."""
    for pid in children(process.pid):
        if os.path.basename(program_of(pid)) in ("docker", "ssh"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# An ssh that is given so many bytes, and no more until it ends: nothing is over before it is cut.
STALLING = """#!/usr/bin/python3
import os, select, sys
ssh, left, (out, end) = sys.argv[0] + ".real", 100 << 20, os.pipe()
if os.fork():
    os.dup2(out, 0)
    os.close(end)
    os.execv(ssh, [ssh, *sys.argv[1:]])
os.close(out)
os.dup2(end, 1)
os.close(end)
try:
    while left and (data := os.read(0, min(left, 65536))):
        left -= len(data)
        while data:
            data = data[os.write(1, data):]
    poller = select.poll()
    poller.register(0, 0)
    poller.register(1, 0)
    left or poller.poll()
except BrokenPipeError:
    pass
"""


def test_a_cut_seed_goes_on(far: Far, name: str) -> None:
    for number in range(40):
        (far.project / f"{number:02}").write_bytes(os.urandom(8 << 20))
    wait_for(lambda: is_settled(far.project))
    argv = far.engine.sandbox_argv("run", "--on", "big", "-n", name, "-x", "true")
    folder = far.engine.directory()
    (folder / "ssh").write_text(STALLING)
    (folder / "ssh").chmod(0o755)
    (folder / "ssh.real").symlink_to(far.there.folder / "ssh")
    stalls = {"PATH": f"{folder}:{far.there.environ['PATH']}"}
    where = far.engine.where(cwd=far.project, env=far.there.environ | stalls)
    far.names.append(name)

    def some_are_there() -> bool:
        mirrors = far.volumes("mirror")
        return bool(mirrors) and len([*(far.files(mirrors[0]) / "from").glob("[0-9][0-9]")]) > 1

    with Process(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                 text=True, start_new_session=True, **where) as process:
        wait_for(some_are_there)
        cut(process)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 125, said
    assert "start it again: what has arrived is not sent again" in said
    assert some_are_there()
    assert far.volumes("copy") == far.volumes("home") == far.volumes("shadow") == []
    assert far.run(name, "cat * | wc -c") == f"{40 * (8 << 20)}\n"
    mirror = far.files(far.volumes("mirror")[0]) / "from"
    assert tree_of(mirror) == tree_of(far.project)


def written(folder: Path) -> set[Path]:
    """What a merge has written, and not yet put in its place."""
    return {path for path in folder.iterdir() if path.name.startswith(".shadow-")}


DIES = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import sandbox
rename, left = os.rename, 100
def dies(source, *words, **more):
    global left
    left -= str(source).startswith(".shadow-")
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, *words, **more)
os.rename = dies
sandbox.leave(sandbox.main(sys.argv[2:]))
"""


def test_a_cut_merge_goes_on(far: Far, name: str) -> None:
    """Cut as soon as its helper is seen, or a little later, or killed while it writes: each file is
    the old one or the new.
    """
    far.run(name, "for i in $(seq 300); do head -c 100000 /dev/urandom >f$i; done")
    new = {path.name: path.read_bytes() for path in
           far.files(far.volumes("copy")[0]).iterdir()}
    for pause in range(4):
        argv = far.engine.sandbox_argv("merge", f"{name}@big")
        if pause % 2:
            argv = [argv[0], "-I", "-c", DIES, *argv[1:]]
        where = far.engine.where(cwd=far.project, env=far.there.environ)
        with Process(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                     stderr=subprocess.PIPE, start_new_session=True, **where) as process:
            if not pause % 2:
                wait_for(lambda: "sandbox-mirror" in far.docker("ps", "--format", "{{.Names}}")
                         or process.poll() is not None)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(pause / 5)
                cut(process)
            process.communicate(timeout=60)
        left = written(far.project)
        assert left or pause != 1
        for path in {*far.project.iterdir()} - left:
            assert path.read_bytes() == new[path.name]
    far.merge(name)
    assert {path.name: path.read_bytes() for path in far.project.iterdir()} == new


def test_a_full_volume(far: Far, name: str) -> None:
    (far.project / "f").write_bytes(os.urandom(1 << 20))
    far.run(name, "true")
    mirror = far.volumes("mirror")[0]
    far.sandbox("rm", "-f", f"{name}@big")
    far.docker("volume", "create", "--driver", "local", "--opt", "type=tmpfs", "--opt",
               "device=tmpfs", "--opt", "o=size=4m", mirror)
    (far.project / "g").write_bytes(os.urandom(8 << 20))
    failed = far.sandbox("run", "--on", "big", "-n", name, "-x", "true", fails=125)
    assert f"there is no room for {far.project} on big" in failed.stderr
    assert "sandbox doctor" in failed.stderr
    for kind in ("mirror", "copy", "home", "shadow"):
        assert far.volumes(kind) == []
    assert far.run(name, "wc -c <g") == f"{8 << 20}\n"


def test_a_run_that_fails_leaves_no_mirror_that_is_new(far: Far, name: str) -> None:
    (far.project / "f").write_text("f")

    def fail() -> None:
        failed = far.sandbox("run", "--on", "big", "-n", f"{name}x", "--memory", "1k", "-x", "true",
                             fails=125)
        assert "memory" in failed.stderr.lower()

    fail()
    assert [far.volumes(kind) for kind in ("mirror", "copy", "home", "shadow")] == [[]] * 4
    far.run(name, "true")
    (mirror,) = far.volumes("mirror")
    fail()
    assert far.volumes("mirror") == [mirror]
    # What another client has there is its own; what is ours and of no session is not.
    other, ours = f"sandbox-mirror-{'f' * 20}", mirror[:-10] + 10 * "f"
    for volume in (other, ours):
        far.docker("volume", "create", volume)
    pruned = far.sandbox("prune", "--on", "big")
    assert pruned.stdout == f"{ours}\n"
    assert f"{other} is another client's mirror of a directory" in pruned.stderr
    assert sorted(far.volumes("mirror")) == sorted([mirror, other])
    assert far.sandbox("prune", "--on", "big", "--copies").stdout == f"{other}\n"


# --- Engines that are elsewhere, though none says so ---


@contextmanager
def forwarded(there: Elsewhere) -> Iterator[tuple[Path, int]]:
    """The engine of `big` on a socket and a port of this machine, by ssh."""
    path, port = there.folder / "forwarded.sock", free_port()
    argv = [f"{there.folder}/ssh", "-N", "-L", f"{path}:/var/run/docker.sock",
            "-L", f"127.0.0.1:{port}:/var/run/docker.sock", "root@big"]
    with Process(argv, start_new_session=True):
        wait_for(path.exists)
        yield path, port
    path.unlink()


def test_a_forwarded_engine_is_on_another_machine(far: Far, name: str) -> None:
    """Of a socket that ssh listens on that is sure, of a port it is assumed, and said."""
    (far.project / "here").write_text("")
    configure(far.engine.home, hosts={})
    with forwarded(far.there) as (path, port):
        for address in (f"unix://{path}", f"tcp://127.0.0.1:{port}"):
            env = {"DOCKER_HOST": address, "SANDBOX_RUNTIME": "docker"}
            made = far.sandbox("run", "-n", name, "-x", "ls", env=env)
            assert made.stdout == "here\n", made.stderr
            said = 'if it is this one: "workspace": "mount"' in made.stderr
            assert said == address.startswith("tcp")
            (row,) = json.loads(far.sandbox("ps", "--json", env=env).stdout)
            assert (row["workspace"], row["name"]) == ("copy", f"{name}@{row['host']}")
            far.sandbox("rm", "-f", row["name"], env=env)
            assert far.docker("volume", "ls", "-q") == ""


def test_a_podman_that_a_file_calls_elsewhere(far: Far, name: str) -> None:
    """`remote = true` in containers.conf: what is made there comes back, and goes, as it has to."""
    far.there.start_podman()
    far.there.machine.must("podman", "load", "-qi", str(far.there.folder / "image.tar"), user=USER,
                           seconds=600)
    served = far.engine.home / "containers.conf"
    text = Path(far.there.environ["CONTAINERS_CONF"]).read_text()
    served.write_text(text.replace("[engine]",
                                   '[engine]\nremote = true\nactive_service = "lab"', 1))
    env = {"CONTAINERS_CONF": str(served), "SANDBOX_RUNTIME": "podman"}

    def volumes() -> list[str]:
        return far.there.machine.must("podman", "volume", "ls", "-q", user=USER).split()

    (far.project / "here").write_text("")
    far.sandbox("run", "--copy", "-n", name, "-x", "test -f here && echo there >here", env=env)
    far.sandbox("merge", name, env=env)
    assert (far.project / "here").read_text() == "there\n"
    assert far.sandbox("prune", env=env).stdout == ""
    assert [kind for kind in ("copy", "home", "mirror", "shadow")
            if any(one.startswith(f"sandbox-{kind}-") for one in volumes())] == [
                "copy", "home", "mirror", "shadow"]
    far.sandbox("rm", "-f", name, env=env)
    assert volumes() == []


# --- A host that lies ---

LIAR = """FROM localhost/sandbox:1.0-common
USER 0
RUN mv $(readlink -f $(command -v python3)) /usr/bin/python3.true && rm -f /usr/bin/python3 && \
  printf '#!/bin/sh\\n[ "$5" != merge ] || exec cat /run/sandbox-mirror/from/lie\\n\
exec /usr/bin/python3.true "$@"\\n' >/usr/bin/python3 && chmod 755 /usr/bin/python3
"""


def lie(*rows: tuple[str, str, bytes], size: int | None = None) -> bytes:
    changed = [{"path": path, "status": "added", "risk": [], "kind": kind, "mode": 0o6777,
                "size": len(data) if size is None else size} for path, kind, data in rows]
    return (json.dumps({"dry": True, "turns": [], "changed": changed, "left": []}).encode()
            + b"\n" + b"".join(data for _, _, data in rows))


def test_a_host_that_lies_stays_in_the_directory(repository: Far, name: str) -> None:
    far, project = repository, repository.project
    outside = project.parent / f"{name}-outside"
    outside.mkdir()
    (outside / "theirs").write_text("theirs")
    (project / "way").symlink_to(outside)
    (project / "folder").mkdir()
    (project / "folder" / "x").write_text("x")
    assert far.there.machine.run("docker", "build", "-q", "-t", f"localhost/{name}:1.0-common",
                                 "-", input=LIAR, env={"DOCKER_BUILDKIT": "0"}).returncode == 0
    configure(far.engine.home, imageName=f"localhost/{name}")
    evil = [f"../{name}-outside/theirs", str(outside / "new"), f"folder/../../{name}-outside/new",
            "way/theirs", "way/new", ".git/hooks/pre-commit", ".GIT/config", "folder/.git/config",
            ".gi\u200dt/hooks/x", "git~1/config", "nul\0", "./a", "folder//x", "", ".",
            "folder/", "a/below", "x" * 300, "long/" * 1000 + "x", "\ud800"]
    kept = {**tree_of(outside), **git_state(project / ".git")}
    (project / "lie").write_bytes(lie(*((path, "file", b"evil") for path in evil),
                                      ("good", "file", b"good"), ("folder", "link", b"/etc"),
                                      ("odd", "device", b"")))
    far.run(name, "true")
    said = far.sandbox("merge", f"{name}@big", fails=1)
    assert "Traceback" not in said.stderr, said.stderr
    assert (project / "good").read_text() == "good"
    assert (project / "good").stat().st_mode & 0o6000 == 0
    assert {**tree_of(outside), **git_state(project / ".git")} == kept
    assert (project / "folder" / "x").read_text() == "x"
    assert (project / "a").read_text() == "one\n2\nthree\n4\n5\n"
    for lies in (lie(("big", "file", b""), size=1 << 40), lie(("short", "file", b""), size=99),
                 lie(("minus", "file", b""), size=-1), b"[" * 100000 + b"\n", b"{}\n", b"nonsense",
                 b'{"changed": [{"path": 7}], "left": []}\n'):
        (project / "lie").write_bytes(lies)
        said = far.sandbox("merge", f"{name}@big", fails=1)
        assert "Traceback" not in said.stderr, said.stderr
    assert not {"big", "short", "minus"} & {path.name for path in project.iterdir()}
    far.docker("image", "rm", "-f", f"localhost/{name}:1.0-common")
