"""One staged Rietveld refinement with ObjCryst++: a request as JSON on stdin, the result as JSON on stdout.

Standalone on purpose: it runs under the system's Python (Debian package python3-pyobjcryst, numpy) and knows nothing
of the rest of the package. One process per refinement, because results of ObjCryst++ depend on what the process did
before.

Definitions, with observed counts yo, calculated yc, and weights w = 1 / max(yo, 1), the inverse Poisson variance:
    R_wp   = sqrt(sum w (yo - yc)^2 / sum w yo^2)
    R_wb   = sqrt(sum w (yo - yc)^2 / sum w (yo - b)^2), b the background estimate of the request (SNIP)
    R_exp  = sqrt((points - parameters) / sum w yo^2), goodness of fit = R_wp / R_exp
    need   = (chi2 without this phase - chi2) / chi2, the scales of the others refitted, all else fixed
    mass fraction = S Z M V / sum over phases, S the refined scale, Z M the mass of a cell, V its volume
Scales may go negative: that is the best sign that a phase is absent.
"""

# pyright: reportMissingImports=false

import json
import math
import os
import resource
import sys
import time
from typing import Any

import numpy as np
from pyobjcryst.atom import Atom
from pyobjcryst.crystal import Crystal
from pyobjcryst.lsq import LSQ
from pyobjcryst.powderpattern import PowderPattern, ReflectionProfileType
from pyobjcryst.scatteringpower import ScatteringPowerAtom

MAX_PHASES = 5
MAX_CELL_VOLUME = 4000.0  # cubic angstrom; a random large cell costs 20 to 60 s instead of 1
MAX_SITES = 200
MAX_REFLECTIONS = 1500  # independent ones of a whole set; a cell of 12 A without symmetry has 2800
MEMORY_BYTES = 2 * 2**30
MAX_POINTS = 20000
BACKGROUND_NODES = 12
PEAK_WIDTH = math.radians(0.13)
PAD_DEGREES = (
    1.0  # ObjCryst++ drops reflections beyond the last point though their tails reach back: go on with weight 0
)
CYCLES = {"background": 2, "shift": 3, "width": 3, "cell": 4, "shape": 4, "last": 4}
# The binding has no call for March-Dollase texture; the object is there and reads XML. The spaces matter to its parser.
MARCH_XML = """<TextureMarchDollase><TexturePhaseMarchDollase>
<Par Refined="0" Limited="1" Min="0" Max="1" Name="Fraction">1</Par>
<Par Refined="0" Limited="1" Min="0.3" Max="3" Name="MarchCoeff">1</Par>
{}
</TexturePhaseMarchDollase></TextureMarchDollase>"""
AXIS_XML = '<Par Refined="0" Limited="0" Min="-10" Max="10" Name="{}">{}</Par>'
CELL_NAMES = ("a", "b", "c", "alpha", "beta", "gamma")
Request = dict[str, Any]


class BadRequest(ValueError):
    """The request breaks a cap or has the wrong form."""


