"""Turns on every engine: the snapshots around a run, a prompt and a job, and what is said of them.

The shadow itself is tested in test_shadow.py; here it runs as the product starts it. What could be
executed of a workspace would write a marker.
"""

import json
import os
import random
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE as TEST_IMAGE
from conftest import PYTHON, ROOT, Engine, Result, everywhere, on_docker, write_config
from service import Service, wait_for
from test_agents import (
    ENV_FILE,
    IMAGE,
    ONCE,
    SCREENS,
    START_SECONDS,
    image,
    write_stub_config,
)
from test_engines import sleeping

import sandbox
import sandbox_changes

__all__ = ["image"]  # a fixture

ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import sandbox, sandbox_changes
name, verb, request, writable = sys.argv[2:]
engine, session = sandbox.find_session(sandbox.engines_of(), name)
try:
    answer = sandbox_changes.ask_shadow(engine, session, verb, json.loads(request), writable == "1")
    if verb == "log":
        sandbox_changes.mark_overlaps(answer["turns"])
except sandbox.SandboxError as error:
    answer = {"error": error.message, "hint": error.hint}
print(json.dumps(answer))
"""


class Turns:
    """A session of the real image with a project, asked as its log, diff and undo would."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name, self.project = engine, name, engine.project
        image = TEST_IMAGE if engine.id == "kubernetes" else IMAGE  # where that has git
        engine.configure(imageName=image.partition(":")[0], network="none")

    def use_stub(self) -> None:
        """Agents have the stub of a model, and checkpoints are made as by default."""
        write_stub_config(self.engine, self.engine.home)
        config = json.loads((self.engine.home / "sandbox.json").read_text())
        del config["checkpoint"]
        (self.engine.home / "sandbox.json").write_text(json.dumps(config))

    def run(self, *args: str, **where: Any) -> Result:
        return self.engine.sandbox("run", "-n", self.name, *args, **where)

    def there(self, script: str) -> str:
        """What a script says of the directory, which may be a copy in the session."""
        done = self.engine.run("exec", self.name, "sh", "-c", f"cd {self.project} && {script}")
        return done.stdout

    def ask(self, verb: str, request: dict[str, Any] | None = None, writable: bool = False,
            **where: Any) -> Any:
        words = [self.name, verb, json.dumps(request or {}), str(int(writable))]
        app = str(self.engine.area / "app")
        done = subprocess.run([PYTHON, "-I", "-c", ASK, app, *words], text=True,
                              capture_output=True, **self.engine.where(**where))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def log(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = self.ask("log")["turns"]
        return turns

    def changed(self, turn: str) -> set[str]:
        return {row["path"] for row in self.ask("diff", {"turn": turn})["files"]}

    def ended(self, count: int = 1) -> list[dict[str, Any]]:
        """The log, as soon as so many turns have ended."""
        def log() -> list[dict[str, Any]]:
            turns = self.log()
            return turns if len([turn for turn in turns if turn.get("ended")]) >= count else []

        found: list[dict[str, Any]] = wait_for(log, 60)
        return found

    def containers(self) -> list[str]:
        """The containers of shadows that use our store."""
        listed = self.engine.run("ps", "-a", "--format", "{{.Names}}", "--filter",
                                 f"volume={self.store()}")
        return [name for name in listed.stdout.split() if name.startswith("sandbox-shadow-")]

    def store(self) -> str:
        home = self.engine.run("inspect", "--format", '{{index .Config.Labels "sandbox.home"}}',
                               self.name).stdout.strip()
        return home.replace("-home-", "-shadow-")

    def volumes(self) -> list[str]:
        return self.engine.run("volume", "ls", "-q").stdout.split()


@pytest.fixture
def turns(engine: Engine, image: str, home: Path, project: Path, name: str) -> Turns:
    return Turns(engine, name)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_what_is_asked_waits_for_no_reader(platform: str) -> None:
    """A pipe is full after 64 KiB, and after 8 for one who has many."""
    ask = (f"import os, sys; sys.platform = {platform!r}; import sandbox; "
           f"{platform!r} == 'linux' or delattr(os, 'memfd_create'); "
           "print(sandbox.Output(['wc', '-c'], stdin=bytes(1 << 20)).result())")
    done = subprocess.run([PYTHON, "-c", ask], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.stdout == f"(0, '{1 << 20}\\n', '')\n", done.stderr


# --- A turn ---


@everywhere
def test_a_turn_has_what_ran_in_it_and_undo_brings_it_back(turns: Turns) -> None:
    """Byte for byte and with modes; what belongs to the person belongs to the person again."""
    secret = turns.project / ".env"
    secret.write_text("KEY=1\n")
    secret.chmod(0o600)
    (turns.project / "gone").write_text("by the person\n")
    owner = turns.engine.uid
    for path in (secret, turns.project / "gone"):
        os.chown(path, owner, turns.engine.gid)
    sudo = "" if turns.engine.id == "kubernetes" else "sudo "  # the test image has none
    ran = turns.run("--checkpoint", "-x", "rm gone; echo KEY=2 >.env; chmod 644 .env; mkdir d; "
                    f"echo new >d/file; {sudo}sh -c 'echo root >root; chmod 600 root'")
    assert ran.returncode == 0, ran.stderr
    (turn,) = turns.log()
    assert turn["what"] == "command" and turn["command"].startswith("rm gone; ")
    assert turn["when"] < turn["ended"] and turn["after"]
    assert turns.changed(turn["id"]) == {"gone", ".env", "d/file", "root"}
    turns.there("echo mine >person")
    done = turns.ask("undo", writable=True)
    assert not done["left"], done
    assert turns.there("stat -c %a .env; cat .env; ls -A") == "600\nKEY=1\n.env\ngone\nperson\n"
    assert {path.stat().st_uid for path in (secret, turns.project / "gone")} == {owner}
    assert not turns.ask("redo", writable=True)["left"]
    assert turns.there("cat d/file") == "new\n"


def test_an_agents_run_is_a_turn(turns: Turns, agent: str = "c") -> None:
    turns.use_stub()
    told = turns.run("-y", agent, "--", "--version")
    assert told.returncode == 0 and turns.log() == [], told.stderr
    assert turns.store() not in turns.volumes() or not turns.log()
    prompt = "run: echo x >made && mkdir -p .git/hooks && echo x >.git/hooks/pre-commit\ntrue"
    ran = turns.run("--strict", "-y", agent, "--", *ONCE[agent].split(), prompt)
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert f"{turns.name} has changed .git/hooks/pre-commit: git runs it at a commit" in ran.stderr
    (turn,) = turns.log()
    assert turn["what"] == "agent" and {"made", ".git/hooks/pre-commit"} <= turns.changed(
        turn["id"])
    words = shlex.join([*ONCE[agent].split(), prompt.split("\n")[0]])
    assert turn["command"] == f"{sandbox.AGENTS[sandbox.SHORTCUTS[agent]].yolo[0]} {words}"
    assert not turns.containers()


@on_docker
@pytest.mark.parametrize("agent", ["gm", "cx", "oc"])
def test_every_agents_run_is_a_turn(turns: Turns, agent: str) -> None:
    test_an_agents_run_is_a_turn(turns, agent)


@pytest.mark.parametrize("words, wanted", [
    ("-y c", True), ("-y c -- --version", False), ("-y cx -- -V", False), ("-y gm -- -h", False),
    ("-y c -- -p hi", True), ("-y c -- -p --help me", True), ("-x claude --version", False),
    ("-x 'claude -p what does -v do'", True), ("-x make", False), ("--checkpoint -x make", True),
    ("--strict -x make", True), ("--no-checkpoint -y c", False), ("", False),
])
def test_which_commands_are_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str,
                                  wanted: bool) -> None:
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path))
    request = sandbox.RunRequest(sandbox.argparse_of("run", shlex.split(words)), look=False)
    command = sandbox.compose(request.base(), request.args.agent_args)
    session = sandbox.Session("none", "", {"sandbox.session": "0123456789"})
    turn = request.turn_of(sandbox.Docker(), session, command)
    assert bool(turn) == wanted
    if turn and "c" in words.split():
        assert turn.about["what"] == "agent"
        other = request.turn_of(sandbox.Docker(), session, ["sh", "-c", "make"])
        assert not other  # what the person says at the end of a run


