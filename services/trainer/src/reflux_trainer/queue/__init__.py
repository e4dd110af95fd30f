"""The durable queue of one run in Redis: prompts out, graded groups in, a ledger of what became of each prompt."""
