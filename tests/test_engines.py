"""Sessions on real engines: each test runs on docker, podman, and both without root."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    IMAGE,
    IMAGE_NAME,
    IMAGE_VERSION,
    PYTHON,
    ROOT,
    TOKEN,
    Engine,
    Process,
    everywhere,
    on_both_clients,
    on_docker,
    write_config,
)
from service import free_port, wait_for

import sandbox
from sandbox import ENGINE_STATUS

MARK = f"s3cret-{os.getpid()}"
SECRET = f"{MARK}-first-line\nsecond 'line' \"quoted\" $HOME `id` \\ ünïcode\n"


def inspect(engine: Engine, name: str) -> dict[str, object]:
    answer = engine.run("container", "inspect", name)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, object] = json.loads(answer.stdout)[0]
    return found


# --- Life of a session ---


def test_create_reuse_restart_remove(engine: Engine, project: Path, name: str) -> None:
    first = engine.sandbox("run", "-n", name, "-x", "sh", "-c", "pwd; echo kept > /tmp/state")
    assert (first.returncode, first.stdout) == (0, f"{project}\n"), first.stderr
    assert engine.sandbox("run", "-n", name, "-x", "cat", "/tmp/state").stdout == "kept\n"
    engine.run("stop", name, timeout=30)
    row = json.loads(engine.sandbox("ps", "--json").stdout)
    assert [r["state"] for r in row if r["name"] == name] == ["exited"]
    again = engine.sandbox("run", "-n", name, "-x", "cat /tmp/state; id -un")
    assert again.returncode == 0 and again.stdout.startswith("kept\n"), again.stderr
    removed = engine.sandbox("rm", name)
    assert (removed.returncode, removed.stdout) == (0, f"{name}\n")
    assert name not in engine.names()


@everywhere
def test_two_runs_racing_for_one_name_share_one_container(engine: Engine, project: Path,
                                                          name: str) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(engine.sandbox, "run", "-n", name, "-x", "hostname") for _ in range(4)]
        results = [run.result() for run in runs]
    assert [r.returncode for r in results] == [0] * 4, [r.stderr for r in results]
    assert len({r.stdout for r in results}) == 1
    assert engine.names().count(name) == 1


def test_two_projects_of_one_name_never_share_a_container(engine: Engine, home: Path) -> None:
    projects = []
    for parent in (engine.directory(), engine.directory()):
        (parent / "app").mkdir()
        os.chown(parent / "app", engine.uid, engine.gid)
        projects.append(parent / "app")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(engine.sandbox, "run", "-x", "hostname; pwd", cwd=p) for p in projects
                for _ in range(2)]
        results = [run.result().stdout.split() for run in runs]
    assert len({host for host, _ in results}) == 4
    assert [directory for _, directory in results] == [str(p) for p in projects for _ in range(2)]
    rows = json.loads(engine.sandbox("ps", "--json").stdout)
    names = [row["name"] for row in rows if row["directory"] in map(str, projects)]
    assert len(names) == 4 and all(n.startswith("app-") for n in names)


def test_a_container_that_is_not_ours_is_never_touched(engine: Engine, project: Path,
                                                       name: str) -> None:
    # With an init, because podman waits ten seconds for a first process that ignores SIGTERM.
    engine.run("run", "-d", "--init", "--name", name, IMAGE, "sleep", "1000")
    try:
        before = inspect(engine, name)["State"]
        for command in (("run", "-n", name, "-x", "true"), ("rm", name)):
            answer = engine.sandbox(*command)
            assert answer.returncode in (1, 125)
            assert f"container {name} exists and is not" in answer.stderr
        assert inspect(engine, name)["State"] == before
        assert name not in engine.sandbox("ps", "-q").stdout.split()
    finally:
        engine.run("rm", "-f", name)


def test_rm_removes_what_exists_and_names_what_does_not(engine: Engine, project: Path,
                                                        name: str) -> None:
    for suffix in ("a", "b"):
        engine.sandbox("run", "-n", name + suffix, "-x", "true")
    settings = engine.home / "sessions" / f"{name}a.json"
    settings.parent.mkdir(exist_ok=True)
    os.chown(settings.parent, engine.uid, engine.gid)
    settings.write_text("{}")
    answer = engine.sandbox("rm", name + "a", name + "nope", name + "b")
    assert (answer.returncode, answer.stdout.split()) == (1, [name + "a", name + "b"])
    assert name + "nope" in answer.stderr and not settings.exists()
    assert not [n for n in engine.names() if n.startswith(name)]


def test_ps_shows_a_table_and_names(engine: Engine, project: Path, home: Path, name: str) -> None:
    write_config(home, runs={"work": {"yolo": "cx"}})
    engine.sandbox("run", "-n", name, "-r", "work", "-x", "true")
    engine.sandbox("run", "-n", name + "2", "-y", "c", "--", "--version")
    rows = {row["name"]: row for row in json.loads(engine.sandbox("ps", "--json").stdout)}
    row = rows[name]
    assert (row["state"], row["profile"]) == ("running", "work")
    assert (row["agent"], row["image"]) == ("", IMAGE)
    assert row["directory"] == str(project) and row["runtime"] == engine.runtime
    assert rows[name + "2"]["agent"] == "claude"
    assert name in engine.sandbox("ps", "-q").stdout.split()
    header, *lines = engine.sandbox("ps").stdout.splitlines()
    line = next(line for line in lines if line.startswith(name + " "))
    assert header.index("STATE") == line.index("running")
    assert header.index("DIRECTORY") == line.index(str(project))


def test_what_is_called_often_imports_little(engine: Engine, project: Path, home: Path,
                                              name: str) -> None:
    """See the import budget of sandbox.py."""
    dear = {"argparse", "dataclasses", "json", "signal", "subprocess", "typing"}
    run = ["run", "-n", name, "-e", "A=1", "-x", "true"]
    engine.sandbox(*run)  # creates it
    engine.sandbox(*run)  # looks whether it runs
    for words in (run, ["ps"]):
        answer = engine.sandbox(*words, env={"PYTHONPROFILEIMPORTTIME": "1"})
        imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
        assert answer.returncode == 0 and "sandbox" in imported
        assert not imported & dear
        # `ps` needs it for the ports of any session.
        assert words == ["ps"] or "re" not in imported


def test_rm_on_exit_leaves_nothing(engine: Engine, project: Path, name: str) -> None:
    for status in (3, *ENGINE_STATUS):
        answer = engine.sandbox("run", "-n", name, "--rm-on-exit", "-x", f"exit {status}")
        assert answer.returncode == status, answer.stderr
        assert name not in engine.names()


# --- What runs inside ---


@everywhere
@pytest.mark.parametrize("status", [0, 1, 3, 125, 126, 127, 255])
def test_the_exit_status_is_passed_on(engine: Engine, shared_session: str,
                                      status: int) -> None:
    assert engine.sandbox("run", "-n", shared_session, "-x", f"exit {status}").returncode == status


@everywhere
def test_a_missing_program_is_127_and_a_file_that_cannot_run_126(engine: Engine,
                                                                 shared_session: str) -> None:
    assert engine.sandbox("run", "-n", shared_session, "-x", "no-such-program").returncode == 127
    assert engine.sandbox("run", "-n", shared_session, "-x", "/etc/passwd").returncode == 126
    assert engine.sandbox("run", "-n", shared_session, "-x", "kill -9 $$").returncode == 137


@everywhere
def test_words_reach_the_program_as_they_are(engine: Engine, shared_session: str) -> None:
    words = ["a b", "", "$HOME", "'", '"', "*", "--", "-x", "ü\n", "\\"]
    answer = engine.sandbox("run", "-n", shared_session, "-x", "printf", "[%s]", *words)
    assert answer.stdout == "".join(f"[{word}]" for word in words), answer.stderr


@everywhere
def test_a_string_goes_to_a_shell_and_takes_arguments(engine: Engine, shared_session: str) -> None:
    script = "x=1; echo $x \"$HOME\" | cat; printf '%s;'"
    answer = engine.sandbox("run", "-n", shared_session, "-x", script, "--", "a b", "c")
    assert answer.stdout == "1 /home/agent\na b;c;"


@everywhere
def test_ten_megabytes_pass_through_unchanged(engine: Engine, shared_session: str) -> None:
    data = os.urandom(10_000_000)
    argv = engine.sandbox_argv("run", "-n", shared_session, "-x", "cat")
    answer = subprocess.run(argv, input=data, capture_output=True, timeout=120, **engine.where())
    assert answer.returncode == 0, answer.stderr
    assert hashlib.sha256(answer.stdout).digest() == hashlib.sha256(data).digest()


@everywhere
def test_stdout_and_stderr_stay_apart(engine: Engine, shared_session: str) -> None:
    answer = engine.sandbox("run", "-n", shared_session, "-x", "echo out; echo err >&2")
    assert (answer.stdout, answer.stderr) == ("out\n", "err\n")


@everywhere
@pytest.mark.parametrize("number, status",
                         [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_process_inside(
    engine: Engine, shared_session: str, number: signal.Signals, status: int
) -> None:
    mark = f"9{number}{os.getpid()}"
    run = engine.popen("run", "-n", shared_session, "-x", f"sleep {mark} | sleep {mark}")
    wait_for(lambda: sleeping(engine, shared_session, mark) == 2)
    os.kill(run.pid, number)
    assert run.wait(60) == status
    wait_for(lambda: sleeping(engine, shared_session, mark) == 0)


@everywhere
def test_a_killed_program_that_ignores_the_signal_is_killed(engine: Engine,
                                                            shared_session: str) -> None:
    mark = f"8{os.getpid()}"
    run = engine.popen("run", "-n", shared_session, "-x",
                       f"trap '' TERM; sleep {mark}; sleep {mark}")
    wait_for(lambda: sleeping(engine, shared_session, mark) == 1)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(60) == 137
    wait_for(lambda: sleeping(engine, shared_session, mark) == 0)


def sleeping(engine: Engine, name: str, mark: str) -> int:
    """How many processes in the container sleep for `mark` seconds."""
    each = "for c in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$c; echo; done 2>/dev/null"
    return engine.run("exec", name, "sh", "-c", each).stdout.splitlines().count(f"sleep {mark} ")


# --- Environment ---


@on_docker
def test_the_six_steps_seen_from_inside(engine: Engine, project: Path, home: Path,
                                        name: str) -> None:
    files = {}
    for file, names in {"global": "ABCDEF", "profile": "BCDEF", "flag": "CDEF"}.items():
        files[file] = home / f"{file}.env"
        files[file].write_text("".join(f'export V_{n}="{file} file"\n' for n in names))
        files[file].chmod(0o644)
    write_config(
        home,
        envFile=[str(files["global"])],
        env={f"V_{n}": "global env" for n in "DEF"},
        runs={"p": {"envFile": [str(files["profile"])],
                    "env": {f"V_{n}": "profile env" for n in "EF"}}},
    )
    answer = engine.sandbox("run", "-n", name, "-r", "p", "--ef", str(files["flag"]), "-e",
                            "V_F=flag", "-x", "env")
    seen = dict(line.split("=", 1) for line in answer.stdout.splitlines() if line.startswith("V_"))
    steps = ["global file", "profile file", "flag file", "global env", "profile env", "flag"]
    assert seen == dict(zip((f"V_{n}" for n in "ABCDEF"), steps, strict=True)), answer.stderr


@everywhere
def test_a_multi_line_secret_arrives_whole_and_is_seen_nowhere(
    engine: Engine, project: Path, home: Path, name: str
) -> None:
    engine.configure(env={"MY_TOKEN": SECRET})
    script = "printf %s \"$MY_TOKEN\"; touch started; until [ -e seen ]; do sleep 0.1; done"
    run = engine.popen("run", "-n", name, "-x", script)
    commands = set()
    inside = ("exec", name, "sh", "-c")
    while run.poll() is None and engine.run(*inside, f"ls {project}/started").returncode:
        commands |= all_commands()
    commands |= all_commands()
    configuration = engine.run("inspect", name).stdout
    engine.run(*inside, f"touch {project}/seen")
    out, err = run.communicate(timeout=60)
    assert out == SECRET, err
    assert any(name in command for command in commands)
    assert not [command for command in commands if MARK in command]
    assert str(project) in configuration and MARK not in configuration


def all_commands() -> set[str]:
    """The command line of every process of this machine."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@everywhere
