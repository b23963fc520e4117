"""BERT: words against positions. When does gradient go through queries and keys?

A small BERT fills in a masked word with the word before it, so it has to learn where to look. At
first nothing is moved through queries and keys. While it learns, most paths of the position
embeddings run through them; when it knows where to look, nearly all of that is over, and what is
left goes through values, as that of the words does.
"""

import torch
from stage import Loss, show, traced, trained
from torch import Tensor, nn

from gradtrace.table import Column, Table
from gradtrace.traced import Trace

WORDS, LENGTH, MASK = 12, 8, 1
TABLES = {"words": "word_embeddings", "positions": "position_embeddings"}
PARTS = ("query", "key", "value")
EARLY, LATE = "0", "200"


def batch(size: int = 64) -> tuple[Tensor, Tensor]:
    """Random words, one of them masked, and the word before it."""
    words = torch.randint(2, WORDS, (size, LENGTH))
    where = torch.randint(1, LENGTH, (size,))
    rows = torch.arange(size)
    labels = torch.full_like(words, -100)  # what the loss leaves out
    labels[rows, where] = words[rows, where - 1]
    words[rows, where] = MASK
    return words, labels


def score(model: nn.Module, words: Tensor, labels: Tensor) -> Tensor:
    """How badly masked words are filled in."""
    loss: Tensor = model(words, labels=labels).loss
    return loss


def run(steps: str = "60") -> tuple[nn.Module, Loss]:
    """A model in the midst of learning."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64}
    more = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
    model = BertForMaskedLM(BertConfig(**sizes, **more, **off, tie_word_embeddings=False))
    trained(model, lambda: score(model, *batch()), int(steps), rate=5e-3)
    fixed = batch(16)
    return model, lambda model: score(model, *fixed)


def ways(trace: Trace, table: str) -> list[float]:
    """The shares of an embedding's paths that run through queries, keys and values."""
    through = trace.paths(f"bert.embeddings.{table}.weight", sample=600).modules
    return [through.get(f"bert.encoder.layer.0.attention.self.{part}", 0.0) for part in PARTS]


def tell(model: nn.Module, loss_fn: Loss, trace: Trace) -> tuple[list[Table], str]:
    """The ways of both embeddings, now and at two other moments."""
    moments = {"at first": run(EARLY), "meanwhile": (model, loss_fn), "after": run(LATE)}
    rows, looking = [], {}
    for moment, (other, score) in moments.items():
        seen = trace if other is model else traced(other, score)
        for name, table in TABLES.items():
            rows.append((moment, float(score(other).detach()), name, *ways(seen, table)))
        looking[moment] = rows[-1][3] + rows[-1][4]
    columns = (Column("when"), Column("loss", "number"), Column("embeddings"))
    shares = tuple(Column(part, "share") for part in PARTS)
    told = ", ".join(f"{moment} {share:.0%}" for moment, share in looking.items())
    return [Table("Paths through attention", (*columns, *shares), tuple(rows))], (
        f"The part of the position embeddings' paths that runs through queries and keys: {told}."
    )


if __name__ == "__main__":
    show(run, tell, "bert")
