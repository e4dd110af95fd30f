"""A task of reflux behind NeMo Gym's `/verify`: rows for another trainer's data set, and the door that grades them.

Contract (NVIDIA-NeMo/Gym, nemo_gym/base_resources_server.py): POST /seed_session, POST /verify with the row and an
OpenAI Responses object, GET /reverify_mode. Grading is the sandbox's: durable, isolated, cached. What got no reward is
a masked sample, never a 0.
"""

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
from aiohttp import web

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1.sandbox_service_pb2_grpc import SandboxServiceStub
from reflux.sandbox.v1.verification_pb2 import Grade, Verification

MOST_BODY_BYTES = 4 << 20
MOST_OPEN = 1024
"""Answers that are graded at one time; more are told to come again."""
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.02, 0.5
_CALL_SECONDS = 30.0
_LATER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)


class BadRow(ValueError):
    """The body of a request is no row of this door; the message says what is missing."""


def rows(task: Any, verifier: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Rows of a data set for /verify: prompts with all that grading needs."""
    for index in range(count):
        problem = task.problem(split, index)
        yield {
            "responses_create_params": {"input": task.prompt_text(problem)},
            "reflux": {"verifier": f"{task.name}/{verifier}", "end_word": task.end_word, "truth": task.truth(problem)},
        }


def parse_row(body: Any) -> tuple[str, str, bytes]:
    """Verifier, answer and payload of a request of /verify. Raises BadRow."""
    try:
        ours, output = body["reflux"], body["response"]["output"]
        verifier, end_word, truth = str(ours["verifier"]), str(ours["end_word"]), ours["truth"]
        message = next(each for each in reversed(output) if each.get("type", "message") == "message")
        parts = [part["text"] for part in message["content"] if part.get("type") == "output_text"]
        payload = json.dumps(truth, allow_nan=False).encode()
        answer = "".join(parts).rstrip()
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
        raise BadRow(f"the row needs reflux and a response with an output message: {error!r}") from error
    # The end of a response is its end; a grammar of ours wants the word for it.
    return verifier, answer if answer.endswith(end_word) else f"{answer} {end_word}", payload


def verdict(job: Verification, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of /verify: the row, the reward, and figures as fields, so that metrics see them."""
    grade = job.grades[0]
    outcome = Grade.Outcome.Name(grade.outcome).removeprefix("OUTCOME_").lower()
    answer = {**{figure.name: figure.value for figure in grade.figures}, **body}
    if outcome in ("scored", "invalid"):
        return {**answer, "reward": grade.reward, "mask_sample": False, "outcome": outcome}
    failure = {"failure_kind": f"reflux:{outcome}", "failure_reason": grade.message or job.error}
    return {**answer, "reward": 0.0, "mask_sample": True, **failure}


class VerifyDoor:
    """The HTTP routes; `channel` leads to the sandbox."""

    def __init__(self, channel: grpc.aio.Channel, run: str, deadline_seconds: float) -> None:
        self._stub: Any = SandboxServiceStub(channel)  # its types are those of the synchronous stub
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._open = 0

    def application(self) -> web.Application:
        """What a server serves."""
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.router.add_post("/seed_session", self._seed)
        app.router.add_post("/verify", self._verify)
        app.router.add_get("/reverify_mode", self._mode)
        return app

    async def _seed(self, _request: web.Request) -> web.Response:
        return web.json_response({})

    async def _mode(self, _request: web.Request) -> web.Response:
        return web.json_response("stateless")

    async def _verify(self, request: web.Request) -> web.Response:
        if self._open >= MOST_OPEN:
            return _refusal(503, f"{self._open} answers are being graded already")
        self._open += 1
        try:
            body = await request.json()
            return web.json_response(verdict(await self._graded(*parse_row(body)), body))
        except (BadRow, ValueError) as error:
            return _refusal(422, str(error))
        except grpc.aio.AioRpcError as error:
            return _refusal(503 if error.code() in _LATER else 422, f"{error.code().name}: {error.details()}")
        finally:
            self._open -= 1

    async def _graded(self, verifier: str, answer: str, payload: bytes) -> Verification:
        request = pb.CreateVerificationRequest(
            request_id=str(uuid.uuid4()),
            verifier=verifier,
            payload=payload,
            answers=[answer],
            run=self._run,
            deadline_seconds=self._deadline_seconds,
        )
        job = (await self._stub.CreateVerification(request, timeout=_CALL_SECONDS)).verification
        pause = _FIRST_POLL_SECONDS
        while job.state != Verification.STATE_ENDED:  # its deadline ends it
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _LAST_POLL_SECONDS)
            asked = pb.GetVerificationRequest(name=job.name)
            job = (await self._stub.GetVerification(asked, timeout=_CALL_SECONDS)).verification
        return job


def _refusal(status: int, text: str) -> web.Response:
    return web.json_response({"detail": text}, status=status)
