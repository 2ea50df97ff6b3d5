"""Sessions on other machines: a docker and a rootless podman behind a sshd, see elsewhere.py."""

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import CONTAINERS_CONF, Engine, Process, Result, unique_name, write_config
from elsewhere import HOSTS, Elsewhere, configure, elsewhere
from service import Service, free_port, wait_for

pytestmark = pytest.mark.parametrize("engine", ["docker"], indirect=True, scope="session")

# The directory is one of the host.
THERE = {"workspace": "mount", "hostPath": "/srv/project"}
RUNS = {"big": {"host": "big", **THERE}, "lab": {"host": "lab", **THERE}}


@pytest.fixture(scope="module")
def machine(engine: Engine) -> Iterator[Elsewhere]:
    with elsewhere(engine) as there:
        there.start_podman()
        there.machine.must("install", "-d", "-m777", "-o1234", "-g1234", "/srv/project")
        yield there


@pytest.fixture
def there(machine: Elsewhere, home: Path, project: Path) -> Iterator[Elsewhere]:
    configure(home, runs=RUNS)
    yield machine
    configure(home)
    names = [name for name in machine.sandbox("ps", "-q").stdout.split() if "@" in name]
    assert not names or machine.sandbox("rm", "-f", *names).returncode == 0


def kept(home: Path, name: str) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob(f"*{name}*"))


@pytest.mark.parametrize("host", HOSTS)
def test_a_session_on_a_host(there: Elsewhere, home: Path, name: str, host: str) -> None:
    """Everything that is done with a session, by its name and host."""
    full = f"{name}@{host}"
    made = there.sandbox("run", "-r", host, "-n", name, "-x", f"id -u; echo made >{host}")
    assert (made.returncode, made.stdout) == (0, "1234\n" if host == "big" else "0\n"), made.stderr
    assert there.machine.must("cat", f"/srv/project/{host}") == "made\n"
    for options in (["-n", full], ["--on", host, "-n", name]):
        again = there.sandbox("run", *options, "-x", f"cat {host}; exit 7")
        assert (again.returncode, again.stdout) == (7, "made\n"), again.stderr
    (row,) = json.loads(there.sandbox("ps", "--json", "--on", host).stdout)
    assert (row["name"], row["host"], row["state"]) == (full, host, "running")
    assert row in json.loads(there.sandbox("ps", "--json").stdout)
    assert there.sandbox("ps", "-q", "--on", "").stdout.find(name) == -1
    copied = there.sandbox("cp", f"{full}:{host}", str(home / "copied"))
    assert (home / "copied").read_text() == "made\n", copied.stderr
    for words in (["stop", full], ["start", full], ["recreate", full, "--memory", "200m"],
                  ["rename", full, f"{name}-2"], ["stop", "--on", host, f"{name}-2"]):
        done = there.sandbox(*words)
        assert done.returncode == 0, done.stderr
    assert not [path for path in kept(home, name) if not path.startswith(f"@{host}/")]
    removed = there.sandbox("rm", f"{name}-2@{host}")
    assert (removed.returncode, removed.stdout) == (0, f"{name}-2@{host}\n"), removed.stderr
    assert kept(home, name) == []


