"""Know when to come back: a turn that ends, an agent that waits, a refusal, an error, told to the
person's own command and to pages."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page
from conftest import PYTHON, Engine, on_docker, write_config
from fuzz import AGENTS, STREAMS, streams
from network import proxy_of
from service import Service, wait_for
from test_browser import open_screen, permit, watched

import sandbox
import sandbox_web
from sandbox_web import Calls, last_words

# A command that writes each event into a file of its own, and tells how many of it run.
PROGRAM = f"""#!{PYTHON}
import os, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
event = sys.stdin.read()
name = f"{{folder}}/{{time.time_ns()}}"
with open(name + ".part", "w") as file:
    file.write(event)
os.rename(name + ".part", name + ".json")
"""


class Person:
    """Whom the service and `run` tell: a real program of the host, by its path."""

    def __init__(self, engine: Engine, then: str = "") -> None:
        self.folder = engine.directory()
        self.program = self.folder / "tell me"
        self.program.write_text(PROGRAM + then)
        self.program.chmod(0o755)

    def told(self) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob("*.json"), key=lambda path: int(path.stem))
        return [json.loads(path.read_text()) for path in files]

    def hears(self, what: str, **more: object) -> dict[str, Any]:
        """Wait until an event of a kind has come, with these fields."""
        def found() -> dict[str, Any] | None:
            return next((event for event in self.told() if event["what"] == what
                         and event.items() >= more.items()), None)

        event: dict[str, Any] = wait_for(found)
        assert event.keys() == {"session", "what", "turn", "status", "text"}
        return event


@pytest.fixture
def person(engine: Engine, home: Path) -> Person:
    person = Person(engine)
    write_config(home, notify=[str(person.program)])
    return person


def prompt(service: Service, name: str, text: str = "go") -> Any:
    return service.post(f"/api/sessions/{name}/prompt", {"prompt": text}).json


# --- The command, by the web service ---


@on_docker
@pytest.mark.parametrize("agent", AGENTS)
def test_a_turn_that_ends_is_told_with_what_the_agent_says_last(
    service: Service, person: Person, name: str, agent: str
) -> None:
    """As the real agent has printed it, with a line of stderr amid one of its own."""
    project = service.engine.project
    shutil.copy(STREAMS / f"{agent}.jsonl", project)
    program = project / agent
    program.write_text(f"#!/bin/sh\nhead -c -20 {project}/{agent}.jsonl; sleep 0.2\n"
                       f"echo noise >&2; sleep 0.2\ntail -c 20 {project}/{agent}.jsonl\n")
    program.chmod(0o755)
    service.create(name, agent=agent, env={"PATH": f"{project}:/usr/bin:/bin"})
    job = prompt(service, name)
    event = person.hears("turn")
    assert (event["session"], event["turn"], event["status"]) == (name, job["id"], 0)
    if agent == "gemini":
        assert event["text"].startswith("pong tool {")
    else:
        assert event["text"] == "apt"  # the last line of its answer


@on_docker
def test_a_turn_that_fails_is_told_and_one_that_is_cancelled_is_not(
    service: Service, person: Person, name: str
) -> None:
    noise = r"printf '\033[31mno \033]0;t\007k\a\tey\033[0m\n\n' >&2"
    service.create(name, agentPromptCommand=f"{noise}; sleep {{prompt}}; exit 3")
    job = prompt(service, name, "600")
    path = f"/api/sessions/{name}/jobs/{job['id']}"
    wait_for(lambda: service.get(f"{path}/output").body)
    assert service.request("DELETE", path).status == 202
    service.ended(job)
    failed = prompt(service, name, "0")
    event = person.hears("error")
    assert event == {"session": name, "what": "error", "turn": failed["id"], "status": 3,
                     "text": "no k? ey"}
    assert [event["turn"] for event in person.told()] == [failed["id"]]


def test_a_turn_is_told_once_also_by_the_server_after_one_that_was_killed(
    service: Service, person: Person, name: str
) -> None:
    waiting = "until [ -e /tmp/go ]; do sleep 0.1; done"
    service.create(name, agentPromptCommand=f"{waiting}; echo {{prompt}}")
    prompt(service, name, "the end")
    service.restart_after_kill()
    other = Service(service.engine)
    service.job(name, "touch /tmp/go")
    person.hears("turn", text="the end")
    prompt(service, name, "second")
    person.hears("turn", text="second")
    other.end()
    assert [event["text"] for event in person.told()] == ["the end", "second"]


GO = "until [ -e /tmp/go ]; do sleep 0.1; done"


@on_docker
def test_an_agent_that_waits_in_a_terminal_is_told_and_titles_and_keys_are_not(
    service: Service, person: Person, name: str
) -> None:
    service.create(name)
    with service.terminal(name) as terminal:
        terminal.type("printf '\\007'; echo ra$(:)ng\r")  # as a shell that cannot complete
        terminal.expect("rang")
        terminal.type(f"{GO}; printf '\\033]0;a title\\007\\033]9;4;1;50\\007\\033]777;no';"
                      " sleep 1; printf 'tify;Title;it is done\\033\\\\'\r")
        service.job(name, "touch /tmp/go")
        event = person.hears("waits")
        assert event["text"] == "it is done" and event["status"] is None
        assert event["turn"] == terminal.hello["id"]
        terminal.type("sleep 4; printf '\\007'\r")
        person.hears("waits", text="the terminal rang its bell")
    assert [event["what"] for event in person.told()] == ["waits", "waits"]


def test_an_agent_that_ends_on_a_terminal_is_told_and_one_that_is_closed_is_not(
    service: Service, person: Person, name: str
) -> None:
    program = service.engine.project / "claude"
    program.write_text("#!/bin/sh\necho here; read line; exit $line\n")
    program.chmod(0o755)
    service.create(name, agent="claude", env={"PATH": f"{service.engine.project}:/usr/bin:/bin"})
    with service.terminal(name, "run=agent") as terminal:
        terminal.expect("here")
        path = f"/api/sessions/{name}/terminals/{terminal.hello['id']}"
        assert service.request("DELETE", path).status == 200
    ids = []
    for status in ("0", "4"):
        with service.terminal(name, "run=agent") as terminal:
            terminal.expect("here")
            terminal.type(f"{status}\r")
            terminal.message("exit")
            ids.append(terminal.hello["id"])
    person.hears("end", turn=ids[0], status=0)
    person.hears("error", turn=ids[1], status=4)
    assert len(person.told()) == 2


def test_a_terminals_calls_are_found_wherever_its_output_is_cut() -> None:
    class Kept(Calls):
        def tell(self, what: str, text: str, status: int | None = None) -> None:
            told.append(text)

    rang = "the terminal rang its bell"
    cases = {b"\x1b]0;title\a \x1b[1mbold\x1b]8;;http://x\x1b\\link\x1b]9;4;1;50\a": [],
             b"\x1b]9;it's \xc3\xbc\a": ["it's ü"], b"\x1b]777;notify;Title;a;b\x1b\\": ["a;b"],
             b"\x1b]777;notify;Title\a": ["Title"], b"\x1b]0;cut off\x1b[m a\ab": [rang],
             b"\x1b]" + 5000 * b"x" + b"\x1b[m\a": [rang], b"\x1b\a": [rang]}
    for output, wanted in cases.items():
        for size in (*range(1, 30), len(output)):
            told: list[str] = []
            calls = Kept(None)  # type: ignore[arg-type]
            for at in range(0, len(output), size):
                calls.hear(output[at : at + size])
            assert told == wanted, (output, size)
            assert len(calls.rest) <= 4100


def test_no_stream_keeps_a_turn_from_being_told() -> None:
    for stream, _ in streams(400, seed=3):
        for agent in AGENTS:
            event = sandbox.news("s", "turn", last_words(stream, agent, failed=False))
            assert event["text"].isprintable() and len(event["text"].encode()) <= 1200


@on_docker
def test_a_flood_of_calls_starts_few_commands(service: Service, person: Person, name: str) -> None:
    service.create(name)
    with service.terminal(name) as terminal:
        terminal.type(f"{GO}; for i in $(seq 3000); do printf '\\033]9;call %s\\007' $i; done;"
                      " head -c 100000 /dev/zero | tr '\\0' '\\a'; sleep 1;"
                      " printf '\\033]9;last\\007'; echo do$(:)ne\r")
        service.job(name, "touch /tmp/go")
        terminal.expect("done")
        person.hears("waits", text="last")
    assert 2 <= len(person.told()) < 10
    assert service.get("/api/news").json["news"][-1]["text"] == "last"
    assert len(service.get("/api/news").json["news"]) == 1


def readers(engine: Engine, name: str) -> list[str]:
    """The processes that read what a session's proxy refuses."""
    proxy, found = proxy_of(engine, name), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            found += [path.parent.name] if proxy in words and "-f" in words else []
    return found


