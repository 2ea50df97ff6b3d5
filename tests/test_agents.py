"""The product's image and the four agents in it, on every engine.

The image is built with the command of the README; what has not changed comes from the engine's
build cache. The agents talk to model_stub.py, which a session without a network starts by itself.
"""

import fcntl
import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import IMAGE as TEST_IMAGE
from conftest import ROOT, USER, Engine, Result, Terminal, on_docker, unique_name, write_config
from network import Guarded
from outside import PUBLIC
from service import Screen, Service, wait_for
from test_back import agents, typed

from sandbox import AGENTS
from sandbox import SHORTCUTS as AGENT_OF

__all__ = ["agents"]  # a fixture

BUILD = ("build", "--iv", "1.0", "--iba", "TOOL=common")
IMAGE = "localhost/sandbox:1.0-common"
# BuildKit would start without a cache wherever it came later than this test, and prints no cache
# hits.
CLASSIC = {"DOCKER_BUILDKIT": "0"}
BUILD_SECONDS = 1500.0
START_SECONDS = 300.0  # four agents at once, beside other work

# Every shortcut of spec 2.3 and the real names.
SHORTCUTS = {
    "agent-a": ("c", "agent-a", "cc", "claude"),
    "agent-b": ("gm", "agent-b", "g", "gemini"),
    "agent-c": ("cx", "agent-c", "codex"),
    "agent-d": ("oc", "agent-d", "opencode"),
}
# How each agent answers one prompt without a terminal, and how it goes on with the last
# conversation.
ONCE = {"c": "-p", "gm": "-p", "cx": "exec --skip-git-repo-check", "oc": "run"}
AGAIN = {"c": "-c -p", "gm": "-r latest -p", "cx": "exec --skip-git-repo-check resume --last",
         "oc": "run -c"}
# A word on the agent's screen when it waits for a prompt, and one that asks for Ctrl-C again.
SCREENS = {"c": ("bypass", "again"), "gm": ("Type", "again"), "cx": ("YOLO", ""), "oc": ("Ask", "")}

PORT = 8080
STUB = f"http://127.0.0.1:{PORT}"
PROVIDER = {"npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{STUB}/v1", "apiKey": "stub"}}
OPENCODE = {
    "model": "stub/stub",
    "small_model": "stub/stub",
    "provider": {"stub": {**PROVIDER, "models": {"stub": {}}}},
}
ENV_FILE = f"""\
export ANTHROPIC_BASE_URL="{STUB}"
export ANTHROPIC_AUTH_TOKEN="stub"
export GEMINI_API_KEY="stub"
export GOOGLE_GEMINI_BASE_URL="{STUB}"
export GEMINI_MODEL="gemini-2.5-pro"
export OPENAI_BASE_URL="{STUB}/v1"
export OPENAI_API_KEY="stub"
export OPENCODE_CONFIG_CONTENT='{json.dumps(OPENCODE)}'
"""

STUB_ANSWERS = f"curl -s --retry 50 --retry-connrefused --retry-delay 1 {STUB}"

