"""All options in one flat config: what GRPO and RLOO share."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from transformers import TrainingArguments

from .batching import Derived, StepSizes, check_eval_groups, check_groups, plan_round
from .generation import GenerationOptions
from .images import ImageOptions
from .logging import LoggingOptions
from .model import ModelOptions
from .objective import ObjectiveOptions
from .options import refuse, refuse_unknown_names, refuse_unsupported, require, require_types
from .training import TrainingOptions, has_bfloat16
from .vllm import VLLMOptions

C = TypeVar("C", bound=TrainingArguments)


@refuse_unknown_names
@dataclass(repr=False)  # the text of TrainingArguments hides tokens, a generated one would print them
class PolicyConfig(
    ModelOptions,
    ImageOptions,
    GenerationOptions,
    VLLMOptions,
    ObjectiveOptions,
    LoggingOptions,
    TrainingOptions,
    TrainingArguments,
):
    """Options of a policy trainer: those of `transformers.TrainingArguments` and those of the classes above.

    Every option is listed with its meaning in docs/options.md. A name that is no option raises TypeError, a value that
    cannot work raises ValueError, and both say what to write instead. `generation_batch_size` and
    `steps_per_generation` are ints once the config is made; `dataclasses.replace` works out anew which of them nobody
    gave.

        config = GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=8)
        config.generation_batch_size, config.steps_per_generation  # (8, 1)
    """

    _VALID_DICT_FIELDS = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
        "vllm_engine_kwargs",
    ]
    _names_elsewhere: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        require_types(self, scale_rewards=bool)
        refuse_unsupported(self)
        self._refuse_split_rows()
        if cast("bool | None", self.bf16) is None:
            self.bf16 = not self.fp16 and not self.use_cpu and has_bfloat16()
        super().__post_init__()
        self._refuse_shared_process()
        self.check_model()
        self.resolve_padding(self.device.type)
        self.check_images()
        self.check_generation()
        self.check_vllm(self.world_size)
        self.check_mismatch()
        self.check_objective()
        self.check_logging()
        self._plan_batches()

    def _refuse_split_rows(self) -> None:
        """Every process trains on rows of its own; context, sequence and tensor parallelism share rows."""
        for name in ("cp_size", "sp_size", "tp_size"):
            launched = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1"))  # set by `accelerate launch`
            size: int = getattr(self.parallelism_config, name, launched)
            if size > 1:
                refuse("parallelism_config", f"{name}={size}", f"rows cannot be split over processes; set {name}=1")

    def _refuse_shared_process(self) -> None:
        """Several devices in one process, or batches that accelerate splits, would break the sizes of the batches."""
        if self.n_gpu > 1:
            raise ValueError(
                f"{self.n_gpu} devices are visible to this one process, which would be trained with DataParallel. "
                f"Start a process for each with `accelerate launch --num_processes {self.n_gpu}`, or show one device "
                "with CUDA_VISIBLE_DEVICES=0"
            )
        if getattr(self.accelerator_config, "split_batches", False):
            refuse("accelerator_config", "split_batches=True", "batch sizes are those of one process; leave it False")

    def _plan_batches(self) -> None:
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            number: int = getattr(self, name)
            require(number >= 1, name, number, "it must be at least 1")
        sizes = StepSizes(
            per_device=self.per_device_train_batch_size,
            num_processes=self.world_size,
            accumulation=self.gradient_accumulation_steps,
        )
        size, steps = plan_round(sizes, self.generation_batch_size, self.steps_per_generation)
        self.generation_batch_size, self.steps_per_generation = size, steps
        check_groups(sizes, size, self.num_generations, None if isinstance(steps, Derived) else steps)
        if self.eval_strategy != "no":
            evaluation = StepSizes(
                per_device=self.per_device_eval_batch_size, num_processes=self.world_size, accumulation=1
            )
            check_eval_groups(evaluation, self.generations_per_prompt(evaluating=True))

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values for JSON; tokens are masked."""
        return {name: int(value) if isinstance(value, Derived) else value for name, value in super().to_dict().items()}

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """A config from what `to_dict` returned, or from a file of options. Masked tokens are left out.

        `GRPOConfig.from_dict(json.loads(config.to_json_string()))` equals `config`.
        """
        return cls(**{name: value for name, value in values.items() if value != f"<{name.upper()}>"})
