"""What a person sees of the turns of agents: log, diff, undo and redo."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Engine, Terminal, on_docker, write_config
from service import wait_for
from test_agents import IMAGE, STUB_ANSWERS, image, write_stub_config
from test_shadow import State, Workspace, names, workspace

import sandbox
import sandbox_changes
from sandbox import SandboxError
from sandbox_changes import (
    BOLD,
    LINE_CHARS,
    LISTED,
    patch_lines,
    pick_turn,
    quoted,
    rows_of,
    shown_line,
    warnings,
)

__all__ = ["image", "workspace"]  # fixtures

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
    assert rows_of({"changed": [row]}, "changed", shape) == [row]
    answers: list[dict[str, Any]] = [{}, {"changed": None}, {"changed": {}}, {"changed": ["a"]},
                   {"changed": [{"path": "a"}]}, {"changed": [row | {"path": 7}]}]
    for answer in answers:
        with pytest.raises(SandboxError, match="nonsense"):
            rows_of(answer, "changed", shape)


LIES = "".join(HOSTILE)


def test_an_image_that_lies_reaches_no_terminal(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads the snapshots is the image's python3."""
    turn = dict.fromkeys(("id", "what", "command", "when", "after"), LIES)
    turns = [turn | {"kind": "turn", "tree": "main"}, turn | {"kind": LIES, "tree": LIES,
                                                              "turns": [LIES]}]
    row = {"path": LIES, "status": LIES, "oldMode": LIES, "newMode": LIES + "x", "size": 1,
           "binary": True, "added": 1, "deleted": 1, "risk": [LIES], "patch": f"@@{LIES}",
           "why": LIES}
    answers: dict[str, Any] = {
        "log": {"turns": turns}, "diff": {"files": [row, row | {"kept": False}], "more": LIES},
        "undo": {"changed": [row], "left": [row]}, "redo": {"changed": [row], "left": [row]}}
    labels = {"sandbox.session": "x", "sandbox.user": "0:0", "sandbox.network": "none",
              "sandbox.created": json.dumps({"flags": {}, "variables": [], "spec": {
                  "image": "i", "directory": "/d", "workdir": "/d", "volumes": [], "ports": [],
                  "network": "none"}})}
    session = sandbox.Session("x", "exited", labels)
    monkeypatch.setattr(sandbox, "find_given", lambda *_: (sandbox.Docker(), session))
    monkeypatch.setattr(sandbox_changes, "ask_shadow", lambda _, __, verb, *___: answers[verb])
    for words in ("log", "log --json", "diff", "diff --stat", "diff --json", "undo", "redo"):
        command, *options = words.split()
        sandbox.main([command, "x", *options])
        printed = capsys.readouterr()
        assert "error" not in printed.err and (printed.out or printed.err), words
        for text in printed:
            assert all(c.isprintable() or c in "\n\t" for c in text), (words, text)


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


# --- What a diff says ---


def shown(workspace: Workspace, turn: str) -> str:
    """The patch of a turn, as a pipe gets it."""
    rows = workspace.call("diff", turn=turn, patch=True)["files"]
    lines = [*warnings(rows), *(line for row in rows for line in patch_lines(row))]
    return "".join(f"{shown_line(line)}\n" for line, _ in lines)


def test_what_others_make_of_a_patch_is_what_the_agent_did(workspace: Workspace) -> None:
    """Warnings above it do not matter to them, nor does anything that a file or a name holds."""
    workspace.write({"edit": "1\n2\n3\n", "gone": "x\ny\n", "dir/with space": "s\n", "grün": "g",
                     "mode": "m\n", "same": "s\n", "-- a/x": "1\n", "evil": "+++ b/same\n"})
    before = workspace.area / "before"
    shutil.copytree(workspace.top, before)
    with workspace.turn():
        workspace.write({"edit": "1\nzwei\n3", "new": "a\n\tb", "dir/with space": "t\n",
                         "empty": "", "grün": "grün", "Makefile": "all:\n\trm\n", "-- a/x": "2\n",
                         "evil": "--- a/same\n+++ b/same\n@@ -1 +1 @@\n-s\n+evil\n"})
        (workspace.top / "gone").unlink()
        (workspace.top / "mode").chmod(0o755)
        (workspace.top / "link").symlink_to("edit")
    text = shown(workspace, "t1")
    assert text.startswith("warning: Makefile: a build runs it\n")
    subprocess.run(["git", "apply", "-v"], cwd=before, input=text.encode(), check=True)
    assert workspace.state(before) == workspace.state()


