"""What processes measured of their transports. For people: it lives in memory and is reported again after a restart."""

from collections import OrderedDict

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb

_PROCESSES = 1024


class Paths:
    """The last report of each process, of the latest processes."""

    def __init__(self) -> None:
        self._reports: OrderedDict[str, pb.ReportPathsRequest] = OrderedDict()

    def report(self, report: pb.ReportPathsRequest) -> None:
        """Replaces what the process said before."""
        self._reports[report.process] = report
        self._reports.move_to_end(report.process)
        while len(self._reports) > _PROCESSES:
            self._reports.popitem(last=False)

    def all(self) -> list[pb.ReportPathsRequest]:
        """All reports in order of process."""
        return [self._reports[name] for name in sorted(self._reports)]
