"""The fields of a run file with their defaults: the recipe of the X-ray phase identification example."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=10_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=10_000_000)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]

Algorithm = Literal["grpo", "dr_grpo", "rloo", "leave_one_out", "reinforce_pp", "gae"]
Loss = Literal["ppo", "dual_clip", "reinforce", "cispo", "gspo", "gspo_token", "importance_sampling", "decoupled_ppo"]
Staleness = Literal["wait", "pace", "drop"]
Release = Literal["full", "surrogate"]
InFlight = Literal["most", "adaptive"]
KlEstimator = Literal["k2", "k3"]
KlPlace = Literal["loss", "reward"]
Curriculum = Literal["none", "pass_rate"]
Transport = Literal["auto", "shm", "ucx", "tcp", "nixl"]
WeightDtype = Literal["float32", "bfloat16"]
WeightMode = Literal["auto", "swap", "in_place"]
Prompt = Literal["words", "text", "chat"]
LoraTargets = Literal["attention", "mlp", "attention+mlp", "attention+mlp+unembed"]


class _Section(BaseModel):
    """Frozen, strict, and closed: an unknown key or a wrong type is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
    )


class TaskConfig(_Section):
    """What to learn."""

    name: str = "xrd-phase-id"
    """Registered name of the task; a lab adds its own through the entry point group `reflux.tasks`."""

    mixture_fraction: Share | None = None
    """Share of training and held-out prompts with two phases; unset takes the task's own (0.3 for xrd-phase-id)."""

    peaks_hidden: bool = False
    """Control of the example: hides the measured peaks, so that only the elements are left."""

    num_phases: Count | None = None
    """Size of the fixed random subset of phases; unset takes the task's own (128 for xrd-phase-id). 8 is easy."""

    prompt: Prompt = "words"
    """How problems are put to the model. `words`: in the task's own closed vocabulary, which a fresh model is made for.
    `text`: in sentences, where the task has them, for a language model with a tokenizer of its own. `chat`: the same as
    a user's turn in the chat template of the model's folder. In both, the folder's end-of-sequence token ends an
    answer."""


class ModelConfig(_Section):
    """Which model; the sizes count for a fresh one only."""

    path: str = ""
    """Folder in Hugging Face layout on the trainer's host; empty initialises a fresh Llama of the sizes below."""

    hidden_size: Count = 128
    """Width of the residual stream; a multiple of `num_heads` with an even head size."""

    num_layers: Count = 4
    """Number of blocks."""

    num_heads: Count = 4
    """Attention heads."""

    intermediate_size: Count = 336
    """Width of the feed-forward layer."""

    compute_dtype: WeightDtype = "float32"
    """Type of the learner's passes; weights, gradients and moments stay float32."""

    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass instead of keeping them: less memory, a third more time."""

    lora_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """Above 0: trains a LoRA adapter of this rank (arXiv 2106.09685) and leaves the weights as they are; replicas get
    the weights with the adapter added in. Learning rates are about ten times those of all weights. 0 trains them."""

    lora_targets: LoraTargets = "attention+mlp"
    """Matrices that the adapter adapts; `unembed` is the output head, which models with tied embeddings lack."""


class WarmupConfig(_Section):
    """Supervised stage before reinforcement learning: right answers to the task's warm-up problems."""

    steps: CountOrZero = 200
    """Optimizer steps; 0 skips the stage."""

    batch_size: Count = 64
    """Examples per step."""

    learning_rate: Rate = 2e-3
    """Peak learning rate; 20 steps of ramp, then linear decay to 5 % of it."""

    mixture_fraction: Share | None = None
    """Share of examples with two phases; unset takes the task's own (0.2 for xrd-phase-id)."""


