"""Ping-pong scheduling: the consumers issue their products in turns, so that one's softmax runs beside another's products.

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3.1.
"""

from .gluon import aggregate, constexpr_function, gl, jit, named_arrive, named_wait


@aggregate
class PingPong:
    """A named barrier for each of CONSUMERS warpgroups.  Without ON nobody waits."""

    ON: gl.constexpr
    CONSUMERS: gl.constexpr

    @constexpr_function
    def __init__(self, ON, CONSUMERS):
        self.ON, self.CONSUMERS = gl.constexpr(ON), gl.constexpr(CONSUMERS)

    @jit
    def begin(self, CID: gl.constexpr):
        """The first consumer need not wait."""
        if self.ON and CID == self.CONSUMERS - 1:
            named_arrive(0)

    @jit
    def wait(self, CID: gl.constexpr):
        """Before the products of consumer CID: until the one before it has issued its own."""
        if self.ON:
            named_wait(CID)

    @jit
    def pass_on(self, CID: gl.constexpr):
        """Behind them: let the next consumer issue."""
        if self.ON:
            named_arrive((CID + 1) % self.CONSUMERS)

    @jit
    def end(self, CID: gl.constexpr):
        """The last one has passed on to the first."""
        if self.ON and CID == 0:
            named_wait(0)
