"""What a command in a session on Kubernetes costs beside `kubectl exec`: ratios from paired runs.

    .venv/bin/python tests/bench/bench_kubernetes.py [-n 40]

Needs root and the cluster of the tests (tests/prepare kubernetes), which it starts and ends.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness import Table, median, quartiles

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from cluster import Cluster, started  # noqa: E402
from conftest import copy_code  # noqa: E402

PAUSE_SECONDS = 0.1  # as bench_cli.py has it


def seconds(argv: Sequence[str]) -> float:
    time.sleep(PAUSE_SECONDS)
    start = time.perf_counter()
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare run with kubectl exec.")
    parser.add_argument("-n", type=int, default=40, dest="count", help="pairs (default 40)")
    args = parser.parse_args(argv)
    table = Table()
    with tempfile.TemporaryDirectory(prefix="sandbox-bench-") as name:
        copy_code(Path(name, "app"))
        cluster = Cluster("kubernetes", "kubectl", "root", Path(name))
        with started(cluster):
            cluster.configure()
            os.environ.update(cluster.environ())
            os.chdir(cluster.project)
            ours = cluster.sandbox_argv("run", "-n", "bench", "-x", "true")
            bare = ["kubectl", "--context", "admin", "--namespace", "agents", "exec"]
            seconds(ours), seconds(ours)
            bare += [cluster.pod("bench"), "-c", "session", "--", "true"]
            pairs = [(seconds(ours), seconds(bare)) for _ in range(args.count)]
    ratios = [a / b for a, b in pairs]
    table.row("run -n existing -x true", median(ratios), "x exec", most=1.3, note=(
        f"{quartiles(ratios)} {1000 * median([a for a, _ in pairs]):.0f} ms / "
        f"{1000 * median([b for _, b in pairs]):.0f} ms"))
    return int(not table.fine)


if __name__ == "__main__":
    sys.exit(main())
