"""How quickly a directory is on another machine, beside tar through ssh: seconds.

    .venv/bin/python tests/bench/bench_hosts.py [-n 3] [--files 20000] [--megabytes 1000]

Needs root, docker and the product's image (sandbox build). The other machine is one of the tests'
own, behind a sshd on loopback. Seeding is what fills the copy of a new session, without its first
snapshot, which takes as long as on this machine; before each the other machine has nothing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import Table, median

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from conftest import Engine, copy_code, write_config  # noqa: E402
from elsewhere import configure, elsewhere  # noqa: E402

import sandbox  # noqa: E402
import sandbox_changes  # noqa: E402
import sandbox_travel  # noqa: E402

IMAGE_NAME = "localhost/sandbox"


def make(top: Path, files: int, size: int) -> None:
    for number in range(files):
        folder = top / f"{number % 200}" / f"{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}").write_bytes(os.urandom(size))


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare seeding with tar through ssh.")
    parser.add_argument("-n", type=int, default=3, dest="count", help="pairs (default 3)")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--megabytes", type=int, default=1000)
    args = parser.parse_args(argv)
    table = Table()
    with tempfile.TemporaryDirectory(prefix="sandbox-bench-") as name:
        area = Path(name)
        area.chmod(0o755)
        copy_code(area / "app")
        engine = Engine("docker", "docker", "root", area)
        write_config(engine.home, imageName=IMAGE_NAME)
        configure(engine.home)
        make(engine.project, args.files, args.megabytes * 1_000_000 // args.files)
        with elsewhere(engine) as there:
            archive = area / "image.tar"
            engine.run("save", "-o", str(archive), f"{IMAGE_NAME}:1.0-common", timeout=600)
            there.machine.must("docker", "load", "-qi", str(archive), seconds=600)
            archive.unlink()
            os.environ.update(there.environ, SANDBOX_HOME=str(engine.home))
            os.environ.pop("SANDBOX_RUNTIME")
            os.chdir(engine.project)
            config = sandbox.load_config(sandbox.Layer({"host": "big"}, "flags"))
            host = sandbox.candidates(config)[0]
            spec = sandbox.spec_of(config, [host])
            labels = sandbox.labels_of(config, sandbox.Layer({}, "flags"), spec, "0:0")
            session = sandbox.Session("bench@big", "", labels)
            # What is written to the other machine's disk, which is memory, would count.
            sandbox_changes.LIMITS["memory"] = "8g"
            volumes = session.copy, sandbox_travel.mirror_of(session)

            def drop(*names: str) -> None:
                for volume in names:
                    there.machine.run("docker", "volume", "rm", "-f", volume)

            def seed() -> None:
                sandbox_travel.fill_copy(host, session)

            def sync() -> None:
                with sandbox_travel.Helper(host, session, ["true"]) as helper:
                    helper.output()

            def nothing() -> None:
                there.client("docker", "--context", "big", "run", "--rm", "--network", "none",
                             "--entrypoint", "true", f"{IMAGE_NAME}:1.0-common")

            def tar() -> None:
                folder = "/var/lib/docker/bench"
                subprocess.run(f"tar -c . | ssh root@big 'mkdir {folder} && tar -xC {folder}'",
                               shell=True, check=True)

            pairs = []
            for _ in range(args.count):
                drop(*volumes)
                pairs.append((seconds(seed), seconds(tar)))
                there.machine.must("rm", "-r", "/var/lib/docker/bench")
            again = [(seconds(sync), seconds(nothing)) for _ in range(args.count)]
            others = []
            for _ in range(args.count):
                drop(session.copy)
                others.append(seconds(seed))
        what = f"{args.megabytes} MB in {args.files} files"
        table.row(f"seeding {what}", median([a / b for a, b in pairs]), "x tar", most=1.5, note=(
            f"{median([a for a, _ in pairs]):.2f} s / {median([b for _, b in pairs]):.2f} s"))
        table.row("again, where nothing has changed", median([a for a, _ in again]), "s", most=2,
                  note=f"a container that does nothing: {median([b for _, b in again]):.2f} s")
        table.row("a second copy of the same directory", median(others), "s")
        shutil.rmtree(engine.project)
    return int(not table.fine)


if __name__ == "__main__":
    sys.exit(main())
