"""Run all tests, in parts, some of them side by side: most tests wait for an engine.

    python tests/run.py [OPTION OF PYTEST...]

conftest.py says which test belongs to which part. A part begins when another has ended, so that no
processor is idle while one long part is left. Progress is shown as it comes, the rest of what a
part says when it has ended. One file, or what -k names, is for pytest itself.

Exit status: 0; 1 when a part fails, runs no test or is killed; 130 after Ctrl-C.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from conftest import PARTS

ENDING = (signal.SIGINT, signal.SIGTERM)
END_SECONDS = 60.0  # for the tests that are running to remove what they have made
PRINTING = threading.Lock()
AT_ONCE = 5  # parts: with more, two processors are no faster
ROOM = threading.Semaphore(AT_ONCE)


class Part(threading.Thread):
    """One pytest, and what shows its output. It ends with the pytest."""

    def __init__(self, name: str, options: Sequence[str]) -> None:
        super().__init__(name=name)
        self.said: list[str] = []  # without its progress
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--part={name}"]
        # In a group of its own: a terminal's Ctrl-C beside ours would interrupt the clean-up.
        self.process = subprocess.Popen(
            [*argv, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", process_group=0,
        )  # fmt: skip

    def run(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.endswith("%]\n"):
                self.show(f"{self.name:8} {line}")
            else:
                self.said.append(line)
        self.process.wait()
        ROOM.release()
        self.show(f"\n+ tests of the part {self.name}\n", *self.said, "\n")

    def show(self, *lines: str) -> None:
        with PRINTING:
            print("".join(lines), end="", flush=True)

    def summary(self) -> str:
        """What has failed, and the last line."""
        failed = [line for line in self.said if line.startswith(("FAILED ", "ERROR "))]
        last = self.said[-1].strip() if self.said else "nothing said"
        return f"{''.join(failed)}{self.name}: status {self.process.returncode}, {last}"

    def interrupt(self) -> None:
        """What a terminal does at Ctrl-C."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        """Let it clean up, but not for ever."""
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """What is begun here is known before a signal interrupts: else nobody would end it."""
    came: list[int] = []
    for number in ENDING:
        signal.signal(number, lambda number, _frame: came.append(number))
    yield
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def main(options: Sequence[str]) -> int:
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)
    parts: list[Part] = []
    try:
        for name in PARTS:
            ROOM.acquire()
            with interrupted_later():
                parts.append(Part(name, options))
                parts[-1].start()
        for part in parts:
            part.join()
    except KeyboardInterrupt:
        for part in parts:
            part.interrupt()
        for part in parts:
            part.end()
        return 130
    print(*(part.summary() for part in parts), sep="\n")
    return int(any(part.process.returncode for part in parts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
