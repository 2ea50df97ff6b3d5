"""What runs on a terminal belongs to its session: left, killed, attached to again, on every engine.

Beside real terminals and engines, the pure parts are tested by value: keys that detach, what is
switched off on leaving, what is replayed, frames, and the holder's own view of modes and answers.
"""

import ast
import json
import os
import re
import signal
import subprocess
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    ROOT,
    USER,
    Engine,
    Process,
    Terminal,
    everywhere,
    on_docker,
    write_config,
)
from service import Service, wait_for
from test_agents import (  # noqa: F401
    ONCE,
    SCREENS,
    START_SECONDS,
    Session,
    image,
    session,
    type_prompt,
)
from test_engines import sleeping

import sandbox
from sandbox import AGENTS, SHORTCUTS, DetachKeys, Frames, Held, Screen, frame, without_questions

KEYS = "\x1cd"
KITTY = "\x1b[92;5u\x1b[92;5:3ud"
OTHER = "\x1b[27;5;92~d"
CAT = "echo ready; cat; exit 5"


def hold() -> Any:
    """The holder's program as a module, from its source."""
    import types

    module = types.ModuleType("hold")
    exec((ROOT / "static" / "session" / "hold.py").read_text(), module.__dict__)
    return module


# --- Keys ---


def typed(keys: str, *pieces: str) -> tuple[str, bool]:
    """What arrives at the program, and whether the keys were complete."""
    finder, passed = DetachKeys(keys), b""
    for piece in pieces:
        data, over = finder.feed(piece.encode())
        passed += data
        if over:
            return passed.decode(), True
    return (passed + finder.give_up()).decode(), False


DEFAULT = sandbox.KEYS["detachKeys"].default


@pytest.mark.parametrize("pieces, passed, left", [
    ([KEYS], "", True),
    (["a\x1c", "d"], "a", True),
    (["\x1cx"], "\x1cx", False),
    (["\x1c"], "\x1c", False),  # alone, after a moment
    (["\x1c", "\x1c", "d"], "\x1cd", False),  # twice is once
    (["d\x1b[A\x1c\x1b[B"], "d\x1b[A\x1c\x1b[B", False),
    (["\x1b[92;5u", "d"], "", True),
    ([KITTY], "", True),
    (["\x1b[92;5u\x1b[92;5:3u\x1b[57442;1:3u\x1b[100;1:1u"], "", True),
    (["\x1b[92::92;133u\x1b[100;129u"], "", True),  # Num Lock
    ([OTHER], "", True),
    (["x\x1b[9", "2;5ud"], "x", True),
    (["\x1b[92;5u\x1b[92;5u"], "\x1b[92;5u", False),
    (["\x1b[92;6u" "d"], "\x1b[92;6ud", False),  # with Shift it is another key
    (["\x1b[<35;10;10M" * 3], "\x1b[<35;10;10M" * 3, False),
    (["\x1b"], "\x1b", False),
], ids=ascii)
def test_the_keys_are_found_as_terminals_send_them(pieces: list[str], passed: str,
                                                   left: bool) -> None:
    assert typed(DEFAULT, *pieces) == (passed, left)


def test_other_keys_and_none() -> None:
    assert typed("ctrl-p,ctrl-q", "\x10\x11") == ("", True)
    assert typed("ctrl-@,x,y", "\0xy") == ("", True)
    assert typed("", "\x1cd\x1b[92;5u") == ("\x1cd\x1b[92;5u", False)


@pytest.mark.parametrize("value", ["ctrl-", "ctrl-1", "ab", "a,,b", ",", "ctrl-\\,", 3])
def test_wrong_keys_are_refused(value: object) -> None:
    with pytest.raises(ValueError):
        sandbox.check_value("detachKeys", value)


# --- What a terminal is brought back from ---


def test_what_a_program_switched_on_is_switched_off() -> None:
    screen = Screen()
    output = b"\x1b[?1049h\x1b[>1u\x1b[?2004;1004h\x1b[?25l\x1b[>4;2m\x1b[2 q\x1b[?7h\x1b[31mtext"
    for at in range(len(output)):  # a byte at a time
        screen.scan(output[at : at + 1])
    off = screen.restore(False)
    assert set(re.findall(rb"\x1b\[[^\x1b]+", off)) == {
        b"\x1b[?1049l", b"\x1b[<1u", b"\x1b[?2004l", b"\x1b[?1004l", b"\x1b[?25h", b"\x1b[>4m",
        b"\x1b[0 q"}
    assert off.index(b"\x1b[<1u") < off.index(b"\x1b[?1049l")


def test_a_program_that_tidies_up_itself_leaves_nothing_to_do() -> None:
    screen = Screen()
    screen.scan(b"\x1b[?1049h\x1b[>1u\x1b[?25l\x1b[?1000h text "
                b"\x1b[?1000l\x1b[?25h\x1b[<u\x1b[?1049l")
    assert screen.restore(False) == b""


@pytest.mark.parametrize("odd", [b"\x1b[<1;2u", b"\x1b[<;u", b"\x1b[<99999999999u", b"\x1b[?;h"])
def test_an_odd_sequence_ends_nobody(odd: bytes) -> None:
    screen, modes = Screen(), hold().Modes()
    for data in (b"\x1b[>1u", odd):
        screen.scan(data)
        modes.scan(data, 10)
    assert b"u" not in screen.restore(False) or odd[-1:] == b"h"