def test_names_that_the_client_reads_reach_the_container_only(engine: Engine, project: Path,
                                                              name: str) -> None:
    values = {"DOCKER_HOST": "tcp://nowhere", "CONTAINER_HOST": "tcp://nowhere",
              "HTTPS_PROXY": "http://nowhere:1",
              "HOME": "/tmp", "PATH": "/bin:/nowhere", "XDG_RUNTIME_DIR": "/nowhere"}  # fmt: skip
    flags = [f"-e{n}={v}" for n, v in values.items()]
    answer = engine.sandbox("run", "-n", name, *flags, "-x", "env")
    seen = dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)
    assert {n: seen.get(n) for n in values} == values, answer.stderr


@on_docker
def test_a_rotated_key_is_there_at_the_next_run(engine: Engine, project: Path, name: str) -> None:
    for key in ("old", "new"):
        env = engine.project / "keys.env"
        env.write_text(f'export API_KEY="{key}"\n')
        env.chmod(0o644)
        ran = engine.sandbox("run", "-n", name, "--ef", str(env), "-x", "echo $API_KEY")
        assert ran.stdout == f"{key}\n"


# --- Files and users ---


def test_created_files_belong_to_the_person(engine: Engine, project: Path, name: str) -> None:
    answer = engine.sandbox("run", "-n", name, "-x",
                            "mkdir d; touch d/f; touch $HOME/x; id -un; whoami; echo ~")
    assert answer.returncode == 0, answer.stderr
    made = [(project / path).stat() for path in ("d", "d/f")]
    assert [(status.st_uid, status.st_gid) for status in made] == [(engine.uid, engine.gid)] * 2
    assert answer.stdout.split()[0] not in ("", "unknown")


