"""Run AI coding agents in containers, at full speed, without handing them the machine.

    sandbox run -y c                 Claude Code on the current directory, in a new container
    sandbox run -n demo -- -c        continue the agent's conversation in the container "demo"
    sandbox run --allow HOST -y c    the same, able to reach that host and nothing else
    sandbox run --on HOST -y c       the same on another machine, of the key "hosts"
    sandbox recreate demo -p 80:80   a new container for it, its conversations stay
    sandbox ps | attach | logs | stop | start | cp | rm | rename | net | prune | build | doctor
    sandbox log | diff | undo | redo what agents have changed, and back
    sandbox usage | budget           what they have used, and may use
    sandbox init | config | serve | completion

Files: ~/.sandbox/sandbox.json (SANDBOX_HOME moves the directory) holds the configuration,
~/.sandbox/env/*.env by convention the env files, ~/.sandbox/@HOST/ what is kept of the sessions of
a host, static/image/ what goes into the image.

Exit codes: 0; 1 our own failure or a wrong configuration; 2 usage; 130 Ctrl-C. `run` passes the
status of what it ran on, uses 125 for a failure before that, and 128+n for a signal n.

Import budget: at import only os, sys and time, which the interpreter has loaded, and parts of it
such as errno; json, re and select where a command needs them, argparse for what read_plainly() does
not read; never subprocess, shutil, dataclasses or typing. `sandbox ps` and `run` in a session that
exists are measured against it: they import nothing that is written in Python.
"""

from __future__ import annotations

import errno
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    import signal
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from contextlib import suppress
    from functools import partial
    from typing import Any, NoReturn

    from sandbox_changes import Turn

    ListOf = Callable[["Engine", Sequence[Mapping[str, Any]]], list[Any]]
else:
    # The parts of the interpreter that signal and functools are made of: contextlib and functools
    # take 3 ms, and signal's enums 1 ms.
    import _signal as signal
    from _functools import partial

    class suppress:
        """The same as contextlib's."""

        def __init__(self, *kinds: type[BaseException]) -> None:
            self.kinds = kinds

        def __enter__(self) -> None:
            pass

        def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
            return kind is not None and issubclass(kind, self.kinds)


__version__ = "0.1.0"

IMAGE_NAME = "localhost/sandbox"
IMAGE_VERSION = "1.0-common"
BASE_IMAGE = "debian:trixie-slim"
CONTAINER_HOME = "/home/agent"
STARTUP_SECONDS = 30
CALL_SECONDS = 20  # for an answer of the engine
ANSWER_BYTES = 32 << 20  # of an answer for which nothing else is said
NOTIFY_SECONDS, NOTIFY_BYTES = 10, 65536  # for the person's own command, and of its output
NEWS_CHARS = 300
LONG_SECONDS = 600  # for what it may take its time for: create, start, stop, remove
FULL_BYTES = 50_000_000
PIPE_BYTES = 65536
GONE_SECONDS = 3  # without a process, after which a daemon is taken for dead
RESIZE_AGAIN_SECONDS = 0.5
KEY_SECONDS = 0.5  # for which the first of the keys that detach waits for the next one
NUDGE_SECONDS = 0.1
ENVIRONMENT_BYTES = 128 * 1024 - 16  # the kernel's limit for one string of an environment
MASK = "<masked>"

# What apt and sudo need inside the container; everything else is dropped.
CAPABILITIES = ("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")

SHELL = ["sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"]


class Agent:
    """A coding agent: all that is known of it, but for its package (static/image/) and the reader
    of its events (static/ui/events.js).

    It is started as `program` with the arguments of a mode. `prompt` is how it answers one prompt
    without a terminal: with JSON events as they come, in a conversation that goes on (all begin
    one where there is none). A prompt that begins with a dash is no option there, and stdin is
    empty, for some read it to its end first. `headless` are the words that make it do the same
    for who calls it.
    `env` goes to all that runs in a session, `yolo_env` where the agent is the session's, and
    `version_env` makes it tell its version sooner. `init` takes the credentials in `files` (below
    the home directory, each with the option of its mount), which the variable `moved` has moved
    where it is set, and in `variables`. `turn`: the events that a turn, or a step of it, begins
    and ends with, and the fields that hold the conversation's id and what was used. `says` is the
    field of an event that holds what the agent answers.
    """

    def __init__(self, program: str, title: str, shortcuts: str = "", *, yolo: str = "",
                 resume: str, prompt: str, headless: str = "", env: Mapping[str, str] = {},
                 yolo_env: Mapping[str, str] = {}, version_env: Mapping[str, str] = {},
                 files: str = "", moved: str = "", variables: str = "", turn: str = "",
                 says: str = "", events: str = "") -> None:
        self.program, self.title = program, title
        self.shortcuts = [*shortcuts.split(), program]
        self.yolo = [program, *yolo.split()]
        self.resume = resume.split()
        self.prompt, self.headless = f"{program} {prompt}", headless.split()
        self.env, self.yolo_env, self.version_env = env, yolo_env, version_env
        self.files, self.moved, self.variables = files.split(), moved, variables.split()
        self.turn, self.says = turn.split(), says.split(".")
        self.events = events or program  # the name of their reader

    def host_file(self, path: str) -> str:
        """Where a file below the home directory is on this machine."""
        moved = os.environ.get(self.moved)
        if moved:
            return os.path.join(os.path.abspath(moved), path.partition("/")[2])
        return os.path.expanduser(f"~/{path}")


AGENTS = {agent.program: agent for agent in (
    Agent("claude", "Claude Code", "c cc agent-a", yolo="--dangerously-skip-permissions",
          resume="-c",
          prompt="-p --continue --output-format stream-json --verbose --include-partial-messages"
                 " --dangerously-skip-permissions -- {prompt}", headless="-p --print",
          env={"IS_SANDBOX": "1", "CLAUDE_CODE_SANDBOXED": "1", "DISABLE_AUTOUPDATER": "1"},
          files=".claude/.credentials.json", moved="CLAUDE_CONFIG_DIR",
          variables="ANTHROPIC_BASE_URL ANTHROPIC_AUTH_TOKEN ANTHROPIC_API_KEY"
                    " CLAUDE_CODE_OAUTH_TOKEN ANTHROPIC_MODEL ANTHROPIC_DEFAULT_OPUS_MODEL"
                    " ANTHROPIC_DEFAULT_SONNET_MODEL ANTHROPIC_DEFAULT_HAIKU_MODEL"
                    " CLAUDE_CODE_SUBAGENT_MODEL",
          turn="system result session_id usage", says="result"),
    Agent("gemini", "Gemini CLI", "gm g agent-b", yolo="--yolo", resume="-r",
          prompt="--prompt={prompt} --resume latest --output-format stream-json --yolo",
          headless="-p --prompt",
          env={"GEMINI_CLI_TRUST_WORKSPACE": "true"},
          version_env={"GEMINI_CLI_NO_RELAUNCH": "true"},  # or it starts itself twice
          files=".gemini/oauth_creds.json .gemini/google_accounts.json .gemini/settings.json:ro",
          variables="GEMINI_API_KEY GEMINI_MODEL GOOGLE_GEMINI_BASE_URL GOOGLE_API_KEY"
                    " GOOGLE_CLOUD_PROJECT",
          turn="init result session_id stats", says="content"),
    Agent("codex", "Codex", "cx agent-c", yolo="--dangerously-bypass-approvals-and-sandbox",
          resume="resume --last",
          prompt="exec resume --last --json --skip-git-repo-check"
                 " --dangerously-bypass-approvals-and-sandbox -- {prompt}", headless="exec e",
          files=".codex/auth.json .codex/config.toml:ro", moved="CODEX_HOME",
          variables="OPENAI_API_KEY OPENAI_BASE_URL",
          turn="turn.started turn.completed thread_id usage", says="item.text"),
    Agent("opencode", "OpenCode", "oc agent-d", resume="-c",
          prompt="run --continue --format json -- {prompt}", headless="run",
          env={"OPENCODE_DISABLE_AUTOUPDATE": "true"},
          yolo_env={"OPENCODE_PERMISSION": '{"*":"allow"}'},
          files=".local/share/opencode/auth.json .config/opencode/opencode.json:ro",
          variables="OPENCODE_API_KEY OPENCODE_CONFIG_CONTENT",
          turn="step_start step_finish sessionID part.tokens", says="part.text"),
)}
SHORTCUTS = {shortcut: name for name, agent in AGENTS.items() for shortcut in agent.shortcuts}


class SandboxError(Exception):
    """A failure that a person can act on: what happened, what to do, and the exit status."""

    def __init__(self, message: str, hint: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.message, self.hint, self.code = message, hint, code


class FileError(SandboxError):
    """A file of ours that could not be written; `errno` says why."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror}", "make room or correct the permissions")
        self.errno = error.errno


class NameTaken(SandboxError):
    """Another run won the race for a container's name."""


class NotBegun(SandboxError):
    """A container ended before its command began; where it may have begun `sure` is False."""

    def __init__(self, message: str, hint: str, code: int, *, sure: bool) -> None:
        super().__init__(message, hint, code)
        self.sure = sure


class EngineProblem(SandboxError):
    """A failure with a known remedy; `kind` says which one it is."""

    def __init__(self, kind: str, message: str, remedy: Remedy) -> None:
        super().__init__(message, remedy.text(), 125)
        self.kind, self.remedy = kind, remedy


def printable(text: str) -> str:
    """The text without what a terminal would obey; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text.replace("\t", " "))


def one_line(text: str) -> str:
    return printable(text).replace("\n", "?")


def say(message: str) -> None:
    """Talk to the person, on standard error; some of the words are those of others."""
    print(f"sandbox: {printable(message)}", file=sys.stderr, flush=True)


def show(line: str) -> None:
    """Print a line for people that holds words of others: standard output."""
    print(printable(line))


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the known word that is closest, or ''."""
    import difflib

    found = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f" (did you mean {found[0]}?)" if found else ""


def is_plain(text: str, also: str) -> bool:
    """True when the text holds ASCII letters, digits and the characters of `also` only."""
    return text.isascii() and all(c.isalnum() or c in also for c in text)


def quote_all(argv: Iterable[str]) -> str:
    """The words as a shell reads them, quoted only where they must be: as shlex.join()."""
    return " ".join(word if word and is_plain(word, "_@%+=:,./-")
                    else "'" + word.replace("'", "'\"'\"'") + "'" for word in argv)


def random_id() -> str:
    """Forty random bits as ten digits."""
    return os.urandom(5).hex()


# --- JSON ---
# Every JSON text is read here. The interpreter's parser calls itself for each level, and from 3.13
# on it goes deeper than the stack of a small thread reaches: the process dies without an exception.

NESTING = 64  # levels; nothing of ours has more than a dozen
JSON_FILE_BYTES = 16 * 1024 * 1024


def finite(text: str) -> float:
    number = float(text)
    if number - number:  # not a number, for what is not finite
        raise ValueError(f"{text[:40]} is not a number of JSON")
    return number


def parse_json(text: str | bytes | bytearray, number: Callable[[str], float] = finite) -> Any:
    """The value of a JSON text; `number` reads what is no integer in it.

    Raises ValueError, also for one that is nested deeper than NESTING levels and, with finite(),
    for what JSON does not have (NaN, infinity): a browser would refuse what we make of it.
    """
    text = text if isinstance(text, str) else text.decode()
    if text.count("[") + text.count("{") > NESTING:
        check_nesting(text)
    # What json.loads() asks: to import `json`, and with it `re`, takes longer than all else that
    # most commands do. Of a mistake it cannot tell without `json`: that is a SystemError.
    with suppress(ImportError, AttributeError, StopIteration, ValueError, SystemError):
        from _json import make_scanner

        body = text.strip(" \t\r\n")
        form: Any = JsonForm(number)
        value, end = make_scanner(form)(body, 0)
        if end == len(body):
            return value
    import json  # which also says what is wrong

    return json.loads(text, parse_constant=number, parse_float=number)


class JsonForm:
    """How the scanner of the interpreter is to read a text: as json.loads() does."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_int = int

    def __init__(self, number: Callable[[str], float]) -> None:
        self.parse_float = self.parse_constant = number


def check_nesting(text: str) -> None:
    """Raise ValueError for too many levels; what follows a mistake in the text may go uncounted."""
    import re

    # Without its escapes every second piece between two quotes is a string.
    outside = "".join(re.sub(r"\\.", "", text, flags=re.DOTALL).split('"')[::2])
    depth = 0
    for bracket in re.findall(r"[][{}]", outside):
        depth += 1 if bracket in "[{" else -1
        if depth > NESTING:
            raise ValueError(f"it is nested deeper than {NESTING} levels")


def read_json(path: str, number: Callable[[str], float] = finite) -> Any:
    """The value in a file that others may have written, too. Raises OSError and ValueError."""
    with open(path, "rb") as file:
        text = file.read(JSON_FILE_BYTES + 1)
    if len(text) > JSON_FILE_BYTES:
        raise ValueError(f"it is larger than {JSON_FILE_BYTES} bytes")
    return parse_json(text, number)


def to_json(value: object, **form: Any) -> str:
    """json.dumps() with these options."""
    import json

    return json.dumps(value, **form)


# --- Env files ---


def parse_env_file(text: str, source: str) -> dict[str, tuple[str, int]]:
    """Variables of an env file with their line numbers, the last line winning.

    A line is `[export] NAME=value`; `#` starts a comment line. Single quotes keep everything,
    double quotes keep everything but a backslash before `"`, `\\`, `$` or a backtick; no
    substitution takes place. What shells read in two ways is refused. Only LF ends a line: a
    carriage return belongs to the value. Raises SandboxError.
    """
    variables: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        body = line.strip(" \t")
        if not body.strip("\r") or body.startswith("#"):
            continue
        try:
            name, value = parse_env_line(body)
        except ValueError as error:
            raise SandboxError(f"{source}:{number}: {error}", 'write export NAME="value"') from None
        variables[name] = (value, number)
    return variables


def parse_env_line(body: str) -> tuple[str, str]:
    """Name and value of one line. Raises ValueError with the reason."""
    if body.startswith(("export ", "export\t")):
        body = body[7:].lstrip(" \t")
    name, equals, rest = body.partition("=")
    if not equals:
        raise ValueError("there is no '='")
    if not (name.isascii() and name.isidentifier()):  # the text itself may be a part of a secret
        raise ValueError("what is before the '=' is not a name of a variable")
    check_env_name(name)
    if "\0" in rest:
        raise ValueError(f"the value of {name} has a NUL character")
    if rest[:1] in ("'", '"'):
        return name, unquote_env(name, rest)
    value = rest.rstrip(" \t")
    if set(value) & set(" \t\"'\\$`;&|<>(){") or value.startswith(("~", "#")) or ":~" in value:
        raise ValueError(f"the value of {name} has a special character and no quotes")
    return name, value


def unquote_env(name: str, rest: str) -> str:
    """The value of a quoted text, with a carriage return right behind the closing quote."""
    mark, value, at = rest[0], "", 1
    while at < len(rest) and rest[at] != mark:
        escaped = rest[at + 1 : at + 2] if mark == '"' and rest[at] == "\\" else ""
        # bash marks its own quoting with these two characters, so it would read another value.
        if escaped in ("\x01", "\x7f"):
            raise ValueError(f"the value of {name} has a backslash before a control character")
        if escaped and escaped in '"\\$`':
            at += 1
        value += rest[at : at + 1]
        at += 1
    if at >= len(rest):
        raise ValueError(f"the quote of {name} is not closed")
    cr = "\r" if rest.startswith("\r", at + 1) else ""
    tail = rest[at + 1 + len(cr) :]
    if tail.strip(" \t") and not (tail[0] in " \t" and tail.lstrip(" \t").startswith("#")):
        raise ValueError(f"text after the closing quote of {name}")
    return value + cr


def check_env_name(name: str) -> None:
    """Raise ValueError unless a shell could export the name."""
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f"{name!r} is not a name of a variable: letters, digits and _ only")
    if name in ("SANDBOX_ENV", "SANDBOX_EXEC", "SANDBOX_AUTOSTART", "SANDBOX_HOLD"):
        raise ValueError(f"{name} is reserved")


def read_env_file(path: str) -> dict[str, tuple[str, int]]:
    """Parse the env file at an absolute path. Raises SandboxError when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            return parse_env_file(file.read(), path)
    except OSError as error:
        raise SandboxError(f"env file {path}: {error.strerror}",
                           "correct the path or create the file") from None


# --- Configuration keys ---
# A check takes the JSON value, returns it normalised, and raises ValueError with reason and remedy.


def is_text(value: Any) -> bool:
    """True for a string without NUL and lone surrogates: an argv and a file can hold it."""
    if not isinstance(value, str) or "\0" in value:
        return False
    with suppress(UnicodeEncodeError):
        os.fsencode(value)
        return True
    return False


def a_string(value: Any) -> str:
    if not is_text(value):
        raise ValueError(f"{value!r} is not a string")
    return str(value)


def a_word(value: Any) -> str:
    if not is_text(value) or not value:
        raise ValueError("it is empty or not a string")  # and may be a password
    return str(value)


def matching(pattern: str, what: str, *, numbers: bool = False,
             then: Callable[[str], Any] = str) -> Callable[[Any], Any]:
    """A check for a string of a pattern, which a number's digits may be, too; `then` normalises."""

    def is_one(text: str) -> bool:
        import re

        return bool(re.fullmatch(pattern, text, re.ASCII | re.DOTALL))

    return fulfilling(is_one, what, numbers=numbers, then=then)


def fulfilling(is_one: Callable[[str], bool], what: str, *, numbers: bool = False,
               then: Callable[[str], Any] = str) -> Callable[[Any], Any]:
    """The same by a function: for what most commands check, as the import of `re` takes 2 ms."""

    def check(value: Any) -> Any:
        text = str(value) if numbers and type(value) in (int, float) else value
        if not is_text(text) or not is_one(text):
            raise ValueError(f"{value!r} is not {what}")
        return then(text)

    return check


def is_name(text: str) -> bool:
    return 2 <= len(text) <= 128 and is_plain(text, "_.-") and text[0].isalnum()


def is_host(text: str) -> bool:
    return 0 < len(text) <= 64 and is_plain(text, "_.-")


def is_image_name(text: str) -> bool:
    """`[host[:port]/][folder/]name`."""
    host, slash, rest = text.partition("/")
    name, colon, port = host.partition(":")
    parts = [name, *rest.split("/")] if slash else [text]
    return text.isascii() and (port.isdecimal() or not colon) and all(
        part[:1].isalnum() and is_plain(part, "_.-") and part == part.lower() for part in parts)


def is_image_version(text: str) -> bool:
    version, _, variant = text.partition("-")
    return (all(number.isdecimal() for number in version.split(".")) and text.isascii()
            and 0 < len(variant) <= 80 and is_plain(variant, "_.-"))


def one_of(known: Iterable[str], what: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if a_string(value) not in known:
            raise ValueError(
                f"{value!r} is not {what}: use one of {', '.join(known)}{nearest(value, known)}")
        return str(value)

    return check


def is_exact(path: str) -> bool:
    """Whether everybody reads a path as we do: strict UTF-8 without control characters.

    Engines are written in Go, which makes U+FFFD of other bytes and "\\n" of "\\r\\n": they would
    mount another path than the one that was checked.
    """
    with suppress(UnicodeEncodeError):
        path.encode()
        return not any(c < " " or "\x7f" <= c <= "\x9f" for c in path)
    return False


def an_absolute_path(value: Any) -> str:
    path = a_string(value)
    if path.startswith("~/"):
        path = os.path.expanduser(path)
    if not path.startswith("/"):
        raise ValueError(f"{value!r} is not an absolute path")
    if not is_exact(path):
        raise ValueError(f"{value!r} has a control character or a byte that is not UTF-8")
    return "/" + os.path.normpath(path).lstrip("/")  # normpath keeps two leading slashes


def a_volume(value: Any) -> str:
    """`<host>:<container>[:<options>]`, both paths absolute; `~/` is the person's home."""
    parts = a_string(value).split(":")
    if len(parts) not in (2, 3):
        raise ValueError(f"{value!r} is not <host_path>:<container_path>[:ro|z|Z]")
    host, container = an_absolute_path(parts[0]), an_absolute_path(parts[1])
    for option in parts[2].split(",") if len(parts) == 3 else ():
        if option not in ("ro", "rw", "z", "Z"):
            raise ValueError(f"{value!r}: the option {option!r} is not one of ro, rw, z, Z")
    if container == "/":
        raise ValueError(f"{value!r} would cover the whole container")
    return ":".join([host, container, *parts[2:]])


def a_port(value: Any) -> str:
    """`[<ip>:]<host port>:<container port>[/tcp|/udp]`; without an address on 127.0.0.1."""
    what = "[<ip>:]<host_port>:<container_port>[/tcp|/udp], ports from 1 to 65535"
    address = r"((\[[0-9a-fA-F:.]+\]|[0-9.]+):)?"
    text = matching(address + r"0*[1-9]\d{0,4}:0*[1-9]\d{0,4}(/tcp|/udp)?", what)(value)
    ports = text.partition("/")[0].split(":")[-2:]
    if max(map(int, ports)) > 65535:
        raise ValueError(f"{value!r} is not {what}")
    return text if text.count(":") > 1 else f"127.0.0.1:{text}"


def a_shortcut(value: Any) -> str:
    return SHORTCUTS[one_of(SHORTCUTS, "an agent")(value)]


def a_command(value: Any) -> str | list[str]:
    """A string for a shell, or a list of words that are passed as they are."""
    if is_text(value) and value.strip():
        return str(value)
    if isinstance(value, list) and value and all(map(is_text, value)) and value[0]:
        return list(value)
    raise ValueError(f"{value!r} is neither a command line nor a list of words")


def a_program(value: Any) -> list[str]:
    """The words of a command of the host, which no shell reads: a string is split as one would."""
    import shlex

    words = a_command(value)
    words = shlex.split(words) if isinstance(words, str) else words
    if not words or not words[0]:
        raise ValueError(f"{value!r} names no program")
    if "/" in words[0]:  # one of the directory at hand may be the project's
        words[0] = an_absolute_path(words[0])
    return words


def a_rule(value: Any) -> str:
    """`<host>[:<port>]` in its one form: a name, `*.` and a name, or an address.

    Without a port it means 443 and 80. Rule in static/image/proxy.py, a program of its own, takes
    the same texts and means the same by them.
    """
    import re

    text = a_string(value)
    bare = text.count(":") > 1 and not text.startswith("[")  # an IPv6 address without its brackets
    found = re.fullmatch(r"(\*\.)?(?:\[(.*:.*)\]|([^:]*))(?::([0-9]{1,5}))?",
                         f"[{text}]" if bare else text)
    below, address, name, port = found.groups("") if found else ("", "", "", "")
    host = canonical_host(address or name)
    if not host or not 0 < int(port or 1) < 65536 or (below and is_address(host)):
        raise ValueError(f"{value!r} is not <host>[:<port>]: a name, *.name for what is below it, "
                         "or an address; no http://, no path")
    host = f"[{host}]" if ":" in host else host
    return below + host + (f":{int(port)}" if port else "")


def is_address(host: str) -> bool:
    """Whether a host is to be an address: with such a last label C libraries read a name as one."""
    import re

    return ":" in host or bool(re.fullmatch(r"[0-9]+|0x[0-9a-f]*", host.rpartition(".")[2]))


def canonical_host(text: str) -> str:
    """A name or an address written the one way, '' for what is neither, as `127.1` and `0x7f.1`."""
    import re

    host = text.removesuffix(".").lower() if text.isascii() else ""
    if not is_address(host):
        label = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
        return host if len(host) < 254 and re.fullmatch(rf"{label}(\.{label})*", host) else ""
    from socket import AF_INET, AF_INET6, inet_ntop, inet_pton

    with suppress(OSError):
        data = inet_pton(AF_INET6 if ":" in host else AF_INET, host)
        data = data[12:] if data[:12] == bytes(10) + b"\xff\xff" else data
        return inet_ntop(AF_INET if len(data) == 4 else AF_INET6, data)
    return ""


def a_network(value: Any) -> Any:
    """`open`, `none`, `host`, or an object with lists of hosts: `allow` and, maybe, `deny`."""
    if (isinstance(value, dict) and "allow" in value and not set(value) - {"allow", "deny"}
            and all(isinstance(rules, list) for rules in value.values())):
        lists = {key: list(dict.fromkeys(map(a_rule, rules))) for key, rules in value.items()}
        return {key: rules for key, rules in lists.items() if rules or key == "allow"}
    if value not in ("open", "none", "host"):
        raise ValueError(f'{value!r} is not open, none, host, or {{"allow": ["<host>[:<port>]"]}}')
    return value


a_name = fulfilling(
    lambda text: is_name(text.partition("@")[0]) and ("@" not in text or is_host(
        text.partition("@")[2])),
    "a container name: 2 to 128 of A-Z a-z 0-9 _ . -, a letter or digit first; @HOST may follow")
an_image_name = fulfilling(
    is_image_name, "an image name: lower case, without a version (that is imageVersion)")
an_image_version = fulfilling(is_image_version,
                              f"<version>-<variant>, for example {IMAGE_VERSION}")
a_number = matching(r"(?=.*[1-9])\d{0,5}(\.\d{0,3})?", "a number of CPUs such as 2 or 1.5",
                    numbers=True)
a_size = matching(r"0*[1-9]\d*([bkmgBKMG]|[kmgKMG][bB])?", "a size such as 512m or 4g",
                  then=str.lower)
a_count = matching(r"0*[1-9]\d{0,8}", "a whole number above 0", numbers=True, then=int)
a_build_argument = matching(r"[A-Za-z_]\w*=.*", "<NAME>=<value>")
KEY_PATTERN = r"(ctrl-[a-z@[\\\]^_]|[!-+.-~-])"
a_key_sequence = matching(rf"({KEY_PATTERN}(,{KEY_PATTERN})*)?",
                          "keys such as ctrl-p,ctrl-q, or empty for none")
a_host = matching(r"\[?[\w.:-]+\]?", "a host name", then=lambda text: text.lower().strip("[]"))
a_prompt_template = matching(r".*\{prompt\}.*", "a command with the placeholder {prompt}")


def a_checkpoint(value: Any) -> Any:
    """true, false, `try`, or an object with the bounds of what is kept."""
    checks = {"keep": a_count, "maxBytes": a_size}
    if isinstance(value, dict) and value and not value.keys() - checks.keys():
        return {name: checks[name](bound) for name, bound in value.items()}
    if not (isinstance(value, bool) or value == "try"):
        raise ValueError(f'{value!r} is not true, false, try, or {{"keep": 50, "maxBytes": "2g"}}')
    return value


AMOUNTS = ("usd", "tokens", "minutes")


def a_budget(value: Any) -> dict[str, Any]:
    """An object of amounts and `per`, or a string such as 5usd,60minutes/day; '' is none."""
    import re

    wrong = ValueError(f'{value!r} is not such as 5usd, 60minutes/day or {{"usd": 5, "tokens": '
                       '2000000, "minutes": 60, "per": "day"}')
    if isinstance(value, str):
        amounts, _, per = value.partition("/")
        found = [re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d\d?)?)([a-z]+)", word)
                 for word in amounts.split(",") if word]
        if not all(found) or "/" in value and not per:
            raise wrong
        value = {match[2]: float(match[1]) for match in found if match}
        value |= {"per": per} if per else {}
    if not isinstance(value, dict) or set(value) - {*AMOUNTS, "per"}:
        raise wrong
    numbers = [amount for name, amount in value.items() if name != "per"]
    if (not all(type(amount) in (int, float) and 0 <= amount < 1e15 for amount in numbers)
            or value.get("per", "day") not in ("session", "day")):
        raise wrong
    return value


def some_hosts(value: Any) -> dict[str, Any]:
    """Names, and what each says; sandbox_hosts reads the one that is meant."""
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    for name, host in value.items():
        if not (is_host(name) and isinstance(host, dict) and "runtime" in host
                and all(map(is_text, host.values()))):
            raise ValueError(f'{name!r}: {host!r} is not such as {{"runtime": "…", …}}, or its '
                             "name has more than A-Z a-z 0-9 _ . -")
    return value


def an_engine(value: Any) -> str:
    return one_of(ENGINES, "an engine")(value)


def an_environment(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("it is not an object of names and strings")
    for name, text in value.items():
        check_env_name(name)
        if not is_text(text):
            raise ValueError(f"the value of {name} is not a string")
    return value


WORKSPACES = ("mount", "copy")
KEYS_ARE = ("visible", "hidden")
REPEATED: dict[str, Any] = {"action": "append", "default": []}


class Key:
    """A key of the configuration. All that is known of it in general is its row in KEYS.

    `check` is of the value, and of a list for each item. `kind` is scalar, list or object: of a
    scalar the value of the highest layer counts, lists are appended, and `env` is merged by its
    names. The commands in `of` have an option with these `flags` (`config` has those of `run`).
    `variable`, of our environment, counts less than the file, or more (`above_file`).
    What is `fixed` is what a session is created from: to change it takes a new container. It is in
    the session's specification by its name, or as a part of another field (`part_of`). `limit` is
    what engines call it. `excludes` names the key that does not go together with it: of
    the two the one of the higher layer counts. A `setting` may be made for one session. What is
    the person's `own` comes from the files of the host alone: no container and no client of the
    web service may say what the host runs.
    """

    def __init__(self, name: str, check: Callable[[Any], Any], flags: str = "", metavar: str = "",
                 help: str = "", *, kind: str = "scalar", of: str = "run", default: Any = None,
                 variable: str = "", above_file: bool = False, fixed: bool = False,
                 part_of: str = "", limit: str = "", excludes: str = "", secret: bool = False,
                 setting: bool = False, own: bool = False) -> None:
        self.name, self.check, self.kind, self.default = name, check, kind, default
        self.flags, self.metavar, self.help, self.of = flags.split(), metavar, help, of.split()
        self.variable, self.above_file = variable, above_file
        self.fixed, self.part_of, self.limit = fixed, part_of, limit
        self.excludes, self.secret, self.setting, self.own = excludes, secret, setting, own

    def option(self) -> dict[str, Any]:
        """What argparse wants to know of its option."""
        if self.kind == "scalar":
            default = "" if self.default is None else f"; default: {self.default}"
            help = self.help.replace("{engines}", " or ".join(ENGINES))
            return {"metavar": self.metavar, "help": help + default}
        return REPEATED | {"metavar": self.metavar, "help": f"{self.help}; repeatable"}


KEYS = {key.name: key for key in (
    Key("yolo", a_shortcut, "-y --yolo", "AGENT",
        "start an agent that asks for no permission: "
        + ", ".join(agent.shortcuts[0] for agent in AGENTS.values()), excludes="command"),
    Key("command", a_command, "-x", "COMMAND ...",
        "run this instead: one string for a shell, or words up to the end of the line",
        excludes="yolo"),
    Key("containerName", a_name, "-n --name", "NAME",
        "container name; default: made from the directory's"),
    Key("hostPath", an_absolute_path, "--hp --host-path", "DIR",
        "host directory to mount; default: the current one", fixed=True, part_of="directory"),
    Key("containerPath", an_absolute_path, "--cp --container-path", "DIR",
        "where it is mounted; default: same path", fixed=True, part_of="workdir"),
    Key("workspace", one_of(WORKSPACES, "a workspace"), default="mount"),
    Key("volumes", a_volume, "-v --volume", "HOST:CONTAINER[:ro|z|Z]", "another mount",
        kind="list", fixed=True),
    Key("ports", a_port, "-p --port", "[IP:]HOST:CONTAINER",
        "publish a port, on 127.0.0.1 unless an address is given", kind="list", fixed=True),
    Key("env", an_environment, "-e --env", "NAME[=VALUE]",
        "a variable, by name alone with the value it has here", kind="object", setting=True),
    Key("envFile", an_absolute_path, "--ef --env-file", "FILE", "an env file",
        kind="list", of="run recreate"),
    Key("imageVersion", an_image_version, "--iv --image-version", "VERSION",
        "version of the image", of="run build", default=IMAGE_VERSION, fixed=True,
        part_of="image"),
    Key("imageName", an_image_name, "--in --image-name", "NAME", "image name", of="run build",
        default=IMAGE_NAME, fixed=True, part_of="image"),
    Key("imageBuildArgs", a_build_argument, "--iba --image-build-arg", "NAME=VALUE",
        "build argument, for example TOOL=common, TOOL=full, TOOL=go,rust", kind="list",
        of="build"),
    Key("memory", a_size, "--memory", "SIZE", "memory limit, for example 4g", fixed=True,
        limit="memory"),
    Key("cpus", a_number, "--cpus", "NUMBER", "CPU limit, for example 1.5", fixed=True,
        limit="cpus"),
    Key("pidsLimit", a_count, "--pids-limit", "COUNT", "limit of processes", default=4096,
        fixed=True, limit="pids-limit"),
    Key("network", a_network, "--net --network", "MODE", "open, none or host", default="open",
        fixed=True, setting=True),
    Key("keys", one_of(KEYS_ARE, "a way to give keys"), "--keys", "hidden|visible",
        "whether agents see the keys that they work with", default="visible", fixed=True),
    Key("budget", a_budget, "--budget", "AMOUNT",
        "refuse what goes beyond it, such as 5usd, 2e6tokens or 60minutes/day; needs --keys hidden",
        setting=True),
    Key("autostart", a_string, setting=True),
    Key("agentPromptCommand", a_prompt_template, setting=True),
    Key("checkpoint", a_checkpoint),
    Key("protect", one_of(("hooks", "config"), "a part of .git"), kind="list", fixed=True),
    Key("notify", a_program, own=True),
    Key("detachKeys", a_key_sequence, default="ctrl-\\,d"),
    Key("serverUser", a_word, "-U --user", "USER", "user name of the web service", of="serve",
        default="admin", variable="SANDBOX_SERVER_USER"),
    Key("serverPass", a_word, "-P --password", "PASSWORD",
        "its password; default: a random one, printed", of="serve",
        variable="SANDBOX_SERVER_PASS", secret=True),
    Key("allowedHosts", a_host, "--allow-host", "NAME", "a name that the service is reached by",
        kind="list", of="serve"),
    Key("runtime", an_engine, "--rt --runtime", "ENGINE",
        "{engines}; default: the first that answers",
        of="run ps attach logs log diff undo redo merge stop start cp rm recreate rename net prune "
           "build doctor serve",
        variable="SANDBOX_RUNTIME", above_file=True),
    Key("host", fulfilling(lambda text: not text or is_host(text), "a name of a host"), "--on",
        "HOST", "a machine of the key hosts in sandbox.json; default: this machine",
        of="run ps attach logs log diff undo redo merge stop start cp rm recreate rename net prune "
           "build doctor serve usage budget", variable="SANDBOX_HOST", above_file=True),
    Key("hosts", some_hosts, own=True),
)}


def check_value(name: str, value: Any) -> Any:
    """The normalised value of a key. Raises ValueError with reason and remedy."""
    key = KEYS[name]
    if value is not None and value == key.default and type(value) is type(key.default):
        return value  # it is right, and nothing need be imported to see that
    if key.kind != "list":
        return key.check(value)
    if not isinstance(value, list):
        raise ValueError("it is not an array of strings")
    return [key.check(item) for item in value]


# --- Layers ---


class Layer:
    """Checked values of one origin.

    `origin` says what it is: default, environment, file, profile, created (what was given when the
    session was created), settings (made for it later), flags, request (of the web service), or
    check for values of which nothing but the check is wanted. A key's place, for people, is in
    `places`, or the key itself behind `prefix`.
    """

    def __init__(self, values: Mapping[str, Any], origin: str, prefix: str = "", code: int = 1, *,
                 places: Mapping[str, str] | None = None) -> None:
        self.origin, self.prefix, self.places = origin, prefix, places or {}
        # What -e has named: NAME with the value that it has here, NAME= with another one.
        self.variables: list[str] = []
        self.values: dict[str, Any] = {}
        for name, value in values.items():
            place = self.source(name)
            if name not in KEYS:
                raise SandboxError(f"{place}: unknown key{nearest(name, KEYS)}",
                                   f"the keys are {', '.join(KEYS)}", code)
            if KEYS[name].own and origin not in ("file", "profile", "settings"):
                raise SandboxError(f"{place}: it is for {config_path()} alone", code=code)
            if KEYS[name].excludes in self.values:
                raise SandboxError(f"{place}: not together with {KEYS[name].excludes}",
                                   "keep one of them", code)
            try:
                self.values[name] = check_value(name, value)
            except ValueError as error:
                raise SandboxError(f"{place}: {error}", code=code) from None

    def source(self, name: str) -> str:
        return self.places.get(name, self.prefix + name)


ADDING = ("created", "flags", "request")  # the layers whose rules add to those of an allowlist


def merge(layers: Sequence[Layer]) -> dict[str, list[tuple[Any, str]]]:
    """Effective settings, lowest layer first: of a scalar the last counts, lists are appended."""
    merged: dict[str, list[tuple[Any, str]]] = {}
    for layer in layers:
        for name, value in layer.values.items():
            key, source = KEYS[name], layer.source(name)
            merged.pop(key.excludes, None)
            if key.kind == "list":
                merged.setdefault(name, []).extend((item, source) for item in value)
            elif key.kind == "scalar":
                if name == "network" and layer.origin in ADDING and name in merged:
                    value = with_rules(merged[name][-1][0], value)
                merged[name] = [(value, source)]
    return merged


def with_rules(network: Any, more: Any) -> Any:
    """An allowlist with more rules: what is allowed is no longer denied, and the other way round.

    Where not both are an allowlist, `more` counts alone.
    """
    if not (isinstance(network, dict) and isinstance(more, dict)):
        return more
    allow, deny = ([*network.get(key, ()), *more.get(key, ())] for key in ("allow", "deny"))
    return a_network({"allow": [rule for rule in allow if rule not in more.get("deny", ())],
                      "deny": [rule for rule in deny if rule not in more.get("allow", ())]})


def merge_env(layers: Sequence[Layer],
              read: Callable[[str], dict[str, tuple[str, int]]] = read_env_file,
              ) -> dict[str, tuple[Any, str]]:
    """The container's variables: the env files of all layers first, then all `env`."""
    env: dict[str, tuple[Any, str]] = {}
    for layer in layers:
        for path in layer.values.get("envFile", ()):
            if layer.origin == "created" and not os.path.exists(path):
                say(f"{path}, an env file that the session was created with, is gone")
                continue
            env.update((n, (v, f"{path}:{line}")) for n, (v, line) in read(path).items())
    for layer in layers:
        for name, value in layer.values.get("env", {}).items():
            source = layer.source("env")
            env[name] = (value, source if layer.origin == "flags" else f"{source}.{name}")
    return env


class Config:
    """Effective settings of one invocation."""

    def __init__(self, layers: Sequence[Layer], profile: str) -> None:
        self.profile, self.layers = profile, layers
        self.settings = merge(layers)

    def env(self) -> dict[str, tuple[Any, str]]:
        """The container's variables; reads the env files."""
        return merge_env(self.layers)

    def get(self, key: str) -> Any:
        """The value of a scalar, or None."""
        found = self.settings.get(key)
        return found[-1][0] if found else None

    def all(self, key: str) -> list[Any]:
        """The values of a list, each once, in order."""
        return list(dict.fromkeys(value for value, _ in self.settings.get(key, ())))

    def is_given(self, key: str) -> bool:
        """Whether anything but the defaults says what it is."""
        return any(key in layer.values for layer in self.layers if layer.origin != "default")

    def given(self, key: str) -> Any:
        """The value of a scalar that was given with this command, None where it was not."""
        return next((layer.values[key] for layer in self.layers
                     if layer.origin in ("flags", "request") and key in layer.values), None)

    @property
    def image(self) -> str:
        return f"{self.get('imageName')}:{self.get('imageVersion')}"


def sandbox_home() -> str:
    return os.environ.get("SANDBOX_HOME") or os.path.expanduser("~/.sandbox")


def config_path() -> str:
    return os.path.join(sandbox_home(), "sandbox.json")


def read_config() -> dict[str, Any]:
    """The configuration file, {} where there is none. Raises SandboxError with line and column."""
    path = config_path()
    try:
        data = read_json(path, float)  # a key's own check says more of what is no number
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        import json

        if isinstance(error, json.JSONDecodeError):
            raise SandboxError(f"{path}:{error.lineno}:{error.colno}: {error.msg}",
                               "correct the JSON") from None
        # Nested too deeply, or a number of 5,000 digits.
        raise SandboxError(f"{path}: {getattr(error, 'strerror', None) or error}",
                           "correct the file") from None
    if not isinstance(data, dict) or not isinstance(data.get("runs", {}), dict):
        raise SandboxError(f"{path}: the file and its `runs` must be JSON objects",
                           "correct the JSON")
    return data


def make_private(folder: str) -> None:
    """Make a folder and those above it that are missing, all with mode 0700. Raises OSError."""
    if not os.path.isdir(folder):
        make_private(os.path.dirname(os.path.abspath(folder)))
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def write_private(path: str, text: str) -> None:
    """Write a file with mode 0600; a reader sees the old content or the new, never a part."""
    target = os.path.realpath(path)
    temporary = f"{target}.{random_id()}"
    try:
        make_private(os.path.dirname(os.path.abspath(path)))
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.fsencode(text))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise FileError(path, error) from None