def test_what_was_kept_asks_a_terminal_nothing() -> None:
    questions = [b"\x1b[c", b"\x1b[>0c", b"\x1b[6n", b"\x1b[?996n", b"\x1b[?u", b"\x1b[>q",
                 b"\x1b[?2026$p", b"\x1b]11;?\x07", b"\x1b]4;1;?\x1b\\", b"\x1bP+q544e\x1b\\",
                 b"\x1b[18t", b"\x05", b"\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\"]
    drawn = b"\x1b[31ma\x1b[?2004h\x1b[2J\x1b]0;what?\x07\x1b[22;0t\x1b[>1u"
    assert without_questions(drawn + drawn.join(questions) + drawn) == drawn * (len(questions) + 1)


# --- Frames and lists: what comes from inside may lie ---


def test_frames_come_in_any_pieces() -> None:
    frames, data = Frames(), frame(b"h", b"0 1 2 3") + frame(b"o", b"x" * 300) + frame(b"e")
    found = [each for at in range(0, len(data), 7) for each in frames.feed(data[at : at + 7])]
    assert found == [(b"h", b"0 1 2 3"), (b"o", b"x" * 300), (b"e", b"")]


@pytest.mark.parametrize("data", [b"x\0\0\0\1a", b"o\xff\xff\xff\xff", b"o\0\1\0\1", b"words"])
def test_what_is_no_frame_ends_it(data: bytes) -> None:
    with pytest.raises(ValueError):
        Frames().feed(data)


def test_a_line_of_the_list_is_read_strictly() -> None:
    held = Held("0123456789 1795330875.077 - - 2 24 80 cat \x1b[31m x")
    assert (held.clients, held.runs, held.rows, held.title) == (2, True, 24, "cat ?[31m x")
    assert not Held("0123456789 1.000 - - lost - - x").runs
    for line in ("", "../etc/x 1.000 - - 1 24 80 x", "0123456789 nan - - 1 24 80 x",
                 "0123456789 1.000 - 99999 1 24 80 x", "0123456789 1.000 - - 1 24 80"):
        with pytest.raises(ValueError):
            Held(line)


# --- The holder's own parts ---


def test_the_holder_knows_the_modes_before_a_position() -> None:
    modes = hold().Modes()
    output = b"\x1b[?1049h\x1b[>1uab\x1b[?25l\x1b[?1049l\x1b[?1049;2004h"
    for at in range(0, len(output), 3):
        modes.scan(output[at : at + 3], min(at + 3, len(output)))
    assert modes.before(len(output)) == b"\x1b[>1u\x1b[?25l\x1b[?1049h\x1b[?2004h"
    assert modes.before(output.index(b"\x1b[?25l")) == b"\x1b[>1u"
    for number in range(1000):
        modes.scan(b"\x1b[?%dh\x1b[>1u" % number, 100)
    assert len(modes.set) <= 64


@pytest.mark.parametrize("data, answer", [
    ("\x1b[?1;2c", True), ("\x1b[24;80R\x1b[I", True), ("\x1b[?1u", True),
    ("\x1b]11;rgb:0/0/0\x07", True), ("\x1bP1+r\x1b\\\x1b[?2026;2$y", True),
    ("a", False), ("\x1b[A", False), ("\x1b[97;5u", False), ("\x1b", False), ("\x1b[", False),
    ("\x1b]11;", False), ("\x1b[?1;2cx", False)], ids=ascii)
def test_the_holder_knows_answers_from_keys(data: str, answer: bool) -> None:
    assert hold().is_answer(data.encode()) is answer


def test_the_holder_needs_little() -> None:
    source = (ROOT / "static" / "session" / "hold.py").read_text()
    imported = {alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import)
                for alias in node.names}
    assert imported == {"fcntl", "mmap", "os", "select", "sys", "termios", "time"}
    assert len(sandbox.hold_source()) < sandbox.ENVIRONMENT_BYTES // 4


# --- Real terminals ---


def hang_up(terminal: Terminal) -> None:
    """Close the window."""
    os.dup2(os.open(os.devnull, os.O_RDWR), terminal.master)
    terminal.process.wait(60)


def rows(engine: Engine, name: str) -> list[dict[str, Any]]:
    listed = engine.sandbox("ps", name, "--json")
    assert listed.returncode == 0, listed.stderr
    found: list[dict[str, Any]] = json.loads(listed.stdout)
    return found


def states(engine: Engine, name: str) -> list[str]:
    return [row["state"] for row in rows(engine, name)]


def begin(engine: Engine, name: str, command: str = CAT) -> str:
    """Start a command in the background, in a session that is made for it; the terminal's id."""
    started = engine.sandbox("run", "-n", name, "-d", "-x", command)
    assert started.returncode == 0 and started.stdout.split()[0] == name, started.stderr
    return started.stdout.split()[1]


