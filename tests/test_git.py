"""Git in sessions: linked worktrees, what of them can be written, authors."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import PATH, PYTHON, ROOT, Engine, Result, on_docker
from service import Service
from test_agents import IMAGE as AGENTS_IMAGE
from test_agents import image as image

import sandbox

AUTHOR = {f"GIT_{role}_{field}": value for role in ("AUTHOR", "COMMITTER")
          for field, value in (("NAME", "Setup"), ("EMAIL", "setup@test"))}
AS_AGENT = sandbox.each("-e", [f"{name}={value.replace('Setup', 'Agent')}"
                               for name, value in AUTHOR.items()])


def git_in(folder: Path, *args: str, engine: Engine | None = None, **env: str) -> str:
    """What this machine's git prints in a folder, as the engine's user."""
    where = engine.where(cwd=folder, env={**AUTHOR, **env}) if engine else {
        "cwd": folder, "env": {"PATH": PATH, "HOME": "/", **AUTHOR, **env}}
    ran = subprocess.run(["git", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                         **where)
    assert ran.returncode == 0, ran.stderr
    return str(ran.stdout)


class Worktree:
    """A repository in a folder of its own, and a linked worktree of it beside."""

    def __init__(self, engine: Engine, name: str = "tree") -> None:
        self.engine, base = engine, engine.directory()
        self.top, self.path = base / "repo", base / name
        self.git = self.top / ".git"
        git_in(base, "init", "-q", "-b", "main", "repo", engine=engine)
        self.host(self.top, "commit", "-q", "--allow-empty", "-m", "first")
        self.host(self.top, "pack-refs", "--all")
        self.host(self.top, "worktree", "add", "-q", "-b", "topic", str(self.path))
        self.host(self.top, "worktree", "add", "-q", "-b", "other", str(base / "other"))
        self.admin = self.git / "worktrees" / self.path.name

    def host(self, folder: Path, *args: str) -> str:
        return git_in(folder, *args, engine=self.engine)

    def run(self, name: str, *args: str) -> Result:
        return self.engine.sandbox("run", "-n", name, *args, cwd=self.path)

    def obeyed(self) -> dict[str, bytes]:
        """All of the repository but for what commits write."""
        written = [self.git / part for part in ("objects", "refs", "worktrees/tree")]
        kept = [self.git / "objects" / "info", *(self.admin / file for file in (
            "commondir", "gitdir", "config.worktree")), self.path / ".git"]
        found = {}
        for path in [*self.git.rglob("*"), self.path / ".git"]:
            if not any(path.is_relative_to(part) for part in written) or any(
                    path.is_relative_to(part) for part in kept):
                found[str(path)] = path.read_bytes() if path.is_file() else b""
        return found


@pytest.fixture
def worktree(engine: Engine) -> Worktree:
    return Worktree(engine)


@pytest.fixture
def git_image(engine: Engine, image: str, home: Path) -> list[str]:
    """The options for the image that has git."""
    name, _, version = AGENTS_IMAGE.rpartition(":")
    return ["--in", name, "--iv", version]


WORK = """set -e
git status --short; git log --oneline | wc -l
echo one >file; git add file; git commit -qm one
git switch -qc more; echo two >>file; git stash -q; git stash pop -q; git commit -qam two
git switch -q topic; git merge -q more; git branch -qd more 2>&1 | grep -v config || true
echo three >>file; git commit -qam three; git rebase -q main; git tag done; git tag -d done
git worktree list | cut -d' ' -f1"""


def test_git_works_in_a_linked_worktree(worktree: Worktree, git_image: list[str], name: str,
                                        ) -> None:
    """All that commits take, without a word of an error; the host sees it at once."""
    ran = worktree.run(name, *git_image, *AS_AGENT, "-x", "sh", "-c", WORK)
    said, *rest = ran.stderr.splitlines()
    assert f"commits and branches of {worktree.git} can be written" in said
    assert (ran.returncode, rest) == (0, []), ran
    assert ran.stdout.splitlines()[0] == "1"
    assert ran.stdout.splitlines()[-3:] == [
        str(path) for path in (worktree.top, worktree.top.parent / "other", worktree.path)]
    log = worktree.host(worktree.path, "log", "--format=%an %s", "topic")
    assert log.splitlines() == ["Agent three", "Agent two", "Agent one", "Setup first"]
    assert worktree.host(worktree.path, "status", "--short") == ""
    worktree.host(worktree.path, "fsck", "--strict")
    # And the other way round: what the host writes, and packs, is seen inside.
    worktree.host(worktree.path, "commit", "-q", "--allow-empty", "-m", "four")
    worktree.host(worktree.top, "gc", "-q")
    again = worktree.run(name, "-x", "git", "log", "--format=%s", "-1")
    assert (again.stdout, again.stderr) == ("four\n", "")
    # What is mounted of the repository may have been turned meanwhile: see start_session().
    worktree.engine.run("stop", "-t", "0", name)
    again = worktree.run(name, "-x", "true")
    assert again.returncode == 125 and f"sandbox recreate {name}" in again.stderr
    assert worktree.engine.sandbox("recreate", name).returncode == 0
    again = worktree.run(name, *AS_AGENT, "-x",
                         "git commit -q --allow-empty -m five; git log --format=%s -1")
    assert (again.stdout, again.returncode) == ("five\n", 0), again.stderr


@on_docker
def test_a_configuration_that_is_no_file_makes_nobody_wait(worktree: Worktree, name: str) -> None:
    worktree.host(worktree.top, "config", "extensions.worktreeConfig", "true")
    os.mkfifo(worktree.admin / "config.worktree")
    ran = worktree.run(name, "-x", "true")
    assert ran.returncode and "config.worktree" in ran.stderr


@on_docker
def test_the_persons_stashes_stay(worktree: Worktree, git_image: list[str], name: str) -> None:
    """Those made inside are listed inside; taken back there they are gone, and no other is."""
    (worktree.top / "file").write_text("the person's")
    worktree.host(worktree.top, "add", "file")
    worktree.host(worktree.top, "stash", "-q")
    put = "echo 1 >one; git add one; git stash -q"
    for command, count in ((f"{put}; git stash pop -q; git reset -q --hard", 1), (put, 2)):
        ran = worktree.run(name, *git_image, *AS_AGENT, "-x", f"{command}; git stash list | wc -l")
        assert ran.stdout == f"{count}\n", ran.stderr
        assert worktree.host(worktree.top, "stash", "list").count("stash@") == 1
    worktree.host(worktree.top, "stash", "pop", "-q")
    assert (worktree.top / "file").read_text() == "the person's"


@on_docker
def test_a_packed_branch_is_not_removed_from_inside(worktree: Worktree, git_image: list[str],
                                                    name: str) -> None:
    """It would be removed in a copy of the list alone, and from then on that would count inside."""
    worktree.host(worktree.top, "branch", "packed")
    worktree.host(worktree.top, "pack-refs", "--all")
    ran = worktree.run(name, *git_image, "-x", "git branch -D packed; git branch")
    assert "could not delete" in ran.stderr and "packed" in ran.stdout
    assert "packed" in worktree.host(worktree.top, "branch")
    worktree.host(worktree.top, "branch", "-D", "packed")
    assert "packed" not in worktree.run(name, "-x", "git", "branch").stdout


ATTACK = """
for top in "$1" /run/sandbox-git; do
  for path in config config.worktree commondir HEAD hooks/post-commit info/attributes \\
    objects/info/alternates modules/sub/config logs/HEAD logs/refs/heads/main \\
    worktrees/other/config.worktree \\
    worktrees/other/commondir worktrees/other/gitdir worktrees/tree/commondir \\
    worktrees/tree/gitdir worktrees/tree/config.worktree worktrees/new/HEAD; do
    mkdir -p "$(dirname "$top/$path")"
    echo evil >>"$top/$path"; rm -rf "$top/$path"; echo evil >"$top/$path"
    mv /tmp/evil "$top/$path"; : >/tmp/evil
  done
  for path in hooks info modules worktrees objects/info worktrees/tree worktrees/other; do
    mv "$top/$path" "$top/$path.old"; mkdir -p "$top/$path"; ln -s /tmp "$top/$path"
    echo evil >"$top/$path/pre-commit"
  done
