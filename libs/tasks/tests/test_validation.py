import itertools
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reflux_tasks.verify import VerificationError
from reflux_tasks.xrd import refinement as refinement_module
from reflux_tasks.xrd.profile import Profile, pseudo_voigt_sum, strained_lines
from reflux_tasks.xrd.profile_surrogate import ProfileSurrogate, SurrogateScore
from reflux_tasks.xrd.readers import UnreadablePattern, cut_and_rebin, mixture_truth, read_pattern
from reflux_tasks.xrd.refinement import Fit, PhaseFit, RefinementOptions
from reflux_tasks.xrd.refinement_pool import RefinementPool
from reflux_tasks.xrd.structure_files import Structure
from reflux_tasks.xrd.validation import Kind, Scan, ScanResult, Trial, Validator, find_scans, replacements, resolve
from reflux_tasks.xrd.validation_report import AT_LEAST, AT_MOST, missed, report
from reflux_tasks.xrd.verdict import judge


def simulated(structures: list[Structure], shift: float = 0.0) -> Profile:
    """Equal highest lines of each phase, 10 to 95 degrees, with counting statistics."""
    two_theta = np.arange(10, 95, 0.04)
    total = np.full_like(two_theta, 100.0)
    for structure in structures:
        inverse_2d, intensity = strained_lines(structure.phase, np.ones(3))
        widths = np.full(len(inverse_2d), 0.15)
        total += 600 * pseudo_voigt_sum(two_theta, inverse_2d, intensity, widths=widths, eta=0.5, zero_shift=shift)
    return Profile(two_theta, np.random.default_rng(1).poisson(total).astype(float))


@pytest.mark.parametrize("true", [("NiO", "V2O5"), pytest.param(("Bi2O3", "Li2CO3"), marks=pytest.mark.slow)])
def test_the_surrogate_puts_the_true_set_first(shipped: dict[str, Structure], true: tuple[str, ...]) -> None:
    profile = cut_and_rebin(simulated([shipped[name] for name in true], shift=0.06), 13, 90, 1100)
    surrogate = ProfileSurrogate(profile, shipped)
    scores = {each: surrogate.score(each) for each in itertools.combinations(shipped, len(true))}
    assert set(min(scores, key=lambda each: scores[each].profile_r)) == set(true)
    best = surrogate.score(true)
    assert best.profile_r < 0.35
    assert best.peak_f1 > 0.5
    assert best.displacement_degrees == pytest.approx(0.06, abs=0.035)


def test_non_negative_coefficients_agree_with_scipy(shipped: dict[str, Structure]) -> None:
    """The fast solver of the grid against a slow exact one, on wrong sets that push coefficients below zero."""
    from scipy.optimize import nnls

    from reflux_tasks.xrd.profile_surrogate import _non_negative

    rng = np.random.default_rng(0)
    for _ in range(20):
        matrix, wanted = rng.random((40, 4)), rng.normal(size=40)
        gram, overlap = matrix.T @ matrix, matrix.T @ wanted
        found = _non_negative(gram[None], overlap[None], 4)[0]
        exact, _ = nnls(matrix, wanted)
        loss = [float(np.linalg.norm(matrix @ each - wanted)) for each in (found, exact)]
        assert (found >= 0).all()
        assert loss[0] <= 1.05 * loss[1]


@pytest.mark.slow
def test_the_surrogate_finds_every_weighed_mixture(xrd_data: Path, shipped: dict[str, Structure]) -> None:
    for path in sorted((xrd_data / "measured").glob("*_0p*min.xrdml")):
        true = tuple(mixture_truth(path))
        surrogate = ProfileSurrogate(cut_and_rebin(read_pattern(path), 13, 90, 2100), shipped)
        r = {each: surrogate.score(each).profile_r for each in itertools.combinations(sorted(shipped), len(true))}
        assert set(min(r, key=lambda each: r[each])) == set(true), path.name


def fit(names: tuple[str, ...], r_wb: float, need: float = 5.0, scale: float = 1.0, shift: float = 0.0) -> Fit:
    share = 1 / len(names)
    phases = [PhaseFit(name, 1.0, 5.0, share, (1.0, 1.0, 1.0), 0.0) for name in names[:-1]]
    phases.append(PhaseFit(names[-1], scale, need, share, (1.0, 1.0, 1.0), shift))
    return Fit(r_wb / 3, r_wb, 0.01, 3.0, 1000, 20, 0.0, tuple(phases), (), 0.5)