@on_docker
def test_what_no_turn_is_takes_no_snapshot(turns: Turns) -> None:
    assert turns.run("-x", "echo x >file").returncode == 0
    assert turns.run("--no-checkpoint", "-y", "c", "--", "--help").returncode == 0
    assert turns.store() not in turns.volumes()
    refused = turns.run("--strict", "--no-checkpoint", "-x", "true")
    assert refused.returncode == 2 and "--no-checkpoint" in refused.stderr


@on_docker
def test_strict_passes_a_status_where_nothing_is_to_be_feared(turns: Turns) -> None:
    assert turns.run("--strict", "-x", "echo x >text; exit 7").returncode == 7
    again = turns.run("--strict", "-x", "echo x >'Make\nfile' >Makefile; printf '\\033' >.envrc")
    assert again.returncode == 3
    assert len([line for line in again.stderr.splitlines() if "has changed" in line]) == 2
    many = turns.run("--strict", "-x", "mkdir .vscode; for n in $(seq 99); do : >.vscode/$n; done")
    assert many.returncode == 3 and f"more: sandbox diff {turns.name} " in many.stderr
    assert len(many.stderr.splitlines()) < 25


@on_docker
def test_turns_at_once_are_marked(turns: Turns) -> None:
    turns.run("-x", "true")
    first = turns.engine.popen("run", "-n", turns.name, "--checkpoint", "-x",
                               "echo x >one; until [ -e two ]; do sleep 0.1; done; sleep 1")
    wait_for((turns.project / "one").exists)
    assert turns.run("--checkpoint", "-x", "echo x >two").returncode == 0
    assert first.wait(60) == 0
    one, two = turns.log()
    assert (one["beside"], two["beside"]) == ([two["id"]], [one["id"]])


