"""The shadow, run as it is: snapshots of hostile trees, diff, undo, redo and merge, and what kills
and races leave.

Nothing of a workspace may ever run: every tree is full of configurations that would write a marker.
"""

import contextlib
import hashlib
import importlib.util
import itertools
import json
import marshal
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import PYTHON, ROOT, USER

PROGRAM = ROOT / "static" / "image" / "shadow.py"
State = dict[bytes, tuple[Any, ...]]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shadow", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["shadow"] = module
    spec.loader.exec_module(module)
    return module


shadow = load()


class Workspace:
    """A directory, its store, and a marker that whatever is executed there would write."""

    def __init__(self, area: Path) -> None:
        self.area, self.store = area, area / "store"
        self.top, self.marker = area / "work", area / "marker"
        self.turns = 0
        for folder in (self.store, self.top):
            folder.mkdir()
        self.program = area / "shadow.py"  # where the other user may read it
        shutil.copy(PROGRAM, self.program)
        home = area / "home"
        (home / ".config" / "git").mkdir(parents=True)
        (home / ".gitconfig").write_text(hostile_config(self.marker))
        (home / ".config" / "git" / "attributes").write_text("* filter=mark diff=mark merge=mark\n")
        self.env = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}

    def argv(self, verb: str, request: dict[str, Any], top: Path | None = None) -> list[str]:
        return [PYTHON, "-I", "-S", str(self.program), verb, str(self.store),
                str(top or self.top), json.dumps(request)]

    def call(self, verb: str, fails: int = 0, user: str | None = None, top: Path | None = None,
             **request: Any) -> Any:
        done = subprocess.run(self.argv(verb, request, top), env=self.env, cwd=self.top,
                              capture_output=True, text=True, timeout=120, user=user,
                              group=user, extra_groups=[] if user else None)
        assert (done.returncode, done.stderr) == (fails, ""), done
        answer = json.loads(done.stdout)
        assert ("error" in answer) == bool(fails), answer
        assert not self.marker.exists(), "something of the workspace was executed"
        return answer

    @contextlib.contextmanager
    def turn(self, **about: Any) -> Iterator[str]:
        self.turns += 1
        id = f"t{self.turns}"
        self.call("snapshot", turn={"id": id, **about})
        yield id
        self.call("snapshot", end=id)

    def state(self, top: Path | None = None) -> State:
        """Everything that an undo must bring back, byte for byte."""
        found: State = {}
        whole = os.fsencode(top or self.top)
        for folder, folders, files in os.walk(whole):
            for name in [b".", *folders, *files]:
                path = os.path.join(folder, name)
                st = os.lstat(path)
                about: tuple[Any, ...] = (oct(st.st_mode),)
                if stat.S_ISLNK(st.st_mode):
                    about += (os.readlink(path),)
                elif stat.S_ISREG(st.st_mode):
                    small = st.st_size < 1 << 24
                    about += (Path(os.fsdecode(path)).read_bytes() if small else st.st_size,)
                found[os.path.relpath(path, whole)] = about
        return found

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.top / name).parent.mkdir(parents=True, exist_ok=True)
            (self.top / name).write_text(text)

    def git(self, *words: str, top: Path | None = None) -> str:
        """As a person has made the repository: with nothing hostile in force."""
        env = {**self.env, "HOME": "/nonexistent", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a",
               "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}
        return subprocess.run(["git", *words], cwd=top or self.top, env=env, check=True,
                              capture_output=True, text=True).stdout


def hostile_config(marker: Path) -> str:
    run = f"touch {marker}"
    return f"""\
[core]
\tfsmonitor = {run}
\thooksPath = {marker.parent}/work/hooks
\tpager = {run}
\teditor = {run}
\tsshCommand = {run}
\taskPass = {run}
\talternateRefsCommand = {run}
[filter "mark"]
\tclean = {run}; cat
\tsmudge = {run}; cat
\trequired = true
[diff]
\texternal = {run}
[diff "mark"]
\ttextconv = {run}; cat
\tcommand = {run}
[merge "mark"]
\tdriver = {run}; true
[merge]
\tdefault = mark
[gpg]
\tprogram = {run}
[commit]
\tgpgSign = true
[credential]
\thelper = !{run}
[uploadpack]
\tpackObjectsHook = {run}
[include]
\tpath = {marker.parent}/work/included
"""


def arm(workspace: Workspace, top: Path) -> None:
    """Everything in a repository that git would execute or obey."""
    config = hostile_config(workspace.marker)
    with (top / ".git" / "config").open("a") as file:
        file.write(config)
    (workspace.top / "included").write_text(f"[core]\n\tfsmonitor = touch {workspace.marker}\n")
    for folder in (top / ".git" / "hooks", workspace.top / "hooks"):
        folder.mkdir(exist_ok=True)
        for hook in ("pre-commit", "post-checkout", "post-index-change", "reference-transaction",
                     "fsmonitor-watchman", "post-merge", "pre-auto-gc"):
            (folder / hook).write_text(f"#!/bin/sh\ntouch {workspace.marker}\n")
            (folder / hook).chmod(0o755)
    (top / ".gitattributes").write_text("* filter=mark diff=mark merge=mark\n")
    (top / ".git" / "info").mkdir(exist_ok=True)
    (top / ".git" / "info" / "attributes").write_text("* filter=mark diff=mark merge=mark\n")


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    area = Path(tempfile.mkdtemp(prefix="shadow-"))
    area.chmod(0o755)
    yield Workspace(area)
    subprocess.run(["rm", "-rf", area], check=True)  # deeper than Python's rmtree can


# --- The corpus of hostile trees ---


def repository(w: Workspace) -> None:
    w.git("init", "-q")
    w.write({"src/main.py": "print(1)\n", "README": "hello\n"})
    w.git("add", ".")
    w.git("commit", "-qm", "first")


def armed(w: Workspace) -> None:
    repository(w)
    arm(w, w.top)


def nested(w: Workspace) -> None:
    armed(w)
    for name in ("inner", "src/inner"):
        (w.top / name).mkdir()
        w.git("init", "-q", top=w.top / name)
        (w.top / name / "file").write_text("x")
        arm(w, w.top / name)


def broken(w: Workspace) -> None:
    armed(w)
    for name in ("empty", "upper", "wrong", "head"):
        (w.top / name).mkdir()
    w.git("init", "-q", top=w.top / "empty")
    w.write({".GIT/config": hostile_config(w.marker), "upper/.Git/HEAD": "x",
             "wrong/.git/HEAD/x": "", "wrong/.git/config/y": "", "git~1/config": "x",
             "head/.git/HEAD": "\0\xff" * 999,
             "head/.git/index": "DIRCgarbage", "head/.git/objects/aa/bb": "never kept"})


def bare_inside(w: Workspace) -> None:
    w.write({"x": "y"})
    w.git("init", "-q", "--bare", "bare.git")
    with (w.top / "bare.git" / "config").open("a") as file:
        file.write(hostile_config(w.marker))


def linked(w: Workspace) -> None:
    """A submodule and a linked worktree, whose .git is a file."""
    armed(w)
    elsewhere = w.area / "elsewhere"
    elsewhere.mkdir()
    w.git("init", "-q", top=elsewhere)
    arm(w, elsewhere)
    w.write({"sub/.git": f"gitdir: {elsewhere}/.git\n", "sub/file": "x",
             "tree/.git": "gitdir: ../../nowhere\n",
             ".gitmodules": f"[submodule \"sub\"]\n\tpath = sub\n\turl = {elsewhere}\n"
                            f"\tupdate = !touch {w.marker}\n"})


def no_repository(w: Workspace) -> None:
    w.write({"a": "1\n", "b/c": "2\n"})


def hiding(w: Workspace) -> None:
    armed(w)
    w.write({".gitignore": "*\n!*/\n", "src/.gitignore": "*\n", ".env": "KEY=1\n"})
    (w.top / ".env").chmod(0o600)


def names(w: Workspace) -> None:
    armed(w)
    odd = [b"new\nline", b"tab\there", b'quo"te', b"back\\slash", b"\xff\xfe invalid", b"-rf",
           b"--help", b":(top)x", b":dir", b":m=x", b":s=x", b"=x", b"x" * 255, b" ", b"~", b"a~1",
           "\u202egnp.exe".encode(), b"\x1b[2J", b"Case", b"case", b"CASE", b".git ", b"*", b"!x",
           b"#x", b"a\rb", b"HEAD", b".gitignore.d"]
    for name in odd:
        (Path(os.fsdecode(os.fsencode(w.top) + b"/" + name))).write_bytes(name + b"\n")
        folder = Path(os.fsdecode(os.fsencode(w.top) + b"/odd-" + name[:200] + b"/sub"))
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(name)
    for name in (b":", b".gitignore/x/y", b"rules/.gitignore/z"):
        os.makedirs(os.fsencode(w.top) + b"/dirs/" + name)


def links(w: Workspace) -> None:
    armed(w)
    for number, target in enumerate(("/etc/passwd", "../../..", "nowhere", "loop", "src", "/",
                                     "../store", b"\xff".decode(errors="surrogateescape"))):
        (w.top / f"link{number}").symlink_to(target)
    (w.top / "loop").symlink_to("loop")
    (w.top / "linked.git").mkdir()
    (w.top / "linked.git" / ".git").symlink_to(w.top / ".git")


def specials(w: Workspace) -> None:
    armed(w)
    os.mkfifo(w.top / "fifo")
    os.mknod(w.top / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))  # endless, if one reads it
    os.mkfifo(w.top / ".git" / "fifo")
    os.mkfifo(w.top / ".gitignore")
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(w.top / "socket"))
    bound.close()


