"""How rounds of rollouts fit into `transformers.Trainer`: loaders, evaluation, logs, checkpoints.

The training loader yields micro-steps (`vlmroll.data`). When the loop asks for the micro-batches of an optimizer step,
the first micro-step of a round is turned into rollouts by `collect`, and the later ones cut from them.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import ProgressCallback, Trainer

from vlmroll import data, rollouts
from vlmroll.attention import switch_off
from vlmroll.completions import print_table, write_parquet
from vlmroll.config import PolicyConfig
from vlmroll.console import ShortProgress
from vlmroll.generators import Generator
from vlmroll.interaction import Interaction
from vlmroll.metrics import Metrics
from vlmroll.modeling import load_adapter
from vlmroll.planning import deal
from vlmroll.resume import Round, check_plan, load_round, save_round
from vlmroll.types import Rollout
from vlmroll_processors import FamilyAdapter
from vlmroll_processors.types import Row


class RoundTrainer(Trainer):
    """A trainer whose batches are lists of rollouts. A subclass gives `collect` and `compute_loss`."""

    # Losses are sums over the optimizer step already; the base class must not divide them again.
    loss_is_scaled_for_ga = True

    args: PolicyConfig
    adapter: FamilyAdapter
    generator: Generator
    interaction: Interaction

    def __init__(self, **options: Any) -> None:
        self._forget_logs()
        self._round: Round | None = None
        self._resumed_from: str | None = None
        self._micro_steps_left = 0
        self._step_started = 0.0
        self._random_states_loaded = False
        self._evaluating: str | None = None
        super().__init__(**options)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(ShortProgress)

    def collect(self, rows: Sequence[Row], row_ids: Sequence[int], seed: tuple[Any, ...], mode: str) -> list[Rollout]:
        """This process's rollouts of one round of rows, ready to train on."""
        raise NotImplementedError("PolicyTrainer gives `collect`")

    # Training.

    def get_train_dataloader(self) -> Any:
        """The loader of micro-steps."""
        args = self.args
        assert args.generation_batch_size is not None
        assert args.steps_per_generation is not None
        schedule = data.Schedule(
            prompts_per_round=args.generation_batch_size // args.num_generations,
            micro_steps_per_round=args.steps_per_generation * args.num_iterations,
            shuffle=args.shuffle_dataset,
            seed=args.seed if args.data_seed is None else args.data_seed,
        )
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        return data.round_loader(self.train_dataset, schedule)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. The generator has the trained weights in the end."""
        self._round, self._resumed_from = None, None
        self._forget_logs()
        try:
            result = super().train(*args, **kwargs)
        finally:
            switch_off(self.model)
        self.generator.sync_weights(self.model)
        return result

    def _forget_logs(self) -> None:
        """Start metrics and tables anew: a run that failed may have left some."""
        self.metrics = {mode: Metrics(type(self).__name__) for mode in ("train", "eval")}
        self.table: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}

    def get_batch_samples(
        self, epoch_iterator: Iterator[data.MicroStep], num_batches: int, device: torch.device
    ) -> tuple[list[list[list[Rollout]]], None]:
        """The micro-steps of one optimizer step: pieces, each of rollouts that go through the model together.

        Rollouts know their share in the step's loss, so groups may move from one micro-step to another to stay whole.
        """
        self._step_started = time.perf_counter()
        if self._resumed_from is not None:
            self._load_rng_state(self._resumed_from)  # before generating, as in the run that was not stopped
        batches = [self._micro_batch(step) for step in islice(epoch_iterator, num_batches)]
        self._micro_steps_left = len(batches)
        pieces = self.cut([rollout for batch in self.weigh(batches) for rollout in batch])
        return deal(pieces, len(batches)), None

    def cut(self, found: Sequence[Rollout]) -> list[list[Rollout]]:
        """Pieces of rollouts that go through the model together."""
        raise NotImplementedError("PolicyTrainer gives `cut`")

    def _micro_batch(self, step: data.MicroStep) -> list[Rollout]:
        size = self.args.per_device_train_batch_size
        if self._round is None or (self._round.epoch, self._round.number) != (step.epoch, step.round):
            rows = step.rows or data.ChosenRows(self.train_dataset, step.row_ids)
            self._round = self._saved_round(step, rows) or self._new_round(step, rows)
        start = step.index * size % len(self._round.rollouts)
        return list(self._round.rollouts[start : start + size])

    def _new_round(self, step: data.MicroStep, rows: Sequence[Row]) -> Round:
        self.sync_generator("train")
        found = self.collect(rows, step.row_ids, ("train", step.epoch, step.round), "train")
        return Round(epoch=step.epoch, number=step.round, rollouts=tuple(found))

    def _saved_round(self, step: data.MicroStep, rows: Sequence[Row]) -> Round | None:
        """The round as a checkpoint holds it, when the run was stopped inside it."""
        if self._resumed_from is None:
            return None
        folder, self._resumed_from = self._resumed_from, None
        rank = self.accelerator.process_index
        if step.index > 0:
            check_plan(folder, rank, self._plan())
        place = {row_id: i for i, row_id in enumerate(step.row_ids)}

        def row_of(row_id: int) -> Row:  # a row that took the place of one too long is none of the round's own
            return rows[place[row_id]] if row_id in place else self.train_dataset[row_id]  # pyright: ignore

        opener = self.interaction.opener
        found = load_round(folder, rank, epoch=step.epoch, number=step.round, row_of=row_of, opener=opener)
        if found is None and step.index > 0:
            raise ValueError(f"{folder} was made inside a generation round but lacks its rollouts; resume from another")
        return found

    def weigh(self, batches: Sequence[Sequence[Rollout]]) -> list[list[Rollout]]:
        """Give the rollouts of an optimizer step their masks and shares in the step's loss, over all processes."""
        args = self.args
        if args.top_entropy_quantile < 1:
            batches = rollouts.keep_high_entropy(batches, args.top_entropy_quantile, gather_object)
        longest = args.max_completion_length
        return rollouts.weigh(batches, loss_type=args.loss_type, max_completion_length=longest, gather=gather_object)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs  # tensors are made in compute_loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-step, piece by piece; wrappers reduce gradients in the last piece."""
        loss = torch.zeros((), device=self.accelerator.device)
        for piece in inputs[:-1]:
            with self.accelerator.no_sync(model):
                loss += super().training_step(model, piece, num_items_in_batch)
        loss += super().training_step(model, inputs[-1], num_items_in_batch)
        self._micro_steps_left -= 1
        if self._micro_steps_left == 0:
            self.metrics["train"].add_mean("step_time", time.perf_counter() - self._step_started)
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """6 operations for each parameter and token, forward and backward."""
        tokens = sum(r.prompt.num_tokens + len(r.completion.completion_ids) for piece in inputs for r in piece)
        return 6 * tokens * self.accelerator.unwrap_model(self.model).num_parameters(exclude_embeddings=True)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Tokens are counted when a round is collected."""

    # Evaluation.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of evaluation batches."""
        chosen: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]  # pyright: ignore
        if chosen is None or (hasattr(chosen, "__len__") and len(chosen) == 0):
            raise ValueError("evaluation needs an eval_dataset with rows")
        completions = self.args.per_device_eval_batch_size * self.accelerator.num_processes
        return data.eval_loader(chosen, max(1, completions // self.args.generations_per_prompt(evaluating=True)))

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Generate for the evaluation rows, score, and log under the prefix; see `transformers.Trainer.evaluate`."""
        outer, self._evaluating = self._evaluating, metric_key_prefix
        try:
            self.sync_generator("eval")
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._evaluating = outer
            if not self.is_in_train:
                switch_off(self.model)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a policy has no labels to predict."""
        raise TypeError("a policy trainer does not predict; call evaluate, or generator.generate for completions")

    def sync_generator(self, mode: str) -> None:
        """Hand the current weights to the generator."""
        with self.metrics[mode].timed("sync_weights"):
            self.generator.sync_weights(self.model)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Generate for one evaluation batch (a `data.EvalStep`) and compute its loss."""
        found = self.collect(inputs.rows, inputs.row_ids, ("eval", inputs.number), "eval")
        (found,) = self.weigh([found])
        loss = torch.zeros((), device=self.accelerator.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            for piece in self.cut(found):
                loss += self.compute_loss(model, piece).detach()  # pyright: ignore
        return loss, None, None

    # Logs and checkpoints.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the collected metrics to a log line, and show and write the completions table."""
        mode = "train" if self._evaluating is None else "eval"
        prefix = "" if self._evaluating is None else f"{self._evaluating}_"
        logs |= {f"{prefix}{name}": value for name, value in self.metrics[mode].flush(gather_object).items()}
        if mode == "train":
            logs["num_tokens"] = float(self.state.num_input_tokens_seen)
        super().log(logs, start_time)
        rows: list[dict[str, Any]] = gather_object(self.table[mode]) if self.args.log_completions else []
        self.table[mode] = []
        if rows and self.is_world_process_zero():
            folder = Path(str(self.args.output_dir)) / f"{prefix}completions"
            write_parquet(rows, folder, self.state.global_step)
            title = f"step {self.state.global_step}"
            print_table(
                rows,
                title.capitalize() if mode == "train" else f"Evaluation, {title}",
                limit=self.args.num_completions_to_print,
                unique_prompts=self.args.log_unique_prompts,
            )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._round is not None:
            save_round(self._round, folder, self.accelerator.process_index, self._plan())
        super()._save_checkpoint(model, trial)

    def _plan(self) -> dict[str, Any]:
        """The options that decide what a round holds and how it is trained on."""
        args = self.args
        names = "seed data_seed shuffle_dataset num_generations per_device_train_batch_size steps_per_generation"
        names += " num_iterations gradient_accumulation_steps max_completion_length top_entropy_quantile beta"
        return {name: getattr(args, name) for name in names.split()} | {"processes": args.world_size}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights the way they were saved.

        Checkpoints carry the hub's parameter names, which differ from the modules' for vision-language models; the
        base class would leave all of those out with no more than a warning. `from_pretrained` maps them. Of a
        checkpoint with several adapters it would load all but the one that is trained.
        """
        if not self._load_weights(resume_from_checkpoint, self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """The same for `load_best_model_at_end`."""
        if not self._load_weights(str(self.state.best_model_checkpoint), self.model):
            super()._load_best_model()

    def _load_weights(self, folder: str, model: Any) -> bool:
        """Load the weights of a model of transformers, or its trained adapter, in place; False for other modules."""
        if not Path(folder).is_dir():
            raise ValueError(f"there is no checkpoint folder at {folder!r}; give one that a run has written")
        inner: Any = self.accelerator.unwrap_model(model)
        if hasattr(inner, "peft_config"):
            load_adapter(inner, folder)
        elif hasattr(inner, "from_pretrained"):
            inner.load_state_dict(type(inner).from_pretrained(folder, dtype=inner.dtype).state_dict())
        else:
            return False
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._resumed_from = checkpoint
        self._random_states_loaded = False

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Once for each resumed run: the base class asks again after the first batches were made."""
        if checkpoint is None or not self._random_states_loaded:
            super()._load_rng_state(checkpoint)
        self._random_states_loaded = True