# --- Who takes the last snapshot ---


def test_strict_does_not_pass_what_may_still_write(turns: Turns) -> None:
    left = turns.run("--strict", "-x", "setsid sleep 98764 </dev/null >/dev/null 2>&1 & "
                     "until pgrep -fx 'sleep 98764' >/dev/null; do sleep 0.1; done; echo done")
    assert (left.returncode, left.stdout) == (3, "done\n"), left.stderr
    assert "sleep 98764 runs on: what it changes from now on is in no turn" in left.stderr
    assert turns.run("--strict", "-x", "true").returncode == 0  # the next turn has not started it


@pytest.mark.parametrize("how", ["detached", "left", "killed"])
def test_a_turn_ends_when_its_program_does_whoever_is_there(turns: Turns, how: str) -> None:
    wait = "until [ -e go ]; do sleep 0.1; done; echo x >made"
    turns.run("-x", "true")
    if how == "left":
        with turns.engine.pty("run", "-n", turns.name, "--checkpoint", "-x",
                              f"echo begun; {wait}") as terminal:
            terminal.expect("begun")  # the client reads keys by now
            terminal.send("\x1cd")
            assert terminal.wait() == 0
    elif how == "killed":
        client = turns.engine.popen("run", "-n", turns.name, "--checkpoint", "-x",
                                    f"echo x >began; {wait}")
        wait_for(lambda: turns.there("cat began"))
        client.kill()
        client.wait()
    else:
        left = turns.run("-d", "--checkpoint", "-x", wait)
        assert left.returncode == 0, left.stderr
    assert not turns.log()[0].get("ended")
    turns.there("touch go")
    (turn,) = turns.ended()
    assert "made" in turns.changed(turn["id"])
    turns.there("echo by the person >later")
    turns.ask("snapshot")
    assert "later" not in turns.changed(turn["id"])


