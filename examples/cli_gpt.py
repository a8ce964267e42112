"""The same GPT from a configuration file, with LightningCLI.

    python examples/cli_gpt.py fit --config configs/train_gpt.yaml
    python examples/cli_gpt.py fit --config configs/train_gpt.yaml --trainer.max_steps 1000
"""

from pytorch_lightning.cli import LightningCLI
from train_gpt import GPT, Text


def main(args: list[str] | None = None) -> LightningCLI:
    return LightningCLI(GPT, Text, args=args, seed_everything_default=0)


if __name__ == "__main__":
    main()
