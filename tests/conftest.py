"""Settings that hold for every test: one thread, no network, checked shapes, the same examples in every run."""

import os

# Read when torch, transformers and tqdm are imported, so set before. Why one thread: CONTRIBUTING.md, "Pitfalls".
os.environ.update(
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    TORCHDYNAMO_DISABLE="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    TQDM_DISABLE="1",
)

import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# Types and tensor shapes of both packages are checked at run time; an int passes for a float, as PEP 484 says.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
install_import_hook(["vlmroll", "vlmroll_processors"], CHECKER)

torch.set_num_threads(1)

# `dev` looks for new examples in every run: `python -m pytest --hypothesis-profile=dev`.
_UNTIMED = [HealthCheck.too_slow]  # a machine with other work beside is no fault of the code
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25, suppress_health_check=_UNTIMED)
settings.register_profile("dev", deadline=None, max_examples=200, suppress_health_check=_UNTIMED)
settings.load_profile("ci")
