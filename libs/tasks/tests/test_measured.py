import json
from pathlib import Path

import numpy as np
import pytest

from reflux_tasks.xrd import measured
from reflux_tasks.xrd.profile import Profile
from reflux_tasks.xrd.readers import (
    UnreadablePattern,
    cut_and_rebin,
    mixture_truth,
    named_phases,
    read_pattern,
)
from reflux_tasks.xrd.structures import candidates

XRDML = """\ufeff<?xml version="1.0"?>
<xrdMeasurements xmlns="http://www.xrdml.com/XRDMeasurement/2.3"><xrdMeasurement><scan><dataPoints>
<positions axis="Omega" unit="deg"><startPosition>5</startPosition><endPosition>10</endPosition></positions>
<positions axis="2Theta" unit="deg"><startPosition>10.0</startPosition><endPosition>{end}</endPosition></positions>
<{tag} unit="counts">{counts}</{tag}></dataPoints></scan></xrdMeasurement></xrdMeasurements>"""


def write_xrdml(path: Path, counts: str, tag: str = "counts", end: str = "20.0") -> Path:
    path.write_text(XRDML.format(tag=tag, counts=counts, end=end), encoding="utf-8")
    return path


@pytest.mark.parametrize("tag", ["counts", "intensities"])
def test_an_xrdml_file_gives_counts_over_two_theta(tmp_path: Path, tag: str) -> None:
    profile = read_pattern(write_xrdml(tmp_path / "a.xrdml", " ".join(map(str, range(101))), tag))
    np.testing.assert_allclose(profile.two_theta, np.linspace(10, 20, 101))
    np.testing.assert_array_equal(profile.counts, np.arange(101))


def test_an_xy_file_gives_counts_over_two_theta(tmp_path: Path) -> None:
    path = tmp_path / "MnO+TiO2.xy"
    path.write_text("# comment\n" + "\n".join(f"{10 + k / 10:.1f} {k}.0" for k in range(200)))
    assert read_pattern(path).counts.sum() == sum(range(200))
    assert named_phases(path) == ["MnO", "TiO2"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.xrdml", "no xml", "not XML"),
        ("a.xrdml", "<a/>", "no dataPoints"),
        ("a.xrdml", XRDML.format(tag="counts", counts="1 2 x", end="20"), "no counts"),
        ("a.xrdml", XRDML.format(tag="counts", counts="1 2 3", end="20"), "at least 100"),
        ("a.xrdml", XRDML.format(tag="counts", counts="-1 " * 200, end="20"), "none negative"),
        ("a.xrdml", XRDML.format(tag="counts", counts="1 " * 200, end="5"), "rise"),
        ("a.xy", "1 2 3\n" * 200, "3 columns"),
        ("a.xy", "ten twenty\n", "not two columns"),
        ("a.raw", "", "no reader"),
    ],
)
def test_files_that_are_no_patterns_are_named_with_the_reason(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UnreadablePattern, match=message):
        read_pattern(tmp_path / name)


def test_the_truth_of_a_mixture_is_its_file_name() -> None:
    path = Path("V2O5_0p2012-La(OH)3_0p5004-MnCO3_0p3013--8min.xrdml")
    assert mixture_truth(path) == {"V2O5": 0.2012, "La(OH)3": 0.5004, "MnCO3": 0.3013}
    with pytest.raises(UnreadablePattern, match="mass fractions"):
        mixture_truth(Path("GeO2-ZnO_700C_60min.xrdml"))


def test_rebinning_keeps_the_counts() -> None:
    profile = Profile(np.linspace(10, 100, 9001), np.ones(9001))
    small = cut_and_rebin(profile, 20, 80, 2500)
    assert len(small.counts) <= 2500
    assert small.counts.sum() == pytest.approx(6001, abs=3)
    assert small.two_theta[0] == pytest.approx(20, abs=0.05)


def test_every_single_replacement_is_tried_once() -> None:
    pool = ["A", "B", "C", "D", "E"]
    sets = measured.trials(["A", "B"], pool, surplus=True)
    kinds = [trial.kind for trial in sets]
    assert sets[0].names == ("A", "B")
    assert {kind: kinds.count(kind) for kind in kinds} == {"true": 1, "replacement": 6, "omission": 2, "addition": 3}
    assert len({trial.names for trial in sets}) == len(sets)
    assert len(measured.trials(["A", "B"], pool, surplus=False)) == 7


def test_candidate_structures_have_sensible_cells(xrd_data: Path) -> None:
    pool = candidates(xrd_data)
    assert len(pool) == 12
    assert pool["MnCO3"].hall == '-R 3 2"c', "rhombohedral axes would lose c"
    assert pool["V2O5"].cell[2] == pytest.approx(4.368), "the plates lie along c"
    for name, structure in pool.items():
        assert structure.name == name
        assert all(site[4] >= 1 for site in structure.sites)


def test_candidates_without_reference_files_are_the_published_ones(tmp_path: Path) -> None:
    assert set(candidates(tmp_path)) == {"ZnO", "NiO", "In2O3", "V2O5", "MnCO3", "Bi2O3"}


@pytest.mark.parametrize("name", ["TiO2+MnO.xy", "LiMnO2.xy"])
def test_the_autoxrd_patterns_can_be_read(xrd_data: Path, name: str) -> None:
    profile = read_pattern(xrd_data / "measured_autoxrd" / name)
    assert len(profile.counts) == 9001
    assert profile.two_theta[0] == pytest.approx(10)


def test_a_weighed_mixture_prefers_its_true_phases(objcryst: Path, xrd_data: Path) -> None:
    [path] = (xrd_data / "measured").glob("TiO2_*-ZnO_*--2min.xrdml")
    report = measured.evaluate_scan(path, candidates(xrd_data), workers=2, max_wrong=3)
    assert report["true_set_has_best_r_wp"]
    assert report["wrong_sets"]["replacement"] == 3
    assert report["r_wb"] < 0.20
    assert report["goodness"] < 4
    assert report["score"] > 0.5
    assert all(abs(report["refined"][name] - weighed) < 0.15 for name, weighed in report["weighed"].items())


def test_the_command_says_what_it_cannot_do(objcryst: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured.main(["--data", str(tmp_path)]) == 2
    assert "measured" in capsys.readouterr().err
    (tmp_path / "measured").mkdir()
    write_xrdml(tmp_path / "measured" / "UO2_0p5-ZnO_0p5--2min.xrdml", "1 " * 200)
    write_xrdml(tmp_path / "measured" / "product--2min.xrdml", "1 " * 200)
    assert measured.main(["--data", str(tmp_path), "--scans", "2min", "--out", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert "no structure of UO2" in report["skipped"]["UO2_0p5-ZnO_0p5--2min.xrdml"]
    assert len(report["skipped"]) == 2
    assert report["scans"] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scan", ["8min", "2min"])
def test_every_true_set_beats_every_wrong_set(objcryst: Path, xrd_data: Path, scan: str) -> None:
    summary = measured.evaluate_measured(xrd_data, scans=[scan], surplus=True)["summary"]
    assert summary["scans"] == 8
    assert summary["true_set_has_best_r_wp"] == 8
    assert summary["true_set_has_best_score"] == 8
    assert summary["mean_mass_fraction_error"] <= 0.04
