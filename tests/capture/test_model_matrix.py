"""Every model family in every implementation: right numbers, right names, nothing changed."""

from typing import Any

import pytest
import torch

from entropy_monitor.capture import CaptureSession
from tests.capture.helpers import assert_same_training, assert_weights, capture
from tests.models import FAMILIES, cast, eager_weights, loss_of, tiny
from tests.versions import TRANSFORMERS_5

pytest.importorskip("transformers")

CASES = [
    (name, way)
    for name, family in FAMILIES.items()
    for way in family.ways
    if way != "flex_attention"
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_statistics_equal_those_of_the_eager_weights(
    name: str, way: str, record_property: Any
) -> None:
    if not TRANSFORMERS_5 and name in ("mpt", "clip", "deepseek_v3"):
        pytest.skip("transformers 4 cannot run it in float64")
    family = FAMILIES[name]
    model = tiny(name, way, torch.float64)
    inputs = cast(family.inputs(), torch.float64)
    with torch.no_grad():
        measured, report, _ = capture(model, lambda: model(**inputs))
    assert set(measured.stats) == set(family.names)
    assert report.complete
    assert not report.skipped
    if way in family.differs:
        record_property("unlike eager", family.differs[way])
    else:
        assert_weights(measured, eager_weights(name))


@pytest.mark.parametrize(("name", "way"), CASES)
def test_training_is_the_same_bit_for_bit(name: str, way: str) -> None:
    family = FAMILIES[name]
    plain, watched = tiny(name, way), tiny(name, way)
    torch.manual_seed(1)
    expected = loss_of(plain(**family.inputs()))
    expected.backward()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    measured, _, loss = capture(watched, lambda: loss_of(watched(**family.inputs())))
    loss.backward()
    assert set(measured.stats) == set(family.names)
    assert_same_training(plain, watched, (expected, loss))
    assert torch.equal(torch.get_rng_state(), state)


FLEX = [
    pytest.param(name, marks=() if name == "llama" else pytest.mark.slow)
    for name, family in FAMILIES.items()
    if "flex_attention" in family.ways
]


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.filterwarnings("ignore")  # compiling, transformers and torch touch deprecated names
def test_flex_attention_has_no_backward_on_a_cpu_but_right_numbers(name: str) -> None:
    torch._dynamo.reset()
    family = FAMILIES[name]
    model = tiny(name, "flex_attention").eval()
    session = CaptureSession(model, on_error="raise")
    weights = eager_weights(name, torch.float32)
    with torch.no_grad():
        expected = loss_of(model(**family.inputs()))
        for _ in range(2):
            measured, report, loss = capture(
                model, lambda: loss_of(model(**family.inputs())), session=session
            )
            assert set(measured.stats) == set(family.names)
            assert set(report.way.values()) == {"flex"}
            assert report.complete
            assert_weights(measured, weights, atol=1e-4)
            assert torch.equal(loss, expected)
    torch._dynamo.reset()
