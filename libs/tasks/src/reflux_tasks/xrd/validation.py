"""Validates the full verifier on weighed mixtures: does the true phase set win, and does it stand by itself?

For each scan the true set is refined, then wrong sets: every single replacement and the surrogate's best sets of the
same size, every set with one phase more, every set with one phase less. Verdicts are those of `verdict.py`.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb
from pathlib import Path
from typing import Literal

from reflux_tasks.verify import VerificationError
from reflux_tasks.xrd import profile_surrogate
from reflux_tasks.xrd.measured import SAME, clash
from reflux_tasks.xrd.measured_payload import MEASURED_OPTIONS, prepare
from reflux_tasks.xrd.profile import Profile
from reflux_tasks.xrd.profile_surrogate import ProfileSurrogate, SurrogateScore
from reflux_tasks.xrd.readers import SUFFIXES, UnreadablePattern, cut_and_rebin, mixture_truth, read_pattern
from reflux_tasks.xrd.refinement import Candidate
from reflux_tasks.xrd.refinement_pool import RefinementPool
from reflux_tasks.xrd.structure_files import Structure
from reflux_tasks.xrd.verdict import Verdict, judge

Kind = Literal["true", "replacement", "same size", "addition", "omission"]
MAX_SETS = 20_000
"""More sets of one size are not scored one by one; single replacements are."""
MAX_OF_A_KIND = 48
"""Refined sets of a kind, the surrogate's best; twelve candidates stay below."""
BEST_OF_SAME_SIZE = 12
QUICK_ADDITIONS = 3
_MINUTES = re.compile(r"(\d+)min$")


@dataclass(frozen=True)
class Scan:
    """One measured scan of a weighed mixture."""

    path: Path
    weighed: Mapping[str, float]
    """Mass fractions by name of the candidate, adding up to 1."""
    refined: Profile
    """What is refined."""
    coarse: Profile
    """What the surrogate takes."""


@dataclass(frozen=True)
class Trial:
    """One phase set to refine against one scan, and what came out; `verdict` is None when the refinement failed."""

    kind: Kind
    names: tuple[str, ...]
    verdict: Verdict | None = None


@dataclass(frozen=True)
class ScanResult:
    """All trials of a scan, the true set first."""

    scan: Scan
    trials: tuple[Trial, ...]
    surrogate: SurrogateScore
    surrogate_rank: int
    """Sets of the same size with a lower R, plus 1."""
    sets_scored: int
    surrogate_ms: float
    """CPU time of the surrogate per set."""


