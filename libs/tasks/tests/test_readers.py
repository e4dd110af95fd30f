import io
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_tasks.xrd import readers
from reflux_tasks.xrd.bounded import OverLimit, call_bounded
from reflux_tasks.xrd.profile import Profile
from reflux_tasks.xrd.readers import UnreadablePattern, cut_and_rebin, mixture_truth, named_phases, read_pattern

XRDML = """\ufeff<?xml version="1.0"?>
<xrdMeasurements xmlns="http://www.xrdml.com/XRDMeasurement/2.3"><xrdMeasurement><scan><dataPoints>
<positions axis="Omega" unit="deg"><startPosition>5</startPosition><endPosition>10</endPosition></positions>
<positions axis="2Theta" unit="deg"><startPosition>10.0</startPosition><endPosition>{end}</endPosition></positions>
{more}<{tag} unit="{unit}">{counts}</{tag}></dataPoints></scan></xrdMeasurement></xrdMeasurements>"""
BOMB = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">{}]><x>&i;</x>'.format(
    "".join(f'<!ENTITY {name} "{f"&{before};" * 10}">' for before, name in zip("abcdefgh", "bcdefghi", strict=True))
)


def xrdml(counts: str, tag: str = "counts", end: str = "20.0", more: str = "", unit: str = "counts") -> str:
    return XRDML.format(tag=tag, counts=counts, end=end, more=more, unit=unit)


@pytest.mark.parametrize("tag", ["counts", "intensities"])
def test_an_xrdml_file_gives_counts_over_two_theta(tmp_path: Path, tag: str) -> None:
    (tmp_path / "a.xrdml").write_text(xrdml(" ".join(map(str, range(101))), tag), "utf-8")
    profile = read_pattern(tmp_path / "a.xrdml")
    np.testing.assert_allclose(profile.two_theta, np.linspace(10, 20, 101))
    np.testing.assert_array_equal(profile.counts, np.arange(101))


def test_attenuated_and_timed_intensities_become_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.xrdml"
    factors = "<beamAttenuationFactors>" + "1 " * 50 + "3 " * 51 + "</beamAttenuationFactors>"
    path.write_text(xrdml("2 " * 101, more=factors), "utf-8")
    assert read_pattern(path).counts.sum() == 2 * 50 + 6 * 51
    path.write_text(
        xrdml("2 " * 101, "intensities", more="<commonCountingTime>4</commonCountingTime>", unit="cps"), "utf-8"
    )
    assert read_pattern(path).counts.sum() == 8 * 101


def test_columns_of_text_give_counts_over_two_theta(tmp_path: Path) -> None:
    rows = [f"{10 + k / 10:.1f} {k}.0" for k in range(200)]
    (tmp_path / "MnO+TiO2.xy").write_text("# comment\n" + "\n".join(rows))
    (tmp_path / "a.csv").write_text("\n".join(row.replace(" ", ", ") for row in rows))
    for name in ("MnO+TiO2.xy", "a.csv"):
        assert read_pattern(tmp_path / name).counts.sum() == sum(range(200))
    assert named_phases(tmp_path / "MnO+TiO2.xy") == ["MnO", "TiO2"]


def test_deviations_give_counts_per_second_the_weight_of_their_counts(tmp_path: Path) -> None:
    counts = np.arange(100, 300)
    rows = [f"{10 + k / 10:.1f} {n / 50:.6f} {np.sqrt(n) / 50:.6f}" for k, n in enumerate(counts)]
    (tmp_path / "a.xye").write_text("\n".join(rows))
    np.testing.assert_allclose(read_pattern(tmp_path / "a.xye").counts, counts, rtol=1e-3)


def bruker_raw4(counts: np.ndarray) -> bytes:
    """A minimal file of Bruker's RAW4.00: header, one range with its 2Theta drive, 4-byte intensities."""
    head = bytearray(160 + 92)
    head[32:46] = b"Locked Coupled"
    struct.pack_into("<ddI", head, 72, 10.0, 0.02, len(counts))
    struct.pack_into("<II", head, 136, 4, 92)
    struct.pack_into("<III", head, 160, 50, 92, 2)
    head[172:178] = b"2Theta"
    struct.pack_into("<d", head, 216, 10.0)
    return b"RAW4.00\0".ljust(61, b"\0") + bytes(head) + counts.astype("<f4").tobytes()


