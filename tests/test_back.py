"""Coming back to a session: what is remembered, what is printed, asked and said, on each engine."""

import contextlib
import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import PYTHON, Engine, Terminal, on_both_clients, on_docker, unique_name, write_config
from service import free_port, wait_for
from test_engines import inspect, sleeping

import sandbox
from sandbox import ENGINE_STATUS, KILLED

PROMPT = "Keep it? [y] "


@pytest.fixture
def agents(engine: Engine, project: Path, home: Path) -> Path:
    """A program that stands where agents would, and says how it was started and what it was given;
    a command named sandbox; what a person's configuration holds."""
    program = project / "claude"
    program.write_text(
        '#!/bin/sh\nfor n in FILE LATER GIVEN PLAIN PROFILE API_TOKEN; do\n'
        'eval "printf %s, \\"\\$$n\\""; done; echo "$(basename "$0"):$*:"\n')
    program.chmod(0o755)
    (project / "codex").symlink_to("claude")
    ours = home / "bin" / "sandbox"
    ours.parent.mkdir()
    ours.write_text(f'#!/bin/sh\nexec {PYTHON} {engine.area / "app"} "$@"\n')
    ours.chmod(0o755)
    for file, line in (("file", "FILE='of the file'"), ("later", "LATER=yes")):
        (project / f"{file}.env").write_text(line + "\n")
    write_config(home, env={"PATH": f"{project}:/bin"}, runs={"p": {"env": {"PROFILE": "p"}}})
    return ours.parent


def typed(engine: Engine, agents: Path, line: str, **env: str) -> Terminal:
    """A shell on a terminal, in which a line was typed."""
    path = f"{agents}:{engine.environ()['PATH']}"
    shell = Terminal(["/bin/sh"], 24, 200, **engine.where(env={"PATH": path, "PS1": "$ ", **env}))
    shell.send(f"{line}\n")
    return shell


# --- What is printed leads back ---

YOLO = "--dangerously-skip-permissions"
CODEX = "--dangerously-bypass-approvals-and-sandbox"
CREATED = ["--ef", "file.env", "-e", "GIVEN", "-e", "PLAIN=a b", "-r", "p"]


@on_docker
@pytest.mark.parametrize(("before", "options", "seen", "printed"), [
    (None, [*CREATED, "-y", "c"], f"of the file,,given,a b,p,,claude:{YOLO}",
     "-e 'PLAIN=a b' -- -c"),
    (["-y", "c"], [*CREATED, "--ef", "later.env", "-x", "codex", "--model", "m"],
     "of the file,yes,given,a b,p,,codex:--model m",
     "later.env -e GIVEN -e 'PLAIN=a b' -x codex --model m -- resume --last"),
    ([*CREATED, "-x", "true"], ["-y", "cx", "-e", "API_TOKEN=hush"],
     f"of the file,,given,,p,hush,codex:{CODEX}", "-e API_TOKEN -y cx -- resume --last"),
    ([*CREATED, "-x", "true"], ["-e", "PLAIN=b", "-x", "claude --model m"],
     "of the file,,given,b,p,,claude:--model m", "-e PLAIN=b -x 'claude --model m' -- -c"),
])
def test_the_printed_command_goes_on_as_it_was(
    engine: Engine, agents: Path, name: str, before: list[str] | None, options: list[str],
    seen: str, printed: str
) -> None:
    """It is typed as it was printed, in a shell."""
    given: dict[str, Any] = {"env": {"GIVEN": "given"}}
    if before is not None:
        made = engine.sandbox("run", "-n", name, *before, **given)
        assert made.returncode == 0, made.stderr
    with engine.pty("run", "-n", name, *options, cols=200, **given) as terminal:
        terminal.expect(f"{seen}:")
        terminal.expect(PROMPT)
        terminal.send("\n")
        assert terminal.wait() == 0
    command = terminal.output.rpartition("to come back: ")[2].splitlines()[0]
    assert command.startswith(f"sandbox run -n {name} ") and command.endswith(printed)
    resume = "resume --last" if "codex:" in seen else "-c"
    with typed(engine, agents, command, GIVEN="given", API_TOKEN="hush") as shell:
        shell.expect(f"{seen} {resume}:")
        shell.expect(PROMPT)
        shell.send("\n")
        shell.expect(f"to come back: {command}")


