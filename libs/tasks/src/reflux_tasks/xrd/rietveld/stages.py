"""The staged refinement of one request: parameters are freed in stages and stay free.

Scales may go negative: that is the best sign that a phase is absent.
mass fraction = S Z M V / sum over phases, S the refined scale, Z M the mass of a cell, V its volume.
"""

# pyright: reportMissingImports=false

import math
from typing import Any

import numpy as np
from crystals import Request, add_texture, check_reflections, make_crystal
from figures import chi2, needs, r_values
from pyobjcryst.crystal import Crystal
from pyobjcryst.lsq import LSQ
from pyobjcryst.powderpattern import PowderPattern, ReflectionProfileType

BACKGROUND_NODES = 12
PEAK_WIDTH = math.radians(0.13)
PAD_DEGREES = 1.0  # ObjCryst++ drops reflections beyond the last point, whose tails reach back: go on with weight 0
CYCLES = {"background": 2, "shift": 3, "width": 3, "cell": 4, "shape": 4, "last": 4}
CELL_REPEATS = 4
CELL_GAIN = 0.95  # the stage is repeated as long as it leaves less than this of the misfit
CELL_NAMES = ("a", "b", "c", "alpha", "beta", "gamma")


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
        """Least squares over the free parameters, as many cycles as the stage has; a stage that ends in a worse fit is
        taken back, because limits can throw the solver into a corner."""
        before = [self.compiled.GetPar(i).GetValue() for i in range(self.compiled.GetNbPar())]
        start = self._misfit()
        try:
            self.solver.Refine(CYCLES[stage], True, True)
        except Exception as error:  # ObjCryst++ raises bare C++ exceptions; the values reached so far stay
            self.notes.append(f"{stage}: {str(error)[:80]}")
        if not self._misfit() <= start:
            self.notes.append(f"{stage}: taken back")
            for i, value in enumerate(before):
                self.compiled.GetPar(i).SetValue(value)
            self.pattern.Prepare()

    def _misfit(self) -> float:
        calculated = self._calculated()
        return chi2(self.counts, calculated, 1 / np.maximum(self.counts, 1))

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
        for _ in range(CELL_REPEATS):  # lines half a width off pull slowly at first
            start = self._misfit()
            self.run("cell")
            if not self._misfit() < CELL_GAIN * start:
                break
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
        """Figures of merit and the phases, as `figures` defines them."""
        calculated = self._calculated()
        free = self.compiled.GetNbParNotFixed()
        return {
            **r_values(self.counts, calculated, self.background, free),
            "points": len(self.counts),
            "parameters": free,
            "shift_degrees": math.degrees(self.parameters[id(self.pattern), self.shift].GetValue()),
            "phases": self._phase_results(calculated),
            "notes": self.notes,
        }

    def _calculated(self) -> np.ndarray:
        return np.array(self.pattern.GetPowderPatternCalc())[: len(self.counts)]

    def _phase_results(self, calculated: np.ndarray) -> list[dict[str, Any]]:
        every = [self.pattern.GetPar(i) for i in range(self.pattern.GetNbPar())]
        scales = [parameter for parameter in every if parameter.GetName().startswith("Scale_")]
        masses = [
            scale.GetValue() * c.GetSpaceGroup().GetNbSymmetrics() * c.GetWeight() * c.GetVolume()
            for scale, c in zip(scales, self.crystals, strict=True)
        ]
        parts = np.array([calculated - self._without(scale) for scale in scales])
        found = needs(self.counts, calculated, parts)
        results = []
        for i, (crystal, scale) in enumerate(zip(self.crystals, scales, strict=True)):
            cell = [crystal.a, crystal.b, crystal.c]
            results.append(
                {
                    "name": crystal.GetName(),
                    "scale": scale.GetValue(),
                    "need": found[i],
                    "mass_fraction": masses[i] / sum(masses) if sum(masses) else 0.0,
                    "cell": cell,
                    "cell_shift": max(abs(now / was - 1) for now, was in zip(cell, self.start_cells[i], strict=True)),
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


def bound(parameter: Any, low: float, high: float) -> None:
    """Limits a parameter of ObjCryst++."""
    parameter.SetMin(low)
    parameter.SetMax(high)
    parameter.SetIsLimited(True)
