"""`tilefold explain --policy` and `--trace`: in how many parts keys are folded, for a call or for every step of a generation."""

from collections.abc import Mapping
from dataclasses import dataclass

from tilefold.cli.runtime import pair_of
from tilefold.errors import Unsupported, ValueRangeError
from tilefold.plan import AttentionProblem, Device

_NOT_A_CALL = (
    "--varlen",
    "--blocks",
    "--listed",
    "--sizes",
    "--page-size",
)  # of the plain command, without a decision to split


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The options that only these two forms of the command have; None, False and 0 where they were not given."""

    policy: str | None
    call: str | None
    capacity: int | None
    paged: bool
    append: bool
    num_splits: int
    prompt: int | None
    new: int | None
    as_json: bool

    @property
    def function(self) -> str:
        """What stands for flash_attn's function unless --call says so."""
        return self.call or "dense"


def check_dispatch(asked: Dispatch, trace: bool, others: Mapping[str, object]) -> None:
    """Unsupported or ValueRangeError, naming the option that does not go with the others.

    others: options of the plain command, by name, with None or False where they were not given."""
    mine = {"--call": asked.call, "--capacity": asked.capacity, "--paged": asked.paged, "--append": asked.append,
            "--num-splits": asked.num_splits}  # fmt: skip
    for name, value in mine.items():
        given = value is not None if name == "--capacity" else value
        if given and asked.policy is None and not trace:
            raise Unsupported(f"{name} needs --policy or --trace")
    for name, value in (("--prompt", asked.prompt), ("--new", asked.new)):
        if value is not None and not trace:
            raise Unsupported(f"{name} needs --trace")
        if value is None and trace:
            raise ValueRangeError(f"{name} must be given with --trace, in tokens")
    if trace and asked.num_splits:
        raise Unsupported("--num-splits does not go with --trace: the policy decides every step")
    for name in others if trace else _NOT_A_CALL if asked.policy is not None else ():
        if others[name] is not None and others[name] is not False:
            instead = (
                ": --prompt and --new say it"
                if name in ("--q", "--kv")
                else ": --call varlen says it" * (name == "--varlen")
            )
            raise Unsupported(f"{name} does not go with {'--trace' if trace else '--policy'}{instead}")


def explain_split(asked: Dispatch, problem: AttentionProblem, device: Device) -> str:
    """The decision of --policy for one call, as text or JSON."""
    from tilefold.plan import plan_splits

    made = plan_splits(problem, device, asked.policy or "tilefold", call=asked.function, capacity=asked.capacity,
                       paged=asked.paged, append=asked.append, splits=asked.num_splits)  # fmt: skip
    return made.to_json() if asked.as_json else str(made)


def explain_steps(
    asked: Dispatch, device: Device, heads: int, kv_heads: int | None, dim: int, batch: int, dtype: str, window: str | None
) -> str:  # fmt: skip
    """The decisions of --policy for all steps of a generation, as text or JSON."""
    from tilefold.plan import Generation, trace_generation

    left, right = (-1, -1) if window is None else pair_of(window, "--window")
    if right not in (-1, 0):
        raise ValueRangeError(f"--window must be LEFT,0 with --trace: no later key exists, got {window!r}")
    if asked.capacity is not None and asked.capacity < 1:
        raise ValueRangeError(f"--capacity must be at least 1, got {asked.capacity}")
    run = Generation(
        heads=heads, kv_heads=heads if kv_heads is None else kv_heads, dim=dim, prompt=asked.prompt or 0, new=asked.new or 0,
        batch=batch, dtype=dtype, call=asked.function, capacity=asked.capacity or 0, window=left, paged=asked.paged,
        append=asked.append,
    )  # fmt: skip
    made = trace_generation(run, device, asked.policy or "tilefold")
    return made.to_json() if asked.as_json else str(made)
