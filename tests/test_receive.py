"""What makes a mirror on a host, and what brings a merge back from there, without an engine: the
container is a process of this machine, and its mirror a directory.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from service import wait_for

import sandbox
import sandbox_hosts
import sandbox_kube
import sandbox_travel
from sandbox import SandboxError
from sandbox_travel import MIRROR_DIRECTORY, Helper

RECEIVE = ROOT / "static" / "session" / "receive.py"


class Far:
    """A directory, and what stands for a host: it is told a command, or nothing but a lie."""

    host, name = "big", "docker"

    def __init__(self, area: Path) -> None:
        self.area, self.lie = area, ["true"]
        self.top, self.mirror = area / "work", area / "mirror"
        for folder in (self.top, self.mirror):
            folder.mkdir()
        spec = {"directory": str(self.top), "sources": [str(self.top)], "image": "none"}
        self.session: Any = SimpleNamespace(
            created=lambda: (spec, {}), user=f"{os.getuid()}:{os.getgid()}", store="store",
            name="far", copy="copy", id="id", labels={})
        self.engine: Any = self

    def closed_argv(self, _name: str, _image: str, words: Sequence[str], **_: object) -> list[str]:
        given = words.index(MIRROR_DIRECTORY) + 3
        known = [str(self.mirror) if word == MIRROR_DIRECTORY else word for word in words[:given]]
        return [*known, *(words[given:] if self.lie == [] else self.lie)]

    def argv(self, *_: str) -> list[str]:
        return ["true"]

    def client_there(self) -> list[str]:
        return []

    def failure(self, text: str) -> SandboxError:
        return SandboxError(text)

    def send(self) -> None:
        for path in [self.top, *self.top.rglob("*")]:  # else nothing of it is sure to be unchanged
            if not path.is_symlink():
                os.utime(path, ns=(10**18, 10**18))
        with Helper(self.engine, self.session, []) as helper:
            assert helper.output() == b""

    def merge(self, *rows: Mapping[str, Any], contents: bytes = b"") -> dict[str, Any]:
        """Of what the host says has changed."""
        answer = {"dry": True, "turns": [], "changed": [*rows], "left": []}
        (self.area / "lie").write_bytes(json.dumps(answer).encode() + b"\n" + contents)
        self.lie = ["sh", "-c", 'cd "$0"; cat >asked; exec cat lie', str(self.area)]
        return sandbox_travel.merge(self.engine, self.session, {}, False)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Far:
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path / "kept"))
    return Far(tmp_path)


# --- Mirrors ---


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing counts as just written."""
    monkeypatch.setattr(sandbox_travel, "RACY_NS", -10**18)


@pytest.mark.usefixtures("settled")
def test_a_directory_that_becomes_a_link_takes_nothing_along(far: Far) -> None:
    """`mv current v1; ln -s v1 current`, which releases do."""
    for name in ("a", "b"):
        (far.top / "current" / "inner").mkdir(parents=True, exist_ok=True)
        (far.top / "current" / "inner" / name).write_text(name)
    far.send()
    (far.top / "current").rename(far.top / "v1")
    (far.top / "current").symlink_to("v1")
    far.send()
    mirrored = far.mirror / "from"
    assert os.readlink(mirrored / "current") == "v1"
    assert (mirrored / "v1" / "inner" / "a").read_text() == "a"
    assert (mirrored / "v1" / "inner" / "b").read_text() == "b"


@pytest.mark.usefixtures("settled")
def test_a_link_out_of_the_mirror_reaches_nothing(far: Far) -> None:
    store = far.area / "store"
    (far.top / "folder").mkdir()
    store.mkdir()
    for folder in (far.top / "folder", store):
        (folder / "state.json").write_text("{}")
    far.send()
    (far.top / "folder" / "state.json").unlink()
    (far.top / "folder").rmdir()
    (far.top / "folder").symlink_to(store)
    far.send()
    assert (store / "state.json").exists()
    assert os.readlink(far.mirror / "from" / "folder") == str(store)


@pytest.mark.parametrize("row, fails", [
    (["-", "from/way/file"], False), (["-", "from/way/inner"], False),
    (["f", "from/way/file", "w", 0o644, 1], True),
    (["l", "from/way/file", "w", 0o777, 1, "x"], True),
    (["d", "from/way", "w", 0o777, 1], True), (["d", "from/way/inner", "w", 0o777, 1], True)])