@everywhere
def test_keys_leave_it_and_attach_brings_it_back(engine: Engine, project: Path, name: str,
                                                 keys: str = KEYS) -> None:
    with engine.pty("run", "-n", name, "-x", CAT) as terminal:
        terminal.expect(f"Ctrl-\\ d leaves it running; to come back: sandbox attach {name}")
        terminal.expect("ready")
        terminal.send("one\n")
        terminal.expect("one\r\none")
        terminal.send(keys)
        terminal.expect(f"left {name}; to come back: sandbox attach {name}")
        assert terminal.wait() == 0 and "Keep it?" not in terminal.output
        assert termios.tcgetattr(terminal.master) == terminal.mode
    with engine.pty("attach", name) as terminal:
        terminal.expect("one\r\none")
        terminal.send("two\n")
        terminal.expect("two\r\ntwo")
        terminal.send("\x04")
        assert terminal.wait() == 5
    assert states(engine, name) == ["ended"]


@on_docker
@pytest.mark.parametrize("keys", [KITTY, OTHER], ids=["kitty", "modifyOtherKeys"])
def test_keys_of_newer_terminals_leave_it(engine: Engine, project: Path, name: str,
                                          keys: str) -> None:
    test_keys_leave_it_and_attach_brings_it_back(engine, project, name, keys)


@everywhere
def test_a_closed_window_a_hang_up_and_a_killed_client_leave_it_running(
    engine: Engine, project: Path, name: str
) -> None:
    begin(engine, name)
    ways: dict[str, Callable[[Terminal], object]] = {
        "window": hang_up, "hang-up": lambda t: os.kill(t.process.pid, signal.SIGHUP),
        "kill": lambda t: os.kill(t.process.pid, signal.SIGKILL)}
    for command in (["attach", name], ["run", "-n", name, "-x", CAT]):
        for way, leave in ways.items():
            with engine.pty(*command) as terminal:
                terminal.expect("ready")
                terminal.send(f"{way}\n")
                terminal.expect(f"{way}\r\n{way}")
                leave(terminal)
                terminal.process.wait(60)
    assert states(engine, name) == ["running"] * 4
    seen = engine.sandbox("logs", name, rows(engine, name)[0]["id"])
    assert [way for way in ways if f"{way}\n{way}" in seen.stdout.replace("\r", "")] == [*ways]


