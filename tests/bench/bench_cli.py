"""What the command line costs beside the engine's own client: ratios from one paired run.

    .venv/bin/python tests/bench/bench_cli.py [--runtime podman] [-n 20]

Needs root, the engine, and the image that tests/prepare makes. Measures the zipapp, made for the
running interpreter, as its own first line starts it. Each pair runs A B A B …; a row is the median
of B, of A, of B/A with its quartiles, and the ceiling that the project has set itself.

Each command is started after a pause, as a person does it: an engine that has answered just now
answers sooner, docker's exec in 24 ms instead of 40, and only the bare call would profit.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

IMAGE_NAME, IMAGE_VERSION = "localhost/sandbox-test", "1.0-common"
PAUSE_SECONDS = 0.1
BUILD = Path(__file__).resolve().parents[2] / "static" / "build.py"


def seconds(*commands: Sequence[str]) -> float:
    time.sleep(PAUSE_SECONDS)
    start = time.perf_counter()
    for command in commands:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def pair(title: str, ceiling: float, count: int, ours: Callable[[], float],
         bare: Callable[[], float]) -> bool:
    """Print one row; True when the median ratio is at or under the ceiling."""
    ours(), bare()
    rows = [(bare(), ours()) for _ in range(count)]
    ratios = [b / a for a, b in rows]
    low, middle, high = statistics.quantiles(ratios, n=4)
    ms = [1000 * statistics.median(column) for column in zip(*rows, strict=True)]
    print(
        f"{title:34} {ms[1]:7.1f} ms  {ms[0]:7.1f} ms  {middle:5.2f} ({low:.2f}-{high:.2f})  "
        f"ceiling {ceiling}")
    return middle <= ceiling


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare sandbox with the engine's client.")
    parser.add_argument("--runtime", choices=("docker", "podman"), default="docker")
    parser.add_argument("-n", type=int, default=20, dest="count", help="pairs per row (default 20)")
    args = parser.parse_args(argv)
    engine, count, image = args.runtime, args.count, f"{IMAGE_NAME}:{IMAGE_VERSION}"
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(SANDBOX_HOME=home, SANDBOX_RUNTIME=engine)
        os.chdir(home)
        subprocess.run([sys.executable, BUILD, "sandbox.pyz"], check=True,
                       stdout=subprocess.DEVNULL)
        sandbox = [sys.executable, "-I", "-S", f"{home}/sandbox.pyz"]
        run = [*sandbox, "run", "--in", IMAGE_NAME, "--iv", IMAGE_VERSION]
        stem, number = f"bench-{os.getpid()}", iter(range(10**6))

        def create() -> float:
            name = f"{stem}-{next(number)}"
            taken = seconds([*run, "-n", name, "-x", "true"])
            subprocess.run([engine, "rm", "-f", name], stdout=subprocess.DEVNULL, check=True)
            return taken

        def create_bare() -> float:
            name = f"{stem}-{next(number)}"
            init = [engine, "run", "-d", "--init", "--name", name, image, "sleep", "infinity"]
            taken = seconds(init, [engine, "exec", name, "true"])
            subprocess.run([engine, "rm", "-f", name], stdout=subprocess.DEVNULL, check=True)
            return taken

        print(f"{'':34} {'sandbox':>10}  {engine:>10}  ratio (quartiles)")
        subprocess.run([*run, "-n", stem, "-x", "true"], check=True)
        try:
            fine = [
                pair("run -n existing -x true / exec", 1.4, count,
                     lambda: seconds([*run, "-n", stem, "-x", "true"]),
                     lambda: seconds([engine, "exec", stem, "true"])),
                pair("ps / ps", 2.5, count, lambda: seconds([*sandbox, "ps"]),
                     lambda: seconds([engine, "ps"])),
                pair("create and run / run -d, exec", 1.3, count, create, create_bare),
                pair("--version / import argparse", 1.5, count,
                     lambda: seconds([*sandbox, "--version"]),
                     lambda: seconds([sys.executable, "-I", "-S", "-c", "import argparse"])),
            ]  # fmt: skip
        finally:
            subprocess.run([*sandbox, "rm", stem], stdout=subprocess.DEVNULL, check=True)
    return int(not all(fine))


if __name__ == "__main__":
    sys.exit(main())
