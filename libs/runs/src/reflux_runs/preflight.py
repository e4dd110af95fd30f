"""Checks that cross fields, and the counts that follow from a run file: done before anything starts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from reflux_runs.config import RunConfig
from reflux_runs.errors import ConfigError, Refusal
from reflux_runs.memory import HostMemory, Memory, predict, refuse, shape_of

FRESH_CONTEXT_TOKENS = 64
"""Context of a freshly initialised model: prompt and answer of the example fit twice."""
TASK_GROUP = "reflux.tasks"
EXTERNAL = "external/"
"""Prefix of verifiers whose jobs are completed by an outside caller."""
MAX_BATCH_MIB = 256
"""Largest request that a learner takes, in MiB; one batch is one request."""
_TOKEN_BYTES = 3
"""Most bytes of a token id on the wire (vocabularies up to 2 million)."""
_LOGPROB_BYTES = 4
_MESSAGE_BYTES = 32
"""Bound of what a completion or a prompt costs beside its tokens."""


@dataclass(frozen=True)
class Catalog:
    """What is installed where the check runs. Empty `tasks` means unknown: the trainer checks again."""

    tasks: Sequence[str] = ()
    verifiers: Mapping[str, Sequence[str]] | None = None
    """Verifier names per task."""
    prompt_tokens: Mapping[str, int] | None = None
    """Longest prompt per task, in tokens."""
    host: HostMemory | None = None
    """Memory of the nodes; None means unknown: nothing is refused for want of it."""


@dataclass(frozen=True)
class Counts:
    """What a run file amounts to."""

    samples_per_step: int
    window_prompts: int
    """Most prompts that are open at once."""
    rl_prompts: int
    """Prompts that are trained on, filtered ones not counted."""
    rl_samples: int
    warmup_examples: int
    optimizer_steps: int
    evaluation_prompts: int
    """Held-out prompts of the main set over all evaluations."""
    checkpoints: int
    largest_batch_bytes: int
    """Bound of the largest request to the learner."""
    memory: Memory | None
    """Predicted peaks; None when the model's folder cannot be read here."""

    def lines(self) -> list[str]:
        """One line per count for people."""
        counts = [f"{name.replace('_', ' ')}: {value:,}" for name, value in vars(self).items() if name != "memory"]
        return counts + (self.memory.lines() if self.memory else [])


def installed_catalog() -> Catalog:
    """Tasks by their entry points, without importing them."""
    return Catalog(tasks=sorted({entry.name for entry in entry_points(group=TASK_GROUP)}))


