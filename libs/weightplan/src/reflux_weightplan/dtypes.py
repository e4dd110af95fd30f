"""Owns the sizes of element types, by the names that torch and numpy share."""

from reflux_weightplan.errors import LayoutRefused

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def item_bytes(name: str, dtype: str) -> int:
    """Bytes of one element; `LayoutRefused` with the tensor's name for a type without a rule."""
    if dtype not in ITEM_BYTES:
        raise LayoutRefused(f"tensor {name} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]
