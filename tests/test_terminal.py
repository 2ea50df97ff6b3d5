"""`run` on a real terminal: the exit menu, the shell, sizes and keys, on every engine."""

import os
import termios
from pathlib import Path

import pytest
from conftest import Engine, Terminal, everywhere, on_docker, write_config
from service import wait_for
from test_engines import sleeping

PROMPT = "Keep it? [y] "


@pytest.fixture
def agent(engine: Engine, project: Path, home: Path) -> str:
    """A program that stands where an agent would: it says how it was started, and what it reads."""
    program = project / "claude"
    program.write_text(
        '#!/bin/sh\necho "agent:$*:"\nread line\necho "read:$line"\nexit ${line:-4}\n')
    program.chmod(0o755)
    write_config(home, env={"PATH": f"{project}:/bin"})
    return "agent:--dangerously-skip-permissions:"


def leave(terminal: Terminal, answer: str) -> int:
    terminal.expect(PROMPT)
    terminal.send(answer + "\n")
    return terminal.wait()


@on_docker
def test_y_keeps_the_container_and_passes_the_status(engine: Engine, agent: str, name: str) -> None:
    with engine.pty("run", "-n", name, "-y", "c") as terminal:
        terminal.expect(agent)
        terminal.send("7\n")
        terminal.expect("read:7")
        assert leave(terminal, "y") == 7
    assert name in engine.names()
    assert f"sandbox run -n {name} -- -c" in terminal.output


@on_docker
def test_n_removes_the_container(engine: Engine, agent: str, name: str) -> None:
    with engine.pty("run", "-n", name, "-y", "c") as terminal:
        terminal.expect(agent)
        terminal.send("\n")
        assert leave(terminal, "n") == 4
    assert name not in engine.names()


@on_docker
def test_1_r_x_and_i_go_on_in_the_same_container(engine: Engine, agent: str, name: str) -> None:
    with engine.pty("run", "-n", name, "-y", "c", "--", "--model", "m") as terminal:
        terminal.expect("agent:--dangerously-skip-permissions --model m:")
        terminal.send("1\n")
        terminal.expect(PROMPT)
        terminal.send("nonsense\n")  # is asked again
        terminal.expect(PROMPT)
        terminal.send("1\n")
        terminal.expect("agent:--dangerously-skip-permissions --model m:")
        terminal.send("2\n")
        terminal.expect(PROMPT)
        terminal.send("r\n")
        terminal.expect("agent:--dangerously-skip-permissions -c:")
        terminal.send("3\n")
        terminal.expect(PROMPT)
        terminal.send("x\n")
        terminal.expect("Command: ")
        terminal.send("echo one-$((1+1)) | cat\n")
        terminal.expect("one-2")
        terminal.expect(PROMPT)
        terminal.send("i\n")
        terminal.send("echo shell-$((2+2)); exit 6\n")
        terminal.expect("shell-4")
        assert leave(terminal, "") == 6
    assert engine.names().count(name) == 1


@on_docker
def test_the_end_of_input_keeps_the_container(engine: Engine, agent: str, name: str) -> None:
    with engine.pty("run", "-n", name, "-y", "c") as terminal:
        terminal.expect(agent)
        terminal.send("1\n")
        assert leave(terminal, "\x04") == 1
    assert name in engine.names()


@on_docker
def test_no_terminal_no_question(engine: Engine, agent: str, name: str) -> None:
    answer = engine.sandbox("run", "-n", name, "-y", "c", input="5\n")
    assert (answer.returncode, answer.stdout) == (5, f"{agent}\nread:5\n")
    assert name in engine.names()


@on_docker
def test_rm_on_exit_asks_nothing(engine: Engine, agent: str, name: str) -> None:
    with engine.pty("run", "-n", name, "--rm-on-exit", "-y", "c") as terminal:
        terminal.expect(agent)
        terminal.send("3\n")
        assert terminal.wait() == 3
    assert PROMPT not in terminal.output and name not in engine.names()


@everywhere
def test_the_default_is_a_shell_and_the_size_is_the_terminals(engine: Engine, project: Path,
                                                              name: str) -> None:
    with engine.pty("run", "-n", name, rows=41, cols=133) as terminal:
        terminal.send("stty size; tty; echo $TERM\n")
        terminal.expect("41 133")
        terminal.expect("xterm-256color")
        terminal.resize(30, 101)
        terminal.send("until [ \"$(stty size)\" = '30 101' ]; do sleep 0.1; done; echo resi''zed\n")
        terminal.expect("resized")
        terminal.send("exit 9\n")
        assert leave(terminal, "y") == 9


@pytest.mark.parametrize("rows, cols", [(24, 80), (50, 200), (11, 40)])
def test_the_size_is_right_from_the_first_moment(
    engine: Engine, project: Path, name: str, rows: int, cols: int
) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    for _ in range(5):
        with engine.pty("run", "-n", name, "-x", "stty size", rows=rows, cols=cols) as terminal:
            terminal.expect(f"{rows} {cols}")
            assert terminal.wait() == 0


def test_keys_go_to_the_program(engine: Engine, project: Path, name: str) -> None:
    script = "stty raw -echo; echo ready; dd bs=1 count=6 2>/dev/null | od -An -tx1"
    with engine.pty("run", "-n", name, "-x", script) as terminal:
        terminal.expect("ready")
        terminal.send("\x10\x11\x03\x1c\x1a\x04")  # Ctrl-P Ctrl-Q Ctrl-C Ctrl-\ Ctrl-Z Ctrl-D
        terminal.expect("10 11 03 1c 1a 04")
        terminal.expect(PROMPT)


def test_ctrl_c_interrupts_the_program_and_not_the_session(engine: Engine, project: Path,
                                                           name: str) -> None:
    script = "trap 'echo caught; exit 42' INT; echo ready; while :; do sleep 1; done"
    with engine.pty("run", "-n", name, "-x", script) as terminal:
        terminal.expect("ready")
        terminal.send("\x03")
        terminal.expect("caught")
        assert leave(terminal, "y") == 42


def test_with_rm_on_exit_a_closed_terminal_leaves_nothing(engine: Engine, project: Path,
                                                         name: str) -> None:
    mark = "987654"
    engine.sandbox("run", "-n", name, "-x", "true")
    with engine.pty("run", "-n", name, "--rm-on-exit", "-x",
                    f"echo ready; sleep {mark}") as terminal:
        terminal.expect("ready")
        wait_for(lambda: sleeping(engine, name, mark) == 1)
        os.dup2(os.open(os.devnull, os.O_RDWR), terminal.master)
        terminal.process.wait(60)
    assert name not in engine.names()


def test_the_terminal_is_as_it_was(engine: Engine, project: Path, name: str) -> None:
    with engine.pty("run", "-n", name, "-x", "stty raw; kill -9 $$") as terminal:
        terminal.expect(PROMPT)
        assert termios.tcgetattr(terminal.master) == terminal.mode
        terminal.send("y\n")
        assert terminal.wait() == 137
