"""``watch.conflicts``: norms, cosines and winners against autograd and by hand."""

from __future__ import annotations

from itertools import combinations
from math import isnan, nan, sqrt
from typing import Any

import pytest
import torch
from architectures import in_float64
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.autodiff.names import enclosing
from gradtrace.errors import GradtraceError, NoGraph, NonFinite, UnknownName, Unsupported
from gradtrace.measures.conflicts import Compared, Conflicts


class TwoTasks(nn.Module):
    """A body that two heads share, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.left(hidden), self.right(hidden)


def two_tasks(dtype: torch.dtype = torch.float64) -> tuple[TwoTasks, gt.watch, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = TwoTasks().to(dtype)
    with gt.watch(model) as watch:
        left, right = model(torch.randn(5, 4, dtype=dtype))
        terms = {"ce": left.square().mean(), "kl": -3 * right.exp().sum()}
    return model, watch, terms


def by_autograd(model: nn.Module, terms: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """``{parameter: {term: gradient}}`` of all parameters that require grad; zeros for None."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, dict[str, Tensor]] = {name: {} for name in named}
    for term, loss in terms.items():
        some = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for (name, p), grad in zip(named.items(), some):
            found[name][term] = torch.zeros_like(p) if grad is None else grad
    return found


def assert_as_autograd(table: Conflicts, model: nn.Module, terms: dict[str, Tensor]) -> None:
    """Every number of every module and parameter."""
    grads = by_autograd(model, terms)
    first = {id(p): name for name, p in model.named_parameters()}
    places: dict[str, dict[str, None]] = {"": dict.fromkeys(grads)}
    for name, p in model.named_parameters(remove_duplicate=False):
        for place in (name, *enclosing(name)):
            places.setdefault(place, {})[first[id(p)]] = None
    for place, inside in places.items():
        whole = {t: torch.cat([grads[n][t].flatten().double() for n in inside]) for t in terms}
        total = torch.stack(list(whole.values())).sum(0)
        for term, grad in whole.items():
            norm = float(grad.norm())
            assert table.norm(term, place) == pytest.approx(norm, rel=1e-12, abs=1e-300)
            share = float(grad @ total / (total @ total))
            assert table.share(term, place) == pytest.approx(share, rel=1e-9, nan_ok=True)
        for a, b in combinations(terms, 2):
            size = float(whole[a].norm() * whole[b].norm())
            cosine = float(whole[a] @ whole[b]) / size if size else nan
            assert table.cosine(a, b, place) == pytest.approx(cosine, abs=1e-12, nan_ok=True)


def test_every_number_is_that_of_autograd() -> None:
    model, watch, terms = two_tasks()
    assert_as_autograd(watch.conflicts(terms), model, terms)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "vit", "mamba", "resnet"])
def test_architectures_as_autograd_in_float64(name: str) -> None:
    """The loss, a pull on the weights of every parameter, and a part of the graph walked twice."""
    model, loss_of = in_float64(name)
    model.eval()
    with gt.watch(model) as watch:
        loss = loss_of(model)
        decay = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        terms = {"loss": loss, "decay": -0.01 * decay, "tanh": loss.tanh()}
    assert_as_autograd(watch.conflicts(terms), model, terms)


def test_by_hand() -> None:
    """With w ∈ R², terms 3 w₀ + 4 w₁ and -w₀: the sum is (2, 4), of square 20."""
    model = nn.Linear(2, 1, bias=False)
    with gt.watch(model) as watch:
        up, down = model(torch.tensor([3.0, 4.0])), model(torch.tensor([-1.0, 0.0]))
    table = watch.conflicts({"up": up, "down": down})
    assert table.norm("up") == 5 and table.norm("down", module="weight") == 1
    assert table.cosine("up", "down") == table.cosine("down", "up") == pytest.approx(-3 / 5)
    assert table.share("up") == pytest.approx(22 / 20)
    assert table.share("down") == pytest.approx(-2 / 20)
    assert table.winner() == "up" and table.cosine("up", "up") == 1


