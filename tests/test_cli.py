"""The command line: help, usage errors, -x and --, completion, and `config command`."""

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Engine, on_docker, write_config
from network import inspected

import sandbox

OURS = [sys.executable, str(ROOT / "sandbox.py")]
NO_ENGINE = "neither docker nor podman is installed"


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty SANDBOX_HOME, and for this process a PATH without engines."""
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SANDBOX_RUNTIME", raising=False)


def main(*argv: str) -> int | str | None:
    try:
        return sandbox.main(argv)
    except SystemExit as end:
        return end.code


# --- Help and usage ---


@pytest.mark.parametrize("command", sandbox.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--help") == 0 and f"\n  {command} " in capsys.readouterr().out
    assert main(command, "--help") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: sandbox {command}") and err == ""
    parser = sandbox.parser_of(command)
    assert all(action.help and max(action.option_strings, default="", key=len) in out
               for action in parser._actions)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "-V"):
        assert main(option) == 0
        assert capsys.readouterr() == (f"sandbox {sandbox.__version__}\n", "")


def test_a_plain_command_line_is_read_as_argparse_reads_it() -> None:
    """What read_plainly() takes upon itself, over words of which most are an option's."""
    chance, read = random.Random(10), 0
    for command in sandbox.COMMANDS:
        parser = sandbox.parser_of(command)
        known = [flag for flags, _ in sandbox.options_of(command).values() for flag in flags]
        others = ["", "x", "NAME=1", "-", "--", "-1", "-x y", "--name=x", "-nx", "--nam", "a b"]
        tried = [[flag, *more] for flag in known for more in ([], ["x"], ["x", flag, "y"])]
        tried += [[chance.choice(known if known and chance.random() < 0.5 else others)
                   for _ in range(chance.randrange(5))] for _ in range(100)]
        for words in tried:
            args = sandbox.read_plainly(command, words)
            if args is None:
                continue
            read += 1
            assert vars(args) == vars(parser.parse_args(words)), words
    assert read > 100
    assert sandbox.REPEATED["default"] == []


def test_words_are_quoted_as_shlex_does() -> None:
    chance = random.Random(10)
    for _ in range(3000):
        words = ["".join(chance.choices("ab1_@%+=:,./-'\"$ \\\nü\udc80", k=chance.randrange(6)))
                 for _ in range(chance.randrange(4))]
        assert sandbox.quote_all(words) == shlex.join(words)


def test_nothing_written_in_python_is_imported_with_it() -> None:
    """See the import budget of sandbox.py."""
    code = ("import sys, os, __future__; before = {*sys.modules}; "
            f"sys.path.insert(0, {str(ROOT)!r}); import sandbox, sandbox_hosts, sandbox_kube; "
            "print(*{name for name in {*sys.modules} - before "
            "if (getattr(sys.modules[name], '__file__', None) or '').endswith('.py')})")
    out = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True,
                         timeout=60, check=True).stdout
    assert sorted(out.split()) == ["sandbox", "sandbox_hosts", "sandbox_kube"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["runn"], "no command 'runn' (did you mean run?)"),
        ([""], "no command ''"),
        (["claude"], "no command 'claude'"),
        (["--nope"], "--nope"),
        (["run", "--nope"], "--nope"),
        (["run", "bash"], "bash"),
        (["run", "-n"], "-n"),
        (["run", "--contain", "x"], "--contain"),
        (["run", "-x"], "-x needs a command"),
        (["run", "-x", "--", "ls"], "-x needs a command"),
        (["run", "-xbash"], "-x"),
        (["ps", "one", "two"], "two"),
        (["rm"], "NAME"),
        (["config"], "show"),
        (["config", "shwo"], "shwo"),
        (["completion", "tcsh"], "tcsh"),
        (["build", "--iba", "TOOL"], "TOOL"),
        (["build", "--iv", "1.0-common", "--iba", "TOOL=full"], "common"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(argv: list[str], words: str,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and NO_ENGINE not in err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["claude"], "to start Claude Code: sandbox run -y claude"),
        (["c"], "to start Claude Code: sandbox run -y c"),
        (["run", "claude"], "to run that: sandbox run -y claude"),
        (["-n", "shop", "gemini", "--debug"], "to run that: sandbox run -y gemini --debug"),
        (["run", "npm", "test", "a b"], "to run that: sandbox run -x npm test 'a b'"),
    ],
)
def test_an_agent_or_a_command_without_its_option_is_answered_with_it(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[1:]) == ("", [f"  {hint}"])


@pytest.mark.parametrize("command",
                         ["ps", "rm some", "run", "-y c", "-- -c", "build", "config command"])