def test_a_session_remembers_files_and_names_and_no_value(engine: Engine, agents: Path, home: Path,
                                                          name: str) -> None:
    """A file that is gone, and a variable that is not there, are said and keep nobody out."""
    given = {"GIVEN": "s3cret-given"}
    run = ("run", "-n", name)
    assert engine.sandbox(*run, *CREATED, "-e", "API_TOKEN=s3cret-token", "-y", "c",
                          env=given).returncode == 0
    assert "s3cret" not in str(inspect(engine, name))
    kept = "".join(path.read_text() for path in home.rglob("*") if path.is_file())
    assert "s3cret" not in kept
    again = engine.sandbox(*run, "--", "-c", env=given)
    assert again.stdout == f"of the file,,s3cret-given,,p,,claude:{YOLO} -c:\n"
    assert f"{name} was created with -e PLAIN API_TOKEN, whose value is not kept" in again.stderr
    assert engine.sandbox("recreate", name).returncode == 0
    copy = f"{name}-copy"
    duplicate = engine.sandbox("run", "--from", name, "-n", copy, "--ef", "later.env", env=given)
    assert duplicate.stdout == f",yes,s3cret-given,,p,,claude:{YOLO}:\n"
    for session, files in ((name, "of the file,"), (copy, ",yes")):
        again = engine.sandbox("run", "-n", session, env=given)
        assert again.stdout == f"{files},s3cret-given,,p,,claude:{YOLO}:\n"
        assert "-e PLAIN API_TOKEN, whose value is not kept" in again.stderr
    (engine.project / "file.env").write_text("FILE=rotated\n")
    again = engine.sandbox(*run, "-e", "PLAIN=x", "-e", "API_TOKEN=y")
    assert again.stdout.startswith("rotated,,,x,p,y,")
    assert "created with -e GIVEN, whose" in again.stderr
    (engine.project / "file.env").unlink()
    again = engine.sandbox(*run, "-x", "echo ran")
    assert (again.returncode, again.stdout) == (0, "ran\n")
    assert again.stderr == (f"sandbox: {engine.project}/file.env, an env file that the session was "
                            "created with, is gone\n")


# --- Without a name ---


def made(engine: Engine, *options: str) -> str:
    """The name of a session that a script has made without giving one."""
    ran = engine.sandbox("run", *options, "-x", "true")
    assert ran.returncode == 0
    (line,) = ran.stderr.splitlines()
    found = re.fullmatch(r"sandbox: made the session (\S+); to come back: sandbox run -n \1", line)
    assert found, line
    return found[1]


def ask(engine: Engine, question: str, answer: str, *options: str) -> str:
    """The host name that a run without a name has printed, once it has asked and was answered."""
    with engine.pty("run", *options, "-x", "echo host=$(hostname)", cols=200) as terminal:
        if question:
            terminal.expect(question)
            terminal.send(answer)
        terminal.expect("host=")
        terminal.expect("\n")
        assert ("Go on in" in terminal.output) is bool(question)
        return terminal.output.rpartition("host=")[2].split()[0]


@on_both_clients
def test_on_a_terminal_the_sessions_of_the_directory_are_offered(engine: Engine, project: Path,
                                                                 home: Path) -> None:
    def host(name: str) -> str:
        config: Any = inspect(engine, name)["Config"]
        return str(config["Hostname"])

    def second() -> None:
        began = int(time.time())  # engines tell whole seconds
        wait_for(lambda: int(time.time()) > began)

    elsewhere = ["-n", unique_name(), "--hp", str(home)]
    assert engine.sandbox("run", *elsewhere, "-x", "true").returncode == 0
    old = made(engine)
    for answer in ("\n", "y\n", "1\n", "\x04", "nonsense\n\n"):
        assert ask(engine, f"Go on in {old} (no agent, running, of 20", answer) == host(old)
    second()
    new = ask(engine, "[Y/n] ", "n\n")
    assert new != host(old)
    second()
    newest = ask(engine, "", "", "--new")
    assert len({host(old), new, newest}) == 3
    engine.run("stop", "-t", "0", old)
    question = "Go on in which of them? [1], n for a new one: "
    assert ask(engine, question, "\n") == newest
    assert ask(engine, question, "2\n") == new
    assert ask(engine, question, "4\n0\n3\n") == host(old)
    # where the network is open a run that wants it closed has nothing to go on in
    assert ask(engine, "", "", "--net", "none") not in {host(old), new, newest}
    assert ask(engine, "", "", "--rm-on-exit") not in {host(old), new, newest}
    assert made(engine) not in {old, newest, new}
    for options in (["--new", "-n", "shop"], ["-n", "shop", "--new"]):
        assert engine.sandbox("run", *options).returncode == 2


@on_docker
def test_the_question_can_be_left(engine: Engine, project: Path, home: Path) -> None:
    name = made(engine)
    with engine.pty("run", "-x", "true") as terminal:
        terminal.expect("[Y/n] ")
        terminal.send("\x03")
        assert terminal.wait() == 130
    assert [n for n in engine.names() if n.startswith(project.name)] == [name]


# --- What is asked at the end ---


