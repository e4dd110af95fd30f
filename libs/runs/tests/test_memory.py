import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_runs.config import RunConfig
from reflux_runs.errors import ConfigError
from reflux_runs.load import load_document
from reflux_runs.memory import HostMemory, Shape, gib, predict, shape_of
from reflux_runs.preflight import Catalog, preflight

GIB = 1 << 30
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def shape(config: RunConfig) -> Shape:
    found = shape_of(config)
    assert found is not None
    return found


def test_the_shape_comes_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    found = shape(load_document({"model": {"path": str(tmp_path)}}))
    assert found.parameters == pytest.approx(134_515_008, rel=1e-3)
    assert found.adapter_parameters(16, "attention+mlp") == pytest.approx(4_884_480, rel=1e-6)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"vocab_size": "many"}', '{"num_attention_heads": 0}'])
def test_a_folder_that_cannot_be_read_is_not_predicted(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert shape_of(load_document({"model": {"path": str(tmp_path)}})) is None


sizes = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(1, 64).map(lambda n: 128 * n),
        "num_layers": st.integers(2, 64),
        "intermediate_size": st.integers(16, 8192),
        "num_heads": st.just(4),
    }
)


@given(sizes, st.integers(1, 512))
def test_more_of_anything_never_needs_less(size: dict[str, int], prompt_tokens: int) -> None:
    def peaks(prompt: int, **changes: object) -> tuple[int, int]:
        config = load_document({"model": size | changes})
        memory = predict(config, shape(config), prompt)
        return memory.learner_bytes, memory.engine_bytes

    learner, engine = peaks(prompt_tokens)
    for more in ({"num_layers": size["num_layers"] + 1}, {"intermediate_size": size["intermediate_size"] + 1}):
        wider = peaks(prompt_tokens, **more)
        assert wider[0] > learner
        assert wider[1] > engine
    longer = peaks(prompt_tokens + 100)
    assert longer[0] >= learner
    assert longer[1] >= engine
    assert peaks(prompt_tokens, gradient_checkpointing=True)[0] <= learner


def refusal(document: dict[str, object], host: HostMemory) -> str:
    with pytest.raises(ConfigError) as refused:
        preflight(load_document(document), Catalog(host=host))
    return str(refused.value)


def test_a_model_that_no_node_holds_is_refused_with_the_sum_and_the_ways_out() -> None:
    text = refusal({"model": {"hidden_size": 8192, "num_layers": 80}}, HostMemory(64 * GIB, 640 * GIB))
    for part in ("model.hidden_size", "the learner needs about", "gradient and moments", "64.00 GiB", "lora_rank"):
        assert part in text


def test_more_engines_than_the_nodes_hold_are_refused_with_a_number_that_fits() -> None:
    document: dict[str, object] = {"fleet": {"engines": 100}}
    host = HostMemory(16 * GIB, 16 * GIB)
    text = refusal(document, host)
    assert "fleet.engines" in text
    fitting = int(text.split("or less")[0].split()[-1])
    for engines in (fitting, fitting + 1):
        config = load_document({"fleet": {"engines": engines}})
        least = predict(config, shape(config), 64, least=True)
        assert (least.run_bytes <= host.total_bytes) == (engines == fitting), gib(least.run_bytes)
    preflight(load_document({"fleet": {"engines": fitting}}), Catalog(host=host))


def test_nothing_is_refused_when_the_nodes_memory_is_not_known() -> None:
    preflight(load_document({"model": {"hidden_size": 8192, "num_layers": 80}}), Catalog())
