"""Make the committed series of checkpoints: the Backcopy twins, in the layout of Pythia.

Two one-layer GPTNeoX models (42k parameters) learn the Bigram-Backcopy task, one with ``<bos>`` and
one without. Each leaves 15 checkpoints ``step0 ... step320`` (float16 safetensors), a
``config.json``, and ``tokens.npy``: 32 sequences it never saw. Replaying them shows what
`entropy-monitor replay` does, in seconds and without a download:

    python examples/make_series.py      # writes examples/series/{with-bos,without-bos}
    cd examples/series
    entropy-monitor replay with-bos --tokens with-bos/tokens.npy
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from entropy_monitor.demo.backcopy import Backcopy

STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320)
HELD_OUT_SEED = 1_000_003


def make(folder: Path, *, bos: bool, seed: int) -> None:
    """Train one twin and write its series."""
    task = Backcopy(bos=bos)
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=task.vocabulary,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=128,
        max_position_embeddings=task.length,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,  # 10,000 is made for thousands of tokens
            "partial_rotary_factor": 0.25,
        },
        bos_token_id=task.bos_token,
        eos_token_id=task.bos_token,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPTNeoXForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=7e-3, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min((step + 1) / 50, 1.0))
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["GPTNeoXForCausalLM"]
    config.dtype = "float16"
    # the two lines before transformers 5 read of the rotary embedding
    config.rotary_emb_base, config.rotary_pct = 100, 0.25
    layout = {k: v for k, v in config.to_diff_dict().items() if k != "transformers_version"}
    (folder / "config.json").write_text(
        json.dumps(layout, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    np.save(folder / "tokens.npy", task.draw(32, seed=HELD_OUT_SEED).astype(np.uint8))
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            save(model, folder / f"step{step}")
        tokens = torch.from_numpy(task.draw(32, seed=seed * 1_000_000 + step))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        warm_up.step()
    print(f"{folder}: loss {loss.item():.3f} at step {STEPS[-1]}")


def save(model: torch.nn.Module, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    state = {name: value.detach().half().contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "series")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, bos in (("with-bos", True), ("without-bos", False)):
        make(arguments.out / name, bos=bos, seed=arguments.seed)


if __name__ == "__main__":
    main()
