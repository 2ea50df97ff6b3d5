"""Network allowlists on real engines. The outside is a container in the network namespace of a
session's proxy."""

import concurrent.futures
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    IMAGE,
    IMAGE_VERSION,
    ROOT,
    TOKEN,
    Engine,
    Held,
    on_docker,
    unique_name,
    write_config,
)
from network import LOCAL, Guarded, inspected, left_of, proxy_of, shown_network
from outside import PUBLIC
from service import Service, wait_for

PROBE = (ROOT / "tests" / "probe.py").read_text()


@pytest.fixture(scope="module")
def guarded(engine: Engine) -> Iterator[Guarded]:
    """One session for all tests that leave its rules as they were."""
    guarded = Guarded(engine, "api.test", "api.test:8081", "private.test")
    yield guarded
    guarded.end()


# --- What is allowed ---

REACH = """
import json, urllib.request
from websockets.sync.client import connect
for url in ("http://api.test/", "https://api.test/"):
    print(*json.load(urllib.request.urlopen(url)))
with connect("ws://api.test:8081/") as socket:
    socket.send("over a socket")
    print(socket.recv())
"""


def test_an_allowed_name_is_reached(guarded: Guarded) -> None:
    answer = guarded.python(REACH)
    expected = [f"{PUBLIC} 80 api.test", f"{PUBLIC} 443 api.test", "over a socket"]
    assert answer.stdout.splitlines() == expected, answer.stderr
    fetched = guarded.run("wget -q -O - http://api.test/").stdout
    assert fetched == json.dumps([PUBLIC, 80, "api.test"])


@on_docker
def test_a_certificate_is_the_servers_own(guarded: Guarded) -> None:
    answer = guarded.python(REACH, "-e", "SSL_CERT_FILE=/dev/null")
    assert "CERTIFICATE_VERIFY_FAILED" in answer.stderr


ENVIRONMENT = """
import json, os
print(json.dumps(dict(os.environ)))
"""


@on_docker
def test_every_program_is_told(guarded: Guarded) -> None:
    env = json.loads(guarded.python(ENVIRONMENT, "-e", "HTTP_PROXY=http://10.0.0.1:1", "-e",
                                    "https_proxy=x").stdout)
    proxy = "http://127.0.0.1:3128"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    assert {env[name] for name in names} == {proxy}
    assert env["NO_PROXY"] == env["no_proxy"] == "localhost,127.0.0.1,::1"
    assert env["NODE_USE_ENV_PROXY"] == "1"


@on_docker
def test_two_hundred_connections_beside_slow_and_broken_ones(guarded: Guarded) -> None:
    answer = guarded.python(CROWD)
    expected = ["200", "tunnels", "200", "answers", "20", "slow"]
    assert answer.stdout.split() == expected, answer.stdout + answer.stderr


CROWD = """
import socket, struct
def proxy(data):
    sock = socket.create_connection(("127.0.0.1", 3128), timeout=60)
    sock.sendall(data)
    return sock
slow = [proxy(b"GET http://api.test/ HTTP/1.1\\r\\nHost: api") for _ in range(20)]
large = b"GET http://api.test/zeros/9999999 HTTP/1.0\\r\\n\\r\\n"
for data in (b"", b"CONNECT api.test:80 HTTP/1.1\\r\\n\\r\\n", b"\\0" * 3000, large):
    for _ in range(10):
        with proxy(data) as broken:
            reset = struct.pack("ii", 1, 0)
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
tunnels = [proxy(b"CONNECT api.test:80 HTTP/1.1\\r\\n\\r\\n") for _ in range(200)]
print(sum(tunnel.recv(100).startswith(b"HTTP/1.1 200") for tunnel in tunnels), "tunnels")
for tunnel in tunnels:
    tunnel.sendall(b"GET / HTTP/1.1\\r\\nHost: api.test\\r\\n\\r\\n")
def answer(sock):
    data = b""
    while more := sock.recv(4096):
        data += more
    return data.startswith(b"HTTP/1.1 200") and data.endswith(b'"api.test"]')
print(sum(map(answer, tunnels)), "answers")
for sock in slow:
    sock.sendall(b".test\\r\\n\\r\\n")
print(sum(map(answer, slow)), "slow")
"""


# --- What is not ---


