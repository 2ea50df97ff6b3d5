"""A real cluster of two nodes as one more engine: tests/prepare kubernetes builds it, and
tests/kubernetes starts it.
"""

import contextlib
import fcntl
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import IMAGE_NAME, ROOT, TIMEOUT_SECONDS, Engine, Result, write_config

BED = ROOT / "tests" / "kubernetes"
RUN = Path("/var/cache/sandbox-test/kubernetes/run")
VERSION = "1.0-git"
BUILD_SECONDS = 1800  # for a build that was begun before the tests


@dataclass
class Cluster(Engine):
    """The cluster, and this machine's client of it. Its host is k8s; `person` is another user's
    view of the same namespace, and `closed` of one where no pod may be made.
    """

    host: str = "@k8s"

    def environ(self, user: str | None = None, home: Path | None = None) -> dict[str, str]:
        environ = super().environ(user, home)
        environ |= {"PATH": f"{RUN}:{environ['PATH']}", "KUBECONFIG": f"{RUN}/config"}
        del environ["SANDBOX_RUNTIME"]
        return environ

    def configure(self, **keys: object) -> None:
        hosts = {name: {"runtime": "kubectl", "context": context, "namespace": namespace}
                 for name, context, namespace in (
                     ("k8s", "admin", "agents"), ("person", "person", "agents"),
                     ("closed", "person", "closed"), ("strict", "person", "strict"))}
        write_config(self.home, **{"imageName": IMAGE_NAME, "imageVersion": VERSION,
                                   "hosts": hosts, "host": "k8s", **keys})

    def kubectl(self, *words: str, input: str = "") -> str:
        done = self.call(*words, input=input)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def call(self, *words: str, input: str | None = None) -> Result:
        argv = ["kubectl", "--context", "admin", "--namespace", "agents", *words]
        return self._run(argv, input, 60, {})

    def run(self, *args: str, timeout: float = TIMEOUT_SECONDS, input: str | None = None,
            **where: Any) -> Result:
        """What docker has a command for, and kubectl as well."""
        if args[0] == "exec":
            return self.call("exec", self.pod(args[1]), "-c", "session", "--", *args[2:])
        if args[0] == "inspect":
            return self.call("get", "pods,configmaps", "-o", "json")
        assert args[0] in ("stop", "kill"), args
        return self.call("delete", self.pod(args[-1]), *(["--force"] if args[0] == "kill" else []),
                         f"--grace-period={int(args[0] == 'stop')}")

    def names(self) -> list[str]:
        shown = r'jsonpath={range .items[*]}{.metadata.annotations.sandbox\.name}{" "}{end}'
        out = self.kubectl("get", "configmaps", "-l", "sandbox.session,!sandbox.proxy", "-o", shown)
        return [name + self.host for name in out.split()]

    def label(self, name: str, key: str) -> str:
        record = self.kubectl("get", "configmaps", "-o", "json", "-l",
                              f"sandbox.name={name.removesuffix(self.host)}")
        return str(json.loads(record)["items"][0]["metadata"]["annotations"][key])

    def volumes(self) -> set[str]:
        return {item.partition("/")[2] for item in self.kubectl("get", "pvc", "-o",
                                                                "name").split()}

    def pod(self, name: str) -> str:
        """The pod of a session."""
        return self.kubectl("get", "pods", "-l",
                            f"sandbox.name={name.removesuffix(self.host)},!sandbox.proxy", "-o",
                            "name").strip()

    def left(self) -> str:
        """What there is of sessions."""
        return self.kubectl("get", "pods,configmaps,pvc", "-o", "name", "--field-selector",
                            "metadata.name!=kube-root-ca.crt")

    def session_ids(self) -> set[str]:
        return set(self.left().split())

    def remove(self, ids: set[str]) -> None:
        if ids:
            self.call("delete", *ids, "--force", "--grace-period=0", "--timeout=50s")

    def must(self, *words: str, status: int = 0, **where: Any) -> Result:
        done = self.sandbox(*words, **where)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    @contextlib.contextmanager
    def without_api(self) -> Iterator[None]:
        self.bed("api", "stop")
        try:
            yield
        finally:
            self.bed("api", "start")

    def bed(self, *words: str) -> None:
        done = subprocess.run([BED, *words], capture_output=True, text=True, timeout=BUILD_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def started(cluster: Cluster) -> Iterator[None]:
    with open("/run/sandbox-test-kubernetes.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster.bed("up")
        try:
            yield
        finally:
            cluster.bed("down")
