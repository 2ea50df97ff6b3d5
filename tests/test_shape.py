"""The shape of the code: one place for each thing, and what follows from it."""

import ast
import copy
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium
from conftest import PYTHON, ROOT, TIMEOUT_SECONDS, Engine, on_docker, write_config
from fuzz import STREAMS
from service import Service
from test_browser import log_in, open_screen, submit

import sandbox
from sandbox import AGENTS, ENGINES, OPTIONS, SHORTCUTS, containerfile

# --- Agents: a row of sandbox.AGENTS, a package in the image, a reader of its events ---

NAMED = re.compile("|".join(name for agent in AGENTS.values()
                            for name in (agent.program, agent.title)), re.IGNORECASE)
README = (ROOT / "README.md").read_text()


def table_of(tree: ast.Module, name: str) -> set[int]:
    """The lines of a module's table, none where it has no such table."""
    return {line for node in tree.body if isinstance(node, ast.Assign)
            and [target.id for target in node.targets if isinstance(target, ast.Name)] == [name]
            for line in range(node.lineno, (node.end_lineno or 0) + 1)}


@pytest.mark.parametrize("path", [*ROOT.glob("sandbox*.py"), *ROOT.glob("static/**/*.py")],
                         ids=lambda path: path.name)
def test_agents_are_named_in_one_python_table(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    table = table_of(tree, "AGENTS")
    assert bool(table) == (path.name == "sandbox.py")
    example = range(1, tree.body[0].end_lineno or 0)  # the module's docstring
    lines = enumerate(text.splitlines(), 1)
    assert [line for number, line in lines
            if number not in table and number not in example and NAMED.search(line)] == []
    words = [(node.lineno, node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    # Those of one letter are words of other things, too.
    assert [word for line, word in words if line not in table
            and word in [shortcut for shortcut in SHORTCUTS if len(shortcut) > 1]] == []


def test_the_pages_name_agents_in_the_readers_of_their_events_only() -> None:
    pages = [path for folder in ("ui", "preview", "auth")
             for path in (ROOT / "static" / folder).glob("*.*")]
    assert len(pages) > 20
    for path in pages:
        text = path.read_text().partition("// --- Readers")[0]
        assert NAMED.findall(text) == [], path


def test_each_agents_events_have_a_reader_of_that_name() -> None:
    text = (ROOT / "static" / "ui" / "events.js").read_text()
    table = re.search(r"^const READERS = \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    assert table
    readers = re.findall(r"^  (\w+): \{", table[1], re.MULTILINE)
    assert sorted(readers) == sorted({agent.events for agent in AGENTS.values()})


def test_each_agent_has_its_package_and_version_in_the_image() -> None:
    script = (ROOT / "static" / "image" / "install-agents").read_text()
    installed = re.findall(r"^    (\w+)\) packages=.*@\$(\w+)_VERSION\"", script, re.MULTILINE)
    assert installed == [(name, name.upper()) for name in AGENTS]
    arguments = dict(words[0].split("=") for words in containerfile("ARG") if "=" in words[0])
    assert arguments["AGENTS"].split(",") == list(AGENTS)
    versions = {name: value for name, value in arguments.items() if value == "latest"}
    assert list(versions) == [f"{name.upper()}_VERSION" for name in AGENTS]
    assert all(f"`{version}`" in README for version in versions)


@pytest.mark.parametrize("agent", AGENTS.values(), ids=list(AGENTS))
def test_the_readme_has_each_agents_row(agent: Any) -> None:
    resume = " ".join(agent.resume)
    (row,) = [line for line in README.splitlines() if line.endswith(f"| `-- {resume}` |")
              and f"| {agent.title} |" in line]
    assert re.findall("`(.+?)`", row.split("|")[1]) == agent.shortcuts
    given = [f"{name}={value}" for name, value in agent.yolo_env.items()]
    assert re.findall("`(.+?)`", row.split("|")[3]) == [" ".join(agent.yolo), *given]


@pytest.mark.parametrize("agent", AGENTS.values(), ids=list(AGENTS))
def test_a_turns_events_are_marked_as_the_table_says(agent: Any) -> None:
    """As the agent has printed them."""
    lines = (STREAMS / f"{agent.program}.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    begins, ends, conversation, used = agent.turn
    types = [event["type"] for event in events]
    assert begins in types[:2] and types[-1] == ends
    assert any(isinstance(event.get(conversation), str) for event in events)
    found = events[-1]
    for key in used.split("."):
        found = found[key]
    assert any(isinstance(value, int) for value in found.values())


FIFTH = """\
    Agent("newname", "New Agent", "nn", yolo="--all", resume="--go-on", env={"NEWNAME_QUIET": "1"},
          yolo_env={"NEWNAME_MAY": "all"}, prompt="ask --json -- {prompt}",
          files=".newname/auth.json", moved="NEWNAME_HOME", variables="NEWNAME_KEY"),
"""
PROGRAM = """#!/bin/sh
[ "$1" != ask ] || { printf '{"type":"newname.said","text":"heard %s"}\\n' "$4"; exit; }
echo "$NEWNAME_QUIET $NEWNAME_MAY $*"
"""


@pytest.fixture
def fifth(engine: Engine) -> Engine:
    """The command line with an agent more, a row that was added, and the agent in its sessions."""
    fifth = copy.copy(engine)
    fifth.area = engine.directory()
    shutil.copytree(engine.area / "app", fifth.area / "app")
    code = fifth.area / "app" / "sandbox.py"
    begins = "\nAGENTS = {agent.program: agent for agent in (\n"
    assert code.read_text().count(begins) == 1
    code.write_text(code.read_text().replace(begins, begins + FIFTH))
    fifth.home, fifth.project = fifth.directory(), fifth.directory()
    program = fifth.project / "newname"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    write_config(fifth.home, env={"PATH": f"{fifth.project}:/bin:/usr/bin"})
    return fifth


@pytest.fixture
def service_of_five(fifth: Engine) -> Iterator[Service]:
    service = Service(fifth)
    yield service
    service.end()


@on_docker
def test_a_row_more_is_an_agent_of_the_command_line(fifth: Engine, name: str) -> None:
    printed = fifth.sandbox("config", "command", "-y", "nn", "--", "--more")
    assert printed.stdout.splitlines()[-1].endswith(" newname --all --more"), printed
    ran = fifth.sandbox("run", "-n", name, "-y", "newname", "--", "--more")
    assert ran.stdout == "1 all --all --more\n", ran.stderr
    (row,) = [row for row in json.loads(fifth.sandbox("ps", "--json").stdout)
              if row["name"] == name]
    assert row["agent"] == "newname"
    assert {"nn", "newname"} <= {*fifth.sandbox("__complete", "run", "-y", "").stdout.split()}
    assert " nn" in fifth.sandbox("run", "--help").stdout
    refused = fifth.sandbox("build", "--iv", "1.0", "--iba", "AGENTS=newnam")
    assert refused.returncode == 2 and "did you mean newname?" in refused.stderr


@on_docker
def test_a_row_more_is_an_agent_of_init(fifth: Engine) -> None:
    elsewhere = fifth.directory()
    (elsewhere / "auth.json").write_text("{}")
    env = {"NEWNAME_KEY": "hush", "NEWNAME_HOME": str(elsewhere)}
    made = fifth.sandbox("init", env=env)
    assert "sandbox run -r newname" in made.stdout and "hush" not in made.stdout, made
    profile = json.loads((fifth.home / "sandbox.json").read_text())["runs"]["newname"]
    assert profile["yolo"] == "nn"
    assert profile["volumes"] == [f"{elsewhere}/auth.json:/home/agent/.newname/auth.json"]
    assert "hush" in (fifth.home / "env" / "newname.env").read_text()


@on_docker
def test_a_row_more_is_an_agent_of_the_pages(service_of_five: Service, name: str) -> None:
    """What it prints is shown as text, for there is no reader of its events."""
    service = service_of_five
    answer = service.get("/api/profiles").json
    assert answer["agents"] == [details["name"] for details in answer["agentDetails"]]
    assert sorted(answer["agents"]) == sorted([*AGENTS, "newname"])
    (details,) = [row for row in answer["agentDetails"] if row["name"] == "newname"]
    assert details == {"name": "newname", "title": "New Agent", "shortcuts": ["nn", "newname"],
                       "agentPromptCommand": "newname ask --json -- {prompt}", "events": "newname"}
    with chromium() as browser:
        page = browser.page()
        log_in(page, service)
        create(page, service, name)
        page.see("What should New Agent do?")
        page.see("New Agent", ".sessions [aria-current] .where")
        submit(page, "say it's five")
        page.see("""{"type":"newname.said","text":"heard say it's five"}""", ".turn .raw")
        page.see("done", ".job-foot")
        open_screen(page, service, name, "agent")  # anew, with nothing known before
        page.wait("document.querySelector('.composer textarea').placeholder === 'Ask New Agent'")
        page.see("New Agent", ".session-head")
        page.goto(f"http://{service.address}/preview")
        tile = f".tile:has([href*='{name}'])"  # of those of all sessions
        page.see("New Agent", f"{tile} .about")
        page.see("heard say it's five", f"{tile} .tail")
        assert page.errors == []
        page.close()


def create(page: Page, service: Service, name: str) -> None:
    """Choose the new agent in the form."""
    page.goto(f"http://{service.address}/#/new")
    page.see("New Agent", ".choices")
    page.click("input[value=newname] + span")
    page.fill("input[placeholder='/home/me/project']", str(service.engine.project))
    page.fill("input[placeholder^='made from']", name)
    page.click("form button[type=submit]")
    page.wait(f"location.hash === '#/s/{name}/agent'", 60)


# --- Engines: what differs between them is in their drivers ---

MODULES = sorted(path.name for path in ROOT.glob("sandbox*.py"))


def parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text())


def strings(node: ast.AST) -> Iterator[ast.Constant]:
    """The text constants of a piece of code, those in f-strings too, without its docstrings."""
    doc = [statement.value for owner in ast.walk(node)
           if isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef)
           for statement in owner.body[:1] if isinstance(statement, ast.Expr)]
    for found in ast.walk(node):
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and found not in doc:
            yield found


def where(module: str, nodes: list[ast.Constant]) -> list[str]:
    """Places to look at, for the message of a failed test."""
    return [f"{module}:{node.lineno}: {node.value!r:.60}" for node in nodes]


def is_driver(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and "Engine" in (node.name, *map(ast.unparse, node.bases))


def outside_drivers(module: str) -> list[ast.Constant]:
    return [text for node in parsed(module).body if not is_driver(node) for text in strings(node)]


def test_there_is_a_driver_for_each_engine() -> None:
    drivers = {node.name.lower() for node in parsed("sandbox.py").body
               if isinstance(node, ast.ClassDef) and is_driver(node)}
    assert drivers == {"engine", *ENGINES}


@pytest.mark.parametrize("module", MODULES)
def test_engines_are_named_by_their_drivers(module: str) -> None:
    names = re.compile(rf"\b({'|'.join(ENGINES)})\b", re.IGNORECASE)
    assert where(module, [s for s in outside_drivers(module) if names.search(str(s.value))]) == []


@pytest.mark.parametrize("module", MODULES)
def test_the_words_of_engines_are_their_drivers(module: str) -> None:
    """No option of theirs stands elsewhere, and no argv that begins with an engine's name."""
    inside = [text for node in parsed("sandbox.py").body if is_driver(node)
              for text in strings(node)]
    words = {text.value for text in inside if re.fullmatch("--[a-z-]+", str(text.value))}
    words -= {flag for flags, _ in OPTIONS.values() for flag in flags.split()}
    words -= {flag for key in sandbox.KEYS.values() for flag in key.flags}
    words |= {"exec", "inspect"}
    assert where(module, [s for s in outside_drivers(module) if s.value in words]) == []
    started = [node for node in ast.walk(parsed(module)) if isinstance(node, ast.List)
               and node.elts and ast.unparse(node.elts[0]) == "engine.name"]
    assert [f"{module}:{node.lineno}" for node in started] == []


# --- Modules ---


def imported(module: str, top: bool) -> set[str]:
    """Modules of ours that a module imports: at its top, or anywhere."""
    tree = parsed(module)
    nodes = tree.body if top else list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {f"{name}.py" for name in names} & set(MODULES)


def test_there_is_no_circle_of_imports() -> None:
    """Nothing imports what imports it; `serve` alone reaches up, when it is called."""
    graph = {module: imported(module, top=True) for module in MODULES}
    while leaves := {module for module, needs in graph.items() if not needs}:
        graph = {module: needs - leaves for module, needs in graph.items() if module not in leaves}
    assert not graph
    assert imported("sandbox.py", top=True) == set()


# --- Keys: a row of sandbox.KEYS and a line of the README ---

# A key more than there are: what a person would add to have one.
ROW = """Key("shmSize", a_size, "--shm-size", "SIZE", "size of /dev/shm",
             variable="SANDBOX_SHM_SIZE", fixed=True, limit="shm-size")"""
LIST_ROW = 'Key("watched", a_word, "--watch", "PIN", "a PIN", kind="list", fixed=True, secret=True)'


@pytest.fixture
def more_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SANDBOX_HOME, with both rows in the table."""
    for row in (ROW, LIST_ROW):
        key = eval(row, vars(sandbox))
        monkeypatch.setitem(sandbox.KEYS, key.name, key)
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path))
    return tmp_path


def configure(home: Path, **keys: object) -> None:
    (home / "sandbox.json").write_text(json.dumps(keys))


def show(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert sandbox.main(["config", "show", *options]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_a_key_is_one_row_for_options_and_layers(
    more_keys: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"{more_keys}/sandbox.json: "
    assert "shmSize" not in show(capsys)
    monkeypatch.setenv("SANDBOX_SHM_SIZE", "1G")
    assert show(capsys)["shmSize"] == {"value": "1g", "source": "$SANDBOX_SHM_SIZE"}
    configure(more_keys, shmSize="2g", watched=["1234"], runs={"p": {"shmSize": "3g"}})
    assert show(capsys)["shmSize"] == {"value": "2g", "source": f"{path}shmSize"}
    assert show(capsys, "-r", "p")["shmSize"] == {"value": "3g", "source": f"{path}runs.p.shmSize"}
    found = show(capsys, "-r", "p", "--shm-size", "4g", "--watch", "5678")
    assert found["shmSize"] == {"value": "4g", "source": "--shm-size"}
    assert found["watched"] == [{"value": "<masked>", "source": f"{path}watched"},
                                {"value": "<masked>", "source": "--watch"}]
    found = show(capsys, "--watch", "5678", "--reveal")
    assert [item["value"] for item in found["watched"]] == ["1234", "5678"]
    for command in ("run", "config"):
        assert "--shm-size SIZE" in sandbox.parser_of(command).format_help()
    assert "--shm-size" not in sandbox.parser_of("build").format_help()


def test_a_key_is_one_row_for_what_is_wrong(more_keys: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{more_keys}/sandbox.json: "
    assert sandbox.main(["run", "--shm-size", "lots"]) == 2
    assert "--shm-size: 'lots' is not a size" in capsys.readouterr().err
    for keys, said in (({"shmSize": "lots"}, "shmSize: 'lots' is not a size"),
                       ({"watched": "x"}, "watched: it is not an array"),
                       ({"shmsize": "1g"}, "shmsize: unknown key (did you mean shmSize?)")):
        configure(more_keys, **keys)
        assert sandbox.main(["config", "show"]) == 1
        assert path + said in capsys.readouterr().err


def session_of(config: sandbox.Config, flags: sandbox.Layer, spec: dict[str, Any],
               ) -> sandbox.Session:
    return sandbox.Session("demo", "exited", sandbox.labels_of(config, flags, spec, "0:0"))


def test_a_key_is_one_row_for_what_a_session_is_created_from(
    more_keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = sandbox.argparse_of("run", ["--shm-size", "64m", "--watch", "1234", "-n", "demo"])
    flags = sandbox.flags_layer(args)
    config = sandbox.load_config(flags)
    spec = sandbox.spec_of(config)
    session = session_of(config, flags, spec)
    have, kept = session.created()
    assert (have, kept) == (spec, {"shmSize": "64m", "watched": ["1234"]})
    # what its creation said holds for it, with this as the source, and can be said anew
    later = sandbox.session_config(session, {})
    assert later.settings["shmSize"] == [("64m", "container demo")]
    assert sandbox.differences(have, sandbox.spec_of(later)) == []
    configure(more_keys, watched=["5678"])
    args = sandbox.argparse_of("run", ["--shm-size", "1g"])
    again = sandbox.load_config(sandbox.flags_layer(args))
    assert set(sandbox.differences(have, sandbox.spec_of(again))) == {
        "shmSize: it has 64m, asked for is 1g", "watched: it lacks 5678",
        "watched: it has 1234, which is no longer asked for"}


def test_a_session_that_is_older_than_a_key_goes_on(
    more_keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = sandbox.load_config()
    spec = {field: value for field, value in sandbox.spec_of(config).items()
            if field not in ("shmSize", "watched")}
    session = session_of(config, sandbox.Layer({}, "flags"), spec)
    have, _ = session.created()
    assert sandbox.differences(have, sandbox.spec_of(sandbox.session_config(session, {}))) == []
    configure(more_keys, shmSize="1g", watched=["1234"])
    assert set(sandbox.differences(have, sandbox.spec_of(sandbox.session_config(session, {})))) == {
        "shmSize: it has none, asked for is 1g", "watched: it lacks 1234"}


def test_a_key_is_one_row_for_a_container(engine: Engine, project: Path, name: str) -> None:
    """Added in the process of each command: the engine gets the value, and a difference is said."""
    row = f"sandbox.KEYS['shmSize'] = eval({ROW!r}, vars(sandbox))"
    program = f"import sys\nimport sandbox\n{row}\nsys.exit(sandbox.main(sys.argv[1:]))"

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [PYTHON, "-c", program, "run", "-n", name, *options, "-x", "df", "-k", "/dev/shm"]
        where = engine.where(env={"PYTHONPATH": str(engine.area / "app")})
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=TIMEOUT_SECONDS, **where)

    first = run("--shm-size", "24m")
    assert first.returncode == 0, first.stderr
    assert str(24 * 1024) in first.stdout.split()
    second = run("--shm-size", "32m")
    assert "differs from what is asked for: shmSize: it has 24m, asked for is 32m" in second.stderr
    assert str(24 * 1024) in second.stdout.split()
    assert "differs" not in run().stderr


# Where several keys are named and no more could be said by the table: fields of an answer of the
# API, and columns of ps. Agents have a `yolo` and an `env` of their own.
OF_ANOTHER_TABLE = {"session_data", "session_row", "lost_row", "print_table"}


def named_together(tree: ast.AST, function: str = "") -> Iterator[tuple[str, list[str]]]:
    """Each collection, call and string of words with two keys or more, and its function's name."""
    for node in ast.iter_child_nodes(tree):
        words: list[object] = []
        match node:
            case ast.Assign(targets=[ast.Name(id="KEYS" | "AGENTS")]):
                continue
            case ast.Tuple() | ast.List() | ast.Set():
                words = [item.value for item in node.elts if isinstance(item, ast.Constant)]
            case ast.Dict():
                words = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            case ast.Call(func=ast.Name(id="dict" | "fields")):  # which take any names
                words = [keyword.arg for keyword in node.keywords]
            case ast.Constant(value=str(text)) if all(map(str.isidentifier, text.split())):
                words = [*text.split()]
        keys = [word for word in words if isinstance(word, str) and word in sandbox.KEYS]
        if len(keys) > 1:
            yield function, keys
        inner = node.name if isinstance(node, ast.FunctionDef) else function
        yield from named_together(node, inner)


def test_keys_are_listed_in_their_table_only() -> None:
    trees = (ast.parse(path.read_text()) for path in sorted(ROOT.glob("sandbox*.py")))
    found = list(itertools.chain.from_iterable(map(named_together, trees)))
    assert {function for function, _ in found} <= OF_ANOTHER_TABLE, found
    # and the table itself would be seen
    for text in ('X = {"memory": 1, "cpus": 2}', 'X = ["memory", "cpus"]', 'X = "memory cpus"',
                 "dict(memory=1, cpus=2)", "fields(data, memory=str, cpus=str)"):
        assert list(named_together(ast.parse(text))) == [("", ["memory", "cpus"])]


# --- Modules: what sandbox_web uses of sandbox is listed at its top ---


def used_of_sandbox(tree: ast.Module) -> set[str]:
    """The names of sandbox.py that a module imports or takes as attributes."""
    imports = {alias.name for node in ast.walk(tree)
               if isinstance(node, ast.ImportFrom) and node.module == "sandbox"
               for alias in node.names}
    return imports | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                      and isinstance(node.value, ast.Name) and node.value.id == "sandbox"}


def test_what_the_service_uses_of_sandbox_is_listed_at_its_top() -> None:
    tree = ast.parse((ROOT / "sandbox_web.py").read_text())
    _, _, listed = (ast.get_docstring(tree) or "").partition("All that it uses of sandbox.py")
    rooms = "\n".join(re.findall(r"^ {4}.*", listed, re.MULTILINE))
    names = re.sub(r"\w+:", "", rooms).split()
    assert len(names) == len(set(names))
    assert set(names) == used_of_sandbox(tree) - {"__file__"}
