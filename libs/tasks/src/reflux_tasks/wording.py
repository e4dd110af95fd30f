"""Words of an answer, read within bounds. Standard library only, because every sandbox child loads it."""

from collections.abc import Sequence

from reflux_tasks.canonical import END, PAD
from reflux_tasks.verify import Answer, answer_words


class InvalidAnswer(ValueError):
    """An answer does not follow the grammar; the message says where."""


def bounded_words(answer: Answer, most_characters: int, most_words: int) -> list[str]:
    """Words before the end word; raises InvalidAnswer for an answer that is too long, unread, or does not end."""
    size = len(answer) if isinstance(answer, str) else sum(min(len(word), most_characters) + 1 for word in answer)
    if size > most_characters:
        raise InvalidAnswer(f"{size} characters, at most {most_characters} are read")
    return words_before_end(answer_words(answer), most_words)


def words_before_end(words: Sequence[str], most_words: int) -> list[str]:
    """Raises InvalidAnswer for too many words, without an end word, or with anything but padding after it."""
    if len(words) > most_words:
        raise InvalidAnswer(f"{len(words)} words, at most {most_words} are read")
    if END not in words:
        raise InvalidAnswer(f"no {END}")
    end = list(words).index(END)
    if any(word != PAD for word in words[end + 1 :]):
        raise InvalidAnswer(f"words after {END}")
    return list(words[:end])
