"""A third engine: containers of plain namespaces, made with unshare, entered with nsenter.

The class is its driver, the functions its program, which the driver's calls start. It shows what
a driver has to be, and is no jail: whatever image is named, a container sees the machine's own
programs, read-only, keeps its capabilities and is not limited. It needs root. NAMESPACES_HOME has
a folder for each container:

    container.json  what it was created from
    root/           its files
    log             what its first command has printed
    lock            held while it runs
    pid             that of its first command
    exit            how that ended
"""

import fcntl
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from sandbox import Engine, iso_time


class Namespaces(Engine):
    name = "namespaces"
    minimum = (1, 0)

    def argv(self, call: str, *names: str) -> list[str]:
        return [sys.executable, __file__, call, *names]

    def is_rootless(self, fact: str) -> bool:
        return False

    def inspect_argv(self, name: str) -> list[str]:
        return self.argv("inspect", name)

    def read_inspected(self, out: str) -> tuple[str, str, str, int, int, dict[str, str]]:
        data = json.loads(out)
        return data["id"], data["name"], data["state"], data["code"], 0, data["labels"]

    def is_name_taken(self, err: str) -> bool:
        return "there is already" in err

    def list_argv(self, label: str, shown: Sequence[str]) -> list[str]:
        return self.argv("list", label)

    def read_list(self, out: str) -> list[dict[str, Any]]:
        rows = json.loads(out)
        return [{**row, "created": iso_time(row["created"])} for row in rows]

    def create_argv(self, name: str, image: str, command: Sequence[str], *,
                    labels: Mapping[str, str], workdir: str, log_size: str, env: Sequence[str],
                    limits: Mapping[str, Any], capabilities: Sequence[str] = (),
                    network: str = "open", ports: Sequence[str] = (),
                    binds: Sequence[tuple[str, str, str]] = (), volumes: Sequence[str] = (),
                    service: bool = False, beside: Sequence[str] = ()) -> list[str]:
        assert not ports and not service, "it has no network of its own"
        return self.argv("create", json.dumps({
            "name": name, "image": image, "command": list(command), "labels": dict(labels),
            "workdir": workdir, "env": dict(item.split("=", 1) for item in env),
            "network": network, "binds": [*binds, *map(place_of, volumes)]}))

    def exec_argv(self, name: str, command: Sequence[str], *, user: str = "", workdir: str = "",
                  env: Sequence[str] = (), stdin: bool = False,
                  terminal: bool = False) -> list[str]:
        where = {"user": user or "0:0", "workdir": workdir or "/", "env": list(env), "stdin": stdin}
        return self.argv("exec", name, json.dumps(where), *command)

    def logs_argv(self, name: str, *, follow: bool = False, tail: int = 0,
                  since: float = 0) -> list[str]:
        return self.argv("logs", name, str(tail))

    def copy_argv(self, name: str, path: str) -> list[str]:
        return self.argv("copy", name, path)

    def image_argv(self, name: str) -> list[str]:
        return self.argv("image", name)

    def read_image(self, out: str) -> tuple[str, list[str], dict[str, str]]:
        return out.strip(), [], {}

    def image_of_argv(self, name: str) -> list[str]:
        return self.argv("image", name)

    def try_argv(self, image: str, command: Sequence[str], network: str = "open",
                 volumes: Sequence[str] = ()) -> list[str]:
        return self.argv("try", network, json.dumps([*map(place_of, volumes)]), *command)

    def closed_argv(self, name: str, image: str, command: Sequence[str], *,
                    volumes: Sequence[str] = (), **_: Any) -> list[str]:
        return self.try_argv(image, command, "none", volumes)


def place_of(volume: str) -> tuple[str, str, str]:
    """A volume as a bind: it is a folder."""
    name, target, *options = volume.split(":")
    return str(volumes_of() / name), target, ",".join(options)


def volumes_of() -> Path:
    return Path(os.environ["NAMESPACES_HOME"] + ".volumes")


