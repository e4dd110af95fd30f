"""A language model's folder that is small enough for any test: two layers, one token a byte, a chat template."""

import json
from pathlib import Path

from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from reflux_model.config import ModelConfig
from reflux_model.creation import WEIGHTS_FILE, initial_arrays, write_config

TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END = "<|im_end|>"


def write_byte_tokenizer(folder: Path, *, template: bool = True, end: str = END) -> Tokenizer:
    """Writes a new folder's tokenizer: a token per byte (0 to 255), then the marks of turns; `end` ends one."""
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    if template:
        (folder / "chat_template.jinja").write_text(TURNS)
    return tokenizer


def write_language_model(folder: Path) -> Path:
    """Writes it; its weights are random, with embeddings far enough apart for an adapter to tell them."""
    tokenizer = write_byte_tokenizer(folder)
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_size=32,
        max_positions=512,
        eos_token_id=tokenizer.token_to_id(END),
    )
    save_file(initial_arrays(config, 0, std=0.15), folder / WEIGHTS_FILE, {"format": "pt"})
    write_config(folder, config)
    return folder
