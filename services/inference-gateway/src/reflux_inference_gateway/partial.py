"""Samples that were stopped half-way: how to ask for the rest, and how the pieces become one sample. Pure."""

from dataclasses import replace

from reflux.common.v1.common_pb2 import Sample, SamplingParams, VersionSpan
from reflux_inference_gateway.wire import GroupCall


def rest(call: GroupCall, sample: Sample) -> GroupCall:
    """A call for what is missing of a group's sample: its tokens so far belong to the prompt.

    Draws of the torch engine depend on the sample's seed and the position of a token, so that the rest is what it would
    have been. vLLM and SGLang start a seed's generator anew: there a seeded rest repeats its first noise.
    """
    sampling = SamplingParams()
    sampling.CopyFrom(call.sampling)
    sampling.max_tokens -= len(sample.token_ids)
    prompt = (*call.prompt_token_ids, *sample.token_ids)
    return replace(call, prompt_token_ids=prompt, num_samples=1, sampling=sampling, first_sample=sample.index)


def joined(before: Sample, after: Sample) -> Sample:
    """One sample from its two pieces; spans of one version that meet become one."""
    whole = Sample()
    whole.CopyFrom(before)
    whole.finish_reason = after.finish_reason
    whole.token_ids.extend(after.token_ids)
    whole.logprobs.extend(after.logprobs)
    whole.top_logprobs.extend(after.top_logprobs)
    shift = len(before.token_ids)
    for span in after.versions:
        last = whole.versions[-1] if whole.versions else None
        if last is not None and (last.version, last.kv_version) == (span.version, span.kv_version):
            last.end = span.end + shift
        else:
            moved = VersionSpan(version=span.version, start=span.start + shift, end=span.end + shift)
            moved.kv_version = span.kv_version
            whole.versions.append(moved)
    return whole