def test_a_bruker_file_is_read_by_the_maintained_reader(tmp_path: Path) -> None:
    pytest.importorskip("geddes", reason="the reader of Bruker files is not installed: pip install geddes")
    counts = np.arange(200, 400)
    (tmp_path / "a.raw").write_bytes(bruker_raw4(counts))
    profile = read_pattern(tmp_path / "a.raw")
    np.testing.assert_array_equal(profile.counts, counts)
    np.testing.assert_allclose(profile.two_theta, 10 + 0.02 * np.arange(200))
    (tmp_path / "a.raw").write_bytes(bruker_raw4(counts)[:-300])
    with pytest.raises(UnreadablePattern, match=r"a\.raw: .*RAW"):
        read_pattern(tmp_path / "a.raw")


@pytest.mark.parametrize(("suffix", "files", "size"), [(".brml", 1, 300 << 20), (".rasx", 3000, 1)])
def test_an_archive_that_unpacks_to_far_more_than_a_scan_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, files: int, size: int
) -> None:
    monkeypatch.setattr(readers, "call_bounded", lambda *_: pytest.fail("unpacked"))
    with zipfile.ZipFile(tmp_path / f"a{suffix}", "w") as archive:
        for number in range(files):
            archive.writestr(f"Experiment{number}/RawData0.xml", b"<a/>")
        archive.filelist[0].file_size = size  # what a bomb says of itself
    with pytest.raises(UnreadablePattern, match=rf"a\{suffix}: {files} files of "):
        read_pattern(tmp_path / f"a{suffix}")


def test_an_archive_of_a_format_newer_than_ours_is_refused_by_name(tmp_path: Path) -> None:
    archive = bytearray(zipped("Experiment0/RawData0.xml", "<RawData/>"))
    archive[archive.index(b"PK\x01\x02") + 6] = 99  # the version that is needed to extract
    (tmp_path / "a.brml").write_bytes(archive)
    with pytest.raises(UnreadablePattern, match=r"a\.brml: no readable archive: .*9\.9"):
        read_pattern(tmp_path / "a.brml")


VENDOR_FILES = {
    ".raw": lambda: bruker_raw4(np.arange(200, 400)),
    ".brml": lambda: zipped("Experiment0/RawData0.xml", "<RawData><Datum>1,1,10,5,3</Datum></RawData>"),
    ".ras": lambda: "\n".join(["*RAS_INT_START", *(f"{10 + k / 10:.1f} {k} 1" for k in range(200))]).encode(),
}


