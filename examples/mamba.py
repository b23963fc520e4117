"""Mamba: the state against the skip. Along which of them does gradient travel?

A two-layer Mamba is asked, at every word, for the first word of the text. Nothing but the state
remembers it: in one layer most gradient comes out of the scan and was carried from step to step,
while the way past it (``y = scan(x) + D x``) carries next to nothing there.
"""

import torch
from stage import Loss, show, trained
from torch import Tensor, nn

from gradtrace.table import Column, Table
from gradtrace.traced import Trace
from gradtrace.tracing.influence import Influence

WORDS, LENGTH, LAYERS = 8, 10, 2


def batch(size: int = 32) -> Tensor:
    """Random words."""
    return torch.randint(1, WORDS, (size, LENGTH))


def score(model: nn.Module, words: Tensor) -> Tensor:
    """How badly the first word is known, at all that follow."""
    first = words[:, :1].expand(-1, LENGTH - 1)
    logits = model(words).logits[:, 1:]
    return nn.functional.cross_entropy(logits.reshape(-1, WORDS), first.reshape(-1))


def run(steps: str = "150") -> tuple[nn.Module, Loss]:
    """A trained model."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "conv_kernel": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = MambaConfig(num_hidden_layers=LAYERS, use_cache=False, **sizes, **ends)
    model = MambaForCausalLM(config)
    trained(model, lambda: score(model, batch()), int(steps))
    words = batch(4)
    return model, lambda model: score(model, words)


def argument(found: Influence, place: str) -> float:
    """The share of an argument of a sum, by |gradient|."""
    return next(row.gradient.share for row in found if row.name.startswith(f"{place} "))


def tell(model: nn.Module, loss_fn: Loss, trace: Trace) -> tuple[list[Table], str]:
    """The sums of each layer. In a mixer the last is that of scan and skip; before it come those
    of the state, one a step, from the last step to the first.
    """
    sums = trace.influence("arguments")
    rows, entries = [], {}
    for layer in range(LAYERS):
        whole, mixer = f"backbone.layers.{layer}.add", f"backbone.layers.{layer}.mixer.add"
        places = (f"{whole}[1]", f"{whole}[0]", f"{mixer}[0]", f"{mixer}[1]")
        rows.append((f"layer {layer}", *(argument(sums, place) for place in places)))
        for step in range(LENGTH):
            entries[layer, step] = argument(sums, f"{mixer}{LENGTH - step}[1]")
    columns = [Column(name, "share") for name in ("mixer", "around it", "state", "D skip")]
    best = max(rows, key=lambda row: row[3])
    layer, step = max(entries, key=entries.__getitem__)
    return [Table("Influence by |gradient|", (Column("layer"), *columns), tuple(rows))], (
        f"In {best[0]} {best[3]:.0%} of the gradient comes through the state and {best[4]:.0%} "
        f"through the skip beside it; {entries[layer, step]:.0%} entered the state of layer "
        f"{layer} at step {step} and was carried on from there."
    )


if __name__ == "__main__":
    show(run, tell, "mamba")