@pytest.mark.parametrize("user", ["root", "somebody"])
def test_there_is_no_way_around(guarded: Guarded, neighbour: Path, user: str) -> None:
    engine = guarded.engine
    own = host_addresses() | set(inspected(engine, guarded.proxy, ADDRESSES).split())
    given = json.dumps({"api": PUBLIC, "own": sorted(own)})
    uid = {"root": "0:0", "somebody": "4321:4321"}[user]
    answer = engine.run("exec", "-i", "--user", uid, guarded.name, "python3", "-", given,
                        input=PROBE)
    assert answer.returncode == 0, answer.stderr
    tried = json.loads(answer.stdout)
    assert len(tried) > 100 and [row for row in tried if row[1] not in row[2].split("|")] == []
    seen = json.loads(guarded.run("wget -q -O - http://api.test/seen").stdout)
    assert {tuple(row) for row in seen} == {(PUBLIC, 80, "api.test"), (PUBLIC, 443, "api.test")}
    assert neighbour.read_text() == "listening\n"


@pytest.fixture(scope="module")
def neighbour(engine: Engine) -> Iterator[Path]:
    """What another session notes, which listens to all that comes."""
    with Guarded(engine, "api.test", outside=False) as session, engine.popen(
        *session.python_argv(LISTEN), **session.where
    ) as listener:
        engine.started.remove(listener)  # it outlives the test that asks first
        notes = session.project / "notes"
        wait_for(lambda: notes.exists() and notes.read_text())
        yield notes


LISTEN = """
import socket
listeners = [socket.create_server(("", port)) for port in (8080, 9999)]
listeners.append(socket.socket(socket.AF_UNIX))
listeners[-1].bind("\\0neighbour")
listeners[-1].listen()
import select
with open("notes", "w", buffering=1) as notes:
    print("listening", file=notes)
    while ready := select.select(listeners, [], [])[0]:
        print(ready[0].accept(), file=notes)
"""


ADDRESSES = ("{{range .NetworkSettings.Networks}}{{.IPAddress}} {{.Gateway}} {{end}}"
             "{{.NetworkSettings.IPAddress}}")


def host_addresses() -> set[str]:
    """Addresses of this machine, without its loopback's."""
    rows = json.loads(subprocess.run(["ip", "-j", "-4", "address"], capture_output=True,
                                     check=True).stdout)
    return {info["local"] for row in rows for info in row["addr_info"] if row["ifname"] != "lo"}


@on_docker
def test_a_refusal_names_the_host_and_the_remedy(guarded: Guarded) -> None:
    script = "printf 'GET http://%s/ HTTP/1.0\\r\\n\\r\\n' | nc 127.0.0.1 3128"
    for host, named in (("other.test:8443", "other.test:8443"), ("private.test", "127.0.0.3")):
        answer = guarded.run(script % host).stdout
        assert answer.startswith("HTTP/1.1 403 Forbidden")
        assert f"{host.partition(':')[0]} port" in answer
        assert answer.endswith(f"To allow it: sandbox net allow {guarded.name} {named}\n")
        said = guarded.run(script % host).stderr.splitlines()
        assert len(said) == 1 and said[0].endswith(
            f"; to allow it: sandbox net allow {guarded.name} {named}")


# --- Rules ---

OPEN = """
import sys
from websockets.exceptions import InvalidProxyStatus
from websockets.sync.client import connect
with connect("ws://api.test:8081/") as socket:
    print("open", flush=True)
    for line in sys.stdin:
        socket.send(line.strip())
        try:
            connect("ws://api.test:8081/").close()
            print(socket.recv(), "another", flush=True)
        except InvalidProxyStatus as error:
            print(socket.recv(), error.response.status_code, flush=True)
"""


def test_changed_rules_hold_for_the_next_connection(guarded: Guarded) -> None:
    before = guarded.rules()
    with guarded.engine.popen(*guarded.python_argv(OPEN), **guarded.where) as run:
        assert run.stdin and run.stdout and run.stdout.readline() == "open\n"

        def say(word: str) -> str:
            assert run.stdin and run.stdout
            run.stdin.write(f"{word}\n")
            run.stdin.flush()
            return run.stdout.readline().strip()

        assert say("first") == "first another"
        assert guarded.net("deny", "api.test:8081").returncode == 0
        assert guarded.rules() == {"allow": ["api.test", "private.test"], "deny": ["api.test:8081"]}
        assert say("second") == "second 403"
        assert guarded.net("allow", "api.test:8081").returncode == 0
        assert say("third") == "third another"
    assert sorted(guarded.rules()["allow"]) == sorted(before["allow"])