@on_docker
def test_created_files_belong_to_an_ordinary_user_of_a_rootful_engine(engine: Engine,
                                                                      name: str) -> None:
    project, home = engine.directory("sandbox-test"), engine.directory("sandbox-test")
    write_config(home)
    where: dict[str, Any] = {"user": "sandbox-test", "cwd": project, "home": home}
    answer = engine.sandbox("run", "-n", name, "-x",
                            "touch f; touch ~/x; id -un; echo $HOME; id -u", **where)
    assert answer.returncode == 0, answer.stderr
    status = (project / "f").stat()
    assert answer.stdout.split() == ["agent", "/home/agent", str(status.st_uid)]
    assert status.st_uid != 0


@on_docker
def test_what_is_mounted_into_the_home_stays_the_hosts(engine: Engine, name: str) -> None:
    project, home, theirs = (engine.directory("sandbox-test") for _ in range(3))
    write_config(home, volumes=[f"{theirs}/key:/home/agent/.agent/key:ro",
                                f"{theirs}/dir:/home/agent/.agent/dir"])
    (theirs / "key").write_text("key")
    (theirs / "dir").mkdir()
    (theirs / "dir" / "file").touch()
    where: dict[str, Any] = {"user": "sandbox-test", "cwd": project, "home": home}
    answer = engine.sandbox("run", "-n", name, "-x", "cat ~/.agent/key; touch ~/.agent/state",
                            **where)
    assert (answer.returncode, answer.stdout) == (0, "key"), answer.stderr
    made = (theirs / "key", theirs / "dir", theirs / "dir" / "file")
    assert {path.stat().st_uid for path in made} == {0}


@pytest.mark.parametrize("folder", ["plain", "with space", "co,mma", "co:lon", 'quo"te', "ünï"])
def test_any_directory_is_mounted_at_the_same_path(engine: Engine, project: Path, name: str,
                                                   folder: str) -> None:
    directory = project / folder
    directory.mkdir()
    (directory / "seen").write_text("yes")
    os.chown(directory, engine.uid, engine.gid)
    answer = engine.sandbox("run", "-n", name, "-x", "pwd; cat seen", cwd=directory)
    assert answer.stdout == f"{directory}\nyes", answer.stderr


