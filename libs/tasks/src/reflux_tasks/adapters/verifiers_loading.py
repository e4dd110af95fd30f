"""Opens an environment of the `verifiers` library, of its first generation (`load_environment`) or of 0.4 and later."""

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from reflux_tasks.adapters.rows import Row
from reflux_tasks.verify import VerificationError, VerifierUnavailable


class ForeignEnvironment(Protocol):
    """Rows and rewards of one environment."""

    def rows(self, most: int) -> Sequence[Row]: ...

    def score(self, payload: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
        """Reward and figures of one answer. Raises ValueError for a foreign payload, VerificationError when a reward
        function fails."""
        ...


def open_environment(name: str, arguments: Mapping[str, Any]) -> ForeignEnvironment:
    """Imports the package `name`. Raises ImportError, or VerifierUnavailable when it needs more than a child has."""
    package = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    module = importlib.import_module(package)
    if callable(load := getattr(module, "load_environment", None)):
        return FirstGeneration(name, load(**arguments))
    return Taskset(name, module, arguments)


class FirstGeneration:
    """An Environment with a data set and a Rubric (library below 0.4)."""

    def __init__(self, name: str, environment: Any) -> None:
        self._environment = environment
        self._rewards: list[tuple[Callable[..., Any], float, Any]] = []
        rubrics = [environment.rubric]
        for rubric in rubrics:  # grows: a RubricGroup holds rubrics
            if nested := getattr(rubric, "rubrics", None):
                rubrics += nested
                continue
            if rubric.has_group_rewards:
                raise VerifierUnavailable(
                    f"{name}: rewards over a whole group are not supported, each answer is graded"
                )
            self._rewards += [(func, weight, rubric) for func, weight in zip(rubric.funcs, rubric.weights, strict=True)]
        if not any(weight for _, weight, _ in self._rewards):
            raise VerifierUnavailable(f"{name}: the rubric has no reward")

    def rows(self, most: int) -> Sequence[Row]:
        found = []
        for row in islice(self._environment.get_dataset(), most):
            prompt = _text(row["prompt"])
            answer = row.get("answer") or ""
            truth = {key: value for key, value in row.items() if key not in ("example_id", "id")}
            found.append(Row(prompt, answer if isinstance(answer, str) else str(answer), truth))
        return found

    def score(self, payload: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
        if "prompt" not in payload:
            raise ValueError("not a payload of this task: it needs the prompt")
        prompt = payload["prompt"]
        said: Any = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        state = {**payload, "answer": payload.get("answer", ""), "info": payload.get("info") or {}, "input": payload}
        state |= {"completion": said, "is_completed": True, "trajectory": []}
        return asyncio.run(self._sum(state))

    async def _sum(self, state: dict[str, Any]) -> tuple[float, dict[str, float]]:
        reward, figures = 0.0, {}
        for func, weight, rubric in self._rewards:
            name = getattr(func, "__name__", "reward")
            value = await _call(func, rubric.score_objects(state), name)
            figures[name] = value
            reward += weight * value
        return reward, figures


class Taskset:
    """A taskset with rewards as methods of its tasks (library 0.4 and later), scored without a runtime."""

    def __init__(self, name: str, module: Any, arguments: Mapping[str, Any]) -> None:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
        from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
        from verifiers.v1.trace import AgentInfo, TraceTask  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils.generic import concrete_type  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils.loaders import taskset_class  # pyright: ignore[reportMissingImports]

        self._vf, self._trace_task, self._agent = vf, TraceTask, AgentInfo(config=AgentConfig())
        made = taskset_class(module.__name__)
        self._config = (concrete_type(made, vf.TasksetConfig) or vf.TasksetConfig)(id=module.__name__, **arguments)
        self._taskset = made(self._config)
        self._task = made.task_type()
        self._check(name)

    def _check(self, name: str) -> None:
        """Refuses what would be left out of a score without a runtime."""
        probe = next(iter(self._taskset), None)
        if probe is None:
            raise VerifierUnavailable(f"{name}: the taskset is empty")
        needs = [
            function.__name__
            for function in probe.hooks("reward")
            if (given := inspect.signature(function).parameters.get("runtime")) is not None
            and given.default is given.empty
        ]
        if needs or probe.plugged_judges() or self._task.NEEDS_CONTAINER:
            what = ", ".join(needs) or ("a container" if self._task.NEEDS_CONTAINER else "judges")
            raise VerifierUnavailable(f"{name}: {what} needs a runtime or a model; serve it and use /verify")
        if not probe.hooks("reward"):
            raise VerifierUnavailable(f"{name}: the taskset has no reward")

    def rows(self, most: int) -> Sequence[Row]:
        found = []
        for task in islice(iter(self._taskset), most):
            system = f"{task.data.system_prompt}\n\n" if task.data.system_prompt else ""
            answer = getattr(task.data, "answer", "")
            truth = {"data": task.data.model_dump(mode="json", exclude_none=True)}
            found.append(Row(system + task.data.prompt_text, answer if isinstance(answer, str) else str(answer), truth))
        return found

    def score(self, payload: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
        vf = self._vf
        try:
            data = self._task.data_type().model_validate(payload["data"])
        except (KeyError, ValueError) as error:
            raise ValueError(f"not a payload of this task: {error}") from error
        task = self._task(data, self._config.task)
        trace = vf.Trace(task=self._trace_task(type=self._task.__name__, data=data), agent=self._agent)
        asked = vf.MessageNode(message=vf.UserMessage(content=data.prompt_text))
        trace.nodes = [asked, vf.MessageNode(parent=0, message=vf.AssistantMessage(content=text), sampled=True)]
        try:
            asyncio.run(task.score(trace))
        except vf.TaskError as error:
            raise VerificationError(f"a reward function failed: {error}") from error
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            raise VerificationError(f"no value of {', '.join(missing)}")
        figures = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return trace.reward, figures | {name: value for name, value in trace.metrics.items() if value is not None}


async def _call(func: Callable[..., Any], objects: Mapping[str, Any], name: str) -> float:
    parameters = inspect.signature(func).parameters
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    given = {key: value for key, value in objects.items() if everything or key in parameters}
    try:
        value = func(**given)
        return float(await value if inspect.isawaitable(value) else value)
    except Exception as error:  # task boundary: a function of somebody else's environment
        raise VerificationError(f"reward function {name} failed: {type(error).__name__}: {error}") from error


def _text(prompt: Any) -> str:
    """Text of a prompt that is a string or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message["content"] for message in prompt if isinstance(message.get("content"), str))