def test_what_is_kept_of_a_session_is_its_hosts(there: Elsewhere, home: Path, name: str,
                                                engine: Engine, project: Path) -> None:
    """The session here, and those of the same name elsewhere, know nothing of each other."""
    assert there.sandbox("run", "-n", name, "-x", "true", "--rt", "docker").returncode == 0
    job = home / "jobs" / name / "job"
    job.mkdir(parents=True)
    (home / "sessions").mkdir(exist_ok=True)
    (home / "sessions" / f"{name}.json").write_text('{"env": {"KEPT": "1"}}')
    before = kept(home, name)
    # As a host of the key, and as one that the environment means.
    ways: list[tuple[list[str], dict[str, str]]] = [
        (["-r", "big"], {}), (["--hp", "/srv/project"], {"DOCKER_HOST": "ssh://root@big"}),
        (["--hp", "/srv/project"], {"DOCKER_CONTEXT": "big"})]
    for options, env in ways:
        if env:
            configure(home, workspace="mount")
        made = there.sandbox("run", "-n", name, *options, "-x", "echo $KEPT", env=env)
        assert (made.returncode, made.stdout) == (0, "\n"), made.stderr
        where = f"{name}@big" if not env else name
        again = there.sandbox("run", "-n", where, *options, "-x", "echo again", env=env)
        assert (again.stdout, again.stderr) == ("again\n", "")
        removed = there.sandbox("rm", where, env=env)
        assert removed.returncode == 0, removed.stderr
        assert kept(home, name) == before
    # An earlier version has kept by its name what is of the session elsewhere.
    there.sandbox("run", "-n", name, *options, "-x", "true", env=env)
    for folder, file in (("known", f"docker-{name}.json"), ("sessions", f"{name}.json")):
        (home / folder / file).rename(home / f"here-{folder}")
    (home / "@big" / "known" / f"docker-{name}.json").rename(home / "known" / f"docker-{name}.json")
    (home / "sessions" / f"{name}.json").write_text('{"env": {"KEPT": "there"}}')
    moved = there.sandbox("run", "-n", name, *options, "-x", "echo $KEPT", env=env)
    assert (moved.stdout, kept(home / "known", name)) == ("there\n", []), moved.stderr
    for folder, file in (("known", f"docker-{name}.json"), ("sessions", f"{name}.json")):
        (home / f"here-{folder}").rename(home / folder / file)
    here = there.sandbox("run", "-n", name, "--rt", "docker", "-x", "echo $KEPT")
    assert (here.stdout, here.stderr) == ("1\n", "")


def test_two_engines_of_a_machine_share_no_name(engine: Engine, home: Path, project: Path,
                                                name: str) -> None:
    """What is kept of a session is kept by its name, so a second one would take it."""
    env = {"CONTAINERS_CONF": CONTAINERS_CONF}

    def run(runtime: str, **where: Any) -> Result:
        return engine.sandbox("run", "-n", name, "--rt", runtime, "-x", "true", env=env, **where)

    assert run("podman").returncode == 0
    try:
        second = run("docker")
        assert second.returncode == 125
        assert f"there is a session {name} of podman already" in second.stderr
        # An earlier version has made both.
        other = engine.directory()
        write_config(other)
        assert run("docker", home=other).returncode == 0
        note = f"known/docker-{name}.json"
        (home / note).write_bytes((other / note).read_bytes())
        (home / "jobs" / name / "job").mkdir(parents=True)
        assert engine.sandbox("rm", name, "--rt", "docker", env=env).returncode == 0
        assert kept(home, name) == [f"jobs/{name}", f"known/podman-{name}.json"]
    finally:
        removed = engine.sandbox("rm", name, "--rt", "podman", env=env)
    assert (removed.returncode, kept(home, name)) == (0, []), removed.stderr


def test_a_mount_of_files_of_this_machine_is_refused(there: Elsewhere, home: Path, name: str,
                                                     project: Path) -> None:
    """Also where the server has the path, and without `hosts`: it has other files there."""
    there.machine.must("mkdir", "-p", str(project))
    served = home / "containers.conf"
    text = Path(there.environ["CONTAINERS_CONF"]).read_text()
    active = "[engine]\nremote = true\nactive_service = \"lab\""
    served.write_text(text.replace("[engine]", active, 1))
    for options, env in ((["--on", "big"], {}), (["--on", "lab"], {}),
                         ([], {"DOCKER_HOST": "ssh://root@big", "SANDBOX_RUNTIME": "docker"}),
                         ([], {"DOCKER_CONTEXT": "big", "SANDBOX_RUNTIME": "docker"}),
                         ([], {"CONTAINER_CONNECTION": "lab", "SANDBOX_RUNTIME": "podman"}),
                         ([], {"CONTAINERS_CONF": str(served), "SANDBOX_RUNTIME": "podman"})):
        mount = f"{project}:/elsewhere"
        done = there.sandbox("run", *options, "-v", mount, "-n", name, "-x", "true", env=env)
        assert done.returncode == 125
        assert f"the directory {project} is on this machine" in done.stderr, done.stderr
        assert '"workspace": "mount"' in done.stderr and "--copy" in done.stderr
        assert there.sandbox("ps", "-q", "--on", "big").stdout == ""
    assert there.machine.must("ls", str(project)) == ""


