"""Idefics 2 and 3, SmolVLM and Mllama: pictures in slots, as many in each row as the row with most has."""

from typing import Any

import torch
import transformers as hf
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

from tiny_families.base import Built, build_tokenizer, chat_template, finish, text_config, vision_config

GRID = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
PICTURE = ["<fake_token_around_image>", "<image>", "<end_of_utterance>"]
TILE = {"longest_edge": 32}
SIZES: dict[str, Any] = {"size": {"longest_edge": 64}, "max_image_size": TILE}
VIDEO: dict[str, Any] = {"size": TILE, "max_image_size": TILE, "num_frames": 4, "fps": 1}


def _template(**more: str) -> str:
    return chat_template(
        turn="{{ m.role | capitalize }}:",
        image="<image>",
        end="<end_of_utterance>\n",
        generation="Assistant:",
        **more,
    )


def _tiles_config(tokenizer: Any) -> dict[str, Any]:
    text = text_config(tokenizer, head_dim=16)
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "pad_token_id": tokenizer.pad_token_id}
    return {"scale_factor": 2, "text_config": text, "vision_config": vision_config(), **ids}


def smolvlm() -> Built:
    """A picture cut into tiles and shown once more as a whole, 16 tokens each: the model wants multiples of a patch."""
    special = [*PICTURE, "<global-img>", *GRID, "<|endoftext|>"]
    tokenizer = build_tokenizer(special, bos="<|im_start|>", eos="<end_of_utterance>", pad="<|im_end|>")
    processor = hf.SmolVLMProcessor(
        image_processor=hf.SmolVLMImageProcessor(**SIZES, do_image_splitting=True),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(**VIDEO),
        image_seq_len=16,
        chat_template=_template(start="<|im_start|>"),
    )
    options: dict[str, Any] = {**_tiles_config(tokenizer), "vision_config": vision_config(patch_size=4)}
    config = hf.SmolVLMConfig(**options)
    return finish(hf.SmolVLMForConditionalGeneration(config), tokenizer), processor


def idefics3() -> Built:
    """As smolvlm, with four tokens a tile and a begin token that the tokenizer writes."""
    special = [*PICTURE, "<global-img>", *GRID]
    tokenizer = build_tokenizer(special, bos="<bos>", eos="<eos>", pad="<pad>", starts_with_bos=True)
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessor(**SIZES, do_image_splitting=True),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=_template(),
    )
    config = hf.Idefics3Config(**_tiles_config(tokenizer))
    return finish(hf.Idefics3ForConditionalGeneration(config), tokenizer, "<end_of_utterance>"), processor


def _idefics2(split: bool) -> Built:
    tokenizer = build_tokenizer(PICTURE, bos="<s>", eos="</s>", pad="<unk>", starts_with_bos=True)
    size = {"shortest_edge": 24, "longest_edge": 48}
    processor = hf.Idefics2Processor(
        image_processor=hf.Idefics2ImageProcessor(size=size, do_image_splitting=split),
        tokenizer=tokenizer,
        image_seq_len=4,
        chat_template=_template(),
    )
    perceiver: dict[str, Any] = {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1}
    perceiver |= {"resampler_n_heads": 4, "resampler_head_dim": 16, "num_key_value_heads": 2}
    config = hf.Idefics2Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        text_config=text_config(tokenizer, "mistral", head_dim=16),
        perceiver_config=perceiver,
        vision_config=vision_config(image_size=48),
    )
    return finish(hf.Idefics2ForConditionalGeneration(config), tokenizer, "<end_of_utterance>"), processor


def idefics2() -> Built:
    """Four tokens for each picture, whose pixels keep their shape and are padded to the largest of the batch."""
    return _idefics2(split=False)


def idefics2_split() -> Built:
    """As idefics2, with every picture cut into four and shown once more as a whole."""
    return _idefics2(split=True)


def mllama() -> Built:
    """One token for each picture, whose up to four tiles are seen through cross attention."""
    special = ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|image|>", "<|end_of_text|>"]
    tokenizer = build_tokenizer(
        special, bos="<|begin_of_text|>", eos="<|eot_id|>", pad="<|finetune_right_pad_id|>", starts_with_bos=True
    )
    template = chat_template(
        start="{{ bos_token }}",
        turn="<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\\n\\n' }}",
        image="<|image|>",
        end="<|eot_id|>",
        generation="<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}",
    )
    images = hf.MllamaImageProcessor(size={"height": 32, "width": 32}, max_image_tiles=4)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = text_config(tokenizer, "mllama_text_model", num_hidden_layers=3, cross_attention_layers=[1])
    vision = vision_config(attention_heads=2, num_global_layers=1, vision_output_dim=64)
    config = hf.MllamaConfig(
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, "max_num_tiles": 4, "intermediate_layers_indices": [0]},
    )
    model = finish(hf.MllamaForConditionalGeneration(config), tokenizer, "<|end_of_text|>")
    with torch.no_grad():  # near 0 they would shut the pictures out
        for name, parameter in model.named_parameters():
            if parameter.numel() == 1 and "gate" in name:
                parameter.fill_(0.8 if "cross_attn" in name else 0.5)
    return model, hf.MllamaProcessor(image_processor=images, tokenizer=tokenizer, chat_template=template)
