"""Reaching the attention of a running model: one `AttentionCall` each, the model unchanged.

`CaptureSession(model).window(receiver)` opens the taps around a forward pass. One dispatch mode
(`hub`) sees every operation that really runs; each way of computing attention has a file that reads
it (`fused`, `softmax`); `owners` says whose attention it is, `report` what was not seen and why.
"""

from entropy_monitor.capture.report import CaptureReport
from entropy_monitor.capture.session import CaptureSession
from entropy_monitor.capture.window import Window

__all__ = ["CaptureReport", "CaptureSession", "Window"]
