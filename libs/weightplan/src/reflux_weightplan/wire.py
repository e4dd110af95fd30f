"""Owns the canonical bytes of a symbolic layout and their hash: equal layouts give equal bytes in every process."""

import json
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from typing import Any

import xxhash

from reflux_weightplan.mesh import Cut, Mesh, Place, Placement
from reflux_weightplan.spec import SpecLayout, TensorSpec

FORMAT = "reflux-weight-layout/1"


def canonical(layout: SpecLayout) -> bytes:
    """JSON lines: a head with mesh, engine and places, then one line per tensor. Placements are written once."""
    return "\n".join(_lines(layout)).encode()


def _lines(layout: SpecLayout) -> Iterator[str]:
    placements: dict[Placement, int] = {}
    known: dict[int, int] = {}
    numbers = []
    for tensor in layout.tensors:  # Equal placements are mostly one object, and comparing them is slow.
        number = known.get(id(tensor.placement))
        if number is None:
            number = known[id(tensor.placement)] = placements.setdefault(tensor.placement, len(placements))
        numbers.append(number)
    yield _dump([FORMAT, layout.mesh.axes, layout.engine])
    yield _dump([[p.host, p.domain, p.rack, p.nic, p.bytes_per_second] for p in layout.places])
    yield _dump([[[[c.dim, c.axis, c.rule, c.unit] for c in p.cuts], p.pinned] for p in placements])
    for tensor, number in zip(layout.tensors, numbers, strict=True):
        fused = f"{_dump(tensor.fused)},{tensor.fused_order},{tensor.fused_rows}" if tensor.fused else '"",0,0'
        shape = ",".join(map(str, tensor.shape))
        yield f'[{encode_basestring_ascii(tensor.name)},[{shape}],"{tensor.dtype}",{number},{tensor.layer},{fused}]'


def parse(data: bytes) -> SpecLayout:
    """The layout whose canonical bytes these are; `ValueError` for anything else, `LayoutRefused` among them."""
    try:
        return _parse(data)
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(f"these bytes are no layout: {error}") from error


def _parse(data: bytes) -> SpecLayout:
    head, places, placements, *tensors = [json.loads(line) for line in data.split(b"\n")]
    if head[0] != FORMAT:
        raise ValueError(f"a layout starts with {FORMAT}, not {head[0]!r}")
    shared = [
        Placement(tuple(Cut(*cut) for cut in cuts), tuple((axis, coordinate) for axis, coordinate in pinned))
        for cuts, pinned in placements
    ]
    return SpecLayout(
        mesh=Mesh(tuple((name, size) for name, size in head[1])),
        tensors=tuple(
            TensorSpec(name, tuple(shape), dtype, shared[number], layer, *fused)
            for name, shape, dtype, number, layer, *fused in tensors
        ),
        places=tuple(Place(*place) for place in places),
        engine=head[2],
    )


def digest(*parts: bytes) -> str:
    """xxh3_128 of the parts one after the other, as 32 hexadecimal digits."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def layout_hash(layout: SpecLayout) -> str:
    """Hash of the canonical bytes: the name under which a layout travels and a plan is cached."""
    return digest(canonical(layout))


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
