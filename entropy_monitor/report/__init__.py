"""Reports on recorded runs: text, JSON, CSV, parquet, PNG; `html` makes the one-file dashboard."""

from entropy_monitor.report.build import Report, build_report

__all__ = ["Report", "build_report"]
