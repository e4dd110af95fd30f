import pytest

from reflux_weight_broker.plan import Tensors, check_layouts
from reflux_weight_broker.refusals import LayoutMismatch


def test_layouts_that_differ_are_refused_by_tensor_name() -> None:
    source = Tensors("a", 1, {"w": ((2,), "float32"), "b": ((2,), "float32")})
    destination = Tensors("b", 1, {"w": ((3,), "float32"), "x": ((2,), "float32")})
    with pytest.raises(
        LayoutMismatch, match=r"replica r0.*missing b.*unexpected x.*w is float32\[3\] instead of float32\[2\]"
    ):
        check_layouts(source, destination, "r0")


def test_many_differences_are_counted() -> None:
    source = Tensors("a", 1, {f"w{index}": ((2,), "float32") for index in range(9)})
    with pytest.raises(LayoutMismatch, match="missing w4 and 5 more"):
        check_layouts(source, Tensors("b", 1, {"x": ((2,), "float32")}), "r0")


def test_layouts_fit_however_they_are_cut_and_ordered() -> None:
    source = Tensors("a", 1, {"w": ((2,), "float32"), "b": ((2,), "int8")})
    check_layouts(source, Tensors("b", 4, {"b": ((2,), "int8"), "w": ((2,), "float32")}), "r0")
