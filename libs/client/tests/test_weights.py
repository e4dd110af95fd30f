"""`reflux weights plan`: a plan from a preset or a file, as text and as JSON, and files that cannot be."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux_client.commands.weights import paths_table, weights
from reflux_client.connection import ClientError
from reflux_client.layout_file import load_layouts

FILE = """
[model]
preset = "smollm2-135m"
[source]
kind = "fsdp"
shards = 2
[target]
kind = "parallel"
replicas = 2
"""


def test_a_plan_names_bytes_buckets_and_bound() -> None:
    result = CliRunner().invoke(weights, ["plan", "--preset", "smollm2-135m-2-to-2"])
    assert result.exit_code == 0, result.output
    for word in ("plan ", "layouts", "0.50 GiB", "buckets", "lower bound", "efficiency"):
        assert word in result.output


def test_a_file_gives_the_plan_of_the_preset_that_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "layouts.toml"
    file.write_text(FILE)
    told = [
        json.loads(CliRunner().invoke(weights, ["plan", "--json", *how]).output)
        for how in ([str(file)], ["--preset", "smollm2-135m-2-to-2"])
    ]
    assert told[0] == told[1]
    assert told[0]["nbytes"] == 2 * 134_515_008 * 2
    assert 0 < told[0]["efficiency"] <= 1


def test_the_model_may_be_a_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "vocab_size": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "layouts.toml"
    file.write_text('[model]\nconfig = "model"\n[source]\n[target]\n')
    source, target = load_layouts(file)
    assert source.nbytes == target.nbytes == 2 * (64 * 8 + 4 * 8 * 8 + 3 * 8 * 16 + 3 * 8)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[model]\npreset = 'nobody'\n[source]\n[target]\n", "nobody"),
        ("[model]\npreset = 'smollm2-135m'\n[source]\nkind = 'ddp'\n[target]\n", "source.kind"),
        ("[model]\npreset = 'smollm2-135m'\n[source]\nshards = 0\n[target]\n", "source.shards"),
        ("[model]\npreset = 'smollm2-135m'\n[target]\n", "source"),
        ("[model]\npreset = 'qwen3-30b-a3b'\n[source]\nkind = 'fsdp-experts'\nowners = 3\n[target]\n", "3 owners"),
        ("[model\n", "layouts.toml"),
        ("[model]\nconfig = 'nowhere.json'\n[source]\n[target]\n", "nowhere.json"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_key(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "layouts.toml"
    file.write_text(text)
    with pytest.raises(ClientError, match=named):
        load_layouts(file)


@pytest.mark.parametrize("arguments", [[], ["--preset", "smollm2-135m-2-to-2", "--gigabytes-per-second", "0"]])
def test_what_makes_no_plan_is_said(arguments: list[str]) -> None:
    result = CliRunner().invoke(weights, ["plan", *arguments])
    assert isinstance(result.exception, ClientError)


def test_paths_are_shown_with_peer_rate_and_reason() -> None:
    slow = pb.TransferPath(transport="tcp", peer="pid 7 (ab12cd34)", bytes_per_second=2.5e9, reason="below its floor")
    paths = [pb.TransferPath(transport="shm", bytes_per_second=8e9, chosen=True, reason="configured"), slow]
    answer = pb.ListPathsResponse(processes=[pb.ReportPathsRequest(process="replicas/a", paths=paths)])
    console = Console(width=200, file=io.StringIO())
    with console.capture() as printed:
        console.print(paths_table(answer))
    own, peer = (line for line in printed.get().splitlines() if "replicas/a" in line)
    assert [word for word in own.split() if word != "\u2502"] == ["replicas/a", "shm", "-", "8.00", "yes", "configured"]
    for word in ("tcp", "pid 7 (ab12cd34)", "2.50", "below its floor"):
        assert word in peer
    assert "yes" not in peer


def test_what_is_executed_is_told_from_what_is_a_model() -> None:
    how = ["plan", "--preset", "smollm2-135m-2-to-2"]
    assert "route       direct\n" in CliRunner().invoke(weights, how).output
    relayed = CliRunner().invoke(weights, [*how, "--relay", "relay"]).output
    assert "route       relay (a model: publishers and replicas go direct)\n" in relayed
