"""Products in another form are the same products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.graphs import Graph, assert_equal, record
from workbench.train.traced.graph import products
from workbench.train.traced.graph.products import add_inside, share_operands, transpose_products, use_onednn

DTYPES = [torch.float32, torch.float64]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available() or products._linear() is None:
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)


def check(graph: Graph, rtol: float | None = None) -> list[str]:
    assert_equal(graph.run(), graph.results, rtol)
    return graph.targets()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_bias_is_added_inside(dtype: torch.dtype, swapped: bool) -> None:
    w, b, x = tensors((3, 8, 4), (3, 1, 8), (3, 5, 4), dtype=dtype)

    def function(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        product = torch.bmm(x, w.transpose(1, 2))
        return b + product if swapped else product + b

    graph = record(function, [w, b], [x])
    add_inside(graph.graph)
    graph.refresh()
    assert check(graph) == ["transpose.int", "baddbmm.default"]


def test_a_product_that_is_needed_elsewhere_stays() -> None:
    w, b, x = tensors((3, 4, 8), (3, 1, 8), (3, 5, 4), dtype=torch.float64)
    graph = record(lambda w, b, x: [p := torch.bmm(x, w), p + b], [w, b], [x])
    add_inside(graph.graph)
    assert check(graph) == ["bmm.default", "add.Tensor"]
    scaled = record(lambda w, b, x: torch.add(torch.bmm(x, w), b, alpha=2), [w, b], [x])
    add_inside(scaled.graph)
    assert check(scaled) == ["bmm.default", "add.Tensor"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_products_are_transposed(dtype: torch.dtype) -> None:
    w, x = tensors((3, 10, 4), (3, 32, 4), dtype=dtype)
    graph = record(lambda w, x: torch.bmm(x, w.transpose(1, 2)).relu(), [w], [x])
    transpose_products(graph.graph)
    graph.refresh()
    assert check(graph)[-3:] == ["bmm.default", "transpose.int", "relu.default"]
    (product,) = [n for n in graph.graph.nodes if "bmm" in str(n.target)]
    assert product.meta["tensor"].shape == (3, 10, 32)
    assert "lane" not in str(product.args[0])
    assert product.args[0] in graph.inputs, "the transpose of a transpose is the weight itself"


def test_wide_products_stay() -> None:
    w, x = tensors((3, 64, 4), (3, 32, 4), dtype=torch.float32)
    graph = record(lambda w, x: torch.bmm(x, w.transpose(1, 2)), [w], [x])
    transpose_products(graph.graph)
    assert check(graph) == ["transpose.int", "bmm.default"]


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [False, True])
def test_one_product_stands_for_many_with_the_same_operand(bias: bool) -> None:
    w, b, x = tensors((3, 8, 4), (3, 8, 1), (5, 4), dtype=torch.float32)

    def function(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        shared = x.t().expand(3, 4, 5)
        return torch.baddbmm(b, w, shared) if bias else torch.bmm(w, shared)

    graph = record(function, [w, b], [x])
    share_operands(graph.graph)
    graph.refresh()
    targets = check(graph)
    assert targets.count("mm.default") == 1
    assert not any("bmm" in t for t in targets)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", ["none", "left", "right", "both"])
def test_large_products_go_to_onednn(bias: bool, transposed: str) -> None:
    left, right, b = tensors((256, 128), (128, 192), (192,), dtype=torch.float32)
    left = left.t().contiguous().t() if transposed in ("left", "both") else left
    right = right.t().contiguous().t() if transposed in ("right", "both") else right
    graph = record(lambda x, y, b: torch.addmm(b, x, y) if bias else torch.mm(x, y), [left, right, b])
    use_onednn(graph.graph)
    graph.refresh()
    assert check(graph)[-1] == "mkldnn._linear_pointwise.default"


@pytest.mark.usefixtures("onednn")
def test_small_ones_and_float64_stay() -> None:
    for shape, dtype in (((8, 8), torch.float32), ((256, 256), torch.float64)):
        x, y = tensors(shape, shape, dtype=dtype)
        graph = record(torch.mm, [x, y])
        use_onednn(graph.graph)
        assert check(graph) == ["mm.default"]


def test_without_onednn_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: False)
    x, y = tensors((256, 256), (256, 256), dtype=torch.float32)
    graph = record(torch.mm, [x, y])
    use_onednn(graph.graph)
    share_operands(graph.graph)
    assert graph.targets() == ["mm.default"]


def test_which_library_is_faster_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for slow, expected in ((0.0, False), (1.0, True)):
        clock = iter([t for n in range(40) for t in (10 * n, 10 * n + (1 + slow if n % 2 == 0 else 1.0))])
        monkeypatch.setattr(products.time, "perf_counter", lambda: next(clock))  # noqa: B023
        assert products._onednn_is_faster.__wrapped__() is expected
