"""Makes ``Attribution``: of a scalar that was computed, or of a function at several points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradtrace.attribution.input_recorder import one_number
from gradtrace.attribution.result import MEANINGS, Attribution, table_of
from gradtrace.attribution.token_scores import Recording, token_rows
from gradtrace.errors import GradtraceError, NonFinite, UnknownName, did_you_mean, not_one_of
from gradtrace.traced import Trace

Tokens = Mapping[str, Sequence[str]]
TraceAt = Callable[[Mapping[str, Tensor]], Trace]
"""The trace of a function at a point."""


def of_scalar(
    scalar: Tensor, inputs: Mapping[str, Tensor], trace: Trace, rule: str, tokens: Tokens
) -> Attribution:
    """Gradient × input of a scalar."""
    directions = {name: tensor.detach() for name, tensor in inputs.items()}

    def recordings() -> Iterator[Recording]:
        yield Recording(trace, 1.0)

    value = float(scalar.detach())
    return _attribution(recordings, directions, value, rule, 0, tokens)


def of_function(
    function: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    trace_at: TraceAt,
    rule: str,
    points: int,
    baseline: Mapping[str, Tensor] | None,
    tokens: Tokens,
) -> Attribution:
    """Integrated gradients by the midpoint rule: the mean derivative at ``points`` points."""
    ends = {name: tensor.detach() for name, tensor in inputs.items()}
    starts = {name: _baseline(name, x, baseline) for name, x in ends.items()}
    directions = {name: ends[name] - starts[name] for name in ends}

    def recordings() -> Iterator[Recording]:
        for n in range(points):
            part = (n + 0.5) / points
            at = {name: starts[name] + part * directions[name] for name in ends}
            yield Recording(trace_at(at), 1 / points)

    with torch.no_grad():
        value = _number(function(*ends.values())) - _number(function(*starts.values()))
    return _attribution(recordings, directions, value, rule, points, tokens)


def _attribution(
    recordings: Callable[[], Iterator[Recording]],
    directions: Mapping[str, Tensor],
    value: float,
    rule: str,
    points: int,
    tokens: Tokens,
) -> Attribution:
    scores = {name: torch.zeros_like(d, dtype=torch.float64) for name, d in directions.items()}
    reached: set[str] = set()
    for trace, weight in recordings():
        for name, gradient in trace.gradients.items():
            reached.add(name)
            scores[name] += weight * gradient.double() * directions[name].double()
    for name, each in scores.items():
        if not bool(torch.isfinite(each).all()):
            raise NonFinite(
                f"the scores of input {name!r} are not finite; gradtrace.backward of the scalar "
                "says where NaN or infinity first appears"
            )
    unreached = tuple(name for name in directions if name not in reached)
    fields = (token_rows(scores, tokens), scores, directions, value, rule, points, unreached)
    return table_of(Attribution("", (), (), (), {}, *fields, recordings))


def _number(result: Any) -> float:
    """What a function returned, as a number; an error for anything but one."""
    if not isinstance(result, Tensor):
        raise GradtraceError(
            f"the function of the inputs returned a {type(result).__name__}, not a tensor: return "
            "a logit, a difference of logits, or a loss, without .item()"
        )
    return float(one_number(result).detach())


def _baseline(name: str, x: Tensor, baseline: Mapping[str, Tensor] | None) -> Tensor:
    """Where the line to an input begins: at 0, if nothing else is given."""
    given = (baseline or {}).get(name)
    if given is None:
        return torch.zeros_like(x)
    return torch.as_tensor(given, dtype=x.dtype, device=x.device).detach().expand_as(x)


def checked(
    inputs: Any,
    rule: str,
    integrated: int | None,
    function: bool,
    baseline: Any,
    tokens: Any,
) -> None:
    """Raise for what cannot be attributed, before anything is computed."""
    if rule not in MEANINGS:
        raise UnknownName(not_one_of("rule", rule, tuple(MEANINGS)))
    _check_inputs(inputs, function)
    if tokens is not None:
        _check_names("tokens", tokens, inputs)
    if baseline is not None:
        _check_baseline(baseline, inputs, integrated)
    if integrated is None:
        return
    if not isinstance(integrated, int) or isinstance(integrated, bool) or integrated < 1:
        raise GradtraceError(f"integrated is a number of points from 1 on, not {integrated!r}")
    if not function:
        raise GradtraceError(
            "integrated gradients need the scalar at other inputs: pass a function of the inputs, "
            "such as lambda tokens: model(inputs_embeds=tokens).logits[0, -1, 5]"
        )


def _check_inputs(inputs: Any, function: bool) -> None:
    """Inputs are different tensors by name that can have a gradient."""
    if not isinstance(inputs, Mapping) or not inputs:
        raise GradtraceError('attribute takes inputs by name: inputs={"tokens": embeddings}')
    first: dict[int, str] = {}
    for name, tensor in inputs.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise GradtraceError(f"inputs[{name!r}] is a {type(tensor).__name__}, not a tensor")
        if not tensor.is_floating_point():
            raise GradtraceError(
                f"input {name!r} is of {tensor.dtype}, which has no gradient; attribute to what it "
                "is embedded to: embeddings = model.get_input_embeddings()(ids)"
            )
        if not function and not tensor.requires_grad:
            raise GradtraceError(
                f"input {name!r} does not require grad; call {name}.requires_grad_() before the "
                "forward pass, or name the output of a layer, such as the embedding's"
            )
        other = first.setdefault(id(tensor), name)
        if other != name and not function:
            raise GradtraceError(
                f"inputs {other!r} and {name!r} are the same tensor, whose score cannot be divided "
                f"between them; name it once, or call the model with {other}.clone() in one place"
            )


def _check_names(what: str, given: Any, inputs: Mapping[str, Tensor]) -> None:
    """Tokens and baselines are given by the names of inputs."""
    if not isinstance(given, Mapping):
        name = next(iter(inputs))
        raise GradtraceError(f"{what} takes the names of inputs: {what}={{{name!r}: ...}}")
    if unknown := [name for name in given if name not in inputs]:
        names = did_you_mean(str(unknown[0]), inputs)
        raise UnknownName(f"{what}[{unknown[0]!r}]: there is no input {unknown[0]!r}{names}")


def _check_baseline(baseline: Any, inputs: Mapping[str, Tensor], integrated: int | None) -> None:
    """A baseline has the shape of its input, or one that expands to it; it is for integration."""
    if integrated is None:
        raise GradtraceError(
            "a baseline is where integration starts: say at how many points, integrated=64"
        )
    _check_names("baseline", baseline, inputs)
    for name, given in baseline.items():
        shape, wanted = tuple(torch.as_tensor(given).shape), tuple(inputs[name].shape)
        sizes = zip(shape[::-1], wanted[::-1])
        if len(shape) > len(wanted) or any(a not in (1, b) for a, b in sizes):
            raise GradtraceError(
                f"baseline[{name!r}] has shape {shape}, and the input {wanted}: they must be the "
                "same, or the baseline must expand to the input's"
            )
        if not bool(torch.as_tensor(given).isfinite().all()):
            raise NonFinite(
                f"baseline[{name!r}] has elements that are NaN or infinite, so nothing can be "
                "integrated from it; replace them, as by torch.nan_to_num"
            )