@on_docker
def test_a_server_that_ends_leaves_no_reader_of_refusals(service: Service, name: str) -> None:
    service.create(name, network={"allow": []},
                   agentPromptCommand="until [ -e {prompt} ]; do sleep 1; done")
    assert service.post(f"/api/sessions/{name}/prompt", {"prompt": "go"}).status == 201
    wait_for(lambda: readers(service.engine, name))
    service.process.terminate()
    assert service.process.wait(60) == 0
    wait_for(lambda: not readers(service.engine, name))


def test_what_is_kept_of_calls_goes_with_them(monkeypatch: pytest.MonkeyPatch,
                                              tmp_path: Path) -> None:
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path))
    monkeypatch.setattr(sandbox_web, "PAUSE_SECONDS", 0.01)
    news = sandbox_web.News()
    for number in range(20):
        news.tell(sandbox.Session(f"s{number % 5}", "running", {}), "end", "text")
    wait_for(lambda: not news.waiting)
    assert not news.turns and len(news.last) == 5


def test_a_refusal_is_told_while_a_turn_goes_on_and_no_page_is_open(
    service: Service, person: Person, name: str
) -> None:
    template = "until wget -q http://refused.example/ || [ -e {prompt} ]; do sleep 1; done; false"
    service.create(name, network={"allow": []}, agentPromptCommand=template)
    before = service.resources()[1]
    job = prompt(service, name, "/tmp/go")
    event = person.hears("refused")
    assert event["text"] == "refused.example port 80: no rule allows it"
    service.job(name, "touch /tmp/go")
    service.ended(job)
    person.hears("error", turn=job["id"])
    assert [event["what"] for event in person.told()] == ["refused", "error"]
    wait_for(lambda: service.resources()[1] <= before)  # nobody reads the log any more
    service.request("DELETE", f"/api/sessions/{name}")


