"""Jobs on real engines: nothing is lost, order is kept, cancel reaches into the container."""

import concurrent.futures
import contextlib
import errno
import hashlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE, PYTHON, ROOT, Engine, everywhere, on_docker, write_config
from service import Service, free_port, wait_for
from test_engines import sleeping
from test_install import build_zipapp

SUPERVISOR = ROOT / "static" / "session" / "job.py"


def text_of(service: Service, job: object, stream: str = "") -> str:
    wanted = (stream,) if stream else ("stdout", "stderr")
    return "".join(data for name, data, _ in service.events(job) if name in wanted)


@everywhere
def test_a_command_streams_and_ends_with_its_status(service: Service, name: str) -> None:
    """What one stream has said is told before the other one says more."""
    service.create(name)
    wait = "until [ -e {} ]; do sleep 0.1; done"
    job = service.job(name, f"echo out; {wait.format('out')}; echo err >&2; {wait.format('err')}; "
                            "echo again; exit 7")
    assert (job["state"], job["kind"], job["exit"]) == ("running", "command", None)
    events = []
    for event in service.events(job):
        events.append(event)
        if event[0] in ("stdout", "stderr"):
            made = f"{service.engine.project}/{event[1].strip()}"
            service.engine.run("exec", name, "touch", made)
    told = [(name, data) for name, data, _ in events[1:-1]]
    assert told == [("stdout", "out\n"), ("stderr", "err\n"), ("stdout", "again\n")]
    assert events[0][0] == "job" and events[-1][0] == "end" and events[-1][1]["exit"] == 7
    job = service.ended(job)
    assert (job["state"], job["exit"], job["size"]) == ("ended", 7, 14)
    assert service.get(f"/api/sessions/{name}/jobs").json == [job]


@on_docker
def test_a_job_that_is_being_started_is_not_lost(service: Service, name: str) -> None:
    """Others ask for the jobs all the time."""
    service.create(name)
    path, over = f"/api/sessions/{name}/jobs", threading.Event()

    def watch() -> set[str]:
        states: set[str] = set()
        while not over.is_set():
            states |= {job["state"] for job in service.get(path).json}
            time.sleep(0.02)
        return states

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        states = pool.submit(watch)
        try:
            jobs = [service.ended(service.job(name, "exit 4")) for _ in range(10)]
        finally:
            over.set()
    assert [job["exit"] for job in jobs] == [4] * 10
    assert states.result() <= {"running", "ended"}


@everywhere
def test_cancel_ends_the_process_inside(service: Service, name: str) -> None:
    service.create(name)
    path = f"/api/sessions/{name}/jobs"
    polite = service.job(name,
                         "trap 'echo interrupted; exit 3' INT; echo ready; "
                         "while :; do sleep 0.1; done")
    stubborn = service.job(name, "trap '' INT TERM; echo ready; sleep 98765")
    for job in (polite, stubborn):
        next(event for event in service.events(job) if event[1] == "ready\n")
        assert service.request("DELETE", f"{path}/{job['id']}").status == 202
    polite, stubborn = service.ended(polite), service.ended(stubborn)
    assert (polite["state"], polite["exit"]) == ("cancelled", 3)
    assert stubborn["state"] == "cancelled" and stubborn["exit"] != 0
    wait_for(lambda: sleeping(service.engine, name, "98765") == 0)
    assert service.request("DELETE", f"{path}/{polite['id']}").status == 409


@everywhere
def test_kill_9_of_the_server_loses_nothing(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name,
                      "i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); sleep 0.01; done; "
                      "until [ -e go ]; do sleep 0.1; done; exit 5")
    seen = list(itertools.islice(service.events(job), 10))
    service.restart_after_kill()
    assert service.get(f"/api/sessions/{name}/jobs/{job['id']}").json["state"] == "running"
    service.engine.run("exec", name, "touch", f"{service.engine.project}/go")
    rest = list(service.events(job, seen[-1][2]))
    text = "".join(data for kind, data, _ in [*seen, *rest] if kind == "stdout")
    assert text == "".join(f"line {i}\n" for i in range(200))
    assert service.ended(job)["exit"] == 5


@on_docker
def test_a_hundred_megabytes_in_bounded_memory(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name, "yes 0123456789abcdef | head -c 100000000")
    before = service.resident_bytes()
    size = 0
    for kind, data, _ in service.events(job):
        size += len(data) if kind == "stdout" else 0
    assert size == 100_000_000
    assert service.resident_bytes() - before < 8_000_000
    folder = service.engine.home / "jobs" / name / job["id"]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1.01 * size