def test_without_an_engine_there_is_one_error_with_a_remedy(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*command.split()) == (125 if command[:3] in ("run", "-y ", "-- ") else 1)
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [f"sandbox: {NO_ENGINE}", "  install docker or podman"]


@on_docker
def test_options_may_follow_the_bare_name(engine: Engine, project: Path, name: str) -> None:
    answer = engine.sandbox("-n", name, "--rm-on-exit", "-x", "echo", "bare")
    assert (answer.returncode, answer.stdout) == (0, "bare\n"), answer.stderr


# --- Odd surroundings ---


def test_values_are_printed_as_the_bytes_they_are(tmp_path: Path) -> None:
    value = b"\xff\xe9 \xe2\x82\xac"
    (tmp_path / "a.env").write_bytes(b'A="' + value + b'"\n')
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1:strict"}
    argv = [*OURS, "config", "show", "--ef", f"{tmp_path}/a.env"]
    shown = subprocess.run(argv, env=environ, capture_output=True, check=True).stdout
    assert b'"value": "' + value + b'"' in shown


def test_output_that_cannot_be_written_is_no_crash() -> None:
    read, write = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    for fd, status, words in ((write, 141, ""), (full, 1, "sandbox: output: No space left")):
        answer = subprocess.run([*OURS, "config", "show"], stdout=fd, stderr=subprocess.PIPE,
                                text=True)
        assert answer.returncode == status
        assert answer.stderr.startswith(words)
        assert answer.stderr.count("\n") <= 2
        os.close(fd)


def test_closed_streams_are_no_crash() -> None:
    for command in ("run -x true <&- >&-", "config command <&-", "doctor --fix <&-"):
        script = f'exec "$@" {command}'
        answer = subprocess.run(["/bin/sh", "-c", script, "sh", *OURS], stderr=subprocess.PIPE,
                                text=True)
        assert "Traceback" not in answer.stderr and answer.returncode in (1, 125), answer.stderr


def test_a_directory_that_is_gone_matters_only_to_those_who_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for argv in (["run", "-x", "true"], ["run", "--hp", "x"]):
        assert main(*argv) == 125
        assert "current directory" in capsys.readouterr().err
    for argv in (["ps"], ["rm", "xx"]):
        assert main(*argv) == 1
        assert NO_ENGINE in capsys.readouterr().err
    assert main("config", "show") == main("completion", "bash") == 0


# --- -x and -- ---


@pytest.mark.parametrize(
    ("argv", "options", "command", "agent_args"),
    [
        ("", [], None, []),
        ("-n|d", ["-n", "d"], None, []),
        ("-n|d|--|-c|--model|opus", ["-n", "d"], None, ["-c", "--model", "opus"]),
        ("--", [], None, []),
        ("--|--|x", [], None, ["--", "x"]),
        # words: up to the end of the line, `--` included
        ("-n|d|-x|bash", ["-n", "d"], ["bash"], []),
        ("-x|ls|-l|-n|d", [], ["ls", "-l", "-n", "d"], []),
        ("-x|grep|-e|--|x y", [], ["grep", "-e", "--", "x y"], []),
        ("-x|env|-x", [], ["env", "-x"], []),
        ("-x|printf||a b", [], ["printf", "", "a b"], []),
        ("-x|bash|--|-l", [], ["bash", "--", "-l"], []),
        # an agent's words: `--` ends them
        ("-x|claude|--model|opus|--|-c", [], ["claude", "--model", "opus"], ["-c"]),
        ("-x|agent-b|--|-r", [], ["agent-b"], ["-r"]),
        ("-x|/usr/bin/codex|--|resume", [], ["/usr/bin/codex"], ["resume"]),
        # one string: for a shell, options may follow, `--` gives it arguments
        ("-x|make test", [], "make test", []),
        ("-e|A=1|-x|make test|-n|d", ["-e", "A=1", "-n", "d"], "make test", []),
        ("-x|sleep infinity|--|a b", [], "sleep infinity", ["a b"]),
        ("-x|a\tb", [], "a\tb", []),
        ("-x|ls;id", [], "ls;id", []),
        ("-x|$EDITOR", [], "$EDITOR", []),
        ("-x|x>y", [], "x>y", []),
        ("-x|./run.sh", [], ["./run.sh"], []),
    ],
)
def test_how_x_and_the_dashes_divide_the_line(
    argv: str, options: list[str], command: str | list[str] | None, agent_args: list[str]
) -> None:
    assert sandbox.split_command(argv.split("|") if argv else []) == (options, command, agent_args)


def test_the_dashes_after_config_command_belong_to_the_agent() -> None:
    args = sandbox.argparse_of("config",
                               ["command", "-y", "c", "--reveal", "--", "show", "--reveal"])
    assert (args.what, args.yolo, args.reveal) == ("command", "c", True)
    assert args.agent_args == ["show", "--reveal"]


