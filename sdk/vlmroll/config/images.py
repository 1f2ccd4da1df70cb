"""Options of prompts: the pixels of their pictures, and their length."""

from dataclasses import dataclass

from .options import option, require, require_choice


@dataclass(repr=False)
class ImageOptions:
    """The pixel budget that every picture is brought into, and what becomes of long prompts, for every generator.

    `GRPOConfig(min_pixels=56 * 56, max_pixels=768 * 768, max_prompt_length=4096, long_prompts="shrink")`
    """

    min_pixels: int | None = option(
        None, help="Pictures with fewer pixels are scaled up to this many. None: as the processor says.", new=True
    )
    max_pixels: int | None = option(
        None, help="Pictures with more pixels are scaled down to this many. None: as the processor says.", new=True
    )

    max_prompt_length: int | None = option(
        None,
        help="Most tokens of a prompt, those of its pictures included. A longer one is never cut; see long_prompts. "
        "None: what the model's positions leave beside max_completion_length.",
    )
    long_prompts: str = option(
        "raise",
        help="What becomes of a prompt that is too long. raise: the run stops and names the row; skip: another row of "
        "the dataset takes its place (in evaluation none does), and prompts/num_skipped counts it; shrink: its "
        "pictures get fewer pixels, and the run stops when that cannot help.",
        new=True,
    )

    def check_images(self) -> None:
        """Raise ValueError for a pixel budget that no picture fits into, or an unknown policy for long prompts."""
        length = self.max_prompt_length
        require(length is None or length >= 1, "max_prompt_length", length, "it must be at least 1")
        require_choice("long_prompts", self.long_prompts, ("raise", "skip", "shrink"))
        least, most = self.min_pixels, self.max_pixels
        require(least is None or least >= 1, "min_pixels", least, "it must be at least 1")
        require(most is None or most >= 1, "max_pixels", most, "it must be at least 1")
        if least is not None and most is not None:
            require(least <= most, "min_pixels", least, f"it must not be greater than max_pixels={most}")
