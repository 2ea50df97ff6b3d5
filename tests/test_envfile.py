"""Env files: what a line means, and how a wrong one is answered."""

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import sandbox

Show = Callable[..., tuple[int, str, str]]

SEED = 20240229
SHELLS = ("dash", "bash")
CHARACTERS = "aZ09_ \t'\"\\=#~:;&|<>(){}[]*?!%^,.-+@/\r\v\féü漢\u0301\u2028\u3000😀"
AWKWARD = [*CHARACTERS, "\x01", "\x7f", "export ", " #", ":~", "{a,b}", "\\\\", '\\"']


def parse(text: str) -> dict[str, str]:
    return {name: value for name, (value, _) in sandbox.parse_env_file(text, "x.env").items()}


def sourced(folder: Path, shell: str, text: str) -> dict[str, str]:
    """The variables named N… that a real shell has after sourcing the text."""
    file = folder / "file.env"
    file.write_bytes(os.fsencode(text))
    argv = [shell, "-c", "set -ae; . ./file.env; env -0"]
    answer = subprocess.run(argv, cwd=folder, env={"PATH": os.defpath, "HOME": "/nowhere"},
                            capture_output=True)
    assert (answer.returncode, answer.stderr) == (0, b"")
    pairs = (os.fsdecode(pair).split("=", 1) for pair in answer.stdout.split(b"\0")
             if pair.startswith(b"N"))
    return dict(pairs)


# --- Lines ---


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('export A="value"', "value"),
        ('A="value"', "value"),
        ("A='value'", "value"),
        ("A=value", "value"),
        ("\t export \t A=value \t", "value"),
        ("A=", ""),
        ('A=""', ""),
        ("export A=''", ""),
        ('A=" x "', " x "),
        ('A="it\'s"', "it's"),
        ("A='say \"hi\"'", 'say "hi"'),
        (r'A="a \"b\" \\ \$ \`"', 'a "b" \\ $ `'),
        (r'A="\n \t \a \'"', r"\n \t \a \'"),
        (r"A='\n \\ \"'", r"\n \\ \""),
        ('A="$HOME ${HOME} $(id) `id`"', "$HOME ${HOME} $(id) `id`"),
        ("A='$HOME'", "$HOME"),
        ('A="a # b"', "a # b"),
        ('A="x" # comment', "x"),
        ("A='x'\t# comment", "x"),
        ("A=a#b=c", "a#b=c"),
        ("A=https://host:8080/p?q=1%20*[x]", "https://host:8080/p?q=1%20*[x]"),
        ('A="grüß 漢字 😀"', "grüß 漢字 😀"),
        ("A=grüß", "grüß"),
        ('A="x\u2028y\x0bz\x85"', "x\u2028y\x0bz\x85"),
        ("A=x\r", "x\r"),
        ('A="x"\r', "x\r"),
        ('A="x\r"', "x\r"),
        ("export A='x'\r", "x\r"),
        ('A="x"\r # comment\r', "x\r"),
        ('A="x" # comment\r', "x"),
    ],
)
def test_a_line_gives_its_value(line: str, value: str) -> None:
    assert parse(line) == {"A": value}


def test_comments_and_blank_lines_give_nothing_and_the_last_line_wins() -> None:
    text = '# A="no"\n\n  \t\n\t# B=no\nA=1\r\n\r\nB=2\nexport A="3"\n#C=4'
    assert sandbox.parse_env_file(text, "x.env") == {"A": ("3", 8), "B": ("2", 7)}


@pytest.mark.parametrize(
    "line",
    [
        "A",
        "export A",
        "export",
        "=x",
        'export ="x"',
        "1A=x",
        "A-B=x",
        "A B=x",
        "A =x",
        "Ä=x",
        "A.b=x",
        '"A"=x',
        "\ufeffA=x",
        "exportA B=x",
        "A= x",
        "A=a b",
        "A=a'b'",
        'A="x',
        "A='x",
        'A="x\\"',
        "A='it's'",
        'A="x"y',
        'A="x" y',
        'A="x"#y',
        'A="x" \r',
        'A="x"\ry',
        "A='a''b'",
        r"A='a'\''b'",
        "A=$HOME",
        "A=`id`",
        "A=a;b",
        "A=a&b",
        "A=a|b",
        "A=<x",
        "A=(x)",
        "A=a\\b",
        "A=~/x",
        "A=/x:~/y",
        "export A={a,b}",
        "A=#x",
        "A=a\0b",
        'A="a\0b"',
        'A="a\\\x7fb"',
        'A="a\\\x01b"',
        "SANDBOX_ENV=x",
        "SANDBOX_EXEC=x",
    ],
)
def test_a_wrong_line_is_refused_with_its_file_and_number(line: str) -> None:
    with pytest.raises(sandbox.SandboxError, match=r"^/x\.env:3: ") as error:
        sandbox.parse_env_file(f"# comment\nB=1\n{line}\nC=1", "/x.env")
    assert error.value.code == 1 and error.value.hint


