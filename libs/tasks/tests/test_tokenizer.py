import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from reflux_tasks.tokenizer import write_word_tokenizer
from reflux_tasks.xrd.task import XrdTask


def test_ids_make_the_round_trip_through_the_written_tokenizer(task: XrdTask, tmp_path: Path) -> None:
    task.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(task.words)
    for index in range(50):
        problem = task.problem("train", index)
        ids = task.prompt_ids(problem) + task.answer_ids(problem)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text == task.decode(ids)
        assert tokenizer.encode(text).ids == ids
    every = list(range(len(task.words)))
    assert tokenizer.encode(tokenizer.decode(every, skip_special_tokens=False)).ids == every


def test_the_config_names_end_and_padding(task: XrdTask, tmp_path: Path) -> None:
    task.write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["pad_token"]) == ("<eos>", "<pad>")


def test_the_end_word_disappears_when_special_tokens_are_skipped(task: XrdTask, tmp_path: Path) -> None:
    task.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode([task.ids["<ans>"], task.ids["<eos>"], task.ids["<pad>"]]) == "<ans>"


@pytest.mark.parametrize(
    "words", [["<pad>", "<eos>", "a b"], ["<pad>", "<eos>", "a", "a"], ["<eos>", "a"], ["<pad>", "<eos>", ""]]
)
def test_words_that_cannot_make_the_round_trip_are_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        write_word_tokenizer(words, "<pad>", "<eos>", tmp_path)


def test_ids_outside_the_vocabulary_are_refused(task: XrdTask) -> None:
    with pytest.raises(ValueError, match="347"):
        task.decode([0, 347])
