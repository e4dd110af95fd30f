import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_tasks.wording import InvalidAnswer
from reflux_tasks.xrd.answers import ELEMENTS, format_answer, parse_answer

counts = st.one_of(st.just([]), st.integers(2, 999).map(lambda n: [f"n{n}"]))
formulas = st.lists(st.sampled_from(sorted(ELEMENTS)), min_size=1, max_size=4, unique=True).flatmap(
    lambda elements: st.lists(counts, min_size=len(elements), max_size=len(elements)).map(
        lambda each: [word for element, count in zip(elements, each, strict=True) for word in (element, *count)]
    )
)
labels = st.tuples(formulas, st.integers(1, 230)).map(lambda parts: (*parts[0], f"sg{parts[1]}"))


@given(st.lists(labels, min_size=1, max_size=4), st.integers(0, 3))
def test_an_answer_survives_formatting_and_parsing(phases: list[tuple[str, ...]], padding: int) -> None:
    words = [*format_answer(phases), *["<pad>"] * padding]
    assert [phase.label for phase in parse_answer(words)] == phases


@given(st.lists(st.one_of(st.sampled_from(["<sep>", "<eos>", "Ti", "n2", "sg136", "t4"]), st.text(max_size=4))))
def test_any_other_words_are_refused_and_nothing_else_happens(words: list[str]) -> None:
    try:
        phases = parse_answer(words)
    except InvalidAnswer:
        return
    assert words[: words.index("<eos>") + 1] == format_answer([phase.label for phase in phases])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<eos>",
        "Ti O n2 sg136",
        "Ti O n2 <eos>",
        "sg136 <eos>",
        "Ti O n2 sg0 <eos>",
        "Ti O n2 sg231 <eos>",
        "Ti O n1 sg136 <eos>",
        "n2 O sg136 <eos>",
        "Ti n2 n3 O sg136 <eos>",
        "Ti Ti sg136 <eos>",
        "Ti O n2 sg136 sg136 <eos>",
        "Ti O n2 sg136 <sep> <eos>",
        "<sep> Ti O n2 sg136 <eos>",
        "Ti O n2 sg136 <eos> Ti",
        "t4 Ti O n2 sg136 <eos>",
        "Xx O n2 sg136 <eos>",
        "TiO2 sg136 <eos>",
        "Ti O n2 sg136 " * 40 + "<eos>",
    ],
)
def test_what_breaks_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(InvalidAnswer):
        parse_answer(text.split())
