"""Images: what each installs and copies, that it runs without root, and that its health check asks the right port."""

import re
import tomllib
from pathlib import Path

import pytest
from isolated import ROOT, install_line

AGENT = ROOT / "deploy/agent/Dockerfile"
DOCKERFILES = {path.parent.name: path for path in (*sorted(ROOT.glob("services/*/Dockerfile")), AGENT)}

INSTALLS = {
    "scheduler": "libs/protos libs/kit libs/placement services/scheduler[kubernetes]",
    "trainer": "libs/protos libs/kit libs/runs libs/tasks libs/model libs/storage services/trainer",
    "inference-gateway": "libs/protos libs/kit services/inference-gateway",
    "weight-broker": "libs/protos libs/kit libs/weightplan libs/transfer services/weight-broker",
    "sandbox": "libs/protos libs/kit libs/tasks services/sandbox",
    "checkpoint": "libs/protos libs/kit libs/storage services/checkpoint",
    "agent": "libs/protos libs/kit libs/placement libs/runs libs/tasks libs/storage libs/weightplan libs/transfer "
    "libs/model services/scheduler services/trainer[learner] services/inference-gateway[engine]",
}
"""What the isolated test of each service installs; a new dependency between packages is added in both places."""
PORTS = {
    "scheduler": 7001,
    "trainer": 7002,
    "inference-gateway": 7003,
    "weight-broker": 7004,
    "sandbox": 7005,
    "checkpoint": 7006,
    "agent": 7007,
}
"""gRPC ports, as the peers' defaults in the kit's settings; HTTP is 1000 higher."""

every_image = pytest.mark.parametrize("name", sorted(INSTALLS))


def instructions(name: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) of a Dockerfile, continuation lines joined, comments dropped."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", DOCKERFILES[name].read_text(), flags=re.MULTILINE))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def of(name: str, kind: str) -> list[str]:
    """The arguments of all instructions of one kind."""
    return [rest for word, rest in instructions(name) if word == kind]


def test_there_is_one_image_per_service_and_one_for_nodes() -> None:
    folders = {path.parent.name for path in ROOT.glob("services/*/pyproject.toml")}
    assert set(DOCKERFILES) == folders | {"agent"} == set(INSTALLS)


@every_image
def test_an_image_installs_what_the_table_says(name: str) -> None:
    found = [
        f"{package.folder.relative_to(ROOT)}" + (f"[{','.join(sorted(package.extras))}]" if package.extras else "")
        for package in install_line(DOCKERFILES[name])
    ]
    assert found == INSTALLS[name].split()
    assert len([line for line in of(name, "RUN") if "pip install" in line]) == 1


@every_image
def test_an_image_copies_what_it_installs_and_no_more(name: str) -> None:
    copied = {line.split()[0] for line in of(name, "COPY") if line.startswith(("libs/", "services/"))}
    assert copied == {item.partition("[")[0] for item in INSTALLS[name].split()}
    for line in of(name, "COPY"):
        source = line.split()[0]
        assert source.startswith("--from=build") or source == "constraints.txt" or (ROOT / source).is_dir()


@every_image
def test_an_image_runs_without_root_from_a_pinned_base(name: str) -> None:
    for base in of(name, "FROM"):
        assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm( AS build)?", base), base
    assert of(name, "USER") == ["10001:10001"]
    last = [word for word, _ in instructions(name)].index("USER")
    assert not [word for word, _ in instructions(name)[last:] if word in ("RUN", "COPY", "ADD")]


@every_image
def test_the_health_check_asks_the_grpc_port(name: str) -> None:
    port = PORTS[name]
    assert of(name, "EXPOSE") == [f"{port} {port + 1000}"]
    (check,) = of(name, "HEALTHCHECK")
    assert check.endswith(f'CMD ["python", "-m", "reflux_kit.probe", "127.0.0.1:{port}"]')


@every_image
def test_the_entry_point_is_a_script_of_an_installed_package(name: str) -> None:
    scripts: set[str] = set()
    for package in install_line(DOCKERFILES[name]):
        project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
        scripts |= set(project.get("scripts", {}))
    (entry,) = of(name, "ENTRYPOINT")
    assert entry == f'["reflux-{name}"]'
    assert f"reflux-{name}" in scripts


def test_the_build_context_holds_what_images_copy() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"constraints.txt", "configs/topologies", "libs/*/src", "services/*/src"} <= kept
    for name in INSTALLS:
        for package in install_line(DOCKERFILES[name]):
            project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
            readme = project.get("readme")
            assert readme in (None, "README.md"), f"{package.folder} needs {readme} in the build context"
            assert readme is None or Path(package.folder / readme).is_file()