def derive(config: RunConfig, prompt_tokens: int = FRESH_CONTEXT_TOKENS) -> Counts:
    """Counts of a configuration that passed `preflight`; `prompt_tokens` is the length of the longest prompt."""
    rl, every, shape = config.rl, config.checkpoint.every_steps, shape_of(config)
    between = (rl.steps - 1) // config.evaluation.every_steps if config.evaluation.every_steps else 0
    return Counts(
        samples_per_step=rl.groups_per_step * rl.samples_per_group,
        window_prompts=math.ceil((rl.max_lag + 1) * rl.groups_per_step * rl.oversampling),
        rl_prompts=rl.steps * rl.groups_per_step,
        rl_samples=rl.steps * rl.groups_per_step * rl.samples_per_group,
        warmup_examples=config.warmup.steps * config.warmup.batch_size,
        optimizer_steps=config.warmup.steps + rl.steps,
        evaluation_prompts=2 * config.evaluation.prompts + between * config.evaluation.intermediate_prompts,
        checkpoints=-(-config.warmup.steps // every) + -(-rl.steps // every) if every else 0,
        largest_batch_bytes=max(_batch_bytes(config, prompt_tokens).values()),
        memory=predict(config, shape, prompt_tokens) if shape else None,
    )


def preflight(config: RunConfig, catalog: Catalog | None = None) -> Counts:
    """Refuses what cannot work, all at once, with ConfigError; returns the derived counts."""
    catalog = installed_catalog() if catalog is None else catalog
    prompt_tokens = (catalog.prompt_tokens or {}).get(config.task.name, FRESH_CONTEXT_TOKENS)
    refusals = [
        *_batch(config),
        *_deterministic(config),
        *_lora(config),
        *_task(config, catalog),
        *_model(config, catalog),
        *_fleet(config),
        *_message_size(config, prompt_tokens),
        *(refuse(config, prompt_tokens, catalog.host) if catalog.host else []),
    ]
    if refusals:
        raise ConfigError(tuple(refusals))
    return derive(config, prompt_tokens)


def _batch_bytes(config: RunConfig, prompt_tokens: int) -> dict[str, int]:
    """Bound of one batch's bytes by the key that sets the number of its prompts."""
    rl, prompt = config.rl, prompt_tokens * _TOKEN_BYTES + _MESSAGE_BYTES
    # With a KL in the reward, a token has a reference's log-prob, too, and may have an advantage of its own.
    numbers = 3 if rl.kl_coefficient and rl.kl_in == "reward" else 1
    answer = rl.max_tokens * (_TOKEN_BYTES + numbers * _LOGPROB_BYTES) + _MESSAGE_BYTES
    return {
        "rl.groups_per_step": rl.groups_per_step * (prompt + rl.samples_per_group * answer),
        "warmup.batch_size": config.warmup.batch_size * (prompt + answer),
    }


def _message_size(config: RunConfig, prompt_tokens: int) -> list[Refusal]:
    found, most = [], MAX_BATCH_MIB << 20
    for key, size in _batch_bytes(config, prompt_tokens).items():
        section, _, name = key.partition(".")
        count = getattr(getattr(config, section), name)
        if size > most:
            reason = f"one batch could take {size >> 20} MiB, the learner takes {MAX_BATCH_MIB} MiB"
            found.append(Refusal(key, count, reason, f"{max(1, count * most // size)} or less"))
    return found


def _deterministic(config: RunConfig) -> list[Refusal]:
    if not config.deterministic:
        return []
    needed = {
        "rl.max_lag": (config.rl.max_lag, 0),
        "rl.staleness": (config.rl.staleness, "wait"),
        "rl.release": (config.rl.release, "full"),
        "rl.curriculum": (config.rl.curriculum, "none"),
        "fleet.weight_dtype": (config.fleet.weight_dtype, "float32"),
    }
    reason = "makes a run depend on timing or rounding, and deterministic = true excludes that"
    return [Refusal(key, value, reason, json.dumps(works)) for key, (value, works) in needed.items() if value != works]


def _lora(config: RunConfig) -> list[Refusal]:
    model = config.model
    if not model.lora_rank:
        return []
    if config.deterministic:
        reason = (
            "replicas merge an adapter that the learner adds, which rounds otherwise; deterministic = true excludes it"
        )
        return [Refusal("model.lora_rank", model.lora_rank, reason, "0, or deterministic = false")]
    if config.rl.algorithm == "gae":
        reason = "the critic's head belongs to the model, and an adapter leaves the model as it is"
        return [Refusal("rl.algorithm", "gae", reason, '"reinforce_pp", which needs no critic, or model.lora_rank = 0')]
    if "unembed" in model.lora_targets and _ties_embeddings(model.path):
        reason = "the model ties its output head to the embedding, so that there is no lm_head.weight to adapt"
        return [Refusal("model.lora_targets", model.lora_targets, reason, '"attention+mlp"')]
    return []


def _ties_embeddings(path: str) -> bool:
    """Fresh models do; a folder that cannot be read is refused elsewhere."""
    if not path:
        return True
    try:
        return bool(json.loads((Path(path) / "config.json").read_text()).get("tie_word_embeddings", False))
    except (OSError, ValueError, AttributeError):
        return False


def _batch(config: RunConfig) -> list[Refusal]:
    rl, found = config.rl, []
    size = rl.groups_per_step * rl.samples_per_group
    if rl.batch_size is not None and rl.batch_size % rl.samples_per_group:
        reason = f"is not divisible into groups of rl.samples_per_group = {rl.samples_per_group}"
        found.append(Refusal("rl.batch_size", rl.batch_size, reason, str(size)))
    elif rl.batch_size not in (None, size):
        reason = f"is not rl.groups_per_step * rl.samples_per_group = {rl.groups_per_step} * {rl.samples_per_group}"
        found.append(Refusal("rl.batch_size", rl.batch_size, reason, str(size)))
    needed = {"leave_one_out": 3, "reinforce_pp": 1, "gae": 1}.get(rl.algorithm, 2)
    if rl.samples_per_group < needed:
        reason = f"{rl.algorithm} compares answers of one prompt and needs at least {needed}"
        found.append(Refusal("rl.samples_per_group", rl.samples_per_group, reason, "8"))
    if rl.algorithm in ("reinforce_pp", "gae") and rl.release == "surrogate":
        reason = f'is corrected group by group, and algorithm = "{rl.algorithm}" compares over the whole step'
        found.append(Refusal("rl.release", rl.release, reason, '"full"'))
    if rl.kl_coefficient and rl.kl_in == "reward" and rl.release == "surrogate":
        reason = 'corrects rewards without a KL, and kl_in = "reward" puts one into them'
        found.append(Refusal("rl.release", rl.release, reason, '"full", or rl.kl_in = "loss"'))
    if rl.oversampling > 1 and rl.staleness != "drop":
        reason = f'asks for prompts that staleness = "{rl.staleness}" would wait for: only "drop" discards'
        found.append(Refusal("rl.oversampling", rl.oversampling, reason, "1.0"))
    if rl.verify_deadline_seconds >= rl.no_progress_seconds:
        reason = (
            f"is not more than rl.verify_seconds = {rl.verify_deadline_seconds:g}: one verification could end the run"
        )
        proposal = f"{1.5 * rl.verify_deadline_seconds:g}"
        found.append(Refusal("rl.no_progress_seconds", rl.no_progress_seconds, reason, proposal))
    if rl.ramp_steps > rl.steps:
        reason = f"is longer than rl.steps = {rl.steps}"
        found.append(Refusal("rl.ramp_steps", rl.ramp_steps, reason, str(rl.steps // 10)))
    for key in ("surrogate_prompts", "full_prompts", "intermediate_prompts"):
        value = getattr(config.evaluation, key)
        if value > config.evaluation.prompts:
            reason = f"is more than evaluation.prompts = {config.evaluation.prompts}"
            found.append(Refusal(f"evaluation.{key}", value, reason, str(config.evaluation.prompts)))
    return found


def _task(config: RunConfig, catalog: Catalog) -> list[Refusal]:
    name = config.task.name
    if catalog.tasks and name not in catalog.tasks:
        return [
            Refusal("task.name", name, "no such task is installed", " or ".join(f'"{task}"' for task in catalog.tasks))
        ]
    known = (catalog.verifiers or {}).get(name, ())
    named = {"rl.verifier": config.rl.verifier}
    if config.rl.release == "surrogate":
        named["rl.surrogate"] = config.rl.surrogate
        if config.rl.rule:
            named["rl.rule"] = config.rl.rule
    return [
        Refusal(key, verifier, f"task {name} has no such verifier", " or ".join(f'"{each}"' for each in known))
        for key, verifier in named.items()
        if known and verifier not in known and not verifier.startswith(EXTERNAL)
    ]


def _model(config: RunConfig, catalog: Catalog) -> list[Refusal]:
    model = config.model
    if model.path:
        context, refusal = _context_of(Path(model.path))
        if refusal:
            return [refusal]
    else:
        context = FRESH_CONTEXT_TOKENS
        if config.task.prompt != "words":
            reason = "needs a language model, and a fresh one knows the task's words only"
            return [Refusal("task.prompt", config.task.prompt, reason, '"words", or model.path')]
        if model.hidden_size % (2 * model.num_heads):
            reason = f"does not divide into model.num_heads = {model.num_heads} heads of even size"
            fitting = max(1, round(model.hidden_size / (2 * model.num_heads))) * 2 * model.num_heads
            return [Refusal("model.hidden_size", model.hidden_size, reason, str(fitting))]
    room = context - (catalog.prompt_tokens or {}).get(config.task.name, 1)
    if config.rl.max_tokens > room:
        reason = f"prompt and answer would exceed the model's context of {context} tokens"
        return [Refusal("rl.max_tokens", config.rl.max_tokens, reason, f"{max(room, 1)} or less")]
    return []


def _fleet(config: RunConfig) -> list[Refusal]:
    if config.fleet.shared and not (config.model.lora_rank and config.model.path):
        reason = "is for LoRA adapters on one model folder: set model.lora_rank and model.path"
        return [Refusal("fleet.shared", config.fleet.shared, reason, '""')]
    if config.fleet.weight_delta and config.fleet.weight_dtype != "bfloat16":
        reason = "every step changes nearly all float32 weights, their difference is as large as they are"
        return [Refusal("fleet.weight_delta", True, reason, 'fleet.weight_dtype = "bfloat16"')]
    return []


def _context_of(folder: Path) -> tuple[int, Refusal | None]:
    missing = _missing_file(folder)
    if missing:
        reason = f"the folder has no {missing}" if folder.is_dir() else "there is no such folder"
        works = 'a folder in Hugging Face layout (`make demo-smollm2` makes one of SmolLM2), or "" for a fresh model'
        return 0, Refusal("model.path", str(folder), reason, works)
    try:
        document = json.loads((folder / "config.json").read_text())
        return int(document.get("max_position_embeddings", 2048)), None
    except (ValueError, AttributeError, TypeError):
        return 0, Refusal("model.path", str(folder), "its config.json cannot be read", "a complete folder")


def _missing_file(folder: Path) -> str:
    """The first file that a model folder lacks; of weights in shards, those that the index names."""
    index = folder / "model.safetensors.index.json"
    weights = ["model.safetensors"]
    if index.is_file() and not (folder / weights[0]).is_file():
        try:
            weights = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{index.name} that can be read"
    files = ("config.json", "tokenizer.json", "tokenizer_config.json", *weights)
    return next((name for name in files if not (folder / name).is_file()), "")
