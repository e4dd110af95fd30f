"""The phases of the task, precursors and targets: their starting structures and the table of their energies.

energies.json is made by `python -m reflux_tasks.synthesis.phases CACHE_FOLDER`.
"""

import logging
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from reflux_tasks.chemistry.energies import write_table
from reflux_tasks.csp.references import SOURCE, Reference
from reflux_tasks.synthesis import structures as make
from reflux_tasks.synthesis.shelf import PRECURSORS
from reflux_tasks.xrd.phases import load_phases

TABLE = Path(__file__).with_name("energies.json")


def _phases(prototypes: Mapping[str, Reference]) -> dict[str, make.Maker]:
    """Makers of the starting structure of every phase that is no plain prototype, by formula."""
    found: dict[str, make.Maker] = {
        "Li2O": lambda: make.antifluorite("Li", 4.62),
        "ZnO": lambda: make.wurtzite("Zn", 3.250, 5.207),
        "La2O3": lambda: make.lanthana("La", 3.937, 6.129),
        "CuO": make.tenorite,
        "Li2CO3": make.zabuyelite,
        "Mg(OH)2": lambda: make.hydroxide("Mg", 3.142, 4.766),
        "Ca(OH)2": lambda: make.hydroxide("Ca", 3.589, 4.911),
        "PbTiO3": make.lead_titanate,
        "LiAlO2": lambda: make.layered_rocksalt("Al", 2.80, 14.22),
        "LiCrO2": lambda: make.layered_rocksalt("Cr", 2.90, 14.42),
        "Sr3Ti2O7": lambda: make.double_layered("Sr", "Ti", 3.90, 20.38),
    }
    families: tuple[tuple[Any, dict[str, tuple[Any, ...]]], ...] = (
        (make.rocksalt, _ROCKSALTS),
        (make.rutile, {"SnO2": ("Sn", 4.737, 3.186), "GeO2": ("Ge", 4.40, 2.86)}),
        (make.corundum, {"Fe2O3": ("Fe", 5.034, 13.75), "Cr2O3": ("Cr", 4.959, 13.59)}),
        (make.calcite, _CALCITES),
        (make.aragonite, {"SrCO3": ("Sr", 5.107, 8.414, 6.029), "BaCO3": ("Ba", 5.313, 8.896, 6.428)}),
        (make.perovskite, _PEROVSKITES),
        (make.spinel, _SPINELS),
        (make.olivine, _OLIVINES),
        (make.layered, _LAYERED),
        (make.pyrochlore, {"La2Zr2O7": ("La", "Zr", 10.80), "La2Sn2O7": ("La", "Sn", 10.70)}),
    )
    for maker, rows in families:
        found |= {formula: partial(maker, *values) for formula, values in rows.items()}
    for formula, (name, replaced, cell) in _FROM_PROTOTYPES.items():
        found[formula] = partial(make.from_prototype, prototypes[name], replaced, cell)
    return found


