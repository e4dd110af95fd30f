"""Frames between the service and a child carry any text, at its size in UTF-8."""

import socket

from reflux_sandbox.isolation import frames


def test_a_frame_holds_a_million_characters_and_half_a_surrogate_pair_comes_through():
    message = {"answers": ["\N{GRINNING FACE}" * 1_000_000, "a\ud800b", "\0"], "reward": 0.5}
    near, far = socket.socketpair()
    with near, far:
        frames.send(near, {"text": "\ud800"})
        assert frames.receive(far) == {"text": "\ud800"}
    frame = frames.encode(message)
    assert len(frame) < 5 << 20
    assert frames._decode(frame[4:]) == message
