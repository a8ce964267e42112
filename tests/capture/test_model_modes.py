"""Every model family compiled, checkpointed and in bfloat16: names complete, numbers right."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from entropy_monitor.capture import CaptureSession
from tests.capture.helpers import assert_same_training, assert_weights, capture
from tests.models import FAMILIES, eager_weights, loss_of, tiny

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # dynamo and transformers touch deprecated names

# One family of each sort in the quick run.
QUICK = {"compiled": {"llama"}, "checkpointed": {"llama", "bert", "vit"}, "bf16": {"llama", "t5"}}


def cases(mode: str) -> list[Any]:
    return [
        pytest.param(
            name, way, marks=() if name in QUICK[mode] and way == "sdpa" else pytest.mark.slow
        )
        for name, family in FAMILIES.items()
        for way in family.ways
        if way != "flex_attention"
    ]


@pytest.mark.parametrize(("name", "way"), cases("compiled"))
def test_compiled(name: str, way: str, record_property: Any) -> None:
    torch._dynamo.reset()
    family = FAMILIES[name]
    raw = tiny(name, way).eval()
    model = torch.compile(raw, backend="aot_eager")
    session = CaptureSession(raw, on_error="raise")
    weights = eager_weights(name) if way not in family.differs else None
    given = family.inputs()
    windows = []
    for _ in range(4):
        measured, report, _ = capture(raw, lambda: model(**given), session=session)
        if measured.stats and weights is not None:
            assert_weights(measured, weights, atol=2e-4)
        # Nothing is missing without a word, and nothing is named that is not there.
        assert set(measured.stats) <= set(family.names)
        assert set(measured.stats) == set(family.names) or report.opaque or report.lost
        windows.append(set(measured.stats) == set(family.names))
    assert windows[0]
    assert windows[-1]
    record_property("steps", "uncompiled" if session._uncompiled else "compiled")
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "way"), cases("checkpointed"))
def test_checkpointed(name: str, way: str) -> None:
    family = FAMILIES[name]
    plain, watched = tiny(name, way), tiny(name, way)
    if not watched.supports_gradient_checkpointing:
        pytest.skip("transformers does not offer it for this model")
    losses = []
    for model in (plain, watched):
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def run(model: Any) -> Tensor:
        torch.manual_seed(1)
        loss = loss_of(model(**family.inputs()))
        loss.backward()
        return loss

    losses.append(run(plain))
    measured, report, loss = capture(watched, lambda: run(watched))
    losses.append(loss)
    assert set(measured.stats) == set(family.names)
    assert report.complete
    assert_same_training(plain, watched, tuple(losses))


@pytest.mark.parametrize(("name", "way"), cases("bf16"))
def test_bf16(name: str, way: str) -> None:
    family = FAMILIES[name]
    plain, watched = tiny(name, way), tiny(name, way)

    def run(model: Any) -> Tensor:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model(**family.inputs()))

    expected = run(plain)
    expected.backward()
    measured, report, loss = capture(watched, lambda: run(watched))
    loss.backward()
    assert set(measured.stats) == set(family.names)
    assert report.complete
    assert_same_training(plain, watched, (expected, loss))
    if way not in family.differs:
        with torch.no_grad():
            exact, *_ = capture(watched, lambda: loss_of(watched(**family.inputs())))
        for layer, stats in measured.stats.items():
            want = exact.stats[layer]
            assert torch.equal(stats.kind, want.kind), layer
            assert stats.content_entropy.isfinite().all()
            difference = stats.content_entropy.mean() - want.content_entropy.mean()
            assert abs(difference) < 0.05, layer  # the forward itself differs in bfloat16