def modes(w: Workspace) -> None:
    armed(w)
    for number, mode in enumerate((0o000, 0o600, 0o4755, 0o2755, 0o666, 0o777, 0o640, 0o111)):
        w.write({f"file{number}": str(number)})
        (w.top / f"file{number}").chmod(mode)
        (w.top / f"dir{number}" / "in").mkdir(parents=True)
        (w.top / f"dir{number}" / "x").write_text("x")
        (w.top / f"dir{number}").chmod(mode | 0o1000)


def large(w: Workspace) -> None:
    armed(w)
    with (w.top / "sparse").open("wb") as file:
        file.truncate(3 << 30)
    (w.top / "sixteen").write_bytes(os.urandom(1 << 20) + bytes(15 << 20))


def deep(w: Workspace) -> None:
    armed(w)
    top = os.open(w.top, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=top)
        below = os.open("d", os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = below
    os.close(top)


CORPUS: list[Callable[[Workspace], None]] = [
    repository, armed, nested, broken, bare_inside, linked, no_repository, hiding, names, links,
    specials, modes, large, deep]


def rampage(w: Workspace, seed: int) -> None:
    """What an agent may do to any tree: change, remove, add, swap and chmod."""
    chance = random.Random(seed)
    paths = sorted(path for path in w.top.rglob("*") if "objects" not in path.parts
                   and len(path.parts) < 40)
    for path in paths:
        what = chance.choice(["keep", "keep", "write", "remove", "chmod", "swap"])
        st = os.lstat(path) if os.path.lexists(path) else None
        if st is None or what == "keep" or st.st_size > 1 << 24:
            continue
        if stat.S_ISDIR(st.st_mode):
            if what == "chmod":
                path.chmod(chance.choice([0o755, 0o700, 0o555, 0o1777]))
            elif what == "write":
                (path / "new").write_text("new")
        elif stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode):
            if what == "write" and stat.S_ISREG(st.st_mode):
                path.write_bytes(chance.randbytes(40))
            elif what == "chmod" and stat.S_ISREG(st.st_mode):
                path.chmod(chance.choice([0o644, 0o755, 0o600, 0o4711]))
            elif what in ("remove", "swap"):
                path.unlink()
                if what == "swap":
                    kind = chance.randrange(2)
                    path.symlink_to("/etc") if kind else (path / "sub").mkdir(parents=True)
    folders = [path for path in paths if path.is_dir() and not path.is_symlink()
               and "hooks" in path.parts]
    if folders:
        shutil.rmtree(folders[0])


@pytest.mark.parametrize("build", CORPUS, ids=lambda build: build.__name__)
def test_undo_and_redo_of_a_hostile_tree_are_byte_for_byte(
        workspace: Workspace, build: Callable[[Workspace], None]) -> None:
    build(workspace)
    before = workspace.state()
    with workspace.turn():
        rampage(workspace, 7)
    workspace.write({"person's": "own\n"})  # or there would be nothing to merge
    after = workspace.state()
    before[b"person's"] = after[b"person's"]
    workspace.call("diff", turn="t1", patch=True)
    assert workspace.call("undo", dry=True)["changed"] and workspace.state() == after
    left = workspace.call("undo")["left"]
    assert workspace.state() == before and left == []
    assert workspace.call("redo")["left"] == []
    assert workspace.state() == after
    workspace.call("prune", keep=1, maxBytes=0)
    assert workspace.call("undo", fails=1)["error"] == "there is nothing to undo"
    assert workspace.call("diff")["files"]


@pytest.mark.parametrize("build", [armed, nested, linked], ids=lambda build: build.__name__)
def test_these_trees_do_execute_something(workspace: Workspace,
                                          build: Callable[[Workspace], None]) -> None:
    """Or the tests would prove nothing."""
    build(workspace)
    (workspace.top / "src" / "main.py").write_text("changed")
    subprocess.run(["git", "status"], cwd=workspace.top, env=workspace.env, capture_output=True)
    assert workspace.marker.exists()


# --- What is seen ---


def rows(answer: Any) -> dict[str, Any]:
    return {row["path"]: row for row in answer["files"]}


def test_a_diff_says_what_changed_and_how(workspace: Workspace) -> None:
    workspace.write({"edit": "1\n2\n3\n", "gone": "x\ny\n", "mode": "m", "kind": "k", "same": "s"})
    with workspace.turn(what="agent", command="agent -p 'x'", when="2026-01-02T03:04:05Z"):
        workspace.write({"edit": "1\nzwei\n3\n4\n", "new\nname": "a\n", "binary": "\0\1"})
        (workspace.top / "gone").unlink()
        (workspace.top / "mode").chmod(0o755)
        (workspace.top / "kind").unlink()
        (workspace.top / "kind").symlink_to("edit")
    found = rows(workspace.call("diff", turn="t1", patch=True))
    assert {path: row["status"] for path, row in found.items()} == {
        "edit": "modified", "gone": "deleted", "mode": "mode", "kind": "type",
        "new\nname": "added", "binary": "added"}
    edit = found["edit"]
    assert (edit["added"], edit["deleted"], edit["size"], edit["binary"]) == (2, 1, 11, False)
    assert edit["patch"] == "@@ -1,3 +1,4 @@\n 1\n-2\n+zwei\n 3\n+4\n"
    assert found["binary"]["binary"] and "patch" not in found["binary"]
    assert (found["mode"]["oldMode"], found["mode"]["newMode"]) == ("100644", "100755")
    assert found["kind"]["newMode"] == "120777"
    assert found["new\nname"]["patch"] == "@@ -0,0 +1 @@\n+a\n"
    (turn,) = workspace.call("log")["turns"]
    assert (turn["files"], turn["added"], turn["deleted"]) == (6, 4, 4)
    assert (turn["what"], turn["command"]) == ("agent", "agent -p 'x'")
    only = workspace.call("diff", turn="t1", paths=["edit"], patch=True)
    assert list(rows(only)) == ["edit"] and rows(only)["edit"] == edit


def test_a_patch_is_bounded(workspace: Workspace) -> None:
    with workspace.turn():
        workspace.write({"a": "line\n" * 500_000, "b": "line\n" * 500_000, "c": "x\n"})
    answer = workspace.call("diff", turn="t1", patch=True)
    found = rows(answer)
    assert len(json.dumps(answer)) < 6 << 20
    assert [found[name]["truncated"] for name in "abc"] == [False, True, True]
    assert [found[name]["added"] for name in "abc"] == [500_000, 500_000, 1]
    assert "patch" in rows(workspace.call("diff", turn="t1", paths=["c"], patch=True))["c"]
    workspace.git(f"--git-dir={workspace.store}/git", "fsck", "--full", "--strict")


def test_git_finds_what_lies_far_behind_in_a_pack(workspace: Workspace) -> None:
    """Where the numbers of an index have not bits enough, it has a table of larger ones."""
    pack = shadow.Pack(shadow.Store(str(workspace.store)))
    far = [12, (1 << 31) - 1, 1 << 31, 7 << 31, 5 << 31]
    pack.rows = [(os.urandom(32), at, offset) for at, offset in enumerate(far)]
    index = pack.index() + bytes(32)
    shown = subprocess.run(["git", "show-index", "--object-format=sha256"], capture_output=True,
                           input=index + hashlib.sha256(index).digest(), check=True).stdout
    assert shown.decode().splitlines() == [
        f"{offset} {name.hex()} ({checksum:08x})" for name, checksum, offset in sorted(pack.rows)]