class RlConfig(_Section):
    """Reinforcement learning."""

    algorithm: Algorithm = "grpo"
    """Advantage estimator over the rewards of one group. `reinforce_pp` compares with all answers of the step instead:
    one answer per prompt is enough, and a group of equal rewards teaches, too (arXiv 2501.03262; its KL is `kl_in`).
    `gae` is PPO with a critic (arXiv 1707.06347, 1506.02438): a value head of the learner tells what to expect at each
    token; here, too, one answer per prompt is enough. With `dr_grpo` the loss divides every answer by the constant
    length `max_tokens` (arXiv 2503.20783); the others average over all tokens of the batch."""

    loss: Loss = "ppo"
    """Policy loss per token. `gspo` and `gspo_token` average over the tokens of each answer, then over the answers
    (arXiv 2507.18071), whatever the algorithm."""

    steps: Count = 150
    """Optimizer steps."""

    groups_per_step: Count = 32
    """Prompts that one step trains on; each is answered `samples_per_group` times."""

    samples_per_group: Annotated[int, Field(ge=1, le=1024)] = 8
    """Answers per prompt; their mean reward is the baseline."""

    batch_size: Count | None = None
    """Answers per step, a check only: must equal groups_per_step * samples_per_group when it is set."""

    learning_rate: Rate = 2e-4
    """Peak learning rate."""

    ramp_steps: CountOrZero = 15
    """Steps of linear ramp from 0 to the peak."""

    final_lr_fraction: Share = 0.2
    """Floor of the linear decay as a share of the peak."""

    max_lag: Annotated[int, Field(ge=0, le=1000)] = 1
    """Largest age of a trained answer in weight versions; 0 is fully synchronous. The window of open prompts is
    (max_lag + 1) * groups_per_step."""

    staleness: Staleness = "wait"
    """How `max_lag` is kept. `wait` trains in the order of the prompts, so that a batch never depends on timing; `pace`
    trains what has arrived, the oldest first, and waits only for what would become too old; both discard nothing.
    `drop` waits for nobody and discards what arrives too old, which favours quick answers."""

    oversampling: Annotated[float, Field(ge=1.0, le=8.0)] = 1.0
    """Open prompts per prompt that training needs; `staleness = "drop"` only: room for what comes too late."""

    in_flight: InFlight = "most"
    """How many prompts are open. `most`: all that `max_lag` allows. `adaptive`: as many as keep the trainer from
    waiting, by Little's law from the latencies of groups; samples are younger where the trainer is the bottleneck."""

    curriculum: Curriculum = "none"
    """Which problems are asked. `none`: the task's, one after the other. `pass_rate`: one of the next four, of a kind
    that is solved about half of the time rather than one that is always or never solved, for tasks that know kinds
    (docs/training.md)."""

    clip_low: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """Lower clip width: the probability ratio is clipped at 1 - clip_low."""

    clip_high: Annotated[float, Field(ge=0.0, le=10.0)] = 0.2
    """Upper clip width: the probability ratio is clipped at 1 + clip_high."""

    tis_cap: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Above 0: each token's loss is multiplied by exp(lp_learner - lp_sampler), at most this, and the ratio is taken to
    the learner's policy at the start of the step (arXiv 2110.00641). 2 is usual."""

    kl_coefficient: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Above 0: each token's loss or reward gets this share of the KL to a reference, which holds the policy near it
    (GRPO, arXiv 2402.03300, takes 0.04). The reference is the policy that reinforcement learning began with, of which
    the learner keeps a copy; with `model.lora_rank` it is the model without the adapter, which costs no memory."""

    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL from a token's log-probs, d = lp_reference - lp: `k3` is exp(d) - d - 1, `k2` is d^2 / 2.
    Counts with `kl_in = "loss"` only."""

    kl_in: KlPlace = "loss"
    """Where that KL counts. `loss` adds it to every token's (GRPO). `reward` takes k1 = lp - lp_reference of every
    token, by the sampler's lp, from its reward: `reinforce_pp` sums the rewards behind a token (arXiv 2501.03262), the
    other algorithms those of an answer before they compare (arXiv 2402.14740). Groups are chosen by the rewards
    without it."""

    gae_lambda: Share = 0.95
    """With `algorithm = "gae"`: weight of later temporal differences in an advantage; 1 takes returns less values."""

    gamma: Share = 1.0
    """With `algorithm = "gae"`: discount of a reward per token."""

    critic_learning_rate: Rate = 1e-3
    """With `algorithm = "gae"`: learning rate of the value head, on the schedule of `learning_rate`."""

    value_coefficient: Annotated[float, Field(gt=0.0, le=1e6)] = 0.1
    """With `algorithm = "gae"`: weight of the critic's loss, by which it shapes the model that it shares."""

    value_clip: Annotated[float, Field(ge=0.0, le=1e6)] = 0.2
    """With `algorithm = "gae"`: how far a value counts as moved from the one at the start of the step; 0 bounds
    nothing."""

    overlong_buffer: CountOrZero = 0
    """Above 0: answers of the last so many tokens before `max_tokens` lose reward, linearly up to `overlong_penalty`
    (DAPO, arXiv 2503.14476). Which groups have something to teach is decided on the rewards before."""

    overlong_penalty: Annotated[float, Field(ge=0.0, le=1e6)] = 1.0
    """Reward that an answer of `max_tokens` loses."""

    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """Sampling temperature of training answers; evaluation is greedy."""

    max_tokens: Count = 12
    """Upper bound of generated tokens per answer; prompt and answer must fit the model's context."""

    verifier: str = "label"
    """Verifier of the training reward: one of the task's, or `external/NAME` for jobs that an outside caller completes,
    an instrument or a person (docs/sandbox.md)."""

    release: Release = "full"
    """When a group is trained on. `full` waits for the rewards of `verifier`. `surrogate` takes those of `surrogate` at
    once, as long as their calibration holds, and trains the difference when those of `verifier` come (docs/ladder.md);
    `verifier` must be of fidelity full, and the end of the run waits for nobody."""

    surrogate: str = "surrogate"
    """Verifier of the provisional rewards, of fidelity surrogate; counts with `release = "surrogate"` only."""

    rule: str = ""
    """Verifier of fidelity rule that a group meets before the surrogate; a group of which every answer fails it is
    graded by it alone. Empty leaves it out; counts with `release = "surrogate"` only."""

    audit_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of groups that are verified in full whatever they seem worth: what calibration and its error are measured
    on. Counts with `release = "surrogate"` only."""

    tolerated_error: Annotated[float, Field(ge=0.0, le=10.0)] = 0.05
    """Expected error of a group's advantages, in deviations, below which its other full verifications are left out.
    Counts with `release = "surrogate"` only."""

    full_cpu_seconds: Annotated[float, Field(ge=0.0, le=1e12)] = 0.0
    """CPU seconds of full verification that the groups of one weight version may use; 0 bounds nothing. Counts with
    `release = "surrogate"` only."""

    correction_lag: Annotated[int, Field(ge=0, le=100_000)] = 16
    """Largest age in versions at which a late reward is still trained; later ones are counted and dropped, and
    verifications for them are cancelled."""

    verify_seconds: Annotated[float, Field(gt=0.0, le=604_800.0)] | None = None
    """Deadline of one verification, from its creation to its grades, waits and retries included; later its rewards are
    unknown. Less than `no_progress_seconds`, since a run may have nothing to do but wait for one; unset takes 120, or
    two thirds of a shorter `no_progress_seconds`."""

    no_progress_seconds: Annotated[float, Field(gt=0.0, le=1_209_600.0)] = 180.0
    """The run fails with phase, waiting party and age when nothing has moved for this long."""

    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e6)] = 1.0
    """Limit of the gradient's norm; 0 turns it off."""

    @property
    def verify_deadline_seconds(self) -> float:
        """`verify_seconds`, or what stands for it."""
        return min(120.0, self.no_progress_seconds * 2 / 3) if self.verify_seconds is None else self.verify_seconds


