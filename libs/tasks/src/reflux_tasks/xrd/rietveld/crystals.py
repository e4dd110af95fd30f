"""Crystals of ObjCryst++ from a request, the caps on what they may cost, and the texture that the binding lacks."""

# pyright: reportMissingImports=false

import math
from typing import Any

from pyobjcryst.atom import Atom
from pyobjcryst.crystal import Crystal
from pyobjcryst.scatteringpower import ScatteringPowerAtom

MAX_PHASES = 5
MAX_CELL_VOLUME = 4000.0  # cubic angstrom; a random large cell costs 20 to 60 s instead of 1
MAX_SITES = 200
MAX_REFLECTIONS = 1500  # independent ones of a whole set; a cell of 12 A without symmetry has 2800
MAX_POINTS = 20000
# The binding has no call for March-Dollase texture; the object is there and reads XML. The spaces matter to its parser.
MARCH_XML = """<TextureMarchDollase><TexturePhaseMarchDollase>
<Par Refined="0" Limited="1" Min="0" Max="1" Name="Fraction">1</Par>
<Par Refined="0" Limited="1" Min="0.3" Max="3" Name="MarchCoeff">1</Par>
{}
</TexturePhaseMarchDollase></TextureMarchDollase>"""
AXIS_XML = '<Par Refined="0" Limited="0" Min="-10" Max="10" Name="{}">{}</Par>'
Request = dict[str, Any]


class BadRequest(ValueError):
    """The request breaks a cap or has the wrong form."""


def check(request: Request) -> None:
    """Refuses what would cost far more than a refinement should."""
    phases, points = request["phases"], len(request["counts"])
    if not 1 <= len(phases) <= MAX_PHASES:
        raise BadRequest(f"{len(phases)} phases, allowed are 1 to {MAX_PHASES}")
    if not 100 <= points <= MAX_POINTS or len(request["two_theta_degrees"]) != points:
        raise BadRequest(f"{points} points, allowed are 100 to {MAX_POINTS}, as many angles as counts")
    for phase in phases:
        a, b, c, *angles = phase["cell"]
        x, y, z = (math.cos(math.radians(angle)) for angle in angles)
        volume = a * b * c * math.sqrt(max(0.0, 1 - x * x - y * y - z * z + 2 * x * y * z))
        if not 1.0 <= volume <= MAX_CELL_VOLUME or not 1 <= len(phase["sites"]) <= MAX_SITES:
            raise BadRequest(f"phase {phase['name']}: volume {volume:.0f} A^3, {len(phase['sites'])} sites")


def check_reflections(crystals: list[Crystal], theta: float) -> None:
    """Refuses a set whose independent reflections up to this angle would cost far more than a refinement should.

    Their number is about the volume of the limiting sphere, 4/3 pi (2 sin(theta) / lambda)^3, times that of the cell
    over the symmetry operations (with centring), halved by Friedel's law where there is no inversion.
    """
    sphere = 4 / 3 * math.pi * (2 * math.sin(theta) / 1.5406) ** 3
    total = 0.0
    for crystal in crystals:
        group = crystal.GetSpaceGroup()
        total += sphere * crystal.GetVolume() / group.GetNbSymmetrics() / (1 if group.HasInversionCenter() else 2)
    if total > MAX_REFLECTIONS:
        raise BadRequest(f"{total:.0f} independent reflections, allowed are {MAX_REFLECTIONS}")


def make_crystal(phase: Request, biso: dict[str, float]) -> Crystal:
    """Crystal from cell, Hall symbol and sites [element, x, y, z, multiplicity].

    Occupancies are multiplicity / number of operations, and the automatic correction for special positions is off: it
    goes by distance and would merge the atoms of a short bond.
    """
    a, b, c, alpha, beta, gamma = phase["cell"]
    crystal = Crystal(a, b, c, *(math.radians(angle) for angle in (alpha, beta, gamma)), "Hall: " + phase["hall"])
    crystal.SetName(phase["name"])
    crystal.SetUseDynPopCorr(0)
    operations = crystal.GetSpaceGroup().GetNbSymmetrics()
    powers = {}
    for i, (element, x, y, z, multiplicity) in enumerate(phase["sites"]):
        if element not in powers:
            powers[element] = ScatteringPowerAtom(element, element, biso.get(element, biso["default"]))
            powers[element].Biso = biso.get(element, biso["default"])
            crystal.AddScatteringPower(powers[element])
        crystal.AddScatterer(Atom(x, y, z, f"{element}{i}", powers[element], multiplicity / operations))
    return crystal


def add_texture(diffraction: Any, direction: list[int]) -> Any:
    """The March-Dollase object of a phase, with its axis set; its coefficient is then called MarchCoeff_0."""
    registry = diffraction.GetSubObjRegistry()
    found = [registry.GetObj(i) for i in range(registry.GetNb())]
    texture = next(item for item in found if "March" in item.GetClassName())
    axes = [AXIS_XML.format(name, value) for name, value in zip("HKL", direction, strict=True)]
    texture.XMLInput(MARCH_XML.format("\n".join(axes)) + "\n")
    return texture
