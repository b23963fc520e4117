"""Influence: marks in the streaming pass against paths followed one by one, and tables by hand."""

from __future__ import annotations

from math import isnan

import pytest
import torch
import torch.nn.functional as F
from arguments import arguments
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.pytorch.wrapped_modules import within
from gradtrace.traced import Trace
from gradtrace.tracing import counting
from gradtrace.tracing.influence import information
from gradtrace.tracing.moments import Moments

RULES = pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])


class Residual(nn.Module):
    """Blocks ``x + f(x)``, and parallel branches that are averaged."""

    def __init__(self, width: int = 5, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.out = nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = (torch.tanh(self.left(x)) + torch.tanh(self.right(x))) / 2
        return self.out(x.mean(1))


def residual(seed: int = 0, reduction: str = "mean") -> tuple[nn.Module, gt.watch, Tensor]:
    torch.manual_seed(seed)
    model = Residual().double()
    tokens, targets = torch.randint(0, 7, (3, 4)), torch.randint(0, 4, (3,))
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(tokens), targets, reduction=reduction)
    return model, watch, loss


# What the columns mean ---------------------------------------------------------------------------


def counted(trace: Trace, name: str) -> tuple[int, float]:
    """Paths through a module, and their gradient, by following every path."""
    through, weight = 0, 0.0
    for path in trace.paths(sample=10**9):
        if not within(path.name, name) and any(within(m, name) for m in path.modules):
            through += 1
            weight += abs(path.gradient)
    return through, weight


@RULES
@pytest.mark.parametrize("seed", range(3))
def test_marks_are_the_paths_followed_one_by_one(rule: str, seed: int) -> None:
    _, watch, loss = residual(seed)
    trace = watch.trace(loss, rule=rule)
    table = trace.influence()
    assert {"left", "right", "blocks", "blocks.0", "embed", "out"} <= {row.name for row in table}
    for row in table:
        through, weight = counted(trace, row.name)
        assert row.through == through, row.name
        assert float(row["|g| through"]) == pytest.approx(weight)


@RULES
def test_shares_of_branches_that_partition_all_paths_add_up_to_one(rule: str) -> None:
    _, watch, loss = residual()
    table = watch.trace(loss, rule=rule).influence({"left": "left", "right": "right"})
    below = {"embed.weight", "blocks.0.weight"}
    assert below <= set(watch.backward(loss))
    for column in ("share", "weighted"):
        assert sum(table.column(column)) == pytest.approx(1, abs=1e-12)
    assert table["left"].eligible == table["right"].eligible  # undiluted by each other's weights


def test_eligible_leaves_out_own_parameters_and_those_with_no_way_through() -> None:
    model, watch, loss = residual()
    table = watch.trace(loss).influence()
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    grads = watch.backward(loss)
    reached = {name: int((grad != 0).sum()) for name, grad in grads.items()}
    before_left = [n for n in sizes if n.startswith(("embed", "blocks"))]
    assert table["left"].eligible == sum(reached[n] for n in before_left)
    assert table["left"].own == sizes["left.weight"] + sizes["left.bias"]
    assert table["left"].unreached == sum(sizes[n] - reached[n] for n in before_left) > 0
    assert table["embed"].eligible == 0
    assert isnan(table.shares["embed"])
    assert table.shares["out"] == 1.0
    assert table["blocks"].own == sum(sizes[n] for n in sizes if n.startswith("blocks"))


def test_a_module_called_many_times_counts_once_a_path() -> None:
    torch.manual_seed(0)

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.cell = nn.RNNCell(3, 3)
            self.out = nn.Linear(3, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            h = torch.zeros(1, 3, dtype=torch.float64)
            for t in range(len(tokens)):
                h = self.cell(self.embed(tokens[t : t + 1]), h)
            return self.out(h)

    model = Cell().double()
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(torch.randint(0, 5, (200,))), torch.tensor([1]))
    trace = watch.trace(loss)
    table = trace.influence()
    assert table.shares["cell"] == 1.0
    assert table["cell"].through == int((trace.gradients["embed.weight"] != 0).sum()) == 15
    assert {step.module for step in trace.path("embed.weight", (0, 0)).steps} >= {"cell", "embed"}


# Kinds of components -----------------------------------------------------------------------------


