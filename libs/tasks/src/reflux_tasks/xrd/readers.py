"""Reads measured powder patterns of laboratories into counts over two-theta; refuses what is none, by file and line.

Own readers for `.xrdml` and for text columns; formats of Bruker and Rigaku go through geddes (MIT), if it is installed,
in a child with limits.
"""

import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from reflux_tasks.xrd.bounded import call_bounded
from reflux_tasks.xrd.profile import Profile

MAX_BYTES = 64 * 2**20
MAX_POINTS = 500_000
MIN_POINTS = 100
MAX_COUNTS = 1e12
MAX_UNPACKED_BYTES = 256 * 2**20
MAX_MEMBERS = 2000
"""Of an archive (`.brml`, `.rasx`), as its table of contents says; more are refused unread."""
TEXT_SUFFIXES = (".xy", ".xye", ".dat", ".txt", ".csv")
VENDOR_SUFFIXES = (".raw", ".brml", ".uxd", ".ras", ".rasx")
SUFFIXES = (".xrdml", *TEXT_SUFFIXES, *VENDOR_SUFFIXES)
_COMMENT = ("#", "!", ";", "'", '"', "/")
_PART = re.compile(r"(?P<name>[^-].*?)_(?P<fraction>\d+p\d+)(?:-|$)")


class UnreadablePattern(ValueError):
    """A file is no powder pattern of its kind; the message names the file, the line where there is one, and why."""


def read_pattern(path: Path) -> Profile:
    """Counts over two-theta of one file, the reader chosen by its suffix; raises UnreadablePattern or OSError."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UnreadablePattern(f"{path.name}: no reader for {suffix!r}; known are {', '.join(SUFFIXES)}")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UnreadablePattern(f"{path.name}: {size >> 20} MiB, at most {MAX_BYTES >> 20} MiB are read")
    if suffix == ".xrdml":
        return _read_xrdml(path)
    return _read_columns(path) if suffix in TEXT_SUFFIXES else _read_vendor(path)


class _NoDoctype(ElementTree.TreeBuilder):
    """Patterns need no document type; a bomb of entities does."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ElementTree.ParseError(f"a document type ({name}) is not allowed")


def _read_xrdml(path: Path) -> Profile:
    """The first scan of a PANalytical XML file: counts, or intensities, over evenly spaced 2Theta positions."""
    parser = ElementTree.XMLParser(target=_NoDoctype())
    try:
        root = ElementTree.fromstring(path.read_bytes(), parser)
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: an encoding that does not exist
        line = getattr(error, "position", (1, 0))[0]
        raise UnreadablePattern(f"{path.name}:{line}: not XML: {error}") from error
    points = root.find(".//{*}dataPoints")
    if points is None:
        raise UnreadablePattern(f"{path.name}: no dataPoints")
    try:
        return checked(path.name, *_xrdml_arrays(points))
    except ValueError as error:
        if isinstance(error, UnreadablePattern):
            raise
        raise UnreadablePattern(f"{path.name}: no counts over start and end positions of 2Theta: {error}") from error


def _xrdml_arrays(points: ElementTree.Element) -> tuple[np.ndarray, np.ndarray]:
    """Angles and counts; attenuated `counts` are scaled up, `intensities` in counts per second are made counts."""
    text = points.findtext("{*}counts")
    values = np.array((text or points.findtext("{*}intensities") or "").split(), float)
    if text and (factors := (points.findtext("{*}beamAttenuationFactors") or "").split()):
        values = values * np.array(factors, float)
    found = points.find("{*}intensities")
    seconds = points.findtext("{*}commonCountingTime")
    if not text and found is not None and found.get("unit") == "cps" and seconds:
        values = values * float(seconds)
    [axis] = [each for each in points.findall("{*}positions") if each.get("axis") == "2Theta"]
    if listed := axis.findtext("{*}listPositions"):
        return np.array(listed.split(), float), values
    start, end = (float(axis.findtext(f"{{*}}{tag}") or "missing") for tag in ("startPosition", "endPosition"))
    return np.linspace(start, end, len(values)), values


def _read_columns(path: Path) -> Profile:
    """Two or three columns: degrees, counts, and their standard deviation, separated by white space or a comma.

    With deviations the counts are scaled by the median of y / sigma^2, so that Poisson weights fit them: intensities
    in other units get the weight that they had when they were counted.
    """
    rows = list(_rows(path))
    if not rows:
        raise UnreadablePattern(f"{path.name}: no numbers")
    table = np.array(rows)
    two_theta, counts = table[:, 0], table[:, 1]
    if table.shape[1] == 3:
        with np.errstate(all="ignore"):
            ratio = counts / table[:, 2] ** 2
        seen = ratio[np.isfinite(ratio) & (ratio > 0)]
        counts = counts * (float(np.median(seen)) if len(seen) else 1.0)
    return checked(path.name, two_theta, counts)


def _rows(path: Path) -> Iterator[list[float]]:
    columns = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise UnreadablePattern(f"{path.name}:{number}: not text in UTF-8 ({error.reason})") from error
            if not text or text.startswith(_COMMENT):
                continue
            row = _numbers(path, number, text)
            columns = columns or len(row)
            if len(row) != columns or number > MAX_POINTS:
                wrong = (
                    f"{len(row)} columns, {columns} before" if len(row) != columns else f"more than {MAX_POINTS} lines"
                )
                raise UnreadablePattern(f"{path.name}:{number}: {wrong}")
            yield row