@on_docker
def test_no_path_is_mounted_that_engines_read_in_another_way(engine: Engine, project: Path,
                                                             name: str) -> None:
    """Go makes U+FFFD of a byte that is not UTF-8; CSV makes one line feed of CR LF."""
    odd, meant = os.fsencode(project) + b"/a\377", project / "a\ufffd"
    os.mkdir(odd)
    meant.symlink_to("/")
    (project / "app").symlink_to(os.fsdecode(odd))
    (project / "c\r\nd").mkdir()
    (project / "c\nd").symlink_to("/")
    (project / "e").symlink_to("c\r\nd")
    for folder in ("app", "c\r\nd"):
        answer = engine.sandbox("run", "-n", name, "-x", "ls etc/shadow", cwd=project / folder)
        assert (answer.returncode, answer.stdout) == (125, ""), answer.stderr
        assert "the current directory" in answer.stderr
    for flags in (["--hp", "app"], ["--hp", "e"], ["-v", f"{project}/app:/x"],
                  ["-v", f"{project}/e:/x"]):
        answer = engine.sandbox("run", "-n", name, *flags, "-x", "ls etc/shadow /x/etc/shadow")
        assert (answer.returncode, answer.stdout) == (125, ""), answer.stderr
        assert "a mounted path leads to" in answer.stderr
    for flags in (["--hp", os.fsdecode(odd)], ["-v", os.fsdecode(odd) + ":/x"],
                  ["--cp", "/x\x9b"], ["--hp", "c\r\nd"]):
        answer = engine.sandbox("run", "-n", name, *flags, "-x", "ls")
        assert (answer.returncode, answer.stdout) == (2, ""), answer.stderr
        assert "has a control character or a byte that is not UTF-8" in answer.stderr
    assert name not in engine.names()
    assert engine.sandbox("ps", cwd=project / "app").returncode == 0


FLIP = """
import os, sys
os.chdir(sys.argv[1])
while True:
    os.rename("data", "was")
    os.symlink("victim", "data")
    os.unlink("data")
    os.rename("was", "data")
"""


def test_what_was_mounted_is_what_was_checked(engine: Engine, project: Path, name: str) -> None:
    """A path that is turned to an engine's socket after the check: nothing runs there."""
    for folder in ("data", "victim"):
        (project / folder).mkdir()
        os.chown(project / folder, engine.uid, engine.gid)
    (project / "victim" / "engine").touch()
    other = "CONTAINER_HOST" if engine.runtime == "docker" else "DOCKER_HOST"
    env = {other: f"unix://{project}/victim/engine"}
    touch = ["-v", f"{project}/data:/data", "--hp", str(engine.directory()), "-x", "touch",
             "/data/reached"]
    assert engine.sandbox("run", "-n", name, *touch, env=env).returncode == 0
    engine.run("stop", "-t", "0", name)
    statuses = []
    with Process([PYTHON, "-c", FLIP, str(project)], start_new_session=True):
        for attempt in range(7):
            created = engine.sandbox("run", "-n", f"{name}-{attempt}", "--rm-on-exit", *touch,
                                     env=env)
            started = engine.sandbox("run", "-n", name, *touch, env=env)
            engine.run("stop", "-t", "0", name)
            statuses += [created.returncode, started.returncode]
    assert not (project / "victim" / "reached").exists(), statuses
    # 1 where the client could not even look into the container: it mounts what is missing for that,
    # too.
    assert 125 in statuses and set(statuses) <= {0, 1, 125}, statuses


# With a pause, because runc itself fails where the file changes while it mounts it.
def test_a_mounted_file_may_be_written_anew_meanwhile(engine: Engine, project: Path,
                                                      name: str) -> None:
    """As agents write their settings: between its mount and the look at the mount table."""
    (project / "file").write_text("whole")
    made = engine.sandbox("run", "-n", name, "-v", f"{project}/file:/x", "-x", "true")
    assert made.returncode == 0
    label = engine.run("inspect", "-f", '{{index .Config.Labels "sandbox.created"}}', name).stdout
    spec = json.loads(label)["spec"]
    before = sandbox.mounts_meant(sandbox.binds_of(spec))
    (project / "new").write_text("whole")
    (project / "new").rename(project / "file")
    script = (ROOT / "static" / "session" / "mounts.sh").read_text() + 'mounts_are "$@"'
    look = ("exec", "--user", "0:0", name, "sh", "-c", script, "sandbox")
    for meant in (before, sandbox.mounts_meant(sandbox.binds_of(spec))):
        assert engine.run(*look, *meant).returncode == 0
    (project / "file").rename(project / "elsewhere")
    answer = engine.run(*look, before[0], f"{before[3]}x", "/x")
    assert answer.returncode == 1
    assert "what is mounted at /x is not what was checked" in answer.stderr


@pytest.mark.parametrize("place", ["tmpfs", "bind", "with space", "back\\slash", "file"])
def test_mounts_of_every_kind_are_recognised(engine: Engine, project: Path, name: str,
                                             place: str) -> None:
    # whose mount namespace is older
    mounts = place in ("tmpfs", "bind") and "rootless" not in engine.id
    if mounts:
        (project / place).mkdir()
        kind = ["-t", "tmpfs", "tmpfs"] if place == "tmpfs" else ["--bind", str(engine.directory())]
        subprocess.run(["mount", *kind, str(project / place)], check=True)
    inner = project / place / "inner"
    inner.mkdir(parents=True)
    (inner / "file").write_text("seen")
    mount = f"{inner}/file:/var/run/seen" if place == "file" else f"{inner}:/x {place}"
    at = "/var/run/seen" if place == "file" else f"/x {place}/file"
    try:
        for _ in range(2):
            answer = engine.sandbox("run", "-n", name, "-v", mount, "-x", "cat", at)
            assert (answer.returncode, answer.stdout) == (0, "seen"), answer.stderr
            engine.run("stop", "-t", "0", name)
        engine.run("rm", "-f", name)
    finally:
        if mounts:
            subprocess.run(["umount", str(project / place)], check=True)