def test_check_and_log_are_lines_of_json(guarded: Guarded) -> None:
    for hosts, status in ((["api.test"], 0), (["api.test", "other.test"], 1), (["api.test:81"], 1)):
        answer = guarded.net("check", *hosts)
        rows = [json.loads(line) for line in answer.stdout.splitlines()]
        assert answer.returncode == status
        assert [row["host"] for row in rows] == [h.split(":")[0] for h in hosts]
        expected = ["deny" if "other" in h or ":" in h else "allow" for h in hosts]
        assert [row["verdict"] for row in rows] == expected
        assert all(row["check"] for row in rows)  # so that nobody takes it for traffic
    with guarded.engine.popen("net", "log", guarded.name, "-f", **guarded.where) as log:
        assert log.stdout
        guarded.answers("api.test", "followed.test:99")
        for line in log.stdout:
            if "followed.test" in line:
                break
    row = json.loads(line)
    assert row.pop("time").endswith("Z")
    assert row == {"session": guarded.name, "host": "followed.test", "port": 99,
                   "verdict": "deny", "rule": "", "reason": "no rule allows it",
                   "kind": "unlisted"}  # fmt: skip
    answer = guarded.net("log")
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    assert {"host": "api.test", "port": 80, "verdict": "allow",
            "rule": "api.test"}.items() <= rows[-2].items()
    assert answer.stderr == "" and not any("check" in row for row in rows)
    before = len(rows)
    assert guarded.net("check", "checked.test").returncode == 1
    rows = [json.loads(line) for line in guarded.net("log").stdout.splitlines()]
    assert len(rows) == before and "checked.test" not in {row["host"] for row in rows}


