"""Which rows of a prompt's tensors each of its pictures brought."""

import pickle
from dataclasses import replace

import pytest
import torch

from tiny_models import tiny
from training_runs import FAMILIES, rows
from vlmroll_processors import Join, JoinKind, Prompt, load_adapter
from vlmroll_processors.types import JOINED_ON, MediaUnit


@pytest.mark.parametrize("name", FAMILIES)
def test_units_share_out_the_tensors_and_the_features_of_a_prompt(name: str) -> None:
    """Each picture is a unit, or all of a prompt are one; a picture alone brings what it brings beside others."""
    made = tiny(name)
    adapter = load_adapter(made.processor, config=made.model.config)
    for prompt in adapter.encode(rows(4, name)):
        pictures = len(prompt.images)
        assert len(prompt.units) == (min(pictures, 1) if adapter.family.together else pictures)
        found = prompt.unit_kwargs()
        for key, whole in prompt.forward_kwargs.items():
            if prompt.join[key].kind is JoinKind.TOKENS:
                assert not any(key in kwargs for kwargs in found)
            else:
                axis = JOINED_ON[prompt.join[key].kind]
                assert torch.cat([kwargs[key] for kwargs in found], axis).equal(whole)
        feature = adapter.tokenizer.convert_tokens_to_ids(adapter.family.feature_of("image"))
        assert sum(unit.num_features for unit in prompt.units) == prompt.prompt_ids.count(feature)
        if not adapter.family.together:
            for unit, span in zip(prompt.units, prompt.image_spans, strict=True):
                ids = prompt.prompt_ids[span.offset : span.offset + span.length]
                assert unit.num_features == ids.count(feature)
        assert pickle.loads(pickle.dumps(prompt)).units == prompt.units


def test_units_that_do_not_add_up_are_refused() -> None:
    x = {"x": torch.zeros(3, 2)}
    units = (MediaUnit(num_features=1, rows={"x": 1}), MediaUnit(num_features=1, rows={"x": 2}))
    join = {"x": Join(kind=JoinKind.ROWS)}
    prompt = Prompt(prompt_ids=(5, 6), engine_ids=(5, 6), forward_kwargs=x, join=join, units=units)
    assert [len(kwargs["x"]) for kwargs in prompt.unit_kwargs()] == [1, 2]
    with pytest.raises(ValueError, match=r"its units bring \[1\] rows"):
        replace(prompt, units=units[:1])