# --- The program ---

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Makes the container's view of the files, tells its own pid on descriptor 9, and becomes the first
# command.
SETUP = """\
set -e
read -r pid _ </proc/self/stat
root=$1 workdir=$2; shift 2
cd "$root"
mkdir -p dev etc proc run tmp var/tmp
chmod 1777 tmp var/tmp
for name in bin lib lib32 lib64 libx32 sbin usr; do
  if [ -L /$name ]; then [ -L $name ] || ln -s "$(readlink /$name)" $name
  elif [ -d /$name ]; then
    mkdir -p $name; mount --bind /$name $name; mount -o remount,bind,ro $name
  fi
done
for name in alternatives group ld.so.cache passwd; do
  [ -e etc/$name ] || cp -a /etc/$name etc/
done
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs tmpfs dev/shm
. ./binds
ip link set lo up 2>/dev/null || :
echo "$pid" >&9
exec 9>&-
exec chroot . sh -c 'cd "$0" && exec "$@"' "$workdir" "$@"
"""


def containers() -> list[Path]:
    return [path.parent for path in Path(os.environ["NAMESPACES_HOME"]).glob("*/container.json")]


def read(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "container.json").read_text())
    return data


def write(folder: Path, data: Mapping[str, Any]) -> None:
    temporary = folder / secrets.token_hex(5)
    temporary.write_text(json.dumps(data))
    temporary.rename(folder / "container.json")


def fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(125)


def find(name: str) -> Path:
    """The folder of a container by its id or name."""
    for folder in containers():
        with suppress(FileNotFoundError):
            if name in (folder.name, read(folder)["name"]):
                return folder
    fail(f"no such container: {name}")


def is_running(folder: Path) -> bool:
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def described(folder: Path) -> dict[str, Any]:
    data, code = read(folder), folder / "exit"
    return {"id": folder.name, "state": "running" if is_running(folder) else "exited",
            "code": int(code.read_text()) if code.exists() else 0,
            **{key: data[key] for key in ("name", "image", "labels", "created")}}


def bind_script(root: Path, binds: Sequence[tuple[str, str, str]]) -> str:
    lines = []
    for source, target, options in sorted(binds, key=lambda bind: bind[1]):  # the outer ones first
        if Path(source).parent == volumes_of():
            Path(source).mkdir(parents=True, exist_ok=True)
        inside = root / target.lstrip("/")
        make = "mkdir -p" if os.path.isdir(source) else "touch"
        lines.append(shlex.join(["mkdir", "-p", str(inside.parent)]))
        lines.append(f"{make} {shlex.quote(str(inside))}")
        lines.append(shlex.join(["mount", "--bind", source, str(inside)]))
        if "ro" in options.split(","):
            lines.append(shlex.join(["mount", "-o", "remount,bind,ro", str(inside)]))
    return "\n".join(lines) + "\n"


def unshare(folder: Path, data: Mapping[str, Any], **popen: Any) -> "subprocess.Popen[bytes]":
    """Start the first command of a container."""
    root = folder / "root"
    root.mkdir(exist_ok=True)
    (root / "binds").write_text(bind_script(root, data["binds"]))
    network = [] if data["network"] in ("open", "host") else ["--net"]
    argv = ["unshare", "--mount", "--pid", "--fork", *network, "sh", "-c", SETUP, "sh", str(root),
            data["workdir"], *data["command"]]
    return subprocess.Popen(argv, env={"PATH": PATH, **data["env"]}, **popen)


