"""What an operator sees of one request: a trace over processes, and the engine's choice of transport."""

import asyncio
import json
import os
import re
import subprocess
import sys

import aiohttp
import pytest

TRACE = "0af7651916cd43dd8448eb211c80319c"
_DOORS = re.compile(r"serves gRPC on (\S+) and HTTP on (\S+)")


@pytest.fixture
def gateway_process(tmp_path, monkeypatch):
    """A gateway in a process of its own that writes spans below tmp_path."""
    monkeypatch.setenv("REFLUX_STATE_DIR", str(tmp_path))
    own = {f"REFLUX_INFERENCE_GATEWAY_{name}": "127.0.0.1:0" for name in ("LISTEN", "HTTP_LISTEN")}
    command = [sys.executable, "-m", "reflux_inference_gateway.main"]
    process = subprocess.Popen(command, env=os.environ | own, stderr=subprocess.PIPE, text=True)
    doors = next(found for line in process.stderr if (found := _DOORS.search(line)))
    yield process, doors[1], f"http://{doors[2]}"
    process.kill()
    process.wait()


async def test_a_traced_request_joins_gateway_and_engine(
    gateway_process, start_engine, model_folder, ready_replicas, tmp_path
):
    process, address, url = gateway_process
    engine = start_engine(model_folder, address, WEIGHTS="broker")  # nobody is the broker here: it stays at version 0
    try:
        (replica,) = await ready_replicas(address, "tiny", 1)
        async with aiohttp.ClientSession() as session:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 3}
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
            async with session.get(f"{replica.http_url}/metrics") as response:
                metrics = await response.text()
    finally:
        engine.stop()
        process.terminate()
        await asyncio.to_thread(process.wait, 20)
    spans = {}
    for path in (tmp_path / "traces").glob("*.jsonl"):
        spans |= {span["name"]: span for span in map(json.loads, path.read_text().splitlines())}
    assert spans["gateway.http"]["trace_id"] == spans["engine.generate"]["trace_id"] == TRACE
    assert spans["engine.generate"]["parent_id"] == spans["gateway.http"]["span_id"]
    assert len(re.findall(r'reflux_transfer_chosen\{backend="\w+"\} 1.0', metrics)) == 1
    assert "transfer backend" in engine.log.read_text()
