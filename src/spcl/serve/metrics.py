"""Metrics of a service in Prometheus' text format, made from its totals and its status when they are asked for."""

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spcl.serve.history import Totals
from spcl.serve.status import Status, TaskState, TaskStatus

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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


def _step_metrics(totals: Totals, status: Status) -> Iterable[Metric]:
    yield _counter("spcl_steps", "Steps since the process started.", totals.steps)
    yield _counter("spcl_step_seconds", "Time spent in steps.", totals.seconds)
    yield _gauge("spcl_learner_steps", "Steps of the learner, over all restarts.", status.steps)
    yield _gauge("spcl_kappa_before", "Condition number of the gradients in the latest step.", totals.kappa_before)
    yield _gauge("spcl_kappa_after", "Condition number of the adjusted gradients.", totals.kappa_after)
    yield _gauge("spcl_memory_samples", "Samples in memory.", status.memory_samples)
    yield _gauge("spcl_memory_bytes", "Size of the memory's content.", status.memory_bytes)
    yield _gauge("spcl_checkpoint_age_seconds", "Time since the latest checkpoint.", status.checkpoint_age)
    if totals.checkpoint is not None:
        yield _gauge("spcl_checkpoint_seconds", "Time that the latest checkpoint took.", totals.checkpoint.seconds)
        yield _gauge("spcl_checkpoint_bytes", "Size of the latest checkpoint.", totals.checkpoint.bytes)
    yield _gauge("spcl_uptime_seconds", "Time since the process started.", status.uptime)


def _task_metrics(totals: Totals, tasks: Iterable[TaskStatus]) -> Iterable[Metric]:
    listed = list(tasks)
    yield _by_task(
        CounterMetricFamily, "spcl_samples", "New samples learned since the process started.", totals.samples
    )
    yield _by_task(CounterMetricFamily, "spcl_skipped", "Batches skipped because they were not finite.", totals.skipped)
    yield _by_task(CounterMetricFamily, "spcl_dead_letters", "Messages that were refused.", totals.dead_letters)
    yield _by_task(GaugeMetricFamily, "spcl_loss", "Loss in the latest step.", totals.losses)
    text = "Accuracy on the latest batch that was tested before training on it."
    yield _by_task(GaugeMetricFamily, "spcl_prequential_accuracy", text, totals.accuracies)
    lags = {task.name: task.lag_seconds for task in listed}
    yield _by_task(GaugeMetricFamily, "spcl_lag_seconds", "Time for which the next batch has been awaited.", lags)
    backlogs = {task.name: task.backlog for task in listed}
    yield _by_task(GaugeMetricFamily, "spcl_backlog_batches", "Batches that wait to be learned.", backlogs)
    late = {task.name: task.late for task in listed}
    yield _by_task(GaugeMetricFamily, "spcl_late_messages", "Messages not learned because their task had ended.", late)
    states = GaugeMetricFamily("spcl_tasks", "Tasks by state.", labels=["state"])
    for state in get_args(TaskState):
        states.add_metric([state], sum(task.state == state for task in listed))
    yield states


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """Return a metric with one value, or with none."""
    return GaugeMetricFamily(name, text, value=value)


def _by_task(
    family: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, values: Mapping[str, float | None]
) -> Metric:
    metric = family(name, text, labels=["task"])
    for task, value in values.items():
        if value is not None:
            metric.add_metric([task], value)
    return metric
