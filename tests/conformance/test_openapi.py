"""The OpenAPI document: valid, and kept by a gateway and engine that schemathesis sends all sorts of requests."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from openapi_spec_validator import validate

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi" / "gateway.yaml"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_the_document_is_valid():
    validate(yaml.safe_load(DOCUMENT.read_text()))


@pytest.mark.slow
def test_answers_to_whatever_comes_are_as_the_document_says(endpoint, tmp_path):
    document = yaml.safe_load(DOCUMENT.read_text())
    sampling = document["components"]["schemas"]["Sampling"]
    sampling["properties"] |= {"model": {"const": "tiny"}, "n": {"type": "integer", "minimum": 1, "maximum": 2}}
    sampling["properties"]["max_tokens"] |= {"maximum": 4}
    sampling["required"] += ["max_tokens"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        del document["paths"][path]["post"]["parameters"]  # a version that nobody has would be waited for
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(document))
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", str(tmp_path / "gateway.yaml")]
    command += ["--url", endpoint, "--checks", CHECKS, "--generation-deterministic", "--no-color"]
    command += ["--max-examples", "20", "--request-timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
