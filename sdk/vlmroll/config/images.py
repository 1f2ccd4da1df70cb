"""Options of the pictures in prompts."""

from dataclasses import dataclass

from .options import option, require


@dataclass(repr=False)
class ImageOptions:
    """The pixel budget that every picture is brought into, whichever generator reads it.

    `GRPOConfig(min_pixels=56 * 56, max_pixels=768 * 768)`
    """

    min_pixels: int | None = option(
        None, help="Pictures with fewer pixels are scaled up to this many. None: as the processor says.", new=True
    )
    max_pixels: int | None = option(
        None, help="Pictures with more pixels are scaled down to this many. None: as the processor says.", new=True
    )

    def check_images(self) -> None:
        """Raise ValueError for a pixel budget that no picture fits into."""
        least, most = self.min_pixels, self.max_pixels
        require(least is None or least >= 1, "min_pixels", least, "it must be at least 1")
        require(most is None or most >= 1, "max_pixels", most, "it must be at least 1")
        if least is not None and most is not None:
            require(least <= most, "min_pixels", least, f"it must not be greater than max_pixels={most}")
