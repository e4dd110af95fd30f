"""NIXL READ (nixl-cu12, plug-in UCX, its default transports), with a prepared transfer that is posted again.

Its agents take seconds to start; that is not counted. Polling for the end is what its interface offers.
"""

import os
import sys
from multiprocessing.connection import Connection

import numpy as np
import torch
from worker import PATTERN, answer, keep, start


def owner(pipe: Connection, length: int) -> None:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("owner", nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    data = torch.from_numpy(np.full(length, PATTERN, np.uint8))  # numpy asks for huge pages, torch does not.
    agent.register_memory([data])
    pipe.send((agent.get_agent_metadata(), agent.get_serialized_descs(agent.get_xfer_descs([data]))))
    keep(pipe)


def main() -> None:
    length = int(sys.argv[1])
    os.environ["UCX_NET_DEVICES"] = "lo"
    ours = start(owner, length)
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("reader", nixl_agent_config(backends=["UCX"]))
    data = torch.from_numpy(np.ones(length, np.uint8))
    agent.register_memory([data])
    metadata, descriptors = ours.recv()
    peer = agent.add_remote_agent(metadata)
    mine = agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs([data]))
    theirs_prepared = agent.prep_xfer_dlist(peer, agent.deserialize_descs(descriptors))
    handle = agent.make_prepped_xfer("READ", mine, [0], theirs_prepared, [0])

    def transfer() -> None:
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(handle)
        assert state == "DONE"

    answer(transfer, lambda: bool((data == PATTERN).all()), lambda: data[::4096].fill_(0))


if __name__ == "__main__":
    main()
