"""Hidden keys: what runs in a session has placeholders, its broker has the keys, and nothing else
that a session or the engine's metadata can show has them.

The vendors are vendor_stub.py in the network of a session's companion, under their own names.
"""

import contextlib
import json
import os
import re
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from conftest import IMAGE, Engine, Result, on_docker, unique_name, write_config
from network import add_names, inspected, proxy_of, shown_network
from service import Service, wait_for
from test_agents import (
    ONCE,
    SCREENS,
    START_SECONDS,
    image,
    type_prompt,
    type_words,
)
from test_broker import ASK, TABLE, VENDORS, Ca, ca, equip, taken

import sandbox
import sandbox_keys
from sandbox import SandboxError

__all__ = ["ca", "image"]  # fixtures

SECRET = secrets.token_hex(8)  # nothing else on this machine has it
REAL = {"ANTHROPIC_API_KEY": f"sk-ant-api03-{SECRET}", "OPENAI_API_KEY": f"sk-{SECRET}",
        "GEMINI_API_KEY": f"AIza-{SECRET}"}
BROKER = "http://127.0.0.1:3129"


# --- Placeholders ---


def test_a_key_becomes_a_placeholder_and_its_base_url_the_brokers() -> None:
    env, providers = sandbox_keys.hide({**REAL, "OTHER": "x"})
    assert not set(env.values()) & set(REAL.values()) and env["OTHER"] == "x"
    assert env["ANTHROPIC_BASE_URL"] == f"{BROKER}/anthropic"
    assert env["OPENAI_BASE_URL"] == f"{BROKER}/openai"
    assert env["GOOGLE_GEMINI_BASE_URL"] == f"{BROKER}/gemini"
    assert env["_CLAUDE_CODE_ASSUME_FIRST_PARTY_BASE_URL"] == "1"
    config = json.loads(env["OPENCODE_CONFIG_CONTENT"])["provider"]
    assert {id: row["options"]["baseURL"] for id, row in config.items()} == {
        "anthropic": f"{BROKER}/anthropic/v1", "openai": f"{BROKER}/openai",
        "google": f"{BROKER}/google"}
    assert [*providers] == ["anthropic", "openai", "gemini", "google"]
    row = TABLE["providers"]["anthropic"]
    assert providers["anthropic"] == {
        "url": "https://api.anthropic.com", "status": 402, "counted": row["counted"],
        "free": row["free"],
        "keys": {row["keys"]["ANTHROPIC_API_KEY"]: REAL["ANTHROPIC_API_KEY"]}}
    assert env["ANTHROPIC_API_KEY"] == row["keys"]["ANTHROPIC_API_KEY"]


def test_what_is_not_given_is_not_named() -> None:
    assert sandbox_keys.hide({"A": "b"}) == ({"A": "b"}, {})


def test_a_configured_base_url_is_where_the_broker_sends() -> None:
    """And the agent is not told that this is the vendor's own."""
    env, providers = sandbox_keys.hide({"ANTHROPIC_AUTH_TOKEN": "t",
                                        "ANTHROPIC_BASE_URL": "http://gate.example:8080/a/"})
    assert env["ANTHROPIC_BASE_URL"] == f"{BROKER}/anthropic"
    assert providers["anthropic"]["url"] == "http://gate.example:8080/a/"
    assert "_CLAUDE_CODE_ASSUME_FIRST_PARTY_BASE_URL" not in env


def test_the_settings_of_an_agent_keep_what_else_they_say() -> None:
    given = {"model": "m", "provider": {
        "groq": {"options": {"timeout": 5}},
        "anthropic": {"options": {"baseURL": "https://gate.example/x/v1"}}}}
    env, providers = sandbox_keys.hide({"GROQ_API_KEY": "g", "ANTHROPIC_API_KEY": "a",
                                        "OPENCODE_CONFIG_CONTENT": json.dumps(given)})
    data = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    assert data["model"] == "m"
    assert data["provider"]["groq"]["options"] == {"timeout": 5, "baseURL": f"{BROKER}/groq"}
    assert data["provider"]["anthropic"]["options"]["baseURL"] == f"{BROKER}/own-anthropic/v1"
    assert providers["own-anthropic"]["url"] == "https://gate.example/x"
    assert providers["anthropic"]["url"] == "https://api.anthropic.com"


def test_no_proxy_is_on_the_way_to_the_broker() -> None:
    env, _ = sandbox_keys.hide({"GROQ_API_KEY": "g", "HTTPS_PROXY": "http://p:1", "NO_PROXY": "x"})
    assert (env["NO_PROXY"], env["no_proxy"]) == ("x,127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize("env,said", [
    ({"OPENAI_API_KEY": ""}, "OPENAI_API_KEY is to be hidden, and is empty"),
    ({"OPENAI_API_KEY": "a\nb"}, "OPENAI_API_KEY is to be hidden, and has other than printable"),
    ({"OPENAI_API_KEY": "a b"}, "printable"), ({"OPENAI_API_KEY": "ä"}, "printable"),
    *[({"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": url}, "OPENAI_BASE_URL is no http")
      for url in ("ftp://x", "//x", "https://", "https://me:pw@x", "https://x?a", "https://x\n")],
    *[({"GROQ_API_KEY": "k", "OPENCODE_CONFIG_CONTENT": text}, "OPENCODE_CONFIG_CONTENT is no JSON")
      for text in ("{", "[]", '{"provider": 3}', '{"provider": {"groq": []}}')],
    ({"ANTHROPIC_API_KEY": "k", "OPENCODE_CONFIG_CONTENT":
      '{"provider": {"anthropic": {"options": {"baseURL": "https://x/v2"}}}}'}, "end with /v1"),
])  # fmt: skip
def test_what_cannot_be_hidden_is_said_and_not_shown(env: dict[str, str], said: str) -> None:
    with pytest.raises(SandboxError, match=re.escape(said)) as caught:
        sandbox_keys.hide(env)
    assert "pw" not in caught.value.message + caught.value.hint


