"""What snapshots cost beside git on the same tree: ratios from one paired run.

    .venv/bin/python tests/bench/bench_shadow.py [-n 5] [--files 50000] [--directory DIR]

Measures static/image/shadow.py as a process, with /usr/bin/python3; the start of a container comes
on top. `git status` has a warm untracked cache, `git add -A` goes into an empty repository. Each
pair runs A B A B …; a row is the median of its runs with the ceiling that the project has set.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import Table, median

PROGRAM = Path(__file__).resolve().parents[2] / "static" / "image" / "shadow.py"
# no configuration of this machine
ENV = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_AUTHOR_NAME": "a",
       "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}
FILES_EACH, LINES = 20, 60


def seconds(argv: Sequence[str], top: Path) -> float:
    start = time.perf_counter()
    subprocess.run(argv, cwd=top, env=ENV, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def shadow(verb: str, store: Path, top: Path, **request: Any) -> float:
    return seconds(["/usr/bin/python3", "-I", "-S", str(PROGRAM), verb, str(store), str(top),
                    json.dumps(request)], top)


def make(top: Path, count: int) -> None:
    """Files of about 3 kB, 20 to a directory, unlike each other."""
    for number in range(count):
        folder = top / f"package{number // 400}" / f"module{number // FILES_EACH % 20}"
        if number % FILES_EACH == 0:
            folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"value_{number}_{line} = {hash((number, line))}\n" for line in range(LINES))
        (folder / f"file{number}.py").write_text(text)


def size(folder: Path) -> int:
    """What it takes on the disk, in bytes."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def pairs(count: int, ours: Callable[[], float], bare: Callable[[], float]) -> tuple[float, float]:
    ours(), bare()
    rows = [(ours(), bare()) for _ in range(count)]
    return median([row[0] for row in rows]), median([row[1] for row in rows])


def compare(table: Table, title: str, most: float, ours: float, bare: float) -> None:
    table.row(title, ours / bare, "x", f"{1000 * ours:8.0f} ms / {1000 * bare:.0f} ms", most=most)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare snapshots with git.")
    parser.add_argument("-n", type=int, default=5, dest="count", help="pairs per row (default 5)")
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--directory", help="where the trees are made (default: a temporary one)")
    args = parser.parse_args(argv)
    table, count = Table(), args.count
    with tempfile.TemporaryDirectory(prefix="sandbox-bench-", dir=args.directory) as area:
        top, store, git = Path(area, "work"), Path(area, "store"), Path(area, "git")
        top.mkdir()
        make(top, args.files)
        time.sleep(3)  # until no file is as new as a snapshot
        git_argv = ["git", f"--git-dir={git}", f"--work-tree={top}"]

        def add() -> float:
            shutil.rmtree(git, ignore_errors=True)
            seconds([*git_argv, "init", "-q"], top)
            return seconds([*git_argv, "add", "-A"], top)

        def first() -> float:
            shutil.rmtree(store, ignore_errors=True)
            return shadow("snapshot", store, top)

        compare(table, "first snapshot / add -A", 2, *pairs(min(count, 3), first, add))
        table.row("store / git, on the disk", size(store) / size(git), "x",
                  f"{size(store) >> 20} MB / {size(git) >> 20} MB", most=1)
        seconds([*git_argv, "commit", "-qm", "first"], top)
        seconds([*git_argv, "config", "core.untrackedCache", "true"], top)

        def status() -> float:
            return seconds([*git_argv, "status", "--porcelain"], top)

        def again() -> float:
            return shadow("snapshot", store, top)

        compare(table, "next snapshot / status", 2, *pairs(count, again, status))

        def changed() -> float:
            for number in range(20):
                path = top / f"package{number}" / "module0" / f"file{number * 400}.py"
                if path.exists():
                    path.write_text(path.read_text() + f"{time.time_ns()}\n")
            return shadow("snapshot", store, top)

        compare(table, "the same with 20 files changed", 2, *pairs(count, changed, status))

        turns = iter(range(10**6))

        def turn() -> float:
            name = f"t{next(turns)}"
            return (shadow("snapshot", store, top, turn={"id": name})
                    + shadow("snapshot", store, top, end=name))

        turn()
        table.row("both snapshots of a turn", median([turn() for _ in range(count)]), "s",
                  most=args.files / 20_000)
        with (top / "sparse").open("wb") as file:
            file.truncate(3 << 30)
        table.row("a sparse file of 3 GB more", shadow("snapshot", store, top), "s", most=5)
        shutil.rmtree(top)
        shutil.rmtree(store)
        top.mkdir()
        make(top, 100_000)
        table.row("100,000 files, first snapshot", shadow("snapshot", store, top), "s")
        table.row("100,000 files, next snapshot", shadow("snapshot", store, top), "s")
    return 0 if table.fine else 1


if __name__ == "__main__":
    sys.exit(main())