@on_docker
def test_bytes_are_kept_as_they_were_and_characters_are_whole(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name,
                      r"printf '\303'; sleep 0.2; printf '\244\n\377\000'; printf 'e\r\n' >&2")
    service.ended(job)
    assert text_of(service, job, "stdout") == "ä\n\ufffd\0"
    path = f"/api/sessions/{name}/jobs/{job['id']}/output"
    assert service.get(path + "?stream=stdout").body == b"\xc3\xa4\n\xff\0"
    assert service.get(path + "?stream=stderr").body == b"e\r\n"
    random = service.job(name,
                         "head -c 300000 /dev/urandom | tee /tmp/random; sha256sum /tmp/random >&2")
    service.ended(random)
    path = f"/api/sessions/{name}/jobs/{random['id']}/output"
    digest = hashlib.sha256(service.get(path + "?stream=stdout").body).hexdigest()
    assert text_of(service, random, "stderr").split()[0] == digest


@on_docker
def test_a_stream_is_taken_up_inside_a_character(service: Service, name: str) -> None:
    """Both streams write characters of four bytes, byte by byte in turn, each when the one before
    it was kept."""
    service.create(name)
    smile = [f"\\{byte:03o}" for byte in "😀".encode()] * 2
    each = [f"printf '{byte}' >&{stream}" for byte in smile for stream in (1, 2)]
    job = service.job(name, "".join(f"{write}; until [ -e {number} ]; do sleep 0.01; done; "
                                    for number, write in enumerate(each)))
    output = service.engine.home / "jobs" / name / job["id"] / "output"
    for number in range(len(each)):
        wait_for(lambda: output.stat().st_size > number)  # noqa: B023
        (service.engine.project / str(number)).touch()
    assert service.ended(job)["size"] == 16
    whole = list(service.events(job))
    assert [data for kind, data, _ in whole if kind == "stdout"] == ["😀", "😀"]
    for offset in range(17):
        rest = [(kind, data) for kind, data, _ in service.events(job, offset)][1:-1]
        assert rest == [(kind, data) for kind, data, id in whole[1:-1] if id > offset], offset


@on_docker
def test_what_alternates_costs_at_most_three_times_its_size(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name,
                      "i=0; while [ $i -lt 3000 ]; do printf o; printf e >&2; i=$((i+1)); done")
    assert service.ended(job)["size"] == 6000
    assert text_of(service, job, "stdout") == "o" * 3000
    assert text_of(service, job, "stderr") == "e" * 3000
    folder = service.engine.home / "jobs" / name / job["id"]
    assert (folder / "output").stat().st_size + (folder / "runs").stat().st_size <= 12_000


@on_docker
@pytest.mark.parametrize(
    "prompt",
    ["plain", 'it\'s "quoted" $HOME `id` $(id) \\ ; rm -rf / & | > <', "two\nlines\n\n",
     "{prompt} -ünïcode 日本", '[{"\\' * 100],
)
@pytest.mark.parametrize(
    "template", ["printf %s {prompt}", "printf '%s' \"{prompt}\"", "printf %s '{prompt}'",
                 'printf %s \\"{prompt}']
)
def test_a_prompt_is_one_word_whatever_it_holds(service: Service, name: str, template: str,
                                                prompt: str) -> None:
    service.create(name, agentPromptCommand=template)
    reply = service.post(f"/api/sessions/{name}/prompt", {"prompt": prompt})
    assert reply.status == 201, reply.body
    job = service.ended(reply.json)
    assert job["prompt"] == prompt
    prefix = '"' if "\\" in template else ""
    assert text_of(service, job) == prefix + prompt


@on_docker
def test_agent_mode_needs_its_template(service: Service, name: str) -> None:
    service.create(name)
    path = f"/api/sessions/{name}"
    reply = service.post(path + "/prompt", {"prompt": "hello"})
    assert reply.status == 409 and "agentPromptCommand" in reply.json["error"]["message"]
    reply = service.post(path + "/settings", {"agentPromptCommand": "echo hello"}, "PUT")
    assert reply.status == 400 and "{prompt}" in reply.json["error"]["message"]
    (service.engine.home / "sessions" / f"{name}.json").write_text('{"agentPromptCommand": "echo"}')
    reply = service.post(path + "/prompt", {"prompt": "hello"})
    assert reply.status == 409 and "{prompt}" in reply.json["error"]["message"]
    service.post(path + "/settings", {"agentPromptCommand": None, "env": {"A": "it's new"}}, "PUT")
    service.post(path + "/settings", {"agentPromptCommand": 'echo "$A: {prompt}"'}, "PUT")
    job = service.post(path + "/prompt", {"prompt": "hello"}).json
    service.ended(job)
    assert text_of(service, job) == "it's new: hello\n"


@on_docker
def test_the_known_agents_have_their_template(service: Service, name: str) -> None:
    for agent in ("claude", "gemini", "codex", "opencode"):
        session = service.create(f"{name}-{agent}", agent=agent)
        assert session["agent"] == agent and "{prompt}" in session["agentPromptCommand"]


