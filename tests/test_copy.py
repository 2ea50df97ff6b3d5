"""Sessions that work on a copy of a directory, and what comes back from one."""

import json
import os
import re
import secrets
import shlex
import signal
import socket
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    PYTHON,
    Engine,
    Held,
    Process,
    Result,
    as_root_and_not,
    everywhere,
    on,
    on_docker,
    write_config,
)
from network import inspected
from service import Service, wait_for
from test_agents import IMAGE as AGENTS_IMAGE
from test_agents import STUB_ANSWERS, image, write_stub_config
from test_git import AS_AGENT, Worktree, git_in
from test_shadow import hostile_config

__all__ = ["image"]  # a fixture

TEXT = "one\n2\nthree\n4\n5\n"
State = dict[str, tuple[Any, ...]]


class Copied:
    """A directory of the person's, and sessions on copies of it."""

    def __init__(self, engine: Engine, project: Path) -> None:
        self.engine, self.project = engine, project

    def run(self, name: str, command: str, *options: str) -> str:
        ran = self.engine.sandbox("run", "-n", name, *options, "-x", "sh", "-c", command)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def make(self, name: str, command: str = "true") -> str:
        return self.run(name, command, "--copy", *AS_AGENT)

    def merge(self, name: str, *options: str, fails: int = 0) -> Result:
        answer = self.engine.sandbox("merge", name, *options)
        assert answer.returncode == fails, answer.stderr
        return answer

    def brought(self, name: str, *options: str, fails: int = 0) -> list[str]:
        return [line.split()[1] for line in
                self.merge(name, *options, fails=fails).stdout.splitlines()]

    def git(self, *args: str) -> str:
        return git_in(self.project, *args, engine=self.engine)

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.project / name).write_text(text)
            os.chown(self.project / name, self.engine.uid, self.engine.gid)

    def read(self, name: str) -> str:
        return (self.project / name).read_text()


@pytest.fixture
def copied(engine: Engine, image: str, home: Path, project: Path) -> Copied:
    engine.configure(imageName=image.partition(":")[0])
    return Copied(engine, project)


@pytest.fixture
def repository(copied: Copied) -> Copied:
    copied.git("init", "-q", "-b", "main")
    copied.write(a=TEXT, b="b\n", **{".gitignore": "ignored\n"})
    copied.git("add", ".")
    copied.git("commit", "-qm", "first")
    return copied


def volume_of(engine: Engine, name: str, kind: str = "copy") -> str:
    return engine.label(name, "sandbox.home").replace("home", kind)


def git_state(folder: Path) -> State:
    """All of a repository but its objects, and the times."""
    return {str(path): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"",
                        path.lstat().st_mtime_ns if path.is_file() else 0)
            for path in folder.rglob("*") if "objects" not in path.parts}


# --- The copy ---

LOOK = """
import os, stat
for folder, folders, files in sorted(os.walk(b'.')):
    for name in sorted([b'.', *folders, *files]):
        path = os.path.join(folder, name)
        st = os.lstat(path)
        about = [path, oct(st.st_mode), st.st_mtime_ns if name != b'.' or folder == b'.' else 0]
        if stat.S_ISLNK(st.st_mode): about += [os.readlink(path)]
        elif stat.S_ISREG(st.st_mode):
            about += [st.st_size, st.st_nlink]
            if st.st_size < 1 << 20: about += [open(path, 'rb').read()]
        print(about)
"""


def fill(project: Path, engine: Engine) -> None:
    """What a directory may hold."""
    for name in ("empty", "deep/er", "private"):
        (project / name).mkdir(parents=True)
    (project / "file").write_text("text")
    (project / "file").chmod(0o600)
    (project / "setuid").write_text("x")
    os.link(project / "file", project / "deep" / "hard")
    (project / "link").symlink_to("/etc/passwd")
    (project / "broken").symlink_to("../../nowhere")
    (project / os.fsdecode(b"new\nline \xff'\"")).write_text("name")
    os.mkfifo(project / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(project / "s"))
    with (project / "sparse").open("wb") as file:
        file.truncate(3 << 30)
    for path in [project, *project.rglob("*")]:
        os.chown(path, engine.uid, engine.gid, follow_symlinks=False)
    (project / "setuid").chmod(0o4755)
    (project / "private").chmod(0o2700)
    (project / "deep").chmod(0o1777)
    for path in project.rglob("*"):
        os.utime(path, ns=(1, 1_000_000_000_123_456_789), follow_symlinks=False)