done
rm -f "$2/.git"; mv "$2/.git" "$2/old"; echo evil >"$2/.git"; mkdir -p "$2/.git"
umount /run/sandbox-git/objects/info; mount -o remount,rw /run/sandbox-git
:"""


@pytest.mark.parametrize("missing", [(), ("hooks", "info", "objects/info/packs")],
                         ids=["whole", "without hooks"])
def test_nothing_that_the_host_obeys_can_be_written(worktree: Worktree, name: str,
                                                    missing: tuple[str, ...]) -> None:
    """By root neither, and not after the host has replaced what is mounted."""
    engine = worktree.engine
    worktree.host(worktree.top, "config", "extensions.worktreeConfig", "true")
    for path in missing:
        subprocess.run(["rm", "-rf", worktree.git / path], check=True)
    ran = worktree.run(name, "-x", "true")
    assert ran.returncode == 0, ran.stderr
    assert (worktree.admin / "config.worktree").read_text() == ""
    for change in ((), ("config", "host.key", "value"), ("gc", "-q")):
        if change:
            worktree.host(worktree.top, *change)
        before = worktree.obeyed()
        for user in ("0", str(engine.uid) if engine.user == "root" else "0"):
            ran = engine.run("exec", "--user", user, name, "sh", "-c", ATTACK, "sh",
                             str(worktree.git), str(worktree.path))
            assert ran.returncode == 0 and "Read-only file system" in ran.stderr
            assert worktree.obeyed() == before
        worktree.host(worktree.path, "status")


def test_a_worktree_of_any_name_at_any_path(engine: Engine, git_image: list[str], name: str,
                                            ) -> None:
    """At another path of the container, too, where its repository is where its .git says."""
    odd = Worktree(engine, "it's a: $tree, \"odd\"\\")
    show = "git status --short --branch; git rev-parse --show-toplevel"
    ran = odd.run(name, *git_image, "--cp", "/work", "-x", show)
    assert ran.stdout == "## topic\n/work\n", ran.stderr
    ran = odd.run(f"{name}b", *git_image, "-x", show)
    assert ran.stdout == f"## topic\n{odd.path}\n", ran.stderr


@on_docker
def test_a_worktree_of_a_bare_repository(worktree: Worktree, git_image: list[str], name: str,
                                         ) -> None:
    """Which has no logs, no index and its HEAD detached from all worktrees."""
    base = worktree.top.parent
    worktree.host(base, "clone", "-q", "--bare", str(worktree.top), "bare")
    worktree.host(base / "bare", "worktree", "add", "-q", str(base / "leaf"))
    commit = "git commit -q --allow-empty -m inside && git status --short --branch"
    ran = worktree.engine.sandbox("run", "-n", name, *git_image, *AS_AGENT, "-x", commit,
                                  cwd=base / "leaf")
    (said,) = ran.stderr.splitlines()
    assert str(base / "bare") in said and ran.stdout == "## leaf\n"
    assert worktree.host(base / "bare", "log", "-1", "--format=%s", "leaf") == "inside\n"


@on_docker
def test_what_mounts_show_already_stays_as_it_is(worktree: Worktree, git_image: list[str],
                                                 name: str) -> None:
    """The repository that the person mounts is writable, as before; so is one that is the project.
    """
    commit = (*AS_AGENT, "-x",
              "git config a.b c && git commit -q --allow-empty -m two && git gc -q")
    ran = worktree.run(name, *git_image, "-v", f"{worktree.git}:{worktree.git}", *commit)
    assert (ran.returncode, ran.stderr) == (0, "")
    ran = worktree.engine.sandbox("run", "-n", f"{name}b", *git_image, *commit, cwd=worktree.top)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert worktree.host(worktree.top, "config", "a.b") == "c\n"


@on_docker
def test_a_folder_below_a_repository_gets_a_hint(engine: Engine, worktree: Worktree,
                                                 git_image: list[str], name: str) -> None:
    below = worktree.top / "below"
    below.mkdir()
    os.chown(below, engine.uid, engine.gid)
    ran = engine.sandbox("run", "-n", name, "-x", "true", cwd=below)
    (said,) = ran.stderr.splitlines()
    assert f"git does not work in {below}" in said and f"-v {worktree.top}:{worktree.top}" in said
    assert engine.sandbox("run", "-n", name, "-x", "true", cwd=below).stderr == ""
    mounted = engine.sandbox("run", "-n", f"{name}b", *git_image, "-v",
                             f"{worktree.top}:{worktree.top}", "-x", "touch f; git status --short",
                             cwd=below)
    assert (mounted.stdout, mounted.stderr) == ("?? ./\n", "")
    other = engine.sandbox("run", "-n", f"{name}c", "--cp", "/work", "-x", "true", cwd=below)
    assert "run from" in other.stderr and "-v" not in other.stderr
    copy = engine.sandbox("run", "-n", f"{name}d", *git_image, "--copy", "-x", "true", cwd=below)
    assert copy.returncode == 0, copy
    assert "run from" in copy.stderr and "-v" not in copy.stderr  # it would be no copy then


@on_docker
def test_a_project_whose_repository_lies_elsewhere_gets_a_hint(engine: Engine, worktree: Worktree,
                                                               name: str) -> None:
    """A submodule, for one. What its .git says is not repeated as something to mount."""
    worktree.host(worktree.top, "-c", "protocol.file.allow=always", "submodule", "-q", "add",
                  str(worktree.path), "sub")
    ran = engine.sandbox("run", "-n", name, "-x", "true", cwd=worktree.top / "sub")
    (said,) = ran.stderr.splitlines()
    assert "git does not work" in said and "leads to another place" in said and "-v" not in said


def test_a_session_of_before_says_what_it_lacks(linked: tuple[Path, Path],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    tree, admin = linked
    monkeypatch.chdir(tree)
    spec = sandbox.spec_of(sandbox.load_config())
    before = {key: value for key, value in spec.items() if key != "git"}
    assert sandbox.differences(before, spec) == [
        f"git: it has none, asked for is {admin.parents[1]}"]
    assert sandbox.differences(spec, spec) == []


# --- What a .git says is not believed ---


@pytest.fixture
def linked(tmp_path: Path) -> tuple[Path, Path]:
    """A worktree of a repository of ours, and the folder of it in the repository."""
    git_in(tmp_path, "init", "-q", "repo")
    git_in(tmp_path / "repo", "commit", "-q", "--allow-empty", "-m", "first")
    git_in(tmp_path / "repo", "worktree", "add", "-q", "../tree")
    return tmp_path / "tree", tmp_path / "repo" / ".git" / "worktrees" / "tree"


def test_a_worktree_is_known_by_both_of_its_ends(linked: tuple[Path, Path]) -> None:
    tree, admin = linked
    assert sandbox.linked_admin(str(tree)) == (str(admin), str(admin))
    (tree / ".git").write_text("gitdir: ../repo/.git/worktrees/tree\n")
    assert sandbox.linked_admin(str(tree)) == ("../repo/.git/worktrees/tree", str(admin))
    assert sandbox.linked_admin(str(tree.parent / "repo")) == ("", "")
    assert sandbox.linked_admin(str(tree.parent)) == ("", "")


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Move what is there aside and put something else in its place."""
    path.rename(path.with_name("aside"))
    make(path)


