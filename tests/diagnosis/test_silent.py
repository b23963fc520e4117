"""Parameters that get no gradient: the reason, the module and the line are named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from healthy_cases import CASES as HEALTHY
from silent_cases import CASES, Net, data
from torch import Tensor
from torch import distributions as D

import gradtrace as gt


@pytest.mark.parametrize("name", CASES)
def test_reason_module_and_line_are_named(name: str) -> None:
    """By a watch as it is."""
    torch.manual_seed(0)
    wanted = CASES[name]
    model, step = wanted.make()
    with gt.watch(model) as watch:
        loss = step()
    found = watch.diagnose(loss)
    worst = "warning" if wanted.reason == "got no samples" else "error"
    caused = [each for each in found.silent if each.severity == worst]
    assert {each.module for each in caused} == set(wanted.silent), str(found)
    assert {each.reason for each in caused} == {wanted.reason}, str(found)
    assert not found.healthy
    if wanted.line:
        assert all("# HERE" in each.line for each in caused), str(found)


@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(name: str) -> None:
    torch.manual_seed(0)
    model, step = HEALTHY[name]()
    with gt.watch(model, diagnose=True) as watch:
        loss = step()
    found = watch.diagnose(loss)
    assert found.healthy and not found.silent, str(found)
    assert found.nonfinite is None
    with gt.watch(model, diagnose=False) as plain:
        loss = step()
    assert plain.diagnose(loss).healthy


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("heaviside", lambda h: torch.heaviside(h, torch.zeros(()))),
        ("floor_divide", lambda h: torch.floor_divide(h, 2.0)),
        ("histogram", lambda h: torch.histogram(h, 4).hist),
        ("zeta", lambda h: torch.special.zeta(h.abs() + 2, h.abs() + 1)),
        ("igamma", lambda h: torch.igamma(h.abs() + 1, torch.ones(()))),
    ],
)
def test_operators_without_a_derivative_are_told_as_such(
    name: str, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    class Hidden(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(super().forward(x))

    model = torch.nn.Sequential(Hidden(3, 4))
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, 3)).sum()
    (found,) = [each for each in watch.diagnose(loss).findings if each.kind == "derivative"]
    assert found.title.startswith(f"{name} has no derivative") and found.module == "0"
    assert ("'input'" in found.title) == (name == "igamma")
    assert f"torch.{'special.' * (name == 'zeta')}{name}(" in found.line and "use" in found.advice


SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "alpha of add": lambda h, side: torch.add(h, side, alpha=0),
    "alpha of sub": lambda h, side: torch.sub(h, side, alpha=0.0),
    "alpha of add_": lambda h, side: h.clone().add_(side, alpha=0),
    "alpha of index_add": lambda h, side: h.index_add(0, torch.arange(5), side, alpha=0),
    "alpha of addmm": lambda h, side: torch.addmm(h, side, torch.eye(6), alpha=0),
    "beta of addmm": lambda h, side: torch.addmm(side, h, torch.eye(6), beta=0),
    "value of addcmul": lambda h, side: torch.addcmul(h, side, torch.ones(6), value=0),
    "value of addcdiv": lambda h, side: torch.addcdiv(h, side, torch.ones(6), value=0),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_coefficient_of_zero_is_a_factor(name: str) -> None:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.side = torch.nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(SUMS[name](self.enc(x), self.side(x)))

    model, (x, y) = Mixed(), data()
    with gt.watch(model) as watch:
        loss = torch.nn.functional.cross_entropy(model(x), y)
    (found,) = watch.diagnose(loss).findings
    assert found.title.endswith("side.weight, side.bias (multiplied by zero)"), found
    assert found.severity == "error" and f"{name.split()[0]}= is 0" in found.evidence


def test_the_record_changes_nothing() -> None:
    """Gradients, buffers and random numbers are those of an unwatched step."""
    results = []
    for diagnose in (False, True):
        torch.manual_seed(0)
        model, step = HEALTHY["batch_norm_and_relu"]()
        with gt.watch(model, diagnose=diagnose):
            loss = step()
        loss.backward()
        results.append(
            [loss, torch.rand(()), *model.buffers(), *(p.grad for p in model.parameters())]
        )
    assert all(torch.equal(one, other) for one, other in zip(*results))


@pytest.mark.parametrize("forbidden", [True, False])
def test_without_a_record_the_module_is_named(
    forbidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was forbidden, or the forward pass has too many operations for it."""
    monkeypatch.setattr(sys.modules[gt.watch.__module__], "UNASKED_OPERATIONS", 1)
    model, step = CASES["detach_in_forward"].make()
    with gt.watch(model, diagnose=False if forbidden else None) as watch:
        loss = step()
    found = watch.diagnose(loss)
    assert [each.parameter for each in found.silent] == ["enc.weight", "enc.bias"]
    assert found.silent[0].reason == "cut off"
    assert "gt.watch(model, diagnose=True)" in str(found)


