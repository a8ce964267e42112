"""A small GPT on real text with the callback: the whole of what a Lightning user adds is one line.

    python examples/train_gpt.py
    python examples/train_gpt.py --precision bf16-mixed --steps 1000
    tensorboard --logdir runs
"""

import argparse
from importlib.resources import files
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from entropy_monitor import EntropyMonitor

SAMPLE = Path(str(files("entropy_monitor.demo") / "data" / "sample.txt"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        # Fused, and it stays fused: the monitor needs no attention weights.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class GPT(pl.LightningModule):
    def __init__(
        self,
        vocabulary: int = 256,
        length: int = 128,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        learning_rate: float = 1e-3,
        warmup: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.blocks(x))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        warmup = self.hparams.warmup
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, 1.0)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Windows(Dataset):
    """Pieces of `length` + 1 bytes that overlap by half."""

    def __init__(self, text: bytes, length: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - self.length - 1) // (self.length // 2)

    def __getitem__(self, index: int) -> Tensor:
        start = index * (self.length // 2)
        return self.bytes[start : start + self.length + 1]


class Text(pl.LightningDataModule):
    """Bytes of a text file; the first chapters of Pride and Prejudice unless a path is given."""

    def __init__(self, path: str | None = None, length: int = 128, batch: int = 16) -> None:
        super().__init__()
        self.path, self.length, self.batch = Path(path or SAMPLE), length, batch

    def train_dataloader(self) -> DataLoader:
        data = Windows(self.path.read_bytes(), self.length)
        return DataLoader(data, batch_size=self.batch, shuffle=True, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", help="a text file; a sample ships with the package")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--precision", default="32-true", help="for example bf16-mixed")
    parser.add_argument("--logdir", type=Path, default=Path("runs"))
    args = parser.parse_args()

    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_steps=args.steps,
        precision=args.precision,
        logger=TensorBoardLogger(args.logdir, name="train_gpt"),
        callbacks=[EntropyMonitor(prog_bar=True)],  # this is all
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    model = GPT(length=args.length, layers=args.layers, width=args.width)
    trainer.fit(model, datamodule=Text(args.text, length=args.length))
    print(f"\nLogs and record: {trainer.log_dir}")
    print(f"  entropy-monitor report {trainer.log_dir}")
    print(f"  tensorboard --logdir {args.logdir}")


if __name__ == "__main__":
    main()
