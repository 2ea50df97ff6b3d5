"""Every way to run it: from a checkout, installed from a wheel, installed editable, and as a zipapp."""

import hashlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import ROOT

ASSET = "image/Containerfile"
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "sandbox.py").read_text(), re.MULTILINE)[0]
# A bare environment, and for the ways without a venv -S, lest the test venv's own sandbox be found.
ENVIRON = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
BARE_PYTHON = [sys.executable, "-S"]


@dataclass
class Way:
    """One way to run: the argv of the command, the argv of a Python that can import it, and where."""

    command: list[str]
    python: list[str]
    cwd: Path
    env: dict[str, str] = field(default_factory=dict)

    def run(self, argv: list[str]) -> bytes:
        env = {**ENVIRON, "HOME": str(self.cwd), **self.env}
        return subprocess.run(argv, cwd=self.cwd, env=env, check=True, stdout=subprocess.PIPE, timeout=60).stdout


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip("wheel", "-q", "--no-deps", "-w", str(directory), str(ROOT))
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="session")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_zipapp(tmp_path_factory.mktemp("zipapp") / "sandbox.pyz")


def build_zipapp(out: Path) -> Path:
    subprocess.run([sys.executable, ROOT / "static" / "build.py", out], check=True, timeout=120)
    return out


def pip(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *args], check=True, timeout=300)


def installed(directory: Path, cwd: Path, *what: str) -> Way:
    """Install into a fresh venv with pip."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = str(directory / "bin" / "python")
    pip("--python", python, "install", "-q", *what)
    return Way([str(directory / "bin" / "sandbox")], [python], cwd)


@pytest.fixture(scope="session", params=["checkout", "wheel", "editable", "zipapp"])
def way(request: pytest.FixtureRequest, elsewhere: Path, tmp_path_factory: pytest.TempPathFactory) -> Way:
    match request.param:
        case "checkout":
            return Way([*BARE_PYTHON, "-m", "sandbox"], BARE_PYTHON, ROOT)
        case "wheel":
            wheel: Path = request.getfixturevalue("wheel")
            return installed(tmp_path_factory.mktemp("venv"), elsewhere, str(wheel))
        case "editable":
            return installed(tmp_path_factory.mktemp("venv"), elsewhere, "-e", str(ROOT))
        case _:
            zipapp: Path = request.getfixturevalue("zipapp")
            return Way([*BARE_PYTHON, str(zipapp)], BARE_PYTHON, elsewhere, {"PYTHONPATH": str(zipapp)})


# --- All ways ---


def test_every_way_runs_and_tells_its_version(way: Way) -> None:
    assert way.run([*way.command, "--version"]).decode().split()[-1] == VERSION


def test_every_way_finds_its_assets(way: Way) -> None:
    code = f"import sandbox, sys; sys.stdout.buffer.write(sandbox.asset({ASSET!r}))"
    assert way.run([*way.python, "-c", code]) == (ROOT / "static" / ASSET).read_bytes()


def test_wheel_and_zipapp_bring_what_the_pages_load(wheel: Path, zipapp: Path) -> None:
    for file in (wheel, zipapp):
        names = zipfile.ZipFile(file).namelist()
        for name in ("index.html", "vendor/xterm.mjs", "vendor/marked.esm.js", "vendor/LICENSES.txt"):
            assert f"sandbox_static/ui/{name}" in names
        assert not [name for name in names if "node_modules" in name or "package-lock" in name]


def test_every_way_says_which_asset_is_missing(way: Way) -> None:
    code = "import sandbox\ntry: sandbox.asset('image/none')\nexcept sandbox.SandboxError as error: print(error)"
    assert b"image/none" in way.run([*way.python, "-c", code])


def test_an_exit_status_comes_through(way: Way) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        way.run([*way.command, "--no-such-option"])
    assert error.value.returncode == 2


def test_no_module_of_the_project_is_run(way: Way, tmp_path: Path) -> None:
    """An empty item of PYTHONPATH is the current directory, which is the project."""
    if way.command[-2:] == ["-m", "sandbox"]:
        return  # which is Python's own start in the current directory: the README says so
    for module in ("argparse", "json", "select", "signal", "subprocess", "sandbox_web"):
        (tmp_path / f"{module}.py").write_text("open('run', 'w')\nraise SystemExit(7)\n")
    for command in ("ps --help", "config show"):
        way = Way(way.command, [], tmp_path, {"PYTHONPATH": f"{way.env.get('PYTHONPATH', '')}:/x"})
        way.run([*way.command, *command.split()])
    assert not (tmp_path / "run").exists()


# --- Wheel ---


def test_the_wheel_leaves_site_packages_tidy(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops <= {"sandbox.py", "sandbox_web.py", "sandbox_static"}
    assert f"sandbox_static/{ASSET}" in names
    assert "sandbox_static/build.py" not in names


# --- Zipapp ---


def test_two_builds_are_equal(zipapp: Path, tmp_path: Path) -> None:
    again = build_zipapp(tmp_path / "again.pyz")
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(zipapp.read_bytes()).digest()


def test_the_zipapp_is_a_command_of_its_own(zipapp: Path, elsewhere: Path) -> None:
    way = Way([str(zipapp)], [], elsewhere)
    assert VERSION in way.run([str(zipapp), "--version"]).decode()
    assert VERSION in way.run([sys.executable, "-I", str(zipapp), "--version"]).decode()


def test_the_zipapp_starts_isolated(zipapp: Path, tmp_path: Path) -> None:
    for module in ("argparse", "contextlib", "json", "runpy", "sandbox"):
        (tmp_path / f"{module}.py").write_text("open('run', 'w')\nraise SystemExit(7)\n")
    way = Way([], [], tmp_path, {"PYTHONPATH": ":/x"})
    assert b"usage" in way.run([str(zipapp), "ps", "--help"])
    assert not (tmp_path / "run").exists()


def test_the_zipapp_runs_without_its_bytecode(zipapp: Path, elsewhere: Path) -> None:
    """Which is what another version of Python does."""
    plain = elsewhere / "plain.pyz"
    with zipfile.ZipFile(zipapp) as source, zipfile.ZipFile(plain, "w") as target:
        for name in source.namelist():
            target.writestr(name, b"\0" * 64 if name.endswith(".pyc") else source.read(name))
    assert VERSION in Way([], [], elsewhere).run([sys.executable, "-I", str(plain), "--version"]).decode()


def test_the_zipapp_brings_websockets(zipapp: Path, elsewhere: Path) -> None:
    way = Way([], BARE_PYTHON, elsewhere, {"PYTHONPATH": str(zipapp)})
    found = way.run([*way.python, "-c", "import websockets.server; print(websockets.server.__file__)"]).decode()
    assert found.startswith(str(zipapp))


def test_the_zipapp_refuses_an_old_python(zipapp: Path) -> None:
    code = f"import runpy, sys; sys.version_info = (3, 10, 0); runpy.run_path({str(zipapp)!r}, run_name='__main__')"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (1, "sandbox: Python 3.11 or newer is needed, this is 3.10\n")