def test_a_loss_computed_after_the_watch() -> None:
    model = Net(lambda h: h.detach())
    x, y = data()
    with gt.watch(model, diagnose=True) as watch:
        out = model(x)
    found = watch.diagnose(torch.nn.functional.cross_entropy(out, y))
    assert {each.parameter for each in found.silent} == {"enc.weight", "enc.bias"}
    assert found.silent[0].reason == "output detached"
    assert any("outside of the watch" in remark for remark in found.remarks)


def test_a_loss_that_is_a_number() -> None:
    model = Net()
    x, y = data()
    with gt.watch(model, diagnose=True) as watch:
        loss = torch.nn.functional.cross_entropy(model(x), y).item()  # HERE
    found = watch.diagnose(loss)
    assert len(found.silent) == 4
    assert {each.reason for each in found.silent} == {"output detached"}
    assert all("# HERE" in each.line for each in found.silent)
    with pytest.raises(gt.errors.GradtraceError, match="expected the loss tensor, got str"):
        watch.diagnose("loss")  # type: ignore[arg-type]


def test_modules_in_a_plain_list_are_not_registered() -> None:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)]
            self.between = torch.nn.Sequential(*self.blocks).forward

    model = Listed()
    x, y = data()
    with gt.watch(model, diagnose=True) as watch:
        loss = torch.nn.functional.cross_entropy(model(x), y)
    (found,) = watch.diagnose(loss).findings
    assert (found.kind, found.severity, found.module) == ("unregistered", "error", "blocks")
    assert found.parameters[1:3] == ("blocks[0].bias", "blocks[1].weight")
    assert "ModuleList" in found.advice


def test_unused_rows_are_counted_and_not_blamed() -> None:
    model = torch.nn.Embedding(100, 3)
    with gt.watch(model, diagnose=True) as watch:
        loss = model(torch.tensor([3, 3, 7])).sum()
    found = watch.diagnose(loss)
    assert found.healthy and found.unused_rows == {"weight": (98, 100)}
    assert "weight 98 of 100" in str(found)


def test_a_model_that_is_wholly_frozen() -> None:
    model = Net().requires_grad_(False)
    with gt.watch(model, diagnose=True) as watch:
        loss = model(data()[0]).sum()
    found = watch.diagnose(loss)
    assert not found.healthy and not found.silent
    assert "no parameter requires grad" in str(found)


def test_parameters_of_one_cause_are_one_finding() -> None:
    model, step = CASES["no_grad_as_a_decorator"].make()
    with gt.watch(model, diagnose=True) as watch:
        loss = step()
    found = watch.diagnose(loss)
    (finding,) = found.findings
    assert finding.module == "enc" and len(finding.parameters) == 4
    assert finding.parameter == "enc.0.weight"
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert written["silent"][0]["reason"] == "called under no_grad"
    assert written["findings"][0]["line"] == finding.line
    assert "<pre" in found._repr_html_()


def test_a_backward_pass_that_fails_is_a_finding() -> None:
    model = Net(lambda h: h.exp())
    with gt.watch(model, diagnose=True) as watch:
        h = model.enc(data()[0]).exp()
        loss = model.head(h).sum()
        h.mul_(2)  # HERE
    (finding,) = watch.diagnose(loss).findings
    assert finding.kind == "backward" and "was overwritten" in finding.title
    assert "mul_() changes in place" in finding.evidence and "model.head(h)" in finding.evidence
    assert "# HERE" in finding.line and "out of place" in finding.advice


