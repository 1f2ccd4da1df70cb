"""A sequence-classification model as a reward function."""

from collections.abc import Sequence
from typing import Any

import torch


class ModelReward:
    """Scores prompt and completion with a model that has one output.

    Args:
        model: a hub id, a path, or a model of transformers with a sequence-classification head of one label.
        tokenizer: its tokenizer; by default the one saved with the model.
        device: where it runs.
        batch_size: completions that it scores at a time.
        trust_remote_code: run Python code that the model's repository brings along.

    Raises:
        ValueError: the model has more than one label, or its tokenizer has neither a pad nor an eos token.

    Example:
        >>> ModelReward("my-org/reward-model")(["Hi"], [" there"])  # doctest: +SKIP
        [0.3]
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        device: str | torch.device = "cpu",
        batch_size: int = 16,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if isinstance(model, str):
            model = AutoModelForSequenceClassification.from_pretrained(
                model, num_labels=1, trust_remote_code=trust_remote_code
            )
        if model.config.num_labels != 1:
            raise ValueError(f"the reward model has {model.config.num_labels} labels; a reward needs exactly one")
        self.model = model.to(device).eval()
        path: str = model.config._name_or_path
        self._batch_size = batch_size
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        self.tokenizer = tokenizer
        if self.tokenizer.pad_token is None:
            if self.tokenizer.eos_token is None:
                raise ValueError("the reward model's tokenizer has neither a pad nor an eos token; set pad_token")
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # Models of this kind find the last token of a row by its pad id.
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.__name__ = path.rstrip("/").split("/")[-1] or type(model).__name__

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """One score for each prompt and completion; pictures are not shown to the model."""
        # A chat template writes the special tokens itself.
        ids = [
            self.tokenizer(self._text(prompt, completion), add_special_tokens=isinstance(prompt, str))["input_ids"]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        scores: list[float] = []
        for start in range(0, len(ids), self._batch_size):
            part = {"input_ids": ids[start : start + self._batch_size]}
            inputs = self.tokenizer.pad(part, padding_side="right", return_tensors="pt")
            with torch.inference_mode():
                scores.extend(self.model(**inputs.to(self.model.device)).logits[:, 0].float().tolist())
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        turns = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
        messages = [{**message, "content": _plain(message["content"])} for message in [*turns, *completion]]
        return self.tokenizer.apply_chat_template(messages, tokenize=False)


def _plain(content: Any) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
