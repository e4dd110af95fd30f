"""docker-compose.yml against the Compose specification, the Dockerfiles and the settings that services really have."""

import ast
import json
import re
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest
import yaml
from isolated import ROOT
from test_dockerfiles import DOCKERFILES, PORTS

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
ONCE = {"volumes", "bucket"}
"""Services that end after their work."""

ours = pytest.mark.parametrize("name", sorted(OURS))
every = pytest.mark.parametrize("name", sorted(SERVICES))


def test_the_file_follows_the_compose_specification() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: compose file not validated")
    pytest.importorskip("check_jsonschema", reason="check-jsonschema (which brings the schema) is not installed")
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(COMPOSE)] == []
    assert list(validator.iter_errors({"services": {"x": {"imagee": "y"}}})), "the schema accepts anything"


def test_docker_compose_accepts_the_file(tmp_path) -> None:
    version = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(version, capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed: the file is checked against the schema only")
    values = tmp_path / "env"
    values.write_text("".join(f"{name}=x\n" for name in interpolated()))
    command = ["docker", "compose", "--env-file", str(values), "--profile", "full", "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_six_services_an_agent_and_what_they_stand_on() -> None:
    assert set(OURS) == set(DOCKERFILES)
    assert set(SERVICES) - set(OURS) == {"redis", "minio", "otel-collector", "prometheus"} | ONCE
    for name, service in SERVICES.items():
        wanted = ["full"] if name in ("otel-collector", "prometheus") else ["core", "full"]
        assert service["profiles"] == wanted, name


@every
def test_images_are_pinned(name: str) -> None:
    tag = SERVICES[name]["image"].rpartition(":")[2]
    assert re.search(r"\d", tag), SERVICES[name]["image"]
    assert "latest" not in tag


@every
def test_containers_run_without_root_and_rights_on_a_read_only_root(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "privileged" not in service
    if name == "volumes":  # chown needs root and this one right; it has no network and ends at once
        assert service["cap_add"] == ["CHOWN"]
        assert service["network_mode"] == "none"
        return
    assert service["user"].split(":")[0] not in ("0", "root")
    assert "cap_add" not in service
    assert "no-new-privileges:true" in service["security_opt"]


@ours
def test_our_services_are_built_and_asked_like_their_images(name: str) -> None:
    service = SERVICES[name]
    assert ROOT / service["build"]["dockerfile"] == DOCKERFILES[name]
    assert service["build"]["context"] == "."
    assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "reflux_kit.probe", f"127.0.0.1:{PORTS[name]}"]
    prefix = f"REFLUX_{name.upper().replace('-', '_')}"
    assert service["environment"][f"{prefix}_LISTEN"] == f"0.0.0.0:{PORTS[name]}"
    assert service["environment"][f"{prefix}_HTTP_LISTEN"] == f"0.0.0.0:{PORTS[name] + 1000}"
    state = [volume for volume in (*service["tmpfs"], *service.get("volumes", ())) if "/var/lib/reflux" in volume]
    assert len(state) == 1, "the state folder must be writable on the read-only root"


@ours
def test_peers_are_called_where_they_listen(name: str) -> None:
    environment = SERVICES[name]["environment"]
    peers = {key: value for key, value in environment.items() if re.fullmatch(r"REFLUX_[A-Z]+_ADDRESS", key)}
    assert len(peers) == 6
    for address in peers.values():
        host, _, port = address.partition(":")
        assert int(port) == PORTS[host]


def test_every_variable_is_a_setting_that_exists() -> None:
    known = settings_names()
    for name, service in OURS.items():
        for variable in service["environment"]:
            assert variable in known or variable.startswith("AWS_"), f"{name}: no setting is called {variable}"


def test_what_must_be_given_is_in_the_example_and_nothing_else() -> None:
    example = (ROOT / "deploy/env.example").read_text()
    offered = set(re.findall(r"^(?:# )?([A-Z0-9_]+)=", example, re.MULTILINE))
    assert offered == interpolated()
    required = set(re.findall(r"\$\{([A-Z0-9_]+):\?", (ROOT / "docker-compose.yml").read_text()))
    assert required == set(re.findall(r"^([A-Z0-9_]+)=$", example, re.MULTILINE))


def test_only_doors_for_people_are_published_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert set(published) == {"trainer", "inference-gateway", "prometheus"}
    for name, ports in published.items():
        assert all(port.startswith("127.0.0.1:") for port in ports)
        assert "front" in SERVICES[name]["networks"]
    assert COMPOSE["networks"]["backend"]["internal"] is True
    assert [name for name, service in SERVICES.items() if "front" in service.get("networks", ())] == list(published)


def test_nothing_waits_for_itself_or_for_another_profile() -> None:
    after = {name: set(service.get("depends_on", {})) for name, service in SERVICES.items()}
    for name, needed in after.items():
        assert needed <= set(SERVICES)
        assert all(set(SERVICES[name]["profiles"]) <= set(SERVICES[other]["profiles"]) for other in needed)
        for other, terms in SERVICES[name].get("depends_on", {}).items():
            ends = terms["condition"] == "service_completed_successfully"
            assert ends == (other in ONCE)
            assert ends or "healthcheck" in SERVICES[other]
    started: set[str] = set()
    while len(started) < len(after):
        ready = {name for name, needed in after.items() if needed <= started} - started
        assert ready, f"a circle among {set(after) - started}"
        started |= ready


def test_mounted_files_and_volumes_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (ROOT / source).is_file() if source.startswith("./") else source in COMPOSE["volumes"]


def test_prometheus_scrapes_every_service() -> None:
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    (group,) = job["static_configs"]
    assert set(group["targets"]) == {f"{name}:{port + 1000}" for name, port in PORTS.items()}


def test_the_collector_receives_where_the_example_sends() -> None:
    collector = yaml.safe_load((ROOT / "deploy/otel/collector.yml").read_text())
    assert collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"
    assert "REFLUX_OTLP_ENDPOINT=otel-collector:4317" in (ROOT / "deploy/env.example").read_text()
    pipeline = collector["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) <= set(collector[kind])


def test_the_sandbox_may_do_what_its_children_need_and_nothing_to_the_kernel() -> None:
    profile = json.loads((ROOT / "deploy/seccomp/sandbox.json").read_text())
    refused = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert all(rule["action"] == "SCMP_ACT_ERRNO" for rule in profile["syscalls"])
    needed = {"unshare", "setns", "mount", "umount2", "pivot_root", "mount_setattr", "clone", "clone3", "seccomp"}
    assert not refused & (needed | {"prctl", "capset", "sethostname", "pidfd_open", "close_range"})
    assert {"bpf", "init_module", "kexec_load", "ptrace", "keyctl", "perf_event_open", "userfaultfd"} <= refused
    options = SERVICES["sandbox"]["security_opt"]
    assert "seccomp=deploy/seccomp/sandbox.json" in options


def interpolated() -> set[str]:
    """Variables that the compose file takes from the environment or from .env."""
    return set(re.findall(r"(?<!\$)\$\{([A-Z0-9_]+)", (ROOT / "docker-compose.yml").read_text()))


def settings_names() -> set[str]:
    """Environment names of all settings classes, read from the sources: importing them would bring torch along."""
    shared: set[str] = set()
    names: set[str] = set()
    kit = ROOT / "libs/kit/src/reflux_kit/settings.py"
    for path in (kit, *ROOT.glob("services/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            source = ast.unparse(node)
            found = re.search(r"model_config = prefix\('([a-z-]+)'\)", source)
            fields = {
                item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and hasattr(item.target, "id")
            }
            shared |= {f"REFLUX_{field.upper()}" for field in re.findall(r"_shared\('(\w+)'\)", source)}
            shared |= set(re.findall(r"validation_alias='(\w+)'", source))
            if found:
                start = f"REFLUX_{found[1].upper().replace('-', '_')}_"
                names |= {start + field.upper() for field in fields | {"listen", "http_listen", "drain_seconds"}}
    return shared | names