def profile_layer(data: Mapping[str, Any], name: str) -> Layer:
    runs = data.get("runs", {})
    if name not in runs or not is_exact(name):  # it becomes a label
        hint = f"{config_path()} has none: sandbox init"
        hint = f"the run profiles are {', '.join(runs)}" if runs else hint
        raise SandboxError(f"no run profile {name!r}{nearest(name, runs)}", hint)
    if not isinstance(runs[name], dict):
        raise SandboxError(f"{config_path()}: runs.{name} is not an object")
    return Layer(runs[name], "profile", f"{config_path()}: runs.{name}.")


def environ_layer(*, above_file: bool) -> Layer:
    """The keys that our own environment has, of those that count more than the file, or less."""
    variables = {key.name: key.variable for key in KEYS.values()
                 if key.variable and key.above_file == above_file}
    found = {name: os.environ[variable] for name, variable in variables.items()
             if os.environ.get(variable)}
    return Layer(found, "environment",
                 places={name: f"${variable}" for name, variable in variables.items()})


def default_layer() -> Layer:
    values = {key.name: key.default for key in KEYS.values() if key.default is not None}
    # Only `run` needs the current directory, and says that it is gone.
    with suppress(SandboxError):
        values["hostPath"] = current_directory()
    return Layer(values, "default", places=dict.fromkeys(values, "default"))


def load_config(flags: Layer | None = None, profile: str | None = None,
                session: Sequence[Layer] = (), data: Mapping[str, Any] | None = None) -> Config:
    """Resolve all layers; `session` are those of an existing one: see session_config()."""
    data = read_config() if data is None else data
    layers = [
        default_layer(),
        environ_layer(above_file=False),
        Layer({k: v for k, v in data.items() if k != "runs"}, "file", f"{config_path()}: "),
        *([] if profile is None else [profile_layer(data, profile)]),
        environ_layer(above_file=True),
        *session,
        *([flags] if flags else []),
    ]
    return Config(layers, profile or "")


def current_directory() -> str:
    """Where we are. Raises SandboxError when it is gone or no engine can be told its name."""
    try:
        path = os.getcwd()
    except FileNotFoundError:
        raise SandboxError("the current directory no longer exists", "change to another directory",
                           125) from None
    if not is_exact(path):
        message = (f"the current directory {path!r} has a control character or a byte "
                   "that is not UTF-8")
        raise SandboxError(message, "rename it: engines would take another one for it", 125)
    return path


def is_secret(name: str, value: object = "") -> bool:
    """Whether a name sounds like a secret's, or the value is a URL with a password in it."""
    parts = ("KEY", "TOKEN", "SECRET", "PASS", "AUTH", "CREDENTIAL", "PRIVATE", "CONFIG_CONTENT")
    named = any(part in name.upper().replace("AUTHOR", "") for part in parts)
    return named or "@" in str(value).partition("://")[2].partition("/")[0]


# --- Engine processes ---
# One door: every process is started by spawn(), which can say what it starts (SANDBOX_TRACE=1), but
# for a copy of this one: see Kubectl.spawn() in sandbox_kube.py.


def spawn(argv: Sequence[str], *, env: Mapping[str, str] | None = None,
          fds: Mapping[int, int] | None = None, own_group: bool = False) -> int:
    """Start argv and return its pid; `fds` maps a descriptor of the child to one of ours.

    Raises FileNotFoundError when there is no such program. Where the handler of a signal raises,
    the child is ended first: nobody else knows its pid yet.
    """
    trace(argv)
    # Under nohup SIGHUP stays ignored: the person wants that for the child as well.
    reset = [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE]
    reset += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in (fds or {}).items()]
    group: dict[str, Any] = {"setpgroup": 0} if own_group else {}
    pid, mask = 0, signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, reset)
        pid = os.posix_spawnp(argv[0], list(argv), env or os.environ, file_actions=actions,
                              setsigdef=reset, setsigmask=mask, **group)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what has waited is handled here
        return pid
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pid:
            terminate(pid)
        raise


def trace(argv: Sequence[str]) -> None:
    if os.environ.get("SANDBOX_TRACE"):
        print("+ " + printable(quote_all(argv)), file=sys.stderr, flush=True)


def own_argv(module: str, function: str, *words: str) -> list[str]:
    """Calls a function of this program, wherever it is installed, which gives the exit status."""
    here = os.path.dirname(os.path.abspath(__file__))
    source = (f"import sys; sys.path[:0] = sys.argv[1:2]; import sandbox, {module}; "
              f"sandbox.leave({module}.{function}())")
    return [sys.executable, "-I", "-S", "-c", source, here, *words]


def terminate(pid: int) -> None:
    """End a process and wait for it."""
    with suppress(OSError):  # it may be root's, or ended by the same Ctrl-C
        os.kill(pid, 15)
    wait_for(pid)


def wait_for(pid: int) -> int:
    """Wait for a process: its exit status, or 128+n when signal n ended it."""
    return exit_status(os.waitpid(pid, 0)[1])


def exit_status(status: int) -> int:
    """The exit status in what waitpid() gives, or 128+n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end us as Ctrl-C does: what was begun is cleaned up."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


class SignalsHeld:
    """Lets a signal that ends us wait for the end of the block; a second one does not wait."""

    def __enter__(self) -> None:
        self.came: list[int] = []
        self.before: dict[int, Any] = {}
        with suppress(ValueError):  # signals come to the main thread alone
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if callable(signal.getsignal(number)):
                    self.before[number] = signal.signal(number, self.hold)

    def hold(self, number: int, frame: Any) -> None:
        self.came.append(number)
        if len(self.came) > 1:
            self.before[number](number, frame)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.came:
            self.before[self.came[0]](self.came[0], None)


def signal_name(number: int) -> str:
    """The name, as kill takes it, of one of the signals that end a run."""
    return {int(signal.SIGINT): "INT", int(signal.SIGTERM): "TERM"}.get(number, "HUP")


def call(argv: Sequence[str], env: Mapping[str, str] | None = None, output: int = 2) -> int:
    """Run argv, its output on our stderr or `output`. Raises SandboxError without a program."""
    try:
        return wait_for(spawn(argv, env=env, fds={1: output}))
    except FileNotFoundError:
        raise SandboxError(f"there is no program {argv[0]}", f"install {argv[0]}") from None


def file_of(text: bytes) -> int:
    """A descriptor to read a text from: a pipe that nobody reads yet takes only so much."""
    if sys.platform == "linux":
        file = os.memfd_create("text")
        os.pwrite(file, text, 0)
        return file
    import tempfile

    with tempfile.TemporaryFile() as disk:
        disk.write(text)
        disk.seek(0)  # which also writes it
        return os.dup(disk.fileno())


class Output:
    """A process whose output is collected: start it, do something else, then ask for the result.

    One that is to answer soon leads a group of its own, which is killed with it, unless there is a
    terminal on which it could ask for a passphrase.
    """

    def __init__(self, argv: Sequence[str], seconds: float = CALL_SECONDS,
                 env: Mapping[str, str] | None = None, stdin: bytes = b"",
                 leads: bool = False) -> None:
        """`seconds` from now it must have ended. A Ctrl-C on the terminal does not reach one that
        `leads` a group: a daemon would go on without its client.
        """
        self.argv, self.seconds = argv, seconds
        self.deadline = time.monotonic() + seconds
        self.leads = leads or seconds < LONG_SECONDS and not os.isatty(0)
        given = file_of(stdin)
        (self.out, out), (self.err, err) = os.pipe(), os.pipe()
        try:
            self.pid = spawn(argv, env=env, fds={0: given, 1: out, 2: err}, own_group=self.leads)
        except BaseException:
            self.close(self.out, self.err)
            raise
        finally:
            self.close(given, out, err)

    @staticmethod
    def close(*fds: int) -> None:
        for fd in fds:
            os.close(fd)

    def result(self, limit_bytes: int = 0) -> tuple[int, str, str]:
        """Exit status, standard output, standard error.

        A process that prints more than the limit is killed there. Raises EngineProblem after the
        deadline, but not for an answer that was there before: of several that were asked at once
        each is read after those that did not come.
        """
        chunks: dict[int, list[bytes]] = {self.out: [], self.err: []}
        try:
            self.collect(chunks, limit_bytes)
            status = self.wait()
        except BaseException as error:
            self.end(9 if isinstance(error, EngineProblem) else 15)
            raise
        finally:
            self.close(*chunks)
        out, err = (b"".join(parts).decode(errors="replace") for parts in chunks.values())
        return status, out, err

    def collect(self, chunks: dict[int, list[bytes]], limit_bytes: int) -> None:
        """Read until both streams end or the limit is passed, where the process is killed."""
        import select

        poller, left = select.poll(), len(chunks)
        for fd in chunks:
            poller.register(fd, select.POLLIN)
        late_bytes = 0  # no more than what the two pipes held
        while left:
            late = time.monotonic() > self.deadline
            ready = poller.poll(0 if late else self.left_ms())
            if late and (not ready or late_bytes > 2 * PIPE_BYTES):
                self.left_ms()  # raises
            for fd, _ in ready:
                data = os.read(fd, 65536)
                late_bytes += len(data) if late else 0
                chunks[fd].append(data)
                if not data:
                    poller.unregister(fd)
                    left -= 1
                elif self.is_whole(fd, data):
                    return
            total = sum(len(data) for parts in chunks.values() for data in parts)
            if total > (limit_bytes or ANSWER_BYTES):
                self.kill(9)
                return

    def is_whole(self, fd: int, data: bytes) -> bool:
        """Whether nothing more than this is awaited, not even the end."""
        return False

    def wait(self) -> int:
        """The exit status of a process that has closed its streams, which most do by ending."""
        pause_seconds = 0.0001
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return exit_status(status)
            self.left_ms()
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, 0.05)

    def left_ms(self) -> float:
        """Milliseconds up to the deadline. Raises EngineProblem when it has passed."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            words = printable(quote_all(self.argv[:4]))[:200]
            raise EngineProblem("daemon",
                                f"{words} … did not answer within {self.seconds:g} seconds",
                                Remedy([], note=f"see why {self.argv[0]} hangs, then try again"))
        return left * 1000

    def end(self, number: int) -> None:
        self.kill(number)
        wait_for(self.pid)

    def kill(self, number: int) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if self.leads else os.kill)(self.pid, number)


def news(session: str, what: str, text: str, turn: str | None = None,
         status: int | None = None) -> dict[str, Any]:
    """What a person may want to come back for; the last line of a text that may be anybody's."""
    lines = printable(text[-16 * NEWS_CHARS:]).split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return {"session": session, "what": what, "turn": turn, "status": status,
            "text": last[:NEWS_CHARS]}


def notify(command: Sequence[str], event: Mapping[str, Any]) -> str:
    """Give an event, as JSON on stdin, to the person's own command; what went wrong, or ''."""
    try:
        called = Output(command, NOTIFY_SECONDS, stdin=to_json(event).encode() + b"\n")
        status, out, err = called.result(NOTIFY_BYTES)
    except OSError as error:
        return f"notify: {command[0]}: {error.strerror}"
    except SandboxError as error:
        return f"notify: {error.message}"
    why = news("", "", err or out)["text"]
    return status and f"notify: {command[0]} ended with status {status}: {why}" or ""


# --- Long work ---


class Step:
    """A command that takes long: a live block on a terminal, else one line with its time.

    Its output goes to a log, which is kept and named when it fails. With SANDBOX_VERBOSE
    (--verbose) the output passes through instead.
    """

    def __init__(self, title: str, number: int = 1, total: int = 1, undone: str = "",
                 ended_by: Sequence[str] = ()) -> None:
        """`undone` says what an interruption leaves behind: nothing, most often. `ended_by` is a
        command that ends it where a signal to the process may not.
        """
        self.head = f"[{number}/{total}] {title}"
        self.ended_by = ended_by
        self.title, self.undone, self.log = title, undone, ""
        self.tail: list[str] = []  # the last lines of the output
        self.began = self.drawn = 0.0  # monotonic; 0 where no block is shown
        self.live = os.isatty(2) and os.environ.get("TERM") not in (None, "", "dumb")

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None,
            silent_seconds: float = 0, seconds: float = 0) -> None:
        """Run the command; where it takes no longer than `silent_seconds` nothing is said.

        Raises SandboxError when it fails, cannot be started or takes longer than `seconds`.
        """
        self.began = time.monotonic()
        self.deadline = self.began + seconds if seconds else 0.0
        if os.environ.get("SANDBOX_VERBOSE"):
            say(self.head)
            status = call(argv, env)
        else:
            self.log = make_log()
            status = self.watch(argv, env)
        if status:
            last = "".join(f"\n  {line}" for line in self.tail)
            hint = f"the whole output: {self.log}" if self.log else "see its output above"
            raise SandboxError(f"{self.title} ended with status {status}{last}", hint, 125)
        self.forget_log()
        if time.monotonic() - self.began >= silent_seconds:
            say(f"{self.head}  {self.elapsed()}")

    def end(self, pid: int) -> None:
        """End the process. An engine that is still making its container would go on without it, so
        it stays until there is a container to be removed.
        """
        until = time.monotonic() + CALL_SECONDS
        while self.ended_by and time.monotonic() < until:
            Output(self.ended_by, LONG_SECONDS).result()
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.1)
        terminate(pid)

    def watch(self, argv: Sequence[str], env: Mapping[str, str] | None) -> int:
        """Run it, its output into the log and the last line into the block; the exit status."""
        import select

        if argv[0] == "sudo" and os.isatty(0):  # its question would be drawn over
            call(["sudo", "-v"])
        (out, end), null = os.pipe(), os.open(os.devnull, os.O_RDONLY)
        pid, poller = 0, select.poll()
        poller.register(out, select.POLLIN)
        try:
            with open(self.log or os.devnull, "ab", buffering=0) as log:
                pid = spawn(argv, env=env, fds={0: null, 1: end, 2: end})
                os.close(end)
                end = -1
                while not (ready := poller.poll(500)) or (data := os.read(out, 65536)):
                    if ready:
                        with suppress(OSError):  # a full disk is told by what fills it
                            log.write(data)
                        self.note(data.decode(errors="replace"))
                    if self.deadline and time.monotonic() > self.deadline:
                        raise SandboxError(f"{self.title} takes too long", NO_ROOM_HINT, 125)
                    self.draw()
            return wait_for(pid)
        except FileNotFoundError:
            self.forget_log()
            raise SandboxError(f"there is no program {argv[0]}", f"install {argv[0]}",
                               125) from None
        except BaseException:
            if pid:
                self.end(pid)
            self.wipe()
            self.forget_log()
            say(f"{self.title} was interrupted{self.undone}")
            raise
        finally:
            self.wipe()
            Output.close(out, null, *([end] if end >= 0 else []))

    def forget_log(self) -> None:
        if self.log:
            os.unlink(self.log)

    def note(self, text: str) -> None:
        lines = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
        self.tail = [printable(line)[:400] for line in [*self.tail, *lines][-8:]]

    def elapsed(self) -> str:
        seconds = round(time.monotonic() - self.began)
        return f"{seconds // 60}:{seconds % 60:02d}"

    def draw(self) -> None:
        """Show what it is, how long it has taken and its last line, over what was shown before."""
        now = time.monotonic()
        if not self.live or now - self.drawn < 0.1:
            return
        self.wipe()
        self.drawn = now
        width = (os.get_terminal_size(2).columns or 80) - 1
        lines = [f"{self.head}  {self.elapsed()}", f"  {self.tail[-1] if self.tail else ''}"]
        print("\n".join(line[:width] for line in lines), end="", file=sys.stderr, flush=True)

    def wipe(self) -> None:
        if self.drawn:
            print("\r\x1b[A\x1b[J", end="", file=sys.stderr, flush=True)
            self.drawn = 0.0


def make_log() -> str:
    """An empty log of our own; '' where there is no room for it."""
    path = os.path.join(os.path.abspath(sandbox_home()), "logs", f"{random_id()}.log")
    try:
        make_private(os.path.dirname(path))
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return ""
    return path


def run_steps(commands: Sequence[Sequence[str]]) -> None:
    """Run commands that take long, one after another. Raises SandboxError when one fails."""
    for number, command in enumerate(commands, 1):
        Step(quote_all(command), number, len(commands)).run(command)


# --- Remedies ---


class Remedy:
    """Commands that mend a problem, or an action of our own that one of our commands stands for."""

    def __init__(self, commands: Sequence[Sequence[str]],
                 action: Callable[[], object] | None = None, note: str = "") -> None:
        self.commands, self.action, self.note = commands, action, note

    def text(self) -> str:
        if not self.commands:
            return self.note
        text = "run: " + " && ".join(map(quote_all, self.commands))
        if self.needs_sudo():
            roots = [command[1:] for command in self.commands if command[0] == "sudo"]
            ours = [command for command in self.commands if command[0] != "sudo"]
            text = "ask an administrator to run: " + " && ".join(map(quote_all, roots))
            text += ", then run: " + " && ".join(map(quote_all, ours)) if ours else ""
        return text + (f" ({self.note})" if self.note else "")

    def needs_sudo(self) -> bool:
        """Whether a command is root's, and there is no sudo here."""
        return any(command[0] == "sudo" for command in self.commands) and not program("sudo")

    @property
    def offered(self) -> bool:
        """Whether it can be carried out from here."""
        return bool(self.commands) and not self.needs_sudo()

    def carry_out(self) -> None:
        """Run it. Raises SandboxError when a command fails."""
        path = os.environ.get("PATH", os.defpath)
        if "/usr/sbin" not in path.split(":"):
            os.environ["PATH"] = f"{path}:{ADMIN_PATH}"  # dpkg and dockerd refuse without
        if self.action:
            self.action()
            return
        run_steps(self.commands)


# Where an administrator's programs are; not on everybody's PATH, nor on that of a plain `su`.
ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"


def program(name: str) -> str:
    """Where a program is here, '' for nowhere."""
    from shutil import which

    return which(name) or which(name, path=ADMIN_PATH) or ""


def as_root(command: Sequence[str]) -> list[str]:
    return [*([] if os.getuid() == 0 else ["sudo"]), *command]


# How to install packages, by what is on PATH.
PACKAGE_MANAGERS = {
    "apt-get": [["apt-get", "update"],
                ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y",
                 "--install-recommends"]],
    "dnf": [["dnf", "install", "-y"]],
    "zypper": [["zypper", "install", "-y"]], "pacman": [["pacman", "-Sy", "--noconfirm"]],
    "apk": [["apk", "add"]], "brew": [["brew", "install"]],
}


def install_commands(*packages: str) -> list[list[str]]:
    """Commands that install the packages here, [] where no known package manager is found."""
    for manager, (*before, install) in PACKAGE_MANAGERS.items():
        if program(manager):
            commands = [*before, [*install, *packages]]
            return commands if manager == "brew" else [as_root(command) for command in commands]
    return []


def install_remedy(packages: Iterable[str], otherwise: str) -> Remedy:
    """To install packages, or to be told what to install where we do not know how."""
    commands = install_commands(*packages)
    return Remedy(commands, note="" if commands else f"install {otherwise}")


def may_run(name: str) -> bool:
    """Whether a process of this name runs here, as far as we can see: others' may be hidden."""
    if not os.path.exists("/proc/1/comm"):
        return True
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/comm", "rb") as file:
            if file.read().rstrip(b"\n") == name.encode():
                return True
    return False


def permission_remedy(message: str) -> Remedy:
    """Membership of the group that the socket belongs to, where it belongs to one."""
    import grp
    import pwd
    import re

    closed = Remedy([], note="ask an administrator for access to it")
    try:
        found = re.search(r"unix(?:://| )(/[^\s:\"]+)", message)
        owner = os.stat(found[1] if found else "")
        user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(owner.st_gid)
    except (OSError, KeyError):
        return closed
    if not owner.st_gid or not owner.st_mode & 0o020 or not (program("sg") and program("usermod")):
        return closed
    if user in group.gr_mem:
        return Remedy([["newgrp", group.gr_name]], lambda: join_group(group.gr_name, []),
                      "or log in again: you have become a member of the group since you did")
    commands = [as_root(["usermod", "-aG", group.gr_name, user])]
    return Remedy(commands, lambda: join_group(group.gr_name, commands),
                  "and log in again; members of the group are as good as root")


def join_group(group: str, commands: Sequence[Sequence[str]]) -> NoReturn:
    """Enter the group of the socket and start ourselves again as a member of it."""
    if os.environ.get("SANDBOX_REGROUPED"):
        raise SandboxError("the engine's socket is still closed to this user", "log in again", 125)
    Remedy(commands).carry_out()
    os.environ["SANDBOX_REGROUPED"] = str(os.getgid())
    os.execvp("sg", ["sg", group, "-c", quote_all([sys.executable, *sys.orig_argv[1:]])])


# --- Engines ---
# What is different between engines stands in their drivers, and the names of engines in ENGINES.

NO_ROOM_HINT = "make room: sandbox doctor shows the disk"
LAST_HINT = "sandbox doctor checks the engine"


def each(option: str, values: Iterable[str]) -> list[str]:
    """An option, again for each value."""
    return [word for value in values for word in (option, value)]


# Programs whose sockets lead to another machine.
FORWARDERS = ("ssh", "sshd", "sshd-session", "socat")


def is_here(address: str) -> bool:
    """Whether an address leads no further than this machine; '' is the engine's own choice."""
    return not address or (address.startswith(("unix:", "npipe:", "fd:", "/"))
                           and listener(address.removeprefix("unix://")) not in FORWARDERS)


def listener(path: str) -> str:
    """The program that listens on a socket, '' where that is not known. One that went to the
    background after it had begun to listen, as `ssh -f` does, is not there any more.
    """
    with suppress(ImportError, OSError):
        from _socket import AF_UNIX, SO_PEERCRED, SOL_SOCKET, socket  # the module takes 3 ms

        client = socket(AF_UNIX)
        client.setblocking(False)
        client.connect(path)
        pid = int.from_bytes(client.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)[:4], sys.byteorder)
        if pid:  # it is seen from here
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return FORWARDERS[0]
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    return ""


def place_name(place: str) -> str:
    """A name for a host that has none but an address."""
    address = place.rpartition("://")[2].lstrip("/")
    return "".join(c if is_plain(c, "_.-") else "-" for c in address)[:60]


def ssh_address(address: str) -> str:
    """An address as ssh takes it: without a path."""
    return "/".join(address.split("/")[:3])


def kept_folder(host: str) -> str:
    return f"@{host}" if host else ""


class Engine:
    """The driver of an engine. What stands here is in the words that docker and podman share.

    argv() and the methods `*_argv` give the engine's call for one thing, to be printed or started:
    their caller decides when to wait for it. `read_*` gives what the output of such a call says.
    """

    name = ""
    minimum: tuple[int, ...] = ()  # the oldest version that works
    disk_root = ""  # where it most often keeps its images
    sockets: tuple[str, ...] = ()  # where it may listen; {run} and {home} are folders of the user
    address_variable = ""  # tells the client which one is meant
    elsewhere_built = ""  # how images come to one that builds none
    daemonless = False  # the client itself starts containers, with helper programs of this machine
    daemon = ""  # the program of its daemon
    options: tuple[str, ...] = ()  # of the client: what an entry of "hosts" may say
    more_options: tuple[str, ...] = ()  # what it may say that is not the client's
    create_flags: tuple[str, ...] = ()  # more options that each of our containers needs

    # What the client prints for each failure, in lower case; a driver adds its "daemon".
    symptoms: Mapping[str, tuple[str, ...]] = {
        "permission": ("permission denied while trying to connect", "connect: permission denied"),
        "old": ("client version", "minimum supported api version"),
        "image": ("no such image", "image not known", "unable to find image"),
    }
    unknown: tuple[str, ...] = ()  # how it says that there is no host of a name, in lower case
    # Programs that the engine starts, with the package that has each on Debian; elsewhere it is
    # named as the program.
    helpers: Mapping[str, str] = {"crun": "crun", "runc": "runc"}
    # How it says that one of them is missing, in lower case.
    missing = (r'could not find (?:a working )?"?(NAME)(?![\w-])',
               r'exec: \\?"(NAME)\\?": executable file not found',
               r'stat \S*/(NAME): no such file', r'oci runtime "(NAME)" not found',
               r'unable to execute (NAME):')
    # What to do about failures that belong to the call and not to the engine.
    hints: Mapping[str, str] = {
        "bind source path does not exist": "create the directory, or correct the path",
        "statfs": "create the directory, or correct the path",
        "already allocated": "choose another host port",
        "already in use": "choose another host port",
        "no space left": NO_ROOM_HINT,
        "not a directory": "give a directory",
        "is restarting": "its proxy does not start: sandbox net log <name>",
        'exec: "python3"': "an allowlist needs an image with the proxy: sandbox build",
        "minimum memory": "give more memory",
        "range of cpus": "give fewer CPUs than the machine has",
        "invalid ip": "correct the address",
        "cannot assign requested address": "give an address of this machine",
    }

    # The words of the calls that take names and no more.
    calls: Mapping[str, tuple[str, ...]] = {
        "ping": ("ps", "-q"),  # fails where the engine cannot do anything
        "start": ("start",), "stop": ("stop", "-t", "5"), "unpause": ("unpause",),
        "restart": ("restart", "-t", "1"),  # starts it, too
        "cp": ("cp",),  # takes what and where; one of them is ID:PATH
        "rename": ("rename",),  # takes the id and the new name
        "remove": ("rm", "-f", "-v"),  # one that runs, too, and its anonymous volumes
        "volumes": ("volume", "ls", "-q"),  # prints their names
        "remove-volume": ("volume", "rm"),  # without -f: podman would remove its containers
        "commit": ("commit",),  # makes an image of a container, without what is mounted in it
        "pull": ("pull", "-q"), "push": ("push",), "remove-image": ("image", "rm"),
        "import": ("import",),  # takes a tar archive of a root directory and the image's name
    }

    def __init__(self, host: str = "", client: Sequence[str] = (),
                 more: Mapping[str, str] | None = None) -> None:
        """For a host of the key "hosts", with the words that its every call begins with and what
        else its entry says; else for the one that our environment means, which has a name where it
        is another machine.
        """
        self.version = ""
        self.asked: Output | None = None
        self.client = [*client] or [self.name]
        self.host = host or place_name(self.place())
        self.more = more or {}
        self.serves = False  # whether its service is told by a file of its own, see Podman

    def place(self) -> str:
        """The address, or a name of it, of the other machine that our environment means; or ''."""
        return ""

    @property
    def shares_files(self) -> bool:
        """Whether a path is the same file for the engine as for us."""
        return not (self.host or self.serves)

    def ssh_words(self) -> list[str]:
        """How ssh is told to reach its host; [] where the client does so in another way."""
        return []

    def client_there(self) -> list[str]:
        """What a call begins with on the host itself; [] where no client is sure to be there."""
        return []

    @property
    def is_named(self) -> bool:
        """Whether it is a host of the key "hosts"."""
        return self.client != [self.name]

    @property
    def origin(self) -> str:
        """What says which one is meant."""
        return f"hosts.{self.host} in {config_path()}" if self.is_named else self.address()

    @property
    def kept(self) -> str:
        """The folder below ~/.sandbox for what is kept of its host's sessions."""
        return kept_folder(self.host)

    def full(self, name: str) -> str:
        """NAME@HOST for a container of another host."""
        return f"{self.bare(name)}@{self.host}" if self.host else name

    def bare(self, name: str) -> str:
        """The name as the engine knows it."""
        return name.removesuffix(f"@{self.host}") if self.host else name

    def argv(self, call: str, *names: str) -> list[str]:
        """One of `calls` on containers, volumes or images.

        A driver adds "facts", which prints the version, a space and what is_rootless() takes, or
        "!" and why it cannot; and "storage", which prints the folder that it keeps images in.
        """
        return [*self.client, *self.calls[call], *map(self.bare, names)]

    def ask(self, argv: Sequence[str], seconds: float = CALL_SECONDS) -> str:
        """Standard output of a call that must succeed. Raises EngineProblem or SandboxError."""
        status, out, err = Output(argv, seconds).result()
        if status:
            raise self.failure(err)
        return out

    # -- facts --

    def ask_ahead(self) -> None:
        """Ask for the facts while something else is asked: what is created needs them."""
        with suppress(OSError):
            self.asked = Output(self.argv("facts"))

    def facts(self) -> Output:
        asked, self.asked = self.asked, None
        return asked or Output(self.argv("facts"))

    def read_facts(self, out: str) -> tuple[str, str]:
        """The version, and what is_rootless() takes."""
        version, _, fact = out.strip("\n").partition(" ")
        return version, fact

    def is_rootless(self, fact: str) -> bool:
        raise NotImplementedError

    def check_session(self, config: Config, spec: Mapping[str, Any]) -> None:
        """Raise SandboxError for what is asked of a session and cannot be had on this engine."""

    def check_helpers(self) -> None:
        """Raise EngineProblem where it lacks on this machine what its containers need."""

    # -- containers --

    def inspect_argv(self, name: str) -> list[str]:
        form = ("{{.Id}} {{.Name}} {{.State.Status}} {{.State.ExitCode}} {{.State.Pid}} "
                "{{json .Config.Labels}}")
        return [*self.client, "container", "inspect", "--format", form, self.bare(name)]

    def read_inspected(self, out: str) -> tuple[str, str, str, int, int, dict[str, str]]:
        """Id, name, state, exit status, pid (0 for unknown) and labels of a container."""
        id, name, state, code, pid, labels = out.strip().split(" ", 5)
        return id, name.lstrip("/"), state, int(code), int(pid), parse_json(labels) or {}

    def is_absent(self, err: str) -> bool:
        """Whether a call failed because there is no such container."""
        return "no such container" in err.lower()

    def is_name_taken(self, err: str) -> bool:
        """Whether a creation failed because another container has the name."""
        return "already in use" in err and "name" in err.lower()

    def list_argv(self, label: str, shown: Sequence[str]) -> list[str]:
        """Prints the containers that have a label, with the labels shown; for read_list()."""
        raise NotImplementedError

    def read_list(self, out: str) -> list[dict[str, Any]]:
        """A row for each container: name, state, image, created (ISO 8601), labels."""
        raise NotImplementedError

    def image_of_argv(self, name: str) -> list[str]:
        """Prints the id of the image that a container was made from."""
        return [*self.client, "container", "inspect", "--format", "{{.Image}}", self.bare(name)]

    def create_argv(self, name: str, image: str, command: Sequence[str], *,
                    labels: Mapping[str, str], workdir: str, log_size: str, env: Sequence[str],
                    limits: Mapping[str, Any], capabilities: Sequence[str] = (),
                    network: str = "open", ports: Sequence[str] = (),
                    binds: Sequence[tuple[str, str, str]] = (), volumes: Sequence[str] = (),
                    service: bool = False, beside: Sequence[str] = ()) -> list[str]:
        """Starts a container whose first command is root's and prints its id.

        The limits have the names in KEYS. A bind is a path of the host, one of the container
        and options. A service is closed further than a session and started again when it fails;
        it is where the volumes `beside` it are.
        """
        argv = [*self.client, "run", "-d", *([] if service else ["--init"]), "--pull", "never",
                "--name", self.bare(name), "--user", "0:0", "--workdir", workdir, *each("-e", env),
                "--cap-drop", "ALL", "--log-driver", "json-file",
                "--log-opt", f"max-size={log_size}"]
        argv += [f"--cap-add={capability}" for capability in capabilities]
        argv += ["--security-opt", "no-new-privileges", "--read-only",
                 "--restart", "on-failure"] if service else []
        argv += self.create_flags
        for limit, value in limits.items():
            argv += [f"--{limit}", str(value)] if value else []
        argv += ["--network", network] if network != "open" else []
        argv += each("--publish", ports) + each("--label", map("=".join, labels.items()))
        for bind in binds:
            argv += self.bind_argv(*bind)
        return [*argv, *each("--volume", volumes), "--entrypoint", command[0], image, *command[1:]]

    def closed_argv(self, name: str, image: str, command: Sequence[str], *,
                    labels: Mapping[str, str], limits: Mapping[str, Any],
                    capabilities: Sequence[str], binds: Sequence[tuple[str, str, str]],
                    volumes: Sequence[str] = (), user: str = "0:0") -> list[str]:
        """Runs a command, with our stdin, in a new container that reaches nothing but what is
        mounted, and removes that.
        """
        argv = [*self.client, "run", "--rm", "-i", "--pull", "never", "--name", name,
                "--user", user, "--workdir", "/", "--network", "none", "--read-only",
                "--log-driver", "none", "--security-opt", "no-new-privileges",
                "--cap-drop", "ALL", *(f"--cap-add={name}" for name in capabilities),
                *self.create_flags, *(f"--{limit}={value}" for limit, value in limits.items()),
                *each("--label", map("=".join, labels.items()))]
        for bind in binds:
            argv += self.bind_argv(*bind)
        return [*argv, *each("--volume", volumes), "--entrypoint", command[0], image, *command[1:]]

    def bind_argv(self, host: str, container: str, options: str) -> list[str]:
        """A mount that fails when the host path does not exist; paths may hold any character. What
        is no path is a volume.
        """
        chosen = options.split(",") if options else []
        if "z" in chosen or "Z" in chosen:  # docker's --mount knows no relabelling
            return ["--volume", f"{host}:{container}:{options}"]
        kind = "bind" if host.startswith("/") else "volume"
        fields = [f"type={kind}", f"source={host}", f"target={container}",
                  *(["readonly" if kind == "bind" else "ro"] if "ro" in chosen else [])]
        return ["--mount", ",".join('"' + f.replace('"', '""') + '"' if set(f) & set(',"\n') else f
                                    for f in fields)]

    def create(self, argv: Sequence[str]) -> Output:
        """The creation of a container, begun."""
        return Output(argv, LONG_SECONDS, leads=self.shares_files)

    def rename(self, id: str, name: str) -> tuple[int, str]:
        """Rename a container; the client's status and what it said on stderr."""
        status, _, err = Output(self.argv("rename", id, name), leads=self.shares_files).result()
        return status, err

    # Docker and podman would swallow Ctrl-P to detach; these eight keys nobody types.
    detach_keys = ",".join(["ctrl-\\"] + ["ctrl-@"] * 7)

    def exec_argv(self, name: str, command: Sequence[str], *, user: str = "", workdir: str = "",
                  env: Sequence[str] = (), stdin: bool = False,
                  terminal: bool = False) -> list[str]:
        """Runs a command in a container; a variable without `=` has the call's own value."""
        argv = [*self.client, "exec", *(["-i"] if stdin else []),
                *(["-t", "--detach-keys", self.detach_keys] if terminal else []),
                *(["--user", user] if user else []), *(["--workdir", workdir] if workdir else [])]
        return [*argv, *each("-e", env), self.bare(name), *command]

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], *, own_group: bool) -> int:
        """Start the call of an exec on our own streams and return its pid."""
        return spawn(argv, env=env, own_group=own_group)

    def logs_argv(self, name: str, *, follow: bool = False, tail: int = 0,
                  since: float = 0) -> list[str]:
        """Prints what a container has printed, or the last lines, or what came since a time."""
        return [*self.client, "logs", *(["-f"] if follow else []),
                *(["--tail", str(tail)] if tail else []),
                *(["--since", f"{since:.9f}"] if since else []), self.bare(name)]

    def copy_argv(self, name: str, path: str) -> list[str]:
        """Prints a file of a container, which need not run, as a tar archive."""
        return [*self.client, "cp", f"{self.bare(name)}:{path}", "-"]

    def forward_argv(self, name: str, ports: Sequence[str]) -> list[str]:
        """Has published ports of a container listen here; [] where the client does not do that."""
        return []

    def role(self) -> str:
        """What an administrator is to grant, for the client of the engine; "" for nothing."""
        return ""

    # -- images --

    def image_argv(self, name: str) -> list[str]:
        form = "{{.Id}} {{json .RepoTags}} {{json .Config.Labels}}"
        return [*self.client, "image", "inspect", "--format", form, name]

    def read_image(self, out: str) -> tuple[str, list[str], dict[str, str]]:
        """Id, names and labels of an image."""
        id, tags, labels = out.strip().split(" ", 2)
        return id, parse_json(tags) or [], parse_json(labels) or {}

    def build_argv(self, tag: str, folder: str, labels: Mapping[str, str], args: Sequence[str],
                   host_network: bool) -> list[str]:
        """Builds the Containerfile of a folder; an argument without `=` has its value from ours."""
        return [*self.client, "build", "--force-rm", "-t", tag,
                *each("--label", map("=".join, labels.items())), *each("--build-arg", args),
                *(["--network", "host"] if host_network else []),
                "-f", os.path.join(folder, "Containerfile"), folder]

    def build_problem(self) -> EngineProblem | None:
        """What this machine lacks for a build, as far as it can be seen."""
        return None

    def try_argv(self, image: str, command: Sequence[str], network: str = "open",
                 volumes: Sequence[str] = ()) -> list[str]:
        """Runs a command as root in a new container of an image, and removes that."""
        return [*self.client, "run", "--rm", "--init", "--pull", "never", "--user", "0:0",
                *(["--network", network] if network != "open" else []),
                *each("--volume", volumes), "--entrypoint", command[0], image, *command[1:]]

    # -- failures and their remedies --

    def diagnose(self, err: str) -> str:
        """Which of the symptoms a message is, "helper" for a program that it misses, or ''."""
        text = err.lower()
        found = next((kind for kind, signs in self.symptoms.items()
                      if any(sign in text for sign in signs)), "")
        return found or ("helper" if self.missing_helpers(err) else "")

    def missing_helpers(self, err: str) -> list[str]:
        """The programs of `helpers` that the engine has not found, by its message."""
        import re

        names = "|".join(self.helpers)
        found = [name for pattern in self.missing
                 for name in re.findall(pattern.replace("NAME", names), err.lower())]
        return list(dict.fromkeys(found))

    def failure(self, err: str, wanted: str | None = None) -> SandboxError:
        """The error for a failed call: what the engine printed, with a remedy where that is known.

        `wanted` is the engine that was asked for, '' for any.
        """
        lines = [line for line in err.strip().splitlines()
                 if line.strip() and "--help'" not in line]
        errors = [line for line in lines
                  if not (line.startswith('time="') and " level=warning " in line)]
        message = "\n".join(errors or lines) or f"{self.name} failed and printed nothing"
        kind = self.diagnose(err)
        if kind and kind != "image":
            return self.problem(kind, message, self.name if wanted is None else wanted)
        hint = next((hint for sign, hint in self.hints.items() if sign in message.lower()),
                    LAST_HINT)
        if self.is_named and any(sign in message.lower() for sign in self.unknown):
            hint = f"correct {self.origin}"
        return SandboxError(message, hint, 125)

    def problem(self, kind: str, message: str, wanted: str) -> EngineProblem:
        return EngineProblem(kind, message, self.remedy(kind, message))

    def remedy(self, kind: str, message: str) -> Remedy:
        """The one remedy for a problem that was met with this message."""
        if self.host and kind != "daemon":  # nothing of this machine mends it
            return Remedy([], note=f"mend that on {self.host}")
        if kind == "permission":
            return permission_remedy(message)
        if kind == "helper":
            packages = dict.fromkeys(self.helpers[name] if program("apt-get") else name
                                     for name in self.missing_helpers(message))
            return install_remedy(packages, " ".join(packages))
        if kind == "daemon":
            commands = [] if self.host else self.start_commands(message)
            if commands:
                return Remedy(commands, lambda: self.start_daemon(commands))
            note = f"start the {self.name} that is meant, or correct {self.origin}"
            return Remedy([], note=note)
        return Remedy(install_commands(*self.packages()), note=f"upgrade {self.name}")

    def packages(self) -> list[str]:
        """The packages that it comes in."""
        return [self.name]

    def address(self) -> str:
        """What tells the client where to find it."""
        return self.address_variable

    def start_commands(self, message: str) -> list[list[str]]:
        """How to start the daemon or machine that a message misses; [] where it is not here."""
        return []

    def start_daemon(self, commands: Sequence[Sequence[str]]) -> None:
        """Start the daemon and wait until it answers. Raises SandboxError with its last words."""
        hint = "mend that and try again"
        try:
            Remedy(commands).carry_out()
        except SandboxError as error:
            raise SandboxError(self.last_words() + error.message, hint, 125) from None
        began = seen = time.monotonic()
        while self.diagnose(Output(self.argv("ping")).result()[2]) == "daemon":
            now = time.monotonic()
            seen = now if may_run(self.daemon) else seen
            ended = now - seen > GONE_SECONDS
            if ended or now - began > STARTUP_SECONDS:
                words = f"{self.name} was started and {'has ended' if ended else 'does not answer'}"
                raise SandboxError(self.last_words() + words, hint, 125)
            time.sleep(0.2)

    def last_words(self) -> str:
        """The last lines that its daemon has printed."""
        return ""


