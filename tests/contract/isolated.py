"""An interpreter that sees only what a Dockerfile's install line brings: those local packages and what they declare."""

import re
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
_INSTALL = re.compile(r"pip install .*-c constraints\.txt (?P<packages>[^\\&\n]+)")


@dataclass(frozen=True)
class LocalPackage:
    """One argument of an install line, for example "./services/trainer[learner]"."""

    folder: Path
    extras: frozenset[str]

    @property
    def distribution(self) -> str:
        """Name of the distribution in the folder."""
        text = (self.folder / "pyproject.toml").read_text()
        found = re.search(r'^name = "(.+)"', text, re.MULTILINE)
        assert found, self.folder
        return canonicalize_name(found.group(1))


def install_line(dockerfile: Path) -> list[LocalPackage]:
    """The local packages that a Dockerfile installs, in order."""
    found = _INSTALL.search(dockerfile.read_text())
    assert found, f"{dockerfile} has no line `pip install ... -c constraints.txt ./libs/... ./services/...`"
    packages = []
    for word in found.group("packages").split():
        word = word.strip("\"'")
        if word.startswith("./"):
            path, _, extras = word.rstrip("]").partition("[")
            packages.append(LocalPackage(ROOT / path, frozenset(filter(None, extras.split(",")))))
    return packages


def closure(packages: list[LocalPackage]) -> set[str]:
    """Distributions that pip would install for these packages; other local packages do not come along by themselves."""
    allowed_local = {package.distribution for package in packages}
    wanted = [(package.distribution, package.extras) for package in packages]
    done: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        name, extras = wanted.pop()
        if (name, extras) in done:
            continue
        done.add((name, extras))
        for requirement in _requirements(name, extras):
            needed = canonicalize_name(requirement.name)
            if needed.startswith("reflux-") and needed not in allowed_local:
                raise AssertionError(f"{name} needs {needed}, which the install line leaves out")
            wanted.append((needed, frozenset(requirement.extras)))
    return {name for name, _ in done}


def _requirements(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        markers = [{"extra": extra} for extra in (extras or {""})]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in markers):
            yield requirement


def build(folder: Path, distributions: set[str]) -> Path:
    """A virtual environment that holds links to exactly these distributions' files; returns its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in sorted(distributions):
        _link(metadata.distribution(name), site)
    return folder / "bin" / "python"


def _link(distribution: metadata.Distribution, site: Path) -> None:
    origin = Path(str(distribution.locate_file("")))
    for file in distribution.files or ():
        parts = Path(str(file)).parts
        if parts[0] == ".." or "__pycache__" in parts:
            continue
        _link_file(origin.joinpath(*parts), site.joinpath(*parts))


def _link_file(source: Path, target: Path) -> None:
    # Namespace packages (google, opentelemetry) are shared by distributions: link files, not folders.
    if target.exists() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source)