def test_a_copy_is_the_directory_byte_for_byte(copied: Copied, engine: Engine, name: str) -> None:
    fill(copied.project, engine)
    look = f"python3 -c {shlex.quote(LOOK)}"
    inside = copied.make(name, f"{look}; du -k sparse; touch made; stat -c %u file made")
    outside = subprocess.run(["sh", "-c", look], cwd=copied.project, capture_output=True, text=True)
    lines = inside.splitlines()
    assert lines[:-3] == outside.stdout.splitlines() and len(lines) > 15
    assert int(lines[-3].split()[0]) < 100  # kilobytes
    assert lines[-2] == lines[-1]  # the owner is who works there
    assert not (copied.project / "made").exists()
    assert f"{copied.project} (copy)" in engine.sandbox("ps").stdout
    (row,) = [row for row in json.loads(engine.sandbox("ps", "--json").stdout)
              if row["name"] == name]
    assert row["workspace"] == "copy"


def test_nothing_of_the_directory_is_mounted(repository: Copied, engine: Engine, name: str) -> None:
    repository.make(name)
    mounts = inspected(engine, name, "{{range .Mounts}}{{.Source}} {{end}}")
    assert str(repository.project) not in mounts
    refused = engine.sandbox("run", "-n", f"{name}-2", "--copy", "-v",
                             f"/tmp:{repository.project}", "-x", "true")
    assert refused.returncode == 125 and "two mounts go to" in refused.stderr


