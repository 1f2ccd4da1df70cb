"""Tiny random models and processors of many vision-language families."""

from collections.abc import Callable

from tiny_families import gemma, grids, idefics, llava, tiles, unknown
from tiny_families.base import Built

BUILDERS: dict[str, Callable[[], Built]] = {
    "gemma3": gemma.gemma3,
    "gemma3_panscan": gemma.gemma3_panscan,
    "gemma4": gemma.gemma4,
    "smolvlm": idefics.smolvlm,
    "idefics3": idefics.idefics3,
    "idefics2": idefics.idefics2,
    "idefics2_split": idefics.idefics2_split,
    "llava": llava.llava,
    "llava_next": llava.llava_next,
    "llava_onevision": llava.llava_onevision,
    "internvl": tiles.internvl,
    "paligemma": gemma.paligemma,
    "paligemma2": gemma.paligemma2,
    "mistral3": llava.mistral3,
    "pixtral": llava.pixtral,
    "lfm2_vl": tiles.lfm2_vl,
    "glm4v": grids.glm4v,
    "glm46v": grids.glm46v,
    "kimi_k25": grids.kimi_k25,
    "mllama": idefics.mllama,
    "aya_vision": tiles.aya_vision,
    "cohere2_vision": tiles.cohere2_vision,
}
UNKNOWN: dict[str, Callable[[], Built]] = {
    "janus": unknown.janus,
    "phi4_multimodal": unknown.phi4_multimodal,
    "deepseek_vl": unknown.deepseek_vl,
    "ovis2": unknown.ovis2,
    "video_llama_3": unknown.video_llama_3,
    "llama4": unknown.llama4,
}


def build(name: str) -> Built:
    """The model and the processor of a family, whose tokenizer has the chat template too, as one read from disk."""
    model, processor = {**BUILDERS, **UNKNOWN}[name]()
    processor.tokenizer.chat_template = processor.chat_template
    return model, processor