MISTAKES = (
    (["run", "-r", "big", "--hp", "/nowhere", "-x", "true"], "make the directory on big"),
    (["ps", "--on", "bgi"], "there is no host 'bgi' (did you mean big?)"),
    (["rm", "some@nowhere"], "there is no host 'nowhere'"),
    (["stop", "--on", "big", "some@lab"], "--on big does not go together with some@lab"),
    (["ps", "--on", "lab", "--rt", "docker"], "leave --rt out"),
    (["ps", "--on", "lost"], "correct hosts.lost in "),
    (["ps", "--on", "gone"], "correct hosts.gone in "),
    (["ps", "--on", "typo"], "hosts.typo.contxt: unknown (did you mean context?)"),
    (["ps", "--on", "bare"], "give it context"),
    (["ps", "--on", "portless"], "ssh://USER@HOST:22"),
    (["run", "-r", "big", "--iv", "9.9-none", "-x", "true"], "sandbox build --on big"),
    (["run", "-r", "big", "-p", "80:80/udp", "-x", "true"], "ssh brings no UDP here"),
    (["build", "--on", "big", "--push"], "name one: --in REGISTRY/NAME"),
)


def test_a_mistake_is_said_with_its_remedy(there: Elsewhere, home: Path) -> None:
    more = {"lost": {"runtime": "docker", "context": "lost"},
            "gone": {"runtime": "podman", "connection": "gone"},
            "typo": {"runtime": "docker", "contxt": "big"}, "bare": {"runtime": "docker"},
            "portless": {"runtime": "podman", "connection": "portless"}}
    configure(home, hosts={**HOSTS, **more})
    for words, said in MISTAKES:
        options = ["-n", unique_name()] if words[0] == "run" else []
        done = there.sandbox(words[0], *options, *words[1:])
        assert done.returncode in (1, 2, 125) and said in done.stderr, (words, done.stderr)
        assert done.stderr.count("sandbox: ") == 1


def test_a_host_that_does_not_answer_is_one_line(there: Elsewhere, home: Path, name: str,
                                                 engine: Engine) -> None:
    """Its packets are lost: a client would wait for ever. The list of the others is whole."""
    there.sandbox("run", "-r", "lab", "-n", name, "-x", "true")
    configure(home, runs=RUNS, hosts={**HOSTS, "far": {"runtime": "docker", "context": "far"}})
    with there.silent("far"):
        listed = there.sandbox("ps")
        assert (listed.returncode, f"{name}@lab" in listed.stdout) == (1, True), listed.stderr
        (line,) = listed.stderr.splitlines()
        assert line.startswith("sandbox: far did not answer: ")
        service = Service(engine, env=there.environ)

        def rows() -> dict[str, Any]:
            return {row["name"]: row for row in service.get("/api/sessions").json}

        assert rows()["@far"]["state"] == "unreachable"
        wait_for(lambda: "far did not answer" in rows()["@far"]["why"])
        assert wait_for(lambda: rows().get(f"{name}@lab"))["host"] == "lab"
        assert service.get(f"/api/sessions/{name}%40lab").json["state"] == "running"
        job = service.job(f"{name}@lab", "echo there")
        assert service.ended(job)["exit"] == 0
        service.end()


def test_a_cut_connection_is_no_end(there: Elsewhere, name: str, engine: Engine) -> None:
    """Also with a plain DOCKER_HOST. What ran goes on."""
    for host in HOSTS:
        assert there.sandbox("run", "-r", host, "-n", name, "-x", "true").returncode == 0
    marks = "98701"
    ways: list[tuple[str, dict[str, str]]] = [
        (f"{name}@big", {}), (name, {"DOCKER_HOST": "ssh://root@big"}), (f"{name}@lab", {})]
    for full, env in ways:
        run = engine.popen("run", "-n", full, "-x", f"echo began; exec sleep {marks}",
                           env=there.environ | env)
        assert run.stdout and run.stdout.readline() == "began\n"
        there.cut()
        _, err = run.communicate(timeout=60)
        assert run.returncode == 125, err
        assert "was cut, and what ran in" in err and "sandbox run -n" in err
        shown = there.sandbox("run", "-n", full, "-x", "ps", env=env)
        assert f"sleep {marks}" in shown.stdout, shown.stderr
    failed = there.sandbox("run", "-n", f"{name}@big", "-x", "exit 1")
    assert (failed.returncode, failed.stderr) == (1, "")