@on_docker
def test_autostart_runs_at_every_start_and_is_a_job(service: Service, name: str) -> None:
    service.create(name, autostart="echo started; exit 4")
    job = service.ended(service.get(f"/api/sessions/{name}/jobs").json[0])
    assert (job["kind"], job["exit"], text_of(service, job)) == ("autostart", 4, "started\n")
    assert service.post(f"/api/sessions/{name}/stop").json["state"] == "exited"
    assert service.post(f"/api/sessions/{name}/command", {"command": "true"}).status == 409
    assert service.post(f"/api/sessions/{name}/start").json["state"] == "running"
    assert len(service.get(f"/api/sessions/{name}/jobs").json) == 2


def test_autostart_is_not_lost_with_a_service_that_is_killed(service: Service, name: str) -> None:
    script = "echo started >> started"
    started = service.engine.project / "started"
    for number in range(4):
        session = f"{name}-{number}"
        fields = {"name": session, "directory": str(started.parent), "autostart": script}
        threading.Thread(target=lambda: suppressed(service.post, "/api/sessions", fields)).start()  # noqa: B023
        running = ("ps", "--format", "{{.Names}}")

        def runs() -> bool:
            return session in service.engine.run(*running).stdout.split()  # noqa: B023

        if number == 0:  # it never hears that the container is there, unless we are too slow
            making = ["pgrep", "-P", str(service.pid), "-f", f" run -d .*{session}"]
            wait_for(lambda: not subprocess.run(  # noqa: B023
                making, stdout=subprocess.DEVNULL).returncode or runs())  # noqa: B023
            os.kill(service.pid, signal.SIGSTOP)
        wait_for(runs)
        time.sleep(0.03 * number)
        service.restart_after_kill()
        wait_for(lambda: service.get(f"/api/sessions/{session}").json.get("state") == "running")  # noqa: B023
        for _ in range(2):
            service.ended(service.job(session, "true"))
        wait_for(lambda: started.exists() and started.read_text())
        assert service.post(f"/api/sessions/{session}/stop").status == 200
        assert service.post(f"/api/sessions/{session}/start").status == 200
        service.ended(service.job(session, "true"))
        wait_for(lambda: started.read_text() == "started\n" * 2)
        started.unlink()


def suppressed(action: Any, *args: Any) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        action(*args)


@on_docker
def test_a_session_that_goes_takes_its_jobs_and_settings(service: Service, name: str) -> None:
    service.create(name, env={"A": "1"})
    service.ended(service.job(name, "echo $A"))
    assert service.request("DELETE", f"/api/sessions/{name}").status == 200
    assert not (service.engine.home / "jobs" / name).exists()
    assert not (service.engine.home / "sessions" / f"{name}.json").exists()
    assert service.get(f"/api/sessions/{name}").status == 404
    service.create(name)
    assert service.get(f"/api/sessions/{name}/jobs").json == []


@on_docker
def test_a_job_of_a_session_that_is_removed_ends(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name, "echo ready; sleep 1000")
    next(event for event in service.events(job) if event[1] == "ready\n")
    assert service.post(f"/api/sessions/{name}/stop").status == 200
    assert service.ended(job)["exit"] not in (0, None)


@on_docker
def test_a_killed_supervisor_is_said(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name, "echo ready; sleep 1000")
    next(event for event in service.events(job) if event[1] == "ready\n")
    os.kill(supervisor_of(service, job), 9)
    job = service.ended(job)
    assert job["state"] == "lost" and job["error"]


# --- The supervisor, a program of its own ---


def supervisor_of(service: Service, job: Any) -> int:
    """The process that supervises a job."""
    folder = os.fsencode(service.engine.home / "jobs" / job["session"] / job["id"])

    def has_folder(pid: int) -> bool:
        with suppress(OSError):  # others end meanwhile
            return folder in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return False

    def leaders() -> list[int]:
        pids = filter(has_folder, map(int, filter(str.isdigit, os.listdir("/proc"))))
        with suppress(ProcessLookupError):  # the process that has started it ends meanwhile
            return [pid for pid in pids if os.getsid(pid) == pid]
        return []

    # It leads a session a moment after the answer; until it has become the engine's client, its
    # child is another of that command line.
    (pid,) = wait_for(leaders)
    return int(pid)


def supervised(folder: Path, limit_bytes: int, *command: str, options: Any = ()) -> Any:
    """Supervise a command without the service, and wait until all that was started has ended."""
    for name in ("output", "runs", "lock", "job.json.new"):
        (folder / name).touch()
    (folder / "status").write_text(" " * 512)
    argv = [PYTHON, "-I", "-S", *options, SUPERVISOR, folder, str(limit_bytes), *command]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)


