"""A machine to break: this one's files with all writes in memory, and a network and processes of
its own.

What is removed, installed or stopped in it stays as it is outside. It has no network but its
loopback; packages come from a repository of the tests' own.
"""

import fcntl
import hashlib
import os
import pwd
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import CONTAINERS_CONF, IMAGE, PATH, USER, Engine, Process, Result, Terminal

# $1 is the directory of the tests: what is written there later is seen in it, too.
SCRIPT = """\
tests=$1
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
cd /mnt/root
# The engines keep their containers in an overlay, which cannot lie on another.
for directory in run var/log var/lib/docker var/lib/containers home; do
  mount -t tmpfs -o mode=755 tmpfs $directory
done
mount --bind "$tests" ".$tests"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
pivot_root . mnt
cd /
umount -l /mnt
rm -rf /etc/apt/sources.list* /var/lib/apt/lists /usr/local/bin/docker /etc/docker
rm -f /var/lib/man-db/auto-update # else each installation reads all manual pages anew
printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
echo "deb [trusted=yes] file:$tests/packages ./" >/etc/apt/sources.list
ip link set lo up
echo ready
while :; do sleep 1000; done  # a shell that waits reaps what is orphaned, as an init does"""


class Machine:
    """Commands in it run in the engine's project directory, as root without a `user`."""

    def __init__(self, engine: Engine, pid: int) -> None:
        self.engine, self.runtime = engine, ""  # the engine that is asked for, '' for any
        self.prefix = ["nsenter", f"--target={pid}", "--mount", "--net", "--pid", "env", "-C",
                       str(engine.project)]
        self.add_user(USER)

    def argv(self, argv: tuple[str, ...], user: str, groups: str, env: dict[str, str]) -> list[str]:
        whole = self.environ(user) | env
        owner = pwd.getpwnam(user)
        become = []
        if user != "root":
            become = ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", groups]
        return [*self.prefix, *become, "env", "-i",
                *(f"{name}={value}" for name, value in whole.items()), *argv]

    def environ(self, user: str) -> dict[str, str]:
        environ = self.engine.environ(user, self.engine.home)
        return environ | {"SANDBOX_RUNTIME": self.runtime, "CONTAINERS_CONF": CONTAINERS_CONF,
                          "PATH": PATH}

    def run(self, *argv: str, user: str = "root", groups: str = "--init-groups",
            env: dict[str, str] | None = None,
            input: str = "", seconds: int = 300) -> Result:
        words = self.argv(argv, user, groups, env or {})
        return subprocess.run(words, input=input, capture_output=True, text=True, timeout=seconds)

    def must(self, *argv: str, **how: Any) -> str:
        """What a command printed, that must succeed."""
        done = self.run(*argv, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sandbox(self, *args: str, **how: Any) -> Result:
        return self.run(*self.engine.sandbox_argv(*args), **how)

    def pty(self, *args: str) -> Terminal:
        words = self.argv((*self.engine.sandbox_argv(*args),), "root", "", {})
        return Terminal(words, 24, 80, user=0)

    def add_user(self, name: str) -> None:
        """Give a user of this machine the directories of a login."""
        owner = pwd.getpwnam(name)
        for directory in (owner.pw_dir, f"/run/user/{owner.pw_uid}"):
            self.must("install", "-d", "-m700", f"-o{owner.pw_uid}", f"-g{owner.pw_gid}", directory)

    def let_sudo(self, user: str = USER) -> None:
        self.install("sudo")
        self.must("sh", "-c", f"echo '{user} ALL=(ALL) NOPASSWD: ALL' >>/etc/sudoers")

    def own_project(self, user: str = USER) -> None:
        owner = pwd.getpwnam(user)
        for path in (self.engine.project, self.engine.home, self.engine.home / "sandbox.json"):
            os.chown(path, owner.pw_uid, owner.pw_gid)

    def log_out(self, user: str = USER) -> None:
        """End what a user has left running, as the end of the last login does."""
        uid = pwd.getpwnam(user).pw_uid
        self.run("pkill", "-KILL", "-u", user)
        self.must("sh", "-c", f"rm -rf /run/user/{uid}/* /tmp/podman-run-{uid}")

    # --- Packages ---

    def install(self, *packages: str) -> None:
        self.offer(*packages)
        self.must("sh", "-c", f"apt-get update -qq && apt-get install -qq {' '.join(packages)}")
        self.must("rm", "-rf", "/var/lib/apt/lists")

    def offer(self, *packages: str) -> None:
        """Put packages that the distribution has into the repository that apt reads here."""
        folder = self.engine.area / "packages"
        folder.mkdir(exist_ok=True)
        for package in packages:
            if not list(folder.glob(f"{package}_*.deb")):
                download(package, folder)
        index = [self.entry(path) for path in sorted(folder.glob("*.deb"))]
        (folder / "Packages").write_text("\n".join(index))

    @staticmethod
    def entry(path: Path) -> str:
        control = subprocess.run(["dpkg-deb", "-f", path], check=True, capture_output=True,
                                 text=True).stdout
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        return f"{control}Filename: ./{path.name}\nSize: {len(data)}\nSHA256: {digest}\n"

    def remove(self, *packages: str) -> None:
        """Remove packages, whatever needs them; what they have stored stays."""
        self.must("dpkg", "--remove", "--force-depends", *packages)

    # --- Engines ---

    def start_dockerd(self) -> None:
        script = "dockerd >/dev/null 2>&1 & until docker ps >/dev/null 2>&1; do sleep 0.05; done"
        self.must("timeout", "120", "sh", "-c", script)

    def stop_dockerd(self) -> None:
        script = ("pid=$(cat /run/docker.pid) || exit 0; kill $pid; "
                  "while [ -e /proc/$pid ]; do sleep 0.05; done")
        self.must("timeout", "120", "sh", "-c", script)

    def running(self, name: str) -> bool:
        return self.run("pgrep", "-x", name).returncode == 0

    def image(self) -> Path:
        """The test image in a file."""
        path = self.engine.area / "test-image.tar"
        if not path.exists():
            assert self.engine.run("save", "-o", str(path), IMAGE).returncode == 0
            path.chmod(0o644)
        return path

    def load_docker(self) -> None:
        """Give docker the test image, and stop it."""
        self.start_dockerd()
        self.must("docker", "load", "-i", str(self.image()))
        self.stop_dockerd()

    def load_podman(self, user: str = "root") -> None:
        self.must("podman", "load", "-i", str(self.image()), user=user)


def download(package: str, folder: Path) -> None:
    """Fetch a package that the distribution has, by the lists that are here or by new ones."""
    argv = ["apt-get", "download", "-qq", package]
    with open("/run/sandbox-test-apt.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # apt-get fails where another one fetches lists
        if not subprocess.run(argv, cwd=folder, capture_output=True, timeout=300).returncode:
            return
        subprocess.run(["apt-get", "update", "-qq"], check=True, capture_output=True, timeout=300)
        if subprocess.run(["apt-cache", "show", package], capture_output=True).returncode == 0:
            subprocess.run(argv, cwd=folder, check=True, capture_output=True, timeout=300)


@contextmanager
def own_machine(engine: Engine) -> Iterator[Machine]:
    argv = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "sh", "-ec", SCRIPT,
            "sh",
            str(engine.area)]
    with Process(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "ready\n"
        init = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
        machine = Machine(engine, init)
        yield machine
        machine.stop_dockerd()
