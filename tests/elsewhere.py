"""Another machine: one of the tests' own, with a dockerd, a podman of an ordinary user and a sshd.

It has a network of its own, and of this one's only a port of the loopback, which leads to its
sshd. No client here can reach its engines in another way.
"""

import json
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import USER, Engine, Process, Result
from machine import Machine, own_machine
from service import wait_for

SSH = ("openssh-client", "openssh-sftp-server", "libwrap0", "ucf", "runit-helper", "lsb-base")

FORWARD = """
import contextlib, socket, sys, threading

def pump(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)

def guarded(*ends):
    try:
        pump(*ends)
    except OSError:  # to close them would say nothing as long as the other thread reads
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

def lead(client):  # while packets are lost it waits here, and nobody else for it
    with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 22)) as there:
        back = threading.Thread(target=guarded, args=(there, client), daemon=True)
        back.start()
        guarded(client, there)
        back.join()

server = socket.socket(fileno=int(sys.argv[1]))
while True:
    client, _ = server.accept()
    threading.Thread(target=lead, args=(client,), daemon=True).start()
"""


class Elsewhere:
    """The machine, and what a client needs to reach it: HOSTS of the configuration, `environ`."""

    def __init__(self, engine: Engine, machine: Machine, port: int) -> None:
        self.engine, self.machine, self.port = engine, machine, port
        self.folder = engine.directory()
        self.environ = {"HOME": str(self.folder), "DOCKER_CONFIG": f"{self.folder}/docker",
                        "PATH": f"{self.folder}:{os.environ['PATH']}", "SANDBOX_RUNTIME": "",
                        "CONTAINERS_CONF": f"{self.folder}/containers.conf"}

    def set_up(self) -> None:
        self.machine.offer(*SSH)
        self.machine.install("openssh-server")
        key = self.folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        public = key.with_suffix(".pub").read_text()
        self.machine.must("usermod", "-p", "*", USER)  # sshd refuses one that is locked
        for user in ("root", USER):
            home = pwd.getpwnam(user).pw_dir
            self.machine.must("sh", "-c", "mkdir -pm700 $1/.ssh; cat >$1/.ssh/authorized_keys; "
                              "chown -R $2 $1/.ssh", "sh", home, user, input=public)
        self.machine.must("sh", "-c", "mkdir -p /run/sshd; /usr/sbin/sshd -o UsePAM=no "
                          "-o StrictModes=no -o MaxStartups=100 -o MaxSessions=100 && "
                          "until [ -s /run/sshd.pid ]; do sleep 0.05; done")  # it listens by then
        config = self.folder / "config"
        config.write_text(f"Host *\n HostName 127.0.0.1\n Port {self.port}\n IdentityFile {key}\n"
                          " IdentitiesOnly yes\n StrictHostKeyChecking no\n LogLevel ERROR\n"
                          f" UserKnownHostsFile {self.folder}/known_hosts\n BatchMode yes\n")
        ssh = self.folder / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n')
        ssh.chmod(0o755)
        self.machine.load_docker()
        self.machine.start_dockerd()
        (self.folder / "docker").mkdir()
        (self.folder / "docker" / "config.json").write_text("{}")  # podman wants one
        self.client("docker", "context", "create", "big", "--docker", "host=ssh://root@big")

    def start_podman(self) -> None:
        """The service of an ordinary user's podman, and the connection `lab` to it."""
        uid = pwd.getpwnam(USER).pw_uid
        self.machine.load_podman(USER)
        path = f"/run/user/{uid}/podman.sock"
        self.machine.must("sh", "-c", f"podman system service -t 0 unix://{path} >/dev/null 2>&1 &",
                          user=USER)
        wait_for(lambda: self.machine.run("test", "-S", path).returncode == 0)
        Path(self.environ["CONTAINERS_CONF"]).write_text(
            "[engine]\n[engine.service_destinations.lab]\n"
            f'uri = "ssh://{USER}@127.0.0.1:{self.port}{path}"\nidentity = "{self.folder}/key"\n'
            f'[engine.service_destinations.portless]\nuri = "ssh://{USER}@127.0.0.1{path}"\n')

    def client(self, *argv: str) -> str:
        """What a client's own command printed, that must succeed."""
        done = subprocess.run(argv, env=self.engine.environ() | self.environ, text=True,
                              capture_output=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def cut(self) -> None:
        """End all connections, as a network does that is gone for a while."""
        self.machine.must("pkill", "-KILL", "-f", f"^sshd: (root|{USER})")

    @contextmanager
    def lossy(self) -> Iterator[None]:
        """Its network loses all packets of ssh: no connection is closed, and none says a word."""
        rules = [("INPUT", "--dport"), ("INPUT", "--sport")]
        for chain, side in rules:
            self.machine.must("iptables", "-I", chain, "-p", "tcp", side, "22", "-j", "DROP")
        try:
            yield
        finally:
            for chain, side in rules:
                self.machine.must("iptables", "-D", chain, "-p", "tcp", side, "22", "-j", "DROP")

    @contextmanager
    def silent(self, name: str) -> Iterator[None]:
        """A context whose host takes connections and says nothing: its packets are lost."""
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
            self.client("docker", "context", "create", name, "--docker",
                        f"host=tcp://127.0.0.1:{port}")
            yield

    def sandbox(self, *argv: str, env: dict[str, str] | None = None, **where: object) -> Result:
        return self.engine.sandbox(*argv, env=self.environ | (env or {}), **where)  # type: ignore[arg-type]


HOSTS = {"big": {"runtime": "docker", "context": "big"},
         "lab": {"runtime": "podman", "connection": "lab"}}


def configure(home: Path, **keys: object) -> None:
    path = home / "sandbox.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hosts": HOSTS, **keys}))


@contextmanager
def elsewhere(engine: Engine) -> Iterator[Elsewhere]:
    with own_machine(engine) as machine, socket.create_server(("127.0.0.1", 0)) as server:
        argv = [*machine.prefix[:3], "--net", sys.executable, "-c", FORWARD, str(server.fileno())]
        argv = [argv[0], argv[1], "--net", *argv[4:]]
        with Process(argv, pass_fds=[server.fileno()], start_new_session=True):
            there = Elsewhere(engine, machine, server.getsockname()[1])
            there.set_up()
            yield there
