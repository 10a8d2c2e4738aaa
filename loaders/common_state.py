"""What a Megatron checkpoint says beside its weights: saved arguments, parallel sizes, the iteration."""

from __future__ import annotations

from dataclasses import dataclass

from gtp_serve.errors import CheckpointCorrupt, LayoutMismatch
from gtp_serve.loaders.limits import MAX_SIZE
from gtp_serve.loaders.megatron_args import SavedArgs
from gtp_serve.loaders.pickle_values import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedSizes:
    """Parallel sizes of the run that saved the checkpoint; None where nobody says."""

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    gtp: int | None = None
    egtp: int | None = None


def saved_sizes(args: SavedArgs | None, overrides: SavedSizes) -> SavedSizes:
    """What the arguments say, and where they say nothing, what the user says.

    :raises LayoutMismatch: when both speak and differ.
    """
    said = _said(args) if args is not None else {}
    sizes: dict[str, int | None] = {}
    for name in ("tp", "pp", "ep", "etp", "gtp", "egtp"):
        asked = getattr(overrides, name)
        sizes[name] = asked if said.get(name) is None else said[name]
        if asked is not None and sizes[name] != asked:
            raise LayoutMismatch(
                f"--saved-{name} {asked} contradicts the checkpoint, which says {sizes[name]}",
                [
                    ("saved arguments", args.origin if args is not None else ""),
                    ("try", f"leave --saved-{name} out"),
                ],
            )
    return SavedSizes(**sizes)


def _said(args: SavedArgs) -> dict[str, int | None]:
    tp = args.first("tensor_model_parallel_size")
    etp = args.first("expert_tensor_parallel_size") or tp
    return {
        "tp": tp,
        "pp": args.first("pipeline_model_parallel_size", "transformer_pipeline_model_parallel_size"),
        "ep": args.first("expert_model_parallel_size"),
        "etp": etp,
        "gtp": args.first("gtp_weight_remat_size"),
        "egtp": args.first("expert_gtp_weight_remat_size"),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonState:
    """What a checkpoint says beside its weights.  ``args`` is None where it says nothing about the model."""

    args: SavedArgs | None = None
    iteration: int | None = None
    origin: str = ""


def common_state(value: object, origin: str) -> CommonState:
    """The parts that are used of an unpickled common state.

    :raises CheckpointCorrupt: when it is not the dictionary that Megatron saves.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{origin} does not hold a common state")
    iteration = value.get("iteration")
    return CommonState(
        args=_namespace(value.get("args"), origin),
        iteration=iteration if type(iteration) is int and 0 <= iteration < MAX_SIZE else None,
        origin=origin,
    )


def _namespace(value: object, origin: str) -> SavedArgs | None:
    if isinstance(value, Record) and value.name in ("argparse.Namespace", "types.SimpleNamespace"):
        value = value.attributes()
    return SavedArgs(value, origin) if isinstance(value, dict) else None
