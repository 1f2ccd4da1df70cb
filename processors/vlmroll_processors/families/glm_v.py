"""GLM-4V and GLM-4.6V: patch rows with a (t, h, w) grid for each picture, M-RoPE positions."""

from vlmroll_processors.families.base import Family
from vlmroll_processors.families.positions import PATCHES, grid_positions

GLM_V = Family(
    name="GLM-V",
    processors=("Glm4vProcessor", "Glm46VProcessor"),
    slot="<|image|>",
    written="<|begin_of_image|><|image|><|end_of_image|>",
    vision_tokens=r"<\|((begin|end)_of_)?(image|video|audio)\|>",
    join=PATCHES,
    more=grid_positions,
)
