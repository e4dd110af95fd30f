"""The crystal phases of the task: the AFLOW prototype collection of pymatgen, with diffraction lines, cached on disk.

Source: M. J. Mehl et al., The AFLOW Library of Crystallographic Prototypes: Part 1, Comput. Mater. Sci. 136, S1 (2017);
D. Hicks et al., Part 2, Comput. Mater. Sci. 161, S1 (2019); Part 3, Comput. Mater. Sci. 199, 110450 (2021).
"""

import fcntl
import gzip
import importlib.metadata
import importlib.util
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from reflux_tasks.xrd.cell import SYMMETRY_PRECISION_ANGSTROM, StandardCell, standard_cell

WAVELENGTH_ANGSTROM = 1.54184
"""Mean of Cu K-alpha1 and K-alpha2 (2:1)."""
FORMAT_VERSION = 4
"""Version of the cached file; a change of layout, filter or line computation raises it."""
MAX_ATOMS = 48
MAX_LABEL_WORDS = 5
MAX_LINES = 60
MIN_LINES = 3
WEAKEST_LINE = 1e-4
"""Lines below this share of the strongest are dropped."""
SUBSET_SEED = 7

_ARRAYS = ("hkl", "intensity", "lattice", "coords")


@dataclass(frozen=True)
class Phase:
    """One crystal phase in its conventional cell."""

    formula: str
    space_group: int
    label: tuple[str, ...]
    """Words that name it in an answer, such as ("Ti", "O", "n2", "sg136")."""
    elements: tuple[str, ...]
    prototype: str
    """AFLOW label of the prototype, such as "A2B_tP6_136_f_a"."""
    system: str
    """Crystal system: cubic, hexagonal, trigonal, tetragonal, orthorhombic, monoclinic or triclinic."""
    hall: str
    """Hall symbol of the setting that `lattice` and `coords` are in."""
    species: tuple[str, ...]
    """Element of each atom of the asymmetric unit."""
    coords: np.ndarray
    """Fractional coordinates [atoms, 3] of the asymmetric unit."""
    multiplicities: tuple[int, ...]
    """Atoms in the cell that symmetry makes of each atom of the asymmetric unit."""
    lattice: np.ndarray
    """Lattice vectors [3, 3] of the conventional cell in angstrom, one per row."""
    hkl: np.ndarray
    """Miller indices [lines, 3] between 8 and 95 degrees, by rising angle; one of each family."""
    intensity: np.ndarray
    """Intensities [lines] of whole families with Lorentz-polarisation factor, the strongest is 1."""

    @property
    def name(self) -> str:
        return f"{self.formula}_{self.space_group}"

    @cached_property
    def strongest(self) -> tuple[np.ndarray, np.ndarray]:
        """Miller indices and intensities of the 60 strongest lines, by rising angle."""
        chosen = np.sort(np.argsort(-self.intensity, kind="stable")[:MAX_LINES])
        return self.hkl[chosen], self.intensity[chosen]


def line_angles(lattice: np.ndarray, hkl: np.ndarray) -> np.ndarray:
    """Two-theta [lines] in degrees of Miller indices [lines, 3]; NaN where the wavelength cannot reach the line."""
    reciprocal = np.linalg.norm(hkl @ np.linalg.inv(lattice).T, axis=1)
    sine = WAVELENGTH_ANGSTROM * reciprocal / 2
    return 2 * np.degrees(np.arcsin(np.where(sine < 0.999, sine, np.nan)))


def load_phases(cache_dir: Path, count: int | None = 128) -> list[Phase]:
    """The phases of the task, built on first use (about 5 s) and cached in `cache_dir`.

    `count` takes the fixed random subset of that size (the same on every machine); None takes all. Safe with concurrent
    callers: one builds, the others wait, and the file appears by an atomic rename. Raises ValueError for a count out of
    range and OSError when the folder cannot be written.
    """
    phases = _load_or_build(Path(cache_dir))
    if count is None:
        return phases
    if not 2 <= count <= len(phases):
        raise ValueError(f"num_phases = {count} is out of range: use 2 to {len(phases)}")
    chosen = np.random.default_rng(SUBSET_SEED).permutation(len(phases))[:count]
    return [phases[i] for i in sorted(chosen)]


def cache_file(cache_dir: Path) -> Path:
    """Where the built collection lies; the name holds the format and the version of the collection."""
    source = importlib.metadata.version("pymatgen-core")
    return Path(cache_dir) / f"xrd-phases-v{FORMAT_VERSION}-pymatgen-{source}.npz"


