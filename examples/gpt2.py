"""GPT-2: which attention head carries the gradient, and is it the one that is needed?

A two-layer GPT-2 learns to repeat eight random words. What comes eight places later is known from
where it stands, so one layer of attention is enough: the position embeddings are reached through
the first layer's heads, and the head that carries the most gradient is the one missed most. (Not
so with the second: influence says where gradient goes, not what cannot be replaced.)
"""

import torch
from stage import Loss, show, trained
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.table import Column, Table
from gradtrace.traced import Trace

WORDS, WIDTH, HEADS, LAYERS, HALF = 16, 32, 4, 2, 8
POSITIONS = "transformer.wpe.weight"


def batch(size: int = 32) -> Tensor:
    """Eight words, and the same again."""
    return torch.randint(1, WORDS, (size, HALF)).repeat(1, 2)


def score(model: nn.Module, words: Tensor) -> Tensor:
    """How badly the second half is foretold."""
    logits = model(words).logits[:, HALF - 1 : -1]
    return nn.functional.cross_entropy(logits.reshape(-1, WORDS), words[:, HALF:].reshape(-1))


def run(steps: str = "200") -> tuple[nn.Module, Loss]:
    """A trained model, whose heads are labelled where queries, keys and values are made."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": 2 * HALF, "n_embd": WIDTH, "n_head": HEADS}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, **sizes, **off, **ends))
    for layer, block in enumerate(model.transformer.h):
        each = [f"layer {layer} head {n}" for n in range(HEADS) for _ in range(WIDTH // HEADS)]
        block.attn.c_attn.register_forward_hook(
            lambda _, __, made, names=each * 3: gt.label(made, -1, names)  # queries, keys, values
        )
    trained(model, lambda: score(model, batch()), int(steps))
    fixed = batch(16)
    return model, lambda model: score(model, fixed)


def tell(model: nn.Module, loss_fn: Loss, trace: Trace) -> tuple[list[Table], str]:
    """Each head's influence, beside the loss without it."""
    table = trace.influence("labels")
    shares = dict(zip(table.names, table.column("weighted")))
    without = {}
    for head in shares:
        with torch.no_grad(), gt.ablate(model, head):
            without[head] = float(loss_fn(model))
    columns = (
        Column("head"),
        Column("influence", "share"),
        Column("loss without it", "number"),
    )
    rows = tuple((head, shares[head], without[head]) for head in sorted(shares))
    with torch.no_grad():
        title = f"Loss with all heads: {float(loss_fn(model)):.3g}"
    most, needed = max(shares, key=shares.__getitem__), max(without, key=without.__getitem__)
    first = trace.paths(POSITIONS, sample=400).modules.get("transformer.h.0.attn", 0.0)
    return [Table(title, columns, rows)], (
        f"{first:.0%} of the position embeddings' paths run through the first layer's attention; "
        f"most gradient ({shares[most]:.0%}) comes through {most}, and the loss rises most "
        f"without {needed} (to {without[needed]:.3g})."
    )


if __name__ == "__main__":
    show(run, tell, "gpt2")
