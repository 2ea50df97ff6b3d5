"""The harness itself: what starts the tests changes nothing for them, and the parts of a run."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PARTS, ROOT, Process
from run import AT_ONCE
from service import wait_for

RUN = [sys.executable, str(ROOT / "tests" / "run.py")]
STATUS = """
import conftest, os, subprocess
assert conftest.signal.getsignal(2) == conftest.signal.default_int_handler
print(subprocess.check_output(["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"], text=True))
"""


def ignore_and_block() -> None:
    """As nohup, a shell's job in the background and careless supervisors do."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())


def test_what_tests_start_hears_every_signal() -> None:
    argv = [sys.executable, "-c", STATUS]
    answer = subprocess.run(
        argv, cwd=ROOT / "tests", preexec_fn=ignore_and_block, capture_output=True, text=True,
        timeout=300,
    )
    assert answer.stdout.split() == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16], answer


# --- Parts, side by side ---

PARTS_CONF = """
def pytest_addoption(parser):
    parser.addoption("--part")

def pytest_collection_modifyitems(config, items):
    items[:] = [item for item in items if config.getoption("part") in item.name]
"""
PARTS_TESTS = """
import os, pathlib, pytest, signal

@pytest.fixture
def pid():
    path = pathlib.Path(f"{os.getpid()}.pid")
    yield path
    path.unlink()
"""


def write_tests(folder: Path, bodies: dict[str, str]) -> None:
    (folder / "conftest.py").write_text(PARTS_CONF)
    # A test makes its file itself: a signal amid its fixture's beginning would leave out the end.
    tests = [f"\ndef test_{part}(pid): pid.touch(); {body}\n" for part, body in bodies.items()]
    (folder / "test_it.py").write_text(PARTS_TESTS + "".join(tests))


def collected(*options: str) -> list[str]:
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    answer = subprocess.run([*argv, *options], cwd=ROOT, capture_output=True, text=True,
                            timeout=300)
    assert answer.returncode == 0, answer.stdout
    return [line for line in answer.stdout.splitlines() if "::" in line]


def test_every_test_is_in_one_part() -> None:
    tests = collected()
    assert collected(*(f"--part={part}" for part in PARTS)) == tests
    assert 0 < len(collected(f"--part={PARTS[0]}")) < len(tests)


@pytest.mark.parametrize("body, status, words", [
    ("pass", 0, "podman: status 0, 1 passed"),
    ("assert 0", 1, "FAILED test_it.py::test_podman - assert 0\npodman: status 1, 1 failed"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 1, "podman: status -9, "),
    ("", 1, "podman: status 5, no tests ran"),
], ids=["passes", "fails", "is killed", "runs nothing"])  # fmt: skip
def test_a_run_fails_with_one_of_its_parts(tmp_path: Path, body: str, status: int,
                                           words: str) -> None:
    bodies = dict.fromkeys(PARTS, "pass") | {"podman": body}
    write_tests(tmp_path, {part: body for part, body in bodies.items() if body})
    answer = subprocess.run(RUN, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert answer.returncode == status, answer.stdout
    assert words in answer.stdout and "\ndocker: status 0, 1 passed" in answer.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_a_run_ends_its_parts(tmp_path: Path, number: signal.Signals) -> None:
    write_tests(tmp_path, dict.fromkeys(PARTS, "signal.pause()"))
    with Process(RUN, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                 start_new_session=True) as run:
        pids = wait_for(lambda: len(found := list(tmp_path.glob("*.pid"))) == AT_ONCE and found)
        run.send_signal(number)
        output, _ = run.communicate(timeout=300)
    assert run.returncode == 130, output
    assert output.count("KeyboardInterrupt") >= AT_ONCE and not list(tmp_path.glob("*.pid"))
    assert not [pid for pid in pids if Path("/proc", pid.stem).exists()]