LIES: dict[str, Callable[[Path, Path], object]] = {
    "root": lambda tree, _: (tree / ".git").write_text("gitdir: /\n"),
    "keys": lambda tree, _: (tree / ".git").write_text(f"gitdir: {tree.parent}/.ssh\n"),
    "another": lambda tree, admin: (tree / ".git").write_text(f"gitdir: {admin.parent}/b\n"),
    "control": lambda tree, admin: (tree / ".git").write_text(f"gitdir: {admin}\r\n"),
    "nul": lambda tree, admin: (tree / ".git").write_text(f"gitdir: {admin}\0\n"),
    "long": lambda tree, _: (tree / ".git").write_text("gitdir: " + "a" * 300_000),
    "fifo": lambda tree, _: replace(tree / ".git", os.mkfifo),
    "link": lambda tree, _: replace(tree / ".git", lambda at: at.symlink_to("aside")),
    "folder": lambda tree, _: replace(tree / ".git", Path.mkdir),
    "back": lambda _, admin: (admin / "gitdir").write_text("/elsewhere/.git\n"),
    "up": lambda _, admin: (admin / "commondir").write_text("../../..\n"),
    "objects": lambda _, admin: replace(admin.parents[1] / "objects",
                                        lambda at: at.symlink_to("aside")),
    "info": lambda _, admin: replace(admin.parents[1] / "objects" / "info",
                                     lambda at: at.symlink_to("aside")),
    "refs": lambda _, admin: replace(admin.parents[1] / "refs", lambda at: at.symlink_to("/etc")),
    "worktrees": lambda _, admin: replace(admin.parent, lambda at: at.symlink_to("aside")),
    "no repository": lambda _, admin: (admin.parents[1] / "HEAD").unlink(),
    "owner": lambda _, admin: os.chown(admin.parents[1], 12345, 12345),
}


