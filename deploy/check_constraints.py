"""Says how constraints.txt and this environment differ; exit status 1 when they do. Builds such as +cpu are equal."""

import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BASICS = {"pip", "setuptools", "wheel"}


def only_through_torch() -> set[str]:
    """Distributions that only torch asks for: a build for another platform (CUDA) brings others than the tested one."""
    needed = {canonicalize_name(found.metadata["Name"]): _needs(found) for found in metadata.distributions()}
    tools = {
        canonicalize_name(Requirement(line).name) for line in Path("deploy/requirements-dev.txt").read_text().split()
    }
    ours = tools | {name for name in needed if name.startswith("reflux-")}
    return _reached({"torch"}, needed) - _reached(ours, needed | {"torch": set()}) - {"torch"}


def _needs(distribution: metadata.Distribution) -> set[str]:
    found = map(Requirement, distribution.requires or ())
    return {
        canonicalize_name(each.name) for each in found if each.marker is None or each.marker.evaluate({"extra": ""})
    }


def _reached(start: set[str], needed: Mapping[str, set[str]]) -> set[str]:
    done: set[str] = set()
    todo = list(start)
    while todo:
        name = todo.pop()
        if name not in done:
            done.add(name)
            todo.extend(needed.get(name, ()))
    return done


def main() -> int:
    """Compares pins with installed distributions."""
    lines = (line.split("#")[0].strip() for line in Path("constraints.txt").read_text().splitlines())
    pins = {canonicalize_name(pin.name): pin for pin in map(Requirement, filter(None, lines))}
    installed = {
        canonicalize_name(found.metadata["Name"]): re.sub(r"\+.*", "", found.version)
        for found in metadata.distributions()
        if not found.metadata["Name"].startswith("reflux")
    }
    free = BASICS | only_through_torch()
    problems = [
        f"{name}=={version} is installed, constraints.txt says {pins.get(name, 'nothing')}"
        for name, version in sorted(installed.items())
        if name not in free and (name not in pins or not pins[name].specifier.contains(version))
    ]
    unused = [pin for name, pin in sorted(pins.items()) if name not in installed and not pin.marker]
    problems += [f"{pin} is pinned and not needed" for pin in unused]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
