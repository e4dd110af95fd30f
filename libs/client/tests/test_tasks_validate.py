"""The command on a simulated mixture: output, figures, status; on the measured ones in `make soak`."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from reflux_client.commands.tasks import tasks

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[3]
BARS = {
    "same_size_first", "extra_allowed_first", "accepted_true", "false_accepts", "fraction_mae", "fraction_worst",
    "mean_cpu_s", "max_cpu_s", "surrogate_ms",
}  # fmt: skip


def validate(*arguments: object) -> Result:
    return CliRunner().invoke(tasks, ["validate", "xrd", *map(str, arguments)])


@pytest.fixture(scope="module")
def objcryst() -> None:
    from reflux_tasks.verify import VerifierUnavailable
    from reflux_tasks.xrd.refinement import system_python

    try:
        system_python()
    except VerifierUnavailable as error:
        pytest.skip(f"Rietveld refinement: {error}")


@pytest.fixture
def candidates(tmp_path: Path) -> Path:
    from reflux_tasks.xrd.structure_files import SHIPPED

    folder = tmp_path / "candidates"
    folder.mkdir()
    for name in ("NiO", "ZnO", "TiO2"):
        shutil.copy(SHIPPED / f"{name}.cif", folder)
    return folder


def write_mixture(folder: Path, candidates: Path, name: str) -> None:
    """NiO and ZnO with equal highest lines, whatever the name says they weigh."""
    from reflux_tasks.xrd.profile import pseudo_voigt_sum, strained_lines
    from reflux_tasks.xrd.structure_files import read_folder

    structures = read_folder(candidates)[0]
    two_theta = np.arange(12, 92, 0.03)
    total = np.full_like(two_theta, 100.0)
    for phase in ("NiO", "ZnO"):
        inverse_2d, intensity = strained_lines(structures[phase].phase, np.ones(3))
        widths = np.full(len(intensity), 0.15)
        total += 900 * pseudo_voigt_sum(two_theta, inverse_2d, intensity, widths=widths, eta=0.5)
    counts = np.random.default_rng(0).poisson(total)
    rows = [f"{angle:.2f} {count}" for angle, count in zip(two_theta, counts, strict=True)]
    folder.mkdir()
    (folder / name).write_text("\n".join(rows))


def test_a_folder_of_mixtures_is_judged_and_a_missed_bar_is_status_one(
    objcryst: None, tmp_path: Path, candidates: Path
) -> None:
    write_mixture(tmp_path / "data", candidates, "NiO_0p9-ZnO_0p1--8min.xy")
    (tmp_path / "data" / "torn_0p5-ZnO_0p5--8min.xy").write_text("1 2\nthree\n")
    out = tmp_path / "out.json"
    result = validate("--data", tmp_path / "data", "--candidates", candidates, "--quick", "--out", out)
    report = json.loads(result.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert set(report["bars"]) == BARS
    assert set(report) >= BARS
    assert (report["same_size_first"], report["extra_allowed_first"], report["accepted_true"]) == (1.0, 1.0, 1.0)
    assert report["false_accepts"] == 0.0
    # the name lies about the fractions, which is what the figures and the status must say
    assert {"fraction_mae", "fraction_worst"} <= set(report["missed"])
    assert result.exit_code == 1
    assert "missed: fraction_mae" in result.stderr
    [row] = report["mixtures"]
    assert row["weighed"] == {"NiO": 0.9, "ZnO": 0.1}
    assert row["refined_sets"] == {"true": 1, "replacement": 2, "addition": 1}
    assert row["surrogate"]["rank"] == 1
    assert "torn" in report["skipped"]["torn_0p5-ZnO_0p5--8min.xy"]
    assert (report["quick"], report["candidates"]) == (True, ["NiO", "TiO2", "ZnO"])


def test_a_laboratory_checks_an_answer_about_its_own_pattern(objcryst: None, tmp_path: Path, candidates: Path) -> None:
    write_mixture(tmp_path / "data", candidates, "sample.xy")
    pattern = tmp_path / "data" / "sample.xy"

    def check(*phases: str) -> Result:
        return CliRunner().invoke(tasks, ["check", "xrd", str(pattern), *phases, "--candidates", str(candidates)])

    right, short = check("NiO=0.5", "ZnO=0.5"), check("NiO")
    assert right.exit_code == 0
    refined = {name: phase["mass_fraction"] for name, phase in json.loads(right.stdout)["phases"].items()}
    off = max(abs(fraction - 0.5) for fraction in refined.values())
    assert json.loads(right.stdout)["fractions"] == pytest.approx(min(1, max(0, (0.15 - off) / 0.1)), abs=0.01)
    assert json.loads(right.stdout)["accepted"] is True
    assert set(json.loads(right.stdout)["phases"]) == {"NiO", "ZnO"}
    assert (short.exit_code, json.loads(short.stdout)["accepted"]) == (1, False)
    pattern.write_text("1 2\nthree\n")
    assert "sample.xy:2" in str(check("NiO").exception)


def test_what_cannot_be_validated_is_an_error_with_the_reason(tmp_path: Path, candidates: Path) -> None:
    (tmp_path / "empty").mkdir()
    without_data = validate("--data", tmp_path / "empty", "--candidates", candidates)
    assert "no weighed mixture" in str(without_data.exception)
    without_structures = validate("--data", tmp_path / "empty", "--candidates", tmp_path / "empty")
    assert "no CIF or POSCAR" in str(without_structures.exception)
    assert validate("--data", tmp_path / "nowhere").exit_code == 2
    early = validate("--data", tmp_path / "empty", "--candidates", candidates, "--out", tmp_path / "nowhere" / "x.json")
    assert "there is no folder" in str(early.exception)
    (tmp_path / "empty" / "torn.cif").write_text("data_")
    unusable = validate("--data", tmp_path / "empty", "--candidates", tmp_path / "empty")
    assert "torn.cif:1: the cell" in str(unusable.exception)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_weighed_mixtures_meet_every_bar(objcryst: None) -> None:
    folder = Path(os.environ.get("REFLUX_DATA", ROOT.parent / "shared" / "data")) / "xrd" / "measured"
    if not folder.is_dir():
        pytest.skip(f"measured X-ray data: {folder} is not there; set REFLUX_DATA")
    result = validate("--data", folder, "--quick")
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["scans"] == 8
    assert report["missed"] == []
    assert result.exit_code == 0