def _load_or_build(cache_dir: Path) -> list[Phase]:
    path = cache_file(cache_dir)
    phases = _read(path)
    if phases is not None:
        return phases
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        phases = _read(path)
        if phases is None:
            phases = list(_build())
            _write(path, phases)
    return phases


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> list[Phase] | None:
    """Phases of a cache file; None when it is missing, torn or of another format (then it is built again)."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            arrays = {name: stored[name] for name in _ARRAYS}
    except (FileNotFoundError, zipfile.BadZipFile, EOFError, KeyError, ValueError):
        return None
    if header.get("format") != FORMAT_VERSION:
        return None
    return list(_unpack(header["phases"], arrays))


def _unpack(rows: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> Iterator[Phase]:
    line = atom = 0
    for i, row in enumerate(rows):
        lines, atoms = slice(line, line + row["lines"]), slice(atom, atom + len(row["species"]))
        line, atom = lines.stop, atoms.stop
        yield Phase(
            formula=row["formula"],
            space_group=row["space_group"],
            label=tuple(row["label"]),
            elements=tuple(row["elements"]),
            prototype=row["prototype"],
            system=row["system"],
            hall=row["hall"],
            species=tuple(row["species"]),
            multiplicities=tuple(row["multiplicities"]),
            hkl=arrays["hkl"][lines].astype(float),
            intensity=arrays["intensity"][lines],
            lattice=arrays["lattice"][i],
            coords=arrays["coords"][atoms],
        )


def _write(path: Path, phases: Sequence[Phase]) -> None:
    keys = ("formula", "space_group", "label", "elements", "prototype", "system", "hall", "species", "multiplicities")
    rows = [{key: getattr(phase, key) for key in keys} | {"lines": len(phase.hkl)} for phase in phases]
    header = json.dumps({"format": FORMAT_VERSION, "phases": rows}).encode()
    arrays = {
        "hkl": np.concatenate([phase.hkl for phase in phases]).astype(np.int16),
        "intensity": np.concatenate([phase.intensity for phase in phases]),
        "lattice": np.stack([phase.lattice for phase in phases]),
        "coords": np.concatenate([phase.coords for phase in phases]),
    }
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as part:
        try:
            np.savez_compressed(part, header=np.frombuffer(header, np.uint8), **arrays)
            part.flush()
            os.fsync(part.fileno())
            Path(part.name).replace(path)
        finally:  # Nothing is left to remove once it has its name.
            Path(part.name).unlink(missing_ok=True)


def _build() -> Iterator[Phase]:
    """Distinct (formula, space group) pairs of the collection that fit the task's limits, in the collection's order."""
    from pymatgen.core import Structure

    # importing the module reads the file too, but parses every reference as BibTeX, which takes 10 s: only find it
    found = importlib.util.find_spec("pymatgen.analysis.prototypes")
    assert found is not None
    assert found.origin is not None
    packed = Path(found.origin).with_name("aflow_prototypes.json.gz").read_bytes()
    seen: set[str] = set()
    for entry in json.loads(gzip.decompress(packed)):
        structure = Structure.from_dict(entry["snl"])
        if len(structure) > MAX_ATOMS:
            continue
        phase = _phase(structure, entry["tags"]["aflow"], seen)
        if phase is not None:
            seen.add(phase.name)
            yield phase


def _phase(structure: Any, prototype: str, seen: set[str]) -> Phase | None:
    from pymatgen.symmetry.analyzer import SpacegroupAnalyzer

    analyzer = SpacegroupAnalyzer(structure, symprec=SYMMETRY_PRECISION_ANGSTROM)
    formula, space_group = structure.composition.reduced_formula, analyzer.get_space_group_number()
    if f"{formula}_{space_group}" in seen or len(_label(formula, space_group)) > MAX_LABEL_WORDS:
        return None
    phase = phase_of(standard_cell(structure), prototype)
    return phase if len(phase.hkl) >= MIN_LINES else None


def phase_of(cell: StandardCell, prototype: str) -> Phase:
    """The phase of a standard cell, with its diffraction lines (0.1 to 1 s for a large cell)."""
    formula = cell.structure.composition.reduced_formula
    hkl, intensity = _lines(cell.structure)
    label = _label(formula, cell.space_group)
    return Phase(
        formula=formula,
        space_group=cell.space_group,
        label=label,
        elements=tuple(word for word in label[:-1] if not word.startswith("n")),
        prototype=prototype,
        system=cell.system,
        hall=cell.hall,
        species=cell.species,
        coords=cell.coords,
        multiplicities=tuple(cell.multiplicities.tolist()),
        lattice=np.array(cell.structure.lattice.matrix),
        hkl=hkl,
        intensity=intensity,
    )


def _label(formula: str, space_group: int) -> tuple[str, ...]:
    from pymatgen.core import Composition

    words: list[str] = []
    for element, amount in Composition(formula).items():
        words.append(element.symbol)
        if amount != 1:
            words.append(f"n{int(amount)}")
    return (*words, f"sg{space_group}")


def _lines(structure: Any) -> tuple[np.ndarray, np.ndarray]:
    from pymatgen.analysis.diffraction.xrd import XRDCalculator

    calculator = XRDCalculator(wavelength=WAVELENGTH_ANGSTROM)  # pyright: ignore[reportArgumentType]
    pattern = calculator.get_pattern(structure, scaled=False, two_theta_range=(8, 95))
    # hexagonal cells give four indices (h, k, i, l); i is redundant
    families = [family[0]["hkl"] for family in pattern.hkls]
    hkl = np.array([(index[0], index[1], index[-1]) for index in families], float).reshape(-1, 3)
    intensity = np.array(pattern.y) / np.max(pattern.y, initial=1e-300)
    chosen = intensity > WEAKEST_LINE
    return hkl[chosen], intensity[chosen]
