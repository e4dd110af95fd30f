"""How questions are put to a model: in the task's words, in sentences, or in the folder's chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from counting_task import register
from e2e_language_model import write_byte_tokenizer

from reflux_runs.errors import ConfigError
from reflux_runs.load import load_document
from reflux_runs.preflight import Catalog, preflight
from reflux_tasks.registry import create_task
from reflux_tasks.task import Task
from reflux_tasks.tokenizer import write_word_tokenizer
from reflux_trainer.codec import Codec
from reflux_trainer.problems import Question, question
from reflux_trainer.prompt_length import with_prompt

ASKED = Question(0, "t1 t2 <ans>", "Which phase?\nPeaks: 10.4", "Co n2 Si sg62 <eos>", {})


def byte_folder(folder: Path, **given: Any) -> Path:
    """A folder with the tokenizer of a language model, as far as checks of folders look."""
    write_byte_tokenizer(folder, **given)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_chat_holds_the_sentences_and_the_folders_token_ends_the_answer(tmp_path: Path) -> None:
    codec = Codec(byte_folder(tmp_path / "model"), "chat")
    assert codec.prompt_text(ASKED) == (
        "<|im_start|>user\nWhich phase?\nPeaks: 10.4<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt, answer = codec.prompt_ids(ASKED), codec.answer_ids(ASKED)
    assert codec.end_id == 257
    assert (prompt[0], prompt.count(257)) == (256, 1)
    assert answer[-1] == 257
    assert codec.answer_text(answer) == "Co n2 Si sg62 <eos>"


def test_an_answer_that_has_not_ended_gets_no_end_word(tmp_path: Path) -> None:
    codec = Codec(byte_folder(tmp_path / "model"), "chat")
    assert codec.answer_text(codec.answer_ids(ASKED)[:-1]) == "Co n2 Si sg62"
    assert codec.answer_text([]) == ""


def test_sentences_outside_a_chat_end_where_the_answer_begins(tmp_path: Path) -> None:
    codec = Codec(byte_folder(tmp_path / "model", template=False), "text")
    assert codec.prompt_text(ASKED) == "Which phase?\nPeaks: 10.4\nAnswer:"
    assert codec.answer_text(codec.answer_ids(ASKED)).split() == ["Co", "n2", "Si", "sg62", "<eos>"]
    assert codec.answer_ids(ASKED)[0] == codec.answer_ids(ASKED)[2 + len("Co") - 1], "the answer begins with a space"


def test_words_are_read_and_written_as_they_are(tmp_path: Path) -> None:
    write_word_tokenizer(["<pad>", "<eos>", "t1", "t2", "<ans>", "Co", "n2", "Si", "sg62"], "<pad>", "<eos>", tmp_path)
    codec = Codec(tmp_path)
    assert codec.prompt_ids(ASKED) == [2, 3, 4]
    assert codec.answer_ids(ASKED) == [5, 6, 7, 8, 1]
    assert codec.answer_text([5, 6, 7, 8, 1]) == ASKED.answer_text


@pytest.mark.parametrize(
    ("prompt", "folder", "named"),
    [
        ("chat", {"template": False}, 'no chat template: task.prompt = "text"'),
        ("text", {"end": "<absent>"}, "names no eos_token"),
    ],
)
def test_a_folder_that_lacks_what_the_prompt_needs_is_refused(
    tmp_path: Path, prompt: str, folder: dict[str, object], named: str
) -> None:
    path = byte_folder(tmp_path / "model", **folder)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=named):
        Codec(path, prompt)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Task[Any]:
    register(monkeypatch)
    return create_task("counting", 0, Path())


def test_the_length_of_a_prompt_is_that_of_the_folders_tokenizer(tmp_path: Path, counting: Task[Any]) -> None:
    folder = byte_folder(tmp_path / "model")
    config = load_document({"task": {"name": "counting", "prompt": "chat"}, "model": {"path": str(folder)}})
    known = with_prompt(Catalog(), config, counting)
    (length,) = (known.prompt_tokens or {}).values()
    asked = question(counting, "train", 0)
    assert length == len(Codec.of_run(config, folder).prompt_ids(asked)) > len(asked.prose)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": length + 11}))
    with pytest.raises(ConfigError, match=f"context of {length + 11} tokens"):
        preflight(config, known)


def test_a_tokenizer_of_other_words_is_named_before_anything_starts(tmp_path: Path, counting: Task[Any]) -> None:
    folder = byte_folder(tmp_path / "model")
    write_word_tokenizer(["<pad>", "<eos>", "other"], "<pad>", "<eos>", folder)
    config = load_document({"task": {"name": "counting"}, "model": {"path": str(folder)}})
    with pytest.raises(ConfigError, match=r"cannot encode .* task\.prompt"):
        with_prompt(Catalog(), config, counting)
