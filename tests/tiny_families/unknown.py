"""Families of which the library knows nothing: what it does with them must follow from what they return."""

from typing import Any

import transformers as hf
from transformers.models.deepseek_vl.image_processing_deepseek_vl import DeepseekVLImageProcessor
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.ovis2.image_processing_ovis2 import Ovis2ImageProcessor
from transformers.models.phi4_multimodal.image_processing_phi4_multimodal import Phi4MultimodalImageProcessor
from transformers.models.video_llama_3.image_processing_video_llama_3 import VideoLlama3ImageProcessor
from transformers.models.video_llama_3.video_processing_video_llama_3 import VideoLlama3VideoProcessor

from tiny_families.base import Built, build_tokenizer, chat_template, finish, text_config, vision_config

SIZE = {"height": 32, "width": 32}
# The means must be named: when a saved processor is read back they are, and the colour around a picture follows them.
PADDED: dict[str, Any] = {"size": SIZE, "min_size": 8, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CHATML: dict[str, str] = {
    "turn": "<|im_start|>{{ m.role }}\n",
    "end": "<|im_end|>\n",
    "generation": "<|im_start|>assistant\n",
}
SPOKEN: dict[str, str] = {
    "turn": "{{ {'user': 'User: ', 'assistant': 'Assistant: '}[m.role] if m.role != 'system' }}",
    "end": "{{ eos_token if m.role == 'assistant' else '\\n\\n' }}",
    "generation": "Assistant:",
}


def _deepseek_tokenizer(**named: str) -> Any:
    bos, eos = "<begin_of_sentence>", "<end_of_sentence>"
    return build_tokenizer([*named.values()], bos=bos, eos=eos, pad="<pad>", starts_with_bos=True, named=dict(named))


def janus() -> Built:
    """Sixteen tokens for each picture, and a second decoder, for pictures."""
    tokenizer = _deepseek_tokenizer(
        image_token="<image_placeholder>", boi_token="<begin_of_image>", eoi_token="<end_of_image>"
    )
    processor = hf.JanusProcessor(
        image_processor=hf.JanusImageProcessor(**PADDED),
        tokenizer=tokenizer,
        num_image_tokens=16,
        chat_template=chat_template(image="<image_placeholder>\n", **SPOKEN),
    )
    vision: dict[str, Any] = {"projection_dim": 64, "num_image_tokens": 16, "depth": 2, "mlp_ratio": 2.0}
    codes: dict[str, Any] = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 32, "base_channels": 32}
    codes |= {"channel_multiplier": [1, 1], "num_res_blocks": 1, "num_patches": 4}
    config = hf.JanusConfig(
        image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=False,
        text_config=text_config(tokenizer, head_dim=16),
        vision_config=vision_config(**vision),
        vq_config={**codes, "projection_dim": 64, "image_token_embed_dim": 64},
    )
    return finish(hf.JanusForConditionalGeneration(config), tokenizer), processor


def deepseek_vl() -> Built:
    """Sixteen tokens for each picture."""
    tokenizer = _deepseek_tokenizer(image_token="<image_placeholder>")
    processor = hf.DeepseekVLProcessor(
        image_processor=DeepseekVLImageProcessor(**PADDED),
        tokenizer=tokenizer,
        num_image_tokens=16,
        chat_template=chat_template(image="<image_placeholder>", **SPOKEN),
    )
    config = hf.DeepseekVLConfig(
        image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=False,
        text_config=text_config(tokenizer, head_dim=16),
        vision_config=vision_config("siglip_vision_model"),
    )
    return finish(hf.DeepseekVLForConditionalGeneration(config), tokenizer), processor


def ovis2() -> Built:
    """Four tokens for each tile, which are mixtures of words of a visual vocabulary, and embedded tile separators."""
    marks = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    special = ["<|im_start|>", "<image>", "<IMG_ATOM>", *marks]
    tokenizer = build_tokenizer(special, eos="<|im_end|>", pad="<|endoftext|>")
    processor = hf.Ovis2Processor(
        image_processor=Ovis2ImageProcessor(size=SIZE, crop_to_patches=True, min_patches=1, max_patches=6),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=chat_template(image="<image>\n", **CHATML),
    )
    config = hf.Ovis2Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
        visual_indicator_token_ids=tokenizer.convert_tokens_to_ids(marks),
        vocab_size=len(tokenizer),
        hidden_size=64,
        text_config=text_config(tokenizer, "qwen2"),
        vision_config=vision_config(vocab_size=32, hidden_stride=2, num_visual_indicator_tokens=len(marks)),
    )
    return finish(hf.Ovis2ForConditionalGeneration(config), tokenizer), processor