def background_nodes(two_theta: np.ndarray, background: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Angles and counts of the spline nodes: two close ones at the low end, the rest even."""
    nodes = np.r_[two_theta[0], two_theta[0] + 2, np.linspace(two_theta[0] + 6, two_theta[-1], BACKGROUND_NODES - 2)]
    return nodes, np.interp(nodes, two_theta, background)


class Refinement:
    """Pattern, phases and parameters of one refinement; parameters are freed in stages and stay free."""

    def __init__(self, request: Request) -> None:
        self.two_theta = np.array(request["two_theta_degrees"], float)
        self.counts = np.array(request["counts"], float)
        self.background = np.array(request["background"], float)
        self.weights = 1 / np.maximum(self.counts, 1)
        self.notes: list[str] = []
        self.pattern = self._make_pattern(request)
        self.crystals = [make_crystal(phase, request["biso"]) for phase in request["phases"]]
        check_reflections(self.crystals, math.radians(self.two_theta[-1] / 2))
        self.start_cells = [[crystal.a, crystal.b, crystal.c] for crystal in self.crystals]
        self.diffractions = [self._add_phase(crystal) for crystal in self.crystals]
        self.pattern.SetMaxSinThetaOvLambda(math.sin(math.radians((self.two_theta[-1] + PAD_DEGREES) / 2)) / 1.5406)
        self.pattern.Prepare()
        self.pattern.FitScaleFactorForRw()
        self.profiles = [diffraction.GetProfile() for diffraction in self.diffractions]
        pairs = zip(self.diffractions, request["phases"], strict=True)
        self.textures = [add_texture(owner, phase["march"]) for owner, phase in pairs if phase["march"]]
        self.shift = "Zero" if request["shift"] == "zero" else "2ThetaDispl"
        self._collect(request)

    def _make_pattern(self, request: Request) -> PowderPattern:
        pattern = PowderPattern()
        pattern.SetWavelength(request["wavelength"])
        step = self.two_theta[-1] - self.two_theta[-2]
        beyond = self.two_theta[-1] + np.arange(step, PAD_DEGREES, step)
        pattern.SetPowderPatternX(np.deg2rad(np.concatenate([self.two_theta, beyond])))
        # a point without counts has weight 0 in ObjCryst++
        pattern.SetPowderPatternObs(np.concatenate([self.counts, np.zeros(len(beyond))]))
        nodes, values = background_nodes(self.two_theta, self.background)
        pattern.AddPowderPatternBackground().SetInterpPoints(np.deg2rad(nodes), values)
        return pattern

    def _add_phase(self, crystal: Crystal) -> Any:
        diffraction = self.pattern.AddPowderPatternDiffraction(crystal)
        diffraction.SetIsIgnoringImagScattFact(False)
        diffraction.SetName(crystal.GetName())
        diffraction.SetReflectionProfilePar(ReflectionProfileType.PROFILE_PSEUDO_VOIGT, PEAK_WIDTH**2, 0, 0, 0.5, 0)
        return diffraction

    def _collect(self, request: Request) -> None:
        """Keeps parameters by object and name: LSQ.PrepareRefParList renames them ("W" becomes "W~")."""
        self.parameters = {}
        for owner in [self.pattern, *self.crystals, *self.diffractions, *self.profiles, *self.textures]:
            for i in range(owner.GetNbPar()):
                parameter = owner.GetPar(i)
                self.parameters[id(owner), parameter.GetName()] = parameter
        self._limit(request["cell_limit"])
        self.solver = LSQ()
        self.solver.SetRefinedObj(self.pattern, 0, True, True)
        self.solver.PrepareRefParList(False)
        self.compiled = self.solver.GetCompiledRefinedObj()

    def _limit(self, cell_limit: float) -> None:
        """Bounds that physics allows; without them wrong phases wander to cells that fit anything."""
        for crystal in self.crystals:
            for name in CELL_NAMES:
                parameter = self.parameters[id(crystal), name]
                value = parameter.GetValue()
                reach = value * cell_limit if name in "abc" else 0.015  # radians
                bound(parameter, value - reach, value + reach)
        for profile in self.profiles:
            bound(self.parameters[id(profile), "W"], math.radians(0.04) ** 2, math.radians(0.6) ** 2)
            bound(self.parameters[id(profile), "U"], -(math.radians(0.3) ** 2), math.radians(0.5) ** 2)
        bound(self.parameters[id(self.pattern), self.shift], -math.radians(0.3), math.radians(0.3))

    def free(self, owner: Any, *names: str) -> None:
        """Lets the solver change these parameters of an object from now on."""
        for name in names:
            self.parameters[id(owner), name].SetIsFixed(False)

    def run(self, stage: str) -> None:
        """Least squares over the free parameters, as many cycles as the stage has."""
        try:
            self.solver.Refine(CYCLES[stage], True, True)
        except Exception as error:  # ObjCryst++ raises bare C++ exceptions; the values reached so far stay
            self.notes.append(f"{stage}: {str(error)[:80]}")

    def stages(self, fast: bool) -> None:
        """Scales and background, angle shift, widths, cells, peak shapes, then width slopes and texture."""
        for i in range(self.compiled.GetNbPar()):
            parameter = self.compiled.GetPar(i)
            parameter.SetIsFixed(not parameter.GetName().startswith(("Scale_", "Background_Point")))
        self.run("background")
        self.free(self.pattern, self.shift)
        self.run("shift")
        for profile in self.profiles:
            self.free(profile, "W")
        self.run("width")
        for crystal in self.crystals:
            self.free(crystal, *[name for name in CELL_NAMES if self.parameters[id(crystal), name].IsUsed()])
        self.run("cell")
        if not fast:
            for profile in self.profiles:
                self.free(profile, "Eta0")
            self.run("shape")
            for profile in self.profiles:
                self.free(profile, "U")
        for texture in self.textures:
            self.free(texture, "MarchCoeff_0")
        self.run("last")

    def result(self) -> dict[str, Any]:
        """Figures of merit and the phases, as the module defines them."""
        calculated = self._calculated()
        chi2 = self._chi2(calculated)
        total = float((self.weights * self.counts**2).sum())
        free, points = self.compiled.GetNbParNotFixed(), len(self.counts)
        r_wp, r_exp = math.sqrt(chi2 / total), math.sqrt(max(points - free, 1) / total)
        return {
            "r_wp": r_wp,
            "r_wb": math.sqrt(chi2 / max(self._chi2(self.background), 1e-300)),
            "r_exp": r_exp,
            "goodness": r_wp / r_exp,
            "points": points,
            "parameters": free,
            "shift_degrees": math.degrees(self.parameters[id(self.pattern), self.shift].GetValue()),
            "phases": self._phase_results(chi2),
            "notes": self.notes,
        }

    def _calculated(self) -> np.ndarray:
        return np.array(self.pattern.GetPowderPatternCalc())[: len(self.counts)]

    def _chi2(self, calculated: np.ndarray) -> float:
        return float((self.weights * (self.counts - calculated) ** 2).sum())

    def _phase_results(self, chi2: float) -> list[dict[str, Any]]:
        every = [self.pattern.GetPar(i) for i in range(self.pattern.GetNbPar())]
        scales = [parameter for parameter in every if parameter.GetName().startswith("Scale_")]
        masses = [
            scale.GetValue() * c.GetSpaceGroup().GetNbSymmetrics() * c.GetWeight() * c.GetVolume()
            for scale, c in zip(scales, self.crystals, strict=True)
        ]
        calculated = self._calculated()
        parts = np.array([calculated - self._without(scale) for scale in scales])
        results = []
        for i, (crystal, scale) in enumerate(zip(self.crystals, scales, strict=True)):
            cell = [crystal.a, crystal.b, crystal.c]
            shift = max(abs(now / before - 1) for now, before in zip(cell, self.start_cells[i], strict=True))
            rest = self._without_refitted(calculated, parts, i)
            results.append(
                {
                    "name": crystal.GetName(),
                    "scale": scale.GetValue(),
                    "need": (self._chi2(rest) - chi2) / max(chi2, 1e-300),
                    "mass_fraction": masses[i] / sum(masses) if sum(masses) else 0.0,
                    "cell": cell,
                    "cell_shift": shift,
                }
            )
        return results

    def _without(self, scale: Any) -> np.ndarray:
        """The pattern without a phase. SetScaleFactor leaves it stale; the parameter and Prepare do not."""
        value = scale.GetValue()
        scale.SetValue(0.0)
        self.pattern.Prepare()
        without = self._calculated()
        scale.SetValue(value)
        self.pattern.Prepare()
        return without

    def _without_refitted(self, calculated: np.ndarray, parts: np.ndarray, left_out: int) -> np.ndarray:
        """The best pattern of the background and the other phases' patterns, each times a factor."""
        root = np.sqrt(self.weights)
        background = calculated - parts.sum(axis=0)
        others = np.delete(parts, left_out, axis=0)
        factors = np.linalg.lstsq((others * root).T, (self.counts - background) * root, rcond=None)[0]
        return background + factors @ others


def bound(parameter: Any, low: float, high: float) -> None:
    """Limits a parameter of ObjCryst++."""
    parameter.SetMin(low)
    parameter.SetMax(high)
    parameter.SetIsLimited(True)


def add_texture(diffraction: Any, direction: list[int]) -> Any:
    """The March-Dollase object of a phase, with its axis set; its coefficient is then called MarchCoeff_0."""
    registry = diffraction.GetSubObjRegistry()
    found = [registry.GetObj(i) for i in range(registry.GetNb())]
    texture = next(item for item in found if "March" in item.GetClassName())
    axes = [AXIS_XML.format(name, value) for name, value in zip("HKL", direction, strict=True)]
    texture.XMLInput(MARCH_XML.format("\n".join(axes)) + "\n")
    return texture


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


def main() -> None:
    """Reads the request, refines, writes the result; a request that breaks a cap is answered by its error."""
    request = json.load(sys.stdin)
    # ObjCryst++ prints to stdout: keep the real one for the answer
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    seconds = int(request["cpu_seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # a sandbox may allow less
    memory = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        check(request)
        refinement = Refinement(request)
        refinement.stages(request["effort"] == "fast")
        result = refinement.result()
    except BadRequest as error:
        result: dict[str, Any] = {"error": str(error)}
    result["cpu_seconds"] = time.process_time()
    json.dump(result, answer)
    answer.flush()


if __name__ == "__main__":
    main()
