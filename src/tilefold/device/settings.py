"""Numbers that steer a kernel and are one for all rows, or one a row: read on the device either way."""

import triton
import triton.language as tl


@triton.jit
def setting(value, i_b, i_h, i_q, live):
    """A number for all rows, (number,), or one a row, (pointer, strides of batch, head and query block): fp32."""
    if len(value) == 1:
        return value[0]
    else:
        offset = i_b * value[1] + i_h * value[2] + i_q.to(tl.int64) * value[3]
        return tl.load(value[0] + offset, mask=live, other=0.0).to(tl.float32)


@triton.jit
def whole_setting(value, i_b, i_h, i_q, live, most):
    """The same as int32, 0 to `most`."""
    return tl.minimum(tl.maximum(setting(value, i_b, i_h, i_q, live), 0.0), most).to(tl.int32)