each_agent = pytest.mark.parametrize("agent", ["c", "gm", "cx", "oc"])


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The image, built by docker and by rootful podman, which gives it to the rootless one. On a
    cluster the test image is enough: it has git there.
    """
    if engine.id == "kubernetes":
        return TEST_IMAGE
    builder = engine if engine.user == "root" else Engine("podman", "podman", "root", engine.area)
    build(builder)
    if image_id(engine) != image_id(builder):
        copy_image(builder, engine)
    return IMAGE


def build(builder: Engine) -> None:
    with open(f"/run/sandbox-test-{builder.id}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another part may build the same
        built = builder.sandbox(*BUILD, timeout=BUILD_SECONDS, home=builder.directory(),
                                env=CLASSIC)
    assert built.returncode == 0, built.stdout + built.stderr


def image_id(engine: Engine) -> str:
    return engine.run("image", "inspect", "--format", "{{.Id}}", IMAGE).stdout


def copy_image(source: Engine, target: Engine) -> None:
    archive = source.area / "image.tar"
    saved = source.run("save", "-q", "-o", str(archive), IMAGE, timeout=600)
    assert saved.returncode == 0, saved.stderr
    archive.chmod(0o644)
    loaded = target.run("load", "-q", "-i", str(archive), timeout=600)
    assert loaded.returncode == 0, loaded.stderr
    archive.unlink()


@dataclass
class Session:
    """A session without a network, in which the stub answers for the models."""

    engine: Engine
    name: str
    project: Path
    home: Path
    user: str

    def run(self, *args: str) -> Result:
        return self.engine.sandbox("run", "-n", self.name, *args, **self.where())

    def pty(self, *args: str, below: str = "") -> Terminal:
        """Run on a terminal, in the project or a directory below it."""
        where = self.where() | {"cwd": self.project / below}
        return self.engine.pty("run", "-n", self.name, *args, **where)

    def where(self) -> dict[str, Any]:
        return {"cwd": self.project, "home": self.home, "user": self.user}


def write_stub_config(engine: Engine, home: Path, volumes: Iterable[str] = (),
                      without: str = "^$") -> None:
    """Let all sessions start the stub and ask it, and nobody else, `without` some variables."""
    write_config(home, network="none", **stub_config(engine, home, volumes, without))


def stub_config(engine: Engine, home: Path, volumes: Iterable[str] = (),
                without: str = "^$") -> dict[str, object]:
    stub = engine.area / "model_stub.py"
    if not stub.exists():
        shutil.copy(ROOT / "tests" / "model_stub.py", stub)
        stub.chmod(0o644)
    env_file = home / "stub.env"
    lines = [line for line in ENV_FILE.splitlines(True) if not re.search(without, line)]
    env_file.write_text("".join(lines))
    return {"imageName": IMAGE.partition(":")[0], "envFile": [str(env_file)],
            "volumes": [f"{stub}:/model_stub.py:ro", *volumes],
            "autostart": f"python3 /model_stub.py {PORT}"}


def new_session(engine: Engine, user: str) -> Session:
    session = Session(engine, unique_name(), engine.directory(user), engine.directory(user), user)
    write_stub_config(engine, session.home)
    made = session.run("-y", "c", "--", "--version")
    assert made.returncode == 0, made.stderr
    ready = session.run("-x", STUB_ANSWERS)
    assert ready.returncode == 0, ready.stderr
    return session


@pytest.fixture(scope="module")
def session(engine: Engine, image: str) -> Iterator[Session]:
    """One session for all tests that leave it usable."""
    session = new_session(engine, engine.user)
    yield session
    engine.sandbox("rm", session.name, **session.where())


# --- The image ---


@on_docker
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--iba", "TOOL=common,rusty"], "no tool 'rusty' (did you mean rust?)"),
        (["--iba", "TOLL=common"], "no build argument TOLL (did you mean TOOL?)"),
        (["--iba", "TOOL"], "TOOL"),
        (["--iba", "AGENTS=claude,gemni"],
         "no agent 'gemni' (did you mean gemini?)\n  AGENTS is of claude, gemini, codex, opencode"),
    ],
)
def test_a_wrong_build_argument_is_refused_before_anything_is_built(
    engine: Engine, home: Path, flags: list[str], message: str
) -> None:
    answer = engine.sandbox("build", "--iv", "1.0", *flags, env={"SANDBOX_TRACE": "1"})
    assert (answer.returncode, answer.stdout) == (2, "") and message in answer.stderr
    started = [line for line in answer.stderr.splitlines() if line.startswith("+ ")]
    assert all(line.startswith("+ docker info ") for line in started), started


@on_docker
def test_update_agents_begins_with_the_agents_layer(engine: Engine, image: str, home: Path) -> None:
    before = image_id(engine)
    write_config(home, imageName=IMAGE.partition(":")[0])
    build = engine.popen(*BUILD, "--update-agents", "--verbose", env=CLASSIC)
    assert build.stderr
    run_steps: dict[str, list[str]] = {}
    for line in build.stderr:
        if line.startswith("Step ") and " : RUN " in line:
            run_steps[line.partition(" : RUN ")[2]] = lines = []
        elif run_steps:
            lines.append(line)
        if "Running in" in line:
            break
    *earlier, (step, _) = run_steps.items()
    assert "install-agents" in step
    cached = [any("Using cache" in line for line in lines) for _, lines in earlier]
    assert len(earlier) >= 3 and all(cached)
    build.end()  # one that is broken off leaves the image that there was
    assert image_id(engine) == before


@on_docker
def test_a_missing_agent_is_offered_and_added_and_nothing_stays_behind(
    engine: Engine, image: str, home: Path, project: Path, name: str
) -> None:
    """Of an image with Gemini CLI only, by its label, which the build replaces."""
    base = f"localhost/{unique_name()}"
    tag = f"{base}:1.0-common"
    try:
        label = f"FROM {TEST_IMAGE}\nLABEL sandbox.programs=gemini\n"
        assert engine.run("build", "-t", tag, "-", input=label, env=CLASSIC).returncode == 0
        before = engine.run("image", "inspect", "--format", "{{.Id}}", tag).stdout.strip()
        write_config(home, imageName=base)
        refused = engine.sandbox("run", "-n", name, "-y", "c", "--", "--version")
        build = f"sandbox build --rt docker --iv 1.0-common --in {base} --iba AGENTS=gemini,claude"
        assert refused.returncode == 125
        assert refused.stderr.endswith(f"was built without claude\n  run: {build}\n")
        assert name not in engine.names()
        words = ("run", "--yes", "--verbose", "-n", name, "-y", "c", "--", "--version")
        made = engine.sandbox(*words, timeout=BUILD_SECONDS, env=CLASSIC)
        assert made.returncode == 0 and "(Claude Code)" in made.stdout.splitlines()[-1], made.stderr
        each = f"for program in {' '.join([*AGENTS, *SHORTCUTS])}; do command -v $program; done"
        which = engine.sandbox("run", "-n", name, "-x", each)
        found = [Path(line).name for line in which.stdout.split()]
        assert found == ["claude", "gemini", "agent-a", "agent-b"]
        lacking = engine.sandbox("run", "-n", name, "-y", "cx", "--", "--version")
        assert lacking.returncode == 127
        assert f"sandbox recreate {name}, then run this again" in lacking.stderr
        checks = json.loads(engine.sandbox("doctor", "--json").stdout)
        (agents,) = [row for row in checks if row["check"] == "agents"]
        assert agents["status"] == "ok" and agents["detail"].startswith("claude 2"), agents
        unnamed = engine.run("images", "-q", "--filter", "dangling=true").stdout.split()
        steps = re.findall(r"^ ---> ([0-9a-f]{12})$", made.stdout + made.stderr, re.MULTILINE)
        assert len(steps) > 20 and not {*steps, before[7:19]} & {*unnamed}
    finally:
        engine.sandbox("rm", name)
        engine.run("rmi", tag)


@on_docker
def test_the_image_trusts_debians_certificate_authorities_only(session: Session) -> None:
    pem = ("cat {} | grep -v -e '^#' -e '^$' | tr -d '\\n' "
           "| sed 's/-----END CERTIFICATE-----/&\\n/g' | sort")
    trusted = session.run("-x", pem.format("/etc/ssl/certs/ca-certificates.crt")).stdout
    debians = session.run("-x",
                          pem.format("$(find /usr/share/ca-certificates -name '*.crt')")).stdout
    assert trusted == debians and trusted.count("BEGIN CERTIFICATE") > 100
    # dpkg.cfg leaves the manuals out.
    changed = (
        "dpkg --verify ca-certificates | grep -v ^missing; "
        "find /usr/local/share/ca-certificates /tmp -name '*.crt'"
    )
    assert session.run("-x", changed).stdout == ""


# --- Agents without a terminal ---


@on_docker
def test_every_shortcut_and_role_name_starts_its_agent(session: Session) -> None:
    versions = {}
    for role, shortcuts in SHORTCUTS.items():
        version = session.run("-x", role, "--version")
        assert version.returncode == 0, version.stderr
        assert re.search(r"\d+\.\d+\.\d+", version.stdout), version.stderr
        for shortcut in shortcuts if session.engine.id == "docker" else shortcuts[:1]:
            assert session.run("-y", shortcut, "--", "--version").stdout == version.stdout, shortcut
        versions[version.stdout] = role
    assert len(versions) == len(SHORTCUTS)


def test_a_prompt_is_answered_and_its_conversation_goes_on(session: Session,
                                                           agent: str = "c") -> None:
    prompt = f"say it's {unique_name()}"
    first = session.run("-y", agent, "--", *ONCE[agent].split(), prompt)
    assert first.returncode == 0 and f"pong {prompt}" in first.stdout, first.stdout + first.stderr
    yolo = [] if agent == "c" else ["-y", agent]  # the session was created for c
    second = session.run(*yolo, "--", *AGAIN[agent].split(), "recall")
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"pong {prompt}" in second.stdout, second.stdout + second.stderr


@on_docker
@each_agent
def test_a_conversation_goes_on_in_a_new_container_and_in_a_duplicate(engine: Engine, image: str,
                                                                      agent: str) -> None:
    session = new_session(engine, engine.user)
    prompt = f"say it's {unique_name()}"
    first = session.run("-y", agent, "--", *ONCE[agent].split(), prompt)
    assert f"pong {prompt}" in first.stdout, first.stdout + first.stderr

    def goes_on(session: Session, said: str) -> None:
        assert session.run("-x", STUB_ANSWERS).returncode == 0
        again = session.run("-y", agent, "--", *AGAIN[agent].split(), "recall")
        assert f"pong {said}" in again.stdout, again.stdout + again.stderr

    made = engine.sandbox("recreate", session.name, "--net", "open", "-p", "127.0.0.9:8080:80",
                          "--memory", "3g", **session.where())
    assert made.returncode == 0, made.stderr
    goes_on(session, prompt)
    other = replace(session, name=unique_name())
    copied = engine.sandbox("run", "--from", session.name, "-n", other.name, "-x", "true",
                            **session.where())
    assert copied.returncode == 0, copied.stderr
    assert engine.sandbox("rm", session.name, **session.where()).returncode == 0
    renamed = replace(other, name=unique_name())
    moved = engine.sandbox("rename", other.name, renamed.name, **session.where())
    assert moved.returncode == 0, moved.stderr
    goes_on(renamed, "recall")


def test_a_tool_runs_unasked_and_its_files_belong_to_the_person(session: Session,
                                                                agent: str = "c") -> None:
    made = session.project / f"made-by-{agent}"
    prompt = (f"please run: mkdir {made.name} && echo 'by the agent' > {made.name}/file "
              "&& echo written")
    answer = session.run("-y", agent, "--", *ONCE[agent].split(), prompt)
    assert answer.returncode == 0, answer.stderr
    assert "pong tool" in answer.stdout, answer.stderr
    assert "written" in answer.stdout, answer.stderr
    assert (made / "file").read_text() == "by the agent\n"
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in (made, made / "file")}
    assert owners == owner_of(session)


@on_docker
@pytest.mark.parametrize("agent", ["gm", "cx", "oc"])
def test_every_agent_answers_goes_on_and_runs_tools(session: Session, agent: str) -> None:
    test_a_prompt_is_answered_and_its_conversation_goes_on(session, agent)
    test_a_tool_runs_unasked_and_its_files_belong_to_the_person(session, agent)


def owner_of(session: Session) -> set[tuple[int, int]]:
    stat = session.project.stat()
    return {(stat.st_uid, stat.st_gid)}


@on_docker
def test_codex_lists_its_sessions_and_resumes_one(session: Session) -> None:
    words = ONCE["cx"].split()
    session.run("-y", "cx", "--", *words, "the older one")
    session.run("-y", "cx", "--", *words, "the newer one")
    ids = [line.split()[0] for line in session.run("-y", "cx", "--", "list").stdout.splitlines()]
    again = session.run("-y", "cx", "--", *words, "resume", ids[1], "recall")
    assert "pong the older one" in again.stdout, again.stderr


# --- Agents on a terminal ---


def leave_agent(terminal: Terminal, again: str) -> None:
    """Press Ctrl-C, and once more where the agent asks for that, until it is over.
    The agent forgets the first one after a second.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        terminal.send("\x03")
        if again:
            terminal.expect(again)
            terminal.send("\x03")
        try:
            terminal.expect("Keep it? [y] ")
            return
        except pytest.fail.Exception:
            if not again or time.monotonic() > deadline:
                raise