def test_a_turn_does_not_last_as_long_as_what_its_program_left(turns: Turns) -> None:
    left = turns.run("-d", "--checkpoint", "-x",
                     "setsid sh -c 'echo x >made; exec sleep 98763' </dev/null >/dev/null 2>&1 & "
                     "until pgrep -fx 'sleep 98763' >/dev/null; do sleep 0.1; done")
    assert left.returncode == 0, left.stderr
    (turn,) = turns.ended()
    assert turns.changed(turn["id"]) == {"made"}
    assert sleeping(turns.engine, turns.name, "98763") == 1


@on_docker
def test_who_comes_back_is_told_what_may_be_executed(turns: Turns) -> None:
    script = "echo begun; until [ -e go ]; do sleep 0.1; done; echo evil >>.envrc; exit 4"
    assert turns.run("-d", "--checkpoint", "-x", script).returncode == 0
    with turns.engine.pty("attach", turns.name, cols=200) as attached:
        attached.expect("begun")
        (turns.project / "go").touch()
        attached.expect("has ended with status 4")
        attached.expect(f"{turns.name} has changed .envrc: ")
        assert attached.wait() == 4
    assert turns.run("-d", "-x", "true").returncode == 0  # which is no turn
    plain = turns.engine.sandbox("attach", turns.name)
    assert plain.returncode == 0 and len(plain.stderr.splitlines()) == 1, plain


@everywhere
def test_a_job_takes_its_snapshots_though_the_server_is_killed(turns: Turns, service: Service,
                                                               ) -> None:
    config = json.loads((turns.engine.home / "sandbox.json").read_text()) | {
        "checkpoint": True, "agentPromptCommand": "sh -c {prompt}"}
    (turns.engine.home / "sandbox.json").write_text(json.dumps(config))
    service.create(turns.name)
    prompt = "until [ -e go ]; do sleep 0.1; done; echo x >Makefile\necho second line"
    job = service.post(f"/api/sessions/{turns.name}/prompt", {"prompt": prompt}).json
    assert "changes" not in job
    wait_for(lambda: [turn for turn in turns.log() if turn["id"] == job["id"]], 60)
    service.restart_after_kill()
    turns.there("touch go")
    path = f"/api/sessions/{turns.name}/jobs/{job['id']}"
    ended = wait_for(lambda: (now := service.get(path).json)["state"] == "ended" and now, 60)
    assert ended["exit"] == 0
    assert ended["changes"]["turn"] == job["id"] and ended["changes"]["files"] == 2
    assert ended["changes"]["risks"] == [{"path": "Makefile", "risk": ["a build runs it"]}]
    turn = turns.log()[-1]
    assert (turn["what"], turn["command"]) == ("prompt", prompt.split("\n")[0])


@on_docker
def test_a_prompt_of_one_long_line_is_a_turn(turns: Turns, service: Service) -> None:
    """What is kept of it is a title: a request and a variable hold only so much."""
    write_config(turns.engine.home, imageName=IMAGE.partition(":")[0], network="none",
                 checkpoint=True, agentPromptCommand="sh -c {prompt}")
    service.create(turns.name)
    prompt = f"echo x >made; true {'日本' * 11_000}"
    job = service.post(f"/api/sessions/{turns.name}/prompt", {"prompt": prompt}).json
    assert service.ended(job)["exit"] == 0
    (turn,) = turns.log()
    assert turn["command"] == prompt[:200] and turns.changed(turn["id"]) == {"made"}


@on_docker
def test_an_agents_terminal_in_the_browser_is_a_turn(turns: Turns, service: Service) -> None:
    turns.use_stub()
    service.create(turns.name, agent="claude")
    with service.terminal(turns.name, "run=agent") as terminal:
        wait_for(lambda: turns.log(), 60)
        (turn,) = turns.log()
        assert (turn["what"], turn.get("ended")) == ("agent", None)
        (turns.project / "made").write_text("meanwhile")
        terminal.expect(SCREENS["c"][0], START_SECONDS)  # it has begun
    service.restart_after_kill()
    assert turns.run("--no-checkpoint", "-x", "pkill -x claude; pkill -f claude-code").stderr == ""
    (turn,) = turns.ended()
    assert "made" in turns.changed(turn["id"])


