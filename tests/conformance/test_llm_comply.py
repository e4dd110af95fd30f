"""The suite `llm-comply` on the chat API: what we support passes, what we do not is a 400."""

import json
import subprocess
import sys
from pathlib import Path

UNSUPPORTED = {"chat-tool-calling", "chat-image-input"}
"""The torch engine has no tools and no images; other engines get such requests as they are."""


def test_every_case_passes_or_is_a_bad_request(endpoint):
    command = [str(Path(sys.executable).parent / "llm-comply"), "--format", "openai-chat", "--json"]
    command += ["-u", f"{endpoint}/v1", "-k", "any", "-m", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    results = {case["id"]: case for case in json.loads(done.stdout)["results"]}
    failed = {name for name, case in results.items() if case["status"] == "failed"}
    assert failed == UNSUPPORTED
    assert all(results[name]["errors"][0].startswith("HTTP 400") for name in failed)
    assert sum(case["status"] == "passed" for case in results.values()) >= 6