@on_docker
@pytest.mark.parametrize("words", [
    ["-y", "c", "--", "--version"], ["-y", "c", "--", "--model", "m", "-p", "say it"],
    ["-x", "claude --print=hello"], ["-x", "claude", "-h"], ["-y", "cx", "--", "exec", "say it"],
], ids=" ".join)
def test_nothing_is_asked_after_an_answer(engine: Engine, agents: Path, name: str,
                                          words: list[str]) -> None:
    with engine.pty("run", "-n", name, *words, cols=200) as terminal:
        assert terminal.wait() == 0
    assert words[-1].rpartition("=")[2] in terminal.output and PROMPT not in terminal.output
    with engine.pty("run", "--new", *words, cols=200) as terminal:
        assert terminal.wait() == 0
    assert "made the session " in terminal.output and PROMPT not in terminal.output


# --- A session that others use ---

WORK = "echo at work; sleep 98765; :"
GONE = "the session {} was removed by another command"


def test_rm_asks_who_would_lose_something_and_tells_them(engine: Engine, project: Path, home: Path,
                                                         name: str) -> None:
    run = ("run", "-n", name, "-x")
    assert engine.sandbox(*run, "true").returncode == 0
    with (contextlib.ExitStack() as stack, engine.popen(*run, WORK) as script,
          engine.pty(*run, "echo held; sleep 98764; :") as person,
          engine.pty("run", "-n", name) as menu):
        assert script.stdout and script.stdout.readline() == "at work\n"
        menu.send("exit\n")
        menu.expect(PROMPT)
        wait_for(lambda: sleeping(engine, name, "98764") == 1)
        attached = stack.enter_context(engine.pty("attach", name))
        attached.expect("held")
        for answer, status in (("\n", 1), ("n\n", 1), ("y\n", 0)):
            with engine.pty("rm", name, cols=250) as rm:
                used = rm.expect("Remove it all the same? [y/N] ")
                assert f"{name} is in use: " in used and used.count(";") == 5
                assert f"sh -c {WORK}" in used and "sh -c echo held; sleep 98764; :" in used
                assert name in engine.names()
                rm.send(answer)
                assert rm.wait() == status
            assert (name in engine.names()) is bool(status)
        _, err = script.communicate(timeout=60)
        assert script.returncode and err.splitlines()[-1] == f"sandbox: {GONE.format(name)}"
        for other in (person, attached):
            other.expect(GONE.format(name))
            assert other.wait() in (KILLED, *ENGINE_STATUS)
        menu.send("y\n")
        menu.expect(GONE.format(name))
        assert menu.wait() == 0 and "kept" not in menu.output


@on_docker
def test_a_script_and_force_ask_nothing(engine: Engine, project: Path, home: Path,
                                        name: str) -> None:
    for force in ((), ("-f",), ("--force",)):
        with engine.popen("run", "-n", name, "-x", WORK) as other:
            assert other.stdout and other.stdout.readline() == "at work\n"
            if force:
                with engine.pty("rm", *force, name) as rm:
                    assert rm.wait() == 0 and "in use" not in rm.output
            else:
                removed = engine.sandbox("rm", name)
                assert (removed.returncode, removed.stderr) == (0, "")
            assert GONE.format(name) in other.communicate(timeout=60)[1]


def test_nobody_is_asked_for_what_is_his_own(engine: Engine, project: Path, home: Path,
                                             name: str) -> None:
    """What a run leaves behind is no other's, nor is what autostart has started."""
    write_config(home, autostart="sleep 98763")
    left = "nohup sleep 98762 >/dev/null 2>&1 & echo left"
    with engine.pty("run", "-n", name, "-x", left) as terminal:
        terminal.expect("left")
        terminal.expect(PROMPT)
        terminal.send("n\n")
        assert terminal.wait() == 0
    assert "in use" not in terminal.output and name not in engine.names()
    with engine.pty("run", "-n", name, "--rm-on-exit", "-x", left) as terminal:
        assert terminal.wait() == 0
    assert "in use" not in terminal.output and name not in engine.names()


@on_docker
@pytest.mark.parametrize("options", [[], ["--rm-on-exit"]])
def test_the_end_of_a_run_asks_for_others(engine: Engine, project: Path, home: Path, name: str,
                                          options: list[str]) -> None:
    with (engine.pty("run", "-n", name, *options, cols=200) as terminal,
          engine.popen("run", "-n", name, "-x", WORK) as other):
        assert other.stdout and other.stdout.readline() == "at work\n"
        terminal.send("exit\n")
        if not options:
            terminal.expect(PROMPT)
            terminal.send("n\n")
        used = terminal.expect("Remove it all the same? [y/N] ")
        assert f"{name} is in use: sh -c {WORK}\r\n" in used
        terminal.send("n\n")
        assert terminal.wait() == 0
        wait_for(lambda: sleeping(engine, name, "98765") == 1)


# --- A session that was stopped ---


