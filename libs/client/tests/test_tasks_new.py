"""A scaffolded task is a distribution that passes its own tests."""

import os
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

from reflux_client.commands.tasks_new import list_tasks, new_task, write_scaffold
from reflux_client.connection import ClientError
from reflux_runs.load import load_document
from reflux_runs.preflight import Catalog, preflight


def installed(project, site):
    """Makes what an editable installation would leave in site-packages: the entry points and the way to the code."""
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    name = metadata["name"].replace("-", "_")
    info = site / f"{name}-{metadata['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n")
    ((key, value),) = metadata["entry-points"]["reflux.tasks"].items()
    (info / "entry_points.txt").write_text(f"[reflux.tasks]\n{key} = {value}\n")
    path = [str(site), str(project / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run(command, environment, folder):
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_scaffolded_task_passes_its_own_tests(tmp_path):
    project = tmp_path / "my-alloys"
    done = CliRunner().invoke(new_task, ["my-alloys", "--folder", str(project)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "reflux run" in done.output
    environment = installed(project, tmp_path / "site")
    tests = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], environment, project)
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert " passed" in tests.stdout


def test_the_scaffold_is_clean_code_and_its_run_file_is_valid(tmp_path):
    written = write_scaffold("abc-2d", tmp_path / "t")
    assert {path.relative_to(tmp_path / "t").parts[0] for path in written} == {
        "README.md", "pyproject.toml", "run.toml", "src", "tests",
    }  # fmt: skip
    rules = ["--isolated", "--line-length", "120", "--select", "E,F,I,UP,B,C4,SIM,RET,PT"]
    checked = run([sys.executable, "-m", "ruff", "check", *rules, "."], dict(os.environ), tmp_path / "t")
    assert checked.returncode == 0, checked.stdout
    config = load_document(tomllib.loads((tmp_path / "t" / "run.toml").read_text()))
    assert config.task.name == "abc-2d"
    known = Catalog(tasks=["abc-2d"], verifiers={"abc-2d": ["rule"]}, prompt_tokens={"abc-2d": 4})
    assert preflight(config, known).samples_per_step == 64


@pytest.mark.parametrize(
    "name", ["", "My-Task", "a_b", "-a", "a--b", "../x", "class", "reflux-x", "a" * 41, "1a", "a\n"]
)
def test_a_bad_name_is_refused_and_nothing_is_written(tmp_path, name):
    with pytest.raises(ClientError, match="name"):
        write_scaffold(name, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_folder_with_files_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ClientError, match="not an empty folder"):
        write_scaffold("my-task", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_installed_tasks_are_listed_with_their_verifiers():
    done = CliRunner(env={"COLUMNS": "40"}).invoke(list_tasks, catch_exceptions=False)
    assert done.exit_code == 0
    for word in ("crystal-structure", "xrd-phase-id", "reflux-tasks", "synthesis-surrogate-2", "label", "full"):
        assert word in done.output


@pytest.mark.slow
def test_a_scaffolded_task_installs_with_pip(tmp_path):
    write_scaffold("my-alloys", tmp_path / "p")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--target"]
    done = run([*pip, str(tmp_path / "site"), str(tmp_path / "p")], dict(os.environ), tmp_path)
    assert done.returncode == 0, done.stderr
    code = "from reflux_tasks.registry import task_class; print(task_class('my-alloys').__name__)"
    named = run([sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(tmp_path / "site")}, tmp_path)
    assert named.stdout.strip() == "MyAlloysTask", named.stderr
