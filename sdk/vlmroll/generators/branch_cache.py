"""A key-value cache in which each prompt stands once, for all completions that grow from it.

While completions grow, every layer holds the keys and values of each distinct prompt, which are only read, and those of
each row's own tokens, written in place into buffers that are allocated beforehand. The queries of all rows of a prompt
meet its keys in one matrix product; one softmax joins the prompt's part with the row's own.

A model is taken at its word only where it can be checked: the tensors that its attention gets must be those that it
cached, every layer must ask, and the mask that it makes for the first new token must hide what is hidden here. Else
`NotShareable` is raised in the first step, and `RepeatedCache` serves.

Shapes: N prompts, P the longest of them, R rows, T tokens so far.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from transformers.cache_utils import Cache

from vlmroll.attention import NotShareable, in_place_of
from vlmroll.generators.branch_layer import BranchLayer, Fold

ROOM = 256
"""Own tokens for which there is room at first, where not fewer are asked for; then it doubles."""
_CHANGES = ("position_bias", "s_aux", "softcap", "cache")


class BranchCache(Cache):
    """The cache of all layers, for the model, and its attention.

    Args:
        prefilled: a cache that a model filled with the prompts; it is left as it is.
        mask: [N, P] 0 on the prompts' padding.
        owners: prompt of each row.
        room: most tokens that a row is to grow by.

    Raises:
        NotShareable: says why the model's cache is none of this kind.
    """

    def __init__(self, prefilled: Any, mask: Int[torch.Tensor, "N P"], owners: Sequence[int], room: int) -> None:
        hidden = mask == 0
        padding = hidden if bool(hidden.any()) else None
        first = max(1, min(room, ROOM))
        super().__init__(layers=[BranchLayer(layer, padding, mask.shape[1], first) for layer in prefilled.layers])
        self._device = mask.device
        self._given: dict[int, BranchLayer] = {}  # by the identity of the key that was cached in this step
        self._checked: list[tuple[torch.Tensor | None, BranchLayer]] | None = []  # None once all is checked
        self._owners, self._prompts = list(owners), len(mask)
        self._fold = self._arrange()

    @property
    def trusted(self) -> bool:
        """Whether the model has taken a step and hides what is hidden here."""
        return self._checked is None

    def _arrange(self) -> Fold:
        """Leave out prompts without rows, and number the others anew."""
        live = sorted(set(self._owners))
        if len(live) < self._prompts:
            self._owners = [live.index(owner) for owner in self._owners]
            self._prompts = len(live)
            for layer in self._branches():
                layer.keep_prompts(torch.tensor(live, device=self._device))
        return Fold.of(self._owners, self._device)

    def keep(self, alive: Sequence[int]) -> None:
        """Keep some rows, given in ascending order."""
        self._owners = [self._owners[row] for row in alive]
        for layer in self._branches():
            layer.keep_rows(torch.tensor(alive, device=self._device))
        self._fold = self._arrange()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep one new token of each row in a layer. What is returned is only to be handed on to the attention."""
        layer = self._given[id(key_states)] = self._branches()[layer_idx]
        return layer.update(key_states, value_states)

    def forward(self, model: Any, mask: Int[torch.Tensor, "R T"], **inputs: Any) -> Any:
        """The model's output for one new token of each row.

        Args:
            mask: 0 on padding, with the new token.
            inputs: other arguments of the model's forward.

        Raises:
            NotShareable: on the first call, says why the model cannot use this cache.
        """
        # Later masks are not read here: a lone cell of four axes makes the model build none.
        given = mask.new_ones(1, 1, 1, 1, dtype=torch.bool).expand(len(mask), 1, 1, 1) if self.trusted else mask
        self._given.clear()
        token = in_place_of.set(self._attention)
        try:
            output = model(attention_mask=given, past_key_values=self, use_cache=True, **inputs)
        finally:
            in_place_of.reset(token)
        for layer in self._branches():
            if layer.fresh is None or not layer.asked:
                raise NotShareable("a layer does not use the attention that it is given")
            layer.fresh = layer.fresh_value = None
        self._checked = None
        return output

    def _branches(self) -> list[BranchLayer]:
        layers: Any = self.layers
        return layers

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """An attention function of transformers."""
        layer = self._given.get(id(key))  # layers may also share the keys of another one
        if layer is None or layer.fresh is not key or layer.fresh_value is not value:
            raise NotShareable("a layer attends to other keys than those that it caches")
        if self._checked is not None:
            self._check(layer, attention_mask, options, self._checked)
        layer.asked = True
        return layer.attend(query, self._fold, options.get("scaling")), None

    def _check(
        self,
        layer: BranchLayer,
        mask: torch.Tensor | None,
        options: dict[str, Any],
        checked: list[tuple[torch.Tensor | None, BranchLayer]],
    ) -> None:
        """Compare what a layer asks for with what it gets."""
        if changes := [name for name in _CHANGES if options.get(name) is not None]:
            raise NotShareable(f"its attention takes {changes[0]}")
        if options.get("sliding_window") not in (None, layer.window):
            raise NotShareable(f"a layer has a window of {options['sliding_window']}, its cache {layer.window}")
        if any(mask is other and layer.window == like.window for other, like in checked):
            return
        checked.append((mask, layer))
        expected = torch.ones(
            len(self._owners), layer.kept + layer.own, dtype=torch.bool, device=layer.prompt_keys.device
        )
        if layer.hidden is not None:
            expected[:, : layer.kept] = ~layer.hidden[torch.tensor(self._owners, device=expected.device)]
        if mask is None:
            agrees = layer.hidden is None
        elif mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[-1] != expected.shape[1]:
            raise NotShareable("its attention is masked in a way of its own")
        else:
            agrees = bool((mask.to(expected.device) == expected[:, None, None]).all())
        if not agrees:
            raise NotShareable("its attention leaves out other tokens than padding and those outside of a window")


class RepeatedCache:
    """A model's own cache of the prompts, repeated for each row: what every model with a cache can do.

    Args:
        prefilled: a cache that a model filled with the prompts; it is changed.
        owners: prompt of each row.
        device: of the model.
    """

    def __init__(self, prefilled: Any, owners: Sequence[int], device: torch.device) -> None:
        self._cache, self._device = prefilled, device
        self.keep(owners)

    def keep(self, alive: Sequence[int]) -> None:
        """Keep some rows, or repeat rows, in the order of their indices."""
        self._cache.reorder_cache(torch.tensor(alive, device=self._device))

    def forward(self, model: Any, mask: Int[torch.Tensor, "R T"], **inputs: Any) -> Any:
        """The model's output for one new token of each row; `mask` is 0 on padding, with the new token."""
        return model(attention_mask=mask, past_key_values=self._cache, use_cache=True, **inputs)
