"""What a person sees of the turns of agents: log, diff, undo and redo."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Terminal
from test_shadow import Workspace, names, workspace

import sandbox
import sandbox_changes
from sandbox import Session
from sandbox_changes import BOLD, LINE_CHARS, LISTED, page, patch_lines, quoted, shown_line

__all__ = ["workspace"]  # a fixture

# --- Nothing of a file or a name reaches a terminal as more than text ---

HOSTILE = {
    "\x1b[2Jgone": "^[[2Jgone", "\x1b]0;title\x07": "^[]0;title^G", "a\rb": "a^Mb", "\x00": "^@",
    "\x9b31m": "<U+009B>31m", "\x7f": "^?", "\udcff\udc9b": "<FF><9B>", "\u202egnp": "<U+202E>gnp",
    "\u2066x\u2069": "<U+2066>x<U+2069>", "\u200b": "<U+200B>", "a\u2028b": "a<U+2028>b",
    "\x0b\x0c\x85": "^K^L<U+0085>", "\ud800": "<U+D800>", "\U000e0041": "<U+E0041>",
    "tab\tstays": "tab\tstays", "grün 🙂": "grün 🙂"}


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_terminal_would_obey_is_visible(text: str) -> None:
    assert shown_line(text) == HOSTILE[text]
    coloured = shown_line(text, BOLD, True)
    assert re.sub(r"\x1b\[(?:1|7|27|)m", "", coloured) == HOSTILE[text]
    assert quoted(text).isprintable() and "\n" not in quoted(text + "\n")


def test_different_names_are_shown_as_different_ones() -> None:
    paths = ["a\nb", "a\\nb", "'a\\nb'", "a", "'a'", '"a"', "\udcff", "\\udcff", "", " "]
    assert len({*map(quoted, paths)}) == len(paths)
    assert quoted("plain, with spaces.txt") == "plain, with spaces.txt"


def test_a_long_line_is_cut_with_a_word() -> None:
    line = shown_line("+" + "x" * 5_000)
    assert line == f"+{'x' * (LINE_CHARS - 1)} … and {5_001 - LINE_CHARS:,} more characters"
    assert shown_line("x" * LINE_CHARS) == "x" * LINE_CHARS


def test_an_answer_of_another_form_is_refused() -> None:
    row = {"path": "a", "status": "added"}
    shape = {"path": str, "status": str}
    assert sandbox_changes.rows_of({"changed": [row]}, "changed", shape) == [row]
    for answer in ({}, {"changed": None}, {"changed": {}}, {"changed": ["a"]},
                   {"changed": [{"path": "a"}]}, {"changed": [row | {"path": 7}]}):
        with pytest.raises(sandbox.SandboxError, match="nonsense"):
            sandbox_changes.rows_of(answer, "changed", shape)


# --- The pager ---

LINES = [("--- a/x", BOLD), ("+new \x1b[2J", "32"), ("-old", "31")]
PAGE = "import sandbox_changes; sandbox_changes.page({}); print('left')"


def paged(lines: object, **env: str) -> Terminal:
    return Terminal([sys.executable, "-c", PAGE.format(lines)], 24, 80, user=os.getuid(), cwd=ROOT,
                    env={"PATH": os.environ["PATH"], "TERM": "xterm", "LANG": "C.UTF-8", **env})


def test_a_terminal_gets_colours_through_the_persons_pager() -> None:
    with paged(LINES, PAGER="sed 's/^/[/' | cat -v; echo 'end of it'") as terminal:
        assert terminal.wait() == 0
    lines = terminal.output.splitlines()
    assert lines == ["[^[[1m--- a/x^[[m", "[^[[32m+new ^[[7m^[^[[27m[2J^[[m", "[^[[31m-old^[[m",
                     "end of it", "left"]


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_unwanted(env: dict[str, str]) -> None:
    with paged(LINES, PAGER="cat", **env) as terminal:
        assert terminal.wait() == 0
    assert terminal.output == "--- a/x\r\n+new ^[[2J\r\n-old\r\nleft\r\n"


@pytest.mark.parametrize("pager", ["", "there-is-none-of-this-name"])
def test_without_a_pager_the_lines_are_printed(pager: str) -> None:
    with paged(LINES, PAGER=pager) as terminal:
        assert terminal.wait() == 0
    assert terminal.output.endswith("\x1b[31m-old\x1b[m\r\nleft\r\n")


def test_less_has_the_terminal_until_one_leaves_it() -> None:
    """Ctrl-C is its own, and what it has not read yet does not matter."""
    with paged("((f'line {n}', '') for n in range(100_000))") as terminal:
        terminal.expect("line 22")
        terminal.send("\x03")
        terminal.send("/line 34\r")
        terminal.expect("line 34")
        assert terminal.process.poll() is None
        terminal.send("q")
        terminal.expect("left")
        assert terminal.wait() == 0


def test_a_short_text_leaves_less_by_itself() -> None:
    with paged(LINES) as terminal:
        terminal.expect("-old")
        terminal.expect("left")
        assert terminal.wait() == 0


def test_a_pipe_gets_plain_text_and_no_pager() -> None:
    env = {"PATH": os.environ["PATH"], "TERM": "xterm", "PAGER": "echo paged; cat"}
    done = subprocess.run([sys.executable, "-c", PAGE.format(LINES)], cwd=ROOT, env=env, text=True,
                          capture_output=True)
    assert done.stdout == "--- a/x\n+new ^[[2J\n-old\nleft\n"