_ROCKSALTS = {
    "MgO": ("Mg", 4.212),
    "CaO": ("Ca", 4.811),
    "SrO": ("Sr", 5.160),
    "BaO": ("Ba", 5.539),
    "MnO": ("Mn", 4.445),
    "CoO": ("Co", 4.261),
    "NiO": ("Ni", 4.177),
}
_CALCITES = {"MgCO3": ("Mg", 4.633, 15.01), "MnCO3": ("Mn", 4.773, 15.64), "ZnCO3": ("Zn", 4.653, 15.03)}
_PEROVSKITES = {
    "BaTiO3": ("Ba", "Ti", 4.00),
    "SrTiO3": ("Sr", "Ti", 3.905),
    "BaZrO3": ("Ba", "Zr", 4.193),
    "BaSnO3": ("Ba", "Sn", 4.116),
    "LaAlO3": ("La", "Al", 3.79),
}
_SPINELS = {
    "ZnAl2O4": ("Zn", "Al", 8.086),
    "MgAl2O4": ("Mg", "Al", 8.083),
    "CoAl2O4": ("Co", "Al", 8.105),
    "MnAl2O4": ("Mn", "Al", 8.21),
    "MgCr2O4": ("Mg", "Cr", 8.333),
    "ZnCr2O4": ("Zn", "Cr", 8.328),
    "MnCr2O4": ("Mn", "Cr", 8.437),
    "CoCr2O4": ("Co", "Cr", 8.333),
    "NiCr2O4": ("Ni", "Cr", 8.32),
    "ZnFe2O4": ("Zn", "Fe", 8.442),
}
_OLIVINES = {
    "Mg2SiO4": ("Mg", "Si", 4.756, 10.207, 5.980),
    "Mn2SiO4": ("Mn", "Si", 4.902, 10.596, 6.257),
    "Co2SiO4": ("Co", "Si", 4.782, 10.302, 6.003),
    "Ni2SiO4": ("Ni", "Si", 4.726, 10.118, 5.913),
    "Ca2SiO4": ("Ca", "Si", 5.081, 11.224, 6.778),
    "Mg2GeO4": ("Mg", "Ge", 4.912, 10.302, 6.027),
}
_LAYERED = {
    "Sr2TiO4": ("Sr", "Ti", 3.884, 12.60),
    "Sr2SnO4": ("Sr", "Sn", 4.05, 12.58),
    "Ba2SnO4": ("Ba", "Sn", 4.14, 13.30),
    "Ba2ZrO4": ("Ba", "Zr", 4.19, 13.48),
}
_Cell = tuple[float, ...] | None
_FROM_PROTOTYPES: dict[str, tuple[str, dict[str, str], _Cell]] = {
    "PbO": ("PbO_129", {}, None),
    "Al2O3": ("Al2O3_167", {}, None),
    "SiO2": ("SiO2_152", {}, None),
    "TiO2": ("TiO2_136", {}, None),
    "ZrO2": ("ZrO2_14", {}, None),
    "CaCO3": ("CaCO3_167", {}, None),
    "ZrSiO4": ("ZrSiO4_141", {}, None),
    "SrCuO2": ("SrCuO2_63", {}, None),
    "CaTiO3": ("CaTiO3_62", {}, None),
    "CaZrO3": ("CaTiO3_62", {"Ti": "Zr"}, (5.762, 8.017, 5.591)),
    "CaSnO3": ("CaTiO3_62", {"Ti": "Sn"}, (5.681, 7.906, 5.532)),
    "SrZrO3": ("CaTiO3_62", {"Ca": "Sr", "Ti": "Zr"}, (5.817, 8.205, 5.796)),
    "SrSnO3": ("CaTiO3_62", {"Ca": "Sr", "Ti": "Sn"}, (5.71, 8.06, 5.71)),
    "LaFeO3": ("CaTiO3_62", {"Ca": "La", "Ti": "Fe"}, (5.565, 7.854, 5.553)),
    "LaCrO3": ("CaTiO3_62", {"Ca": "La", "Ti": "Cr"}, (5.479, 7.759, 5.515)),
    "MgTiO3": ("TiFeO3_148", {"Fe": "Mg"}, (5.054, 5.054, 13.898)),
    "MnTiO3": ("TiFeO3_148", {"Fe": "Mn"}, (5.139, 5.139, 14.283)),
    "CoTiO3": ("TiFeO3_148", {"Fe": "Co"}, (5.066, 5.066, 13.918)),
    "NiTiO3": ("TiFeO3_148", {"Fe": "Ni"}, (5.030, 5.030, 13.790)),
    "ZnTiO3": ("TiFeO3_148", {"Fe": "Zn"}, (5.078, 5.078, 13.927)),
}
FORMULAS: tuple[str, ...] = tuple(sorted(_phases(dict.fromkeys(row[0] for row in _FROM_PROTOTYPES.values()))))  # type: ignore[arg-type]
TARGETS: tuple[str, ...] = tuple(formula for formula in FORMULAS if formula not in PRECURSORS)


def starting_structures(cache_dir: Path) -> dict[str, make.Maker]:
    """Makers of the primitive starting structure of every phase by formula; reads the AFLOW collection."""
    prototypes = {phase.name: Reference(phase) for phase in load_phases(cache_dir, None)}
    return _phases(prototypes)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    write_table(
        TABLE,
        f"published cells named in synthesis/structures.py; {SOURCE}",
        ((formula, maker()) for formula, maker in sorted(starting_structures(Path(sys.argv[1])).items())),
    )