def clients_of(engine: Engine, pid: int) -> list[int]:
    """The engine's clients that a process of ours has started."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


@everywhere
def test_a_killed_client_of_the_engine_leaves_it_running(engine: Engine, project: Path,
                                                         name: str) -> None:
    with engine.pty("run", "-n", name, "-x", CAT) as terminal:
        terminal.expect("ready")
        for pid in clients_of(engine, terminal.process.pid):
            os.kill(pid, signal.SIGKILL)
        terminal.expect(f"to come back: sandbox attach {name}")
        assert terminal.wait() == (125 if engine.host else 137)  # it may be the connection's end
        assert termios.tcgetattr(terminal.master) == terminal.mode
    with engine.pty("attach", name) as terminal:
        terminal.expect("ready")
        terminal.send("\x04")
        assert terminal.wait() == 5


@everywhere
def test_two_terminals_show_the_same_and_the_last_to_type_has_the_size(
    engine: Engine, project: Path, name: str
) -> None:
    script = ("stty -echo; echo ready; while read -r word; do echo $word $(stty size); done; "
              "exit 3")
    with engine.pty("run", "-n", name, "-x", script, rows=30, cols=90) as one:
        one.expect("ready")
        with engine.pty("attach", name, rows=40, cols=120) as two:
            two.expect("ready")
            two.send("a\n")
            for terminal in (one, two):
                terminal.expect("a 40 120")
            one.send("b\n")
            for terminal in (one, two):
                terminal.expect("b 30 90")
            two.resize(41, 121)
            two.send("c\n")
            for terminal in (one, two):
                terminal.expect("c 41 121")
            hang_up(two)
        one.send("d\n")
        one.expect("d 30 90")
        one.send("\x04")
        one.expect("Keep it?")


def test_what_ends_alone_leaves_its_last_output_and_its_status(engine: Engine, project: Path,
                                                               name: str) -> None:
    begin(engine, name, "stty size; echo last words; exit 42")
    wait_for(lambda: states(engine, name) == ["ended"])
    for _ in range(2):
        ended = engine.sandbox("attach", name)
        assert (ended.returncode, ended.stdout) == (42, "24 80\nlast words\n"), ended.stderr
    with engine.pty("attach", name) as terminal:
        terminal.expect("last words")
        assert terminal.wait() == 42
    assert rows(engine, name)[0]["status"] == 42
    assert engine.sandbox("attach", name, begin(engine, name, "no-such-program")).returncode == 127


@everywhere
def test_signals_from_outside_mean_what_they_did(engine: Engine, project: Path, name: str) -> None:
    script = "trap 'echo caught; exit 7' {}; echo ready; while :; do sleep 0.1; done"
    engine.sandbox("run", "-n", name, "-x", "true")
    for number in (signal.SIGINT, signal.SIGTERM):
        with engine.pty("run", "-n", name, "-x", script.format(number.name[3:])) as terminal:
            terminal.expect("ready")
            os.kill(terminal.process.pid, number)
            terminal.expect("caught")
            assert terminal.wait() == 7
    assert states(engine, name) == ["ended"] * 2


def test_the_program_has_no_other_environment(engine: Engine, project: Path, name: str) -> None:
    plain = engine.sandbox("run", "-n", name, "-x", "env").stdout.splitlines()
    with engine.pty("run", "-n", name, "-x", "env") as terminal:
        assert terminal.wait() == 0
    held = terminal.output.splitlines()
    changed = ("SHLVL=", "SANDBOX_EXEC=", "PWD=", "TERM=")
    assert [line for line in {*held} ^ {*plain} if not line.startswith(changed)] == []
    assert "TERM=xterm-256color" in held


def test_a_program_that_leaves_its_terminal_makes_nobody_wait(engine: Engine, project: Path,
                                                              name: str) -> None:
    begin(engine, name, "sleep 98761 & setsid sleep 98762 & echo started; exit 4")
    assert engine.sandbox("attach", name).returncode == 4
    # A holder whose program has closed its terminal waits without a loop.
    begin(engine, name, "exec >/dev/null 2>&1 </dev/null; sleep 98763; exit 6")
    wait_for(lambda: sleeping(engine, name, "98763") == 1)
    spent = [ticks(engine, name)]
    subprocess.run(["sleep", "1"], check=True)
    assert ticks(engine, name) - spent[0] < 20  # of a hundred


def ticks(engine: Engine, name: str) -> int:
    """The processor time that holders have used, in hundredths of a second."""
    each = ("for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q 'SANDBOX_HOLD' && "
            "awk '{print $14 + $15}' $p/stat; done 2>/dev/null")
    return sum(map(int, engine.run("exec", name, "sh", "-c", each).stdout.split()))


def test_a_slow_reader_is_never_cut(engine: Engine, project: Path, name: str) -> None:
    begin(engine, name, "sleep 1; head -c 3000000 /dev/zero | tr '\\0' a; echo; echo over")
    reader = engine.popen("attach", name)
    assert reader.stdout
    other = engine.sandbox("attach", name)  # is not held up
    assert other.stdout.endswith("over\n") and other.returncode == 0
    assert reader.stdout.read().endswith("over\n") and reader.wait(60) == 0


@on_docker
def test_a_client_that_is_slow_to_join_joins(engine: Engine, project: Path, name: str) -> None:
    """The holder waits a second for what it says, and begins the program once it is there."""
    engine.sandbox("run", "-n", name, "-x", "true")
    source = sandbox.hold_source().rpartition("\nif __name__")[0]
    start = "rm /run/sandbox/terminals/*/socket; echo ready; exec sleep 98765"
    where = engine.where()
    for words in (["start", "0123456789", "24", "80", "x", "sh", "-c", start],
                  ["start", "9876543210", "0", "0", "x", "sleep", "98765"],
                  ["attach", "9876543210", "24", "80", "0"]):
        where["env"]["SANDBOX_HOLD"] = f"[]\n{source}\n{SLOW}main(*{words!r})"
        argv = [engine.runtime, "exec", "-i", "-e", "SANDBOX_HOLD", name, *sandbox.HOLD]
        with Process(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                     encoding="utf-8", **where) as client:
            assert client.stdin and client.stdout
            assert client.stdout.read(1) == ("" if "0" in words[2:4] else "h")
            client.stdin.close()  # it leaves
            assert client.wait(60) == 0, client.stdout.read()


# A client that the machine leaves no time, at the first two of its connections.
SLOW = """
def connect(folder, now=connect, slow=[2, 2]):
    found = now(folder)
    time.sleep(slow.pop() if slow else 0)
    return found
"""

# What `attach` does, again and again in one process: it lets go at once, or after the first frame.
ATTACHES = """
for number in range({count}):
    holder = connect(FOLDER + "/{id}")
    stdin, stdout = os.pipe(), os.pipe()
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (stdin[0], stdout[1]))
    size = b"%d 100 0" % (number % 50)
    holder.sendmsg([size], [(SOL_SOCKET, SCM_RIGHTS, rights)])
    for fd in (stdin[0], stdout[1]):
        os.close(fd)
    assert number % 2 or os.read(stdout[0], 1) == b"h"
    for fd in (stdin[1], stdout[0]):
        os.close(fd)
    assert number % 3 or holder.recv(9) == b"0\\n"
"""


@on_docker
def test_a_thousand_attaches_leave_nothing(engine: Engine, project: Path, name: str) -> None:
    id = begin(engine, name)
    wait_for(lambda: "cat" in engine.run("exec", name, "ps", "-o", "comm").stdout.split())
    assert engine.sandbox("logs", name).stdout == "ready\n"
    before = left_in(engine, name)
    where = engine.where()
    source = sandbox.hold_source().rpartition("\nif __name__")[0]
    where["env"]["SANDBOX_HOLD"] = f"[]\n{source}\n{ATTACHES.format(count=240, id=id)}"
    inside = [subprocess.Popen([engine.runtime, "exec", "-e", "SANDBOX_HOLD", name, *sandbox.HOLD],
                               **where) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        over = [*pool.map(lambda _: engine.sandbox("logs", name), range(40))]
    assert [process.wait(120) for process in inside] == [0] * 4
    assert all(ran.returncode == 0 and ran.stdout == "ready\n" for ran in over), over[0]
    wait_for(lambda: left_in(engine, name) == before)
    with engine.pty("attach", name) as terminal:
        terminal.expect("ready")
        terminal.send("\x04")
        assert terminal.wait() == 5


def left_in(engine: Engine, name: str) -> list[str]:
    """Processes, the holder's descriptors, and files of terminals in a session."""
    # A pipe would be counted: one of its processes begins before or after the other has looked.
    script = ("set -- /proc/[0-9]*; echo $#; for p in /proc/[0-9]*; do "
              "tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q SANDBOX_HOLD && ls $p/fd; done; "
              "find /run/sandbox | sort")
    return engine.run("exec", name, "sh", "-c", script).stdout.split()


