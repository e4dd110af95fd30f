"""Writes a closed vocabulary as a Hugging Face word-level tokenizer: white space separates words, ids are positions."""

import json
from collections.abc import Sequence
from pathlib import Path

CHAT_TEMPLATE = "{{ messages[-1]['content'] }}"
"""The last message is the prompt; these models know no roles."""


def write_word_tokenizer(words: Sequence[str], pad_word: str, end_word: str, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into an existing folder.

    Encoding and decoding are exact inverses for sequences of known words; the vocabulary has no unknown word, so
    encoding another word is an error of the tokenizers library. ValueError for words that white space splits.
    """
    bad = [word for word in words if not word or word.split() != [word]]
    if bad or len(set(words)) != len(words) or not {pad_word, end_word} <= set(words):
        raise ValueError(
            f"a vocabulary needs distinct words without white space, {pad_word} and {end_word}; bad: {bad[:5]}"
        )
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(word, vocabulary[word]) for word in (pad_word, end_word)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad_word,
        "eos_token": end_word,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _special(word: str, token_id: int) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": word, **flags}