def test_what_overwrites_comes_after_what_needs_it() -> None:
    model = Net()
    with gt.watch(model) as watch:
        h = model.enc(data()[0]).sigmoid()
        torch.relu_(h)
        h += 1  # HERE
        loss = model.head(h).sum()
    (finding,) = watch.diagnose(loss).findings
    assert "# HERE" in finding.line and "gradient of relu_()" in finding.evidence, finding


OVERWRITTEN: dict[str, tuple[Callable[[Net, Tensor], Tensor], str, str]] = {}


def overwritten(name: str, said: str, advice: str = "out of place") -> Callable[[Any], Any]:
    def keep(loss_of: Callable[[Net, Tensor], Tensor]) -> None:
        OVERWRITTEN[name] = loss_of, said, advice

    return keep


@overwritten("what a view is of", "x[i] = y changes in place what the gradient of matmul()")
def _(model: Net, x: Tensor) -> Tensor:
    memory = torch.randn(7, 6)
    scores = model.enc(x) @ memory.T
    memory[:5] = 0  # HERE
    return model.head(model.enc(x)).sum() + scores.square().sum()


@overwritten("a view", "mul_() changes in place what the gradient of square()")
def _(model: Net, x: Tensor) -> Tensor:
    h = model.enc(x)
    size = h.square().sum()
    h.view(-1)[3:].mul_(2)  # HERE
    return size + model.head(h * 1).sum()


@overwritten("weights", "changes in place weights the gradient of linear()", "optimizer.step()")
def _(model: Net, x: Tensor) -> Tensor:
    out = model(x)
    out.sum().backward(retain_graph=True)
    torch.optim.SGD(model.head.parameters(), 0.1).step()  # HERE
    return out.square().sum()


@pytest.mark.parametrize("name", OVERWRITTEN)
def test_what_shares_memory_is_overwritten(name: str) -> None:
    model, (loss_of, said, advice) = Net(), OVERWRITTEN[name]
    with gt.watch(model, diagnose=True) as watch:
        loss = loss_of(model, data()[0])
    (finding,) = watch.diagnose(loss).findings
    assert said in finding.evidence and "# HERE" in finding.line and advice in finding.advice


def test_a_loss_whose_graph_is_gone_is_no_fault_of_the_model() -> None:
    model, step = HEALTHY["dropout"]()
    with gt.watch(model) as watch:
        loss = step()
    loss.backward(retain_graph=True)
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(gt.errors.FreedGraph, match="before the step"):
        watch.diagnose(loss)
    with gt.watch(model) as watch:
        loss = step()
    loss.backward()
    with pytest.raises(gt.errors.FreedGraph, match=r"before loss.backward\(\)"):
        watch.diagnose(loss)


def test_a_monitor_warns_of_silent_parameters_at_its_first_step() -> None:
    model, step = CASES["detach_in_forward"].make()
    with gt.Monitor(model, every=1) as monitor:
        words = r"2 of 4 parameters get no gradient.*enc\.weight"
        with pytest.warns(UserWarning, match=words) as caught:
            monitor.step(step())
        assert [each.filename for each in caught] == [__file__]  # not a line of ours
        monitor.step(step())  # and not again
    tied, step = HEALTHY["tied_weights"]()
    with gt.Monitor(tied, every=1) as monitor:
        monitor.step(step())


