"""No reason of a plan is contradicted by its own numbers: random problems of every planner, and what plans print read back."""

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, reject
from hypothesis import strategies as st

from examples import examples
from plan_claims import contradictions
from plan_problems import KINDS
from tilefold.errors import TilefoldError


@pytest.mark.parametrize("kind", KINDS)
@examples(150)
@given(data=st.data())
def test_reasons_say_what_their_numbers_say(kind, data):
    try:
        plan = data.draw(KINDS[kind])
    except TilefoldError:  # a refusal is no plan
        reject()
    assert not list(contradictions(plan))
