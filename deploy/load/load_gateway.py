"""`make load-gateway`: open-loop load on any OpenAI endpoint, with percentiles, failures by kind and an HTML report.

    python deploy/load/load_gateway.py http://127.0.0.1:8003 --rate 20 --mix chat --duration 60

A token is taken from REFLUX_TOKEN. The last line of output is one JSON object. Status 1 when more requests failed than
`--max-failed` allows, 2 when the run could not start.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import aiohttp
from figures import by_kind, flat
from load_report import write_report
from request_mix import MixError, arrivals, read_mix
from sending import Outcome, first_model, send_all


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("url", help="the endpoint without /v1")
    made.add_argument("--rate", type=float, default=10.0, help="requests per second on average")
    made.add_argument("--duration", type=float, default=30.0, help="seconds in which requests start")
    made.add_argument("--mix", default="chat", help="a file of deploy/load/mixes, or a path that ends in .toml")
    made.add_argument("--model", default="", help="without it: the first one that /v1/models lists")
    made.add_argument("--limit", type=float, default=300.0, help="longest wait for one answer, in seconds")
    made.add_argument("--max-inflight", type=int, default=4096, help="requests above it are counted and not sent")
    made.add_argument("--max-failed", type=float, default=0.01, help="share of failures that is still a success")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--report", type=Path, default=Path("runs/load.html"))
    return made


async def run(options: argparse.Namespace, token: str) -> tuple[list[Outcome], dict[str, str]]:
    """Sends the load; what became of each request, and what to say about the run."""
    kinds = read_mix(options.mix)
    model = options.model or await first_model(options.url, token)
    planned = arrivals(kinds, model, options.rate, options.duration, options.seed)
    facts = {
        "address": options.url,
        "model": model,
        "mix": options.mix,
        "rate": f"{options.rate:g}/s",
        "for": f"{options.duration:g} s",
        "seed": str(options.seed),
        "at": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    outcomes = await send_all(
        options.url, token, planned, limit_seconds=options.limit, max_inflight=options.max_inflight
    )
    return outcomes, facts


def show(outcomes: list[Outcome]) -> None:
    """Prints a table for people."""
    for part in by_kind(outcomes):
        print(f"{part.name}: {part.requests} requests, {part.failed} failed, {part.tokens} tokens")
        for name, times in part.times.items():
            print(f"  {name:12}" + "".join(f" {share} {value * 1e3:.1f} ms" for share, value in times.items()))
        for error, count in part.errors.items():
            print(f"  {count} x {error}")


def main() -> int:
    """Runs the load and tells of it; the exit status."""
    options = parser().parse_args()
    if options.rate <= 0 or options.duration <= 0:
        print("load-gateway: rate and duration must be above 0", file=sys.stderr)
        return 2
    try:
        outcomes, facts = asyncio.run(run(options, os.environ.get("REFLUX_TOKEN", "")))
    except (MixError, LookupError, aiohttp.ClientError, TimeoutError) as error:
        print(f"load-gateway: {error or type(error).__name__}", file=sys.stderr)
        return 2
    show(outcomes)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    write_report(options.report, outcomes, options.duration, facts)
    print(f"report: {options.report}")
    figures = flat(outcomes, options.duration)
    print(json.dumps(figures))
    return 1 if figures["failed"] > options.max_failed * max(1, figures["requests"]) else 0


if __name__ == "__main__":
    sys.exit(main())
