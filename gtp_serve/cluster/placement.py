"""Where a replica's ranks go: one bundle of resources each, on one node if any is large enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from gtp_serve.cluster.settings import Strategy
from gtp_serve.errors import DoesNotFit

RayStrategy = Literal["STRICT_PACK", "PACK", "STRICT_SPREAD"]


def bundles(ranks: int, cpus: float, gpus: float) -> list[dict[str, float]]:
    """One for each rank."""
    return [{name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount} for _ in range(ranks)]


def choose_strategy(
    wanted: Strategy, needed: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]
) -> RayStrategy:
    """Ray's word for where bundles go.

    :param nodes: all resources of each living node, in use or not.
    :raises DoesNotFit: when they are more than the whole cluster has; a cluster that grows by itself has no limit.
    """
    if wanted == "spread":
        return "STRICT_SPREAD"
    names = {name for bundle in needed for name in bundle}
    total = {name: sum(bundle.get(name, 0.0) for bundle in needed) for name in names}
    if any(all(node.get(name, 0.0) >= amount for name, amount in total.items()) for node in nodes):
        return "STRICT_PACK" if wanted == "auto" else "PACK"
    there = {name: sum(node.get(name, 0.0) for node in nodes) for name in names}
    missing = [name for name, amount in total.items() if there[name] < amount]
    if missing:
        seen = ", ".join(f"{there[name]:g} {name}" for name in missing)
        raise DoesNotFit(
            f"one replica needs {', '.join(f'{total[name]:g} {name}' for name in missing)}, the cluster has {seen}",
            [("try", "fewer ranks (--tp), less for each (--cpus-per-rank), or more nodes")],
        )
    return "PACK"
