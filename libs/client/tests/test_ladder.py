from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux_client.commands.ladder import rows


def test_a_run_with_a_past_shows_trust_savings_and_reasons():
    shown = dict(
        rows(
            pb.GetCalibrationResponse(
                trusted=True,
                pairs=80,
                effective_pairs=61.2,
                rank_correlation=0.81,
                cpu_seconds=60.0,
                cpu_seconds_saved=40.0,
                skipped=[pb.SkipCount(reason="decided", count=7), pb.SkipCount(reason="stale", count=1)],
            )
        )
    )
    assert shown["trusted"].startswith("yes")
    assert shown["CPU saved"] == "40.0 of 100.0 s"
    assert shown["skipped"] == "7 decided, 1 stale"
    assert shown["rank correlation"] == "0.810"


def test_a_run_without_a_past_shows_that_nothing_is_known():
    nothing = float("nan")
    shown = dict(rows(pb.GetCalibrationResponse(rank_correlation=nothing, bias=nothing, advantage_error=nothing)))
    assert shown["trusted"].startswith("no")
    assert shown["rank correlation"] == "-"
    assert shown["CPU saved"] == "nothing yet"