def test_what_cannot_be_copied_is_named_and_left_out(copied: Copied, engine: Engine, name: str,
                                                     ) -> None:
    os.mknod(copied.project / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    copied.write(file="text")
    made = engine.sandbox("run", "-n", name, "--copy", "-x", "ls")
    assert (made.returncode, made.stdout) == (0, "file\n"), made
    assert "not copied: " in made.stderr and "device" in made.stderr


@as_root_and_not
def test_a_hundred_thousand_files(copied: Copied, engine: Engine, name: str) -> None:
    script = ("import os\nfor n in range(100000):\n d = f'd{n % 500}'\n"
              " os.makedirs(d, exist_ok=True)\n open(f'{d}/{n}', 'w').write(str(n))")
    subprocess.run(["python3", "-c", script], cwd=copied.project, check=True, user=engine.uid)
    assert copied.make(name, "find . -type f | wc -l; echo more >d7/more") == "100000\n"
    assert copied.brought(name) == ["d7/more"]


@as_root_and_not
def test_directories_that_are_swapped_for_links_end_well(copied: Copied, engine: Engine, name: str,
                                                         ) -> None:
    """Somebody swaps all the time while it is copied: no byte of the host comes along.

    cp may follow a link that was a directory when it looked; where it copies there is the image.
    """
    beside = engine.directory()
    (beside / "secret").write_text("secret")
    swap = ("import os\nos.makedirs('d/e', exist_ok=True)\nopen('d/e/f', 'w').write('mine')\n"
            f"os.symlink('{beside}', 'l')\nopen('ready', 'w')\n"
            "while True:\n os.rename('d', 'x'); os.rename('l', 'd')\n"
            " os.rename('d', 'l'); os.rename('x', 'd')")
    for number in range(300):
        (copied.project / f"a{number}").write_text("x" * 1000)
    os.chown(copied.project, engine.uid, engine.gid)
    with Process(["python3", "-c", swap], cwd=copied.project, user=engine.uid,
                 start_new_session=True):
        wait_for((copied.project / "ready").exists)
        for number in range(3):
            seen = copied.make(f"{name}-{number}", "find . -name secret; ls | wc -l")
            assert 300 < int(seen) < 310  # nothing was found


@on_docker
def test_a_mode_is_for_good(copied: Copied, engine: Engine, home: Path, name: str) -> None:
    copied.run(name, "true")
    refused = engine.sandbox("run", "-n", name, "--copy", "-x", "touch made")
    assert refused.returncode == 125 and "works on the directory itself, for good" in refused.stderr
    assert not (copied.project / "made").exists()
    assert "nothing is to merge" in copied.merge(name, fails=1).stderr
    write_config(home, imageName=AGENTS_IMAGE.partition(":")[0], workspace="copy")
    said = engine.sandbox("run", "-n", name, "-x", "touch made")  # the file is for new ones
    assert said.returncode == 0 and "works on the directory itself, for good" in said.stderr
    assert (copied.project / "made").exists()
    copied.run(f"{name}-2", "rm made")
    write_config(home, imageName=AGENTS_IMAGE.partition(":")[0])
    copied.run(f"{name}-2", "touch more")
    assert engine.sandbox("recreate", f"{name}-2").returncode == 0
    assert copied.run(f"{name}-2", "ls") == "more\n"
    assert [path.name for path in copied.project.iterdir()] == ["made"]


@on_docker
def test_an_image_without_git_makes_no_copy(engine: Engine, home: Path, project: Path, name: str,
                                            ) -> None:
    refused = engine.sandbox("run", "-n", name, "--copy", "-x", "true")
    assert refused.returncode == 125 and "a copy needs an image with git" in refused.stderr
    assert name not in engine.sandbox("ps", "-q").stdout


@everywhere
def test_it_survives_a_new_container_and_a_new_name(repository: Copied, engine: Engine, name: str,
                                                    ) -> None:
    repository.make(name, "echo work >work")
    assert engine.sandbox("recreate", name, "--memory", "1g").returncode == 0
    other = f"2{name}"
    assert engine.sandbox("rename", name, other).returncode == 0
    engine.sandbox("stop", other)
    assert repository.brought(other) == ["work"]
    kept = {volume_of(engine, other, kind) for kind in ("copy", "shadow", "home")}
    assert kept <= engine.volumes()
    removed = engine.sandbox("rm", other)
    assert removed.returncode == 0, removed.stderr
    wait_for(lambda: not kept & engine.volumes())


@on_docker
def test_it_never_becomes_one_of_another_directory(repository: Copied, engine: Engine, name: str,
                                                   ) -> None:
    """A merge would go there."""
    repository.make(name, "touch work")
    other = engine.directory()
    for status, words in ((1, ["recreate", name]), (125, ["run", "--from", name, "-x", "true"])):
        refused = engine.sandbox(words[0], "--hp", str(other), *words[1:])
        assert refused.returncode == status and "for good" in refused.stderr, refused
    link = other / "link"
    link.symlink_to(repository.project)
    assert engine.sandbox("recreate", name, "--hp", str(link)).returncode == 0
    assert repository.brought(name) == ["work"]


@as_root_and_not
def test_a_duplicate_has_the_work_and_knows_what_was_merged(repository: Copied, engine: Engine,
                                                            name: str) -> None:
    repository.make(name, "echo 1 >merged")
    repository.merge(name)
    repository.run(name, "echo 2 >work")
    repository.run(f"2{name}", "echo 3 >>work; cat work", "--from", name)
    assert repository.brought(f"2{name}") == ["work"]
    assert repository.read("work") == "2\n3\n"
    assert repository.run(name, "cat work") == "2\n"
    repository.run(f"{name}-m", "true")
    assert repository.run(f"{name}-3", "rm a; ls", "--from", f"{name}-m", "--copy") == (
        "b\nmerged\nwork\n")
    assert (repository.project / "a").exists()


@on_docker
def test_the_way_back_says_which_is_a_copy(repository: Copied, engine: Engine, name: str) -> None:
    repository.make(name)
    repository.run(f"{name}-m", "true")
    with engine.pty("run", "--copy", "-x", "true") as back:
        assert f"Go on in {name} (no agent, running, a copy of " in back.expect("[Y/n]")
        back.send("\n")
        assert back.wait() == 0
    with engine.pty("run", "-x", "true") as back:
        assert back.expect("[1]").count("a copy of") == 1
        back.send("\x03")


# --- What fails ---


@on_docker
def test_a_full_disk_is_said_and_leaves_no_session(copied: Copied, engine: Engine, name: str,
                                                   ) -> None:
    id = secrets.token_hex(5)
    volume = f"sandbox-copy-{id}"
    engine.run("volume", "create", "--opt", "type=tmpfs", "--opt", "device=tmpfs",
               "--opt", "o=size=1m", volume)
    copied.write(large="x" * 3_000_000)
    code = (f"import sys; sys.path.insert(0, {str(engine.area / 'app')!r})\n"
            f"import sandbox; sandbox.random_id = lambda: {id!r}\n"
            f"sys.exit(sandbox.main(['run', '-n', {name!r}, '--copy', '-x', 'true']))")
    with engine._popen(["python3", "-c", code], {}) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 125 and "there is no room for a copy of" in err, err
    assert "make room" in err and name not in engine.sandbox("ps", "-q").stdout
    assert volume not in engine.volumes()


TRACED = {"SANDBOX_TRACE": "1"}
FILLS_A_COPY = "*' run '*sandbox-copy-*"


def copy_of(engine: Engine, run: Process) -> str:
    """The volume of the copy that a traced command makes, when it is there."""
    assert run.stderr
    line = next(line for line in run.stderr if "sandbox-copy-" in line and " run " in line)
    found = re.search("sandbox-copy-[0-9a-f]{10}", line)
    assert found
    wait_for(lambda: found[0] in engine.volumes())
    return found[0]


def test_a_killed_seed_leaves_no_half_session(copied: Copied, engine: Engine, name: str) -> None:
    copied.write(large="x" * 30_000_000)
    held = Held(engine, FILLS_A_COPY)
    run = engine.popen("run", "-n", name, "--copy", "-x", "true", env=TRACED | held.env)
    left = copy_of(engine, run)
    run.kill()
    run.wait()
    held.go()
    assert name not in engine.sandbox("ps", "-q").stdout
    assert copied.make(name, "wc -c <large") == "30000000\n"
    wait_for(lambda: engine.run("ps", "-aq", "--filter", f"name={left}").stdout == "")
    engine.run("volume", "rm", left, left.replace("copy", "shadow"))


def test_ctrl_c_while_it_is_copied_leaves_nothing(copied: Copied, engine: Engine, name: str,
                                                  ) -> None:
    with (copied.project / "large").open("wb") as file:
        for _ in range(100):
            file.write(bytes(10 << 20))
    held = Held(engine, FILLS_A_COPY)
    run = engine.popen("run", "-n", name, "--copy", "-x", "true", env=TRACED | held.env)
    copy = copy_of(engine, run)
    run.send_signal(signal.SIGINT)
    held.go()
    assert run.wait() == 130
    assert copy not in engine.volumes()
    assert engine.run("ps", "-aq", "--filter", f"name={copy}").stdout == ""


@on_docker
def test_what_fails_half_way_loses_nothing_of_a_copy(repository: Copied, engine: Engine, name: str,
                                                     ) -> None:
    repository.make(name, "echo work >work")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failed = engine.sandbox("recreate", name, "-p", f"{taken.getsockname()[1]}:80")
    assert failed.returncode == 1 and f"{name} is there as it was, stopped" in failed.stderr
    assert repository.brought(name, "--dry-run") == ["work"]
    engine.run("volume", "rm", volume_of(engine, name, "shadow"))  # as `podman volume prune` does
    assert f"the snapshots of {name} are gone" in repository.merge(name, fails=1).stderr
    assert "holds work that was not merged" in engine.sandbox("rm", name).stderr


@on_docker
def test_work_is_not_lost_with_its_session(repository: Copied, engine: Engine, name: str) -> None:
    repository.make(name, "echo work >work; git add work; git commit -qm work")
    refused = engine.sandbox("rm", name)
    assert refused.returncode == 1
    assert f"{name} holds work that was not merged" in refused.stderr
    assert "1 file and 1 commit" in refused.stderr
    assert f"sandbox rm -f {name} removes it" in refused.stderr
    with engine.pty("rm", name) as rm:
        rm.expect("Lose it? [y/N]")
        rm.send("\n")
        assert rm.wait() == 1
    once = engine.sandbox("run", "-n", name, "--rm-on-exit", "-x", "true")
    assert "holds work that was not merged" in once.stderr
    repository.run(name, "git reset -q --hard HEAD~; git status")
    assert engine.sandbox("rm", name).returncode == 0  # there is none by now
    repository.make(f"2{name}", "echo work >work")
    volume = volume_of(engine, f"2{name}")
    assert engine.sandbox("rm", "-f", f"2{name}").returncode == 0
    wait_for(lambda: volume not in engine.volumes())


@on_docker
def test_the_snapshots_of_another_directory_change_nothing(repository: Copied, engine: Engine,
                                                           name: str) -> None:
    """As in a store that was another session's: in its eyes all that is there is new or gone."""
    repository.make(name, "echo work >work")
    store = f"{volume_of(engine, name, 'shadow')}:/store"
    engine.run("run", "--rm", "--user", "0", "--network", "none", "-v", store, AGENTS_IMAGE,
               "sed", "-i", "s/a copy of /elsewhere/", "/store/state.json")
    refused = repository.merge(name, fails=1).stderr
    assert f"the snapshots are those of elsewhere{repository.project}, and not of a copy" in refused
    assert not (repository.project / "work").exists()
    assert "holds work that was not merged" in engine.sandbox("rm", name).stderr


@on_docker
def test_what_cannot_come_is_work_all_the_same(repository: Copied, engine: Engine, name: str,
                                               ) -> None:
    repository.make(name, "head -c 20000000 /dev/urandom >large; mkdir ignored; echo x >ignored/x")
    for _ in range(2):
        answer = repository.merge(name, fails=1)
        assert "large was left as it is: it is too large to keep" in answer.stderr
        refused = engine.sandbox("rm", name)
        assert refused.returncode == 1 and "see sandbox merge: 1 file\n" in refused.stderr
    repository.run(name, "rm large")  # what is ignored is no work
    assert engine.sandbox("rm", name).returncode == 0


def test_prune_names_the_copy_of_a_lost_session(repository: Copied, engine: Engine, name: str,
                                                ) -> None:
    repository.make(name, "echo work >work")
    copy = volume_of(engine, name)
    engine.run("rm", "-f", name)
    for options in (("--dry-run",), ()):
        said = engine.sandbox("prune", *options)
        assert f"{copy} holds work of a session that is gone" in said.stderr, said
        assert copy not in said.stdout
        assert {copy, copy.replace("copy", "shadow")} <= engine.volumes()
    assert copy in engine.sandbox("prune", "--copies").stdout
    assert not {copy, copy.replace("copy", "shadow")} & engine.volumes()


def remove_behind(engine: Engine, name: str) -> None:
    engine.run("rm", "-f", *(["--time=0"] if engine.runtime == "podman" else []), name)
    assert "is gone" in engine.sandbox("run", "-n", name, "-x", "true").stderr


@on_docker
def test_what_a_lost_container_left_is_taken_only_for_the_same(repository: Copied, engine: Engine,
                                                               name: str) -> None:
    """The snapshots of a directory say nothing of a copy, or of another directory."""
    repository.run(name, "true", "--checkpoint")
    left = volume_of(engine, name, "home")
    remove_behind(engine, name)
    made = engine.sandbox("run", "-n", name, "--copy", "-x", "sh", "-c", "echo work >work; ls")
    assert (made.returncode, made.stdout) == (0, "a\nb\nwork\n"), made
    assert "its home was kept" not in made.stderr and "prune" in made.stderr
    assert volume_of(engine, name, "home") != left
    assert repository.brought(name) == ["work"]
    assert (repository.read("a"), repository.read("b")) == (TEXT, "b\n")
    remove_behind(engine, name)
    kept = engine.sandbox("run", "-n", name, "--copy", "-x", "ls")
    assert kept.stdout == "a\nb\nwork\n" and "its home was kept" in kept.stderr
    copy = volume_of(engine, name)
    remove_behind(engine, name)
    engine.run("volume", "rm", copy)
    again = engine.sandbox("run", "-n", name, "--copy", "-x", "sh", "-c", "rm b; ls")
    assert again.stdout == "a\nwork\n" and volume_of(engine, name) != copy
    assert repository.brought(name) == ["b"] and repository.read("a") == TEXT


@on_docker
def test_a_copy_without_its_volume_is_not_merged(repository: Copied, engine: Engine, name: str,
                                                 ) -> None:
    """It would be made anew, and be empty: every file would go."""
    repository.make(name, "echo work >work")
    copy = volume_of(engine, name)
    aside = f"{copy}-aside"  # an engine removes no volume of a container, so the name is changed
    try:
        engine.sandbox("stop", name)
        answer = asked_with_copy(engine, name, aside)
        assert "the copy of" in answer and "is gone" in answer
        assert aside not in engine.volumes() and repository.read("a") == TEXT
    finally:
        engine.run("volume", "rm", aside)


def asked_with_copy(engine: Engine, name: str, copy: str) -> str:
    """What a merge says of a session whose copy is taken for another volume."""
    script = """
import sys
sys.path.insert(0, sys.argv[1])
import sandbox, sandbox_changes
engine, session = sandbox.find_session(sandbox.engines_of(), sys.argv[2])
session.copy = sys.argv[3]
try:
    print(sandbox_changes.merge_copy(engine, session))
except sandbox.SandboxError as error:
    print(error.message)
"""
    done = subprocess.run([PYTHON, "-I", "-c", script, str(engine.area / "app"), name, copy],
                          text=True, capture_output=True, **engine.where())
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@on_docker
def test_another_directory_begins_without_undos(copied: Copied, engine: Engine, name: str) -> None:
    copied.run(name, "echo agent >made", "--checkpoint")
    other = engine.directory()
    (other / "mine").write_text("mine\n")
    moved = engine.sandbox("recreate", name, "--hp", str(other))
    assert moved.returncode == 0, moved.stderr
    assert json.loads(engine.sandbox("log", name, "--json").stdout) == []
    assert engine.sandbox("undo", name).returncode == 1
    assert [path.name for path in other.iterdir()] == ["mine"]
    link = copied.project / "link"
    link.symlink_to(copied.project)
    assert engine.sandbox("run", "-n", f"{name}-l", "--hp", str(link), "--checkpoint", "-x",
                          "touch more").returncode == 0
    link.unlink()
    link.symlink_to(other)
    remove_behind(engine, f"{name}-l")
    again = engine.sandbox("run", "-n", f"{name}-l", "--hp", str(link), "-x", "ls")
    assert again.stdout == "mine\n" and "its home was kept" not in again.stderr
    assert json.loads(engine.sandbox("log", f"{name}-l", "--json").stdout) == []
    copied.make(f"{name}-2", "echo work >work")
    refused = engine.sandbox("recreate", f"{name}-2", "--hp", str(other))
    assert refused.returncode and f"a copy of {copied.project}, for good" in refused.stderr
    assert copied.brought(f"{name}-2") == ["work"]


@on_docker
def test_a_copy_that_was_not_made_from_here_is_not_lost_unasked(repository: Copied, engine: Engine,
                                                                service: Service, name: str,
                                                                ) -> None:
    repository.make(name, "echo work >work")
    copy, store = volume_of(engine, name), volume_of(engine, name, "shadow")
    other = f"{name}-2"
    engine.run("rename", name, other)
    refused = engine.sandbox("rm", other)
    assert refused.returncode == 1 and "was not made from here" in refused.stderr
    assert service.post(f"/api/sessions/{other}", method="DELETE").status == 409
    assert {copy, store} <= engine.volumes()
    assert engine.sandbox("rm", "-f", other).returncode == 0  # its labels may name another's
    assert {copy, store} <= engine.volumes()
    engine.run("volume", "rm", copy, store)


@on_docker
def test_commits_of_other_branches_are_work(repository: Copied, engine: Engine, name: str) -> None:
    commit = "git commit -q --allow-empty -m"
    repository.make(name, f"git checkout -qb feature; {commit} one; {commit} two; "
                          "git tag -a t -m t; git checkout -q main")
    refused = engine.sandbox("rm", name)
    assert refused.returncode == 1, refused
    assert "2 commits on other branches or stashed" in refused.stderr
    assert "nothing to change" in repository.merge(name).stderr
    repository.run(name, "git branch -qD feature; git tag -d t")
    repository.run(name, "echo 1 >>a; git stash -q; echo 2 >>a; git stash -q", *AS_AGENT)
    assert "commits on other branches or stashed" in engine.sandbox("rm", name).stderr
    repository.run(name, f"git stash clear; git pack-refs --all; git checkout -q --orphan x; "
                         f"git rm -rqf .; git checkout -q main; git branch y; {commit} three; "
                         "git pack-refs --all", *AS_AGENT)
    assert ": 1 commit\n" in engine.sandbox("rm", name).stderr
    repository.run(name, "git reset -q --hard y; mkfifo .git/refs/heads/fifo; echo bad >"
                         ".git/refs/heads/bad; printf %040d 1 >.git/refs/heads/none")
    assert engine.sandbox("rm", name).returncode == 0  # there is none by now


@on_docker
def test_a_source_does_not_change_while_it_is_duplicated(copied: Copied, engine: Engine, name: str,
                                                         ) -> None:
    copied.make(name, "head -c 8000000 /dev/zero >large")
    held = Held(engine, FILLS_A_COPY)
    with engine.popen("run", "-n", f"{name}-2", "--from", name, "-x", "stat", "-c", "%s", "large",
                      env=TRACED | held.env) as run:
        copy_of(engine, run)
        with engine.popen("rm", "-f", name) as rm:
            assert rm.stderr and "waiting for another command" in rm.stderr.readline()
            held.go()
            assert rm.wait(60) == 0
        assert run.stdout and run.stdout.read() == "8000000\n"


@on_docker
@pytest.mark.parametrize("ending", [".lock", "..b", "."])
def test_a_name_that_is_no_branch_gets_one(repository: Copied, engine: Engine, name: str,
                                           ending: str) -> None:
    repository.make(f"{name}{ending}", "git commit -q --allow-empty -m work")
    said = repository.merge(f"{name}{ending}").stderr
    assert "1 commit came as the branch sandbox/" in said
    branch = said.split("the branch ")[1].split()[0]
    assert repository.git("log", "--format=%s", branch) == "work\nfirst\n"


# --- Merging ---


@on("docker", "kubernetes")
def test_two_copies_are_merged_with_what_the_person_did(repository: Copied, engine: Engine,
                                                        name: str) -> None:
    one, two = f"1{name}", f"2{name}"
    repository.make(one, "sed -i s/one/ONE/ a; echo new >new; rm b; echo both >fight")
    repository.make(two, "sed -i s/three/THREE/ a; echo other >fight; mkdir d; echo d >d/d")
    repository.write(a=f"{TEXT}mine\n")
    assert repository.brought(one, "--dry-run") == ["a", "b", "fight", "new"]
    assert repository.read("a") == f"{TEXT}mine\n"
    with engine.popen("run", "-n", one, "-x", "sh", "-c", "echo begun; exec cat") as used:
        assert used.stdin and used.stdout and used.stdout.readline() == "begun\n"
        answer = repository.merge(one)
        assert f"what goes on in {one} comes with the next merge: cat\n" in answer.stderr
        used.stdin.close()
        assert used.wait(60) == 0
    assert answer.stdout.split() == ["modified", "a", "deleted", "b", "added", "fight", "added",
                                     "new"]
    assert repository.read("a") == "ONE\n2\nthree\n4\n5\nmine\n"
    repository.write(new="the person's\n")
    answer = repository.merge(two, fails=1)
    assert "fight was left as it is: both have changed it" in answer.stderr
    assert repository.read("a") == "ONE\n2\nTHREE\n4\n5\nmine\n"
    assert repository.read("fight") == "both\n" and repository.read("d/d") == "d\n"
    assert "what goes on" not in answer.stderr
    assert repository.brought(one) == []
    repository.run(one, "echo more >>new; sed -i s/ONE/again/ a")
    assert repository.brought(one, fails=1) == ["a"]
    assert repository.read("new") == "the person's\n"
    repository.run(two, "sed -i s/THREE/again/ a")  # it came although something was left
    assert repository.brought(two, fails=1) == ["a"]
    assert repository.read("a") == "again\n2\nagain\n4\n5\nmine\n"


@as_root_and_not
def test_commits_come_as_a_branch_and_nothing_of_the_copy_runs(repository: Copied, engine: Engine,
                                                              name: str) -> None:
    """Everything that git obeys is in the copy, and would write a marker."""
    marker = repository.project / "marker"
    host = (repository.project / ".git" / "config").read_text()
    before = git_state(repository.project / ".git")
    touch = f"touch {marker} /run/sandbox-git/refs/marker /run/sandbox-git/objects/marker"
    config = hostile_config(marker).replace(f"touch {marker}", touch)
    hook = shlex.quote(f"#!/bin/sh\n{touch}\n")
    repository.make(name, f"""set -e
        echo work >work; git add work; git commit -qm work; git checkout -q --detach
        printf %s {shlex.quote(config)} >>.git/config
        for hook in pre-commit post-checkout reference-transaction post-update pre-receive update \
            post-index-change pre-auto-gc fsmonitor-watchman; do
          printf %s {hook} >.git/hooks/$hook; chmod 755 .git/hooks/$hook
        done
        echo '* filter=mark diff=mark merge=mark' >.git/info/attributes
        echo /run/sandbox-git/objects >.git/objects/info/alternates
        printf '[url "ext::{touch} "]\\n\\tinsteadOf = /\\n' >>.git/config""")
    answer = repository.merge(name)
    assert f"1 commit came as the branch sandbox/{name}" in answer.stderr
    assert list(repository.project.rglob("marker")) == []
    assert "marker" not in repository.run(name, "ls")
    ran = repository.run(name, "git status >/dev/null 2>&1; ls marker; rm -f m* [0-9]*")
    assert ran == "marker\n"
    assert (repository.project / ".git" / "config").read_text() == host
    branch = repository.project / ".git" / "refs" / "heads" / "sandbox"
    after = git_state(repository.project / ".git")
    assert {path for path in after if after[path] != before.get(path)} == {
        str(branch), str(branch / name)}
    owners = {path.lstat().st_uid for path in (repository.project / ".git").rglob("*")}
    assert owners == {engine.uid}
    repository.git("fsck", "--strict")
    log = repository.git("log", "--format=%an %s", f"sandbox/{name}")
    assert log == "Agent work\nSetup first\n"
    assert repository.git("status", "--short") == "?? work\n"
    assert "nothing to change" in repository.merge(name).stderr
    # What was committed since comes, too, but not over other commits or into what is checked out.
    more = "git -c core.hooksPath=/x commit -qm more --allow-empty"
    repository.run(name, f"rm .git/info/attributes .git/config; {more}", *AS_AGENT)
    repository.git("stash", "-qu")
    repository.git("checkout", "-q", f"sandbox/{name}")
    assert "is checked out" in repository.merge(name, fails=1).stderr
    repository.git("commit", "-q", "--allow-empty", "-m", "mine")
    repository.git("checkout", "-q", "main")
    assert "has other commits" in repository.merge(name, fails=1).stderr
    repository.git("branch", "-m", f"sandbox/{name}", "mine")
    assert f"branch sandbox/{name}" in repository.merge(name).stderr
    assert repository.git("log", "--format=%s", f"sandbox/{name}") == "more\nwork\nfirst\n"


@on_docker
def test_a_copy_of_a_linked_worktree_has_its_own_repository(engine: Engine, copied: Copied,
                                                            name: str) -> None:
    worktree = Worktree(engine)
    worktree.host(worktree.top, "config", "core.bare", "true")  # as of a bare one with worktrees
    engine.project = copied.project = worktree.path
    before = git_state(worktree.git), (worktree.path / ".git").read_bytes()
    out = copied.make(name, "git status -sb; git branch --format='%(refname:short)' -a;"
                            "echo work >work; git add .; git commit -qm work; git gc -q")
    assert out.split() == ["##", "topic", "main", "other", "topic"]
    assert (git_state(worktree.git), (worktree.path / ".git").read_bytes()) == before
    assert "1 commit came as the branch" in copied.merge(name).stderr
    log = worktree.host(worktree.path, "log", "--format=%an %s", f"sandbox/{name}")
    assert log.splitlines() == ["Agent work", "Setup first"]
    assert worktree.host(worktree.path, "status", "--short") == "?? work\n"


@on_docker
def test_a_repository_that_cannot_take_commits_is_said(repository: Copied, engine: Engine,
                                                       name: str) -> None:
    repository.make(name, "echo work >work; git add work; git commit -qm work")
    (repository.project / ".git" / "reftable").mkdir()
    assert "its commits did not come" in repository.merge(name, fails=1).stderr
    assert repository.read("work") == "work\n"
    assert engine.sandbox("rm", name).returncode == 1
    (repository.project / ".git" / "reftable").rmdir()
    os.chown(repository.project / ".git", 12345, 12345)
    assert "is not yours" in repository.merge(name, fails=1).stderr
    os.chown(repository.project / ".git", engine.uid, engine.gid)
    assert f"1 commit came as the branch sandbox/{name}" in repository.merge(name).stderr


@on_docker
def test_a_directory_that_leads_elsewhere_is_not_merged_into(repository: Copied, engine: Engine,
                                                             name: str) -> None:
    repository.make(name, "echo work >work")
    engine.project = elsewhere = engine.directory()  # where commands are started
    aside = repository.project.with_name(f"{repository.project.name}-aside")
    repository.project.rename(aside)
    repository.project.symlink_to(elsewhere)
    refused = engine.sandbox("merge", name)
    assert refused.returncode == 1 and "leads to another place" in refused.stderr
    assert list(elsewhere.iterdir()) == []
    repository.project.unlink()
    refused = engine.sandbox("merge", name)
    assert refused.returncode == 1 and "is gone or leads" in refused.stderr
    assert "was not merged" in engine.sandbox("rm", name).stderr
    aside.rename(repository.project)
    assert repository.brought(name) == ["work"]


@on_docker
def test_a_killed_merge_is_finished_by_the_next(copied: Copied, engine: Engine, name: str) -> None:
    count = 400
    for number in range(count):
        copied.write(**{f"f{number}": "old"})
    copied.make(name, f"for n in $(seq 0 {count - 1}); do echo new >f$n; done")

    def is_writing() -> bool:
        return merge.poll() is not None or any(
            path.name.startswith(".shadow-") for path in copied.project.iterdir())

    for _ in range(3):
        merge = engine.popen("merge", name)
        wait_for(is_writing)
        for id in engine.run("ps", "-q", "--filter", "label=sandbox.shadow="
                             + volume_of(engine, name, "shadow")).stdout.split():
            engine.run("kill", id)
        merge.kill()
        merge.wait()
        assert {(copied.project / f"f{n}").read_text() for n in range(count)} <= {"old", "new\n"}
    copied.merge(name)
    assert {path.name for path in copied.project.iterdir()} == {f"f{n}" for n in range(count)}
    assert {path.read_text() for path in copied.project.iterdir()} == {"new\n"}


# --- Agents and the web ---


@on_docker
def test_an_agent_works_on_a_copy(engine: Engine, image: str, home: Path, project: Path, name: str,
                                  ) -> None:
    write_stub_config(engine, home)
    copied = Copied(engine, project)
    copied.write(file="old\n")
    made = engine.sandbox("run", "-n", name, "--copy", "-x", STUB_ANSWERS)
    assert made.returncode == 0, made.stderr
    ran = engine.sandbox("run", "-n", name, "-y", "c", "--checkpoint", "--", "-p",
                         "go and run: echo agent >>file; echo 1 >Makefile")
    assert "pong tool" in ran.stdout, ran
    assert copied.read("file") == "old\n"
    (turn,) = json.loads(engine.sandbox("log", name, "--json").stdout)
    assert (turn["files"], turn["risky"]) == (2, 1)
    assert "+agent" in engine.sandbox("diff", name).stdout
    merged = copied.merge(name)
    assert merged.stdout.split() == ["added", "Makefile", "modified", "file"]
    assert "warning: Makefile: a build runs it" in merged.stderr
    assert copied.read("file") == "old\nagent\n"
    undone = engine.sandbox("undo", name)  # of the turn, in the copy
    assert undone.returncode == 0, undone.stderr
    assert copied.read("file") == "old\nagent\n"
    assert copied.brought(name) == ["Makefile", "file"]
    assert copied.read("file") == "old\n" and not (copied.project / "Makefile").exists()


@on_docker
def test_the_service_makes_copies_and_loses_none(repository: Copied, engine: Engine,
                                                 service: Service, home: Path, name: str) -> None:
    write_config(home, imageName=AGENTS_IMAGE.partition(":")[0])
    made = service.post("/api/sessions", {"name": name, "directory": str(repository.project),
                                          "workspace": "copy"})
    assert (made.status, made.json["workspace"]) == (201, "copy"), made.json
    engine.sandbox("run", "-n", name, "-x", "touch work")
    refused = service.post(f"/api/sessions/{name}", method="DELETE")
    assert refused.status == 409 and "1 file" in refused.json["error"]["message"]
    assert service.post(f"/api/sessions/{name}?force=1", method="DELETE").status == 200


@on_docker
def test_a_name_taken_meanwhile_keeps_its_settings(copied: Copied, engine: Engine,
                                                   home: Path, name: str) -> None:
    held = Held(engine, FILLS_A_COPY)
    service = Service(engine, env=held.env)
    before = engine.volumes()
    with ThreadPoolExecutor() as pool:
        posted = pool.submit(service.post, "/api/sessions", {
            "name": name, "directory": str(copied.project), "workspace": "copy"})
        wait_for(lambda: [v for v in engine.volumes() - before if v.startswith("sandbox-copy-")])
        engine.run("create", "--name", name, AGENTS_IMAGE)
        theirs = home / "sessions" / f"{name}.json"
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_text('{"yolo": "codex"}')
        held.go()
        assert posted.result().status != 201
    service.end()
    assert theirs.read_text() == '{"yolo": "codex"}'
    engine.run("rm", name)
