"""The home of a session outlives the container, goes with `rm`, and is copied for a duplicate."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    IMAGE,
    TOKEN,
    Engine,
    Held,
    Result,
    everywhere,
    on_docker,
    unique_name,
    write_config,
)
from network import inspected
from service import Service, wait_for

import sandbox


def homes(engine: Engine) -> set[str]:
    """The homes that there are, of all sessions."""
    return {name for name in engine.volumes() if name.startswith("sandbox-home-")}


def home_of(engine: Engine, name: str) -> str:
    return inspected(engine, name, '{{index .Config.Labels "sandbox.home"}}')


def made_from(engine: Engine, name: str) -> Any:
    """What a session was created from; not every engine has the limits in force."""
    return json.loads(inspected(engine, name, '{{index .Config.Labels "sandbox.created"}}'))["spec"]


def named(trace: str) -> set[str]:
    """The homes that a traced command has named."""
    return set(re.findall("sandbox-home-[0-9a-f]{10}", trace))


def gone(engine: Engine, trace: str) -> bool:
    """Whether a traced command had homes, and all are gone."""
    assert named(trace)
    return not named(trace) & homes(engine)


def said(engine: Engine, name: str, command: str, *options: str, **where: Any) -> str:
    ran = engine.sandbox("run", "-n", name, *options, "-x", command, **where)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def recreated(engine: Engine, name: str, *options: str, **where: Any) -> Result:
    answer = engine.sandbox("recreate", name, *options, **where)
    assert (answer.returncode, answer.stdout) == (0, f"{name}\n"), answer.stderr
    return answer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- A new container ---


def test_the_command_that_a_run_prints_keeps_the_home(engine: Engine, project: Path, home: Path,
                                                      name: str) -> None:
    ports = f"{free_port()}:80", f"{free_port()}:81"
    said(engine, name, "echo kept >~/file; echo gone >/tmp/file", "-p", ports[0])
    first = inspected(engine, name, "{{.Id}}"), home_of(engine, name)
    asked = ("-p", ports[1], "--pids-limit", "500")
    ran = engine.sandbox("run", "-n", name, *asked, "-x", "true")
    (line,) = [line for line in ran.stderr.splitlines() if "sandbox recreate" in line]
    words = shlex.split(line.partition("conversations: sandbox ")[2])
    assert words[:2] == ["recreate", name]
    made = engine.sandbox(*words)
    assert (made.returncode, made.stdout) == (0, f"{name}\n"), made.stderr
    ran = engine.sandbox("run", "-n", name, *asked, "-x", "cat ~/file; ls /tmp/file")
    assert (ran.stdout, "differs" in ran.stderr) == ("kept\n", False)
    assert inspected(engine, name, "{{.Id}}") != first[0] and home_of(engine, name) == first[1]
    assert made_from(engine, name)["pidsLimit"] == 500
    published = inspected(engine, name, "{{json .HostConfig.PortBindings}}")
    assert all(f'"HostPort":"{port.split(":")[0]}"' in published for port in ports)
    assert [other for other in engine.names() if other.startswith(f"{name}.")] == []
    assert engine.sandbox("rm", name).returncode == 0
    assert first[1] not in homes(engine)


@on_docker
def test_what_is_given_takes_the_place_of_what_was_given(engine: Engine, project: Path, home: Path,
                                                         name: str) -> None:
    one, two = engine.directory(), engine.directory()
    write_config(home, volumes=[f"{home}:/configured:ro"])
    said(engine, name, "true", "-v", f"{one}:/one", "--pids-limit", "300")
    recreated(engine, name, "-v", f"{two}:/two")
    assert said(engine, name, "ls -d /one /two /configured 2>/dev/null || :").split() == [
        "/configured", "/two"]
    assert made_from(engine, name)["pidsLimit"] == 300
    recreated(engine, name, "-v", "", "--net", "none")
    assert said(engine, name, "ls -d /two /configured 2>/dev/null; ls /sys/class/net").split() == [
        "/configured", "lo"]
    refused = engine.sandbox("recreate", name, "-v", "/nowhere-at-all:/x")
    assert refused.returncode == 1 and "nowhere-at-all" in refused.stderr
    assert f"{name} is there as it was, stopped" in refused.stderr
    assert said(engine, name, "ls -d /configured") == "/configured\n"


def test_a_mount_in_the_home_stays_the_hosts_and_leaves_nothing(engine: Engine, project: Path,
                                                                home: Path, name: str) -> None:
    theirs = engine.directory()
    (theirs / "key").write_text("theirs")
    (theirs / "key").chmod(0o644)
    (theirs / "dir").mkdir()
    mounts = (f"{theirs}/key:/home/agent/.agent/key", f"{theirs}/dir:/home/agent/.agent/dir:ro")
    said(engine, name, "cat ~/.agent/key; echo mine >~/.agent/state",
         *(word for mount in mounts for word in ("-v", mount)))
    recreated(engine, name, "-v", mounts[1])
    assert said(engine, name, "cd ~/.agent; ls; cat state").split() == ["dir", "state", "mine"]
    duplicate = engine.sandbox("run", "--from", name, "-n", f"{name}-2", "-v", "", "-x", "true")
    assert duplicate.returncode == 2  # no mount has this form
    assert (theirs / "key").read_text() == "theirs" and (theirs / "dir").is_dir()


@on_docker
def test_a_home_belongs_to_an_ordinary_user_and_what_is_mounted_there_does_not(
    engine: Engine, name: str
) -> None:
    """Both may be on one device: that a walk stays on it says nothing."""
    project, home = (engine.directory("sandbox-test") for _ in range(2))
    theirs = engine.directory("root") / "with [a] sp*ce"
    theirs.mkdir()
    (theirs / "file").touch()
    write_config(home, volumes=[f"{theirs}:/home/agent/.agent/with [a] sp*ce"])
    where: dict[str, Any] = {"user": "sandbox-test", "cwd": project, "home": home}
    look = "touch ~/mine ~/.agent/mine; stat -c '%U %n' ~ ~/.agent ~/.agent/mine ~/mine"
    for command in (("run", "-n", name, "-x", look), ("recreate", name),
                    ("run", "-n", name, "-x", look)):
        answer = engine.sandbox(*command, **where)
        assert answer.returncode == 0, answer.stderr
        owners = {line.split()[0] for line in answer.stdout.splitlines()}
        assert owners == ({"agent"} if command[0] == "run" else {name})
    assert [path.stat().st_uid for path in (theirs, theirs / "file")] == [0, 0]


def test_who_uses_it_is_asked_about_and_told(engine: Engine, project: Path, home: Path,
                                             name: str) -> None:
    said(engine, name, "true")
    user = engine.popen("run", "-n", name, "-x", "echo began; sleep 1000")
    assert user.stdout and user.stdout.readline() == "began\n"
    with engine.pty("recreate", name) as recreate:
        assert "sleep 1000" in recreate.expect("Create its container anew all the same? [y/N] ")
        recreate.send("n\n")
        recreate.expect(f"{name} was left as it is")
        assert recreate.wait() == 1
    assert user.poll() is None
    recreated(engine, name)  # a script has decided
    assert user.communicate(timeout=60)[1].endswith(
        f"the session {name} was created anew by another command\n")


@on_docker
def test_env_files_and_the_names_of_variables_go_along(engine: Engine, project: Path, home: Path,
                                                       name: str) -> None:
    files = [home / "a.env", home / "b.env"]
    for path in files:
        path.write_text(f"export FILE={path.name}\n")
        path.chmod(0o644)
    show = "echo $FILE $GIVEN"
    given = {"GIVEN": "given"}
    engine.sandbox("run", "-n", name, "--ef", str(files[0]), "-e", "GIVEN", "-x", "true", env=given)
    recreated(engine, name)
    assert engine.sandbox("run", "-n", name, "-x", show, env=given).stdout == "a.env given\n"
    copied = engine.sandbox("run", "--from", name, "-n", f"{name}-2", "-x", show, env=given)
    assert copied.stdout == "a.env given\n", copied.stderr
    assert engine.sandbox("run", "-n", f"{name}-2", "-x", show, env=given).stdout == copied.stdout
    recreated(engine, name, "--ef", str(files[1]))
    assert said(engine, name, "echo $FILE") == "b.env\n"


def test_what_fails_half_way_leaves_the_session_as_it_was(engine: Engine, project: Path,
                                                          home: Path, name: str) -> None:
    said(engine, name, "echo kept >~/file; echo kept >/tmp/file")
    id = inspected(engine, name, "{{.Id}}")
    missing = engine.sandbox("recreate", name, "--iv", "9.9-common")
    assert missing.returncode == 1 and "has no image" in missing.stderr
    assert inspected(engine, name, "{{.State.Status}}") == "running"  # nothing was touched
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failed = engine.sandbox("recreate", name, "-p", f"{taken.getsockname()[1]}:80")
    assert failed.returncode == 1 and f"{name} is there as it was, stopped" in failed.stderr
    assert inspected(engine, name, "{{.Id}} {{.State.Status}}") == f"{id} exited"
    assert said(engine, name, "cat ~/file /tmp/file") == "kept\nkept\n"
    assert engine.sandbox("recreate", f"{name}-nope").returncode == 1


@everywhere
def test_ctrl_c_while_it_is_created_anew_loses_nothing(engine: Engine, project: Path, home: Path,
                                                       name: str) -> None:
    said(engine, name, "echo kept >~/file")
    for sign in (" rename ", " create " if engine.host else " run -d "):
        held = None if engine.host else Held(engine, f"*'{sign}'*")
        env = {"SANDBOX_TRACE": "1", **(held.env if held else {})}
        with engine.popen("recreate", name, env=env) as recreate:
            assert recreate.stderr
            assert next(line for line in recreate.stderr if sign in line)
            recreate.send_signal(signal.SIGINT)
            if held:
                held.go()
            recreate.stderr.read()
            assert recreate.wait(60) == 130
        assert said(engine, name, "cat ~/file") == "kept\n"
        assert [other for other in engine.names() if other.startswith(name)] == [name]


def test_ctrl_c_finds_what_is_created_already(engine: Engine, project: Path, home: Path,
                                              name: str) -> None:
    (project / ".git").mkdir()
    inner = project / "inner"
    inner.mkdir()
    inner.chmod(0o777)
    id = said(engine, name, "echo kept >~/file; hostname", cwd=inner)
    out, full = os.pipe()  # where it is to say something of git, between creation and return
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, bytes(4096))
    os.set_blocking(full, True)
    where = engine.where(cwd=inner)
    with subprocess.Popen(engine.sandbox_argv("recreate", name), stderr=full, **where) as recreate:
        os.close(full)
        children = Path(f"/proc/{recreate.pid}/task/{recreate.pid}/children")

        def is_created() -> bool:
            ran = engine.run("exec", name, "hostname")
            return ran.returncode == 0 and ran.stdout != id and not children.read_text()

        wait_for(is_created)
        recreate.send_signal(signal.SIGINT)
        with open(out, errors="replace") as printed:
            assert "Traceback" not in printed.read()
        assert recreate.wait(60) == 130
    assert [other for other in engine.names() if other.startswith(name)] == [name]
    assert said(engine, name, "cat ~/file; hostname", cwd=inner) == f"kept\n{id}"


class SlowDaemon(socketserver.ThreadingUnixStreamServer):
    """The way to docker's daemon: what creates a container comes there when it is let through,
    whether its client has waited or not.
    """

    daemon_threads = True
    came, through = threading.Event(), threading.Event()

    class RequestHandlerClass(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as daemon:
                daemon.connect("/var/run/docker.sock")
                threading.Thread(target=self.answers, args=[daemon]).start()
                with contextlib.suppress(OSError):
                    while data := self.request.recv(65536):
                        if b"/containers/create?" in data:
                            SlowDaemon.came.set()
                            SlowDaemon.through.wait(60)
                        daemon.sendall(data)

        def answers(self, daemon: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := daemon.recv(65536):
                    self.request.sendall(data)


@on_docker
def test_ctrl_c_waits_for_a_daemon_that_creates(engine: Engine, project: Path, home: Path,
                                                name: str) -> None:
    said(engine, name, "echo kept >~/file")
    path = engine.area / f"{name}.sock"
    with SlowDaemon(str(path), SlowDaemon.RequestHandlerClass) as relay:
        threading.Thread(target=relay.serve_forever).start()
        for words in (["recreate", name], ["run", "-n", f"{name}-2", "-x", "true"]):
            relay.came.clear()
            relay.through.clear()
            with engine.pty(*words, env={"DOCKER_HOST": f"unix://{path}"}) as made:
                assert relay.came.wait(60)
                made.send("\x03")  # it comes to the client as well
                made.quiet()  # so long it is still to wait
                relay.through.set()
                assert made.wait(60) == 130
        relay.shutdown()
    assert said(engine, name, "cat ~/file") == "kept\n"
    assert [other for other in engine.names() if other.startswith(name)] == [name]


def test_a_power_cut_while_it_is_created_anew_loses_nothing(engine: Engine, project: Path,
                                                            home: Path, name: str) -> None:
    said(engine, name, "echo kept >~/file")
    held = Held(engine, "*' run -d '*")
    with engine.popen("recreate", name, env={"SANDBOX_TRACE": "1", **held.env}) as recreate:
        assert recreate.stderr
        renamed = next(line for line in recreate.stderr if " rename " in line).split()[-1]
        next(line for line in recreate.stderr if " run -d " in line)  # and now all is killed
    held.go()
    assert renamed in engine.sandbox("ps", "-q").stdout.split()

    def came_back() -> bool:
        engine.sandbox("rm", name)  # where the engine has gone on alone; the home is in use
        return engine.sandbox("rename", renamed, name).returncode == 0

    wait_for(came_back)
    assert said(engine, name, "cat ~/file") == "kept\n"


def test_a_container_that_ends_at_once_does_not_take_the_place_of_one_that_runs(
    engine: Engine, project: Path, home: Path, name: str, image_of_many: str
) -> None:
    said(engine, name, "echo kept >~/file")
    failed = engine.sandbox("recreate", name, "--in", image_of_many, "--iv", "1.0-ending")
    assert failed.returncode == 1 and "ended as soon as it was started" in failed.stderr
    assert said(engine, name, "cat ~/file") == "kept\n"


@pytest.fixture(scope="module")
def image_of_many(engine: Engine) -> Iterator[str]:
    """Versions of an image: two that bring files in a home, and one whose containers end."""
    name = f"localhost/{TOKEN}-many"
    scripts = {
        "1.0-old": "mkdir -p /home/agent/notes /etc/skel; cd /home/agent/notes; "
                   "for f in same changed gone; do echo old >$f; done; echo old >/etc/skel/.rc",
        "1.0-new": "mkdir -p /home/agent/notes /etc/skel; cd /home/agent/notes; "
                   "for f in same changed more; do echo new >$f; done; echo new >/etc/skel/.rc",
        "1.0-ending": "rm /bin/sh; printf '#!/bin/busybox sh\\n[ \"$4\" != 0 ] || exit 3\\n"
                      "exec busybox sh \"$@\"' >/bin/sh; chmod 755 /bin/sh"}
    for version, script in scripts.items():
        made = unique_name()
        engine.run("run", "--name", made, IMAGE, "sh", "-c", script)
        committed = engine.run("commit", made, f"{name}:{version}")
        assert committed.returncode == 0, committed.stderr
        engine.run("rm", made)
    yield name
    engine.run("rmi", *(f"{name}:{version}" for version in scripts))


def test_another_image_brings_its_files_and_keeps_what_was_changed(
    engine: Engine, project: Path, home: Path, name: str, image_of_many: str
) -> None:
    said(engine, name, "cd ~; echo mine >notes/changed; echo said >conversation",
         "--in", image_of_many, "--iv", "1.0-old")
    recreated(engine, name, "--iv", "1.0-new")
    shown = said(engine, name, "cd ~; grep . notes/* .rc conversation")
    assert shown.split() == ["notes/changed:mine", "notes/more:new", "notes/same:new", ".rc:new",
                             "conversation:said"]
    with socket.create_server(("127.0.0.1", 0)) as taken:  # and what it has done is undone
        failed = engine.sandbox("recreate", name, "--iv", "1.0-old", "-p",
                                f"{taken.getsockname()[1]}:80")
    assert failed.returncode == 1
    assert said(engine, name, "cd ~; grep . notes/* .rc conversation") == shown


def test_nothing_in_a_home_leads_out_of_it(engine: Engine, project: Path, home: Path, name: str,
                                           image_of_many: str) -> None:
    """Links, pipes and folders where an image has files; what is mounted stays as it is."""
    (project / "target").write_text("old\n")
    (project / "target").chmod(0o666)
    said(engine, name,
         f"cd ~; rm notes/*; ln -s {project}/target notes/same; mkfifo notes/changed; "
         f"mkdir notes/gone .rc.d; rm .rc; ln -s /etc/passwd .rc; ln -s {project} out; "
         "mkfifo pipe; echo said >conversation", "--in", image_of_many, "--iv", "1.0-old")
    recreated(engine, name, "--iv", "1.0-new")
    assert (project / "target").read_text() == "old\n"
    assert os.listdir(project) == ["target"]
    duplicate = engine.sandbox("run", "--from", name, "-n", f"{name}-2", "-x",
                               "cd ~; cat conversation; ls -F; readlink out")
    assert duplicate.returncode == 0, duplicate.stderr
    assert duplicate.stdout.split() == ["said", "conversation", "notes/", "out@", "pipe|",
                                        str(project)]
    assert (project / "target").read_text() == "old\n"


def test_the_home_that_the_host_has_mounted_is_no_volume(engine: Engine, project: Path, home: Path,
                                                         name: str) -> None:
    theirs = engine.directory()
    said(engine, name, "echo kept >~/file", "-v", f"{theirs}:/home/agent")
    assert (theirs / "file").read_text() == "kept\n"
    assert home_of(engine, name) not in homes(engine)
    assert os.listdir(theirs) == ["file"]
    engine.sandbox("rm", name)
    assert (theirs / "file").exists()


# --- Another name, a duplicate ---


def test_a_session_with_another_name_is_the_same(engine: Engine, project: Path, home: Path,
                                                 name: str) -> None:
    other, settings = f"{name}-other", home / "sessions"
    said(engine, name, "echo kept | tee ~/file >/tmp/file", "--allow", "127.0.0.9")
    assert engine.sandbox("net", "allow", name, "127.0.0.8").returncode == 0
    said(engine, f"{name}-taken", "true")
    taken = engine.sandbox("rename", name, f"{name}-taken")
    assert taken.returncode == 1 and f"there is a container {name}-taken already" in taken.stderr
    assert engine.sandbox("rename", name, "-").returncode == 1
    renamed = engine.sandbox("rename", name, other)
    assert (renamed.returncode, renamed.stdout) == (0, f"{other}\n"), renamed.stderr
    assert said(engine, other, "cat ~/file /tmp/file") == "kept\nkept\n"
    assert json.loads(engine.sandbox("net", "show", other).stdout) == {
        "allow": ["127.0.0.9", "127.0.0.8"]}
    assert engine.sandbox("rm", name).returncode == 1
    assert not [path for path in settings.iterdir() if path.name.startswith(f"{name}.")]
    recreated(engine, other)
    assert said(engine, other, "cat ~/file") == "kept\n"
    assert engine.sandbox("rm", other).returncode == 0
    assert not list(home.rglob(f"{other}*"))


@on_docker
def test_a_name_that_it_has_is_no_new_name(engine: Engine, project: Path, home: Path,
                                           name: str) -> None:
    said(engine, name, "echo kept >~/file")
    refused = engine.sandbox("rename", name, name)
    assert refused.returncode == 1 and f"{name} has that name already" in refused.stderr
    assert said(engine, name, "cat ~/file") == "kept\n"


@on_docker
def test_a_limit_can_be_taken_back(engine: Engine, project: Path, home: Path, name: str) -> None:
    said(engine, name, "true", "--memory", "256m", "--cpus", "1", "--pids-limit", "500")
    recreated(engine, name, "--memory", "", "--pids-limit", "")
    made = made_from(engine, name)
    assert [made[key] for key in ("memory", "cpus", "pidsLimit")] == [None, "1", 4096]
    help = engine.sandbox("recreate", "--help").stdout
    assert "default:" not in help and "What is not given stays as it is" in help


def test_an_open_run_follows_a_rename(engine: Engine, name: str) -> None:
    """What it prints and removes is not that of the session that has its first name by then."""
    other = f"other-{name}"
    with engine.pty("run", "-n", name) as terminal:
        terminal.send("echo rea''dy\n")
        terminal.expect("ready")
        assert engine.sandbox("rename", name, other).returncode == 0
        assert engine.sandbox("run", "-n", name, "-d", "-x", "sleep 1000").returncode == 0
        terminal.send("exit\n")
        terminal.expect(f"the container {other} is still there")
        terminal.expect("Keep it?")
        terminal.send("n\n")
        assert terminal.process.wait(60) == 0
    assert engine.sandbox("ps", "-q").stdout.split().count(other) == 0
    assert "sleep 1000" in engine.sandbox("ps", name).stdout
    engine.sandbox("rm", "-f", name)


@on_docker
def test_a_job_ends_in_the_session_that_was_renamed(service: Service, name: str) -> None:
    engine, other = service.engine, f"{name}-other"
    service.create(name)
    job = service.job(name, "until [ -e go ]; do sleep 0.1; done; echo said; exit 3")
    assert engine.sandbox("rename", name, other).returncode == 0
    (engine.project / "go").touch()
    path = f"/api/sessions/{other}/jobs/{job['id']}"
    wait_for(lambda: service.get(path).json["state"] == "ended")
    assert service.get(path).json["exit"] == 3
    assert service.get(f"{path}/output").body == b"said\n"
    assert service.get(f"/api/sessions/{name}").status == 404


def test_a_duplicate_has_a_home_of_its_own(engine: Engine, project: Path, home: Path,
                                           name: str) -> None:
    other, data, port = f"{name}-2", engine.directory(), free_port()
    write_config(home, runs={"work": {"env": {"FROM": "profile"}}})
    said(engine, name, "echo kept >~/file; echo gone >/tmp/file", "-r", "work",
         "-v", f"{data}:/data", "-p", f"{port}:80")
    (home / "sessions").mkdir(exist_ok=True)
    (home / "sessions" / f"{name}.json").write_text('{"env": {"SET": "here"}}')
    for path in (home / "sessions", home / "sessions" / f"{name}.json"):
        os.chown(path, engine.uid, engine.gid)
    made = engine.sandbox("run", "--from", name, "-n", other, "-x",
                          "cat ~/file; ls -d /data /tmp/file; echo $FROM $SET; echo more >>~/file")
    assert made.stdout.split() == ["kept", "/data", "profile", "here"], made.stderr
    assert said(engine, name, "cat ~/file") == "kept\n"
    rows = {row["name"]: row for row in json.loads(engine.sandbox("ps", "--json").stdout)}
    assert rows[other]["directory"] == rows[name]["directory"] == str(project)
    again = engine.sandbox("run", "--from", name, "-n", other, "-x", "true")
    assert again.returncode == 125 and f"there is a session {other} already" in again.stderr
    nobody = engine.sandbox("run", "--from", f"{name}-nope", "-n", f"{name}-3", "-x", "true")
    assert nobody.returncode == 125 and "there is no container" in nobody.stderr
    failed = engine.sandbox("run", "--from", name, "-p", f"{port}:80", "-x", "true",
                            env={"SANDBOX_TRACE": "1"})
    assert failed.returncode == 125
    assert named(failed.stderr) & homes(engine) == {home_of(engine, name)}
    engine.sandbox("rm", name)
    assert said(engine, other, "cat ~/file") == "kept\nmore\n"


# --- At the same moment ---


@on_docker
@pytest.mark.parametrize("moment", ["stop", "run -d"])
@pytest.mark.parametrize("other", ["recreate", "rm", "rename", "run", "prune"])
def test_what_changes_a_session_waits_for_what_changes_it(
    engine: Engine, project: Path, home: Path, name: str, other: str, moment: str
) -> None:
    """Before its container has another name, and after that."""
    said(engine, name, "echo kept >~/file")
    kept, more = home_of(engine, name), f"{name}-b"
    words = {"recreate": ("recreate", name), "rm": ("rm", name), "rename": ("rename", name, more),
             "run": ("run", "--from", name, "-n", more, "-x", "cat ~/file"), "prune": ("prune",)}
    held = Held(engine, f"*' {moment} '*")
    with engine.popen("recreate", name, env={"SANDBOX_TRACE": "1", **held.env}) as first:
        assert first.stderr
        next(line for line in first.stderr if f" {moment} " in line)
        os.kill(first.pid, signal.SIGSTOP)
        held.go()
        with engine.popen(*words[other]) as second:
            assert second.stderr and "waiting for another command" in second.stderr.readline()
            os.kill(first.pid, signal.SIGCONT)
            out, err = second.communicate(timeout=60)
        first.communicate(timeout=60)
        assert first.returncode == 0
    if other == "prune" or moment == "run -d":
        assert second.returncode == 0 and kept not in out.split(), err
    else:  # it was about another container
        assert second.returncode and "was changed by another command at this moment" in err
    there = {n for n in engine.names() if n.startswith(name)}
    if moment == "stop" or other in ("recreate", "prune"):
        assert there == {name}
    else:
        assert there == {"rm": set(), "rename": {more}, "run": {name, more}}[other]
    for left in there:
        assert said(engine, left, "cat ~/file") == "kept\n"
    assert (kept in homes(engine)) == bool(there)


@on_docker
def test_prune_leaves_a_home_that_is_just_copied(engine: Engine, project: Path, home: Path,
                                                 name: str) -> None:
    said(engine, name, "echo kept >~/file")
    held = Held(engine, "*' --read-only '*")
    with engine.popen("run", "--from", name, "-n", f"{name}-b", "-x", "cat ~/file",
                      env={"SANDBOX_TRACE": "1", **held.env}) as copy:
        assert copy.stderr
        copied = next(line for line in copy.stderr if " --read-only " in line)
        (left,) = named(copied) - {home_of(engine, name)}
        os.kill(copy.pid, signal.SIGSTOP)
        held.go()
        wait_for(lambda: left in homes(engine) and "sandbox-step" not in engine.run("ps").stdout)
        with engine.popen("prune") as prune:
            assert prune.stderr and "waiting for another command" in prune.stderr.readline()
            os.kill(copy.pid, signal.SIGCONT)
            assert left not in prune.communicate(timeout=60)[0].split()
        assert copy.communicate(timeout=60)[0] == "kept\n"


@on_docker
def test_what_copies_a_home_may_little_and_ends(engine: Engine, project: Path, home: Path,
                                                name: str) -> None:
    """The sh that does it may be anybody's: a session of before is copied by what it has become."""
    volume, step_name = f"{name}-volume", f"{name}-step"
    argv = sandbox.home_argv(sandbox.ENGINES[engine.runtime](), step_name, IMAGE, volume, "copy",
                             "/x")
    argv = argv[1 : argv.index("--entrypoint")]

    def inside(script: str) -> list[str]:
        return [*argv, "--entrypoint", "sh", IMAGE, "-c", script]

    shown = engine.run(*inside("grep CapBnd /proc/self/status; ls /sys/class/net; touch /x"))
    assert shown.stdout.split() == ["CapBnd:", "000000000000001b", "lo"], shown.stderr
    assert shown.returncode
    stubborn = [engine.runtime, *inside("trap '' TERM INT; sleep 1000 & wait; sleep 1000")]
    step = sandbox.Step("copy", ended_by=[engine.runtime, "rm", "-f", step_name])
    with pytest.raises(sandbox.SandboxError, match="takes too long"):
        step.run(stubborn, {**os.environ, **engine.environ()}, seconds=1)
    assert step_name not in engine.names()
    engine.run("volume", "rm", volume)