@on_docker
@pytest.mark.parametrize("change", [
    "", ": >$f", "echo junk >$f", "head -c 1000 $f >$f.x && mv $f.x $f", "rm $f; mkdir $f",
    """python3 -I -c "import marshal; marshal.dump(('', 1), open('$f', 'wb'))" """,
    """python3 -I -c "import marshal; marshal.dump(1, open('$f', 'wb'))" """])
def test_what_the_session_keeps_of_the_holder_need_not_be_right(
        engine: Engine, project: Path, name: str, change: str) -> None:
    begin(engine, name)
    script = f"for f in /run/sandbox/hold-*; do [ -f $f ]; {change or ':'}; done"
    assert engine.run("exec", name, "sh", "-ec", script).returncode == 0
    with engine.pty("attach", name) as terminal:
        terminal.expect("ready")
        terminal.send("\x04")
        assert terminal.wait() == 5


@on_docker
def test_what_was_kept_is_shown_without_its_questions(engine: Engine, project: Path,
                                                      name: str) -> None:
    begin(engine, name, "printf '\\033[c\\033[?1049h\\033[6nready'; cat")
    wait_for(lambda: "ready" in engine.sandbox("logs", name).stdout)
    with engine.pty("attach", name) as terminal:
        seen = terminal.expect("ready")
        assert "\x1b[?1049h" in seen and "\x1b[c" not in seen and "\x1b[6n" not in seen
        terminal.send(KEYS)
        assert terminal.wait() == 0
        assert "\x1b[?1049l" in terminal.output
    assert "\x1b[6n" in engine.sandbox("logs", name).stdout  # a file has all of it


# --- Bad input ---


@on_docker
def test_attach_to_what_is_not_there(engine: Engine, project: Path, name: str) -> None:
    missing = engine.sandbox("attach", name)
    assert (missing.returncode, missing.stderr) == (
        1, f"sandbox: there is no container {name}\n  sandbox ps lists them\n")
    engine.sandbox("run", "-n", name, "-x", "true")
    for words in ([], ["0123456789"], ["../x\x1b"]):
        refused = engine.sandbox("attach", name, *words)
        assert refused.returncode == 1 and "has no terminal" in refused.stderr
        assert "\x1b" not in refused.stderr
    engine.sandbox("stop", name)
    refused = engine.sandbox("attach", name)
    assert refused.returncode == 1 and f"sandbox start {name}" in refused.stderr


@on_docker
def test_a_dumb_terminal_and_a_pipe_show_it(engine: Engine, project: Path, name: str) -> None:
    id = begin(engine, name)
    with engine.pty("attach", name, env={"TERM": "dumb"}) as terminal:
        terminal.expect("ready")
        terminal.send("typed\n")
        terminal.expect("typed")  # by our own terminal: it is not raw
        terminal.send("\x03")
        assert terminal.wait() == 130
    piped = engine.popen("attach", name, id)
    assert piped.stdin and piped.stdout
    assert piped.stdout.readline() == "ready\n"
    piped.stdin.write("typed\n")
    piped.stdin.close()
    piped.terminate()
    piped.wait(60)
    assert states(engine, name) == ["running"]
    assert "typed" not in engine.sandbox("logs", name).stdout


@everywhere
def test_a_holder_that_died_is_told(engine: Engine, project: Path, name: str) -> None:
    kill = ("for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | "
            "grep -q SANDBOX_HOL[D] && kill -9 ${p#/proc/}; done; true")
    with engine.pty("run", "-n", name, "-x", CAT) as terminal:
        terminal.expect("ready")
        engine.run("exec", name, "sh", "-c", kill)
        terminal.expect("how the program did is not known")
        terminal.expect("Keep it?")
        terminal.send("\n")
        assert terminal.wait() == 125
    assert states(engine, name) == ["lost"]
    again = engine.sandbox("attach", name)
    assert again.returncode == 1 and again.stdout == "ready\n"
    assert "is not known" in again.stderr


@pytest.mark.parametrize("reason, breaks", [
    ("it was made by an earlier version", "rm -rf /run/sandbox"),
    ("it has no python3", "rm -f /usr/bin/python3 /usr/local/bin/python3 /bin/python3")],
    ids=["old", "no python3"])
