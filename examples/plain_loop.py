"""No framework: monitor a plain PyTorch loop, and say what the change of entropy is made of.

    python examples/plain_loop.py
    python examples/plain_loop.py --logdir runs/plain      # TensorBoard and a record as well
"""

import argparse
from importlib.resources import files
from pathlib import Path

import torch
from torch import nn

from entropy_monitor import AttentionMonitor, attribute_change

SAMPLE = Path(str(files("entropy_monitor.demo") / "data" / "sample.txt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two measurements")
    parser.add_argument("--logdir", type=Path, help="also write TensorBoard logs and a record here")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(SAMPLE.read_bytes()), dtype=torch.uint8).long()
    length, width = 64, 64
    embed = nn.Embedding(256, width)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleList([embed, encoder, nn.Linear(width, 256)])
    position = nn.Parameter(0.02 * torch.randn(length, width))
    causal = nn.Transformer.generate_square_subsequent_mask(length)
    optimizer = torch.optim.AdamW([*model.parameters(), position], lr=1e-3)

    monitor = AttentionMonitor(model)
    pipeline = None
    if args.logdir is not None:
        from entropy_monitor.pipeline import Pipeline
        from entropy_monitor.writers import RecordWriter, TensorBoardWriter

        pipeline = Pipeline(writers=[TensorBoardWriter(args.logdir), RecordWriter(args.logdir)])

    def loss_of_a_batch() -> torch.Tensor:
        starts = torch.randint(len(text) - length - 1, (16, 1))
        tokens = text[starts + torch.arange(length + 1)]
        hidden = encoder(embed(tokens[:, :-1]) + position, mask=causal, is_causal=True)
        logits = model[2](hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    before = None
    for step in range(args.steps):
        if step % args.every == 0:
            with monitor.observe(step=step):  # one forward, or several micro-batches
                loss = loss_of_a_batch()
            snapshot = monitor.snapshot()
            before = before or snapshot
            change = attribute_change(before, snapshot)
            entropy = snapshot.mean("total_entropy")
            print(
                f"step {step:4d}  loss {loss.item():.2f}  entropy {entropy:.2f}, change "
                f"{change.total:+.2f} = sink {change.sink:+.2f} + content {change.content:+.2f}"
            )
            if pipeline is not None:
                pipeline.emit(snapshot)
        else:
            loss = loss_of_a_batch()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if pipeline is not None:
        pipeline.close()


if __name__ == "__main__":
    main()