# Its patience is short from the signal on: until then a host that is busy may take its time.
IMPATIENT = """
import signal, sys
sys.path.insert(0, sys.argv[1])
import sandbox, sandbox_hosts
def end_patience(*_):
    sandbox.CALL_SECONDS, sandbox_hosts.UNANSWERED_SECONDS = 2, 5
    sandbox.Output.__init__.__defaults__ = (2, *sandbox.Output.__init__.__defaults__[1:])
signal.signal(signal.SIGUSR1, end_patience)
sandbox_hosts.PROBE_SECONDS = 2
sandbox.leave(sandbox.main(sys.argv[2:]))
"""


def test_a_network_that_loses_everything_is_a_cut(there: Elsewhere, name: str, engine: Engine,
                                                  ) -> None:
    """No connection is closed, so nobody is told."""
    runs, hosts = [], [f"{name}@{host}" for host in HOSTS]
    with ExitStack() as stack:
        for host, full in zip(HOSTS, hosts, strict=True):
            assert there.sandbox("run", "-r", host, "-n", name, "-x", "true").returncode == 0
            argv = [sys.executable, "-I", "-c", IMPATIENT, str(engine.area / "app"), "run",
                    "-n", full, "-x", "echo began; exec sleep 98702"]
            run = stack.enter_context(Process(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, **engine.where(env=there.environ)))
            assert run.stdout and run.stdout.readline() == "began\n"
            runs.append(run)
        with there.lossy():
            for run in runs:
                run.send_signal(signal.SIGUSR1)
            for full, run in zip(hosts, runs, strict=True):
                _, err = run.communicate(timeout=60)
                assert run.returncode == 125, err
                assert f"what ran in {full} may go on" in err
                assert f"sandbox run -n {full}" in err
    for full in hosts:
        assert "sleep 98702" in there.sandbox("run", "-n", full, "-x", "ps").stdout


def test_two_clients_of_one_session(there: Elsewhere, name: str, engine: Engine) -> None:
    """What the one renames or removes while the other works in it is told that one."""
    full = f"{name}@big"
    other = engine.directory()
    write_config(other)
    configure(other, runs=RUNS)
    there.sandbox("run", "-r", "big", "-n", name, "-x", "true")
    seen = there.sandbox("run", "-n", full, "-x", "echo seen", home=other)
    assert seen.stdout == "seen\n", seen.stderr
    with engine.popen("run", "-n", full, "-x", "echo began; exec sleep 98703",
                      env=there.environ) as run:
        assert run.stdout and run.stdout.readline() == "began\n"
        renamed = there.sandbox("rename", full, f"{name}-2", home=other)
        assert renamed.returncode == 0, renamed.stderr
        again = there.sandbox("run", "-n", f"{name}-2@big", "-x", "ps")
        assert "sleep 98703" in again.stdout, again.stderr
        removed = there.sandbox("rm", "-f", f"{name}-2@big", home=other)
        assert removed.returncode == 0, removed.stderr
        _, err = run.communicate(timeout=60)
        known = run.returncode in (125, 137) or "whether the command began is not known" in err
        assert known and "Traceback" not in err, (run.returncode, err)
    told = there.sandbox("run", "-n", full, "-x", "echo never")
    assert (told.returncode, told.stdout) == (1, "") and f"{full} is gone" in told.stderr
    anew = there.sandbox("run", "-r", "big", "-n", name, "-x", "echo anew")
    assert anew.stdout == "anew\n", anew.stderr