# --- Where no snapshot can be taken ---


@on_docker
def test_an_image_without_git_starts_no_turn(turns: Turns) -> None:
    write_config(turns.engine.home, checkpoint=True)
    refused = turns.run("-x", "echo x >made")
    assert refused.returncode == 125 and not (turns.project / "made").exists()
    assert f"{TEST_IMAGE} has no python3 or no git" in refused.stderr
    assert "--no-checkpoint" in refused.stderr
    assert turns.run("--no-checkpoint", "-x", "echo x >made").returncode == 0
    write_config(turns.engine.home, checkpoint="try", command="agent-c >tried || true")
    tried = turns.run()
    assert tried.returncode == 0 and (turns.project / "tried").exists()
    assert tried.stderr.count("no snapshot could be taken") == 1


def test_a_damaged_store_and_a_workspace_that_is_gone_are_said(turns: Turns) -> None:
    assert turns.run("--checkpoint", "-x", "echo x >made").returncode == 0
    where = ["--rm", "-v", f"{turns.store()}:/store", "--entrypoint", "sh", IMAGE, "-c"]
    spoilt = turns.engine.run("run", *where, "for f in /store/git/objects/pack/*.pack; "
                              "do echo spoilt >$f; done")
    assert spoilt.returncode == 0, spoilt.stderr
    refused = turns.run("--checkpoint", "-x", "echo x >again")
    assert refused.returncode == 125 and "the store of snapshots is damaged" in refused.stderr
    assert not (turns.project / "again").exists() and len(refused.stderr.splitlines()) == 2
    aside = turns.project.rename(turns.project.with_name(f"{turns.project.name}-gone"))
    gone = turns.ask("log", cwd="/")
    aside.rename(turns.project)
    assert f"{turns.project} is gone" in gone["error"]


def test_a_directory_that_was_turned_is_not_written(turns: Turns) -> None:
    """Where a link leads elsewhere by now nothing is restored there, as root it could be."""
    assert turns.run("--checkpoint", "-x", "echo x >made").returncode == 0
    victim = turns.engine.directory()
    aside = turns.project.rename(turns.project.with_name(f"{turns.project.name}-aside"))
    turns.project.symlink_to(victim)
    refused = turns.ask("undo", writable=True)
    turns.project.unlink()
    aside.rename(turns.project)
    assert "leads to another place" in refused["error"] and not list(victim.iterdir())


@on_docker
def test_killed_at_any_moment_nothing_is_lost(turns: Turns) -> None:
    """kill -9 of the client, or of the container of a snapshot: the tree stays, the store opens."""
    chance = random.Random(11)
    for number in range(400):
        (turns.project / f"file{number}").write_text(f"{number}\n" * number)
    assert turns.run("--checkpoint", "-x", "true").returncode == 0
    for number in range(10):
        client = turns.engine.popen("run", "-n", turns.name, "--checkpoint", "-x",
                                    f"echo {number} >number")
        time.sleep(chance.random() * 0.8)
        if number % 2:
            client.kill()
        else:
            for container in turns.containers():
                turns.engine.run("kill", container)
        client.wait(60)
    assert isinstance(turns.ask("snapshot").get("tree"), str)
    wait_for(lambda: not turns.containers(), 60)
    before = {path.name: path.read_bytes() for path in turns.project.iterdir()}
    assert turns.run("--checkpoint", "-x", "rm file*").returncode == 0
    assert not turns.ask("undo", writable=True)["left"]
    assert {path.name: path.read_bytes() for path in turns.project.iterdir()} == before