def test_operators_and_groups() -> None:
    _, watch, loss = residual()
    trace = watch.trace(loss)
    operators = trace.influence("operators")
    assert operators.shares["NllLossBackward0"] == 1.0
    assert 0 < operators.shares["TanhBackward0"] <= 1
    groups = trace.influence({"both": ["left", "right"], "all blocks": "blocks.*"})
    assert groups.shares["both"] == 1.0
    assert groups["both"].own == 60
    blocks = trace.influence("blocks")["blocks"]
    assert groups["all blocks"].values[1:] == blocks.values[1:]


@RULES
def test_arguments_tell_which_branch_of_a_sum(rule: str) -> None:
    _, watch, loss = residual()
    trace = watch.trace(loss, rule=rule)
    table = trace.influence(arguments(trace))  # type: ignore[arg-type]
    sides = trace.influence(["left", "right"])
    for name, argument in ("left", "add[0] from left"), ("right", "add[1] from right"):
        assert table[argument].through == sides[name].through + sides[name].own


@RULES
def test_labels_are_the_elements_that_paths_visit(rule: str) -> None:
    torch.manual_seed(1)
    w, v = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    names = ["a", "b", None, "a", "c", "a"]
    h = gt.label(torch.randn(3, 4, dtype=torch.float64) @ w, 1, names)
    loss = (torch.tanh(h) @ v.T).square().sum()
    trace = gt.trace(loss, rule=rule, names={"w": w, "v": v})
    table = trace.influence("labels")
    seen = dict.fromkeys("abc", 0)
    for path in trace.paths(sample=1000):
        for step in path.steps:
            if step.operator == "LabelBackward" and names[step.index[1]]:
                seen[names[step.index[1]]] += 1
    assert {row.name: row.through for row in table} == seen
    assert seen == {"a": 12, "b": 4, "c": 4}  # a column of w feeds one slice
    assert table["a"].eligible == 24
    assert table["a"].own == 0


def test_hundreds_of_components() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(93))).double()
    with gt.watch(layers) as watch:
        loss = layers(torch.ones(1, 2, dtype=torch.float64)).sum()
    table = watch.trace(loss).influence()
    assert len(table) == 93
    for row in table:
        assert row.through == row.eligible == 6 * int(row.name), row.name


def test_default_without_modules_is_labels_or_operators() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert "MulBackward0" in gt.trace((x * x).sum()).influence().shares
    labelled = gt.label(x * 2, 0, "slice")
    assert set(gt.trace(labelled.sum()).influence().shares) == {"slice 0", "slice 1"}


def test_tied_weights_belong_to_both_modules() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "out": nn.Linear(3, 5, bias=False)})
    model["out"].weight = model["embed"].weight
    with gt.watch(model) as watch:
        scores = model["out"](model["embed"](torch.tensor([1, 2])))
        loss = F.cross_entropy(scores, torch.tensor([2, 0]))
    table = watch.trace(loss).influence()
    assert table["embed"].own == table["out"].own == 15
    assert table["embed"].eligible == table["out"].eligible == 0


def test_a_module_that_was_not_called_has_no_influence() -> None:
    model, watch, loss = residual()
    model.unused = nn.Linear(2, 2)
    table = watch.trace(loss).influence(["unused", "left"])
    assert table["unused"].eligible == 0


def test_weights_changed_in_place_are_noticed() -> None:
    model, watch, loss = residual()
    trace = watch.trace(loss)
    before = trace.influence()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1)
    with pytest.raises(GradtraceError, match="changed in place"):
        trace.influence()
    assert before["left"].eligible > 0


# Several losses -----------------------------------------------------------------------------------


def test_standard_error_is_that_of_a_ratio_of_sums() -> None:
    through, eligible = [1, 4, 2, 5], [10, 10, 8, 12]
    moments = Moments.over(through, eligible)
    share = 12 / 40
    assert moments.share == share
    residuals = [t - share * e for t, e in zip(through, eligible)]
    wanted = (4 / 3 * sum(r * r for r in residuals)) ** 0.5 / 40
    assert moments.error(4) == pytest.approx(wanted, rel=1e-12)
    equal = Moments.over((1, 4, 2, 5), [10] * 4)
    spread = torch.tensor([0.1, 0.4, 0.2, 0.5], dtype=torch.float64).std() / 2
    assert equal.error(4) == pytest.approx(float(spread), rel=1e-12)
    assert isnan(Moments.of(1, 2).error(1))
    assert isnan(Moments().error(5))