def test_volumes_host_path_and_container_path(engine: Engine, project: Path, name: str) -> None:
    data = engine.directory()
    (data / "file").write_text("data")
    (data / "file").chmod(0o644)
    flags = ["--hp", str(project), "--cp", "/code", "-v", f"{data}:/data:ro"]
    answer = engine.sandbox("run", "-n", name, *flags, "-x", "pwd; cat /data/file; touch /data/new",
                            cwd="/tmp")
    assert answer.stdout == "/code\ndata" and "Read-only" in answer.stderr
    assert not (data / "new").exists()


def test_containment(engine: Engine, project: Path, name: str) -> None:
    answer = engine.sandbox("run", "-n", name, "-x", "grep CapBnd /proc/1/status; cat /proc/mounts")
    capabilities = int(answer.stdout.split()[1], 16)
    dangerous = {"SYS_ADMIN": 21, "SYS_PTRACE": 19, "SYS_MODULE": 16, "NET_ADMIN": 12,
                 "NET_RAW": 13, "MKNOD": 27,
                 "SYS_RAWIO": 17, "DAC_READ_SEARCH": 2, "SYS_CHROOT": 18}  # fmt: skip
    assert [n for n, bit in dangerous.items() if capabilities >> bit & 1] == []
    assert ".sock" not in answer.stdout
    assert json.dumps(inspect(engine, name)).count("PidsLimit") == 1


@on_docker
def test_a_first_run_makes_folders_that_are_private(engine: Engine, project: Path,
                                                    name: str) -> None:
    home = engine.directory() / "new" / "home"
    answer = engine.sandbox("run", "-n", name, "--in", IMAGE_NAME, "-x", "true", home=home)
    assert answer.returncode == 0, answer.stderr
    folders = [home.parent, *(path for path in home.parent.rglob("*") if path.is_dir())]
    assert len(folders) > 2 and {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_words_of_an_engine_or_a_directory_do_not_act_on_the_terminal(
    engine: Engine, project: Path, name: str
) -> None:
    odd = project / "odd\u202e"
    odd.mkdir()
    assert engine.sandbox("run", "-n", name, "-x", "true", cwd=odd).returncode == 0
    elsewhere = engine.sandbox("run", "-n", name, "-x", "true", cwd="/tmp")
    missing = engine.sandbox("run", "-n", f"{name}-2", "-v", f"{odd}/missing:/x", "-x", "true")
    assert "works on" in elsewhere.stderr and "missing" in missing.stderr
    assert [c for c in elsewhere.stderr + missing.stderr if not c.isprintable() and c != "\n"] == []


# --- Reuse ---


@on_docker
def test_a_difference_is_said_line_by_line(engine: Engine, project: Path, home: Path,
                                           name: str) -> None:
    data = engine.directory()
    port = f"127.0.0.1:{free_port()}:80"
    engine.sandbox("run", "-n", name, "-p", port, "--memory", "512m", "-x", "true")
    same = engine.sandbox("run", "-n", name, "-x", "true")
    assert (same.returncode, same.stderr) == (0, "")
    write_config(home, volumes=[f"{data}:/data"], imageVersion="2.0-common")
    other = engine.sandbox("run", "-n", name, "--memory", "1g", "-x", "echo ran")
    assert other.stdout == "ran\n"
    for part in (f"volumes: it lacks {data}:/data",
                 "asked for is localhost/sandbox-test:2.0-common",
                 "memory: it has 512m, asked for is 1g", f"sandbox recreate {name} --memory 1g"):
        assert part in other.stderr
    assert "ports" not in other.stderr


@on_docker
def test_a_session_keeps_its_directory_and_profile(engine: Engine, project: Path, home: Path,
                                                   name: str) -> None:
    write_config(home, runs={"p": {"env": {"FROM_PROFILE": "yes"}}})
    engine.sandbox("run", "-n", name, "-r", "p", "-x", "true")
    (project / "sub").mkdir()
    inside = engine.sandbox("run", "-n", name, "-x", "pwd; echo $FROM_PROFILE", cwd=project / "sub")
    assert (inside.stdout, inside.stderr) == (f"{project}/sub\nyes\n", "")
    elsewhere = engine.sandbox("run", "-n", name, "-x", "pwd", cwd="/usr")
    assert elsewhere.stdout == f"{project}\n" and "/usr is not mounted" in elsewhere.stderr


@on_docker
def test_arguments_reach_the_agent_the_container_was_created_with(
    engine: Engine, project: Path, home: Path, name: str
) -> None:
    (project / "bin").mkdir()
    program = project / "bin" / "codex"
    program.write_text('#!/bin/sh\necho codex "$@"\n')
    program.chmod(0o755)
    write_config(home, env={"PATH": f"{project}/bin:/bin"}, yolo="c")
    expected = "codex --dangerously-bypass-approvals-and-sandbox"
    assert engine.sandbox("run", "-n", name, "-y", "cx").stdout == f"{expected}\n"
    ran = engine.sandbox("run", "-n", name, "--", "resume", "--last")
    assert ran.stdout == f"{expected} resume --last\n"
    assert engine.sandbox("-n", name, "-x", "echo other").stdout == "other\n"
    assert engine.sandbox("-n", name).stdout == f"{expected}\n"


@on_docker
def test_a_yolo_shortcut_of_agent_d_sets_its_permission(engine: Engine, project: Path, home: Path,
                                                        name: str) -> None:
    program = project / "opencode"
    program.write_text('#!/bin/sh\necho "$OPENCODE_PERMISSION" "$@"\n')
    program.chmod(0o755)
    write_config(home, env={"PATH": f"{project}:/bin"})
    ran = engine.sandbox("run", "-n", name, "-y", "agent-d", "--", "-c")
    assert ran.stdout == '{"*":"allow"} -c\n'
    assert engine.sandbox("run", "-n", name).stdout == '{"*":"allow"}\n'


def test_autostart_runs_when_the_container_starts(engine: Engine, project: Path, home: Path,
                                                  name: str) -> None:
    write_config(home, autostart="echo $GREETING >> started", env={"GREETING": "hello"})
    engine.sandbox("run", "-n", name, "-x", "true")
    wait_for(lambda: (project / "started").exists() and (project / "started").read_text())
    engine.sandbox("run", "-n", name, "-x", "true")
    engine.run("stop", name)
    engine.sandbox("run", "-n", name, "-x", "true")
    wait_for(lambda: (project / "started").read_text() == "hello\nhello\n")


def test_autostart_is_not_lost_with_a_client_that_is_killed(
    engine: Engine, project: Path, home: Path, name: str
) -> None:
    """The client dies at some moment from the start of the container on; the next run makes up for
    what is missing."""
    write_config(home, autostart="echo started >> started")
    for number in range(8):
        session = f"{name}-{number}"
        with engine.popen("run", "-n", session, "-x", "sleep 60") as killed:
            wait_for(lambda: session in engine.run("ps", "--format", "{{.Names}}").stdout.split())  # noqa: B023
            time.sleep(0.02 * number)
            killed.send_signal(signal.SIGKILL)
        for _ in range(2):
            assert engine.sandbox("run", "-n", session, "-x", "true").returncode == 0
        wait_for(lambda: (project / "started").exists() and (project / "started").read_text())
        engine.run("restart", "-t", "0", session)
        assert engine.sandbox("run", "-n", session, "-x", "true").returncode == 0
        wait_for(lambda: (project / "started").read_text() == "started\n" * 2)
        (project / "started").unlink()


def test_commands_that_begin_at_once_start_autostart_once(
    engine: Engine, project: Path, home: Path, name: str
) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    write_config(home, autostart="echo started >> started")
    engine.run("restart", "-t", "0", name)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(engine.sandbox, "run", "-n", name, "-x",
                            "until [ -s started ]; do sleep 0.1; done; sleep 1; cat started")
                for _ in range(4)]
        assert [run.result().stdout for run in runs] == ["started\n"] * 4


