"""Configuration: layers, what each key takes, what a wrong file is answered with, and `init`.

No test here needs an engine: those on PATH only note that they were called.
"""

import json
import os
import random
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import sandbox

SEED = 20240229


class Tool:
    """Our command in this process; SANDBOX_HOME, HOME and the directory are below tmp_path."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home, self.person, self.project = (
            folder / name for name in ("sandbox", "person", "project"))
        self.called, self.capsys = folder / "called", capsys
        self.path = self.home / "sandbox.json"

    def configure(self, **keys: object) -> None:
        self.write(json.dumps(keys))

    def write(self, text: str) -> None:
        self.home.mkdir(exist_ok=True)
        self.path.write_text(text)

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        try:
            status = sandbox.main(argv)
        except SystemExit as end:
            assert isinstance(end.code, int)
            status = end.code
        return status, *self.capsys.readouterr()

    def show(self, *options: str) -> dict[str, Any]:
        status, out, err = self("config", "show", *options)
        assert (status, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    def value(self, key: str, *options: str) -> Any:
        return self.show("--reveal", *options)[key]["value"]

    def refused(self, status: int, *argv: str) -> str:
        """The error, of two lines at most, of a command that prints nothing and calls no engine."""
        found, out, err = self(*argv)
        assert (found, out) == (status, ""), err
        lines = err.splitlines()
        assert len(lines) in (1, 2)
        assert lines[0].startswith("sandbox: ")
        assert all(x.startswith("  ") for x in lines[1:])
        assert not self.called.exists()
        return err


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
         capsys: pytest.CaptureFixture[str]) -> Tool:
    tool = Tool(tmp_path, capsys)
    for folder in (tool.person, tool.project, tmp_path / "bin"):
        folder.mkdir()
    for engine in ("docker", "podman"):
        program = tmp_path / "bin" / engine
        program.write_text(f"#!/bin/sh\n: >'{tool.called}'\nexit 1\n")
        program.chmod(0o755)
    ours = ("SANDBOX_RUNTIME", "SANDBOX_SERVER_USER", "SANDBOX_SERVER_PASS", "DOCKER_HOST",
            "CONTAINER_HOST",
            "CODEX_HOME", "CLAUDE_CONFIG_DIR")
    for name in (*ours, *(name for agent in sandbox.AGENTS.values() for name in agent.variables)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SANDBOX_HOME", str(tool.home))
    monkeypatch.setenv("HOME", str(tool.person))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.defpath}")
    monkeypatch.chdir(tool.project)
    return tool


# --- Layers ---


def test_without_a_file_the_defaults_hold(tool: Tool) -> None:
    found = tool.show()
    assert found["hostPath"] == {"value": str(tool.project), "source": "default"}
    assert {key: found[key]["value"] for key in ("imageVersion", "network", "serverUser")} == {
        "imageVersion": "1.0-common",
        "network": "open",
        "serverUser": "admin",
    }
    assert found["env"] == {}


@pytest.mark.parametrize("steps", range(1, 7))
def test_of_the_six_steps_the_last_that_sets_a_variable_wins(tool: Tool, tmp_path: Path,
                                                             steps: int) -> None:
    files = [tmp_path / f"{step}.env" for step in (1, 2, 3)]
    for step, file in enumerate(files, 1):
        file.write_text(f"# step\nexport V={step}\nONLY{step}=x\n" if step <= steps else "")
    env = {step: {"V": str(step), f"ONLY{step}": "x"} if step <= steps else {}
           for step in (4, 5, 6)}
    profile = {"envFile": [str(files[1])], "env": env[5]}
    tool.configure(envFile=[str(files[0])], env=env[4],
                   runs={"p": profile, "other": {"env": {"V": "no"}}})
    flags = [word for name, value in env[6].items() for word in ("-e", f"{name}={value}")]
    found = tool.show("-r", "p", "--ef", str(files[2]), *flags)["env"]
    sources = [*(f"{file}:2" for file in files), f"{tool.path}: env.V",
               f"{tool.path}: runs.p.env.V", "-e"]
    assert found["V"] == {"value": str(steps), "source": sources[steps - 1]}
    assert set(found) == {"V", *(f"ONLY{step}" for step in range(1, steps + 1))}


POOL: dict[str, list[Any]] = {
    "yolo": ["c", "cx"],
    "command": ["make", ["ls", "-l"]],
    "memory": ["1g", "2g"],
    "network": ["none", "host"],
    "volumes": [[], ["/a:/b"], ["/c:/d:ro", "/a:/b"]],
    "ports": [["127.0.0.1:1:2"], ["0.0.0.0:3:4/udp"]],
    "envFile": [["/1"], ["/2", "/3"], ["/3", "/1"]],
    "env": [{}, {"A": "4", "B": "4"}, {"B": "5"}, {"C": "6"}],
}
FILES = {"/1": {"A": ("1", 1), "C": ("1", 2)}, "/2": {"A": ("2", 1), "D": ("2", 2)},
         "/3": {"C": ("3", 1)}}


def reference(layers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    settings: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            appended = isinstance(value, list) and key != "command"
            settings[key] = settings.get(key, []) + value if appended else value
            settings.pop({"yolo": "command", "command": "yolo"}.get(key, ""), None)
    del settings["env"]
    env: dict[str, str] = {}
    for path in settings.get("envFile", []):
        env.update({name: value for name, (value, _) in FILES[path].items()})
    for layer in layers:
        env |= layer.get("env", {})
    return settings, env


def test_any_layers_merge_as_the_reference_says() -> None:
    chance = random.Random(SEED)
    for _ in range(2000):
        layers: list[dict[str, Any]] = [{"env": {}}]
        for _ in range(chance.randrange(1, 5)):
            keys = chance.sample(list(POOL), chance.randrange(len(POOL)))
            layers.append({key: chance.choice(POOL[key]) for key in keys
                           if key != "yolo" or "command" not in keys})
        checked = [sandbox.Layer(values, "file", f"layer {n}: ") for n, values in enumerate(layers)]
        settings = sandbox.merge(checked)
        names = {"c": "claude", "cx": "codex"}
        named = [{**x, "yolo": names[x["yolo"]]} if "yolo" in x else x for x in layers]
        expected, expected_env = reference(named)
        found = {k: [s[0] for s in v] if sandbox.KEYS[k].kind == "list" else v[-1][0]
                 for k, v in settings.items()}
        assert found == expected
        env = sandbox.merge_env(checked, FILES.__getitem__)
        assert {name: setting[0] for name, setting in env.items()} == expected_env


@pytest.mark.parametrize(("origin", "adds"), [
    ("file", False), ("profile", False), ("settings", False),
    ("created", True), ("flags", True), ("request", True),
])
@pytest.mark.parametrize("places", [{}, {"network": "a place"}])
def test_whether_rules_are_added_is_said_by_the_origin(origin: str, adds: bool,
                                                       places: dict[str, str]) -> None:
    """And not by the way in which a layer's places are named."""
    below = sandbox.Layer({"network": {"allow": ["a.test"], "deny": ["b.test"]}}, "file")
    layer = sandbox.Layer({"network": {"allow": ["b.test"]}}, origin, places=places)
    (network, source), = sandbox.merge([below, layer])["network"]
    assert network == {"allow": ["a.test", "b.test"] if adds else ["b.test"]}
    assert source == places.get("network", "network")


