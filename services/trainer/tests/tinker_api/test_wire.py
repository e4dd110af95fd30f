"""Our messages are the SDK's on the wire, and what they hold is read or refused."""

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as sdk

from reflux.common.v1.common_pb2 import Sample, TokenScores
from reflux.trainer.v1 import tinker_pb2 as ours
from reflux_kit.errors import InvalidRequest
from reflux_trainer.tinker import wire

NAMES = {
    "EncodedTextChunk": "TinkerEncodedText",
    "Chunk": "TinkerChunk",
    "SparseCsr": "TinkerSparseCsr",
    "Tensor": "TinkerTensor",
    "Datum": "TinkerDatum",
    "LossConfigValue": "TinkerLossValue",
    "ForwardBackwardRequest": "TinkerForwardBackwardRequest",
    "BatchedTensor": "TinkerBatchedTensor",
    "ArrayRecord": "TinkerArrayRecord",
    "ForwardBackwardOutput": "TinkerForwardBackwardOutput",
    "TopkLogprobs": "TinkerTopkLogprobs",
    "SampledSequence": "TinkerSampledSequence",
    "SampleResponse": "TinkerSampleResponse",
}
ENUMS = {14: 5}
"""An enum of the SDK may be a number here: both are varints."""


def fields_of(message):
    return {field.name: (field.number, field.type, field.is_repeated) for field in message.fields}


@pytest.mark.parametrize(("theirs", "mine"), NAMES.items())
def test_every_field_of_ours_is_the_sdks(theirs, mine):
    known = fields_of(sdk.DESCRIPTOR.message_types_by_name[theirs])
    for name, (number, kind, repeated) in fields_of(ours.DESCRIPTOR.message_types_by_name[mine]).items():
        assert known[name][0] == number, name
        assert known[name][1] in (kind, 14 if kind == 5 else kind), name
        assert known[name][2] == repeated, name
    nested = sdk.DESCRIPTOR.message_types_by_name[theirs].nested_types_by_name
    for name, entry in ours.DESCRIPTOR.message_types_by_name[mine].nested_types_by_name.items():
        assert fields_of(nested[name]) == fields_of(entry)


def test_number_types_are_the_sdks():
    theirs = {value.name.removeprefix("DTYPE_"): value.number for value in sdk.DType.DESCRIPTOR.values}
    assert theirs == {v.name.removeprefix("TINKER_DTYPE_"): v.number for v in ours.TinkerDtype.DESCRIPTOR.values}


def request(**inputs):
    made = sdk.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    datum = made.data.add()
    for part in ([1, 2], [3]):
        datum.model_input.add().encoded_text.tokens = np.array(part, np.int32).tobytes()
    dtypes = {"i8": sdk.DTYPE_INT64, "f4": sdk.DTYPE_FLOAT32, "u2": sdk.DTYPE_BFLOAT16}
    for name, array in ({"target_tokens": np.array([2, 3, 4])} | inputs).items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = array.tobytes(), dtypes[array.dtype.str[1:]]
        tensor.shape[:] = array.shape
    made.loss_fn_config["clip_low_threshold"] = 0.7
    made.loss_fn_config_v2["clip_high_threshold"].number = 1.5
    return made


def parsed(made):
    return wire.parse_forward_backward(made.SerializeToString())


def test_a_batch_is_read_with_all_its_arrays_and_bounds_become_widths():
    half = (np.array([1.5, -2.0, 0.25], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    read = parsed(request(advantages=half, logprobs=np.array([-1, -2, -3], np.float32)))
    (datum,) = wire.learner_batch(read)
    assert (list(datum.token_ids), list(datum.target_token_ids)) == ([1, 2, 3], [2, 3, 4])
    assert {array.name: list(array.values) for array in datum.arrays} == {
        "advantages": [1.5, -2.0, 0.25],
        "logprobs": [-1, -2, -3],
    }
    loss = wire.loss_config(read)
    assert (loss.name, loss.aggregation) == ("ppo", "sum")
    assert (loss.clip_low, loss.clip_high) == pytest.approx((0.3, 0.5))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"target_tokens": np.array([2, 3])}, "3 input tokens and 2"),
        ({"target_tokens": np.array([2, 3, -4])}, "negative"),
        ({"target_tokens": np.array([[2, 3], [3, 4], [4, 5]])}, "dense vector"),
        ({"weights": np.array([1.0], np.float32)}, "1 entries for 3"),
        ({"clip_low_threshold": np.array([1.0], np.float32)}, "not served"),
    ],
)
def test_arrays_that_do_not_fit_are_named(inputs, words):
    with pytest.raises(InvalidRequest, match=words):
        wire.learner_batch(parsed(request(**inputs)))


@pytest.mark.parametrize("name", ["stable_reinforce", "custom", ""])
def test_losses_that_are_not_served_are_refused_with_those_that_are(name):
    made = request()
    made.loss_fn = name
    with pytest.raises(InvalidRequest, match="cross_entropy"):
        wire.loss_config(parsed(made))


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(InvalidRequest):
        wire.parse_forward_backward(b"\xff\xff\xff")


def test_samples_without_what_was_asked_for_are_an_error_and_not_a_hole():
    wish = wire.PromptWish(3, logprobs=True, last=None, top_prompt=0, top_samples=0)
    with pytest.raises(ValueError, match="no log-probs of prompts"):
        wire.render_samples([Sample(token_ids=[1], logprobs=[-1.0])], wish)
    wish = wire.PromptWish(3, logprobs=False, last=None, top_prompt=0, top_samples=2)
    with pytest.raises(ValueError, match="no alternatives"):
        wire.render_samples([Sample(token_ids=[1], logprobs=[-1.0])], wish)
    top = TokenScores(token_ids=[5, 4, 3], logprobs=[-3.0, -1.0, -2.0])
    raw = wire.render_samples([Sample(token_ids=[1], logprobs=[-1.0], top_logprobs=[top])], wish)
    row = sdk.SampleResponse.FromString(raw).sequences[0].topk_sampled_logprobs
    assert list(np.frombuffer(row.token_ids, np.int32)) == [4, 3]