def test_the_table_of_several_losses_has_errors() -> None:
    _, watch, loss = residual(reduction="none")
    table = watch.trace(loss).influence()
    singles = [watch.trace(one).influence() for one in loss]
    total = type(table).total(singles)
    for row in table:
        for column in ("through", "eligible", "unreached", "own", "share", "± share"):
            assert total[row.name][column] == pytest.approx(row[column], nan_ok=True)
    assert "Influence (greedy, 3 losses)" in str(table) and "± share" in str(table)
    assert table.about == {"rule": "greedy", "by": "modules", "losses": 3}
    assert "±" not in str(singles[0])


# A sample of elements -----------------------------------------------------------------------------


class Skip(nn.Module):
    """A layer around which a connection leads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.c(h + self.b(h).tanh())


def test_a_sample_counts_as_many_elements_as_asked_for() -> None:
    torch.manual_seed(0)
    model = Skip()
    with gt.watch(model) as watch:
        loss = model(torch.randn(5, 6)).square().sum()
    trace = watch.trace(loss)
    table = trace.influence(["b"], sample=40)
    whole = trace.influence(["b"])
    assert table["b"].eligible + table["b"].unreached < 40 < whole["b"].eligible
    assert table["b"].own == whole["b"].own == 42
    assert table.notes[0].startswith("paths of 40 of 105 elements, drawn at random; ±")
    assert table.about["sampled"] == 40 and table.errors["b"] > 0
    assert str(table) == str(trace.influence(["b"], sample=40))
    assert str(table) != str(trace.influence(["b"], sample=40, seed=1))
    with pytest.raises(GradtraceError, match="from 1 on"):
        trace.influence(sample=0)


def test_large_models_are_sampled_and_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Skip()
    with gt.watch(model) as watch:
        loss = model(torch.randn(5, 6)).square().sum()
    trace = watch.trace(loss)
    monkeypatch.setattr(counting, "EXACT_MAX_ELEMENTS", 104)
    monkeypatch.setattr(counting, "AUTO_SAMPLE", 25)
    assert trace.influence().about["sampled"] == 25
    assert "paths of 25 of 105 elements" in str(trace.influence())
    assert "sampled" not in trace.influence(sample=None).about
    assert "sampled" not in trace.influence(of="c").about  # it has few


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_every_leaf_of_a_recurrent_layer_is_counted(kind: type[nn.RNNBase], rule: str) -> None:
    """Also where the cotangent of one bias is made of that of the other, within one operator."""
    torch.manual_seed(0)
    layer, x = kind(4, 3), torch.randn(5, 4, requires_grad=True)
    names = {"x": x, **dict(layer.named_parameters())}
    table = gt.trace(layer(x)[0].square().sum(), rule=rule, names=names).influence("operators")
    row = table["SumBackward0"]
    assert row.eligible + row.unreached == sum(leaf.numel() for leaf in names.values())


def test_a_module_with_a_larger_share_than_the_one_it_is_in_is_explained() -> None:
    """What is inside the outer one and outside the inner one counts for the inner one alone."""
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = nn.ModuleDict({"first": nn.Linear(3, 4), "branch": branch, "last": nn.Linear(4, 1)})
    with gt.watch(model) as watch:
        h = model["first"](torch.randn(8, 3))
        loss = model["last"](h + model["branch"](h)).square().mean()
    table = watch.trace(loss).influence()
    assert table["branch.1"].share > table["branch"].share
    assert "a module may have a larger share than the one that it is in" in str(table)
    assert "larger share" not in str(watch.trace(loss).influence(["first", "branch"]))


def test_dropouts_do_not_lead_the_table() -> None:
    """What has no parameters has the share of what it follows, and more elements outside it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            y: Tensor = self.out(h + self.drop(self.inner(h)))
            return y

    torch.manual_seed(0)
    model = Net()
    with gt.watch(model) as watch:
        loss = model(torch.randn(8, 3)).square().mean()
    table = watch.trace(loss).influence()
    told = [information(table[n].share, table[n].eligible) for n in ("drop", "inner")]
    assert told[0] > told[1] > 0
    assert table.names == ("inner", "embed", "drop", "out")


def test_a_model_of_one_layer_has_no_modules_below() -> None:
    model = nn.Linear(3, 2)
    with gt.watch(model) as watch:
        trace = watch.trace(model(torch.randn(4, 3)).square().sum())
    assert trace.influence().about["by"] == "operators"
    with pytest.raises(UnknownName, match="if the model is one layer, ask for"):
        trace.influence(["module:x"])