def test_a_session_that_cannot_hold_works_as_it_did(engine: Engine, project: Path, name: str,
                                                    reason: str, breaks: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    engine.run("exec", "-u", "0:0", name, "sh", "-c", breaks)
    for said in (1, 0):  # once
        with engine.pty("run", "-n", name, "-x", "echo ready; stty size; sleep 98764",
                        rows=31, cols=91) as terminal:
            terminal.expect("31 91")
            assert terminal.output.count(f"cannot keep what runs on a terminal: {reason}") == said
            wait_for(lambda: sleeping(engine, name, "98764") == 1)
            hang_up(terminal)
        wait_for(lambda: sleeping(engine, name, "98764") == 0)
    refused = engine.sandbox("run", "-n", name, "-d", "-x", "true")
    assert refused.returncode == 125 and reason in refused.stderr
    assert engine.sandbox("run", "-n", name, "-x", "echo plain").stdout == "plain\n"
    assert engine.sandbox("ps", name, "-q").stdout == ""


@on_docker
def test_what_removes_its_own_terminal_keeps_running(engine: Engine, project: Path,
                                                     name: str) -> None:
    with engine.pty("run", "-n", name, "-x", "rm -rf /run/sandbox/*; " + CAT) as terminal:
        terminal.expect("ready")
        terminal.send("one\n")
        terminal.expect("one\r\none")
        terminal.send("\x04")
        terminal.expect("Keep it?")
        terminal.send("\n")
        assert terminal.wait() == 5


def test_ctrl_c_ends_what_has_not_begun(engine: Engine, project: Path, name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    engine.run("exec", "-u", "0:0", name, "rm", "/run/sandbox-ready")
    with engine.pty("run", "-n", name, "-x", "echo began") as terminal:
        wait_for(lambda: clients_of(engine, terminal.process.pid))
        terminal.quiet(0.5)
        terminal.send("\x03")
        assert terminal.wait() == 130
    assert "began\r" not in terminal.output


# --- Commands ---


@on_docker
def test_detached_and_removed_on_exit_do_not_go_together(engine: Engine, name: str) -> None:
    refused = engine.sandbox("run", "-n", name, "-d", "--rm-on-exit", "-x", "true")
    assert refused.returncode == 2 and name not in engine.names()


@on_docker
def test_ps_says_what_runs_and_since_when(engine: Engine, home: Path, project: Path,
                                          name: str) -> None:
    id = begin(engine, name, "sleep 98765; true")

    def listed() -> Any:
        found = json.loads(engine.sandbox("ps", "--json").stdout)
        return next(row for row in found if row["name"] == name)["running"]

    ((row),) = listed()
    assert (row["id"], row["what"]) == (id, "sleep 98765; true")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row["since"])
    assert re.search(rf"^{name} .* sleep 20\d\d-\d\d-\d\d \d\d:\d\d ",
                     engine.sandbox("ps").stdout, re.MULTILINE)
    assert engine.sandbox("ps", name, "-q").stdout == f"{id}\n"
    assert [*(home / "terminals" / name).iterdir()] == [home / "terminals" / name / id]
    engine.sandbox("stop", name)
    assert listed() == [] and not [*(home / "terminals" / name).iterdir()]
    engine.sandbox("rm", name)
    assert not (home / "terminals" / name).exists()


@on_docker
def test_ps_asks_only_where_something_was_started(engine: Engine, home: Path, project: Path,
                                                  name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    traced = {"SANDBOX_TRACE": "1"}
    assert " exec " not in engine.sandbox("ps", env=traced).stderr
    begin(engine, name)
    assert engine.sandbox("ps", env=traced).stderr.count(" exec ") == 1


@everywhere
def test_those_inside_are_told_that_it_was_stopped(engine: Engine, project: Path,
                                                   name: str) -> None:
    stopped = f"the session {name} was stopped, and what ran in it has ended"
    assert engine.sandbox("run", "-n", name, "-x", "true").returncode == 0
    with (engine.popen("run", "-n", name, "-x", "echo at work; sleep 98765; :") as script,
          engine.pty("run", "-n", name, "-x", "echo held; sleep 98764; :") as person):
        assert script.stdout and script.stdout.readline() == "at work\n"
        person.expect("held")
        with engine.pty("attach", name) as attached:
            attached.expect("Ctrl-\\ d leaves it running")
            attached.expect("held")
            assert engine.sandbox("stop", name).returncode == 0
            for other in (person, attached):
                other.expect(stopped)
                other.expect(f"sandbox start {name}")
                assert other.wait() in (137, *sandbox.ENGINE_STATUS)
        assert stopped in script.communicate(timeout=60)[1] and script.returncode == 137
    shown = engine.sandbox("ps", name)
    assert f"{name} is stopped, and nothing runs in it" in shown.stderr
    assert (name, "true") not in [(row["id"], row["what"]) for row in rows(engine, name)]


@on_docker
def test_attach_says_how_it_ended(engine: Engine, project: Path, name: str) -> None:
    begin(engine, name, "echo held; read -r word; exit 7")
    with engine.pty("attach", name) as attached:
        attached.expect("held")
        attached.send("it\n")
        attached.expect("echo held; read -r word; exit 7 has ended with status 7")
        assert attached.wait() == 7


@on_docker
def test_one_session_that_hangs_hides_no_other(engine: Engine, project: Path, home: Path,
                                               name: str) -> None:
    hangs, answers = f"{name}-a", f"{name}-b"
    for one in (hangs, answers):
        begin(engine, one, "sleep 98765; :")
    hang = "python=$(command -v python3); rm $python; printf '#!/bin/sh\nsleep 98764' >$python"
    assert engine.run("exec", hangs, "sh", "-c", f"{hang}; chmod +x $python").returncode == 0
    found = {row["name"]: row["running"] for row in
             json.loads(engine.sandbox("ps", "--json").stdout)}
    assert found[hangs] == [] and [row["what"] for row in found[answers]] == ["sleep 98765; :"]


def test_an_answer_that_came_in_time_is_read_later() -> None:
    asked = [sandbox.Output(["sh", "-c", script], seconds)
             for script, seconds in (("sleep 60", 2), ("seq 1000", 2), ("yes", 2))]
    with pytest.raises(sandbox.EngineProblem, match="did not answer"):
        asked[0].result()
    assert asked[1].result()[1].split()[-1] == "1000"
    with pytest.raises(sandbox.EngineProblem, match="did not answer"):
        asked[2].result()


@on_docker
def test_what_ps_has_seen_end_is_asked_no_more_and_shown_once(
    service: Service, engine: Engine, name: str, project: Path
) -> None:
    service.post("/api/sessions", {"name": name, "directory": str(project)})
    id = begin(engine, name, "true")
    wait_for(lambda: states(engine, name) == ["ended"])
    traced = {"SANDBOX_TRACE": "1"}
    assert " exec " in engine.sandbox("ps", env=traced).stderr
    assert " exec " not in engine.sandbox("ps", env=traced).stderr
    (row,) = service.get(f"/api/sessions/{name}/terminals").json
    assert (row["id"], row["ended"], row["exit"]) == (id, True, 0)
    with service.terminal(name, f"id={id}") as screen:
        screen.message("exit")
    wait_for(lambda: service.get(f"/api/sessions/{name}/terminals").json == [])


def test_records_of_terminals_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path))
    for number in range(3 * sandbox.LISTED):
        sandbox.record_terminal("shop", f"{number:010}", "true")
    left = sandbox.recorded_terminals("shop")
    assert sandbox.LISTED <= len(left) <= 2 * sandbox.LISTED
    assert f"{3 * sandbox.LISTED - 1:010}" in left and f"{0:010}" not in left


