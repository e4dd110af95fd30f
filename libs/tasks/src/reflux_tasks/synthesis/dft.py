"""The dearest verifier: the energy of a reaction between small, covered solids by Quantum ESPRESSO."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from reflux_tasks.chemistry import espresso
from reflux_tasks.chemistry.mlip import relax, require_model
from reflux_tasks.synthesis.answers import Recipe
from reflux_tasks.synthesis.payload import Truth
from reflux_tasks.synthesis.phases import starting_structures
from reflux_tasks.synthesis.units import atoms_of
from reflux_tasks.synthesis.verifiers import FullVerifier

RELAX_STEPS = 60


class DftVerifier(FullVerifier):
    """As `full`, with the reaction energy from pw.x at CHGNet's geometries where all of this holds: the target is one
    of the task's, no gas leaves, all elements have pseudopotentials, and no primitive cell has more than 12 atoms.
    Otherwise CHGNet's energy stays.
    """

    name: ClassVar[str] = "dft"
    version: ClassVar[str] = "synthesis-dft-2"
    trusted: ClassVar[bool] = False
    cost_seconds: ClassVar[float] = 60.0
    weakest_tier: ClassVar[Literal["process", "prefork", "bwrap", "gvisor"]] = "prefork"

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir

    @cached_property
    def _starting(self) -> dict[str, Any]:
        return starting_structures(self.cache_dir)

    def prepare(self) -> None:
        super().prepare()
        require_model()  # and no more: seconds of import are nothing beside a calculation, but much in every template
        espresso.program()
        _ = self._starting

    def _energy(self, truth: Truth, recipe: Recipe) -> tuple[float, dict[str, Any]]:
        espresso.program()
        pseudos = espresso.choose_pseudopotentials(atoms_of(truth.target))
        names = [truth.target, *(name for name, _ in recipe.precursors)]
        if truth.target not in self._starting:
            return *super()._energy(truth, recipe)[:1], {"dft": 0}
        structures = {name: self._starting[name]() for name in names}
        too_large = any(len(structure) > espresso.MAX_ATOMS for structure in structures.values())
        if pseudos is None or recipe.gases or too_large:
            return *super()._energy(truth, recipe)[:1], {"dft": 0}
        energies = {}
        for name, structure in structures.items():
            files = {element: pseudos.files[element] for element in atoms_of(name)}
            own = espresso.PseudoSet(pseudos.functional, files, pseudos.mixed)
            per_atom = espresso.total_energy(relax(structure, RELAX_STEPS).structure, own)
            energies[name] = per_atom * sum(atoms_of(name).values())
        consumed = sum(float(amount) * energies[name] for name, amount in recipe.precursors)
        atoms = sum(float(amount) * sum(atoms_of(name).values()) for name, amount in recipe.precursors)
        energy = (float(recipe.target_amount) * energies[truth.target] - consumed) / atoms
        return energy, {"dft": 1, "dft_mixed": int(pseudos.mixed)}
