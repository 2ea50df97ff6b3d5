"""Build the zipapp: one file that runs wherever there is Python 3.11 or newer.

    python3 static/build.py [OUT]        OUT is dist/sandbox.pyz by default
    python3 static/build.py --libraries  only fetch what the pages load from npm

The libraries of the browser are those of static/package-lock.json, fetched with `npm ci`, or
without npm from the registry itself (NPM_CONFIG_REGISTRY names another), into a directory that goes
again; the files that pages load are kept in static/ui/vendor/, with the digest of the lock file
that says whether they are up to date. They are never committed. Building a wheel fetches them too:
pyproject.toml names this file as hatchling's build hook.

In it: sandbox.py and its modules, static/ as sandbox_static/, the pure Python
part of the `websockets` that is installed for the running interpreter, and a __main__.py. Beside
each module lies its bytecode (unchecked-hash): the Python version that built the file starts a
third faster, any other compiles the source. What every start reads is not compressed: to unpack it
takes longer. Names are sorted and times and modes fixed, so two builds from equal sources on one
interpreter are equal byte for byte.

Exit status: 0, or 1 when websockets or the registry is missing.
"""

import argparse
import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("sandbox.py", "sandbox_changes.py", "sandbox_hosts.py", "sandbox_keys.py",
           "sandbox_web.py")
NOT_ASSETS = {"build.py", "node_modules", "__pycache__", "package.json", "package-lock.json",
              ".npmrc"}
VENDOR = ROOT / "static" / "ui" / "vendor"
LIBRARIES = (
    "@xterm/xterm/lib/xterm.mjs", "@xterm/xterm/css/xterm.css",
    "@xterm/addon-fit/lib/addon-fit.mjs",
    "@xterm/addon-search/lib/addon-search.mjs", "@xterm/addon-unicode11/lib/addon-unicode11.mjs",
    "@xterm/addon-web-links/lib/addon-web-links.mjs", "marked/lib/marked.esm.js",
    "dompurify/dist/purify.es.mjs",
)
NPM_SECONDS = 300
# A shell, because the first line of a script can name one option at most where `env` does not know
# -S. Python's own -S, because all that is imported is in the file: what the machine has installed
# for Python takes its time at each start.
START = b"""\
#!/bin/sh
exec python3 -I -S "$0" "$@"
"""
MAIN = b"""\
import sys

if sys.version_info < (3, 11):
    sys.exit("sandbox: Python 3.11 or newer is needed, this is %d.%d" % sys.version_info[:2])

from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

# `import sandbox` would read and decode the module twice: first to learn the name of its file.
spec = ModuleSpec("sandbox", __loader__, origin=__file__.replace("__main__", "sandbox"))
spec.has_location = True
sandbox = sys.modules["sandbox"] = module_from_spec(spec)
__loader__.exec_module(sandbox)
sandbox.entry()
"""


class BuildError(Exception):
    """A message of two lines: what happened, and what can be done."""


def lock_digest() -> str:
    text = (ROOT / "static" / "package-lock.json").read_bytes() + "\n".join(LIBRARIES).encode()
    return hashlib.sha256(text).hexdigest()


def fetch_libraries() -> None:
    """Bring static/ui/vendor/ up to date with the lock file.

    Raises BuildError; then what was there before stays.
    """
    stamp = VENDOR / "digest.txt"
    if stamp.is_file() and stamp.read_text() == lock_digest():
        return
    with tempfile.TemporaryDirectory(dir=VENDOR.parent.parent, prefix=".vendor-") as name:
        directory = Path(name)
        for file in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(ROOT / "static" / file, directory)
        if shutil.which("npm"):
            npm_ci(directory)
        else:
            fetch_packages(directory)
        fresh = directory / "vendor"
        fresh.mkdir()
        for library in LIBRARIES:
            text = (directory / "node_modules" / library).read_text()
            lines = [line for line in text.split("\n")
                     if not line.startswith("//# sourceMappingURL=")]
            (fresh / Path(library).name).write_text("\n".join(lines))
        (fresh / "LICENSES.txt").write_text(licenses(directory / "node_modules"))
        (fresh / "digest.txt").write_text(lock_digest())
        shutil.rmtree(VENDOR, ignore_errors=True)
        fresh.rename(VENDOR)


def npm_ci(directory: Path) -> None:
    argv = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        subprocess.run(argv, cwd=directory, check=True, timeout=NPM_SECONDS, text=True,
                       stdin=subprocess.DEVNULL,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"npm ci took longer than {NPM_SECONDS} seconds\nis the registry reachable?") from None
    except subprocess.CalledProcessError as error:
        raise BuildError(
            f"{error.stdout.strip()}\nnpm ci failed; is the registry reachable?") from None