NOISE = """
import socket, threading
def ask():
    for _ in range(1500):
        with socket.create_connection(("127.0.0.1", 3128)) as sock:
            sock.sendall(b"CONNECT " + b'"' * 253 + b":443 HTTP/1.1\\r\\n\\r\\n")
            while sock.recv(4096):
                pass
threads = [threading.Thread(target=ask) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def hosts_of(text: str) -> list[str]:
    return [json.loads(line)["host"] for line in text.splitlines()]


@on_docker
def test_noise_does_not_hide_what_was_asked_for_before(engine: Engine) -> None:
    with Guarded(engine, LOCAL, outside=False) as session:
        assert session.answers(LOCAL, "secret.test", "secret.test") == ["502", "403", "403"]
        before = session.net("log").stdout
        assert hosts_of(before) == ["127.0.0.1", "secret.test", "secret.test"]
        assert session.python(NOISE).returncode == 0
        assert "secret.test" not in engine.run("logs", session.proxy).stdout
        lines = session.net("log").stdout.splitlines()
        kept = json.loads(lines[1])
        assert [json.loads(line)["host"] for line in lines[:2]] == ["127.0.0.1", "secret.test"]
        assert (kept["count"], kept["verdict"], kept["reason"]) == (2, "deny", "no rule allows it")
        times = [json.loads(line)["time"] for line in before.splitlines()]
        assert [kept["first"], kept["time"]] == times[1:]
        with engine.popen("net", "log", session.name, "-f", **session.where) as log:
            assert log.stdout and hosts_of(log.stdout.readline()) == ["127.0.0.1"]
            session.answers("followed.test")
            assert any("followed.test" in line for line in log.stdout)


def test_what_is_kept_outlives_the_log_and_is_out_of_reach(engine: Engine) -> None:
    with Guarded(engine, LOCAL, outside=False) as session:
        session.answers(LOCAL, "secret.test")
        look = ["exec", "--user", "0", session.name, "ls", "/var/lib/sandbox-net"]
        assert "No such file" in engine.run(*look).stderr
        volumes = engine.run("volume", "ls", "-q").stdout.split()
        engine.run("stop", "-t", "0", session.name, session.proxy)
        path = inspected(engine, session.proxy, LOG_PATH[engine.runtime])
        os.truncate(path, 0)  # as it is when the engine begins it anew
        assert hosts_of(session.net("log").stdout) == ["127.0.0.1", "secret.test"]
        assert session.answers("secret.test", "new.test") == ["403", "403"]
        wait_for(lambda: "new.test" in engine.run("logs", session.proxy).stdout)
        log = session.net("log").stdout.splitlines()
        assert hosts_of("\n".join(log)) == ["127.0.0.1", "secret.test", "secret.test", "new.test"]
        assert json.loads(log[1])["count"] == 2
        mine = inspected(engine, session.proxy, '{{range .Mounts}}{{.Name}} {{end}}').split()
        assert len(mine) == 2 and set(mine) <= set(volumes)
    assert not set(mine) & set(engine.run("volume", "ls", "-q").stdout.split())


def test_the_log_of_a_proxy_that_keeps_nothing_is_shown(engine: Engine) -> None:
    """Of a session that an older version has made."""
    with Guarded(engine, LOCAL, outside=False) as session:
        session.answers(LOCAL)
        line = session.net("log").stdout
        engine.run("rm", "-f", "-v", session.proxy)
        engine.run("run", "-d", "--name", session.proxy, "--entrypoint", "echo", IMAGE, "-n", line)
        wait_for(lambda: engine.run("logs", session.proxy).stdout == line)
        answer = session.net("log")
        assert (answer.returncode, answer.stdout, answer.stderr) == (0, line, "")


LOG_PATH = {"docker": "{{.LogPath}}", "podman": "{{.HostConfig.LogConfig.Path}}"}


def test_rules_of_every_source_are_in_force_at_the_next_run(engine: Engine) -> None:
    with Guarded(engine, "127.0.0.2", outside=False, network={"allow": ["127.0.0.1"]}) as session:
        places = [f"127.0.0.{number}" for number in (1, 2, 3, 4)]
        assert session.rules() == {"allow": places[:2]}
        # nobody listens, but it was tried
        assert session.answers(*places) == ["502", "502", "403", "403"]
        assert session.run("true", "--allow", "127.0.0.3").returncode == 0
        assert session.answers(*places) == ["502", "502", "502", "403"]
        write_config(session.home, network={"allow": ["127.0.0.4"], "deny": ["127.0.0.2"]})
        assert session.net("deny", "127.0.0.1").returncode == 0
        engine.run("stop", "-t", "0", session.name, session.proxy)
        assert session.answers(*places) == ["403", "502", "502", "403"]
        assert session.rules() == {"allow": ["127.0.0.2", "127.0.0.3"], "deny": ["127.0.0.1"]}
        rows = json.loads(engine.sandbox("ps", "--json").stdout)
        assert [row["network"] for row in rows if row["name"] == session.name] == ["allow"]


@on_docker
@pytest.mark.parametrize(
    "flags, status, message",
    [
        (["--allow", "http://api.test"], 2, "is not <host>[:<port>]"),
        (["--allow", "api.test/path"], 2, "is not <host>[:<port>]"),
        (["--allow", "api.test:0"], 2, "is not <host>[:<port>]"),
        (["--allow", "api.test:65536"], 2, "is not <host>[:<port>]"),
        (["--allow", "*"], 2, "is not <host>[:<port>]"),
        (["--allow", "127.1"], 2, "is not <host>[:<port>]"),
        (["--allow", "10.0.0.0/8"], 2, "is not <host>[:<port>]"),
        (["--allow", "api.test", "--net", "none"], 2,
         "--allow does not go together with --net none"),
        (["--net", "closed"], 2, "is not open, none, host"),
        (["--allow", "api.test", "-p", "18080:80"], 125,
         "ports cannot be published with an allowlist"),
    ],
)
def test_what_cannot_be_is_refused(
    engine: Engine, project: Path, name: str, flags: list[str], status: int, message: str
) -> None:
    answer = engine.sandbox("run", "-n", name, *flags, "-x", "echo ran")
    assert (answer.returncode, answer.stdout) == (status, "") and message in answer.stderr
    assert name not in engine.names()


@on_docker
def test_net_says_what_it_cannot_do(engine: Engine, guarded: Guarded, project: Path,
                                    name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    table: list[tuple[list[str], int, str]] = [
        (["show", name], 1, "has no allowlist: its network is open"),
        (["show", f"{name}-not"], 1, "there is no container"),
        (["show", guarded.proxy], 1, f"is the proxy of the session {guarded.name}"),
        (["allow", guarded.name], 2, "net allow takes hosts"),
        (["show", guarded.name, "api.test"], 2, "net show takes no hosts"),
        (["allow", guarded.name, "api.test", "http://x"], 2,
         "allow: 'http://x' is not <host>[:<port>]"),
        (["deny", guarded.name, "*.127.0.0.1"], 2, "deny: '*.127.0.0.1' is not <host>[:<port>]"),
        (["check", guarded.name, "api.test:x"], 2, "check: 'api.test:x' is not <host>[:<port>]"),
    ]
    before = guarded.rules()
    for args, status, message in table:
        answer = engine.sandbox("net", *args, **guarded.where)
        assert (answer.returncode, answer.stdout) == (status, ""), (args, answer)
        assert message in answer.stderr, (args, answer)
    assert guarded.rules() == before
    for command in (["rm", guarded.proxy], ["run", "-n", guarded.proxy, "-x", "true"]):
        answer = engine.sandbox(*command)
        assert answer.returncode in (1, 125) and "is the proxy of the session" in answer.stderr
    assert guarded.proxy not in engine.sandbox("ps").stdout


def test_the_proxy_has_a_limit_on_its_memory(engine: Engine, guarded: Guarded) -> None:
    limit = inspected(engine, guarded.proxy, "{{.HostConfig.Memory}}")
    kept = engine.id != "rootless" or Path("/sys/fs/cgroup/cgroup.controllers").exists()
    assert limit == (str(512 * 1024 * 1024) if kept else "0")  # only version 2 is for all users


# --- A proxy that dies ---


def test_the_network_is_cut_while_the_proxy_is_down(engine: Engine) -> None:
    with Guarded(engine, LOCAL, outside=False) as session:
        assert session.net("allow", "127.0.0.5:90").returncode == 0
        places, expected = [LOCAL, "127.0.0.5:90", "127.0.0.6"], ["502", "502", "403"]
        inside = ["exec", session.name, "nc", "-w", "1", "127.0.0.1", "3128"]

        pid = int(inspected(engine, session.proxy, "{{.State.Pid}}"))
        os.kill(pid, signal.SIGKILL)
        # by itself
        wait_for(lambda: inspected(engine, session.proxy, "{{.State.Pid}}") not in (str(pid), "0"))
        wait_for(lambda: session.answers(*places) == expected)

        engine.run("kill", session.proxy)
        wait_for(lambda: shown_network(engine, session.name) == "cut")
        assert engine.run(*inside).returncode != 0
        assert session.answers(*places) == expected  # which comes from the run
        assert shown_network(engine, session.name) == "allow"

        engine.run("rm", "-f", session.proxy)
        assert shown_network(engine, session.name) == "cut" and engine.run(*inside).returncode != 0
        assert session.answers(*places) == expected

        # as when the engine starts again
        engine.run("stop", "-t", "0", session.name, session.proxy)
        assert session.answers(*places) == expected


# --- Failing closed ---

NO_PROGRAM, BROKEN = f"localhost/{TOKEN}-without", f"localhost/{TOKEN}-broken"
PROGRAM = "/usr/local/lib/sandbox/proxy.py"


@pytest.fixture(scope="module")
def variants(engine: Engine) -> Iterator[None]:
    """Images without the proxy's program, and with one that cannot serve."""
    program = "import sys\nif sys.argv[1] == 'serve': sys.exit('this proxy is broken')\n"
    program += (ROOT / "static/image/proxy.py").read_text().replace("RETRY_SECONDS = 10,",
                                                                    "RETRY_SECONDS = 1,")
    commands = {NO_PROGRAM: f"rm {PROGRAM}", BROKEN: f"cat >{PROGRAM}"}
    for image, command in commands.items():
        name = unique_name()
        made = engine.run("run", "-i", "--name", name, IMAGE, "sh", "-c", command, input=program)
        assert made.returncode == 0, made.stderr
        assert engine.run("commit", name, f"{image}:{IMAGE_VERSION}").returncode == 0
        engine.run("rm", name)
    yield
    engine.run("rmi", *(f"{image}:{IMAGE_VERSION}" for image in commands))


