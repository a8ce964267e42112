import numpy as np
import pytest

from entropy_monitor.alerts.alert import Alert
from entropy_monitor.attribution import split_means, split_se
from entropy_monitor.names import CHANGE_NAMES, COVARIANCE_PAIRS, STAT_NAMES
from entropy_monitor.writers import Emission, RecordWriter

LAYERS = (("model.layers.0.attn", 3), ("model.layers.1.attn", 2))
STEPS = (0, 10, 20, 30)


def moment(step):
    """Means per head at a step, in closed form: the sink grows in layer 1, the content sharpens."""
    heads = np.arange(5)
    s = 0.05 + 0.01 * heads + np.where(heads > 2, 0.02, 0.001) * step
    c, m = 1 - s, np.full(5, 33.0)
    content = np.log(m) * (1 - 0.004 * step * (1 + heads / 5))
    binary = -(s * np.log(s) + c * np.log(c))
    values = dict.fromkeys(STAT_NAMES, np.zeros(5)) | {
        "sink_mass": s,
        "content_mass": c,
        "binary_entropy": binary,
        "content_entropy": content,
        "content_mass_entropy": c * content,
        "content_evenness": content / np.log(m),
        "total_entropy": binary + c * content,
        "max_logit": 1.0 + heads + step,
        "support": m,
        "log_support": np.log(m),
        "content_mass_log_support": c * np.log(m),
        "rows_valid": np.full(5, 100.0),
    }
    cov = np.zeros((len(COVARIANCE_PAIRS), 5))
    for i, (one, other) in enumerate(COVARIANCE_PAIRS):
        cov[i] = 1e-6 * (one == other)
    return values, cov


def described(values, errors):
    change = {name: float(values[i].mean()) for i, name in enumerate(CHANGE_NAMES)}
    return change | {
        "se": {name: float(errors[i].mean()) / 3 for i, name in enumerate(CHANGE_NAMES)}
    }


def emit(step, *, recorded=True, baseline=0):
    values, cov = moment(step)
    fields = {}
    if recorded:
        before, cov_before = moment(baseline)
        split, error = split_means(before, values), split_se(before, values, cov_before, cov)
        change = np.stack([split[name] for name in CHANGE_NAMES]).astype(np.float32)
        errors = np.stack([error[name] for name in CHANGE_NAMES]).astype(np.float32)
        model = described(change, errors)
        spans = {LAYERS[0][0]: slice(0, 3), LAYERS[1][0]: slice(3, 5)}
        fields = {
            "change": change,
            "change_se": errors,
            "summary": {
                "baseline_step": baseline,
                "last_step": step,
                "paired": True,
                "change": model,
                "sink_share": model["sink"] / model["total"] if step != baseline else None,
                "ordered": {
                    "sink_first": {"sink": -0.25, "content": -0.75},
                    "content_first": {"sink": -0.5, "content": -0.5},
                },
                "layers": {
                    name: described(change[:, span], errors[:, span]) | {"sink_share": None}
                    for name, span in spans.items()
                },
            },
        }
    alerts = ()
    if step == 20:
        alerts = (
            Alert("sink_growth", "info", "model", step, None, None, "the sink grew", {}),
            Alert("concentration", "warn", "layer", step, LAYERS[1][0], None, "content fell", {}),
        )
    return Emission(
        step=step,
        layers=LAYERS,
        stats=np.stack([values[name] for name in STAT_NAMES]).astype(np.float32),
        cov=cov.astype(np.float32),
        model={"attention/total_entropy": float(values["total_entropy"].mean())},
        alerts=alerts,
        **fields,
    )


@pytest.fixture
def run(tmp_path):
    """The folder of a run that recorded its change against step 0."""
    writer = RecordWriter(tmp_path / "run", header={"sink": "first", "rows": 64})
    for step in STEPS:
        writer.write(emit(step))
    writer.close()
    return tmp_path / "run"


@pytest.fixture
def at():
    return moment


@pytest.fixture
def emission():
    return emit