def test_the_verdict_follows_its_formula() -> None:
    good = judge(fit(("A", "B"), 0.15), 0.012)
    assert (good.gate, good.accepted) == ("", True)
    assert good.score == pytest.approx((0.45 - 0.15 - 0.04) / 0.30)
    assert judge(fit(("A", "B"), 0.21), 0.012).accepted is False
    assert judge(replace(fit(("A", "B"), 0.21), goodness=1.2), 0.012).accepted, "most of it is counting noise"
    assert judge(fit(("A", "B", "C"), 0.14), 0.012).rank > good.rank, "a surplus phase costs more than it gains"
    for bad in (
        fit(("A", "B"), 0.1, need=0.11),
        fit(("A", "B"), 0.1, scale=-1e-9),
        fit(("A", "B"), 0.1, scale=float("nan")),
        fit(("A", "B"), 0.1, need=float("nan")),
        fit(("A", "B"), 0.1, shift=0.0119),
    ):
        verdict = judge(bad, 0.012)
        assert verdict.gate.startswith("B: ")
        assert (verdict.score, verdict.accepted) == (0.0, False)
        assert verdict.rank > good.rank


def result(*trials: tuple[Kind, tuple[str, ...], Fit | None]) -> ScanResult:
    profile = Profile(np.arange(3.0), np.ones(3))
    scan = Scan(Path("A_0p6-B_0p4--8min.xy"), {"A": 0.6, "B": 0.4}, profile, profile)
    judged = tuple(Trial(kind, names, judge(found, 0.012) if found else None) for kind, names, found in trials)
    return ScanResult(scan, judged, SurrogateScore(0.2, 0.9, 0.0, 0.1), 1, 66, 0.2)


def test_the_report_counts_who_is_first_and_who_is_accepted() -> None:
    true = ("true", ("A", "B"), fit(("A", "B"), 0.15))
    winning = result(true, ("replacement", ("A", "C"), fit(("A", "C"), 0.3)), ("omission", ("A",), fit(("A",), 0.175)))
    losing = result(true, ("same size", ("C", "D"), fit(("C", "D"), 0.14)), ("addition", ("A", "B", "C"), None))
    figures = report([winning, losing])
    assert figures["same_size_first"] == figures["extra_allowed_first"] == 0.5
    assert figures["accepted_true"] == 1.0
    assert figures["false_accepts"] == 0.5
    assert figures["fraction_mae"] == figures["fraction_worst"] == pytest.approx(0.1)
    assert figures["failed_refinements"] == 1
    assert figures["missed"] == ["same_size_first", "extra_allowed_first", "false_accepts", "fraction_mae"]
    assert figures["mixtures"][1]["falsely_accepted"] == [{"kind": "same size", "phases": ["C", "D"]}]


def test_a_true_set_that_fails_is_neither_first_nor_accepted() -> None:
    figures = report([result(("true", ("A", "B"), None), ("replacement", ("A", "C"), fit(("A", "C"), 0.3)))])
    assert (figures["same_size_first"], figures["accepted_true"]) == (0.0, 0.0)
    assert figures["fraction_worst"] == 0.6


def test_every_bar_can_be_missed() -> None:
    good = {**AT_LEAST, **AT_MOST}
    assert missed(good) == []
    for name in good:
        worse = good[name] - 0.01 if name in AT_LEAST else good[name] + 0.01
        assert missed({**good, name: worse}) == [name]
        assert missed({**good, name: float("nan")}) == [name]


def test_a_mixtures_name_means_the_candidate_of_that_name_or_the_only_one_of_its_formula(
    shipped: dict[str, Structure],
) -> None:
    assert resolve("TiO2", shipped) == "TiO2"
    foreign = {"LaOH3": shipped["La(OH)3"], "TiO2_141": shipped["TiO2"], "TiO2_136": shipped["TiO2-rutile"]}
    assert resolve("La(OH)3", foreign) == "LaOH3"
    for name, reason in (("TiO2", "several structures"), ("UO2", "no structure of UO2"), ("?", "no formula")):
        with pytest.raises(UnreadablePattern, match=reason):
            resolve(name, foreign)


