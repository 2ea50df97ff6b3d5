"""The harness itself: what starts the tests does not change what they see."""

import signal
import subprocess
import sys
from pathlib import Path

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
    tests = Path(__file__).parent
    answer = subprocess.run(
        argv, cwd=tests, preexec_fn=ignore_and_block, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.split() == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16], answer
