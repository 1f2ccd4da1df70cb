"""A short training run of two processes with vLLM in them: started by torchrun.

python tests/with_vllm/two_processes.py TENSOR_PARALLEL_SIZE FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch

from training_runs import make_trainer
from vlmroll.checking import check_generators


def main(size: str, folder: str) -> None:
    engine = {"enforce_eager": True, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
    trainer = make_trainer(
        "grpo",
        Path(folder) / "run",
        model="qwen2_5_vl",
        per_device_train_batch_size=6,  # groups of 4: one lies on both processes
        gradient_accumulation_steps=1,
        use_vllm=True,
        vllm_tensor_parallel_size=int(size),
        vllm_max_model_length=512,
        vllm_engine_kwargs=engine,
    )
    trainer.train()
    model: Any = trainer.model
    adapter: Any = trainer.adapter
    report = check_generators(model, adapter, {"vllm-colocate": trainer.generator}, tolerance=1e-3)
    result = {"weights": model.state_dict(), "passed": report.passed, "report": str(report)}
    torch.save(result, Path(folder) / f"{trainer.accelerator.process_index}.pt")
    trainer.generator.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