FAILING = {
    "hangs": ("open(name + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(600)",
              "did not answer within 10 seconds"),
    "fails": ("sys.exit('so\\n\\033[31mno phone')", "ended with status 1: ?[31mno phone"),
    "floods": ("while True: print('x' * 9999)", "ended with status 137: xxx"),
    "missing": ("", "/no/such/program: No such file or directory"),
    "misspelt": ("", "notify: [] is neither a command line nor a list of words"),
}


@on_docker
@pytest.mark.parametrize("case", FAILING)
def test_a_command_that_fails_is_logged_and_harms_nothing(engine: Engine, home: Path, project: Path,
                                                          name: str, case: str) -> None:
    then, logged = FAILING[case]
    person = Person(engine, then)
    service = Service(engine)
    service.create(name, agentPromptCommand=f"{GO}; echo {{prompt}}")
    job = prompt(service, name)
    commands: dict[str, Any] = {"missing": "/no/such/program", "misspelt": []}
    write_config(home, notify=commands.get(case, [str(person.program)]))
    path = engine.run("exec", name, "touch", "/tmp/go")
    assert path.returncode == 0
    assert service.ended(job)["exit"] == 0  # and the service answers
    assert service.process.stderr
    while logged not in (line := service.process.stderr.readline()):
        assert line
    for file in person.folder.glob("*.pid"):
        wait_for(lambda: not Path(f"/proc/{file.read_text()}").exists())  # noqa: B023
    write_config(home)
    assert service.get("/api/news").json["news"][-1]["what"] == "turn"
    service.end()