@on_docker
@each_agent
def test_on_a_terminal_the_agent_waits_for_a_prompt_at_once(session: Session, agent: str) -> None:
    _, again = SCREENS[agent]
    with session.pty("-y", agent) as terminal:
        type_prompt(terminal, agent, "hello-terminal")
        terminal.expect("pong", timeout=START_SECONDS)
        terminal.expect("hello-terminal")
        terminal.quiet()
        leave_agent(terminal, again)
        terminal.send("y\n")
        assert terminal.wait() == 0
    assert session.name in session.engine.names()


@on_docker
def test_the_printed_command_leads_back_to_an_agent_that_is_logged_in(
    engine: Engine, image: str, agents: Path
) -> None:
    """With its conversation; the key came in an env file, named by a relative path."""
    session = Session(engine, unique_name(), engine.project, engine.home, engine.user)
    write_stub_config(engine, session.home, without="ANTHROPIC_AUTH_TOKEN")
    (session.project / "key.env").write_text("export ANTHROPIC_AUTH_TOKEN=stub\n")
    prompt = unique_name()
    with session.pty("--ef", "key.env", "-y", "c") as terminal:
        type_prompt(terminal, "c", prompt)
        terminal.expect("pong", timeout=START_SECONDS)
        terminal.quiet()
        leave_agent(terminal, "again")
        terminal.send("\n")
        assert terminal.wait() == 0
    command = terminal.output.rpartition("to come back: ")[2].strip()
    assert command == f"sandbox run -n {session.name} -- -c"
    with typed(engine, agents, command) as shell:
        type_prompt(shell, "c", "recall")
        shell.expect(f"pong {prompt}", timeout=START_SECONDS)
        assert "Not logged in" not in shell.output


