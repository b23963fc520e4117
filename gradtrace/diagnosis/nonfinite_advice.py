"""What to do about a value that is NaN or infinite, by the operator that made it."""

from __future__ import annotations

from math import isinf, isnan

from gradtrace.diagnosis.result import NonFiniteValue

HELD = "already holds it"
"""What is said of a value that was bad before the step."""

FORWARD = {
    "log log2 log10 log1p logit xlogy special_xlogy": "keep the argument above 0: "
    "x.clamp_min(1e-8).log(), or log_softmax, logsigmoid and losses that take logits.",
    "sqrt rsqrt": "keep the argument above 0: x.clamp_min(1e-12).sqrt().",
    "pow float_power": "a negative number to a fractional power is NaN, and 0 to a negative power "
    "is infinite: keep the base above 0, x.clamp_min(1e-8), or take its absolute value.",
    "std var std_mean var_mean": "the deviation of a single element is NaN: correction=0, or more "
    "than one sample.",
    "normalize cosine_similarity": "a vector of zeros has no direction: a positive eps keeps the "
    "divisor away from 0.",
    "div true_divide truediv reciprocal fmod remainder": "keep the divisor away from 0: "
    "x / (y + 1e-8), or y.clamp_min(1e-8).",
    "softmax log_softmax scaled_dot_product_attention multi_head_attention_forward": "a row in "
    "which everything is masked (-inf) has no softmax; leave one position open, or mask with a "
    "large finite number.",
    "exp expm1 exp2 sinh cosh logsumexp": "keep the argument small (below 88 in float32, 11 in "
    "float16), or compute in logarithms: logsumexp, log_softmax, softplus.",
    "cross_entropy nll_loss mean nanmean": "a mean over nothing is NaN: are all targets "
    "ignore_index, all weights 0, or the batch empty?",
    "masked_fill masked_fill_ where": "what is masked with an infinite number is needed for the "
    "loss, as the class of a target is: check the mask.",
    "ctc_loss": "no alignment is possible: a target is longer than its input (repeated labels need "
    "a blank between them). Check the lengths; zero_infinity=True leaves such samples out.",
    "acos asin atanh acosh": "keep the argument inside of its range: x.clamp(-1 + 1e-6, 1 - 1e-6).",
    "logdet slogdet": "the matrix is singular: add a small number to its diagonal.",
    "tensor as_tensor from_numpy full": "look at the data that it is made of.",
}
"""By the names of functions that made a bad value of good ones."""

BACKWARD = {
    "sqrt rsqrt pow norm std var cdist linalgvectornorm hypot": "its derivative at 0 is infinite: "
    "add a small number inside, (x + 1e-12).sqrt().",
    "linalgeigh linalgeig linalgsvd": "its derivative is infinite where two eigenvalues or "
    "singular values are equal: add a small random diagonal, or use the values alone.",
    "atan2": "it has no derivative where both arguments are 0: keep them away from it.",
}
"""By the kinds of nodes that made a bad gradient; of others it is what holds of the function."""


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: advice for names, advice in table.items() for name in names.split()}


OF_FUNCTIONS = _by_name(FORWARD)
OF_NODES = OF_FUNCTIONS | _by_name(BACKWARD)

AVERAGES = ("mean", "nanmean", "cross_entropy", "nll_loss")
HALF = "the range of float16 ends at 65,504: compute this in float32 or bfloat16, or scale it down."
HIDDEN = (
    "its derivative is infinite where a condition or mask hides the value, and 0 · ∞ is NaN: make "
    "the argument safe before the operation, torch.where(ok, x, 1.0).log(), not only after it."
)
UNDEFINED = (
    "0 · ∞, ∞ - ∞ and ∞ / ∞ are NaN: keep infinite values out, as with torch.where, or mask with a "
    "large finite number."
)
OVERFLOW = "it is too large for its dtype: normalise or clip what goes in, or take smaller steps."
DATA = "look at the data: torch.isfinite(x).all(), where the batch is made."
BUFFER = "buffer "
"""How the name of a buffer that holds a bad value begins."""

WRITTEN = (
    "an earlier batch wrote it there: find that batch, and set the buffer anew "
    "(reset_running_stats() of a batch norm)."
)
WEIGHTS = "look at the step before: was its gradient NaN, the learning rate too large, not clipped?"


def advice_for(value: NonFiniteValue) -> str:
    """What to do about a bad value."""
    name = value.operator.lower().partition("backward")[0].rstrip("_0123456789")
    of_node = "Backward" in value.operator
    half = any("float16" in text and "bfloat16" not in text for text in value.inputs)
    infinite = any("inf" in text for text in value.inputs)
    known = (OF_NODES if of_node else OF_FUNCTIONS).get(name)
    if any(HELD in text for text in value.inputs):
        held = WRITTEN if value.operator.startswith(BUFFER) else WEIGHTS
        return DATA if value.operator == "an input" else held
    if half and (known is None or isinf(value.value)):
        return HALF
    if value.of == "gradient" and not of_node:
        return HIDDEN
    if name in AVERAGES and (infinite or isinf(value.value)):
        known = None  # not of nothing
    if name == "pow" and isinf(value.value) and not any(x[:2] == "0 " for x in value.inputs):
        known = None  # not of 0
    if known is None and isnan(value.value) and infinite:
        return UNDEFINED
    return known or (OVERFLOW if isinf(value.value) else "look at the values that go into it.")
