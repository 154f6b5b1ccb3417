"""A run on a Ray cluster: one task, or the tasks of its ranks in a placement group."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from spcl.grids.cluster import import_ray
from spcl.grids.plan import Job
from spcl.grids.ray_worker import Order, find_endpoint, make_run

__all__ = ["Needs", "RayRun"]

END_SECONDS = 5.0
"""How long the other ranks of a run that has ended well have to end."""


@dataclass(frozen=True)
class Needs:
    """What the cluster keeps for a run: so many processes, each with its CPUs and GPUs."""

    processes: int
    cpus: float
    gpus: float

    @property
    def each(self) -> dict[str, float]:
        """The resources of each process, by Ray's names."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    @property
    def total(self) -> dict[str, float]:
        """The resources of all processes."""
        return {name: self.processes * amount for name, amount in self.each.items()}

    def fit(self, nodes: list[Mapping[str, float]]) -> bool:
        """Return whether nodes with these resources have room for all processes, if nothing else runs there.

        >>> Needs(processes=2, cpus=2.0, gpus=0.0).fit([{"CPU": 3.0}, {"CPU": 3.0}])
        True
        """
        places = (min(node.get(name, 0.0) // amount for name, amount in self.each.items()) for node in nodes)
        return sum(places) >= self.processes


@dataclass
class RayRun:
    """A run that the cluster makes or will make.

    Attributes:
        job: the run.
        number: tells its messages from those of other runs.
        needs: what the cluster keeps for it.
        tasks: Ray's references, of the first rank first.
        waiting: those whose end has not been seen.
        nodes: the names of the nodes of its ranks that have begun.
        is_training: whether it has made or resumed a step, so that there is something to save.
    """

    job: Job
    number: int
    needs: Needs
    tasks: list[Any]
    group: Any = None
    nodes: dict[int, str] = field(default_factory=dict)
    is_training: bool = False

    def __post_init__(self) -> None:
        self.waiting = list(self.tasks)

    @classmethod
    def submit(cls, job: Job, order: Order, needs: Needs, queue: Any) -> Self:
        """Submit the tasks of a run, which wait until the cluster has room for all of them at once."""
        task, options = _task(needs.gpus, needs.processes > 1), {"num_cpus": needs.cpus, "name": job.name}
        if needs.processes == 1:
            return cls(job, order.number, needs, [task.options(**options).remote(order, queue)])
        group, places = _reserve(needs)
        endpoint = _finder().options(scheduling_strategy=places[0]).remote()
        ranks = [
            task.options(**options, scheduling_strategy=place).remote(order, queue, rank, endpoint)
            for rank, place in enumerate(places)
        ]
        return cls(job, order.number, needs, ranks, group)

    def stop(self) -> None:
        """Let the run save itself; ranks of a run that has not begun would wait for each other, and are killed."""
        if self.group is not None and not self.is_training:
            self._remove_group()
        else:
            for task in self.tasks:
                import_ray().cancel(task)

    def end(self, is_well: bool) -> None:
        """Free what the cluster keeps for several ranks; those that have not ended are killed, after a bad end at once.

        A task alone has ended, and keeps nothing.
        """
        if self.group is not None:
            if is_well:
                import_ray().wait(self.tasks, num_returns=len(self.tasks), timeout=END_SECONDS)
            self._remove_group()

    def kill(self) -> None:
        """End all processes at once."""
        for task in self.tasks:
            import_ray().cancel(task, force=True)
        self.end(is_well=False)

    def _remove_group(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def _reserve(needs: Needs) -> tuple[Any, list[Any]]:
    """Ask for room for all processes of a run at once; return the placement group, and the place of each."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([needs.each] * needs.processes)
    return group, [
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank) for rank in range(needs.processes)
    ]


@cache
def _task(gpus: float, is_rank: bool) -> Any:
    """Return the task of Ray; processes that cannot change to another GPU, or to other ranks, make one run only."""
    return import_ray().remote(num_gpus=gpus, max_retries=0, max_calls=1 if gpus or is_rank else 0)(make_run)


@cache
def _finder() -> Any:
    return import_ray().remote(num_cpus=0)(find_endpoint)
