"""The README: its options, its commands and its lines for shells are those of the program."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Terminal
from service import wait_for

import sandbox

README = (ROOT / "README.md").read_text()
PICTURE_BYTES = 200_000


# --- Options and commands ---


def sections() -> Iterator[tuple[str, list[str]]]:
    """Each heading, and the lines up to the next one."""
    for text in re.split(r"^#+ ", README, flags=re.MULTILINE)[1:]:
        heading, *lines = text.splitlines()
        yield heading, lines


def blocks(language: str) -> str:
    """The lines of all code blocks in a language."""
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))


def options_of(cell: str) -> set[str]:
    code = " ".join(re.findall(r"`(.+?)`", cell))
    return set(re.findall(r"(?<!\S)--?[A-Za-z-]+", code))


def documented() -> dict[str, set[str]]:
    """The options of each command: its section's table, and the one that says whose they are."""
    found: dict[str, set[str]] = {command: set() for command in sandbox.COMMANDS}
    for heading, lines in sections():
        head: list[str] = []
        for line in lines:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            head = cells and (head or cells)
            if head[:1] == ["option"] and (options := options_of(cells[0])):
                for command in cells[1].split(", ") if head[1] == "of" else [heading]:
                    found[command] |= options
    return found


@pytest.mark.parametrize("command", sandbox.COMMANDS)
def test_the_tables_have_the_options_that_there_are(command: str) -> None:
    actions = sandbox.parser_of(command)._actions
    have = {option for action in actions for option in action.option_strings}
    tables = documented()
    assert "`config` takes the options of `run`" in README
    said = tables[command] | (tables["run"] if command == "config" else set())
    assert said == have - {"-h", "--help"}


def commands() -> list[list[str]]:
    """The words after `sandbox` of each command of ours in the code blocks."""
    typed = re.findall(r"^\$ (.*)$", blocks("console"), re.MULTILINE)
    found = []
    for line in [*blocks("sh").replace("\\\n", " ").splitlines(), *typed]:
        if re.search(r"(^|\| |-m )sandbox ", line):
            words = shlex.split(line, comments=True)
            rest = words[words.index("sandbox") + 1 :]
            ends = [at for at, word in enumerate(rest) if word in ("|", "&&", ";")]
            found.append(rest[: ends[0]] if ends else rest)
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_each_command_is_one_that_can_be_given(words: list[str]) -> None:
    command = words[0] if words[0] in sandbox.COMMANDS else "run"
    args = sandbox.argparse_of(command, words[1:] if words[0] == command else words)
    if command == "build":
        sandbox.check_build_args(dict(item.split("=", 1) for item in args.imageBuildArgs))
    else:
        sandbox.flags_layer(args)


def test_the_blocks_hold_every_command() -> None:
    assert set(sandbox.COMMANDS) <= {words[0] for words in commands()}


# --- Shells ---

READY = {"bash": ".bashrc\nPS1='READY '\n", "zsh": ".zshrc\nPS1='READY '\n",
         "fish": ".config/fish/config.fish\nfunction fish_prompt; echo 'READY '; end\n"}


@pytest.mark.parametrize("shell", READY)
def test_a_shell_completes_with_its_line(tmp_path: Path, shell: str) -> None:
    """The line stands in the file that the README names; in the real shell Tab is pressed."""
    pattern = rf"^(.*completion {shell}.*?) +# in ~/(\S+)"
    ((line, file),) = re.findall(pattern, blocks("sh"), re.MULTILINE)
    expected, _, prompt = READY[shell].partition("\n")
    assert file == expected
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(f"{line}\n{prompt}")
    ours = tmp_path / "bin" / "sandbox"
    ours.parent.mkdir()
    ours.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/sandbox.py "$@"\n')
    ours.chmod(0o755)
    (tmp_path / "file.env").write_text("COMPLETED=1\n")
    (tmp_path / "compost").touch()  # a file is no command
    out, files = tmp_path / "out", tmp_path / "files"
    env = {"HOME": str(tmp_path), "SANDBOX_HOME": str(tmp_path), "TERM": "xterm", "LANG": "C.UTF-8",
           "PATH": f"{ours.parent}:{os.defpath}:/usr/local/bin:/opt/homebrew/bin"}
    with Terminal([shell, "-i"], 24, 80, user=os.getuid(), env=env, cwd=tmp_path) as terminal:
        terminal.expect("READY")
        terminal.send("sandbox comp\tzs\t>out\r")
        wait_for(lambda: out.exists() and "#compdef sandbox" in out.read_text())
        terminal.send("sandbox conf\tsh\t--ef fi\t>files\r")
        wait_for(lambda: files.exists() and "COMPLETED" in files.read_text())


# --- Pictures ---


def test_the_pictures_are_there_and_small() -> None:
    pictures = [ROOT / name for name in re.findall(r'<img src="([^"]+)"', README)]
    assert len(pictures) == 2
    assert sum(picture.stat().st_size for picture in pictures) < PICTURE_BYTES


# --- Configuration ---


TYPES = {"list": "array of strings", "object": "object"}


def test_the_table_has_the_keys_that_there_are() -> None:
    """With the type of each that is no scalar, its default and its variable."""
    table = README.partition("| key | type | |\n")[2].partition("\n\n")[0]
    found = []
    for line in table.splitlines()[1:]:
        names, types, text = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        for key in (sandbox.KEYS[name] for name in re.findall(r"`(\w+)`", names)):
            found.append(key.name)
            assert (types if types in TYPES.values() else None) == TYPES.get(key.kind), key.name
            assert key.default is None or f"`{key.default}`" in text, key.name
            assert key.variable in README
    assert sorted(found) == sorted(sandbox.KEYS)


def test_the_examples_of_files_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("SANDBOX_HOME", "SANDBOX_RUNTIME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    env_file = tmp_path / ".sandbox" / "env" / "work.env"
    env_file.parent.mkdir(parents=True)
    env_file.write_text(README.partition("### Env files\n\n```sh\n")[2].partition("```")[0])
    (tmp_path / ".sandbox" / "sandbox.json").write_text(blocks("json"))
    assert sandbox.main(["config", "show", "-r", "work", "--reveal"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["env"]["ANTHROPIC_AUTH_TOKEN"]["value"] == 'a "quoted" part'
