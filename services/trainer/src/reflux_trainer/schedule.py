"""Learning rates by step: linear ramp, then linear decay to a floor."""

from reflux_runs.config import RlConfig, WarmupConfig

WARMUP_RAMP_STEPS = 20
WARMUP_FLOOR = 0.05


def learning_rate(step: int, steps: int, peak: float, ramp_steps: int, floor: float) -> float:
    """Rate of step `step` (from 0) of `steps`: peak * min(1, (step + 1) / ramp) * max(floor, 1 - step / steps)."""
    ramp = min(1.0, (step + 1) / ramp_steps) if ramp_steps else 1.0
    return peak * ramp * max(floor, 1.0 - step / steps)


def rl_rate(config: RlConfig, step: int) -> float:
    """Rate of a step of reinforcement learning."""
    return learning_rate(step, config.steps, config.learning_rate, config.ramp_steps, config.final_lr_fraction)


def critic_rate(config: RlConfig, step: int) -> float:
    """Rate of the critic's head, on the same schedule; 0 without a critic."""
    if config.algorithm != "gae":
        return 0.0
    return config.critic_learning_rate * rl_rate(config, step) / config.learning_rate


def warmup_rate(config: WarmupConfig, step: int) -> float:
    """Rate of a supervised step."""
    return learning_rate(step, config.steps, config.learning_rate, WARMUP_RAMP_STEPS, WARMUP_FLOOR)