def test_ctrl_c_leaves_no_container(turns: Turns) -> None:
    """Also of a snapshot that would never come: somebody holds the lock of the store."""
    assert turns.run("--checkpoint", "-x", "true").returncode == 0
    holder = f"{turns.name}-lock"
    script = "exec 9>/store/lock; flock 9; echo locked; exec sleep 600"
    turns.engine.run("run", "-d", "--name", holder, "-v", f"{turns.store()}:/store", "--entrypoint",
                     "sh", IMAGE, "-c", script)
    try:
        wait_for(lambda: "locked" in turns.engine.run("logs", holder).stdout)
        client = turns.engine.popen("run", "-n", turns.name, "--checkpoint", "-x", "echo x >made")
        assert client.stderr
        assert client.stderr.readline() == (
            f"sandbox: taking a snapshot of {turns.project}: Ctrl-C ends it, "
            "--no-checkpoint goes without\n")
        wait_for(turns.containers)
        client.send_signal(signal.SIGINT)
        assert client.wait(60) == 130
        assert not turns.containers() and not (turns.project / "made").exists()
    finally:
        turns.engine.run("rm", "-f", holder)


@on_docker
def test_an_agents_terminal_that_is_not_held_is_a_turn(turns: Turns, service: Service) -> None:
    """Nor the next one, of which that is known before."""
    turns.use_stub()
    service.create(turns.name, agent="claude")
    turns.engine.run("exec", turns.name, "sh", "-c", "rm $(command -v python3)")
    with service.terminal(turns.name, "run=agent") as first:
        first.expect("this terminal ends with its server")
        with service.terminal(turns.name, "run=agent"):
            wait_for(lambda: len(turns.log()) == 2, 60)


# --- What is hostile ---


@on_docker
def test_nothing_of_a_workspace_is_executed(turns: Turns) -> None:
    """On the host no git runs, and what runs where the snapshots are taken obeys nothing there."""
    marker = "/run/sandbox-work/../sandbox-store/marker"
    hostile = f"touch {marker} marker /tmp/marker-{turns.name}"
    config = (f"[core]\n\tfsmonitor = {hostile}\n\thooksPath = .\n"
              f"[filter \"x\"]\n\tclean = {hostile}\n\tsmudge = {hostile}\n\tprocess = {hostile}\n"
              f"[diff \"x\"]\n\ttextconv = {hostile}\n\tcommand = {hostile}\n"
              f"[merge \"x\"]\n\tdriver = {hostile}\n")
    script = (f"git init -q . && printf %s {shlex.quote(config)} >>.git/config && "
              f"printf '#!/bin/sh\\n{hostile}\\n' >.git/hooks/post-index-change && "
              "chmod +x .git/hooks/* && cp -R .git nested.git && mkdir nested && "
              "cp -R .git nested && echo '* filter=x diff=x merge=x' >.gitattributes && "
              "mkfifo fifo && ln -s / root && echo text >file")
    assert turns.run("--checkpoint", "-x", script).returncode == 0
    (turn,) = turns.log()
    assert turns.ask("diff", {"turn": turn["id"], "patch": True})["files"]
    left = [row["path"] for verb in ("undo", "redo") for row in turns.ask(
        verb, writable=True)["left"]]
    assert {path.split("/")[0] for path in left} <= {".git", "nested", "nested.git", "fifo"}
    assert (turns.project / "file").exists()
    assert not (turns.project / "marker").exists()
    assert not Path(f"/tmp/marker-{turns.name}").exists()
    found = turns.engine.run("run", "--rm", "-v", f"{turns.store()}:/store", "--entrypoint", "find",
                             IMAGE, "/store", "-name", "marker")
    assert (found.returncode, found.stdout) == (0, "")


