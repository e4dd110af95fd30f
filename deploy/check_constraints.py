"""Says how constraints.txt and this environment differ; exit status 1 when they do. Builds such as +cpu are equal."""

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BASICS = {"pip", "setuptools", "wheel"}


def main() -> int:
    """Compares pins with installed distributions."""
    lines = (line.split("#")[0].strip() for line in Path("constraints.txt").read_text().splitlines())
    pins = {canonicalize_name(pin.name): pin for pin in map(Requirement, filter(None, lines))}
    installed = {
        canonicalize_name(found.metadata["Name"]): re.sub(r"\+.*", "", found.version)
        for found in metadata.distributions()
        if not found.metadata["Name"].startswith("reflux")
    }
    problems = [
        f"{name}=={version} is installed, constraints.txt says {pins.get(name, 'nothing')}"
        for name, version in sorted(installed.items())
        if name not in BASICS and (name not in pins or not pins[name].specifier.contains(version))
    ]
    unused = [pin for name, pin in sorted(pins.items()) if name not in installed and not pin.marker]
    problems += [f"{pin} is pinned and not needed" for pin in unused]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
