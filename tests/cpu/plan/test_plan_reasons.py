"""No reason of a plan is contradicted by its own numbers: random problems of every planner, and what plans print read back."""

import copy
import pickle
from dataclasses import replace

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, reject
from hypothesis import strategies as st

from examples import examples
from plan_claims import contradictions
from plan_problems import KINDS
from tilefold.errors import TilefoldError
from tilefold.plan import AttentionProblem, device_named, plan_attention
from tilefold.plan.base import Plan


@pytest.mark.parametrize("kind", KINDS)
@examples(100)
@given(data=st.data())
def test_reasons_say_what_their_numbers_say(kind, data):
    try:
        plan = data.draw(KINDS[kind])
    except TilefoldError:  # a refusal is no plan
        reject()
    if isinstance(plan, Plan):  # a planner leaves the checks out, and what no launch needs for later
        assert replace(plan) == plan
        assert type(plan).from_json(plan.to_json()) == plan
    assert not list(contradictions(plan))


def test_what_no_launch_needs_is_made_once_when_somebody_asks():
    plan_attention.cache_clear()
    plan = plan_attention(AttentionProblem(2, 300, 300, 8, 2, 128, 128), device_named("h200"))
    for name in ("rejected", "cost", "bound", "buffers", "shared_bytes", "programs_per_sm"):
        with pytest.raises(AttributeError):
            object.__getattribute__(plan, name)
    later = plan.later(reason=lambda: plan.reason[::-1])
    assert plan.rejected is plan.rejected and object.__getattribute__(plan, "cost") is plan.cost
    assert later.reason == plan.reason[::-1] and replace(later, reason=plan.reason) == plan
    assert pickle.loads(pickle.dumps(plan)) == copy.copy(plan) == plan
    with pytest.raises(AttributeError, match="AttentionPlan has no attribute 'tiles'"):
        plan.tiles  # noqa: B018