@on_docker
def test_the_shadow_may_do_little(turns: Turns) -> None:
    """Its container is closed: what it may read and write is the directory and its own store."""
    turns.run("-x", "true")
    session = sandbox.Session(turns.name, "running", json.loads(turns.engine.run(
        "inspect", "--format", "{{json .Config.Labels}}", turns.name).stdout))
    argv = sandbox_changes.shadow_argv(sandbox.Docker(), session, f"{turns.name}-x", "log", False)
    at = argv.index("--entrypoint")
    probe = ("id -u; grep CapEff /proc/self/status; grep NoNewPrivs /proc/self/status; "
             "ls /sys/class/net; touch /etc/x /run/sandbox-work/x; env | cut -d= -f1 | sort")
    told = turns.engine.run(*argv[1:at], "--entrypoint", "sh", IMAGE, "-c", probe)
    assert told.stdout, told.stderr
    uid, caps, privileges, network, *env = told.stdout.split("\n")
    assert (uid, int(caps.split()[1], 16), privileges.split()[1]) == ("0", 1 << 1, "1")
    assert network == "lo" and told.stderr.count("Read-only file system") == 2
    assert not {name for name in env if name.startswith(("SANDBOX", "ANTHROPIC", "HTTP"))}
    assert ENV_FILE.split("=")[0].split()[1] not in env


@pytest.mark.parametrize("hooks", [True, False], ids=["a folder of hooks", "none"])
def test_protected_parts_of_git_can_only_be_read(turns: Turns, hooks: bool) -> None:
    git = turns.project / ".git"
    path = {"PATH": os.environ["PATH"]}
    subprocess.run(["git", "init", "-q", turns.project], check=True, env=path)
    if not hooks:
        subprocess.run(["rm", "-r", git / "hooks"], check=True)
    subprocess.run(["chown", "-R", f"{turns.engine.uid}:{turns.engine.gid}", git], check=True)
    config = json.loads((turns.engine.home / "sandbox.json").read_text())
    (turns.engine.home / "sandbox.json").write_text(
        json.dumps(config | {"protect": ["hooks", "config"]}))
    before = (git / "config").read_bytes()
    tried = turns.run("-x", "git config x.y z; echo x >.git/hooks/pre-commit; "
                      "python3 -c 'import os; os.rename(\".git\", \"moved\")'; "
                      "sudo rm -rf .git/hooks; echo x >f; git add f; "
                      "git -c user.name=a -c user.email=b commit -qm message; git log --oneline")
    assert "message" in tried.stdout, tried.stderr
    assert (git / "config").read_bytes() == before and (git / "hooks").is_dir()
    assert not (git / "hooks" / "pre-commit").exists() and not (turns.project / "moved").exists()
    assert turns.engine.sandbox("stop", turns.name).returncode == 0
    again = turns.run("-x", "true", cwd=turns.engine.directory())
    assert again.returncode == 0 and "differs" not in again.stderr, again.stderr  # it starts again
    subprocess.run(["rm", "-r", git], check=True)
    bare = turns.engine.sandbox("run", "-n", f"{turns.name}-bare", "-x", "true")
    assert (bare.returncode, "nothing is protected" in bare.stderr) == (0, True)


@on_docker
def test_a_turn_without_snapshots_does_not_start_unasked(turns: Turns) -> None:
    """What a session that was not made from here would change, nobody could say."""
    engine, theirs = turns.engine, f"{turns.name}-theirs"
    assert turns.run("-x", "true").returncode == 0
    engine.run("rename", turns.name, theirs)
    turns.name = theirs
    for option in ("--strict", "--checkpoint"):
        refused = turns.run(option, "-x", "touch made")
        assert refused.returncode == 125 and "--no-checkpoint" in refused.stderr, refused
    assert not (turns.project / "made").exists()
    assert turns.run("-x", "true").returncode == 0
    config = json.loads((engine.home / "sandbox.json").read_text())
    (engine.home / "sandbox.json").write_text(json.dumps(config | {"checkpoint": "try"}))
    assert turns.run("-x", "touch made").returncode == 0
    assert (turns.project / "made").exists()


