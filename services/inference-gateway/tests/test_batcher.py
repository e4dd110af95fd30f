from hypothesis import given
from hypothesis import strategies as st

from reflux_inference_gateway.engine.batcher import Batcher, Ticket

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9), st.integers(1, 40), st.integers(1, 20)),
        st.tuples(st.just("admit")),
        st.tuples(st.just("release"), st.integers(0, 1 << 16)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    max_size=60,
)


@given(ACTIONS, st.integers(1, 8), st.integers(1, 64), st.integers(60, 400))
def test_every_sample_gets_one_row_in_order_and_rows_stay_dense(actions, max_rows, prefill_tokens, max_tokens):
    batcher = Batcher(max_rows, prefill_tokens, max_tokens)
    mirror, seated, expected = [], [], []  # what a KV cache would hold row by row, and (group, sample) in order
    added = 0
    for action in actions:
        match action:
            case ("add", samples, prompt, tokens):
                batcher.add(Ticket(f"g{added}", samples, prompt, tokens))
                expected += [(f"g{added}", index) for index in range(samples)]
                added += 1
            case ("admit",):
                free = max_rows - batcher.num_active
                room = max_tokens - sum(batcher.seat(row).tokens for row in range(batcher.num_active))
                waiting = batcher.num_waiting
                for one in batcher.admit():
                    assert one.row == len(mirror)
                    fresh = [(one.ticket.request_id, one.first + offset) for offset in range(one.count)]
                    mirror += fresh
                    seated += fresh
                if room >= 60:
                    assert (batcher.num_waiting < waiting) == (free > 0 and waiting > 0)
            case ("release", bits):
                rows = [row for row in range(len(mirror)) if bits >> row & 1]
                moves = batcher.release(rows)
                assert not {move.source for move in moves} & {move.target for move in moves}
                carry_out(mirror, moves, len(rows))
            case ("abort", number):
                rows, dropped = batcher.abort(f"g{number}")
                expected = [s for s in expected if s not in {(f"g{number}", index) for index in dropped}]
                carry_out(mirror, batcher.release(rows), len(rows))
        assert [(batcher.seat(r).request_id, batcher.seat(r).sample_index) for r in range(batcher.num_active)] == mirror
        assert batcher.num_active <= max_rows
        assert sum(batcher.seat(row).tokens for row in range(batcher.num_active)) <= max_tokens
        assert seated == expected[: len(seated)]
    while batcher.num_waiting:
        batcher.release(range(batcher.num_active))
        for one in batcher.admit():
            seated += [(one.ticket.request_id, one.first + offset) for offset in range(one.count)]
    assert seated == expected
    assert batcher.waiting_tokens == 0


def carry_out(mirror, moves, freed):
    for move in moves:
        mirror[move.target] = mirror[move.source]
    del mirror[len(mirror) - freed :]


def test_a_step_takes_at_least_one_prompt_and_no_more_than_its_budget():
    batcher = Batcher(max_rows=8, prefill_tokens_per_step=10, max_tokens=1000)
    for number, prompt in enumerate((50, 4, 6, 1)):
        batcher.add(Ticket(f"g{number}", 1, prompt, 5))
    assert [one.ticket.request_id for one in batcher.admit()] == ["g0"]
    assert [one.ticket.request_id for one in batcher.admit()] == ["g1", "g2"]
    assert [one.ticket.request_id for one in batcher.admit()] == ["g3"]


def test_a_group_that_is_larger_than_the_batch_enters_in_chunks():
    batcher = Batcher(max_rows=4, prefill_tokens_per_step=100, max_tokens=1000)
    batcher.add(Ticket("g", 6, 3, 5))
    assert batcher.waiting_tokens == 33
    (first,) = batcher.admit()
    assert (first.first, first.count, batcher.num_waiting, batcher.waiting_tokens) == (0, 4, 2, 10)
    batcher.release([1])
    (second,) = batcher.admit()
    assert (second.first, second.count, second.row) == (4, 1, 3)


def test_samples_wait_until_what_they_may_generate_fits():
    batcher = Batcher(max_rows=8, prefill_tokens_per_step=100, max_tokens=50)
    batcher.add(Ticket("big", 2, 10, 20))
    batcher.add(Ticket("small", 3, 2, 8))
    assert [(one.ticket.request_id, one.count) for one in batcher.admit()] == [("big", 1)]
    assert batcher.admit() == [], "first come, first served: nobody overtakes"
    batcher.release([0])
    assert [(one.ticket.request_id, one.count) for one in batcher.admit()] == [("big", 1), ("small", 2)]