def zipped(name: str, text: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, text)
    return file.getvalue()


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(sorted(VENDOR_FILES)),
    st.floats(0, 1),
    st.one_of(st.none(), st.binary(min_size=1, max_size=8)),
)
def test_torn_and_damaged_files_of_instruments_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, place: float, damage: bytes | None
) -> None:
    good = VENDOR_FILES[suffix]()
    cut = int(place * len(good))
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    path.write_bytes(good[:cut] if damage is None else good[:cut] + damage + good[cut + len(damage) :])
    try:
        profile = read_pattern(path)
    except UnreadablePattern as error:
        assert str(error).startswith(path.name)  # noqa: PT017 either way is right
    else:
        assert len(profile.counts) >= 100


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.xrdml", "no xml", r"a\.xrdml:1: not XML"),
        ("a.xrdml", "<a>\n<b>\n</a>", r"a\.xrdml:3: not XML"),
        ("a.xrdml", BOMB, "document type"),
        ("a.xrdml", '<!DOCTYPE x SYSTEM "file:///etc/passwd"><x/>', "document type"),
        ("a.xrdml", '<?xml version="1.0" encoding="klingon"?><a/>', "not XML"),
        ("a.xrdml", "<a/>", "no dataPoints"),
        ("a.xrdml", xrdml("1 2 x"), "no counts"),
        ("a.xrdml", xrdml("nan " * 200), "not finite"),
        ("a.xrdml", xrdml("1e300 " * 200), "counts must lie"),
        ("a.xrdml", xrdml("0 " * 200), "no counts at all"),
        ("a.xrdml", xrdml("1 2 3"), "at least 100"),
        ("a.xrdml", xrdml("-1 " * 200), "none negative"),
        ("a.xrdml", xrdml("1 " * 200, end="5"), "rise"),
        ("a.xrdml", xrdml("1 " * 200, end="500"), "180"),
        ("a.xy", "1 2 3 4\n" * 200, r"a\.xy:1: 4 columns"),
        ("a.xy", "1 2\n\n1 2 3\n", r"a\.xy:3: 3 columns, 2 before"),
        ("a.xy", "1 2\nten twenty\n", r"a\.xy:2: 'ten twenty'"),
        ("a.xy", "1 2\n2 nan\n", r"a\.xy:2: .* not finite"),
        ("a.xye", "1 2\n2 inf\n", r"a\.xye:2: .* not finite"),
        ("a.xy", "", "no numbers"),
        ("a.png", "", "no reader"),
    ],
)
def test_files_that_are_no_patterns_are_named_with_line_and_reason(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(UnreadablePattern, match=message):
        read_pattern(tmp_path / name)


@pytest.mark.parametrize("data", ["10 1\n".encode("utf-16"), b"10 1\n\xff\xfe 3\n", os.urandom(4096)])
def test_a_wrong_encoding_is_named_by_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.xy").write_bytes(data)
    with pytest.raises(UnreadablePattern, match=r"a\.xy:[0-9]+: "):
        read_pattern(tmp_path / "a.xy")


@pytest.mark.parametrize("suffix", readers.SUFFIXES)
def test_a_hundred_megabytes_are_refused_unread(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(UnreadablePattern, match="100 MiB, at most 64 MiB"):
        read_pattern(path)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([".xrdml", ".xy", ".xye"]),
    st.one_of(st.binary(max_size=300), st.integers(0, 900), st.tuples(st.integers(0, 900), st.binary(max_size=8))),
)
def test_torn_and_damaged_files_are_refused_or_read_and_nothing_else_happens(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, damage: bytes | int | tuple[int, bytes]
) -> None:
    whole = xrdml("5 " * 120) if suffix == ".xrdml" else "\n".join(f"{10 + k / 10:.1f} 5" for k in range(120))
    good = whole.encode()
    if isinstance(damage, bytes):
        data = damage
    elif isinstance(damage, int):
        data = good[:damage]
    else:
        data = good[: damage[0]] + damage[1] + good[damage[0] + len(damage[1]) :]
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    path.write_bytes(data)
    try:
        profile = read_pattern(path)
    except UnreadablePattern as error:
        refusal = str(error)
    else:
        assert np.isfinite(profile.counts).all()
        assert len(profile.counts) >= 100
        return
    assert refusal.startswith(path.name)


def test_the_truth_of_a_mixture_is_its_file_name() -> None:
    path = Path("V2O5_0p2012-La(OH)3_0p5004-MnCO3_0p3013--8min.xrdml")
    assert mixture_truth(path) == {"V2O5": 0.2012, "La(OH)3": 0.5004, "MnCO3": 0.3013}
    assert mixture_truth(Path("TiO2-rutile_0p5-ZnO_0p5.xy")) == {"TiO2-rutile": 0.5, "ZnO": 0.5}
    for name in ("GeO2-ZnO_700C_60min.xrdml", "ZnO_0p5-NiO--8min.xrdml", "ZnO_0p5-ZnO_0p5.xy", "ZnO_0p2-NiO_0p3.xy"):
        with pytest.raises(UnreadablePattern, match="mass fractions"):
            mixture_truth(Path(name))


def test_rebinning_keeps_the_counts() -> None:
    profile = Profile(np.linspace(10, 100, 9001), np.ones(9001))
    small = cut_and_rebin(profile, 20, 80, 2500)
    assert len(small.counts) <= 2500
    assert small.counts.sum() == pytest.approx(6001, abs=3)
    assert small.two_theta[0] == pytest.approx(20, abs=0.05)
    with pytest.raises(UnreadablePattern, match="only 0 points"):
        cut_and_rebin(profile, 110, 120, 2500)


@pytest.mark.parametrize("name", ["TiO2+MnO.xy", "LiMnO2.xy"])
def test_the_autoxrd_patterns_can_be_read(xrd_data: Path, name: str) -> None:
    profile = read_pattern(xrd_data / "measured_autoxrd" / name)
    assert len(profile.counts) == 9001
    assert profile.two_theta[0] == pytest.approx(10)


def test_a_bounded_call_gives_its_value_its_error_or_its_end() -> None:
    assert call_bounded(lambda number: number + 1, 2) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        call_bounded(int, "x")
    with pytest.raises(ValueError, match="more than 64 MiB"):
        call_bounded(lambda: bytes(10**9), memory_mib=64)
    with pytest.raises(OverLimit, match="1 s of processor time"):
        call_bounded(lambda: all(iter(lambda: True, False)), cpu_seconds=1)
    with pytest.raises(OverLimit, match="status"):
        call_bounded(os._exit, 3)
