"""The report in words."""

from entropy_monitor.capture import CaptureReport


def test_reasons_are_told_once_with_the_names_they_hold_for() -> None:
    unseen = {f"layers.{n}.attention": "it hides" for n in range(6)}
    text = CaptureReport(unseen=unseen, lost={"other": "it is lost"}).describe()
    assert "Not seen: layers.0.attention, layers.1.attention, layers.2.attention" in text
    assert "and 2 more: it hides." in text
    assert text.count("it hides") == 1
    assert "Lost: other: it is lost." in text
    assert "Looked for: fused attention kernels" in text


def test_modules_that_look_like_attention_and_did_not_run() -> None:
    text = CaptureReport(candidates=2, idle=("a", "b")).describe()
    assert "2 modules look like attention, but none of them ran: a, b." in text
    assert "attention_modules" in CaptureReport().describe()


def test_complete_means_everything_was_seen() -> None:
    seen = {"seen": {"a": 1}, "way": {"a": "sdpa"}}
    assert CaptureReport(**seen).complete
    assert not CaptureReport().complete
    assert not CaptureReport(**seen, lost={"b": "x"}).complete
    assert not CaptureReport(**seen, reliable=False).complete
    assert not CaptureReport(**seen, errors=[ValueError("x")]).complete
    assert CaptureReport(**seen, notes=["later"], skipped={"a": 3}, foreign={"EMA": 1}).complete


def test_everything_that_happened_is_in_the_text() -> None:
    text = CaptureReport(
        seen={"a": 1}, way={"a": "sdpa"}, skipped={"a": 3}, foreign={"EMA": 1}, notes=["Later."],
        errors=[ValueError("broken")], reliable=False,
    ).describe()  # fmt: skip
    for part in ("Seen: 1 attention layer (sdpa).", "3 single-query calls", "EMA", "Later.",
                 "ValueError: broken", "this window does not count"):  # fmt: skip
        assert part in text
