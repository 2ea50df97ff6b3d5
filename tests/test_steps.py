"""Long work: what is shown of it on a terminal and without one, and what is left when it fails or
is interrupted."""

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Process, Terminal

CODE = """\
import sys
sys.path.insert(0, sys.argv[1])
import sandbox
def work(_args):
    sandbox.end_on_signals()
    sandbox.run_steps([["sh", "-c", line] for line in sys.argv[2:]])
    return 0
sandbox.COMMANDS["doctor"] = ("", "", work)
sys.exit(sandbox.main(["doctor"]))
"""


def argv(*lines: str) -> list[str]:
    """A command of ours whose work is these lines for a shell."""
    return [sys.executable, "-c", CODE, str(ROOT), *lines]


def where(home: Path, **more: str) -> dict[str, Any]:
    return {"env": {"PATH": os.environ["PATH"], "SANDBOX_HOME": str(home), "TERM": "xterm-256color",
                    **more}}


def run(home: Path, *lines: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv(*lines), capture_output=True, text=True, timeout=60,
                          **where(home, **more))


def logs(home: Path) -> list[Path]:
    return list((home / "logs").glob("*"))


def test_without_a_terminal_there_is_one_line_per_step_with_its_time(tmp_path: Path) -> None:
    answer = run(tmp_path, "echo one; echo two >&2", "exit 0")
    assert (answer.returncode, answer.stdout) == (0, "")
    first, second = answer.stderr.splitlines()
    assert re.fullmatch(r"sandbox: \[1/2\] sh -c 'echo one; echo two >&2'  \d:\d\d", first)
    assert re.fullmatch(r"sandbox: \[2/2\] sh -c 'exit 0'  \d:\d\d", second)
    assert logs(tmp_path) == []


def test_a_step_that_fails_shows_its_last_lines_and_names_its_log(tmp_path: Path) -> None:
    many = r"seq 100; printf '\033[2Jend\n' >&2; exit 7"
    answer = run(tmp_path, many, "touch never")
    assert answer.returncode == 1
    (log,) = logs(tmp_path)
    lines = answer.stderr.splitlines()
    assert lines[0].endswith("ended with status 7") and lines[-1] == f"  the whole output: {log}"
    assert lines[1:-1] == [*(f"  {n}" for n in range(94, 101)), "  ?[2Jend"]
    assert log.read_text() == "".join(f"{n}\n" for n in range(1, 101)) + "\x1b[2Jend\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_verbose_lets_everything_through(tmp_path: Path) -> None:
    answer = run(tmp_path, "echo one; exit 3", SANDBOX_VERBOSE="1")
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[1] == "one"
    assert logs(tmp_path) == []


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    code = CODE.replace('["sh", "-c", line]', "[line]")
    answer = subprocess.run([sys.executable, "-c", code, str(ROOT), "no-such-program"],
                            capture_output=True, text=True,
                            **where(tmp_path))
    assert answer.returncode == 1 and "there is no program no-such-program" in answer.stderr
    assert logs(tmp_path) == []


def test_a_home_that_cannot_be_written_keeps_nobody_from_working(tmp_path: Path) -> None:
    answer = run(tmp_path / "file" / "home", "echo ran; exit 3")
    assert (answer.returncode, logs(tmp_path)) == (1, [])
    (tmp_path / "full").write_text("")
    answer = run(tmp_path / "full", "echo ran; exit 3")
    assert answer.returncode == 1
    assert "  ran\n" in answer.stderr
    assert "see its output above" in answer.stderr


def pty(home: Path, *lines: str) -> Terminal:
    return Terminal(argv(*lines), 24, 60, cwd=home, user=os.getuid(), **where(home))


def test_on_a_terminal_one_block_shows_step_time_and_last_line(tmp_path: Path) -> None:
    """The second line waits until the first was seen, so that both are drawn."""
    fifo, end = tmp_path / "fifo", tmp_path / "end"  # the first cat may have its own open for long
    os.mkfifo(fifo)
    os.mkfifo(end)
    with pty(tmp_path, f"echo first; cat {fifo}; cat {end}") as terminal:
        terminal.expect("  first")
        fifo.write_text("\x1b[2J" + "wide" * 40 + "\n")
        terminal.expect("  ?[2J" + "wide" * 13)
        end.write_text("")
        assert terminal.wait() == 0
    shown = terminal.output
    assert "\x1b[2J" not in shown and "wide" * 15 not in shown
    assert max(len(line) for line in re.split(r"\r?\n|\r\x1b\[A\x1b\[J", shown)[:-2]) < 60
    last = shown.rpartition("\r\x1b[A\x1b[J")[2]  # what is left when the block was wiped
    assert re.fullmatch(r"sandbox: \[1/1\] sh -c .*  \d:\d\d\r\n", last, re.DOTALL)
    assert logs(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_is_interrupted_ends_and_says_so(tmp_path: Path, number: int, status: int) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    line = (f"trap 'rm {tmp_path}/half; exit 1' TERM; touch {tmp_path}/half; "
            f"echo ready >{fifo}; sleep 600 & wait")
    with Process(argv(line), stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True,
                 **where(tmp_path)) as process:
        assert fifo.read_text() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status and "was interrupted" in err
    assert not (tmp_path / "half").exists() and logs(tmp_path) == []


# A signal arrives when the process has been started and its pid is known to nobody.
SIGNALLED = """\
import os, signal
spawn = os.posix_spawnp
def spawn_and_signal(*args, **options):
    pid = spawn(*args, **options)
    os.write(1, b"%d" % pid)
    os.kill(os.getpid(), signal.SIGTERM)
    return pid
os.posix_spawnp = spawn_and_signal
"""


@pytest.mark.parametrize("verbose", ["", "1"])
def test_what_is_interrupted_while_it_is_started_ends(tmp_path: Path, verbose: str) -> None:
    command = [sys.executable, "-c", SIGNALLED + CODE, str(ROOT), "exec sleep 600 >&- 2>&-"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60,
                            **where(tmp_path, SANDBOX_VERBOSE=verbose))
    assert answer.returncode == 143 and logs(tmp_path) == []
    left = Path("/proc", answer.stdout).exists()
    if left:
        os.kill(int(answer.stdout), signal.SIGKILL)
    assert not left


def test_what_is_started_is_open_to_every_signal(tmp_path: Path) -> None:
    answer = run(tmp_path, "exec grep SigBlk /proc/self/status", SANDBOX_VERBOSE="1")
    assert re.search(r"SigBlk:\s0{16}\n", answer.stderr), answer.stderr