def test_the_supervisor_imports_little(tmp_path: Path) -> None:
    """As long as a job runs, so does its supervisor."""
    def imported(stderr: str) -> set[str]:
        return set(re.findall(r"^import time: .*\| +(\S+)$", stderr, re.MULTILINE))

    least = [PYTHON, "-I", "-S", "-X", "importtime", "-c", "import fcntl, os, select, sys, time"]
    allowed = imported(subprocess.run(least, capture_output=True, text=True, check=True).stderr)
    said = supervised(tmp_path, 100, "sh", "-c", "echo out; kill $$", options=("-X", "importtime"))
    assert (tmp_path / "output").read_text() == "out\n"
    assert json.loads((tmp_path / "status").read_text())["exit"] == 128 + 15
    assert {"fcntl", "os"} <= imported(said.stderr) <= allowed


def test_output_over_the_limit_is_dropped_and_said(tmp_path: Path) -> None:
    wait = f"until [ -s {tmp_path}/output ]; do sleep 0.01; done"
    supervised(tmp_path, 8, "sh", "-c", f"echo out; {wait}; echo over the limit; echo; exit 3")
    assert (tmp_path / "output").read_text() == "out\n"
    status = json.loads((tmp_path / "status").read_text())
    assert status["exit"] == 3
    assert status["error"] == "only the first 4 bytes of the output were kept"


def test_a_program_that_is_missing_is_said(tmp_path: Path) -> None:
    supervised(tmp_path, 100, '/no/"such"\n\\ü')
    status = json.loads((tmp_path / "status").read_text())
    assert (status["exit"], status["error"]) == (125, "/no/?such????: No such file or directory")


