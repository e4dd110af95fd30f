"""The commit protocol over gRPC."""

import asyncio
from uuid import uuid4

import grpc
import pytest

from reflux.checkpoint.v1 import checkpoint_pb2 as messages
from reflux.checkpoint.v1 import checkpoint_service_pb2 as pb
from reflux_storage.stores.base import MIN_PART_BYTES

State = messages.Checkpoint


async def code_of(call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_a_checkpoint_exists_from_its_commit_on(writer) -> None:
    assert await code_of(writer.latest()) is grpc.StatusCode.NOT_FOUND
    begun = await writer.begin(step=7)
    assert (begun.state, begun.run, begun.step, begun.attempt) == (State.STATE_OPEN, "r", 7, 1)
    stored = writer.write(begun)
    assert await code_of(writer.latest()) is grpc.StatusCode.NOT_FOUND
    cursor = {"next_prompt_index": 9, "low_water_index": 5, "epoch": 3, "op_id": 44}
    committed = await writer.commit(begun, [stored], **cursor)
    assert committed.state == State.STATE_COMMITTED
    assert committed.committed_at > 0
    assert list(committed.objects) == [stored]
    assert (committed.cursor.op_id, committed.cursor.epoch, committed.cursor.next_prompt_index) == (44, 3, 9)
    assert await writer.latest() == committed == await writer.get(begun.name)


async def test_begin_and_commit_are_idempotent(writer) -> None:
    request_id = str(uuid4())
    begun = await writer.begin(1, request_id=request_id)
    assert await writer.begin(1, request_id=request_id) == begun
    stored = writer.write(begun)
    committed = await writer.commit(begun, [stored], op_id=1)
    assert await writer.commit(begun, [stored], op_id=1) == committed
    assert await writer.begin(1, request_id=request_id) == committed
    assert await code_of(writer.commit(begun, [stored], op_id=2)) is grpc.StatusCode.ALREADY_EXISTS


async def test_objects_must_be_there_with_their_sizes(writer) -> None:
    begun = await writer.begin(1)
    stored = writer.write(begun)
    missing = messages.StoredObject(key=f"{begun.prefix}/other", size_bytes=5, checksum="0" * 32)
    longer = messages.StoredObject(key=stored.key, size_bytes=stored.size_bytes + 1, checksum=stored.checksum)
    for objects in ([stored, missing], [longer]):
        assert await code_of(writer.commit(begun, objects)) is grpc.StatusCode.FAILED_PRECONDITION
    assert (await writer.get(begun.name)).state == State.STATE_OPEN
    await writer.commit(begun, [stored])


async def test_an_aborted_checkpoint_leaves_nothing_and_cannot_commit(writer) -> None:
    begun = await writer.begin(1)
    stored = writer.write(begun)
    writer.store.put_part(writer.store.begin(f"{begun.prefix}/half", MIN_PART_BYTES), 1, b"x")
    assert (await writer.abort(begun.name)).state == State.STATE_ABORTED
    assert (await writer.abort(begun.name)).state == State.STATE_ABORTED
    assert list(writer.store.list(begun.prefix)) == []
    assert list(writer.store.list_uploads("")) == []
    assert await code_of(writer.commit(begun, [stored])) is grpc.StatusCode.FAILED_PRECONDITION
    assert (await writer.get(begun.name)).state == State.STATE_ABORTED


async def test_a_committed_checkpoint_cannot_be_aborted(writer) -> None:
    committed = await writer.save(1)
    assert await code_of(writer.abort(committed.name)) is grpc.StatusCode.FAILED_PRECONDITION
    assert (await writer.latest()).name == committed.name


async def test_of_two_committers_of_one_step_exactly_one_wins(writer) -> None:
    begun = [await writer.begin(4) for _ in range(2)]
    stored = [writer.write(checkpoint, fill=i) for i, checkpoint in enumerate(begun)]
    calls = [writer.commit(checkpoint, [item]) for checkpoint, item in zip(begun, stored, strict=True)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    won = [result for result in results if isinstance(result, messages.Checkpoint)]
    lost = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert [len(won), len(lost)] == [1, 1]
    assert lost[0].code() is grpc.StatusCode.ALREADY_EXISTS
    assert await writer.latest() == won[0]
    assert await code_of(writer.begin(4)) is grpc.StatusCode.ALREADY_EXISTS


async def test_the_same_commit_sent_twice_at_once_succeeds_or_asks_to_retry(writer) -> None:
    begun = await writer.begin(4)
    stored = writer.write(begun)
    results = await asyncio.gather(*(writer.commit(begun, [stored]) for _ in range(4)), return_exceptions=True)
    errors = [result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert set(errors) <= {grpc.StatusCode.ABORTED}
    assert (await writer.commit(begun, [stored])).state == State.STATE_COMMITTED


async def test_a_replaced_attempt_is_fenced(writer) -> None:
    stale = await writer.begin(30, attempt=1)
    stored = writer.write(stale)
    await writer.save(25, attempt=2)
    for call in (writer.commit(stale, [stored]), writer.begin(31, attempt=1)):
        assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
    assert (await writer.latest()).step == 25


async def test_a_later_attempt_beats_a_higher_step(writer) -> None:
    await writer.save(30, attempt=1)
    await writer.save(25, attempt=2)
    latest = await writer.latest()
    assert (latest.attempt, latest.step) == (2, 25)
    await writer.save(30, attempt=2)
    latest = await writer.latest()
    assert (latest.attempt, latest.step) == (2, 30)


async def test_runs_do_not_see_each_other(writer) -> None:
    await writer.save(1, run="a")
    await writer.save(2, run="ab")
    assert (await writer.latest("a")).step == 1
    assert [item.run for item in (await writer.list("a")).checkpoints] == ["a"]


async def test_listing_is_newest_first_and_pages_lose_nothing(writer) -> None:
    for run in ("b", "a"):
        for step in (1, 2, 10):
            await writer.save(step, run=run)
    everything = [(item.run, item.step) for item in (await writer.list()).checkpoints]
    assert everything == [("a", 10), ("a", 2), ("a", 1), ("b", 10), ("b", 2), ("b", 1)]
    found, token = [], ""
    while True:
        page = await writer.list(page_size=2, page_token=token)
        found += [(item.run, item.step) for item in page.checkpoints]
        token = page.next_page_token
        if not token:
            break
    assert found == everything


async def test_commit_names_the_field_that_is_wrong(writer) -> None:
    begun = await writer.begin(1)
    stored = writer.write(begun)
    for objects, cursor, field in (
        ([], messages.LoopCursor(), "objects"),
        ([stored], None, "cursor"),
        ([stored], messages.LoopCursor(low_water_index=3), "low_water_index"),
        (
            [messages.StoredObject(key="elsewhere/x", size_bytes=1, checksum="0" * 32)],
            messages.LoopCursor(),
            "elsewhere",
        ),
    ):
        request = pb.CommitCheckpointRequest(name=begun.name, objects=objects, cursor=cursor)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await writer.stub.CommitCheckpoint(request, timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in caught.value.details()
