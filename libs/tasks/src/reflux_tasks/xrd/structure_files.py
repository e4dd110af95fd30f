"""Reads crystal structures of other people (CIF, POSCAR) as candidates; refuses what is none, by file and line.

Each file is parsed by pymatgen in a child with limits, after caps on what a bomb would use: bytes, atoms, symmetry
operations, angles and lengths of the cell.
"""

import functools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reflux_tasks.xrd.bounded import call_bounded
from reflux_tasks.xrd.cell import StandardCell, standard_cell
from reflux_tasks.xrd.database import candidate
from reflux_tasks.xrd.phases import Phase, phase_of
from reflux_tasks.xrd.refinement import MAX_CELL_VOLUME, Candidate

SHIPPED = Path(__file__).with_name("candidates")
MAX_BYTES = 2 * 2**20
MAX_ATOMS = 400
"""In the conventional cell."""
MAX_SITE_LINES = 2000
MIN_DISTANCE_ANGSTROM = 0.6
MIN_VOLUME_PER_ATOM, MAX_VOLUME_PER_ATOM = 3.0, 120.0
"""Cubic angstrom; diamond has 5.7, caesium 117."""
_POSCAR_NAMES = ("poscar", "contcar")
_CELL_LINE = re.compile(r"_cell_(length|angle)_(a|b|c|alpha|beta|gamma)\s+(\S+)", re.IGNORECASE)
_MARCH_LINE = re.compile(r"_pd_pref_orient_March_Dollase\.index_([hkl])\s+(-?\d+)", re.IGNORECASE)
_PLATES = {("V2O5", 59): (0, 0, 1)}
"""Powders that lie in plates: axis of preferred orientation where the file names none."""


class UnreadableStructure(ValueError):
    """A file is no usable crystal structure; the message names the file, the line where there is one, and why."""


@dataclass(frozen=True)
class Structure:
    """A candidate structure under its name, as the surrogate and the refinement take it."""

    name: str
    phase: Phase
    candidate: Candidate
    primitive: Any
    """pymatgen Structure of the primitive cell, for matching."""
    text: str
    """The file's own text."""

    def under(self, name: str) -> "Structure":
        """The same structure under another name."""
        return replace(self, name=name, candidate=replace(self.candidate, name=name))


def read_folder(folder: Path) -> tuple[dict[str, Structure], dict[str, str]]:
    """Structures of the CIF and POSCAR files of a folder by file stem, and why others were refused, by file name.

    Raises FileNotFoundError when the folder holds no such file.
    """
    files = sorted(path for path in folder.iterdir() if _is_structure(path)) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(f"{folder}: no CIF or POSCAR file in there")
    found: dict[str, Structure] = {}
    refused: dict[str, str] = {}
    for path in files:
        try:
            structure = read_file(path)
        except UnreadableStructure as error:
            refused[path.name] = str(error)
        else:
            found[structure.name] = structure
    return found, refused


