"""On a GPU: the contraction beside cuBLAS, and whole traces beside the backward pass.

``python -m gradtrace.benchmarks --only gpu-gpt2`` needs torch, numpy and transformers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import gradtrace
from gradtrace import kernels
from gradtrace.benchmarks.cases import Problem, gpt2, llama
from gradtrace.benchmarks.devices import Peak, counted, peak, place, settle, tidy, told, waited
from gradtrace.benchmarks.models import plain, samples, watched
from gradtrace.benchmarks.results import Absent, Curve, Figure, ResultColumn, Section, Setting, say
from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness.interleaved_timing import (
    Timed,
    Way,
    Ways,
    interleaved,
    power_fit,
)
from gradtrace.kernels.precision import without_tf32

TERA, GIB = 1e12, 2**30

# The contraction ---------------------------------------------------------------------------------

MATMUL, INDEX, MARKS, VALUE = "torch.matmul", "index", "marks", "value"


class ProductCase(NamedTuple):
    """A batch of products (m × k) · (k × n), and the least T products/s that are aimed at."""

    name: str
    batch: int
    m: int
    k: int
    n: int
    least: float | None = None

    @property
    def size(self) -> int:
        """How many products of two numbers."""
        return self.batch * self.m * self.k * self.n


WIDTH, TOKENS, WORDS = 768, 1024, 50_257

PRODUCTS = (
    ProductCase("4096³", 1, 4096, 4096, 4096, 10.0),
    ProductCase("2048 × 3072, k = 768", 1, 2048, 768, 3072, 8.0),
    ProductCase("attention to values, activation", 12, TOKENS, 64, TOKENS),
    ProductCase("attention to keys, activation", 12, TOKENS, TOKENS, 64),
    ProductCase("queries, keys, values, activation", 1, TOKENS, 3 * WIDTH, WIDTH),
    ProductCase("queries, keys, values, weight", 1, WIDTH, TOKENS, 3 * WIDTH),
    ProductCase("output of attention, activation", 1, TOKENS, WIDTH, WIDTH),
    ProductCase("output of attention, weight", 1, WIDTH, TOKENS, WIDTH),
    ProductCase("4 × wider, activation", 1, TOKENS, 4 * WIDTH, WIDTH),
    ProductCase("4 × wider, weight", 1, WIDTH, TOKENS, 4 * WIDTH),
    ProductCase("narrow again, activation", 1, TOKENS, WIDTH, 4 * WIDTH),
    ProductCase("narrow again, weight", 1, 4 * WIDTH, TOKENS, WIDTH),
    ProductCase("words, activation", 1, TOKENS, WORDS, WIDTH),
    ProductCase("words, weight", 1, WORDS, TOKENS, WIDTH),
)
"""Two of the project's aims, and those of GPT-2 small's backward pass."""

LITTLE = (ProductCase("small", 2, 12, 20, 24), ProductCase("smaller", 1, 3, 5, 2))

AIM = "index, T products/s"


def contractions(setting: Setting) -> Section:
    """``maxₖ |a[m, k] · b[k, n]|`` with its exact index, its mark, or alone, beside cuBLAS."""
    device = place(setting)
    section = Section(
        "Contraction in (max, ×) on a GPU, over `torch.matmul` in float32",
        [
            ResultColumn("product"),
            ResultColumn("(batch, m, k, n)"),
            ResultColumn("torch.matmul, ms", ".3f"),
            ResultColumn("T products/s", ".2f"),
            ResultColumn(AIM, ".2f"),
            ResultColumn("at least", ".0f", limits=AIM, least=True),
            ResultColumn("index, over torch.matmul", ".2f"),
            ResultColumn("marks, T products/s", ".2f"),
            ResultColumn("marks, over torch.matmul", ".2f"),
            ResultColumn("value, T products/s", ".2f"),
            ResultColumn("value, over torch.matmul", ".2f"),
            ResultColumn("rounds", "d"),
        ],
    )
    for product in LITTLE if setting.quick else PRODUCTS:
        _product(section, product, setting, device)
    section.note(
        "Gaussian numbers in float32, TF32 off. "
        "Index: the exact one, the lowest k of equals. Marks: the int32 beside the winner, no "
        "index. By CUDA events around 5 calls in a row, laying out the operands included; the best "
        "of the rounds. Below the first two, those of GPT-2 small at 1,024 tokens, by the gradient "
        "that they are of."
    )
    return told(section, device, setting)


def _product(
    section: Section, product: ProductCase, setting: Setting, device: torch.device
) -> None:
    batch, m, k, n = product[1:5]
    a, b = torch.randn(batch, m, k, device=device), torch.randn(batch, k, n, device=device)
    ways = _contracted(a, b)
    with without_tf32():
        for way in ways.values():
            way()()  # compiled, laid out and warm
        timed = interleaved(
            ways, setting.turns(10), patience=6, collect=False, clock=counted(device, 5)
        )
    found: list[float | None] = []
    for name in (MARKS, VALUE):
        found += [product.size / timed.best(name) / TERA, timed.ratio(name)]
    section.add(
        product.name,
        str((batch, m, k, n)),
        timed.baseline * 1e3,
        product.size / timed.baseline / TERA,
        product.size / timed.best(INDEX) / TERA,
        setting.limit(product.least),
        timed.ratio(INDEX),
        *found,
        timed.rounds,
    )
    del a, b, ways
    tidy(device)


def _contracted(a: Tensor, b: Tensor) -> Ways:
    ids = torch.randint(1, 1 << 20, a.shape, dtype=torch.int32, device=a.device)
    contract = kernels.backend_of(a).contract
    ready: dict[str, Callable[[], object]] = {
        MATMUL: lambda: torch.matmul(a, b),
        INDEX: lambda: contract(a, b, index=True),
        MARKS: lambda: contract(a, b, value=False, ids=ids),
        VALUE: lambda: contract(a, b),
    }
    return {name: (lambda run=run: run) for name, run in ready.items()}  # type: ignore[misc]


# Whole models ------------------------------------------------------------------------------------

BACKWARD, RECORDING, INFLUENCE = "loss.backward()", "recording", "influence"
GREEDY, VITERBI = "recording + influence", "recording + influence, viterbi"
SAMPLED_ELEMENTS, ROWS = 10_000, "influence(leaf_rows=1/16)"
SAMPLED = f"influence(sample={SAMPLED_ELEMENTS:_})"

SMALL_AIMS = {GREEDY: 2.8, SAMPLED: 1.8}
BILLION_AIMS = {GREEDY: 8.0, ROWS: 5.0, SAMPLED: 2.5}
EIGHT_BILLION_AIMS = {GREEDY: 18.0, ROWS: 10.0, SAMPLED: 3.0}
"""What ways may take, over the backward pass."""


def _ways(problem: Problem) -> dict[str, Way]:
    """The backward pass, and what a trace is made of."""

    def recorded() -> Callable[[], object]:
        problem.model.zero_grad(set_to_none=True)
        with gradtrace.watch(problem.model) as watch:
            loss = problem.loss()
        return watch.trace(loss).influence

    return {
        BACKWARD: plain(problem),
        RECORDING: watched(problem, lambda watch, loss: watch.trace(loss)),
        INFLUENCE: recorded,
        GREEDY: watched(problem, lambda watch, loss: watch.trace(loss).influence()),
        VITERBI: watched(
            problem, lambda watch, loss: watch.trace(loss, rule="viterbi").influence()
        ),
    }


def gpt2_small(setting: Setting) -> Section:
    """GPT-2 small in float32 at 1,024 tokens."""
    device = place(setting)
    make = tiny if setting.quick else (lambda: gpt2(TOKENS))
    name = "GPT-2 build, 8 tokens" if setting.quick else "GPT-2 small, 1,024 tokens, float32"
    section = _compared(f"{name}: a whole trace on a GPU", setting, device, make, SMALL_AIMS)
    return told(section, device, setting)


def billion(setting: Setting) -> Section:
    """A Llama of a billion parameters in bfloat16 at 1,024 tokens."""
    device = place(setting)
    make = small_llama if setting.quick else (lambda: llama(TOKENS, torch.bfloat16))
    name = "Llama build, 8 tokens" if setting.quick else "Llama of 1.1 billion parameters, bfloat16"
    section = _compared(f"{name}: a whole trace on a GPU", setting, device, make, BILLION_AIMS)
    if not setting.quick:
        section.note(
            "As `transformers.LlamaForCausalLM`: 22 layers, 2,048 wide (5,632 within), 32 heads, 8 "
            "of keys and values, 32,000 words, input and output weights apart; 1,024 tokens."
        )
    return told(section, device, setting)


def eight_billion(setting: Setting) -> Section:
    """A Llama of eight billion parameters in bfloat16 at 512 tokens."""
    device = place(setting)
    make = small_llama if setting.quick else _large_llama
    name = "Llama build, 8 tokens" if setting.quick else "Llama of 8 billion parameters, bfloat16"
    title = f"{name}: a whole trace on a large GPU"
    section = _compared(title, setting, device, make, EIGHT_BILLION_AIMS, rounds=6)
    if not setting.quick:
        section.note(
            "As `transformers.LlamaForCausalLM`: 32 layers, 4,096 wide (14,336 within), 32 heads, "
            "8 of keys and values, 128,256 words, input and output weights apart; 512 tokens."
        )
    return told(section, device, setting)


def _large_llama() -> Problem:
    return llama(
        512, torch.bfloat16, vocab_size=128_256, hidden_size=4096, intermediate_size=14_336,
        num_hidden_layers=32,
    )  # fmt: skip


def tiny(tokens: int = 8, width: int = 16) -> Problem:
    """GPT-2's build with one layer, to try a section."""
    return gpt2(tokens, vocab_size=50, n_embd=width, n_layer=1, n_head=2, n_positions=64)