RISKY = [
    ".git/config", ".git/hooks/pre-push", ".git/info/attributes", "sub/.git", ".gitmodules",
    ".gitattributes", ".vscode/tasks.json", "deep/.idea/workspace.xml", ".envrc", ".bashrc",
    "AGENTS.md", ".mcp.json", ".github/workflows/ci.yml", "Makefile", "Dockerfile", "setup.py",
    "conftest.py", "vite.config.ts", ".npmrc", ".husky/pre-commit", ".GIT/config", "git~1/config",
    ".g\u200cit/config", "some-agent.md", ".some-agent/settings.json", "x/SOME-AGENT.local.md",
    ".hg/hgrc"]
HARMLESS = ["README.md", "src/main.py", ".git/HEAD", ".git/index", ".git/refs/heads/x",
            ".git/logs/HEAD", "doc/some-agents.md", ".git/hooks/x.sample", "config", "hooks/x"]


def test_what_the_host_may_execute_is_named_with_a_reason(workspace: Workspace) -> None:
    with workspace.turn():
        workspace.write(dict.fromkeys((*RISKY, *HARMLESS), "changed\n"))
        workspace.write({"run": "x", "suid": "x"})
        (workspace.top / "run").chmod(0o755)
        (workspace.top / "suid").chmod(0o4755)
        (workspace.top / "out").symlink_to("/etc/passwd")
        (workspace.top / "in").symlink_to("README.md")
    found = rows(workspace.call("diff", turn="t1", agents=["some-agent"]))
    risky = {path for path, row in found.items() if row["risk"]}
    assert risky == {*RISKY, "run", "suid", "out"}
    assert found["suid"]["risk"] == ["it runs with its owner's rights"]
    assert found["out"]["risk"] == ["a link that leads out of the directory"]
    assert {row["path"] for row in workspace.call("log")["turns"][0]["risks"]} == {
        path for path in risky if "some" not in path.lower()}


@pytest.mark.parametrize("how", ["ignored", "link"])
def test_what_holds_such_a_file_and_is_seen_as_a_whole_is_named(workspace: Workspace, how: str,
                                                               ) -> None:
    risky = [".vscode", "deep/.idea", ".husky", ".hg", ".github", ".cargo"]
    folders = [*risky, "docs", "target"]
    workspace.write({".gitignore": "".join(f"/{path}/\n" for path in folders), "deep/x": "x"})
    with workspace.turn():
        for path in folders:
            if how == "link":
                (workspace.top / path).symlink_to("x")
            else:
                workspace.write({f"{path}/file": "x"})
    found = rows(workspace.call("diff", turn="t1"))
    assert {path for path, row in found.items() if row["risk"]} == {*risky}
    assert found.keys() == {*folders}
    for path in folders:
        subprocess.run(["rm", "-r", path], cwd=workspace.top, check=True)
    assert not any(row["risk"] for row in workspace.call("diff", now=True)["files"])


def test_of_a_package_only_what_it_runs_is_a_risk(workspace: Workspace) -> None:
    package = {"scripts": {"test": "x"}, "dependencies": {"a": "1", "b": "2"}}
    project = '[build-system]\nrequires = ["a"]\n[project]\nname = "x"\nversion = "{}"\n'
    workspace.write({"package.json": json.dumps(package), "pyproject.toml": project.format(1)})
    with workspace.turn():
        package["dependencies"] = {"b": "2", "a": "1"}
        workspace.write({"package.json": json.dumps(package), "pyproject.toml": project.format(2)})
    assert all(row["risk"] == [] for row in workspace.call("diff", turn="t1")["files"])
    with workspace.turn():
        package["scripts"]["postinstall"] = "evil"
        workspace.write({"package.json": json.dumps(package), "pyproject.toml": "not toml"})
    assert all(row["risk"] == [shadow.RUNS_REASON]
               for row in workspace.call("diff", turn="t2")["files"])


def test_the_rules_of_the_first_snapshot_say_what_is_ignored(workspace: Workspace) -> None:
    workspace.write({".gitignore": "build/\n*.log\n", "src/.gitignore": "/out\n", "build/x": "1",
                     "src/out/y": "1", ".git/info/exclude": "/cache/\n", "cache/z": "1",
                     "keep/out/y": "1"})
    (workspace.top / "big.log").write_bytes(bytes(2 << 20))
    (workspace.top / "big.txt").write_bytes(bytes(2 << 20))
    with workspace.turn():
        workspace.write({".gitignore": "*\n", "build/x2": "22", "src/out/y": "2", "cache/z": "2",
                         "keep/out/y": "2", "deep/build/x": "3", "new/file": "3", "small.log": "4"})
        for name in ("big.log", "big.txt"):
            (workspace.top / name).write_bytes(bytes(3 << 20))
    found = rows(workspace.call("diff", turn="t1"))
    seen = {path for path, row in found.items() if row.get("kept") is False}
    assert seen == {"build", "src/out", "cache", "deep/build", "big.log"}
    assert (found["build"]["files"], found["build"]["size"]) == (2, 3)
    assert found["build"]["why"] == "an ignored directory is only counted"
    assert {"keep/out/y", "new/file", "small.log", "big.txt", ".gitignore"} < {*found}
    left = {row["path"]: row["why"] for row in workspace.call("undo")["left"]}
    assert left.keys() == seen | {"deep"}  # for it is not empty
    assert left["build"] == "an ignored directory is only counted"
    assert (workspace.top / "build" / "x2").exists()
    assert (workspace.top / "big.txt").stat().st_size == 2 << 20


def test_what_was_not_kept_goes_only_when_one_says_so(workspace: Workspace) -> None:
    workspace.write({"code": "x"})
    with workspace.turn(), (workspace.top / "code").open("wb") as file:
        file.truncate(20 << 20)
    assert workspace.call("undo")["left"] == [
        {"path": "code", "why": "it is too large to keep", "conflict": True}]
    assert (workspace.top / "code").stat().st_size == 20 << 20
    assert workspace.call("undo", discard=True)["left"] == []
    assert (workspace.top / "code").read_text() == "x"


LATER = """
import runpy, sys, time
now, trace = time.time_ns, open(sys.argv[1], "w")
time.time_ns = lambda: now() + 10**10  # no file is as new as the snapshot
sys.addaudithook(lambda event, about: trace.write(f"{event} {about[0]!r}\\n")
                 if event in ("open", "subprocess.Popen", "os.exec") else None)
sys.argv = sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="shadow")["main"](sys.argv[1:])
finally:
    trace.flush()
"""


def test_an_unchanged_tree_is_not_read_again(workspace: Workspace) -> None:
    """No file of it is opened, git is not asked, and nothing is written for the disk to keep."""
    workspace.write({"a": "1", "b/c": "2"})
    trace = workspace.area / "trace"
    argv = workspace.argv("snapshot", {})
    argv[3:3] = ["-c", LATER, str(trace)]
    for opened in (True, False):
        subprocess.run(argv, env=workspace.env, check=True, capture_output=True)
        text = trace.read_text()
        assert "open 'b'\n" in text
        assert ("open 'a'\n" in text, "open 'c'\n" in text) == (opened, opened)
        assert ("subprocess.Popen" in text) == opened
        assert ("state.json.tmp" in text) == opened


@pytest.mark.parametrize("shared", [0, 500])
def test_two_processes_see_what_one_sees(workspace: Workspace, shared: int) -> None:
    """A second one compares half of a large tree with what was seen last."""
    workspace.program.write_text(PROGRAM.read_text().replace("SHARED = 500", f"SHARED = {shared}"))
    armed(workspace)
    workspace.write({f"d{at % 40}/e{at % 7}/{at}": f"{at}\n" for at in range(900)})
    workspace.write({".gitignore": "build\n", "d1/build/x": "x"})
    chance = random.Random(7)
    for _ in range(4):
        before = workspace.state()
        with workspace.turn():
            for path in chance.sample(sorted(workspace.top.glob("d*/e*/*")), 5):
                path.unlink()
            subprocess.run(["rm", "-r", chance.choice(sorted(workspace.top.glob("d*/e*")))])
            at = chance.randrange(40)
            workspace.write({f"d{at}/new": "x", f"d{at}/f/new{at}": "y", "d1/build/x": f"{at}"})
            chance.choice(sorted(workspace.top.glob("d*/*"))).chmod(0o700)
        after = workspace.state()
        assert {row["path"] for row in workspace.call("undo")["left"]} == {"d1/build"}
        build = b"d1/build/x"
        assert workspace.state() | {build: b""} == before | {build: b""}
        workspace.call("redo")
        assert workspace.state() == after


