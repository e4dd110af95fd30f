"""torch.distributed broadcast over gloo from one process to another, from and into the tensors of a model in bfloat16.

`flat`: all tensors as one; `cast`: likewise, cast from float32 each time; else tensor by tensor. No checksum, and but
for `cast` no cast, which our sync has.
"""

import os
import sys
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from smol import tensors_of
from worker import answer, keep, start


def _join(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def _parts() -> list[torch.Tensor]:
    tensors = [tensor.view(torch.uint8).reshape(-1) for tensor in tensors_of(sys.argv[2]).values()]
    return tensors if sys.argv[3] == "tensors" else [torch.cat(tensors)]


def owner(pipe: Connection, length: int) -> None:
    _join(0, sys.argv[4])
    parts = _parts()
    master = [part.view(torch.bfloat16).float() for part in parts] if sys.argv[3] == "cast" else []
    pipe.send("ready")
    while pipe.recv():
        for narrow, wide in zip(parts, master, strict=False):
            narrow.view(torch.bfloat16).copy_(wide)
        for part in parts:
            dist.broadcast(part, 0)
    keep(pipe)


def main() -> None:
    ours = start(owner, int(sys.argv[1]))
    _join(1, sys.argv[4])
    wanted = _parts()
    parts = [torch.empty_like(part) for part in wanted]
    ours.recv()

    def transfer() -> None:
        ours.send(True)
        for part in parts:
            dist.broadcast(part, 0)

    def clear() -> None:
        for part in parts:
            part[::4096] = 0

    answer(transfer, lambda: all(torch.equal(*pair) for pair in zip(parts, wanted, strict=True)), clear)


if __name__ == "__main__":
    main()
