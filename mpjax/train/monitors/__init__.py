"""Monitors a run: its files, TensorBoard, histograms and diagnosis."""

from mpjax.train.monitors._diagnose import first_nonfinite, nonfinite_report, state_report
from mpjax.train.monitors._events import Events
from mpjax.train.monitors._histograms import Watcher
from mpjax.train.monitors._metrics_file import MetricsFile
from mpjax.train.monitors._peak_memory import peak_memory
from mpjax.train.monitors._run_directory import RunDirectory, config_mismatch, plain, run_mismatch

__all__ = [
  "Events",
  "MetricsFile",
  "RunDirectory",
  "Watcher",
  "config_mismatch",
  "first_nonfinite",
  "nonfinite_report",
  "peak_memory",
  "plain",
  "run_mismatch",
  "state_report",
]