# --- Ready for a prompt ---
# An agent that asks something first (whether it may trust the directory, use a key, skip
# permissions) takes what is typed for the answer, so only at a prompt does typed text arrive at the
# model.


def make_projects(session: Session) -> None:
    """A repository with a subdirectory, and a worktree of it, in the session's project."""
    project = session.project
    (project / "repo" / "sub").mkdir(parents=True)
    commit = "-c user.name=nobody -c user.email=nobody@example.org commit -qm Begin --allow-empty"
    for words in ("init -q", commit, "worktree add -q ../tree"):
        subprocess.run(["git", *words.split()], cwd=project / "repo", check=True)
    stat = project.stat()
    subprocess.run(["chown", "-R", f"{stat.st_uid}:{stat.st_gid}", project], check=True)


def prompt_agents(start: Callable[[str], Terminal], asked: Callable[[str], Result]) -> None:
    """Start all agents side by side; what is then typed into each arrives at its model."""

    def prompt_one(agent: str) -> None:
        prompt = unique_name()
        with start(agent) as terminal:
            type_prompt(terminal, agent, prompt)
            answer = asked(f"{STUB}/asked/{prompt}")
            assert answer.returncode == 0, f"{agent} did not send the prompt: {terminal.output!r}"

    with ThreadPoolExecutor() as pool:
        list(pool.map(prompt_one, ONCE))


