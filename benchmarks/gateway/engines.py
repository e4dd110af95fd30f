"""Two real torch engines: few large groups at once, and many small ones. How long until the last sample?

2 groups of 32 samples, then 64 groups of 8; prompts of 1,024 tokens, all samples of one length. The model has the shape
of SmolLM2-135M with seeded noise for weights, in bfloat16, one thread per engine. Ways and shapes as in `mix.py`, but
the many groups go to the routers as single requests only where prompts draw them to the replica that has the prefix:
without that most of the time is prefill. Ways that a router refuses are left out. Figures: ours / the best way of the
better router, medians over the rounds.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mix import Way, makespan_vs_router, try_out, ways
from proxies import MODEL, bench
from rounds import interleaved, show
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from workload import PROMPT_TOKENS, Group

from reflux_model.config import ModelConfig
from reflux_model.creation import create_folder
from reflux_model.presets import SMOLLM2_135M, TINY

ROWS = 32


@dataclass(frozen=True)
class WordGroup(Group):
    """A group whose prompt is the same tokens as words and as ids; a new one per round, so that no cache knows it."""

    vocabulary: int
    round: int

    def ids(self) -> list[int]:
        first = self.round * 100 + self.number
        return [3 + (7919 * first + 31 * place) % (self.vocabulary - 3) for place in range(PROMPT_TOKENS)]

    def text(self) -> str:
        return " ".join(f"w{token}" for token in self.ids())


def write_model(folder: Path, config: ModelConfig) -> None:
    """Noise of a shape, and a tokenizer whose words are w0, w1, ..."""
    create_folder(folder, config, 0)
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(config.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def measure(way: Way, order: Sequence[Group]) -> Mapping[str, float]:
    """Seconds until the last sample."""
    begun = time.perf_counter()
    asyncio.run(way.place(order))
    return {"makespan_s": time.perf_counter() - begun}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it works")
    parser.add_argument("--many", type=int, default=64, help="groups of 8")
    options = parser.parse_args()
    config, figures = replace(TINY, vocab_size=512, max_positions=2048) if options.tiny else SMOLLM2_135M, {}
    with tempfile.TemporaryDirectory() as folder, bench() as running:
        write_model(Path(folder), config)
        engine = {"MODEL": folder, "MODEL_ID": MODEL, "WEIGHTS": "folder", "DTYPE": "bfloat16"}
        engine |= {"MAX_ROWS": str(ROWS), "MAX_MODEL_LEN": "1280", "LISTEN": "127.0.0.1:0"}
        running.start_engines(2, {f"REFLUX_ENGINE_{name}": value for name, value in engine.items()}, ROWS)
        turns: dict[str, int] = {}
        able = try_out(ways(running, options.max_tokens), WordGroup(99, 16, config.vocab_size, 0))
        sensible = [way for way in able if way.shape != "single" or "/cache_aware/" in way.name]
        for key, count, size, chosen in (("big_group", 2, 32, able), ("many_groups", options.many, 8, sensible)):

            def turn(way: Way, count: int = count, size: int = size) -> Mapping[str, float]:
                number = turns[way.name] = turns.get(way.name, 0) + 1
                order = [
                    WordGroup(place, size, config.vocab_size, number * 50 + able.index(way)) for place in range(count)
                ]
                return measure(way, order)

            measured = interleaved(chosen, options.rounds, turn, warm_up=0)
            print(key)
            show(measured, {"makespan_s": "s"})
            figures |= makespan_vs_router(measured, f"{key}_makespan_ratio")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
