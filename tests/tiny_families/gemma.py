"""Gemma 3, Gemma 4 and PaliGemma: soft tokens of a fixed or a dynamic number."""

from typing import Any

import transformers as hf
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

from tiny_families.base import Built, build_tokenizer, chat_template, finish, text_config, vision_config


def _gemma3_tokenizer() -> Any:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    special = ["<start_of_turn>", "<end_of_turn>", *named.values()]
    return build_tokenizer(special, bos="<bos>", eos="<eos>", pad="<pad>", starts_with_bos=True, named=named)


def _gemma3_model(tokenizer: Any) -> Any:
    text = text_config(
        tokenizer,
        "gemma3_text",
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=32,
        query_pre_attn_scalar=16,
    )
    config = hf.Gemma3Config(
        text_config=text,
        vision_config=vision_config("siglip_vision_model"),
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    return finish(hf.Gemma3ForConditionalGeneration(config), tokenizer, "<end_of_turn>")


class PanAndScan(Gemma3ImageProcessor):
    """Cuts crops from every picture, though the processor's own defaults, which it passes on, say not to."""

    def preprocess(self, images: Any, **options: Any) -> Any:
        crops: dict[str, Any] = {"pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 4}
        options |= {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 1.2, **crops}
        return super().preprocess(images, **options)


def _gemma3(image_processor: Any) -> Built:
    tokenizer = _gemma3_tokenizer()
    template = chat_template(
        start="{{ bos_token }}",
        turn="<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n",
        image="<start_of_image>",
        end="<end_of_turn>\n",
        generation="<start_of_turn>model\n",
    )
    processor = hf.Gemma3Processor(
        image_processor=image_processor, tokenizer=tokenizer, image_seq_length=4, chat_template=template
    )
    return _gemma3_model(tokenizer), processor


def gemma3() -> Built:
    """Four soft tokens for each picture."""
    return _gemma3(Gemma3ImageProcessor(size={"height": 32, "width": 32}))


def gemma3_panscan() -> Built:
    """Four soft tokens for each picture and for each crop of it."""
    return _gemma3(PanAndScan(size={"height": 32, "width": 32}))


def gemma4() -> Built:
    """Up to 70 soft tokens for each picture, in a padded tensor of patches with their positions."""
    named = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    named |= {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
    special = ["<|turn>", "<turn|>", *named.values(), "<|video|>"]
    tokenizer = build_tokenizer(special, bos="<bos>", eos="<eos>", pad="<pad>", starts_with_bos=True, named=named)
    template = chat_template(
        start="{{ bos_token }}",
        turn="<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n",
        image="<|image|>",
        end="<turn|>\n",
        generation="<|turn>model\n",
    )
    patches: dict[str, Any] = {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2}
    processor = hf.Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=hf.Gemma4ImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(**patches),
        image_seq_length=70,
        chat_template=template,
    )
    text = text_config(
        tokenizer,
        "gemma4_text",
        vocab_size_per_layer_input=len(tokenizer),
        hidden_size_per_layer_input=8,
        head_dim=16,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        use_bidirectional_attention="vision",
    )
    vision = vision_config(head_dim=16, num_key_value_heads=2, pooling_kernel_size=2, position_embedding_size=256)
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in named}
    config = hf.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        **ids,
    )
    return finish(hf.Gemma4ForConditionalGeneration(config), tokenizer, "<turn|>"), processor


def _paligemma(model_type: str, **text: Any) -> Built:
    tokenizer = build_tokenizer(["<image>"], bos="<bos>", eos="<eos>", pad="<pad>")
    images: Any = hf.SiglipImageProcessor(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    template = (
        "{% for m in messages %}{% if m.content is not string %}{% for p in m.content if p.type == 'image' %}<image>"
        "{% endfor %}{% endif %}{% endfor %}{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}"
        "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
    )
    processor = hf.PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer, chat_template=template)
    more: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 16}
    config = hf.PaliGemmaConfig(
        text_config=text_config(tokenizer, model_type, **more, **text),
        vision_config=vision_config("siglip_vision_model", projection_dim=64),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
    )
    return finish(hf.PaliGemmaForConditionalGeneration(config), tokenizer), processor


def paligemma() -> Built:
    """Sixteen tokens for each picture, all before the text, and a prompt in which every token sees every other.

    The processor adds 1152 tokens for places and masks to the tokenizer.
    """
    return _paligemma("gemma")


def paligemma2() -> Built:
    """As paligemma, on Gemma 2."""
    return _paligemma("gemma2", sliding_window=64, query_pre_attn_scalar=16)
