"""Options of the policy model: how it is loaded, what of it is trained, and what its forward pass may hold."""

from dataclasses import dataclass
from typing import Any

from .options import option, require, require_dict


@dataclass(repr=False)
class ModelOptions:
    """How the policy is loaded and run.

    `GRPOConfig(model_init_kwargs={"attn_implementation": "sdpa"}, freeze_vision_tower=True)`
    """

    model_init_kwargs: dict[str, Any] | str | None = option(
        None, help="Keyword arguments for from_pretrained, used when the model is given as a name or a path."
    )
    trust_remote_code: bool = option(
        False, help="Run Python code that a model repository brings along, for the policy and for reward models."
    )
    router_aux_loss_coef: float | None = option(
        None,
        help="Weight of the load-balancing loss of mixture-of-experts models. No such loss is added.",
        refused="the load-balancing loss is not offered yet; leave router_aux_loss_coef=None, which adds none",
    )
    disable_dropout: bool = option(
        False, help="Set every dropout of the model to 0, so that two passes over the same tokens agree."
    )
    cast_lm_head_to_fp32: bool = option(
        False,
        help="Keep the output projection in float32.",
        refused="it is not offered yet; leave it out",
    )
    pad_to_multiple_of: int | str | None = option(
        "auto",
        help="Pad prompts and completions to a multiple of this length. 'auto' is 128 on Neuron devices, which compile "
        "once for each shape, and no extra padding elsewhere; 'none' never pads.",
    )
    ds3_gather_for_generation: bool = option(
        True,
        help="Under DeepSpeed ZeRO-3, gather the weights once for each generation round. Sharded training is not "
        "offered yet.",
        refused="generating from weights that are still split is not offered yet; leave ds3_gather_for_generation=True",
    )
    freeze_vision_tower: bool = option(
        False, help="Train the language model alone: the vision tower keeps its weights.", new=True
    )
    share_prompts: bool = option(
        True,
        help="Run a prompt, with its pictures, once for all of its completions in a micro-batch, and pad nothing. "
        "Models that cannot do that are found out on first use; they run each prompt again for each completion.",
        new=True,
    )
    micro_batch_max_tokens: int | None = option(
        None,
        help="Most tokens that go through the model together in training: prompts, each counted once where its "
        "completions share it, and completions. A micro-step over it is run in pieces; groups stay together where they "
        "fit. None: per_device_train_batch_size alone is the limit.",
        new=True,
    )
    micro_batch_max_patches: int | None = option(
        None,
        help="Most patches of pictures and videos that go through the vision tower together in training.",
        new=True,
    )
    logprob_chunk_size: int = option(
        1024,
        help="Number of completion tokens whose logits exist at one time; smaller needs less memory.",
        new=True,
    )

    def check_model(self) -> None:
        """Raise ValueError for a model option out of range, and read numbers given as text."""
        require_dict("model_init_kwargs", self.model_init_kwargs)
        for name in ("logprob_chunk_size", "micro_batch_max_tokens", "micro_batch_max_patches"):
            size: int | None = getattr(self, name)
            require(size is None or size >= 1, name, size, "it must be at least 1")

    def resolve_padding(self, device_type: str) -> None:
        """Turn `pad_to_multiple_of` into an int or None for a device such as "cuda"."""
        given = self.pad_to_multiple_of
        if given == "auto":
            # Neuron compiles once for each shape of its input, so fewer lengths are fewer compilations.
            self.pad_to_multiple_of = 128 if device_type == "neuron" else None
        elif isinstance(given, str):  # the command line knows text only
            require(given.isdigit() or given.lower() == "none", "pad_to_multiple_of", given, "'auto', 'none' or an int")
            self.pad_to_multiple_of = int(given) if given.isdigit() else None
        padding = self.pad_to_multiple_of
        require(padding is None or int(padding) >= 1, "pad_to_multiple_of", given, "it must be at least 1")