@on_docker
def test_only_files_of_the_host_say_what_is_called(service: Service, name: str) -> None:
    service.create(name)
    for answer in (
        service.post("/api/sessions", {"name": f"{name}-2", "notify": "touch /tmp/x",
                                       "directory": str(service.engine.project)}),
        service.post(f"/api/sessions/{name}/settings", {"notify": "touch /tmp/x"}, method="PUT"),
    ):
        assert answer.status == 400 and "notify" in answer.json["error"]["message"]
    for origin in ("created", "flags", "request", "check", "environment", "default"):
        with pytest.raises(sandbox.SandboxError, match="sandbox.json alone"):
            sandbox.Layer({"notify": ["touch", "x"]}, origin)
    labels = {"sandbox.session": "x", "sandbox.user": "0:0", "sandbox.created": json.dumps(
        {"spec": {"image": "i", "directory": "/d", "workdir": "/d", "volumes": [], "ports": [],
                  "network": "open"}, "flags": {"yolo": "c"}})}
    sandbox.Session("s", "running", labels).created()
    labels["sandbox.created"] = labels["sandbox.created"].replace('"yolo": "c"', '"notify": "x"')
    with pytest.raises(sandbox.BrokenSession):
        sandbox.Session("s", "running", labels).created()


# --- The command, by `run` ---


@pytest.fixture
def agent(engine: Engine, project: Path) -> Path:
    program = project / "claude"
    program.write_text("#!/bin/sh\necho here; read line; exit $line\n")
    program.chmod(0o755)
    return program


def test_run_tells_that_its_agent_has_ended_and_rings(engine: Engine, home: Path, agent: Path,
                                                      name: str) -> None:
    person = Person(engine)
    profile = {"notify": [str(person.program)], "yolo": "c"}
    write_config(home, env={"PATH": f"{agent.parent}:/bin"}, runs={"p": profile})
    with engine.pty("run", "-n", name, "-r", "p") as terminal:
        terminal.expect("here")
        terminal.send("4\n")
        terminal.expect("\a")
        terminal.expect("Keep it? [y] ")
        terminal.send("y\n")
        assert terminal.wait() == 4
    assert person.hears("error") == {"session": name, "what": "error", "turn": None, "status": 4,
                                     "text": ""}
    ran = engine.sandbox("run", "-n", name, "-r", "p", "--", "--version", input="0\n")
    assert ran.returncode == 0, ran.stderr
    for command in (("-r", "p"), ("-x", "echo here; read line")):
        ran = engine.sandbox("run", "-n", name, *command, input="0\n")
        assert (ran.returncode, ran.stdout) == (0, "here\n") and "\a" not in ran.stderr
    person.hears("end")
    assert len(person.told()) == 2  # the other command is no agent, and a version is no turn


@on_docker
@pytest.mark.parametrize("case", ["hangs", "missing"])
def test_run_waits_for_no_command_and_keeps_why_it_failed(engine: Engine, home: Path, agent: Path,
                                                          name: str, case: str) -> None:
    then, logged = FAILING[case]
    person = Person(engine, then)
    words = ["/no/such/program"] if case == "missing" else [str(person.program)]
    write_config(home, env={"PATH": f"{agent.parent}:/bin"}, notify=words)
    ran = engine.sandbox("run", "-n", name, "-y", "c", input="0\n")  # which reads to the end
    assert (ran.returncode, ran.stdout) == (0, "here\n")
    log = home / "logs" / "notify.log"
    if case == "hangs":
        assert not log.exists()
    wait_for(lambda: log.exists() and logged in log.read_text())


# --- Pages ---