def test_what_is_not_a_patch_has_words(workspace: Workspace) -> None:
    workspace.write({".gitignore": "node_modules/\n", "node_modules/x": "1", "kind": "k"})
    with workspace.turn():
        workspace.write({"node_modules/x": "22", "binary": "\0\1", "long": "line\n" * 500_000,
                         "more": "line\n" * 500_000})
        (workspace.top / "kind").unlink()
        (workspace.top / "kind").symlink_to("long")
        (workspace.top / "huge").touch()
        os.truncate(workspace.top / "huge", 20 << 20)
    text = shown(workspace, "t1")
    assert re.search("^not kept: huge: .+\nnot kept: node_modules: .+\n", text)
    assert "\nBinary files /dev/null and b/binary differ\n" in text
    assert "\nold mode 100644\nnew mode 120777\n" in text
    assert len(text) < 6 << 20 and text.endswith("name this path\n")
    assert "a/huge" not in text and "a/node_modules" not in text


def test_warnings_leave_room_for_the_rest(workspace: Workspace) -> None:
    with workspace.turn():
        workspace.write({f".vscode/{number:03}": "x" for number in range(2 * LISTED)})
    lines = shown(workspace, "t1").splitlines()
    assert lines[LISTED - 1].startswith(f"warning: .vscode/{LISTED - 1:03}: ")
    assert lines[LISTED] == f"… and {LISTED} more such lines: --json has them all"
    assert lines[LISTED + 1] == "diff --git a/.vscode/000 b/.vscode/000"


TURNS = [{"id": "3f2a9c01d4", "kind": "turn"}, {"id": "3f77777777", "kind": "turn"},
         {"id": "undo-3", "kind": "undo"}, {"id": "01989f5c1a2-3f2a9c01d4", "kind": "turn"}]


@pytest.mark.parametrize("word, at", [("3f2a9c01d4", 0), ("3f2", 0), ("3f7", 1), ("-1", 3),
                                      ("-3", 0), ("0198", 3), ("undo-3", 2), ("src", None),
                                      ("", None)])
def test_a_word_is_a_turn_where_it_names_one(word: str, at: int | None) -> None:
    assert pick_turn(TURNS, word, False) == (None if at is None else TURNS[at])


@pytest.mark.parametrize("word, exists, message", [
    ("3f", False, "3f may be 3f2a9c01d4, 3f77777777"), ("3f2", True, "or a path"),
    ("-4", False, "there is no turn -4: 3 are kept"), ("-0", False, "there is no turn -0")])