def test_a_file_that_is_as_new_as_the_snapshot_is_read_again(workspace: Workspace) -> None:
    """Were the clock to stand still, nothing else would tell that it has changed."""
    text = PROGRAM.read_text().replace("RACY_NS = 2_000", "RACY_NS = 600_000")
    workspace.program.write_text(text)  # the snapshot may begin late
    workspace.write({"a": "one", "old": "x"})
    os.utime(workspace.top / "a", (1, 1))  # its ctime is new
    with workspace.turn():
        _, data = (workspace.store / "cache-main").read_bytes().split(b"\n", 1)
        noted = marshal.loads(marshal.loads(data)[""][0])
        assert {row[0] for row in noted} == {"a", "old"}
        assert shadow.row_of("a", os.stat(workspace.top / "a")) not in noted
        workspace.write({"a": "two"})
    assert list(rows(workspace.call("diff", turn="t1"))) == ["a"]
    assert workspace.call("undo")["changed"] == [{"path": "a", "status": "modified", "risk": []}]
    assert (workspace.top / "a").read_text() == "one"


def test_a_file_that_is_written_all_the_time_ends_no_snapshot(workspace: Workspace) -> None:
    ends = threading.Event()

    def grow() -> None:
        with (workspace.top / "log").open("ab", buffering=0) as file:
            while not ends.is_set():
                file.write(b"x" * 1000)
                if file.tell() > 8 << 20:
                    file.truncate(0)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        with workspace.turn():
            pass
        workspace.call("snapshot")
        assert list(rows(workspace.call("diff", turn="t1"))) in ([], ["log"])
    finally:
        ends.set()
        thread.join()


# --- The person's work ---


def test_undo_keeps_what_the_person_did_meanwhile(workspace: Workspace) -> None:
    text = [f"{number}\n" for number in range(20)]
    workspace.write({"both": "".join(text), "mine": "a\n", "fight": "x\n", "gone": "g\n"})
    with workspace.turn():
        workspace.write({"both": "".join(["agent\n", *text[1:]]), "fight": "agent\n", "new": "n\n",
                         "mixed/theirs": "t\n"})
        (workspace.top / "gone").unlink()
    workspace.write({"both": "".join(["agent\n", *text[1:19], "person\n"]), "mine": "b\n",
                     "fight": "person\n", "own": "o\n", "mixed/mine": "m\n"})
    times = {name: os.stat(workspace.top / name) for name in ("mine", "own", "fight")}
    answer = workspace.call("undo")
    assert answer["left"] == [{"path": "fight", "why": "both have changed it", "conflict": True}]
    assert (workspace.top / "both").read_text() == "".join([*text[:19], "person\n"])
    assert {name: (workspace.top / name).read_text() for name in ("mine", "fight", "own", "gone")
            } == {"mine": "b\n", "fight": "person\n", "own": "o\n", "gone": "g\n"}
    assert sorted(os.listdir(workspace.top / "mixed")) == ["mine"]
    assert not (workspace.top / "new").exists()
    for name, st in times.items():
        now = os.stat(workspace.top / name)
        assert (now.st_mtime_ns, now.st_ino) == (st.st_mtime_ns, st.st_ino)


def test_a_git_directory_is_undone_as_a_whole_or_not_at_all(workspace: Workspace) -> None:
    repository(workspace)
    with workspace.turn():
        workspace.write({"src/main.py": "print(2)\n"})
        workspace.git("commit", "-qam", "second")
        second = workspace.state()
    changed = rows(workspace.call("diff"))
    assert ".git/refs/heads/" in "".join(changed) and ".git/objects" not in "".join(changed)
    workspace.git("commit", "-q", "--allow-empty", "-m", "third")  # the person
    third = {path: about for path, about in workspace.state().items() if path.startswith(b".git")}
    assert workspace.call("undo")["left"] == [
        {"path": ".git", "why": "both have changed it", "conflict": True}]
    assert {path: about for path, about in workspace.state().items()
            if path.startswith(b".git")} == third
    assert (workspace.top / "src" / "main.py").read_text() == "print(1)\n"
    assert second != workspace.state()


@pytest.mark.parametrize("verb", ["undo", "redo"])
def test_to_look_at_a_repository_is_no_change_of_it(workspace: Workspace, verb: str) -> None:
    """git status writes the index anew, also that of a submodule."""
    repository(workspace)
    workspace.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(workspace.top),
                  "sub")
    workspace.git("commit", "-qm", "a submodule")
    heads = []
    for text in ("one", "two"):
        heads.append(workspace.git("rev-parse", "HEAD"))
        with workspace.turn():
            for top in (workspace.top / "sub", workspace.top):
                (top / "README").write_text(text)
                workspace.git("commit", "-qam", text, top=top)
    heads.append(workspace.git("rev-parse", "HEAD"))

    def look() -> None:
        for top in (workspace.top, workspace.top / "sub"):
            for name in top.glob("*E*"):
                os.utime(name)
        workspace.git("status")

    look()
    assert workspace.call("undo")["left"] == []
    assert workspace.git("rev-parse", "HEAD") == heads[1]
    look()
    assert workspace.call(verb)["left"] == []
    assert workspace.git("rev-parse", "HEAD") == heads[0 if verb == "undo" else 2]
    assert workspace.git("status", "--porcelain") == ""


def test_several_turns_are_undone_at_once_or_one_of_them(workspace: Workspace) -> None:
    workspace.write({"a": "0", "b": "0", "c": "0"})
    for name in "abc":
        with workspace.turn():
            workspace.write({name: "1"})
    content = {name: (workspace.top / name) for name in "abc"}
    assert workspace.call("undo", turn="t2", only=True)["turns"] == ["t2"]
    assert [path.read_text() for path in content.values()] == ["1", "0", "1"]
    assert workspace.call("undo", turn="t1")["turns"] == ["t1", "t3"]
    assert [path.read_text() for path in content.values()] == ["0", "0", "0"]
    assert "undone already" in workspace.call("undo", turn="t1", fails=1)["error"]
    workspace.call("redo", turn="t2")
    assert [path.read_text() for path in content.values()] == ["0", "1", "0"]
    workspace.call("redo")
    assert [path.read_text() for path in content.values()] == ["1", "1", "1"]
    assert workspace.call("redo", fails=1)["error"] == "there is nothing to redo"


def test_what_was_left_is_undone_and_redone_later(workspace: Workspace) -> None:
    def write(text: str) -> None:
        workspace.write(dict(zip("abc", text, strict=True)))

    def now() -> tuple[str, bool]:
        text = "".join((workspace.top / name).read_text() for name in "abc")
        return text, bool(workspace.call("log")["turns"][0]["undone"])

    write("000")
    with workspace.turn() as turn:
        write("111")
    write("P11")
    assert [row["path"] for row in workspace.call("undo")["left"]] == ["a"]
    write("100")
    assert workspace.call("undo", turn=turn, fails=1)["kind"] == "nothing"
    workspace.call("undo", turn=turn, paths=["a"])
    assert now() == ("000", True)
    workspace.call("redo")  # of a path
    assert now() == ("100", True)
    write("1P0")
    assert [row["path"] for row in workspace.call("redo")["left"]] == ["b"]
    assert now() == ("1P1", False)
    write("101")
    assert workspace.call("redo", fails=1)["kind"] == "nothing"
    workspace.call("redo", turn=turn, paths=["b"])
    assert now() == ("111", False)


def test_undo_of_a_path(workspace: Workspace) -> None:
    with workspace.turn():
        workspace.write({"a/b": "1", "a/c": "1", "ab": "1"})
    workspace.call("undo", paths=["a/b"])
    assert workspace.call("log")["turns"][-1]["paths"] == ["a/b"]
    assert sorted(workspace.state()) == [b".", b"a", b"a/c", b"ab"]
    workspace.call("undo", paths=["./a"])
    workspace.call("diff", paths=["nope"], fails=1)
    assert os.listdir(workspace.top) == ["ab"]
    nothing = workspace.call("undo", paths=["nope"], fails=1)
    assert "nothing is to change at nope" in nothing["error"] and nothing["kind"] == "missing"
    for path in ("/etc", "../x", "a/../../x", "..", "a\0b"):
        workspace.call("undo", paths=[path], fails=2)
    with workspace.turn():
        workspace.write({"..a": "1"})
    assert workspace.call("undo", paths=["..a"])["changed"][0]["path"] == "..a"


