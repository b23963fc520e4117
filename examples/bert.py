"""BERT: tokens against positions. Which way do the gradients of the two embeddings go?

A small BERT fills in a masked word with the word before it. Where to look is a matter of
positions, what is found there a matter of words: position embeddings are moved through queries
and keys more than word embeddings are, which are moved through values.
"""

import torch
from stage import Loss, show, trained
from torch import Tensor, nn

from gradtrace.tables import Column, Table
from gradtrace.trace import Trace

WORDS, LENGTH, MASK = 12, 8, 1
TABLES = {"words": "word_embeddings", "positions": "position_embeddings"}
PARTS = ("query", "key", "value")


def batch(size: int = 64) -> tuple[Tensor, Tensor]:
    """Random words, one of them masked, and the word before it."""
    words = torch.randint(2, WORDS, (size, LENGTH))
    where = torch.randint(1, LENGTH, (size,))
    rows = torch.arange(size)
    labels = torch.full_like(words, -100)  # what the loss leaves out
    labels[rows, where] = words[rows, where - 1]
    words[rows, where] = MASK
    return words, labels


def run(steps: str = "300") -> tuple[nn.Module, Loss]:
    """A trained model."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64}
    more = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
    model = BertForMaskedLM(BertConfig(**sizes, **more, **off, tie_word_embeddings=False))

    def score(model: nn.Module, words: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(words, labels=labels).loss
        return loss

    trained(model, lambda: score(model, *batch()), int(steps), rate=5e-3)
    fixed = batch(16)
    return model, lambda model: score(model, *fixed)


def tell(model: nn.Module, loss_fn: Loss, trace: Trace) -> tuple[list[Table], str]:
    print(float(loss_fn(model)))
    found = {}
    for name, table in TABLES.items():
        paths = trace.paths(f"bert.embeddings.{table}.weight", sample=600)
        through = paths.modules
        print(through)
        found[name] = [through.get(f"bert.encoder.layer.0.attention.self.{p}", 0.0) for p in PARTS]
    columns = (Column("embeddings"), *(Column(part, "share") for part in PARTS))
    return [Table("Of the paths of each", columns, tuple((k, *v) for k, v in found.items()))], ""


if __name__ == "__main__":
    show(run, tell, "bert")
