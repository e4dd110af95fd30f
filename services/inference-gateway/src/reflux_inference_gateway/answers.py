"""What callers of GenerateGroup get: finished samples one by one, or the whole group in one message."""

from collections.abc import Iterable, Iterator, Sequence

from reflux.common.v1.common_pb2 import Sample
from reflux.inference_gateway.v1 import inference_gateway_service_pb2 as pb

Batch = tuple[str, Sequence[Sample]]
"""A replica and samples that it finished."""

_TOKENS_PER_MESSAGE = 100_000
"""Keeps a message below gRPC's limit of 4 MiB: about 14 bytes per token with its log-prob."""


def one_by_one(batch: Batch) -> Iterator[pb.GenerateGroupResponse]:
    """A message for each sample."""
    replica, samples = batch
    for sample in samples:
        yield pb.GenerateGroupResponse(sample=sample, replica=replica)


def whole_group(batches: Sequence[Batch]) -> Iterator[pb.GenerateGroupResponse]:
    """All samples by index, in one message or in as few as fit. Messages of a single replica are passed on as they are:
    it has sorted them, and cut them to size.
    """
    if len({replica for replica, _ in batches}) == 1:
        for replica, samples in batches:
            yield pb.GenerateGroupResponse(replica=replica, samples=samples)
        return
    made = sorted(((sample, replica) for replica, samples in batches for sample in samples), key=lambda it: it[0].index)
    for part in _parts(made):
        replicas = [replica for _, replica in part]
        samples = [sample for sample, _ in part]
        yield pb.GenerateGroupResponse(replica=replicas[0], samples=samples, replicas=replicas)


def aborted(indices: Iterable[int]) -> list[Sample]:
    """The answer to samples that were aborted before a replica had them."""
    return [Sample(index=index, finish_reason="abort") for index in indices]


def generated_tokens(samples: Sequence[Sample]) -> list[int]:
    """Lengths of the samples that ended by themselves."""
    return [len(sample.token_ids) for sample in samples if sample.finish_reason != "abort"]


def _parts(made: Sequence[tuple[Sample, str]]) -> list[list[tuple[Sample, str]]]:
    parts: list[list[tuple[Sample, str]]] = []
    tokens = _TOKENS_PER_MESSAGE
    for sample, replica in made:
        if tokens + len(sample.token_ids) > _TOKENS_PER_MESSAGE:
            parts.append([])
            tokens = 0
        parts[-1].append((sample, replica))
        tokens += len(sample.token_ids)
    return parts