def type_prompt(screen: Terminal | Screen, agent: str, prompt: str) -> None:
    """Wait for the agent's prompt, type, and press Enter."""
    screen.expect(SCREENS[agent][0], timeout=START_SECONDS)
    type_words(screen, prompt, prompt)


def type_words(screen: Terminal | Screen, words: str, shown: str) -> None:
    """Type to an agent until these words are `shown`, and press Enter. While it draws, it loses
    keys.
    """
    send = screen.send if isinstance(screen, Terminal) else screen.type
    screen.quiet()
    deadline = time.monotonic() + START_SECONDS
    while True:
        send(words)
        try:
            screen.expect(shown, timeout=15)
            break
        except (TimeoutError, pytest.fail.Exception):  # keys were lost, or drawn in pieces
            if time.monotonic() > deadline:
                raise
            send("\x15")  # Ctrl-U takes back what it has got
            screen.quiet()
    screen.quiet()  # an Enter that follows at once is one of a pasted text
    send("\r")


@pytest.fixture(scope="module")
def projects(session: Session) -> Session:
    make_projects(session)
    return session


def ask(session: Session, url: str) -> Result:
    return session.run("-x", f"curl -sf {url}")


@on_docker
@pytest.mark.parametrize("below", ["repo", "repo/sub", "tree"])
def test_in_a_repository_every_agent_waits_for_a_prompt(projects: Session, below: str) -> None:
    prompt_agents(lambda agent: projects.pty("-y", agent, below=below), partial(ask, projects))


# What a person has on the host, as the agents themselves write it.
OWN_FILES = {
    ".claude/settings.json": '{"model": "opus"}',
    ".claude/.credentials.json": json.dumps({"claudeAiOauth": {
        "accessToken": "stub", "refreshToken": "stub", "expiresAt": 4102444800000,
        "scopes": ["user:inference", "user:profile"], "subscriptionType": "max"}}),
    ".gemini/settings.json": json.dumps({"security": {
        "auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": True}},
        "ui": {"theme": "GitHub"}}),
    ".codex/auth.json": '{"OPENAI_API_KEY": "stub", "tokens": null, "last_refresh": null}',
    ".codex/config.toml": f'openai_base_url = "{STUB}/v1"\n\n'
                          '[projects."/elsewhere"]\ntrust_level = "untrusted"\n',
    ".config/opencode/opencode.json": json.dumps({
        "$schema": "https://opencode.ai/config.json", **OPENCODE}),
    ".local/share/opencode/auth.json": '{"stub": {"type": "api", "key": "stub"}}',
}  # fmt: skip
OWN_VARIABLES = "ANTHROPIC_AUTH_TOKEN|OPENAI|OPENCODE"


@on_docker
def test_with_own_credentials_and_settings_every_agent_waits_for_a_prompt(
    engine: Engine, image: str
) -> None:
    """They stay as they are, mounted writable. --cp mounts the repository at another path."""
    own = engine.directory()
    for path, text in OWN_FILES.items():
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_text(text)
    session = Session(engine, unique_name(), engine.directory(), engine.directory(), engine.user)
    volumes = [f"{own / path}:/home/agent/{path}" for path in OWN_FILES]
    write_stub_config(engine, session.home, volumes, OWN_VARIABLES)
    make_projects(session)
    session.project /= "repo"
    made = session.run("--cp", "/srv/work", "-x", STUB_ANSWERS)
    assert made.returncode == 0, made.stderr
    prompt_agents(lambda agent: session.pty("-y", agent), partial(ask, session))
    assert {path: (own / path).read_text() for path in OWN_FILES} == OWN_FILES


@on_docker
def test_claude_code_uses_the_key_that_it_was_given(projects: Session) -> None:
    key = ["-e", "ANTHROPIC_AUTH_TOKEN=", "-e", "ANTHROPIC_API_KEY=sk-ant-stub-0123456789-012345"]
    prompt = unique_name()
    with projects.pty(*key, "-y", "c", below="repo") as terminal:
        type_prompt(terminal, "c", prompt)
        assert ask(projects, f"{STUB}/asked/{prompt}").returncode == 0, terminal.output


