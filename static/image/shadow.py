"""Snapshots of a workspace in a store of their own: what a turn changed, undo, redo and merge.

    shadow.py VERB STORE WORKSPACE [REQUEST]     REQUEST is a JSON object, or - to read it on stdin

    snapshot  {"turn": {"id", "when", "what", "command"}} begins a turn, {"end": ID, …} ends it;
              {} only looks. All take "keep" and "maxBytes", "agents", names that are risky below,
              and "directory", whose files these are: once it was said, no other has its tree
    log       {}: the turns, undos, redos and merges that are kept, with "paths" ([""]: all)
    diff      {"turn": ID, "paths": […], "patch": true, "now": true}; without a turn since the
              first snapshot; now: up to a new one, unless it is of a turn that has ended
    undo      {"turn": ID, "only": true, "paths": […], "dry": true, "discard": true}: the last
              turn that is not undone, or all since this one, or only this one; discard: what was
              never kept may go, too
    redo      {"turn": ID, "paths": […], "dry": true}: undo the last undo, or the one of this turn
    merge     {"tree": "origin", "paths": […], "dry": true}: bring the work of the tree "main"
              into WORKSPACE, which is another one, named by "tree" (the other verbs know "tree",
              too). Where it is the mirror of one elsewhere, {"dry", "send": true} answers with
              "kind", "mode" and "size" of each change, whose contents follow the answer;
              {"elsewhere": true} notes what has come there by now, and writes nothing; modes count
              as come, but for those of "lost": […]
              All three answer {"dry", "turns", "changed": [{"path", "status", "risk"}],
              "left": [{"path", "why", "conflict"}]}; "conflict" is false where it never could go
    prune     {"keep": TURNS, "maxBytes": BYTES}

stdout has one JSON object; a failure is {"error", "hint", "kind"}: "missing" where there is no such
turn or change, "nothing" where there is nothing to do, or "". Paths are relative to WORKSPACE;
bytes that are not UTF-8 are lone surrogates, as in Python. Nothing of the workspace is executed or
obeyed: only this program reads and writes it, and git sees nothing but objects, whose names all
begin with a mark of ours, so that it knows none of them:
  =NAME    a file, link or directory      :m=NAME  its mode, where it is not 0644 or 0755
  :dir     a directory's own mode         :s=NAME  what was seen and not kept: kind, size, stamp

STORE has git/ (a bare repository of SHA-256 packs, written here), rules/ (the ignore files of the
first snapshot), cache-TREE (what was seen last, to know what is unchanged), tmp/, lock and
state.json. That is the truth: a pack which it does not name is what a killed run has left.
Exit codes: 0; 1 failed; 2 usage.
"""

import codecs
import contextlib
import fcntl
import functools
import gc
import json
import marshal
import mmap
import os
import re
import stat
import sys
import time
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # dear to import, and not needed where nothing has changed
    import subprocess
    from concurrent.futures import Future, ThreadPoolExecutor

WHOLE_BYTES, IGNORED_BYTES, PATCH_BYTES = 16 << 20, 1 << 20, 4 << 20
KEEP_TURNS, STORE_BYTES, PACKS = 50, 2 << 30, 40
LISTED, FILES = 50, 20_000  # in the log for a turn, and in a diff
SHARED = 500  # directories from which on a second process helps
ASKED_BYTES, BATCH_BYTES = 32 << 10, 1 << 20
DEPTH, PATH_CHARACTERS, ATTEMPTS = 200, 3000, 3
RACY_NS = 2_000_000_000  # some file systems keep times of two seconds
FILE, LINK, DIR, NOTE = "file", "link", "dir", "note"
KINDS = {b"100644": FILE, b"100755": FILE, b"120000": LINK, b"40000": DIR}
MARKS = "=", ":m=", ":s="
PIPE, DEVNULL = -1, -3  # subprocess's
S_IFMT, S_IFDIR = 0o170000, 0o40000
PACKED = {b"tree": 2, b"blob": 3}
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CONFIG = """\
[core]
	repositoryformatversion = 1
	bare = true
	bigFileThreshold = 4m
	attributesFile = /dev/null
	excludesFile = /dev/null
	hooksPath = /dev/null
	fsmonitor = false
[user]
	name = shadow
	email = shadow
[extensions]
	objectformat = sha256
[merge]
	renames = false
	directoryRenames = false
"""

# --- What the host may execute or obey later: a pattern of the whole path, the reason ---

RISKS = (
    (r"\.git/(?:.*/)?config(?:\.worktree)?", "git runs programs that this file names"),
    (r"\.git/(?:.*/)?hooks/(?!.*\.sample$).*", "git runs it at a commit, merge or checkout"),
    (r"\.git/(?:.*/)?info/attributes|\.gitattributes", "tells git which filters to run"),
    (r"\.git/(?:.*/)?(?:commondir|gitdir|alternates|worktrees/.*)|\.git",
     "tells git to use another repository, with its configuration"),
    (r"\.git/(?:index|(?:.*/)?(?:HEAD|ORIG_HEAD|FETCH_HEAD|packed-refs"
     r"|(?:refs|logs|objects|info)/.*|hooks/.*\.sample|COMMIT_EDITMSG|index|description))", ""),
    (r"\.git/.*", "git may obey it"),
    (r"\.gitmodules", "names repositories that git fetches and checks out"),
    (r"\.gitconfig|\.lfsconfig|HEAD", "git may take its directory or its settings from it"),
    (r"\.hg(?:/hgrc.*|/sharedpath)?|\.jj(?:/.*config\.toml)?",
     "version control runs programs that this file names"),
    (r"\.vscode/.*|.*\.code-workspace|\.idea/.*|\.fleet/.*|\.zed/.*|\.vs/.*|\.cursor/.*"
     r"|\.windsurf/.*", "an editor runs tasks and takes programs from it"),
    (r"\.exrc|\.n?vimrc|\.nvim\.lua|\.lvimrc|\.dir-locals\.el|\.sublime-project|\.projectile",
     "an editor executes it when the directory is opened"),
    (r"\.envrc|\.env\.(?:sh|zsh)|\.autoenv|\.?mise\.toml|\.tool-versions|\.in|\.out|flake\.nix"
     r"|(?:default|shell)\.nix|devbox\.json", "a shell loads it on entering the directory"),
    (r"\.(?:bash|zsh|k?sh|c|tc)(?:rc|env|_?profile|_?login|_?logout)|\.profile|\.z(?:profile|login)"
     r"|config\.fish|.*\.fish", "a shell executes it when it starts"),
    (r"AGENTS\.md|\.?mcp\.json|\.cursorrules|\.windsurfrules|\.clinerules.*|\.roo/.*|\.aider.*"
     r"|\.agents?/.*|copilot-instructions\.md", "agents on the host obey it"),
    (r"\.github(?:/(?:workflows|actions)/.*)?|\.git(?:lab|ea|hub)-ci\.yml|\.(?:forgejo|gitea)/.*"
     r"|\.circleci/.*|Jenkinsfile|\.travis\.yml|azure-pipelines\.ya?ml|bitbucket-pipelines\.yml"
     r"|\.drone\.ya?ml|\.buildkite/.*|\.woodpecker.*|\.appveyor\.yml|cloudbuild\.ya?ml",
     "continuous integration runs it with its secrets"),
    (r"(?:Docker|Container)file.*|(?:docker-)?compose.*\.ya?ml|\.devcontainer.*|Vagrantfile"
     r"|Tiltfile|skaffold\.ya?ml", "starts containers or machines on the host"),
    (r"(?:GNU)?Makefile.*|.*\.mk|[jJ]ustfile|\.justfile|Taskfile\.ya?ml|Rakefile|CMakeLists\.txt"
     r"|.*\.cmake|meson\.build|SConstruct|configure(?:\.ac)?|WORKSPACE.*|BUILD(?:\.bazel)?|.*\.bzl"
     r"|.*\.gradle(?:\.kts)?|gradlew.*|gradle/.*|mvnw.*|\.mvn/.*|pom\.xml|build\.(?:xml|rs|zig|sbt)"
     r"|\.cargo/.*|Directory\.Build\..*|.*\.(?:cs|vcx|fs)proj|Earthfile", "a build runs it"),
    (r"setup\.(?:py|cfg)|noxfile\.py|tox\.ini|conftest\.py|(?:site|user)customize\.py|.*\.pth"
     r"|Gemfile|.*\.gemspec|Package\.swift|mix\.exs|binding\.gyp", "installing or testing runs it"),
    (r"\.npmrc|\.yarnrc.*|\.yarn/.*|\.pnpmfile\.c?js|\.?pip\.conf|\.bundle/.*|\.condarc|uv\.toml",
     "a package manager takes sources and programs from it"),
    (r"\.pre-commit-(?:config|hooks)\.yaml|\.?lefthook.*\.(?:ya?ml|toml|json)|\.husky/.*"
     r"|\.overcommit\.yml|\.lintstagedrc.*", "runs when one commits"),
    (r"[^/]*\.config\.[cm]?[jt]s|\.?(?:eslint|prettier|babel|stylelint|mocha)rc\.[cm]?js|gulpfile.*"
     r"|Gruntfile.*|\.eslintrc.*|\.rubocop\.yml|\.pylintrc",
     "a tool executes it to configure itself"),
    (r"[^/]*\.(?:desktop|lnk|scpt|command|reg)|autorun\.inf|desktop\.ini",
     "a desktop may execute it"),
)
# Of these only what installing and building run counts, not the order of dependencies.
RUNS = {"package.json": ("scripts", "bin", "husky", "lint-staged", "simple-git-hooks", "gypfile",
                         "packageManager", "workspaces"),
        "composer.json": ("scripts", "bin"), "deno.json": ("tasks",),
        "pyproject.toml": ("build-system", "tool", "entry-points"),
        "cargo.toml": ("package", "build")}
