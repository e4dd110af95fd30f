import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux_tasks.wording import InvalidAnswer
from reflux_tasks.xrd.measured_answers import MeasuredAnswer, parse_measured_answer


@pytest.mark.parametrize(
    ("answer", "phases", "fractions"),
    [
        ("ZnO <eos>", ("ZnO",), None),
        ("ZnO 1 <eos> <pad>", ("ZnO",), (1.0,)),
        ("La(OH)3 0.25 <sep> my oxide .75 <eos>", ("La(OH)3", "my oxide"), (0.25, 0.75)),
        ("0.5 <eos>", ("0.5",), None),
    ],
)
def test_an_answer_names_phases_and_maybe_claims_their_fractions(
    answer: str, phases: tuple[str, ...], fractions: tuple[float, ...] | None
) -> None:
    assert parse_measured_answer(answer) == MeasuredAnswer(phases, fractions, is_cif=False)


def test_structures_claim_by_the_tag_of_the_powder_dictionary() -> None:
    parsed = parse_measured_answer("data_a\n_pd_phase_mass_% 40\nx\ndata_b\n_pd_phase_mass_%  60.0\n")
    assert (parsed.is_cif, parsed.fractions) == (True, (0.4, 0.6))
    assert parse_measured_answer("data_a\ndata_b\n").fractions is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("<eos>", "without a name"),
        ("ZnO <sep> <eos>", "without a name"),
        ("ZnO", "no <eos>"),
        ("ZnO <eos> NiO", "words after"),
        ("ZnO 0.5 <sep> NiO <eos>", "1 of 2 phases"),
        ("ZnO 0.5 <sep> NiO 0.4 <eos>", "add up to 0.9"),
        ("ZnO 1.4 <eos>", "add up to 1.4"),
        ("data_a\n_pd_phase_mass_% 40\n_pd_phase_mass_% 60\n", "two mass fractions"),
        ("data_a\n_pd_phase_mass_% 40\ndata_b\n", "all or none"),
    ],
)
def test_an_answer_against_the_grammar_is_refused_with_its_reason(answer: str, reason: str) -> None:
    with pytest.raises(InvalidAnswer, match=reason):
        parse_measured_answer(answer)


NAMES = st.sampled_from(
    ["ZnO", "NiO", "La(OH)3", "0.3", ".000001", "<sep>", "<eos>", "<pad>", "data_x", "1e9", "nan", "-1", "\n"]
)


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(NAMES, max_size=12).map(" ".join)))
def test_any_text_is_an_answer_or_refused_and_its_words_mean_the_same(text: str) -> None:
    try:
        parsed = parse_measured_answer(text)
    except InvalidAnswer:
        return
    assert parsed.fractions is None or (min(parsed.fractions) >= 0 and len(parsed.fractions) == len(parsed.phases))
    if not parsed.is_cif:
        again = parse_measured_answer(parsed.words)
        assert again.words == parsed.words
        assert sorted(again.phases) == sorted(parsed.phases)