@pytest.mark.parametrize(
    "image, message",
    [(NO_PROGRAM, f"this image has no {PROGRAM}: build it again"),
     (BROKEN, "network proxy does not take port 3128")],
    ids=["none", "broken"],
)
def test_without_a_proxy_no_session(
    engine: Engine, project: Path, home: Path, variants: None, name: str, image: str, message: str
) -> None:
    write_config(home, imageName=image)
    answer = engine.sandbox("run", "-n", name, "--allow", "api.test", "-x", "echo ran",
                            env={"SANDBOX_TRACE": "1"})
    assert (answer.returncode, answer.stdout) == (125, ""), answer.stderr
    assert message in answer.stderr, answer.stderr
    engine.sandbox("rm", name)  # a container that was started is kept
    assert leftovers(engine, answer.stderr) == []


# --- Nothing stays ---


SESSION_ID = re.compile(r"sandbox\.session=([0-9a-f]{10})")


def leftovers(engine: Engine, trace: str) -> list[str]:
    """What is there of the one session that a command has tried to make, from its SANDBOX_TRACE."""
    (id,) = set(SESSION_ID.findall(trace))
    return left_of(engine, id)


def test_nothing_stays_of_a_session(engine: Engine, project: Path, home: Path, name: str) -> None:
    trace = {"SANDBOX_TRACE": "1"}
    for flags, message in ((["-v", "/nonexistent-dir:/x"], "/nonexistent-dir"),
                           (["--iv", "9.9-common"], "no image")):
        failed = engine.sandbox("run", "-n", name, "--allow", "api.test", *flags, "-x", "echo ran",
                                env=trace)
        assert (failed.returncode, failed.stdout) == (125, "") and message in failed.stderr
        assert leftovers(engine, failed.stderr) == []
    once = engine.sandbox("run", "-n", name, "--allow", "api.test", "--rm-on-exit", "-x", "exit 3",
                          env=trace)
    assert once.returncode == 3 and leftovers(engine, once.stderr) == []
    made = engine.sandbox("run", "-n", name, "--allow", "api.test", "-x", "true", env=trace)
    assert len(leftovers(engine, made.stderr)) == 3
    assert engine.sandbox("rm", name).returncode == 0
    assert leftovers(engine, made.stderr) == []


