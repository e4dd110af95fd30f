"""New weights on running vLLM and SGLang servers: they take effect, the old ones come back, and no request is lost."""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from learner import Learner, Weights, folder_weights, perturbed
from servers import MODEL_ID, ask, sglang, vllm
from stack import Stack, stack
from talk import HANG_GUARD_SECONDS, PROMPT, Said, Sglang, Vllm

from reflux.common.v1.common_pb2 import SamplingParams
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb
from reflux.inference_gateway.v1.inference_gateway_service_pb2_grpc import InferenceGatewayServiceStub
from reflux_transfer.client.publisher import PublishAborted, Published

ENGINES: dict[str, tuple[Callable, Callable, str]] = {
    "vllm": (vllm, Vllm, "ucx"),
    "sglang": (sglang, Sglang, "ucx"),
    "sglang-distributed": (sglang, Sglang, "shm"),
}
"""Adapter's name of the engine -> how to start it, how to talk to it, by what the learner offers memory."""

ASKED = os.environ.get("REFLUX_TEST_ENGINES_ONLY", "").split() or list(ENGINES)

IN_FLIGHT_TOKENS = 120
FOLLOWED_TOKENS = 6
GROUP_TOKENS = 8
ROUNDS = 3


class Case:
    """One engine with its stack, and two sets of weights."""

    def __init__(self, name: str, engine: Vllm | Sglang, stack: Stack, learner: Learner, old: Weights) -> None:
        self.name, self.engine, self.stack, self.learner = name, engine, stack, learner
        self.old, self.new = old, perturbed(old)
        self.published = 0

    def publish(self, weights: Weights, *, flip: bool = False) -> Published:
        """The next version; checks that the engine and its fingerprint followed."""
        self.published += 1
        done = asyncio.run(self.learner.publish(weights, self.published, flip=flip))
        # A killed adapter is listed until the broker has given it up, with the version that it had.
        (replica,) = [replica for replica in done.replicas if replica.epoch == done.epoch]
        assert replica.fingerprint == self.learner.fingerprint
        assert self.engine.version() == str(self.published)
        return done


@contextmanager
def running_case(name: str, folder: Path, model: Path) -> Iterator[Case]:
    start, talk, transport = ENGINES[name]
    old = folder_weights(model)
    with (
        start(folder, model) as url,
        stack(folder, name, url, model) as around,
        around.learner(old, transport) as learner,
    ):
        yield Case(name, talk(url), around, learner, old)


@pytest.fixture(scope="module", params=ASKED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Case]:
    with running_case(request.param, tmp_path_factory.mktemp(request.param), model) as case:
        yield case


def test_outputs_follow_the_weights_and_come_back_bit_for_bit(case: Case, figures: dict[str, list[float]]) -> None:
    loaded = case.engine.says()
    case.publish(case.old)
    assert case.engine.says() == _as(loaded, case), "the same weights by another way say something else"
    for _ in range(ROUNDS):
        for weights, follows in ((case.new, False), (case.old, True)):
            (replica,) = case.publish(weights).replicas
            figures.setdefault(f"{case.name.replace('-', '_')}_pause_s", []).append(replica.pause_ms / 1000)
            assert (case.engine.says() == _as(loaded, case)) is follows


def test_a_request_in_flight_finishes_under_the_new_weights(case: Case) -> None:
    case.publish(case.old)
    undisturbed = case.engine.says(IN_FLIGHT_TOKENS)
    stream, heard = case.engine.streams(IN_FLIGHT_TOKENS), []
    heard.append(next(stream))
    case.publish(case.new)
    before = len(heard)
    heard += stream
    assert before < len(heard), "the request was over before the weights changed"
    said = _joined(heard, case)
    assert len(said.token_ids) == IN_FLIGHT_TOKENS
    assert said.token_ids[:1] == undisturbed.token_ids[:1]
    assert said.token_ids != undisturbed.token_ids, "the rest was said by the old weights"
    # Where the two part, the new weights speak; from there on they say what they say to the same beginning.
    apart = next(i for i, (a, b) in enumerate(zip(said.token_ids, undisturbed.token_ids, strict=True)) if a != b) + 1
    rest = case.engine.says(FOLLOWED_TOKENS, (*PROMPT, *said.token_ids[:apart]))
    assert said.token_ids[apart : apart + FOLLOWED_TOKENS] == rest.token_ids, "old keys and values were used"
    if isinstance(case.engine, Sglang):
        assert heard[-1].versions == (str(case.published - 1), str(case.published))


def test_a_flipped_bit_never_reaches_the_engine(case: Case) -> None:
    case.publish(case.old)
    before, version = case.engine.says(), case.engine.version()
    with pytest.raises(PublishAborted, match="checksum mismatch"):
        case.publish(case.new, flip=True)
    assert (case.engine.says(), case.engine.version()) == (before, version)
    case.publish(case.new)
    assert case.engine.says().token_ids != before.token_ids


def test_an_adapter_that_dies_in_the_middle_of_a_commit_is_replaced_and_nothing_is_lost(case: Case) -> None:
    case.publish(case.new)
    undisturbed = case.engine.says()
    case.stack.kill_adapter()
    case.engine.half_a_commit(case.name)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(case.engine.says)
        case.stack.start_another_adapter(case.published)
        assert waiting.result(HANG_GUARD_SECONDS) == undisturbed
    case.publish(case.old)
    assert case.engine.says() != undisturbed


def test_the_gateway_routes_to_the_engine_by_its_version(case: Case) -> None:
    case.publish(case.old)
    body = {"model": MODEL_ID, "prompt": list(PROMPT), "max_tokens": 4, "temperature": 0}
    answer = ask(f"{case.stack.gateway_url}/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == 4


def test_the_gateway_draws_groups_with_the_engines_own_tokens_and_log_probs(case: Case) -> None:
    case.publish(case.old)
    said = case.engine.says(GROUP_TOKENS)
    request = pb.GenerateGroupRequest(
        request_id="group",
        model_id=MODEL_ID,
        prompt_token_ids=PROMPT,
        num_samples=2,
        sampling=SamplingParams(max_tokens=GROUP_TOKENS, temperature=0),
        min_version=case.published,
    )
    with grpc.insecure_channel(case.stack.gateway_address) as channel:
        stub = InferenceGatewayServiceStub(channel)
        samples = [answer.sample for answer in stub.GenerateGroup(request, timeout=HANG_GUARD_SECONDS)]
        request.whole_group = True
        (whole,) = stub.GenerateGroup(request, timeout=HANG_GUARD_SECONDS)
    assert sorted(sample.index for sample in samples) == [sample.index for sample in whole.samples] == [0, 1]
    for sample in (*samples, *whole.samples):
        assert tuple(sample.token_ids) == said.token_ids
        # Two rows are computed in another order than one, in bfloat16.
        assert list(sample.logprobs) == pytest.approx(said.logprobs, abs=0.05)
        assert [(span.version, span.start, span.end) for span in sample.versions] == [(case.published, 0, GROUP_TOKENS)]


def _as(said: Said, case: Case) -> Said:
    """What was said before the first publish, as it has to be said now."""
    return Said(said.token_ids, said.logprobs, (str(case.published),)) if said.versions else said


def _joined(parts: list[Said], case: Case) -> Said:
    if isinstance(case.engine, Sglang):
        return parts[-1]
    return Said(tuple(token for part in parts for token in part.token_ids), ())