# --- Configuration ---


@pytest.fixture
def sandbox_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("SANDBOX_RUNTIME", *REAL, "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "home"


def test_init_proposes_hidden_where_it_takes_variables(sandbox_home: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    (sandbox_home.parent / ".codex").mkdir()
    (sandbox_home.parent / ".codex" / "auth.json").write_text("{}")
    assert sandbox.main(["init"]) == 0
    runs = json.loads((sandbox_home / "sandbox.json").read_text())["runs"]
    assert {name: runs[name].get("keys") for name in runs} == {"claude": "hidden", "codex": None}
    runs["claude"]["keys"] = "visible"
    (sandbox_home / "sandbox.json").write_text(json.dumps({"runs": runs}))
    assert sandbox.main(["init", "--force"]) == 0
    runs = json.loads((sandbox_home / "sandbox.json").read_text())["runs"]
    assert runs["claude"]["keys"] == "visible"


def test_an_old_session_is_as_one_with_visible_keys() -> None:
    assert sandbox.differences({}, {"keys": "visible"}) == []
    assert sandbox.differences({}, {"keys": "hidden"}) == [
        "keys: it has visible, asked for is hidden"]


def test_an_engines_call_takes_more_than_a_pipe_holds() -> None:
    data = b"x" * 300_000
    assert sandbox.Output(["wc", "-c"], stdin=data).result()[1].split() == ["300000"]
    assert sandbox.Output(["true"], stdin=data).result()[0] == 0


# --- A session ---


# One request through the broker; then it stays, to be looked at, until the file is there.
ASKS = """
import http.client, json, os, sys, time
connection = http.client.HTTPConnection("127.0.0.1", 3129)
connection.request("POST", "/anthropic/v1/messages", json.dumps({"model": "stub", "messages": [
    {"role": "user", "content": "say it"}]}), {"x-api-key": os.environ["ANTHROPIC_API_KEY"]})
answer = connection.getresponse()
print(answer.status, answer.read().decode(), flush=True)
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


class Hidden:
    """A session with hidden keys, in a home and a project of its own, and the vendors."""

    def __init__(self, engine: Engine, ca: Ca, *options: str, image: str = IMAGE,
                 **configuration: object) -> None:
        self.engine, self.name = engine, unique_name()
        self.project, self.home = engine.directory(), engine.directory()
        write_config(self.home, imageName=image.partition(":")[0], keys="hidden", **configuration)
        self.env_file = self.home / "real.env"
        self.env_file.write_text("".join(f"{name}={key}\n" for name, key in REAL.items()))
        self.directory = engine.directory()
        equip(self.directory, ca, REAL.values())
        self.directory.chmod(0o777)
        made = self.run("-x", "true", *options)
        assert made.returncode == 0, made.stderr
        self.said = made.stderr
        self.start_vendors()

    def start_vendors(self) -> None:
        self.proxy, self.vendors = proxy_of(self.engine, self.name), f"{unique_name()}-vendors"
        (self.directory / "ready").unlink(missing_ok=True)
        add_names(self.engine, self.proxy, dict.fromkeys(VENDORS, "127.0.0.1"))
        made = self.engine.run(
            "run", "-d", "--init", "--name", self.vendors, "--network", f"container:{self.proxy}",
            "-v", f"{self.directory}:/stub", "-e", "PYTHONDONTWRITEBYTECODE=1", IMAGE, "python3",
            "/stub/vendor_stub.py", "/stub")
        assert made.returncode == 0, made.stderr
        wait_for((self.directory / "ready").exists)

    @property
    def where(self) -> dict[str, Any]:
        return {"cwd": self.project, "home": self.home,
                "env": {"SSL_CERT_FILE": str(self.directory / "ca.crt")}}

    def argv(self, *options: str) -> list[str]:
        return ["run", "-n", self.name, "--ef", str(self.env_file), *options]

    def run(self, *options: str) -> Result:
        # -x takes all that follows
        at = options.index("-x") if "-x" in options else len(options)
        words = [*options[at + 2:], *options[:at], *options[at:at + 2]]
        return self.engine.sandbox(*self.argv(*words), **self.where)

    def sandbox(self, *words: str) -> Result:
        return self.engine.sandbox(*words, **self.where)

    def ask(self) -> Result:
        """One request from inside."""
        (self.project / "asks.py").write_text(ASKS)
        return self.run("-x", "python3 asks.py")

    def requests_text(self) -> str:
        path = self.directory / "requests"
        return path.read_text() if path.exists() else ""

    def requests(self) -> list[Any]:
        """Those to the vendors since the last call."""
        return taken(self.directory / "requests")

    def end(self) -> None:
        self.engine.remove({self.vendors})
        removed = self.sandbox("rm", "-f", self.name)
        assert removed.returncode == 0, removed.stderr

    def places(self) -> Iterator[tuple[str, bytes]]:
        """All that a session and the engine can show, while something runs."""
        for container in (self.name, self.proxy):
            yield f"inspect {container}", self.engine.run("inspect", container).stdout.encode()
            logs = self.engine.run("logs", container)
            yield f"logs {container}", (logs.stdout + logs.stderr).encode()
        for container, folders in ((self.name, "/home /run /tmp /var/tmp /etc"),
                                   (self.proxy, "/var/lib/sandbox-net /run")):
            files = self.engine.run("exec", "-u", "0", container, "sh", "-c",
                                    f"find {folders} -type f -exec cat {{}} +").stdout
            yield f"volumes {container}", files.encode(errors="surrogateescape")
        ours = [path for top in (self.project, self.home) for path in top.rglob("*")
                 if path.is_file() and path != self.env_file]
        yield "files", b"".join(path.read_bytes() for path in ours)
        yield "what the engine keeps", b"".join(self.kept_by_engine())
        for container in (self.name, self.proxy):
            for pid in self.pids(container):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    for name in ("environ", "cmdline"):
                        yield f"{name} of {pid}", Path("/proc", pid, name).read_bytes()
                    if container == self.name:
                        yield f"memory of {pid}", memory(pid)

    def kept_by_engine(self) -> Iterator[bytes]:
        """Its own files about the two containers."""
        if self.engine.runtime == "docker":
            root = self.engine.run("info", "-f", "{{.DockerRootDir}}").stdout.strip()
            patterns = [f"containers/{inspected(self.engine, name, '{{.Id}}')}/*"
                        for name in (self.name, self.proxy)]
        else:
            root = self.engine.run("info", "-f", "{{.Store.GraphRoot}}").stdout.strip()
            patterns = ["db.sql*", "libpod/*.db", *(
                f"overlay-containers/{inspected(self.engine, name, '{{.Id}}')}/userdata/**/*"
                for name in (self.name, self.proxy))]
        paths = [path for pattern in patterns for path in Path(root).glob(pattern)]
        assert any(self.name.encode() in data for path in paths if path.is_file()
                   for data in [path.read_bytes()])
        yield from (path.read_bytes() for path in paths if path.is_file())

    def pids(self, container: str) -> list[str]:
        """All in its namespace: not every engine can list them."""
        own = namespace(inspected(self.engine, container, "{{.State.Pid}}"))
        return [pid for pid in os.listdir("/proc") if pid.isdigit() and namespace(pid) == own != ""]


def namespace(pid: str) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def memory(pid: str) -> bytes:
    """What a process has in memory, as far as it can be read."""
    found = []
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as file:
        for span, mode in (line.split()[:2] for line in maps):
            start, end = (int(word, 16) for word in span.split("-"))
            with contextlib.suppress(OSError, OverflowError):
                if mode.startswith("rw"):
                    file.seek(start)
                    found.append(file.read(min(end - start, 64 << 20)))
    return b"".join(found)


@pytest.fixture(scope="module")
def hidden(engine: Engine, ca: Ca) -> Iterator[Hidden]:
    hidden = Hidden(engine, ca)
    yield hidden
    hidden.end()


def test_a_request_reaches_the_vendor_with_the_key(hidden: Hidden) -> None:
    hidden.requests()
    answer = hidden.ask()
    assert answer.stdout.startswith("200 ") and "pong" in answer.stdout, answer
    (request,) = hidden.requests()
    headers = {name.lower(): value for name, value in request[2]}
    assert headers["x-api-key"] == REAL["ANTHROPIC_API_KEY"]


def test_the_key_is_nowhere_but_in_the_brokers_memory(hidden: Hidden) -> None:
    """While a program that works with it runs: environments, memory, argv, files, logs, inspect."""
    (hidden.project / "asks.py").write_text(ASKS)
    go = hidden.project / "go"
    with hidden.engine.popen(*hidden.argv("-x", f"python3 asks.py {go}"), **hidden.where) as run:
        assert run.stdout and run.stdout.readline().startswith("200 ")
        placeholder = TABLE["providers"]["anthropic"]["keys"]["ANTHROPIC_API_KEY"].encode()
        places = dict(hidden.places())
        go.touch()
        run.communicate(timeout=60)
    assert [place for place, content in places.items()
            for key in REAL.values() if key.encode() in content] == []
    # Where the placeholder is, the key would have been found.
    kinds = {place.partition(" of ")[0] for place, content in places.items()
             if placeholder in content}
    # Podman keeps the environment of an exec.
    assert kinds - {"what the engine keeps"} == {"environ", "memory"}
    in_companion = b"".join(map(memory, hidden.pids(hidden.proxy)))
    assert all(key.encode() in in_companion for key in REAL.values())


class Sampler:
    """What arguments and environments of all processes have held of some words, until it ends."""

    def __init__(self, *words: str) -> None:
        self.words, self.found, self.ending = words, set[str](), threading.Event()
        self.thread = threading.Thread(target=self.look)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.thread.join()

    def look(self) -> None:
        while not self.ending.is_set():
            for path in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    data = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
                    self.found |= {word for word in self.words if word.encode() in data}


def test_no_process_gets_a_key_and_no_output_shows_one(hidden: Hidden) -> None:
    """Whatever a command does with a session: also what it prints for a shell, or traces."""
    placeholder = TABLE["providers"]["anthropic"]["keys"]["ANTHROPIC_API_KEY"]
    env = {**hidden.where["env"], "SANDBOX_TRACE": "1"}
    where = hidden.where | {"env": env}
    said: list[str] = []
    with Sampler(*REAL.values(), placeholder) as sampler:
        with hidden.engine.popen(*hidden.argv("-x", "cat"), **where) as run:
            wait_for(lambda: placeholder in sampler.found)
            said += run.communicate(timeout=60)
        for words in (["stop", hidden.name],
                      hidden.argv("-d", "-x", "true"), ["budget", hidden.name, "9usd"],
                      ["usage"], ["budget", hidden.name, ""], ["net", "log", hidden.name],
                      ["config", "show", "--ef", str(hidden.env_file)],
                      ["config", "command", *hidden.argv()[1:], "--reveal"],
                      hidden.argv("--keys", "visible", "-x", "true")):
            ran = hidden.engine.sandbox(*words, **where)
            assert ran.returncode == 0, (words, ran)
            said.append(ran.stdout + ran.stderr)
    assert sampler.found == {placeholder}
    assert [text for text in said if SECRET in text] == []
    hidden.engine.remove({hidden.vendors})
    hidden.start_vendors()


# What tries all sockets that can be seen for the control of the broker, and its files.
ATTACKS = """
import glob, os, socket
for path in glob.glob("/run/**/*", recursive=True) + glob.glob("/var/lib/sandbox-net/*"):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1)
        try:
            sock.connect(path)
            sock.sendall(b'{"do": "usage"}\\n')
            data = sock.recv(1000)
            print("answer", path, data) if data else None
        except OSError:
            pass
for name in ("broker.sock", "counts.json", "decisions"):
    print("file", name) if os.path.exists("/var/lib/sandbox-net/" + name) else None
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        print("process", path) if b"broker.py" in open(path, "rb").read() else None
    except OSError:
        pass
# What is no request of an agent gets no further than the broker.
for request in ("CONNECT example.org:443", "GET http://example.org/", "POST /anthropic/v1/files",
                "DELETE /anthropic/v1/messages", "POST /anthropic/v1/messages/../files",
                "POST http://api.anthropic.com/v1/messages", "POST /anthropic/v1/messages"):
    for more in ("", "Content-Length: 2\\r\\nTransfer-Encoding: chunked\\r\\n",
                 "x-api-key: own\\r\\nx: a\\nx-api-key: own\\r\\n", "Upgrade: h2c\\r\\n"):
        with socket.create_connection(("127.0.0.1", 3129), 10) as sock:
            sock.sendall(f"{request} HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n{more}\\r\\n".encode())
            status = sock.makefile("rb").readline().split()[1:2]
            if status and not status[0].startswith(b"4"):
                print(request, more, status)
try:
    open("/run/sandbox-net/new", "w")
    print("written")
except OSError:
    pass
print("done")
"""


@pytest.mark.parametrize("user", ["0", ""])
def test_the_companion_is_out_of_reach_from_inside(hidden: Hidden, user: str) -> None:
    """Its memory, its files and its control, for root and for the agent's user."""
    user = user or f"{hidden.engine.uid}:{hidden.engine.gid}"
    hidden.requests()
    tried = hidden.engine.run("exec", "-i", "-u", user, hidden.name, "python3", "-", input=ATTACKS)
    assert tried.stdout == "done\n", tried
    assert hidden.requests() == []


def test_no_neighbour_reaches_the_broker(hidden: Hidden) -> None:
    """It listens on the loopback of the session alone."""
    shown = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
    for address in inspected(hidden.engine, hidden.name, shown).split():
        script = f"import socket; socket.create_connection(({address!r}, 3129), 5)"
        tried = hidden.engine.run("exec", hidden.proxy, "python3", "-c", script)
        assert "ConnectionRefusedError" in tried.stderr, tried
    listening = hidden.engine.run("exec", hidden.name, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    places = [line.split()[1] for line in listening.stdout.splitlines() if ":0C39 " in line]
    assert places and {place for place in places if ":0C39" in place} == {"0100007F:0C39"}
    beside = hidden.engine.run("exec", hidden.proxy, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    heard = [line.split()[1] for line in beside.stdout.splitlines() if line.split()[3] == "0A"]
    assert [place for place in heard if not place.endswith(":01BB")] == []  # that of the vendors


def test_a_restarted_companion_has_no_key_until_the_next_run(hidden: Hidden) -> None:
    engine = hidden.engine
    engine.remove({hidden.vendors})
    (hidden.project / "asks.py").write_text(ASKS)
    assert engine.run("restart", "-t", "1", hidden.proxy).returncode == 0
    inside = ["exec", "-e", "ANTHROPIC_API_KEY=x", "-w", str(hidden.project), hidden.name,
              "python3", "asks.py"]
    wait_for(lambda: engine.run(*inside).stdout.startswith("401 "))
    assert f"sandbox run -n {hidden.name}" in engine.run(*inside).stdout
    hidden.start_vendors()
    assert hidden.ask().stdout.startswith("200 ")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_companion_that_is_gone_comes_back_with_the_next_run(engine: Engine, ca: Ca,
                                                               stopped: bool) -> None:
    hidden = Hidden(engine, ca)
    try:
        engine.remove({hidden.vendors})
        if stopped:
            assert hidden.sandbox("stop", hidden.name).returncode == 0
        assert engine.run("rm", "-f", "-v", hidden.proxy).returncode == 0
        ran = hidden.run("-x", "echo $ANTHROPIC_BASE_URL")
        assert ran.stdout == f"{BROKER}/anthropic\n", ran.stderr
        hidden.start_vendors()
        assert hidden.ask().stdout.startswith("200 ")
    finally:
        hidden.end()


def test_a_stopped_session_has_its_keys_when_it_starts_again(hidden: Hidden) -> None:
    hidden.engine.remove({hidden.vendors})
    assert hidden.sandbox("stop", hidden.name).returncode == 0
    assert hidden.run("-x", "true").returncode == 0
    hidden.start_vendors()
    assert hidden.ask().stdout.startswith("200 ")


@on_docker
def test_a_changed_key_is_there_with_the_next_run(hidden: Hidden) -> None:
    before = hidden.env_file.read_text()
    try:
        hidden.env_file.write_text(before.replace(SECRET, "another-key"))
        assert hidden.ask().stdout.startswith("401 ")  # the vendor's
        assert "another-key" in json.dumps(hidden.requests()[-1])
    finally:
        hidden.env_file.write_text(before)
    assert hidden.ask().stdout.startswith("200 ")


@pytest.mark.parametrize("options", [("--net", "none"), ("--allow", "api.test")], ids=str)
def test_the_broker_needs_no_rule_and_is_no_other_way_out(engine: Engine, ca: Ca,
                                                          options: tuple[str, str]) -> None:
    hidden = Hidden(engine, ca, *options)
    try:
        assert shown_network(engine, hidden.name) in ("gone", "none", "allow")
        rows = json.loads(hidden.sandbox("ps", "--json").stdout)
        (row,) = [row for row in rows if row["name"] == hidden.name]
        assert row["network"] == ("none" if "none" in options else "allow")
        assert hidden.ask().stdout.startswith("200 ")
        assert inspected(engine, hidden.name, "{{.HostConfig.NetworkMode}}") == "none"
        asks = r"printf 'GET /other/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n' | nc 127.0.0.1 3129"
        assert hidden.run("-x", asks).stdout.startswith("HTTP/1.1 404 ")
        if "none" in options:
            assert hidden.sandbox("net", "show", hidden.name).returncode == 1
            assert '"use"' in hidden.sandbox("net", "log", hidden.name).stdout
        else:
            assert hidden.sandbox("net", "show", hidden.name).returncode == 0
    finally:
        hidden.end()


@on_docker
def test_an_open_session_is_no_allowlist(hidden: Hidden) -> None:
    rows = json.loads(hidden.sandbox("ps", "--json").stdout)
    (row,) = [row for row in rows if row["name"] == hidden.name]
    assert row["network"] == "open"
    assert hidden.run("-x", "echo [$HTTP_PROXY]").stdout == "[]\n"
    assert hidden.sandbox("net", "allow", hidden.name, "x.test").returncode == 1
    assert hidden.sandbox("prune", "--dry-run").stdout.find(hidden.proxy) < 0


@on_docker
def test_what_stays_visible_is_said(hidden: Hidden) -> None:
    ran = hidden.run("-e", "GITHUB_TOKEN=ghp", "-e", "PLAIN=1", "-x", "echo $GITHUB_TOKEN")
    assert ran.stdout == "ghp\n"
    assert f"what runs in {hidden.name} sees GITHUB_TOKEN" in ran.stderr


@on_docker
def test_a_refusal_of_the_broker_is_told(hidden: Hidden) -> None:
    asks = (r"printf 'POST /anthropic/v1/%s HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            r"Content-Length: 0\r\n\r\n' {} | nc 127.0.0.1 3129 >/dev/null")
    ran = hidden.run("-x", "; ".join(asks.format(path) for path in ("files", "messages", "x")))
    lines = [line for line in ran.stderr.splitlines() if "was refused" in line]
    assert len(lines) == 2, ran.stderr
    place = f"{hidden.name} was refused api.anthropic.com port 443: "
    assert f"{place}agents need no POST of /v1/x; see: sandbox net log" in lines[0]
    assert f"{place}the request has no placeholder" in lines[1]


@on_docker
def test_the_web_service_gives_them_too_and_shows_names_alone(engine: Engine, service: Service,
                                                              project: Path, name: str) -> None:
    made = service.post("/api/sessions", {"name": name, "directory": str(project),
                                          "keys": "hidden", "env": {"GROQ_API_KEY": "real-key"}})
    assert (made.status, made.json["keys"], made.json["network"]) == (201, "hidden", "open")
    service.post(f"/api/sessions/{name}/settings", {"env": {"GROQ_API_KEY": "real-key",
                                                            "PLAIN": "1"}}, method="PUT")
    settings = service.get(f"/api/sessions/{name}/settings")
    assert settings.json["hiddenKeys"] == ["GROQ_API_KEY"] and b"real-key" not in settings.body
    env = settings.json["settings"]["env"]
    assert env == {"GROQ_API_KEY": None, "PLAIN": "1"}
    kept = service.post(f"/api/sessions/{name}/settings", {"env": {**env, "PLAIN": "2"}},
                        method="PUT")
    assert kept.json["settings"]["env"] == {"GROQ_API_KEY": None, "PLAIN": "2"}
    stored = json.loads((engine.home / "sessions" / f"{name}.json").read_text())
    assert stored["env"] == {"GROQ_API_KEY": "real-key", "PLAIN": "2"}
    unknown = service.post(f"/api/sessions/{name}/settings", {"env": {"OTHER": None}}, method="PUT")
    assert unknown.status == 400
    proxy = proxy_of(engine, name)
    assert engine.run("restart", "-t", "1", proxy).returncode == 0
    job = service.post(f"/api/sessions/{name}/command", {"command": "echo [$GROQ_API_KEY]"}).json
    path = f"/api/sessions/{name}/jobs/{job['id']}"
    wait_for(lambda: service.get(path).json["state"] == "ended")
    output = (engine.home / "jobs" / name / job["id"] / "output").read_text()
    assert "[gsk_hidden-by-sandbox-not-a-key]" in output
    having = [path for path in engine.home.rglob("*")
              if path.is_file() and b"real-key" in path.read_bytes()]
    assert having == [engine.home / "sessions" / f"{name}.json"]  # where the person has put it
    assert asked(engine, proxy)["providers"] == ["groq"]
    assert service.get(f"/api/sessions/{name}/network").status == 409
    bad = service.post(f"/api/sessions/{name}/settings", {"env": {"GROQ_API_KEY": ""}},
                       method="PUT")
    assert bad.status == 400 and "GROQ_API_KEY" in bad.body.decode()


@on_docker
def test_a_session_with_visible_keys_is_not_taken_for_one(engine: Engine, home: Path,
                                                          project: Path, name: str) -> None:
    def run(*options: str) -> Result:
        return engine.sandbox("run", "-n", name, "-e", "GROQ_API_KEY=real", *options, "-x",
                              "echo $GROQ_API_KEY")

    assert run().stdout == "real\n"
    refused = run("--keys", "hidden")
    assert (refused.returncode, refused.stdout) == (125, "")
    assert f"the keys of {name} are visible" in refused.stderr
    made = engine.sandbox("recreate", name, "--keys", "hidden")
    assert made.returncode == 0, made.stderr
    placeholder = TABLE["providers"]["groq"]["keys"]["GROQ_API_KEY"]
    assert run().stdout == run("--keys", "visible").stdout == f"{placeholder}\n"
    assert "keys: it has hidden" in run("--keys", "visible").stderr


@on_docker
@pytest.mark.parametrize("options,said", [
    (["-e", "GROQ_API_KEY="], "GROQ_API_KEY is to be hidden, and is empty"),
    (["-e", "GROQ_API_KEY=a\nb"], "GROQ_API_KEY is to be hidden"),
    (["-e", "OPENAI_API_KEY=k", "-e", "OPENAI_BASE_URL=file:///x"], "OPENAI_BASE_URL is no http"),
    (["--net", "host"], "keys cannot be hidden with host as network"),
])  # fmt: skip
def test_nothing_starts_half_hidden(engine: Engine, home: Path, project: Path, name: str,
                                    options: list[str], said: str) -> None:
    ran = engine.sandbox("run", "-n", name, "--keys", "hidden", *options, "-x", "true")
    assert ran.returncode == 125 and said in ran.stderr
    assert name not in engine.sandbox("ps", "-q").stdout.split()


@on_docker
def test_an_image_without_the_broker_is_named_with_the_remedy(engine: Engine, home: Path,
                                                              project: Path, name: str) -> None:
    container, old = unique_name(), f"localhost/{unique_name()}"
    made = engine.run("run", "--name", container, IMAGE, "rm", "/usr/local/lib/sandbox/broker.py")
    assert made.returncode == 0, made.stderr
    assert engine.run("commit", container, f"{old}:1.0-common").returncode == 0
    try:
        ran = engine.sandbox("run", "-n", name, "--in", old, "--keys", "hidden", "-e",
                             "GROQ_API_KEY=k", "-x", "true")
        assert ran.returncode == 125 and "too old to hide keys" in ran.stderr, ran.stderr
        assert "sandbox build" in ran.stderr
        assert name not in engine.sandbox("ps", "-q").stdout.split()
    finally:
        engine.run("rm", "-f", container)
        engine.run("rmi", f"{old}:1.0-common")


def asked(engine: Engine, proxy: str) -> Any:
    """What a broker itself says."""
    answer = engine.run("exec", "-i", proxy, "python3", "-c", ASK.read_text(),
                        f"{sandbox.KEPT_DIRECTORY}/broker.sock", input='{"do": "usage"}\n')
    return json.loads(answer.stdout)


# --- Use and budgets ---


@pytest.mark.parametrize("value,budget", [
    ("5usd", {"usd": 5}), ("2.5usd,60minutes/day", {"usd": 2.5, "minutes": 60, "per": "day"}),
    ("4e+06tokens", {"tokens": 4e6}), ("", {}), ("0usd", {"usd": 0}),
    ({"usd": 5, "tokens": 7, "minutes": 1.5, "per": "session"},) * 2,
])  # fmt: skip
def test_a_budget_is_read(value: Any, budget: Any) -> None:
    """Also as the broker writes it in a refusal."""
    assert sandbox.a_budget(value) == budget


@pytest.mark.parametrize("value", [
    5, "5", "usd", "5eur", "-1usd", "5usd/", "5usd/week", "nanusd", "1e999usd", {"eur": 5},
    {"usd": "5"}, {"usd": True}, {"usd": -1}, {"per": "week"}, {"usd": float("inf")}])
def test_a_wrong_budget_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is not such as 5usd"):
        sandbox.a_budget(value)


@pytest.fixture
def measured(engine: Engine, ca: Ca) -> Iterator[Hidden]:
    """A session whose model costs two tokens a request, and may use one."""
    measured = Hidden(engine, ca, "--budget", "1tokens")
    yield measured
    measured.end()


@on_docker
def test_over_its_budget_nothing_is_sent_until_it_is_raised(measured: Hidden) -> None:
    assert measured.ask().stdout.startswith("200 ")
    measured.requests()
    refused = measured.ask()
    raise_it = f"sandbox budget {measured.name} 2tokens"
    assert refused.stdout.startswith("402 ") and raise_it in refused.stdout
    assert "the budget is spent: 2.00 of 1 tokens" in refused.stderr and raise_it in refused.stderr
    assert "see: sandbox net log" not in refused.stderr
    assert measured.requests() == []
    raised = measured.sandbox("budget", measured.name, "3tokens")
    assert raised.stdout == "2.00 of 3 tokens are spent\n", raised.stderr
    assert measured.ask().stdout.startswith("200 ")
    assert measured.ask().stdout.startswith("402 ")
    assert measured.sandbox("budget", measured.name, "").stdout == "no budget\n"
    assert measured.ask().stdout.startswith("200 ")


def test_what_was_used_outlives_a_restart_of_all(measured: Hidden) -> None:
    assert measured.ask().stdout.startswith("200 ")
    before = json.loads(measured.sandbox("usage", measured.name, "--json").stdout)
    measured.engine.remove({measured.vendors})
    assert measured.sandbox("stop", measured.name).returncode == 0
    assert json.loads(measured.sandbox("usage", measured.name, "--json").stdout) == before
    (entry,) = before
    ((day, row),) = entry["days"].items()
    assert row["models"] == {"stub": {"requests": 1, "input": 1, "output": 1, "cached": 0,
                                      "written": 0, "written_long": 0, "usd": None}}
    assert entry["spent"]["tokens"] == 2 and entry["budget"] == {"tokens": 1}
    shown = measured.sandbox("usage")
    assert [measured.name, day, "stub"] in [line.split()[:3] for line in shown.stdout.splitlines()]
    assert "no price is known of stub; the prices are of 20" in shown.stderr
    assert f"{measured.name}: 2.00 of 1 tokens are spent" in shown.stderr
    assert measured.ask().stdout.startswith("402 ")
    made = measured.sandbox("recreate", measured.name)
    assert made.returncode == 0, made.stderr
    measured.proxy = proxy_of(measured.engine, measured.name)
    assert json.loads(measured.sandbox("usage", measured.name, "--json").stdout) == before
    refused = measured.ask()
    assert refused.stdout.startswith("402 "), refused


@on_docker
def test_counts_that_cannot_be_read_are_told_and_begin_anew(measured: Hidden) -> None:
    break_it = f"echo '{{}}' > {sandbox.KEPT_DIRECTORY}/counts.json"
    assert measured.engine.run("exec", measured.proxy, "sh", "-c", break_it).returncode == 0
    failed = measured.sandbox("usage", measured.name)
    assert failed.returncode == 1 and "sandbox recreate begins anew" in failed.stderr
    made = measured.sandbox("recreate", measured.name)
    assert made.returncode == 0 and "could not be read, and begin anew" in made.stderr
    (entry,) = json.loads(measured.sandbox("usage", measured.name, "--json").stdout)
    assert entry["days"] == {} and entry["left"] == {"tokens": 1}


@on_docker
def test_the_web_service_tells_what_was_used_and_raises_a_budget(measured: Hidden) -> None:
    assert measured.ask().stdout.startswith("200 ")
    measured.engine.home = measured.home
    service = Service(measured.engine)
    try:
        path = f"/api/sessions/{measured.name}"
        told = service.get(f"{path}/usage").json
        assert told["spent"]["tokens"] == 2 and told["budget"] == {"tokens": 1}
        assert (told["left"], told["unpriced"]) == ({"tokens": 0}, ["stub"])
        assert (told["broker"], told["hiddenKeys"]) == ("ready", [*REAL])
        assert told["prices"] == TABLE["prices"]["date"]
        raised = service.post(f"{path}/budget", {"budget": {"tokens": 9}})
        assert raised.json["left"] == {"tokens": 7} and raised.json["broker"] == "ready"
        assert asked(measured.engine, measured.proxy)["budget"] == {"tokens": 9}
        assert service.post(f"{path}/budget", {"budget": "5usd/day"}).json["budget"] == {
            "usd": 5, "tokens": 9, "per": "day"}
        put = service.post(f"{path}/settings", {"budget": {"tokens": 8}}, method="PUT")
        assert put.status == 200 and put.json["effective"]["budget"] == {"tokens": 8}
        for wrong in ({"budget": {"tokens": -9}}, {"budget": "5eur"}, {"budget": 5}, {}):
            assert service.post(f"{path}/budget", wrong).status == 400, wrong
        assert service.post(f"{path}/settings", {"budget": {"tokens": -9}},
                            method="PUT").status == 400

        whole = service.get("/api/usage").json
        (entry,) = [entry for entry in whole["sessions"] if entry["name"] == measured.name]
        assert entry["days"] == told["days"] and whole["day"] in entry["days"]
        assert (entry["budget"], entry["left"]) == ({"tokens": 8}, {"tokens": 6})
        restarted = measured.engine.run("restart", "-t", "1", measured.proxy)
        assert restarted.returncode == 0, restarted.stderr
        wait_for(lambda: service.get(f"{path}/usage").json["broker"] == "empty")
        service.post(f"{path}/stop", {})
        assert service.get(f"{path}/usage").json["broker"] == "down"
        assert service.post(f"{path}/budget", {"budget": ""}).json["left"] == {}
    finally:
        service.end()


@on_docker
def test_a_budget_takes_hidden_keys(engine: Engine, home: Path, project: Path, name: str) -> None:
    ran = engine.sandbox("run", "-n", name, "--budget", "5usd", "-x", "true")
    assert ran.returncode == 125 and "a budget holds for hidden keys alone" in ran.stderr
    assert name not in engine.sandbox("ps", "-q").stdout.split()
    assert engine.sandbox("run", "-n", name, "-x", "true").returncode == 0
    for words in (["run", "-n", name, "--budget", "5usd", "-x", "true"], ["budget", name, "5usd"],
                  ["usage", name]):
        refused = engine.sandbox(*words)
        assert refused.returncode and "--keys hidden" in refused.stderr, words


# --- The four agents ---


@pytest.fixture(scope="module")
def agents(engine: Engine, image: str, ca: Ca) -> Iterator[Hidden]:
    models = {"model": "anthropic/claude-sonnet-4-5", "small_model": "anthropic/claude-haiku-4-5"}
    agents = Hidden(engine, ca, image=image, env={"OPENCODE_CONFIG_CONTENT": json.dumps(models),
                                                  "GEMINI_MODEL": "gemini-2.5-pro"})
    yield agents
    agents.end()


def real_keys_in(agents: Hidden) -> list[str]:
    return [place for place, content in agents.places() for key in REAL.values()
            if key.encode() in content]


@on_docker
@pytest.mark.parametrize("agent", ONCE)
def test_an_agent_works_and_its_key_is_nowhere(agents: Hidden, agent: str) -> None:
    """A prompt without a terminal, looked at while its tool runs."""
    agents.requests()
    begun, go = (agents.project / unique_name() for _ in range(2))
    command = f"touch {begun}; until [ -e {go} ]; do sleep 0.1; done; echo hello"
    argv = agents.argv("-y", agent, "--", *ONCE[agent].split(), f"please run: {command}")
    with agents.engine.popen(*argv, **agents.where) as run:
        assert run.stdin
        run.stdin.close()  # some read it to its end first
        run.stdin = None
        wait_for(begun.exists, START_SECONDS)
        found = real_keys_in(agents)
        go.touch()
        out, err = run.communicate(timeout=120)
    assert found == []
    assert "pong tool" in out and "hello" in out, out + err
    sent = json.dumps([headers for method, path, headers, body in agents.requests()])
    assert any(key in sent for key in REAL.values())


@on_docker
@pytest.mark.parametrize("agent", ONCE)
def test_on_a_terminal_an_agent_works_and_its_key_is_nowhere(agents: Hidden, agent: str) -> None:
    prompt = unique_name()
    with agents.engine.pty(*agents.argv("-y", agent), **agents.where) as terminal:
        type_prompt(terminal, agent, prompt)
        wait_for(lambda: prompt in agents.requests_text(), START_SECONDS)
        assert real_keys_in(agents) == []


@on_docker
@pytest.mark.parametrize("agent", ONCE)
def test_before_each_prompt_of_an_agent_on_a_terminal_there_is_a_checkpoint(
        engine: Engine, image: str, ca: Ca, agent: str) -> None:
    models = {"model": "anthropic/claude-sonnet-4-5", "small_model": "anthropic/claude-haiku-4-5"}
    hidden = Hidden(engine, ca, image=image, checkpoint=True, env={
        "OPENCODE_CONFIG_CONTENT": json.dumps(models), "GEMINI_MODEL": "gemini-2.5-pro"})
    try:
        one, two = (hidden.project / unique_name() for _ in range(2))
        with engine.pty(*hidden.argv("-y", agent), **hidden.where) as terminal:
            terminal.expect(SCREENS[agent][0], timeout=START_SECONDS)
            for path in (one, two):
                type_words(terminal, f"please run: touch {path.name}", path.name)
                wait_for(path.exists, START_SECONDS)
            turns = json.loads(hidden.sandbox("log", hidden.name, "--json").stdout)
            assert [turn["what"] for turn in turns].count("prompt") == 2, turns
            undone = hidden.sandbox("undo", hidden.name, "-f")
            assert undone.returncode == 0, undone.stderr
            assert one.exists() and not two.exists()
    finally:
        hidden.end()
