"""Tiny random models and processors of each family, built here so that no test needs a hub.

Weights are random but of a size that makes logits depend on everything (standard deviation about 0.5), so that a wrong
pixel, position or mask shows as a difference far above rounding.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerFast

from tiny_families import BUILDERS, UNKNOWN, build
from tiny_families.base import byte_level_bpe, randomise

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QWEN_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
VISION_FAMILIES: tuple[str, ...] = (*QWEN_FAMILIES, *BUILDERS)
"""Families with pictures that the library supports."""
UNKNOWN_FAMILIES: tuple[str, ...] = tuple(UNKNOWN)
"""Families with pictures of which the library knows nothing."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model with its processor (a tokenizer for the text family)."""

    name: str
    model: Any
    processor: Any

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Noise of a given size."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def user(text: str, *pictures: Image.Image) -> list[dict[str, Any]]:
    """One user message with its pictures before the text."""
    parts = [{"type": "image", "image": image} for image in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def mixed_rows() -> list[dict[str, Any]]:
    """Four rows with 1, 3, 0 and 2 pictures of different sizes."""
    return [
        {"prompt": user("which digit ?", picture(64, 48, 1))},
        {"prompt": user("what is the sum of", picture(120, 40, 2), picture(40, 100, 3), picture(64, 64, 4))},
        {"prompt": user("how many dots ? 7")},
        {"prompt": user("larger ?", picture(96, 64, 5), picture(48, 48, 6))},
    ]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A small byte-level BPE with Qwen's special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(list(SPECIAL)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=TEMPLATE,
    )


def _ids() -> dict[str, Any]:
    vocabulary = tokenizer().get_vocab()
    keys = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    keys |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    return {key: vocabulary[f"<|{token}|>"] for key, token in keys.items()}


def _text_config(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"vocab_size": 336, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": tokenizer().pad_token_id}
    base |= {"eos_token_id": tokenizer().eos_token_id, "bos_token_id": None}
    return {**base, **more}


def _vision_config(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {**base, "in_channels": 3, **more}


def _rope(section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, **more}


def _processor(name: str) -> Any:
    import transformers
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    size = {"shortest_edge": 16 * 16 * 2, "longest_edge": 64 * 64}
    sizes: dict[str, Any] = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    images = transformers.Qwen2VLImageProcessor(**sizes, size=size)
    kind = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}.get(name, "Qwen3VLProcessor")
    video = (Qwen3VLVideoProcessor if kind == "Qwen3VLProcessor" else Qwen2VLVideoProcessor)(**sizes)
    return getattr(transformers, kind)(
        image_processor=images, tokenizer=tokenizer(), video_processor=video, chat_template=TEMPLATE
    )


@cache
def tiny(name: str) -> Tiny:
    """A tiny model of "text" or of one of the families with pictures. Shared: copy it before training."""
    import transformers as hf

    if name in BUILDERS or name in UNKNOWN:
        return Tiny(name, *build(name))
    if name == "text":
        config = hf.Qwen3Config(**_text_config(head_dim=32))
        return Tiny(name, randomise(hf.Qwen3ForCausalLM(config)), tokenizer())
    wide = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
    if name == "qwen2_vl":
        text = _text_config(rope_parameters=_rope([4, 6, 6]))
        vision = _vision_config(embed_dim=32, hidden_size=64, mlp_ratio=2)
        model = hf.Qwen2VLForConditionalGeneration(hf.Qwen2VLConfig(text_config=text, vision_config=vision, **_ids()))
    elif name == "qwen2_5_vl":
        text = _text_config(rope_parameters=_rope([4, 6, 6]))
        vision = _vision_config(**wide, window_size=32, fullatt_block_indexes=[1])
        model = hf.Qwen2_5_VLForConditionalGeneration(
            hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_ids())
        )
    elif name == "qwen3_vl":
        text = _text_config(head_dim=32, rope_parameters=_rope([8, 4, 4], mrope_interleaved=True))
        vision = _vision_config(**wide, num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
        model = hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(text_config=text, vision_config=vision, **_ids()))
    elif name == "qwen3_5":
        linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
        text = _text_config(
            head_dim=32,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            rope_parameters=_rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
            **linear,
        )
        vision = _vision_config(**wide, num_position_embeddings=64)
        model = hf.Qwen3_5ForConditionalGeneration(hf.Qwen3_5Config(text_config=text, vision_config=vision, **_ids()))
    else:
        raise ValueError(f"no tiny model named {name!r}")
    return Tiny(name, randomise(model), _processor(name))
