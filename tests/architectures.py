"""Tiny randomly initialised `transformers` models, each with a scalar loss, by architecture.

A builder seeds torch and returns the model in training mode, dropout active, with a function that
computes its loss on a fixed batch. Dropout makes the loss depend on torch's random state: to
compare two evaluations, call `torch.manual_seed` with the same seed before each.

`transformers` is imported by the first builder called, not by this module.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

Loss = Callable[[torch.nn.Module], torch.Tensor]
Builder = Callable[[], tuple[torch.nn.Module, Loss]]
Inputs = Callable[[], dict[str, torch.Tensor]]

BATCH = 2
TOKENS = 8
VOCAB = 64
CLASSES = 3
PIXELS = 32
SAMPLES = 800
FRAMES = 40
MELS = 8

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_VISION = {
    "image_size": PIXELS,
    "patch_size": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
_STAGES = {
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "num_labels": CLASSES,
    "initializer_range": 0.2,
}
_SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "init_std": 0.2,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_MOE = {
    "num_key_value_heads": 1,
    "attention_dropout": 0.1,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}


def _ids(length: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, length))


def _images() -> torch.Tensor:
    return torch.randn(BATCH, 3, PIXELS, PIXELS)


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "labels": _ids()}


def _image_class() -> dict[str, torch.Tensor]:
    return {"pixel_values": _images(), "labels": torch.randint(CLASSES, (BATCH,))}


def _image_mask() -> dict[str, torch.Tensor]:
    return {
        "pixel_values": _images(),
        "labels": torch.randint(CLASSES, (BATCH, PIXELS, PIXELS)),
    }


def _waveform() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, SAMPLES), "labels": _ids(3)}


def _spectrogram() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, MELS, FRAMES), "labels": _ids()}


def _image_text() -> dict[str, torch.Tensor]:
    return {
        "input_ids": _ids(),
        "pixel_values": _images(),
        "return_loss": torch.tensor(True),
    }


def _builder(
    name: str, head: str, inputs: Inputs, base: Mapping[str, Any], /, **overrides: Any
) -> Builder:
    """Builder of `{name}{head}` from `{name}Config`, whose own loss on `inputs` is the loss."""

    def build() -> tuple[torch.nn.Module, Loss]:
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        config = getattr(transformers, f"{name}Config")(**{**base, **overrides})
        torch.manual_seed(0)
        model: torch.nn.Module = getattr(transformers, f"{name}{head}")(config).train()
        batch = inputs()

        def loss(model: torch.nn.Module) -> torch.Tensor:
            device = next(model.parameters()).device
            value: torch.Tensor = model(**{name: x.to(device) for name, x in batch.items()}).loss
            return value

        return model, loss

    return build


def _causal(name: str, **overrides: Any) -> Builder:
    return _builder(name, "ForCausalLM", _text, _TEXT, **overrides)


def _masked(name: str, **overrides: Any) -> Builder:
    return _builder(name, "ForMaskedLM", _text, _TEXT, **overrides)


def _seq2seq(name: str, base: Mapping[str, Any], **overrides: Any) -> Builder:
    return _builder(name, "ForConditionalGeneration", _text, base, **overrides)


def _vision(name: str, base: Mapping[str, Any], **overrides: Any) -> Builder:
    return _builder(name, "ForImageClassification", _image_class, base, **overrides)


ARCHITECTURES: dict[str, Builder] = {
    # Decoders
    "gpt2": _builder("GPT2", "LMHeadModel", _text, _TEXT),
    "llama": _causal("Llama", num_key_value_heads=1, attention_dropout=0.1),
    "gpt_neox": _causal("GPTNeoX", hidden_dropout=0.1, attention_dropout=0.1),
    "opt": _causal("OPT", ffn_dim=32, word_embed_proj_dim=8),
    # Encoders
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta"),
    "distilbert": _masked("DistilBert", hidden_dim=32),
    "deberta_v2": _masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    # Encoder-decoders
    "t5": _seq2seq("T5", _T5),
    "bart": _seq2seq("Bart", _SEQ2SEQ, max_position_embeddings=32),
    # Mixtures of experts
    "mixtral": _causal("Mixtral", num_local_experts=4, **_MOE),
    "qwen2_moe": _causal(
        "Qwen2Moe",
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **_MOE,
    ),
    "switch": _seq2seq(
        "SwitchTransformers",
        _T5,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=4,
        output_router_logits=True,
    ),
    # State spaces
    "mamba": _causal("Mamba", state_size=4),
    "mamba2": _causal("Mamba2", state_size=4, num_heads=4, head_dim=8, n_groups=2, chunk_size=4),
    # Vision
    "vit": _vision("ViT", _VISION, num_labels=CLASSES, hidden_dropout_prob=0.1),
    "resnet": _vision("ResNet", _STAGES, embedding_size=8),
    "convnext": _vision(
        "ConvNext", _STAGES, num_stages=2, drop_path_rate=0.2, layer_scale_init_value=0.5
    ),
    "swin": _vision(
        "Swin",
        {"image_size": PIXELS, "patch_size": 4, "num_labels": CLASSES},
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        hidden_dropout_prob=0.1,
        initializer_range=0.2,
    ),
    "segformer": _builder(
        "Segformer",
        "ForSemanticSegmentation",
        _image_mask,
        _STAGES,
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    ),
    # Audio
    "wav2vec2": _builder(
        "Wav2Vec2",
        "ForCTC",
        _waveform,
        _TEXT,
        conv_dim=[8, 8],
        conv_kernel=[10, 3],
        conv_stride=[5, 4],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,  # The time mask is drawn by numpy, which no torch seed controls
        layerdrop=0.0,
    ),
    "whisper": _builder(
        "Whisper",
        "ForConditionalGeneration",
        _spectrogram,
        _SEQ2SEQ,
        num_mel_bins=MELS,
        max_source_positions=FRAMES // 2,
        max_target_positions=16,
        dropout=0.1,
    ),
    # Multimodal
    "clip": _builder(
        "CLIP",
        "Model",
        _image_text,
        {
            "text_config": {**_TEXT, "attention_dropout": 0.1},
            "vision_config": {**_VISION, "attention_dropout": 0.1},
        },
        projection_dim=8,
    ),
}


class _NoFloat32(TorchFunctionMode):
    """Computes in float64 where float32 is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(
            lambda x: torch.float64 if x is torch.float32 else x, (args, dict(kwargs or {}))
        )
        return func(*args, **kwargs)


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _NoFloat32():
            yield
    finally:
        torch.set_default_dtype(before)


def in_float64(name: str) -> tuple[torch.nn.Module, Loss]:
    """The model and its loss in float64 throughout: norms and losses that are written in float32
    would leave its rounding in an otherwise exact comparison.
    """
    with _float64():
        model, loss_of = ARCHITECTURES[name]()
        model.double()
    config: Any = model.config
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # grouped products have no float64

    def loss(model: torch.nn.Module) -> torch.Tensor:
        with _float64():
            return loss_of(model)

    return model, loss
