"""What every tiny family shares: a tokenizer trainer, chat templates, small configs and random weights."""

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "which picture shows the larger digit ? what is the sum of 0 1 2 3 4 5 6 7 8 9 and how many red dots ? "

Built = tuple[Any, Any]


def byte_level_bpe(special: list[str]) -> Tokenizer:
    """A byte-level BPE of at most 320 tokens, and the special tokens after them."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT] * 4, trainer)
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return inner


def build_tokenizer(
    special: list[str],
    *,
    eos: str,
    pad: str,
    bos: str | None = None,
    starts_with_bos: bool = False,
    named: dict[str, str] | None = None,
) -> Any:
    """A tokenizer with a family's own special tokens.

    `starts_with_bos`: it puts `bos` before every text.
    `named`: more attributes, as `{"boi_token": "<start_of_image>"}`.
    """
    inner = byte_level_bpe(list(dict.fromkeys([*filter(None, (pad, bos, eos)), *special])))
    if starts_with_bos and bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    more: dict[str, Any] = {"bos_token": bos} if bos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=eos,
        pad_token=pad,
        padding_side="left",
        model_specific_special_tokens=named or {},
        **more,
    )


def chat_template(*, turn: str, end: str, image: str, generation: str, start: str = "") -> str:
    """A chat template: `turn`, the content with `image` for each picture, and `end`, once for each message `m`."""
    return (
        start + "{% for m in messages %}" + turn + "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}" + image + "{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}" + end + "{% endfor %}{% if add_generation_prompt %}" + generation + "{% endif %}"
    )


def text_config(tokenizer: Any, model_type: str = "llama", **more: Any) -> dict[str, Any]:
    """A language model of two layers, 64 wide."""
    base: dict[str, Any] = {"model_type": model_type, "vocab_size": len(tokenizer), "hidden_size": 64}
    base |= {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    base |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return {**base, **more}


def vision_config(model_type: str | None = None, **more: Any) -> dict[str, Any]:
    """A vision tower of two layers, 32 wide, for pictures of 32 x 32 in patches of 8 x 8."""
    base: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    base |= {"model_type": model_type} if model_type else {}
    base |= {"vision_use_head": False} if model_type in ("siglip_vision_model", "siglip2_vision_model") else {}
    return {**base, **more}


def randomise(model: Any, seed: int = 0) -> Any:
    """Random weights for every parameter, norms near 1, float32, eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (0.3 if parameter.shape[-1] <= 8 else 0.08))
            else:
                parameter.add_(noise * 0.05) if "norm" in name else parameter.copy_(noise * 0.05)
    return model.float().eval()


def finish(model: Any, tokenizer: Any, *stops: str) -> Any:
    """Random weights, and the ids that end a completion: the tokenizer's eos and `stops`.

    Scales that are not called norms stay near 1, as in `ln_pre`: near 0 they would hide what they scale.
    """
    parameters = [each for name, each in model.named_parameters() if each.dim() < 2 and "norm" not in name]
    scales = [each for each in parameters if bool((each == 1).all())]
    randomise(model)
    with torch.no_grad():
        for scale in scales:
            scale.add_(1.0)
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(stops))]))
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
