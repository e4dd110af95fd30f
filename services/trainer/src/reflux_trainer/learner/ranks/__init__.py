"""One model over several processes: FSDP2's shards, the processes that hold them, and who tells them what to do."""
