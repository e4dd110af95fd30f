"""Greedy completions of both engines in one form: token ids and the log-prob of each, not rounded."""

import json
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from servers import MODEL_ID, ask

PROMPT = (504, 3575, 282, 4649, 314)
"""The first tokens of a sentence about the capital of a country."""

HANG_GUARD_SECONDS = 300.0


@dataclass(frozen=True)
class Said:
    """What an engine said, and by which weights it claims to have said it (empty: it does not tell)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...] = ()


class Vllm:
    """vLLM's /v1/completions."""

    def __init__(self, url: str) -> None:
        self.url = url

    def says(self, num_tokens: int = 24, after: Sequence[int] = PROMPT) -> Said:
        """The answer to a prompt; equal weights give equal bits as long as nothing else runs."""
        body = {**_completion(num_tokens, return_token_ids=True), "prompt": list(after)}
        choice = ask(f"{self.url}/v1/completions", body)["choices"][0]
        return Said(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))

    def streams(self, num_tokens: int) -> Iterator[Said]:
        """The same token by token."""
        for event in _events(f"{self.url}/v1/completions", _completion(num_tokens, return_token_ids=True, stream=True)):
            choice = event["choices"][0]
            yield Said(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))

    def version(self) -> str:
        """The engine's own word."""
        return ask(f"{self.url}/weight_info")["weight_version"]

    def half_a_commit(self, _by: str) -> None:
        """What an adapter has done when it dies in the middle of a commit."""
        ask(f"{self.url}/pause?mode=keep", {})
        ask(f"{self.url}/start_weight_update", {})


class Sglang:
    """SGLang's /generate."""

    def __init__(self, url: str) -> None:
        self.url = url

    def says(self, num_tokens: int = 24, after: Sequence[int] = PROMPT) -> Said:
        """As `Vllm.says`."""
        return _generated(ask(f"{self.url}/generate", {**_generate(num_tokens), "input_ids": list(after)}))

    def streams(self, num_tokens: int) -> Iterator[Said]:
        """As `Vllm.streams`, but each part holds all tokens so far."""
        for event in _events(f"{self.url}/generate", _generate(num_tokens, stream=True)):
            yield _generated(event)

    def version(self) -> str:
        """The engine's own word."""
        return ask(f"{self.url}/model_info")["weight_version"]

    def half_a_commit(self, by: str) -> None:
        """As `Vllm.half_a_commit`; a load from disk opens no session."""
        ask(f"{self.url}/pause_generation", {"mode": "retract"})
        if by == "sglang-distributed":
            ask(f"{self.url}/begin_weight_update", {})


def _completion(num_tokens: int, **more: object) -> dict[str, Any]:
    fixed = {"model": MODEL_ID, "prompt": list(PROMPT), "temperature": 0, "logprobs": 0, "ignore_eos": True}
    return {**fixed, "max_tokens": num_tokens, **more}


def _generate(num_tokens: int, **more: object) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": list(PROMPT), "sampling_params": sampling, "return_logprob": True, **more}


def _generated(answer: dict[str, Any]) -> Said:
    meta = answer["meta_info"]
    logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"])
    spans = meta.get("weight_versions") or ()
    return Said(tuple(answer["output_ids"]), logprobs, tuple(str(span["version"]) for span in spans))


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANG_GUARD_SECONDS) as answer:
        for line in answer:
            text = line.decode().strip().removeprefix("data:").strip()
            if text and text != "[DONE]":
                yield json.loads(text)
