"""Every way to run it: from a checkout, a wheel, an editable installation, and a zipapp."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT
from service import free_port, wait_for

ASSET = "image/Containerfile"
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "sandbox.py").read_text(), re.MULTILINE)[0]
# A bare environment, and for the ways without a venv -S, lest the test venv's own sandbox be found.
ENVIRON = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
BARE_PYTHON = [sys.executable, "-S"]


@dataclass
class Way:
    """One way to run: the argv of the command and of a Python that can import it, and where."""

    command: list[str]
    python: list[str]
    cwd: Path
    env: dict[str, str] = field(default_factory=dict)

    def run(self, argv: list[str]) -> bytes:
        env = {**ENVIRON, "HOME": str(self.cwd), **self.env}
        return subprocess.run(argv, cwd=self.cwd, env=env, check=True, stdout=subprocess.PIPE,
                              timeout=60).stdout


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
def way(request: pytest.FixtureRequest, elsewhere: Path,
        tmp_path_factory: pytest.TempPathFactory) -> Way:
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
            return Way([*BARE_PYTHON, str(zipapp)], BARE_PYTHON, elsewhere,
                       {"PYTHONPATH": str(zipapp)})


# --- All ways ---


def test_every_way_runs_and_tells_its_version(way: Way) -> None:
    assert way.run([*way.command, "--version"]).decode().split()[-1] == VERSION


def test_every_way_finds_its_assets(way: Way) -> None:
    code = f"import sandbox, sys; sys.stdout.buffer.write(sandbox.asset({ASSET!r}))"
    assert way.run([*way.python, "-c", code]) == (ROOT / "static" / ASSET).read_bytes()


def test_wheel_and_zipapp_bring_what_the_pages_load(wheel: Path, zipapp: Path) -> None:
    for file in (wheel, zipapp):
        names = zipfile.ZipFile(file).namelist()
        for name in ("index.html", "vendor/xterm.mjs", "vendor/marked.esm.js",
                     "vendor/LICENSES.txt"):
            assert f"sandbox_static/ui/{name}" in names
        assert not [name for name in names if "node_modules" in name or "package-lock" in name]
        assert not [name for name in names if name.endswith(".png")]  # the README's


def test_every_way_starts_the_supervisor_of_a_job(way: Way, tmp_path: Path) -> None:
    folder = str(tmp_path / "job")
    args = [folder, "100", "sh", "-c", 'eval "$SANDBOX_ENV"']
    way.run([*way.python, "-c", f"""
import sandbox_web
sandbox_web.write_job({folder!r}, {{}})
sandbox_web.start_supervisor({args!r}, "echo out")"""])
    wait_for(lambda: Path(folder, "status").read_text().strip())
    assert Path(folder, "output").read_text() == "out\n"


def test_every_way_says_which_asset_is_missing(way: Way) -> None:
    code = ("import sandbox\ntry: sandbox.asset('image/none')\n"
            "except sandbox.SandboxError as error: print(error)")
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


def test_the_command_starts_where_it_is_installed_for_the_user(wheel: Path, tmp_path: Path) -> None:
    env = {**ENVIRON, "HOME": str(tmp_path), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    install = ["--python", PYTHON, "install", "-q", "--user", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], env=env, check=True, timeout=300)
    command = [str(tmp_path / ".local" / "bin" / "sandbox"), "--version"]
    assert Way([], [], tmp_path, {"PYTHONPATH": ":/x"}).run(command).split()[-1] == VERSION.encode()


def test_the_wheel_leaves_site_packages_tidy(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops <= {*(path.name for path in ROOT.glob("sandbox*.py")), "sandbox_static"}
    assert f"sandbox_static/{ASSET}" in names
    assert "sandbox_static/build.py" not in names


# --- Zipapp ---


def test_two_builds_are_equal(zipapp: Path, tmp_path: Path) -> None:
    again = build_zipapp(tmp_path / "again.pyz")
    digests = [hashlib.sha256(path.read_bytes()).digest() for path in (again, zipapp)]
    assert digests[0] == digests[1]


def test_the_zipapp_is_a_command_of_its_own(zipapp: Path, elsewhere: Path) -> None:
    way = Way([str(zipapp)], [], elsewhere)
    assert VERSION in way.run([str(zipapp), "--version"]).decode()
    assert VERSION in way.run([sys.executable, "-I", str(zipapp), "--version"]).decode()


def test_the_zipapp_finds_its_files_by_any_way(zipapp: Path, elsewhere: Path) -> None:
    (elsewhere / "link").symlink_to(zipapp)
    (elsewhere / "below").mkdir()
    script = (ROOT / "static" / "completion" / "sandbox.bash").read_bytes()
    for path in (os.path.relpath(zipapp, elsewhere), "./link", "below/../link"):
        assert Way([], [], elsewhere).run([path, "completion", "bash"]) == script


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
    command = [sys.executable, "-I", str(plain), "--version"]
    assert VERSION in Way([], [], elsewhere).run(command).decode()


def test_the_zipapp_brings_websockets(zipapp: Path, elsewhere: Path) -> None:
    way = Way([], BARE_PYTHON, elsewhere, {"PYTHONPATH": str(zipapp)})
    found = way.run([*way.python, "-c",
                     "import websockets.server; print(websockets.server.__file__)"]).decode()
    assert found.startswith(str(zipapp))


def test_the_zipapp_refuses_an_old_python(zipapp: Path) -> None:
    code = ("import runpy, sys; sys.version_info = (3, 10, 0); "
            f"runpy.run_path({str(zipapp)!r}, run_name='__main__')")
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            timeout=60)
    assert answer.returncode == 1
    assert answer.stderr == "sandbox: Python 3.11 or newer is needed, this is 3.10\n"


# --- A checkout, and what serve lacks there ---


@dataclass
class Checkout:
    """The files of a checkout alone, and a Python with nothing but its own library."""

    root: Path
    home: Path
    port: int

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": ENVIRON["PATH"], "HOME": str(self.home), "PYTHONDONTWRITEBYTECODE": "1",
               **env}
        argv = [*BARE_PYTHON, "-m", "sandbox", "serve", f"127.0.0.1:{self.port}", *args]
        return subprocess.run(argv, cwd=self.root, env=env, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True,
                              timeout=300)

    def serves(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`serve` in the background leads to the login page."""
        served = self.run("-d", *args, **env)
        assert served.returncode == 0, served.stderr
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=60) as answer:
            assert answer.url.endswith("/auth/login")
        assert self.run("--stop").returncode == 0
        return served

    def build(self, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [*BARE_PYTHON, "static/build.py", "--libraries"]
        return subprocess.run(argv, cwd=self.root, env=ENVIRON | env, capture_output=True,
                              text=True, timeout=300)

    @property
    def vendor(self) -> Path:
        return self.root / "static" / "ui" / "vendor"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path / "checkout", tmp_path / "home", free_port())
    checkout.home.mkdir()
    shutil.copytree(ROOT / "static", checkout.root / "static",
                    ignore=shutil.ignore_patterns("vendor", "__pycache__"))
    for module in ROOT.glob("sandbox*.py"):
        shutil.copy(module, checkout.root)
    return checkout