@pytest.mark.parametrize("lie", LIES)
def test_no_repository_but_the_worktrees_own_is_believed(linked: tuple[Path, Path],
                                                         lie: str) -> None:
    tree, admin = linked
    (tree.parent / ".ssh").mkdir()
    git_in(tree.parent / "repo", "worktree", "add", "-q", "../b")
    assert sandbox.linked_admin(str(tree))[1]
    LIES[lie](tree, admin)
    assert sandbox.linked_admin(str(tree)) == ("", "")


def test_a_repository_with_an_engines_socket_is_not_mounted(
    linked: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, admin = linked
    (admin.parents[1] / "d.sock").touch()
    monkeypatch.chdir(tree)
    spec = sandbox.spec_of(sandbox.load_config())
    assert spec["git"]
    sandbox.check_mounts(spec)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{admin.parents[1]}/d.sock")
    with pytest.raises(sandbox.SandboxError, match="holds an engine's socket"):
        sandbox.check_mounts(spec)


# --- Authors and time ---

CONFIGS = {
    "plain": "[user]\n\tname = Ann Other\n\temail = ann@test\n",
    "quoted": '[user]\nname="Ann \\"#1\\" Other" # me\nemail = ann@test ; mine\n',
    "case": "[User] NAME = Ann\n[USER]\n  Email=ann@test\n",
    "roles": "[user]\nname = Ann\nemail = ann@test\n[author]\nname = Writer\n"
             "[committer]\nemail = commit@test\n",
    "include": "[user]\nname = Ann\nemail = first@test\n[include]\npath = more\n",
    "work": '[user]\nname = Ann\nemail = first@test\n[includeIf "gitdir:~/"]\npath = ~/more\n',
    "not here": '[user]\nname = Ann\nemail = a@test\n[includeIf "gitdir:/srv/"]\npath = ~/more\n',
    "circle": "[include]\npath = .gitconfig\n[user]\nname = Ann\nemail = ann@test\n",
    "unicode": "[user]\nname = Ånn Öther\nemail = ann@test\n[alias]\nx = !echo name = y\n",
}


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a repository in it."""
    for name in (*AUTHOR, "XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    git_in(tmp_path, "init", "-q", "repo")
    (tmp_path / "more").write_text("[user]\n\temail = more@test\n")
    return tmp_path


def said_by_git(person: Path, **env: str) -> dict[str, str]:
    """The variables, from what git itself says."""
    found = {}
    for role in ("AUTHOR", "COMMITTER"):
        ran = subprocess.run(["git", "var", f"GIT_{role}_IDENT"], cwd=person / "repo", text=True,
                             capture_output=True, check=True, env={**os.environ, **env})
        name, _, rest = ran.stdout.partition(" <")
        found[f"GIT_{role}_NAME"], found[f"GIT_{role}_EMAIL"] = name, rest.partition(">")[0]
    return found


def author(person: Path) -> dict[str, str]:
    return sandbox.git_author({"directory": str(person / "repo")})


@pytest.mark.parametrize("text", [text for name, text in CONFIGS.items() if name != "circle"],
                         ids=[name for name in CONFIGS if name != "circle"])
def test_the_author_is_who_git_says(person: Path, text: str) -> None:
    (person / ".gitconfig").write_text(text)
    assert author(person) == said_by_git(person)


def test_an_author_comes_from_all_places_that_git_knows(person: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    assert author(person) == {}
    other = person / ".config" / "git" / "config"
    other.parent.mkdir(parents=True)
    other.write_text("[user]\nname = Xdg\nemail = xdg@test\n")
    assert author(person) == said_by_git(person)
    (person / ".gitconfig").write_text("[user]\nname = Home\n")
    assert author(person) == said_by_git(person)
    (person / "global").write_text("[user]\nname = Global\nemail = global@test\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(person / "global"))
    assert author(person) == said_by_git(person)
    git_in(person / "repo", "config", "user.email", "project@test")
    assert author(person) == said_by_git(person)
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Variable")
    assert author(person) == said_by_git(person)
    assert author(person)["GIT_AUTHOR_EMAIL"] == "project@test"


def test_what_is_read_of_a_project_is_names_and_nothing_hangs(person: Path) -> None:
    (person / ".gitconfig").write_text(CONFIGS["circle"])
    config = person / "repo" / ".git" / "config"
    config.write_text(f"[include]\npath = {person}/more\n[user]\nname = \"a\x1b]0;x\"\n")
    assert author(person)["GIT_AUTHOR_EMAIL"] == "ann@test"
    assert "GIT_AUTHOR_NAME" not in author(person)
    config.unlink()
    os.mkfifo(config)
    assert author(person)["GIT_AUTHOR_NAME"] == "Ann"


@on_docker
def test_author_and_zone_come_along_and_the_persons_variables_win(engine: Engine, project: Path,
                                                                  name: str) -> None:
    config = project / "global"
    config.write_text("[user]\nname = Ann Other\nemail = ann@test\n")
    env = {"GIT_CONFIG_GLOBAL": str(config), "TZ": "Europe/Berlin"}
    show = ("-x", "env | grep -e ^GIT_ -e ^TZ= | sort")
    ran = engine.sandbox("run", "-n", name, *show, env=env)
    assert ran.stdout.splitlines() == [
        "GIT_AUTHOR_EMAIL=ann@test", "GIT_AUTHOR_NAME=Ann Other",
        "GIT_COMMITTER_EMAIL=ann@test", "GIT_COMMITTER_NAME=Ann Other", "TZ=Europe/Berlin"]
    own = ("-e", "GIT_AUTHOR_NAME=Bot", "-e", "TZ=Asia/Tokyo")
    ran = engine.sandbox("run", "-n", name, *own, *show, env=env)
    assert "GIT_AUTHOR_NAME=Bot" in ran.stdout and "TZ=Asia/Tokyo" in ran.stdout
    config.write_text("[user]\nname = New Name\n")
    ran = engine.sandbox("run", "-n", name, *show, env=env)
    assert "GIT_AUTHOR_NAME=New Name" in ran.stdout and "EMAIL" not in ran.stdout


@on_docker
def test_author_and_zone_come_along_in_the_web(engine: Engine, home: Path, project: Path,
                                               name: str) -> None:
    config = project / "global"
    config.write_text("[user]\nname = Ann Other\nemail = ann@test\n")
    service = Service(engine, env={"GIT_CONFIG_GLOBAL": str(config), "TZ": "Europe/Berlin"})
    try:
        made = service.post("/api/sessions", {"name": name, "directory": str(project)})
        assert made.status == 201, made.body
        job = service.job(name, "echo $GIT_AUTHOR_NAME $GIT_COMMITTER_EMAIL $TZ")
        service.ended(job)
        output = service.get(f"/api/sessions/{name}/jobs/{job['id']}/output").body
        assert output == b"Ann Other ann@test Europe/Berlin\n"
        with service.terminal(name) as screen:
            screen.type("echo $GIT_AUTHOR_NAME-$TZ\n")
            screen.expect("Ann Other-Europe/Berlin")
    finally:
        service.end()


@on_docker
def test_a_worktree_is_mounted_in_the_web(worktree: Worktree, git_image: list[str], name: str,
                                          ) -> None:
    service = Service(worktree.engine)
    try:
        made = service.post("/api/sessions", {"name": name, "directory": str(worktree.path)})
        assert made.status == 201, made.body
        assert made.json["recreate"] == []
        assert service.ended(service.job(name, "ls /run/sandbox-git/objects"))["exit"] == 0
        made = service.post(f"/api/sessions/{name}/recreate")
        assert made.json["recreate"] == [], made.body
        assert service.ended(service.job(name, "ls /run/sandbox-git/objects"))["exit"] == 0
    finally:
        service.end()


def test_the_zone_is_the_variables_or_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"/etc/localtime": "/usr/share/zoneinfo/America/New_York"}
    monkeypatch.setattr(os, "readlink", links.__getitem__)
    for value, zone in (("Asia/Tokyo", "Asia/Tokyo"), (":Asia/Tokyo", "Asia/Tokyo"),
                        ("CET-1CEST,M3.5.0,M10.5.0/3", "CET-1CEST,M3.5.0,M10.5.0/3"),
                        ("", "America/New_York")):
        monkeypatch.setenv("TZ", value)
        assert sandbox.host_zone() == {"TZ": zone}
    for value in ("/etc/localtime", "\x1b"):
        monkeypatch.setenv("TZ", value)
        assert sandbox.host_zone() == {}




def test_init_says_who_commits(person: Path, monkeypatch: pytest.MonkeyPatch,
                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SANDBOX_HOME", str(person / "home"))
    monkeypatch.chdir(person)
    assert sandbox.main(["init"]) == 0
    assert "commits in" not in capsys.readouterr().out
    (person / ".gitconfig").write_text(CONFIGS["plain"])
    assert sandbox.main(["init"]) == 0
    assert "commits in sessions are by Ann Other <ann@test>" in capsys.readouterr().out


# --- README ---


def test_the_recipes_for_an_ssh_agent(worktree: Worktree, git_image: list[str], name: str) -> None:
    """As the README has them, but for a push, which would need a server."""
    engine = worktree.engine
    folder = engine.directory()
    image = f"--in {git_image[1]} --iv {git_image[3]}"
    section = (ROOT / "README.md").read_text().partition("\n## Git\n")[2].partition("\n## ")[0]
    recipe = "\n".join(re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    recipe = recipe.replace("-n shop", f"-n {name} {image}")
    assert recipe.count("git push") == recipe.count("git commit") == 1
    recipe = recipe.replace("git push", "ssh-add -l").replace("git commit", "git commit -a")
    # podman keeps its images in the home directory
    script = f"""set -e
        home=$HOME HOME={folder}
        sandbox() {{ HOME=$home {PYTHON} {engine.area}/app "$@"; }}
        mkdir -m 700 ~/.ssh
        touch ~/.ssh/known_hosts
        ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519
        """ + recipe
    (worktree.path / "price").touch()
    worktree.host(worktree.path, "add", "price")
    env = {"SANDBOX_HOME": str(folder / ".sandbox"), **AUTHOR}
    ran = subprocess.run(["sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True,
                         text=True, **engine.where(cwd=worktree.path, env=env))
    for pid in re.findall(r"SSH_AGENT_PID=(\d+)", ran.stdout):
        os.kill(int(pid), signal.SIGTERM)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    public = (folder / ".ssh" / "id_ed25519.pub").read_text()
    assert " (ED25519)\n" in ran.stdout
    allowed = engine.directory() / "allowed"
    allowed.write_text(f"setup@test {public}")
    signed = ("-c", f"gpg.ssh.allowedSignersFile={allowed}", "log", "-1", "--format=%G? %an %s")
    assert worktree.host(worktree.path, *signed) == "G Setup Add a price\n"


@on_docker
def test_a_compiler_is_explained_and_pip_is_there(engine: Engine, git_image: list[str],
                                                  name: str) -> None:
    script = ("python3 -m venv venv && venv/bin/pip --version && make --version && printf "
              "'all:\n\tcc x.c\n' >Makefile; make; echo $?")
    ran = engine.sandbox("run", "-n", name, *git_image, "-x", f"cd /tmp; {script}")
    assert "pip " in ran.stdout and "GNU Make" in ran.stdout, ran.stderr
    assert "\n2\n" in ran.stdout and "this image has no cc\n" in ran.stderr
    (build,) = re.findall("sandbox (build .*), then", ran.stderr)
    args = sandbox.argparse_of("build", build.split()[1:])
    assert "build-essential" in ran.stderr
    assert "build-essential" in sandbox.tool_packages()[args.imageBuildArgs[0].partition("=")[2]]