@on_docker
def test_claude_code_gets_what_the_image_brings_and_its_home_lacks(session: Session) -> None:
    # In a place of its own: a Claude Code that another test has left may still write to its home.
    script = ("export CLAUDE_CONFIG_DIR=$(mktemp -d); file=$CLAUDE_CONFIG_DIR/.claude.json; "
              "jq '.theme = \"light\" | del(.hasCompletedOnboarding)' ~/.claude.json >$file; "
              "claude --version >/dev/null; jq -c '[.theme, .hasCompletedOnboarding]' $file; "
              "echo '{' >$file; claude --version >/dev/null 2>&1; cat $file")
    answer = session.run("-x", script)
    assert answer.stdout == '["light",true]\n{\n', answer.stderr


@on_docker
@each_agent
def test_the_agent_button_opens_a_prompt(
    engine: Engine, image: str, service: Service, name: str, agent: str
) -> None:
    write_stub_config(engine, engine.home)
    subprocess.run(["git", "init", "-q", engine.project], check=True)
    service.create(name, agent=agent)
    assert service.ended(service.job(name, STUB_ANSWERS))["exit"] == 0
    prompt = unique_name()
    with service.terminal(name, "run=agent&rows=30&cols=100") as screen:
        type_prompt(screen, agent, prompt)
        asked = service.ended(service.job(name, f"curl -sf {STUB}/asked/{prompt}"))
        screen.quiet()
        assert asked["exit"] == 0, bytes(screen.output)


# --- Agents in the web service's AGENT mode ---

# The page's own reader of the events: each line of its input is [stream, text], its output the
# blocks that it makes.
READER = """
import { AgentStream } from EVENTS;
const blocks = [];
const stream = new AgentStream((block, isNew) => isNew && blocks.push(block));
for (const [name, text] of JSON.parse(process.argv[1])) stream.feed(name, text);
stream.end();
console.log(JSON.stringify(blocks));
"""


def blocks_of(events: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """What the page shows of a job's output."""
    script = READER.replace("EVENTS", json.dumps(str(ROOT / "static" / "ui" / "events.js")))
    argv = ["node", "--input-type=module", "--eval", script, json.dumps(events)]
    return list(json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout))


def prompted(service: Service, session: str, prompt: str) -> list[dict[str, Any]]:
    """Prompt a session's agent; what the page makes of its events, without its stderr."""
    reply = service.post(f"/api/sessions/{session}/prompt", {"prompt": prompt})
    assert reply.status == 201, reply.body
    events = [(kind, data) for kind, data, _ in service.events(reply.json)
              if kind in ("stdout", "stderr")]
    job = service.ended(reply.json)
    assert (job["state"], job["exit"]) == ("ended", 0), events
    blocks = blocks_of(events)
    assert not [block for block in blocks if block["kind"] == "raw" and block["stream"] == "stdout"]
    return [block for block in blocks if block["kind"] != "raw"]


def texts(blocks: list[dict[str, Any]]) -> list[str]:
    return [block["text"] for block in blocks if block["kind"] == "text"]


@on_docker
@each_agent
def test_agent_mode_answers_goes_on_and_shows_tools(engine: Engine, image: str, service: Service,
                                                    name: str,
                                                    agent: str) -> None:
    """With the command that a session is created with; nothing is said twice, also where it comes
    in parts."""
    write_stub_config(engine, engine.home)
    session = service.create(name, agent=agent)
    assert "{prompt}" in session["agentPromptCommand"]
    assert service.ended(service.job(name, STUB_ANSWERS))["exit"] == 0
    prompt = f"- it's {name} \"$HOME\""  # which is no option
    assert texts(prompted(service, name, prompt)) == [f"pong {prompt}"]
    assert texts(prompted(service, name, "recall")) == [f"pong {prompt}"]
    blocks = prompted(service, name, "please run: echo by-the-agent && ls -d /etc")
    tools = [block for block in blocks if block["kind"] == "tool"]
    assert [tool["status"] for tool in tools] == ["ok"]
    assert "by-the-agent\n/etc" in tools[0]["output"]
    assert "by-the-agent" in json.dumps(tools[0]["input"])
    (text,) = texts(blocks)
    assert text.startswith("pong tool") and "by-the-agent" in text
    (told,) = wait_for(lambda: [news for news in service.get("/api/news").json["news"]
                                if news["turn"] == service.get(
                                    f"/api/sessions/{name}/jobs").json[0]["id"]])
    assert told["what"] == "turn" and told["text"] == text.splitlines()[-1][:300]
    (summary,) = [block for block in blocks if block["kind"] == "summary"]
    assert summary["tokens"]["in"] > 0


# --- An ordinary user, and root's work ---