def test_runs_racing_for_one_name_share_one_proxy(engine: Engine, project: Path, home: Path,
                                                  name: str) -> None:
    flags = ("-n", name, "--allow", "127.0.0.1", "-x", "hostname")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(engine.sandbox, "run", *flags, env={"SANDBOX_TRACE": "1"})
                for _ in range(3)]
        results = [run.result() for run in runs]
    assert [r.returncode for r in results] == [0] * 3 and len({r.stdout for r in results}) == 1
    left = [left_of(engine, id) for r in results for id in set(SESSION_ID.findall(r.stderr))]
    assert sorted(map(len, left))[-1] == 3 and sum(map(len, left)) == 3


def test_prune_removes_what_a_crash_has_left(engine: Engine, project: Path, home: Path,
                                             name: str) -> None:
    kept = engine.sandbox("run", "-n", f"{name}-kept", "--allow", "api.test", "-x", "true",
                          env={"SANDBOX_TRACE": "1"})
    traces = [kill_while_it_creates(engine, f"{name}-{number}") for number in range(2)]
    for row in json.loads(engine.sandbox("ps", "--json").stdout):
        if row["name"].startswith(f"{name}-") and row["name"] != f"{name}-kept":
            # a session whose container went by other hands leaves most
            engine.run("rm", "-f", row["name"])
    left = [item for trace in traces for item in leftovers(engine, trace)]
    assert left
    mounts = [mount for item in left if item.startswith("sandbox-proxy-")
              for mount in inspected(engine, item, "{{range .Mounts}}{{.Name}} {{end}}").split()]
    foreign = f"{name}-sandbox-net-0123456789"
    engine.run("volume", "create", foreign)
    shown = engine.sandbox("prune", "--dry-run").stdout.split()
    assert set(left) <= set(shown) and len(leftovers(engine, kept.stderr)) == 3
    assert not set(leftovers(engine, kept.stderr)) & set(shown)
    assert set(left) <= set(engine.sandbox("prune").stdout.split())
    assert [item for trace in traces for item in leftovers(engine, trace)] == []
    assert not set(mounts) & set(engine.run("volume", "ls", "-q").stdout.split())
    assert len(leftovers(engine, kept.stderr)) == 3
    assert engine.run("volume", "rm", foreign).returncode == 0


def kill_while_it_creates(engine: Engine, name: str) -> str:
    """Kill a run when its two containers are there, and it does not know; what it has said of them.
    """
    held = Held(engine, "*' run -d '*")
    with engine.popen("run", "-n", name, "--allow", "api.test", "-x", "true",
                      env={"SANDBOX_TRACE": "1", **held.env}) as run:
        assert run.stderr
        label = next(line for line in run.stderr if "--label sandbox.proxy" in line)
        wait_for(lambda: held.made() == 2)
    held.go()
    return label


# --- Commands for a shell, and the web service ---


def test_the_printed_commands_make_a_working_session(engine: Engine, project: Path, home: Path,
                                                     name: str) -> None:
    ask = "printf 'GET http://127.0.0.7/ HTTP/1.0\\r\\n\\r\\n' | nc 127.0.0.1 3128 | head -n 1"
    flags = ("-n", name, "--allow", "127.0.0.7", "-x", ask)
    for _ in range(2):  # of a new session, and of one that is there
        lines = engine.sandbox("config", "command", *flags).stdout
        script = subprocess.run(
            ["sh", "-ec", lines], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60, **engine.where()
        )
        assert script.stdout == "HTTP/1.1 502 Bad Gateway\n", lines + script.stderr
        assert shown_network(engine, name) == "allow"
    assert engine.sandbox("run", *flags).stdout == script.stdout