def start(name: str) -> None:
    """Start a container under a process that waits for its end, unless it runs."""
    folder = find(name)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    told, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        null, log = os.open(os.devnull, os.O_RDWR), os.open(
            folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for fd, ours in ((0, null), (1, log), (2, log), (9, tell)):
            os.dup2(ours, fd)
        os.close(told)
        process = unshare(folder, read(folder), pass_fds=(9,))
        os.close(tell)
        os.close(9)
        status = process.wait()
        (folder / "exit").write_text(str(status if status >= 0 else 128 - status))
        os._exit(0)
    os.close(tell)
    os.close(lock)  # the other one keeps it
    with open(told) as pipe:
        pid = pipe.readline().strip()
    if not pid:
        fail(f"it was not started: {(folder / 'log').read_text()}")
    (folder / "pid").write_text(pid)


def stop(name: str) -> None:
    folder = find(name)
    if is_running(folder):
        with suppress(ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), 9)  # the others of the namespace go with it
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def create(text: str) -> None:
    data = json.loads(text)
    data["created"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    home = Path(os.environ["NAMESPACES_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(read(folder)["name"] == data["name"] for folder in containers()):
            fail(f"there is already a container {data['name']}")
        folder = home / secrets.token_hex(16)
        folder.mkdir()
        write(folder, data)
    start(folder.name)
    print(folder.name)


def remove(*names: str) -> None:
    for name in names:
        stop(name)
        shutil.rmtree(find(name))


def rename(id: str, name: str) -> None:
    folder = find(id)
    write(folder, {**read(folder), "name": name})


def enter(name: str, text: str, *command: str) -> None:
    """Become a command in a running container."""
    folder, where = find(name), json.loads(text)
    if not is_running(folder):
        fail(f"the container {name} does not run")
    env = {"PATH": PATH, **read(folder)["env"]}
    for item in where["env"]:
        variable, equals, value = item.partition("=")
        env[variable] = value if equals else os.environ[variable]
    if not where["stdin"]:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    uid, gid = where["user"].split(":")
    os.execvpe("nsenter", ["nsenter", "--target", (folder / "pid").read_text(), "--mount", "--pid",
                           "--net", "--root", "--setuid", uid, "--setgid", gid, "--",
                           "env", "-C", where["workdir"], *command], env)


def remove_volume(name: str) -> None:
    used = [bind[0] for folder in containers() for bind in read(folder)["binds"]]
    if str(volumes_of() / name) in used:
        fail(f"the volume {name} is in use")
    shutil.rmtree(volumes_of() / name)


def attempt(network: str, binds: str, *command: str) -> None:
    """Run a command in a container that nobody else sees."""
    folder = Path(os.environ["NAMESPACES_HOME"]) / f"try-{secrets.token_hex(5)}"
    folder.mkdir(parents=True)
    data = {"command": command, "network": network, "binds": json.loads(binds), "workdir": "/",
            "env": {}}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 9)
    status = unshare(folder, data, pass_fds=(9,)).wait()
    shutil.rmtree(folder)
    sys.exit(status)


def logs(name: str, tail: str) -> None:
    lines = (find(name) / "log").read_text().splitlines(keepends=True)
    print("".join(lines[-int(tail):]), end="")


def copy(name: str, path: str) -> None:
    source = find(name) / "root" / path.lstrip("/")
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        archive.add(source, source.name)


def transfer(*places: str) -> None:
    """Copy a file or folder between the machine and a container, as ID:PATH names it."""
    source, target = (find(place.partition(":")[0]) / "root" / place.partition(":")[2].lstrip("/")
                      if ":" in place else Path(place) for place in places)
    sys.exit(subprocess.run(["cp", "-R", source, target]).returncode)


def main(call: str, *args: str) -> None:
    if call == "facts":
        print("1.0 rootful")
    elif call == "image":
        print("machine")
    elif call == "inspect":
        print(json.dumps(described(find(args[0]))))
    elif call == "list":
        rows = [described(folder) for folder in containers()]
        print(json.dumps([row for row in rows if args[0] in row["labels"]]))
    elif call in CALLS:
        CALLS[call](*args)
    else:
        fail(f"namespaces cannot {call}")


CALLS: dict[str, Callable[..., None]] = {
    "create": create, "start": start, "stop": stop, "rename": rename, "remove": remove,
    "exec": enter, "try": attempt, "logs": logs, "copy": copy, "cp": transfer,
    "volumes": print, "remove-volume": remove_volume,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