def test_no_row_goes_through_a_link(far: Far, row: list[Any], fails: bool) -> None:
    """Whatever order of rows a directory that changes meanwhile makes."""
    outside = far.area / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "file").write_text("kept")
    outside.chmod(0o700)
    (outside / "inner").chmod(0o700)
    rows = [["d", "from", "w", 0o755, 1], ["l", "from/way", "w", 0o777, 1, str(outside)], row]
    content = bytes(16) if row[0] == "f" else b""  # none of it, and a size of 0
    given = b"".join(json.dumps(row).encode() + b"\n" for row in rows) + content + b'["end"]\n'
    done = subprocess.run([sys.executable, "-I", "-S", str(RECEIVE), str(far.mirror),
                           *far.session.user.split(":"), "true"],
                          input=given, capture_output=True, timeout=60)
    assert done.returncode == fails, done.stderr
    assert not fails or b"from/way" in done.stderr and b"Traceback" not in done.stderr
    assert (outside / "file").read_text() == "kept" and not (outside / "file").is_symlink()
    assert [path.stat().st_mode & 0o777 for path in (outside, outside / "inner")] == [0o700] * 2


# --- The client of a host ---


def test_a_helper_is_called_by_the_client_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By that of the socket in the address, with the same words, whatever login shell reads them.
    """
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@big:22/run/my.sock")
    engine = sandbox.Docker()
    assert engine.client_there() == ["docker", "--host", "unix:///run/my.sock"]
    words = ["run", "a\nb", "it's", '"$HOME"', "`x` \\ !", ""]
    argv = sandbox_travel.near(engine, ["docker", *words])
    assert argv[0] == "ssh" and argv[-2] == "ssh://me@big:22"
    monkeypatch.setattr(engine, "client_there", lambda: ["printf", "%s\\0"])
    given = sandbox_travel.near(engine, ["docker", *words])[-1]
    for shell in ("sh", "bash"):
        said = subprocess.run([shell, "-c", given], capture_output=True, timeout=60, check=True)
        assert said.stdout.decode().split("\0")[:-1] == words
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    assert sandbox_travel.near(sandbox.Docker(), ["docker", "run"]) == ["docker", "run"]


def test_ciphers_stay_those_that_the_person_allows(tmp_path: Path) -> None:
    config = tmp_path / "config"
    for chosen, first in (("", True), ("Ciphers aes256-ctr,aes128-gcm@openssh.com", True),
                          ("Ciphers aes256-ctr", False)):
        config.write_text(f"Host *\n {chosen}\n")
        words = ["-F", str(config), "big"]
        argv = ["ssh", "-G", *sandbox_travel.first_cipher(words), *words]
        said = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
        (line,) = [line for line in said.splitlines() if line.startswith("ciphers ")]
        assert ("ciphers aes128-gcm" in line, "chacha" in line) == (first, not chosen)


# --- What comes back ---


def changed(path: str, kind: str, mode: int = 0o644, size: int = 0, status: str = "added",
            ) -> dict[str, Any]:
    return {"path": path, "kind": kind, "mode": mode, "size": size, "status": status, "risk": []}


@pytest.mark.parametrize("lacks", [False, True])
def test_a_mode_comes_back(far: Far, monkeypatch: pytest.MonkeyPatch, lacks: bool) -> None:
    """Also to a machine that has no O_PATH, as a Mac."""
    if lacks:
        monkeypatch.delattr(os, "O_PATH")
        monkeypatch.setattr(os, "chmod", without_proc(os.chmod))
    (far.top / "tool").write_text("same")
    (far.top / "folder").mkdir(mode=0o755)
    rows = [changed("tool", "file", 0o755, 4, "mode"), changed("folder", "dir", 0o700, 0, "mode"),
            changed("new", "file", 0o755, 4)]
    answer = far.merge(*rows, contents=b"samenew\n")
    assert answer["left"] == [] and len(answer["changed"]) == 3
    assert (far.top / "tool").stat().st_mode & 0o777 == 0o755
    assert (far.top / "folder").stat().st_mode & 0o777 == 0o700
    assert (far.top / "new").read_text() == "new\n"


def without_proc(chmod: Callable[..., None]) -> Callable[..., None]:
    def changes(path: int | str, *words: Any, **more: Any) -> None:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(2, "there is no /proc", path)
        chmod(path, *words, **more)

    return changes


@pytest.mark.parametrize("target", [b"", b"nul\0", b"x" * 4096, b"x" * 50_000])
def test_a_link_that_cannot_be_stays_away_alone(far: Far, target: bytes) -> None:
    answer = far.merge(changed("way", "link", 0o777, len(target)), changed("good", "file", size=4),
                       contents=target + b"good")
    assert [(row["path"], row["why"]) for row in answer["left"]] == [
        ("way", "it is a link that cannot be")]
    assert [path.name for path in far.top.iterdir()] == ["good"]


def test_the_last_word_of_a_host_counts(far: Far) -> None:
    """It may name a path twice."""
    answer = far.merge(changed("way", "link", 0o777, 4), changed("way", "link", 0o777, 4),
                       contents=b"goodnul\0")
    assert [row["path"] for row in answer["left"]] == ["way"] and not os.listdir(far.top)


def test_the_mode_of_the_directory_itself_stays_quietly(far: Far) -> None:
    far.top.chmod(0o750)
    answer = far.merge(changed("", "dir", 0o777, 0, "mode"), changed("new", "file"))
    assert answer["left"] == [] and [row["path"] for row in answer["changed"]] == ["new"]
    assert far.top.stat().st_mode & 0o777 == 0o750


def test_what_is_left_is_told_to_the_host(far: Far) -> None:
    """It would note a mode as come, for some modes never come as they are."""
    far.merge(changed("nul\0", "file", 0o755, 0, "mode"))
    asked = (far.area / "asked").read_bytes().split(b"\n")[-1]
    assert b'"elsewhere": true' in asked and b'"lost": ["nul\\u0000"]' in asked


# --- Hosts without an end ---


@pytest.fixture
def brief(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience ends soon with a host that is silent, and with another one not before it speaks."""
    if "did nothing" in said:
        monkeypatch.setattr(sandbox_travel, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(sandbox_travel, "LOOK_MS", 50)
    monkeypatch.setattr(sandbox_travel, "ERROR_BYTES", 1 << 20)


FIRST = "import os, sys, time; said = os.fdopen(1, 'wb', 0).write; "
NOTHING = r"said(b'10\nx\x9c\xab\xae\x05\x00\x01u\x00\xf9'); "  # is in the mirror


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("program, said", [
    ("time.sleep(600)", "it did nothing for"),  # never reads, and says nothing
    (NOTHING + "time.sleep(600)", "it did nothing for"),
    (NOTHING + "sys.stdin.read(); time.sleep(600)", "it did nothing for"),
    (NOTHING + "sys.stdin.read(); said(b'{'); time.sleep(600)", "it did nothing for"),
    (r"said(b'-1\n'); said(bytes(1 << 20)); time.sleep(600)", "ended with status 137"),
    ("\nwhile True: os.write(2, bytes(65536))", "it prints too much")])
def test_a_silent_or_endless_host_is_left(far: Far, monkeypatch: pytest.MonkeyPatch, program: str,
                                          said: str) -> None:
    """As where the connection is cut."""
    monkeypatch.setattr(Helper.ended, "__defaults__", (0.5,))
    (far.top / "large").write_bytes(os.urandom(3 << 20))
    monkeypatch.setattr(far, "closed_argv",
                        lambda *_, **__: [sys.executable, "-I", "-S", "-c", FIRST + program])
    began = time.monotonic()
    with pytest.raises(SandboxError) as raised, Helper(far.engine, far.session, []) as helper:
        helper.back.readline(1 << 20)
    assert time.monotonic() - began < 300
    assert raised.value.code == 125 and said in raised.value.message


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("command, said", [
    ("exec sleep 600", "did nothing"), ("echo x; exec sleep 600", "did nothing"),
    ("exec cat /dev/zero >&2", "prints too much")])
def test_a_bundle_that_never_ends(far: Far, command: str, said: str) -> None:
    began = time.monotonic()
    status, text = sandbox_travel.fetch_commits(["sh", "-c", command], str(far.top), "work")
    assert (status, said in text) == (125, True), text
    assert time.monotonic() - began < 300


def test_an_answer_that_never_ends(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a list, and of whatever else is asked without a bound of its own."""
    endless = ["cat", "/dev/zero"]
    monkeypatch.setattr(sandbox, "ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(sandbox_hosts, "engine_on", lambda *_: far)
    monkeypatch.setattr(sandbox, "containers_argv", lambda _: endless)
    monkeypatch.setattr(sandbox, "engines_here", lambda _: [])
    monkeypatch.setattr(sandbox, "list_containers", lambda _: (sandbox.Docker(), []))
    config: Any = SimpleNamespace(get=lambda _: {"big": {}}, given=lambda _: None, image="none")
    assert sandbox_hosts.list_everywhere(config, sandbox.session_rows, None) == (
        [], {"big": "big did not answer: it answers nonsense"})
    monkeypatch.setattr(far, "closed_argv", lambda *_, **__: endless)
    monkeypatch.setattr(far, "exec_argv", lambda *_, **__: endless, raising=False)
    monkeypatch.setattr(far, "diagnose", lambda _: "", raising=False)
    with pytest.raises(SandboxError):
        sandbox_hosts.owner_there(far.engine, config, "/srv")
    sandbox_hosts.check_cut(far.engine, far.session, "tag")
    assert sandbox.first_answer([far.engine], lambda _: sandbox.Output(endless))[1] == 137


def test_a_list_waits_for_no_dead_host(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked aside, later and later; when it answers again the list is whole."""
    fifo = far.area / "answers"
    os.mkfifo(fifo)
    asked = list[int]()

    def argv(_: object) -> list[str]:
        asked.append(1)
        return ["cat", str(fifo)]

    rows = [{"name": "one@big", "state": "running", "labels": {}}]
    monkeypatch.setattr(sandbox_hosts, "LIST_SECONDS", 600)
    monkeypatch.setattr(sandbox_hosts, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(sandbox_hosts, "FIRST_ASK_SECONDS", 0)
    monkeypatch.setattr(sandbox_hosts, "engine_on", lambda *_: far)
    monkeypatch.setattr(sandbox, "containers_argv", argv)
    monkeypatch.setattr(sandbox, "engines_here", lambda _: [])
    monkeypatch.setattr(sandbox, "list_containers",
                        lambda _: (sandbox.Docker(), [{"name": "here"}]))
    monkeypatch.setattr(sandbox, "read_containers", lambda *_: rows)
    config: Any = SimpleNamespace(get=lambda _: {"big": {}}, given=lambda _: None)
    hosts = dict[str, sandbox_hosts.Listed]()

    def listed() -> tuple[list[str], str]:
        found, lost = sandbox_hosts.list_everywhere(config, lambda _, rows: [*rows], hosts)
        return [row["name"] for row in found], lost.get("big", "")

    def answer() -> bool:
        """Answer who has asked; whether nobody asks."""
        with suppress(OSError):
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        thread = hosts["big"].thread
        return not (thread and thread.is_alive())

    def answered() -> tuple[list[str], str]:
        answer()
        return listed()

    assert listed() == (["here"], "big has not answered yet")
    wait_for(lambda: answered() == (["here", "one@big"], ""))
    wait_for(answer)
    monkeypatch.setattr(sandbox, "read_containers", lambda *_: {}.lies)  # type: ignore[attr-defined]
    hosts["big"].pause = 600
    wait_for(lambda: answered()[1])
    names, why = listed()
    assert names == ["here"] and why.startswith("big did not answer: "), why
    assert why.endswith(" it had one@big running") and hosts["big"].pause == 300
    before = len(asked)
    assert listed() == (names, why) and len(asked) == before  # it is left alone
    monkeypatch.setattr(sandbox, "read_containers", lambda *_: rows)
    hosts["big"].again = 0
    assert listed() == (names, why)  # and nobody waits while it is asked again
    wait_for(lambda: answered() == (["here", "one@big"], ""))
    wait_for(answer)


# --- What a session keeps ---


class Keeper:
    """keep.py with a folder of the test's own, and who asks it."""

    def __init__(self, folder: Path, look: str = "LOOK_MS = 100") -> None:
        program = (ROOT / "static" / "session" / "keep.py").read_text()
        assert "LOOK_MS = 100" in program
        self.source = program.replace('"/run/sandbox/jobs"', repr(str(folder))).replace(
            "LOOK_MS = 100", look)

    def __call__(self, position: int, *command: str, given: str = "", tag: str = "tag") -> bytes:
        argv = [sys.executable, "-I", "-S", "-c", self.source, *command]
        return subprocess.run(argv, input=given.encode(), stdout=subprocess.PIPE, timeout=60,
                              env={"SANDBOX_HOLD": f"{tag} {position}", **os.environ}).stdout


def test_what_is_kept_is_run_once_and_shown_from_anywhere(tmp_path: Path) -> None:
    """Also where nothing was kept, where it cannot be, and where its keeper was killed."""
    keep = Keeper(tmp_path / "jobs")
    runs, go = tmp_path / "runs", tmp_path / "go"
    command = ("sh", "-c", f"echo a; echo >>{runs}; until [ -e {go} ]; do sleep 0.1; done; "
               "echo b >&2; exit 5")
    assert keep(0, *command).startswith(b"h\0\0\0\0")  # its client is gone at once
    wait_for(runs.exists)
    go.touch()
    whole = b"o\0\0\0\2a\n" + b"m\0\0\0\2b\n" + b"e\0\0\0\0015"
    wait_for(lambda: keep(0, *command).endswith(whole))
    assert keep(7).endswith(whole[7:]) and b"a" not in keep(7)
    assert runs.read_text() == "\n"
    assert keep(0, given="!").endswith(whole) and not [*(tmp_path / "jobs").iterdir()]
    assert keep(0) == b"e\0\0\0\0"
    wait_for(lambda: keep(0, str(tmp_path / "none")).endswith(b"e\0\0\0\x03127"))
    assert b": not found" in keep(0, given="!")
    killed = keep(0, "sh", "-c", f"rm {go}; kill -9 $PPID; echo never")
    wait_for(lambda: not go.exists())
    wait_for(lambda: keep(0).endswith(b"e\0\0\0\0"))
    assert killed[:1] == b"h"
    for path in (tmp_path / "jobs").iterdir():
        path.unlink()
    (tmp_path / "jobs").rmdir()
    (tmp_path / "jobs").touch()
    assert keep(0, *command).startswith(b"n")
    assert runs.read_text() == "\n"


def test_the_last_words_are_kept(tmp_path: Path) -> None:
    """Whenever a keeper looks whether the command has ended: here it does so all the time."""
    keep = Keeper(tmp_path / "jobs", look="LOOK_MS = 0")
    tags = [f"tag{number}" for number in range(20)]
    for tag in tags:
        keep(0, "sh", "-c", "sleep 0.1; echo b", tag=tag)
    for tag in tags:
        wait_for(lambda tag=tag: b"e\0\0\0\0010" in keep(0, tag=tag))  # type: ignore[misc]
        assert b"o\0\0\0\2b\n" in keep(0, tag=tag)


class Follower:
    """follow() with processes of this machine for calls of a host, which says these states."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cancel, self.monkeypatch = folder / "cancel", monkeypatch
        self.command, self.states, self.signals = ["false"], list[str](), list[str]()
        engine = SimpleNamespace(
            exec_argv=lambda *_, **__: self.command, inspect_argv=lambda _: ["true"],
            read_inspected=lambda _: ("id", "far", self.states.pop(0), 0, 0, {}))
        monkeypatch.setattr(sandbox, "engine_of", lambda *_: engine)
        monkeypatch.setattr(sandbox, "exec_argv", lambda *_: ["false"])
        monkeypatch.setattr(sandbox, "signal_tagged",
                            lambda _engine, _session, tag, name, _: self.signals.append(tag + name))
        monkeypatch.setattr(sandbox_hosts, "LONGEST_PAUSE_SECONDS", 0)

    def follow(self, *states: str) -> int:
        self.states = [*states]
        about = {"runtime": "docker@big", "workdir": "/", "tag": "tag", "cancel": str(self.cancel),
                 "session": ["far", "", {"sandbox.user": "0:0"}, "id"]}
        self.monkeypatch.setenv("SANDBOX_FOLLOW", json.dumps(about))
        return sandbox_hosts.follow()


def test_a_follower_ends_with_what_it_follows_and_no_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Follower(tmp_path, monkeypatch)
    away = ["lost"] * 5  # a node that is not heard has not ended
    assert far.follow(*away, "exited") == sandbox.KILLED and not far.states
    assert far.follow(*away, "running", "running", "running") == 1 and not far.states
    far.cancel.touch()
    assert far.follow("running", "lost", "exited") == sandbox.KILLED
    assert far.signals == ["tagTERM"]  # as soon as it is reached
    monkeypatch.setattr(sandbox_hosts, "CANCEL_SECONDS", -1)
    assert far.follow("lost", "never asked") == sandbox.KILLED and far.states == ["never asked"]


def test_a_busy_host_hears_that_the_status_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what it keeps of a job would stay."""
    far, heard = Follower(tmp_path, monkeypatch), tmp_path / "heard"
    far.command = ["sh", "-c", f"printf 'e\\0\\0\\0\\0010'; sleep 2.5; head -c 1 >{heard}"]
    assert far.follow() == 0 and heard.read_text() == "!"


@pytest.mark.parametrize("lasts, calls", [(True, 11), (False, sandbox_hosts.TRIES + 1)])
def test_the_end_of_a_program_is_awaited_though_often_cut(monkeypatch: pytest.MonkeyPatch,
                                                          lasts: bool, calls: int) -> None:
    """Each call that has lasted was made; one that never begins is not made for ever."""
    statuses, made = [255] * 10 + [0], list[int]()
    monkeypatch.setattr(sandbox_hosts, "FIRST_PAUSE_SECONDS", 0)
    monkeypatch.setattr(sandbox_hosts, "LONGEST_PAUSE_SECONDS", 0 if lasts else 60)
    monkeypatch.setattr(sandbox, "spawn", lambda *_, **__: made.append(1))
    monkeypatch.setattr(sandbox_hosts, "wait_for", lambda *_: statuses[len(made) - 1])
    monkeypatch.setattr(sandbox_hosts, "is_gone", lambda *_: False)
    sandbox_hosts.await_end(sandbox.Docker(), sandbox.Session("far", "", {}), ["true"])
    assert len(made) == calls


def test_a_flood_of_errors_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_hosts, "SILENT_SECONDS", 600)
    far = Follower(tmp_path, monkeypatch)
    far.command = ["sh", "-c", "head -c 99999999 /dev/zero >&2; sleep 600"]
    assert far.follow("exited") == sandbox.KILLED


def test_a_forwarder_that_went_to_the_background_leads_elsewhere(tmp_path: Path) -> None:
    """As `ssh -f` does, after it has begun to listen."""
    path, go = tmp_path / "socket", tmp_path / "go"
    os.mkfifo(go)
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(path))
        ours.listen()
        assert sandbox.is_here(f"unix://{path}")
    path.unlink()
    if not (parent := os.fork()):
        with socket.socket(socket.AF_UNIX) as theirs:
            theirs.bind(str(path))
            theirs.listen()
            if not os.fork():
                go.read_bytes()
            os._exit(0)
    os.waitpid(parent, 0)
    try:
        assert not sandbox.is_here(f"unix://{path}")
    finally:
        go.write_bytes(b"")


def test_what_is_there_hides_nothing_else_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a quota would be taken for a name that somebody has, and asked again and again."""
    there = 'Error from server (AlreadyExists): persistentvolumeclaims "one" already exists\n'
    wrong = 'Error from server (Forbidden): persistentvolumeclaims "two": exceeded quota'
    engine = sandbox_kube.Kubectl("k8s", ["kubectl"])
    for said, raised in ((there, None), (f"{there}{wrong}\n", wrong),
                         ("", "kubectl ended with status 1")):
        monkeypatch.setattr(sandbox_kube, "kubectl", lambda *_, said=said, **__: (1, "", said))
        if raised is None:
            sandbox_kube.make(engine, {}, there=True)
            continue
        with pytest.raises(sandbox.SandboxError) as error:
            sandbox_kube.make(engine, {}, there=True)
        assert error.value.message == raised
