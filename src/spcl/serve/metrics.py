"""Metrics of a service in Prometheus' text format, made from its totals and its status when they are asked for."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spcl.serve.history import Totals
from spcl.serve.service import Status, TaskStatus

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("running", "silent", "finished")


class Metrics(Collector):
    """Metrics of one service; nothing is counted here but the time of predictions, so that steps cost nothing more.

    Args:
        totals: returns the totals of the events so far.
        status: returns the present status.
    """

    def __init__(self, totals: Callable[[], Totals], status: Callable[[], Status]) -> None:
        self._totals = totals
        self._status = status
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.predict_seconds = Histogram(
            "spcl_predict_seconds", "Time of a prediction, from the whole request on.", registry=self._registry
        )

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of steps, tasks, memory and checkpoints."""
        totals, status = self._totals(), self._status()
        yield from _step_metrics(totals, status)
        yield from _task_metrics(totals, status.tasks)
