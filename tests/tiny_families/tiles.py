"""InternVL, Aya Vision, Cohere 2 Vision and LFM2-VL: a picture's tiles stand in one row of tiles of the whole batch."""

from typing import Any

import transformers as hf
from transformers.models.cohere2_vision.image_processing_cohere2_vision import Cohere2VisionImageProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

from tiny_families.base import Built, build_tokenizer, chat_template, finish, text_config, vision_config

SIZE = {"height": 32, "width": 32}
TILES: dict[str, Any] = {"size": SIZE, "crop_to_patches": True, "min_patches": 1, "max_patches": 6}
TURNS = ["<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"]
COHERE: dict[str, Any] = {
    "bos": "<BOS_TOKEN>",
    "eos": "<|END_OF_TURN_TOKEN|>",
    "pad": "<PAD>",
    "starts_with_bos": True,
}


def _cohere_template(image: str) -> str:
    roles = "{'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[m.role]"
    return chat_template(
        start="{{ bos_token }}",
        turn="<|START_OF_TURN_TOKEN|><|{{ " + roles + " }}_TOKEN|>",
        image=image,
        end="<|END_OF_TURN_TOKEN|>",
        generation="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    )


def _cohere_config(tokenizer: Any) -> dict[str, Any]:
    text = text_config(tokenizer, "cohere2", head_dim=16, logit_scale=1.0)
    vision = vision_config("siglip_vision_model")
    return {"text_config": text, "vision_config": vision, "downsample_factor": 2, "tie_word_embeddings": False}


def internvl() -> Built:
    """Four tokens for each tile, and a picture of several tiles once more as a whole."""
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    named |= {"video_token": "<video>"}
    special = ["<|im_start|>", *named.values()]
    tokenizer = build_tokenizer(special, eos="<|im_end|>", pad="<|endoftext|>", named=named)
    template = chat_template(
        turn="<|im_start|>{{ m.role }}\n",
        image="<IMG_CONTEXT>\n",
        end="<|im_end|>\n",
        generation="<|im_start|>assistant\n",
    )
    processor = hf.InternVLProcessor(
        image_processor=hf.GotOcr2ImageProcessor(**TILES),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=SIZE),
        image_seq_length=4,
        chat_template=template,
    )
    config = hf.InternVLConfig(
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
        text_config=text_config(tokenizer, "qwen2"),
        vision_config=vision_config(image_size=[32, 32], patch_size=[8, 8], layer_scale_init_value=1.0),
    )
    return finish(hf.InternVLForConditionalGeneration(config), tokenizer), processor


def aya_vision() -> Built:
    """Four tokens for each tile, and a name before every tile."""
    frame = ["<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"]
    names = ["TILE", "TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 13))]
    tokenizer = build_tokenizer([*TURNS, *frame, *names], **COHERE)
    processor = hf.AyaVisionProcessor(
        image_processor=hf.GotOcr2ImageProcessor(**TILES),
        tokenizer=tokenizer,
        patch_size=8,
        img_size=32,
        downsample_factor=2,
        chat_template=_cohere_template("<image>"),
    )
    config = hf.AyaVisionConfig(
        **_cohere_config(tokenizer),
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return finish(hf.AyaVisionForConditionalGeneration(config), tokenizer), processor


def cohere2_vision() -> Built:
    """As aya_vision, with line breaks in place of names."""
    named = {"image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"}
    named |= {"img_line_break_token": "<|IMG_LINE_BREAK|>"}
    tokenizer = build_tokenizer([*TURNS, *named.values()], named=named, **COHERE)
    tiles: dict[str, Any] = {**TILES, "patch_size": 2}  # read by the processor: two by two tokens for a tile
    processor = hf.Cohere2VisionProcessor(
        image_processor=Cohere2VisionImageProcessor(**tiles),
        tokenizer=tokenizer,
        chat_template=_cohere_template("<|IMG_PATCH|>"),
    )
    config = hf.Cohere2VisionConfig(
        **_cohere_config(tokenizer), image_token_id=tokenizer.image_token_id, alignment_intermediate_size=64
    )
    return finish(hf.Cohere2VisionForConditionalGeneration(config), tokenizer), processor


def lfm2_vl() -> Built:
    """Four tokens for each tile, whose place is named, and a thumbnail of the picture's shape."""
    grid = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    special = ["<|im_start|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *grid]
    tokenizer = build_tokenizer(special, bos="<|startoftext|>", eos="<|im_end|>", pad="<|pad|>", starts_with_bos=True)
    template = chat_template(
        start="{{ bos_token }}",
        turn="<|im_start|>{{ m.role }}\n",
        image="<image>",
        end="<|im_end|>\n",
        generation="<|im_start|>assistant\n",
    )
    images = Lfm2VlImageProcessor(
        tile_size=32,
        encoder_patch_size=8,
        downsample_factor=2,
        min_image_tokens=2,
        max_image_tokens=9,
        min_tiles=2,
        max_tiles=4,
        max_pixels_tolerance=1.5,
        use_thumbnail=True,
        do_image_splitting=True,
    )
    text = text_config(tokenizer, "lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3)
    config = hf.Lfm2VlConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        downsample_factor=2,
        projector_hidden_size=48,
        tie_word_embeddings=False,
        text_config=text,
        vision_config=vision_config("siglip2_vision_model", num_patches=16),
    )
    processor = hf.Lfm2VlProcessor(image_processor=images, tokenizer=tokenizer, chat_template=template)
    return finish(hf.Lfm2VlForConditionalGeneration(config), tokenizer), processor