# --- Completion ---


@pytest.mark.parametrize(
    ("line", "included", "excluded"),
    [
        ("", ["run", "ps", "config", "--version"], ["--rm-on-exit", "__complete"]),
        ("ru", ["run", "rm"], []),
        ("-", ["--rm-on-exit", "-y"], ["ps"]),
        ("run ", ["--rm-on-exit", "--hp", "-x"], ["--json", "show"]),
        ("run -y ", ["c", "agent-a", "claude", "oc"], ["--hp"]),
        ("--yolo ", ["c", "agent-d"], ["--hp"]),
        ("run -r ", ["work", "play"], ["-y", "a b", "$(id)"]),
        ("config ", ["show", "command", "--reveal"], []),
        ("completion ", ["bash", "zsh", "fish"], []),
        ("ps -", ["--json", "-q"], ["-y"]),
        ("run -v ", [], ["--hp", "-y", "run"]),
        ("build --iba ", [], ["--iv", "run"]),
        ("diff shop -", ["--stat"], ["--dry-run"]),
        ("undo shop sr", [], ["--dry-run"]),
        ("run -y c -- ", [], ["--hp", "-y", "c"]),
        ("run -x ls ", [], ["--hp", "-y"]),
        ("nonsense ", [], ["show"]),
    ],
)
def test_what_is_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, included: list[str],
    excluded: list[str]
) -> None:
    profiles: dict[str, object] = {"work": {}, "play": {}, "a b": {}, "$(id)": {}}
    (tmp_path / "sandbox.json").write_text(json.dumps({"runs": profiles}))
    assert main("__complete", *line.split(" ")) == 0
    out, err = capsys.readouterr()
    assert set(included) <= set(out.splitlines())
    assert not set(excluded) & set(out.splitlines())
    assert err == ""


@pytest.mark.parametrize("shell", ("bash", "zsh", "fish"))
def test_a_completion_script_is_valid(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("completion", shell) == 0
    program = shutil.which(shell, path=os.defpath + ":/usr/local/bin:/opt/homebrew/bin")
    assert program, f"{shell} is not installed: tests/prepare does that"
    script = capsys.readouterr().out
    answer = subprocess.run([program, "-n", "/dev/stdin"], input=script, capture_output=True,
                            text=True)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["co"], ["config", "completion"]),
        (["run", "-y", "cl"], ["claude"]),
        (["run", "-r", ""], ["work"]),
        (["-n", "x", "--rm"], ["--rm-on-exit"]),
        (["run", "-v", "/e"], []),
        (["no", ""], []),
    ],
)
def test_bash_completes(tmp_path: Path, words: list[str], offered: list[str]) -> None:
    profiles: dict[str, object] = {"work": {}, f"$(:>{tmp_path}/ran)": {}}
    (tmp_path / "sandbox.json").write_text(json.dumps({"runs": profiles}))
    script = f"""sandbox() {{ {" ".join(OURS)} "$@"; }}
        eval "$(sandbox completion bash)"; COMP_WORDS=(sandbox "$@"); COMP_CWORD=$#
        _sandbox; printf '%s\\n' "${{COMPREPLY[@]}}" """
    argv = ["/bin/bash", "-c", script, "bash", *words]
    answer = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert sorted(filter(None, answer.stdout.split("\n"))) == sorted(offered)
    assert answer.stderr == ""
    assert not (tmp_path / "ran").exists()


@on_docker
def test_a_path_follows_the_name_of_a_session(engine: Engine, project: Path, name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "touch /tmp/x")
    script = f"""sandbox() {{ {" ".join(engine.sandbox_argv())} "$@"; }}
        compopt() {{ echo "$@"; }}
        eval "$(sandbox completion bash)"; COMP_WORDS=(sandbox cp {name[:-1]}); COMP_CWORD=2
        _sandbox; echo "${{COMPREPLY[@]}}" """
    answer = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True,
                            **engine.where())
    assert answer.stdout.split("\n")[0] == "-o nospace" and f"{name}:" in answer.stdout
    copied = engine.sandbox("cp", f"{name}:/tmp/x", ".")
    assert copied.returncode == 0 and (project / "x").exists()
    assert inspected(engine, name, "{{.Id}}") not in copied.stderr + copied.stdout


