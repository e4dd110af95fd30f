"""Shapes that tests and measurements fill with noise."""

from reflux_model.config import ModelConfig

SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    max_positions=8192,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
)
"""As in the `config.json` of HuggingFaceTB/SmolLM2-135M (Apache-2.0)."""

TINY = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    max_positions=96,
    eos_token_id=1,
    pad_token_id=0,
)
"""The smallest with grouped heads; `dataclasses.replace` gives it another vocabulary or length."""