def test_terms_that_cancel_have_no_winner() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    table = gt.watch(nn.Identity()).conflicts({"a": w.sum(), "b": -w.sum()})
    assert table.winner() is None and isnan(table.share("a"))
    assert table.cosine("a", "b") == pytest.approx(-1) and table.norm("a") == pytest.approx(sqrt(2))


def test_a_term_that_does_not_reach_a_module() -> None:
    _, watch, terms = two_tasks()
    table = watch.conflicts(terms)
    assert table.norm("kl", "left") == 0 and isnan(table.cosine("ce", "kl", "left"))
    assert table.winner("left") == "ce" and table.share("ce", "left") == 1
    assert table.norm("ce", "unused") == 0 and table.winner("unused") is None
    assert table["left"].values[3:] == (0.0, None, "ce", 1.0)
    text = str(table)
    assert "no term gives unused a gradient" in text
    assert "kl does not give left a gradient" in text and "ce does not give right" in text


def test_samples_are_named_by_their_index() -> None:
    torch.manual_seed(0)
    model = TwoTasks().double()
    with gt.watch(model) as watch:
        losses = model(torch.randn(7, 4).double())[0].square().mean(1)
    table = watch.conflicts(losses)
    assert table.terms == tuple("0123456")
    assert_as_autograd(table, model, {str(n): loss for n, loss in enumerate(losses)})
    lowest = min(table.cosine(a, b, "body") for a, b in combinations(table.terms, 2))
    assert table["body"].lowest_cosine == pytest.approx(lowest)
    a, b = table["body"].between.split(" and ")
    assert table.cosine(a, b, "body") == pytest.approx(lowest)
    assert table.cosine(int(a), int(b), "body") == table.cosine(a, b, "body")
    assert table.norm(3) == table.norm("3")
    assert len(table.cosines("body")) == 21


def test_the_table_prints_sorts_plots() -> None:
    _, watch, terms = two_tasks()
    table = watch.conflicts(terms)
    text = str(table)
    assert text.splitlines()[1].split() == [
        *("module", "elements", "norm", "ce", "norm", "kl", "cosine", "ce·kl", "wins"),
        *("its", "share"),
    ]
    assert [row.name for row in table] == [
        *("(all)", "body", "body.0", "body.2", "left", "right", "unused"),
    ]
    assert [row.name for row in table.by_parameter()][:2] == ["body.0.weight", "body.0.bias"]
    assert len(table.top(2, "cosine ce·kl")) == 2
    frame = table.to_pandas()
    assert frame["norm ce"][0] == table.norm("ce")
    axes: Any = table.plot("cosine ce·kl")
    assert axes.get_xlabel() == "cosine ce·kl"
    assert table["body"].elements == 4 * 6 + 6 + 36 + 6


def test_words_say_who_is_drowned_and_who_pulls_against_whom() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(w.detach()))
    with gt.watch(model) as watch:
        terms = {"big": 50 * model.w.sum(), "small": -model.w.sum()}
    table = watch.conflicts(terms).by_parameter()
    assert "the gradient of big is 50 times as long as that of small" in str(table)
    assert "these pull against each other: big and small in w (-1.00)" in str(table)


def test_tied_weights_belong_to_both_and_count_once() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    with gt.watch(model) as watch:
        x = torch.randn(2, 3)
        terms = {"p": model["a"](x).sum(), "q": model["b"](x).square().sum()}
    table = watch.conflicts(terms)
    assert table.norm("p", "a") == table.norm("p", "b") == table.norm("p")
    assert table["b"].elements == table["(all)"].elements == 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_are_of_float64(dtype: torch.dtype) -> None:
    """Squares that float16 cannot hold."""
    w = torch.full((3,), 0.0, dtype=dtype, requires_grad=True)
    table = gt.watch(nn.Identity()).conflicts({"a": (w * 1000).sum(), "b": (w * 2).sum()})
    assert table.norm("a") == pytest.approx(1000 * sqrt(3), rel=1e-12)
    assert table.cosine("a", "b") == pytest.approx(1, rel=1e-12)