def test_a_stopped_session_starts_without_a_word_of_the_engine(engine: Engine, project: Path,
                                                               home: Path, name: str) -> None:
    """However it was stopped, and whether a script or a person has used it before."""
    run = ("run", "-n", name, "-x", "echo ran")
    assert engine.sandbox(*run).returncode == 0
    assert engine.sandbox(*run).stderr == ""
    for end in ("stop -t 0", "kill", "restart -t 0"):
        engine.run(*end.split(), name)
        for _ in range(2):
            answer = engine.sandbox(*run)
            assert (answer.returncode, answer.stdout, answer.stderr) == (0, "ran\n", ""), end
    engine.run("stop", "-t", "0", name)
    with engine.pty(*run) as terminal:
        assert terminal.wait() == 0
    said = [line for line in terminal.output.splitlines() if "leaves it running" not in line]
    assert said == ["ran"]


# --- Ports ---

SERVE = "python3 -m http.server 8123 --bind {} >/dev/null 2>&1"


def status_at(port: int) -> str:
    """The first line that a server at a port of this machine answers, '' for none."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
        return sock.recv(100).decode().partition("\r\n")[0]
    return ""


@pytest.mark.parametrize("address, heard", [
    ("127.0.0.1", False), ("0.0.0.0", True), ("::", True)])
def test_a_port_on_which_nobody_can_be_reached_is_explained(
    engine: Engine, project: Path, home: Path, name: str, address: str, heard: bool
) -> None:
    port = free_port()
    run = ("run", "-n", name, "-p", f"{port}:8123", "-p", f"127.0.0.2:{port}:9/udp")
    assert engine.sandbox(*run, "-x", "true").returncode == 0
    shown = f"{port}->8123, 127.0.0.2:{port}->9/udp"
    (row,) = [row for row in json.loads(engine.sandbox("ps", "--json").stdout)
              if row["name"] == name]
    assert row["ports"] == [f"127.0.0.1:{port}:8123", f"127.0.0.2:{port}:9/udp"]
    header, *lines = engine.sandbox("ps").stdout.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    assert line[header.index("PORTS"):].startswith(f"{shown}  ")
    told = f"nobody reaches port {port}->8123 of {name}"

    def ps() -> str:
        with engine.pty("ps", cols=250) as terminal:
            assert terminal.wait() == 0
        return terminal.output

    assert told not in ps()  # where nobody listens there is nothing to explain
    with engine.popen("run", "-n", name, "-x", SERVE.format(address)):
        listening = "grep -q ':1FBB 0*:0000 0A' /proc/net/tcp /proc/net/tcp6"
        wait_for(lambda: engine.run("exec", name, "sh", "-c", listening).returncode == 0)
        assert status_at(port) == ("HTTP/1.0 200 OK" if heard else "")
        assert (told in ps()) is not heard
        assert told not in engine.sandbox("ps").stderr
        with engine.pty("run", "-n", name, "-x", "true", cols=250) as terminal:
            assert terminal.wait() == 0
        assert (told in terminal.output) is not heard


@pytest.mark.parametrize("address, loopback", [
    ("0100007F", True), ("0200007F", True), ("00000000", False), ("020011AC", False),
    ("0" * 24 + "01000000", True), ("0" * 16 + "FFFF00000100007F", True), ("0" * 32, False),
    ("0" * 16 + "FFFF0000020011AC", False), ("0" * 30 + "7F", False), ("", False)])
def test_an_address_of_the_kernels_table_is_told(address: str, loopback: bool) -> None:
    assert sandbox.is_loopback(address) is loopback


# --- What exists stays in reach ---


@on_docker
@pytest.mark.parametrize("text", ['{"runtime": "%s",', '{"runtime": "%s", "volume": []}'])
def test_a_wrong_file_keeps_nobody_from_what_exists(engine: Engine, project: Path, home: Path,
                                                    name: str, text: str) -> None:
    assert engine.sandbox("run", "-n", name, "-x", "true").returncode == 0
    (home / "sandbox.json").write_text(text % engine.runtime)
    whole = text.endswith("}")
    env = {"SANDBOX_RUNTIME": "" if whole else engine.runtime}  # as far as it can be read
    shown = engine.sandbox("ps", "-q", env=env)
    assert shown.returncode == 0 and name in shown.stdout.split()
    assert shown.stderr.startswith(f"sandbox: {home}/sandbox.json")
    assert shown.stderr.count("\n") == 1
    assert name in engine.sandbox("__complete", "rm", "", env=env).stdout.split()
    assert engine.sandbox("prune", "--dry-run", env=env).returncode == 0
    assert engine.sandbox("run", "-n", name, "-x", "true", env=env).returncode == 1
    removed = engine.sandbox("rm", name, env=env)
    assert (removed.returncode, removed.stdout) == (0, f"{name}\n")
    write_config(home)  # a test that asks for no home of its own gets this one
