"""What callers of GenerateGroup get: finished samples one by one, or the whole group in one message."""

from collections.abc import Iterator, Sequence

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
    """All samples by index, in one message or in as few as fit; a single batch of a replica is passed on as it is."""
    if len(batches) == 1 and sum(len(sample.token_ids) for sample in batches[0][1]) <= _TOKENS_PER_MESSAGE:
        ((replica, samples),) = batches
        yield pb.GenerateGroupResponse(replica=replica, samples=samples)
        return
    made = sorted(((sample, replica) for replica, samples in batches for sample in samples), key=lambda it: it[0].index)
    for part in _parts(made):
        replicas = [replica for _, replica in part]
        several = len(set(replicas)) > 1
        samples = [sample for sample, _ in part]
        yield pb.GenerateGroupResponse(replica=replicas[0], samples=samples, replicas=replicas if several else ())


def aborted(samples: Sequence[Sample]) -> list[Sample]:
    """The answer to samples that were aborted while no replica had them, with the tokens that they have."""
    left = []
    for sample in samples:
        left.append(end := Sample())
        end.CopyFrom(sample)
        end.finish_reason = "abort"
    return left


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