def test_autostart_outlives_the_run_that_started_it(engine: Engine, project: Path, home: Path,
                                                    name: str) -> None:
    """Neither a signal to that run nor its terminal ends the script, and it begins where the
    session works."""
    (project / "sub").mkdir()
    write_config(home,
                 autostart="trap 'echo interrupted >interrupted' INT; pwd; "
                           "while :; do sleep 0.1; done")
    run = ("run", "-n", name)
    with engine.pty(*run, "--hp", str(project), "-x", "echo here; sleep 60",
                    cwd=project / "sub") as terminal:
        terminal.expect("here")
        terminal.send("\x03")
        terminal.expect("Keep it?")
        terminal.send("\n")
        assert terminal.wait() == 130
    cat = ("run", "-n", name, "-x", "cat /tmp/autostart.log")
    assert wait_for(lambda: engine.sandbox(*cat).stdout) == f"{project}\n"
    assert not (project / "interrupted").exists()
    interrupt = ("for f in /proc/[0-9]*/cmdline; do "
                 "grep -q 'interrupte[d]' $f && kill -INT ${f//[^0-9]/}; done")
    engine.sandbox("run", "-n", name, "-x", interrupt)
    wait_for((project / "interrupted").exists)


def test_a_command_never_runs_twice(engine: Engine, project: Path, name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    for status in (1, 125, 255):
        answer = engine.sandbox("run", "-n", name, "--rm-on-exit", "-x",
                                f"echo ran >>log; exit {status}")
        assert answer.returncode == status, answer.stderr
    assert (project / "log").read_text() == "ran\n" * 3


@pytest.mark.parametrize("end", ["stop -t 0", "kill", "rm -f"])
def test_a_command_that_began_does_not_run_again_when_its_container_ends(
    engine: Engine, project: Path, name: str, end: str
) -> None:
    """The engine's client is a script that ends the container before it says how the command in it
    has ended."""
    run = ("run", "-n", name, "-x")
    folder, real = engine.directory(), shutil.which(engine.runtime)
    client = folder / engine.runtime
    label = '{{index .Config.Labels "sandbox.home"}}'
    client.write_text(
        f'#!/bin/sh\n{real} "$@"\ns=$?\n[ "$1" = exec ] || exit $s\n'
        f"home=$({real} inspect --format '{label}' {name})\n"
        f'{real} {end} {name} >&2\n{real} volume rm $home >/dev/null 2>&1\nexit $s\n')
    client.chmod(0o755)
    where: dict[str, Any] = {"env": {"PATH": f"{folder}:{engine.environ()['PATH']}"}}
    for status in ENGINE_STATUS:
        assert engine.sandbox(*run, "true").returncode == 0
        answer = engine.sandbox(*run, f"echo ran >>log; exit {status}", **where)
        assert answer.returncode == status, answer.stderr
        assert (project / "log").read_text() == "ran\n", answer.stderr
        assert ("whether the command began is not known" in answer.stderr) is (end == "rm -f")
        (project / "log").unlink()


@everywhere
@pytest.mark.parametrize("end", ["stop -t 0", "kill"])
def test_a_command_that_did_not_begin_runs_when_its_container_is_started(
    engine: Engine, project: Path, name: str, end: str
) -> None:
    run = ("run", "-n", name, "-x", "echo ran")
    assert engine.sandbox(*run).stdout == engine.sandbox(*run).stdout == "ran\n"
    assert engine.run(*end.split(), name).returncode == 0
    assert engine.sandbox(*run).stdout == "ran\n"


def test_a_container_that_is_gone_is_made_anew_once_that_is_said(engine: Engine, project: Path,
                                                                 name: str) -> None:
    run = ("run", "-n", name, "-x", "echo ran")
    assert engine.sandbox(*run).stdout == "ran\n"
    engine.remove({name})
    answer = engine.sandbox(*run)
    assert (answer.returncode in ENGINE_STATUS, answer.stdout) == (True, "")
    assert "is gone, and whether" in answer.stderr
    assert engine.sandbox(*run).stdout == "ran\n"


ERASING = ("rm /run/sandbox-began", ": >/run/sandbox-began", "yes >/run/sandbox-began & sleep 0.5")


@pytest.mark.parametrize("erase", ERASING)
def test_what_erases_the_mark_is_not_run_again(engine: Engine, project: Path, name: str,
                                               erase: str) -> None:
    assert engine.sandbox("run", "-n", name, "-x", "true").returncode == 0
    ended = engine.sandbox("run", "-n", name, "-x", f"echo ran >>log; {erase}; kill -9 -1; exit 1")
    assert (project / "log").read_text() == "ran\n", ended.stderr


def test_a_mount_that_was_turned_elsewhere_is_not_followed(engine: Engine, project: Path,
                                                           name: str) -> None:
    for folder in ("data", "victim"):
        (project / folder).mkdir()
        os.chown(project / folder, engine.uid, engine.gid)
    engine.sandbox("run", "-n", name, "-v", f"{project}/data:/data", "-x",
                   "mv data was; ln -s victim data")
    engine.run("stop", name)
    answer = engine.sandbox("run", "-n", name, "-x", "touch /data/reached")
    assert answer.returncode == 125 and "leads through a link" in answer.stderr
    assert not (project / "victim" / "reached").exists()


def test_a_container_that_ends_at_once_says_why(engine: Engine, project: Path, name: str) -> None:
    (project / "file").touch()
    for _ in range(2):
        answer = engine.sandbox("run", "-n", name, "-v", f"{project}/file:/bin/sleep", "-x",
                                "echo ran")
        assert (answer.returncode, answer.stdout) == (125, ""), answer.stderr
        assert "ended as soon as it was started" in answer.stderr
        assert f"sandbox recreate {name}" in answer.stderr
    assert engine.sandbox("rm", name).returncode == 0 and name not in engine.names()


# The shell of an image whose containers end with status 3 when there is a file /tmp/end.
ENDS_WITH_3 = """rm /bin/sh; cat >/bin/sh <<'END'
#!/bin/busybox sh
case $2 in *'exec sleep infinity'*) ;; *) exec /bin/busybox sh "$@" ;; esac
init=${2%exec sleep infinity*}
shift 2
/bin/busybox sh -c "$init" "$@"
until [ -e /tmp/end ]; do sleep 0.05; done
exit 3
END
chmod 755 /bin/sh
"""


@pytest.fixture(scope="module")
def ending_image(engine: Engine) -> Iterator[str]:
    image, made = f"localhost/{TOKEN}-ending", f"{TOKEN}-ending"
    assert engine.run("run", "--name", made, IMAGE, "sh", "-c", ENDS_WITH_3).returncode == 0
    assert engine.run("commit", made, f"{image}:{IMAGE_VERSION}").returncode == 0
    engine.run("rm", made)
    yield image
    engine.run("rmi", f"{image}:{IMAGE_VERSION}")


@pytest.mark.parametrize("lie",
                         ["", "echo sandbox >/run/sandbox-began; ", "rm /run/sandbox-began; "])
def test_a_container_that_lies_about_its_start_is_kept(
    engine: Engine, project: Path, ending_image: str, name: str, lie: str
) -> None:
    noise = (r"head -c 30000000 /dev/zero | tr '\0' x >/proc/1/fd/1; "
             r"printf '\033]0;owned\007\n' >/proc/1/fd/1; ")
    command = f"echo kept >/tmp/state; {lie}{noise}touch /tmp/end; sleep 60"
    answer = engine.sandbox("run", "-n", name, "--in", ending_image, "-x", command, timeout=50)
    assert answer.returncode == (125 if lie else 137), answer.stderr
    assert "\033" not in answer.stderr and len(answer.stderr) < 3000
    assert engine.run("cp", f"{name}:/tmp/state", f"{project}/state").returncode == 0
    log = engine.run("logs", name)
    assert "owned" in log.stdout and len(log.stdout) < 2_000_000


# --- Network and ports ---


def test_no_network_has_only_loopback(engine: Engine, project: Path, name: str) -> None:
    answer = engine.sandbox("run", "-n", name, "--net", "none", "-x",
                            "ls /sys/class/net; cat /proc/net/route | wc -l")
    assert answer.stdout.split() == ["lo", "1"], answer.stderr


def test_the_host_network_is_the_hosts(engine: Engine, project: Path, name: str) -> None:
    answer = engine.sandbox("run", "-n", name, "--net", "host", "-x",
                            "readlink /proc/self/ns/net; ls /sys/class/net")
    space, *interfaces = answer.stdout.split()
    if engine.id == "rootless-docker":  # whose daemon has a network of its own
        assert "docker0" in interfaces, answer.stderr
    else:
        assert space == os.readlink("/proc/self/ns/net"), answer.stderr


def test_a_published_port_listens_on_loopback_only(engine: Engine, project: Path,
                                                   name: str) -> None:
    port = free_port()
    engine.sandbox("run", "-n", name, "-p", f"{port}:80", "-x", "true")
    bindings = json.dumps(inspect(engine, name)["HostConfig"])
    assert f'"HostIp": "127.0.0.1", "HostPort": "{port}"' in bindings
    taken = engine.sandbox("run", "-n", name + "2", "-p", f"{port}:80", "-x", "true")
    assert taken.returncode == 125 and "choose another host port" in taken.stderr
    assert name + "2" not in engine.names()


# --- An engine that hangs ---


class SilentEngine:
    """A Unix socket on which nobody answers; the engine's client is led to it."""

    def __init__(self, engine: Engine) -> None:
        self.path = str(engine.directory() / "silent.sock")
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(self.path)
        os.chmod(self.path, 0o777)
        self.server.listen(100)
        self.env = {{"docker": "DOCKER_HOST",
                     "podman": "CONTAINER_HOST"}[engine.runtime]: f"unix://{self.path}"}
        self.connections: list[socket.socket] = []
        self.thread = threading.Thread(target=self.accept, daemon=True)
        self.thread.start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.connections.append(self.server.accept()[0])

    def clients(self, program: str) -> list[str]:
        """The processes of this name that are led to the socket."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                named = (process / "comm").read_text().strip() == program
                if named and self.path.encode() in (process / "environ").read_bytes():
                    found.append(process.name)
        return found

    def __enter__(self) -> "SilentEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.thread.join()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def impatient(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our command, which waits three seconds for an engine in place of twenty."""
    app, ours = engine.directory(), engine.area / "app"
    for path in ours.iterdir():
        if path.name not in ("__pycache__", "sandbox.py"):
            (app / path.name).symlink_to(path)
    source = (ours / "sandbox.py").read_text()
    assert "\nCALL_SECONDS = 20 " in source
    (app / "sandbox.py").write_text(source.replace("\nCALL_SECONDS = 20 ", "\nCALL_SECONDS = 3 "))
    monkeypatch.setattr(engine, "sandbox_argv", lambda *args: [PYTHON, str(app), *args])


# Whether the engine is rootless does not matter to its client.
@on_both_clients
def test_an_engine_that_does_not_answer_is_said(engine: Engine, project: Path, name: str,
                                                impatient: None) -> None:
    commands = (["ps"], ["rm", name], ["run", "-n", name, "-x", "true"], ["doctor"])
    with SilentEngine(engine) as silent, concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(engine.sandbox, *command, env=silent.env) for command in commands]
        for command, answer in zip(commands, [run.result() for run in runs], strict=True):
            assert answer.returncode == (125 if command[0] == "run" else 1), answer
            assert f"{engine.runtime} " in answer.stdout + answer.stderr
            assert "did not answer within 3 seconds" in answer.stdout + answer.stderr
        assert silent.connections
        wait_for(lambda: not silent.clients(engine.runtime))


