"""The shape of the code: one place for each thing, and what follows from it."""

import ast
import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PYTHON, ROOT, TIMEOUT_SECONDS, Engine

import sandbox

# --- Keys ---

# A key more than there are: what a person would add to have one.
ROW = """Key("shmSize", a_size, "--shm-size", "SIZE", "size of /dev/shm",
             variable="SANDBOX_SHM_SIZE", fixed=True, limit="--shm-size")"""
LIST_ROW = 'Key("watched", a_word, "--watch", "PIN", "a PIN", kind="list", fixed=True, secret=True)'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"{home}/sandbox.json: "
    assert "shmSize" not in show(capsys)
    monkeypatch.setenv("SANDBOX_SHM_SIZE", "1G")
    assert show(capsys)["shmSize"] == {"value": "1g", "source": "$SANDBOX_SHM_SIZE"}
    configure(home, shmSize="2g", watched=["1234"], runs={"p": {"shmSize": "3g"}})
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


def test_a_key_is_one_row_for_what_is_wrong(home: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{home}/sandbox.json: "
    assert sandbox.main(["run", "--shm-size", "lots"]) == 2
    assert "--shm-size: 'lots' is not a size" in capsys.readouterr().err
    for keys, said in (({"shmSize": "lots"}, "shmSize: 'lots' is not a size"),
                       ({"watched": "x"}, "watched: it is not an array"),
                       ({"shmsize": "1g"}, "shmsize: unknown key (did you mean shmSize?)")):
        configure(home, **keys)
        assert sandbox.main(["config", "show"]) == 1
        assert path + said in capsys.readouterr().err


def session_of(config: sandbox.Config, flags: sandbox.Layer, spec: dict[str, Any],
               ) -> sandbox.Session:
    return sandbox.Session("demo", "exited", sandbox.labels_of(config, flags, spec, "0:0"))


def test_a_key_is_one_row_for_what_a_session_is_created_from(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    configure(home, watched=["5678"])
    args = sandbox.argparse_of("run", ["--shm-size", "1g"])
    again = sandbox.load_config(sandbox.flags_layer(args))
    assert set(sandbox.differences(have, sandbox.spec_of(again))) == {
        "shmSize: it has 64m, asked for is 1g", "watched: it lacks 5678",
        "watched: it has 1234, which is no longer asked for"}


def test_a_session_that_is_older_than_a_key_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = sandbox.load_config()
    spec = {field: value for field, value in sandbox.spec_of(config).items()
            if field not in ("shmSize", "watched")}
    session = session_of(config, sandbox.Layer({}, "flags"), spec)
    have, _ = session.created()
    assert sandbox.differences(have, sandbox.spec_of(sandbox.session_config(session, {}))) == []
    configure(home, shmSize="1g", watched=["1234"])
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
# API, and the place of a session, which are two of them together.
OF_ANOTHER_TABLE = {"session_data", "post_recreate"}


def named_together(tree: ast.AST, function: str = "") -> Iterator[tuple[str, list[str]]]:
    """Each collection, call and string of words with two keys or more, and its function's name."""
    for node in ast.iter_child_nodes(tree):
        words: list[object] = []
        match node:
            case ast.Assign(targets=[ast.Name(id="KEYS")]):
                continue
            case ast.Tuple() | ast.List() | ast.Set():
                words = [item.value for item in node.elts if isinstance(item, ast.Constant)]
            case ast.Dict():
                words = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            case ast.Call():
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
    assert list(named_together(ast.parse('X = {"memory": 1, "cpus": 2}\nY = "memory cpus"')))


# --- End of keys ---
