"""Keys of answers: equal where the grade is the same, different where it is not."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_tasks.canonical import FORMS, formula_set_key, reaction_key, reduced_formula, text_form
from reflux_tasks.xrd.label import LabelVerifier

PHASES = ("Ti O n2 sg136", "Ti O n2 sg141", "Ni O sg225", "O Ni sg225", "Zn O sg186", "Zn sg194")
PAYLOAD = {"phases": [{"label": PHASES[0]}, {"label": PHASES[2]}], "elements": ["Ti", "O", "Ni", "Zn"]}


def answer(phases):
    return " <sep> ".join(phases) + " <eos>"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(PHASES), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_phases_means_nothing_and_their_number_does(phases, random):
    shuffled = random.sample(phases, len(phases))
    padded = answer(shuffled).replace(" ", "  \n") + " <pad> <pad>"
    assert text_form("parts", padded) == text_form("parts", answer(phases))
    assert text_form("parts", answer([*phases, phases[0]])) != text_form("parts", answer(phases))


@settings(max_examples=80, derandomize=True, deadline=None)
@given(*[st.lists(st.sampled_from([*PHASES, "Ti", "sg0", "<eos>", "<pad>"]), max_size=3)] * 2)
def test_answers_with_one_key_have_one_grade(first, second):
    verifier = LabelVerifier()
    texts = [answer(first), answer(second)]
    if len({verifier.canonical(PAYLOAD, text) for text in texts}) == 1:
        grades = verifier.grade(PAYLOAD, texts)
        assert len({(grade.outcome, grade.reward) for grade in grades}) == 1


def test_the_surrogate_grades_phases_alike_in_any_order(task):
    verifier = task.verifiers["surrogate"]
    labels = [" ".join(phase.label) for phase in task.phases[:40]]
    for index in range(3):
        payload = task.truth(task.problem("heldout", index))
        phases = [phase["label"] for phase in payload["phases"]] + labels[index * 3 : index * 3 + 2]
        allowed = [phase for phase in phases if {*phase.split()} & {*payload["elements"]}]
        for some in (phases, allowed, [phases[0], *allowed]):
            texts = [answer(some), answer(some[::-1]), answer(sorted(some))]
            assert len({verifier.canonical(payload, text) for text in texts}) == 1
            assert len({(grade.outcome, grade.reward) for grade in verifier.grade(payload, texts)}) == 1


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.text(max_size=60))
def test_no_text_breaks_a_form_and_a_canonical_text_is_its_own(text):
    for form in FORMS[:3]:
        once = text_form(form, text)
        assert text_form(form, once) == once


def test_an_answer_that_a_parser_may_refuse_keeps_its_own_words():
    for text in (
        "Zn sg194 <sep> Ni O sg225",
        "Zn sg194 <sep> Ni O sg225 <eos> Zn",
        "Zn <sep> Ni <eos>" + " <pad>" * 126,
    ):
        assert text_form("parts", text) == text
    assert text_form("exact", " a  b\n") == " a  b\n"
    assert text_form("words", " a  b\n") == "a b"


def test_a_formula_is_its_elements_in_smallest_whole_amounts():
    assert reduced_formula("Ti2O4") == ("O2Ti1", 2)
    assert reduced_formula("Ca(OH)2")[0] == reduced_formula("CaO2H2")[0] == "Ca1H2O2"
    assert reduced_formula("Li0.5CoO2")[0] == "Co2Li1O4"
    assert reduced_formula("Co")[0] != reduced_formula("CO")[0]


@pytest.mark.parametrize(
    "text", ["", "2", "(", "()2", "Ti)", "TiO2x", "Ti0", "2TiO2", "Ti2 3", "[" * 9 + "Ti", "Ti1000001"]
)
def test_what_is_no_formula_is_refused(text):
    with pytest.raises(ValueError, match=r"formula|amount"):
        reduced_formula(text)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.text(alphabet=string.ascii_letters + string.digits + "()[].", max_size=20))
def test_no_text_breaks_the_formula_parser(text):
    try:
        name, units = reduced_formula(text)
    except ValueError:
        return
    assert reduced_formula(name) == (name, 1)
    assert units > 0


def test_reactions_are_equal_up_to_order_units_and_a_common_factor():
    written = reaction_key({"BaCO3": 1, "TiO2": 1}, {"BaTiO3": 1, "CO2": 1})
    assert reaction_key({"Ti2O4": 1.5, "BaCO3": 3}, {"CO2": 3, "BaTiO3": 3}) == written
    assert reaction_key({"BaCO3": 1, "TiO2": 2}, {"BaTiO3": 1, "CO2": 1}) != written
    assert reaction_key({"BaTiO3": 1, "CO2": 1}, {"BaCO3": 1, "TiO2": 1}) != written
    assert formula_set_key(["TiO2", "BaCO3", "Ti2O4"]) == formula_set_key(["BaCO3", "TiO2"])
    for wrong in ({}, {"TiO2": 0}, {"TiO2": float("nan")}, {"TiO2": -1}):
        with pytest.raises(ValueError, match=r"amount|substances|Invalid"):
            reaction_key(wrong, {})