def video_llama_3() -> Built:
    """One token for two by two patches, with a grid and a merge size for each picture."""
    special = ["<|im_start|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = build_tokenizer(special, eos="<|im_end|>", pad="<|endoftext|>")
    patches: dict[str, Any] = {"patch_size": 8, "merge_size": 2}
    patches |= {"size": {"shortest_edge": 16 * 16 * 2, "longest_edge": 64 * 64}}
    processor = hf.VideoLlama3Processor(
        image_processor=VideoLlama3ImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=VideoLlama3VideoProcessor(**patches),
        chat_template=chat_template(image="<|image_pad|>\n", **CHATML),
    )
    vision = vision_config()
    del vision["image_size"]
    config = hf.VideoLlama3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        text_config=text_config(tokenizer, "qwen2"),
        vision_config=vision,
    )
    return finish(hf.VideoLlama3ForConditionalGeneration(config), tokenizer), processor


def llama4() -> Built:
    """Four tokens for each tile, separators between them, and a mixture of experts.

    The processor returns pixels in bfloat16, whatever the model's type: a float32 model takes them only after a cast.
    """
    special = ["<|header_start|>", "<|header_end|>", "<|end_of_text|>", "<|image_start|>", "<|image|>"]
    special += ["<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
    tokenizer = build_tokenizer(
        special, bos="<|begin_of_text|>", eos="<|eot|>", pad="<|finetune_right_pad|>", starts_with_bos=True
    )
    template = chat_template(
        start="{{ bos_token }}",
        turn="<|header_start|>{{ m.role }}<|header_end|>{{ '\\n\\n' }}",
        image="<|image|>",
        end="<|eot|>",
        generation="<|header_start|>assistant<|header_end|>{{ '\\n\\n' }}",
    )
    processor = hf.Llama4Processor(
        image_processor=Llama4ImageProcessor(size=SIZE, max_patches=6),
        tokenizer=tokenizer,
        patch_size=8,
        chat_template=template,
    )
    experts: dict[str, Any] = {"num_local_experts": 2, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0]}
    wide = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64)
    text = text_config(tokenizer, "llama4_text", head_dim=16, rope_parameters=ROPE, **experts)
    config = hf.Llama4Config(
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<|image_start|>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<|image_end|>"),
        text_config=text,
        vision_config={**vision_config(rope_parameters=ROPE, **wide), "intermediate_size": 128},
    )
    return finish(hf.Llama4ForConditionalGeneration(config), tokenizer, "<|end_of_text|>"), processor


def phi4_multimodal() -> Built:
    """Hundreds of tokens for each picture: their number knows pictures of 448 pixels in patches of 14 only."""
    named = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
    special = [*named.values(), "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer = build_tokenizer(special, eos="<|endoftext|>", pad="<|pad|>", named=named)
    template = chat_template(turn="<|{{ m.role }}|>", image="<|image|>", end="<|end|>", generation="<|assistant|>")
    processor = hf.Phi4MultimodalProcessor(
        image_processor=Phi4MultimodalImageProcessor(dynamic_hd=4),
        audio_processor=hf.Phi4MultimodalFeatureExtractor(),
        tokenizer=tokenizer,
        chat_template=template,
    )
    narrow: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    audio: dict[str, Any] = {"num_blocks": 1, "nemo_conv_channels": 16, "ext_pw_out_channel": 16}
    vision: dict[str, Any] = {"num_hidden_layers": 2, "image_size": 448, "crop_size": 448, "patch_size": 14}
    text = text_config(tokenizer, rope_parameters=ROPE, max_position_embeddings=4096)
    text |= {"original_max_position_embeddings": 4096, "bos_token_id": tokenizer.eos_token_id}
    del text["model_type"]
    config = hf.Phi4MultimodalConfig(
        **text,
        vision_config={**narrow, **vision, "image_token_id": tokenizer.image_token_id, "feature_layer": -2},
        audio_config={
            **narrow,
            **audio,
            "depthwise_separable_out_channel": 16,
            "audio_token_id": tokenizer.audio_token_id,
        },
    )
    return finish(hf.Phi4MultimodalForCausalLM(config), tokenizer, "<|end|>"), processor
