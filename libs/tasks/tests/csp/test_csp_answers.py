"""Parsing and expanding answers: what is right, and bad input in bounded time."""

import contextlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymatgen.core import Lattice, Structure

from reflux_tasks.chemistry.sanity import structure_problem
from reflux_tasks.csp.answers import MAX_CHARACTERS, expand, parse_answer
from reflux_tasks.wording import InvalidAnswer

RUTILE = "Ti O n2 sg136 4.594 2.959 Ti 0 0 0 O 0.3053 0.3053 0 <eos>"
ROWS = " ".join("Ti 0 0 0" for _ in range(300))

BAD = {
    "empty": ("", "no <eos>"),
    "no end": ("Ti O n2 sg136 4.6 2.9", "no <eos>"),
    "words after the end": (RUTILE + " Ti", "words after"),
    "undecodable bytes": (b"Ti \xff\xfe sg1 <eos>".decode(errors="surrogateescape"), "out of place"),
    "no space group": ("Ti O n2 4.6 2.9 Ti 0 0 0 <eos>", "no space group"),
    "space group 231": ("Ti sg231 4 Ti 0 0 0 <eos>", "no space group"),
    "element twice": ("Ti Ti sg229 3.3 Ti 0 0 0 <eos>", "out of place"),
    "10^6 atoms in the formula": ("Ti n1000000 sg229 3.3 Ti 0 0 0 <eos>", "out of place"),
    "NaN lattice": ("Ti sg229 nan Ti 0 0 0 <eos>", "no cell parameter"),
    "infinite lattice": ("Ti sg229 inf Ti 0 0 0 <eos>", "no cell parameter"),
    "negative lattice": ("Ti sg229 -3.3 Ti 0 0 0 <eos>", "no cell parameter"),
    "zero lattice": ("Ti sg229 0 Ti 0 0 0 <eos>", "zero"),
    "huge number": ("Ti sg229 1e300 Ti 0 0 0 <eos>", "no cell parameter"),
    "long cell": ("Ti sg1 1001 4 4 90 90 90 Ti 0 0 0 <eos>", "outside"),
    "angle of zero": ("Ti sg1 4 4 4 90 90 0 Ti 0 0 0 <eos>", "zero"),
    "angle of 5": ("Ti sg1 4 4 4 90 90 5 Ti 0 0 0 <eos>", "outside"),
    "angles that make no cell": ("Ti sg1 4 4 4 40 40 120 Ti 0 0 0 <eos>", "make no cell"),
    "volume of 0.1": ("Ti sg1 0.5 0.5 0.5 90 90 90 Ti 0 0 0 <eos>", "volume"),
    "too dense": ("Ti sg1 1 1 1.4 90 90 90 Ti 0 0 0 <eos>", "volume per atom"),
    "NaN coordinate": ("Ti sg229 3.3 Ti nan 0 0 <eos>", "no coordinate"),
    "negative occupancy": ("Ti sg229 3.3 Ti 0 0 0 -0.5 <eos>", "sites of four words"),
    "division by zero": ("Ti sg229 3.3 Ti 1/0 0 0 <eos>", "no coordinate"),
    "overlapping atoms": ("Ti O sg1 4 4 4 90 90 90 Ti 0 0 0 O 0.05 0 0 <eos>", "A apart"),
    "duplicate site": ("Ti sg1 4 4 4 90 90 90 Ti 0.1 0 0 Ti 0.1 0 0 <eos>", "A apart"),
    "sites of another formula": ("Ti O n2 sg1 4 4 4 90 90 90 Ti 0 0 0 O 0.5 0.5 0.5 <eos>", "the sites make"),
    "too many sites": (f"Ti sg1 99 99 99 90 90 90 {ROWS} <eos>", "words, at most"),
    "too many atoms": ("Ti sg225 40 Ti 0.11 0.23 0.31 Ti 0.05 0.16 0.42 <eos>", "more than 200 atoms"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_answers_are_refused_with_a_reason(name: str) -> None:
    answer, reason = BAD[name]
    start = time.process_time()
    with pytest.raises(InvalidAnswer, match=re.escape(reason)) as caught:
        expand(parse_answer(answer))
    assert len(str(caught.value)) < 200
    assert time.process_time() - start < 20, "a guard against hanging"


def test_100_megabytes_are_refused_unread() -> None:
    with pytest.raises(InvalidAnswer, match="102000000 characters"):
        parse_answer("Ti " * 34_000_000)


def test_a_list_of_words_is_bounded_as_a_text_is() -> None:
    with pytest.raises(InvalidAnswer, match="characters"):
        parse_answer(["Ti" * MAX_CHARACTERS, "<eos>"])


def test_rutile_is_read_as_the_crystal_that_it_is() -> None:
    structure = expand(parse_answer(RUTILE))
    wanted = Structure.from_spacegroup(
        "P4_2/mnm", Lattice.tetragonal(4.594, 2.959), ["Ti", "O"], [[0, 0, 0], [0.3053, 0.3053, 0]]
    )
    assert structure.matches(wanted, scale=False)
    assert structure.volume == pytest.approx(wanted.volume)


def test_rounded_coordinates_move_onto_the_special_position() -> None:
    """x, 2x of a hexagonal group on a grid of 0.01, and thirds with two decimals."""
    structure = expand(parse_answer("Ni As sg194 3.62 5.03 Ni 0 0 0 As 0.33 0.67 0.25 <eos>"))
    assert len(structure) == 4
    assert min(abs(value % 1 - 1 / 3) for value in structure.frac_coords[2:, 0]) < 1e-9


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["Ti", "O", "n2", "sg136", "sg1", "0", "0.5", "1/3", "90", "4.6", "<eos>", "<pad>", "-0.1", "x"]
        ),
        max_size=24,
    )
)
def test_any_words_end_in_a_crystal_or_a_reason(words: list[str]) -> None:
    with contextlib.suppress(InvalidAnswer):
        assert structure_problem(expand(parse_answer(words))) == ""


def test_a_skewed_cell_hides_no_overlap() -> None:
    lattice = Lattice.from_parameters(5, 5, 60, 90, 90, 10)
    assert structure_problem(Structure(lattice, ["Ti"], [[0, 0, 0]])) == ""
    assert "apart" in structure_problem(Structure(lattice, ["Ti", "Ti"], [[0, 0, 0], [0.5, 0.5, 0]]))
    thin = Lattice.from_parameters(2.8, 2.8, 60, 90, 90, 10)
    assert "apart" in structure_problem(Structure(thin, ["Ti"], [[0, 0, 0]])), "an atom and its own image"
