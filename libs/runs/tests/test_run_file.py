import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux.trainer.v1 import run_pb2 as pb
from reflux_runs.config import RlConfig, RunConfig
from reflux_runs.document import document
from reflux_runs.errors import ConfigError
from reflux_runs.load import dump_text, load_document, load_file, load_text
from reflux_runs.preflight import Catalog, derive, preflight
from reflux_runs.translate import from_message, to_message

CATALOG = Catalog(
    tasks=["xrd-phase-id"], verifiers={"xrd-phase-id": ["label", "surrogate"]}, prompt_tokens={"xrd-phase-id": 19}
)


@pytest.mark.parametrize(
    ("text", "key", "value", "works"),
    [
        ("[rl]\nstepz = 3", "rl.stepz", 3, "rl.steps"),
        ("[rll]\nsteps = 3", "rll", {"steps": 3}, "rl"),
        ('[rl]\nsteps = "150"', "rl.steps", "150", "150"),
        ("[rl]\nsteps = true", "rl.steps", True, "150"),
        ("[rl]\nsteps = 1.5", "rl.steps", 1.5, "150"),
        ("[rl]\nmax_lag = -1", "rl.max_lag", -1, "1"),
        ("[rl]\nlearning_rate = 0.0", "rl.learning_rate", 0.0, "0.0002"),
        ("[rl]\nlearning_rate = nan", "rl.learning_rate", None, "0.0002"),
        ("rl = 3", "rl", 3, "[rl]"),
        ('[rl]\nalgorithm = "gpro"', "rl.algorithm", "gpro", "grpo"),
        ('[fleet]\ntransport = "nccl"', "fleet.transport", "nccl", "auto"),
        ("[fleet]\nweight_delta = true", "fleet.weight_delta", True, "bfloat16"),
        ("seed = -1", "seed", -1, "0"),
        ('name = "Big Run"', "name", "Big Run", "xrd-phase-id"),
        ("[task]\nmixture_fraction = 2.0", "task.mixture_fraction", 2.0, "0.3"),
        ("[rl]\nbatch_size = 100", "rl.batch_size", 100, "256"),
        ("[rl]\nbatch_size = 128", "rl.batch_size", 128, "256"),
        ("[rl]\nsamples_per_group = 1", "rl.samples_per_group", 1, "8"),
        (
            '[rl]\nalgorithm = "reinforce_pp"\nrelease = "surrogate"\nverifier = "full"',
            "rl.release",
            "surrogate",
            "full",
        ),
        ("[rl]\nmax_tokens = 60", "rl.max_tokens", 60, "45 or less"),
        ("[rl]\nramp_steps = 500", "rl.ramp_steps", 500, "15"),
        ('[rl]\nverifier = "lable"', "rl.verifier", "lable", '"label"'),
        ("[rl]\noversampling = 2.0", "rl.oversampling", 2.0, "1.0"),
        ("[rl]\nverify_seconds = 600.0", "rl.no_progress_seconds", 180.0, "900"),
        ('[task]\nname = "go"', "task.name", "go", '"xrd-phase-id"'),
        ("[model]\nhidden_size = 100\nnum_heads = 3", "model.hidden_size", 100, "102"),
        ('[model]\npath = "/nonexistent"', "model.path", "/nonexistent", "make demo-smollm2"),
        ('[task]\nprompt = "chat"', "task.prompt", "chat", "model.path"),
        ("deterministic = true\n[rl]\nmax_lag = 0\n[model]\nlora_rank = 8", "model.lora_rank", 8, "0"),
        (
            '[model]\nlora_rank = 8\nlora_targets = "attention+mlp+unembed"',
            "model.lora_targets",
            "attention+mlp+unembed",
            "attention+mlp",
        ),
        ("[evaluation]\nprompts = 10", "evaluation.surrogate_prompts", 64, "10"),
        (
            '[rl]\nkl_coefficient = 0.1\nkl_in = "reward"\nrelease = "surrogate"\nverifier = "label"',
            "rl.release",
            "surrogate",
            '"full", or rl.kl_in = "loss"',
        ),
        ("rl.steps = = 3", "file", "", "rl.steps = 150"),
    ],
)
def test_a_bad_run_file_is_refused_with_key_value_and_a_value_that_would_work(text, key, value, works):
    with pytest.raises(ConfigError) as caught:
        preflight(load_text(text), CATALOG)
    refusal = caught.value.refusals[0]
    assert refusal.key == key
    assert value is None or refusal.value == value
    assert works in refusal.works
    assert key in str(caught.value)
    assert "would work" in str(caught.value)