ICON = "document.querySelector('link[rel=icon]').href"


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[Page]:
    with watched(browser, service) as page:
        yield page


def watch_desktop(page: Page) -> None:
    page.eval("""{
        const Shown = Notification;
        window.shown = [];
        window.Notification = class extends Shown {
            constructor(title, options) {
                super(title, options);
                shown.push(`${title}: ${options.body}`);
            }
        };
    }""")


@on_docker
def test_a_page_that_nobody_looks_at_says_what_has_happened(
    page: Page, browser: Browser, service: Service, name: str
) -> None:
    service.create(name, agentPromptCommand="echo working; echo {prompt}; test {prompt} != fail")
    open_screen(page, service, name, "agent")
    page.click("[aria-label^='Notify me']")  # asked for by a person; headless it says no
    page.told("The browser does not allow notifications")
    permit(page, service, "notifications")
    page.click("[aria-label^='Notify me']")
    page.told("You will be notified")
    assert not page.eval("document.querySelector('[aria-label^=\"Notify me\"]').checkVisibility()")
    watch_desktop(page)
    title = f"{name} · Agent — sandbox"
    service.ended(prompt(service, name, "looked at"))
    wait_for(lambda: service.get("/api/news").json["news"])
    other = browser.page()
    other.call("Page.bringToFront")
    page.wait("document.hidden || !document.hasFocus()")
    prompt(service, name, "an answer")
    page.wait(f"document.title === '(1) {title}'")
    page.wait(f"{ICON}.endsWith('/icon-good.svg')")
    prompt(service, name, "fail")
    page.wait(f"{ICON}.endsWith('/icon-bad.svg')")
    shown = [f"{name}: the turn has ended: an answer", f"{name}: it has failed: fail"]
    page.wait(f"shown.at(-1) === {json.dumps(shown[1])}")
    assert page.eval("shown")[-2:] == shown
    other.close()
    page.call("Page.bringToFront")
    page.wait(f"document.title === '{title}' && {ICON}.endsWith('/icon.svg')")
    assert page.eval("fetch(document.querySelector('link[rel=icon]').href.replace('.svg', "
                     "'-bad.svg')).then((answer) => answer.ok)")


@on_docker
def test_news_of_another_session_stay_until_it_is_looked_at(page: Page, service: Service,
                                                            name: str) -> None:
    service.create(name, agentPromptCommand="echo {prompt}")
    other = f"{name}-other"
    service.create(other, agentPromptCommand="echo {prompt}")
    permit(page, service, "notifications")
    open_screen(page, service, other, "command")
    watch_desktop(page)
    prompt(service, other, "looked at")
    service.ended(prompt(service, name, "elsewhere"))
    page.wait(f"document.title === '(1) {other} · Command — sandbox'")
    page.see(name, ".sessions .news")
    page.click(".sessions .news")
    page.wait(f"document.title === '{name} · Agent — sandbox'")
    page.wait("document.querySelectorAll('.sessions .news').length === 0")
    assert page.eval("shown") == []  # nobody was away
    page.goto(f"http://{service.address}/preview")
    page.wait("document.title === '(2) Mission control — sandbox'")


@on_docker
def test_a_refusal_and_an_agent_that_waits_reach_a_page_elsewhere(page: Page, service: Service,
                                                         name: str) -> None:
    service.create(name, network={"allow": []},
                   agentPromptCommand=f"wget -qO- http://refused.example/; {GO}; : {{prompt}}")
    open_screen(page, service, name, "agent")
    page.eval("void (location.hash = '#/new')")
    page.see("New session", "main")
    prompt(service, name)
    page.wait(f"document.title === '(1) New session — sandbox' && {ICON}.endsWith('/icon-bad.svg')")
    with service.terminal(name) as terminal:
        terminal.type("printf '\\033]9;may I?\\007'\r")
        page.see(f"{name}: it waits for you", "#said")
    service.request("DELETE", f"/api/sessions/{name}")
    page.wait(f"document.title === 'New session — sandbox' && {ICON}.endsWith('/icon.svg')")