def test_a_job_goes_on_when_it_was_cut(there: Elsewhere, name: str, engine: Engine) -> None:
    """Its output is complete when the host is back, and it was run once; it ends with its session.
    """
    service, lines = Service(engine, env=there.environ), ["began", *map(str, range(1, 20001))]

    def output(job: Any, stream: str = "") -> str:
        path = f"/api/sessions/{job['session']}/jobs/{job['id']}/output?stream={stream}"
        return service.get(path).body.decode()

    def began(job: Any) -> bool:
        return "began" in output(job)

    jobs = []
    for host in HOSTS:
        there.sandbox("run", "-r", host, "-n", name, "-x", "true")
        jobs += [service.job(f"{name}@{host}", command) for command in (
            "echo began; echo once >>/tmp/runs; until [ -e /tmp/go ]; do sleep 0.1; done; "
            "for i in $(seq 20000); do echo $i; done; echo bad >&2; exit 7",
            "echo began; exec sleep 1000")]
    for job in jobs:
        wait_for(partial(began, job))
    there.cut()
    for job, lasting in (jobs[:2], jobs[2:]):
        full = job["session"]
        assert there.sandbox("run", "-n", full, "-x", "touch /tmp/go").returncode == 0
        ended = service.ended(job)
        assert (ended["exit"], ended["state"]) == (7, "ended"), ended
        assert output(job, "stdout") == "".join(f"{line}\n" for line in lines)
        assert output(job, "stderr") == "bad\n"
        kept = there.sandbox("run", "-n", full, "-x", "cat /tmp/runs; ls /run/sandbox/jobs").stdout
        assert kept.startswith("once\n") and kept.count("\n") == 3  # and what the other keeps
        assert service.get(f"/api/sessions/{full}/jobs/{lasting['id']}").json["state"] == "running"
        assert there.sandbox("stop", full).returncode == 0
        assert service.ended(lasting)["exit"] == 137
    # One of an earlier version has no place to keep anything.
    assert there.sandbox("start", full).returncode == 0
    there.sandbox("run", "-n", full, "-x", "rm -r /run/sandbox")
    plain = service.job(full, "echo plain; exit 3")
    assert (service.ended(plain)["exit"], output(plain, "stdout")) == (3, "plain\n")
    service.end()


def test_a_port_reaches_this_machine(there: Elsewhere, name: str, engine: Engine) -> None:
    """As long as a run of its session lives; another one says how."""
    port = free_port()
    serve = ("mkdir -p /tmp/w; echo hello >/tmp/w/index.html; "
             "exec busybox httpd -f -p 8080 -h /tmp/w")
    run = engine.popen("run", "-r", "big", "-n", name, "-p", f"{port}:8080", "-x", serve,
                       env=there.environ)

    def answer() -> bytes:
        try:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            client.request("GET", "/")
            return client.getresponse().read()
        except OSError:
            return b""

    assert wait_for(answer) == b"hello\n"
    other = there.sandbox("run", "-n", f"{name}@big", "-x", "true")
    assert f"127.0.0.1:{port}:127.0.0.1:{port} ssh://root@big" in other.stderr
    run.kill()  # it has no time to tidy up
    run.wait(60)
    assert wait_for(lambda: not answer())
    service = Service(engine, env=there.environ)
    wait_for(lambda: service.get("/api/sessions").status == 200 and answer() == b"hello\n")
    service.end()
    assert wait_for(lambda: not answer())


def test_the_doctor_looks_at_the_host(there: Elsewhere) -> None:
    for host, root in (("big", "rootful"), ("lab", "rootless")):
        done = there.sandbox("doctor", "--on", host, "--json")
        found = {check["check"]: check for check in json.loads(done.stdout)}
        assert found["permission"]["detail"] == root, done.stdout
        assert found["disk"]["detail"].endswith(f"GB free on {host}")
        assert found["clock"]["status"] == found["image"]["status"] == "ok"


def test_a_list_is_one_call_for_each_host(there: Elsewhere, home: Path) -> None:
    """However many sessions there are, and nothing is imported for it where no host is named."""
    done = there.sandbox("ps", "-q", env={"SANDBOX_TRACE": "1"})
    calls = [line for line in done.stderr.splitlines() if line.startswith("+ ")]
    assert sorted(" ".join(call.split()[:4]) for call in calls) == [
        "+ docker --context big", "+ docker ps -a", "+ podman --connection lab"], calls
