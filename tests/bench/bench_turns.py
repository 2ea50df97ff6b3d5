"""What snapshots add to a run: seconds, from one paired run.

    .venv/bin/python tests/bench/bench_turns.py [--runtime podman] [-n 7] [--files 20000]

Needs root, the engine and the product's image (sandbox build). Measures the zipapp, made for the
running interpreter. A run with both snapshots and one without take turns; a row is the median of
their differences, with the ceiling that the project has set itself.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_shadow import make
from harness import Table, build_zipapp, median


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare runs with snapshots and without.")
    parser.add_argument("--runtime", choices=("docker", "podman"), default="docker")
    parser.add_argument("-n", type=int, default=7, dest="count", help="pairs per row (default 7)")
    parser.add_argument("--files", type=int, default=20_000)
    args = parser.parse_args(argv)
    table, stem, number = Table(), f"bench-{os.getpid()}", iter(range(10**6))
    with tempfile.TemporaryDirectory(prefix="sandbox-bench-") as area:
        top = Path(area, "work")
        make(top, args.files)
        os.environ.update(SANDBOX_HOME=area, SANDBOX_RUNTIME=args.runtime)
        sandbox = build_zipapp(area)

        def run(name: str, *options: str) -> float:
            command = ["-x", f"echo {next(number)} >made"]
            start = time.perf_counter()
            subprocess.run([*sandbox, "run", "-n", name, *options, *command], cwd=top, check=True,
                           stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return time.perf_counter() - start

        def remove(*names: str) -> None:
            subprocess.run([*sandbox, "rm", "-f", *names], check=True, stdout=subprocess.DEVNULL)

        def fresh(*options: str) -> float:
            name = f"{stem}-{next(number)}"
            taken = run(name, *options)
            remove(name)
            return taken

        def added(title: str, one: Callable[..., float]) -> None:
            rows = [(one("--checkpoint"), one()) for _ in range(args.count + 1)][1:]
            table.row(title, median([a - b for a, b in rows]), "s", most=1.0, note=(
                f"{median([a for a, _ in rows]):.2f} s / {median([b for _, b in rows]):.2f} s"))

        added(f"a new session on {args.files} files", fresh)
        added("a session that is there", lambda *options: run(stem, *options))
        remove(stem)
    return int(not table.fine)


if __name__ == "__main__":
    sys.exit(main())
