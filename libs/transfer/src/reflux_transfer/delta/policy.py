"""Decides whether a version goes out as a delta or in full. Pure."""

from dataclasses import dataclass

MAX_DENSITY = 0.15
"""Share of changed elements above which a delta is not made: AdamW at lr 1e-5 changes about that much of bfloat16
weights, and the delta then costs more processor time than the bytes that it saves.
"""


@dataclass(frozen=True)
class Observed:
    """What the last versions showed. Rates are bytes of weights per second; `ratio` is delta bytes / dense bytes."""

    link_bytes_per_second: float
    ratio: float = 0.03
    """Measured at lr 1e-6: 2.4 % of the elements change, and the XOR planes compress to that."""
    encode_bytes_per_second: float = 0.4e9
    decode_bytes_per_second: float = 0.8e9
    """Both of one busy core at that ratio; zstd takes most of it. Measure and replace them."""


@dataclass(frozen=True)
class DeltaChoice:
    """The decision and its arithmetic in one sentence."""

    delta: bool
    sentence: str


def choose(
    weights_bytes: int,
    observed: Observed,
    *,
    versions_since_anchor: int,
    anchor_every: int = 10,
    density: float | None = None,
    max_density: float = MAX_DENSITY,
) -> DeltaChoice:
    """Delta when it arrives earlier than the weights in full, and unless an anchor is due.

    Every `anchor_every`-th version goes out in full, so that a reader that missed one is never far from a base.
    `density` is that of the last version, if it was measured.
    """
    if versions_since_anchor + 1 >= anchor_every:
        return DeltaChoice(False, f"{versions_since_anchor} versions since the last full one: full")
    if density is not None and density > max_density:
        return DeltaChoice(False, f"{density:.1%} of the elements changed, more than {max_density:.0%}: full")
    full = weights_bytes / observed.link_bytes_per_second
    codec = weights_bytes * (1 / observed.encode_bytes_per_second + 1 / observed.decode_bytes_per_second)
    delta = codec + full * observed.ratio
    better = delta < full
    sentence = f"delta {delta:.2f} s (codec {codec:.2f} s) against {full:.2f} s: {'delta' if better else 'full'}"
    return DeltaChoice(better, sentence)