def path_without(program: str, folder: Path) -> str:
    """A PATH on which there is everything but one program."""
    folder.mkdir()
    for directory in ENVIRON["PATH"].split(":"):
        for path in Path(directory).glob("*"):
            if path.name != program and not (folder / path.name).is_symlink():
                (folder / path.name).symlink_to(path)
    return str(folder)


def test_serve_says_how_it_comes_to_websockets(checkout: Checkout) -> None:
    ran = checkout.run()
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "the Python package websockets is not installed" in ran.stderr
    assert f"  run: {sys.executable} -I -m venv {checkout.home}/.sandbox/venv && " in ran.stderr
    assert list(checkout.home.iterdir()) == []


def test_serve_makes_an_environment_of_its_own_once(checkout: Checkout) -> None:
    """Also where pip is told to install for the user, and for later versions of Python."""
    assert "websockets is not installed" in checkout.serves("--yes", PIP_USER="1").stderr
    assert (checkout.home / ".sandbox").is_dir() and not (checkout.home / ".local").exists()
    assert checkout.serves().stderr == ""
    (library,) = (checkout.home / ".sandbox" / "venv" / "lib").iterdir()
    library.rename(library.with_name("python3.99"))
    assert checkout.serves().stderr == ""
    shutil.rmtree(library.with_name("python3.99") / "site-packages" / "websockets")
    assert checkout.run("-d").returncode == 1
    checkout.serves("--yes")


def test_a_websockets_that_is_too_old_is_none(checkout: Checkout, tmp_path: Path) -> None:
    """Debian 12 has version 10."""
    pip("install", "-q", "--target", str(tmp_path / "old"), "websockets==10.4")
    old = {"PYTHONPATH": str(tmp_path / "old")}
    assert "not installed, or too old" in checkout.run(**old).stderr
    checkout.serves("--yes", **old)
    checkout.serves(**old)


def test_an_installation_that_fails_leaves_nothing(checkout: Checkout) -> None:
    ran = checkout.run("--yes", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(checkout.home))
    assert ran.returncode == 1 and "No matching distribution found for websockets" in ran.stderr
    (log,) = (checkout.home / ".sandbox" / "logs").iterdir()
    assert ran.stderr.endswith(f"  the whole output: {log}\n")
    assert "ended with status 1" in ran.stderr
    assert [path.name for path in (checkout.home / ".sandbox").iterdir()] == ["logs"]


def test_the_pages_get_the_same_libraries_without_npm(checkout: Checkout, tmp_path: Path) -> None:
    built = checkout.build(PATH=path_without("npm", tmp_path / "bin"))
    assert built.returncode == 0, built.stderr
    have = {path.name: path.read_bytes() for path in checkout.vendor.iterdir()}
    shutil.rmtree(checkout.vendor)
    assert checkout.build().returncode == 0
    assert have == {path.name: path.read_bytes() for path in checkout.vendor.iterdir()}


def test_another_library_than_the_lock_file_names_is_refused(checkout: Checkout,
                                                             tmp_path: Path) -> None:
    lock = checkout.root / "static" / "package-lock.json"
    data = json.loads(lock.read_text())
    data["packages"]["node_modules/marked"]["version"] = "18.2.0"
    lock.write_text(json.dumps(data))
    built = checkout.build(PATH=path_without("npm", tmp_path / "bin"))
    assert built.returncode == 1
    assert "marked-18.2.0.tgz is not what static/package-lock.json names" in built.stderr
    assert not checkout.vendor.exists() and not list((checkout.root / "static").glob(".vendor-*"))


def test_without_a_registry_the_pages_are_served_with_a_warning(checkout: Checkout,
                                                                tmp_path: Path) -> None:
    checkout.serves("--yes")
    shutil.rmtree(checkout.vendor)
    away = {"PATH": path_without("npm", tmp_path / "bin"),
            "NPM_CONFIG_REGISTRY": f"http://127.0.0.1:{free_port()}"}
    said = checkout.serves(**away).stderr
    assert "is the registry reachable? NPM_CONFIG_REGISTRY names another" in said