class Docker(Engine):
    """Docker, whose client speaks with a daemon."""

    name = "docker"
    minimum = (20, 10)
    disk_root = "/var/lib/docker"
    sockets = ("/run/docker.sock", "{run}/docker.sock", "{home}/.docker/run/docker.sock",
               "{home}/.docker/desktop/docker.sock", "{home}/.colima/default/docker.sock")
    address_variable = "DOCKER_HOST"
    daemon = "dockerd"
    unknown = ("unable to resolve docker endpoint",)
    symptoms = {**Engine.symptoms,
                "daemon": ("cannot connect to the docker daemon", "is the docker daemon running",
                           "error during connect", "make sure the url is valid",
                           "failed to connect to the docker api")}
    calls = {
        **Engine.calls,
        "facts": ("info", "--format",
                  "{{range .ServerErrors}}!{{.}}{{else}}{{.ServerVersion}} "
                  '{{range .SecurityOptions}}{{if eq . "name=rootless"}}rootless{{end}}{{end}}'
                  "{{end}}"),
        "storage": ("info", "--format", "{{.DockerRootDir}}"),
    }
    hints = {
        "unable to parse docker host": "correct DOCKER_HOST, or unset it",
        "docker endpoint": "correct DOCKER_CONTEXT, or run: docker context use default",
        "is not found on the file system":
            "correct DOCKER_CONTEXT, or run: docker context use default",
        **Engine.hints,
    }

    options = ("context",)

    socket = "/var/run/docker.sock"
    log = "/var/log/dockerd.log"
    pid_files = {"dockerd": "/var/run/docker.pid",
                 "containerd": "/var/run/docker/containerd/containerd.pid"}

    def place(self) -> str:
        if address := os.environ.get("DOCKER_HOST"):
            return "" if is_here(address) else address
        context = os.environ.get("DOCKER_CONTEXT") or self.config("config.json").get(
            "currentContext")
        return context if context and not is_here(self.endpoint(context)) else ""

    def config(self, path: str) -> dict[str, Any]:
        """A file of the client's, {} where there is none that can be read."""
        folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
        with suppress(OSError, ValueError):
            found = read_json(os.path.join(folder, path))
            return found if isinstance(found, dict) else {}
        return {}

    def endpoint(self, context: str) -> str:
        """The address that a context has, "" for none that we know."""
        with suppress(OSError, KeyError, TypeError):
            folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
            for id in os.listdir(os.path.join(folder, "contexts", "meta")):
                found = self.config(os.path.join("contexts", "meta", id, "meta.json"))
                if found.get("Name") == context:
                    return str(found["Endpoints"]["docker"]["Host"])
        return ""

    def there(self) -> str:
        """The address of its daemon, "" for none that we know."""
        place = self.client[2] if self.is_named else self.place()
        return place if "://" in place else self.endpoint(place)

    def ssh_words(self) -> list[str]:
        address = self.there()
        return [ssh_address(address)] if address.startswith("ssh://") else []

    def client_there(self) -> list[str]:
        address = self.there()
        if not address.startswith("ssh://"):
            return []
        _, _, path = address.removeprefix("ssh://").partition("/")
        return [self.name, *(["--host", f"unix:///{path}"] if path else [])]

    def is_rootless(self, fact: str) -> bool:
        return fact == "rootless"

    def list_argv(self, label: str, shown: Sequence[str]) -> list[str]:
        labels = ",".join(f'"{label}":{{{{json (.Label "{label}")}}}}' for label in shown)
        form = ('{"name":{{json .Names}},"state":{{json .State}},"image":{{json .Image}},'
                '"created":{{json .CreatedAt}},"labels":{' + labels + "}}")
        return [*self.client, "ps", "-a", "--filter", f"label={label}", "--format", form]

    def read_list(self, out: str) -> list[dict[str, Any]]:
        # not splitlines(): a label may hold U+0085
        rows = [parse_json(line) for line in out.split("\n") if line]
        return [{**row, "created": iso_time(row["created"])} for row in rows]

    def packages(self) -> list[str]:
        if not program("apt-get"):
            return [self.name]
        with suppress(OSError), open("/var/lib/dpkg/info/docker.io.list", encoding="utf-8") as file:
            # From Debian 13 on the client is a package of its own, which docker.io only recommends.
            if program("dockerd") and "/usr/bin/docker" not in file.read().split("\n"):
                return ["docker-cli"]
        return ["docker.io"]

    def address(self) -> str:
        return self.address_variable if os.environ.get("DOCKER_HOST") else "the docker context"

    def problem(self, kind: str, message: str, wanted: str) -> EngineProblem:
        if (not self.host and kind == "daemon" and self.socket in message
                and sys.platform != "darwin" and not program("dockerd") and not self.has_unit()):
            message += "\nonly the client of docker is installed here: there is no dockerd"
            return EngineProblem("engine", message, engine_remedy(wanted))
        return super().problem(kind, message, wanted)

    def has_unit(self) -> bool:
        """Whether systemd starts docker here."""
        folders = ("/etc/systemd/system", "/lib/systemd/system", "/usr/lib/systemd/system")
        booted = os.path.isdir("/run/systemd/system")
        return booted and any(os.path.exists(f"{folder}/docker.service") for folder in folders)

    def stale_pid_files(self) -> list[str]:
        """Those of a docker that was killed: another process may have its pid, and none starts."""
        closed = os.path.isdir("/var/run/docker") and not os.access("/var/run/docker", os.X_OK)
        return [path for name, path in self.pid_files.items() if not may_run(name)
                and (os.path.exists(path) or (closed and path.startswith("/var/run/docker/")))]

    def start_commands(self, message: str) -> list[list[str]]:
        if sys.platform == "darwin":
            return [["open", "-a", "Docker"]]
        if self.socket not in message:
            return []
        if self.has_unit():
            return [as_root(["systemctl", "start", "docker"])]
        stale = self.stale_pid_files()
        return [*([as_root(["rm", "-f", *stale])] if stale else []),
                as_root(["sh", "-c", f"setsid dockerd >>{self.log} 2>&1 </dev/null &"])]

    def last_words(self) -> str:
        if sys.platform == "darwin":
            return ""
        journal = ["journalctl", "-u", "docker", "-n", "5", "--no-pager", "-o", "cat"]
        log = ["tail", "-n", "5", self.log]
        status, out, _ = Output(as_root(journal if self.has_unit() else log)).result()
        return "" if status else out


class Podman(Engine):
    """Podman, which has no daemon, or on macOS a machine."""

    name = "podman"
    minimum = (4, 0)
    disk_root = "/var/lib/containers"
    sockets = ("/run/podman/podman.sock", "{run}/podman/podman.sock")
    address_variable = "CONTAINER_HOST"
    daemonless = True
    options = ("connection",)
    create_flags = ("--http-proxy=false",)
    symptoms = {**Engine.symptoms,
                "daemon": ("cannot connect to podman", "unable to connect to podman",
                           "failed to connect: ")}
    unknown = ("destination not found",)
    hints = {**Engine.hints, "strconv.atoi":
             "give the connection's address its port: ssh://USER@HOST:22/run/…"}
    helpers = {
        "newuidmap": "uidmap", "newgidmap": "uidmap", "slirp4netns": "slirp4netns",
        "pasta": "passt", "nft": "nftables", "iptables": "iptables", "netavark": "netavark",
        "aardvark-dns": "aardvark-dns", "catatonit": "catatonit", "conmon": "conmon",
        **Engine.helpers,
    }

    calls = {
        **Engine.calls,
        # `podman info` takes ten times as long
        "facts": ("version", "--format", "{{.Client.Version}} {{if .Server}}remote{{end}}"),
        "storage": ("info", "--format", "{{.Store.GraphRoot}}"),
        "rootless": ("info", "--format", "{{.Host.Security.Rootless}}"),
        "details": ("info", "--format", "json"),
        "connections": ("system", "connection", "list", "--format", "json"),
    }

    def place(self) -> str:
        if address := os.environ.get("CONTAINER_HOST"):
            return "" if is_here(address) else address
        name = os.environ.get("CONTAINER_CONNECTION", "")
        # The machine of macOS shares the person's files.
        return "" if name.startswith("podman-machine") else name

    def ssh_words(self) -> list[str]:
        place = self.client[2] if self.is_named else self.place()
        address, identity = place, os.environ.get("CONTAINER_SSHKEY", "")
        if "://" not in place:
            known = parse_json(self.ask(self.argv("connections")))
            row = next((row for row in known if row["Name"] == place), {"URI": "", "Identity": ""})
            address, identity = row["URI"], row["Identity"]
        words = ["-i", identity] if identity else []
        return [*words, ssh_address(address)] if address.startswith("ssh://") else []

    def is_rootless(self, fact: str) -> bool:
        if fact == "remote":
            # On macOS it is the machine, which shares the person's files.
            self.serves = not os.environ.get("CONTAINER_HOST") and sys.platform != "darwin"
            return self.ask(self.argv("rootless")).strip() == "true"
        return os.getuid() != 0

    def check_helpers(self) -> None:
        host = parse_json(self.ask(self.argv("details")))["host"]
        if host.get("serviceIsRemote") or not host["security"]["rootless"]:
            return
        if len(host["idMappings"]["uidmap"] or []) < 2:
            message = ("podman has no user ids for its containers: "
                       "/etc/subuid and /etc/subgid do not name this user")
            raise EngineProblem("helper", message, self.ids_remedy())
        network = host.get("rootlessNetworkCmd") or "slirp4netns"
        if not (host.get(network) or {}).get("executable", "?"):
            raise self.lacks(network)

    def lacks(self, helper: str) -> EngineProblem:
        """The problem that a program of the network is missing."""
        message = f"podman could not find {helper}, without which a container has no network"
        return self.problem("helper", message, self.name)

    def list_argv(self, label: str, shown: Sequence[str]) -> list[str]:
        return [*self.client, "ps", "-a", "--filter", f"label={label}", "--format", "json"]

    def read_list(self, out: str) -> list[dict[str, Any]]:
        return [{"name": row["Names"][0], "state": row["State"], "image": row["Image"],
                 "created": iso_time(time.strftime("%Y-%m-%d %H:%M:%S %z",
                                                   time.localtime(row["Created"]))),
                 "labels": row["Labels"]} for row in parse_json(out or "[]")]

    def create(self, argv: Sequence[str]) -> Output:
        return Created(argv, LONG_SECONDS, leads=self.shares_files)

    def build_problem(self) -> EngineProblem | None:
        if self.host:
            return None
        tables = "nft" if version_numbers(self.version) >= (5,) else "iptables"
        return self.lacks(tables) if os.getuid() == 0 and not program(tables) else None

    def missing_helpers(self, err: str) -> list[str]:
        import re

        found, unnamed = super().missing_helpers(err), r"(?im)^error: netavark: .*\(os error 2\)"
        if not found and re.search(unnamed, err):
            return [name for name in ("nft", "iptables") if not program(name)]
        return found

    def packages(self) -> list[str]:
        # rootless it wants its helpers named
        return [self.name, *(["uidmap", "slirp4netns"] if program("apt-get") else [])]

    def start_commands(self, message: str) -> list[list[str]]:
        return [["podman", "machine", "start"]] if sys.platform == "darwin" else []

    def ids_remedy(self) -> Remedy:
        """A range of user and group ids that nobody else has."""
        import pwd

        end = 100000
        for path in ("/etc/subuid", "/etc/subgid"):
            with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    _, *numbers = line.strip().split(":")
                    if len(numbers) == 2 and all(map(str.isdecimal, numbers)):
                        end = max(end, sum(map(int, numbers)))
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            return Remedy([], note="use a user that has a name")
        if not program("usermod"):
            note = f"give {user} a range of 65536 ids in /etc/subuid and /etc/subgid"
            return Remedy([], note=note)
        given = f"{end}-{end + 65535}"
        add = ["usermod", "--add-subuids", given, "--add-subgids", given, user]
        return Remedy([as_root(add), ["podman", "system", "migrate"]])


class Created(Output):
    """A container that is being created: of two that share a new volume podman lets one fail."""

    def result(self, limit_bytes: int = 0) -> tuple[int, str, str]:
        status, out, err = super().result(limit_bytes)
        if status and "volume already exists" in err:
            return Output(self.argv, self.seconds).result()
        return status, out, err


# In the order in which they are tried. Whatever names an engine takes it from here.
ENGINES: dict[str, type[Engine]] = {driver.name: driver for driver in (Docker, Podman)}


def engine_remedy(wanted: str) -> Remedy:
    """How to install the engine that was asked for, or the one that fits best."""
    # An ordinary user is best served by podman: no daemon, no group that is as good as root.
    best = Docker if os.getuid() == 0 and program("apt-get") else Podman
    return install_remedy(ENGINES.get(wanted, best)().packages(), " or ".join(ENGINES))


def iso_time(text: str) -> str:
    """ISO 8601 for '2026-01-31 12:00:00 +0100', which may be followed by a zone's name."""
    day, hour, zone = text.split()[:3]
    return f"{day}T{hour}{zone[:3]}:{zone[3:]}"


def candidates(config: Config) -> list[Engine]:
    """The engine that was asked for, or those to try in turn."""
    if config.get("host"):
        engine = engine_on(config, config.get("host"))
        asked = config.given("runtime")
        if asked not in (None, engine.name):
            raise SandboxError(f"the host {engine.host} has {engine.name} and not {asked}",
                               "leave --rt out", 2)
        return [engine]
    return engines_here(config)


def engines_here(config: Config) -> list[Engine]:
    """The same, of this machine."""
    runtime = config.get("runtime")
    return [ENGINES[runtime]()] if runtime else [driver() for driver in ENGINES.values()]


def engine_on(config: Config, host: str) -> Engine:
    """The engine of a host of the key "hosts". Raises SandboxError."""
    import sandbox_hosts

    return sandbox_hosts.engine_on(config, host)


def engine_of(runtime: str, host: str) -> Engine:
    """The engine that a session was seen on."""
    if runtime in ENGINES and (engine := ENGINES[runtime]()).host == host:
        return engine
    return engine_on(load_config(), host)


def at_host(engines: Sequence[Engine], name: str) -> Sequence[Engine]:
    """The engines that a name is meant on: those given, or that of the host in NAME@HOST."""
    host = name.partition("@")[2]
    found = [engine for engine in engines if engine.host == host]
    return engines if not host else found or [engine_on(load_config(), host)]


def config_of(args: argparse.Namespace | None = None) -> Config:
    """For a command on what exists: a mistake in the file does not keep it from that."""
    flags = flags_layer(args) if args else None
    try:
        return load_config(flags)
    except SandboxError as error:
        kept: dict[str, Any] = {}
        for key in KEYS.values():  # with a mistake elsewhere, what says where still counts
            with suppress(SandboxError, KeyError):
                if key.above_file or key.own:
                    kept |= Layer({key.name: read_config()[key.name]}, "file").values
        config = load_config(flags, data=kept)
        say(error.message)
        return config


def engines_of(args: argparse.Namespace | None = None) -> list[Engine]:
    """The engines of such a command."""
    return candidates(config_of(args))


def first_answer(engines: Sequence[Engine],
                 start: Callable[[Engine], Output]) -> tuple[Engine, int, str, str]:
    """The first engine that answers a call, and status, stdout, stderr. Raises EngineProblem."""
    met: SandboxError | None = None
    wanted = engines[0].name if len(engines) == 1 else ""
    broken = ""
    for engine in engines:
        try:
            status, out, err = start(engine).result()
        except FileNotFoundError:
            continue
        except EngineProblem as error:  # it will not answer the question asked ahead either
            asked, engine.asked = engine.asked, None
            if asked:
                asked.end(9)
            met = met or error
            continue
        except OSError as error:  # not a program that this machine can run
            broken += f"{program(engine.name) or engine.name}: {error.strerror}\n"
            continue
        # `docker info` prints a failure of its daemon as data, and some versions end with status 0.
        if out.startswith("!"):
            status, err = 1, out[1:]
        if not status or engine.diagnose(err) in ("", "image"):
            return engine, status, out, err
        met = met or engine.failure(err, wanted)
    message = f"{wanted} is not" if wanted else f"neither {' nor '.join(ENGINES)} is"
    raise met or EngineProblem("engine", f"{broken}{message} installed", engine_remedy(wanted))


def pick_engine(engines: Sequence[Engine]) -> tuple[Engine, bool]:
    """The first engine that answers, and whether it is rootless. Raises EngineProblem."""
    engine, status, out, err = first_answer(engines, Engine.facts)
    if status:
        raise engine.failure(err)
    engine.version, fact = engine.read_facts(out)
    if version_numbers(engine.version) < engine.minimum:
        oldest = ".".join(map(str, engine.minimum))
        message = f"{engine.name} {engine.version} is too old: {oldest} is the oldest that works"
        raise engine.problem("old", message, engine.name)
    return engine, engine.is_rootless(fact)


def version_numbers(version: str) -> tuple[int, ...]:
    """(20, 10) for '20.10.24+dfsg1'."""
    return tuple(int(number) for number in version.split(".")[:2] if number.isdigit())


def with_remedies(action: Callable[[], Any], assume_yes: bool) -> Any:
    """Do the action; where a problem has a remedy and the person agrees, apply it and try again."""
    met: set[str] = set()
    while True:
        try:
            return action()
        except EngineProblem as error:
            if error.hint in met or not error.remedy.offered or not (assume_yes or can_ask()):
                raise
            if not confirm(error, assume_yes):
                raise SandboxError("left as it is", code=error.code) from None
            met.add(error.hint)
            with_remedies(error.remedy.carry_out, assume_yes)


def confirm(error: EngineProblem, assume_yes: bool) -> bool:
    """Say what is wrong and what mends it; whether that may be done."""
    say(error.message)
    say(error.remedy.text())
    return assume_yes or ask_person("Do that now? [y/N] ").lower() in ("y", "yes")


def can_ask() -> bool:
    return os.isatty(0) and os.isatty(2)