@on_docker
def test_the_web_service_shows_and_changes_rules(service: Service, name: str) -> None:
    service.create(name, network={"allow": ["127.0.0.1"]})
    service.create(f"{name}-open")
    path = f"/api/sessions/{name}"
    assert service.get(f"{path}/network").json == {"allow": ["127.0.0.1"]}
    events = decisions(service, name)
    assert asked(service, name) == ["502", "403", "403"]
    assert [(row["host"], row["verdict"]) for row in itertools.islice(events, 3)] == [
        ("127.0.0.1", "allow"), ("127.0.0.2", "deny"), ("127.0.0.3", "deny")]  # fmt: skip

    rules = service.post(f"{path}/network", {"allow": "127.0.0.2"})
    assert (rules.status, rules.json) == (200, {"allow": ["127.0.0.1", "127.0.0.2"]})
    assert asked(service, name) == ["502", "502", "403"]
    assert service.post(f"{path}/network", {"deny": "127.0.0.1"}).json == {
        "allow": ["127.0.0.2"], "deny": ["127.0.0.1"]}  # fmt: skip
    assert asked(service, name) == ["403", "502", "403"]
    put = service.post(f"{path}/settings", {"network": {"allow": ["127.0.0.3:80"]}}, method="PUT")
    assert put.status == 200 and put.json["effective"]["network"] == {"allow": ["127.0.0.3:80"]}
    assert asked(service, name) == ["403", "403", "502"]
    assert next(row for row in events if row["rule"] == "127.0.0.3:80")["verdict"] == "allow"

    assert [row_of(service, n)["network"] for n in (name, f"{name}-open")] == ["allow", "open"]
    engine = service.engine
    engine.run("kill", proxy_of(engine, name))
    wait_for(lambda: row_of(service, name)["network"] == "cut")
    assert asked(service, name) == ["", "", ""]

    for action in ("start", "stop", "start"):  # which brings both back
        assert service.post(f"{path}/{action}").status == 200
    assert asked(service, name) == ["403", "403", "502"]

    for body in ({}, {"allow": "http://x"}, {"allow": 5}, {"allow": "x", "more": 1}):
        assert service.post(f"{path}/network", body).status == 400
    assert service.post(f"{path}-open/network", {"allow": "x"}).status == 409
    assert service.get(f"{path}-open/network").status == 409
    put = service.post(f"{path}-open/settings", {"network": {"allow": ["127.0.0.2"]}}, method="PUT")
    assert put.json["recreate"] == ["network: it has open, asked for is an allowlist"]
    assert service.post(f"{path}-open/recreate").json["network"] == {"allow": ["127.0.0.2"]}
    assert asked(service, f"{name}-open") == ["403", "502", "403"]
    proxy = proxy_of(engine, f"{name}-open")
    service.post(f"{path}-open/settings", {"network": "none"}, method="PUT")
    assert service.post(f"{path}-open/recreate").json["network"] == "none"
    assert left_of(engine, proxy.removeprefix("sandbox-proxy-")) == []
    trouble = service.post("/api/sessions", {"name": f"{name}-2", "directory": "/tmp",
                                             "network": {"allow": ["a b"]}})
    assert trouble.status == 400 and b"a b" in trouble.body


def row_of(service: Service, name: str) -> Any:
    return next(row for row in service.get("/api/sessions").json if row["name"] == name)


def asked(service: Service, name: str) -> list[str]:
    """The statuses that the proxy gives inside for three addresses."""
    ask = ("printf 'GET http://127.0.0.%s/ HTTP/1.0\\r\\n\\r\\n' $n | nc 127.0.0.1 3128 "
           "| head -n 1; echo")
    job = service.job(name, f"for n in 1 2 3; do {ask}; done")
    text = "".join(data for kind, data, _ in service.events(job) if kind == "stdout")
    return [line.strip().split(" ")[1] if line.strip() else ""
            for line in text.replace("\r\n\n", "\n").splitlines()]


def decisions(service: Service, name: str) -> Iterator[Any]:
    """What the page would show, as it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request("GET", f"/api/sessions/{name}/network/events",
                       headers={"Cookie": service.cookie})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.readline() == b": the log\n"
    return (json.loads(line.removeprefix(b"data: ")) for line in answer
            if line.startswith(b"data: "))


# --- Attacks ---

# Root inside gives the proxy listeners and takes the connections that it has seen coming: its
# accept() blocks, for good, where the flag that forbids that was cleared meanwhile. Ends when the
# proxy takes no more.
FILL_GATES = """
import contextlib, fcntl, os, signal, socket, threading, time
for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError):
        if b"gate" in open(f"/proc/{pid}/cmdline", "rb").read().split(bytes(1)):
            os.kill(int(pid), signal.SIGKILL)
def steal(listener):
    with contextlib.suppress(OSError):
        listener.accept()
