"""Plain language models: no pictures, and positions that `collate` counts from the attention mask."""

from vlmroll_processors.families.base import Family

TEXT = Family(name="text")
