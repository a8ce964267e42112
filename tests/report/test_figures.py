import subprocess
import sys

import numpy as np
import pytest

from entropy_monitor.names import STAT_NAMES
from entropy_monitor.report import build_report
from entropy_monitor.report.figures import _short
from entropy_monitor.writers import Emission, RecordWriter

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def pixels(path):
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


def test_figure_of_a_run(run, tmp_path):
    build_report(run).to_png(tmp_path / "report.png")
    image = pixels(tmp_path / "report.png")
    assert image.shape == (1160, 1680, 3)
    # the colours of the channels are there, in bars and in lines
    for colour in ((0xDD, 0x7A, 0x00), (0x00, 0x3F, 0x88)):
        assert (np.abs(image.astype(int) - colour).max(-1) < 3).sum() > 1000


def test_vector_formats_and_a_chosen_baseline(run, tmp_path):
    report = build_report(run, baseline=10)
    report.to_png(tmp_path / "report.svg")
    assert "Change by layer, steps 10 to 30" in (tmp_path / "report.svg").read_text()
    report.to_png(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("steps", "layers"),
    [
        ([3], (("attn", 1),)),
        ([0, 1, 2, 4, 8, 16, 32, 64, 128, 256], (("attn", 4),)),
        ([0, 10], (("a", 1), ("b", 1))),
    ],
)
def test_small_models_and_short_runs(tmp_path, steps, layers):
    heads = sum(count for _, count in layers)
    writer = RecordWriter(tmp_path)
    for step in steps:
        stats = np.full((len(STAT_NAMES), heads), 0.5, dtype=np.float32)
        stats[STAT_NAMES.index("sink_mass"), 0] = np.nan
        writer.write(Emission(step=step, layers=layers, stats=stats))
    writer.close()
    build_report(tmp_path).to_png(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_pyplot_is_left_alone(run, tmp_path):
    code = (
        "import sys; from entropy_monitor.report import build_report; "
        f"build_report({str(run)!r}).to_png({str(tmp_path / 'report.png')!r}); "
        "print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_names_of_layers_are_shortened():
    assert _short(["m.0.attn", "m.1.attn"]) == ["0", "1"]
    assert _short(["enc.0.self", "dec.0.cross"]) == ["enc.self", "dec.cross"]
    assert _short(["one"]) == ["one"]
    assert _short(["a.b", "a_very_long_name_of_a_layer_of_some_model"])[1].startswith("...")
