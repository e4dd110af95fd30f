"""Words of an answer, read within bounds. Standard library only."""

from reflux_tasks.verify import Answer
from reflux_tasks.xrd.answers import InvalidAnswer

END, PAD = "<eos>", "<pad>"


def bounded_words(answer: Answer, most_characters: int, most_words: int) -> list[str]:
    """Words before the end word; raises InvalidAnswer for an answer that is too long, unread, or does not end."""
    size = len(answer) if isinstance(answer, str) else sum(min(len(word), most_characters) + 1 for word in answer)
    if size > most_characters:
        raise InvalidAnswer(f"{size} characters, at most {most_characters} are read")
    words = answer.split() if isinstance(answer, str) else [str(word) for word in answer]
    if len(words) > most_words:
        raise InvalidAnswer(f"{len(words)} words, at most {most_words} are read")
    if END not in words:
        raise InvalidAnswer(f"no {END}")
    end = words.index(END)
    if any(word != PAD for word in words[end + 1 :]):
        raise InvalidAnswer(f"words after {END}")
    return words[:end]