end = time.monotonic() + 60
while time.monotonic() < end:
    with socket.socket(socket.AF_UNIX) as link, socket.create_server(("127.0.0.1", 0)) as listener:
        link.connect("/run/sandbox-net/proxy.sock")
        try:
            socket.send_fds(link, [b"L"], [listener.fileno()])
            taken = link.recv(1)
        except OSError:
            taken = b""
        if not taken:
            print("full", flush=True)
            break
        for _ in range(100):
            with socket.create_connection(listener.getsockname()):
                flags = fcntl.fcntl(listener, fcntl.F_GETFL)
                fcntl.fcntl(listener, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
                threading.Thread(target=steal, args=(listener,), daemon=True).start()
    time.sleep(0.2)
os._exit(0)
"""


@on_docker
def test_a_session_comes_back_after_its_gates_were_taken(engine: Engine) -> None:
    with Guarded(engine, LOCAL, outside=False) as session:
        inside = ["exec", "-i", "--user", "0", session.name, "python3", "-"]
        assert engine.run(*inside, input=FILL_GATES).stdout == "full\n"
        engine.run("stop", "-t", "0", session.name)  # and not its proxy
        assert session.answers(LOCAL) == ["502"]


@on_docker
def test_what_was_denied_while_it_was_stopped_is_denied(service: Service, name: str) -> None:
    service.create(name, network={"allow": ["127.0.0.1", "127.0.0.2", "127.0.0.3"]})
    service.post(f"/api/sessions/{name}/stop")
    assert service.post(f"/api/sessions/{name}/network", {"deny": "127.0.0.2"}).status == 200
    assert service.post(f"/api/sessions/{name}/start").status == 200
    assert asked(service, name) == ["502", "403", "502"]


@on_docker
def test_no_command_runs_in_a_more_open_network_than_is_asked_for(engine: Engine, project: Path,
                                                                  name: str) -> None:
    run = ["run", "-n", name, "-x", "echo ran"]
    assert engine.sandbox(*run).stdout == "ran\n"
    for flags in (["--allow", "api.test"], ["--net", "none"]):
        answer = engine.sandbox(*run, *flags)
        assert (answer.returncode, answer.stdout) == (125, "")
        assert f"the network of {name} is open" in answer.stderr
    assert engine.sandbox(*run, "--net", "open").stdout == "ran\n"


@on_docker
def test_a_session_that_others_removed_does_not_come_back_open(engine: Engine, project: Path,
                                                               name: str) -> None:
    run = ["run", "-n", name, "-x", "echo ran"]
    assert engine.sandbox(*run, "--net", "none").stdout == "ran\n"
    engine.remove({name})
    answer = engine.sandbox(*run)
    assert (answer.returncode, answer.stdout) == (125, "")
    assert "is gone, and its network was none" in answer.stderr
    assert engine.sandbox(*run, "--net", "open").stdout == "ran\n"
    assert engine.sandbox(*run).stdout == "ran\n"


@on_docker
def test_none_takes_every_rule_away(engine: Engine) -> None:
    """For good, as rules are changed; what a session cannot have, as --net open, changes none."""
    with Guarded(engine, LOCAL, outside=False) as session:
        assert session.answers(LOCAL) == ["502"]
        ran = session.run("true", "--net", "none")
        assert ran.returncode == 0 and f"they were: {LOCAL}\n" in ran.stderr
        assert session.run("true", "--net", "none").stderr == ""
        assert session.answers(LOCAL) == ["403"] and session.rules() == {"allow": []}
        engine.run("stop", "-t", "0", session.name, session.proxy)
        assert session.answers(LOCAL) == ["403"]
        assert session.run("true", "--net", "open").returncode == 0
        assert session.rules() == {"allow": []} and session.answers(LOCAL) == ["403"]
        assert session.net("allow", LOCAL).returncode == 0
        assert session.answers(LOCAL) == ["502"]


@on_docker
def test_no_rule_is_lost_when_many_are_changed_at_once(engine: Engine) -> None:
    with Guarded(engine, outside=False, network={"allow": []}) as session:
        hosts = [f"127.0.0.{number}" for number in range(1, 7)]
        runs = [engine.popen("run", "-n", session.name, "--allow", host, "-x", "true",
                             **session.where)
                for host in hosts]  # fmt: skip
        assert session.net("deny", "127.0.0.9").returncode == 0
        assert [run.wait() for run in runs] == [0] * len(hosts)
        rules = session.rules()
        assert (sorted(rules["allow"]), rules["deny"]) == (hosts, ["127.0.0.9"])
