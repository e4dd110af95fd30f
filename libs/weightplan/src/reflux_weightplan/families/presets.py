"""Well-known models and pairs of layouts, for people who try a plan before they have a cluster. Sizes are those of the
published `config.json` files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reflux_weightplan.families.layouts import Parallelism, fsdp, fsdp_experts, parallel
from reflux_weightplan.families.registry import model_of
from reflux_weightplan.mesh import Place
from reflux_weightplan.spec import SpecLayout

CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "vocab_size": 151936,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
    },
}

RANKS_PER_HOST, RANKS_PER_DOMAIN = 4, 72
"""A GB200 NVL72 rack: 18 trays of 4 GPUs, each with a network adapter of its own."""


@dataclass(frozen=True)
class Preset:
    """A trainer's layout and an engine's layout of one model."""

    about: str
    make: Callable[[], tuple[SpecLayout, SpecLayout]]


def places(ranks: int, side: str) -> tuple[Place, ...]:
    """Ranks of one side over the trays of racks."""
    found: list[Place] = []
    for rank in range(ranks):
        host, domain = f"{side}-{rank // RANKS_PER_HOST}", f"{side}-rack-{rank // RANKS_PER_DOMAIN}"
        found.append(Place(host, domain, domain, f"nic{rank % RANKS_PER_HOST}"))
    return tuple(found)


def _deepseek(replicas: int) -> tuple[SpecLayout, SpecLayout]:
    model, sizes = model_of(CONFIGS["deepseek-v3"]), Parallelism(replicas=replicas, expert_groups=16, tensor=8)
    source = fsdp_experts(model, 4, 64, places=places(256, "trainer"))
    return source, parallel(model, sizes, places=places(sizes.ranks, "engine"))


def _small(name: str, shards: int, sizes: Parallelism) -> tuple[SpecLayout, SpecLayout]:
    model = model_of(CONFIGS[name])
    source = fsdp(model, shards, places=places(shards, "trainer"))
    return source, parallel(model, sizes, places=places(sizes.ranks, "engine"))


PRESETS: dict[str, Preset] = {
    "deepseek-v3-256-to-128": Preset("FSDP 4 x EP 64 to one replica of EP 128, TP 8", lambda: _deepseek(1)),
    "deepseek-v3-256-to-512": Preset("FSDP 4 x EP 64 to four replicas of EP 128, TP 8", lambda: _deepseek(4)),
    "qwen3-30b-a3b-16-to-32": Preset(
        "FSDP 16 to four replicas of EP 8, TP 4",
        lambda: _small("qwen3-30b-a3b", 16, Parallelism(replicas=4, expert_groups=2, tensor=4)),
    ),
    "llama-3.1-8b-8-to-8": Preset(
        "FSDP 8 to two replicas of TP 4", lambda: _small("llama-3.1-8b", 8, Parallelism(replicas=2, tensor=4))
    ),
    "smollm2-135m-2-to-2": Preset(
        "FSDP 2 to two replicas of one rank", lambda: _small("smollm2-135m", 2, Parallelism(replicas=2))
    ),
}