def test_an_error_repeats_nothing_that_may_be_a_secret() -> None:
    # A key of several lines that was pasted without quotes makes the first two.
    for line in ("c2VjcmV0", "+c2VjcmV0==", "export T c2VjcmV0", "T='c2VjcmV0",
                 "T=c2VjcmV0;", 'T="c2VjcmV0"x'):
        with pytest.raises(sandbox.SandboxError) as error:
            sandbox.parse_env_file(line, "x.env")
        assert "c2VjcmV0" not in error.value.message


# --- Properties ---


@pytest.mark.parametrize("shell", SHELLS)
def test_what_init_quotes_is_read_back_by_us_and_by_a_shell(tmp_path: Path, shell: str) -> None:
    chance = random.Random(SEED)
    alphabet = [*AWKWARD, "$", "`", "$(id)", "\udcff"]
    values = {f"N{n}": "".join(chance.choices(alphabet, k=chance.randrange(12)))
              for n in range(3000)}
    text = "".join(f"export {name}={sandbox.env_quote(value)}\n" for name, value in values.items())
    assert parse(text) == values
    assert sourced(tmp_path, shell, text) == values


@pytest.mark.parametrize("shell", SHELLS)
def test_any_line_parses_or_is_refused_and_a_shell_agrees_with_what_is_accepted(tmp_path: Path,
                                                                                shell: str) -> None:
    chance = random.Random(SEED)
    accepted: dict[str, str] = {}
    lines, refused = [], 0
    for n in range(6000):
        quote = chance.choice(["", "", '"', "'"])
        inner = "".join(chance.choices(AWKWARD, k=chance.randrange(8)))
        value = quote + inner + chance.choice([quote, quote, ""])
        before = chance.choice(["", "export ", "  ", "#", "x"])
        after = chance.choice(["", " ", "\r", " #\r"])
        line = f"{before}N{n}={value}{after}"
        try:
            found = parse(line)
        except sandbox.SandboxError:
            refused += 1
            continue
        accepted.update(found)
        lines.append(line)
    accepted = {name: value for name, value in accepted.items() if name.startswith("N")}
    assert len(accepted) > 1000 and refused > 1000
    assert sourced(tmp_path, shell, "\n".join(lines)) == accepted


def test_garbage_never_ends_in_anything_but_a_refusal() -> None:
    chance = random.Random(SEED)
    for _ in range(5000):
        text = "".join(chance.choices([*AWKWARD, "A", "=", "\n", "\0", "$", "`", "\udcff"],
                                      k=chance.randrange(30)))
        try:
            found = parse(text)
        except sandbox.SandboxError:
            continue
        assert all(name.isidentifier() and "\0" not in value for name, value in found.items())


# --- Files ---


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
         capsys: pytest.CaptureFixture[str]) -> Show:
    """config show with these options: status, standard output, standard error."""
    monkeypatch.setenv("SANDBOX_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SANDBOX_RUNTIME", raising=False)

    def show(*options: str) -> tuple[int, str, str]:
        status = sandbox.main(["config", "show", *options])
        return status, *capsys.readouterr()

    return show


def test_bytes_that_are_not_utf8_reach_the_container_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "a.env"
    file.write_bytes(b'A="\xff\xfe"\nB=\xe9\r\n')
    values = {name: value for name, (value, _) in sandbox.read_env_file(str(file)).items()}
    assert os.fsencode(sandbox.env_script(values)) == b"export A='\xff\xfe'\nexport B='\xe9\r'"


def test_a_wrong_line_ends_config_show_with_one_error(show: Show, tmp_path: Path) -> None:
    file = tmp_path / "a.env"
    file.write_text("A=1\nB = 2\n")
    status, out, err = show("--ef", str(file))
    assert (status, out) == (1, "") and err.startswith(f"sandbox: {file}:2: ")
    assert err.splitlines()[1:] == ['  write export NAME="value"']


def test_a_file_that_cannot_be_read_is_named(show: Show, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.env", tmp_path, Path("/dev/null/x"), tmp_path / ("x" * 300)):
        status, out, err = show("--ef", str(path))
        assert (status, out) == (1, "") and err.startswith(f"sandbox: env file {path}: ")


def test_an_empty_path_is_refused(show: Show) -> None:
    assert show("--ef", "") == (2, "", "sandbox: --ef: '' is not an absolute path\n")
