"""What a run with a probe logged is what its checkpoints give when they are replayed."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, GPTNeoXForCausalLM

from entropy_monitor.replay import ModelSpec, ReplaySettings, TokenSpec, replay
from entropy_monitor.writers import read_run

pl = pytest.importorskip("pytorch_lightning")


class Module(pl.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.model = GPTNeoXForCausalLM(config)

    def forward(self, ids):
        return self.model(input_ids=ids)

    def training_step(self, batch, batch_idx):
        (ids,) = batch
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SaveFirst(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/checkpoints/epoch=0-step=0.ckpt")


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("rows", [64, None])
def test_replay_gives_what_training_logged(few, tmp_path, rows):
    from pytorch_lightning.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from entropy_monitor import EntropyMonitor

    torch.manual_seed(1)
    ids = torch.from_numpy(np.load(few / "tokens.npy").astype(np.int64))
    monitor = EntropyMonitor(
        every_n_steps=2,
        probe=ids[:8],
        rows=rows,
        record=str(tmp_path / "trained"),
        on_error="raise",
    )
    saver = ModelCheckpoint(
        dirpath=tmp_path / "checkpoints",
        every_n_train_steps=2,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    trainer = pl.Trainer(
        max_steps=6,
        accelerator="cpu",
        logger=False,
        callbacks=[monitor, saver, SaveFirst()],
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Module(AutoConfig.from_pretrained(few)), DataLoader(TensorDataset(ids), batch_size=4)
    )
    np.save(tmp_path / "probe.npy", ids[:8].numpy())
    replay(
        ReplaySettings(
            model=str(tmp_path / "checkpoints"),
            logdir=str(tmp_path / "replayed"),
            tokens=TokenSpec(tokens=str(tmp_path / "probe.npy")),
            spec=ModelSpec(config=str(few)),
            rows=rows,
            threads=torch.get_num_threads(),
        )
    )
    trained, replayed = read_run(tmp_path / "trained"), read_run(tmp_path / "replayed")
    assert replayed.steps.tolist() == [0, 2, 4, 6]
    assert trained.steps.tolist() == [0, 2, 4, 6]
    assert replayed.layers == trained.layers == (("model.gpt_neox.layers.0.attention", 1),)
    for name in trained.stat_names:
        assert replayed.stat(name) == pytest.approx(trained.stat(name), abs=1e-6), name
    assert replayed.change == pytest.approx(trained.change, abs=1e-6)
    assert replayed.change_se == pytest.approx(trained.change_se, abs=1e-6)