def test_a_value_says_where_it_comes_from(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    tool.configure(memory="1g", cpus=2, volumes=["/a:/a"],
                   runs={"p": {"cpus": 1.5, "volumes": ["~/b:/b:ro"]}})
    monkeypatch.setenv("SANDBOX_RUNTIME", "podman")
    found = tool.show("-r", "p", "-v", "/c:/c", "--iv", "2.0-full")
    assert found["memory"] == {"value": "1g", "source": f"{tool.path}: memory"}
    assert found["cpus"] == {"value": "1.5", "source": f"{tool.path}: runs.p.cpus"}
    assert found["runtime"] == {"value": "podman", "source": "$SANDBOX_RUNTIME"}
    assert found["imageVersion"] == {"value": "2.0-full", "source": "--iv"}
    assert found["pidsLimit"]["source"] == "default"
    assert found["volumes"] == [
        {"value": "/a:/a", "source": f"{tool.path}: volumes"},
        {"value": f"{tool.person}/b:/b:ro", "source": f"{tool.path}: runs.p.volumes"},
        {"value": "/c:/c", "source": "-v"},
    ]


def test_the_higher_of_yolo_and_command_counts(tool: Tool) -> None:
    tool.configure(yolo="c", runs={"p": {"command": "make"}, "q": {"command": ["ls", "-l"]}})
    assert tool.value("yolo") == "claude"
    for options, key, value in (
        (("-r", "p"), "command", "make"),
        (("-r", "q"), "command", ["ls", "-l"]),
        (("-r", "p", "-y", "agent-c"), "yolo", "codex"),
        (("-x", "bash", "-l"), "command", ["bash", "-l"]),
    ):
        found = tool.show(*(options if "-x" not in options else ("-r", "p", *options)))
        assert found[key]["value"] == value and len({"yolo", "command"} & set(found)) == 1


@pytest.mark.parametrize(("key", "flag", "low", "high"),
                         [("imageVersion", "--iv", "1.0-common", "2-full")])
def test_the_command_line_overrides_the_profile_overrides_the_file(
    tool: Tool, key: str, flag: str, low: str, high: str
) -> None:
    tool.configure(**{key: low}, runs={"p": {key: high}})
    assert (tool.value(key), tool.value(key, "-r", "p")) == (low, high)
    assert tool.value(key, "-r", "p", flag, low) == low


@pytest.mark.parametrize(
    ("key", "variable"),
    [("serverUser", "SANDBOX_SERVER_USER"), ("serverPass", "SANDBOX_SERVER_PASS")]
)
def test_credentials_come_from_profile_file_variable_default(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, key: str, variable: str
) -> None:
    assert tool.show().get(key, {}).get("value") == ("admin" if key == "serverUser" else None)
    monkeypatch.setenv(variable, "of the environment")
    assert tool.show("--reveal")[key] == {"value": "of the environment", "source": f"${variable}"}
    tool.configure(**{key: "of the file"}, runs={"p": {key: "of the profile"}, "q": {}})
    assert tool.value(key, "-r", "q") == "of the file"
    assert tool.value(key, "-r", "p") == "of the profile"


def test_the_engine_comes_from_flag_variable_profile_file(tool: Tool,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    tool.configure(runtime="docker", runs={"p": {"runtime": "podman"}})
    assert (tool.value("runtime"), tool.value("runtime", "-r", "p")) == ("docker", "podman")
    monkeypatch.setenv("SANDBOX_RUNTIME", "docker")
    assert tool.value("runtime", "-r", "p") == "docker"
    assert tool.value("runtime", "-r", "p", "--rt", "podman") == "podman"
    monkeypatch.setenv("SANDBOX_RUNTIME", "lxc")
    refused = tool.refused(1, "ps")
    assert "$SANDBOX_RUNTIME: 'lxc' is not an engine: use one of docker, podman" in refused


def test_secrets_are_masked_unless_revealed(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text("ANTHROPIC_AUTH_TOKEN=hush1\nMODEL=opus\n")
    env = {"my_api_key": "hush3", "DB_PASSWORD": "hush4"}
    tool.configure(serverPass="hush2", envFile=[f"{tmp_path}/a.env"], env=env)
    status, out, _ = tool("config", "show", "-e", "CLIENT_SECRET=hush5")
    assert status == 0 and "hush" not in out and "opus" in out
    assert json.loads(out)["env"]["DB_PASSWORD"] == {
        "value": "<masked>", "source": f"{tool.path}: env.DB_PASSWORD"}
    _, out, _ = tool("config", "show", "-e", "CLIENT_SECRET=hush5", "--reveal")
    assert all(f"hush{n}" in out for n in range(1, 6))


def test_an_env_file_of_the_command_line_may_be_relative(tool: Tool) -> None:
    (tool.project / "a.env").write_text("A=1\n")
    (tool.person / "b.env").write_text("B=2\n")
    found = tool.show("--ef", "a.env", "--ef", "~/b.env", "--ef", "../project/a.env")
    paths = [str(tool.project / "a.env"), str(tool.person / "b.env")]
    assert [item["value"] for item in found["envFile"]] == [*paths, paths[0]]
    assert found["env"]["A"] == {"value": "1", "source": f"{paths[0]}:1"}


# --- Wrong files ---


COMMA_COLUMN = 19 if sys.version_info >= (3, 13) else 20  # the comma, or what follows
BROKEN: list[tuple[str, list[str]]] = [
    ('{"volumes": ["/a:/b"],\n  "memory" "1g"}', [":2:12: "]),
    ('{"env": {"A": "1"},}', [f":1:{COMMA_COLUMN}: "]),
    ("", [":1:1: "]),
    ("\ufeff{}", [":1:1: "]),
    ("[]", ["JSON object"]),
    ("null", ["JSON object"]),
    ('{"runs": []}', ["JSON object"]),
    ('{"runs": {"p": null}}', ["runs.p is not an object"]),
    ('{"runs": {"p": ["yolo"]}}', ["runs.p is not an object"]),
    ("[" * 100_000, []),
    ('{"yolo": ' + "[" * 980 + "]" * 980 + "}", []),
    ('{"pidsLimit": ' + "1" * 5000 + "}", ["digits"]),
    ('{"volume": ["/a:/b"]}', [": volume: unknown key (did you mean volumes?)", "imageVersion"]),
    ('{"runs": {"p": {"imageversion": "1-x"}}}',
     ["runs.p.imageversion: unknown key (did you mean imageVersion?)"]),
    ('{"runs": {"p": {"runs": {}}}}', ["runs.p.runs: unknown key"]),
    ('{"": 1}', ["unknown key"]),
    ('{"yolo": "claud"}', [": yolo: 'claud' is not an agent", "did you mean claude?"]),
    ('{"runtime": "dokcer"}', ["did you mean docker?"]),
    ('{"yolo": "c", "command": "ls"}', ["command: not together with yolo"]),
    ('{"envFile": ["env/a.env"]}', [": envFile: 'env/a.env' is not an absolute path"]),
    ('{"envFile": ["/nowhere/a.env"]}', ["env file /nowhere/a.env: No such file"]),
    ('{"envFile": "/a.env"}', [": envFile: it is not an array"]),
    ('{"env": {"1A": "x"}}', [": env: '1A' is not a name"]),
    ('{"env": {"A": 1}}', [": env: the value of A is not a string"]),
    ('{"env": {"A": "x\\u0000y"}}', [": env: the value of A"]),
    ('{"env": {"A": "\\ud800"}}', [": env: the value of A"]),
    ('{"agentPromptCommand": "claude -p"}', ["{prompt}"]),
    ('{"serverPass": ""}', [": serverPass: it is empty"]),
]


@pytest.mark.parametrize(("text", "words"), BROKEN, ids=[text[:30] for text, _ in BROKEN])
@pytest.mark.parametrize("command",
                         ["config show", "config command", "run", "--rm-on-exit -x true"])
def test_a_wrong_file_ends_every_command_with_one_error(tool: Tool, text: str, words: list[str],
                                                        command: str) -> None:
    tool.write(text)
    options = ("-r", "p") if '"p"' in text else ()
    first, *rest = command.split()
    err = tool.refused(1, first, *options, *rest)
    assert str(tool.path) in err or "/nowhere/a.env" in err
    assert all(word in err for word in words)


@pytest.mark.parametrize("key", sandbox.KEYS)
def test_no_key_takes_a_value_of_another_type(tool: Tool, key: str) -> None:
    numbers, strings = [None, True, float("nan"), 10**400], ["\ud800", "/\ud800", ["/\ud800"]]
    wrong: list[Any] = [*numbers, *strings, [[]], [None], {"allow": 1}, {"A": {"B": "c"}}]
    for value in wrong:
        if (key, value) == ("checkpoint", True):
            continue
        tool.configure(**{key: value})
        assert f"{tool.path}: {key}: " in tool.refused(1, "config", "show")
        tool.configure(runs={"p": {key: value}})
        assert f"{tool.path}: runs.p.{key}: " in tool.refused(1, "run", "-r", "p")


def test_a_missing_profile_is_answered_with_those_that_exist(tool: Tool) -> None:
    assert "sandbox init" in tool.refused(1, "run", "-r", "work")
    tool.configure(runs={"work": {}, "play": {}})
    err = tool.refused(1, "run", "-r", "worc")
    assert "no run profile 'worc' (did you mean work?)" in err and "work, play" in err
    assert "no run profile ''" in tool.refused(1, "run", "-r", "")


def test_a_file_that_cannot_be_read_is_named(tool: Tool) -> None:
    tool.home.mkdir()
    tool.path.write_bytes(b'{"memory": "\xff"}')
    assert str(tool.path) in tool.refused(1, "config", "show")
    tool.path.unlink()
    tool.path.mkdir()
    assert f"{tool.path}: Is a directory" in tool.refused(1, "run")


@pytest.mark.parametrize(
    "options",
    [
        ("-v", "x"),
        ("-v", "a:/b"),
        ("-v", "/a:b"),
        ("-p", "80"),
        ("-e", "1A=b"),
        ("-e", "=b"),
        ("-e", "NOT_SET_ANYWHERE"),
        ("--ef", ""),
        ("-y", "nobody"),
        ("-n", "ä"),
        ("-n", ""),
        ("--hp", ""),
        ("--cp", "relative"),
        ("--iv", "latest"),
        ("--in", "UPPER"),
        ("--net", "moon"),
        ("--memory", "lots"),
        ("--cpus", "0"),
        ("--pids-limit", "-1"),
        ("--rt", "lxc"),
        ("-y", "c", "-x", "true"),
        ("-x", ""),
        ("-x", " "),
        ("-x",),
    ],
    ids=repr,
)
def test_a_wrong_option_is_a_usage_error(tool: Tool, options: tuple[str, ...]) -> None:
    for command in ("run", "config"):
        err = tool.refused(2, command, *(("show",) if command == "config" else ()), *options)
        assert options[0] in err or "-x" in err


# --- Values ---


def test_paths(tool: Tool) -> None:
    home = str(tool.person)
    for value, path in {"/a": "/a", "/a//b/../c/": "/a/c", "//a": "/a",
                        "~/x y": f"{home}/x y", "/ü:": "/ü:"}.items():
        assert sandbox.check_value("hostPath", value) == path


def short(value: object) -> str:
    return ascii(value)[:40]


GOOD: list[tuple[str, Any, Any]] = [
    ("volumes", "/a:/b", "/a:/b"),
    ("volumes", "/a/:/b/../c:ro", "/a:/c:ro"),
    ("volumes", "/a:/b:z", "/a:/b:z"),
    ("volumes", "/a:/b:ro,Z", "/a:/b:ro,Z"),
    ("volumes", "/a b,c=d\"e:/ü 'f", "/a b,c=d\"e:/ü 'f"),
    ("ports", "3000:80", "127.0.0.1:3000:80"),
    ("ports", "0.0.0.0:3000:80/udp", "0.0.0.0:3000:80/udp"),
    ("ports", "[::1]:1:65535/tcp", "[::1]:1:65535/tcp"),
    ("imageBuildArgs", "TOOL=go,rust", "TOOL=go,rust"),
    ("imageBuildArgs", "A=", "A="),
    ("imageName", "localhost/sandbox", "localhost/sandbox"),
    ("imageName", "registry.example:5000/team/x_y.z-1", "registry.example:5000/team/x_y.z-1"),
    ("imageVersion", "1-common", "1-common"),
    ("imageVersion", "1.20.3-go-rust", "1.20.3-go-rust"),
    ("containerName", "a1", "a1"),
    ("containerName", "A_b.c-9", "A_b.c-9"),
    ("containerName", "a" * 128, "a" * 128),
    ("memory", "512m", "512m"),
    ("memory", "4G", "4g"),
    ("memory", "4gb", "4gb"),
    ("memory", "100000", "100000"),
    ("cpus", 1.5, "1.5"),
    ("cpus", 4, "4"),
    ("cpus", "0.5", "0.5"),
    ("pidsLimit", 100, 100),
    ("pidsLimit", "100", 100),
    ("command", "make test", "make test"),
    ("command", ["printf", "", "a b"], ["printf", "", "a b"]),
    ("network", "none", "none"),
    ("network", {"allow": ["example.org", "*.example.org:443"]},
     {"allow": ["example.org", "*.example.org:443"]}),
    ("agentPromptCommand", "claude -p {prompt}", "claude -p {prompt}"),
    ("autostart", "", ""),
    ("notify", "tell 'me now' $HOME;", ["tell", "me now", "$HOME;"]),
    ("notify", ["/a/../tell", ""], ["/tell", ""]),
    *(("yolo", word, name) for name, words in {
        "claude": ("c", "cc", "agent-a", "claude"),
        "gemini": ("gm", "g", "agent-b", "gemini"),
        "codex": ("cx", "agent-c", "codex"),
        "opencode": ("oc", "agent-d", "opencode"),
    }.items() for word in words),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "normal"), GOOD, ids=short)
def test_a_good_value_is_normalised(key: str, value: Any, normal: Any) -> None:
    if sandbox.KEYS[key].kind == "list":
        value, normal = [value], [normal]
    assert sandbox.check_value(key, value) == normal
    assert sandbox.check_value(key, normal) == normal


BAD: dict[str, list[Any]] = {
    "volumes": ["", "/a", "a:/b", "/a:b", "/a:/b:", "/a:/b:x", "/a:/b:ro:z", "/a:/", "/a://",
                "/a:/b/..", "::", 7],
    "ports": ["", "80", "0:80", "80:0", "65536:80", "80:80/sctp", "a:b", "1:2:3:4", ":80:80", "80:",
              "٣:80", "-1:80"]
    + ["localhost x:80:80", "-a:80:80", "[::1:80:80", "1" * 5000 + ":80"],
    "imageBuildArgs": ["", "A", "=x", "1A=x", "A B=x"],
    "imageName": ["", "A", "a:1", "host:5000", "a/", "a b", "ä", "-a", "/a", "a//b", "..", "a\n"],
    "imageVersion": ["", "1.0", "latest", "1.0-", "-common", "v1-x", "1..0-x", "1-x y", "²-x",
                     "1-ä", "1-" + "x" * 100],
    "containerName": ["", "a", "-ab", ".ab", "a b", "ä1", "a/b", "a" * 129, "ab\n"],
    "hostPath": ["", "x", "./x", "~user/x", "/a\0"],
    "memory": ["", "g", "0g", "-1g", "1.5g", "4kk", "4gk", "4bg", "4 g", "٤g", "1e3", 4],
    "cpus": [0, -1, "", "x", "nan", "inf", 1e9, True, "1_0", [], "1" * 5000],
    "pidsLimit": [0, -1, 1.5, "1.0", "", True, "²", "1" * 5000, 10**30],
    "command": ["", " \n", [], [""], ["", "x"], ["a", 1], ["a\0"], {}],
    "network": ["", "bridge", {}, {"allow": "x"}, {"allow": [""]}, {"allow": [1]},
                {"allow": [], "refuse": []},
                {"allow": ["a" * 64 + ".example.org"]}],
    "yolo": ["", "C", "agent-e", [], {}],
    "serverUser": ["", 7],
    "notify": ["", " ", "it's", "''", "./tell", "bin/tell me", [], [""], ["a", 7], {}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items()
                                            for value in values], ids=short)
def test_a_bad_value_is_refused_with_a_reason(key: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        sandbox.check_value(key, [value] if sandbox.KEYS[key].kind == "list" else value)
    assert error.type is ValueError and "Exceeds the limit" not in str(error.value)


NAMES = {
    "containerName": r"[A-Za-z0-9][\w.-]{1,127}",
    "imageName": r"([a-z0-9][a-z0-9_.-]*(:\d+)?/)?([a-z0-9][a-z0-9_.-]*/)*[a-z0-9][a-z0-9_.-]*",
    "imageVersion": r"\d+(\.\d+)*-[\w.-]{1,80}",
}


@pytest.mark.parametrize("key", NAMES)
def test_names_are_what_their_pattern_says(key: str) -> None:
    chance, good = random.Random(10), 0
    for _ in range(20000):
        text = "".join(chance.choices(["a", "b", "1", "20", *".-_:/", "A", "²", "\n"],
                                      [5, 5, 5, 5, 2, 2, 2, 2, 2, 0.2, 0.2, 0.2],
                                      k=chance.choice([1, 3, 6, 9])))
        text *= chance.choice([1, 1, 1, 60])
        expected = bool(re.fullmatch(NAMES[key], text, re.ASCII))
        good += expected
        try:
            assert sandbox.check_value(key, text) == text and expected, text
        except ValueError:
            assert not expected, text
    assert good > 50


def test_a_default_is_what_its_check_makes_of_it() -> None:
    for key in sandbox.KEYS.values():
        if key.default is not None:
            assert key.check(key.default) == key.default
            assert type(key.check(key.default)) is type(key.default)


def test_an_engines_socket_is_not_mounted_unless_wanted(tool: Tool,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tool.person / "run"
    folder.mkdir()
    (folder / "engine").touch()
    (tool.person / "link").symlink_to(folder)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/engine")
    for mount in (f"{folder}/engine", folder, tool.person / "link", tool.person, "/",
                  "/nowhere/docker.sock"):
        for options in (("-v", f"{mount}:/x"), ("--hp", str(mount), "--cp", "/x")):
            err = tool.refused(125, "run", *options)
            assert f"{mount} holds an engine's socket" in err and "--allow-engine-socket" in err
            status, _, err = tool("run", "--allow-engine-socket", *options)
            assert status == 125 and "socket:" not in err and tool.called.exists()
            tool.called.unlink()


def test_two_mounts_on_one_place_are_refused(tool: Tool) -> None:
    assert "two mounts go to /x" in tool.refused(125, "run", "-v", "/etc:/x", "-v", "/usr:/x")
    refused = tool.refused(125, "run", "-v", f"/etc:{tool.project}")
    assert f"two mounts go to {tool.project}" in refused


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b1m\u202e\u2028\r"


@pytest.mark.parametrize(
    ("config", "argv"),
    [
        ({HOSTILE: 1}, ["run"]),
        ({"runs": {HOSTILE: {"cpus": "x"}}}, ["run", "-r", HOSTILE]),
        ({"runs": {HOSTILE: {}}}, ["run", "-r", "other"]),
        ({"hostPath": f"/{HOSTILE}"}, ["run"]),
        ({"envFile": ["/nowhere/\u202e"]}, ["run"]),
        ({"volumes": ["/run:/\u202e", "/run:/\u202e"]}, ["run"]),
        ({}, ["rm", HOSTILE]),
        ({}, ["run", "--hp", "\u202e/docker.sock", "--cp", "/x"]),
        ({}, ["run", "-e", HOSTILE]),
        ({}, ["doctor"]),
    ],
)
def test_no_word_of_a_path_or_a_file_acts_on_the_terminal(tool: Tool, config: dict[str, Any],
                                                          argv: list[str]) -> None:
    tool.configure(**config)
    if argv == ["doctor"]:
        tool.home.rename(tool.home.with_name("\u202e"))
        # which the fixture sets back
        os.environ["SANDBOX_HOME"] = str(tool.home.with_name("\u202e"))
    status, out, err = tool(*argv)
    assert status and err + out
    assert [c for c in out + err if not c.isprintable() and c != "\n"] == []


# --- init ---


def put(path: Path, text: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


ADOPTED = {
    "claude": (".claude/.credentials.json", "ANTHROPIC_AUTH_TOKEN", "c"),
    "gemini": (".gemini/oauth_creds.json", "GEMINI_API_KEY", "gm"),
    "codex": (".codex/auth.json", "OPENAI_API_KEY", "cx"),
    "opencode": (".local/share/opencode/auth.json", "OPENCODE_API_KEY", "oc"),
}


@pytest.mark.parametrize("agent", ADOPTED)
def test_init_makes_a_profile_of_an_agents_settings(tool: Tool, monkeypatch: pytest.MonkeyPatch,
                                                    agent: str) -> None:
    file, variable, _ = ADOPTED[agent]
    put(tool.person / file)
    monkeypatch.setenv(variable, "hush")
    status, out, _ = tool("init")
    assert status == 0
    assert variable in out
    assert file in out
    assert f"sandbox run -r {agent}" in out
    assert "hush" not in out
    assert {mode(path) for path in (tool.path, tool.home / "env" / f"{agent}.env")} == {0o600}
    assert {mode(path) for path in (tool.home, tool.home / "env")} == {0o700}
    found = tool.show("-r", agent, "--reveal")
    assert found["yolo"]["value"] == agent and found["env"][variable]["value"] == "hush"
    volumes = [item["value"] for item in found["volumes"]]
    assert volumes == [f"{tool.person}/{file}:/home/agent/{file}"]
    assert list(json.loads(tool.path.read_text())["runs"]) == [agent]


@pytest.mark.parametrize(
    ("variable", "file"), [("CODEX_HOME", "auth.json"), ("CLAUDE_CONFIG_DIR", ".credentials.json")]
)
def test_init_looks_where_the_agent_was_told_to(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, variable: str, file: str
) -> None:
    put(tool.person / "elsewhere" / file)
    monkeypatch.setenv(variable, str(tool.person / "elsewhere"))
    assert tool("init")[0] == 0
    (agent,) = json.loads(tool.path.read_text())["runs"]
    volume = tool.show("-r", agent)["volumes"][0]["value"]
    assert volume == f"{tool.person}/elsewhere/{file}:/home/agent/.{agent}/{file}"


def test_init_with_nothing_to_adopt_says_so(tool: Tool) -> None:
    status, _, err = tool("init")
    assert status == 0 and err.startswith("sandbox: nothing ") and tool.show()["env"] == {}


def test_init_leaves_a_profile_that_exists_as_it_is(tool: Tool,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    tool.configure(runs={"claude": {"command": "mine"}})
    put(tool.home / "env/claude.env", "MINE=1\n")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "hush")
    before = contents(tool.home)
    status, _, err = tool("init")
    assert status == 0
    assert "runs.claude exists" in err
    assert "--force" in err
    assert contents(tool.home) == before


def test_init_force_renews_a_profile_and_loses_nothing(tool: Tool,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(tool.home / "env/claude.env", "# mine\nexport MINE='1'\nANTHROPIC_MODEL=old\n")
    other = put(tool.home / "env/other.env", "OTHER=1\n")
    auth = put(tool.person / ".claude/.credentials.json")
    profile: dict[str, Any] = {"memory": "1g",
                               "volumes": ["/a:/b",
                                           f"{auth}:/home/agent/.claude/.credentials.json:ro"]}
    profile |= {"envFile": [str(other), str(file)],
                "env": {"ANTHROPIC_API_KEY": "stale", "MORE": "ü"}}
    tool.configure(cpus=1, serverPass="hush", runs={"claude": profile, "ü": {"yolo": "cx"}})
    monkeypatch.setenv("ANTHROPIC_API_KEY", "new")
    monkeypatch.setenv("ANTHROPIC_MODEL", "new")
    for _ in range(2):
        assert tool("init", "--force")[0] == 0
        found = tool.show("-r", "claude", "--reveal")
        env = {name: setting["value"] for name, setting in found["env"].items()}
        assert env == {"MINE": "1", "OTHER": "1", "MORE": "ü",
                       "ANTHROPIC_API_KEY": "new", "ANTHROPIC_MODEL": "new"}
        assert [item["value"] for item in found["volumes"]] == profile["volumes"]
        assert found["memory"]["value"] == "1g"
        assert [item["value"] for item in found["envFile"]] == profile["envFile"]
        data = json.loads(tool.path.read_text())
        assert (data["cpus"], data["serverPass"], data["runs"]["ü"]) == (1, "hush", {"yolo": "cx"})
        assert "# mine" in file.read_text() and mode(file) == mode(tool.path) == 0o600


def test_init_keeps_an_env_file_that_no_profile_names(tool: Tool,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    put(tool.home / "env/codex.env", "MINE=1\n")
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    assert tool("init")[0] == 0
    assert {"MINE", "OPENAI_API_KEY"} <= set(tool.show("-r", "codex")["env"])


VALUES = [" ", "a b", "'", '"', "\\", "$HOME", "`id`", "#x", "ü漢", "x\r", "\udcff", "a\nb\n",
          '{\n  "k": "v"\n}']


@pytest.mark.parametrize("value", VALUES, ids=ascii)
def test_init_keeps_any_value_whole(tool: Tool, monkeypatch: pytest.MonkeyPatch,
                                    value: str) -> None:
    monkeypatch.setenv("OPENCODE_CONFIG_CONTENT", value)
    monkeypatch.setenv("GEMINI_API_KEY", "hush")
    assert tool("init")[0] == 0
    config = sandbox.load_config(profile="opencode")
    assert config.env()["OPENCODE_CONFIG_CONTENT"][0] == value


WRONG = ["{", '{"a": 1}', '{"runs": {"claude": {"volumes": null}}}',
         '{"runs": {"codex": {"yolo": []}}}']


@pytest.mark.parametrize("text", WRONG)
def test_init_does_not_touch_a_wrong_file(tool: Tool, monkeypatch: pytest.MonkeyPatch,
                                          text: str) -> None:
    tool.write(text)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "hush")
    before = contents(tool.home)
    assert str(tool.path) in tool.refused(1, "init", "--force")
    assert contents(tool.home) == before


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_full_disk_leaves_the_file_as_it_was(tool: Tool, monkeypatch: pytest.MonkeyPatch,
                                               call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    tool.configure(cpus=1)
    put(tool.person / ".codex/auth.json")
    before = contents(tool.home)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        status, _, err = tool("init")
    assert status == 1 and f"{tool.path}: No space left on device" in err
    assert contents(tool.home) == before


def test_init_says_where_it_cannot_write(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_API_KEY", "hush")
    tool.home.symlink_to(tool.person / "missing")
    status, _, err = tool("init")
    assert status == 1 and err.startswith("sandbox: ") and str(tool.home) in err


def test_init_writes_through_a_link_to_the_file(tool: Tool) -> None:
    real = put(tool.person / "dotfiles/sandbox.json", '{"cpus": 1}')
    tool.home.mkdir()
    tool.path.symlink_to(real)
    put(tool.person / ".codex/auth.json")
    assert tool("init")[0] == 0 and tool.path.is_symlink()
    assert set(json.loads(real.read_text())) == {"cpus", "runs"}
