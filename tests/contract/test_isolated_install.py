"""Each image's install line is enough: every module of the service imports with nothing else around."""

import subprocess
from pathlib import Path

import pytest
from isolated import ROOT, build, closure, install_line

DOCKERFILES = sorted(ROOT.glob("services/*/Dockerfile")) + sorted(ROOT.glob("deploy/*/Dockerfile"))
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1].split(","):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if module.name.endswith("__main__") or any(part in module.name for part in sys.argv[2].split(",") if part):
            continue
        importlib.import_module(module.name)
print("torch" in sys.modules)
"""
NEEDS_TORCH = {
    "reflux_trainer": "reflux_trainer.learner",
    "reflux_inference_gateway": "reflux_inference_gateway.engine",
}
NEEDS_EXTRA = {
    "ray": "reflux_scheduler.backends.ray.driver.,reflux_sandbox.remote.ray_driver",
    "reflux-transfer": "reflux_inference_gateway.foreign.",
}
"""Distributions of extras that an image may lack, and the modules that import them."""

SYSTEM_PYTHON = "rietveld"
"""Modules that only the system interpreter can import (pyobjcryst comes from Debian)."""


def source_packages(folder: Path) -> list[str]:
    return [path.name for path in (folder / "src").glob("reflux_*")]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_installs_all_that_its_service_imports(dockerfile, tmp_path):
    packages = install_line(dockerfile)
    distributions = closure(packages)
    python = build(tmp_path / "venv", distributions)
    with_torch = "torch" in distributions
    names = [
        name
        for package in packages
        if package.folder.parent.name == "services"
        for name in source_packages(package.folder)
    ]
    left_out = "" if with_torch else ",".join(NEEDS_TORCH[name] + "." for name in names if name in NEEDS_TORCH)
    missing_extras = [modules for extra, modules in NEEDS_EXTRA.items() if extra not in distributions]
    skip = ",".join(filter(None, [SYSTEM_PYTHON, left_out, *missing_extras]))
    done = subprocess.run(
        [python, "-I", "-c", IMPORT_ALL, ",".join(names), skip], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(with_torch), "torch must come in with its extra, and with nothing else"


def test_every_service_has_an_image():
    assert {path.parent.name for path in DOCKERFILES} >= {
        path.name for path in (ROOT / "services").iterdir() if path.is_dir()
    }