# --- Removal ---


def test_a_home_goes_with_its_session(engine: Engine, project: Path, home: Path,
                                      name: str) -> None:
    traced = {"SANDBOX_TRACE": "1"}
    ran = engine.sandbox("run", "-n", name, "--rm-on-exit", "-x", "true", env=traced)
    assert ran.returncode == 0, ran.stderr
    wait_for(lambda: gone(engine, ran.stderr))
    with engine.pty("run", "-n", name, "-x", "true", env=traced) as screen:
        screen.expect("[n] remove it, its conversations and snapshots")
        screen.expect("Keep it?")
        screen.send("n\n")
        screen.expect(f"removed {name} with its conversations")
        assert screen.wait() == 0
    wait_for(lambda: gone(engine, screen.output))
    left = [*(home / "locks").iterdir(), *(home / "making").glob("*")]
    assert left == []


def test_prune_takes_the_homes_of_no_session(engine: Engine, project: Path, home: Path,
                                             name: str) -> None:
    said(engine, name, "true")
    said(engine, f"{name}-kept", "echo kept >~/file")
    left, kept = home_of(engine, name), home_of(engine, f"{name}-kept")
    engine.run("rm", "-f", *(["--time=0"] if engine.runtime == "podman" else []), name)
    engine.run("stop", "-t", "0", f"{name}-kept")
    assert left in engine.sandbox("prune", "--dry-run").stdout.split()
    pruned = engine.sandbox("prune").stdout.split()
    assert left in pruned and kept not in pruned
    assert left not in homes(engine)
    assert said(engine, f"{name}-kept", "cat ~/file") == "kept\n"