def test_an_algorithm_without_groups_takes_one_answer_per_prompt():
    text = '[rl]\nalgorithm = "reinforce_pp"\nsamples_per_group = 1\ngroups_per_step = 256'
    assert preflight(load_text(text), CATALOG).samples_per_step == 256


def test_all_refusals_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        load_text('[rl]\nstepz = 3\nmax_lag = -1\n[fleet]\ntransport = "x"')
    assert {refusal.key for refusal in caught.value.refusals} == {"rl.stepz", "rl.max_lag", "fleet.transport"}


def test_a_missing_file_is_a_refusal_not_a_traceback(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_file(tmp_path / "run.toml")


def test_an_empty_run_file_is_the_recipe():
    config = load_text("")
    assert config == RunConfig()
    counts = preflight(config, CATALOG)
    assert (counts.samples_per_step, counts.window_prompts, counts.rl_samples) == (256, 64, 38_400)
    assert counts.evaluation_prompts == 800 + 2 * 64
    assert counts.checkpoints == 14
    assert 0 < counts.largest_batch_bytes < 1 << 20
    assert "samples per step: 256" in counts.lines()


def test_a_batch_that_no_learner_takes_is_refused_with_one_that_it_does():
    document = {"rl": {"groups_per_step": 60_000, "samples_per_group": 1000}, "warmup": {"batch_size": 2_000_000}}
    with pytest.raises(ConfigError, match="the learner takes 256 MiB") as caught:
        preflight(load_document(document), CATALOG)
    works = {refusal.key: int(refusal.works.split()[0]) for refusal in caught.value.refusals}
    assert set(works) == {"rl.groups_per_step", "warmup.batch_size"}
    document["rl"]["groups_per_step"], document["warmup"]["batch_size"] = works.values()
    assert preflight(load_document(document), CATALOG).largest_batch_bytes <= 256 << 20


def test_each_stage_ends_with_a_checkpoint():
    config = load_document({"warmup": {"steps": 3}, "rl": {"steps": 4}, "checkpoint": {"every_steps": 2}})
    assert derive(config).checkpoints == 2 + 2


def test_the_written_toml_reads_back_to_the_same_configuration():
    config = RunConfig(name="a-b", seed=7, rl=RlConfig(steps=3, batch_size=256))
    assert load_text(dump_text(config)) == config


def test_an_incomplete_model_folder_is_refused_by_the_file_that_it_lacks(tmp_path):
    def lacks(name):
        with pytest.raises(ConfigError, match=f"has no {name}"):
            preflight(load_document({"model": {"path": str(tmp_path)}}), CATALOG)

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        lacks(name)
        (tmp_path / name).write_text("{}")
    lacks("model.safetensors")
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(shards))
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    lacks("model-2.safetensors")
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    preflight(load_document({"model": {"path": str(tmp_path)}}), CATALOG)


def test_unset_fields_of_a_message_take_the_defaults_and_zero_is_not_unset():
    assert from_message(pb.RunConfig()) == RunConfig()
    message = pb.RunConfig(warmup=pb.WarmupConfig(steps=0))
    assert from_message(message).warmup.steps == 0


@given(
    st.builds(
        RlConfig,
        steps=st.integers(1, 1000),
        max_lag=st.integers(0, 9),
        learning_rate=st.floats(1e-6, 1.0),
        temperature=st.floats(0.1, 2.0),
        algorithm=st.sampled_from(["grpo", "rloo", "dr_grpo"]),
    ),
    st.integers(0, 2**62 - 1),
)
def test_a_configuration_survives_the_wire(rl, seed):
    config = RunConfig(rl=rl, seed=seed)
    assert from_message(to_message(config)) == config


def test_every_field_of_the_message_exists_in_the_run_file_and_back():
    def names(descriptor):
        return {field.name: names(field.message_type) if field.message_type else None for field in descriptor.fields}

    def fields(model):
        return {
            name: fields(field.annotation) if hasattr(field.annotation, "model_fields") else None
            for name, field in model.model_fields.items()
        }

    assert names(pb.RunConfig.DESCRIPTOR) == fields(RunConfig)


def test_the_documentation_of_the_run_file_is_fresh():
    page = Path(__file__).parents[3] / "docs" / "run-file.md"
    assert page.read_text() == document(), "run: python -m reflux_runs.document > docs/run-file.md"


def test_derived_counts_follow_an_evaluation_only_at_the_ends():
    assert derive(load_document({"evaluation": {"every_steps": 0}})).evaluation_prompts == 800
