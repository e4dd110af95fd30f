from hypothesis import given
from hypothesis import strategies as st

from reflux_inference_gateway.engine.stops import TextCursor, text_pieces

ALPHABET = ["a", "b", "ab", "ba", "aab", "", "c"]


def decode(ids):
    return "".join(ALPHABET[token] for token in ids)


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


TOKENS = st.lists(st.integers(0, len(ALPHABET) - 1), max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple)


@given(TOKENS, STOPS)
def test_text_ends_before_the_first_stop_string(tokens, stops):
    cursor = TextCursor(decode, stops)
    shown = ""
    used = 0
    for token in tokens:
        used += 1
        stopped = cursor.push(token)
        shown += cursor.take(final=False)
        if stopped:
            break
    cursor.finish()
    shown += cursor.take(final=True)
    whole = decode(tokens[:used])
    found = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
    assert cursor.stopped == bool(found)
    assert shown == cursor.text == (whole[: min(found)] if found else whole)
    assert not any(stop in decode(tokens[: used - 1]) for stop in stops)


@given(TOKENS, STOPS)
def test_a_stop_string_is_never_shown_in_part(tokens, stops):
    cursor = TextCursor(decode, stops)
    shown = ""
    for token in tokens:
        stopped = cursor.push(token)
        shown += cursor.take(final=False)
        if stopped:
            break
    assert cursor.text.startswith(shown)


@given(st.text(max_size=12))
def test_characters_over_token_borders_are_shown_whole(text):
    cursor = TextCursor(decode_bytes)
    shown = []
    for byte in text.encode():
        cursor.push(byte)
        shown.append(cursor.take(final=False))
    cursor.finish()
    assert "".join(shown) + cursor.take(final=True) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


def test_an_incomplete_character_at_the_end_is_replaced_once():
    assert "".join(text_pieces(decode_bytes, list("a\u00e9".encode())[:2])) == "a\ufffd"