def test_a_home_whose_container_others_removed_is_taken_again(engine: Engine, project: Path,
                                                              home: Path, name: str) -> None:
    said(engine, name, "echo kept >~/file")
    kept = home_of(engine, name)
    remove = ("rm", "-f", *(["--time=0"] if engine.runtime == "podman" else []))
    engine.run(*remove, name)
    told = engine.sandbox("prune", "--dry-run")
    assert f"{kept} is the home of {name}" in told.stderr and kept in told.stdout.split()
    assert "is gone" in engine.sandbox("run", "-n", name, "-x", "true").stderr
    failed = engine.sandbox("run", "-n", name, "-v", "/nowhere-at-all:/x", "-x", "true")
    assert failed.returncode == 125 and kept in homes(engine)
    ran = engine.sandbox("run", "-n", name, "-x", "cat ~/file")
    assert ran.stdout == "kept\n" and "its home was kept" in ran.stderr
    assert home_of(engine, name) == kept
    engine.run(*remove, name)
    engine.run("volume", "rm", kept)
    assert "is gone" in engine.sandbox("run", "-n", name, "-x", "true").stderr
    ran = engine.sandbox("run", "-n", name, "-x", "ls ~/file")
    assert ran.returncode and "its home was kept" not in ran.stderr
    assert engine.sandbox("rm", name).returncode == 0
    ran = engine.sandbox("run", "-n", name, "-x", "true")
    assert ran.stderr == ""  # removed as it should be