@pytest.mark.parametrize("seed", range(4))
def test_undo_keeps_exactly_the_persons_edits(workspace: Workspace, seed: int) -> None:
    chance = random.Random(seed)
    files = {f"{chance.choice('xyz')}/{number}": [f"{number}.{line}\n" for line in range(40)]
             for number in range(25)}

    def save(now: dict[str, list[str]]) -> None:
        for path in {*map(str, files), *(str(p.relative_to(workspace.top)) for p in
                                         workspace.top.rglob("*") if p.is_file())} - now.keys():
            (workspace.top / path).unlink(missing_ok=True)
        workspace.write({path: "".join(lines) for path, lines in now.items()})

    def edited(now: dict[str, list[str]], who: str, lines: range) -> dict[str, list[str]]:
        result = {path: [*text] for path, text in now.items()}
        for path in result:
            for line in chance.sample(lines, chance.randrange(4)):
                result[path][line] = f"{who} {chance.random()}\n"
        return result

    original = {path: [*lines] for path, lines in files.items()}
    save(original)
    with workspace.turn():
        agents = edited(original, "agent", range(0, 15))
        removed = chance.sample(sorted(agents), 4)
        for path in removed:
            del agents[path]
        agents |= {f"agent/{number}": ["new\n"] for number in range(3)}
        save(agents)
    person_lines = range(20, 40)
    persons = edited({path: lines for path, lines in agents.items() if path in original}, "person",
                     person_lines)
    gone = [path for path in persons if agents[path] == original[path]][:1]
    now = {**agents, **persons, "own/file": ["mine\n"]}
    for path in gone:
        del now[path]
    save(now)
    expected = {path: [*lines[:20], *persons.get(path, lines)[20:]]
                for path, lines in original.items() if path not in gone} | {"own/file": ["mine\n"]}
    before_undo = workspace.state()
    assert workspace.call("undo")["left"] == []
    found = {str(path.relative_to(workspace.top)): path.read_text().splitlines(keepends=True)
             for path in workspace.top.rglob("*") if path.is_file()}
    assert found == expected
    assert workspace.call("redo")["left"] == []
    assert workspace.state() == before_undo