def ask_person(text: str) -> str:
    """Ask on the terminal; the end of input is ''."""
    print(text, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


# --- Sessions ---
# A session is a container with our labels; the engine is the only truth about what exists.


class Session:
    """A container as its labels describe it; `id` is the engine's, '' before there is one.

    `process` is mark_of() its first process, None for unknown. `ours` is the id of the container
    that this host has noted to have made, see remember(). Anyone can give a container labels, and
    an image brings its own: where they are not ours nothing of the host follows from them.
    """

    def __init__(self, name: str, state: str, labels: Mapping[str, str], id: str = "") -> None:
        self.name, self.state, self.labels, self.id = name, state, labels, id
        self.process: str | None = None
        self.ours = ""
        self.user = labels.get("sandbox.user", "0:0")  # numeric uid:gid that commands run as
        self.agent = agent if (agent := labels.get("sandbox.agent", "")) in AGENTS else ""
        # The name of its proxy, which is its broker, too, and of the volume that both mount; ''
        # where it has neither an allowlist nor hidden keys.
        self.has_rules = labels.get("sandbox.network") == "allow"
        self.hides_keys = labels.get("sandbox.keys") == "hidden"
        proxied = self.has_rules or self.hides_keys
        self.proxy = f"sandbox-proxy-{labels.get('sandbox.session')}" if proxied else ""
        self.volume = self.proxy.replace("proxy", "net")
        # The volume that is its home; '' for one of before there were any. Anyone can give a
        # container labels: no other volume may be meant.
        home = labels.get("sandbox.home", "")
        ours = home.startswith(HOME_VOLUME) and is_plain(home.removeprefix(HOME_VOLUME), "")
        self.home = home if ours else ""
        # The volume with the snapshots of its directory. A home stays with its session whatever
        # the container and the name, so it is named as that.
        id = home.removeprefix(HOME_VOLUME) if ours else labels.get("sandbox.session", "")
        self.store = f"{STORE_VOLUME}{id}" if is_plain(id, "") else ""
        # The volume with its copy of the directory; '' where it works on the directory itself.
        copied = ours and labels.get("sandbox.workspace") == "copy"
        self.copy = f"{COPY_VOLUME}{id}" if copied else ""
        self.new_mirror = ""  # the volume that was first filled for it, see sandbox_travel.py

    @property
    def is_elsewhere(self) -> bool:
        return "@" in self.name

    @property
    def is_ours(self) -> bool:
        return self.ours == self.id

    @property
    def profile(self) -> str:
        return self.labels.get("sandbox.profile", "") if self.is_ours else ""

    def created(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What it was created from, and the settings that came from flags or name its agent; none
        where it is not ours.

        Raises BrokenSession: anyone can give a container labels with our names.
        """
        try:
            data = parse_json(self.labels["sandbox.created"])
            spec = {"directory": "/", "workdir": "/", **data["spec"]}
            check_created(spec, self.labels)
            kept = Layer(data["flags"], "created").values
            return spec, kept if self.is_ours else {}
        except (KeyError, TypeError, ValueError, AttributeError, SandboxError):
            message = f"the labels of the container {self.name} are not those of a whole session"
            raise BrokenSession(message, f"remove it: sandbox rm {self.name}", 125) from None

    def variables(self) -> list[str]:
        """The variables that -e gave it at its creation, without their values: Layer.variables."""
        self.created()  # raises
        data = parse_json(self.labels["sandbox.created"]) if self.is_ours else {}
        names = data.get("variables")
        return [name for name in names if is_text(name)] if isinstance(names, list) else []


class Changed(SandboxError):
    """A session that another command was quicker to change."""


class NotASession(SandboxError):
    """A container that is none of our sessions: somebody else's, or the proxy of one."""


class BrokenSession(SandboxError):
    """A container with our labels and nonsense in them: it can be listed and removed, no more."""


def check_created(spec: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """Raise ValueError, KeyError or TypeError where labels hold what none of ours could."""
    for key in ("image", "directory", "workdir"):
        a_word(spec[key])
    # What every session has; one of an earlier version may lack a key that is newer than it.
    volumes, _, network = spec["volumes"], spec["ports"], spec["network"]
    for name in spec.keys() & KEYS:
        if spec[name] is not None or KEYS[name].kind == "list" or name == "network":
            check_value(name, spec[name])
    user, _, group = labels["sandbox.user"].partition(":")
    if not all(id.isascii() and id.isdecimal() and len(id) <= 10 for id in (user, group)):
        raise ValueError("uid:gid")
    sources = spec.get("sources")  # an old session has none
    if sources is not None and not (isinstance(sources, list) and all(map(is_text, sources))
                                    and len(sources) == 1 + len(volumes)):
        raise ValueError("sources")
    if not all(map(is_text, spec.get("sent", ()))):
        raise ValueError("sent")
    git = spec.get("git")  # an old session has none
    if git and not (git["parts"] and all(map(is_text, (git["common"], git["at"], *git["parts"])))):
        raise ValueError("git")
    if isinstance(network, dict) != (labels.get("sandbox.network") == "allow"):
        raise ValueError("network")
    for name, mode in (("workspace", "copy"), ("keys", "hidden")):
        if (spec.get(name) == mode) != (labels.get(f"sandbox.{name}") == mode):
            raise ValueError(name)


def kept_path(kind: str, name: str) -> str:
    """Where what is kept of a session is: NAME, or NAME@HOST."""
    bare, _, host = name.partition("@")
    return os.path.join(sandbox_home(), kept_folder(host), kind, bare)


def settings_path(name: str) -> str:
    return f"{kept_path('sessions', name)}.json"


def read_settings(name: str) -> dict[str, Any]:
    """The settings made for a session, keys of the configuration. Raises SandboxError."""
    path = settings_path(name)
    try:
        data = read_json(path)
        if not isinstance(data, dict):
            raise ValueError("the file is not a JSON object")
        return data
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SandboxError(f"{path}: {error}", "correct the file or remove it") from None


def write_settings(name: str, settings: Mapping[str, Any]) -> None:
    write_private(settings_path(name), to_json(settings, indent=2, ensure_ascii=False) + "\n")


class FileLock:
    """Others wait for it until it is closed. A folder can be locked, too."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_file(path: str, *, shared: bool = False, waits: str = "",
              needed: bool = False) -> FileLock:
    """Have a lock until it is closed, together with all who have it shared; `waits` is said where
    that takes a while.

    On a disk without room for it we go on without, unless it is needed: then FileError is raised.
    """
    import fcntl

    try:
        make_private(os.path.dirname(path))
        lock = os.open(path, os.O_RDONLY if os.path.isdir(path) else os.O_RDONLY | os.O_CREAT,
                       0o600)
    except OSError as error:
        if needed:
            raise FileError(path, error) from None
        return FileLock(os.open(os.devnull, os.O_RDONLY))
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        if waits:
            say(waits)
        fcntl.flock(lock, how)
    return FileLock(lock)


def lock_settings(name: str) -> FileLock:
    """Keep others from changing a session's settings, and from putting its rules in force, until
    the file is closed.
    """
    return lock_file(f"{settings_path(name)}.lock", needed=True)


def lock_path(name: str) -> str:
    return os.path.join(sandbox_home(), "locks", name)


def forget_lock(name: str) -> None:
    """Who waits for it finds out that there is nothing left to change."""
    with suppress(OSError):
        os.unlink(lock_path(name))


def lock_homes(*, shared: bool = True) -> FileLock:
    """Keep `prune` from taking what is being made; it has this lock alone."""
    # The folder itself, so that where nothing was made nothing is left.
    return lock_file(os.path.join(sandbox_home(), "."), shared=shared,
                     waits="waiting for another command that makes or removes sessions")


def lock_container(session: Session) -> FileLock:
    return lock_file(lock_path(session.home or session.id),
                     waits=f"waiting for another command that changes {session.name}")


def lock_session(engine: Engine, session: Session) -> FileLock:
    """Keep others from removing, renaming or copying a session, and from making it anew, until the
    file is closed.

    Raises Changed where one of them was first and its container is gone.
    """
    lock = lock_container(session)
    try:
        if follow_rename(engine, session):
            return lock
    except BaseException:
        lock.close()
        raise
    lock.close()
    raise Changed(f"{session.name} was changed by another command at this moment",
                  "sandbox ps shows what there is now")


def session_config(session: Session, settings: Mapping[str, Any] | None = None,
                   flags: Layer | None = None, profile: str | None = None,
                   data: Mapping[str, Any] | None = None,
                   kept: Mapping[str, Any] | None = None) -> Config:
    """What is in force for a session: configuration, creation, settings, and flags given now.

    `kept` is of its creation, where another one is planned.
    """
    data = read_config() if data is None else data
    settings = read_settings(session.name) if settings is None else settings
    if profile is None and session.profile in data.get("runs", {}):
        profile = session.profile
    if kept is None:
        have, kept = session.created()
        kept = {**kept, "workspace": have.get("workspace", "mount")}
    env = {name: os.environ[name] for name in session.variables() if name in os.environ}
    kept = {**kept, "env": env} if env else kept
    created = Layer(kept, "created", places=dict.fromkeys(kept, f"container {session.name}"))
    # Without agentPromptCommand: it may be '' there.
    settings = {name: settings[name] for name in settings if name != "agentPromptCommand"}
    made = Layer(settings, "settings", f"{settings_path(session.name)}: ")
    return load_config(flags, profile, [created, made], data)


def find_session(engines: Sequence[Engine], name: str) -> tuple[Engine, Session | None]:
    """Look for a session by name, with one call. Raises NotASession for another container."""
    engine, status, out, err = first_answer(at_host(engines, name),
                                            lambda e: Output(e.inspect_argv(name)))
    if status and engine.is_absent(err):
        return engine, None
    if status:
        raise engine.failure(err)
    id, real_name, state, _, pid, labels = engine.read_inspected(out)
    name = engine.full(name)
    if engine.full(real_name) != name:  # the engine takes the start of an id, too
        return engine, None
    session = Session(name, state, labels, id)
    if state == "running":
        session.process = "" if engine.host else mark_of(pid)
    if "sandbox.session" not in session.labels:
        raise NotASession(f"the container {name} exists and is not a sandbox session",
                          "choose another name with -n", 125)
    if "sandbox.proxy" in session.labels:
        raise NotASession(f"{name} is the proxy of the session {session.labels['sandbox.proxy']}",
                          "name the session, not its proxy", 125)
    if engine.host and not recall([engine], name):
        import sandbox_hosts

        sandbox_hosts.take_over(engine, session)
    remember(engine, session)
    if session.copy and session.is_ours:  # its engine may be told by a file of the client's
        with suppress(BrokenSession):
            engine.serves = engine.serves or "sent" in session.created()[0]
    return engine, session


# A run without a terminal does not look for the container first: it execs into the id that the
# name had when it was last seen, unless its first process was seen on this machine and has ended.
# Ids are never given twice, so at worst the engine knows no such container, or the container is
# stopped. Then cmd_run looks for it after all and tries again, but only where the container itself
# shows that the command did not begin: no command runs twice.
ENGINE_STATUS = (1, 125, 126, 127, 255)  # of a client that could not exec, and of many a command
KILLED = 137  # an exec whose container ends
BEGAN_BYTES = 16 << 20  # eleven for each command
LOG_TAIL_BYTES = 65536


def memory_path(engine: Engine, name: str) -> str:
    return os.path.join(sandbox_home(), engine.kept, "known",
                        f"{engine.name}-{engine.bare(name)}.json")


def making_path(session: Session) -> str:
    """A file that is there while we make a container with these labels, or have printed how. It
    holds the settings of a new session, or nothing.
    """
    id = session.labels.get("sandbox.session", "")
    return os.path.join(sandbox_home(), "making", id if is_plain(id, "") and id else "-")


def note_making(session: Session, settings: Mapping[str, Any] | None = None) -> None:
    text = "" if settings is None else to_json(settings)
    for _ in range(3):  # another's end may take the folder that we have just made
        with suppress(OSError):
            make_private(os.path.dirname(making_path(session)))
            fd = os.open(making_path(session), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(fd, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
            return


def forget_making(session: Session) -> None:
    with suppress(OSError):
        os.unlink(making_path(session))
        os.rmdir(os.path.dirname(making_path(session)))


def begin_settings(session: Session, settings: Mapping[str, Any]) -> None:
    """Give a new session its settings; what has its name in our folders is of an earlier one."""
    forget_files(session.name)
    if settings:
        write_settings(session.name, settings)


def remember(engine: Engine, session: Session) -> None:
    """Note what is known of a session; where the note cannot be written it is not taken for ours.

    One that an earlier version has written is of a session that the person has used.
    """
    known = recall([engine], session.name)
    if making := os.path.exists(making_path(session)):
        session.ours = session.id
        with suppress(OSError, ValueError, FileError):  # for who made it and was killed
            begin_settings(session, read_json(making_path(session)))
    if known:
        session.ours = session.ours or known[1].ours
        if not making and (known[1].id, known[1].process) == (session.id, session.process):
            return
    with suppress(FileError):
        write_private(memory_path(engine, session.name),
                      to_json({"id": session.id, "labels": session.labels,
                               "process": session.process, "ours": session.ours}))
    forget_making(session)


def look_next_time(engine: Engine, session: Session) -> None:
    """Forget the id of a session and not its labels: check_gone() wants them."""
    remember(engine, Session(session.name, "", session.labels))


def recall(engines: Sequence[Engine], name: str) -> tuple[Engine, Session] | None:
    """The session as it was when we last saw it."""
    for engine in at_host(engines, name):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            data = read_json(memory_path(engine, name))
            session = Session(engine.full(name), "running", data["labels"], data["id"])
            session.process = data.get("process")
            session.ours = data.get("ours", data["id"]) or "none"  # not the id that it lacks
            return engine, session
    return None


def mark_of(pid: int | str) -> str:
    """A process and when it was started; '' for one that is not seen from here."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return f"{pid} {int(file.read().rpartition(b')')[2].split()[19])}"
    return ""


def has_ended(session: Session) -> bool:
    """Whether a session that was seen to run here does not do so any more, or was never seen."""
    mark = session.process
    return mark is None or (mark != "" and mark_of(mark.partition(" ")[0]) != mark)


def spec_of(config: Config, engines: Sequence[Engine] = ()) -> dict[str, Any]:
    """The part of the configuration that an existing container cannot change. A new session works
    on a copy of the directory where its engine does not see that, unless a mount is asked for.
    """
    directory, volumes = config.get("hostPath"), config.all("volumes")
    paths = (directory, *(volume.split(":")[0] for volume in volumes))
    spec = {"sources": [resolved(path) for path in paths], "image": config.image,
            "directory": directory, "workdir": config.get("containerPath") or directory}
    travels = engines and not engines[0].shares_files and not config.is_given("workspace")
    if travels or config.get("workspace") == "copy":
        spec["workspace"] = "copy"
    for key in KEYS.values():
        if key.fixed and not key.part_of:
            spec[key.name] = config.all(key.name) if key.kind == "list" else config.get(key.name)
    return spec | {"protect": protected_of(config, spec), "git": git_of(spec)}


def source_of(spec: Mapping[str, Any]) -> str:
    """The directory of a session without links; an old session's labels have only its path."""
    return str(spec["sources"][0] if spec.get("sources") else resolved(spec["directory"]))


def resolved(path: str) -> str:
    """The path without links. It is read once: what is checked is what the engine is given."""
    try:
        return os.path.realpath(path)
    except OSError as error:  # a link became a directory meanwhile
        raise SandboxError(f"{path}: {error.strerror}", "try again when nobody changes it",
                           125) from None


def differences(have: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """A line for all in which a container differs from what is asked for, but for its rules."""
    lines = []
    for key, value in want.items():
        old = have.get(key, "visible" if key == "keys" else None)  # an old session has none
        if isinstance(value, list):
            old = old or []
            lines += [f"{key}: it lacks {item}" for item in value if item not in old]
            lines += [f"{key}: it has {item}, which is no longer asked for"
                      for item in old if item not in value]
        elif value != old and not (isinstance(old, dict) and is_closed(value)):
            lines.append(f"{key}: it has {shown(old)}, asked for is {shown(value)}")
    return lines


def is_closed(network: Any) -> bool:
    """Whether the proxy of an allowlist can make it so: by rules, or by none at all."""
    return isinstance(network, dict) or network == "none"


def shown(value: Any) -> str:
    """A value of a specification in words."""
    if isinstance(value, dict):
        return str(value["common"]) if "common" in value else "an allowlist"
    return str(value or "none")


def agent_of(command: str | Sequence[str]) -> str:
    """The agent that a command starts, or ''."""
    word = (command.split() if isinstance(command, str) else command)[0]
    return SHORTCUTS.get(os.path.basename(word), "") if len(word) > 2 else ""


def labels_of(config: Config, flags: Layer, spec: Mapping[str, Any], user: str,
              home: str = "") -> dict[str, str]:
    """The labels that make a container a session, with a new home or that of another container;
    no value of a variable is in them.
    """
    agent = config.get("yolo") or (agent_of(config.get("command")) if config.get("command") else "")
    # not the directory: where a later run comes from does not change it
    kept = {name: value for name, value in flags.values.items()
            if (KEYS[name].fixed and name != "hostPath") or name == "envFile"}
    if agent:
        kept |= {key.name: config.get(key.name) for key in KEYS.values()
                 if key.excludes and config.get(key.name)}
    return {
        "sandbox.session": random_id(), "sandbox.user": user, "sandbox.agent": agent,
        "sandbox.home": home or new_home(),
        "sandbox.profile": config.profile, "sandbox.directory": spec["directory"],
        "sandbox.network": "allow" if isinstance(spec["network"], dict) else spec["network"],
        **({"sandbox.workspace": "copy"} if spec.get("workspace") == "copy" else {}),
        **({"sandbox.keys": "hidden"} if spec["keys"] == "hidden" else {}),
        "sandbox.created": to_json({"spec": spec, "flags": kept, "variables": flags.variables},
                                   separators=(",", ":"))}


def limits() -> list[Key]:
    """The keys that engines have an option of their own for."""
    return [key for key in KEYS.values() if key.limit]


def asset(path: str) -> bytes:
    """A file of static/ in a checkout, wheel or zipapp. Raises SandboxError."""
    parts = path.split("/")
    if not all(part not in ("", ".", "..") and is_plain(part, "_.-") for part in parts):
        raise SandboxError(f"{path!r} is not the path of an asset")
    here = os.path.dirname(__file__)  # as the loader has it, though it may go by way of `..`
    for folder in ("sandbox_static", "static"):
        with suppress(OSError):
            return bytes(globals()["__loader__"].get_data(os.path.join(here, folder, *parts)))
    raise SandboxError(f"the file static/{path} is missing from this installation",
                       "install it again")


def session_argv(engine: Engine, name: str, spec: Mapping[str, Any],
                 labels: Mapping[str, str]) -> list[str]:
    """The engine call that creates a session: an idle init that execs come into."""
    session, git = Session(name, "", labels), spec.get("git")
    volume = session.volume
    home = session.home if has_home(spec) else ""
    script = asset("session/mounts.sh") + asset("session/init.sh")
    return engine.create_argv(
        name, spec["image"],
        ["sh", "-c", script.decode(), "sandbox", *labels["sandbox.user"].split(":"), home,
         *(mounts_meant(binds_of(spec)) if engine.shares_files else ())],
        labels=labels, workdir=spec["workdir"], capabilities=CAPABILITIES,
        env=[f"HOME={CONTAINER_HOME}",
             *([f"SANDBOX_PROXY={PROXY_URL}"] if session.has_rules else []),
             *(["SANDBOX_KEYS=hidden"] if session.hides_keys else []),
             *([f"SANDBOX_GIT={git['at']}"] if git else [])],
        limits={key.limit: spec[key.name] for key in limits()},
        network="none" if isinstance(spec["network"], dict) else spec["network"],
        ports=spec["ports"],
        binds=[*([(session.copy, spec["workdir"], "")] if session.copy else []), *binds_of(spec)],
        volumes=[*([f"{volume}:{NET_DIRECTORY}:ro"] if volume else []),
                 *([f"{home}:{CONTAINER_HOME}"] if home else [])],
        log_size="1m")  # it has a limit because root inside the container can write to it


def mount_targets(spec: Mapping[str, Any]) -> list[str]:
    """Where the mounts of a specification are in the container, in the order of its sources."""
    return [spec["workdir"], *(volume.split(":")[1] for volume in spec["volumes"])]


def binds_of(spec: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """All mounts of a specification: source, place in the container, options. Of a copy's
    directory nothing is mounted.
    """
    options = ["", *((item + ":").split(":")[2] for item in spec["volumes"])]
    binds = [*zip(spec["sources"], mount_targets(spec), options, strict=True), *git_binds(spec),
             *protected_binds(spec)]
    mounted = binds[1:] if spec.get("workspace") == "copy" else binds
    sent = spec.get("sent", ())  # files of another machine's, see sandbox_hosts.placed()
    return [bind for bind in mounted if ":".join(filter(None, bind)) not in sent]


def has_home(spec: Mapping[str, Any]) -> bool:
    """Whether the home is the session's own: nothing of the host is mounted in its place."""
    return all(within(CONTAINER_HOME, target) is None for target in mount_targets(spec))


def mounts_meant(binds: Iterable[tuple[str, str, str]]) -> list[str]:
    """The arguments of mounts_are() in static/session/mounts.sh: the boot id of this machine, then
    for each mount its device and path, and its place in the container; [] without a mount table.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            arguments = [file.read().strip()]
        for source, target, _ in binds:
            arguments += [place_of(source), target] if source.startswith("/") else []
    except FileNotFoundError:
        return []
    return arguments


def place_of(source: str) -> str:
    """Device and path on it of a resolved path, as the mount table (proc(5), mountinfo) shows a
    bind mount of it; "gone", which no mount is, for what is not there or has become a link.
    """
    try:
        fd = os.open(source, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return "gone"
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            mount = next(line.split()[1] for line in file if line.startswith("mnt_id:"))
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.removesuffix(" (deleted)") != source:  # a file may have been written anew
            return "gone"
    finally:
        os.close(fd)
    path = source.replace("\\", "\\134").replace(" ", "\\040")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for fields in map(str.split, file):
            if fields[0] == mount:
                inner = within(path, fields[4]) or ""
                return f"{fields[2]} {os.path.join(fields[3], inner) if inner else fields[3]}"
    raise FileNotFoundError(f"no mount {mount}")  # as under chroot, where "/" is no mount


# What an engine's daemon starts containers with.
OTHER_SOCKETS = ("/run/containerd/containerd.sock", "/run/crio/crio.sock")


def engine_sockets() -> list[str]:
    """Paths at which an engine may listen: who reaches one of them owns the host."""
    run_user = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    home = os.path.expanduser("~")
    known = [*OTHER_SOCKETS]
    for engine in ENGINES.values():
        known += [path.format(run=run_user, home=home) for path in engine.sockets]
        address = os.environ.get(engine.address_variable, "")
        if address.startswith("unix://"):
            known.append(address.removeprefix("unix://"))
    return [os.path.realpath(path) for path in known]


def check_mounts(spec: Mapping[str, Any]) -> None:
    """Raise SandboxError when a mount would hand out an engine's socket, or two go to one place."""
    paths = [spec["directory"], *(volume.split(":")[0] for volume in spec["volumes"])]
    mounted = [*zip(paths, spec["sources"], strict=True),
               *((source, source) for source, _, _ in git_binds(spec))]
    sockets = [socket for socket in engine_sockets() if os.path.exists(socket)]
    names = {os.path.basename(path) for engine in ENGINES.values() for path in engine.sockets}
    names.update(map(os.path.basename, OTHER_SOCKETS))
    for source, real in mounted:
        inside = any(within(socket, real) is not None for socket in sockets)
        if inside or os.path.basename(real) in names:
            message = f"{source} holds an engine's socket: whoever reaches it owns the host"
            hint = "mount something narrower, or say --allow-engine-socket"
            raise SandboxError(message, hint, 125)
        if f"{real}/".startswith(("/proc/", "/sys/", "/dev/")):
            raise SandboxError(f"{source} is a window of the host's kernel", "mount something else",
                               125)
    targets = [*mount_targets(spec), *(target for _, target, _ in git_binds(spec))]
    for target in targets:
        if targets.count(target) > 1:
            raise SandboxError(f"two mounts go to {target}", "keep one of them", 125)
    if spec["sources"][0] == os.path.realpath(os.path.expanduser("~")):
        say(f"the whole home directory {spec['directory']} is mounted: "
            "the agent can read every key in it")


SYSTEM_DIRECTORIES = ("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run",
                      "/sbin", "/sys", "/usr")


def check_spec(spec: Mapping[str, Any]) -> None:
    """Raise SandboxError when parts of a specification do not go together."""
    if spec["ports"] and spec["network"] != "open":
        raise SandboxError(f"ports cannot be published with {shown(spec['network'])} as network",
                           "use --net open or no -p (recreate: -p '')", 125)
    if spec["keys"] == "hidden" and spec["network"] == "host":
        raise SandboxError("keys cannot be hidden with host as network: its loopback is the host's",
                           "use another --net, or --keys visible", 125)
    for target in mount_targets(spec):
        if target in SYSTEM_DIRECTORIES or target.startswith(("/dev/", "/proc/", "/sys/")):
            raise SandboxError(f"a mount would cover the container's {target}",
                               "choose another path (--cp, -v)", 125)
    for source in (*spec["sources"], *(source for source, _, _ in git_binds(spec))):
        if not is_exact(source):
            message = f"a mounted path leads to {source!r}, whose name engines read in another way"
            raise SandboxError(message, "rename it: no control characters, nothing but UTF-8", 125)


def create_session(engines: Sequence[Engine], name: str, config: Config, flags: Layer,
                   spec: Mapping[str, Any], home: str = "",
                   source: Session | None = None,
                   turn: Callable[[Engine, Session], Turn | None] = lambda *_: None,
                   settings: Mapping[str, Any] | None = None) -> tuple[Engine, Session]:
    """Create and start a session and its proxy; what a failed attempt left is removed.

    `spec` is spec_of(config) as it was checked, `home` a volume that is there, as is its copy but
    for a duplicate of a `source`. The first snapshot for a `turn` is taken meanwhile. A new session
    gets these `settings`; without any it has those of its name. Raises SandboxError.
    """
    engine, rootless = pick_engine(engines)
    if engine.shares_files != engines[0].shares_files and not config.is_given("workspace"):
        # The first one did not answer, and with it another default was assumed.
        spec = {**spec, "workspace": WORKSPACES[0 if engine.shares_files else 1]}
    name = engine.full(name)
    check_agent(engine, config)
    if settings is not None and (other := namesake(engine, name)):
        raise SandboxError(f"there is a session {name} of {other} already",
                           "choose another name with -n", 125)
    spec, user = placed(engine, config, spec, rootless)
    engine.check_session(config, spec)
    labels = labels_of(config, flags, spec, user, home)
    session = Session(name, "running", labels)
    make_worktree_config(spec)
    make_protected(spec)
    status, begun, new, done = 1, None, bool(source or not home), False
    try:
        note_making(session, settings)
        if session.copy and new:
            import sandbox_changes

            present_image(engine, config)  # raises
            sandbox_changes.make_copy(engine, session, source)
        begun = turn(engine, session)
        with SignalsHeld():  # what is being made can be removed only when it is there
            proxy = engine.create(proxy_argv(engine, session, spec)) if session.proxy else None
            making, given = engine.create(session_argv(engine, name, spec, labels)), False
            try:
                ended = proxy.result() if proxy else (0, "", "")
                if not ended[0]:
                    give_keys(engine, session, config)
                given = True
            finally:
                made, out, err = making.result()
                status = made if given else 1
        if ended[0] and not status:  # without its proxy no session
            status, out, err = ended
        if not status:  # only now is the name ours
            session.id = session.ours = out.strip()
            if spec.get("sent"):
                import sandbox_travel

                sandbox_travel.send_files(engine, session, spec)
            if settings is not None:
                begin_settings(session, settings)
                note_making(session)  # without what it has by now
            remember(engine, session)
            done = True
    finally:
        if not done:
            if begun:
                begun.drop()
            remove_leftover(engine, session, new)
            forget_making(session)
    if status and engine.is_name_taken(err):
        raise NameTaken(f"the name {name} was taken by another run", "try again", 125)
    if status and engine.diagnose(err) == "image":
        raise missing_image(engine, config)
    if status:
        raise engine.failure(err)
    limited = any(config.is_given(key.name) for key in limits())
    if limited and err.strip():
        say(err.strip())  # the engine warns that it cannot enforce a limit
    if note := git_note(spec):
        say(note)
    if config.all("protect") and not (spec["protect"] or spec["git"] or session.copy):
        say(f"nothing is protected in {spec['directory']}: it has no .git")
    return engine, session


def placed(engine: Engine, config: Config, spec: Mapping[str, Any],
           rootless: bool) -> tuple[Mapping[str, Any], str]:
    """A specification as it is where the engine is, and whose files are mounted there: uid:gid.

    Raises SandboxError where a mount would be of another machine's files.
    """
    if engine.shares_files:
        return spec, container_user(rootless)
    import sandbox_hosts

    return sandbox_hosts.placed(engine, config, spec, rootless)


def recreation(session: Session, flags: Layer, profile: str | None = None,
               without: Container[str] = ()) -> tuple[Config, Layer, dict[str, Any]]:
    """What a session is to be created from anew, with these flags and `without` what was given for
    some keys: its configuration, what of that its labels keep, and its specification.

    A list among the flags takes the place of the one that was given before.
    """
    have, kept = session.created()
    kept = {name: value for name, value in kept.items() if name not in without}
    check_owner(session)
    if not session.is_ours and "hostPath" not in flags.values:
        raise SandboxError(f"{session.name} was not made from here: its labels do not say what is "
                           "mounted", "say it with --hp DIR, and all else that it is to have", 125)
    kept = {**kept, "hostPath": have["directory"]}
    if have["workdir"] != have["directory"] or "hostPath" not in flags.values:
        kept["containerPath"] = have["workdir"]
    kept |= {name: value for name, value in flags.values.items()
             if KEYS[name].fixed or name == "envFile"}
    kept["workspace"] = flags.values.get("workspace", have.get("workspace", "mount"))
    if "network" in flags.values:
        now = session_config(session).get("network")
        kept["network"] = with_rules(now, flags.values["network"])
    config = session_config(session, settings_beside(session, flags), flags, profile, kept=kept)
    layer = Layer(kept, "created")
    layer.variables = list(dict.fromkeys([*session.variables(), *flags.variables]))
    spec = spec_of(config)
    if session.copy and spec["sources"][0] != have["sources"][0]:  # merge would go there
        raise SandboxError(f"{session.name} works on a copy of {have['sources'][0]}, for good",
                           "sandbox run --copy there makes another one", 125)
    return config, layer, spec


def settings_beside(session: Session, flags: Layer) -> dict[str, Any]:
    """The settings of a session without what flags give it anew."""
    return {name: value for name, value in read_settings(session.name).items()
            if not (name in flags.values and KEYS[name].fixed)}


def check_recreation(session: Session, spec: Mapping[str, Any]) -> None:
    """Raise SandboxError when a session cannot be created anew from a specification."""
    check_spec(spec)
    # A link in a path may lead to an engine's socket by now.
    have, _ = session.created()
    known = session.is_ours and (have.get("sources"), have.get("git"))
    if (spec["sources"], spec["git"]) != known:
        check_mounts(spec)


def recreate_command(session: Session, flags: Layer, profile: str | None) -> str:
    """The command that creates a session anew as a `run` with these flags asks for."""
    _, kept = session.created()
    words = ["sandbox", "recreate", session.name]
    words += ["-r", profile] if profile and profile != session.profile else []
    for name, value in flags.values.items():
        key = KEYS[name]
        if key.fixed and isinstance(value, dict):
            words += each("--allow", value["allow"])
        elif key.fixed and isinstance(value, list):
            words += each(key.flags[0], dict.fromkeys([*kept.get(name, ()), *value]))
        elif key.fixed or name == "runtime":
            words += [key.flags[0], str(value)]
    if flags.values.get("network", "open") != "open" and "ports" not in flags.values:
        words += ["-p", ""] if kept.get("ports") else []  # they do not go together
    return quote_all(words)


def recreate_session(engine: Engine, session: Session, config: Config, flags: Layer,
                     spec: Mapping[str, Any],
                     settings: Callable[[], dict[str, Any]] | None = None) -> Session:
    """Create a session anew from a recreation(), with its home; where that fails the old container
    is there, stopped. What `settings` gives takes the place of those that it has.
    """
    with lock_session(engine, session), lock_homes():
        return replace_container(engine, session, config, flags, spec, settings)


def replace_container(engine: Engine, session: Session, config: Config, flags: Layer,
                      spec: Mapping[str, Any],
                      settings: Callable[[], dict[str, Any]] | None) -> Session:
    place = source_of(session.created()[0])
    image, before = present_image(engine, config), image_of(engine, session)
    aside = engine.full(f"{engine.bare(session.name)[:100]}.{random_id()}")
    home = session.home or new_home()
    fresh = None
    look_next_time(engine, session)  # this tells others who end with it, see check_removed()
    stop_session(engine, session)
    try:
        with SignalsHeld():
            taken, err = engine.rename(session.id, aside)
        if taken:
            raise engine.failure(err)
        if not session.home:
            copy_home(engine, session, home)
        renew_home(engine, home, before, image, left_places(session, spec))
        _, fresh = create_session([engine], session.name, config, flags, spec, home)
        if session.hides_keys and fresh.hides_keys:
            import sandbox_keys

            sandbox_keys.take_counts(engine, session, fresh)
        check_ready(engine, fresh)
    except BaseException:
        with suppress(SandboxError):  # the first failure is the one to tell
            # It may be there where nobody has told us; who else has this home is the old one.
            fresh = fresh or find_session([engine], session.name)[1]
            if fresh and fresh.home == home and fresh.id != session.id:
                remove_container(engine, fresh)
        taken, err = engine.rename(session.id, session.name)
        if not taken:
            say(f"{session.name} is there as it was, stopped")
        elif engine.is_name_taken(err):
            say(f"to come back: sandbox rename {aside} NAME")
        remember(engine, session)
        if session.home and before:
            with suppress(SandboxError):
                renew_home(engine, home, image, before)
        remove_volumes(engine, home)  # a new one: nobody uses it
        raise
    with SignalsHeld():  # from here on the new one counts
        if settings:
            with lock_settings(session.name):
                if (wanted := settings()) != read_settings(session.name):
                    write_settings(session.name, wanted)
        remove_container(engine, session)
        same = {spec["sources"][0]} | (set() if engine.shares_files else {spec["directory"]})
        if session.is_ours and place not in same:
            remove_volumes(engine, session.store)  # its snapshots are of the directory before
        forget_terminals(session.name)
    return fresh


def present_image(engine: Engine, config: Config) -> str:
    """The id of the image to create from. Raises EngineProblem where it or its agent is missing."""
    check_agent(engine, config)
    image = Image(engine, config.image).id
    if not image:
        raise missing_image(engine, config)
    return image


def image_of(engine: Engine, session: Session) -> str:
    """The id of the image that a session was created from; '' where it is not known."""
    status, out, _ = Output(engine.image_of_argv(session.id)).result()
    return "" if status else out.strip()


def check_ready(engine: Engine, session: Session) -> None:
    """Wait for a container that was just created. Raises SandboxError where it has ended."""
    wait = ["sh", "-c", "until [ -e /run/sandbox-ready ]; do sleep 0.05; done"]
    if Output(engine.exec_argv(session.id, wait), LONG_SECONDS).result()[0]:
        lines = [f"the container {session.name} ended as soon as it was started",
                 *last_lines(engine, session)]
        raise SandboxError("\n".join(lines), "correct the image or the mounts", 125)


# --- Homes ---
# The home of a session is a volume, which goes from container to container and only with `rm`. What
# is done with it is done by a container of its own: nothing of the host sees what is in it.

HOME_VOLUME, STORE_VOLUME, COPY_VOLUME = "sandbox-home-", "sandbox-shadow-", "sandbox-copy-"
NET_VOLUME = "sandbox-net-"  # of a proxy
MIRROR_VOLUME = "sandbox-mirror-"  # of a directory, on a host that does not see it


def new_home() -> str:
    """The name of a volume for a home; who mounts it first makes it."""
    return HOME_VOLUME + random_id()


HOME_SECONDS = 3600  # for a step on a home; what runs there may be the image of anybody
HOME_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID")  # of who keeps owners and modes


def home_argv(engine: Engine, name: str, image: str, home: str, *words: str,
              source: str = "") -> list[str]:
    """The engine call for a step of static/session/home.sh on a home that no container uses."""
    volumes = [f"{home}:/run/sandbox-home", *([f"{source}:/run/sandbox-from:ro"] if source else ())]
    script = asset("session/home.sh").decode()
    return engine.closed_argv(name, image, ["sh", "-c", script, "sandbox", *words], labels={},
                              limits={}, capabilities=HOME_CAPABILITIES, binds=[], volumes=volumes)


def copy_home_argv(engine: Engine, session: Session, home: str) -> list[str]:
    """The engine call that copies the home of a session to a new one."""
    return home_argv(engine, step_name(), image_of(engine, session), home, "copy",
                     "/run/sandbox-from", source=session.home)


def step_name() -> str:
    return f"sandbox-step-{random_id()}"


def home_step(title: str, engine: Engine, image: str, home: str, *words: str,
              source: str = "") -> None:
    """Carry a step out. Raises SandboxError where it fails or takes too long."""
    name = step_name()
    Step(title, ended_by=engine.argv("remove", name)).run(
        home_argv(engine, name, image, home, *words, source=source), silent_seconds=1,
        seconds=HOME_SECONDS)


def copy_home(engine: Engine, session: Session, home: str) -> None:
    """Copy what a session has in its home, and nothing of what is mounted there, to a new one."""
    title = f"copy the home of {session.name}"
    if session.home:
        home_step(title, engine, image_of(engine, session), home, "copy", "/run/sandbox-from",
                  source=session.home)
        return
    # A session of before there were volumes: its home is in the container itself.
    made = engine.ask(engine.argv("commit", session.id), LONG_SECONDS).split()[-1]
    try:
        home_step(title, engine, made, home, "copy", CONTAINER_HOME)
    finally:
        Output(engine.argv("remove-image", made), LONG_SECONDS).result()


def renew_home(engine: Engine, home: str, before: str, image: str,
               left: Sequence[str] = ()) -> None:
    """Put what an image has in its home, or will by init.sh, in the place of what the image before
    had and nobody has changed; `left` are places in the home where nothing is mounted any more.
    """
    if before == image and not left:
        return
    if before:
        with suppress(SandboxError):  # what it leaves there is too much, and no more
            home_step("clear the home", engine, before, home, "drop", CONTAINER_HOME, *left)
    home_step("renew the home", engine, image, home, "fill", CONTAINER_HOME)


def left_places(session: Session, spec: Mapping[str, Any]) -> list[str]:
    """The places below the home that a session has mounts at, and a specification has none."""
    targets = mount_targets(spec)
    return [place for target in mount_targets(session.created()[0])
            if target not in targets and (place := within(target, CONTAINER_HOME))]


def remove_volumes(engine: Engine, *names: str) -> None:
    """Remove homes and stores, unless a container uses them."""
    if names := tuple(filter(None, names)):
        Output(engine.argv("remove-volume", *names), LONG_SECONDS).result()


def duplicate_home(engine: Engine, session: Session, config: Config,
                   spec: Mapping[str, Any]) -> str:
    """A new home with what a session has in its own, for a container of this specification."""
    image, home = present_image(engine, config), new_home()
    try:
        with lock_session(engine, session):
            copy_home(engine, session, home)
            before = image_of(engine, session)
        renew_home(engine, home, before, image, left_places(session, spec))
    except BaseException:
        remove_volumes(engine, home)
        raise
    return home


def container_user(rootless: bool) -> str:
    """uid:gid in the container whose files belong to us: a rootless engine maps its root to us."""
    # `sg docker` has made docker our group; this variable holds the one that we had before.
    own_group = os.environ.get("SANDBOX_REGROUPED") or os.getgid()
    return "0:0" if rootless else f"{os.getuid()}:{own_group}"


def remove_leftover(engine: Engine, session: Session, new: bool) -> None:
    """Remove the containers of a failed creation, and no other that has the name. The volumes of a
    session that is not new belong to its old container, even those that this does not use.
    """
    status, out, _ = Output(engine.inspect_argv(session.name)).result()
    if not status:
        *_, labels = engine.read_inspected(out)
        if labels.get("sandbox.session") == session.labels["sandbox.session"]:
            Output(engine.argv("remove", session.name), LONG_SECONDS).result()
    remove_proxy(engine, session)
    if new:
        remove_volumes(engine, session.home, session.copy, session.store, session.new_mirror)


def start_session(engine: Engine, session: Session) -> None:
    """Start a session that does not run. Raises SandboxError."""
    if session.state == "running":
        return
    if session.state == "paused":
        hint = "run: " + quote_all(engine.argv("unpause", session.name))
        raise SandboxError(f"the container {session.name} is paused", hint, 125)
    have, _ = session.created()
    if have.get("git"):
        # Another session may write in that repository and turn what is mounted of it just now, and
        # who could look before anything runs is the container, which is no longer as it was made.
        message = f"{session.name} is stopped, and others may have changed what git mounts there"
        raise SandboxError(message, f"sandbox recreate {session.name}, which keeps its home", 125)
    if (engine.shares_files and have.get("sources")
            and any(resolved(path) != path for path, _, _ in binds_of(have))):
        raise mount_turned(session)
    # Restart the proxy: what ran in the session before may have left it stuck. Give it its rules
    # before any command runs.
    if session.proxy and Output(engine.argv("restart", session.proxy), LONG_SECONDS).result()[0]:
        start_proxy(engine, session)
    if session.has_rules:
        set_rules(engine, session, network_of(session, session_config(session)))
    engine.ask(engine.argv("start", session.name), LONG_SECONDS)
    session.state = "running"
    check_mounted(engine, session, have)


def check_mounted(engine: Engine, session: Session, have: Mapping[str, Any]) -> None:
    """Stop a session that was just started on other mounts than meant. Raises SandboxError."""
    meant = mounts_meant(binds_of(have)) if have.get("sources") and engine.shares_files else []
    if not meant:
        return
    script = asset("session/mounts.sh").decode() + f'mounts_are "$@" || exit {TURNED_STATUS}'
    command = ["sh", "-c", script, "sandbox", *meant]
    argv = engine.exec_argv(session.id or session.name, command, user="0:0")
    status, _, err = Output(argv).result()
    if status == TURNED_STATUS:
        stop_session(engine, session)
        raise mount_turned(session)
    # Where the container has ended, the command that comes next says so.
    if status and end_of(engine, session, status)[0] == "running":
        raise engine.failure(err)


TURNED_STATUS = 97


def mount_turned(session: Session) -> SandboxError:
    return SandboxError(f"a mount of {session.name} now leads through a link to another place",
                        f"look at its mounted paths, then: sandbox recreate {session.name}", 125)


def stop_session(engine: Engine, session: Session) -> None:
    """Stop a session that runs. Raises SandboxError."""
    if session.state == "running":
        engine.ask(engine.argv("stop", session.name), LONG_SECONDS)
        session.state = "exited"
        if session.proxy:
            Output(engine.argv("stop", session.proxy), LONG_SECONDS).result()


def missing_image(engine: Engine, config: Config) -> EngineProblem:
    version = config.get("imageVersion")
    name = [] if config.get("imageName") == IMAGE_NAME else ["--in", config.get("imageName")]
    where = ["--on", engine.host] if engine.is_named else ["--rt", engine.name]
    remedy = Remedy([["sandbox", "build", *where, "--iv", version, *name]],
                    lambda: build_image(engine, config))
    place = engine.host or engine.name
    return EngineProblem("image", f"{place} has no image {config.image}", remedy)


def check_agent(engine: Engine, config: Config) -> None:
    """Raise EngineProblem where the image was built without the agent that is asked for."""
    agent = config.get("yolo")
    has = Image(engine, config.image).agents if agent else ()
    if has and agent not in has:
        wanted = [*has, agent]
        command = [*missing_image(engine, config).remedy.commands[0],
                   "--iba", f"AGENTS={','.join(wanted)}"]
        raise EngineProblem("agent", f"{config.image} was built without {agent}",
                            Remedy([command], lambda: build_image(engine, config, agents=wanted)))


def find_settled(engines: Sequence[Engine], name: str) -> tuple[Engine, Session | None]:
    """find_session(), after another command that is making it anew."""
    engine, session = find_session(engines, name)
    known = None if session else recall([engine], name)
    if known and known[1].home:
        with lock_container(known[1]):
            return find_session(engines, name)
    return engine, session


def find_given(engines: Sequence[Engine], name: str, command: str,
               code: int = 1) -> tuple[Engine, Session]:
    """The session that a command was given by its name. Raises SandboxError where there is none."""
    Layer({"containerName": name}, "check", f"{command}: ")
    engine, session = find_settled(engines, name)
    if session is None:
        raise SandboxError(f"there is no container {name}", "sandbox ps lists them", code)
    return engine, session


def remove_session(engine: Engine, session: Session) -> None:
    """Remove a container of ours, its volumes, its settings and its jobs. Raises Changed."""
    with lock_session(engine, session):
        with suppress(OSError):  # first: this tells others who end with it, see check_removed()
            os.unlink(memory_path(engine, session.name))
        remove_container(engine, session)
        # The labels of one that is not ours may name what belongs to another session.
        ours = (session.copy, session.store) if session.is_ours else ()
        remove_volumes(engine, session.home, *ours)
        if not namesake(engine, session.name):
            forget_files(session.name)
        forget_lock(session.home)
        if session.copy and session.is_ours and not engine.shares_files:
            import sandbox_travel

            with suppress(SandboxError):  # `prune` knows it, too
                sandbox_travel.drop_mirror(engine, session)


def namesake(engine: Engine, name: str) -> str:
    """The other engine of this machine that has a session of the name; what is kept is kept by the
    name, and may be that one's. No call of an engine where none was seen.
    """
    for other in [] if engine.host else engines_here(Config([], "")):
        if other.host or other.name == engine.name:
            continue
        known = recall([other], name)
        with suppress(EngineProblem, OSError):  # not there, or out of order
            if known and not Output(other.inspect_argv(known[1].id or name)).result()[0]:
                return other.name
    return ""


def follow_rename(engine: Engine, session: Session) -> bool:
    """Take the name that a session has by now; whether its container is there.

    No call of the engine where it is still known so.
    """
    known = recall([engine], session.name)
    if session.id and not (known and known[1].id == session.id):
        status, out, err = Output(engine.inspect_argv(session.id)).result()
        if not status:
            session.name = engine.full(engine.read_inspected(out)[1])
        return not (status and engine.is_absent(err))
    return True


def users_of(engine: Engine, session: Session, own: Container[str] = ()) -> list[str]:
    """The commands that run in a session, one for each of its tags but our `own`; not autostart."""
    return [words for tag, words in used_by(engine, session).items() if tag not in own]


def used_by(engine: Engine, session: Session) -> dict[str, str]:
    """The first of the processes with a tag, by that."""
    out = ""
    if session.state == "running":
        command = ["sh", "-c", asset("session/users.sh").decode()]
        argv = engine.exec_argv(session.id or session.name, command, user=session.user)
        with suppress(EngineProblem):
            out = Output(argv).result(USERS_BYTES)[1]
    found: dict[str, tuple[int, str]] = {}  # of each tag the first process
    for line in out.split("\n"):
        pid, tag, *words = (line + "  ").split(" ", 2)
        if pid.isdecimal() and len(pid) < 9 and len(tag) == 10:
            process = int(pid), printable(words[0])[:200].strip()
            found[tag] = min(process, found.get(tag, process))
    return {tag: words for tag, (_, words) in sorted(found.items(), key=lambda item: item[1])}


USERS_BYTES = 1 << 20


def may_remove(engine: Engine, session: Session, own: Container[str] = (),
               what: str = "Remove it") -> bool:
    """Ask a person whether the container of a session that others use is to go; a script has
    decided.
    """
    users = users_of(engine, session, own) if can_ask() else []
    if not users:
        return True
    more = f" and {len(users) - 3} more" if len(users) > 3 else ""
    say(f"{session.name} is in use: {'; '.join(users[:3])}{more}")
    return ask_person(f"{what} all the same? [y/N] ").lower() in ("y", "yes")


def may_lose(engine: Engine, session: Session) -> bool:
    """Whether the work in a session's copy may go: merged work may, of other work a person is
    asked.
    """
    if not session.copy:
        return True
    import sandbox_changes

    if not (work := sandbox_changes.unmerged(engine, session)):
        return True
    say(f"{session.name} holds work that was not merged, see sandbox merge: {work}")
    return can_ask() and ask_person("Lose it? [y/N] ").lower() in ("y", "yes")


def check_removed(engine: Engine, session: Session, status: int) -> None:
    """Raise SandboxError where a session was removed by another command of ours.

    As long as the note of it is there this costs no call of the engine.
    """
    for _ in range(REMOVAL_STEPS):
        known = recall([engine], session.name)
        if known and known[1].id == session.id:
            return
        state, _ = end_of(engine, session, status)
        if not state:
            how = "created anew" if recall([engine], session.name) else "removed"
            raise SandboxError(f"the session {session.name} was {how} by another command",
                               code=status)
        if state == "running":  # the note could not be written
            return
        time.sleep(0.1)


REMOVAL_STEPS = 300  # a busy engine takes its time to make a container


def check_stopped(engine: Engine, session: Session, status: int) -> None:
    """Raise SandboxError where the container of a session does not run any more."""
    if end_of(engine, session, KILLED)[0] not in ("", "running"):
        raise SandboxError(f"the session {session.name} was stopped, and what ran in it has ended",
                           f"sandbox start {session.name} starts it again", status)


def rename_session(engine: Engine, session: Session, name: str) -> None:
    """Give a session another name; what runs in it goes on."""
    Layer({"containerName": name}, "check", "rename: ")
    if engine.full(name) != name and "@" in name:
        raise SandboxError(f"{session.name} stays on its host", f"rename it to {engine.bare(name)}")
    name = engine.full(name)
    with lock_session(engine, session), lock_settings(session.name), SignalsHeld():
        if name == session.name:
            raise SandboxError(f"{name} has that name already", "choose another name")
        status, err = engine.rename(session.id, name)
        if status and engine.is_name_taken(err):
            raise SandboxError(f"there is a container {name} already", "choose another name")
        if status:
            raise engine.failure(err)
        forget_files(name)  # an earlier session's
        try:
            for path_of in (jobs_path, terminals_path, settings_path):
                with suppress(FileNotFoundError):
                    os.rename(path_of(session.name), path_of(name))
        except OSError as error:
            engine.rename(session.id, session.name)
            raise FileError(path_of(name), error) from None
        with suppress(OSError):
            os.unlink(memory_path(engine, session.name))
        renamed = Session(name, session.state, session.labels, session.id)
        renamed.ours = session.ours
        remember(engine, renamed)
    with suppress(OSError):
        os.unlink(f"{settings_path(session.name)}.lock")


def remove_container(engine: Engine, session: Session) -> None:
    argv = engine.argv("remove", session.id or session.name)
    status, _, err = Output(argv, LONG_SECONDS).result()
    if status and not engine.is_absent(err):
        raise engine.failure(err)
    remove_proxy(engine, session)
    forget_lock(session.id)


def jobs_path(name: str) -> str:
    return kept_path("jobs", name)


def forget_files(name: str) -> None:
    """Remove what is kept for a session: settings, jobs, records of terminals."""
    for path in (settings_path(name), f"{settings_path(name)}.lock"):
        with suppress(OSError):
            os.unlink(path)
    for folder in (jobs_path(name), terminals_path(name)):
        if os.path.isdir(folder):
            remove_tree(folder)


def remove_tree(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


PS_LABELS = ("sandbox.agent", "sandbox.profile", "sandbox.directory", "sandbox.network")
ID_LABELS = ("sandbox.session", "sandbox.proxy", "sandbox.user", "sandbox.created",
             "sandbox.home", "sandbox.workspace", "sandbox.keys")


def session_rows(engine: Engine, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The sessions among containers: name, state, agent, profile, image, directory, network, ports
    (a list), created (ISO 8601), runtime.

    The network is open, none, host, allow, or cut: an allowlist whose proxy is not running.
    The state is the engine's, or broken: a container whose labels are not those of a whole session.
    """
    running = {row["labels"]["sandbox.session"] for row in rows
               if is_proxy(row) and row["state"] == "running"}
    return sorted((session_row(engine, row, running) for row in rows if not is_proxy(row)),
                  key=lambda row: row["name"])


def list_everywhere(config: Config, of: ListOf = session_rows,
                    aside: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, str]]:
    """What `of` makes of the containers of this machine and of all hosts, or of the one that was
    asked for; and the hosts that did not answer, with the reason. Who asks often keeps `aside` what
    hosts have said, and waits for none that is slow.
    """
    if not config.get("hosts") or config.given("host") is not None:
        return of(*list_containers(candidates(config))), {}
    import sandbox_hosts

    return sandbox_hosts.list_everywhere(config, of, aside)


def is_proxy(row: Mapping[str, Any]) -> bool:
    return bool(row["labels"].get("sandbox.proxy"))


def containers_argv(engine: Engine) -> list[str]:
    return engine.list_argv("sandbox.session", PS_LABELS + ID_LABELS)


def list_containers(engines: Sequence[Engine]) -> tuple[Engine, list[dict[str, Any]]]:
    """The containers that carry our labels, sessions and proxies: see Engine.read_list()."""
    engine, status, out, err = first_answer(engines, lambda e: Output(containers_argv(e)))
    if status:
        raise engine.failure(err)
    return engine, read_containers(engine, out)


def read_containers(engine: Engine, out: str) -> list[dict[str, Any]]:
    """The containers of a list; what another machine says becomes the name of a file."""
    return [{**row, "name": engine.full(row["name"])} for row in engine.read_list(out)
            if not engine.host or is_name(row["name"])]


def lost_row(host: str, why: str) -> dict[str, Any]:
    """A row in a list of sessions for a host that did not answer."""
    unknown = ("agent", "profile", "directory", "network", "workspace", "image", "created",
               "runtime")
    return {**dict.fromkeys(unknown, ""), "name": f"@{host or 'here'}", "host": host,
            "state": "unreachable", "ports": [], "why": why}


def session_row(engine: Engine, row: Mapping[str, Any], proxies: Container[str]) -> dict[str, Any]:
    """A container as `ps` shows it; `proxies` are the ids of the sessions whose proxy runs."""
    labels = row["labels"]
    result: dict[str, Any] = {
        "name": row["name"], "state": row["state"], "ports": [],
        **{label[8:]: labels.get(label, "") for label in PS_LABELS},
        "workspace": labels.get("sandbox.workspace") or WORKSPACES[0],
        "keys": labels.get("sandbox.keys") or KEYS_ARE[0],
        "image": row["image"], "created": row["created"],
        "runtime": engine.name, "host": engine.host}
    if (result["network"] == "allow" and row["state"] == "running"
            and labels["sandbox.session"] not in proxies):
        result["network"] = "cut"
    try:
        result["ports"] = Session(result["name"], "", labels).created()[0]["ports"]
    except BrokenSession:
        result["state"] = "broken"
    return result


# --- Git ---
# What git on this machine would do is found out by reading: a repository says what git is to run,
# so git never runs in one here.

# In a container the repository of a linked worktree is read-only there, but for what a commit
# writes. So nothing can be added that git on this machine obeys: hooks, configuration, `commondir`.
GIT_DIRECTORY = "/run/sandbox-git"
GIT_FILE_BYTES = 256 * 1024


def read_small(path: str, follow: bool = False) -> str:
    """The text of a small regular file, '' for anything else, a link (unless `follow`) included."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError:
        return ""
    try:
        stat = os.fstat(fd)
        regular = stat.st_mode & 0o170000 == 0o100000 and stat.st_size <= GIT_FILE_BYTES
        text = os.read(fd, GIT_FILE_BYTES) if regular else b""
    finally:
        os.close(fd)
    return text.decode(errors="surrogateescape").replace("\0", "?")


def is_folder_of_ours(path: str) -> bool:
    with suppress(OSError):
        stat = os.lstat(path)
        return stat.st_mode & 0o170000 == 0o040000 and stat.st_uid == os.getuid()
    return False


def linked_admin(top: str) -> tuple[str, str]:
    """What the `.git` of a linked worktree says, and the folder that means; '' for none.

    Anybody may have written that file, the agent of an earlier session, too. Believed is what leads
    without links to a repository of the person's that itself names this worktree.
    """
    link = read_small(f"{top}/.git").removesuffix("\n")
    if not link.startswith("gitdir: ") or not is_exact(link):
        return "", ""
    link = link.removeprefix("gitdir: ")
    admin = os.path.normpath(os.path.join(top, link))
    common = os.path.dirname(os.path.dirname(admin))
    needed = (common, f"{common}/objects", f"{common}/objects/info", f"{common}/refs", admin)
    # The two files of the worktree's folder that lead: back, and up.
    back, up = (os.path.normpath(os.path.join(admin, read_small(f"{admin}/{file}").rstrip("\n")))
                for file in ("gitdir", "commondir"))
    believed = (os.path.basename(os.path.dirname(admin)) == "worktrees"
                and os.path.realpath(admin) == admin and all(map(is_folder_of_ours, needed))
                and up == common and os.path.realpath(back) == f"{top}/.git"
                and read_small(f"{common}/HEAD") and os.path.isfile(f"{common}/config"))
    return (link, admin) if believed else ("", "")


def git_of(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """The repository of the linked worktree that a specification mounts: its path, where git looks
    for it in the container, and the parts that are mounted. None for none, or where other mounts
    decide what is there.
    """
    link, admin = linked_admin(resolved(spec["directory"]))
    if not admin or spec.get("workspace") == "copy":  # a copy has a repository of its own
        return None
    common = os.path.dirname(os.path.dirname(admin))
    place = os.path.normpath(os.path.join(spec["workdir"], link, "../.."))
    if any(within(place, target) is not None for target in mount_targets(spec)):
        return None
    hosts = [spec["directory"], *(volume.split(":")[0] for volume in spec["volumes"])]
    if any(within(common, resolved(path)) is not None for path in hosts):  # written by the session
        return None
    id = f"worktrees/{os.path.basename(admin)}"
    parts = ["", "objects", "objects/info", "refs", id, f"{id}/commondir", f"{id}/gitdir"]
    if "worktreeconfig" in read_small(f"{common}/config").lower():
        parts.append(f"{id}/config.worktree")
    return {"common": common, "at": place, "parts": parts}


def git_binds(spec: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The mounts for the repository of a linked worktree, as binds_of() has them."""
    git = spec.get("git")
    if not git:
        return []
    own = os.path.dirname(git["parts"][-1])
    binds = [(f"{spec['sources'][0]}/.git", f"{spec['workdir']}/.git", "ro")]
    for part in git["parts"]:  # git follows links to its own folder, so that is in its place
        place = git["at"] if within(part, own) is not None else GIT_DIRECTORY
        options = "" if part in ("objects", "refs", own) else "ro"
        binds.append((os.path.join(git["common"], part).rstrip("/"),
                      os.path.join(place, part).rstrip("/"), options))
    return binds


def protected_of(config: Config, spec: Mapping[str, Any]) -> list[str]:
    """The parts of .git that are to be read-only, where it is a folder. Of a linked worktree all
    are so already, and nothing of a copy is the host's.
    """
    git = f"{resolved(spec['directory'])}/.git"
    theirs = spec.get("workspace") == "copy" or os.path.islink(git) or not os.path.isdir(git)
    return [] if theirs else config.all("protect")


LEADING = {"commondir": ".\n", "config.worktree": ""}  # with what leads git nowhere else


def protected_binds(spec: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The mounts that make parts of .git read-only, and it a mount: or it could be renamed. Among
    them are the files by which git would take another configuration and other hooks.
    """
    parts = ["", *spec["protect"], *LEADING] if spec.get("protect") else []
    return [(os.path.join(spec["sources"][0], ".git", part).rstrip("/"),
             os.path.join(spec["workdir"], ".git", part).rstrip("/"), "ro" if part else "")
            for part in parts]


def make_protected(spec: Mapping[str, Any]) -> None:
    """Make what is to be protected where it is not there: or it could be made from inside.
    Raises SandboxError.
    """
    for path, _, _ in protected_binds(spec):
        name = os.path.basename(path)
        try:
            if name == "hooks":
                os.makedirs(path, exist_ok=True)
            elif name in LEADING and not os.path.lexists(path):
                write_private(path, LEADING[name])
                os.chmod(path, 0o644)  # others may use the repository, too
        except OSError as error:
            raise FileError(path, error) from None
        if os.path.realpath(path) != path:
            raise SandboxError(f"{path} is a link, which cannot be protected",
                               "put what it leads to there, or leave it out of protect", 125)
        if name == "commondir" and read_small(path) != ".\n":
            raise SandboxError(f"{path} leads git to another repository's configuration",
                               "remove it if you have not made it, or leave out protect", 125)


def make_worktree_config(spec: Mapping[str, Any]) -> None:
    """Make the worktree's own configuration where git would read one: what is not there cannot be
    mounted read-only, and so could be made from inside. Raises SandboxError.
    """
    for path, _, _ in git_binds(spec):
        if os.path.basename(path) == "config.worktree":
            try:
                how = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # it may be a FIFO
                os.close(os.open(path, how, 0o644))
            except OSError as error:
                raise FileError(path, error) from None


def git_note(spec: Mapping[str, Any]) -> str:
    """A line on git in a new session: what it was given, or why git does not work; '' for none."""
    directory, *sources = spec["sources"]
    if spec.get("git"):
        return (f"git works in this worktree: commits and branches of {spec['git']['common']} can "
                "be written, hooks and configuration only read")
    top = directory
    while not os.path.lexists(f"{top}/.git"):
        if top == "/":
            return ""
        top = os.path.dirname(top)
    if any(within(top, source) is not None for source in sources):
        return ""
    if top != directory:
        helps = (":" not in top and spec["workdir"] == spec["directory"]
                 and spec.get("workspace") != "copy")  # which it would lay open
        more = f", or with -v {quote_all([f'{top}:{top}'])}" if helps else ""
        return (f"git does not work in {directory}: its repository {top} is not mounted; run from "
                f"{top}{more}")
    if os.path.isfile(f"{top}/.git") and not linked_admin(top)[1]:
        return (f"git does not work in {directory}: its .git leads to another place, which is no "
                "repository of yours with this worktree, and is not mounted")
    return ""


def git_settings(path: str, folder: str, depth: int = 0) -> dict[str, str]:
    """The values in a git configuration of the person's, by section and name, with the files that
    it includes, those for this folder of a repository (`gitdir:` with a folder) among them.
    """
    found: dict[str, str] = {}
    for key, value in parse_git_config(read_small(path, follow=True)):
        found[key] = value
        place = key.removeprefix("includeif.gitdir:").removesuffix(".path")
        chosen = place != key and place.endswith("/") and within(
            folder, os.path.expanduser(place).rstrip("/")) is not None
        if (key == "include.path" or chosen) and depth < 10:  # as deep as git goes
            more = os.path.join(os.path.dirname(path), os.path.expanduser(value))
            found.update(git_settings(more, folder, depth + 1))
    return found


def parse_git_config(text: str) -> Iterator[tuple[str, str]]:
    """`section.name` or `section.subsection.name`, and the value, of each line that has one."""
    section = ""
    for line in map(str.strip, text.split("\n")):
        if line.startswith("["):
            head, _, line = line[1:].partition("]")
            name, _, below = head.partition(" ")
            section = ".".join(filter(None, (name.lower(), below.strip().strip('"'))))
        name, equals, value = line.partition("=")
        if equals and not name.startswith(("#", ";")):
            yield f"{section}.{name.strip().lower()}", git_value(value)


def git_value(text: str) -> str:
    """A value without its quotes, escapes and comment."""
    value, quoted, escaped = "", False, False
    for char in text.strip():
        if escaped or char not in '\\"#;' or (quoted and char in "#;"):
            value += char
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        else:
            break
    return value.strip()


def git_author(spec: Mapping[str, Any]) -> dict[str, str]:
    """The variables that name author and committer, as git on this machine would in the directory.

    Of the repository's own configuration, which the session may have written, only the names count:
    what it includes is not read.
    """
    git = f"{spec['directory']}/.git"
    folder = spec["git"]["common"] if spec.get("git") else "" if os.path.islink(git) else git
    if spec.get("workspace") == "copy" and (admin := linked_admin(spec["directory"])[1]):
        folder = os.path.dirname(os.path.dirname(admin))
    if (file := os.environ.get("GIT_CONFIG_GLOBAL")) is not None:
        files = [file]
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        files = [f"{base}/git/config", os.path.expanduser("~/.gitconfig")]
    known: dict[str, str] = {}
    for file in files:
        known.update(git_settings(file, folder))
    known.update(parse_git_config(read_small(f"{folder}/config") if folder else ""))
    env = {}
    for role in ("author", "committer"):
        for field in ("name", "email"):
            name = f"GIT_{role}_{field}".upper()
            value = (os.environ.get(name) or known.get(f"{role}.{field}")
                     or known.get(f"user.{field}"))
            if value and value.isprintable():
                env[name] = value
    return env


# --- Network ---
# A session with an allowlist has no network but its own loopback. Its init makes the listening
# socket of the proxy there and hands it to the proxy's container over a volume that the two share:
# see static/image/proxy.py.

NET_DIRECTORY = "/run/sandbox-net"
PROXY_URL = "http://127.0.0.1:3128"
# Waits until somebody listens on the port of the proxy or of the broker, or ten seconds.
LISTENING = """n=0; until grep -q '0100007F:%s 00000000:0000 0A' /proc/net/tcp || [ $n -gt 99 ]
do sleep 0.1; n=$((n+1)); done"""
PROXY_PORT, BROKER_PORT = "0C38", "0C39"
PROXY_PROGRAM = ("python3", "-I", "-S", "/usr/local/lib/sandbox/proxy.py")
BROKER_PROGRAM = (*PROXY_PROGRAM[:3], "/usr/local/lib/sandbox/broker.py")
CREATION_SECONDS = 3  # between the proxy of a session and its container
PROXY_MEMORY = "512m"  # 256 connections that nobody reads take 300 MB, with their sockets
KEPT_DIRECTORY = "/var/lib/sandbox-net"  # a volume of the proxy's own, unseen by the session


def proxy_argv(engine: Engine, session: Session, spec: Mapping[str, Any]) -> list[str]:
    """The engine call that starts the proxy of a session, on the engine's default network."""
    rules = spec["network"] if session.has_rules else {"allow": []}
    program = BROKER_PROGRAM if session.hides_keys else PROXY_PROGRAM
    return engine.create_argv(
        session.proxy, spec["image"], [*program, "serve"],
        labels={"sandbox.session": session.labels["sandbox.session"],
                "sandbox.proxy": session.name},
        workdir="/", service=True, limits={"pids-limit": 1024, "memory": PROXY_MEMORY},
        volumes=[f"{session.volume}:{NET_DIRECTORY}", KEPT_DIRECTORY],
        beside=[*filter(None, (session.home, session.copy))],
        env=[f"SANDBOX_SESSION={session.name}", f"SANDBOX_RULES={to_json(rules)}",
             f"SANDBOX_BROKER={KEPT_DIRECTORY}/broker.sock"],
        log_size="10m")


def set_argv(engine: Engine, session: Session, network: Any) -> list[str]:
    """The engine call that gives the proxy its rules."""
    return engine.exec_argv(session.proxy, [*PROXY_PROGRAM, "set"],
                            env=[f"SANDBOX_RULES={to_json(network)}"])


def set_rules(engine: Engine, session: Session, network: Any, start: bool = True) -> bool:
    """Put the rules in force. Where the proxy is down it is started, or this is False."""
    argv = set_argv(engine, session, network)
    if not Output(argv).result()[0]:
        return True
    if start:
        start_proxy(engine, session)
        engine.ask(argv)
        wait_for_gate(engine, session, PROXY_PORT)
    return start


def wait_for_gate(engine: Engine, session: Session, port: str) -> None:
    """The gate of a session that runs takes a moment to find a new proxy."""
    if session.state == "running":
        command = ["sh", "-c", LISTENING % port]
        Output(engine.exec_argv(session.id or session.name, command)).result()


def give_keys(engine: Engine, session: Session, config: Config, start: bool = True) -> bool:
    """Give the broker of a session its keys, where they are hidden. Where the broker is down it is
    started, or this is False.

    Raises SandboxError where they are not hidden and are to be, or cannot be.
    """
    check_keys(session.name, session.hides_keys, config)
    if not session.hides_keys:
        return True
    import sandbox_keys

    return sandbox_keys.give(engine, session, config, start)


def keep_budget(session: Session, flags: Layer) -> None:
    """Let a budget that flags give hold for good."""
    if session.hides_keys and "budget" in flags.values:
        with lock_settings(session.name):
            budget = {"budget": flags.values["budget"]}
            write_settings(session.name, read_settings(session.name) | budget)


def check_keys(name: str, hidden: bool, config: Config) -> None:
    """Raise SandboxError where the keys of a session are visible and must not be."""
    if hidden:
        return
    if config.get("budget"):
        raise SandboxError(f"a budget holds for hidden keys alone, and those of {name} are visible",
                           "say --keys hidden (sandbox recreate), or --budget ''", 125)
    if config.get("keys") == "hidden":
        raise SandboxError(f"the keys of {name} are visible, asked for is hidden",
                           f"sandbox recreate {name} --keys hidden, then run this again; or "
                           "--keys visible to go on as it is", 125)


def decision_of(line: str | bytes) -> Any:
    """A line of the proxy's log, or None for one that is no decision."""
    with suppress(ValueError):
        data = parse_json(line)
        return data if isinstance(data, dict) else None
    return None


def kept_seconds(engine: Engine, session: Session) -> int:
    """For an answer about what a proxy has kept: a host may have to start something that reads it.
    """
    return 6 * CALL_SECONDS if engine.host and session.state != "running" else CALL_SECONDS


def kept_decisions(engine: Engine, session: Session) -> list[dict[str, Any]]:
    """What the proxy has decided about each host, the first one asked for first.

    The log has room for the last ones only, and what runs in the session can fill it.
    """
    argv = engine.copy_argv(session.proxy, f"{KEPT_DIRECTORY}/decisions")
    # No output where nothing was decided yet, or an old proxy kept nothing. Else a tar archive: its
    # header is no decision, and NULs are before and behind the file.
    _, out, _ = Output(argv, kept_seconds(engine, session)).result()
    entries = filter(None, map(decision_of, out.replace("\0", "\n").split("\n")))
    return sorted(entries, key=lambda entry: str(entry["first"]))


def show_log(engine: Engine, session: Session, follow: bool) -> int:
    """Print the decisions that are in the log, and before them the hosts that came before these."""
    kept = kept_decisions(engine, session)
    gone, out, _ = Output(engine.logs_argv(session.proxy)).result()
    oldest = next(filter(None, map(decision_of, out.splitlines())), {"time": "9999"})["time"]
    for entry in kept:
        if entry["first"] < oldest:
            print(to_json(entry), flush=True)
    if gone and kept:  # a pod's log goes with it
        return 0
    return call(engine.logs_argv(session.proxy, follow=follow), output=1)


def refusals(engine: Engine, session: Session, since: float) -> list[str]:
    """A line for each of the first five hosts refused since a time, and for each kind of refusal
    of the broker: programs hide them.
    """
    if not session.proxy:
        return []
    out = ""
    with suppress(EngineProblem):  # a log that cannot be read must not hide the command's status
        _, out, _ = Output(engine.logs_argv(session.proxy, since=since)).result()
    entries = filter(None, map(decision_of, out.splitlines()))
    denied = {(e["host"], e["port"], e.get("kind") in BROKER_KINDS and e["kind"]): e
              for e in entries if e["verdict"] == "deny"}
    return [f"{session.name} was refused {e['host']} port {e['port']}: {e['reason']}"
            f"{remedy_of(session, e)}" for e in list(denied.values())[:5]]


BROKER_KINDS = ("key", "path", "budget", "turn", "upstream")


def remedy_of(session: Session, refusal: Mapping[str, Any]) -> str:
    """The command that allows what was refused, or where there is none that shows more; '' where
    the reason says it.
    """
    if refusal.get("kind") == "budget":
        return ""
    missing = str(refusal.get("address") or refusal["host"])
    rule = f"[{missing}]" if ":" in missing else missing
    rule += "" if refusal["port"] in (443, 80) else f":{refusal['port']}"
    with suppress(ValueError):
        if refusal.get("kind") in ("unlisted", "denied", "address-private", "address-denied"):
            words = ["sandbox", "net", "allow", session.name, a_rule(rule)]
            return f"; to allow it: {quote_all(words)}"
    return f"; see: sandbox net log {session.name}"


def start_proxy(engine: Engine, session: Session) -> None:
    """Start the proxy of a session, or make it again where it is gone. Raises SandboxError."""
    status, _, err = Output(engine.argv("start", session.proxy), LONG_SECONDS).result()
    if status and engine.is_absent(err):
        argv = proxy_argv(engine, session, session.created()[0])
        status, _, err = Output(argv, LONG_SECONDS).result()
    if status:
        raise engine.failure(err)


def remove_proxy(engine: Engine, session: Session) -> None:
    """Remove the proxy of a session and the volume they shared, as far as they are there."""
    if session.proxy:
        Output(engine.argv("remove", session.proxy), LONG_SECONDS).result()
        Output(engine.argv("remove-volume", session.volume)).result()


def network_of(session: Session, config: Config) -> Any:
    """The rules that hold for a session: those configured now, or those it was created with."""
    network = config.get("network")
    if network == "none":
        return {"allow": []}
    return network if isinstance(network, dict) else session.created()[0]["network"]


def put_rules(engine: Engine, session: Session, request: RunRequest, start: bool) -> bool:
    """Put an existing session's keys and rules in force, those of --allow and --net none for good.

    See set_rules().
    """
    keep_budget(session, request.flags)
    if not give_keys(engine, session, request.config, start):
        return False
    if not session.has_rules:
        return True
    with lock_settings(session.name):  # and read again: somebody may have changed them
        asked = is_closed(request.flags.values.get("network"))  # what it cannot be changes nothing
        config = session_config(session, None, request.flags if asked else None,
                                request.args.profile)
        network = network_of(session, config)
        if not set_rules(engine, session, network, start):
            return False
        if asked:
            had = network_of(session, session_config(session))
            if had.get("allow") and network == {"allow": []}:
                say(f"the rules of {session.name} are gone for good, and it reaches nothing; they "
                    f"were: {' '.join(had['allow'])}")
            write_settings(session.name, read_settings(session.name) | {"network": network})
    return True


def change_rules(engine: Engine, session: Session,
                 rules: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Allow or deny more hosts, from the next connection on and for good; all rules."""
    with lock_settings(session.name):
        settings = read_settings(session.name)
        network: dict[str, list[str]] = with_rules(
            network_of(session, session_config(session, settings)), rules)
        write_settings(session.name, settings | {"network": network})
        if session.state == "running":
            set_rules(engine, session, network)
    return network


def check_host(engine: Engine, session: Session, host: str) -> int:
    """Print the proxy's decision about a host; 0 when it is allowed."""
    argv = engine.exec_argv(session.proxy, [*PROXY_PROGRAM, "check", host])
    status, out, err = Output(argv, LONG_SECONDS).result()
    if not out:
        raise engine.failure(err)
    if decision := decision_of(out):  # marked as what it is: in the log such a line is traffic
        show(to_json({"check": True} | decision))
    return status


# --- Ports ---


def short_port(port: str) -> str:
    """A published port as `ps` shows it: 3000->80, behind its address where that is another one."""
    place, _, inner = port.removeprefix("127.0.0.1:").rpartition(":")
    return f"{place}->{inner}"


def ask_listeners(engine: Engine, name: str) -> Output:
    """The question for what listens in a running session, begun."""
    argv = engine.exec_argv(name, ["cat", "/proc/net/tcp", "/proc/net/tcp6"], user="0:0")
    return Output(argv, LIST_SECONDS)


def unheard_ports(engine: Engine, name: str, ports: Sequence[str],
                  asked: Output | None = None) -> list[str]:
    """A line for each published port on which a program in a running session listens in vain.

    What listens on 127.0.0.1 inside is not reached from outside.
    """
    inner = {int(port.partition("/")[0].rpartition(":")[2]): port for port in ports
             if not port.endswith("/udp")}
    out = ""
    with suppress(EngineProblem):
        asked = asked or (ask_listeners(engine, name) if inner else None)
        out = asked.result(LISTENERS_BYTES)[1] if asked else ""
    heard: dict[int, set[str]] = {}
    for fields in map(str.split, out.splitlines()):
        if len(fields) > 3 and fields[3] == "0A":  # it listens
            address, _, number = fields[1].partition(":")
            with suppress(ValueError):
                heard.setdefault(int(number, 16), set()).add(address)
    return [f"nobody reaches port {short_port(port)} of {name}: what listens there does so on "
            "127.0.0.1 inside; start it with 0.0.0.0 as its address (often --host 0.0.0.0)"
            for number, port in inner.items()
            if (found := heard.get(number)) and all(map(is_loopback, found))]


LISTENERS_BYTES = 1 << 20


def is_loopback(address: str) -> bool:
    """Whether an address of /proc/net/tcp or tcp6, in words of which each is reversed, is one."""
    four = address.removeprefix("0000000000000000FFFF0000")
    return (len(four) == 8 and four.endswith("7F")) or address == "0" * 24 + "01000000"


# --- Commands in a session ---


TELLING = {"--version", "-v", "-V", "--help", "-h"}  # options of agents that end at once


class RunRequest:
    """One `run`, decided and not yet carried out."""

    def __init__(self, args: argparse.Namespace, *, look: bool) -> None:
        self.args = args
        self.looked = look
        self.flags = self.kept = flags_layer(args)  # what was given, and of it what is kept
        data = read_config()
        self.config = load_config(self.flags, args.profile, data=data)
        current_directory()  # raises when it is gone
        name_of = self.flags.values.get if args.source else self.config.get
        self.name = "" if args.new else name_of("containerName") or ""
        self.engines = candidates(self.config)
        self.session: Session | None = None
        self.source: Session | None = None  # what it is to be a duplicate of
        self.left: Session | None = None  # of this name, whose container is gone
        self.fresh = False  # whether this run has started the container
        self.tags: list[str] = []  # of what it has run
        self.turn: Turn | None = None  # begun and not yet entered
        if self.name:
            known = recall(self.engines, self.name)
            if not known:
                self.engines[0].ask_ahead()
            self.looked = look or not known or not known[1].id
            found = None if self.looked else known
            if found and has_ended(found[1]):
                engine, session = find_session(self.engines, self.name)
                if session:  # where it is gone, what follows says so
                    found, self.looked = (engine, session), True
            engine, self.session = found or find_settled(self.engines, self.name)
            self.engines = [engine]
            if known and not self.session:
                check_gone(known[1], self.config)
                self.left = known[1]
        if self.session and args.source:
            raise SandboxError(f"there is a session {self.name} already",
                               "choose another name with -n", 125)
        if self.session:
            self.adopt(self.session, data)
        else:
            self.spec = spec_of(self.config, self.engines)
            if args.source:
                self.take_after(*find_given(self.engines, args.source, "--from", 125))
            self.name = self.name or generated_name(self.config.get("hostPath"))
            check_keys(self.name, self.spec["keys"] == "hidden", self.config)
            if not args.allow_engine_socket:
                check_mounts(self.spec)
            check_spec(self.spec)
        self.env = exec_env(self.config, self.spec)
        if self.spec["keys"] == "hidden":
            import sandbox_keys

            sandbox_keys.say_visible(self.name, self.config, self.spec)
        before = self.session or self.source
        given = before.variables() if before and self.agent else []
        if lost := [name for name in (item.rstrip("=") for item in given) if name not in self.env]:
            say(f"{self.name} was created with -e {' '.join(lost)}, whose value is not kept: "
                "give it again")

    def adopt(self, session: Session, data: Mapping[str, Any]) -> None:
        """Take profile, flags and directory from a session, and say in what it differs."""
        have, _ = session.created()
        check_owner(session)
        if not session.is_ours:
            say(f"{session.name} was not made from here: the profile, env files, variables and "
                "agent that its labels name are not taken, nor are snapshots")
        mode, asked = have.get("workspace", "mount"), self.config.get("workspace")
        if self.config.is_given("workspace") and asked != mode:
            works = "a copy" if mode == "copy" else "the directory itself"
            message = f"{session.name} works on {works}, for good"
            if "workspace" in self.flags.values:  # an agent would write where it was not to
                raise SandboxError(message, "choose another name with -n, or --new", 125)
            say(message)
        self.config = session_config(session, None, self.flags, self.args.profile, data)
        self.spec = spec_of(self.config)
        if not self.config.is_given("hostPath"):
            if within(self.spec["directory"], have["directory"]) is None:
                say(f"{session.name} works on {have['directory']}; "
                    f"{self.spec['directory']} is not mounted in it")
            place = {key: have[key] for key in ("directory", "workdir")}
            if any(self.spec[key] != value for key, value in place.items()):
                self.spec.update(place)
                self.spec["git"] = git_of(self.spec)
        self.spec["protect"] = protected_of(self.config, {**self.spec, "workspace": mode})
        self.spec["sources"] = have.get("sources")  # said by directory and volumes
        if session.is_elsewhere:  # what has the same path here is none of its
            self.spec |= {key: have.get(key) for key in ("git", "protect")}
        check_keys(session.name, session.hides_keys, self.config)
        again = partial(recreate_command, session, self.flags, self.args.profile)
        check_isolation(session, have.get("network"), self.spec["network"], again)
        for line in (lines := differences(have, self.spec)):
            say(f"{session.name} differs from what is asked for: {line}")
        if lines:
            say(f"to create it anew, with its conversations: {again()}")
        self.spec["keys"] = have.get("keys")

    def take_after(self, engine: Engine, source: Session) -> None:
        """Plan a duplicate of a session. The ports that it was given are its own."""
        self.engines, self.source = [engine], source
        flags = Layer({"ports": [], **self.flags.values}, "flags")
        flags.variables = self.flags.variables
        self.settings = settings_beside(source, flags)
        self.config, self.kept, self.spec = recreation(source, flags, self.args.profile)

    def workdir(self) -> str:
        """The current directory as the container sees it, or the top of what is mounted."""
        inner = within(current_directory(), self.spec["directory"])
        return os.path.join(self.spec["workdir"], inner) if inner else str(self.spec["workdir"])

    def base(self) -> str | list[str]:
        """The command without the arguments that follow `--`."""
        yolo = self.config.get("yolo")
        return AGENTS[yolo].yolo if yolo else self.config.get("command") or SHELL

    @property
    def agent(self) -> str:
        return self.config.get("yolo") or agent_of(self.base())

    @property
    def is_passing(self) -> bool:
        """Whether an agent is only asked for an answer, and there is nothing to come back to."""
        return bool(self.agent and self.words() & TELLING.union(AGENTS[self.agent].headless))

    def words(self) -> set[str]:
        """The words of the command, without the values of its options."""
        base = self.base()
        return {word.partition("=")[0] for word in [*(base.split() if isinstance(base, str)
                                                      else base), *self.args.agent_args]}

    @property
    def only_tells(self) -> bool:
        """Whether an agent is asked for its version or its help and for nothing else."""
        asked = self.words().difference(AGENTS[self.agent].yolo) if self.agent else set()
        return bool(asked) and asked <= TELLING

    def start_turn(self, engine: Engine, session: Session) -> Turn | None:
        """Ask for the first snapshot of a turn, while the session is being created."""
        self.turn = self.turn_of(engine, session, compose(self.base(), self.args.agent_args))
        if self.turn:
            self.turn.start()
        return self.turn

    def turn_of(self, engine: Engine, session: Session, command: list[str]) -> Turn | None:
        """The turn that a command is, None for none."""
        agent = self.agent
        ours = [self.args.agent_args, *([AGENTS[agent].resume] if agent else [])]
        if command not in [compose(self.base(), args) for args in ours]:
            agent = ""  # the person has said so at the prompt
        if self.only_tells:
            return None
        words = command
        if agent and self.config.get("yolo"):  # without what we have added
            told = command[len(self.base()):]
            words = [command[0], *(word.partition("\n")[0] for word in told)]
        about = {"id": random_id(), "what": "agent" if agent else "command",
                 "command": title_of(words)}
        turn = wanted_turn(self.config, engine, session, about, bool(agent))
        if turn:
            turn.prompts = (bool(agent) and not self.is_passing
                            and (on_terminal() or self.args.background))
        return turn


def wanted_turn(config: Config, engine: Engine, session: Session, about: Mapping[str, str],
                agent: bool) -> Turn | None:
    """The turn that a command of an agent, or another one, is to be; None for none. Raises
    SandboxError where there should be one and cannot.
    """
    value = config.get("checkpoint")
    if value is False or not (agent or value is True):
        return None
    if not session.is_ours:
        if value == "try":
            return None
        raise SandboxError(f"{session.name} was not made from here: nothing is kept of its changes",
                           "--no-checkpoint, or \"checkpoint\": \"try\", goes on without", 125)
    import sandbox_changes as changes

    return changes.Turn(engine, session, about, changes.bounds(config), value != "try")


def check_owner(session: Session) -> None:
    """Raise SandboxError when a session is another user's; users of another machine are others."""
    if not session.is_elsewhere and session.user.split(":")[0] not in ("0", str(os.getuid())):
        raise SandboxError(f"the session {session.name} is another user's",
                           "choose another name with -n", 125)


def check_isolation(session: Session, have: Any, want: Any, again: Callable[[], str]) -> None:
    """Raise SandboxError when a session's network is open and is not to be: a line goes unread."""
    if have in ("open", "host") and want not in ("open", "host"):
        raise SandboxError(f"the network of {session.name} is {have}, asked for is {shown(want)}",
                           f"{again()}, then run this again; or --net {have} to go on as it is",
                           125)


def check_gone(session: Session, config: Config) -> None:
    """Raise SandboxError where other hands removed a session without open network, or with hidden
    keys, and its flags.
    """
    had = {"allow": "an allowlist", "none": "none"}.get(session.labels.get("sandbox.network", ""))
    if session.hides_keys and not config.is_given("keys"):
        raise SandboxError(f"the container {session.name} is gone, and its keys were hidden",
                           "say what they are to be now: --keys hidden or --keys visible", 125)
    if had and not config.is_given("network"):
        raise SandboxError(f"the container {session.name} is gone, and its network was {had}",
                           "say what it is to be now: --allow HOST, --net none or --net open", 125)


def within(path: str, folder: str) -> str | None:
    """The path relative to a folder that holds it ('' for the folder itself), or None."""
    if path == folder:
        return ""
    folder = folder.rstrip("/") + "/"
    return path.removeprefix(folder) if path.startswith(folder) else None


def generated_name(directory: str) -> str:
    """A name for a new container: the directory's, made fit, and a random part."""
    stem = "".join(c if is_plain(c, "") else "-"
                   for c in os.path.basename(directory).lower()).strip("-")
    return f"{stem[:30] or 'sandbox'}-{random_id()}"


def exec_env(config: Config, spec: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a command, without those of its terminal; `spec` is the session's."""
    env = {"HOME": CONTAINER_HOME, **git_author(spec), **host_zone()}
    for agent in AGENTS.values():
        env.update(agent.env)
    env.update(AGENTS[config.get("yolo")].yolo_env if config.get("yolo") else {})
    env.update((name, value) for name, (value, _) in config.env().items())
    if script := config.get("autostart"):
        env["SANDBOX_AUTOSTART"] = f"cd {quote_all([spec['workdir']])}\n{script}"
    if spec.get("keys") == "hidden":
        import sandbox_keys

        env, _ = sandbox_keys.hide(env)
    return env


def host_zone() -> dict[str, str]:
    """The variable TZ with this machine's time zone, where that is known by its name."""
    zone = os.environ.get("TZ", "").removeprefix(":")
    if not zone:
        with suppress(OSError):
            zone = os.readlink("/etc/localtime").partition("/zoneinfo/")[2]
    return {"TZ": zone} if zone and zone.isprintable() and not zone.startswith("/") else {}


def terminal_env() -> dict[str, str]:
    """What a program must know of our terminal, with a TERM that most containers know."""
    term = os.environ.get("TERM", "")
    families = ("xterm", "screen", "tmux", "linux", "vt", "dumb")
    known = term.startswith(families) and not term.startswith("xterm-")
    color = os.environ.get("COLORTERM")
    return {"TERM": term if known else "xterm-256color"} | ({"COLORTERM": color} if color else {})


def env_script(env: Mapping[str, str]) -> str:
    """The variables as a script for exec_script(). Raises SandboxError over the kernel's limit."""
    script = "\n".join("export " + name + "='" + value.replace("'", "'\\''") + "'"
                       for name, value in env.items())
    if len(os.fsencode(script)) > ENVIRONMENT_BYTES:
        message = f"the environment has {len(script)} bytes, more than {ENVIRONMENT_BYTES}"
        raise SandboxError(message, "mount large values as files", 125)
    return script


def compose(command: str | Sequence[str], args: Sequence[str]) -> list[str]:
    """The words to exec: a string goes to a shell, with the arguments behind its last command."""
    if isinstance(command, str):
        return ["sh", "-c", f'{command} "$@"', "sh", *args] if args else ["sh", "-c", command]
    return [*command, *args]


def once(make: Callable[[], str]) -> Callable[[], str]:
    """A function that is called once, and then known."""
    made: list[str] = []

    def get() -> str:
        if not made:
            made.append(make())
        return made[0]

    return get


@once
def exec_script() -> str:
    """What runs before every command, without its comments: it goes into each call."""
    lines = asset("session/exec.sh").decode().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def exec_argv(engine: Engine, session: Session, workdir: str, tag: str, command: Sequence[str], *,
              stdin: bool = False, size: tuple[int, int] | None = None) -> list[str]:
    """The engine call that runs a command in a session; with `size` (rows, columns) on a terminal.

    The caller puts env_script() into SANDBOX_ENV of the call's environment.
    """
    rows, columns = size or (0, 0)
    return engine.exec_argv(
        session.id or session.name,
        ["sh", "-c", exec_script(), "sandbox", str(rows), str(columns), *command],
        user=session.user, workdir=workdir, env=["SANDBOX_ENV", f"SANDBOX_EXEC={tag}"],
        stdin=stdin, terminal=size is not None)


def send_tagged(engine: Engine, session: Session, tag: str, name: str,
                grace_seconds: int) -> Output:
    """A signal for all that a tagged exec has started, begun."""
    command = ["sh", "-c", asset("session/signal.sh").decode(), "sandbox", name, tag,
               str(grace_seconds)]
    argv = engine.exec_argv(session.id or session.name, command, user=session.user)
    return Output(argv, CALL_SECONDS + grace_seconds)


def signal_tagged(engine: Engine, session: Session, tag: str, name: str,
                  grace_seconds: int) -> None:
    """The same, and wait for it; where the engine does not answer that is no failure."""
    with suppress(EngineProblem):
        send_tagged(engine, session, tag, name, grace_seconds).result()


def on_terminal() -> bool:
    return os.isatty(0) and os.isatty(1)  # sys.stdin is None when it was closed


def terminal_size(fd: int) -> tuple[int, int]:
    size = os.get_terminal_size(fd)
    return (size.lines, size.columns) if size.lines and size.columns else (24, 80)


def run_command(engine: Engine, session: Session, request: RunRequest, command: Sequence[str],
                tag: str) -> int:
    """Run a command in a session on our own stdin, stdout and stderr; its exit status.

    A client of the engine that is cut off leaves its process running inside, so a signal that
    reaches us is sent on to what carries this run's tag.
    """
    terminal = on_terminal()
    if request.args.background:
        return start_held(engine, session, request, command, tag)
    if terminal and not is_unheld(session):
        try:
            return run_held(engine, session, request, command, tag)
        except CannotHold as error:
            say(f"{error.message}; it ends with this one")
    argv = exec_argv(engine, session, request.workdir(), tag, command,
                     stdin=terminal or not os.isatty(0),
                     size=terminal_size(1) if terminal else None)
    script = env_script((terminal_env() if terminal else {}) | request.env)

    def pass_on(number: int, _frame: object) -> None:
        name = signal_name(number)
        signal_tagged(engine, session, tag, name, 0 if name == "INT" else 5)

    def resize_again(number: int, _frame: object) -> None:
        if number == signal.SIGWINCH:
            signal.setitimer(signal.ITIMER_REAL, RESIZE_AGAIN_SECONDS)
        elif pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGWINCH)

    if terminal:
        import termios

        mode = termios.tcgetattr(0)
    pid = 0
    handlers: dict[int, Any] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), pass_on)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
        handlers[signal.SIGHUP] = pass_on
    if terminal:  # docker's client loses a resize while it starts
        handlers.update(dict.fromkeys((signal.SIGWINCH, signal.SIGALRM), resize_again))
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        pid = engine.spawn(argv, {**os.environ, "SANDBOX_ENV": script}, own_group=not terminal)
        if engine.host and not terminal:
            import sandbox_hosts

            return sandbox_hosts.wait_for(engine, pid)
        return wait_for(pid)
    finally:
        if terminal:  # an engine's client that is killed leaves it raw, and it may be gone
            with suppress(termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, mode)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def check_begun(engine: Engine, session: Session, tag: str, status: int, fresh: bool) -> None:
    """Raise NotBegun when a container has ended and does not show that the command began before.

    Nothing is removed: what runs in the container could bring all of this about.
    """
    state, code = end_of(engine, session, status)
    if state == "running":
        return
    begun = has_begun(engine, session, tag)
    if begun:
        return
    sure = begun is False
    if not sure:
        look_next_time(engine, session)
    if fresh and 0 < code < 128:  # it ended by itself: one that is stopped ends by a signal
        lines = [f"the container {session.name} ended as soon as it was started",
                 *last_lines(engine, session)]
        hint = f"correct the image or the mounts, then: sandbox recreate {session.name}"
        raise NotBegun("\n".join(lines), hint, 125, sure=sure)
    message = f"the container {session.name} is {state or 'gone'}"
    if sure:
        raise NotBegun(message, "run this again", 125, sure=True)
    raise NotBegun(f"{message}, and whether the command began is not known",
                   "it is not run again by itself: look at what it has done, then run this again",
                   status, sure=False)


def end_of(engine: Engine, session: Session, status: int) -> tuple[str, int]:
    """The state of a container, '' when it is gone, and the status it ended with."""
    for _ in range(5):  # the engine learns of the end of its processes one by one
        gone, out, err = Output(engine.inspect_argv(session.id)).result()
        if gone and engine.is_absent(err):
            return "", 0
        if gone:
            raise engine.failure(err)
        _, _, state, code, _, _ = engine.read_inspected(out)
        if state == "exited" or (state == "running" and status != KILLED):
            break
        time.sleep(0.1)
    return state, code


def has_begun(engine: Engine, session: Session, tag: str) -> bool | None:
    """Whether a command has left its mark in a container, which need not run; None for unknown."""
    status, out, _ = Output(engine.copy_argv(session.id, "/run/sandbox-began")).result(BEGAN_BYTES)
    # The answer is a tar archive: its header ends with NUL, and the file begins with "sandbox".
    _, head, marks = out.partition("\0sandbox\n")
    return None if status or not head else f"{tag}\n" in marks


def last_lines(engine: Engine, session: Session) -> list[str]:
    """The last lines of a container's own log, for a person."""
    _, out, err = Output(engine.logs_argv(session.id, tail=3)).result(LOG_TAIL_BYTES)
    return [line[:300] for line in (out + err).strip().splitlines()[-3:]]


# --- Terminals ---
# What runs on a terminal belongs to its session: a holder inside has the terminal, and clients
# attach to it. What they speak, and why, is said in static/session/hold.py.

# The session keeps what its Python has made of the source: to compile it takes 5 ms of each start.
# Who may write there is the user that runs it, who gains nothing.
HOLD = ["python3", "-I", "-S", "-c", """\
import marshal, os, sys
argv, source = os.environ.pop("SANDBOX_HOLD").split("\\n", 1)
sys.argv[1:] = eval(argv)
path = "/run/sandbox/hold-%x" % sys.hexversion
try:
    with open(path, "rb") as file:
        kept, code = marshal.loads(file.read())
    if kept != source:
        raise ValueError
except (OSError, EOFError, TypeError, ValueError):
    code = compile(source, "hold.py", "exec")
    try:
        with open(path, "wb") as file:
            file.write(marshal.dumps((source, code)))
    except OSError:
        pass
exec(code)
"""]
RING_BYTES = 1 << 20  # what is kept of the output
FRAME_BYTES = 65536  # no holder sends a longer one
LIST_BYTES = 1 << 20
LIST_SECONDS = 5
LISTED = 100  # terminals of a session, the newest; a hundred is more than the web serves


@once
def hold_source() -> str:
    """The holder's program, without its docstring and comments: it goes into each call."""
    lines = asset("session/hold.py").decode().split('"""', 2)[2].splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def hold_argv(engine: Engine, session: Session, workdir: str, tag: str) -> list[str]:
    """The engine call that starts a program on a terminal which is held, and is its first client.

    Its environment is hold_environ(); the tag is the terminal's id, too.
    """
    return engine.exec_argv(
        session.id or session.name, ["sh", "-c", exec_script(), "sandbox", "hold", "0", *HOLD],
        user=session.user, workdir=workdir, stdin=True,
        env=["SANDBOX_ENV", f"SANDBOX_EXEC={tag}", "SANDBOX_HOLD"])


def attach_argv(engine: Engine, session: Session) -> list[str]:
    """The engine call for the other things that the holder's program does; see hold_environ()."""
    return engine.exec_argv(session.id or session.name, HOLD, user=session.user, stdin=True,
                            env=["SANDBOX_HOLD"])


def hold_environ(script: str, *words: object) -> dict[str, str]:
    """The environment of such a call: env_script(), and what the holder's program is to do.

    Not as arguments: in the session each process sees those of the others. Raises SandboxError.
    """
    hold = f"{[*map(str, words)]!r}\n{hold_source()}"
    if len(os.fsencode(hold)) > ENVIRONMENT_BYTES:
        raise SandboxError("the command is too long for a terminal", "put it into a file", 125)
    return {**os.environ, "SANDBOX_HOLD": hold} | ({"SANDBOX_ENV": script} if script else {})


def frame(kind: bytes, data: bytes = b"") -> bytes:
    return kind + len(data).to_bytes(4, "big") + data


class Frames:
    """The frames in what a client of a holder prints, which anything in a session may forge."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Kind and content of each whole frame. Raises ValueError for what is none."""
        self.rest += data
        frames, at = [], 0
        while len(self.rest) - at >= 5:
            size = int.from_bytes(self.rest[at + 1 : at + 5], "big")
            if self.rest[at] not in b"hmosen" or size > FRAME_BYTES:
                raise ValueError("it is no frame of a holder")
            if len(self.rest) - at < 5 + size:
                break
            frames.append((bytes(self.rest[at : at + 1]), bytes(self.rest[at + 5 : at + 5 + size])))
            at += 5 + size
        del self.rest[:at]
        return frames


def numbers_of(data: bytes) -> list[int]:
    """The numbers in a frame. Raises ValueError for one that no holder sends."""
    numbers = [int(word) for word in data[:100].split()]
    if not all(0 <= number < 1 << 62 for number in numbers):
        raise ValueError("it is no number of a holder")
    return numbers


class Held:
    """A terminal as `list` of hold.py shows it; started and ended in seconds, -1 clients where the
    holder is lost, None for what is not known.
    """

    def __init__(self, line: str) -> None:
        """Raises ValueError for a line that is none."""
        import re

        found = re.fullmatch(r"([0-9a-f]{10}) (\d{1,11}\.\d{3}) (?:(\d{1,11}\.\d{3})|-) "
                             r"(?:(\d{1,3})|-) (?:(\d{1,4})|-|(lost)) (?:(\d{1,4})|-) "
                             r"(?:(\d{1,4})|-) (.*)", line, re.ASCII)
        if not found:
            raise ValueError("it describes no terminal")
        self.id, self.title = found[1], printable(found[9])[:200]
        self.started, self.ended = float(found[2]), float(found[3]) if found[3] else None
        self.status, clients, self.rows, self.columns = (
            int(found[at]) if found[at] else None for at in (4, 5, 7, 8))
        self.clients = -1 if found[6] else clients

    @property
    def runs(self) -> bool:
        return self.status is None and self.clients != -1


def list_terminals(engine: Engine, session: Session,
                   seconds: float = LIST_SECONDS) -> list[Held]:
    """The terminals of a running session that are there, the oldest first."""
    return read_terminals(ask_terminals(engine, session, seconds))


def ask_terminals(engine: Engine, session: Session, seconds: float = LIST_SECONDS) -> Output:
    """The question for the terminals of a session, begun."""
    return Output(attach_argv(engine, session), seconds, hold_environ("", "list"))


def read_terminals(asked: Output) -> list[Held]:
    """The answer; [] where there is none, as in a session of an earlier version."""
    terminals = []
    for line in asked.result(LIST_BYTES)[1].split("\n"):
        with suppress(ValueError):
            terminals.append(Held(line))
    return terminals[-LISTED:]


class DetachKeys:
    """Finds the keys that detach in what is typed, in each way in which terminals send keys."""

    def __init__(self, keys: str) -> None:
        self.keys = [key.encode() if len(key) == 1 else bytes([ord(key[5].upper()) & 31])
                     for key in keys.split(",") if key]
        self.found = 0
        self.held = self.part = b""  # keys that may go on to be those, and a part of a key

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """What is for the program, and whether all keys have come."""
        import re

        data, self.part, passed = self.part + data, b"", b""
        if not self.keys or not (self.held or self.keys[0] in data or b"\x1b[" in data):
            return data, False
        if part := re.search(rb"\x1b\[\d[\d;:]*\Z", data):
            data, self.part = data[: part.start()], part[0]
        for token in re.findall(rb"\x1b\[[0-?]*[@-~]|.", data, re.DOTALL):
            key = key_of(token)
            if key == self.keys[self.found]:
                self.found, self.held = self.found + 1, self.held + token
                if self.found == len(self.keys):
                    return passed, True
            elif self.found and not key:
                self.held += token
            else:  # the first key twice is that key once
                twice = self.found == 1 and key == self.keys[0]
                passed += token if twice else self.held + token
                self.found, self.held = 0, b""
        return passed, False

    def give_up(self) -> bytes:
        """What was held back: nothing has followed it for a moment."""
        held, self.found, self.held, self.part = self.held + self.part, 0, b"", b""
        return held


def key_of(token: bytes) -> bytes:
    """The byte that a key sends to a plain terminal, b"" for its release and for a lone Shift.

    The token is a byte or a sequence of the kitty keyboard protocol or of xterm's modifyOtherKeys.
    """
    import re

    found = re.fullmatch(rb"\x1b\[27;(\d{1,3});(\d{1,6})~|"
                         rb"\x1b\[(\d{1,6})[:\d]*(?:;(\d{0,3})(?::(\d))?(?:;[:\d]*)?)?u", token)
    if not found:
        return token
    code, modifiers = int(found[2] or found[3]), int(found[1] or found[4] or 1) - 1
    if found[5] == b"3" or 57441 <= code <= 57454:
        return b""
    modifiers &= ~(64 | 128)  # Caps Lock and Num Lock
    if code < 127 and modifiers in (0, 4):
        return bytes([code & 31 if modifiers else code])
    return token


class Screen:
    """What a program has switched on in our terminal, so that it can be switched off."""

    ON = (b"7", b"8", b"25")  # these are on before: wrapping, repeating, the cursor
    ALTERNATE = (b"47", b"1047", b"1049")

    def __init__(self) -> None:
        self.rest = b""
        self.modes: dict[bytes, bool] = {}  # those that are not as before
        self.keyboards = {False: 0, True: 0}  # pushed in the main and in the alternate screen
        self.others: dict[bytes, bytes] = {}

    @property
    def alternate(self) -> bool:
        return any(mode in self.modes for mode in self.ALTERNATE)

    def scan(self, data: bytes) -> None:
        import re

        if not self.rest and b"\x1b" not in data:
            return
        data, self.rest = self.rest + data, b""
        if part := re.search(rb"\x1b(\[[?<>=]?[\d;]{0,20} ?)?\Z", data):
            self.rest = part[0]
        for kind, numbers, last in re.findall(rb"\x1b(?:\[([?<>=]?)([\d;]*)(h|l|m|u| q))", data):
            if kind == b"?" and last in b"hl":
                for mode in numbers.split(b";"):
                    self.modes.pop(mode, None)
                    if (last == b"h") != (mode in self.ON) and len(self.modes) < 100:
                        self.modes[mode] = last == b"h"
            elif kind + last == b">u":
                self.keyboards[self.alternate] += 1
            elif kind + last == b"<u":
                left = self.keyboards[self.alternate] - int(numbers.partition(b";")[0][:3] or 1)
                self.keyboards[self.alternate] = max(0, left)
            elif kind + last == b"=u":
                self.others[b"u"] = b"\x1b[=0u"
            elif kind + last == b">m" and numbers[:1] == b"4":
                self.others[b"m"] = b"\x1b[>4m"
            elif kind + last == b" q":
                self.others[b"q"] = b"\x1b[0 q"

    def restore(self, left: bool) -> bytes:
        """What brings the terminal back, for one that was `left` in the middle of anything."""
        off = b"".join(b"\x1b[?" + mode + (b"l" if on else b"h") for mode, on in self.modes.items())
        off = b"".join(self.others.values()) + self.pop(self.alternate) + off
        off += self.pop(False) if self.alternate else b""
        return b"\x1b\\\x1b[m\x1b(B\x1b>" + off + b"\r\n\x1b[J" if left else off

    def pop(self, alternate: bool) -> bytes:
        count = min(self.keyboards[alternate], 99)
        return b"\x1b[<%du" % count if count else b""


def without_questions(output: bytes) -> bytes:
    """Output that was kept, without what a terminal would answer: nobody waits for it any more."""
    import re

    return re.sub(rb"\x05|\x1bZ|\x1b\[(?:[>=]?[\d;]*c|\??[\d;]*n|\??[\d;]*\$p|>[\d;]*q|\?u|[\d;]*x"
                  rb"|(?:1[1-9]|2[01])[\d;]*t)|\x1bP[+$]q[^\x1b]*\x1b\\"
                  rb"|\x1b\](?:4|5|1\d|21|52);[^\a\x1b]*\?(?:\a|\x1b\\)"
                  rb"|\x1b_G[^\x1b]*\x1b\\", b"", output)


def without_part(output: bytes) -> bytes:
    """Output that may begin within a line or a sequence, from the next one on."""
    ends = [at for at in (output.find(b"\n", 0, 4096), output.find(b"\x1b", 0, 4096)) if at >= 0]
    return output[min(ends, default=0) :]


class HungUp(BaseException):
    """Our own terminal is gone."""


class Attachment:
    """Our terminal, or with `typing` False our stdout alone, joined to a terminal that a session
    holds, through a client of the engine.

    How it ended: `refused` is the reason why there is nothing to join, `ended` is True where the
    program has ended, with `status` where that is known, `left` where we have left it. Else the
    connection was lost or never made, and `code` is the status of the engine's client.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], *, typing: bool,
                 keys: str = "", kept: bool = False, follow: bool = True) -> None:
        """`kept` output comes first; without `follow` nothing else does."""
        self.typing, self.kept, self.follow = typing, kept, follow
        self.keys, self.screen, self.frames = DetachKeys(keys), Screen(), Frames()
        self.heard = self.ended = self.left = self.closing = False
        self.refused = ""
        self.status: int | None = None
        self.code = 0
        self.position = self.until = 0  # of the output, and of what was kept of it
        self.replay, self.cut = b"", False
        self.input, self.errors = b"", b""
        self.resized = False
        self.waits: dict[str, float] = {}  # until when, by what is done then
        stdin, self.to = os.pipe()
        self.out, stdout = os.pipe()
        self.err, stderr = os.pipe()
        os.set_blocking(self.to, False)
        try:
            self.pid = spawn(argv, env=environ, fds={0: stdin, 1: stdout, 2: stderr},
                             own_group=True)
        except BaseException:
            Output.close(self.to, self.out, self.err)
            raise
        finally:
            Output.close(stdin, stdout, stderr)

    def run(self, handlers: dict[int, Any]) -> None:
        """Go on until one of the ends, with these handlers of signals."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)

        if self.typing:
            import termios
            import tty

            handlers[signal.SIGWINCH] = lambda number, frame: setattr(self, "resized", True)
            mode = termios.tcgetattr(0)
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        old = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            if self.typing:
                tty.setraw(0, termios.TCSANOW)
            while self.step(woken):
                pass
        except HungUp:
            self.code = 128 + signal.SIGHUP
        except KeyboardInterrupt:  # it may never begin
            os.kill(self.pid, signal.SIGKILL)
            raise
        finally:
            self.closing = True
            if os.isatty(1):
                self.write(self.screen.restore(self.left and self.typing))
            if self.typing:
                with suppress(termios.error):
                    termios.tcsetattr(0, termios.TCSADRAIN, mode)
            self.close()
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            Output.close(woken, wake)

    def hang_up(self, *_: object) -> None:
        """Leave, whatever it waits for; also the handler of a signal."""
        if not (self.left or self.closing):
            self.left = True
            raise HungUp

    def step(self, woken: int) -> bool:
        """Wait for something and do what it takes; False at the end."""
        import select

        poller = select.poll()
        for fd in (self.out, self.err, woken):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        if self.typing and len(self.input) < 65536:
            poller.register(0, select.POLLIN)
        if self.input and self.to >= 0:
            poller.register(self.to, select.POLLOUT)
        left = min(self.waits.values(), default=0) - time.monotonic()
        ready = [fd for fd, _ in poller.poll(max(0, left) * 1000 if self.waits else None)]
        self.look_at_clock()
        if woken in ready:
            os.read(woken, 4096)
        if self.resized:
            self.resized = False
            self.send(b"r", self.size())
        if self.err in ready:
            self.read_errors()
        if 0 in ready and self.typing and self.read_keys():
            return False
        if self.to in ready:
            self.push()
        return self.out not in ready or self.read_output()

    def size(self, less: int = 0) -> bytes:
        rows, columns = terminal_size(1)
        return f"{max(1, rows - less)} {columns}".encode()

    def look_at_clock(self) -> None:
        for what in [what for what, end in self.waits.items() if end <= time.monotonic()]:
            del self.waits[what]
            if what == "keys":
                self.send(b"i", self.keys.give_up())
            else:
                self.send(b"r", self.size())

    def read_errors(self) -> None:
        data = os.read(self.err, 65536)
        self.errors += data[: 65536 - len(self.errors)]
        if not data:
            os.close(self.err)
            self.err = -1

    def read_keys(self) -> bool:
        """Pass on what was typed; whether it asks to leave."""
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.hang_up()
        if not self.heard and b"\x03" in data:  # nobody is there yet who would take it
            raise KeyboardInterrupt
        data, self.left = self.keys.feed(data)
        self.waits.pop("keys", None)
        if self.keys.held or self.keys.part:
            self.waits["keys"] = time.monotonic() + KEY_SECONDS
        self.send(b"i", data)
        return self.left

    def send(self, kind: bytes, data: bytes) -> None:
        if data:
            self.input += frame(kind, data)
            self.push()

    def push(self) -> None:
        try:
            self.input = self.input[os.write(self.to, self.input) :] if self.to >= 0 else b""
        except BlockingIOError:
            pass
        except OSError:  # the engine's client is gone; the end of its output says so
            os.close(self.to)
            self.to, self.input = -1, b""

    def read_output(self) -> bool:
        data = os.read(self.out, 65536)
        try:
            for kind, content in self.frames.feed(data):
                self.obey(kind, content)
        except ValueError as error:
            self.errors += f"sandbox: {error}\n".encode()
            return False
        return bool(data) and not (self.kept and not self.follow and self.heard
                                   and self.position >= self.until)

    def obey(self, kind: bytes, content: bytes) -> None:
        if kind == b"n":
            self.refused = one_line(content.decode(errors="replace"))[:200]
        elif kind == b"h":
            replaying = self.kept and (not self.heard or self.position < self.until)
            self.position, _, _, end = numbers_of(content)
            self.until = min(end, self.position + RING_BYTES) if replaying else self.position
            self.replay = b""
            self.cut, self.heard = replaying and self.position > 0, True
        elif kind == b"m":
            self.write(content)
        elif kind == b"o":
            self.show(content)
        elif kind == b"e":
            self.ended, numbers = True, numbers_of(content)
            self.status = numbers[0] & 255 if numbers else None

    def show(self, content: bytes) -> None:
        replaying, self.position = self.position < self.until, self.position + len(content)
        if not replaying or not os.isatty(1):
            self.write(content)
            return
        self.replay += content
        if self.position >= self.until:
            whole, self.replay = self.replay, b""
            self.write(without_questions(without_part(whole) if self.cut else whole))
            if self.typing and (self.cut or self.screen.alternate):
                # A program draws anew when the size changes, if it has the time to see it.
                self.send(b"r", self.size(1))
                self.waits["size"] = time.monotonic() + NUDGE_SECONDS

    def write(self, data: bytes) -> None:
        self.screen.scan(data)
        while data:
            try:
                data = data[os.write(1, data) :]
            except BlockingIOError:  # somebody has left our terminal so
                import select

                select.select([], [1], [])
            except BrokenPipeError:
                raise
            except OSError:
                self.hang_up()
                return

    def close(self) -> None:
        """End the client of the engine: the end of its stdin is how one leaves."""
        if self.to >= 0:
            os.close(self.to)
        os.set_blocking(self.out, False)
        code = end_client(self.pid, self.out)
        if not self.left:
            self.code = code
        if self.err >= 0:
            os.set_blocking(self.err, False)
            with suppress(BlockingIOError):
                self.read_errors()
        Output.close(self.out, *([self.err] if self.err >= 0 else []))
        if self.errors and not self.left:
            with suppress(OSError):
                os.write(2, self.errors)


def end_client(pid: int, out: int = -1) -> int:
    """The exit status of an engine's client whose input has ended; killed with its group where it
    stays. What it still prints is dropped, or it would wait for us.
    """
    until = time.monotonic() + GONE_SECONDS
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.killpg(pid, 9)
        with suppress(BlockingIOError):
            while out >= 0 and os.read(out, 65536):
                pass
        time.sleep(0.001)
    return exit_status(found[1])


class Left(SandboxError):
    """We have left a terminal whose program runs on."""


class CannotHold(SandboxError):
    """A session that cannot hold terminals: what runs on one ends with its client."""


def title_of(command: Sequence[str]) -> str:
    """What runs, in a line for people."""
    shell = list(command[:2]) == ["sh", "-c"]
    words = "shell" if list(command) == SHELL else command[2] if shell else quote_all(command)
    return printable(words.removesuffix(' "$@"')).replace("\n", " ")[:200]


def run_held(engine: Engine, session: Session, request: RunRequest, command: Sequence[str],
             tag: str) -> int:
    """Run a command on our terminal and on one that the session holds; its exit status.

    Raises Left when it runs on, and CannotHold.
    """
    keys = "" if request.args.rm_on_exit else request.config.get("detachKeys")
    environ = hold_environ(env_script(terminal_env() | request.env), "start", tag,
                           *terminal_size(1), title_of(command), *command)
    if keys and request.fresh and not request.is_passing:
        say(f"{shown_keys(keys)} leaves it running; to come back: sandbox attach {session.name}")
    record_terminal(session.name, tag, title_of(command))
    held = Attachment(hold_argv(engine, session, request.workdir(), tag), environ, typing=True,
                      keys=keys)
    sent: list[Output] = []

    def pass_on(number: int, _frame: object) -> None:
        name = signal_name(number)
        sent.append(send_tagged(engine, session, tag, name, 0 if name == "INT" else 5))

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), pass_on)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
        handlers[signal.SIGHUP] = pass_on if request.args.rm_on_exit else held.hang_up
    try:
        held.run(handlers)
    except KeyboardInterrupt:  # before it began
        signal_tagged(engine, session, tag, "INT", 5)
        forget_terminal(session.name, tag)
        return 128 + signal.SIGINT
    finally:
        for asked in sent:
            with suppress(EngineProblem):
                asked.result()
    return status_of(engine, session, tag, held)


def status_of(engine: Engine, session: Session, tag: str, held: Attachment) -> int:
    """The status of what ran on a terminal. Raises Left when it runs on, and CannotHold."""
    follow_rename(engine, session)
    if held.left:
        one = f" {tag}" if len(recorded_terminals(session.name)) > 1 else ""
        raise Left(f"left {session.name}; to come back: sandbox attach {session.name}{one}",
                   code=held.code)
    if held.refused:
        raise cannot_hold(session, tag, held.refused, held.code)
    status = held.status if held.ended else None
    if status is None and engine.host:
        import sandbox_hosts

        sandbox_hosts.check_cut(engine, session, tag, held=True)
    if status is None:
        check_removed(engine, session, held.code or 1)
        check_stopped(engine, session, held.code or 1)
    if held.heard and status is None:
        known = next((t for t in list_terminals(engine, session) if t.id == tag), None)
        if known and known.runs:
            raise Left(f"the connection to {session.name} was cut, and what ran there goes on",
                       f"to come back: sandbox attach {session.name}",
                       125 if engine.host else held.code)
        if known and known.status is None:
            say(f"what held the terminal in {session.name} has ended: "
                "how the program did is not known")
        status = known.status if known else None
    forget_terminal(session.name, tag)
    return held.code if status is None else status


def cannot_hold(session: Session, tag: str, reason: str, code: int) -> CannotHold:
    """Forget a terminal that was not started, and remember the reason where that is for good."""
    forget_terminal(session.name, tag)
    if code == 125:  # static/session/exec.sh has said so
        mark_unheld(session)
    return CannotHold(f"{session.name} cannot keep what runs on a terminal: {reason}",
                      "run it on a terminal of yours: it ends with that", 125)


def start_held(engine: Engine, session: Session, request: RunRequest, command: Sequence[str],
               tag: str) -> int:
    """Start a command on a terminal that the session holds, and print its name and the id.

    Raises CannotHold.
    """
    environ = hold_environ(env_script(terminal_env() | request.env), "start", tag, 0, 0,
                           title_of(command), *command)
    record_terminal(session.name, tag, title_of(command))
    argv = hold_argv(engine, session, request.workdir(), tag)
    status, out, err = Output(argv, LONG_SECONDS, environ).result(FRAME_BYTES)
    with suppress(ValueError):
        for _, reason in Frames().feed(out.encode()):
            words = one_line(reason.decode(errors="replace"))[:200]
            raise cannot_hold(session, tag, words, status)
    sys.stderr.write(err)
    if status:
        forget_terminal(session.name, tag)
    else:
        print(session.name, tag, flush=True)
    return status


def shown_keys(keys: str) -> str:
    """Keys as people write them: Ctrl-\\ d."""
    return " ".join(key.replace("ctrl-", "Ctrl-") for key in keys.split(","))


# The host remembers which terminals were started and are not known to have ended, so that `ps` asks
# those sessions alone that have some: terminals/<session>/<id>, JSON. A lost record is harmless.


def terminals_path(name: str) -> str:
    return kept_path("terminals", name)


def record_terminal(name: str, id: str, what: str) -> None:
    """Remember that a terminal is being started."""
    path = os.path.join(terminals_path(name), id)
    with suppress(OSError):
        make_private(os.path.dirname(path))
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(to_json({"what": what, "since": round(time.time(), 3)}))
        if len(os.listdir(os.path.dirname(path))) > 2 * LISTED:  # nobody asks how those have ended
            records = recorded_terminals(name, ended=True)
            for old in sorted(records, key=lambda id: float(records[id]["since"]))[:-LISTED]:
                forget_terminal(name, old)


def note_ended(name: str, records: Mapping[str, Mapping[str, Any]],
               terminals: Iterable[Held]) -> None:
    """Note which terminals have ended: `ps` need not ask for them, and pages show them once."""
    for terminal in terminals:
        record = records.get(terminal.id)
        if record and not terminal.runs:
            with suppress(FileError):
                write_private(os.path.join(terminals_path(name), terminal.id),
                              to_json({**record, "ended": True}))


def forget_terminal(name: str, id: str) -> None:
    with suppress(OSError):
        os.unlink(os.path.join(terminals_path(name), id))


def forget_terminals(name: str) -> None:
    """Forget all of a session: its container has stopped."""
    for id in recorded_terminals(name, ended=True):
        forget_terminal(name, id)


def forget_lost(name: str, records: Mapping[str, Mapping[str, Any]], known: Container[str]) -> None:
    """Forget the recorded terminals that are not known, unless one is just being started."""
    for id, record in records.items():
        if id not in known and time.time() - record["since"] > STARTUP_SECONDS:
            forget_terminal(name, id)


def recorded_terminals(name: str, *, ended: bool = False) -> dict[str, dict[str, Any]]:
    """By id what was started, and when, in seconds; also what is known to have `ended`."""
    found = {}
    for id in os.listdir(terminals_path(name)) if os.path.isdir(terminals_path(name)) else ():
        with suppress(OSError, ValueError, TypeError, KeyError):
            data = read_json(os.path.join(terminals_path(name), id))
            if ended or "ended" not in data:
                found[id] = {"what": str(data["what"]), "since": float(data["since"])}
    return found


def mark_unheld(session: Session) -> None:
    """Remember that the session cannot hold a terminal, as long as its container is this one."""
    with suppress(FileError):
        write_private(os.path.join(terminals_path(session.name), "unheld"), to_json(session.id))


def is_unheld(session: Session) -> bool:
    with suppress(OSError, ValueError):
        known = read_json(os.path.join(terminals_path(session.name), "unheld"))
        return bool(known == session.id)
    return False


# --- Image ---

BASE_SUITE = BASE_IMAGE.partition(":")[2].removesuffix("-slim")
LOCAL_BASE = f"localhost/sandbox-base:{BASE_SUITE}"
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
              "/etc/ssl/cert.pem")


def split_build_version(version: str, tool: str) -> tuple[str, str]:
    """Image version and TOOL from `--iv` and `--iba TOOL=…`; either may name the variant."""
    number, dash, variant = version.partition("-")
    variant = variant or (tool.replace(",", "-") or "common")
    tool = tool or variant
    if variant == "common" and tool != "common":
        raise SandboxError(f"the variant common is the minimal image, not TOOL={tool}",
                           f"use --iv {number}", 2)
    return f"{number}-{variant}", tool


def containerfile(instruction: str) -> list[list[str]]:
    """The words that follow an instruction in the Containerfile, of each line that has it."""
    text = asset("image/Containerfile").decode().replace("\\\n", " ")
    lines = map(str.split, text.splitlines())
    return [words[1:] for words in lines if words[:1] == [instruction]]


def check_build_args(args: Mapping[str, str]) -> None:
    """Raise SandboxError for a build argument, a tool or an agent that the image does not know."""
    declared = (words[0].partition("=")[0] for words in containerfile("ARG"))
    known = sorted({*declared, *PROXY_VARIABLES})
    tools = ["full", *tool_packages()]
    for name in args:
        if name not in known:
            raise SandboxError(f"the image has no build argument {name}{nearest(name, known)}",
                               f"the build arguments are {', '.join(known)}", 2)
    for tool in args.get("TOOL", "common").split(","):
        if tool not in tools:
            raise SandboxError(f"the image has no tool {tool!r}{nearest(tool, tools)}",
                               f"TOOL is of {', '.join(tools)}", 2)
    for agent in args["AGENTS"].split(",") if "AGENTS" in args else ():
        if agent not in AGENTS:
            raise SandboxError(f"there is no agent {agent!r}{nearest(agent, AGENTS)}",
                               f"AGENTS is of {', '.join(AGENTS)}", 2)


UNMADE = ": no image was made, and nothing half-made is left"


def tool_packages() -> dict[str, list[str]]:
    """The Debian packages of each tool, from tools.txt."""
    lines = asset("image/tools.txt").decode().splitlines()
    table = (line.split(":") for line in lines if not line.startswith("#"))
    return {name: packages.split() for name, packages in table}


def build_image(engine: Engine, config: Config, update_agents: bool = False,
                agents: Sequence[str] = ()) -> None:
    """Build the image of a configuration, or with these agents. Raises SandboxError."""
    engine.check_helpers()
    given = dict(item.split("=", 1) for item in config.all("imageBuildArgs"))
    version, tool = split_build_version(config.get("imageVersion"), given.get("TOOL", ""))
    args = {**given, "TOOL": tool, **({"AGENTS": ",".join(agents)} if agents else {})}
    check_build_args(args)
    tag = f"{config.get('imageName')}:{version}"
    before = Image(engine, tag)
    args.setdefault("AGENTS", ",".join((before.agents if update_agents else ()) or AGENTS))
    # What the agents' layer is cached by: that of the image before, today's, or one of its own.
    stamp = "" if update_agents else before.stamp
    args["AGENTS_UPDATED"] = stamp or str(int(time.time()) // (1 if update_agents else 86400))
    steps = 1
    if not given.get("BASE"):
        args["BASE"], steps = ensure_base_image(engine, given.get("APT_MIRROR", ""))
    call_build(engine, tag, args, Step(f"build {tag}", steps, steps, UNMADE))
    old = Image(engine, before.id) if before.id else before
    if old.id and not old.names:  # the new one has taken its only name; it may be in use
        Output(engine.argv("remove-image", old.id)).result()
    say(f"built {tag}; sessions that exist keep the image they were created from")


def call_build(engine: Engine, tag: str, args: Mapping[str, str], step: Step) -> None:
    """Build from the files of static/image/. Raises SandboxError."""
    import tempfile

    proxies = {name: os.environ[name] for name in PROXY_VARIABLES if os.environ.get(name)}
    given = [*(f"{name}={value}" for name, value in args.items()), *proxies]
    labels = {"sandbox.agents": args["AGENTS_UPDATED"], "sandbox.programs": args["AGENTS"]}
    host_network = any(f"//{host}" in proxy for proxy in proxies.values()
                       for host in ("127.", "localhost", "[::1]"))
    with tempfile.TemporaryDirectory(prefix="sandbox-build-") as context:
        copied = [name for words in containerfile("COPY") for name in words[:-1]]
        for name in ("Containerfile", *copied):
            with open(os.path.join(context, name), "wb") as file:
                file.write(host_ca_bundle() if name == "ca.crt" else asset(f"image/{name}"))
                os.fchmod(file.fileno(), 0o644)  # the mode goes into the image
        try:
            step.run(engine.build_argv(tag, context, labels, given, host_network))
        except SandboxError as error:
            raise build_failure(engine) or error from None


def build_failure(engine: Engine) -> SandboxError | None:
    """What has ended a build, where this machine shows it."""
    root = "" if engine.host else Output(engine.argv("storage")).result()[1].strip()
    with suppress(OSError):  # it may be another machine's
        stat = os.statvfs(root)
        if stat.f_bavail * stat.f_frsize < FULL_BYTES:
            return SandboxError(f"{engine.name} build found no space left at {root}",
                                NO_ROOM_HINT, 125)
    return engine.build_problem()


def host_ca_bundle() -> bytes:
    """The authorities that this machine trusts: a TLS-inspecting gateway may stand before it."""
    for path in (os.environ.get("SSL_CERT_FILE", ""), *CA_BUNDLES):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return file.read()
    return b""


class Image:
    """An image as the engine has it: its id, '' for none, and what its labels say of agents."""

    def __init__(self, engine: Engine, name: str) -> None:
        status, out, _ = Output(engine.image_argv(name)).result()
        self.id, self.names, labels = ("", [], {}) if status else engine.read_image(out)
        stamp, agents = labels.get("sandbox.agents", ""), labels.get("sandbox.programs", "")
        self.stamp = stamp if stamp.isdigit() else ""
        # An image without that label says nothing about its agents: then this is ().
        self.agents = tuple(agent for agent in AGENTS if agent in agents.split(","))


def ensure_base_image(engine: Engine, mirror: str) -> tuple[str, int]:
    """The distribution's base image, at hand, from a registry or made from a mirror, and the number
    of steps that the build has with it: 2 where the base was fetched or made first.
    """
    for name in (BASE_IMAGE, LOCAL_BASE):
        if Image(engine, name).id:
            return name, 1
    fetch = Step(f"fetch {BASE_IMAGE}", 1, 2)
    try:
        fetch.run(engine.argv("pull", BASE_IMAGE))
        return BASE_IMAGE, 2
    except SandboxError:
        fetch.forget_log()
        last = fetch.tail[-1] if fetch.tail else "it says nothing"
        say(f"no registry gives {BASE_IMAGE} ({last})")
    make_base(engine, mirror)
    return LOCAL_BASE, 2


def make_base(engine: Engine, mirror: str) -> None:
    """Make LOCAL_BASE, as root, from the distribution's mirror or another. Raises SandboxError."""
    from shutil import which

    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    if not which("mmdebstrap") and not which("debootstrap", path=path):
        packages = ("mmdebstrap", "debian-archive-keyring")
        commands = install_commands(*packages) if which("apt-get") else []
        note = f"give a base image with --iba BASE=<image>, or load {BASE_IMAGE}"
        message = "no registry of base images answers, and mmdebstrap is not installed"
        raise EngineProblem("debootstrap", message, Remedy(commands, note="" if commands else note))
    if os.getuid() and not program("sudo"):
        hint = f"ask an administrator to load {BASE_IMAGE}, or give another with --iba BASE=<image>"
        raise SandboxError("no registry of base images answers, and to make one takes root", hint,
                           125)
    script, dpkg_cfg = (asset(f"image/{name}").decode() for name in ("make-base", "dpkg.cfg"))
    tools = ",".join(tool_packages()["common"])
    Step(f"make {LOCAL_BASE} from Debian's mirror", 1, 2, UNMADE).run(
        ["sh", "-c", script, "sh", BASE_SUITE, " ".join(as_root([])), tools, dpkg_cfg, mirror,
         *engine.argv("import", "root.tar", LOCAL_BASE)])


# --- Commands ---
# What a command does is said in COMMANDS.


def open_session(request: RunRequest) -> tuple[Engine, Session]:
    """The running session of a request."""
    if not request.session:
        with lock_homes():
            home = home_for(request)
            engine, session = create_session(request.engines, request.name, request.config,
                                             request.kept, request.spec, home, request.source,
                                             request.start_turn,
                                             request.settings if request.source else {})
        keep_budget(session, request.flags)
        request.fresh = True
        return engine, session
    engine, session = request.engines[0], request.session
    # In the state "created" another run is starting it, so it is not fresh for us.
    request.fresh = session.state == "exited"
    start_session(engine, session)
    put_rules(engine, session, request, True)
    return engine, session


def home_for(request: RunRequest) -> str:
    """The home of a new session where there is one: a duplicate, or what `docker rm` has left."""
    if request.source:
        return duplicate_home(request.engines[0], request.source, request.config, request.spec)
    engine, left, spec = request.engines[0], request.left, request.spec
    volumes = engine.ask(engine.argv("volumes")).split() if left else ()
    if not left or left.home not in volumes:
        return ""
    gone = f"the container {request.name} is gone, and not by sandbox rm"
    # The snapshots that belong to the home are of its directory or copy, and of no other.
    place, wanted = "another directory", spec.get("workspace") == "copy"
    with suppress(BrokenSession):
        place = source_of(left.created()[0])
    if (place, left.copy != "") != (spec["sources"][0], wanted) or (
            wanted and left.copy not in volumes):
        say(f"{gone}: its home, for {'a copy of ' * bool(left.copy)}{place}, is not that of this "
            "one (sandbox prune removes it)")
        return ""
    say(f"{gone}: its home was kept, and this one goes on with it (--new makes another session)")
    return left.home


def choose_session(args: argparse.Namespace) -> None:
    """Where no name is given, ask which session of the directory is meant; not without a terminal.

    The name that was chosen becomes that of -n.
    """
    if args.new or args.source or args.rm_on_exit or not (on_terminal() and can_ask()):
        return
    config = load_config(flags_layer(args), args.profile)
    here = [] if config.get("containerName") else sessions_here(config, args)[:OFFERED]
    about = [f"{row['name']} ({row['labels'].get('sandbox.agent') or 'no agent'}, {row['state']}, "
             f"{'a copy ' if row['labels'].get('sandbox.workspace') else ''}"
             f"of {local_time(row['created'])})" for row in here]
    for row in here:
        if row["state"] == "running" and (left := recorded_terminals(row["name"])):
            say(f"{row['name']} may still run {'; '.join(one['what'] for one in left.values())}; "
                f"to go back to it: sandbox attach {row['name']}")
    if len(here) == 1:
        question = f"Go on in {about[0]}? [Y/n] "
    else:
        for number, line in enumerate(about, 1):
            print(f"{number:3}  {printable(line)}", file=sys.stderr)
        question = "Go on in which of them? [1], n for a new one: "
    choices = {str(number): row["name"] for number, row in enumerate(here, 1)}
    while here and not (args.new or args.containerName):
        answer = ask_person(printable(question)).lower()
        args.new = answer == "n"
        args.containerName = choices.get("1" if answer in ("", "y") else answer)


OFFERED = 20  # sessions; `ps` shows all


def sessions_here(config: Config, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The sessions that a run with this configuration may go on in, the newest first."""
    found, data, flags = [], read_config(), flags_layer(args)
    engine, rows = list_containers(candidates(config))
    for row in rows:
        known = recall([engine], row["name"])
        id = row["labels"]["sandbox.session"]
        if not known or known[1].labels.get("sandbox.session") != id:
            continue  # another container has the name now
        session = known[1]
        with suppress(SandboxError):  # broken, or with another network than is asked for
            have, _ = session.created()
            mine = (session.is_elsewhere
                    or session.user.split(":")[0] in ("0", str(os.getuid())))
            same = flags.values.get("workspace", mode := have.get("workspace", "mount")) == mode
            if session.is_ours and mine and same and have["directory"] == config.get("hostPath"):
                want = session_config(session, None, flags, args.profile, data).get("network")
                check_isolation(session, have["network"], want, str)
                found.append(row)
    return sorted(found, key=lambda row: str(row["created"]), reverse=True)


COPIES = 100


def run_copies(args: argparse.Namespace) -> int:
    """Start the same in several sessions, each on a copy; the highest status. Each is started by a
    process of its own, which returns here, too, as from a run.
    """
    count, args.copy_count = args.copy_count, None
    for given, option in ((args.rm_on_exit, "--rm-on-exit"), (args.strict, "--strict"),
                          (args.source, "--from")):
        if given:
            raise SandboxError(f"--copies does not go together with {option}",
                               "keep one of them", 2)
    if not 0 < count <= COPIES:
        raise SandboxError(f"--copies {count} is not a number from 1 to {COPIES}", code=2)
    args.copy = args.background = True
    args.new, (name, at, host) = not args.containerName, (args.containerName or "").partition("@")
    children, status = list[int](), 0
    try:
        for number in range(1, count + 1):
            args.containerName = f"{name}-{number}{at}{host}" if name else None
            if not (child := os.fork()):
                children.clear()
                return cmd_run(args)
            children.append(child)
            # The first alone: what it asks, mends and sends is there for the others.
            while children and number in (1, count):
                status = max(status, wait_for(children[-1]))
                children.pop()
            if status:
                break
        return status
    finally:
        for child in children:
            terminate(child)


def cmd_run(args: argparse.Namespace) -> int:
    end_on_signals()
    if args.copy_count is not None:
        return run_copies(args)
    if args.background and args.rm_on_exit:
        raise SandboxError("-d does not go together with --rm-on-exit", "keep one of them", 2)
    if args.background and args.strict:
        raise SandboxError("-d does not go together with --strict", "keep one of them", 2)
    try:
        with_remedies(partial(choose_session, args), args.yes)
        request = with_remedies(lambda: RunRequest(args, look=on_terminal() or args.rm_on_exit),
                                args.yes)
        if (not request.looked and request.session
                and put_rules(request.engines[0], request.session, request, False)):
            try:
                with ports_here(request, request.engines[0], request.session):
                    return converse(request, request.engines[0], request.session)
            except NotBegun as error:
                if not error.sure:
                    try:
                        RunRequest(args, look=True)  # it may raise an error that says more
                    finally:
                        look_next_time(request.engines[0], request.session)
                    raise
        for _ in range(50):  # docker reserves a name before it shows the container
            if not request.looked:
                request = with_remedies(lambda: RunRequest(args, look=True), args.yes)
            with suppress(NameTaken):
                engine, session = with_remedies(partial(open_session, request), args.yes)
                break
            request.looked = False
            time.sleep(0.1)
        else:
            raise SandboxError(f"the container {request.name} comes and goes", "try again", 125)
    except KeyboardInterrupt:
        raise SandboxError("interrupted", code=130) from None
    try:
        with ports_here(request, engine, session):
            return converse(request, engine, session)
    finally:
        if (args.rm_on_exit and may_remove(engine, session, request.tags)
                and may_lose(engine, session)):
            with suppress(Changed):
                remove_session(engine, session)


def ports_here(request: RunRequest, engine: Engine, session: Session) -> Any:
    """Have the ports of a session on another machine reach this one, until it is left."""
    if not engine.host:
        return suppress()
    import sandbox_hosts

    return sandbox_hosts.Ports(engine, session.name, session.created()[0]["ports"],
                               brief=request.args.background)


def converse(request: RunRequest, engine: Engine, session: Session) -> int:
    """Run what was asked for, on a terminal ask what to do next; the last status."""
    base = request.base()
    command = compose(base, request.args.agent_args)
    lasts = not request.session or request.agent or base is SHELL
    asks = (lasts and on_terminal() and can_ask() and not request.is_passing
            and not (request.args.rm_on_exit or request.args.background))
    made = not request.session and (request.args.new or not request.config.get("containerName"))
    if made and not asks and not request.args.rm_on_exit:
        say(f"made the session {session.name}; to come back: {way_back(request, engine, session)}")
    while True:
        since = time.time()
        turn, request.turn = request.turn or request.turn_of(engine, session, command), None
        tag = turn.id if turn else random_id()
        request.tags.append(tag)
        with turn or suppress():
            status = run_command(engine, session, request, command, tag)
            if turn and request.args.background and not status:
                turn.lasts = True
        if status:
            check_removed(engine, session, status)
        if status in ENGINE_STATUS and engine.host:
            import sandbox_hosts

            sandbox_hosts.check_cut(engine, session, tag)
        if status in ENGINE_STATUS or (request.fresh and status == KILLED):
            check = partial(check_begun, engine, session, tag, status, request.fresh)
            with_remedies(check, request.args.yes)
        if status == KILLED:
            check_stopped(engine, session, status)
        refused = refusals(engine, session, since)
        for line in refused:
            say(line)
        ports = session.created()[0]["ports"] if on_terminal() else []
        for line in unheard_ports(engine, session.name, ports) if ports else ():
            say(line)
        if request.agent and not (request.args.background or request.only_tells):
            call_back(request, news(session.name, "error" if status else "end",
                                    refused[-1] if refused else "", status=status))
        if status == 127 and request.agent:  # how a shell says that there is no such program
            say(f"{session.name} seems to have no {request.agent}: "
                f"sandbox recreate {session.name}, then run this again")
        strict = request.args.strict
        if turn and not turn.lasts and not turn.report(strict) and strict:
            status = TAMPERED_STATUS
        if asks:
            follow_rename(engine, session)
        again = (ask_next_command(request, engine, session, command, status) if asks
                 else None)
        if again is None:
            return status
        if not again:
            if may_remove(engine, session, request.tags) and may_lose(engine, session):
                remove_session(engine, session)
                say(f"removed {session.name} with its conversations")
            else:
                say(f"kept; to come back: {way_back(request, engine, session)}")
            return status
        command = again


TAMPERED_STATUS = 3


def call_back(request: RunRequest, event: Mapping[str, Any]) -> None:
    """Ring the terminal, and tell the person's own command, which nobody here waits for."""
    if os.isatty(2) and not request.is_passing:
        print("\a", end="", file=sys.stderr, flush=True)
    if not (command := request.config.get("notify")):
        return
    apart, end = os.pipe()
    if os.fork():
        os.close(end)
        os.read(apart, 1)  # until a signal to our group no longer reaches it
        os.close(apart)
        return
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1) if os.isatty(2) else (0, 1, 2):  # who reads our output waits for its end
            os.dup2(null, fd)
        os.close(end)
        if failure := notify(command, event):
            write_private(os.path.join(sandbox_home(), "logs", "notify.log"), f"{failure}\n")
            say(failure)
    finally:
        os._exit(0)


MENU = ("[y] keep  [n] remove it, its conversations and snapshots  [1] again  {resume}"
        "[x] command  [i] shell")


def way_back(request: RunRequest, engine: Engine, session: Session) -> str:
    """The command that goes on after a run: with all that the session does not remember itself."""
    (_, kept), known, flags = session.created(), session.variables(), flags_layer(request.args)
    words = ["sandbox", "run", "-n", session.name]
    profile, default = request.config.profile, load_config().get("runtime")
    if not engine.host and engine.name != (default or next(filter(program, ENGINES), "")):
        words += ["--rt", engine.name]
    words += ["-r", profile] if profile not in ("", session.profile) else []
    words += each("--ef", (path for path in flags.values.get("envFile", ())
                           if path not in kept.get("envFile", ())))
    for name, value in flags.values.get("env", {}).items():
        if name in flags.variables or is_secret(name, value) or printable(value) != value:
            words += ["-e", name] if name not in known else []
        else:
            words += ["-e", f"{name}={value}"]
    if not request.agent:
        return quote_all(words)
    if (yolo := request.config.get("yolo")) != kept.get("yolo"):
        words += ["-y", AGENTS[yolo].shortcuts[0]] if yolo else []
    if (command := request.config.get("command")) != kept.get("command"):
        words += ["-x", *([command] if isinstance(command, str) else command)] if command else []
    return quote_all([*words, "--", *AGENTS[request.agent].resume])


def ask_next_command(request: RunRequest, engine: Engine, session: Session, command: list[str],
                     status: int) -> list[str] | None:
    """What the person wants next: a command, [] to remove the container, None to leave it.

    Raises SandboxError, with the status of the last command, when it was removed meanwhile.
    """
    resume = compose(request.base(), AGENTS[request.agent].resume) if request.agent else []
    say(f"the container {session.name} is still there")
    while True:
        print(MENU.format(resume="[r] resume  " if resume else ""), file=sys.stderr)
        try:
            answer = ask_person("Keep it? [y] ").lower()
        except KeyboardInterrupt:  # most often meant for the command that has just ended
            answer = print(file=sys.stderr) or ""
        check_removed(engine, session, status)
        if answer in ("", "y"):
            say(f"kept; to come back: {way_back(request, engine, session)}")
            return None
        if answer == "x" and (line := ask_person("Command: ")):
            return compose(line, [])
        choice = {"n": [], "1": command, "i": SHELL} | ({"r": resume} if resume else {})
        if answer in choice:
            return choice[answer]


def cmd_rm(args: argparse.Namespace) -> int:
    def remove(engine: Engine, session: Session) -> None:
        if not (args.in_use or (may_remove(engine, session) and may_lose(engine, session))):
            raise SandboxError(f"{session.name} was left as it is",
                               f"sandbox rm -f {session.name} removes it" if session.copy else "")
        remove_session(engine, session)

    return for_each(args, "rm", remove)


def for_each(args: argparse.Namespace, command: str,
             action: Callable[[Engine, Session], object]) -> int:
    """Do something to each session that was named, and print the names."""
    status, engines = 0, engines_of(args)
    for name in args.names:
        try:
            action(*find_given(engines, name, command))
            print(name)
        except EngineProblem:
            raise
        except SandboxError as error:
            report(error)
            status = 1
    return status


def cmd_stop(args: argparse.Namespace) -> int:
    def stop(engine: Engine, session: Session) -> None:
        stop_session(engine, session)
        forget_terminals(session.name)

    return for_each(args, "stop", stop)


def cmd_start(args: argparse.Namespace) -> int:
    def start(engine: Engine, session: Session) -> None:
        start_session(engine, session)
        try:
            config = session_config(session)
        except SandboxError as error:  # it runs, and the first command starts the script
            report(error)
            return
        if config.get("autostart"):  # the first command starts it: see static/session/exec.sh
            spec, _ = session.created()
            give_keys(engine, session, config)
            argv = exec_argv(engine, session, spec["workdir"], random_id(), ["true"])
            script = env_script(exec_env(config, spec))
            status, _, err = Output(argv, LONG_SECONDS,
                                    {**os.environ, "SANDBOX_ENV": script}).result()
            if status:
                raise engine.failure(err)

    return for_each(args, "start", start)


def cmd_attach(args: argparse.Namespace) -> int:
    engine, session = find_given(engines_of(args), args.session, "attach")
    held = pick_terminal(engine, session, args.id)
    typing = on_terminal() and held.runs and os.environ.get("TERM") != "dumb"
    keys = KEYS["detachKeys"].default
    with suppress(SandboxError):  # as engines_of() has said
        keys = load_config().get("detachKeys")
    if typing and keys:
        say(f"{shown_keys(keys)} leaves it running")
    status = join(engine, session, held, keys=keys, typing=typing)
    say(f"{held.title} has ended with status {status}")
    import sandbox_changes

    try:
        sandbox_changes.report_turn(engine, session, held.id, held.runs)
    except SandboxError as error:
        say(f"what it has changed is not known: {error.message}")
    return status


def join(engine: Engine, session: Session, held: Held, *, keys: str = "", typing: bool = False,
         follow: bool = True) -> int:
    """Join a terminal that a session holds, what was kept of its output first; its status."""
    environ = hold_environ("", "attach", held.id, *(terminal_size(1) if typing else (0, 0)), 0)
    joined = Attachment(attach_argv(engine, session), environ, typing=typing, keys=keys, kept=True,
                        follow=follow)
    leaving = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM) if typing else ()
    joined.run(dict.fromkeys(leaving, joined.hang_up))
    if not follow and joined.heard and not joined.refused:
        return 0
    if joined.refused:
        raise SandboxError(f"{session.name}: {joined.refused}", f"sandbox ps {session.name}")
    if joined.ended and joined.status is None:
        raise SandboxError(f"what held {held.id} has ended: how the program did is not known",
                           f"sandbox ps {session.name}")
    return status_of(engine, session, held.id, joined)


def pick_terminal(engine: Engine, session: Session, id: str | None) -> Held:
    """The terminal of an id, or the newest, one that runs before one that has ended."""
    if session.state != "running":
        raise SandboxError(f"{session.name} is {session.state}: what ran on terminals has ended",
                           f"sandbox start {session.name}")
    terminals = list_terminals(engine, session, CALL_SECONDS)
    found = [held for held in terminals if held.id == id] if id else sorted(
        terminals, key=lambda held: held.runs)
    if found:
        return found[-1]
    raise SandboxError(f"{session.name} has no terminal{f' {printable(id)}' if id else ''}",
                       f"sandbox ps {session.name} lists them; sandbox run -n {session.name} "
                       "starts one")


def cmd_logs(args: argparse.Namespace) -> int:
    name = at_host(engines_of(args), args.session)[0].full(args.session)
    jobs = read_jobs(name)
    job = next((job for job in jobs if job["id"] == args.id), None)
    if not job:
        engine, session = find_given(engines_of(args), args.session, "logs")
        running = session.state == "running"
        terminals = (list_terminals(engine, session, CALL_SECONDS)
                     if running and not args.id else [])
        began = max((iso_seconds(held.started) for held in terminals), default="")
        if args.id or not jobs or jobs[-1]["started"] < began:
            held = pick_terminal(engine, session, args.id)
            with suppress(KeyboardInterrupt):
                join(engine, session, held, follow=args.follow)
            return 0
        job = jobs[-1]
    show_job(os.path.join(jobs_path(name), job["id"]), args.follow)
    return 0


def plain(output: bytes) -> bytes:
    """Output without what a terminal would obey: colours go, and the rest is made visible."""
    import re

    text = re.sub(r"\x1b\[[\d;:]*m|\r(?=\n)", "", output.decode(errors="replace"))
    return printable(text).encode()


def show_job(folder: str, follow: bool) -> None:
    """Print the output of a job, as it comes where it is to be followed."""
    with open(os.path.join(folder, "output"), "rb") as output:
        over = False
        while True:
            if data := output.read(65536):
                sys.stdout.buffer.write(plain(data) if os.isatty(1) else data)
            elif over or not follow:
                break
            else:
                sys.stdout.flush()
                over = not is_supervised(folder)
                time.sleep(0 if over else 0.1)
    sys.stdout.flush()


def is_supervised(folder: str) -> bool:
    """Whether the supervisor of a job lives: it holds a lock."""
    import fcntl

    try:
        with open(os.path.join(folder, "lock"), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_jobs(name: str) -> list[dict[str, Any]]:
    """What the web service has run in a session, the oldest first: id, kind, what, state, started,
    ended (ISO 8601) and status, None for what is not known.
    """
    Layer({"containerName": name}, "check", "", 2)
    jobs, folder = [], jobs_path(name)
    for id in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = os.path.join(folder, id)
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            job = read_json(os.path.join(path, "job.json"))["job"]
            with open(os.path.join(path, "status"), "rb") as file:
                end = parse_json(file.read(4096).strip() or b"{}")
            state = "running" if is_supervised(path) else "ended" if end else "lost"
            jobs.append({"id": id, "kind": str(job["kind"]), "state": state,
                         "started": str(job["started"]), "ended": end.get("ended"),
                         "status": end.get("exit"), "what": str(job["command"])[:200]})
    return jobs


def iso_seconds(seconds: float) -> str:
    """ISO 8601, in UTC and with milliseconds, as a job has it."""
    return (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
            + f".{int(seconds * 1000) % 1000:03d}Z")


def cmd_cp(args: argparse.Namespace) -> int:
    """Copy through the engine; links are copied as links."""
    (name, source), (to, target) = split_place(args.copied), split_place(args.target)
    if bool(name) == bool(to):
        raise SandboxError("one of the two is in a session: NAME:PATH",
                           "for a host path with a colon write ./PATH", 2)
    engine, session = find_given(engines_of(args), name or to, "cp")
    inner, outer = (source, target) if name else (target, source)
    outer = os.path.join(current_directory(), outer)
    inner = os.path.join(session.created()[0]["workdir"], inner)
    if not (is_exact(inner) and is_exact(outer)):
        raise SandboxError("a path has a control character or a byte that is not UTF-8",
                           "engines would take another one for it")
    if name:
        return call([*engine.argv("cp"), f"{session.id}:{inner}", outer])
    into = [os.path.basename(outer.rstrip("/"))]
    if into == ["."] and os.path.isdir(outer):  # its content
        into = os.listdir(outer)
    elif not in_session(engine, session, ["test", "-d", inner]):
        into = [""]
    status = call([*engine.argv("cp"), outer, f"{session.id}:{inner}"])
    if not status and session.user != "0:0":  # engines make it root's
        copied = [os.path.join(inner, item).rstrip("/") for item in into]
        if not in_session(engine, session, ["chown", "-hR", session.user, *copied]):
            say(f"what was copied is root's in {session.name}")
    return status


def in_session(engine: Engine, session: Session, command: Sequence[str]) -> bool:
    """Whether a command of root's succeeds in a session."""
    return not Output(engine.exec_argv(session.id, command, user="0:0")).result()[0]


def split_place(text: str) -> tuple[str, str]:
    """Session and path of NAME:PATH; '' and the path for one of this machine."""
    name, colon, path = text.partition(":")
    return (name, path) if colon and is_plain(name, "_.-@") and name[:1] not in "." else ("", text)


def cmd_recreate(args: argparse.Namespace) -> int:
    end_on_signals()
    # A list that is given as '' is emptied, and a limit is what it was without having been given.
    emptied: dict[str, Any] = {name: [] for name in KEYS if getattr(args, name, None) == [""]}
    freed = [key.name for key in limits() if getattr(args, key.name) == ""]
    vars(args).update(emptied | dict.fromkeys(freed))
    flags = flags_layer(args)
    engine, session = find_given(candidates(load_config(flags)), args.session, "recreate")
    flags = Layer({**flags.values, **emptied}, "flags")
    config, kept, spec = recreation(session, flags, args.profile, freed)
    if args.allow_engine_socket:
        check_spec(spec)
    else:
        check_recreation(session, spec)
    if not (args.in_use or may_remove(engine, session, what="Create its container anew")):
        raise SandboxError(f"{session.name} was left as it is")
    with_remedies(partial(recreate_session, engine, session, config, kept, spec,
                          partial(settings_beside, session, flags)), args.yes)
    print(session.name)
    return 0


def cmd_rename(args: argparse.Namespace) -> int:
    engine, session = find_given(engines_of(args), args.session, "rename")
    rename_session(engine, session, args.new_name)
    print(args.new_name)
    return 0


def cmd_ps(args: argparse.Namespace) -> int:
    config = config_of(args)
    if args.only:
        return show_session(candidates(config), args)
    rows, lost = list_everywhere(config)
    running = {} if args.quiet else running_in(rows)
    for row in rows:
        row["running"] = running.get(row["name"], [])
    if args.json:
        print(to_json(rows, indent=2))
    elif args.quiet:
        print("".join(f"{row['name']}\n" for row in rows), end="")
    else:
        print_table(rows)
        listening = [(row, engine, ask_listeners(engine, row["name"])) for row in rows
                     if os.isatty(1) and row["ports"] and row["state"] == "running"
                     for engine in [engine_of(row["runtime"], row["host"])]]
        for row, engine, asked in listening:
            for line in unheard_ports(engine, row["name"], row["ports"], asked):
                say(line)
    for why in lost.values():
        say(why)
    return int(bool(lost))


def running_in(rows: Sequence[Mapping[str, str]]) -> dict[str, list[dict[str, str]]]:
    """What runs on terminals, by session: id, what and since. Only sessions of which it is recorded
    that something was started are asked, side by side.
    """
    asked, running = {}, {}
    for row in rows:
        records = recorded_terminals(row["name"]) if row["state"] == "running" else {}
        engine = engine_of(row["runtime"], row["host"]) if records else None
        known = recall([engine], row["name"]) if engine else None
        if known:
            asked[row["name"]] = records, ask_terminals(*known)
    for name, (records, output) in asked.items():
        with suppress(EngineProblem):
            held = read_terminals(output)
            forget_lost(name, records, {terminal.id for terminal in held})
            note_ended(name, records, held)
            held = [terminal for terminal in held if terminal.runs]
            running[name] = [{"id": terminal.id, "what": terminal.title,
                              "since": iso_seconds(terminal.started)} for terminal in held]
    return running


def show_session(engines: Sequence[Engine], args: argparse.Namespace) -> int:
    """List the terminals and jobs of a session."""
    engine, session = find_given(engines, args.only, "ps")
    held = list_terminals(engine, session) if session.state == "running" else []
    rows = [{"id": terminal.id, "kind": "terminal", "status": terminal.status,
             "state": "running" if terminal.runs else
             "lost" if terminal.clients == -1 else "ended",
             "started": iso_seconds(terminal.started),
             "ended": iso_seconds(terminal.ended) if terminal.ended else None,
             "what": terminal.title} for terminal in held] + read_jobs(session.name)
    rows.sort(key=lambda row: str(row["started"]))
    if args.json:
        print(to_json(rows, indent=2))
    elif args.quiet:
        print("".join(f"{row['id']}\n" for row in rows), end="")
    else:
        print_columns(("id", "kind", "state", "status", "started", "ended", "what"), rows)
        if session.state != "running":
            say(f"{session.name} is {'stopped' if session.state == 'exited' else session.state}, "
                f"and nothing runs in it; to start it: sandbox start {session.name}")
        ports = session.created()[0]["ports"] if session.state == "running" else []
        for line in unheard_ports(engine, session.name, ports) if ports else ():
            say(line)
    return 0


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = ("name", "state", "agent", "runs", "profile", "network", "ports", "image", "created",
               "directory")
    copy = {"copy": " (copy)"}
    print_columns(columns, [{**row, "runs": shown_running(row["running"]),
                             "directory": row["directory"] + copy.get(row["workspace"], ""),
                             "ports": ", ".join(map(short_port, row["ports"]))} for row in rows])


def shown_running(running: Sequence[Mapping[str, str]]) -> str:
    """What runs and since when, in short: the newest."""
    if not running:
        return ""
    what = (running[-1]["what"].split() or ["?"])[0]
    more = f" +{len(running) - 1}" if running[1:] else ""
    return f"{os.path.basename(what)[:20]} {local_time(running[-1]['since'])}{more}"


def local_time(text: str) -> str:
    """Day, hour and minute here for ISO 8601, which may be UTC."""
    if text.endswith("Z"):
        from datetime import datetime

        with suppress(ValueError):
            text = datetime.fromisoformat(text).astimezone().isoformat()
    return text.replace("T", " ")[:16]


def print_columns(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    table = [[c.upper() for c in columns]]
    for row in rows:
        short = {name: "" if value is None else str(value) for name, value in row.items()}
        for name in {"created", "started", "ended"} & row.keys():
            short[name] = local_time(short[name])
        table.append([one_line(short[c]) or "-" for c in columns])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(map(str.ljust, line, widths)).rstrip())


def cmd_net(args: argparse.Namespace) -> int:
    engine, session = find_given(engines_of(args), args.session, "net")
    if not session.has_rules and (args.action != "log" or not session.proxy):
        network = session.labels.get("sandbox.network")
        raise SandboxError(f"{session.name} has no allowlist: its network is {network}",
                           "create it with --allow HOST")
    if bool(args.reached) != (args.action in ("allow", "deny", "check")):
        raise SandboxError(f"net {args.action} takes {'no hosts' if args.reached else 'hosts'}",
                           code=2)
    if args.action == "log":
        return show_log(engine, session, args.follow)
    if args.action == "show":
        print(to_json(network_of(session, session_config(session)), indent=2))
        return 0
    asked = {"allow": [], "deny" if args.action == "deny" else "allow": args.reached}
    rules = Layer({"network": asked}, "check", code=2,
                  places={"network": args.action}).values["network"]
    if args.action == "check":
        set_rules(engine, session, network_of(session, session_config(session)))
        return max(check_host(engine, session, host) for host in args.reached)
    change_rules(engine, session, rules)
    return 0


def cmd_prune(args: argparse.Namespace) -> int:
    """Remove what a crash has left: proxies and volumes of no session, half-written files."""
    met, engines = 0, engines_of(args)
    for engine in engines:
        with suppress(EngineProblem), lock_homes(shared=False):
            prune_engine(engine, args.dry_run, args.copies)
            met += 1
    if not met:
        pick_engine(engines)  # raises and says why
    for path in half_written():
        show(path)
        if not args.dry_run:
            os.unlink(path)
    return 0


def prune_engine(engine: Engine, dry_run: bool, copies: bool) -> None:
    """Remove the proxies and volumes of an engine whose session is gone, and print their names."""
    left = leftovers(engine, copies)
    if left:  # a proxy and a volume are made a moment before their session
        time.sleep(CREATION_SECONDS)
        left = [item for item in leftovers(engine, copies) if item in left]
    homes = known_homes(engine) if left else {}
    for name, argv in left:
        if not argv:
            what = ("is another client's mirror of a directory" if name.startswith(MIRROR_VOLUME)
                    else "holds work of a session that is gone")
            say(f"{name} {what}: sandbox prune --copies removes it")
            continue
        print(name)
        if name in homes:
            say(f"{name} is the home of {homes[name]}, whose container is gone")
        if not dry_run:
            Output(argv, LONG_SECONDS).result()
            forget_lock(name)


def known_homes(engine: Engine) -> dict[str, str]:
    """The names of the sessions that were last seen with a home, by that."""
    folder = os.path.dirname(memory_path(engine, ""))
    found = {}
    for file in os.listdir(folder) if os.path.isdir(folder) else ():
        name = file.removeprefix(f"{engine.name}-").removesuffix(".json")
        if known := recall([engine], name):
            found[known[1].home] = name
    return found


def leftovers(engine: Engine, copies: bool) -> list[tuple[str, list[str]]]:
    """The proxies and shadows, then the volumes of no session: a name, and the engine call that
    removes it; [] for a copy that was finished and another client's mirror of a directory, unless
    `copies` are to go, too.
    """
    import re

    volumes = engine.ask(engine.argv("volumes")).split()
    # Volumes with other names are not ours.
    names = "sandbox-((net|home|shadow|copy)-[0-9a-f]{10}|mirror-[0-9a-f]{10,20})"
    volumes = [volume for volume in volumes if re.fullmatch(names, volume)]
    _, rows = list_containers([engine])
    ids = {row["labels"]["sandbox.session"] for row in rows if not is_proxy(row)}
    used = {NET_VOLUME + id for id in ids} | {row["labels"].get("sandbox.home") for row in rows}
    for row in rows:
        session = Session(row["name"], "", row["labels"])
        used |= {session.copy, session.store}
    others: list[str] = []
    if any(volume.startswith(MIRROR_VOLUME) for volume in volumes):
        import sandbox_travel

        used |= sandbox_travel.mirrors(rows)
        ours = sandbox_travel.our_mirrors()
        others = [volume for volume in volumes if volume.startswith(MIRROR_VOLUME)
                  and not copies and not volume.startswith(ours)]
    kept = [volume for volume in volumes if volume.startswith(COPY_VOLUME) and not copies
            and volume not in used and volume.replace(COPY_VOLUME, STORE_VOLUME) in volumes]
    used |= {volume.replace(COPY_VOLUME, STORE_VOLUME) for volume in kept}
    proxies = [row["name"] for row in rows
               if is_proxy(row) and row["labels"]["sandbox.session"] not in ids]
    shadows = engine.read_list(engine.ask(engine.list_argv("sandbox.shadow", ())))
    proxies += [row["name"] for row in shadows if row["state"] != "running"]
    return [*((proxy, engine.argv("remove", proxy)) for proxy in proxies),
            *((volume, [] if volume in (*kept, *others) else engine.argv("remove-volume", volume))
              for volume in volumes if volume not in used)]


def half_written() -> list[str]:
    """The temporary files of write_private() that nobody is going to rename."""
    import re

    tops = [sandbox_home()]
    tops += [entry.path for entry in os.scandir(tops[0]) if entry.name.startswith("@")]
    folders = tops + [os.path.join(top, folder) for top in tops
                      for folder in ("env", "known", "sessions")]
    entries = [entry for folder in folders if os.path.isdir(folder) for entry in os.scandir(folder)]
    return sorted(entry.path for entry in entries
                  if re.fullmatch(r".+\.(json\.?|env\.)[0-9a-f]{10}", entry.name)
                  and time.time() - entry.stat().st_mtime > 60)


def cmd_config(args: argparse.Namespace) -> int:
    """Print the effective configuration, or the commands that run would execute."""
    if args.what == "command":
        return show_command(args)
    config = load_config(flags_layer(args), args.profile)
    result: dict[str, Any] = {}
    for name, settings in config.settings.items():
        values = [described(setting, KEYS[name].secret, args.reveal) for setting in settings]
        result[name] = values if KEYS[name].kind == "list" else values[-1]
    result["env"] = {name: described(setting, is_secret(name), args.reveal)
                     for name, setting in config.env().items()}
    print(to_json(result, indent=2, ensure_ascii=False))
    return 0


def described(setting: tuple[Any, str], secret: bool, reveal: bool) -> dict[str, Any]:
    value, source = setting
    hidden = (secret or is_secret("", value)) and not reveal
    return {"value": MASK if hidden else value, "source": source}


def show_command(args: argparse.Namespace) -> int:
    """Print, as lines for a shell, what `run` with the same options would execute."""
    request = RunRequest(args, look=True)
    if request.session:
        engine, session = request.engines[0], request.session
        calls = [] if session.state == "running" else [engine.argv("start", session.name)]
        restart = [engine.argv("restart", session.proxy)] if session.proxy and calls else []
        if session.has_rules:
            restart.append(set_argv(engine, session, network_of(session, request.config)))
        calls = restart + calls
    else:
        engine, rootless = pick_engine(request.engines)
        request.name = engine.full(request.name)
        spec, user = placed(engine, request.config, request.spec, rootless)
        request.spec = dict(spec)
        labels = labels_of(request.config, request.kept, spec, user)
        session = Session(request.name, "running", labels)
        note_making(session)
        calls = [proxy_argv(engine, session, request.spec)] if session.proxy else []
        if request.source and request.source.home:
            calls.append(copy_home_argv(engine, request.source, session.home))
        if session.copy:
            import sandbox_changes

            if engine.shares_files:
                calls += sandbox_changes.copy_argvs(engine, session, request.source)
        calls.append(session_argv(engine, request.name, request.spec, labels))
    lines = [quote_all(argv) + " >/dev/null" for argv in calls]
    terminal = os.isatty(0)
    argv = exec_argv(engine, session, request.workdir(), random_id(),
                     compose(request.base(), args.agent_args),
                     stdin=True, size=terminal_size(0) if terminal else None)
    env = (terminal_env() if terminal else {}) | request.env
    masked = [name for name, value in env.items() if is_secret(name, value) and not args.reveal]
    script = env_script(env | dict.fromkeys(masked, MASK))
    lines.append(f"SANDBOX_ENV={quote_all([script])} {quote_all(argv)}")
    if masked:
        lines.insert(0, f"# masked: {' '.join(masked)} (--reveal prints them)")
    if session.copy and not engine.shares_files and not request.session:
        lines.insert(0, f"# and the directory is sent to {engine.host} before")
    if session.hides_keys:
        lines.insert(0, "# and the keys are given to the session's broker over stdin")
    if request.turn_of(engine, session, compose(request.base(), args.agent_args)):
        lines.insert(0, "# and a snapshot before and after (--no-checkpoint: none)")
    if args.rm_on_exit:
        calls = [engine.argv("remove", session.name, *filter(None, [session.proxy]))]
        calls += [engine.argv("remove-volume", volume)
                  for volume in filter(None, (session.volume, session.home, session.copy))]
        lines += [quote_all(argv) + " >/dev/null" for argv in calls]
    print("\n".join(lines))
    return 0


def cmd_serve(args: argparse.Namespace) -> int:
    import sandbox_web

    return sandbox_web.serve(args)


def cmd_changes(command: str, args: argparse.Namespace) -> int:
    """Those of sandbox_changes, which no other command waits for."""
    import sandbox_changes

    status: int = getattr(sandbox_changes, f"cmd_{command}")(args)
    return status


def cmd_keys(command: str, args: argparse.Namespace) -> int:
    """Those of sandbox_keys."""
    import sandbox_keys

    status: int = getattr(sandbox_keys, f"cmd_{command}")(args)
    return status


def cmd_build(args: argparse.Namespace) -> int:
    end_on_signals()
    if args.imageVersion:
        tools = [item.removeprefix("TOOL=") for item in args.imageBuildArgs
                 if item.startswith("TOOL=")]
        args.imageVersion, _ = split_build_version(args.imageVersion, tools[-1] if tools else "")
    config = load_config(flags_layer(args), args.profile)
    if args.push and config.image.startswith("localhost/"):
        raise SandboxError(f"{config.image} has no registry in its name",
                           "name one: --in REGISTRY/NAME", 2)
    with_remedies(lambda: build_image(pick_engine(candidates(config))[0], config,
                                      args.update_agents), args.yes)
    if args.push:
        engine = pick_engine(candidates(config))[0]
        return call(engine.argv("push", config.image))
    return 0


# --- Doctor and init ---


class Check:
    """One line of the doctor: `status` is ok, warn or fail."""

    def __init__(self, name: str, status: str, detail: str, remedy: Remedy | None = None) -> None:
        self.name, self.status, self.detail, self.remedy = name, status, detail, remedy


def check_config() -> Check:
    """The file, every run profile and every env file."""
    path = config_path()
    try:
        data = read_config()
        for profile in (None, *data.get("runs", {})):
            load_config(profile=profile, data=data).env()
    except SandboxError as error:
        return Check("configuration", "fail", error.message, Remedy([], note=error.hint))
    if not os.path.exists(path):
        return Check("configuration", "ok", f"no {path}; sandbox init writes a first one")
    if os.stat(path).st_mode & 0o077:
        return Check("configuration", "warn", f"others can read {path}",
                     Remedy([["chmod", "600", path]]))
    return Check("configuration", "ok", path)


def failed_check(name: str, error: SandboxError) -> Check:
    """The line for what `run` would end with, in the same words."""
    remedy = error.remedy if isinstance(error, EngineProblem) else Remedy([], note=error.hint)
    return Check(name, "fail", error.message, None if error.hint == LAST_HINT else remedy)


def check_engine(config: Config) -> tuple[list[Check], Engine | None]:
    """Is there an engine, may we use it, is it recent: the first that fails ends the list."""
    names = ("engine", "permission", "daemon", "version")
    try:
        engine, rootless = pick_engine(candidates(config))
    except EngineProblem as error:
        at = names.index({"old": "version", "helper": "daemon"}.get(error.kind, error.kind))
        return [*(Check(n, "ok", "") for n in names[:at]), failed_check(names[at], error)], None
    except SandboxError as error:
        return [failed_check("engine", error)], None
    try:
        # podman answers what pick_engine asks for without touching its storage, so ask for more.
        engine.check_helpers()
    except SandboxError as error:
        return [Check("engine", "ok", engine.name), failed_check("daemon", error)], None
    details = (engine.name, "rootless" if rootless else "rootful", "answers", engine.version)
    return [Check(n, "ok", d) for n, d in zip(names, details, strict=True)], engine


def check_image(engine: Engine, config: Config) -> list[Check]:
    """Is the image there, does a container of it get a network, and do its agents start?"""
    image = Image(engine, config.image)
    if not image.id:
        return [failed_check("image", missing_image(engine, config))]
    connected = None
    if engine.daemonless:  # a daemon has the helpers of a network from the start
        connected = Output(engine.try_argv(config.image, ["sh", "-c", ":"]), LONG_SECONDS)
    sooner = {name: value for a in AGENTS.values() for name, value in a.version_env.items()}
    script = env_script(sooner) + "\n" + asset("session/versions.sh").decode()
    command = ["sh", "-c", script, "sh", *(image.agents or AGENTS)]
    _, out, err = Output(engine.try_argv(config.image, command, "none"), LONG_SECONDS).result()
    checks = [Check("image", "ok", config.image)]
    cut, _, words = connected.result() if connected else (0, "", "")
    if connected:
        checks.append(failed_check("network", engine.failure(words)) if cut
                      else Check("network", "ok", ""))
    if not out:
        return checks if cut else [*checks, failed_check("agents", engine.failure(err))]
    versions = out.split("\n")[:-1]
    missing = [line.split()[0] for line in versions if line.endswith("missing")]
    if versions and not missing:
        return [*checks, Check("agents", "ok", "; ".join(versions))]
    build = [*missing_image(engine, config).remedy.commands[0], "--update-agents"]
    remedy = (Remedy([], note=engine.elsewhere_built) if engine.elsewhere_built else
              Remedy([build], lambda: build_image(engine, config, True)))
    detail = f"{', '.join(missing) or 'every agent'} does not start"
    return [*checks, Check("agents", "warn", detail, remedy)]


def check_disk() -> Check:
    """Room where the engines keep their images, as far as it is on this machine."""
    places = (*(engine.disk_root for engine in ENGINES.values()), os.path.expanduser("~"), "/")
    place = next(path for path in places if os.path.isdir(path))
    stat = os.statvfs(place)
    free = stat.f_bavail * stat.f_frsize / 1e9
    short = free < 8
    return Check("disk", "warn" if short else "ok", f"{free:.0f} GB free at {place}",
                 Remedy([], note="make room: the image and its build need 8 GB") if short else None)


def diagnose_all(flags: Layer) -> list[Check]:
    """All checks, in the order in which one needs the other."""
    configuration = check_config()
    config = load_config(flags, data={} if configuration.status == "fail" else None)
    checks, engine = check_engine(config)
    image = check_image(engine, config) if engine else []
    if engine and engine.host:
        import sandbox_hosts

        return [*checks, *image, *sandbox_hosts.check_there(engine, config), configuration]
    there = config.get("host")
    return [*checks, *image, *([] if there else [check_disk()]), configuration]


def cmd_doctor(args: argparse.Namespace) -> int:
    """Check what a run needs; with --fix carry the remedies out."""
    if args.role:
        engine = engines_of(args)[0]
        if not engine.role():
            raise SandboxError(f"{engine.name} needs no role", "--on names a cluster", 2)
        print(engine.role(), end="")
        return 0
    checks = diagnose_all(flags_layer(args))
    met: set[str] = set()
    while args.fix and (args.yes or can_ask()):
        problems = [EngineProblem(c.name, c.detail, c.remedy) for c in checks
                    if c.remedy and c.remedy.offered and c.remedy.text() not in met]
        if not problems:
            break
        met.add(problems[0].hint)
        if confirm(problems[0], args.yes):
            with_remedies(problems[0].remedy.carry_out, args.yes)
        checks = diagnose_all(flags_layer(args))
    mendable = any(check.remedy and check.remedy.offered for check in checks)
    if args.fix and mendable and not (args.yes or can_ask()):
        say("nothing was changed: there is no terminal to ask on (--yes mends without asking)")
    if args.json:
        print(to_json([{"check": c.name, "status": c.status, "detail": c.detail,
                        "remedy": c.remedy.text() if c.remedy else None} for c in checks],
                      indent=2))
    else:
        for check in checks:
            show(f"{check.status:4}  {check.name:13}  {check.detail}".rstrip())
            if check.remedy:
                show(f"      {'':13}  {check.remedy.text()}")
    return int(any(check.status == "fail" for check in checks))


def cmd_init(args: argparse.Namespace) -> int:
    data = read_config()
    runs = data.setdefault("runs", {})
    for profile in (None, *runs):  # raises: do not add to a file that is wrong
        load_config(profile=profile, data=data)
    found = [agent for agent in AGENTS if adopt_agent(agent, runs, args.force)]
    if not found:
        say("nothing new: no agent's credentials or variables are here, "
            "or each has its run profile already")
    if found or not os.path.exists(config_path()):
        write_private(config_path(), to_json(data, indent=2, ensure_ascii=False) + "\n")
        show(f"wrote {config_path()}")
    author = git_author({"directory": os.path.expanduser("~")})
    if len(author) == 4:
        show("commits in sessions are by {GIT_AUTHOR_NAME} <{GIT_AUTHOR_EMAIL}>, "
             "as git on this machine has it".format(**author))
    for agent in found:
        print(f"try: sandbox run -r {agent}")
    return 0


def adopt_agent(agent: str, runs: dict[str, Any], force: bool) -> bool:
    """Make the run profile of an agent from what is on this machine; False for nothing."""
    known = AGENTS[agent]
    volumes = [f"{host}:{CONTAINER_HOME}/{file}" for file in known.files
               if os.path.isfile(host := known.host_file(file.partition(":")[0]))]
    env = {name: os.environ[name] for name in known.variables if os.environ.get(name)}
    if not volumes and not env:
        return False
    if agent in runs and not force:
        say(f"runs.{agent} exists and stays as it is (--force renews it)")
        return False
    profile = {**runs.get(agent, {}), "yolo": known.shortcuts[0]}
    profile.pop("command", None)
    taken = {volume.split(":")[1] for volume in profile.get("volumes", [])}
    if env:
        profile.setdefault("keys", "hidden")
    profile["volumes"] = [*profile.get("volumes", []),
                          *(v for v in volumes if v.split(":")[1] not in taken)]
    if env:
        path = os.path.join(os.path.abspath(sandbox_home()), "env", f"{agent}.env")
        add_to_env_file(path, {name: value for name, value in env.items() if "\n" not in value})
        profile["envFile"] = list(dict.fromkeys([*profile.get("envFile", []), path]))
        others = {name: value for name, value in profile.get("env", {}).items() if name not in env}
        profile["env"] = others | {name: value for name, value in env.items() if "\n" in value}
    runs[agent] = profile
    print(f"{agent}: run profile {agent!r}")
    for volume in volumes:
        show(f"  mounts {volume}")
    for name in env:
        print(f"  {name} from this environment")
    return True


def add_to_env_file(path: str, env: Mapping[str, str]) -> None:
    """Set variables in an env file, where the last line of a name counts; the rest stays."""
    text = ""
    with (suppress(FileNotFoundError),
          open(path, encoding="utf-8", errors="surrogateescape", newline="") as file):
        text = file.read()
    have = {name: value for name, (value, _) in parse_env_file(text, path).items()}
    lines = [f"export {name}={env_quote(value)}\n" for name, value in env.items()
             if have.get(name) != value]
    write_private(path, text + ("\n" if text and not text.endswith("\n") else "") + "".join(lines))


def env_quote(value: str) -> str:
    """A value of one line as an env file holds it."""
    for char in '\\"$`':
        value = value.replace(char, "\\" + char)
    return f'"{value}"'


# --- Parser ---

# Options that are no key of the configuration, by the name they are stored under.
FLAG: dict[str, Any] = {"action": "store_true"}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "what": ("", {"choices": ("show", "command"),
                  "help": "show: effective values with their sources; "
                          "command: what run would execute"}),
    "names": ("", {"nargs": "+", "metavar": "NAME", "help": "container name"}),
    "only": ("", {"nargs": "?", "metavar": "NAME",
                  "help": "list the terminals and jobs of this container"}),
    "id": ("", {"nargs": "?", "metavar": "ID",
                "help": "of a terminal, for logs also of a job, as ps NAME prints it; default: "
                        "the newest"}),
    "copied": ("", {"metavar": "SOURCE", "help": "what is copied: a path, or NAME:PATH"}),
    "target": ("", {"metavar": "TARGET", "help": "where to: NAME:PATH, or a path"}),
    "shell": ("", {"choices": ("bash", "zsh", "fish"),
                   "help": "the shell to print a completion script for"}),
    "profile": ("-r --run",
                {"metavar": "PROFILE", "help": "run profile: runs.PROFILE of sandbox.json"}),
    "copy": ("--copy", FLAG | {"help": "work on a copy of the directory: see merge"}),
    "copy_count": ("--copies", {"metavar": "N", "type": int, "help":
                                "start the same in N sessions, each on a copy, and return"}),
    "allow": ("--allow", REPEATED | {"metavar": "HOST[:PORT]",
                                     "help": "a host that it may reach, and no other than "
                                     "those; *.NAME for all below it; repeatable"}),
    "action": ("", {"choices": ("log", "show", "allow", "deny", "check"),
                    "help": "log: what was asked for; show: the rules; allow, deny: change them; "
                            "check: try a host"}),
    "session": ("", {"metavar": "NAME", "help": "container name"}),
    "any": ("", {"nargs": "?", "metavar": "NAME", "help": "container name; default: all"}),
    "amount": ("", {"nargs": "?", "metavar": "AMOUNT",
                    "help": "such as 5usd, 2e6tokens or 60minutes/day; '' for none; default: "
                            "print what it is and what is spent"}),
    "new_name": ("", {"metavar": "NEW", "help": "its new name"}),
    "source": ("--from", {"metavar": "NAME", "help": "make a duplicate of this session, "
                          "with its conversations and settings"}),
    "reached": ("", {"nargs": "*", "metavar": "HOST[:PORT]", "help": "host names or addresses"}),
    "turn": ("", {"nargs": "?", "metavar": "TURN",
                  "help": "id of a turn as log prints it, or the beginning of one, or -1 for the "
                          "last, -2 for the one before it"}),
    "paths": ("", {"nargs": "*", "metavar": "PATH", "default": [],
                   "help": "only what is there, or below: a path from the current directory, or "
                           "from outside of the session's directory one in that"}),
    "stat": ("--stat", FLAG | {"help": "how many lines of each file have changed, not which"}),
    "follow": ("-f --follow", FLAG | {"help": "go on as more comes"}),
    "dry_run": ("--dry-run", FLAG | {"help": "only print what would be done"}),
    "copies": ("--copies", FLAG | {"help": "remove copies of sessions that are gone, too"}),
    "allow_engine_socket": ("--allow-engine-socket",
                            FLAG | {"help": "permit a mount that holds an engine's socket"}),
    "new": ("--new", FLAG | {"help": "make another session, whatever the directory has, unasked"}),
    "rm_on_exit": ("--rm-on-exit", FLAG | {"help": "remove the container when the command ends"}),
    "checkpoint": ("--checkpoint", {"action": "store_const", "const": True,
                                    "help": "take a snapshot of the directory before and after; "
                                            "default: for an agent"}),
    "no_checkpoint": ("--no-checkpoint", FLAG | {"help": "take none"}),
    "strict": ("--strict", FLAG | {"help": "end with status 3 where what this machine may execute "
                                           "has changed"}),
    "reveal": ("--reveal", FLAG | {"help": "print passwords and secret values"}),
    "json": ("--json", FLAG | {"help": "print JSON"}),
    "quiet": ("-q --quiet", FLAG | {"help": "print names only"}),
    "update_agents": ("--update-agents", FLAG | {"help": "fetch the agents anew, keep the rest"}),
    "push": ("--push", FLAG | {"help": "give it to the registry in its name"}),
    "fix": ("--fix", FLAG | {"help": "carry the remedies out, after asking"}),
    "role": ("--role", FLAG | {"help": "print what a cluster's administrator must grant"}),
    "force": ("--force", FLAG | {"help": "renew run profiles that exist"}),
    "in_use": ("-f --force", FLAG | {"help": "do not ask, even where something runs in it, or "
                                       "(rm) its copy was not merged"}),
    "address": ("", {"nargs": "?", "metavar": "IP:PORT",
                     "help": "listen address; default: 127.0.0.1:3000"}),
    "background": ("-d --detach", FLAG | {"help": "run in the background"}),
    "stop": ("--stop", FLAG | {"help": "stop the background server at the address"}),
    "restart": ("--restart", FLAG | {"help": "restart the background server at the address"}),
    "cert": ("--cert", {"metavar": "FILE", "help": "certificate chain (PEM): serve TLS"}),
    "key": ("--key", {"metavar": "FILE", "help": "its private key (PEM)"}),
    "verbose": ("--verbose", FLAG | {"help": "let the output of long work pass through"}),
    "yes": ("--yes", FLAG | {"help": "apply remedies (install, start, build) without asking"}),
}


def flags_layer(args: argparse.Namespace) -> Layer:
    """The options as the highest layer. Raises SandboxError (usage) for a wrong one."""
    values = {name: getattr(args, name) for name in KEYS
              if getattr(args, name, None) not in (None, [])}
    places = {key.name: key.flags[0] for key in KEYS.values() if key.flags}
    if "env" in values:
        values["env"] = env_flags(values["env"])
    if getattr(args, "new", False) and "containerName" in values:
        raise SandboxError("--new does not go together with -n", "keep one of them", 2)
    for name, other, value in (("strict", "no_checkpoint", True),
                               ("no_checkpoint", "checkpoint", False)):
        if getattr(args, name, False):
            if getattr(args, other):
                raise SandboxError(f"{OPTIONS[name][0]} does not go together with "
                                   f"{OPTIONS[other][0]}", "keep one of them", 2)
            values["checkpoint"], places["checkpoint"] = value, OPTIONS[name][0]
    if values.get("host"):
        check_one_host(args, values["host"])
    if getattr(args, "allow", None):
        if "network" in values:
            raise SandboxError(f"--allow does not go together with --net {values['network']}",
                               "keep one of them", 2)
        values["network"], places["network"] = {"allow": args.allow}, "--allow"
    if getattr(args, "copy", False):
        values["workspace"], places["workspace"] = "copy", "--copy"
    if values.get("hostPath"):
        values["hostPath"] = os.path.join(current_directory(), values["hostPath"])
    if "envFile" in values:
        values["envFile"] = [path if not path or path.startswith(("/", "~/"))
                             else os.path.join(current_directory(), path)
                             for path in values["envFile"]]
    layer = Layer(values, "flags", code=2, places=places)
    layer.variables = ["".join(item.partition("=")[:2]) for item in getattr(args, "env", ())]
    return layer


def check_one_host(args: argparse.Namespace, host: str) -> None:
    """Raise SandboxError for a name on another host than --on says."""
    names = [getattr(args, place, None) or "" for place in
             ("containerName", "session", "only", "any", "source")] + getattr(args, "names", [])
    for name in names:
        if "@" in name and name.partition("@")[2] != host:
            raise SandboxError(f"--on {host} does not go together with {name}",
                               "keep one of them", 2)


def env_flags(items: Sequence[str]) -> dict[str, str]:
    """NAME=value, or NAME for the value that it has in our own environment."""
    env = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals and name not in os.environ:
            message = f"-e: {item!r} is not NAME=value, and no variable of that name is set"
            raise SandboxError(message, code=2)
        env[name] = value if equals else os.environ[name]
    return env


def split_command(argv: Sequence[str]) -> tuple[list[str], str | list[str] | None, list[str]]:
    """Options, the command of -x (string or words), and the agent's arguments after `--`.

    A command with a space in its first word is one string for a shell, and options may follow it.
    Words go on to the end of the line; `--` ends them only where an agent is started.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    options, agent_args = list(argv[:end]), list(argv[end + 1 :])
    if "-x" not in options:
        return options, None, agent_args
    at = options.index("-x")
    words = options[at + 1 :]
    if not words:
        raise SandboxError("-x needs a command", 'for example: -x bash, or -x "make test"', 2)
    if any(c.isspace() for c in words[0]):
        return options[:at] + words[1:], words[0], agent_args
    if len(words) == 1 and end == len(argv):
        return options[:at], words if is_plain(words[0], "_.-/+") else words[0], []
    if not agent_of(words) and end < len(argv):
        words, agent_args = [*words, *argv[end:]], []
    return options[:at], words, agent_args


def options_of(command: str) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """The options of a command by the name of their value: flags, and what argparse wants."""
    of = "run" if command == "config" else command
    keys = {key.name: (key.flags, key.option()) for key in KEYS.values()
            if key.flags and (of in key.of or (of == "recreate" and key.fixed))}
    if command == "recreate":  # what is not given there stays
        keys = {name: (flags, option | {"help": option["help"].partition("; default: ")[0]})
                for name, (flags, option) in keys.items()}
    return keys | {name: (OPTIONS[name][0].split(), OPTIONS[name][1])
                   for name in COMMANDS[command][1].split()}


EPILOGS = dict.fromkeys(("run", "config"), "Arguments after -- are passed to the agent.") | {
    "recreate": "What is not given stays as it is; '' takes a list or a limit away."}


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of one command: building all of them costs more than most commands do."""
    import argparse

    epilog = EPILOGS.get(command)
    # Without a width argparse imports shutil to find one.
    columns = os.get_terminal_size(2).columns - 2 if os.isatty(2) else 100
    parser = argparse.ArgumentParser(
        prog=f"sandbox {command}", description=f"{COMMANDS[command][0].capitalize()}.",
        epilog=epilog, allow_abbrev=False,
        formatter_class=partial(argparse.HelpFormatter, width=columns))
    for name, (flags, settings) in options_of(command).items():
        parser.add_argument(*(flags or [name]), **(settings | ({"dest": name} if flags else {})))
    return parser


class Arguments:
    """What a command was given, as argparse.Namespace has it."""


def read_plainly(command: str, words: Sequence[str]) -> Any:
    """What argparse would make of words, None for what takes a closer look: a mistake, the help, an
    argument. To import argparse takes longer than all else that most commands do.
    """
    values: dict[str, Any] = {}
    known: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, (flags, settings) in options_of(command).items():
        if not flags and settings.get("nargs") not in ("?", "*"):
            return None
        is_flag = settings.get("action") == "store_true"
        values[name] = settings.get("default", False if is_flag else None)
        known.update(dict.fromkeys(flags, (name, settings)))
    left = iter(words)
    for word in left:
        name, settings = known.get(word, ("", {}))
        if settings.get("action") in ("store_true", "store_const"):
            values[name] = settings.get("const", True)
            continue
        value = next(left, "-")
        if not name or value.startswith("-") or settings.keys() & {"choices", "nargs", "type"}:
            return None
        values[name] = [*values[name], value] if settings.get("action") == "append" else value
    args = Arguments()
    vars(args).update(values)
    return args


def usage() -> str:
    commands = "\n".join(f"  {name:12} {row[0]}" for name, row in COMMANDS.items())
    return f"""\
usage: sandbox [run] [options] [-- agent arguments]
       sandbox COMMAND [options]

Run AI coding agents in containers.

commands:
{commands}

sandbox COMMAND --help explains a command; sandbox --version prints the version."""


def argparse_of(command: str, words: Sequence[str]) -> argparse.Namespace:
    """The parsed options of a command, with what -x and `--` brought where it takes them."""
    if command not in ("run", "config"):
        return read_plainly(command, words) or parser_of(command).parse_intermixed_args(words)
    options, command_words, agent_args = split_command(words)
    parser, more = None, list[str]()
    args: argparse.Namespace = read_plainly(command, options)
    if not args:
        parser = parser_of(command)
        args, more = parser.parse_known_args(options)
    if more and not more[0].startswith("-"):
        wanted = ("-y" if more[0] in SHORTCUTS else "-x", *more)
        raise SandboxError(f"unexpected words: {quote_all(more)}",
                           f"to run that: sandbox run {quote_all(wanted)}", 2)
    if parser and more:
        parser.error(f"unrecognized arguments: {quote_all(more)}")
    if args.command:
        raise SandboxError(f"-x{args.command}: a space is missing",
                           'for example: -x bash, or -x "make test"', 2)
    args.command, args.agent_args = command_words, agent_args
    return args


# --- Completion ---

def cmd_completion(args: argparse.Namespace) -> int:
    print(asset(f"completion/sandbox.{args.shell}").decode(), end="")
    return 0


NAMED_ALONE = ("rm", "stop", "start")  # take names and no more
# How many words that are no options are before one.
NAMED_AT = {"net": 1, **dict.fromkeys(("attach", "logs", "ps", "recreate", "rename", "log", "diff",
                                       "undo", "redo", "merge", "usage", "budget"), 0)}


def plain_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words that are neither options nor the values of some."""
    found, is_value = [], False
    for word in words:
        action = parser._option_string_actions.get(word)
        if not (is_value or word.startswith("-")):
            found.append(word)
        is_value = not is_value and action is not None and action.nargs != 0
    return found


def complete(words: Sequence[str]) -> list[str]:
    """What may stand in place of the last word; [] where a file name is expected."""
    command = words[0] if words else ""
    if len(words) < 2 and not command.startswith("-"):
        return [*COMMANDS, "--help", "--version"]
    if not (command in COMMANDS or command.startswith("-")) or {"-x", "--"} & set(words[:-1]):
        return []
    parser = parser_of(command if command in COMMANDS else "run")
    before = words[-2] if len(words) > 1 else ""
    if before in KEYS["yolo"].flags:
        return list(SHORTCUTS)
    if before in KEYS["runtime"].flags:
        return list(ENGINES)
    if before in KEYS["host"].flags:
        return list(config_of().get("hosts") or ())
    if before in ("-r", "--run"):
        # A shell expands the words that it gets, so only plain names are offered.
        return [name for name in read_config().get("runs", {}) if is_plain(name, "_.-")]
    name = before in KEYS["containerName"].flags
    given = plain_words(parser, words[1:-1])
    named = command in NAMED_ALONE or len(given) == NAMED_AT.get(command)
    if name or before == "--from" or named and not words[-1].startswith("-"):
        return [row["name"] for row in list_everywhere(config_of())[0]]
    if command in ("attach", "logs") and len(given) == 1 and not words[-1].startswith("-"):
        jobs = [job["id"] for job in read_jobs(given[0])] if command == "logs" else []
        return [*recorded_terminals(given[0], ended=True), *jobs]
    if command == "cp" and ":" not in words[-1] and "/" not in words[-1]:
        return [f"{row['name']}:" for row in list_everywhere(config_of())[0]]
    if command in ("diff", "undo") and given and not words[-1].startswith("-"):
        return []
    for action in parser._actions:
        if before in action.option_strings and action.nargs != 0:
            return []
    choices = [str(c) for action in parser._actions if not action.option_strings
               for c in action.choices or ()]
    return choices + [option for action in parser._actions for option in action.option_strings]


# --- Main ---


RUN_OPTIONS = ("source profile new copy copy_count allow allow_engine_socket rm_on_exit background "
               "checkpoint no_checkpoint strict yes verbose")
# What each says, its options beside those of the keys, and what carries it out.
COMMANDS: dict[str, tuple[str, str, Callable[[argparse.Namespace], int]]] = {
    "run": ("create or reuse a container and run an agent or a command in it", RUN_OPTIONS,
            cmd_run),
    "ps": ("list sessions, or what runs in one", "only json quiet", cmd_ps),
    "attach": ("go back to a terminal of a session", "session id", cmd_attach),
    "logs": ("print what an agent, a prompt or a command has printed", "session id follow",
             cmd_logs),
    "log": ("list the turns of agents in a session, and what each has changed", "session json",
            partial(cmd_changes, "log")),
    "diff": ("show what agents have changed, or one turn", "session turn paths stat json",
             partial(cmd_changes, "diff")),
    "undo": ("take back the last turn of an agent, or all since one began",
             "session turn paths dry_run in_use", partial(cmd_changes, "undo")),
    "redo": ("take back the last undo", "session", partial(cmd_changes, "redo")),
    "merge": ("bring what was done in a copy into its directory", "session dry_run",
              partial(cmd_changes, "merge")),
    "stop": ("stop containers", "names", cmd_stop),
    "start": ("start containers that were stopped", "names", cmd_start),
    "cp": ("copy between this machine and a session", "copied target", cmd_cp),
    "rm": ("remove containers", "names in_use", cmd_rm),
    "recreate": ("create a session's container anew, its conversations stay",
                 "session profile allow allow_engine_socket in_use yes verbose", cmd_recreate),
    "rename": ("give a session another name", "session new_name", cmd_rename),
    "net": ("show or change what a session may reach", "action session reached follow", cmd_net),
    "usage": ("show what agents have used of their models, by day", "any json",
              partial(cmd_keys, "usage")),
    "budget": ("show or change what agents may use", "session amount",
               partial(cmd_keys, "budget")),
    "prune": ("remove what a crash or a power cut has left", "dry_run copies", cmd_prune),
    "build": ("build the image", "update_agents push profile yes verbose", cmd_build),
    "config": ("print the effective configuration, or what run would execute",
               f"what {RUN_OPTIONS} reveal", cmd_config),
    "doctor": ("check what a run needs, and mend it", "json fix role yes verbose", cmd_doctor),
    "init": ("write a first configuration from the agents' settings found here", "force", cmd_init),
    "serve": ("run the web service, or control the one in the background",
              "address profile background stop restart cert key yes verbose", cmd_serve),
    "completion": ("print a completion script for a shell", "shell", cmd_completion),
}


def dispatch(argv: Sequence[str]) -> int:
    """Parse the command line with the one parser it needs, and carry it out."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"sandbox {__version__}")
        return 0
    if argv[0] == "__complete":
        print("\n".join(complete(argv[1:])))
        return 0
    if argv[0] == "__job":
        supervise(argv[1])
    command, rest = argv[0], argv[1:]
    if command.startswith("-"):
        command, rest = "run", argv
    if command not in COMMANDS:
        hint = f"to start {AGENTS[SHORTCUTS[command]].title}: sandbox run -y {command}" \
            if command in SHORTCUTS else "sandbox --help lists them"
        raise SandboxError(f"there is no command {command!r}{nearest(command, COMMANDS)}", hint, 2)
    try:
        args = argparse_of(command, rest)
        if getattr(args, "verbose", False):
            os.environ["SANDBOX_VERBOSE"] = "1"  # also for ourselves, started again by a remedy
        return COMMANDS[command][2](args)
    except SandboxError as error:
        if command != "run" and error.code == 125:  # 125 is for `run` alone
            error.code = 1
        raise
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise SandboxError(f"{error.filename or 'output'}: {error.strerror}", NO_ROOM_HINT,
                           125 if command == "run" else 1) from None


def supervise(folder: str) -> NoReturn:
    """Be the supervisor of a job: for a web service that has run since before an upgrade."""
    argv = [sys.executable, "-I", "-S", "-c", asset("session/job.py").decode(), folder,
            str(1 << 30), *read_json(f"{folder}/job.json.new")["argv"]]
    os.execv(sys.executable, argv)


def report(error: SandboxError) -> None:
    """Two lines: what happened, and the one thing to do."""
    say(error.message)
    if error.hint:
        print(f"  {printable(error.hint)}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; every error of ours is printed here."""
    try:
        if hasattr(sys.stdout, "reconfigure"):  # values pass through as the bytes they were
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        status = dispatch(sys.argv[1:] if argv is None else argv)
        if sys.stdout:
            sys.stdout.flush()
        return status
    except SandboxError as error:
        report(error)
        return error.code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            say(f"{error.filename or 'output'}: {error.strerror}")
        try:
            sys.stdout.flush()
        except OSError:  # or Python would complain of it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141 if isinstance(error, BrokenPipeError) else 1


def entry() -> NoReturn:
    """The installed command and the zipapp: without PYTHONPATH, whose empty item is the project.

    Not with -I, which would hide what is installed for the user: it may be ourselves.
    """
    if os.environ.get("PYTHONPATH") and not sys.flags.ignore_environment:
        os.execv(sys.executable, [sys.executable, "-E", "-P", *sys.orig_argv[1:]])
    leave(main())


def leave(status: int) -> NoReturn:
    """End without the interpreter's own tidying, which nothing here needs and which takes 2 ms."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.modules.setdefault("sandbox", sys.modules[__name__])
    leave(main())