@on_docker
def test_a_label_names_no_volume_but_a_home(engine: Engine, project: Path, home: Path,
                                            name: str) -> None:
    """Anyone can give a container our labels."""
    volume = f"{name}-data"
    engine.run("volume", "create", volume)
    engine.run("run", "-d", "--init", "--name", name, "--label", "sandbox.session=0123456789",
               "--label", f"sandbox.home={volume}", IMAGE, "sleep", "1000")
    assert engine.sandbox("rm", name).returncode == 0
    assert volume in engine.run("volume", "ls", "-q").stdout.split()
    engine.run("volume", "rm", volume)


# --- In the browser ---


@on_docker
def test_the_web_service_creates_a_session_anew_with_its_home(service: Service, name: str) -> None:
    path = f"/api/sessions/{name}"
    service.create(name)
    assert service.ended(service.job(name, "echo kept >~/file; touch /tmp/gone"))["exit"] == 0
    kept = home_of(service.engine, name)
    assert service.post(f"{path}/recreate").status == 200
    job = service.ended(service.job(name, "cat ~/file; ls /tmp/gone"))
    assert service.get(f"{path}/jobs/{job['id']}/output?stream=stdout").body == b"kept\n"
    assert service.request("DELETE", path).status == 200
    assert kept not in homes(service.engine)


