"""Reads measured powder patterns (`.xrdml`, `.xy`) and the truth that the data sets write into file names."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from reflux_tasks.xrd.profile import Profile

_PART = re.compile(r"(?P<name>.+)_(?P<fraction>\d+p\d+)")


class UnreadablePattern(ValueError):
    """A file is no powder pattern of its kind; the message names the file and what is wrong."""


def read_pattern(path: Path) -> Profile:
    """Counts over two-theta of an `.xrdml` or `.xy` file; raises UnreadablePattern or OSError."""
    readers = {".xrdml": read_xrdml, ".xy": read_xy}
    if path.suffix.lower() not in readers:
        raise UnreadablePattern(f"{path.name}: no reader for {path.suffix!r}; known are {', '.join(readers)}")
    return readers[path.suffix.lower()](path)


def read_xrdml(path: Path) -> Profile:
    """The first scan of a PANalytical XML file: `counts` or `intensities` over evenly spaced 2Theta positions."""
    try:
        root = ElementTree.fromstring(path.read_bytes())
    except ElementTree.ParseError as error:
        raise UnreadablePattern(f"{path.name}: not XML: {error}") from error
    points = root.find(".//{*}dataPoints")
    if points is None:
        raise UnreadablePattern(f"{path.name}: no dataPoints")
    counts = next((text for tag in ("counts", "intensities") if (text := points.findtext(f"{{*}}{tag}"))), "")
    ends = [
        position.findtext(f"{{*}}{tag}")
        for position in points.findall("{*}positions")
        if position.get("axis") == "2Theta"
        for tag in ("startPosition", "endPosition")
    ]
    try:
        values = np.array(counts.split(), float)
        start, end = (float(end or "missing") for end in ends)
    except ValueError as error:
        raise UnreadablePattern(f"{path.name}: no counts over start and end positions of 2Theta: {error}") from error
    return _checked(path, np.linspace(start, end, len(values)), values)


def read_xy(path: Path) -> Profile:
    """Two columns, degrees and counts; lines that start with # are comments."""
    try:
        table = np.loadtxt(path, ndmin=2, encoding="utf-8")
    except ValueError as error:
        raise UnreadablePattern(f"{path.name}: not two columns of numbers: {error}") from error
    if table.shape[1:] != (2,):
        raise UnreadablePattern(f"{path.name}: {table.shape[1]} columns, needs angle and counts")
    return _checked(path, table[:, 0], table[:, 1])


def mixture_truth(path: Path) -> dict[str, float]:
    """Weighed mass fractions by name from `A_0p4009-B_0p6010--8min.xrdml`; raises UnreadablePattern for other names."""
    parts = [_PART.fullmatch(part) for part in path.name.split("--")[0].split("-")]
    if not all(parts):
        raise UnreadablePattern(f"{path.name}: the name holds no mass fractions such as ZnO_0p6010")
    return {part["name"]: float(part["fraction"].replace("p", ".")) for part in parts if part}


def named_phases(path: Path) -> list[str]:
    """Phases from a name such as `TiO2+MnO.xy`."""
    return path.stem.split("+")


def cut_and_rebin(profile: Profile, low: float, high: float, max_points: int) -> Profile:
    """The part from `low` to `high` degrees, with neighbours summed until at most `max_points` are left."""
    inside = (profile.two_theta >= low) & (profile.two_theta <= high)
    two_theta, counts = profile.two_theta[inside], profile.counts[inside]
    group = -(-len(counts) // max_points)
    whole = len(counts) // group * group
    return Profile(two_theta[:whole].reshape(-1, group).mean(axis=1), counts[:whole].reshape(-1, group).sum(axis=1))


def _checked(path: Path, two_theta: np.ndarray, counts: np.ndarray) -> Profile:
    steps = np.diff(two_theta)
    if len(counts) < 100 or not np.isfinite(counts).all() or counts.min() < 0:
        raise UnreadablePattern(
            f"{path.name}: needs at least 100 finite counts, none negative; has {len(counts)} points"
        )
    if steps.min() <= 0 or steps.max() > 1.5 * steps.min():
        raise UnreadablePattern(f"{path.name}: angles must rise in even steps")
    return Profile(two_theta, counts)
