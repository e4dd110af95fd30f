"""Offers as JSON: the routes of foreign engines carry nothing else to their workers. Free of gRPC and protos."""

import base64
import json
import time

from reflux_transfer.client.offer import Offer, Route, SourceRegion
from reflux_weightplan.spec import SpecLayout
from reflux_weightplan.wire import canonical, parse


def offer_to_json(offer: Offer) -> str:
    """One line of text. The source's layout goes along unless it is the reader's own; a deadline as what is left."""
    regions = [
        [region.rank, base64.b64encode(region.handle).decode(), region.transport, region.generation]
        for region in offer.regions
    ]
    fields = {
        "version": offer.version,
        "epoch": offer.epoch,
        "kind": offer.kind,
        "seconds": max(0.0, offer.deadline - time.monotonic()),
        "regions": regions,
        "packed": offer.route.packed,
        "source": "" if offer.route.same else canonical(offer.route.source).decode(),
    }
    return json.dumps(fields, separators=(",", ":"))


class OfferReader:
    """The inverse, for readers of a layout of one rank; keeps the route that was made last."""

    def __init__(self, layout: SpecLayout) -> None:
        self.layout = layout
        self._source: str | None = None
        self._route: Route | None = None

    def read(self, text: str) -> Offer:
        """Raises `ValueError`, `KeyError` or `TypeError` for what is no offer, `PlanRefused` for a source that does
        not fit.
        """
        fields = json.loads(text)
        regions = tuple(
            SourceRegion(int(rank), base64.b64decode(handle, validate=True), str(transport), int(generation))
            for rank, handle, transport, generation in fields["regions"]
        )
        seconds = float(fields["seconds"])
        deadline = time.monotonic() + seconds
        route = self._routed(fields["source"], bool(fields["packed"]))
        version, epoch, kind = int(fields["version"]), int(fields["epoch"]), fields["kind"]
        return Offer(version, epoch, kind, regions, route, deadline, seconds)

    def _routed(self, source: str, packed: bool) -> Route:
        if self._route is None or (source, packed) != (self._source, self._route.packed):
            layout = parse(source.encode()) if source else self.layout
            self._route, self._source = Route(layout, self.layout, 0, packed=packed), source
        return self._route