@on_docker
def test_the_web_service_renames_and_duplicates(service: Service, name: str) -> None:
    path, other, more = f"/api/sessions/{name}", f"{name}-other", f"{name}-more"
    service.create(name, env={"SET": "here"})
    assert service.ended(service.job(name, "echo kept >~/file"))["exit"] == 0
    with service.terminal(name) as screen:
        screen.type("echo al''ive\n")
        screen.expect("alive")
        for wrong, status in (({}, 400), ({"name": "-"}, 400), ({"name": name}, 409)):
            assert service.post(f"{path}/rename", wrong).status == status
        renamed = service.post(f"{path}/rename", {"name": other})
        assert (renamed.status, renamed.json["name"]) == (200, other)
        screen.type("echo still al''ive\n")
        screen.expect("still alive")
        assert [row["session"] for row in
                service.get(f"/api/sessions/{other}/terminals").json] == [other]
    path = f"/api/sessions/{other}"
    assert service.post(f"{path}/duplicate", {"name": other}).status == 409
    made = service.post(f"{path}/duplicate", {"name": more})
    assert (made.status, made.json["name"]) == (201, more), made.body
    job = service.ended(service.job(more, "cat ~/file; echo $SET"))
    output = service.get(f"/api/sessions/{more}/jobs/{job['id']}/output?stream=stdout").body
    assert output == b"kept\nhere\n"
    assert home_of(service.engine, more) != home_of(service.engine, other)
    unnamed = service.post(f"{path}/duplicate", {})
    assert unnamed.status == 201 and unnamed.json["name"] not in (other, more)
    service.request("DELETE", f"/api/sessions/{unnamed.json['name']}")


# --- Decisions ---


def test_a_home_has_the_name_of_a_home() -> None:
    def home(label: str) -> str:
        return sandbox.Session("demo", "", {"sandbox.home": label}).home

    assert home("sandbox-home-0123456789") == "sandbox-home-0123456789"
    assert [home(label) for label in ("", "data", "sandbox-home-a/b", "../sandbox-home-1:/x")] == [
        ""] * 4
