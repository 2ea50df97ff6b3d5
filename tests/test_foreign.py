"""Anyone can give a container our labels, and an image brings its own: they are data."""

import json
import os
from pathlib import Path

import pytest
from conftest import IMAGE, Engine, write_config

SECRETS = "echo $FROM_HERE $FROM_FILE $FROM_PROFILE"
pytestmark = pytest.mark.parametrize("engine", ["docker", "podman"], indirect=True,
                                     scope="session")


def twin(engine: Engine, made: str, name: str, **also: str) -> None:
    """Somebody else's container with all labels of a session that was made."""
    shown = engine.run("inspect", "--format", "{{json .Config.Labels}}", made)
    labels = {**json.loads(shown.stdout), **also}
    ran = engine.run("run", "-d", "--init", "--name", name, *(
        word for key, value in labels.items() for word in ("--label", f"{key}={value}")),
        "-v", f"{engine.project}:{engine.project}", IMAGE,
                     "sh", "-c", "mkdir -p /run; : >/run/sandbox-ready; exec sleep 1000")
    assert ran.returncode == 0, ran.stderr


def test_no_value_of_this_host_follows_from_a_label(engine: Engine, project: Path, home: Path,
                                                    name: str) -> None:
    write_config(home, runs={"work": {"env": {"FROM_PROFILE": "profile"}}})
    (home / "a.env").write_text("export FROM_FILE=file\n")
    os.chown(home / "a.env", engine.uid, engine.gid)
    env, theirs = {"FROM_HERE": "here"}, f"{name}-theirs"
    made = engine.sandbox("run", "-n", name, "-r", "work", "-e", "FROM_HERE", "--ef",
                          str(home / "a.env"), "-x", SECRETS, env=env)
    assert made.stdout == "here file profile\n", made.stderr
    twin(engine, name, theirs)
    for _ in range(2):  # whether it was looked at before or not
        ran = engine.sandbox("run", "-n", theirs, "-x", SECRETS, env=env)
        assert (ran.returncode, ran.stdout) == (0, "\n"), ran.stderr
        assert f"{theirs} was not made from here" in ran.stderr
    again = engine.sandbox("run", "-n", name, "-x", SECRETS, env=env)
    assert (again.stdout, again.stderr) == ("here file profile\n", "")
    assert engine.sandbox("rename", name, f"{name}-new").returncode == 0
    again = engine.sandbox("run", "-n", f"{name}-new", "-x", SECRETS, env=env)
    assert (again.stdout, again.stderr) == ("here file profile\n", "")
    assert engine.sandbox("recreate", f"{name}-new").returncode == 0
    again = engine.sandbox("run", "-n", f"{name}-new", "-x", SECRETS, env=env)
    assert (again.stdout, again.stderr) == ("here file profile\n", "")


def test_no_mount_follows_from_a_label(engine: Engine, project: Path, home: Path,
                                       name: str) -> None:
    data, theirs = engine.directory(), f"{name}-theirs"
    assert engine.sandbox("run", "-n", name, "-v", f"{data}:/data", "-x", "true").returncode == 0
    twin(engine, name, theirs)
    for command in (("recreate", theirs), ("run", "--from", theirs, "-n", f"{name}-2", "-x", "ls")):
        refused = engine.sandbox(*command)
        assert refused.returncode in (1, 125), refused.stderr
        assert f"{theirs} was not made from here" in refused.stderr and "--hp" in refused.stderr
    assert engine.run("inspect", f"{name}-2").returncode != 0
    made = engine.sandbox("recreate", theirs, "--hp", str(project))
    assert made.returncode == 0, made.stderr
    ran = engine.sandbox("run", "-n", theirs, "-x", "ls -d /data")  # it is ours now
    assert ran.returncode and "not made from here" not in ran.stderr
    kept = engine.sandbox("recreate", name)
    assert kept.returncode == 0, kept.stderr
    assert engine.sandbox("run", "-n", name, "-x", "ls -d /data").stdout == "/data\n"


def test_what_a_label_lets_pass_is_checked(engine: Engine, project: Path, home: Path,
                                           name: str) -> None:
    """That a mount of an engine's socket was allowed before is not for a label to say."""
    sockets, theirs = engine.directory(), f"{name}-theirs"
    (sockets / "docker.sock").touch()
    mount = f"{sockets}/docker.sock:/data"
    made = engine.sandbox("run", "-n", name, "--allow-engine-socket", "-v", mount, "-x", "true")
    assert made.returncode == 0, made.stderr
    twin(engine, name, theirs)
    refused = engine.sandbox("recreate", theirs, "--hp", str(project), "-v", mount)
    assert refused.returncode == 1 and "holds an engine's socket" in refused.stderr
    assert engine.sandbox("recreate", name).returncode == 0  # it was allowed here


def test_a_directory_does_not_offer_what_others_made(engine: Engine, project: Path, home: Path,
                                                     name: str) -> None:
    assert engine.sandbox("run", "-n", name, "-x", "true").returncode == 0
    twin(engine, name, f"{name}-theirs")
    with engine.pty("run", "-x", "true") as screen:
        screen.expect(f"Go on in {name} (")
        screen.send("y\n")
        assert screen.wait() == 0
