"""How long does a whole sync take? PublishWeights of a real learner until real torch engines have committed.

Measured by the caller: cast from the learner's float32 to bfloat16, copy, checksums on both sides, one-sided pull,
PREPARE, COMMIT and the exchange of pointers. In the same rounds: the same with two replicas, a memmove of the same
bytes, a gloo broadcast (tensor by tensor, and all in one; the faster counts) and a safetensors file in tmpfs. These two
move bfloat16 tensors without cast and without checksums; `vs_gloo_with_cast` is the flat broadcast with the cast that a
float32 learner needs. While a peer works the whole fleet stands still. Figures: peer's time / ours with one replica.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from fleet import fleet, model_folder
from rounds import MODEL_BYTES, Setup, spread, ways


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="auto", help="a folder, auto or tiny")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with model_folder(options.model) as folder, fleet(folder) as running, tempfile.TemporaryDirectory() as shared:
        syncs = {
            f"{count} replica{'s'[: count - 1]}": running.learner(f"runs/{count}", engines=count) for count in (1, 2)
        }
        one = syncs["1 replica"]
        calls = one.publish()[1].control_messages
        length = one.num_bytes
        file = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="reflux-bench-")) / "model.safetensors"
        setups = {"memcpy": Setup("memcpy"), "file": Setup("tmpfs_file", arguments=(str(folder), str(file)))}
        for how in ("tensors", "flat", "cast"):
            setups[f"gloo/{how}"] = Setup("gloo_broadcast", arguments=(str(folder), how, f"{shared}/{how}"))
        with ways(setups, length) as found:
            measured: dict[str, list[float]] = {name: [] for name in (*syncs, *found)}
            for number in range(options.rounds + 1):
                turn = {name: model.publish()[0] for name, model in syncs.items()}
                with running.standing_still():
                    turn |= {name: way.seconds() for name, way in found.items()}
                for name, seconds in turn.items() if number else ():
                    measured[name].append(seconds)
            assert {way.ask("check") for way in found.values()} == {"whole"}
        file.unlink(missing_ok=True)
        file.parent.rmdir()
    for name, seconds in measured.items():
        print(f"{name:14} {spread(seconds, length)}")
    medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
    own = medians["1 replica"]
    figures = {
        "sync_vs_memcpy": medians["memcpy"] / own,
        "two_replicas_vs_one": medians["2 replicas"] / own,
        "vs_gloo": min(medians["gloo/tensors"], medians["gloo/flat"]) / own,
        "vs_gloo_with_cast": medians["gloo/cast"] / own,
        "vs_file": medians["file"] / own,
        "sync_ms": own * 1e3,
        "control_calls": calls,
    }
    if length != MODEL_BYTES:
        print(f"note: {length} bytes, not those of SmolLM2-135M: the figures show that the benchmark works, no more")
    print(json.dumps({name: round(figure, 3) for name, figure in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