def test_a_word_that_may_be_two_things_is_refused(word: str, exists: bool, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        pick_turn(TURNS, word, exists)


# --- On the engines ---


@dataclass
class Review:
    """A session of the product's image, and our commands on it."""

    engine: Engine
    name: str
    top: Path

    def call(self, command: str, *words: str, fails: int = 0, **where: Any) -> str:
        """What it prints, which a terminal may get; in `said` what it says."""
        done = self.engine.sandbox(command, self.name, *words, **where)
        assert done.returncode == fails, done
        for text in (done.stdout, done.stderr):
            assert all(c.isprintable() or c in "\n\t" for c in text), text
        self.said = done.stderr
        return done.stdout

    def turn(self, script: str) -> str:
        """What an agent does, with sudo where it likes; the id of its turn."""
        done = self.engine.sandbox("run", "-n", self.name, "--checkpoint", "-x", "sh", "-c", script)
        assert not done.returncode, done
        return str(self.log()[0]["id"])

    def log(self) -> Any:
        return json.loads(self.call("log", "--json"))

    def write(self, files: dict[str, str]) -> None:
        """As the person."""
        for name, text in files.items():
            path = self.top / name
            for folder in reversed([*path.relative_to(self.top).parents][:-1]):
                if not (self.top / folder).exists():
                    (self.top / folder).mkdir()
                    os.chown(self.top / folder, self.engine.uid, self.engine.gid)
            path.write_text(text)
            os.chown(path, self.engine.uid, self.engine.gid)

    def state(self) -> State:
        directory = Workspace.__new__(Workspace)
        directory.top = self.top
        return directory.state()

    def rows(self, *words: str, **where: Any) -> dict[str, Any]:
        answer = json.loads(self.call("diff", "--json", *words, **where))
        return {row["path"]: row for row in answer["files"]}


@pytest.fixture
def review(engine: Engine, home: Path, project: Path, name: str, image: str) -> Review:
    write_config(home, imageName=image.partition(":")[0], network="none")
    made = engine.sandbox("run", "-n", name, "-x", "true")
    assert not made.returncode, made
    return Review(engine, name, project)


def test_a_turn_is_shown_undone_and_redone(review: Review) -> None:
    lines = [f"{number}\n" for number in range(20)]
    text = "".join(lines)
    review.write({"both": text, "gone": "g\n", "fight": "x\n", "mine": "a\n"})
    (review.top / "gone").chmod(0o640)
    before = review.state()
    id = review.turn("""
        sed -i '1s/.*/agent/' both; rm gone; echo agent >fight; mkdir -p .git/hooks d
        printf 'x\\033[2J\\r\\n' >.git/hooks/pre-commit; chmod 4755 .git/hooks/pre-commit
        ln -s /etc/passwd d/out; echo root >d/root; sudo chown 0:0 d/root; sudo chmod 600 d/root""")
    after = review.state()
    (row,) = review.log()
    assert (row["id"], row["what"], row["files"], row["state"]) == (id, "command", 6, "")
    head, line = review.call("log").splitlines()
    assert head.split() == ["ID", "WHEN", "WHAT", "FILES", "LINES", "WARNINGS", "STATE"]
    assert line.startswith(id) and re.search(r"  6 +\+5 -3 +2 +-$", line)
    with review.engine.pty("diff", review.name, env={"PAGER": "cat"}) as terminal:
        assert terminal.wait() == 0
        assert "\x1b[32m+x\x1b[7m^[\x1b[27m[2J\x1b[7m^M\x1b[27m\x1b[m\r\n" in terminal.output
    patch = review.call("diff", "-1")
    assert patch.startswith("warning: .git/hooks/pre-commit: git runs it at a commit")
    assert "\nnew file mode 104755\n" in patch and "\n+x^[[2J^M\n" in patch
    assert review.rows(id[:4], "both") == review.rows("both") == {"both": {
        "path": "both", "status": "modified", "oldMode": "100644", "newMode": "100644",
        "size": len(text) + 4, "binary": False, "added": 1, "deleted": 1, "risk": []}}
    planned = review.call("undo", "--dry-run")
    assert review.state() == after
    # The person has worked on, too.
    review.write({"both": "".join(["agent\n", *lines[1:19], "person\n"]), "mine": "person\n"})
    undone = review.call("undo")
    assert sorted(planned.splitlines()) == sorted(undone.splitlines())
    assert {"modified  both", "added     gone", "deleted   d/root"} < {*undone.splitlines()}
    person = review.state()
    assert (review.top / "both").read_text() == "".join([*lines[:19], "person\n"])
    assert (review.top / "mine").read_text() == "person\n"
    assert person | {path: before[path] for path in (b"both", b"mine")} == before
    assert review.log()[1]["state"] == "undone"
    assert "nothing to undo" in (review.call("undo", fails=1), review.said)[1]
    review.call("redo")
    again = review.state()
    assert (review.top / "both").read_text() == "".join(["agent\n", *lines[1:19], "person\n"])
    assert again | {path: after[path] for path in (b"both", b"mine")} == after


@on_docker
def test_a_conflict_is_named_and_left(review: Review) -> None:
    review.write({"fight": "x\n", "other": "x\n"})
    review.turn("echo agent >fight; echo agent >other")
    review.write({"fight": "person\n"})
    assert review.call("undo", "--dry-run", fails=1) == "modified  other\n"
    assert review.said.endswith("sandbox: fight would stay as it is: both have changed it\n")
    assert review.call("undo", fails=1) == "modified  other\n"
    assert review.said.endswith("sandbox: fight was left as it is: both have changed it\n")
    assert (review.top / "fight").read_text() == "person\n"
    assert (review.top / "other").read_text() == "x\n"


@on_docker
def test_turns_and_paths_are_found_from_anywhere(review: Review) -> None:
    review.write({"src/deep/a": "0\n"})
    first = review.turn("echo 1 >src/deep/a; echo 1 >b")
    second = review.turn("echo 2 >src/deep/a; echo 2 >c; echo 1 >./-1; echo 1 >a")
    src = review.top / "src"
    assert {*review.rows()} == {"src/deep/a", "a", "b", "c", "-1"}
    assert {*review.rows(first)} == {*review.rows("-2")} == {"src/deep/a", "b"}
    assert {*review.rows("src")} == {*review.rows("deep", cwd=src)} == {"src/deep/a"}
    assert {*review.rows("src/deep", cwd=Path("/"))} == {"src/deep/a"}
    assert {*review.rows("./deep/a", "../c", cwd=src)} == {"src/deep/a", "c"}
    assert {*review.rows("-1", str(src), "b", "./-1")} == {"src/deep/a", "-1"}
    assert {*review.rows("--", "-1")} == {"src/deep/a", "c", "-1", "a"}
    stat = review.call("diff", "--stat", second, "src").splitlines()
    assert stat == ["modified         +1 -1  src/deep/a", "1 changed, +1 -1"]
    review.call("undo", "deep", cwd=src)
    assert (src / "deep" / "a").read_text() == "1\n" and (review.top / "c").exists()
    assert f"  undo {second} src/deep  " in review.call("log")
    assert not review.engine.sandbox("stop", review.name).returncode  # which does not matter
    review.call("undo", first)
    assert {*review.state()} == {b".", b"src", b"src/deep", b"src/deep/a"}
    assert (src / "deep" / "a").read_text() == "0\n"


@on_docker
def test_no_name_and_no_content_is_more_than_text(review: Review, workspace: Workspace) -> None:
    """Review.call() looks at all that is printed."""
    review.turn("true")
    (review.top / "sub").mkdir()
    workspace.top = review.top / "sub"
    names(workspace)
    hostile = {os.fsdecode(path) for path, (mode, *_) in review.state().items()
               if mode.startswith("0o1") and b"/.git/objects/" not in path}
    review.turn("sudo touch done; echo '\x1b]0;title\x07'")
    assert hostile - {*review.rows()} == set()
    assert json.loads(review.call("diff", "--json"))["more"] == 0
    for words in (["log"], ["diff"], ["diff", "--stat"], ["undo", "-2", "--dry-run"]):
        assert review.call(*words)
    assert "\n+'new\\nline'\n" not in review.call("diff")
    review.call("undo", "-2", "--dry-run")


@on_docker
def test_what_a_real_agent_did_is_taken_back(engine: Engine, home: Path, project: Path, name: str,
                                             image: str) -> None:
    write_stub_config(engine, home)
    review = Review(engine, name, project)
    review.write({"notes": "1\n2\n3\n"})
    for words in (["-y", "c", "--", "--version"], ["-x", STUB_ANSWERS]):
        assert not engine.sandbox("run", "-n", name, *words).returncode
    before = review.state()
    prompt = ("please run: sed -i s/1/agent/ notes && mkdir -m 750 src && echo {} >src/package.json"
              " && chmod 600 src/package.json && echo written")
    ran = engine.sandbox("run", "-n", name, "--checkpoint", "-y", "c", "--", "-p", prompt)
    assert "written" in ran.stdout, ran
    after = review.state()
    assert {"notes", "src/package.json"} <= {*review.rows()}
    (turn,) = review.log()
    assert (turn["what"], turn["state"]) == ("agent", "")
    assert turn["id"] in review.call("log") and "+agent\n" in review.call("diff", turn["id"][:6])
    review.write({"notes": "agent\n2\nthe person's\n"})
    review.call("undo", turn["id"][:6])
    assert (project / "notes").read_text() == "1\n2\nthe person's\n"
    assert review.state() | {b"notes": before[b"notes"]} == before
    review.call("redo")
    assert (project / "notes").read_text() == "agent\n2\nthe person's\n"
    assert review.state() | {b"notes": after[b"notes"]} == after


@on_docker
def test_a_turn_that_runs_is_undone_when_one_says_so(review: Review) -> None:
    review.turn("echo 1 >first")
    waits = "echo >second; until [ -e done ]; do sleep 0.1; done; sudo rm done; echo >third"
    started = review.engine.sandbox("run", "-n", review.name, "-d", "--checkpoint", "-x", waits)
    assert not started.returncode, started
    wait_for(lambda: (review.top / "second").exists())
    turn = review.log()[0]
    assert turn["state"] == "running"
    assert {*review.rows(turn["id"])} == {"second"}
    for words in ([], [turn["id"]], ["-2"], ["second"]):
        review.call("undo", *words, fails=1)
        assert f"nothing was undone, for {turn['id']} still runs" in review.said
    assert "second" in review.call("undo", "--dry-run")
    assert (review.top / "second").exists()
    with review.engine.pty("undo", review.name) as terminal:
        terminal.expect(f"{turn['id']} still runs. Undo what it has done so far? [y/N]")
        terminal.send("n\r")
        assert terminal.wait() == 1 and (review.top / "second").exists()
    assert review.call("undo", "-f") == "deleted   second\n"
    assert "sandbox: what runs in" in review.said
    assert "undone" in review.call("log").splitlines()[2]
    (review.top / "done").touch()
    wait_for(lambda: review.log()[1]["after"])
    assert {*review.state()} == {b".", b"first", b"third"}
    assert {*review.rows(turn["id"])} == {"third"}
    assert review.call("undo") == "deleted   third\n"
    assert {*review.state()} == {b".", b"first"}


@on_docker
def test_a_turn_beside_one_that_runs_is_undone_when_one_says_so(review: Review) -> None:
    """It began first, and what it did since is among the other's changes."""
    waits = "echo >first; until [ -e done ]; do sleep 0.1; done; sudo rm done"
    assert not review.engine.sandbox("run", "-n", review.name, "-d", "--checkpoint", "-x",
                                     waits).returncode
    wait_for(lambda: (review.top / "first").exists())
    review.turn("echo >second")
    second, first = review.log()
    assert (first["state"], second["beside"]) == ("running", [first["id"]])
    review.call("undo", fails=1)
    assert f"nothing was undone, for {first['id']} still runs" in review.said
    (review.top / "done").touch()
    wait_for(lambda: review.log()[1]["after"])
    assert review.call("undo") == "deleted   second\n"


@pytest.mark.parametrize("state, beside", [("running", ["a"]), ("not ended", [])])
def test_what_died_is_beside_nothing_that_began_later(state: str, beside: list[str]) -> None:
    """The snapshot before that is its end."""
    turns: list[dict[str, Any]] = [
        {"id": "a", "kind": "turn", "when": "2026-01-01T00:00:00Z", "state": state},
        {"id": "b", "kind": "turn", "when": "2026-01-01T00:00:01Z", "state": "",
         "ended": "2026-01-01T00:00:09Z"}]
    sandbox_changes.mark_overlaps(turns)
    assert turns[1]["beside"] == beside


@on_docker
def test_a_merge_is_taken_back_from_the_directory(engine: Engine, home: Path, project: Path,
                                                  name: str, image: str) -> None:
    write_config(home, imageName=image.partition(":")[0], network="none")
    review = Review(engine, name, project)
    review.write({"both": "1\n2\n3\n4\n5\n"})
    made = engine.sandbox("run", "-n", name, "--copy", "-x", "true")
    assert not made.returncode, made
    turn = review.turn("sed -i s/1/agent/ both; echo new >new")
    assert {*review.state()} == {b".", b"both"} and {*review.rows(turn)} == {"both", "new"}
    config = (home / "sandbox.json").read_text()
    (home / "sandbox.json").write_text('{"memry": "1g", ' + config[1:])
    review.call("merge")
    assert review.said.count("memry") == 1 and "next merge" not in review.said  # nothing runs
    (home / "sandbox.json").write_text(config)
    merged = review.state()
    (merge,) = [row["id"] for row in review.log() if row["kind"] == "merge"]
    assert {*review.rows(merge)} == {"both", "new"}
    review.write({"both": "agent\n2\n3\n4\nperson\n"})
    review.call("undo", merge)
    assert (project / "both").read_text() == "1\n2\n3\n4\nperson\n"
    assert {*review.state()} == {b".", b"both"}
    review.call("redo")
    assert (project / "both").read_text() == "agent\n2\n3\n4\nperson\n"
    assert {*review.state()} == {*merged}
    assert review.call("undo").splitlines() == ["modified  both", "deleted   new"]
    assert {*review.state()} == {*merged}, "of the copy"


@on_docker
def test_a_mistake_in_the_configuration_keeps_nobody_from_it(review: Review) -> None:
    """It is said once; and no turn goes that the person may have wanted to keep."""
    for number in range(3):
        review.turn(f"echo {number} >a")
    config = review.engine.home / "sandbox.json"
    config.write_text('{"checkpoint": {"keep": 1}, "memry": "1g", ' + config.read_text()[1:])
    for command in ("undo", "redo"):
        assert review.call(command) == "modified  a\n"
        assert review.said.count("memry") == 1
    assert len(review.log()) == 5


def test_a_damaged_store_is_said_in_one_line(review: Review) -> None:
    review.turn("echo 1 >first")
    before = review.state()
    home = review.engine.run("inspect", "--format", '{{index .Config.Labels "sandbox.home"}}',
                             review.name).stdout.strip()
    store = home.replace("-home-", "-shadow-")
    harm = review.engine.run("run", "--rm", "-v", f"{store}:/store", "--entrypoint", "sh", IMAGE,
                             "-c", "echo '{' >/store/state.json")
    assert not harm.returncode, harm
    for command in ("log", "diff", "undo", "redo"):
        assert review.call(command, fails=1) == ""
        assert "damaged" in review.said and len(review.said.splitlines()) == 2
    assert review.state() == before
    advised = f"{review.engine.runtime} volume rm {store}"
    assert review.said.endswith(f": {advised}\n")
    assert not review.engine.run(*advised.split()[1:]).returncode
    review.turn("echo 2 >first")
    assert review.call("undo") == "modified  first\n"


BAD = [("diff", "nope", 1, "nothing has changed at nope"), ("diff", "-9", 1, "there is no turn -9"),
       ("diff", "", 2, "an empty word is no turn"), ("undo", "", 2, "an empty word is no turn"),
       ("diff", "/etc", 2, "/etc is not in the workspace"), ("undo", "../x", 2, "is not in the wo"),
       ("undo", "nope", 1, "nothing is to change at nope")]


@on_docker
def test_a_mistake_is_said_and_nothing_is_done(review: Review) -> None:
    for command in ("diff", "undo", "redo"):
        review.call(command, fails=1)
        assert re.search("no snapshot yet|nothing to (un|re)do", review.said)
    assert review.call("log") == "" and "--checkpoint" in review.said
    assert review.call("log", "--json") == "[]\n"
    review.turn("echo 1 >a")
    before = review.state()
    for command, word, status, message in BAD:
        assert review.call(command, word, fails=status) == ""
        assert message in review.said and len(review.said.splitlines()) <= 2
        assert ("\n  nope is no turn either: sandbox log" in review.said) == (word == "nope")
    missing = review.engine.sandbox("undo", f"{review.name}x")
    assert (missing.returncode, missing.stdout) == (1, "") and "no container" in missing.stderr
    moved = review.top.with_name(f"{review.top.name}-moved")
    review.top.rename(moved)
    try:
        for command in ("diff", "undo"):
            review.call(command, fails=1, cwd=moved)
            assert str(review.top) in review.said
    finally:
        moved.rename(review.top)
    assert review.state() == before
