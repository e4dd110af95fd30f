"""Model folders: what we write is what we and transformers read, and every damage is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from reflux_model.config import ModelConfig, config_from_hf
from reflux_model.creation import CONFIG_FILE, WEIGHTS_FILE, create_folder, fourier_rows
from reflux_model.errors import ModelFolderError, ParameterMismatchError, UnsupportedModelError
from reflux_model.folder import INDEX_FILE, TOKENIZER_FILE, load_folder, save_folder
from reflux_model.parameters import initial_parameters
from reflux_model.shapes import num_parameters

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_size=8,
    max_positions=32,
    eos_token_id=1,
    pad_token_id=0,
)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        create_folder(tmp_path / name, CONFIG, seed)
    first, same, other = ((tmp_path / name / WEIGHTS_FILE).read_bytes() for name in "abc")
    assert first == same
    assert first != other


def test_a_created_folder_is_a_llama_for_transformers(tmp_path: Path) -> None:
    create_folder(tmp_path, CONFIG, 5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(CONFIG)


def test_a_folder_round_trips(tmp_path: Path) -> None:
    params = initial_parameters(CONFIG, 2)
    save_folder(tmp_path, CONFIG, params)
    config, loaded = load_folder(tmp_path)
    assert config == CONFIG
    assert list(loaded) == list(params)
    assert all(torch.equal(loaded[name], params[name]) for name in params)


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    params = initial_parameters(CONFIG, 2)
    save_folder(tmp_path, CONFIG, params)
    (tmp_path / WEIGHTS_FILE).unlink()
    names = list(params)
    parts = {"part-1.safetensors": names[:3], "part-2.safetensors": names[3:]}
    for file, members in parts.items():
        save_file({name: params[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    assert all(torch.equal(tensor, params[name]) for name, tensor in load_folder(tmp_path)[1].items())
    (tmp_path / "part-2.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"part-2\.safetensors is missing"):
        load_folder(tmp_path)


def test_fourier_rows_make_neighbours_similar_and_leave_the_rest(tmp_path: Path) -> None:
    plain = initial_parameters(CONFIG, 2)["model.embed_tokens.weight"]
    create_folder(tmp_path, CONFIG, 2, rows=fourier_rows(4, 30, CONFIG.hidden_size, seed=5, noise=1e-4))
    embedding = load_folder(tmp_path)[1]["model.embed_tokens.weight"]
    assert torch.equal(embedding[:4], plain[:4])
    assert torch.equal(embedding[34:], plain[34:])
    near = torch.cosine_similarity(embedding[10], embedding[11], 0)
    far = torch.cosine_similarity(embedding[10], embedding[25], 0)
    assert near > far + 0.2
    with pytest.raises(ParameterMismatchError, match="do not fit a vocabulary"):
        initial_parameters(CONFIG, 2, rows=fourier_rows(20, 30, CONFIG.hidden_size, seed=5))


def test_creating_a_folder_does_not_import_torch() -> None:
    code = "import sys, reflux_model.creation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_missing_folder_and_each_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist") as caught:
        load_folder(tmp_path / "nowhere")
    assert caught.value.path == str(tmp_path / "nowhere")
    create_folder(tmp_path, CONFIG, 5)
    (tmp_path / WEIGHTS_FILE).rename(tmp_path / "elsewhere")
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is missing"):
        load_folder(tmp_path)
    (tmp_path / CONFIG_FILE).unlink()
    with pytest.raises(ModelFolderError, match=r"config\.json is missing"):
        load_folder(tmp_path)


def test_truncated_weights_and_broken_json_are_named(tmp_path: Path) -> None:
    create_folder(tmp_path, CONFIG, 5)
    weights = tmp_path / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFolderError, match="not a complete safetensors file"):
        load_folder(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(ModelFolderError, match="not valid JSON"):
        load_folder(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("[]")
    with pytest.raises(ModelFolderError, match="JSON object"):
        load_folder(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    params = initial_parameters(CONFIG, 2)
    with pytest.raises(ParameterMismatchError, match=r"model\.norm\.weight is missing"):
        save_folder(tmp_path, CONFIG, {name: t for name, t in params.items() if name != "model.norm.weight"})
    with pytest.raises(ParameterMismatchError, match="has shape"):
        save_folder(tmp_path, CONFIG, params | {"model.norm.weight": torch.ones(3)})
    with pytest.raises(ParameterMismatchError, match="does not belong"):
        save_folder(tmp_path, CONFIG, params | {"lm_head.weight": torch.ones(3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"num_hidden_layers": 0}, "at least 1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, object], message: str) -> None:
    base = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(base | change)


def test_a_tokenizer_of_another_model_is_refused_by_its_ids(tmp_path: Path) -> None:
    create_folder(tmp_path, CONFIG, 5)
    fitting = {"model": {"vocab": {"a": 0, "b": CONFIG.vocab_size - 1}}, "added_tokens": [{"id": 2, "content": "c"}]}
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(fitting))
    load_folder(tmp_path)
    for tokenizer in (
        {"model": {"vocab": {"a": CONFIG.vocab_size}}},
        {"model": {"vocab": [["a", -1.0]] * (CONFIG.vocab_size + 1)}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": CONFIG.vocab_size, "content": "b"}]},
    ):
        (tmp_path / TOKENIZER_FILE).write_text(json.dumps(tokenizer))
        with pytest.raises(ModelFolderError, match=f"ids up to {CONFIG.vocab_size}.*another model"):
            load_folder(tmp_path)
