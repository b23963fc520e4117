"""ResNet: skip against residual branch. Which of the two does gradient take?

A small ResNet tells crosses from rings. At every block's sum, a path comes by the shortcut or by
the convolutions. After training, most go through the convolutions at every block; how many take the
shortcut does not tell how much a block is missed.
"""

import torch
from stage import Loss, show, trained
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.table import Column, Table
from gradtrace.traced import Trace

PIXELS, BLOCKS = 16, 4


def batch(size: int = 16) -> tuple[Tensor, Tensor]:
    """Crosses (0) and rings (1) somewhere in noise."""
    kind = torch.randint(2, (size,))
    y, x = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="ij")
    middle = torch.randint(5, PIXELS - 5, (size, 2, 1, 1))
    dy, dx = y - middle[:, 0], x - middle[:, 1]
    near = torch.maximum(dy.abs(), dx.abs()) <= 4
    cross = near & ((dy == 0) | (dx == 0))
    ring = ((dy**2 + dx**2).sqrt() - 3.5).abs() < 0.6
    shape = torch.where(kind[:, None, None] == 0, cross, ring)
    return shape[:, None] + 0.3 * torch.randn(size, 1, PIXELS, PIXELS), kind


def score(model: nn.Module, images: Tensor, kinds: Tensor) -> Tensor:
    """How badly crosses and rings are told apart."""
    return nn.functional.cross_entropy(model(images).logits, kinds)


def run(steps: str = "60") -> tuple[nn.Module, Loss]:
    """A trained model of four blocks, each with a plain shortcut."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    sizes = {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8], "depths": [BLOCKS]}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", num_labels=2, **sizes))
    trained(model, lambda: score(model, *batch()), int(steps))
    model.eval()  # batch norms no longer tie the images together
    images, kinds = batch(8)
    return model, lambda model: score(model, images, kinds)


def tell(model: nn.Module, loss_fn: Loss, trace: Trace) -> tuple[list[Table], str]:
    """Of the paths that come to a block, the share that takes its shortcut."""
    forks = trace.influence("forks")
    rows = []
    for block in range(BLOCKS):
        name = f"resnet.encoder.stages.0.layers.{block}"
        skip = forks[f"{name}.add/skip"]
        with torch.no_grad(), gt.ablate(model, f"{name}.layer"):
            rows.append((f"block {block}", skip.share, float(loss_fn(model))))
    columns = (
        Column("block"),
        Column("by the shortcut", "share"),
        Column("loss without", "number"),
    )
    with torch.no_grad():
        title = f"Loss with all convolutions: {float(loss_fn(model)):.3g}"
    often, least = max(rows, key=lambda row: row[1]), min(rows, key=lambda row: row[1])
    needed = max(rows, key=lambda row: row[2])
    return [Table(title, columns, tuple(rows))], (
        f"The shortcut is taken by {often[1]:.0%} of the paths at {often[0]} and by {least[1]:.0%} "
        f"at {least[0]}; without its convolutions, {needed[0]} is missed most (loss "
        f"{needed[2]:.3g})."
    )


if __name__ == "__main__":
    show(run, tell, "resnet")