@on_docker
def test_logs_of_terminals_and_jobs(service: Service, engine: Engine, name: str,
                                    project: Path) -> None:
    service.post("/api/sessions", {"name": name, "directory": str(project)})
    job = service.post(f"/api/sessions/{name}/command", {"command": "echo by the job"}).json["id"]
    wait_for(lambda: service.get(f"/api/sessions/{name}/jobs/{job}").json["state"] == "ended")
    assert engine.sandbox("logs", name).stdout == "by the job\n"
    odd = "printf '\\033]52;c;AAAA\\007\\033[1mbold\\033[m\\n'"
    odd_id = service.post(f"/api/sessions/{name}/command", {"command": odd}).json["id"]
    wait_for(lambda: service.get(f"/api/sessions/{name}/jobs/{odd_id}").json["state"] == "ended")
    assert engine.sandbox("logs", name).stdout == "\33]52;c;AAAA\7\33[1mbold\33[m\n"
    with engine.pty("logs", name) as terminal:
        assert terminal.wait() == 0 and terminal.output == "?]52;c;AAAA?bold\r\n"
    id = begin(engine, name, "echo on a terminal; read -r word; echo got $word")
    wait_for(lambda: engine.sandbox("logs", name).stdout == "on a terminal\n")
    assert engine.sandbox("logs", name, job).stdout == "by the job\n"
    following = engine.popen("logs", name, "-f")
    assert following.stdout and following.stdout.readline() == "on a terminal\n"
    with engine.pty("attach", name) as terminal:
        terminal.expect("on a terminal")
        terminal.send("it\n")
        assert terminal.wait() == 0
    assert following.stdout.read().endswith("got it\n") and following.wait(60) == 0
    assert [(row["id"], row["kind"]) for row in rows(engine, name)] == [
        (job, "command"), (odd_id, "command"), (id, "terminal")]
    words = engine.sandbox("__complete", "logs", name, "").stdout.split()
    assert job in words
    assert name in engine.sandbox("__complete", "attach", "").stdout.split()


@everywhere
def test_stop_and_start_and_the_autostart_script(engine: Engine, home: Path, project: Path,
                                                 name: str) -> None:
    engine.configure(autostart="echo started >>began; exec sleep 98766")
    engine.sandbox("run", "-n", name, "-x", "true")
    began = ("exec", name, "cat", f"{project}/began")
    wait_for(lambda: engine.run(*began).stdout)
    begin(engine, name)
    wait_for(lambda: engine.sandbox("logs", name).stdout == "ready\n")
    for words in (["stop", name, "no-such"], ["stop", name], ["start", name], ["start", name]):
        done = engine.sandbox(*words)
        assert done.stdout == f"{name}\n" and done.returncode == len(words) - 2, done.stderr
    wait_for(lambda: engine.run(*began).stdout == "started\n" * 2)
    wait_for(lambda: sleeping(engine, name, "98766") == 1)
    if engine.id == "kubernetes":  # with a pod go its files
        assert states(engine, name) == []
        return
    assert states(engine, name) == ["lost"]
    assert engine.sandbox("logs", name).stdout == "ready\n"