RUNS_REASON = "what installing, building or testing runs has changed"
NOT_KEPT = {"large": "it is too large to keep", "ignored": "an ignored directory is only counted",
            "objects": "a repository's objects are not kept", "full": "the store was full",
            "unreadable": "it cannot be read", "deep": "it lies too deep"}

INDEX = re.compile(r"(?:^|/)\.git/(?:(?:modules|worktrees)/.+/)?index$")
WORK = "large", "full", "unreadable", "deep"  # what somebody may miss

Change = tuple[str, "Entry | None", "Entry | None"]  # a path, what was there, and what comes
Row = tuple[Any, ...]  # name, mode, size, mtime, ctime (ns) and inode
# Of a directory: its rows as marshal has them, its directories (what is said of one that was not
# entered, or ""), its mode and its tree as git has it. Bytes are compared at once, and loaded where
# they differ.
Folder = tuple[bytes, dict[str, str], int, bytes]
NO_FOLDER: Folder = marshal.dumps([], 2), {}, -1, b""


def printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()[:1000]


class Failure(Exception):
    """What ends the request, and what one can do about it."""

    def __init__(self, message: str, hint: str, kind: str = "", code: int = 1) -> None:
        super().__init__(printable(message))
        self.hint, self.kind, self.code = printable(hint), kind, code


class Entry(NamedTuple):
    kind: str
    mode: int = 0
    id: str = ""
    words: tuple[str, ...] = ()  # a note's text; of a file that runs with its owner's rights: whose


def row_of(name: str, st: os.stat_result) -> Row:
    return name, st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino


def canonical(path: str) -> str:
    """The path, with .git for each part that some file system takes for that."""
    if path.isascii() and "git" not in path.lower():
        return path
    parts = ((part, re.sub("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]", "", part)
              .partition(":")[0].rstrip(" .").lower()) for part in path.split("/"))
    return "/".join(".git" if plain in (".git", "git~1") else part for part, plain in parts)


def in_git(path: str) -> bool:
    return ".git" in canonical(path).split("/")


def whole_git(path: str) -> str:
    """The .git directory that a path lies in, or the path: half of a .git is worse than none."""
    parts = canonical(path).split("/")
    return "/".join(path.split("/")[: parts.index(".git") + 1]) if ".git" in parts else path


def below(path: str, tops: Container[str]) -> bool:
    while path and path not in tops:
        path = path.rpartition("/")[0]
    return path in tops


# --- The store: packs, git on objects, the state ---