@on_docker
def test_an_ordinary_user_of_a_rootful_engine_is_agent_inside(engine: Engine, image: str) -> None:
    session = new_session(engine, USER)
    script = "id -un; id -u; sudo -n id -u; echo kept > ~/file; stat -c %U ~/file ~ ~/.claude.json"
    answer = session.run("-x", script)
    uid = str(session.project.stat().st_uid)
    assert answer.stdout.split() == ["agent", uid, "0", "agent", "agent", "agent"]
    for agent in ONCE:
        test_a_tool_runs_unasked_and_its_files_belong_to_the_person(session, agent)
    test_on_a_terminal_the_agent_waits_for_a_prompt_at_once(session, "c")
    test_packages_can_be_installed(session)


CONTROL = """\
Package: tiny
Version: 1.0
Architecture: all
Maintainer: nobody <nobody@example.org>
Description: files of several users
"""
POSTINST = """\
#!/bin/sh -e
useradd --system --no-create-home tiny
chown tiny:games /usr/share/tiny/theirs
chmod 4750 /usr/share/tiny/theirs
su -s /bin/sh -c 'id -un > /tmp/tiny' tiny
"""


def test_packages_can_be_installed(session: Session) -> None:
    tree = session.project / "tiny"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/share/tiny").mkdir(parents=True)
    (tree / "usr/share/tiny/theirs").touch()
    (tree / "DEBIAN/control").write_text(CONTROL)
    (tree / "DEBIAN/postinst").write_text(POSTINST)
    (tree / "DEBIAN/postinst").chmod(0o755)
    built = session.run(
        "-x",
        "dpkg-deb --root-owner-group -b tiny /tmp/tiny.deb && sudo apt-get install -y /tmp/tiny.deb"
    )
    assert built.returncode == 0, built.stdout + built.stderr
    found = session.run("-x",
                        "stat -c '%U %G %a' /usr/share/tiny/theirs; cat /tmp/tiny; "
                        "sudo apt-get purge -y tiny")
    assert found.stdout.startswith("tiny games 4750\ntiny\n"), found.stdout + found.stderr
    assert found.returncode == 0, found.stdout + found.stderr


# --- Through the network proxy ---

MODEL = "model.test:8090"


@pytest.fixture(scope="module")
def guarded(engine: Engine, image: str) -> Iterator[Guarded]:
    """A session of an ordinary user that can reach the model and api.test, and nothing else."""
    env_file = engine.directory() / "stub.env"
    env_file.write_text(ENV_FILE.replace(STUB, f"http://{MODEL}"))
    env_file.chmod(0o644)
    session = Guarded(engine, MODEL, "127.0.0.1:8090", "api.test", "private.test", user=USER,
                      imageName=IMAGE.partition(":")[0], envFile=[str(env_file)])  # fmt: skip
    assert session.outside
    shutil.copy(ROOT / "tests" / "model_stub.py", session.outside.directory)
    session.outside.start("python3", f"{session.outside.directory}/model_stub.py", "8090")
    ready = session.run(f"curl -s --retry 50 --retry-all-errors --retry-delay 1 http://{MODEL}")
    assert ready.returncode == 0, ready.stderr
    yield session
    session.end()


@on_docker
@each_agent
def test_an_agent_reaches_its_model_through_the_proxy(guarded: Guarded, agent: str) -> None:
    prompt = f"say it's {unique_name()}"
    words = ("run", "-n", guarded.name, "-y", agent, "--", *ONCE[agent].split(), prompt)
    answer = guarded.engine.sandbox(*words, **guarded.where)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"pong {prompt}" in answer.stdout, answer.stdout + answer.stderr


@on_docker
def test_with_an_allowlist_every_agent_waits_for_a_prompt(guarded: Guarded) -> None:
    repository = guarded.project / "repo"
    subprocess.run(["git", "init", "-q", repository], check=True)
    subprocess.run(["chown", "-R", USER, repository], check=True)
    where = guarded.where | {"cwd": repository}
    run = ("run", "-n", guarded.name, "-y")
    prompt_agents(lambda agent: guarded.engine.pty(*run, agent, **where),
                  lambda url: guarded.run(f"curl -sf {url.replace(STUB, f'http://{MODEL}')}"))


# Gemini tries for minutes: it is ended when it has told why.
UNTIL_TOLD = """{} >/tmp/told 2>&1 &
until grep -q 'fetch failed' /tmp/told; do sleep 0.2; done
kill 0"""


@on_docker
@each_agent
def test_an_agent_tells_that_its_model_was_refused(guarded: Guarded, agent: str) -> None:
    assert guarded.net("deny", MODEL).returncode == 0
    command = shlex.join([*AGENTS[AGENT_OF[agent]].yolo, *ONCE[agent].split(), "say nothing"])
    if agent == "gm":
        command = f"sh -c {shlex.quote(UNTIL_TOLD.format(command))}; cat /tmp/told; exit 1"
    try:
        answer = guarded.run(f"timeout 100 {command} 2>&1")
    finally:
        assert guarded.net("allow", MODEL).returncode == 0
    assert answer.returncode != 0 and "pong" not in answer.stdout
    assert f"{guarded.name} was refused model.test port 8090: a rule denies it" in answer.stderr
    told = "fetch failed" if agent == "gm" else f"sandbox net allow {guarded.name} {MODEL}"
    assert told in answer.stdout or "403" in answer.stdout, answer.stdout