# The claim on the autostart script takes its time, as on a busy machine.
SLOW_CLAIM = """mkdir() {
  command mkdir "$@" || return
  : >/tmp/claimed
  until [ -e /tmp/go ]; do sleep 0.05; done
}
"""


def test_an_autostart_that_an_interrupted_run_has_claimed_starts(engine: Engine, project: Path,
                                                                 name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    engine.run("exec", name, "sh", "-c", "rm -r /dev/shm/sandbox-start-*")
    script = sandbox.env_script({"SANDBOX_AUTOSTART": f"echo started >>{project}/began"})
    argv = [engine.runtime, "exec", "-e", f"SANDBOX_ENV={script}", "-e", "SANDBOX_EXEC=cut", name,
            "sh", "-c", SLOW_CLAIM + sandbox.exec_script(), "sandbox", "0", "0", "sleep", "30"]
    with subprocess.Popen(argv, **engine.where()) as cut:
        wait_for(lambda: not engine.run("exec", name, "test", "-e", "/tmp/claimed").returncode)
        interrupt = (ROOT / "static" / "session" / "signal.sh").read_text()
        engine.run("exec", name, "sh", "-c", interrupt, "sandbox", "INT", "cut", "0")
        engine.run("exec", name, "touch", "/tmp/go")
        assert cut.wait(60) == 130
    wait_for(lambda: (project / "began").exists())


@everywhere
def test_files_are_copied_in_and_out(engine: Engine, project: Path, name: str) -> None:
    user = USER if engine.id == "docker" else engine.user
    where: dict[str, Any] = {"user": user}
    if user != engine.user:
        where |= {"cwd": engine.directory(user), "home": engine.directory(user)}
        write_config(where["home"])
    folder = where.get("cwd", project)
    owner = folder.stat()

    def sandbox_cp(*words: str) -> int:
        return engine.sandbox("cp", *words, **where).returncode

    made = engine.sandbox("run", "-n", name, "-x", "mkdir /tmp/into", **where)
    assert made.returncode == 0, made.stderr
    for hostile in ("-x", "a b", "a:b", "ü'\"$(id)"):
        (folder / "src").mkdir(exist_ok=True)
        (folder / "src" / hostile).write_text(hostile)
        os.chown(folder / "src" / hostile, owner.st_uid, owner.st_gid)
        assert sandbox_cp(f"./src/{hostile}", f"{name}:/tmp/into") == 0
        assert sandbox_cp(f"{name}:/tmp/into/{hostile}", f"./out-{hostile}") == 0
        assert (folder / f"out-{hostile}").read_text() == hostile
    assert sandbox_cp("src", f"{name}:/tmp/new") == 0
    assert sandbox_cp("src/.", f"{name}:/tmp/into/") == 0
    listing = "cd /tmp; stat -c %u:%g new new/a* into/*; id -u"
    stat = engine.sandbox("run", "-n", name, "-x", listing, **where)
    *owners, uid = stat.stdout.split()
    assert {item.split(":")[0] for item in owners} == {uid} and len(owners) == 7
    engine.sandbox("run", "-n", name, "-x", "ln -s /etc/passwd link; echo below >deep", **where)
    assert sandbox_cp(f"{name}:deep", "flat") == 0  # below the session's directory
    assert (folder / "flat").read_text() == "below\n"
    for words in (["a", "b"], [f"{name}:a", f"{name}:b"]):
        assert sandbox_cp(*words) == 2
    assert sandbox_cp(f"{name}:/no/such", "x") != 0 and sandbox_cp("x", "no-such:/tmp") == 1
    assert sandbox_cp("no-such-file", f"{name}:/tmp") != 0
    assert sandbox_cp("a\nb", f"{name}:/tmp") == 1
    engine.sandbox("rm", name, **where)


# --- Agents ---


@on_docker
def test_agents_are_left_and_come_back_to(session: Session) -> None:  # noqa: F811
    """Each is prompted, left, attached to from a closed window again, and goes on."""

    def visit(agent: str) -> None:
        waiting, _ = SCREENS[agent]
        with session.pty("-y", agent) as terminal:
            type_prompt(terminal, agent, f"first-of-{agent}")
            terminal.expect("pong", timeout=START_SECONDS)
            terminal.quiet()
            kitty = "\x1b[>" in terminal.output and re.search("\x1b\\[>\\d*u", terminal.output)
            terminal.send(KITTY if kitty else KEYS)
            assert terminal.wait() == 0
        program = AGENTS[SHORTCUTS[agent]].program
        listed = session.engine.sandbox("ps", session.name, "--json", **session.where())
        (id,) = [row["id"] for row in json.loads(listed.stdout)
                 if row["what"].split()[0] == program and row["state"] == "running"]
        for rows, cols in ((24, 80), (40, 120)):
            with session.engine.pty("attach", session.name, id, rows=rows, cols=cols,
                                    **session.where()) as terminal:
                terminal.expect("pong", timeout=START_SECONDS)
                terminal.quiet()
                terminal.send(f"then-{rows}")
                terminal.expect(f"then-{rows}", timeout=START_SECONDS)
                terminal.quiet()
                terminal.send("\r")
                terminal.expect("pong", timeout=START_SECONDS)
                hang_up(terminal)

    with ThreadPoolExecutor() as pool:
        list(pool.map(visit, ONCE))