def find_scans(folder: Path, candidates: Mapping[str, Structure], quick: bool) -> tuple[list[Scan], dict[str, str]]:
    """Scans whose name holds mass fractions, and why other patterns were left out, by file name.

    `quick` takes only the longest scan of each mixture, by the minutes at the end of the names. Raises
    FileNotFoundError when no scan is left.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    scans: list[Scan] = []
    skipped: dict[str, str] = {}
    for path in _longest(files) if quick else files:
        try:
            scans.append(_read_scan(path, candidates))
        except UnreadablePattern as error:
            skipped[path.name] = str(error)
    if not scans:
        reasons = "; ".join(list(skipped.values())[:5]) or f"no pattern ({', '.join(SUFFIXES)}) in there"
        raise FileNotFoundError(f"{folder}: no weighed mixture that can be used: {reasons}")
    return scans, skipped


def _longest(files: Sequence[Path]) -> list[Path]:
    best: dict[str, tuple[int, Path]] = {}
    for path in files:
        found = _MINUTES.search(path.stem)
        mixture, minutes = path.stem.split("--")[0] if found else path.stem, int(found[1]) if found else 0
        if mixture not in best or minutes > best[mixture][0]:
            best[mixture] = (minutes, path)
    return [path for _, path in best.values()]


def _read_scan(path: Path, candidates: Mapping[str, Structure]) -> Scan:
    truth = mixture_truth(path)
    total = sum(truth.values())
    weighed = {resolve(name, candidates): fraction / total for name, fraction in truth.items()}
    if len(weighed) < len(truth):
        raise UnreadablePattern(f"{path.name}: two names mean the same structure")
    raw = read_pattern(path)
    try:
        refined = prepare(raw)
        coarse = cut_and_rebin(refined, refined.two_theta[0], refined.two_theta[-1], profile_surrogate.MAX_POINTS)
    except UnreadablePattern as error:
        raise UnreadablePattern(f"{path.name}: {error}") from error
    return Scan(path, weighed, refined, coarse)


def resolve(name: str, candidates: Mapping[str, Structure]) -> str:
    """Name of the candidate that a mixture's name means: the same name, else the only candidate of that formula.

    Raises UnreadablePattern when there is none or more than one.
    """
    from pymatgen.core import Composition

    if name in candidates:
        return name
    try:
        formula = Composition(name).reduced_formula
    except ValueError as error:
        raise UnreadablePattern(f"no structure of {name}, which is no formula either") from error
    found = [key for key, structure in candidates.items() if structure.phase.formula == formula]
    if len(found) != 1:
        what = f"several structures of {name}: {', '.join(found)}; name the right one {name}.cif" if found else ""
        raise UnreadablePattern(what or f"no structure of {name}")
    return found[0]


class Validator:
    """Runs scans one after another; the sets of a scan are refined at once by the pool."""

    def __init__(self, candidates: Mapping[str, Structure], pool: RefinementPool, *, quick: bool) -> None:
        self.candidates = candidates
        self.pool = pool
        self.quick = quick
        pairs = {frozenset(pair): clash(*(candidates[name] for name in pair)) for pair in combinations(candidates, 2)}
        self._clashes = {pair: reason for pair, reason in pairs.items() if reason}

    def run(self, scan: Scan, on_trial: Callable[[int, int], None] = lambda done, total: None) -> ScanResult:
        """Refines all sets of one scan; `on_trial` hears how many of how many are done."""
        names = tuple(scan.weighed)
        surrogate = ProfileSurrogate(scan.coarse, self.candidates)
        same_size = self._same_size(names)
        started = time.process_time()
        scores = {frozenset(names): surrogate.score(names)}
        scores |= {frozenset(each): surrogate.score(each) for each in same_size}
        milliseconds = 1000 * (time.process_time() - started) / (len(same_size) + 1)
        order = sorted(scores, key=lambda each: scores[each].profile_r)
        true, *wrong = self._trials(names, order, surrogate)
        trials = [true, *(trial for trial in wrong if self._is_wrong(trial.names, names))]
        judged = []
        refined = self.pool.refine_all(
            scan.refined, [self._structures(trial.names) for trial in trials], MEASURED_OPTIONS
        )
        for trial, fit in zip(trials, refined, strict=True):
            verdict = None if isinstance(fit, VerificationError) else judge(fit, MEASURED_OPTIONS.cell_limit)
            judged.append(Trial(trial.kind, trial.names, verdict))
            on_trial(len(judged), len(trials))
        rank = order.index(frozenset(names)) + 1
        return ScanResult(scan, tuple(judged), scores[frozenset(names)], rank, len(scores), milliseconds)

    def _is_wrong(self, names: Sequence[str], true: Sequence[str]) -> bool:
        """Whether a set is worth a refinement: the verifier would take it, and it is not the true one renamed."""
        if any(frozenset(pair) in self._clashes for pair in combinations(names, 2)):
            return False
        others = [name for name in names if name not in true]
        return not any(self._clashes.get(frozenset(pair)) == SAME for pair in product(others, true))

    def _structures(self, names: Sequence[str]) -> list[Candidate]:
        return [self.candidates[name].candidate for name in names]

    def _same_size(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """All sets of this size, or the single replacements where there are too many; each sorted."""
        if comb(len(self.candidates), len(names)) <= MAX_SETS:
            return list(combinations(sorted(self.candidates), len(names)))
        return [tuple(sorted(each)) for each in replacements(names, self.candidates)]

    def _trials(
        self, names: tuple[str, ...], order: Sequence[frozenset[str]], surrogate: ProfileSurrogate
    ) -> Iterator[Trial]:
        yield Trial("true", names)
        place = {each: i for i, each in enumerate(order)}
        replaced = sorted(replacements(names, self.candidates), key=lambda each: place[frozenset(each)])[:MAX_OF_A_KIND]
        yield from (Trial("replacement", each) for each in replaced)
        more = [(*names, other) for other in self.candidates if other not in names]
        more.sort(key=lambda each: surrogate.score(each).profile_r)
        yield from (Trial("addition", each) for each in more[: QUICK_ADDITIONS if self.quick else MAX_OF_A_KIND])
        if self.quick:
            return
        seen = {frozenset(names), *map(frozenset, replaced)}
        yield from (Trial("same size", tuple(sorted(each))) for each in order[:BEST_OF_SAME_SIZE] if each not in seen)
        if len(names) > 1:
            yield from (Trial("omission", (*names[:i], *names[i + 1 :])) for i in range(len(names)))


def replacements(names: Sequence[str], candidates: Mapping[str, Structure]) -> list[tuple[str, ...]]:
    """Every set with one phase replaced."""
    others = [name for name in candidates if name not in names]
    return [(*names[:i], other, *names[i + 1 :]) for i in range(len(names)) for other in others]
