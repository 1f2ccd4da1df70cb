"""Models with random weights, their tokenizers and processors, made without a hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
OVERHEAD = 8
"""Tokens of the template around one user message: letters and line ends are a token each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a model.

    Attributes:
        vocabulary: entries of the tokenizer, all of which can be sampled.
        tower: layers and width of the vision tower; None for a text model.
    """

    vocabulary: int
    layers: int
    mlp: int
    hidden: int = 512
    tower: tuple[int, int] | None = None


def build_tokenizer(vocabulary: int) -> Any:
    """A byte-level tokenizer without merges, filled up with words that no text gives but that can be sampled."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"w{i}" for i in range(vocabulary - len(letters) - len(SPECIAL))]
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*letters, *words])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=TEMPLATE,
    )


def build_processor(tokenizer: Any) -> Any:
    """Qwen2.5-VL's processor, which leaves the pictures of all workloads at their size."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    size = {"shortest_edge": 28 * 28, "longest_edge": 1024 * 1024}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    )


def _text_config(shape: Shape, tokenizer: Any) -> dict[str, Any]:
    heads = max(2, shape.hidden // 64)
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


def build_model(shape: Shape, tokenizer: Any, seed: int) -> Any:
    """A Qwen2.5-VL, or without a tower a Qwen3, with the random float32 weights of its own initialisation."""
    import transformers as hf

    torch.manual_seed(seed)
    text = _text_config(shape, tokenizer)
    if shape.tower is None:
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**text, head_dim=text["hidden_size"] // text["num_attention_heads"]))
    depth, width = shape.tower
    half = shape.hidden // text["num_attention_heads"] // 2  # rotary frequencies, shared out over time, height, width
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    vision = {"depth": depth, "hidden_size": width, "out_hidden_size": shape.hidden, "intermediate_size": 2 * width}
    vision |= {"num_heads": max(2, width // 64), "window_size": 112, "fullatt_block_indexes": [depth - 1]}
    ids = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    ids |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    named: dict[str, Any] = {key: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for key, token in ids.items()}
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **named)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def save_model(shape: Shape, folder: Path, seed: int) -> None:
    """Write model, processor and tokenizer into a folder, from which either side loads them."""
    tokenizer = build_tokenizer(shape.vocabulary)
    processor = tokenizer if shape.tower is None else build_processor(tokenizer)
    model = build_model(shape, tokenizer, seed)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
