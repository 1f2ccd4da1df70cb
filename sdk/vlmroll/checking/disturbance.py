"""Changing a policy's weights so that every engine that has missed it can be told, and putting them back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from vlmroll.checking.prompts import TEXT_ONLY

_TOWER, _REST = "the vision tower", "the other weights"
_SCALES = (0.02, 0.1, 0.5)  # of the noise, relative to the weights it is added to


class Disturbance:
    """A policy's weights as they are now, to put back whatever is done to them.

    Args:
        model: the policy. Its weights are copied to main memory.
        towers: names of the submodules that turn pixels into features.
    """

    def __init__(self, model: Any, towers: Sequence[str]) -> None:
        self._model = model
        self._saved = [(p, p.detach().to("cpu", copy=True)) for p in model.parameters() if p.is_floating_point()]
        of_tower = {
            id(parameter)
            for name, module in model.named_modules()
            if name.rpartition(".")[2] in towers
            for parameter in module.parameters()
        }
        self._parts = {
            _TOWER: [pair for pair in self._saved if id(pair[0]) in of_tower],
            _REST: [pair for pair in self._saved if id(pair[0]) not in of_tower],
        }

    def restore(self) -> None:
        """Put all weights back, bit for bit."""
        _put_back(self._saved)

    def disturb(self, moved: Callable[[], Mapping[str, float]], wanted: Mapping[str, float]) -> list[str]:
        """Add noise to all weights, to the vision tower and to the rest as much as it takes.

        Args:
            moved: kind of prompts -> by how much log-probabilities have moved.
            wanted: kind of prompts -> by how much they have to.

        Returns:
            What moved too little, in words.
        """
        faults: list[str] = []
        for part, pairs in self._parts.items():
            weak = [kind for kind in wanted if part == _REST or kind != TEXT_ONLY]
            for scale in _SCALES if pairs and weak else ():
                _put_back(pairs)
                _add_noise((parameter for parameter, _ in pairs), scale)
                found = moved()
                weak = [kind for kind in weak if not found[kind] >= wanted[kind]]
                if not weak:
                    break
            if pairs and weak:
                faults.append(f"noise on {part} moves log-probabilities of {', '.join(weak)} too little to tell")
        return faults

    def make_likely(self, ids: Sequence[int], like: int) -> None:
        """Give some ids the logit of another one, so that only a ban keeps them from being sampled."""
        head = self._model.get_output_embeddings()
        with torch.no_grad():
            for tensor in (head.weight, getattr(head, "bias", None)):
                if tensor is not None:
                    tensor[list(ids)] = tensor[like].clone()


def _put_back(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for parameter, saved in pairs:
            parameter.copy_(saved)


def _add_noise(parameters: Iterable[torch.Tensor], scale: float) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            generator = torch.Generator(parameter.device).manual_seed(i)
            size = float(torch.linalg.vector_norm(parameter, dtype=torch.float32)) / parameter.numel() ** 0.5
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
            parameter.add_(noise.mul_(scale * (size or 1.0)))  # weights that are all 0 have no size