class EvaluationConfig(_Section):
    """Held-out evaluation: greedy answers through the gateway, graded in the sandbox."""

    prompts: Count = 400
    """Held-out prompts of the main set, after warm-up and at the end; further sets of the task take half as many."""

    every_steps: CountOrZero = 50
    """Steps between intermediate evaluations; 0 evaluates at the ends only."""

    intermediate_prompts: Count = 64
    """Prompts of an intermediate evaluation."""

    surrogate_prompts: CountOrZero = 64
    """Answers that the surrogate verifier grades too, at the ends; 0 leaves it out."""

    full_prompts: CountOrZero = 4
    """Answers that the full verifier grades too, at the ends; 0 leaves it out."""


class CheckpointConfig(_Section):
    """Checkpoints: learner state, loop cursor and queue cut as one commit."""

    every_steps: CountOrZero = 25
    """Steps between checkpoints, in warm-up too, and one behind the last step of each stage; 0 writes none, and
    recovery replays from the beginning."""


class FleetConfig(_Section):
    """Processes of the run."""

    engines: Annotated[int, Field(ge=0, le=4096)] = 2
    """Inference replicas that the run starts, with the torch engine. 0 starts none and waits for a replica that is
    started beside it, such as a vLLM server (docs/real-llm.md)."""

    shared: Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?)?$")] = ""
    """Name of a fleet of torch engines that several LoRA runs on one model folder share: the run's adapter gets a seat
    on each of its replicas, and weight syncs move its factors only. The first run that names a fleet starts it, with
    its own `engines` and `weight_dtype`; an idle one ends. Empty: the run has engines of its own. Needs
    `model.lora_rank` and `model.path`."""

    rollout_workers: Annotated[int, Field(ge=1, le=4096)] = 2
    """Rollout workers; each holds its share of the open prompts, at least 16."""

    transport: Transport = "auto"
    """Way of the weights from learner to replicas: `shm` on one host, `ucx` over any network that UCX finds, `tcp` by
    plain sockets, `nixl` where its extra is installed. `auto` takes the first that works where the process runs (see
    docs/weights.md); one that is named and fails its test at the start is an error."""

    sync_timeout_seconds: Seconds = 30.0
    """Seconds that one weight sync may take; it is tried once more, then the run fails with the receiver's text."""

    weight_dtype: WeightDtype = "float32"
    """Type of the weights that replicas get and compute in; `bfloat16` halves the bytes of a sync and the memory."""

    weight_delta: bool = False
    """Sends a version as its difference to the one before: slow links between learner and replicas gain, at the price
    of processor time. The weights go in full where the difference is not small (learning rates above about 1e-5), to
    replicas that lack the version before, and from a learner that was restarted. Needs `weight_dtype = "bfloat16"`."""

    weight_mode: WeightMode = "auto"
    """How replicas take new weights. `swap` keeps a second copy, and decoding pauses for an exchange of pointers;
    `in_place` writes over the only copy, and decoding pauses for the transfer. `auto` takes `swap` where two copies and
    the KV cache fit the memory."""

    probe_every: CountOrZero = 0
    """Weight syncs from one comparison of learner and replicas to the next: all of them score one prompt, and a replica
    whose log-probs differ gets no more requests. 0 compares never."""


class RunConfig(_Section):
    """What to train: one run file."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "xrd-phase-id"
    """Short name (a-z, 0-9, "-"); the run id is this name with a short hash."""

    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0
    """Seed of data, initialisation and sampling."""

    deterministic: bool = False
    """For audits: the run repeats bit for bit on the same machine, whatever is killed on the way, and the learner's
    log-probs equal the engines' exactly. Engines decode one sequence at a time: slow. Needs `rl.max_lag = 0`."""

    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    warmup: WarmupConfig = WarmupConfig()
    rl: RlConfig = RlConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fleet: FleetConfig = FleetConfig()