def test_names_of_sessions_are_offered(engine: Engine, project: Path, name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    for words in (["rm", ""], ["rm", "other", ""], ["run", "-n", ""], ["-n", ""],
                  ["attach", "--rt", engine.runtime, ""], ["recreate", "-p", "80:80", ""],
                  ["net", "--rt", engine.runtime, "log", ""], ["logs", "-f", ""]):
        assert name in engine.sandbox("__complete", *words).stdout.splitlines()


# --- config command ---

TEXT = "first 'line'\nsecond \"line\" $HOME `id` \\ ünïcode €\n\nlast"
PRINT = ["-x", "sh", "-c", 'printf "%s|" "$TEXT" "$API_KEY" "$OUR_PROFILE" "$@"; pwd; id -u', "sh",
         "a b", "'", ""]


def paste(engine: Engine, lines: str) -> subprocess.CompletedProcess[str]:
    """Give the lines to a shell, as a person does."""
    return subprocess.run(["sh", "-c", lines], capture_output=True, text=True, timeout=120,
                          **engine.where())


def test_the_printed_commands_do_what_run_does(engine: Engine, project: Path, home: Path,
                                               name: str) -> None:
    (home / "a.env").write_text("export API_KEY='so hush'\n")
    write_config(home, env={"TEXT": TEXT},
                 runs={"p": {"envFile": [f"{home}/a.env"], "env": {"OUR_PROFILE": "grüß"}}})
    os.chmod(home / "a.env", 0o644)
    options = ["-r", "p", "-v", f"{home}:/home two:ro"]
    printed = engine.sandbox("config", "command", "-n", name, *options, "--reveal", *PRINT)
    assert (printed.returncode, printed.stderr) == (0, "") and "masked" not in printed.stdout
    assert name not in engine.sandbox("ps", "-q").stdout.split()
    pasted = paste(engine, printed.stdout)
    expected = engine.sandbox("run", "-n", name + "2", *options, *PRINT)
    assert f"{TEXT}|so hush|grüß|a b|'||{project}\n" in expected.stdout
    assert (pasted.returncode, pasted.stdout) == (0, expected.stdout), pasted.stderr
    rows = {row["name"]: row for row in json.loads(engine.sandbox("ps", "--json").stdout)}
    same = ("state", "agent", "profile", "image", "directory")
    assert [rows[name][key] for key in same] == [rows[name + "2"][key] for key in same]

    again = engine.sandbox("config", "command", "-n", name, *options, "--reveal", *PRINT)
    assert (again.returncode, again.stderr) == (0, "")
    assert f"{engine.runtime} run" not in again.stdout
    assert again.stdout.startswith("SANDBOX_ENV=") and again.stdout.count(f"{engine.runtime} ") == 1
    assert paste(engine, again.stdout).stdout == expected.stdout


@on_docker
def test_secrets_are_masked_in_the_printed_commands(engine: Engine, project: Path,
                                                    name: str) -> None:
    variables = ["-e", "API_KEY=hush1", "-e", "DB_PASSWORD=hush2\nhush3", "-e", "MODEL=opus"]
    printed = engine.sandbox("config", "command", "-n", name, *variables, "-x", "env")
    first, *_ = printed.stdout.splitlines()
    assert "hush" not in printed.stdout + printed.stderr and "opus" in printed.stdout
    assert first.startswith("# masked: ")
    assert {"API_KEY", "DB_PASSWORD"} <= set(first.split())
    assert "--reveal" in first
    assert "MODEL=opus\n" in paste(engine, printed.stdout).stdout


def test_a_stopped_container_is_started_and_a_passing_one_removed(engine: Engine, project: Path,
                                                                  name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "echo kept >/tmp/state")
    engine.run("stop", name)
    printed = engine.sandbox("config", "command", "-n", name, "--rm-on-exit", "-x", "cat",
                             "/tmp/state")
    pasted = paste(engine, printed.stdout)
    assert "kept\n" in pasted.stdout and pasted.returncode == 0, pasted.stderr
    assert name not in engine.sandbox("ps", "-q").stdout.split()


def test_a_name_is_never_taken_for_the_start_of_an_id(engine: Engine, project: Path,
                                                      name: str) -> None:
    engine.sandbox("run", "-n", name, "-x", "true")
    short = engine.run("container", "inspect", "--format", "{{.Id}}", name).stdout[:12]
    printed = engine.sandbox("config", "command", "-n", short, "-x", "true").stdout
    assert f"--name {short} " in printed
    assert engine.sandbox("rm", short).returncode == 1
    assert name in engine.sandbox("ps", "-q").stdout.split()


def test_the_log_holds_nothing_that_a_terminal_obeys(capfd: pytest.CaptureFixture[str]) -> None:
    import sandbox_web

    sandbox_web.log("Traceback\nValueError: \x1b]0;title\x07\x9b2J")
    assert capfd.readouterr().err.endswith(" Traceback\nValueError: ?]0;title??2J\n")