def test_complex_and_empty_leaves() -> None:
    z = torch.tensor([3 + 4j], requires_grad=True)
    none = torch.zeros(0, requires_grad=True)
    terms = {"a": (z * z.conj()).real.sum() + none.sum(), "b": z.real.sum()}
    (whole, empty) = sorted(gt.watch(nn.Identity()).conflicts(terms).parameters, key=_empty)
    assert whole.norm(0) == 10 and whole.cosine(0, 1) == pytest.approx(6 / 10)
    assert empty.norm(0) == 0 and isnan(empty.cosine(0, 1)) and empty.winner is None


def _empty(each: Compared) -> bool:
    return not each.elements


def test_hooks_run_and_the_graph_survives() -> None:
    model, watch, terms = two_tasks()
    seen: list[float] = []
    model.body[0].weight.register_hook(lambda g: seen.append(float(g.norm())))
    table = watch.conflicts(terms)
    norms = [table.norm(term, "body.0.weight") for term in terms]
    assert seen == pytest.approx(norms)
    (terms["ce"] + terms["kl"]).backward()  # the graph is still there
    assert model.body[0].weight.grad is not None


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda t: {"ce": t["ce"]}, GradtraceError, "at least two terms, got 'ce'"),
        (lambda t: {}, GradtraceError, "at least two terms, got none"),
        (lambda t: {**t, "kl": t["kl"].detach()}, NoGraph, "term 'kl'"),
        (lambda t: {**t, 3: t["kl"]}, GradtraceError, "names of terms are strings, not 3"),
        (lambda t: {**t, "kl": 0.1}, GradtraceError, "term 'kl' is a float"),
        (lambda t: {**t, "kl": t["kl"].expand(4)}, GradtraceError, "term 'kl' has 4 elements"),
        (lambda t: [t["ce"], t["kl"]], GradtraceError, "terms by name, .* got list"),
        (lambda t: t["ce"].expand(2, 2), GradtraceError, r"one tensor of shape \(2, 2\)"),
        (lambda t: t["ce"].expand(1), GradtraceError, "at least two terms, got '0'"),
        (lambda t: {**t, "kl": t["kl"].to("meta")}, GradtraceError, "different devices"),
        (lambda t: {**t, "kl": (t["kl"] * 0).log()}, NonFinite, "term 'kl'"),
        (lambda t: {**t, "kl": t["kl"].to(torch.complex128)}, Unsupported, "term 'kl'"),
    ],
)
def test_errors_name_the_term(make: Any, error: type[Exception], words: str) -> None:
    _, watch, terms = two_tasks()
    with pytest.raises(error, match=words):
        watch.conflicts(make(terms))


def test_a_term_of_another_model_is_refused() -> None:
    _, watch, terms = two_tasks()
    other = nn.Linear(2, 2)
    with pytest.raises(GradtraceError, match="term 'kl' reaches no parameter of the watched"):
        watch.conflicts({**terms, "kl": other(torch.ones(2)).sum()})


def test_unknown_names() -> None:
    _, watch, terms = two_tasks()
    table = watch.conflicts(terms)
    with pytest.raises(UnknownName, match="no term 'kk'"):
        table.norm("kk")
    with pytest.raises(UnknownName, match=r"no module or parameter 'boddy'.*did you mean body"):
        table.cosine("ce", "kl", module="boddy")


def test_nonfinite_gradients_can_be_allowed() -> None:
    _, watch, terms = two_tasks()
    table = watch.conflicts({**terms, "nan": (terms["kl"] * 0).log()}, nonfinite="allow")
    assert isnan(table.cosine("ce", "nan")) and table.winner() is None
    assert table.cosine("ce", "kl") == pytest.approx(watch.conflicts(terms).cosine("ce", "kl"))