def fetch_packages(directory: Path) -> None:
    """Fetch the packages of LIBRARIES in the lock file's versions, as `npm ci` does.

    Raises BuildError.
    """
    registry = os.environ.get("NPM_CONFIG_REGISTRY") or "https://registry.npmjs.org"
    lock = json.loads((directory / "package-lock.json").read_text())["packages"]
    for package in packages():
        entry = lock[f"node_modules/{package}"]
        url = f"{registry.rstrip('/')}/{package}/-/{Path(package).name}-{entry['version']}.tgz"
        try:
            with urllib.request.urlopen(url, timeout=NPM_SECONDS) as answer:
                data = answer.read()
        except (OSError, ValueError) as error:
            hint = "is the registry reachable? NPM_CONFIG_REGISTRY names another"
            raise BuildError(f"{url}: {error}\n{hint}") from None
        digest = base64.b64encode(hashlib.sha512(data).digest()).decode()
        if f"sha512-{digest}" != entry["integrity"]:
            raise BuildError(f"{url} is not what static/package-lock.json names\n"
                             "use a registry that has the original")
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                if content := archive.extractfile(member):
                    path = directory / "node_modules" / package / member.name.partition("/")[2]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.read())


def packages() -> list[str]:
    return sorted({"/".join(name.split("/")[: 2 if name.startswith("@") else 1])
                   for name in LIBRARIES})


def licenses(modules: Path) -> str:
    """The licences that go with the copies."""
    files = [(package, path) for package in packages()
             for path in sorted((modules / package).glob("LICENSE*"))]
    return "\n\n".join(f"--- {package}: {path.name}\n\n{path.read_text()}"
                       for package, path in files)


def get_build_hook() -> Any:
    """The class that hatchling asks for.

    An editable install fetches nothing: its first `serve` does.
    """
    interface = importlib.import_module("hatchling.builders.hooks.plugin.interface")

    def initialize(_hook: object, version: str, _build_data: dict[str, Any]) -> None:
        if version != "editable":
            fetch_libraries()

    return type("LibrariesHook", (interface.BuildHookInterface,), {"initialize": initialize})


def asset_files() -> Iterator[tuple[str, bytes]]:
    """Yield the archive name and the content of every file under static/."""
    static = ROOT / "static"
    for path in static.rglob("*"):
        relative = path.relative_to(static)
        if path.is_file() and not NOT_ASSETS.intersection(relative.parts):
            yield f"sandbox_static/{relative.as_posix()}", path.read_bytes()


def websockets_files() -> Iterator[tuple[str, bytes]]:
    """Yield the archive name and the content of every module of websockets, and its licence."""
    spec = importlib.util.find_spec("websockets")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            f"build.py: websockets is not installed for {sys.executable}\n"
            "Install it with: python3 -m pip install 'websockets>=13'"
        )
    package = Path(spec.submodule_search_locations[0])
    for path in package.rglob("*.py"):
        yield f"websockets/{path.relative_to(package).as_posix()}", path.read_bytes()
    for file in importlib.metadata.files("websockets") or []:
        if file.name == "LICENSE":
            yield "websockets/LICENSE", file.read_binary()


def bytecode(name: str, source: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "module.py")
        path.write_bytes(source)
        py_compile.compile(
            str(path),
            cfile=f"{path}c",
            dfile=f"sandbox.pyz/{name}",
            doraise=True,
            optimize=0,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        return Path(f"{path}c").read_bytes()


def is_hot(name: str) -> bool:
    """Whether a start of the command line reads it."""
    return name in ("__main__.pyc", "sandbox.pyc") or name.startswith("sandbox_static/session/")


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO(START)
    buffer.seek(0, io.SEEK_END)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for name in sorted(files):
            info = zipfile.ZipInfo(name)  # dated 1980-01-01
            info.compress_type = zipfile.ZIP_STORED if is_hot(name) else zipfile.ZIP_DEFLATED
            info.external_attr = 0o100644 << 16
            target.writestr(info, files[name])
    return buffer.getvalue()


def build(out: Path) -> None:
    files = {"__main__.py": MAIN, **dict(asset_files()), **dict(websockets_files())}
    files |= {name: (ROOT / name).read_bytes() for name in MODULES if (ROOT / name).exists()}
    modules = [name for name in files
               if name.endswith(".py") and not name.startswith("sandbox_static/")]
    files |= {f"{name}c": bytecode(name, files[name]) for name in modules}
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    partial.write_bytes(archive(files))
    partial.chmod(0o755)
    os.replace(partial, out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the zipapp.")
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "dist" / "sandbox.pyz",
                        metavar="OUT")
    parser.add_argument("--libraries", action="store_true",
                        help="only fetch the libraries of the web pages")
    args = parser.parse_args(argv)
    out: Path = args.out
    try:
        fetch_libraries()
    except BuildError as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    if not args.libraries:
        build(out)
        print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