@on_docker
def test_a_client_that_is_stopped_is_killed(engine: Engine, project: Path, name: str,
                                            impatient: None) -> None:
    folder = engine.directory()
    client = folder / engine.runtime
    client.write_text(
        f"#!/bin/sh\necho $$ >>{folder}/pids\n"
        f"sleep 1000 & echo $! >>{folder}/pids\nkill -STOP $$\n")
    client.chmod(0o755)
    answer = engine.sandbox("ps", env={"PATH": f"{folder}:{engine.environ()['PATH']}"})
    assert answer.returncode == 1 and "did not answer within 3 seconds" in answer.stderr
    left = [Path("/proc", pid, "stat") for pid in (folder / "pids").read_text().split()]
    assert len(left) == 2
    wait_for(lambda: all(not stat.exists() or ") Z " in stat.read_text() for stat in left))


# --- Bad input leaves nothing ---


@pytest.mark.parametrize(
    "flags, message",
    [
        (["-v", "/nonexistent-dir:/x"], "/nonexistent-dir"),
        (["--hp", "/nonexistent-dir"], "/nonexistent-dir"),
        (["--iv", "9.9-common"], "sandbox build"),
        (["--net", "none", "-p", "1:1"], "ports"),
        (["-v", "/tmp:/a", "-v", "/var:/a"], "two mounts go to /a"),
        (["--hp", "/run", "--cp", "/x"], "engine's socket"),
        (["--cp", "/etc"], "would cover"),
        (["-v", "/proc:/x"], "kernel"),
    ],
)
def test_a_run_that_cannot_start_leaves_nothing(
    engine: Engine, project: Path, name: str, flags: list[str], message: str
) -> None:
    def unused() -> set[str]:  # sessions of other tests come and go meanwhile
        listed = engine.run("volume", "ls", "-q", "--filter", "dangling=true").stdout.split()
        return {volume for volume in listed if volume.startswith("sandbox-")}

    networks, before = engine.run("network", "ls").stdout, unused()
    answer = engine.sandbox("run", "-n", name, *flags, "-x", "echo ran")
    assert (answer.returncode, answer.stdout) == (125, ""), answer.stderr
    assert message in answer.stderr
    assert name not in engine.names()
    assert engine.run("network", "ls").stdout == networks
    wait_for(lambda: unused() <= before)


@pytest.fixture(scope="module")
def session_of_many(engine: Engine) -> Iterator[str]:
    name = f"t-shared-{os.getpid()}{engine.host}"
    made = engine.sandbox("run", "-n", name, "--hp", str(engine.area), "-x", "true")
    assert made.returncode == 0, made.stderr
    yield name
    engine.sandbox("rm", name)


@pytest.fixture
def shared_session(engine: Engine, session_of_many: str) -> str:
    """A running session for tests that leave nothing in it, and its directory."""
    engine.project = engine.area
    return session_of_many
