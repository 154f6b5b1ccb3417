"""Make the runs of a folder of results/ again.

    python results/reproduce.py --list
    python results/reproduce.py ps-emnist --data data --out made     # the runs go to made/ps-emnist
    python results/reproduce.py toy-cifar10 --dry-run                # print the commands of spcl grid

The protocol files of the paper's authors (ps-emnist.json, …, made by ``spcl protocol``) are expected in --protocols.
Runs that are complete are not made again.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ALL = "all,torchjd:AlignedMTL,torchjd:Sum"
FEW = "er,mgda,emgd,soro,spcl"
RIVALS = "er,der++,soro,mgda,emgd"
TWENTY = "mgda,er,der++,emgd,soro,soro+dbt,torchjd:AlignedMTL"
THREE_CONFIGURATIONS = "0,4,8"


@dataclass(frozen=True)
class Grid:
    """One call of ``spcl grid``.

    Attributes:
        settings: what ``--set`` sets, by name.
        sweeps: the values of ``--sweep``, by name.
        series: a folder inside that of the results.
        variables: of the environment.
    """

    benchmark: str
    methods: str = ""
    preset: str | None = "paper"
    scenarios: str = "task,class"
    configs: str | None = "0-8"
    seeds: str = "0"
    protocol: str | None = None
    fit: bool = False
    device: str = "cpu"
    jobs: int = 4
    settings: Mapping[str, str] = field(default_factory=dict)
    sweeps: Mapping[str, str] = field(default_factory=dict)
    series: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def of(self, methods: str, settings: Mapping[str, str] | None = None, **changes: object) -> "Grid":
        """Return the grid of these methods, with further settings and other changes."""
        return replace(self, methods=methods, settings={**self.settings, **(settings or {})}, **changes)  # type: ignore[arg-type]

    def words(self, out: Path, data: Path | None, protocols: Path) -> list[str]:
        """Return the command that makes the runs in the folder ``out``."""
        protocol = None if self.protocol is None else str(protocols / self.protocol)
        options = {
            "--benchmark": self.benchmark,
            "--methods": self.methods,
            "--preset": self.preset,
            "--scenarios": self.scenarios,
            "--configs": self.configs,
            "--seeds": self.seeds,
            "--protocol": protocol,
            "--data-dir": None if data is None else str(data),
            "--device": self.device,
            "--jobs": str(self.jobs),
            "--out": str(out / self.series),
        }
        words = [word for name, value in options.items() if value is not None for word in (name, value)]
        words += [word for name, value in self.settings.items() for word in ("--set", f"{name}={value}")]
        words += [word for name, values in self.sweeps.items() for word in ("--sweep", f"{name}={values}")]
        return ["spcl", "grid", *words, "--no-model", *["--fit"] * self.fit]


EMNIST = Grid("ps-emnist", protocol="ps-emnist.json", fit=True, settings={"threads": "1", "record_every": "25"})
CIFAR = Grid(
    "ps-cifar100",
    protocol="ps-cifar100.json",
    device="cuda",
    settings={"precision": "bfloat16", "record_every": "5", "threads": "1", "method.finished_weight": "1"},
)
TINY = replace(CIFAR, benchmark="ps-tiny-imagenet", protocol="ps-tiny-imagenet.json", jobs=12)
TOY = Grid("toy-cifar10", preset=None, scenarios="task", configs=None, settings={"threads": "1"})

HELD_OUT = {"validation": "0.2"}
BY_CLASS_MEANS = {"predict_by": "class-means"}
FLOAT32_ON_CPU = {"precision": "float32"}


# -- one change of the published code at a time

CHANGES = {
    "paper": ("threads", "1"),
    "weigh-heads": ("method.weigh_heads", "true"),
    "normalise": ("normalise", "false"),
    "head-init": ("method.head_init", "glorot"),
    "eps": ("optimizer.eps", "1e-7"),
    "memory": ("memory", "epochs"),
}
EMNIST_CHANGES = CHANGES | {"init": ("backbone.init", "glorot")}
CIFAR_CHANGES = CHANGES | {
    "residual-relu": ("backbone.residual_relu", "true"),
    "norm-eps": ("backbone.norm_eps", "1e-3"),
    "stem-init": ("backbone.stem_init", "glorot"),
}


def one_change(base: Grid, methods: str, changes: Mapping[str, tuple[str, str]]) -> Iterator[Grid]:
    """Return a grid for each change of one setting."""
    for series, (name, value) in changes.items():
        yield base.of(methods, {name: value}, configs="0-1", series=series)


# -- settings over two orders of magnitude

SENSITIVITY = (
    ("spcl", "logit_weight", "0.05,0.15,0.5,1.5,5"),
    ("spcl", "kappa", "1,2,6,20"),
    ("spcl", "finished_weight", "0.001,0.003,0.01,0.03,0.1"),
    ("soro", "sigma", "10,30,100,300,1000"),
    ("soro", "lambda_", "10,30,100,300,1000"),
    ("der++", "logit_weight", "0.01,0.03,0.1,0.3,1"),
    ("der++", "label_weight", "0.05,0.15,0.5,1.5,5"),
)
FIGURE_7 = {
    "method.alpha": "0,1e-6,1e-5,1e-4,1e-3,1e-2,1e-1",
    "method.sigma": "1,10,50,100,200,1000",
    "method.lambda_": "0,1,10,100,1000",
    "method.iterations": "0",
}


# -- the search for the defaults of spcl

LABELS, LOGITS = {"method.replay_loss": "labels"}, {"method.replay_loss": "logits"}


def search_of_emnist() -> Iterator[Grid]:
    """Return the series of the search on PS-EMNIST."""
    base = replace(
        EMNIST, configs=THREE_CONFIGURATIONS, settings={**EMNIST.settings, **HELD_OUT, "method.finished_weight": "1"}
    )
    of_weight_2 = LOGITS | {"method.kappa": "1", "method.logit_weight": "2"}
    yield base.of(RIVALS, series="rivals")
    yield base.of(
        "spcl", LABELS, sweeps={"method.kappa": "1,3,1000", "method.memory_share": "null,0.5"}, series="labels"
    )
    sweeps = {"method.kappa": "1,3,1000", "method.logit_weight": "0.5,2,8", "method.memory_share": "null,0.5"}
    yield base.of("spcl", LOGITS, sweeps=sweeps, series="logits")
    yield base.of("spcl", of_weight_2, sweeps={"method.scale": "min,mean,norm,unit"}, series="scale")
    sweeps = {"predict_by": "class-means,adjusted,balanced-heads"}
    yield base.of("spcl", of_weight_2, scenarios="class", sweeps=sweeps, series="prediction")
    sweeps = {"method.logit_weight": "0.1,0.2,0.35", "method.memory_share": "null,0.15"}
    yield base.of("spcl", LOGITS, sweeps=sweeps, series="weak")
    sweeps = {"method.finished_weight": "0.0001,0.001,0.003,0.01,0.03,0.1,1"}
    yield base.of("spcl", scenarios="class", sweeps=sweeps, series="finished")


def search_of_cifar() -> Iterator[Grid]:
    """Return the series of the search on PS-CIFAR-100."""
    base = replace(CIFAR, configs=THREE_CONFIGURATIONS, fit=True, settings={**CIFAR.settings, **HELD_OUT})
    yield base.of("er,soro,mgda,emgd", series="rivals")
    yield base.of(
        "spcl", LABELS, sweeps={"method.kappa": "1,3,1000", "method.memory_share": "null,0.5"}, series="labels"
    )
    yield base.of("spcl", LABELS, sweeps={"method.kappa": "1.2,1.5,2"}, series="kappa")
    yield base.of("spcl", LOGITS, sweeps={"method.logit_weight": "0.2,0.5,1"}, series="logits")
    yield base.of("procrustes,soro-kappa,normsum", series="uncond")


# -- the search for the preset plus; settings undo what the preset has learned from it


def plus_of_cifar() -> Iterator[Grid]:
    """Return the series of the search on PS-CIFAR-100."""
    undone = {
        "memory_batch": "1024",
        "updates": "3",
        "learning_rate": "0.001",
        "method.memory_share": "null",
        "method.logit_weight": "0.2",
    }
    base = replace(CIFAR, preset="plus", fit=True, configs="0,4", settings={**CIFAR.settings, **HELD_OUT, **undone})
    half, by_class = {"method.memory_share": "0.5"}, {"scenarios": "class"}

    def series(name: str, settings: Mapping[str, str] | None = None, **changes: object) -> Grid:
        return base.of("spcl", settings, series=name, **changes)

    yield series("average", sweeps={"average": "null,0.99,0.995", "learning_rate": "0.0004,0.001"})
    yield series("heads-fast", {"average": "0.99"}, sweeps={"predict_by": "head,balanced-heads"}, **by_class)
    sweeps = {"learning_rate": "0.0004", "predict_by": "adjusted,balanced-heads"}
    yield series("heads", {"method.logit_weight": "0.5"}, sweeps=sweeps, **by_class)
    yield series("share", sweeps={"method.memory_share": "0.5,classes", "method.logit_weight": "0.2,0.5,1"})
    sweeps = {"updates": "5,8", "memory_batch": "512,1024"}
    yield series("updates", {"method.logit_weight": "0.5"}, sweeps=sweeps)
    yield series("combined", half, sweeps=sweeps)
    yield series("combined-heads", half | {"updates": "5"}, sweeps={"predict_by": "balanced-heads"}, **by_class)
    eight = {"updates": "8"}
    yield series("eight-rate", half | eight, sweeps={"learning_rate": "0.0006,0.002"})
    yield series("eight-weight", half | eight, sweeps={"method.logit_weight": "0.05,0.1"})
    yield series("eight-share", eight, sweeps={"method.memory_share": "0.7"})


def plus_of_emnist() -> Iterator[Grid]:
    """Return the series of the search on PS-EMNIST."""
    undone = {"record_every": "10", "learning_rate": "0.003", "method.finished_weight": "1"}
    settings = {**EMNIST.settings, **HELD_OUT, **undone}
    base = replace(EMNIST, preset="plus", configs=THREE_CONFIGURATIONS, settings=settings)
    large, slow, half = {"memory_batch": "1024"}, {"learning_rate": "0.001"}, {"method.memory_share": "0.5"}
    one, rates = {"updates": "1"}, {"learning_rate": "0.001,0.003"}
    finished = slow | {"method.finished_weight": "0.01"}
    predictors = "class-means,head,balanced-heads"

    def series(name: str, settings: dict[str, str], sweeps: dict[str, str], methods: str = "spcl") -> Grid:
        return base.of(methods, settings, sweeps=sweeps, series=name)

    def of_class(name: str, settings: dict[str, str], sweeps: dict[str, str], methods: str = "spcl") -> Grid:
        return base.of(methods, settings, sweeps=sweeps, series=name, scenarios="class")

    def both(name: str, settings: dict[str, str], sweeps: dict[str, str]) -> Iterator[Grid]:
        """Predict by class means class-incrementally."""
        yield base.of("spcl", settings, sweeps=sweeps, series=name, scenarios="task")
        yield of_class(name, BY_CLASS_MEANS | settings, sweeps)

    def weights(values: str) -> dict[str, str]:
        return {"method.logit_weight": values}

    rough = large | {"average": "0.99", "record_every": "25"}
    yield base.of("spcl", rough, sweeps=weights("0.2,1,2"), series="weight", scenarios="task")
    yield of_class("weight", rough, weights("0.2,1,2") | {"predict_by": predictors})
    yield from both("share", large, {"method.memory_share": "0.5,classes"} | weights("0.5,1,2"))
    yield of_class("heads", large | half, weights("0.5,1,2") | {"predict_by": "head,balanced-heads"})
    yield of_class("long", large, weights("1") | {"average": "0.998,0.999", "predict_by": "class-means,head"})
    yield from both("updates", {}, weights("1") | {"updates": "1,5", "memory_batch": "256,1024"})
    yield from both("crop", large | {"augment": "[crop]"}, weights("1"))
    yield from both("rate", large, weights("1") | {"learning_rate": "0.0005,0.002"})
    yield series("one", one, rates | weights("0.5,1"))
    yield series("one-strong", one, rates | weights("2"))
    yield series("one-half", {"memory_batch": "512"} | half | one, rates | weights("2"))
    yield of_class("one-means", BY_CLASS_MEANS | one, rates | weights("1,2"))
    yield series("three", slow, weights("0.5,2"))
    yield series("slow", slow, weights("4"))
    yield series("middle", {}, weights("1,1.5"))
    yield series("strong", {}, weights("4,8"))
    yield series("three-rate", {}, weights("2") | {"learning_rate": "0.002,0.003"})
    yield of_class("adjusted", {}, weights("2") | {"predict_by": "adjusted,balanced-heads"})
    yield of_class("rivals", slow, {"predict_by": "head,class-means"}, "er,mgda,soro")
    yield series("rivals-logits", slow, weights("0.1,0.5,2"), "der++")
    yield of_class("rivals-means", BY_CLASS_MEANS | slow, weights("0.1,2"), "der++")
    yield of_class("finished", finished, {"method.finished_weight": "0.001,0.003,0.01,0.03,0.1"})
    yield of_class("finished-weight", finished, weights("0.5,1,4,8"))
    yield of_class("finished-updates", finished, {"updates": "1,5"})
    yield of_class("finished-predict", finished, {"predict_by": "class-means,adjusted,balanced-heads"})
    yield of_class("finished-share", finished, {"method.memory_share": "0.5"})
    yield of_class("finished-strong", finished | {"method.finished_weight": "0.03"}, weights("4"))
    yield of_class("finished-memory", finished, {"memory_batch": "256,512"})
    yield of_class("finished-rivals", finished, {}, "der++,soro")
    yield of_class("finished-logits", finished | LOGITS | weights("2"), {}, "soro")


# -- all grids

PLUS = replace(EMNIST, preset="plus")
ABLATION = replace(PLUS, configs=THREE_CONFIGURATIONS)
NINE = replace(CIFAR, fit=True, settings={**CIFAR.settings, **HELD_OUT})
OF_TASKS = replace(CIFAR, scenarios="task", configs="0", seeds="0-2")
FINISHED = replace(CIFAR, scenarios="class", settings={**CIFAR.settings, "method.finished_weight": "0.01"})
NARROW = replace(
    NINE,
    scenarios="class",
    configs=THREE_CONFIGURATIONS,
    device="cpu",
    settings={**NINE.settings, **FLOAT32_ON_CPU, "backbone.width": "16"},
)

WISDM = Grid("ps-wisdm", preset=None, scenarios="domain", jobs=1, settings={"threads": "1", "record_every": "25"})
LATER_WINDOWS = {"validation": "0.25"}
OF_WEARERS = {"encoder": "null,affine", "memory_batch": "40,80", "learning_rate": "0.001,0.003,0.006"}
INTENTS = replace(WISDM, benchmark="ps-intents", scenarios="class", configs=THREE_CONFIGURATIONS)

GRIDS: dict[str, list[Grid]] = {
    "ps-emnist": [EMNIST.of(ALL, seeds="0-2")],
    "ps-emnist-released": [EMNIST.of(ALL, preset="released")],
    "ps-emnist-rounding": [EMNIST.of(ALL, variables={"ATEN_CPU_CAPABILITY": "avx2"})],
    "ps-emnist-held-out": [
        EMNIST.of("soro", HELD_OUT, seeds="0-2", sweeps={"method.scale": "unit,min"}),
        EMNIST.of("soro+dbt", HELD_OUT, seeds="0-2", sweeps={"method.alpha": "1e-6,1e-5,1e-4,1e-3"}),
    ],
    "ps-emnist-betas": [EMNIST.of("procrustes,torchjd:AlignedMTL", {"optimizer.betas": "[0.9,0.9]"}, seeds="0-2")],
    "ps-emnist-recipes": [
        EMNIST.of(FEW, scenarios="task", sweeps={"method.replay_loss": "labels,logits"}),
        EMNIST.of(
            FEW,
            scenarios="class",
            sweeps={"method.replay_loss": "labels,logits", "method.finished_weight": "1,0.01"},
        ),
    ],
    "ps-emnist-finished-weight": [
        EMNIST.of(
            ALL, HELD_OUT, scenarios="class", configs=THREE_CONFIGURATIONS, sweeps={"method.finished_weight": "1,0.01"}
        )
    ],
    "ps-emnist-one-change": [
        *one_change(EMNIST, "mgda,soro", EMNIST_CHANGES),
        EMNIST.of(
            "mgda,soro",
            {"method.weigh_heads": "true", "normalise": "false"},
            configs="0-1",
            series="heads-and-inputs",
        ),
        EMNIST.of("mgda,soro", preset="released", configs="0-1", series="released"),
    ],
    "ps-emnist-sensitivity": [
        EMNIST.of(method, configs=THREE_CONFIGURATIONS, sweeps={f"method.{name}": values})
        for method, name, values in SENSITIVITY
    ],
    "ps-emnist-search": [*search_of_emnist()],
    "ps-emnist-plus-search": [*plus_of_emnist()],
    "ps-emnist-plus": [
        PLUS.of("er,der++,mgda,soro,spcl", seeds="0-2"),
        PLUS.of("er,der++,mgda,soro", scenarios="class", seeds="0-2", sweeps={"predict_by": "class-means"}),
    ],
    "ps-emnist-plus-finished": [
        PLUS.of("er,der++,mgda,soro", {"method.finished_weight": "0.01"}, scenarios="class", seeds="0-2")
    ],
    "ps-emnist-plus-ablation": [
        ABLATION.of("spcl"),
        *(
            ABLATION.of("spcl", sweeps={name: value})
            for name, value in {
                "average": "null",
                "method.replay_loss": "labels",
                "method.kappa": "1000",
                "updates": "1",
                "method.logit_weight": "0.5",
                "method.finished_weight": "1",
            }.items()
        ),
        ABLATION.of("spcl", scenarios="class", sweeps={"predict_by": "class-means,balanced-heads"}),
    ],
    "ps-cifar100": [CIFAR.of(ALL, seeds="0-2")],
    "ps-cifar100-released": [CIFAR.of(ALL, preset="released")],
    "ps-cifar100-default": [CIFAR.of("er,der++,soro,spcl", preset="default", seeds="0-2")],
    "ps-cifar100-twenty": [CIFAR.of(f"{TWENTY},spcl", {"tasks": "20"}, protocol=None)],
    "ps-cifar100-penalty": [
        CIFAR.of("soro+dbt", sweeps={"method.decoupled": "false,true", "method.layers": "all,convolutions"})
    ],
    "ps-cifar100-one-change": [*one_change(CIFAR, "er,soro", CIFAR_CHANGES)],
    "ps-cifar100-hyperparameters": [
        OF_TASKS.of("soro+dbt", sweeps={name: values}) for name, values in FIGURE_7.items()
    ],
    "ps-cifar100-rehearsal": [OF_TASKS.of("soro,soro+dbt", sweeps={"memory_budget": "500,1000,2000,3000,4000,5000"})],
    "ps-cifar100-held-out": [
        NINE.of("soro"),
        NINE.of("soro+dbt", sweeps={"method.alpha": "1e-6,1e-5,1e-4,1e-3"}),
    ],
    "ps-cifar100-search-nine": [
        NINE.of("spcl", LABELS, series="labels"),
        NINE.of("spcl", sweeps={"method.logit_weight": "0.2,0.5,1"}, series="logits"),
        NINE.of(RIVALS, series="rivals"),
    ],
    "ps-cifar100-finished": [
        FINISHED.of("er,der++,soro,spcl", seeds="0-2", series="paper"),
        FINISHED.of("spcl", preset="default", seeds="0-2", series="default"),
        FINISHED.of("spcl", preset="released", series="released"),
        FINISHED.of("er,soro", LOGITS, series="logits"),
    ],
    "ps-cifar100-finished-weight": [
        CIFAR.of("spcl", FLOAT32_ON_CPU | {"method.finished_weight": "0.01"}, scenarios="class", device="cpu")
    ],
    "ps-cifar100-narrow-search": [
        NARROW.of("er,der++,soro", sweeps={"method.finished_weight": "1,0.01"}),
        NARROW.of("spcl", sweeps={"method.finished_weight": "1,0.1,0.01,0.001"}),
    ],
    "ps-cifar100-search": [*search_of_cifar()],
    "ps-cifar100-plus-search": [*plus_of_cifar()],
    "ps-cifar100-plus": [CIFAR.of("er,der++,mgda,soro,spcl", preset="plus", jobs=12)],
    "ps-tiny-imagenet": [TINY.of(ALL)],
    "ps-tiny-imagenet-twenty": [TINY.of(TWENTY, {"tasks": "20"}, protocol=None)],
    "ps-wisdm": [WISDM.of("all", seeds="0-2")],
    "ps-wisdm-plus": [WISDM.of("er,der++,soro,spcl", {"epochs": "3"}, seeds="0-2", preset="plus")],
    "ps-wisdm-search": [
        WISDM.of("spcl", LATER_WINDOWS | {"epochs": "3", "average": "0.99"}, configs="0", sweeps=OF_WEARERS)
    ],
    "ps-wisdm-heads": [
        WISDM.of(
            "soro,spcl",
            LATER_WINDOWS,
            configs=THREE_CONFIGURATIONS,
            seeds="0-2",
            sweeps={"method.weigh_heads": "false,true"},
        )
    ],
    "ps-air": [
        replace(WISDM, benchmark="ps-air").of(
            "er,der++,soro,spcl", {"prequential": "true"}, configs=THREE_CONFIGURATIONS
        )
    ],
    "ps-intents": [INTENTS.of("er,der++,soro,spcl", {"epochs": "3"})],
    "ps-intents-finished": [INTENTS.of("er,der++,soro", {"epochs": "3", "method.finished_weight": "0.01"})],
    "toy-cifar10": [TOY.of("er,soro+dbt", {"evaluate_every": "10"})],
    "toy-cifar10-ablation": [
        TOY.of("er,soro", {"evaluate_every": "10"}, seeds="0-2", sweeps={"method.alpha": "0,1e-5"})
    ],
    "toy-cifar10-timelines": [TOY.of("soro+dbt", configs="0-2", sweeps={"overlap": "1,0.5"})],
}
"""The grids of each folder, in the order in which they were run."""


def main() -> None:
    """Run the grids named on the command line, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *GRIDS], help="folders of results/")
    parser.add_argument("--data", type=Path, help="the publishers' files; by default what 'spcl data get' has fetched")
    parser.add_argument("--protocols", type=Path, default=Path(), help="the folder of ps-emnist.json, …")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder for the folders of runs")
    parser.add_argument("--list", action="store_true", help="list the names")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    given = parser.parse_args()
    if given.list or not given.names:
        print("\n".join(GRIDS))
        return
    for name in given.names:
        for grid in GRIDS[name]:
            words = grid.words(given.out / name, given.data, given.protocols)
            print(shlex.join([*(f"{key}={value}" for key, value in grid.variables.items()), *words]), flush=True)
            if not given.dry_run:
                command = [sys.executable, "-m", *words]
                subprocess.run(command, env={**os.environ, **grid.variables}, check=True)


if __name__ == "__main__":
    main()
