"""How long the list of 200 sessions on three hosts takes, beside the slowest host's own: ratios.

    .venv/bin/python tests/bench/bench_list.py [-n 11] [--sessions 200]

Needs root, docker and the cluster of the tests (tests/prepare kubernetes). The hosts are a docker
and a rootless podman behind a sshd on loopback, and the cluster. One session of each is real; the
others are containers, or records, that were created with its labels and never started.
"""

import argparse
import json
import os
import shlex
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
from conftest import IMAGE, IMAGE_VERSION, USER, copy_code  # noqa: E402
from elsewhere import HOSTS, Elsewhere, elsewhere  # noqa: E402

CLIENTS = {
    "big": ["docker", "--context", "big"],
    "lab": ["podman", "--connection", "lab"],
    "k8s": ["kubectl", "--context", "admin", "--namespace", "agents"],
}


def fill(there: Elsewhere, host: str, count: int) -> None:
    """Create more containers with the labels of the session `one` of a host."""
    shown = subprocess.run([*CLIENTS[host], "inspect", "-f", "{{json .Config.Labels}}", "one"],
                           capture_output=True, text=True, check=True).stdout
    labels = [f"{key}={value}" for key, value in json.loads(shown).items() if "sandbox" in key]
    options = shlex.join([word for label in labels for word in ("--label", label)])
    there.machine.must("sh", "-c", f"for i in $(seq {count}); do {CLIENTS[host][0]} create "
                       f"--name many$i {options} {IMAGE} true >/dev/null || exit; done",
                       user=USER if host == "lab" else "root", seconds=900)


def fill_cluster(cluster: Cluster, count: int) -> None:
    """Create more records like that of the session `one`, each with an id of its own."""
    record = json.loads(cluster.kubectl("get", "configmap", "sandbox-one", "-o", "json"))
    session = record["metadata"]["labels"]["sandbox.session"]
    meta = {key: record["metadata"][key] for key in ("name", "labels", "annotations")}
    text = json.dumps({**record, "metadata": meta})
    items = [json.loads(text.replace(session, f"{i:010x}").replace("-one", f"-many{i}").replace(
        '"sandbox.name": "one"', f'"sandbox.name": "many{i}"')) for i in range(count)]
    cluster.kubectl("create", "-f", "-",
                    input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def seconds(argv: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, check=True)  # podman warns with every call
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare ps with the slowest host's own list.")
    parser.add_argument("-n", type=int, default=11, dest="count", help="rounds (default 11)")
    parser.add_argument("--sessions", type=int, default=200)
    args = parser.parse_args(argv)
    table, each = Table(), args.sessions // 3
    with tempfile.TemporaryDirectory(prefix="sandbox-bench-") as name:
        Path(name).chmod(0o755)
        copy_code(Path(name, "app"))
        cluster = Cluster("kubernetes", "kubectl", "root", Path(name))
        with started(cluster), elsewhere(cluster) as there:
            there.start_podman()
            there.machine.must("install", "-d", "-m777", "/srv/project")
            cluster.configure(runs={host: {"host": host, "workspace": "mount",
                                           "imageVersion": IMAGE_VERSION,
                                           "hostPath": "/srv/project"} for host in HOSTS})
            path = cluster.home / "sandbox.json"
            config = json.loads(path.read_text())
            config["hosts"] = {**HOSTS, "k8s": config["hosts"]["k8s"]}
            path.write_text(json.dumps({**config, "host": ""}))
            os.environ.update(there.environ | {
                key: cluster.environ()[key] for key in ("KUBECONFIG", "SANDBOX_HOME")})
            os.environ["PATH"] = f"{there.folder}:{cluster.environ()['PATH']}"
            os.environ.pop("SANDBOX_RUNTIME")
            os.chdir(cluster.project)
            for host in CLIENTS:
                options = ["--on", "k8s"] if host == "k8s" else ["-r", host]
                subprocess.run(cluster.sandbox_argv("run", *options, "-n", "one", "-x", "true"),
                               check=True)
            for host in HOSTS:
                fill(there, host, each - 1)
            fill_cluster(cluster, args.sessions - 2 * each - 1)
            ours = cluster.sandbox_argv("ps", "-q")
            names = subprocess.run(ours, capture_output=True, text=True, check=True).stdout.split()
            assert len([name for name in names if "@" in name]) == args.sessions, names
            lists = {host: [*client, *(["get", "configmaps,pods", "-o", "json"] if host == "k8s"
                                       else ["ps", "-a", "--format", "json"])]
                     for host, client in CLIENTS.items()}
            rounds = [(seconds(ours), {host: seconds(own) for host, own in lists.items()})
                      for _ in range(args.count)]
    ratios = [mine / max(own.values()) for mine, own in rounds]
    table.row(f"ps of {args.sessions} sessions on three hosts", median(ratios), "x", most=1.3,
              note=f"of the slowest {quartiles(ratios)} "
              f"{1000 * median([mine for mine, _ in rounds]):.0f} ms / " + ", ".join(
                  f"{host} {1000 * median([own[host] for _, own in rounds]):.0f}"
                  for host in CLIENTS))
    return int(not table.fine)


if __name__ == "__main__":
    sys.exit(main())