@pytest.mark.parametrize(
    ("between", "reason", "advice"),
    [
        (lambda h: h.round(), "derivative is zero", "straight-through"),
        (lambda h: h.div(0.1, rounding_mode="floor"), "derivative is zero", "straight-through"),
        (lambda h: torch.nn.functional.leaky_relu(h - 9, 0.0), "dead ReLU", "leaky slope"),
        (
            lambda h: (h * 0).norm(dim=0) + h.detach(),
            "derivative is zero",
            "look whether that is 0",
        ),
        (lambda h: (h - 90).clamp(-5, 5), "saturated", "widen them"),
        (lambda h: torch.sigmoid(h - 900), "saturated", "normalise"),
        (lambda h: 0.0 * h + 1, "multiplied by zero", "find the factor"),
        (torch.nn.Dropout(1.0), "multiplied by zero", "find the factor"),
        (lambda h: torch.normal(h, 1.0), "derivative is zero", "rsample"),
        (lambda h: torch.bernoulli(h.sigmoid()), "derivative is zero", "rsample"),
        (lambda h: h.softmax(-1).multinomial(1) + h.detach(), "output detached", "rsample"),
    ],
)
def test_the_advice_fits_the_operator(
    between: Callable[[torch.Tensor], torch.Tensor], reason: str, advice: str
) -> None:
    torch.manual_seed(0)
    model = Net(between)
    x, y = data()
    with gt.watch(model) as watch:
        loss = torch.nn.functional.cross_entropy(model(x), y)
    found = watch.diagnose(loss)
    assert found.silent[0].reason == reason and advice in found.findings[0].advice, found
    if reason == "multiplied by zero":
        said = found.findings[0].evidence
        assert "the other factor is the number 0" in said or "all of it is dropped" in said


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda h: D.Normal(h, 1.0).sample(), "Normal.sample() draws"),
        (lambda h: D.MultivariateNormal(h, torch.eye(6)).sample(), "its rsample() has one"),
        (lambda h: D.Independent(D.Uniform(h, h + 1), 1).sample(), "Independent.sample() draws"),
        (lambda h: D.Beta(h.exp(), h.exp()).sample(), "its rsample() has one"),
        (lambda h: D.OneHotCategorical(logits=h).sample(), "it has no rsample()"),
        (lambda h: D.Bernoulli(logits=h).sample(), "it has no rsample()"),
    ],
)
def test_a_sample_that_cuts_the_gradient(
    draw: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    """Not the ``no_grad`` inside of PyTorch, nor the operator that came first there."""
    torch.manual_seed(0)
    model = Net(draw)
    x, y = data()
    with gt.watch(model) as watch:
        loss = torch.nn.functional.cross_entropy(model(x), y)
    found = watch.diagnose(loss)
    assert {each.reason for each in found.silent} == {"output detached"}, str(found)
    assert found.silent[0].operator == "sample" and ".sample()" in found.silent[0].line
    assert said in found.findings[0].evidence and "rsample" in found.findings[0].advice


LIBRARY = """
import torch

@torch.no_grad()
def decorated(h):
    return h + 1

def around(h):
    with torch.no_grad():
        return h + 1
"""


@pytest.mark.parametrize("name", ["decorated", "around"])
def test_a_library_that_turns_gradients_off_is_named_beside_the_users_line(name: str) -> None:
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, "/somewhere/site-packages/library.py", "exec"), library)
    function = library[name]
    model = Net(lambda h: function(h))  # HERE
    x, y = data()
    with gt.watch(model) as watch:
        loss = torch.nn.functional.cross_entropy(model(x), y)
    (found,) = watch.diagnose(loss).findings
    assert "called under no_grad" in found.title and "# HERE" in found.line
    assert f"turned off by {name}();" in found.evidence


class Spare(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(4, 2)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs positions of instructions")
@pytest.mark.parametrize(
    ("term", "severity"),
    [
        (lambda model, x: 0 * sum(p.sum() for p in model.spare.parameters()), "note"),
        (lambda model, x: sum(p.sum() for p in model.spare.parameters()) * 0.0, "note"),
        (lambda model, x: 0 * model.spare(x).sum(), "error"),
        (lambda model, x: 0.0 * model.spare(x).square().sum(), "error"),
        (lambda model, x: x.new_tensor(0.0) * model.spare(x).sum(), "error"),
        (lambda model, x: float(x.numel() < 0) * model.spare(x).sum(), "error"),
    ],
)
def test_a_sum_of_parameters_times_a_written_zero_is_meant(
    term: Callable[..., Any], severity: str
) -> None:
    """As it is told to users of DistributedDataParallel; a loss that weighs nothing is not."""
    torch.manual_seed(0)
    model = Spare()
    x, y = data()
    with gt.watch(model) as watch:
        loss = torch.nn.functional.cross_entropy(model(x), y) + term(model, x)
    diagnosis = watch.diagnose(loss)
    (found,) = diagnosis.findings
    assert found.severity == severity and "0: spare.weight, spare.bias" in found.title
    assert diagnosis.healthy == (not diagnosis.silent) == (severity == "note")
    assert ("DistributedDataParallel" in found.advice) == (severity == "note")
