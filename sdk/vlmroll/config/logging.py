"""Options of what a run writes down about its completions. Metrics are always logged."""

from dataclasses import dataclass

from .options import option, require


@dataclass(repr=False)
class LoggingOptions:
    """Which completions are shown and stored.

    `GRPOConfig(log_completions=True, num_completions_to_print=4)`
    """

    log_completions: bool = option(False, help="Every logging_steps, show prompts with their completions and rewards.")
    log_multimodal: bool = option(
        True, help="Log the pictures of a prompt together with its completions; turn off to keep logs small."
    )
    num_completions_to_print: int | None = option(None, help="Print at most this many completions. None prints all.")
    log_unique_prompts: bool = option(False, help="Log one completion of each prompt in place of the whole group.")
    log_completions_hub_repo: str | None = option(
        None,
        help="Hub dataset repository that completions are uploaded to.",
        refused="uploading completions is not offered yet; leave it out and use log_completions=True",
    )

    def check_logging(self) -> None:
        """Raise ValueError for a logging option out of range."""
        count = self.num_completions_to_print
        require(
            count is None or count >= 1,
            "num_completions_to_print",
            count,
            "it must be at least 1; set log_completions=False to print none",
        )