def small_llama() -> Problem:
    """Llama's build with one layer, to try a section."""
    return llama(
        8, torch.bfloat16, vocab_size=50, hidden_size=16, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip


def _compared(
    title: str,
    setting: Setting,
    device: torch.device,
    make: Callable[[], Problem],
    aims: Mapping[str, float],
    rounds: int = 20,
) -> Section:
    """Every way's time and memory."""
    section = Section(
        title,
        [
            ResultColumn("way"),
            ResultColumn("ms", ".1f"),
            ResultColumn("median, ms", ".1f"),
            ResultColumn("ratio", ".2f"),
            ResultColumn("median of rounds", ".2f"),
            ResultColumn("target", ".1f", limits="ratio"),
            ResultColumn("model and activations, GiB", ".2f"),
            ResultColumn("peak beyond them, GiB", ".2f"),
            ResultColumn("peak in all, GiB", ".2f"),
            ResultColumn("rounds", "d"),
        ],
    )
    problem = made_on(setting, device, make)
    ways = _ways(problem) | samples(problem, SAMPLED_ELEMENTS)
    taken: dict[str, Peak | None] = {}
    with without_tf32():
        for name, way in list(ways.items()):  # and all is warm then
            try:
                taken[name] = peak(way, device)
            except (GradtraceError, torch.OutOfMemoryError) as error:  # the others are worth having
                section.note(f"{name}: {type(error).__name__}: {error}")
                del ways[name]
            tidy(device)
        timed = interleaved(ways, setting.turns(rounds), patience=40, clock=waited(device))
    for name in ways:
        now = taken[name]
        section.add(
            name,
            timed.best(name) * 1e3,
            timed.middle(name) * 1e3,
            timed.ratio(name),
            timed.typical(name),
            setting.limit(aims.get(name)),
            None if now is None else now.before / GIB,
            None if now is None else (now.most - now.before) / GIB,
            None if now is None else now.most / GIB,
            timed.rounds,
        )
    numbers = sum(parameter.numel() for parameter in problem.model.parameters())
    section.note(
        f"{numbers:,} parameters, random weights, batch of 1, as in `eval()`. Wall clock from an "
        "idle GPU until it is idle again, ways in turns; the forward pass is in none of them. "
        "`loss.backward()` runs on the plain model (fused attention), the others on a watched one, "
        "whose attention is composed, so that its activations take more. Influence is that of all "
        "modules. Memory is what PyTorch allocated (`torch.cuda.max_memory_allocated`)."
    )
    del problem, ways
    tidy(device)
    return section


def made_on(setting: Setting, device: torch.device, make: Callable[[], Problem]) -> Problem:
    """A model with its data on a device."""
    if not setting.has("transformers", "models on a GPU"):
        raise Absent("transformers is not installed")
    with torch.device(device):
        found = make()
    settle(device)
    return found


# Growth ------------------------------------------------------------------------------------------

LENGTHS = (128, 256, 512, 1024, 2048)
WIDTHS = (192, 384, 768, 1536)
HEAD = 64


def over_tokens(setting: Setting) -> Section:
    """GPT-2 small over the number of tokens."""

    def make(tokens: int) -> Problem:
        if setting.quick:
            return tiny(tokens)
        return gpt2(tokens, n_positions=max(TOKENS, tokens))

    sizes = (8, 16) if setting.quick else LENGTHS
    return _grown("tokens", "GPT-2 small, float32, over tokens", setting, sizes, make)


def over_width(setting: Setting) -> Section:
    """GPT-2's build over its width."""

    def make(width: int) -> Problem:
        if setting.quick:
            return tiny(8, width)
        return gpt2(TOKENS, n_embd=width, n_head=width // HEAD)

    sizes = (16, 32) if setting.quick else WIDTHS
    title = "GPT-2's build, 1,024 tokens, float32, over its width"
    return _grown("width", title, setting, sizes, make)


def _grown(
    what: str, title: str, setting: Setting, sizes: Sequence[int], make: Callable[[int], Problem]
) -> Section:
    """Times over a size, and the exponents."""
    device = place(setting)
    names = (BACKWARD, RECORDING, INFLUENCE, GREEDY)
    section = Section(
        f"{title}, on a GPU",
        [
            ResultColumn(what, ",d"),
            *(ResultColumn(f"{name}, ms", ".1f") for name in names),
            ResultColumn("ratio", ".2f"),
            ResultColumn("median of rounds", ".2f"),
            ResultColumn("peak in all, GiB", ".2f"),
            ResultColumn("rounds", "d"),
        ],
    )
    found: dict[int, Timed] = {}
    for size in sizes:
        say(f"  {size:,} ...")
        try:
            found[size] = _measured(section, size, setting, device, lambda n=size: make(n))  # type: ignore[misc]
        except (GradtraceError, torch.OutOfMemoryError) as error:  # the others are worth having
            section.note(f"{size:,} {what}: {type(error).__name__}: {error}")
        tidy(device)
    _exponents(section, what, {n: [t.best(name) for name in names] for n, t in found.items()})
    x = [float(size) for size in found]
    curves = [
        Curve(name, x, [timed.best(name) * 1e3 for timed in found.values()])
        for name in (GREEDY, BACKWARD, RECORDING)
    ]
    section.figures.append(Figure(f"gpu-{what}", title, what, "milliseconds", curves))
    return told(section, device, setting)


def _measured(
    section: Section,
    size: int,
    setting: Setting,
    device: torch.device,
    make: Callable[[], Problem],
) -> Timed:
    ways = _ways(made_on(setting, device, make))
    del ways[VITERBI]
    with without_tf32():
        for way in ways.values():
            taken = peak(way, device)
        timed = interleaved(ways, setting.turns(10), patience=8, clock=waited(device))
    section.add(
        size,
        *(timed.best(name) * 1e3 for name in ways),
        timed.ratio(GREEDY),
        timed.typical(GREEDY),
        None if taken is None else taken.most / GIB,
        timed.rounds,
    )
    return timed


def _exponents(section: Section, what: str, times: dict[int, list[float]]) -> None:
    """Time as a power of the size, over all sizes and over the larger half of them."""
    sizes = sorted(times)
    large = sizes[len(sizes) // 2 :]
    for n, name in enumerate((BACKWARD, RECORDING, INFLUENCE, GREEDY)):
        told = []
        for some in (sizes, large):
            if len(some) > 1:
                fit = power_fit(some, [times[size][n] for size in some])
                told.append(
                    f"{what}^{fit.slope:.2f} over {some[0]:,} to {some[-1]:,} (R² = {fit.r2:.4f})"
                )
        if told:
            section.note(f"{name}: time grows as {', as '.join(dict.fromkeys(told))}.")
    section.note(
        "Exponents are by least squares of logarithms. The ratio is recording + influence over "
        "`loss.backward()`. Where a model is small, Python takes the time, and not the GPU."
    )