def test_the_supervisor_is_detached_and_holds_little(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name, "echo ready; sleep 1000")
    next(event for event in service.events(job) if event[1] == "ready\n")
    process = Path(f"/proc/{supervisor_of(service, job)}")
    folder = str(service.engine.home / "jobs" / name / job["id"])
    words = process.joinpath("cmdline").read_text().split("\0")
    assert words[: words.index(folder)][-3:] == ["-I", "-S", "-"]
    assert not [word for word in words if "sandbox.py" in word]
    fields = process.joinpath("stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != service.pid and int(fields[3]) != os.getsid(service.pid)
    held = [os.readlink(path).removeprefix(folder) for path in process.joinpath("fd").iterdir()]
    assert sorted(re.sub(r"\d+", "N", path) for path in held) == [
        "/dev/null", "/dev/null", "/dev/null", "/lock", "/output", "/runs", "/status", "pipe:[N]",
        "pipe:[N]"]
    (client,) = process.joinpath("task", process.name, "children").read_text().split()
    held = [os.readlink(path) for path in Path(f"/proc/{client}/fd").iterdir()]
    assert os.readlink(f"/proc/{client}/fd/0") == "/dev/null"
    assert not [path for path in held if folder in path]


@on_docker
def test_a_service_from_before_an_upgrade_starts_jobs(service: Service, name: str) -> None:
    """It calls `sandbox __job`, and gives the command in a file."""
    service.create(name)
    like = service.job(name, "echo ready; sleep 98764")
    process = Path(f"/proc/{supervisor_of(service, like)}")
    folder = service.engine.home / "jobs" / name / "00000000000-aaaaaaaaaa"
    shutil.copytree(folder.with_name(like["id"]), folder)
    data = json.loads((folder / "job.json").read_text())
    words = process.joinpath("cmdline").read_text().rstrip("\0").split("\0")
    argv = [word.replace(data["tag"], "bbbbbbbbbb") for word in words[words.index("docker") :]]
    (folder / "job.json").unlink()
    (folder / "job.json.new").write_text(json.dumps({**data, "tag": "bbbbbbbbbb", "argv": argv}))
    for file in ("output", "runs"):
        (folder / file).write_text("")
    environ = process.joinpath("environ").read_text().split("\0")
    script = next(item for item in environ if item.startswith("SANDBOX_ENV=")).partition("=")[2]
    null = subprocess.DEVNULL
    subprocess.run(service.engine.sandbox_argv("__job", str(folder)), check=True,
                   stdin=null, stdout=null, stderr=null,
                   **service.engine.where(env={"SANDBOX_ENV": script}))
    job = {**like, "id": folder.name}
    next(event for event in service.events(job) if event[1] == "ready\n")
    path = f"/api/sessions/{name}/jobs/{folder.name}"
    assert service.get(path).json["state"] == "running"
    assert service.request("DELETE", path).status == 202
    assert service.ended(job)["state"] == "cancelled"
    assert service.get(f"/api/sessions/{name}/jobs/{like['id']}").json["state"] == "running"


@on_docker
def test_a_zipapp_starts_jobs_also_when_its_file_is_replaced(
    engine: Engine, project: Path, home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zipapp = build_zipapp(engine.area / "sandbox.pyz")
    monkeypatch.setattr(engine, "sandbox_argv", lambda *args: [PYTHON, "-I", str(zipapp), *args])
    service = Service(engine)
    service.create(name)
    for _ in range(2):
        job = service.ended(service.job(name, "echo out; exit 3"))
        assert (job["exit"], text_of(service, job)) == (3, "out\n")
        zipapp.write_text("not any more")


@on_docker
def test_files_that_are_no_jobs_break_nothing(service: Service, name: str) -> None:
    service.create(name)
    job = service.ended(service.job(name, "echo out"))
    folder = service.engine.home / "jobs" / name
    deep = "[" * 100_000
    broken = {"job.json": ["", "[]", "5", '{"job": []}', '{"job": {}}', '{"job": {"kind": 1}}',
                           deep, "\udcff"],
              "status": ["5", "[]", '{"exit": "x"}', '{"exit": NaN}', deep, "nonsense"]}
    lost = []
    for file, texts in broken.items():
        for number, text in enumerate(texts):
            id = f"{number}-{file.partition('.')[0]}"
            shutil.copytree(folder / job["id"], folder / id)
            (folder / id / file).write_text(text, errors="surrogateescape")
            lost += [id] if file == "status" else []
    (folder / "file").touch()
    rows = {row["id"]: row for row in service.get(f"/api/sessions/{name}/jobs").json}
    assert rows.pop(job["id"]) == job and sorted(rows) == sorted(lost)
    assert {row["state"] for row in rows.values()} == {"lost"}
    assert next(row for row in service.get("/api/sessions?tail=10").json if row["name"] == name)
    for id in (path.name for path in folder.iterdir()):
        known = id in (job["id"], *lost)
        expected = {"GET": 200 if known else 404, "DELETE": 409 if known else 404}
        for method, status in expected.items():
            assert service.request(method, f"/api/sessions/{name}/jobs/{id}").status == status, id
    assert "Traceback" not in service.said_at_the_end()


@on_docker
def test_a_job_without_all_its_files_costs_no_descriptor(service: Service, name: str) -> None:
    service.create(name)
    job = service.ended(service.job(name, "echo out"))
    path = f"/api/sessions/{name}/jobs/{job['id']}"
    folder = service.engine.home / "jobs" / name / job["id"]
    before = wait_for(service.resources)
    (folder / "runs").unlink()
    for what in ("events", "output"):
        assert {service.get(f"{path}/{what}").status for _ in range(25)} == {404}
    assert {service.request("HEAD", f"{path}/events").status for _ in range(5)} == {404}
    wait_for(lambda: service.resources() <= before)


@on_docker
def test_a_job_whose_folder_goes_while_it_is_followed_ends(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name, "echo ready; sleep 1000")
    events = service.events(job)
    next(event for event in events if event[1] == "ready\n")
    shutil.rmtree(service.engine.home / "jobs" / name / job["id"])
    kind, last, _ = list(events)[-1]
    assert kind == "end" and last["state"] == "lost" and "removed" in last["error"]
    assert service.get(f"/api/sessions/{name}/jobs/{job['id']}/events").status == 404
    assert "Traceback" not in service.said_at_the_end()


@on_docker
def test_readers_that_took_nothing_leave_no_memory_behind(service: Service, name: str) -> None:
    service.create(name)
    job = service.ended(service.job(name, "tr '\\0' '\\001' </dev/zero | head -c 20000000"))
    path = f"/api/sessions/{name}/jobs/{job['id']}/events"
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {service.cookie}\r\n\r\n"
    before = service.resources(), service.resident_bytes()
    with ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
            sock.sendall(request.encode())
            assert sock.recv(1) == b"H"
        wait_for(lambda: service.resources()[0] >= 300)
        wait_for(service.is_idle)
    wait_for(lambda: service.resources() <= before[0])
    wait_for(lambda: service.resident_bytes() - before[1] < 12_000_000)


@on_docker
def test_two_servers_see_the_same_jobs(service: Service, name: str) -> None:
    service.create(name)
    other = Service(service.engine)
    job = other.job(name, "sleep 0.5; echo done")
    assert text_of(service, job) == text_of(other, job) == "done\n"
    other.end()


@on_docker
def test_settings_are_checked_and_in_force_at_the_next_command(service: Service, name: str) -> None:
    service.create(name)
    path = f"/api/sessions/{name}/settings"
    cases: list[dict[str, object]] = [
        {"env": {"1A": "x"}},
        {"env": {"A": 1}},
        {"env": []},
        {"network": "closed"},
        {"nonsense": 1},
        {"autostart": 5},
        {"env": {"A": "\0"}},
        {"env": {"A": "x" * 200_000}},
        {"network": {"allow": "a"}},
        {"network": {"deny": ["a"]}},
    ]
    for wrong in cases:
        reply = service.post(path, wrong, "PUT")
        assert reply.status == 400 and reply.json["error"]["message"], wrong
    assert service.get(path).json["settings"]["env"] is None
    reply = service.post(path, {"env": {"A": "two\nlines"}, "network": "none"}, "PUT").json
    assert reply["effective"]["network"] == "none"
    assert reply["recreate"] == ["network: it has open, asked for is none"]
    assert reply["configured"]["network"] == "open"
    job = service.job(name, 'echo "$A"')
    service.ended(job)
    assert text_of(service, job) == "two\nlines\n"
    assert service.post(f"/api/sessions/{name}/recreate").json["recreate"] == []
    job = service.ended(service.job(name, "ls /sys/class/net"))
    assert text_of(service, job) == "lo\n"
    stored = service.engine.home / "sessions" / f"{name}.json"
    assert stored.stat().st_mode & 0o777 == 0o600
    assert json.loads(stored.read_text())["network"] == "none"


@on_docker
def test_a_run_sees_the_settings_of_the_web_page(engine: Engine, service: Service,
                                                 name: str) -> None:
    write_config(engine.home, env={"A": "configured", "B": "configured", "C": "configured"})
    service.create(name)
    settings = {"env": {"A": "two\nlines", "B": "web"}, "autostart": 'echo "$B" >/tmp/started'}
    assert service.post(f"/api/sessions/{name}/settings", settings, "PUT").status == 200
    show = ("-x", 'echo "$A $B $C"')
    for options, expected in (((), "two\nlines web configured\n"),
                              (("-e", "B=flag"), "two\nlines flag configured\n")):
        answer = engine.sandbox("run", "-n", name, *options, *show)
        assert (answer.returncode, answer.stdout) == (0, expected), answer.stderr
    assert service.post(f"/api/sessions/{name}/stop").status == 200
    # starts it, and so the script
    assert engine.sandbox("run", "-n", name, "-x", "true").returncode == 0
    wait_for(lambda: engine.sandbox("run", "-n", name, "-x", "cat /tmp/started").stdout == "web\n")
    stored = engine.home / "sessions" / f"{name}.json"
    stored.write_text("[]")
    answer = engine.sandbox("run", "-n", name, *show)
    assert answer.returncode == 1 and str(stored) in answer.stderr and answer.stdout == ""


@on_docker
def test_the_list_says_which_sessions_can_be_prompted(engine: Engine, service: Service,
                                                      name: str) -> None:
    write_config(engine.home, runs={"own": {"agentPromptCommand": "ask {prompt}"}})
    fields: dict[str, dict[str, str]] = {"agent": {"agent": "codex"}, "own": {"profile": "own"},
                                         "set": {}, "bare": {}}
    for end, more in fields.items():
        service.create(f"{name}-{end}", **more)
    service.post(f"/api/sessions/{name}-set/settings", {"agentPromptCommand": "ask {prompt}"},
                 "PUT")

    def modes() -> dict[str, bool]:
        rows = service.get("/api/sessions").json
        return {row["name"].removeprefix(f"{name}-"): row["agentMode"] for row in rows
                if row["name"].startswith(name)}

    assert modes() == {"agent": True, "own": True, "set": True, "bare": False}
    service.post(f"/api/sessions/{name}-agent/settings", {"agentPromptCommand": ""}, "PUT")
    assert not modes()["agent"]
    for end in modes():  # what the list says is what a prompt meets
        reply = service.post(f"/api/sessions/{name}-{end}/prompt", {"prompt": "x"})
        assert reply.status == (201 if modes()[end] else 409)


SPEC: dict[str, object] = {
    "image": IMAGE, "directory": "/tmp", "workdir": "/tmp", "volumes": [], "ports": [],
    "memory": None, "cpus": None, "pidsLimit": None, "network": "open", "sources": ["/tmp"],
}


def created(flags: object = None, **spec: object) -> str:
    return json.dumps({"spec": {**SPEC, **spec}, "flags": flags or {}})


FOREIGN: dict[str, dict[str, str]] = {
    "nothing else": {},
    "deep": {"created": "[" * 100_000},
    "deep inside": {"created": '{"spec":' * 1000},
    "no object": {"created": "[]"},
    "ports": {"created": created(ports=5)},
    "no list": {"created": created(ports=None)},
    "a port": {"created": created(ports=["5"])},
    "network": {"created": created(network={"allow": 5}), "network": "allow"},
    "no network": {"created": created().replace('"network"', '"x"')},
    "no rules": {"created": created(), "network": "allow"},
    "flags": {"created": created(flags={"memory": []})},
    "user": {"created": created(), "user": "--privileged"},
    "sources": {"created": created(sources=5)},
    "a source": {"created": created(sources="/")},
    "a source too few": {"created": created(volumes=["/tmp:/x"])},
    "no source for one": {"created": created(sources=["/tmp", "/tmp"])},
    "missing lists": {"created": created().replace('"volumes"', '"x"').replace('"ports"', '"y"')},
    "a line of Unicode": {"created": "\x85", "session": "a\x85b\u2028c", "agent": "\x85"},
    "directory": {"created": created(directory=["x"])},
    "characters": {"created": "\udcff", "agent": "\x1b]0;x\x07", "profile": "\r\n"},
}


FOR_WHOLE_ONES: list[tuple[str, str, object]] = [
    ("settings", "GET", None), ("settings", "PUT", {"env": {"A": "b"}}),
    ("network", "GET", None), ("network", "POST", {"allow": "a.test"}),
    ("start", "POST", None), ("recreate", "POST", None),
    ("command", "POST", {"command": "true"}), ("prompt", "POST", {"prompt": "x"}),
]


def test_foreign_containers_with_our_labels_are_listed_as_broken(
    engine: Engine, service: Service, name: str
) -> None:
    service.create(name)
    names = {label: f"{name}-{number}" for number, label in enumerate(FOREIGN)}
    for label, labels in FOREIGN.items():
        every = {"session": names[label], "user": "0:0", **labels}
        options = [f"--label=sandbox.{key}={value}" for key, value in every.items()]
        # One of them runs.
        verb = ["run", "-d"] if label == "ports" else ["create"]
        answer = engine.run(*verb, "--name", names[label], *options, IMAGE, "sleep", "1000")
        assert answer.returncode == 0, (label, answer.stderr)
    rows = {row["name"]: row for row in service.get("/api/sessions?tail=10").json}
    assert rows[name]["state"] == "running"
    states = {label: rows[other]["state"] for label, other in names.items()}
    assert states == dict.fromkeys(FOREIGN, "broken")
    listed = engine.sandbox("ps")
    assert listed.returncode == 0 and listed.stdout.count(" broken ") >= len(FOREIGN)
    assert "\x1b" not in listed.stdout
    for label, other in names.items():
        path = f"/api/sessions/{other}"
        assert service.get(path).json["state"] == "broken", label
        if engine.id != "docker" and label != next(iter(FOREIGN)):
            continue  # an engine has given the labels: what is then refused is one thing for all
        statuses = {}
        for end, method, body in FOR_WHOLE_ONES:
            reply = service.post(f"{path}/{end}", body, method)
            statuses[f"{method} {end}"] = reply.status
            assert re.search("whole session|no allowlist", reply.json["error"]["message"])
        assert set(statuses.values()) == {409}, (label, statuses)
        assert service.get(f"{path}/jobs").json == service.get(f"{path}/terminals").json == []
        answer = engine.sandbox("run", "-n", other, "-x", "true")
        assert answer.returncode == 125 and "sandbox rm" in answer.stderr, (label, answer.stderr)
    assert service.ended(service.job(name, "true"))["exit"] == 0
    last = names.popitem()[1]
    for other in names.values():
        assert service.request("DELETE", f"/api/sessions/{other}").status == 200
    assert engine.sandbox("rm", last).returncode == 0
    assert not {row["name"] for row in service.get("/api/sessions").json} & {*names.values(), last}
    assert "Traceback" not in service.said_at_the_end()


def test_a_container_that_cannot_be_created_again_stays(engine: Engine, service: Service,
                                                        name: str) -> None:
    service.create(name)
    assert service.ended(service.job(name, "touch /tmp/mark"))["exit"] == 0
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        write_config(engine.home, ports=[f"{taken.getsockname()[1]}:80"])
        reply = service.post(f"/api/sessions/{name}/recreate")
        assert reply.status == 502 and reply.json["error"]["message"], reply.body
    assert engine.names().count(name) == 1
    assert service.post(f"/api/sessions/{name}/start").json["state"] == "running"
    assert service.ended(service.job(name, "ls /tmp/mark"))["exit"] == 0
    assert service.post(f"/api/sessions/{name}/recreate").json["recreate"] == []
    assert service.ended(service.job(name, "ls /tmp/mark"))["exit"] == 1
    assert not [other for other in engine.names() if other.startswith(f"{name}.")]


@on_docker
def test_profiles_are_listed_and_used(engine: Engine, service: Service, name: str) -> None:
    write_config(engine.home,
                 runs={"work": {"yolo": "cx", "env": {"A": "work"}}, "bad": {"yolo": "nope"}})
    rows = {row["name"]: row for row in service.get("/api/profiles").json["profiles"]}
    assert rows["work"]["agent"] == "codex" and rows["bad"]["error"]
    assert service.create(name, profile="work")["agent"] == "codex"
    job = service.ended(service.job(name, "echo $A"))
    assert text_of(service, job) == "work\n"


@on_docker
def test_the_tail_of_a_running_job_is_in_the_list(service: Service, name: str) -> None:
    service.create(name)
    service.job(name, "echo one; echo two; sleep 1000")

    def last() -> object:
        row = next(row for row in service.get("/api/sessions?tail=100").json if row["name"] == name)
        return row["jobs"] == 1 and row["last"]["tail"] == "one\ntwo\n"

    wait_for(last)


@on_docker
def test_a_full_disk_is_said_and_the_status_is_there(service: Service, name: str) -> None:
    service.create(name)
    jobs = service.engine.home / "jobs"
    jobs.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", jobs], check=True)
    try:
        job = service.ended(service.job(name, "head -c 3000000 /dev/zero | tr '\\0' x; exit 6"))
        assert (job["state"], job["exit"]) == ("ended", 6) and "No space left" in job["error"]
        output = service.get(f"/api/sessions/{name}/jobs/{job['id']}/output").body
        assert output == b"x" * job["size"]
        reply = service.post(f"/api/sessions/{name}/command", {"command": "true"})
        assert reply.status == 507 and reply.json["error"]["hint"]
        assert service.get(f"/api/sessions/{name}/jobs").json[-1] == job
    finally:
        # Lazily: who has answered may not have closed all of its files yet.
        subprocess.run(["umount", "--lazy", jobs], check=True)


def files_in(folder: Path) -> list[Path]:
    """All but locks and the server's own, which come when it has started."""
    files = sorted(path for path in folder.rglob("*")
                   if path.is_file() and path.parent.name != "web")
    return [path for path in files if path.suffix != ".lock"]


@on_docker
def test_on_a_full_disk_nothing_is_half_written(engine: Engine, service: Service,
                                                name: str) -> None:
    service.create(name, env={"A": "before"}, autostart="true")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", engine.home / "jobs"],
                   check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", engine.home / "sessions"],
                   check=True)
    try:
        for folder in ("jobs", "sessions"):
            subprocess.run(["head", "-c", "60000", "/dev/zero"],
                           stdout=(engine.home / folder / "filler").open("wb"))
        stored = engine.home / "sessions" / f"{name}.json"
        stored.write_text('{"autostart": "true"}')
        before = files_in(engine.home)
        requests = {"settings": ("PUT", {"env": {"A": "x" * 9000}}),
                    "command": ("POST", {"command": "true"}),
                    "stop": ("POST", {}), "start": ("POST", {})}
        statuses = {}
        for end, (method, body) in requests.items():
            reply = service.post(f"/api/sessions/{name}/{end}", body, method)
            statuses[end] = reply.status
            assert reply.status == 200 or reply.json["error"]["hint"], reply.body
        assert statuses == {"settings": 507, "command": 507, "stop": 200, "start": 507}
        body = {"name": f"{name}-2", "directory": str(engine.project), "env": {"A": "x" * 9000}}
        assert service.post("/api/sessions", body).status == 507
        assert service.get(f"/api/sessions/{name}-2").status == 404
        assert files_in(engine.home) == before
        assert stored.read_text() == '{"autostart": "true"}'
    finally:
        for folder in ("jobs", "sessions"):
            subprocess.run(["umount", "--lazy", engine.home / folder], check=True)
    service.ended(service.job(name, "test $A = before"))


@on_docker
def test_words_in_a_message_are_not_taken_for_its_meaning(service: Service, name: str) -> None:
    """A full disk is known by the number of its error, whatever a name in a message says."""
    body = {"name": name, "directory": str(service.engine.project), "profile": "plain"}
    plain = service.post("/api/sessions", body)
    named = service.post("/api/sessions", {**body, "profile": os.strerror(errno.ENOSPC)})
    assert plain.status == named.status != 507
    assert plain.json["error"]["code"] == named.json["error"]["code"]


def test_a_proxy_is_no_session(engine: Engine, service: Service, name: str) -> None:
    service.create(name, network={"allow": []})
    answer = engine.run("ps", "--filter", f"label=sandbox.proxy={name}", "--format", "{{.Names}}")
    path = f"/api/sessions/{answer.stdout.strip()}"
    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/stop"), ("PUT", "/settings")):
        reply = service.post(path + end, method=method)
        assert (reply.status, reply.json["error"]["code"]) == (404, "not_found"), (method, end)
        assert "is the proxy of the session" in reply.json["error"]["message"]


@on_docker
def test_of_two_that_create_one_name_the_second_is_told(service: Service, name: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        body = {"name": name, "directory": str(service.engine.project)}
        replies = list(pool.map(lambda _: service.post("/api/sessions", body).status, range(4)))
    assert sorted(replies) == [201, 409, 409, 409]