def test_scans_are_found_by_their_names_and_the_rest_is_listed(tmp_path: Path, shipped: dict[str, Structure]) -> None:
    text = "\n".join(f"{10 + k / 10:.1f} 5" for k in range(900))
    for name in ("NiO_0p5-ZnO_0p5--2min.xy", "NiO_0p5-ZnO_0p5--8min.xy", "NiO_0p6-ZnO_0p4.xy", "product.xy", "a.png"):
        (tmp_path / name).write_text(text)
    (tmp_path / "UO2_0p5-ZnO_0p5.xy").write_text(text)
    (tmp_path / "NiO_0p1-ZnO_0p9.xy").write_text("x")
    scans, skipped = find_scans(tmp_path, shipped, quick=False)
    assert len(scans) == 3
    assert scans[0].weighed == {"NiO": 0.5, "ZnO": 0.5}
    assert set(skipped) == {"product.xy", "UO2_0p5-ZnO_0p5.xy", "NiO_0p1-ZnO_0p9.xy"}
    quick, _ = find_scans(tmp_path, shipped, quick=True)
    assert {scan.path.name for scan in quick} == {"NiO_0p5-ZnO_0p5--8min.xy", "NiO_0p6-ZnO_0p4.xy"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no weighed mixture"):
        find_scans(tmp_path / "empty", shipped, quick=False)


def test_every_single_replacement_is_tried_once() -> None:
    found = replacements(("A", "B"), dict.fromkeys("ABCDE"))  # type: ignore[arg-type]
    assert len(found) == len(set(found)) == 6
    assert all(len({"A", "B"} & set(each)) == 1 for each in found)


def test_the_true_phase_under_another_name_is_no_wrong_set(shipped: dict[str, Structure]) -> None:
    pool = {name: shipped[name] for name in ("NiO", "ZnO", "TiO2")}
    validator = Validator({**pool, "bunsenite": shipped["NiO"].under("bunsenite")}, RefinementPool(1), quick=True)
    assert validator._is_wrong(("TiO2", "ZnO"), ("NiO", "ZnO"))
    assert not validator._is_wrong(("bunsenite", "ZnO"), ("NiO", "ZnO"))
    assert not validator._is_wrong(("NiO", "bunsenite"), ("NiO", "ZnO"))
    assert not validator._is_wrong(("bunsenite", "NiO", "ZnO"), ("NiO", "ZnO"))


SLEEPER = """
import os, time
with open({path!r}, "a") as pids:
    pids.write(f"{{os.getpid()}} ")
time.sleep(600)
"""
DRIVER = """
import numpy as np, sys
from pathlib import Path
from reflux_tasks.xrd import refinement
from reflux_tasks.xrd.profile import Profile
from reflux_tasks.xrd.refinement import RefinementOptions
from reflux_tasks.xrd.refinement_pool import RefinementPool
refinement.SCRIPT = Path(sys.argv[1])
profile = Profile(np.arange(10.0, 30.0, 0.1), np.ones(200))
with RefinementPool(2, Path(sys.executable)) as pool:
    list(pool.refine_all(profile, [[], [], [], []], RefinementOptions()))
"""


def test_ctrl_c_ends_the_refinements_under_way(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SLEEPER.format(path=str(tmp_path / "pids")))
    # a group of its own: only the driver gets the signal, as with kill -INT
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "script.py")], start_new_session=True, stderr=subprocess.PIPE
    )
    pids = _wait_for_pids(tmp_path / "pids", 2)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(30) != 0
    assert driver.stderr is not None
    assert b"KeyboardInterrupt" in driver.stderr.read()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert len((tmp_path / "pids").read_text().split()) == 2, "no further refinement starts"


def _wait_for_pids(path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and len(found := path.read_text().split()) >= count:
            return [int(pid) for pid in found]
        time.sleep(0.02)
    raise AssertionError("the refinements did not start")


def test_a_failed_refinement_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text("import sys, json; json.load(sys.stdin); raise SystemError('broke')")
    monkeypatch.setattr(refinement_module, "SCRIPT", tmp_path / "script.py")
    profile = Profile(np.arange(10.0, 30.0, 0.1), np.ones(200))
    with RefinementPool(2, Path(sys.executable)) as pool:
        found = list(pool.refine_all(profile, [[], []], RefinementOptions()))
    assert [type(each) for each in found] == [VerificationError] * 2