def read_file(path: Path) -> Structure:
    """One structure, named by the file's stem; raises UnreadableStructure."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UnreadableStructure(f"{path.name}: {size >> 20} MiB, at most {MAX_BYTES >> 20} MiB are read")
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableStructure(f"{path.name}: not text in UTF-8: {error.reason} at byte {error.start}") from error
    name = path.name if _is_poscar(path) and path.stem == path.name else path.stem
    try:
        return read_text(name, text, poscar=_is_poscar(path))
    except UnreadableStructure as error:
        separator = ":" if str(error)[:1].isdigit() else ": "
        raise UnreadableStructure(f"{path.name}{separator}{error}") from error


def read_text(name: str, text: str, *, poscar: bool | None = None) -> Structure:
    """One structure from the text of a CIF or POSCAR (None: a CIF has cell tags); UnreadableStructure.

    Bounded in time and memory.
    """
    poscar = "_cell_" not in text if poscar is None else poscar
    if len(text) > MAX_BYTES:
        raise UnreadableStructure(f"longer than {MAX_BYTES >> 20} MiB")
    return _read(text, poscar).under(name)


@functools.lru_cache(maxsize=256)
def _read(text: str, poscar: bool) -> Structure:
    """Parsed once per process: the groups of a run share their candidates."""
    (_check_poscar if poscar else _check_cif)(text.splitlines())
    import pymatgen.analysis.diffraction.xrd
    import pymatgen.io.cif
    import pymatgen.io.vasp.inputs  # noqa: F401 here, not in each child: importing takes longer than parsing

    try:
        return call_bounded(_parse, text, poscar)
    except ValueError as error:
        raise UnreadableStructure(f"not usable: {error}") from error


def _is_structure(path: Path) -> bool:
    return path.is_file() and (path.suffix.lower() == ".cif" or _is_poscar(path))


def _is_poscar(path: Path) -> bool:
    return path.suffix.lower() in (".poscar", ".vasp") or path.name.lower().startswith(_POSCAR_NAMES)


def _check_cif(lines: list[str]) -> None:
    """Cell lengths and angles that can be, and no more atoms and operations than a crystal of `MAX_ATOMS` needs."""
    seen = 0
    for number, line in enumerate(lines, 1):
        for kind, name, word in _CELL_LINE.findall(line):
            value, seen = _number(word), seen + 1
            if not (0.5 <= value <= 200 if kind.lower() == "length" else 10 <= value <= 170):
                raise UnreadableStructure(f"{number}: cell {kind} {name} = {word} cannot be")
    if seen < 6:
        raise UnreadableStructure(f"{max(len(lines), 1)}: the cell's lengths and angles are not all there")
    if sum(len(line.split()) >= 5 and not line.lstrip().startswith(("_", "#")) for line in lines) > MAX_SITE_LINES:
        raise UnreadableStructure(f"{len(lines)}: more than {MAX_SITE_LINES} lines of atoms or operations")


def _check_poscar(lines: list[str]) -> None:
    for number in (2, 3, 4, 5):
        words = lines[number - 1].split() if len(lines) >= number else []
        needed = 1 if number == 2 else 3
        if len(words) < needed or not all(abs(_number(word)) < 1e4 for word in words[:needed]):
            raise UnreadableStructure(f"{number}: needs {needed} finite number(s)")
    for number, line in enumerate(lines[5:7], 6):
        counts = [int(word) for word in line.split() if word.isdigit()]
        if sum(counts) > MAX_ATOMS:
            raise UnreadableStructure(f"{number}: {sum(counts)} atoms, at most {MAX_ATOMS} are allowed")


def _number(word: str) -> float:
    """A number of a CIF without its standard uncertainty; NaN for anything else."""
    try:
        return float(re.sub(r"\(\d*\)$", "", word))
    except ValueError:
        return float("nan")


def _parse(text: str, poscar: bool) -> Structure:
    """In the child: raises ValueError with the reason."""
    with warnings.catch_warnings():  # files round thirds to four digits; pymatgen says so each time
        warnings.simplefilter("ignore")
        structure = _from_poscar(text) if poscar else _from_cif(text)
    for complaint in _complaints(structure):
        raise ValueError(complaint)
    structure.remove_oxidation_states()
    cell = standard_cell(structure)
    if len(cell.structure) > MAX_ATOMS or cell.structure.volume > MAX_CELL_VOLUME:
        raise ValueError(f"{len(cell.structure)} atoms in {cell.structure.volume:.0f} A^3: too large to refine")
    phase = phase_of(cell, "")
    if not len(phase.hkl):
        raise ValueError("no diffraction line up to 95 degrees")
    refined = candidate(phase, np.ones(3), name="", march=_march(text, cell, phase))
    return Structure("", phase, refined, cell.structure.get_primitive_structure(), text)


def _from_cif(text: str) -> Any:
    from pymatgen.io.cif import CifParser

    structures = CifParser.from_str(text).parse_structures(primitive=False, on_error="raise")
    if len(structures) != 1:
        raise ValueError(f"{len(structures)} structures, needs one")
    return structures[0]


def _from_poscar(text: str) -> Any:
    from pymatgen.io.vasp.inputs import Poscar

    return Poscar.from_str(text).structure


def _complaints(structure: Any) -> Iterator[str]:
    """What is wrong with a parsed structure; the cheap checks come first."""
    if len(structure) > MAX_ATOMS:
        yield f"{len(structure)} atoms in the cell, at most {MAX_ATOMS} are allowed"
    if not structure.is_ordered:
        yield "partial or mixed occupancy; only ordered structures are refined"
    volume = structure.volume / len(structure)
    if not MIN_VOLUME_PER_ATOM <= volume <= MAX_VOLUME_PER_ATOM:
        yield f"{volume:.3g} A^3 per atom cannot be"
    if len(structure) > 1:
        distances = structure.distance_matrix[np.triu_indices(len(structure), 1)]
        if not distances.min() >= MIN_DISTANCE_ANGSTROM:
            yield f"two atoms are {distances.min():.2f} A apart"


def _march(text: str, cell: StandardCell, phase: Phase) -> tuple[int, int, int] | None:
    """Axis of preferred orientation in the standard cell: the file's, or a known one."""
    named = {letter.lower(): int(value) for letter, value in _MARCH_LINE.findall(text)}
    if set(named) != {"h", "k", "l"} or not any(named.values()):
        return _PLATES.get((phase.formula, phase.space_group))
    normal = np.array([named[letter] for letter in "hkl"]) @ np.linalg.inv(cell.from_given)
    normal = normal / np.abs(normal[np.abs(normal) > 1e-6]).min()
    multiple = next((k for k in range(1, 7) if np.allclose(k * normal, np.round(k * normal), atol=0.02)), 1)
    h, k, l = (int(value) for value in np.round(multiple * normal))  # noqa: E741 crystallographers' name
    return h, k, l
