"""TRL's GRPOTrainer on the prompts of a file, in its own environment: one JSON line per optimizer step with its time.

    trl_peer.py MODEL PROMPTS STEPS GROUPS SAMPLES MAX_TOKENS THREADS PASSES

A step's batch goes through the model in PASSES parts, whose gradients add up. The last line has the peak of the
process's resident memory. Same settings as our run: float32, no checkpointing of
gradients, constant learning rate, one pass per batch, token mean over the batch, rewards scaled by group.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

import torch
from datasets import Dataset
from score import score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Prints the time at which each step ends."""

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        print(json.dumps({"at": time.time()}), flush=True)


def main() -> None:
    folder, prompts = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    steps, groups, samples, max_tokens, threads, passes = map(int, sys.argv[3:9])
    torch.set_num_threads(threads)
    with TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=steps,
            per_device_train_batch_size=groups * samples // passes,
            gradient_accumulation_steps=passes,
            num_generations=samples,
            max_completion_length=max_tokens,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            dataloader_pin_memory=False,
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [score(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[Clock()],
        )
        trainer.train()
    print(json.dumps({"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


if __name__ == "__main__":
    main()