@on_docker
def test_git_is_led_to_no_other_configuration(turns: Turns) -> None:
    """By the files that take the place of a protected configuration: the host's git runs."""
    git, marker = turns.project / ".git", turns.engine.area / "marker"
    path = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    as_owner = {"user": turns.engine.uid, "group": turns.engine.gid, "env": path}
    subprocess.run(["git", "init", "-q", turns.project], check=True, env=path)
    subprocess.run(["git", "config", "-f", git / "config", "extensions.worktreeConfig", "true"],
                   check=True, env=path)
    subprocess.run(["chown", "-R", f"{turns.engine.uid}:{turns.engine.gid}", git], check=True)
    write_config(turns.engine.home, imageName=IMAGE.partition(":")[0], network="none",
                 protect=["hooks", "config"])
    evil = f'[core]\n\trepositoryformatversion = 0\n\tfsmonitor = "touch {marker}; false"\n'
    tried = turns.run("-x", "mkdir -p evil/objects evil/refs && cp .git/HEAD evil/ && "
                      f"printf %s {shlex.quote(evil)} >evil/config; sudo rm -f .git/commondir; "
                      "sudo cp evil/config .git/config.worktree; echo ../evil >.git/commondir; "
                      "git config --worktree x.y z; git status --short")
    assert "evil/" in tried.stdout, tried
    status = subprocess.run(["git", "-C", turns.project, "status", "--short"], text=True,
                            capture_output=True, **as_owner)  # type: ignore[call-overload]
    assert (status.stdout, status.stderr) == ("?? evil/\n", "") and not marker.exists()
    assert turns.engine.sandbox("recreate", turns.name).returncode == 0
    (git / "commondir").write_text("../evil\n")
    refused = turns.engine.sandbox("recreate", turns.name)
    assert refused.returncode and "leads git to another repository" in refused.stderr, refused


# --- The store's life ---


def test_the_store_goes_with_its_session_and_not_before(turns: Turns, name: str) -> None:
    engine = turns.engine
    assert turns.run("--checkpoint", "-x", "echo x >made").returncode == 0
    store = turns.store()
    assert store in turns.volumes()
    assert engine.sandbox("recreate", name, "--memory", "1g").returncode == 0
    assert turns.store() == store and len(turns.log()) == 1
    turns.name = f"{name}-new"
    assert engine.sandbox("rename", name, turns.name).returncode == 0
    assert turns.run("--checkpoint", "-x", "echo x >again").returncode == 0
    assert len(turns.log()) == 2
    other = Turns(engine, f"{name}-other")
    made = engine.sandbox("run", "--from", turns.name, "-n", other.name, "-x", "true")
    assert made.returncode == 0 and other.store() not in other.volumes(), made.stderr
    dry = engine.sandbox("prune", "--dry-run").stdout
    assert store not in dry
    for one in (turns, other):
        assert engine.sandbox("rm", one.name).returncode == 0
    assert store not in turns.volumes()
    stray = "sandbox-shadow-0123456789"
    engine.run("volume", "create", stray)
    assert stray in engine.sandbox("prune").stdout.split() and stray not in turns.volumes()


@on_docker
def test_only_so_many_turns_are_kept(turns: Turns) -> None:
    config = json.loads((turns.engine.home / "sandbox.json").read_text())
    (turns.engine.home / "sandbox.json").write_text(
        json.dumps(config | {"checkpoint": {"keep": 2, "maxBytes": "1m"}}))
    for number in range(4):
        assert turns.run("--checkpoint", "-x", f"echo x >made{number}").returncode == 0
    assert [turn["command"] for turn in turns.log()] == ["echo x >made2", "echo x >made3"]


@on_docker
@pytest.mark.parametrize("wrong", ["yes", {}, {"keep": 0}, {"maxBytes": "2x"}, {"kept": 1}, []])
def test_a_wrong_checkpoint_is_refused(engine: Engine, home: Path, wrong: object) -> None:
    write_config(home, checkpoint=wrong)
    refused = engine.sandbox("config", "show")
    assert refused.returncode == 1 and "checkpoint: " in refused.stderr
