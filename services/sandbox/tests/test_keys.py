"""Which answers are equal work: text forms in the service, forms of a verifier's own in a real child."""

import contextlib
import dataclasses

import pytest
import pytest_asyncio

from reflux_sandbox import keys
from reflux_sandbox.isolation.base import VerifierInfo
from reflux_sandbox.isolation.process import ProcessIsolation
from reflux_sandbox.jobs import JobSpec, answer_keys
from reflux_sandbox.keys import AnswerKeys

pytestmark = pytest.mark.asyncio(loop_scope="module")
OWN = VerifierInfo(
    name="test/own", version="1", fidelity="rule", trusted=True, cost_seconds=0.001, canonical_form="own"
)


def spec(*answers, **changes):
    given = {
        "verifier": "test/own",
        "version": "1",
        "fidelity": "rule",
        "payload": "{}",
        "answers": answers,
        "deadline_seconds": 20.0,
        "run": "run",
        "traceparent": "",
    } | changes
    return JobSpec(**given)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answer_keys_of(isolation_options):
    isolation = ProcessIsolation(**isolation_options(graders="canonical_graders", idle_target=1, most_children=2))
    await isolation.start()
    made = AnswerKeys(isolation, 64 << 20)

    async def keys_of(*answers, info=OWN):
        return answer_keys(await made.filled(spec(*answers), info))

    yield keys_of
    await isolation.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(keys, "_CHILD_SECONDS", 60.0)


async def test_a_form_of_its_own_makes_answers_equal_and_no_text_can_pass_for_it(answer_keys_of):
    first, same, other, plain = await answer_keys_of("bca", "abc", "abd", "a b")
    assert first == same
    assert len({first, other, plain}) == 3
    words = dataclasses.replace(OWN, canonical_form="exact")
    assert (await answer_keys_of("abc", info=words))[0] != first
    assert (await answer_keys_of("a  b"))[0] == plain
    assert not {first, plain} & set(await answer_keys_of("own\0abc", "words\0a b"))


async def test_a_crash_or_a_hang_of_the_form_leaves_each_answer_to_itself(answer_keys_of, monkeypatch):
    crashed = await answer_keys_of("bca", "abc", "crash")
    assert len(set(crashed)) == 3
    monkeypatch.setattr(keys, "_CHILD_SECONDS", 0.5)
    assert len(set(await answer_keys_of("bca", "abc", "hang"))) == 3


async def test_a_form_that_is_no_text_is_not_taken(answer_keys_of):
    assert len(set(await answer_keys_of("half", "abc", "half"))) == 2


async def test_a_creation_waits_for_a_child_only_so_long(monkeypatch):
    made = AnswerKeys(None, 0)  # it gets no further than the wait
    monkeypatch.setattr(keys, "_ROOM_SECONDS", 0.01)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(keys._MOST_CHILDREN):
            await stack.enter_async_context(made._room)
        filled = await made.filled(spec("a b", "a  b"), OWN)
    assert filled.canonical == ("words\0a b",) * 2


async def test_text_forms_need_no_child():
    made = AnswerKeys(None, 0)
    for form, count in (("exact", 3), ("words", 2), ("parts", 1)):
        info = dataclasses.replace(OWN, canonical_form=form)
        filled = await made.filled(spec("A <sep> B <eos>", "A  <sep> B <eos>", "B <sep> A <eos>"), info)
        assert len(set(answer_keys(filled))) == count


async def test_verifier_version_and_payload_are_part_of_every_key():
    made = [spec("a"), spec("a", verifier="test/b"), spec("a", version="2"), spec("a", payload='{"x":1}')]
    assert len({answer_keys(each)[0] for each in made}) == 4