def _numbers(path: Path, number: int, text: str) -> list[float]:
    try:
        row = [float(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise UnreadablePattern(f"{path.name}:{number}: {text[:40]!r} is not columns of numbers") from error
    if not 2 <= len(row) <= 3:
        raise UnreadablePattern(f"{path.name}:{number}: {len(row)} columns, needs angle, counts and maybe deviation")
    if not np.isfinite(row).all():
        raise UnreadablePattern(f"{path.name}:{number}: {text[:40]!r} is not finite")
    return row


def _read_vendor(path: Path) -> Profile:
    """Bruker (`.raw` of versions 3 and 4, `.brml`, `.uxd`) and Rigaku (`.ras`, `.rasx`): the first scan of the file."""
    if path.suffix.lower() in (".brml", ".rasx"):
        _check_archive(path)
    try:
        from geddes import read  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]
    except ImportError as error:
        raise UnreadablePattern(
            f"{path.name}: reading {path.suffix} needs the package geddes: pip install 'reflux-tasks[vendor-formats]'"
        ) from error

    def arrays() -> tuple[np.ndarray, np.ndarray]:
        pattern = read(str(path))
        return np.array(pattern.x, float), np.array(pattern.y, float)

    try:
        angles, counts = call_bounded(arrays)
    except ValueError as error:
        raise UnreadablePattern(f"{path.name}: {error}") from error
    return checked(path.name, angles, counts)


def _check_archive(path: Path) -> None:
    """Refuses what is no archive, or one that would unpack to far more than a scan is."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, RuntimeError, ValueError, OSError) as error:  # Runtime: a format newer than zipfile
        raise UnreadablePattern(f"{path.name}: no readable archive: {error}") from error
    size = sum(member.file_size for member in members)
    if size > MAX_UNPACKED_BYTES or len(members) > MAX_MEMBERS:
        what = f"{len(members)} files of {size >> 20} MiB"
        raise UnreadablePattern(
            f"{path.name}: {what}, at most {MAX_MEMBERS} of {MAX_UNPACKED_BYTES >> 20} MiB are read"
        )


def mixture_truth(path: Path) -> dict[str, float]:
    """Weighed mass fractions by name from `A_0p4009-B_0p6010--8min.xrdml`; raises UnreadablePattern for other names."""
    text = path.stem.split("--")[0]
    parts = list(_PART.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        raise UnreadablePattern(f"{path.name}: the name holds no mass fractions such as ZnO_0p6010")
    truth = {part["name"]: float(part["fraction"].replace("p", ".")) for part in parts}
    if len(truth) < len(parts) or not 0.9 <= sum(truth.values()) <= 1.1:
        raise UnreadablePattern(f"{path.name}: the mass fractions do not add up to 1, or a name comes twice")
    return truth


def named_phases(path: Path) -> list[str]:
    """Phases from a name such as `TiO2+MnO.xy`."""
    return path.stem.split("+")


def cut_and_rebin(profile: Profile, low: float, high: float, max_points: int) -> Profile:
    """The part from `low` to `high` degrees, with neighbours summed until at most `max_points` are left.

    Raises UnreadablePattern when fewer than 100 points lie there.
    """
    inside = (profile.two_theta >= low) & (profile.two_theta <= high)
    two_theta, counts = profile.two_theta[inside], profile.counts[inside]
    if len(counts) < MIN_POINTS:
        raise UnreadablePattern(f"only {len(counts)} points from {low} to {high} degrees, needs {MIN_POINTS}")
    group = -(-len(counts) // max_points)
    whole = len(counts) // group * group
    return Profile(two_theta[:whole].reshape(-1, group).mean(axis=1), counts[:whole].reshape(-1, group).sum(axis=1))


def checked(name: str, two_theta: np.ndarray, counts: np.ndarray) -> Profile:
    """The profile of these arrays when they are one; raises UnreadablePattern, which begins with `name`."""
    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        (f"{len(two_theta)} angles and {len(counts)} counts", lambda: len(two_theta) == len(counts)),
        (f"needs at least {MIN_POINTS} points, has {len(counts)}", lambda: len(counts) >= MIN_POINTS),
        (f"{len(counts)} points, at most {MAX_POINTS} are read", lambda: len(counts) <= MAX_POINTS),
        ("a count or an angle is not finite", lambda: bool(np.isfinite(counts).all() and np.isfinite(two_theta).all())),
        (
            f"counts must lie from 0 to {MAX_COUNTS:g}, none negative",
            lambda: 0 <= counts.min() <= counts.max() <= MAX_COUNTS,
        ),
        ("no counts at all", lambda: counts.max() > 0),
        ("angles must rise in even steps", lambda: _even(np.diff(two_theta))),
        ("angles must lie from 0 to 180 degrees", lambda: two_theta[0] >= 0 and two_theta[-1] <= 180),
    )
    for complaint, holds in checks:
        if not holds():
            raise UnreadablePattern(f"{name}: {complaint}")
    return Profile(two_theta, counts)


def _even(steps: np.ndarray) -> bool:
    return bool(steps.min() > 0 and steps.max() <= 1.5 * steps.min())