def meddle(top: Path, chance: random.Random, who: str) -> None:
    """Any change of any of a few paths, also of a file to a directory and back."""
    for _ in range(6):
        path = top.joinpath(*(chance.choice("abc") for _ in range(chance.randrange(1, 4))))
        for part in path.relative_to(top).parents:
            if (top / part).is_symlink() or (top / part).is_file():
                (top / part).unlink()
        subprocess.run(["rm", "-rf", path], check=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        match chance.randrange(5):
            case 0:
                path.symlink_to(who)
            case 1:
                path.mkdir()
            case 2:
                path.write_text(f"{who} {chance.random()}")
                path.chmod(chance.choice([0o600, 0o644, 0o755]))
            case 3:
                path.mkdir(mode=chance.choice([0o700, 0o755]))
                (path / chance.choice("abc")).write_text(who)


@pytest.mark.parametrize("seed", range(8))
def test_what_only_one_of_them_has_changed_is_decided_by_that(workspace: Workspace,
                                                              seed: int) -> None:
    chance = random.Random(seed)
    meddle(workspace.top, chance, "first")
    before = workspace.state()
    with workspace.turn():
        meddle(workspace.top, chance, "agent")
    after = workspace.state()
    meddle(workspace.top, chance, "person")
    now = workspace.state()
    left = {os.fsencode(row["path"]) for row in workspace.call("undo")["left"]}
    result = workspace.state()

    def contended(path: bytes) -> bool:
        """Or above or below what is: a directory stays for what is left in it."""
        return any(path == other or path.startswith(other + b"/") or other.startswith(path + b"/")
                   for other in left)

    for path in {*before, *after, *now, *result}:
        if path == b"." or contended(path):
            continue
        folders = {state.get(path, ("0o4",))[0].startswith("0o4")
                   for state in (before, after, now, result)}
        if before.get(path) == after.get(path) or now.get(path) == after.get(path):
            mine = now if before.get(path) == after.get(path) else before
            if folders == {True}:  # one that is empty otherwise, or has what the other has left
                continue
            assert result.get(path) == mine.get(path), (path, left)
    for path in left:
        assert result.get(path) == now.get(path), path
    workspace.call("redo")
    workspace.call("undo", dry=True)


def test_a_turn_that_was_never_ended_ends_with_the_next_snapshot(workspace: Workspace) -> None:
    workspace.write({"a": "old"})
    workspace.call("snapshot", turn={"id": "killed"})
    workspace.write({"a": "new"})
    workspace.call("undo")
    assert (workspace.top / "a").read_text() == "old"
    workspace.call("redo")
    workspace.call("snapshot", turn={"id": "next"})
    workspace.write({"b": "next"})
    workspace.call("snapshot", end="next")
    assert list(rows(workspace.call("diff", turn="killed"))) == ["a"]


def test_a_turn_that_runs_is_seen_and_undone_so_far(workspace: Workspace) -> None:
    workspace.call("diff", now=True, fails=1)  # and begins no store
    workspace.call("snapshot", turn={"id": "runs"})
    workspace.write({"first": "1"})
    assert workspace.call("diff", turn="runs")["files"] == []
    assert list(rows(workspace.call("diff", turn="runs", now=True))) == ["first"]
    assert list(rows(workspace.call("diff", now=True))) == ["first"]
    workspace.call("undo")
    workspace.write({"second": "2"})
    workspace.call("snapshot", end="runs")
    workspace.write({"persons": "3"})
    assert list(rows(workspace.call("diff", turn="runs", now=True))) == ["second"]
    workspace.call("undo")
    assert sorted(workspace.state()) == [b".", b"persons"]
    assert workspace.call("undo", fails=1)["kind"] == "nothing"


def test_a_turn_that_was_undone_at_its_end_stays_so(workspace: Workspace) -> None:
    workspace.call("snapshot", turn={"id": "runs"})
    workspace.write({"first": "1"})
    workspace.call("undo")
    workspace.call("snapshot", end="runs")
    assert workspace.call("undo", fails=1)["kind"] == "nothing"


def test_a_file_in_the_way_of_a_directory_is_left(workspace: Workspace) -> None:
    workspace.write({"to-file/x": "x", "to-dir": "d", "mode/x": "x"})
    with workspace.turn():
        for name in ("to-file", "to-dir"):
            subprocess.run(["rm", "-r", name], cwd=workspace.top, check=True)
        workspace.write({"to-file": "f", "to-dir/y": "y", "mode/x": "agent"})
        (workspace.top / "mode").chmod(0o700)
    workspace.write({"to-file": "person", "to-dir/y": "person"})
    (workspace.top / "mode").chmod(0o711)
    left = {row["path"] for row in workspace.call("undo")["left"]}
    assert left == {"to-file", "to-dir", "to-dir/y", "mode"} - {"to-dir/y"} | (left & {"to-dir/y"})
    assert (workspace.top / "to-file").read_text() == "person"
    assert (workspace.top / "to-dir/y").read_text() == "person"
    assert (workspace.top / "mode").stat().st_mode & 0o777 == 0o711
    assert (workspace.top / "mode/x").read_text() == "x"


def test_a_restored_file_belongs_to_whom_its_directory_does(workspace: Workspace) -> None:
    workspace.write({"d/a": "1", "d/b": "1"})
    for path in (workspace.top / "d", workspace.top / "d/a", workspace.top / "d/b"):
        os.chown(path, 1234, 1234)
    with workspace.turn():
        workspace.write({"d/a": "2"})
        (workspace.top / "d/b").unlink()
    workspace.call("undo")
    assert [os.stat(workspace.top / "d" / name).st_uid for name in "ab"] == [1234, 1234]


def test_nobody_gets_the_rights_of_another_owner(workspace: Workspace) -> None:
    """A restored file belongs to whom its directory does, who may be root."""
    names = "gone", "rootly", "taken", "same", "mine"
    workspace.write(dict.fromkeys(names, "1"))

    def give(name: str, uid: int, mode: int) -> None:
        os.chown(workspace.top / name, uid, uid)
        (workspace.top / name).chmod(mode)

    for name in names:
        give(name, 0 if name == "mine" else 1234, 0o6755)
    with workspace.turn():
        for name in ("gone", "mine", "rootly"):
            (workspace.top / name).unlink()
        workspace.write({"rootly": "2", "same": "2"})
        give("taken", 0, 0o755)
        give("same", 1234, 0o755)
    assert workspace.call("undo")["left"] == []
    found = {name: (os.stat(workspace.top / name).st_uid,
                    os.stat(workspace.top / name).st_mode & 0o7777) for name in names}
    assert found == {"gone": (0, 0o755), "rootly": (0, 0o755), "taken": (0, 0o755),
                     "same": (1234, 0o6755), "mine": (0, 0o6755)}


def test_a_store_knows_the_directory_that_it_is_of(workspace: Workspace) -> None:
    """As volumes are reused: the files of one directory never come into another one."""
    workspace.write({"a": "0"})
    workspace.call("snapshot", turn={"id": "before"})  # as of a version that did not say it
    workspace.call("snapshot", end="before", directory="/one")
    with workspace.turn():
        workspace.write({"a": "1"})
    other = workspace.area / "other"
    other.mkdir()
    (other / "mine").write_text("mine")
    before = workspace.state(other), workspace.call("log")
    for verb, request in (("snapshot", {"turn": {"id": "x"}}), ("snapshot", {}), ("undo", {}),
                          ("redo", {}), ("diff", {"now": True})):
        if verb == "redo":
            workspace.call("undo", directory="/one")
            before = before[0], workspace.call("log")
        refused = workspace.call(verb, directory="/two", top=other, fails=1, **request)
        assert refused["error"] == "the snapshots are those of /one, and not of /two"
        assert refused["kind"] == "" and (workspace.state(other), workspace.call("log")) == before
    merged = workspace.call("merge", tree="origin", directory="/two", top=other)
    assert [row["path"] for row in merged["changed"]] == []
    workspace.call("redo", directory="/one")
    assert workspace.call("merge", tree="origin", directory="/one", top=other, fails=1)
    assert (workspace.top / "a").read_text() == "1"


def test_snapshots_wait_for_each_other(workspace: Workspace) -> None:
    many(workspace, "old")
    started = [subprocess.Popen(workspace.argv("snapshot", {"turn": {"id": f"p{at}"}}),
                                env=workspace.env, stdout=subprocess.DEVNULL) for at in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4
    assert len(workspace.call("log")["turns"]) == 4


# --- Copies ---


def test_a_copy_is_merged_without_what_is_gits(workspace: Workspace) -> None:
    armed(workspace)
    origin = workspace.area / "origin"
    shutil.copytree(workspace.top, origin, symlinks=True)
    with workspace.turn():
        workspace.write({"src/main.py": "print(2)\n", "new/file": "n\n", ".git/config": "evil",
                         "sub/.GIT/config": "evil", "sub/ok": "fine\n", "Makefile": "x"})
        workspace.git("init", "-q", "nested")
        workspace.write({"nested/x": "x"})
    (origin / "README").write_text("the person's\n")
    git = {path: about for path, about in workspace.state(origin).items() if b".git" in path}
    before = workspace.state(origin)
    dry = workspace.call("merge", tree="origin", top=origin, dry=True)
    assert workspace.state(origin) == before
    answer = workspace.call("merge", tree="origin", top=origin)
    assert answer["changed"] == dry["changed"]
    assert answer["left"] == [
        {"path": path, "why": "what is git's own does not leave a copy", "conflict": False}
        for path in (".git", "nested/.git", "sub/.GIT")]
    assert [row["path"] for row in answer["changed"] if row["risk"]] == ["Makefile"]
    after = workspace.state(origin)
    assert {path: about for path, about in after.items() if b".git" in path} == git
    assert (origin / "src/main.py").read_text() == "print(2)\n"
    assert (origin / "README").read_text() == "the person's\n"
    assert (origin / "nested/x").exists() and (origin / "sub/ok").exists()
    with workspace.turn():
        workspace.write({"new/file": "n2\n"})
    (origin / "src/main.py").write_text("print(3)\n")  # after the first merge: the person's
    again = workspace.call("merge", tree="origin", top=origin)
    assert again["changed"] == [{"path": "new/file", "status": "modified", "risk": []}]
    workspace.call("undo", tree="origin", top=origin)
    workspace.call("undo", tree="origin", top=origin)
    assert (origin / "src/main.py").read_text() == "print(3)\n"
    assert not (origin / "new").exists()


def test_what_was_not_merged_comes_with_the_next_merge(workspace: Workspace) -> None:
    workspace.write({"a": "0", "b": "0", "fight": "0"})
    origin = workspace.area / "origin"
    shutil.copytree(workspace.top, origin)
    with workspace.turn():
        workspace.write({"a": "1", "b": "1", "fight": "1"})
    (origin / "fight").write_text("person")

    def merge(**request: Any) -> tuple[list[str], list[str]]:
        answer = workspace.call("merge", tree="origin", top=origin, **request)
        return [row["path"] for row in answer["changed"]], [row["path"] for row in answer["left"]]

    assert merge(paths=["a"]) == (["a"], [])
    assert merge() == (["b"], ["fight"])
    (origin / "fight").write_text("0")
    assert merge() == (["fight"], [])
    assert merge() == ([], [])


@pytest.mark.parametrize("lost", [[], ["tool"]])
def test_a_mode_that_has_not_come_elsewhere_comes_again(workspace: Workspace,
                                                        lost: list[str]) -> None:
    workspace.write({"tool": "0"})
    origin = workspace.area / "origin"
    shutil.copytree(workspace.top, origin)
    with workspace.turn():
        (workspace.top / "tool").chmod(0o755)
    workspace.call("merge", tree="origin", top=origin, elsewhere=True, lost=lost)
    answer = workspace.call("merge", tree="origin", top=origin)
    assert [row["path"] for row in answer["changed"]] == lost


def test_a_merge_that_left_something_does_not_merge_the_rest_again(workspace: Workspace) -> None:
    workspace.write({"came": "X0", "fight": "0", "dir/left": "0", "dir/came": "0"})
    origin = workspace.area / "origin"
    shutil.copytree(workspace.top, origin)
    with workspace.turn():
        workspace.write({"came": "X1", "fight": "1", "dir/left": "1", "dir/came": "1"})
    (origin / "fight").write_text("person")
    (origin / "dir/left").write_text("person")
    (origin / "dir").chmod(0o700)

    def merge(**request: Any) -> list[str]:
        answer = workspace.call("merge", tree="origin", top=origin, **request)
        return [row["path"] for row in answer["left"]]

    assert merge() == ["dir/left", "fight"]
    with workspace.turn():
        workspace.write({"came": "X2", "dir/came": "2"})
    assert merge(paths=["dir"]) == ["dir/left"]
    assert [(origin / name).read_text() for name in ("came", "dir/came")] == ["X1", "2"]
    assert merge() == ["dir/left", "fight"]
    assert (origin / "came").read_text() == "X2"
    assert (origin / "dir").stat().st_mode & 0o777 == 0o700
    (origin / "fight").write_text("0")
    assert merge() == ["dir/left"]
    assert (origin / "fight").read_text() == "1"


def test_a_merge_knows_what_came_when_it_is_forgotten_itself(workspace: Workspace) -> None:
    workspace.write({"a": "0"})
    origin = workspace.area / "origin"
    shutil.copytree(workspace.top, origin)
    with workspace.turn():
        workspace.write({"a": "1"})
    assert workspace.call("merge", tree="origin", top=origin)["changed"]
    for _ in range(4):
        with workspace.turn():
            (workspace.top / "b").write_bytes(os.urandom(200_000))
    workspace.call("prune", keep=2)
    workspace.call("prune", maxBytes=300_000)
    (origin / "a").write_text("0")  # the person's again
    assert [row["path"] for row in workspace.call("merge", tree="origin", top=origin)["changed"]
            ] == ["b"]


def test_what_was_not_kept_of_a_copys_work_is_a_conflict_until_it_is_gone(
        workspace: Workspace) -> None:
    workspace.write({"a": "0", ".gitignore": "build\n"})
    origin = workspace.area / "origin"
    shutil.copytree(workspace.top, origin)
    with workspace.turn(), (workspace.top / "large").open("wb") as file:
        file.truncate(20 << 20)
        workspace.write({"build/x": "x"})
        os.mkfifo(workspace.top / "fifo")
    for paths in ([], [], ["large"]):
        left = workspace.call("merge", tree="origin", top=origin, paths=paths)["left"]
        assert [row["path"] for row in left if row["conflict"]] == ["large"]
    (workspace.top / "large").unlink()
    workspace.call("snapshot")
    assert workspace.call("merge", tree="origin", top=origin)["left"] == []


def test_what_is_only_counted_is_no_conflict(workspace: Workspace) -> None:
    """An ignored directory that the copy and the person have built in, or one has removed."""
    workspace.write({"a": "0", ".gitignore": "build*\n", "build/x": "0", "built": "0",
                     "build-copy/x": "0", "build-mine/x": "0"})
    origin = workspace.area / "origin"
    shutil.copytree(workspace.top, origin)
    with workspace.turn():
        workspace.write({"build/x": "copy", "build-copy/x": "copy", "built": "copy"})
        shutil.rmtree(workspace.top / "build-mine")
    (origin / "build/x").write_text("mine")
    (origin / "built").write_text("mine")
    shutil.rmtree(origin / "build-copy")
    for _ in range(2):
        left = workspace.call("merge", tree="origin", top=origin)["left"]
        assert [row["path"] for row in left if row["conflict"]] == ["built"]
    workspace.write({"build/x": "the person's"})
    left = workspace.call("undo")["left"]
    assert left and not any(row["conflict"] for row in left)


def test_a_turn_of_which_nothing_was_kept_is_in_nobodys_way(workspace: Workspace) -> None:
    workspace.write({".gitignore": "build\n", "build/x": "0", "a": "0"})
    with workspace.turn():
        workspace.write({"a": "1"})
    with workspace.turn():
        workspace.write({"build/x": "1"})
    assert not workspace.call("undo")["left"][0]["conflict"]
    assert workspace.call("undo")["turns"] == ["t1"]
    assert (workspace.top / "a").read_text() == "0"


def test_a_large_file_that_the_person_has_copied_is_no_conflict(workspace: Workspace) -> None:
    workspace.write({"a": "0"})
    origin, large = workspace.area / "origin", workspace.top / "large"
    shutil.copytree(workspace.top, origin)
    with workspace.turn(), large.open("wb") as file:
        file.truncate(20 << 20)
    os.utime(large, ns=(10**18 + 1, 10**18 + 1))
    workspace.call("snapshot")

    def left() -> list[str]:
        answer = workspace.call("merge", tree="origin", top=origin)["left"]
        return [row["path"] for row in answer if row["conflict"]]

    assert left() == ["large"]
    shutil.copy2(large, origin)
    os.utime(origin / "large", ns=(10**18, 10**18))  # as of an archive, which knows but seconds
    assert left() == []
    with large.open("ab") as file:
        file.write(b"more")
    workspace.call("snapshot")
    assert left() == ["large"]


def test_a_directory_of_many_files_is_no_slower_than_many_directories(workspace: Workspace) -> None:
    """What git does with a tree must not cost the square of its entries."""
    (workspace.top / "all").mkdir()
    for at in range(30_000):
        (workspace.top / "all" / f"file{at}").write_text(f"{at}")
    workspace.call("snapshot")  # ends within the time that call() gives
    with workspace.turn():
        (workspace.top / "all" / "file7").write_text("x")
    assert [*rows(workspace.call("diff", turn="t1"))] == ["all/file7"]
    workspace.git(f"--git-dir={workspace.store}/git", "fsck", "--full", "--strict")


def test_a_copy_with_a_repository_of_its_own_is_merged_into_a_linked_worktree(
        workspace: Workspace) -> None:
    workspace.write({".git": "gitdir: /elsewhere\n", "a": "0", "sub/.git": "gitdir: /x\n"})
    origin = workspace.area / "origin"
    shutil.copytree(workspace.top, origin)
    with workspace.turn():
        for name in (".git", "sub/.git"):
            (workspace.top / name).unlink()
            workspace.write({f"{name}/config": "[core]\n", f"{name}/HEAD": "x\n"})
        workspace.write({"a": "1"})
    for text in ("gitdir: /other\n", "gitdir: /elsewhere\n"):
        (origin / ".git").write_text(text)
        before = workspace.state(origin)
        answer = workspace.call("merge", tree="origin", top=origin)
        assert {row["path"] for row in answer["left"]} <= {".git", "sub/.git"}
        assert not any(row["conflict"] for row in answer["left"])
        assert workspace.state(origin) == before | {b"a": workspace.state()[b"a"]}


# --- Races, kills and bounds ---


class Racing(shadow.Request):  # type: ignore[misc, name-defined]
    """A request during which something happens right after the snapshot."""

    happens: Callable[[], None]

    def walk(self) -> Any:
        walk = super().walk()
        type(self).happens()
        type(self).happens = staticmethod(lambda: None)
        return walk


def race(workspace: Workspace, happens: Callable[[], None], **given: Any) -> Any:
    Racing.happens = staticmethod(happens)
    store = shadow.Store(str(workspace.store))
    answer = Racing(store, str(workspace.top), given).undo()
    store.lock.close()
    return answer


def test_a_directory_that_is_swapped_for_a_link_is_not_followed(workspace: Workspace) -> None:
    outside = workspace.area / "outside"
    shutil.copytree(workspace.top, outside)
    workspace.write({"d/changed": "old", "d/removed": "r"})
    with workspace.turn():
        workspace.write({"d/changed": "new", "d/added": "a"})
        (workspace.top / "d" / "removed").unlink()
    (outside / "added").write_text("a")
    (outside / "changed").write_text("new")

    def swap() -> None:
        (workspace.top / "d").rename(workspace.area / "moved")
        (workspace.top / "d").symlink_to(outside)

    before = workspace.state(outside)
    with pytest.raises(shadow.Failure, match="nothing was changed"):
        race(workspace, swap)
    assert workspace.state(outside) == before
    assert (workspace.area / "moved" / "changed").read_text() == "new"


def test_what_changes_after_the_snapshot_is_left(workspace: Workspace) -> None:
    workspace.write({"changed": "old", "other": "old", "removed": "r", "mode": "m"})
    with workspace.turn():
        workspace.write({"changed": "new", "other": "new", "added": "a", "dir/x": "x"})
        (workspace.top / "removed").unlink()
        (workspace.top / "mode").chmod(0o600)

    def meddle() -> None:
        workspace.write({"changed": "late", "added": "late", "removed": "late", "dir/late": "late"})
        (workspace.top / "mode").unlink()
        (workspace.top / "mode").symlink_to("/etc/passwd")

    passwd = os.stat("/etc/passwd")
    answer = race(workspace, meddle)
    assert {row["path"] for row in answer["left"]} == {"changed", "added", "removed", "mode", "dir"}
    assert [(workspace.top / name).read_text() for name in ("changed", "added", "removed",
                                                            "dir/late")] == ["late"] * 4
    assert (workspace.top / "other").read_text() == "old"
    assert os.stat("/etc/passwd") == passwd


def test_what_is_outside_never_comes_in_while_the_tree_changes(workspace: Workspace) -> None:
    """Directories, files and links take each other's places all the time."""
    outside = workspace.area / "outside"
    shutil.copytree(workspace.top, outside)
    (outside / "x").write_text("outside")
    (outside / "sub").mkdir()
    (outside / "sub" / "x").write_text("outside")
    before, ends = workspace.state(outside), threading.Event()
    workspace.write({f"d{at}/sub/x": "inside" for at in range(20)})

    def swap() -> None:
        """Each in turn is put aside for something else, and put back the next time."""
        for at in itertools.count():
            path = workspace.top / f"d{at % 20}" / ("sub" if at % 3 else "")
            aside = workspace.area / f"aside-{at % 20}"
            if ends.is_set():
                break
            with contextlib.suppress(OSError):
                if aside.exists():
                    path.unlink()
                    aside.rename(path)
                else:
                    path.rename(aside)
                    os.mkfifo(path) if at % 7 == 0 else path.symlink_to(outside)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        with workspace.turn():
            for _ in range(20):
                workspace.call("snapshot")
        undone = subprocess.run(workspace.argv("undo", {}), env=workspace.env, capture_output=True)
        assert undone.returncode == 0 or b"nothing was changed" in undone.stdout
    finally:
        ends.set()
        thread.join()
    assert workspace.state(outside) == before
    git = f"--git-dir={workspace.store}/git"
    listed = workspace.git(git, "cat-file", "--batch-all-objects", "--batch-check").split("\n")
    blobs = [line.split()[0] for line in listed if " blob " in line]
    assert blobs and "outside" not in [workspace.git(git, "cat-file", "-p", id) for id in blobs]


def test_a_tree_too_deep_or_with_too_long_a_path_is_kept_as_far_as_one_can(
        workspace: Workspace) -> None:
    top = workspace.top
    for name, levels in (("d", 5000), ("x" * 250, 40), ("\u20ac" * 80, 60)):
        fd = os.open(top, os.O_RDONLY)
        for _ in range(levels):
            os.mkdir(name, dir_fd=fd)
            below = os.open(name, os.O_RDONLY, dir_fd=fd)
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            os.close(fd)
            fd = below
        os.close(fd)
    workspace.write({"a": "1"})
    with workspace.turn():
        workspace.write({"a": "2", "d/d/file": "changed", "\u20ac" * 80 + "/file": "changed"})
    workspace.write({"d/mine": "x"})
    assert workspace.call("undo")["left"] == []
    assert (top / "a").read_text() == "1" and (top / "d/d/file").read_text() == ""


def test_the_other_name_of_a_file_is_not_written(workspace: Workspace) -> None:
    workspace.write({"a": "old"})
    with workspace.turn():
        os.link(workspace.top / "a", workspace.area / "other")
        workspace.write({"a": "new"})
        os.link(workspace.top / "a", workspace.top / "twin")
    assert workspace.call("undo")["left"] == []
    assert (workspace.top / "a").read_text() == "old"
    assert (workspace.area / "other").read_text() == "new"
    assert not (workspace.top / "twin").exists()
    assert workspace.call("redo")["left"] == []
    assert (workspace.top / "twin").read_text() == (workspace.top / "a").read_text() == "new"


def many(workspace: Workspace, text: str) -> None:
    for number in range(150):
        workspace.write({f"d{number % 10}/{number}": f"{text} {number}\n" * 50})


@pytest.mark.parametrize("verb", ["snapshot", "undo", "redo"])
def test_a_kill_leaves_the_old_or_the_new_of_each_file(workspace: Workspace, verb: str) -> None:
    many(workspace, "old")
    before = workspace.state()
    with workspace.turn():
        many(workspace, "new")
        workspace.write({f"more{number}": "more" for number in range(50)})
    after = workspace.state()
    if verb == "redo":
        workspace.call("undo")
    chance = random.Random(verb)
    for number in range(8):
        if verb == "snapshot":
            workspace.write({f"d1/grown{number}-{more}": "x" * 5000 for more in range(200)})
            after = workspace.state()
        process = subprocess.Popen(workspace.argv(verb, {}), env=workspace.env,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.02, 0.25))
        process.kill()
        process.communicate()
        for path, about in workspace.state().items():
            mine = b".shadow-" in path
            assert mine or about in (before.get(path), after.get(path)), path
    workspace.call("snapshot")
    workspace.call("log")
    while verb != "snapshot":
        answer = subprocess.run(workspace.argv(verb, {}), env=workspace.env, capture_output=True)
        if answer.returncode:
            break
    if verb != "snapshot":
        assert workspace.state() == (before if verb == "undo" else after)


def mounted(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)


def test_a_full_disk_changes_nothing(workspace: Workspace) -> None:
    mounted(workspace.top, "4m")
    try:
        (workspace.top / "a").write_bytes(os.urandom(2 << 20))
        workspace.write({"b": "old"})
        with workspace.turn():
            workspace.write({"a": "", "b": "new"})
            (workspace.top / "fill").write_bytes(os.urandom(1 << 20))
        (workspace.top / "persons").write_bytes(os.urandom(5 << 19))
        before = workspace.state()
        assert "No space left" in workspace.call("undo", fails=1)["error"]
        assert workspace.state() == before
        (workspace.top / "persons").unlink()
        assert workspace.call("undo")["left"] == []
        assert (workspace.top / "b").read_text() == "old"
    finally:
        subprocess.run(["umount", workspace.top], check=True)


def test_a_full_store_ends_the_snapshot_and_opens_again(workspace: Workspace) -> None:
    mounted(workspace.store, "1m")
    try:
        workspace.write({"a": "1"})
        workspace.call("snapshot")
        (workspace.top / "big").write_bytes(os.urandom(2 << 20))
        assert "No space left" in workspace.call("snapshot", fails=1)["error"]
        (workspace.top / "big").unlink()
        workspace.call("snapshot")
    finally:
        subprocess.run(["umount", workspace.store], check=True)


def test_the_store_is_bounded(workspace: Workspace) -> None:
    for _ in range(6):
        with workspace.turn():
            (workspace.top / "noise").write_bytes(os.urandom(300_000))
    assert len(workspace.call("log")["turns"]) == 6
    workspace.call("snapshot", keep=4)
    assert [turn["id"] for turn in workspace.call("log")["turns"]] == ["t3", "t4", "t5", "t6"]
    workspace.call("prune", maxBytes=1_300_000)
    log = workspace.call("log")
    assert 0 < len(log["turns"]) < 4 and log["bytes"] < 1_300_000
    noise = (workspace.top / "noise").read_bytes()
    workspace.call("undo")
    workspace.call("redo")
    assert (workspace.top / "noise").read_bytes() == noise
    assert "there is no turn t1" in workspace.call("diff", turn="t1", fails=1)["error"]
    workspace.git(f"--git-dir={workspace.store}/git", "fsck", "--full", "--strict")


def test_a_store_that_cannot_be_smaller_is_kept_whole(workspace: Workspace) -> None:
    """Newer gits write a reverse index beside each pack."""
    workspace.write({"a": "one\n"})
    workspace.call("snapshot")
    workspace.git(f"--git-dir={workspace.store}/git", "config", "pack.writeReverseIndex", "true")
    with workspace.turn():
        (workspace.top / "noise").write_bytes(os.urandom(300_000))
    for verb in ("prune", "prune", "undo", "prune", "redo"):
        workspace.call(verb, maxBytes=1000)
    assert (workspace.top / "noise").exists()
    workspace.call("diff")
    workspace.git(f"--git-dir={workspace.store}/git", "fsck", "--full", "--strict")


@pytest.mark.parametrize("harm", ["cut", "gone", "state", "[]", '{"events": 7}', '{"packs": []}',
                                  "cache", "flipped"])
def test_a_damaged_store_is_said_once(workspace: Workspace, harm: str) -> None:
    workspace.write({"a": "one\n" * 500})
    with workspace.turn():
        workspace.write({"a": "two\n" * 500})
    packs = sorted((workspace.store / "git/objects/pack").glob("*.pack"))
    if harm == "cut":
        os.truncate(packs[0], 20)
    elif harm == "gone":
        packs[0].unlink()
    elif harm == "state":
        (workspace.store / "state.json").write_text('{"events": [')
    elif harm[0] in "[{":
        (workspace.store / "state.json").write_text(harm)
    elif harm == "cache":
        (workspace.store / "cache-main").write_bytes(b"x" * 500)
    else:
        for pack in packs:
            data = bytearray(pack.read_bytes())
            data[20:-40] = os.urandom(len(data) - 60)
            pack.write_bytes(data)
    now = workspace.state()
    if harm == "cache":  # it only saves work
        assert workspace.call("undo")["left"] == []
    else:
        assert "damaged" in workspace.call("undo", fails=1)["error"]
        assert workspace.state() == now


def test_an_ordinary_user_sees_and_restores_what_it_may(workspace: Workspace) -> None:
    workspace.write({"mine/a": "1", "theirs/b": "1", "secret": "s"})
    for path in (workspace.top, workspace.store, workspace.top / "mine", workspace.top / "mine/a"):
        shutil.chown(path, USER, USER)
    (workspace.top / "secret").chmod(0o600)
    (workspace.top / "theirs").chmod(0o700)
    call = workspace.call
    call("snapshot", user=USER, turn={"id": "t1"})
    workspace.write({"mine/a": "2", "secret": "s2"})
    call("snapshot", user=USER, end="t1")
    found = rows(call("diff", user=USER, turn="t1"))
    assert {*found} == {"mine/a", "secret"} and found["secret"]["seen"] == "unreadable"
    assert call("undo", user=USER)["left"] == [
        {"path": "secret", "why": "it cannot be read", "conflict": True}]
    assert (workspace.top / "mine/a").read_text() == "1"


def test_a_wrong_request_is_refused(workspace: Workspace) -> None:
    workspace.write({"a": "1"})
    nothing = workspace.call("diff", fails=1)
    assert "no snapshot" in nothing["error"] and nothing["kind"] == "nothing"
    assert workspace.call("undo", turn=7, fails=2)["kind"] == ""
    workspace.call("undo", paths=[7], fails=2)
    workspace.call("snapshot", tree="../x", fails=2)
    assert workspace.call("merge", fails=1)["kind"] == "nothing"
    missing = workspace.call("snapshot", end="t9", fails=1)
    assert "no turn" in missing["error"] and missing["kind"] == "missing"
    with workspace.turn():
        pass
    assert "already" in workspace.call("snapshot", turn={"id": "t1"}, fails=1)["error"]
    gone = workspace.area / "gone"
    assert str(gone) in workspace.call("snapshot", top=gone, fails=1)["error"]
    argv = workspace.argv("undo", {})[:-1]
    done = subprocess.run([*argv, "-"], input='{"paths": ["nope"]}', capture_output=True, text=True)
    assert done.returncode == 1 and "nope" in json.loads(done.stdout)["error"]
    done = subprocess.run([*argv, "["], capture_output=True, text=True)
    assert done.returncode == 2 and "no JSON object" in json.loads(done.stdout)["error"]
