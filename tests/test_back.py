"""Coming back to a session: what is remembered, what is printed, asked and said, on each engine."""

from pathlib import Path

import pytest
from conftest import Engine, write_config

# --- What exists stays in reach ---


@pytest.mark.parametrize("text", ['{"runtime": "%s",', '{"runtime": "%s", "volume": []}'])
def test_a_wrong_file_keeps_nobody_from_what_exists(engine: Engine, project: Path, home: Path,
                                                    name: str, text: str) -> None:
    assert engine.sandbox("run", "-n", name, "-x", "true").returncode == 0
    (home / "sandbox.json").write_text(text % engine.runtime)
    whole = text.endswith("}")
    env = {"SANDBOX_RUNTIME": "" if whole else engine.runtime}  # as far as it can be read
    shown = engine.sandbox("ps", "-q", env=env)
    assert shown.returncode == 0 and name in shown.stdout.split()
    assert shown.stderr.startswith(f"sandbox: {home}/sandbox.json")
    assert shown.stderr.count("\n") == 1
    assert name in engine.sandbox("__complete", "rm", "", env=env).stdout.split()
    assert engine.sandbox("prune", "--dry-run", env=env).returncode == 0
    assert engine.sandbox("run", "-n", name, "-x", "true", env=env).returncode == 1
    removed = engine.sandbox("rm", name, env=env)
    assert (removed.returncode, removed.stdout) == (0, f"{name}\n")
    write_config(home)  # a test that asks for no home of its own gets this one
