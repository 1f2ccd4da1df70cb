"""LLaVA and its relatives, Pixtral and Mistral 3: pictures of one size, of tiles, or of their own shape."""

from typing import Any

import transformers as hf
from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor

from tiny_families.base import Built, build_tokenizer, chat_template, finish, text_config, vision_config

TEMPLATE = chat_template(turn="{{ m.role | upper }}: ", image="<image>\n", end="{{ '\\n' }}", generation="ASSISTANT:")
PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
SQUARE: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


def _llava_tokenizer() -> Any:
    return build_tokenizer(["<image>"], bos="<s>", eos="</s>", pad="<pad>", starts_with_bos=True)


def _clip_config(tokenizer: Any, model_type: str) -> dict[str, Any]:
    return {
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "image_seq_length": 16,
        "text_config": text_config(tokenizer, model_type, head_dim=16),
        "vision_config": vision_config("clip_vision_model", projection_dim=32),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def _clip_processor(kind: Any, image_processor: Any, tokenizer: Any) -> Any:
    return kind(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def llava() -> Built:
    """Sixteen tokens for each picture."""
    tokenizer = _llava_tokenizer()
    processor = _clip_processor(hf.LlavaProcessor, hf.CLIPImageProcessor(**SQUARE), tokenizer)
    config = hf.LlavaConfig(**_clip_config(tokenizer, "llama"))
    return finish(hf.LlavaForConditionalGeneration(config), tokenizer), processor


def llava_next() -> Built:
    """A picture as a whole and in tiles, without the padding that the tiles hold."""
    tokenizer = _llava_tokenizer()
    images = hf.LlavaNextImageProcessor(**SQUARE, image_grid_pinpoints=PINPOINTS)
    processor = _clip_processor(hf.LlavaNextProcessor, images, tokenizer)
    config = hf.LlavaNextConfig(**_clip_config(tokenizer, "mistral"), image_grid_pinpoints=PINPOINTS)
    return finish(hf.LlavaNextForConditionalGeneration(config), tokenizer), processor


def llava_onevision() -> Built:
    """Tiles for a row's only picture; a row of several pictures has each as a whole."""
    special = ["<image>", "<video>", "<|im_start|>"]
    tokenizer = build_tokenizer(special, eos="<|im_end|>", pad="<|endoftext|>")
    template = chat_template(
        turn="<|im_start|>{{ m.role }}\n",
        image="<image>\n",
        end="<|im_end|>\n",
        generation="<|im_start|>assistant\n",
    )
    size = {"height": 32, "width": 32}
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=PINPOINTS),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        chat_template=template,
    )
    config = hf.LlavaOnevisionConfig(
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_select_strategy="full",
        text_config=text_config(tokenizer, "qwen2"),
        vision_config=vision_config("siglip_vision_model"),
    )
    return finish(hf.LlavaOnevisionForConditionalGeneration(config), tokenizer), processor


def _pixtral_processor(merge: int) -> Any:
    special = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer = build_tokenizer(special, bos="<s>", eos="</s>", pad="<pad>", starts_with_bos=True)
    template = chat_template(
        start="{{ bos_token }}",
        turn="{{ {'system': '[SYSTEM_PROMPT]', 'user': '[INST]'}[m.role] }}",
        image="[IMG]",
        end="{{ {'system': '[/SYSTEM_PROMPT]', 'user': '[/INST]', 'assistant': eos_token}[m.role] }}",
        generation="",
    )
    images = hf.PixtralImageProcessor(patch_size={"height": 8, "width": 8}, size={"longest_edge": 64})
    return hf.PixtralProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=8, spatial_merge_size=merge, chat_template=template
    )


def _pixtral_config(tokenizer: Any) -> dict[str, Any]:
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    return {
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
        "text_config": text_config(tokenizer, "mistral", head_dim=16),
        "vision_config": vision_config("pixtral", image_size=64, head_dim=16, rope_parameters=rope),
        "vision_feature_layer": -1,
    }


def pixtral() -> Built:
    """A token for each patch of a picture in its own shape, with row breaks, on LLaVA's model class."""
    processor = _pixtral_processor(merge=1)
    more: dict[str, Any] = {"vision_feature_select_strategy": "full", "image_seq_length": 1}
    config = hf.LlavaConfig(**_pixtral_config(processor.tokenizer), **more)
    return finish(hf.LlavaForConditionalGeneration(config), processor.tokenizer), processor


def mistral3() -> Built:
    """As pixtral, with one token for two by two patches."""
    processor = _pixtral_processor(merge=2)
    config = hf.Mistral3Config(**_pixtral_config(processor.tokenizer), spatial_merge_size=2, tie_word_embeddings=False)
    return finish(hf.Mistral3ForConditionalGeneration(config), processor.tokenizer), processor