def write(path: str, data: bytes, sync: bool = True) -> None:
    """Replace a file of the store."""
    with open(f"{path}.tmp", "wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    os.rename(f"{path}.tmp", path)


def clear(folder: str) -> None:
    import shutil

    shutil.rmtree(folder)


class Store:
    def __init__(self, folder: str) -> None:
        """Take the lock, and clear away what a killed run has left."""
        self.folder, self.packs = folder, os.path.join(folder, "git/objects/pack")
        for name in ("git/objects/pack", "git/refs", "git/info", "rules"):
            os.makedirs(os.path.join(folder, name), mode=0o700, exist_ok=True)
        self.lock = open(os.path.join(folder, "lock"), "w")  # noqa: SIM115 - until the end
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        if not os.path.exists(self.at("git/HEAD")):
            write(self.at("git/config"), CONFIG.encode())
            write(self.at("git/HEAD"), b"ref: refs/heads/none\n")
        self.state: dict[str, Any] = {"events": [], "last": {}, "first": {}, "packs": {}, "next": 1}
        self.saved = b""
        with contextlib.suppress(FileNotFoundError), open(self.at("state.json"), "rb") as file:
            self.saved = file.read()
            self.state = json.loads(self.saved)
        found = self.pack_sizes()
        for name in found.keys() - self.state["packs"].keys():
            os.unlink(os.path.join(self.packs, name))
        for name, size in self.state["packs"].items():
            if found.get(name) != size:
                raise damaged(f"{name} is not what was written")
        if os.path.exists(self.at("tmp")):
            clear(self.at("tmp"))
        self.reader: subprocess.Popen[bytes] | None = None

    def at(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def pack_sizes(self) -> dict[str, int]:
        return {entry.name: entry.stat().st_size for entry in os.scandir(self.packs)}

    def save(self) -> None:
        if (text := json.dumps(self.state).encode()) != self.saved:
            write(self.at("state.json"), text)
            self.saved = text

    # git: what it writes goes to a directory that ends with the request

    def start(self, *words: str, **more: Any) -> "subprocess.Popen[bytes]":
        import subprocess

        os.makedirs(self.at("tmp/objects"), exist_ok=True)
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self.at("git"), "LC_ALL": "C",
               "GIT_DIR": self.at("git"), "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1",
               "GIT_CONFIG_GLOBAL": os.devnull, "GIT_NO_REPLACE_OBJECTS": "1",
               "GIT_OBJECT_DIRECTORY": self.at("tmp/objects"),
               "GIT_ALTERNATE_OBJECT_DIRECTORIES": self.at("git/objects")}
        return subprocess.Popen(("git", *words), env=env, stdin=PIPE, stdout=PIPE,
                                **{"cwd": self.folder, "stderr": PIPE, **more})

    def git(self, *words: str, given: bytes = b"", fine: Sequence[int] = (0,)) -> bytes:
        process = self.start(*words)
        output, error = process.communicate(given)
        if process.returncode not in fine:
            raise damaged(f"git {words[0]}: {error.decode(errors='replace').strip()[:500]}")
        return output

    def ask(self, word: str, id: str) -> tuple[int, IO[bytes]]:
        if not self.reader:
            self.reader = self.start("cat-file", "--batch-command", stderr=DEVNULL)
        assert self.reader.stdin and self.reader.stdout
        with contextlib.suppress(BrokenPipeError):
            self.reader.stdin.write(f"{word} {id}\n".encode())
            self.reader.stdin.flush()
        head = self.reader.stdout.readline().split()
        if len(head) != 3:
            raise damaged(f"object {id[:12]} is missing")
        return int(head[2]), self.reader.stdout

    def get(self, id: str) -> bytes:
        size, stream = self.ask("contents", id)
        data = stream.read(size + 1)
        if len(data) <= size:
            raise damaged(f"object {id[:12]} cannot be read")
        return data[:-1]

    # Trees

    @functools.cache  # noqa: B019 - there is one store
    def words(self, id: str) -> tuple[str, ...]:
        return tuple(self.get(id).decode().split())

    def entries(self, tree: str) -> dict[str, Entry]:
        """What a directory has, and itself as the entry with the empty name."""
        found, modes = dict[str, Entry](), dict[str, tuple[str, ...]]()
        for name, (mode, id) in tree_entries(self.get(tree) if tree else b"").items():
            mark, _, rest = os.fsdecode(name).partition("=")
            if mark == ":m":
                modes[rest] = self.words(id.hex())
            elif mark == ":dir":
                found[""] = Entry(DIR, mode_of(self.words(id.hex())))
            elif mark:
                found[rest] = Entry(NOTE, 0, id.hex(), self.words(id.hex()))
            else:
                kind = KINDS[mode]
                found[rest] = Entry(kind, int(mode[-3:], 8) if kind == FILE else 0, id.hex())
        for path, words in modes.items():
            if path in found and found[path].kind == FILE:
                found[path] = Entry(FILE, mode_of(words), found[path].id, words[1:])
        return found

    def entry(self, tree: str, path: str) -> Entry | None:
        """What a tree has there."""
        for name in path.split("/"):
            found = self.entries(tree).get(name)
            tree = found.id if found and found.kind == DIR else ""
        return found

    def changes(self, old: str, new: str, path: str = "") -> Iterator[Change]:
        """Each path that differs between two trees; a directory for its mode and existence."""
        if old == new:
            return
        before, after = self.entries(old), self.entries(new)
        for name in sorted(before.keys() | after.keys()):
            here, a, b = f"{path}/{name}".strip("/"), before.get(name), after.get(name)
            if not name:
                if a and b and a != b:
                    yield path, a, b
                continue
            one, two = (entry.id if entry and entry.kind == DIR else "" for entry in (a, b))
            if not (one and two) and a != b:
                yield here, self.entries(one).get("", a), self.entries(two).get("", b)
            yield from self.changes(one, two, here)

    def merge(self, base: str, ours: str, theirs: str) -> tuple[str, set[str]]:
        """The tree, and the paths in conflict, whose entries in it mean nothing."""
        def commit(tree: str, *parents: str) -> str:
            words = [word for parent in parents for word in ("-p", parent)]
            return self.git("commit-tree", tree, "-m", "", *words).decode().strip()

        if base == ours or ours == theirs:
            return theirs, set()
        if base == theirs:
            return ours, set()
        # git 2.40 has --merge-base, and Debian 12 has 2.39.
        root = commit(base)
        sides = commit(ours, root), commit(theirs, root, root)
        output = self.git("merge-tree", "--write-tree", "-z", "--name-only", "--no-messages",
                          *sides, fine=(0, 1))
        tree, *names = output.rstrip(b"\0").split(b"\0")
        marked = re.compile(f"~(?:{'|'.join(sides)})(?:_[0-9]+)?(?=/|$)")
        paths = {in_workspace(marked.sub("", os.fsdecode(name))) for name in names}
        # git writes an index anew when one only looks, so it is theirs where nothing else is.
        others = {whole_git(path) for path in paths if not INDEX.search(path)}
        indexes = {path for path in paths if whole_git(path) not in others}
        whole = tree.decode()
        return self.graft(whole, theirs, indexes, True) if indexes else whole, others

    def graft(self, tree: str, source: str, paths: Iterable[str], whole: bool) -> str:
        """The tree with what another one has at these paths; `whole`: with all that is in them."""
        pack = Pack(self)

        def grafted(tree: bytes, source: bytes, paths: Iterable[str]) -> bytes:
            here, there = (tree_entries(self.get(id.hex()) if id else b"")
                           for id in (tree, source))
            inner = dict[str, list[str]]()
            for path in paths:
                inner.setdefault(path.partition("/")[0], []).append(path.partition("/")[2])
            for first, rests in inner.items():
                folder = os.fsencode(f"={first}")
                old, new = (side[folder][1] if side.get(folder, b" ")[0] == b"40000" else b""
                            for side in (here, there))
                if first and ((old or new) and all(rests)
                              or old and new and not whole and first != ".git"):
                    here[folder] = b"40000", grafted(old, new, rests)
                    continue
                for name in names(first) if first else [b":dir"]:
                    here.pop(name, None)
                    if name in there:
                        here[name] = there[name]
            return pack.put(b"tree", tree_data(here))

        grown = grafted(bytes.fromhex(tree), bytes.fromhex(source), paths).hex()
        pack.finish()
        return grown

    # Bounds

    def merged(self, events: list[dict[str, Any]]) -> dict[str, str]:
        """What has come into each tree by the merges up to these, which are forgotten."""
        came = {event["tree"]: event["theirs"] for event in events
                if event["kind"] == "merge" and not event.get("undone")}
        return {**self.state.get("base", {}), **came}

    def prune(self, keep: int, most: int) -> int:
        """Forget the oldest until the rest fits; returns how many."""
        events, packs = self.state["events"], self.state["packs"]
        dropped = max(0, len(events) - max(1, keep))
        if sum(packs.values()) > most or len(packs) > 2 * PACKS:
            while True:
                trees = [self.state["last"], self.state["first"], self.merged(events[:dropped])]
                roots = {tree for known in trees for tree in known.values()}
                roots |= {tree for event in events[dropped:] for tree in (
                    event["before"], event["after"], event.get("theirs")) if tree}
                given = "".join(f"{tree}\n" for tree in sorted(roots)).encode()
                used = self.git("rev-list", "--objects", "--disk-usage", "--stdin", given=given)
                if int(used) <= most or dropped >= len(events) - 1:
                    break
                dropped += 1
            if dropped or len(packs) > 3:  # than of one pack
                made = self.git("pack-objects", "-q", "--revs", "--delta-base-offset",
                                "--window=5", os.path.join(self.packs, "pack"), given=given)
                # It may have a name that is there, and files beside it that are not listed.
                self.state["packs"] = {name: size for name, size in self.pack_sizes().items()
                                       if name.startswith(f"pack-{made.decode().strip()}.")}
        if dropped or self.state["packs"] != packs:
            self.state["base"] = self.merged(events[:dropped])
            del events[:dropped]
            self.save()
            for name in packs.keys() - self.state["packs"].keys():
                os.unlink(os.path.join(self.packs, name))
        return dropped


def damaged(message: str) -> Failure:
    return Failure(f"the store of snapshots is damaged: {message}",
                   "Is its disk full? If not, remove it to begin a new one.", "damaged")


def mode_of(words: Sequence[str]) -> int:
    """0 in a merge where both have changed it."""
    return int(words[0], 8) if words and words[0].isdigit() else 0


def in_workspace(name: str) -> str:
    """The path of one in the store; of a directory's mode one that ends with :dir."""
    return "/".join(re.sub("^(?::[ms])?=", "", part) for part in name.split("/"))


def names(name: str) -> list[bytes]:
    return [os.fsencode(mark + name) for mark in MARKS]


class Pack:
    """Objects on their way into the store, as gitformat-pack(5) has it, version 2.

    git sees them when finish() has made the index; a pack that state.json does not name is removed.
    git fast-import takes twice as long, and the square of the entries of a directory.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.known = store, set[bytes]()
        self.stem = os.path.join(store.packs, f"pack-{os.urandom(16).hex()}")
        self.rows = list[tuple[bytes, int, int]]()  # name, checksum and offset of what is written
        self.waiting = list[tuple[bytes, bytes, bytes]]()  # name, kind, data
        self.bytes, self.size = 0, 12  # of what waits, of the file
        self.pool: ThreadPoolExecutor | None = None
        self.jobs: list[Future[list[tuple[bytes, int, bytes]]]] = []

    def put(self, kind: bytes, data: bytes) -> bytes:
        """Its name. Raises OSError, also for what was put before."""
        import hashlib

        digest = hashlib.sha256(b"%s %d\0" % (kind, len(data)))
        digest.update(data)
        name = digest.digest()
        if name not in self.known:
            self.known.add(name)
            self.waiting.append((name, kind, data))
            self.bytes += len(data)
            if self.bytes > BATCH_BYTES:
                self.pass_on()
        return name

    def pass_on(self) -> None:
        """Have threads compress what waits: that takes longer than all the rest."""
        if not self.pool:
            from concurrent.futures import ThreadPoolExecutor

            self.pool = ThreadPoolExecutor(2)
        self.jobs.append(self.pool.submit(compressed, self.waiting))
        self.waiting, self.bytes = [], 0
        if len(self.jobs) > 4:
            self.write(self.jobs.pop(0).result())

    def write(self, packed: list[tuple[bytes, int, bytes]]) -> None:
        if packed and not self.rows:
            self.file = open(f"{self.stem}.pack", "w+b", buffering=1 << 20)  # noqa: SIM115
            self.file.write(bytes(self.size))
        for name, checksum, data in packed:
            self.rows.append((name, checksum, self.size))
            self.size += self.file.write(data)

    def finish(self) -> None:
        import hashlib

        for job in self.jobs:
            self.write(job.result())
        self.write(compressed(self.waiting))
        if self.pool:
            self.pool.shutdown()  # for the next walk may fork
        if not self.rows:
            return
        with self.file as file:
            file.seek(0)
            file.write(b"PACK" + (2).to_bytes(4) + len(self.rows).to_bytes(4))
            file.seek(0)
            checksum = hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())
        index = self.index() + checksum
        write(f"{self.stem}.idx", index + hashlib.sha256(index).digest())
        for path in (f"{self.stem}.pack", f"{self.stem}.idx"):
            self.store.state["packs"][os.path.basename(path)] = os.stat(path).st_size

    def index(self) -> bytes:
        """Where each object is, but for the checksums at its end."""
        from bisect import bisect

        names, sums, offsets = zip(*sorted(self.rows), strict=True)
        firsts = [name[0] for name in names]
        far = [offset for offset in offsets if offset >> 31]
        places = {offset: 1 << 31 | at for at, offset in enumerate(far)}
        near = [places.get(offset, offset) for offset in offsets]
        numbers = (number.to_bytes(4) for number in (*sums, *near))
        return b"".join((b"\377tOc", (2).to_bytes(4),
                         *(bisect(firsts, first).to_bytes(4) for first in range(256)), *names,
                         *numbers, *(offset.to_bytes(8) for offset in far)))


def compressed(objects: list[tuple[bytes, bytes, bytes]]) -> list[tuple[bytes, int, bytes]]:
    """The name of each, and a checksum and the bytes of its entry in a pack."""
    entries = list[tuple[bytes, int, bytes]]()
    for name, kind, data in objects:
        size, head = len(data) >> 4, bytearray([PACKED[kind] << 4 | len(data) & 15])
        while size:
            head[-1] |= 128
            head.append(size & 127)
            size >>= 7
        entry = bytes(head) + zlib.compress(data, 1)
        entries.append((name, zlib.crc32(entry), entry))
    return entries


def tree_data(entries: dict[bytes, tuple[bytes, bytes]]) -> bytes:
    rows = sorted((name + b"/" if mode == b"40000" else name, mode, id)
                  for name, (mode, id) in entries.items())
    return b"".join(b"%s %s\0%s" % (mode, name.rstrip(b"/"), id) for name, mode, id in rows)


def tree_entries(data: bytes) -> dict[bytes, tuple[bytes, bytes]]:
    """The mode and the object of each name that a directory has."""
    at, found = 0, dict[bytes, tuple[bytes, bytes]]()
    while at < len(data):
        end = data.index(0, at)
        mode, name = data[at:end].split(b" ", 1)
        found[name], at = (mode, data[end + 1 : end + 33]), end + 33
    return found


class Rules:
    """The ignore rules of the first snapshot, read by git in a directory of nothing else."""

    def __init__(self, store: Store) -> None:
        self.store, self.folder = store, store.at("rules")
        self.frozen = bool(store.state["first"])
        self.process: subprocess.Popen[bytes] | None = None
        if not self.frozen:
            clear(self.folder)
            os.makedirs(f"{self.folder}/.git")  # so that it is never empty
            with contextlib.suppress(FileNotFoundError):
                os.unlink(store.at("git/info/exclude"))

    def freeze(self, path: str, data: bytes) -> None:
        target = f"{self.folder}/{path}" if path != "exclude" else self.store.at("git/info/exclude")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(data)

    def ignored(self, folder: str, names: Sequence[str], folders: bool) -> set[str]:
        """Which of them are. That they are folders, git must see; a rules' file may have the name.

        It tells that of what has something in it without looking, and what is in an ignored folder
        is ignored. So only where that is, the folder itself is made and asked about.
        """
        if not folders:
            return self.ask(folder, names)
        found = self.ask(folder, names, "/\1")
        for name in found:
            with contextlib.suppress(OSError):
                os.makedirs(f"{self.folder}/{folder}/{name}")
        sure = self.ask(folder, [*found])
        for name in found:
            with contextlib.suppress(OSError):
                os.removedirs(f"{self.folder}/{folder}/{name}")
        return sure

    def ask(self, folder: str, names: Sequence[str], inner: str = "") -> set[str]:
        """Which are ignored, or have `inner` ignored.

        As many are asked at once as a pipe holds, or git and we would wait for each other.
        """
        found, at_once = set[str](), 1 + ASKED_BYTES // (4 * len(folder) + 1024)
        if names and not self.process:
            self.process = self.store.start(
                f"--work-tree={self.folder}", "check-ignore", "-vnz", "--no-index", "--stdin",
                cwd=self.folder, stderr=DEVNULL)
        for at in range(0, len(names), at_once):
            asked = names[at : at + at_once]
            assert self.process and self.process.stdin and self.process.stdout
            self.process.stdin.write(b"".join(
                os.fsencode(f"./{folder}/{name}{inner}\0") for name in asked))
            self.process.stdin.flush()
            answer = b""
            while answer.count(b"\0") < 4 * len(asked):  # file of rules, line, pattern, path
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                if not data:
                    raise damaged("git check-ignore has ended")
                answer += data
            parts = answer.split(b"\0")
            found |= {name for name, rules, pattern in zip(asked, parts[::4], parts[2::4],
                      strict=False) if rules and not pattern.startswith(b"!")}
        return found


# --- The walk ---


@contextlib.contextmanager
def opened(root: int, path: str) -> Iterator[int]:
    """A descriptor of a directory below another one, no part of the path a link. Raises OSError."""
    fd = os.dup(root)
    try:
        for part in path.split("/") if path else ():
            inner = os.open(part, FLAGS | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


class Walk:
    """What a workspace holds now, in `folders` by path, and in `tree` once commit() was called."""

    def __init__(self, store: Store, workspace: str, label: str, most: int) -> None:
        self.store, self.label, self.most = store, label, most
        self.cache = self.read_cache()
        self.pack, self.looks = Pack(store), False
        self.edits: dict[str, dict[bytes, tuple[bytes, bytes]]] = {}
        self.rules = Rules(store)
        self.folders: dict[str, Folder] = {}
        self.loaded: dict[str, dict[str, Row]] = {}
        self.racy, self.leftovers = set[tuple[str, str]](), list[tuple[str, str]]()
        self.temporary: str = store.state.get("temporary", "")
        self.settled = time.time_ns() - RACY_NS
        try:
            self.root = os.open(workspace, FLAGS | os.O_DIRECTORY)
        except OSError as error:
            raise Failure(f"{workspace}: {error.strerror}", "Is it still there?") from None
        self.shared = self.share() if len(self.cache) > SHARED and not self.temporary else {}
        self.folder(self.root, "", os.fstat(self.root).st_mode, 0, False)

    def share(self) -> dict[str, list[str]]:
        """Let a child compare half of the directories with the cache, while we walk the rest.

        Returns its directories, each with those below, which stand before it in the cache.
        """
        half = [*self.cache][: len(self.cache) // 2]
        inside, shared, below = {*half}, dict[str, list[str]](), list[str]()
        for path in half:
            below.append(path)
            if path.rpartition("/")[0] not in inside:
                shared[path], below = below, []
        self.answers, answer = os.pipe()
        self.child = os.fork()
        if not self.child:
            try:
                self.looks, self.shared, same = True, {}, list[str]()
                for path in shared:
                    parts = path.split("/")
                    with contextlib.suppress(Exception), opened(self.root, path) as fd:
                        self.folder(fd, path, os.fstat(fd).st_mode, len(parts), ".git" in parts)
                        same.append(path)
                with open(answer, "wb") as file:
                    file.write(os.fsencode("\0".join(same)))
            finally:
                os._exit(0)
        os.close(answer)
        return shared

    @functools.cached_property
    def same(self) -> set[str]:
        """Where the child has found nothing new; elsewhere we must look ourselves."""
        with open(self.answers, "rb") as file:
            found = {*os.fsdecode(file.read()).split("\0")}
        os.waitpid(self.child, 0)
        return found

    def read_cache(self) -> dict[str, Folder]:
        """Empty where there is none, where it is not of the last snapshot, or damaged."""
        try:
            with open(self.store.at(f"cache-{self.label}"), "rb") as file:
                mark, start = file.readline(), file.tell()
                whole = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
                data = memoryview(whole)[start:]
        except (OSError, ValueError):
            return {}
        return marshal.loads(data) if mark == self.mark(data) else {}

    # What has changed in a directory, as changes of its tree

    def edit(self, path: str) -> dict[bytes, tuple[bytes, bytes]]:
        if self.looks:
            raise Failure(f"{path} has changed", "")
        if path not in self.edits:
            self.edits[path] = tree_entries(self.cache.get(path, NO_FOLDER)[3])
            self.pack.known.update(id for _, id in self.edits[path].values())
        return self.edits[path]

    def put(self, folder: str, name: str, data: bytes, mode: bytes = b"100644") -> None:
        self.edit(folder)[os.fsencode(name)] = mode, self.pack.put(b"blob", data)

    def drop(self, folder: str, name: str) -> None:
        for stored in names(name):
            self.edit(folder).pop(stored, None)

    def mark(self, data: bytes | memoryview) -> bytes:
        """What a cache begins with: its format and interpreter, a check, the tree it is of."""
        tree = self.store.state["last"].get(self.label)
        return b"3 %x %x %s\n" % (sys.hexversion, zlib.crc32(data), str(tree).encode())

    def folder(self, fd: int, path: str, mode: int, depth: int, git: bool) -> None:
        rows: list[Row] = []  # to call list[Row] takes as long as to look at a file
        folders: dict[str, int] = {}
        inner: dict[str, str] = {}
        for entry in os.scandir(fd):
            try:
                st = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                rows.append((entry.name,))
                continue
            what = st.st_mode
            if what & S_IFMT == S_IFDIR:
                folders[entry.name] = what
            else:  # as row_of has it
                rows.append((entry.name, what, st.st_size, st.st_mtime_ns, st.st_ctime_ns,
                             st.st_ino))
        known = seen, old, old_mode, tree = self.cache.get(path, NO_FOLDER)
        prefix, now = f"{path}/" if path else "", marshal.dumps(rows, 2)
        if not (git or self.rules.frozen):
            self.freeze(fd, prefix, [row[0] for row in rows])
        if now != seen or old.keys() - folders.keys():
            before = {row[0]: row for row in marshal.loads(seen)}
            for name in before.keys() - {row[0] for row in rows} | old.keys() - folders.keys():
                self.drop(path, name)
            rows = [kept for row in rows if (kept := row if before.get(row[0]) == row else
                                             self.file(fd, path, row, row[0] in before, git))]
            now = marshal.dumps(rows, 2)
        mode = stat.S_IMODE(mode)
        if not folders and mode == old_mode and path not in self.edits:
            self.folders[path] = known
            return
        ignored = {name for name, said in old.items() if said.startswith("ignored")}
        unknown = [name for name in folders if name != ".git" and old.get(name) != ""]
        if not git and unknown:
            ignored |= self.rules.ignored(path, [*{*unknown} - ignored], True)
        for name, folder_mode in sorted(folders.items(),
                                        key=lambda item: prefix + item[0] in self.shared):
            said = self.enter(fd, path, name, folder_mode, depth, git, name in ignored,
                              old.get(name))
            if said is not None:
                inner[name] = said
        if mode != old_mode:
            self.put(path, ":dir", b"%o" % mode)
        if path in self.edits:
            tree = tree_data(self.edits.pop(path))
        self.folders[path] = now, inner, mode, tree

    def enter(self, fd: int, folder: str, name: str, mode: int, depth: int, git: bool,
              ignored: bool, old: str | None) -> str | None:
        """What is said of a directory that is not entered; None if it is gone. `old` was said."""
        path = f"{folder}/{name}" if folder else name
        if git and name == "objects" and not {"refs", "logs"} & {*path.split("/")}:
            said = "objects"
        elif ignored:
            said = "ignored {} {} {}".format(*self.count(fd, name))
        elif depth >= DEPTH or len(path) > PATH_CHARACTERS:
            said = "deep"
        elif path in self.shared and path in self.same:
            self.folders.update((below, self.cache[below]) for below in self.shared[path])
            return ""
        else:
            said = ""
            try:
                inner = os.open(name, FLAGS | os.O_DIRECTORY, dir_fd=fd)
            except FileNotFoundError:
                said = None
            except OSError:
                said = "unreadable"
        if said != old and old is not None:
            self.drop(folder, name)
        if said == "":
            try:
                self.folder(inner, path, mode, depth + 1, git or name == ".git")
            finally:
                os.close(inner)
            tree = self.folders[path][3]
            if old is None or path not in self.cache or tree != self.cache[path][3]:
                stored = os.fsencode(f"={name}")
                self.edit(folder)[stored] = b"40000", self.pack.put(b"tree", tree)
        elif said and said != old:
            self.put(folder, f":s={name}", said.encode())
        return said

    def freeze(self, fd: int, prefix: str, names: list[str]) -> None:
        """Take over the rules of a directory, and at the top those of its repository."""
        for folder, name in [("", ".gitignore")] * (".gitignore" in names) + (
                [(".git/info", "exclude")] * (not prefix)):
            with contextlib.suppress(OSError), opened(fd, folder) as inner:
                st = os.stat(name, dir_fd=inner, follow_symlinks=False)
                if stat.S_ISREG(st.st_mode) and st.st_size <= IGNORED_BYTES:
                    self.rules.freeze(prefix + name, self.read(inner, name, st.st_size)[0])

    def file(self, fd: int, folder: str, row: Row, known: bool, git: bool) -> Row | None:
        """Put it into the store. Returns its row as it was then, None where it is not kept."""
        name, found = row[0], None
        if self.temporary and name.startswith(self.temporary):
            self.leftovers.append((folder, name))
        elif not (git and name.endswith(".lock")):
            found = self.look(fd, folder, row)
        if known:
            self.drop(folder, name)
        if not found:
            return None
        row, mark, data = found
        mode = row[1] if mark == "=" else stat.S_IFREG | 0o644
        kind = b"120000" if stat.S_ISLNK(mode) else b"100755" if mode & 0o100 else b"100644"
        self.put(folder, mark + name, data, kind)
        if stat.S_ISREG(mode) and stat.S_IMODE(mode) not in (0o644, 0o755):
            text = b"%o" % stat.S_IMODE(mode)
            if mode & 0o6000:
                with contextlib.suppress(OSError):
                    st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    text += b" %d %d" % (st.st_uid, st.st_gid)
            self.put(folder, f":m={name}", text)
        return row

    def look(self, fd: int, folder: str, row: Row) -> tuple[Row, str, bytes] | None:
        """Its row, the mark of its name and its content; None if it is gone."""
        def note(*words: object) -> tuple[Row, str, bytes]:
            return row, ":s=", " ".join(map(str, words)).encode()

        name = row[0]
        for attempt in range(ATTEMPTS):
            try:
                if attempt:
                    row = row_of(name, os.stat(name, dir_fd=fd, follow_symlinks=False))
                if len(row) == 1:
                    return note("unreadable")
                _, mode, size, *times, _ = row
                if max(times) >= self.settled:
                    self.racy.add((folder, name))
                if stat.S_ISLNK(mode):
                    return row, "=", os.readlink(os.fsencode(name), dir_fd=fd)
                if not stat.S_ISREG(mode):
                    return note({stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket"}.get(
                        stat.S_IFMT(mode), "device"))
                if size > WHOLE_BYTES or size > IGNORED_BYTES and self.rules.ignored(
                        folder, [name], False):
                    return note("large", size, *times)
                if self.pack.size > self.most:
                    return note("full", size, *times)
                data, st = self.read(fd, name, size)
                if row_of(name, st) == row and len(data) == size:
                    break
            except FileNotFoundError:
                return None
            except OSError:
                self.racy.add((folder, name))
                return note("unreadable", *row[2:5])
        else:
            self.racy.add((folder, name))  # it is being written all the time
        return row, "=", data

    def read(self, fd: int, name: str, size: int) -> tuple[bytes, os.stat_result]:
        """No more than it had, and one byte to know that it grows. Raises OSError."""
        file = os.open(name, FLAGS, dir_fd=fd)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError("not a file any more")
            data = os.read(file, size + 1)
            while 0 < len(data) < size and (more := os.read(file, size + 1 - len(data))):
                data += more
            return data, os.fstat(file)
        finally:
            os.close(file)

    def count(self, fd: int, name: str, depth: int = 0) -> tuple[int, int, int]:
        """Files and bytes below a directory, and the newest change."""
        files = size = newest = 0
        with contextlib.suppress(OSError), opened(fd, name) as inner, os.scandir(inner) as found:
            for entry in found:
                st = entry.stat(follow_symlinks=False)
                more = 1, st.st_size, 0
                if stat.S_ISDIR(st.st_mode) and depth < DEPTH:
                    more = self.count(inner, entry.name, depth + 1)
                files, size = files + more[0], size + more[1]
                newest = max(newest, more[2], st.st_ctime_ns)
        return files, size, newest

    def commit(self) -> str:
        """Make it the last snapshot of its tree; the caller saves the state. Returns its tree."""
        state = self.store.state
        tree = self.folders[""][3]
        self.tree: str = state["last"].get(self.label, "")
        if tree != self.cache.get("", NO_FOLDER)[3]:
            self.tree = self.pack.put(b"tree", tree).hex()
        self.pack.finish()
        state["last"][self.label] = self.tree
        state["first"].setdefault(self.label, self.tree)
        noted = dict(self.folders)
        for folder in {folder for folder, _ in self.racy}:
            rows = [(row[0], 0) if (folder, row[0]) in self.racy else row  # no row is like that
                    for row in marshal.loads(noted[folder][0])]
            noted[folder] = marshal.dumps(rows, 2), *noted[folder][1:]
        if noted != self.cache:
            data = marshal.dumps(noted)
            write(self.store.at(f"cache-{self.label}"), self.mark(data) + data, sync=False)
        return self.tree

    def key(self, path: str) -> Row | str | None:
        """What a path was: None where nothing was there, "" for a directory."""
        folder, _, name = path.rpartition("/")
        rows, inner, *_ = self.folders.get(folder, NO_FOLDER)
        if folder not in self.loaded:
            self.loaded[folder] = {row[0]: row for row in marshal.loads(rows)}
        return "" if name in inner else self.loaded[folder].get(name)


def not_kept(kind: str) -> str:
    return NOT_KEPT.get(kind, f"it is a {kind}")


# --- Restoring ---


class Restore:
    """Brings changes into the workspace that a walk has seen; what is not as it was seen stays.

    `left` has the path and the reason of each one that stays, `never` those that always would.
    """

    def __init__(self, walk: Walk) -> None:
        self.walk, self.store = walk, walk.store
        self.changes = dict[str, tuple[Entry | None, Entry | None]]()
        self.left, self.never, self.removed = dict[str, str](), set[str](), set[str]()
        self.ours = set[int]()  # inodes that have lost a name by us
        self.staged = dict[str, tuple[str, str]]()  # path: directory and name of a temporary file

    def plan(self, path: str, old: Entry | None, new: Entry | None, discard: bool) -> None:
        """A change to make; what was never kept can neither come nor, without `discard`, go."""
        note = new if new and new.kind == NOTE else old
        if note and note.kind == NOTE and (note is new or not discard
                                           or self.walk.key(path) in (None, "")):
            self.leave(path, not_kept(note.words[0]), note.words[0] not in WORK)
        else:
            self.changes[path] = old, new

    def leave(self, path: str, why: str, always: bool = False) -> None:
        self.left[path] = why
        self.never |= {path} if always else set()

    def conflict(self, path: str, *sides: Entry | None) -> None:
        """Both have changed it; of what is never kept it is not even known whether they differ."""
        notes = [side.words if side.kind == NOTE else ("",) for side in sides if side]
        # an archive knows the second of the last change, and nothing of the other times
        seen = {(kind, *values[:1], *(int(time) // 10**9 for time in values[1:2]))
                for kind, *values in notes}
        if len(notes) == 2 and len(seen) == 1 and notes[0][0] == "large":
            return  # the person has copied it over
        never = bool(notes) and all(kind and kind not in WORK for kind, *_ in notes)
        self.leave(path, not_kept(notes[0][0]) if never else "both have changed it", never)

    def done(self) -> dict[str, str]:
        return {path: status(*sides) for path, sides in sorted(self.changes.items())
                if path not in self.left}

    def apply(self) -> None:
        """First everything is written that is needed, so that what fails has changed nothing."""
        self.tidy(self.walk.leftovers)
        self.store.state["temporary"] = f".shadow-{os.urandom(8).hex()}-"
        self.store.save()
        order = sorted(self.changes.items())
        try:
            for path, (old, new) in order:
                if new and new.kind in (FILE, LINK) and (not old or old.kind != new.kind
                                                         or old.id != new.id):
                    self.stage(path, new)
            for path, (old, new) in reversed(order):
                if old and (new is None or DIR in {old.kind, new.kind} and old.kind != new.kind):
                    self.step(path, self.remove)
            for path, (old, new) in order:
                if new and not (old and old.kind == new.kind == DIR):
                    self.step(path, self.place)
            for path, (_, new) in reversed(order):
                if new and new.kind == DIR:
                    self.step(path, self.set_mode)
        except OSError as error:
            raise Failure(f"nothing was changed, for it cannot be written: {error.strerror}",
                          "Is there space, and may one write there?") from None
        finally:
            self.tidy(self.staged.values())

    def tidy(self, files: Iterable[tuple[str, str]]) -> None:
        for folder, name in files:
            with contextlib.suppress(OSError), opened(self.walk.root, folder) as fd:
                os.unlink(name, dir_fd=fd)

    def step(self, path: str, action: Callable[[int, str, str], None]) -> None:
        folder, _, name = path.rpartition("/")
        try:
            if path not in self.left:
                with opened(self.walk.root, folder) as fd:
                    action(fd, name or ".", path)
        except OSError as error:
            self.leave(path, (error.strerror or str(error)).lower())

    def stage(self, path: str, new: Entry) -> None:
        """Write it to a temporary file in the nearest directory that is there. Raises OSError."""
        folder, _, name = path.rpartition("/")
        near = folder
        while near not in self.walk.folders:
            near = near.rpartition("/")[0]
        temporary = f"{self.store.state['temporary']}{len(self.staged)}"
        with opened(self.walk.root, near) as fd:
            owner = os.fstat(fd)
            if near == folder and self.walk.key(path):
                with contextlib.suppress(FileNotFoundError):
                    owner = os.stat(name, dir_fd=fd, follow_symlinks=False)
            self.staged[path] = near, temporary
            data = self.store.get(new.id)
            if new.kind == LINK:
                os.symlink(data, os.fsencode(temporary), dir_fd=fd)
                return own(temporary, owner, dir_fd=fd, follow_symlinks=False)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600, dir_fd=fd), "wb", buffering=0) as file:
                while data:
                    data = data[file.write(data):]
                own(file.fileno(), owner)
                os.fchmod(file.fileno(), mode_for(file.fileno(), new))

    def check(self, fd: int, name: str, path: str) -> None:
        """Is it as the walk has seen it? Raises OSError."""
        try:
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            st = None
        gone = path in self.removed or not self.changes[path][0]
        seen = None if gone else self.walk.key(path) or ""
        now = st and ("" if stat.S_ISDIR(st.st_mode) else row_of(name, st))
        if st and now and seen and st.st_ino in self.ours:
            now = (*now[:4], *seen[4:5], now[5])  # for its ctime tells that another name is gone
        if now != seen:
            raise OSError("it has changed meanwhile")
        self.ours.add(st.st_ino if st else 0)

    def remove(self, fd: int, name: str, path: str) -> None:
        self.check(fd, name, path)
        old, _ = self.changes[path]
        (os.rmdir if old and old.kind == DIR else os.unlink)(name, dir_fd=fd)
        self.removed.add(path)

    def place(self, fd: int, name: str, path: str) -> None:
        self.check(fd, name, path)
        _, new = self.changes[path]
        if new and new.kind == DIR:
            before = os.umask(0)
            os.mkdir(name, new.mode | 0o700, dir_fd=fd)
            os.umask(before)
            own(name, os.fstat(fd), dir_fd=fd, follow_symlinks=False)
        elif path in self.staged:
            folder, temporary = self.staged[path]
            with opened(self.walk.root, folder) as near:
                os.rename(temporary, name, src_dir_fd=near, dst_dir_fd=fd)
            del self.staged[path]
        else:
            self.set_mode(fd, name, path)

    def set_mode(self, fd: int, name: str, path: str) -> None:
        """Not through a link. Where there is O_PATH (Linux; a merge from another machine may end on
        macOS) also of a file that may not be read. Raises OSError.
        """
        _, new = self.changes[path]
        assert new
        way: int | None = getattr(os, "O_PATH", None)
        flags = FLAGS if way is None else way | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(name, flags | os.O_DIRECTORY * (new.kind == DIR), dir_fd=fd)
        try:
            if stat.S_ISLNK(os.fstat(file).st_mode):
                raise OSError("it is a link now")
            os.chmod(file if way is None else f"/proc/self/fd/{file}", mode_for(file, new))
        finally:
            os.close(file)


def own(what: int | str, owner: os.stat_result, **where: Any) -> None:
    with contextlib.suppress(PermissionError):
        os.chown(what, owner.st_uid, owner.st_gid, **where)


def mode_for(file: int, new: Entry) -> int:
    """With the rights of an owner only where that is whose they were."""
    st = os.fstat(file)
    same = new.kind == DIR or new.words == (str(st.st_uid), str(st.st_gid))
    return new.mode if same else new.mode & ~0o6000


# --- What differs ---


def status(old: Entry | None, new: Entry | None) -> str:
    if old is None or new is None:
        return "deleted" if old else "added"
    if old.kind != new.kind:
        return "type"
    return "mode" if old.id == new.id or old.kind == DIR else "modified"


def octal(entry: Entry | None) -> str | None:
    kinds = {LINK: 0o120777, FILE: 0o100000, DIR: 0o40000}
    return f"{kinds[entry.kind] | entry.mode:06o}" if entry and entry.kind != NOTE else None


@functools.cache
def risk_pattern() -> re.Pattern[str]:
    """The shortest way to one of them counts: what lies in a .git is git's, whatever its name."""
    return re.compile(f"(?:.*?/)??(?:{'|'.join(f'({pattern})' for pattern, _ in RISKS)})",
                      re.IGNORECASE | re.DOTALL)


def risks(store: Store, path: str, old: Entry | None, new: Entry | None, agents: Sequence[str],
          ) -> list[str]:
    """Why the host may execute or obey what has changed there."""
    found = list[str]()
    whole = [f"{path}/x"] if new and new.kind in (NOTE, LINK) else []  # then we see nothing below
    for name in (path, *whole):
        match = risk_pattern().fullmatch(canonical(name))
        if match and (reason := RISKS[(match.lastindex or 0) - 1][1]) and (new or in_git(path)):
            found.append(reason)
            break
    names = "|".join(re.escape(name) for name in agents)
    if names and re.search(rf"(?:^|/)\.?(?:{names})(?:\.[^/]*)?(?:/|$)", path, re.IGNORECASE):
        found.append("agents on the host obey it")
    wanted = RUNS.get(path.rpartition("/")[2].lower())
    if wanted and new and (what_runs(store, old, wanted, path)
                           != what_runs(store, new, wanted, path)):
        found.append(RUNS_REASON)
    if new and new.kind == FILE:
        before = old.mode if old and old.kind == FILE else 0
        if new.mode & ~before & 0o6000:
            found.append("it runs with its owner's rights")
        elif new.mode & 0o111 and not before & 0o111:
            found.append("it can be executed, which is new")
    if new and new.kind == LINK:
        target = os.fsdecode(store.get(new.id))
        if target.startswith("/") or os.path.normpath(
                os.path.join(os.path.dirname(path), target)).split("/")[0] == "..":
            found.append("a link that leads out of the directory")
    return found


def what_runs(store: Store, entry: Entry | None, keys: Sequence[str], path: str) -> object:
    if not entry or entry.kind != FILE:
        return {}
    data = store.get(entry.id)
    try:
        if path.lower().endswith(".toml"):
            import tomllib
            whole = tomllib.loads(data.decode())
        else:
            whole = json.loads(data)
        return {key: whole[key] for key in keys if key in whole}
    except (ValueError, TypeError, RecursionError):
        return data


def differences(store: Store, old: str, new: str, paths: Sequence[str], patch: bool,
                agents: Sequence[str]) -> list[dict[str, Any]]:
    found = dict[str, dict[str, Any]]()
    for path, a, b in store.changes(old, new):
        sides = [side for side in (a, b) if side]
        if not below(path, paths) or [side.kind for side in sides] == [DIR]:
            continue
        row = found[path] = {
            "path": path, "status": status(a, b), "oldMode": octal(a), "newMode": octal(b),
            "size": store.ask("info", b.id)[0] if b and b.kind in (FILE, LINK) else None,
            "binary": False, "added": 0, "deleted": 0, "risk": risks(store, path, a, b, agents)}
        for note in [side for side in sides if side.kind == NOTE]:
            kind, *values = note.words
            row |= {"kept": False, "seen": kind, "why": not_kept(kind)}
            if kind == "ignored":
                row |= {"files": int(values[0]), "size": int(values[1])}
            elif values:
                row["size"] = int(values[0])
    words = ["--literal-pathspecs", "diff-tree", "-r", "--no-renames", "--no-textconv",
             "--no-ext-diff", "--no-color"]
    for line in store.git(*words, "-z", "--numstat", old, new).split(b"\0")[:-1]:
        added, deleted, name = line.split(b"\t", 2)
        if counts := counted(found, name):
            counts |= {"binary": True} if added == b"-" else {
                "added": int(added), "deleted": int(deleted)}
    if patch:
        tops = ["/".join(f"={part}" for part in path.split("/")) if path else "." for path in paths]
        add_patch(store, [*words, "-p", "--no-prefix", old, new, "--", *tops], found)
    return list(found.values())


def counted(found: dict[str, dict[str, Any]], name: bytes) -> dict[str, Any] | None:
    """The row of a file of the store that is one of the workspace."""
    whole = os.fsdecode(name)
    return found.get(in_workspace(whole)) if whole.rpartition("/")[2].startswith("=") else None


def add_patch(store: Store, words: list[str], found: dict[str, dict[str, Any]]) -> None:
    """The hunks of each file, as much as fits into PATCH_BYTES; the rest is marked as truncated."""
    with store.start(*words, stderr=DEVNULL) as process:
        assert process.stdout
        text = process.stdout.read(PATCH_BYTES)
        if truncated := bool(process.stdout.read(1)):
            process.kill()
            text = text[: text.rfind(b"\n") + 1]
    if process.returncode and not truncated:
        raise damaged("git diff-tree has ended")
    sections = re.split(rb"^diff --git (.*)\n", text, flags=re.MULTILINE)[1:]
    row = None
    for names, section in zip(sections[::2], sections[1::2], strict=True):
        name = names[: len(names) // 2]  # twice the same, for renames are not looked for
        if name.startswith(b'"'):
            name = codecs.escape_decode(name[1:-1])[0]
        row = counted(found, name)
        hunks = re.search(rb"^@@ .*", section, re.MULTILINE | re.DOTALL)
        if row and hunks:
            row["patch"] = row.get("patch", "") + hunks[0].decode(errors="surrogateescape")
    if truncated:
        for other in found.values():
            other["truncated"] = other is row or "patch" not in other


# --- Verbs ---


class Request:
    def __init__(self, store: Store, workspace: str, given: dict[str, Any]) -> None:
        self.store, self.workspace, self.given = store, workspace, given
        self.label = self.take("tree", str, "main")
        if not re.fullmatch("[a-z]{1,20}", self.label):
            raise usage(f"{self.label!r} is no name of a tree")
        self.paths = [os.path.normpath(path) for path in self.take("paths", list, [])] or ["."]
        if any(f"{path}/".startswith(("/", "../")) or "\0" in path for path in self.paths):
            raise usage("paths begin at the top of the workspace")
        self.paths = ["" if path == "." else path for path in self.paths]
        self.agents = self.take("agents", list, [])
        self.keep = self.take("keep", int, KEEP_TURNS)
        self.most = self.take("maxBytes", int, STORE_BYTES)
        self.events: list[dict[str, Any]] = store.state["events"]

    def take(self, key: str, kind: type, default: Any) -> Any:
        value = self.given.get(key, default)
        if type(value) is not kind or (isinstance(value, list)
                                       and not all(isinstance(word, str) for word in value)):
            raise usage(f"{key} is no {kind.__name__}")
        return value

    def walk(self) -> Walk:
        """Take a snapshot."""
        whose = self.take("directory", str, "")
        known = self.store.state.setdefault("directories", {})
        if whose and known.setdefault(self.label, whose) != whose:
            raise Failure(f"the snapshots are those of {known[self.label]}, and not of {whose}",
                          "Another directory takes a new store.")
        walk = Walk(self.store, self.workspace, self.label, self.most)
        walk.commit()
        self.store.save()
        return walk

    def event(self, kind: str, before: str, **more: Any) -> dict[str, Any]:
        number = self.store.state["next"]
        self.store.state["next"] += 1
        event = {"id": f"{kind}-{number}", "kind": kind, "tree": self.label, "before": before,
                 "after": None, "number": number, **more}
        self.events.append(event)
        return event

    def find(self, id: str) -> dict[str, Any]:
        for event in self.events:
            if event["id"] == id and event["tree"] == self.label:
                return event
        kept = ", ".join(event["id"] for event in self.events[-5:]) or "none"
        raise Failure(f"there is no turn {id}", f"The last ones that are kept: {kept}.",
                      "missing")

    def after(self, event: dict[str, Any], now: str) -> str:
        """Where a turn was not ended, the next snapshot is its end."""
        later = [other["before"] for other in self.events if other["number"] > event["number"]
                 and other["tree"] == event["tree"]]
        return str(event["after"] or (later or [now])[0])

    def finish(self, **answer: Any) -> dict[str, Any]:
        self.store.save()
        self.store.prune(self.keep, self.most)
        return answer

    # each verb returns its answer

    def snapshot(self) -> dict[str, Any]:
        turn, end = self.take("turn", dict, {}), self.take("end", str, "")
        about = {key: str(value)[:4096] for key, value in (turn or self.given).items()
                 if key in ("id", "when", "what", "command", "ended")}
        if turn and any(event["id"] == about.get("id") for event in self.events):
            raise Failure(f"there is a turn {about['id']} already", "Take another id.")
        event = self.find(end) if end else None
        walk = self.walk()
        if turn:
            event = self.event("turn", walk.tree, **about)
        elif event:
            if event.get("undone") and not event["after"]:  # what it has done since is not
                event["undone"] = walk.tree == [
                    undo["after"] for undo in self.events
                    if undo["kind"] == "undo" and event["id"] in undo["turns"]][-1]
            event |= about | {"after": walk.tree}
            event |= self.totals(event["before"], walk.tree)
        return self.finish(tree=walk.tree, turn=event)

    def totals(self, before: str, after: str) -> dict[str, Any]:
        rows = differences(self.store, before, after, [""], False, self.agents)
        return {"files": len(rows), "added": sum(row["added"] for row in rows),
                "deleted": sum(row["deleted"] for row in rows),
                "notKept": [row["path"] for row in rows if row.get("kept") is False][:LISTED],
                "risky": sum(bool(row["risk"]) for row in rows),
                "risks": [{"path": row["path"], "risk": row["risk"]}
                          for row in rows if row["risk"]][:LISTED]}

    def log(self) -> dict[str, Any]:
        return {"turns": self.events, "bytes": sum(self.store.state["packs"].values())}

    def diff(self) -> dict[str, Any]:
        now = self.store.state["last"].get(self.label)
        if not now:
            raise Failure("there is no snapshot yet", "One is taken when an agent runs.", "nothing")
        turn = self.take("turn", str, "")
        event = self.find(turn) if turn else None
        if self.take("now", bool, False) and not (event and event["after"]):
            now = self.walk().tree
        old, new = self.store.state["first"][self.label], now
        if event:
            old, new = event["before"], self.after(event, now)
        rows = differences(self.store, old, new, self.paths, self.take("patch", bool, False),
                           self.agents)
        if self.paths != [""] and not rows:
            raise Failure(f"nothing has changed at {', '.join(self.paths)}",
                          "Paths begin at the top of the workspace.", "missing")
        return {"from": old, "to": new, "files": rows[:FILES], "more": len(rows[FILES:])}

    def undo(self) -> dict[str, Any]:
        turn = self.take("turn", str, "")
        some = self.paths != [""]  # of a turn that was undone, some may have been left
        turns = [event for event in self.events if event["tree"] == self.label
                 and event["kind"] in ("turn", "merge")
                 and (not event.get("undone") or some and event["id"] == turn)]
        if turn:
            if (first := self.find(turn)) not in turns:
                raise Failure(f"turn {turn} is undone already",
                              "Try redo, or name the paths that were left.", "nothing")
            turns = [first] if self.take("only", bool, False) else turns[turns.index(first):]
        else:
            turns = turns[-1:]
        if not turns:
            raise Failure("there is nothing to undo", "No turn is kept that is not undone.",
                          "nothing")
        walk = self.walk()
        steps = [(self.after(event, walk.tree), event["before"]) for event in reversed(turns)]
        return self.bring(walk, "undo", steps, [event["id"] for event in turns])

    def redo(self) -> dict[str, Any]:
        turn = self.take("turn", str, "")
        undos = [event for event in self.events if event["tree"] == self.label
                 and event["kind"] == "undo" and (not turn or turn in event["turns"])]
        again = [event for event in undos if not event.get("redone")][-1:] or (
            undos[::-1] if turn and self.paths != [""] else [])
        if not again:
            raise Failure("there is nothing to redo", "No undo is kept that was not redone.",
                          "nothing")
        steps = [(event["after"], event["before"]) for event in again]
        return self.bring(self.walk(), "redo", steps, again[0]["turns"], again[0])

    def merge(self) -> dict[str, Any]:
        state = self.store.state
        if self.label == "main" or "main" not in state["last"]:
            raise Failure("there is nothing to merge", "A copy has a snapshot and another tree.",
                          "nothing")
        base = self.store.merged(self.events).get(self.label, state["first"]["main"])
        theirs = state["last"]["main"]
        return self.bring(self.walk(), "merge", [(base, theirs)])

    def prune(self) -> dict[str, Any]:
        dropped = self.store.prune(self.keep, self.most)
        return {"dropped": dropped, "bytes": sum(self.store.state["packs"].values())}

    def bring(self, walk: Walk, kind: str, steps: list[tuple[str, str]], turns: Sequence[str] = (),
              undo: dict[str, Any] | None = None) -> dict[str, Any]:
        """Merge into the workspace what turns the first tree of each step into the second one."""
        restore, dry = self.plan(walk, kind, steps), self.take("dry", bool, False)
        if self.paths != [""] and not restore.changes and not restore.left:
            raise Failure(f"nothing is to change at {', '.join(self.paths)}",
                          "Paths begin at the top of the workspace.", "missing")
        elsewhere, lost = self.take("elsewhere", bool, False), self.take("lost", list, [])
        missing = {path for path, what in restore.done().items()
                   if elsewhere and (what != "mode" or path in lost)}
        if not dry:
            if not elsewhere:
                restore.apply()
                self.store.state["temporary"] = ""
            after = walk.tree if elsewhere else self.walk().tree
            event = self.event(kind, walk.tree, after=after, turns=turns,
                               files=len(restore.done()), paths=self.paths[:LISTED],
                               when=self.take("when", str, ""))
            if kind == "merge":  # what has not come this time comes with the next one
                base, theirs = steps[0]
                if self.paths != [""]:
                    theirs = self.store.graft(base, theirs, self.paths, True)
                event["theirs"] = self.store.graft(theirs, base, restore.left.keys()
                                                   - restore.never | missing, False)
            if self.paths == [""] and (restore.done() or restore.left.keys() <= restore.never):
                for other in self.events if not undo or undo.get("paths", [""]) == [""] else ():
                    if other["id"] in turns:
                        other["undone"] = kind == "undo"
                if undo:
                    undo["redone"] = True
        rows = [{"path": path, "status": what,
                 "risk": risks(self.store, path, *restore.changes[path], self.agents)}
                for path, what in restore.done().items()]
        left = [{"path": path, "why": why, "conflict": path not in restore.never}
                for path, why in sorted(restore.left.items())]
        answer = self.finish(dry=dry, turns=list(turns), changed=rows, left=left)
        if self.take("send", bool, False):
            sent = [restore.changes[path][1] for path in restore.done()]
            files = [new if new and new.kind != DIR else None for new in sent]
            answer["changed"] = [{**row, "kind": new.kind if new else "",
                                  "mode": new.mode if new else 0,
                                  "size": self.store.ask("info", file.id)[0] if file else 0}
                                 for row, new, file in zip(rows, sent, files, strict=True)]
            answer["contents"] = (self.store.get(file.id) for file in files if file)
        return answer

    def plan(self, walk: Walk, kind: str, steps: list[tuple[str, str]]) -> Restore:
        """What is to be done, and left, of what was asked for."""
        restore, tree, conflicts = Restore(walk), walk.tree, set[str]()
        for base, theirs in steps:
            tree, found = self.store.merge(base, tree, theirs)
            conflicts |= found
        discard = self.take("discard", bool, False)
        for path, old, new in self.store.changes(walk.tree, tree):
            # merge-tree calls a file so where there is a directory of its name
            plain = re.sub("~[0-9a-f]{64}(_[0-9]+)?(?=/|$)", "", path)
            if kind == "merge" and in_git(plain):
                conflicts.add(whole_git(plain))
            elif below(path, self.paths) and not any(
                    below(name, conflicts) or f"{name}/:dir".lstrip("/") in conflicts
                    for name in (path, plain)):
                restore.plan(path, old, new, discard)
        for path in {path.removesuffix(":dir").rstrip("/") for path in conflicts}:
            if not below(path, self.paths):
                continue
            if kind == "merge" and in_git(path):
                restore.leave(path, "what is git's own does not leave a copy", True)
            else:
                restore.conflict(path, self.store.entry(walk.tree, path),
                                 self.store.entry(steps[-1][1], path))
        return restore


VERBS = {name: getattr(Request, name) for name in
         ("snapshot", "log", "diff", "undo", "redo", "merge", "prune")}


def usage(message: str) -> Failure:
    return Failure(message, f"shadow.py {'|'.join(VERBS)} STORE WORKSPACE [REQUEST]", code=2)


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Raises Failure."""
    if len(argv) not in (3, 4) or argv[0] not in VERBS:
        raise usage("a verb, a store, a workspace and a request are wanted")
    text = "".join(argv[3:]) or "{}"
    try:
        given = json.loads(sys.stdin.read() if text == "-" else text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise usage("the request is no JSON object")
    try:
        return dict(VERBS[argv[0]](Request(Store(os.path.abspath(argv[1])), argv[2], given)))
    except OSError as error:
        raise Failure(f"{error.filename or argv[1]}: {error.strerror}",
                      "Is there space, and may one write there?") from None
    except (KeyError, TypeError, ValueError, EOFError, IndexError, AttributeError) as error:
        raise damaged(repr(error)[:300]) from None


def main(argv: Sequence[str]) -> int:
    try:
        answer, code = run(argv), 0
    except Failure as error:
        answer, code = {"error": str(error), "hint": error.hint, "kind": error.kind}, error.code
    contents = answer.pop("contents", ())
    print(json.dumps(answer), flush=True)
    for data in contents:
        sys.stdout.buffer.write(data)
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    gc.disable()  # it would look through the cache again and again
    os._exit(main(sys.argv[1:]))  # nor is there anything to tidy up