@on_docker
@pytest.mark.parametrize("command", ["", "sudo "])
def test_there_is_no_way_around_for_sudo(guarded: Guarded, command: str) -> None:
    shutil.copy(ROOT / "tests" / "probe.py", guarded.project)
    answer = guarded.run(
        f"{command}python3 probe.py '{json.dumps({'api': PUBLIC, 'own': ['172.17.0.1']})}'")
    assert answer.returncode == 0, answer.stderr
    tried = json.loads(answer.stdout)
    assert len(tried) > 100 and [row for row in tried if row[1] not in row[2].split("|")] == []


# What each program fetches with no variable set, from a host that is allowed and from one that is
# not.
FETCH = {
    "git":
        "git clone -q http://{host}/files/repo.git /tmp/{host}.git && cat /tmp/{host}.git/fetched",
    "apt": "o='-o Dir::Etc::sourcelist=/tmp/list -o Dir::Etc::sourceparts=-'; "
           "echo 'deb [trusted=yes] http://{host}/files/apt ./' >/tmp/list; "
           "sudo apt-get update $o; apt-cache $o policy fetched",
    "npm": "npm view fetched name --registry http://{host}/files/npm/",
}  # fmt: skip


@on_docker
@pytest.mark.parametrize("program", FETCH)
def test_programs_go_through_the_proxy_without_its_variables(guarded: Guarded,
                                                             program: str) -> None:
    clean = "env -i HOME=$HOME PATH=$PATH sh -c"
    assert guarded.outside
    make_files(guarded.outside.directory / "files")
    good = guarded.run(f"{clean} {shlex.quote(FETCH[program].format(host='api.test'))}")
    assert "fetched" in good.stdout, good.stdout + good.stderr
    bad = guarded.run(f"{clean} {shlex.quote(FETCH[program].format(host='other.test'))}")
    said = "".join(line for line in bad.stderr.splitlines() if not line.startswith("sandbox: "))
    assert "403" in said or "sandbox net allow" in said, bad.stdout + bad.stderr
    assert guarded.run("cat /etc/pip.conf").stdout == "[global]\nproxy = http://127.0.0.1:3128\n"


def make_files(files: Path) -> None:
    """A repository for git, apt and npm each, with something that is called fetched."""
    if files.exists():
        return
    work = files / "work"
    for folder in ("apt", "npm", "work"):
        (files / folder).mkdir(parents=True)
    (work / "fetched").write_text("fetched\n")
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "Add it"]):
        subprocess.run(["git", *words], cwd=work, check=True)
    subprocess.run(["git", "clone", "-q", "--bare", work, files / "repo.git"], check=True)
    subprocess.run(["git", "update-server-info"], cwd=files / "repo.git", check=True)
    control = CONTROL.replace("tiny", "fetched")
    (files / "apt" / "Packages").write_text(f"{control}Filename: ./fetched.deb\nSize: 1\n")
    versions = {"1.0.0": {"name": "fetched", "version": "1.0.0"}}
    (files / "npm" / "fetched").write_text(
        json.dumps({"name": "fetched", "dist-tags": {"latest": "1.0.0"}, "versions": versions})
    )


# --- README ---


@on_docker
def test_the_transcript_of_the_readme(engine: Engine, image: str) -> None:
    """What an ordinary user sees on a terminal; name, directory, version and time are others."""
    name, project, home = unique_name(), engine.directory(USER), engine.directory(USER)
    write_config(home, imageName=IMAGE.partition(":")[0])
    readme = (ROOT / "README.md").read_text()
    transcript = readme.partition("```console\n$ cd /srv/shop\n$ ")[2].partition("```")[0]

    def same(text: str) -> list[list[str]]:
        text = text.replace(str(project), "/srv/shop").replace(name, "shop")
        text = re.sub(r"\x1b\[[?0-9;]*[a-z]", "", re.sub(r"\d+\.\d+\.\d+", "VERSION", text))
        text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", text)
        return [line.split() for line in text.splitlines()]

    for turn in transcript.split("\n$ "):
        line, _, expected = turn.partition("\n")
        _, *words = shlex.split(line.replace("shop", name))
        with engine.pty(*words, user=USER, cwd=project, home=home) as terminal:
            if "Keep it?" in expected:
                terminal.expect("Keep it? [y] ")
                terminal.send("y\r")
            assert terminal.wait() == 0
        seen = terminal.output
        if words == ["ps"]:  # which shows other sessions, too
            ours = ("NAME ", f"{name} ")
            seen = "\n".join(line for line in seen.splitlines() if line.startswith(ours))
        assert same(seen) == same(expected)
