"""The powders on the shelf and the gases that leave. Standard library only.

Why a precursor is on the list: oxides, carbonates and hydroxides are what text-mined solid-state syntheses start from
(O. Kononova et al., Sci. Data 6, 203 (2019)), and all of these are ordinary powders; BaO, SrO and Li2O are sensitive to
air, which is why a problem may strike them out. Melting points: CRC Handbook of Chemistry and Physics, Physical
Constants of Inorganic Compounds, rounded to 10 K; sources differ by up to 100 K.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Precursor:
    """A powder on the shelf."""

    formula: str
    melting_kelvin: float
    """Of itself, or of the oxide that it becomes before it melts."""
    gas: str = ""
    """What it gives off."""


PRECURSORS: Mapping[str, Precursor] = {
    row.formula: row
    for row in (
        Precursor("Li2O", 1710),
        Precursor("MgO", 3100),
        Precursor("CaO", 2890),
        Precursor("SrO", 2800),
        Precursor("BaO", 2250),
        Precursor("MnO", 2120),
        Precursor("CoO", 2100),
        Precursor("NiO", 2230),
        Precursor("CuO", 1500),
        Precursor("ZnO", 2250),
        Precursor("PbO", 1160),
        Precursor("Al2O3", 2330),
        Precursor("Cr2O3", 2710),
        Precursor("Fe2O3", 1840),
        Precursor("La2O3", 2580),
        Precursor("SiO2", 2000),
        Precursor("GeO2", 1390),
        Precursor("SnO2", 1900),
        Precursor("TiO2", 2120),
        Precursor("ZrO2", 2980),
        Precursor("Li2CO3", 1010, "CO2"),
        Precursor("MgCO3", 3100, "CO2"),
        Precursor("CaCO3", 2890, "CO2"),
        Precursor("SrCO3", 2800, "CO2"),
        Precursor("BaCO3", 2250, "CO2"),
        Precursor("MnCO3", 2120, "CO2"),
        Precursor("ZnCO3", 2250, "CO2"),
        Precursor("Mg(OH)2", 3100, "H2O"),
        Precursor("Ca(OH)2", 2890, "H2O"),
    )
}
GASES = ("CO2", "H2O")
