"""GLM-4V, GLM-4.6V and Kimi K2.5: flat patches of all pictures, and a grid for each."""

from typing import Any

import transformers as hf
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor
from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor
from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

from tiny_families.base import Built, build_tokenizer, chat_template, finish, text_config, vision_config

PATCHES: dict[str, Any] = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}


def _glm_tokenizer() -> Any:
    special = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    special += ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]
    special += ["<|begin_of_video|>", "<|video|>", "<|end_of_video|>"]
    return build_tokenizer(special, eos="<|endoftext|>", pad="<|endoftext|>")


def _glm_parts(images: Any, videos: Any, tokenizer: Any) -> dict[str, Any]:
    size = {"shortest_edge": 16 * 16 * 2, "longest_edge": 2 * 64 * 64}
    template = chat_template(
        start="[gMASK]<sop>",
        turn="<|{{ m.role }}|>\n",
        image="<|begin_of_image|><|image|><|end_of_image|>",
        end="",
        generation="<|assistant|>\n",
    )
    return {
        "image_processor": images(**PATCHES, size=size),
        "tokenizer": tokenizer,
        "video_processor": videos(**PATCHES, size=size),
        "chat_template": template,
    }


def _glm_config(tokenizer: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8}
    vision |= {"image_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64}
    names = {"image": "<|image|>", "video": "<|video|>"}
    names |= {f"{kind}_start": f"<|begin_of_{kind}|>" for kind in ("image", "video")}
    names |= {f"{kind}_end": f"<|end_of_{kind}|>" for kind in ("image", "video")}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    text = text_config(tokenizer, "glm4v_text", rope_parameters=rope)
    return {"text_config": text, "vision_config": {"model_type": "glm4v_vision", **vision}, **ids}


def glm4v() -> Built:
    """One token for two by two patches, positions in three axes, no end of a turn but the next role."""
    tokenizer = _glm_tokenizer()
    processor = hf.Glm4vProcessor(**_glm_parts(hf.Glm4vImageProcessor, Glm4vVideoProcessor, tokenizer))
    config = hf.Glm4vConfig(**_glm_config(tokenizer))
    return finish(hf.Glm4vForConditionalGeneration(config), tokenizer, "<|user|>", "<|observation|>"), processor


def glm46v() -> Built:
    """As glm4v, under other classes."""
    tokenizer = _glm_tokenizer()
    processor = hf.Glm46VProcessor(**_glm_parts(hf.Glm46VImageProcessor, Glm46VVideoProcessor, tokenizer))
    config = hf.Glm46VConfig(**_glm_config(tokenizer))
    return finish(hf.Glm46VForConditionalGeneration(config), tokenizer, "<|user|>", "<|observation|>"), processor


def _kimi_text_config(tokenizer: Any) -> dict[str, Any]:
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    more: dict[str, Any] = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    return text_config(tokenizer, "deepseek_v3", **more, **experts, **ranks)


def kimi_k25() -> Built:
    """One token for two by two patches, on a mixture of experts."""
    special = ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"]
    special += ["<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"]
    special += ["<|kimi_k25_video_placeholder|>"]
    tokenizer = build_tokenizer(special, bos="[BOS]", eos="[EOS]", pad="[PAD]")
    template = chat_template(
        turn="<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>",
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        end="<|im_end|>",
        generation="<|im_assistant|>assistant<|im_middle|>",
    )
    size = {"max_height": 16, "max_width": 16}
    processor = hf.Kimi_K25Processor(
        image_processor=Kimi_K25ImageProcessor(patch_size=8, merge_size=2, max_patches=64, size=size),
        tokenizer=tokenizer,
        video_processor=Kimi_K25VideoProcessor(patch_size=8, merge_size=2),
        chat_template=template,
    )
    config = hf.Kimi_K25Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<|media_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|kimi_k25_video_placeholder|>"),
        projection_hidden_size=32,
        tie_word_embeddings=False,
        text_config=_kimi_text_config(tokenizer),
        vision_config=vision_config(pos_emb_height=8, pos_emb_width=8, pos_emb_time=4),
    )
    return finish(hf.Kimi_K25ForConditionalGeneration(config), tokenizer, "<|im_end|>"), processor
