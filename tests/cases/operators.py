"""Arguments of the custom operators by the names of their schemas, for `torch.library.opcheck`."""

from typing import Any

PLAIN = {"max_seqlen_q": 0, "max_seqlen_k": 0, "causal": False, "window_left": -1, "window_right": -1, "softcap": 0.0,
         "layout": "bshd", "hooks": "", "mod_order": "|", "dropout_p": 0.0, "deterministic": True}  # fmt: skip


def arguments_of(op: Any, **given: Any) -> tuple[Any, ...]:
    """In order; what is not given is None, an empty list or what changes nothing."""
    found = []
    for argument in op._opoverload._schema.arguments:
        empty = [] if str(argument.type).startswith("List") else None
        found.append(given.pop(argument.name, PLAIN.get(argument.name, empty)))
    assert not given, f"the operator has no {sorted(given)}"
    return tuple(found)
