"""reflux ladder: how far the surrogate of a run can be trusted, and what the value of information saved."""

import asyncio
import math

import click
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux.sandbox.v1.ladder_service_pb2_grpc import LadderServiceStub
from reflux_client import connection


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer.")
def ladder(run: str, as_json: bool) -> None:
    """Show the calibration of RUN: cheap against full rewards, trust, coverage, and CPU seconds saved."""
    known = asyncio.run(_calibration(run))
    if as_json:
        click.echo(MessageToJson(known, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    table = Table("figure", "value", title=f"fidelity ladder of {run}", title_justify="left")
    for name, value in rows(known):
        table.add_row(name, value)
    Console().print(table)


async def _calibration(run: str) -> pb.GetCalibrationResponse:
    async with connection.channel("sandbox") as channel:
        return await LadderServiceStub(channel).GetCalibration(pb.GetCalibrationRequest(run=run))


def rows(known: pb.GetCalibrationResponse) -> list[tuple[str, str]]:
    """What a person wants to know, as text."""
    total = known.cpu_seconds + known.cpu_seconds_saved
    saved = f"{known.cpu_seconds_saved:.1f} of {total:.1f} s" if total else "nothing yet"
    skipped = ", ".join(f"{each.count} {each.reason}" for each in known.skipped) or "none"
    return [
        ("groups open, released, settled", f"{known.groups_open}, {known.groups_released}, {known.groups_settled}"),
        ("trusted", "yes: groups are released on it" if known.trusted else "no: releases wait for full"),
        ("pairs (effective)", f"{known.pairs} ({known.effective_pairs:.0f})"),
        ("rank correlation", _number(known.rank_correlation)),
        ("bias, spread", f"{_number(known.bias)}, {_number(known.spread)}"),
        ("released samples with a full grade", _number(known.coverage)),
        ("full rewards inside the 90 % forecast", _number(known.interval_coverage)),
        ("CPU saved", saved),
        (f"advantage error ({known.audited_groups} audited groups)", _number(known.advantage_error)),
        ("skipped", skipped),
    ]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
