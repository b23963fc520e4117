"""ViT: through which patches does the gradient of the patch embedding come?

A small vision transformer tells crosses from rings, which lie in one of sixteen patches; the
others hold noise. The patch that matters carries many times the share that it has by chance.
"""

import torch
from stage import Loss, show, trained
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.table import Column, Table
from gradtrace.traced import Trace

SIDE, PATCH, PLACE = 4, 5, 6
"""Patches in a row, pixels in a row of a patch, the patch that is looked at."""

CROSS = torch.tensor([[1, 0, 0, 0, 1], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0]])
RING = torch.tensor([[0, 1, 1, 1, 0], [1, 0, 0, 0, 1], [1, 0, 0, 0, 1]])
SHAPES = torch.stack([torch.cat([half, half[:2].flip(0)]) for half in (CROSS, RING)])


def batch(size: int = 32, place: int | None = None) -> tuple[Tensor, Tensor]:
    """Crosses (0) and rings (1), each in a patch of noise, or all in one."""
    kind = torch.randint(2, (size,))
    where = torch.randint(SIDE**2, (size,)) if place is None else torch.full((size,), place)
    patches = 0.2 * torch.randn(size, SIDE**2, PATCH, PATCH)
    patches[torch.arange(size), where] += SHAPES[kind]
    rows = patches.view(size, SIDE, SIDE, PATCH, PATCH).transpose(2, 3)
    return rows.reshape(size, 1, SIDE * PATCH, SIDE * PATCH), kind


def score(model: nn.Module, images: Tensor, kinds: Tensor) -> Tensor:
    """How badly crosses and rings are told apart."""
    return nn.functional.cross_entropy(model(images).logits, kinds)


def run(steps: str = "150") -> tuple[nn.Module, Loss]:
    """A trained model, whose patches are labelled as they are embedded."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    image = {"image_size": SIDE * PATCH, "patch_size": PATCH, "num_channels": 1}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = ViTConfig(num_attention_heads=2, num_labels=2, **image, **sizes)
    model = ViTForImageClassification(config)
    model.vit.embeddings.patch_embeddings.register_forward_hook(
        lambda _, __, made: gt.label(made, 1, "patch")
    )
    trained(model, lambda: score(model, *batch()), int(steps))
    images, kinds = batch(8, PLACE)
    return model, lambda model: score(model, images, kinds)


def tell(model: nn.Module, loss_fn: Loss, trace: Trace) -> tuple[list[Table], str]:
    """The patches, as they lie in the image."""
    table = trace.influence("labels")
    shares = dict(zip(table.names, table.column("weighted")))
    columns = (Column("row"), *(Column(f"column {n}", "share") for n in range(SIDE)))
    each = [shares[f"patch {n}"] for n in range(SIDE**2)]
    rows = tuple((f"{n}", *each[n * SIDE : (n + 1) * SIDE]) for n in range(SIDE))
    most = max(range(SIDE**2), key=each.__getitem__)
    title = f"Patches of the embedding's paths, by |gradient|; the shape is in patch {PLACE}"
    return [Table(title, columns, rows)], (
        f"{each[PLACE]:.0%} of the patch embedding's gradient comes through patch {PLACE}, where "
        f"the shape is: {each[PLACE] * SIDE**2:.1f} times its share by chance; the largest "
        f"share is that of patch {most} ({each[most]:.0%})."
    )


if __name__ == "__main__":
    show(run, tell, "vit")
