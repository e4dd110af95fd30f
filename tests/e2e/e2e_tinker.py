"""A tiny base model behind the stack's Tinker API, and the unmodified SDK against it."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from tokenizers import Tokenizer, models, pre_tokenizers

from reflux_client import connection
from reflux_model.config import ModelConfig
from reflux_model.creation import create_folder

KEY = "tml-end-to-end"
BASE = "tiny-base"
VOCABULARY = 32
_CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_size=16,
    max_positions=64,
    tie_embeddings=False,
)


def offered(folder: Path) -> dict[str, str]:
    """Makes model, tokenizer and keys; returns the environment that offers them. Nothing starts before it is used."""
    base = folder / "base"
    create_folder(base, _CONFIG, seed=5)
    vocabulary = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(base / "tokenizer.json"))
    (base / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (folder / "keys.toml").write_text(f'[[keys]]\nname = "tests"\nsha256 = "{digest}"\n')
    return {
        "REFLUX_TINKER_BASE_MODELS": json.dumps({BASE: str(base)}),
        "REFLUX_TINKER_TOKENIZER_IDS": json.dumps({BASE: str(base)}),
        "REFLUX_TINKER_KEYS_FILE": str(folder / "keys.toml"),
        "REFLUX_TINKER_SAMPLERS_PER_BASE": "1",
        "REFLUX_TINKER_IDLE_SECONDS": "30",
    }


async def with_sdk(folder: Path, use: Callable[[tinker.ServiceClient], Awaitable[Any]]) -> Any:
    """`use(service)` in a thread of its own: parts of the SDK block whoever calls them."""
    record = connection.read_record(folder)
    assert record is not None

    def work() -> Any:
        client = tinker.ServiceClient(base_url=f"http://{record.http['trainer']}", api_key=KEY)
        try:
            return asyncio.run(use(client))  # pyright: ignore[reportArgumentType]
        finally:
            client.close("success").result(timeout=60)

    logging.getLogger("tinker").setLevel(logging.ERROR)
    return await asyncio.to_thread(work)


def datum(tokens: list[int]) -> types.Datum:
    """Predicts each next token of a sequence."""
    inputs = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=inputs, loss_fn_inputs={"target_tokens": tokens[1:]})


async def train(client: tinker.TrainingClient, data: list[types.Datum], learning_rate: float = 0.02) -> float:
    """One pipelined step; the sum of the loss before it."""
    backward = client.forward_backward(data, "cross_entropy")
    update = client.optim_step(types.AdamParams(learning_rate=learning_rate))
    loss = (await backward).metrics["loss:sum"]
    await update
    return loss
