"""Options of `transformers.TrainingArguments` that have another default here, or that an on-policy run cannot use."""

from dataclasses import dataclass
from typing import cast

import torch
from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_xla_available

from .options import option


@dataclass(repr=False)
class TrainingOptions:
    """Defaults for on-policy training, and refusals of what would undermine it.

    `GRPOConfig().bf16` is True on an accelerator that has bfloat16, and False on a CPU.
    """

    learning_rate: float = option(1e-6, help="Learning rate that the schedule starts from.")
    logging_steps: float = option(10, help="Optimizer steps between two logs; below 1, a share of all steps.")
    gradient_checkpointing: bool = option(
        True, help="Compute activations again in the backward pass: less memory, about a fifth more time."
    )
    bf16: bool = option(
        cast(bool, None),
        help="Train in bfloat16 mixed precision. None: True on an accelerator that has bfloat16, unless fp16 is set; "
        "False on a CPU.",
    )
    remove_unused_columns: bool = option(
        False,
        help="Drop the dataset columns that are no argument of the model.",
        refused="reward functions, messages and pictures are read from those columns; leave it False",
    )
    auto_find_batch_size: bool = option(
        False,
        help="Halve the batch size when memory runs out.",
        refused="a smaller batch would cut groups; lower per_device_train_batch_size and raise "
        "gradient_accumulation_steps yourself",
    )
    use_liger_kernel: bool = option(
        False,
        help="Replace layers of the model by Liger kernels.",
        refused='it is not offered; load the model with model_init_kwargs={"use_kernels": True}',
    )
    label_smoothing_factor: float = option(
        0.0,
        help="Smooth one-hot labels.",
        refused="the objective is made of advantages and has no labels to smooth; leave it 0.0",
    )
    train_sampling_strategy: str = option(
        "random",
        help="How training rows are drawn.",
        refused="rows are drawn so that every group is whole; leave it 'random', and use shuffle_dataset for the order",
    )
    torch_compile: bool = option(
        False,
        help="Compile the model's forward.",
        refused="log-probabilities are computed from parts of the model, which it would not reach; leave it False",
    )
    dataloader_num_workers: int = option(
        0,
        help="Processes that load rows.",
        refused="rows are read when their generation round begins, in the process itself; leave it 0",
    )
    dataloader_drop_last: bool = option(
        False,
        help="Drop the last, incomplete batch.",
        refused="training rounds are always whole and evaluation keeps every row; leave it False",
    )
    neftune_noise_alpha: float | None = option(
        None,
        help="Add noise to the embeddings in training.",
        refused="with noise, the policy that is trained is not the one that sampled; leave it out",
    )


def has_bfloat16() -> bool:
    """Whether this process sees an accelerator that computes in bfloat16, and does not just imitate it."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return is_torch_bf16_gpu_available() or is_torch_xla_available()
