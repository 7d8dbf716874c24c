"""From a Python mod of FlexAttention to a `@triton.jit` one of `tilefold.attention`.

The mod is called once with numbers that write down what is done with them: tensors without storage, below autograd, so that torch
says which operation it is and what it promotes.  Tensors that the mod reads by these numbers become args, with their strides.
Equal texts are one function, so that new lengths and new tensors compile nothing.
"""

import contextlib
import functools
import itertools
import linecache
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
import triton
import triton.language as tl
from torch._functorch import pyfunctorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...device.mods import softcap
from ...errors import DeviceError, DtypeError, ShapeError, Unsupported

INDICES = ("batch", "head", "q_index", "kv_index")
COUNTER = itertools.count()
# Outside of torch.func's transformations; torch may name it otherwise one day.
_untransformed: Any = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", contextlib.nullcontext)
NAMES = {
    torch.bool: "int1",
    torch.int64: "int64",
    torch.float64: "float64",
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32), "int32"),
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), "float32"),
}
"""What is computed in, by torch's dtype: 16 bits only hold."""


class Translated(NamedTuple):
    """function: what `attention` takes as score_mod or mask_mod; args: its score_args or mask_args.  bias: what a score_mod adds,
    if it does nothing else."""

    function: Any
    args: tuple[Any, ...]
    bias: torch.Tensor | None = None


def translated(
    mod: Callable[..., Any], extents: tuple[int, int, int, int], device: torch.device, kind: str
) -> Translated:
    """A mod of FlexAttention as one of tilefold.  extents: batch, query heads, queries, keys.  kind: "score_mod" or "mask_mod".

    Raises Unsupported, naming the mod and the operation, for what has no translation; ShapeError for a tensor with less elements
    than the index needs that it is read by."""
    trace = _Trace(kind, mod, extents, device)
    with _untransformed():  # the mod is asked for its text alone
        indices = [
            trace.value(name, torch.int32, natural=True, extent=n) for name, n in zip(INDICES, extents, strict=True)
        ]
        score = [trace.value("score", torch.float32)] if kind == "score_mod" else []
        with _Indexing(trace):
            found = mod(*score, *indices)
    return Translated(_compiled(trace.text(found), kind), tuple(trace.args), trace.bias(found))


@functools.lru_cache(maxsize=1024)
def _compiled(text: str, kind: str) -> Any:
    """The function of a text, which inspect.getsource finds, as Triton does."""
    file = f"<{kind} {next(COUNTER)} translated by tilefold>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {**globals(), "__name__": __name__}
    exec(compile(text, file, "exec"), space)
    return triton.jit(space[kind])


class _Number(torch.Tensor):
    """A number of a mod: `text` says it in the function that is written.  literal: what it is, if the text is that.  natural: it
    is not negative.  row: the tensor and the first indices of an element whose other indices are to come."""

    trace: "_Trace"  # type: ignore[assignment]
    text: str
    literal: Any
    natural: bool
    extent: int | None
    row: tuple[torch.Tensor, tuple[Any, ...]] | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        trace = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, _Number)).trace
        return trace.operation(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.text}>"


class _Indexing(TorchFunctionMode):
    """Hands tensor[numbers] over before torch reads the numbers on the host."""

    def __init__(self, trace: "_Trace") -> None:
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            row = isinstance(tensor, _Number)
            if row or any(isinstance(each, _Number) for each in index):
                return self.trace.element(tensor, index)
        return func(*args, **(kwargs or {}))


class _Trace:
    """What a mod does, as statements."""

    def __init__(self, kind: str, mod: Any, extents: tuple[int, ...], device: torch.device) -> None:
        self.kind, self.extents, self.device = kind, extents, device
        self.name = getattr(mod, "__name__", type(mod).__name__)
        self.lines: list[str] = []
        self.known: dict[str, str] = {}
        self.args: list[Any] = []
        self.names: list[str] = []
        self.pointers: dict[int, str] = {}
        self.strides: dict[tuple[str, int], str] = {}
        self.elements: dict[str, tuple[torch.Tensor, tuple[Any, ...]]] = {}

    def refuse(self, what: str) -> NoReturn:
        raise Unsupported(
            f"{self.kind} {self.name}: {what} has no translation to Triton; docs/reference/flex_attention.md lists what has; or "
            f"give tilefold.attention a @triton.jit function as {self.kind}"
        )

    # ------------------------------------------------------------ numbers

    def value(self, text: str, dtype: torch.dtype, natural: bool = False, literal: Any = None, extent: Any = None,
              row: Any = None) -> _Number:  # fmt: skip
        """A number that is said by a text."""
        shape = row[0].shape[len(row[1]) :] if row else ()
        made = torch.Tensor._make_wrapper_subclass(_Number, shape, dtype=dtype, device=self.device)
        made.trace, made.text, made.natural, made.literal, made.extent, made.row = (
            self, text, natural, literal, extent, row)  # fmt: skip
        return made

    def named(self, expression: str) -> str:
        """A variable with that value; equal expressions are computed once."""
        if expression not in self.known:
            self.known[expression] = f"v{len(self.known)}"
            self.lines.append(f"{self.known[expression]} = {expression}")
        return self.known[expression]

    def arg(self, value: Any) -> str:
        self.args.append(value)
        self.names.append(f"a{len(self.names)}")
        return self.names[-1]

    def tensor(self, value: torch.Tensor) -> str:
        """The pointer to a tensor that a mod reads."""
        if value.device != self.device:
            raise DeviceError(
                f"{self.kind} {self.name} reads a tensor on {value.device}, the query is on {self.device}"
            )
        if value.dtype not in NAMES:
            raise DtypeError(f"{self.kind} {self.name} reads a tensor of {value.dtype}")
        if id(value) not in self.pointers:
            self.pointers[id(value)] = self.arg(value.detach() if self.kind == "mask_mod" else value)
        return self.pointers[id(value)]

    def operand(self, value: Any, dtype: torch.dtype | None = None, small: bool = False) -> str:
        """An argument of an operation, in a dtype, as it stands in an expression.  small: an int may become an arg."""
        value = self.taken(value)
        if not isinstance(value, _Number):
            number = value
            if dtype is not None:
                number = float(value) if dtype.is_floating_point else bool(value) if dtype == torch.bool else int(value)
            if isinstance(number, bool):
                return "(kv_index >= 0)" if number else "(kv_index < 0)"
            if isinstance(number, int):
                return self.arg(number) if small and abs(number) > 1 else f"({number})"
            return f"({number!r})" if math.isfinite(number) else f'float("{number}")'
        if value.row is not None:
            self.refuse(f"a tensor of {value.dim()} dimensions as an operand, where one element is needed,")
        if dtype is None or NAMES[value.dtype] == NAMES[dtype]:
            return value.text
        if dtype == torch.bool:
            return self.named(f"{value.text} != 0")
        distance = self.distance(value.text) if NAMES[dtype] == "float32" else ""
        return distance or self.named(f"{value.text}.to(tl.{NAMES[dtype]})")

    def distance(self, name: str) -> str:
        """The variable that is an integer one's distance of the indices in float32, or "": converted before they are subtracted,
        since a tile has fewer indices than distances.  Exact to 2 ** 24 tokens."""
        expression = next((text for text, known in self.known.items() if known == name), "")
        if found := re.fullmatch(r"tl\.abs\((\w+)\)", expression):
            inner = self.distance(found[1])
            return inner and self.named(f"tl.abs({inner})")
        found = re.fullmatch(r"(q_index|kv_index) - (q_index|kv_index)", expression)
        if not found or max(self.extents[2:]) > 1 << 24:
            return ""
        a, b = (self.named(f"{index}.to(tl.float32)") for index in found.groups())
        return self.named(f"{a} - {b}")

    def taken(self, value: Any) -> Any:
        """A Python number or a _Number of what an operation is given."""
        if isinstance(value, _Number):
            return value if value.literal is None else value.literal
        if isinstance(value, torch.Tensor):
            if value.dim():
                self.refuse(f"a tensor of shape {tuple(value.shape)} as an operand, where one element is needed,")
            number = (
                value.device.type == "cpu" and not value.requires_grad
            )  # of the mod's text, or one wrapped by torch
            return value.item() if number else self.element(value, ())
        if not isinstance(value, bool | int | float):
            self.refuse(f"an operand of {type(value).__name__}")
        return value

    def dtype_of(self, *values: Any) -> torch.dtype:
        """What torch computes in, if it is given these."""
        given = [self.taken(each) for each in values]
        like = [
            torch.empty((), dtype=each.dtype, device="meta") if isinstance(each, _Number) else each for each in given
        ]
        return torch.result_type(like[0], like[-1])

    # ------------------------------------------------------------ tensors that are read

    def element(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> _Number:
        """tensor[index]: an element, or a row whose other indices are to come."""
        before: tuple[Any, ...] = ()
        if isinstance(tensor, _Number):
            if tensor.row is None:
                self.refuse("an index of a number")
            tensor, before = tensor.row
        index = (*before, *index)
        if len(index) > tensor.dim():
            raise ShapeError(
                f"{self.kind} {self.name} gives {len(index)} indices to a tensor of shape {tuple(tensor.shape)}"
            )
        if len(index) < tensor.dim():
            return self.value("", tensor.dtype, row=(tensor, index))
        pointer = self.tensor(tensor)
        far = (
            sum(abs(stride) * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)) >= 1 << 31
        )
        at = pointer
        for one, size, stride in zip(index, tensor.shape, tensor.stride(), strict=True):
            place = self.index(tensor, one, size)
            if far:
                place = f"tl.cast({place}, tl.int64)"
            if stride:
                at += f" + {place}" if stride == 1 else f" + {place} * {self.stride(pointer, stride)}"
        loaded = f"tl.load({at})"
        if tensor.dtype == torch.bool:
            loaded = f"({loaded} != 0)"
        else:
            loaded = f"{loaded}.to(tl.{NAMES[tensor.dtype]})"
        name = self.named(loaded)
        self.elements[name] = tensor, index
        return self.value(name, tensor.dtype, natural=tensor.dtype == torch.uint8)

    def stride(self, pointer: str, stride: int) -> str:
        """The arg that holds a stride."""
        if (pointer, stride) not in self.strides:
            self.strides[pointer, stride] = self.arg(stride)
        return self.strides[pointer, stride]

    def index(self, tensor: torch.Tensor, one: Any, size: int) -> str:
        """One index of a tensor; a negative one counts from the end."""
        if isinstance(one, torch.Tensor) and not isinstance(one, _Number):
            one = self.taken(one)
        if isinstance(one, _Number) and one.literal is not None:
            one = one.literal
        if isinstance(one, bool) or not isinstance(one, int | _Number):
            self.refuse(f"an index that is a {type(one).__name__}, where an integer is needed,")
        shape = tuple(tensor.shape)
        if isinstance(one, int):
            if not -size <= one < size:
                raise ShapeError(
                    f"{self.kind} {self.name} reads element {one} of a dimension of {size}, of a tensor {shape}"
                )
            return f"({one % size})"
        if one.row is not None or one.dtype.is_floating_point or one.dtype == torch.bool:
            self.refuse(f"an index of {one.dtype}, where an integer is needed,")
        if one.extent is not None and one.extent > size:
            raise ShapeError(
                f"{self.kind} {self.name} reads a tensor of shape {shape} by {one.text}, which goes to {one.extent}, in a "
                f"dimension of {size}"
            )
        if one.natural:
            return one.text
        return self.named(f"tl.where({one.text} < 0, {one.text} + {self.arg(size)}, {one.text})")

    # ------------------------------------------------------------ operations

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of torch's dispatcher, of which an argument is a _Number."""
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "equal"):
            self.refuse("an `if`, `and`, `or`, `not` or .item() of a number of the mod (use torch.where, &, | and ~)")
        in_place = name.endswith("_") and not name.startswith("_") and name[:-1] in OPERATIONS
        rule = OPERATIONS.get(name[:-1] if in_place else name)
        if rule is None:
            self.refuse(f"torch's {name}")
        self.materialise([each for each in tree_leaves((args, kwargs)) if isinstance(each, _Number)])
        try:
            made = rule(self, *args, **kwargs)
        except TypeError:
            self.refuse(f"torch's {name} with these arguments")
        if not in_place:
            return made
        target = args[0]
        target.text, target.literal, target.natural = self.operand(made, target.dtype), None, made.natural
        target.extent = None
        return target

    def materialise(self, numbers: list[_Number]) -> None:
        """Of literals alone the first becomes a tile, since Triton has no functions of Python's numbers."""
        first = numbers[0]
        if all(each.literal is not None for each in numbers):
            text = self.operand(first, first.dtype)
            if first.dtype != torch.bool:
                text = self.named(f"tl.full((1, 1), {text}, tl.{NAMES[first.dtype]})")
            first.text, first.literal = text, None

    def write(self, template: str, dtype: torch.dtype, natural: bool = False, **operands: str) -> _Number:
        return self.value(self.named(template.format(**operands)), dtype, natural)

    # ------------------------------------------------------------ the function

    def text(self, found: Any) -> str:
        """The source of the function that returns what the mod returned."""
        if isinstance(found, torch.Tensor) and not isinstance(found, _Number):
            found = self.taken(found)
        if not isinstance(found, _Number | bool | int | float):
            self.refuse(f"a result of {type(found).__name__}")
        dtype = torch.float32 if self.kind == "score_mod" else torch.bool
        result = self.operand(found, dtype)
        if self.kind == "score_mod" and not self._reads_score(result):
            result = f"tl.where(score == score, {result}, {result})"
        head = f"def {self.kind}(score, batch, head, q_index, kv_index, args):\n"
        taken = [f"{', '.join([*self.names, 'seq_q', 'seq_k'])} = args"] if self.names else []
        return head + "".join(f"    {line}\n" for line in (*taken, *self.lines, f"return {result}"))

    def bias(self, found: Any) -> torch.Tensor | None:
        """What is added to the score, [batch or 1, heads or 1, queries or 1, keys], if that is an element by the four indices as
        they are, or some of them, and nothing else is done."""
        expression = next((text for text, name in self.known.items() if name == getattr(found, "text", "")), "")
        added = re.fullmatch(r"score \+ (\w+)|(\w+) \+ score", expression)
        tensor, index = self.elements.get(added[1] or added[2], (None, ())) if added else (None, ())
        if tensor is None or not tensor.dtype.is_floating_point or tensor.dtype == torch.float64:
            return None
        fixed = [one.literal if isinstance(one, _Number) else one for one in index]
        names = [one.text for one, number in zip(index, fixed, strict=True) if number is None]
        if "kv_index" not in names or len({*names} & {*INDICES}) < len(names):
            return None
        read = tensor
        for dim, number in reversed([*enumerate(fixed)]):
            if type(number) is int:  # of one element squeezed: its gradient is a view
                read = read.squeeze(dim) if read.shape[dim] == 1 else read.select(dim, number)
            elif number is not None:  # a tensor's number would be waited for
                return None
        order = [name for name in INDICES if name in names]
        read = read.permute([names.index(name) for name in order])
        for dim, name in enumerate(INDICES):
            if name not in names:
                read = read.unsqueeze(dim)
            elif read.shape[dim] > self.extents[dim]:
                read = read.narrow(dim, 0, self.extents[dim])
        return read

    def _reads_score(self, result: str) -> bool:
        """Whether a variable has the shape of the score: it was made from it, by statements in this order."""
        of = {"score"}
        for line in self.lines:
            name, _, value = line.partition(" = ")
            if of & set(re.findall(r"\w+", value)):
                of.add(name)
        return result in of


# ---------------------------------------------------------------- helpers of the functions that are written


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)), whose derivative is finite everywhere."""
    return 1.0 / (1.0 + tl.exp(-tl.clamp(x, -80.0, 80.0, propagate_nan=tl.PropagateNan.ALL)))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh(x), right to 3e-7."""
    return softcap(x, 0, 0, 0, 0, (1.0,))


# ---------------------------------------------------------------- rules

Rule = Callable[..., _Number]
OPERATIONS: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        OPERATIONS.update(dict.fromkeys(names, rule))
        return rule

    return add


def _is_natural(value: Any) -> bool:
    if isinstance(value, _Number) and value.literal is None:
        return value.natural
    return not isinstance(value, torch.Tensor) and value >= 0


def _arithmetic(sign: str, natural: bool) -> Any:
    def rule(trace: _Trace, a: Any, b: Any, alpha: Any = 1) -> _Number:
        if alpha != 1:
            b = OPERATIONS["mul"](trace, b, alpha) if isinstance(b, _Number) else b * alpha
        dtype = trace.dtype_of(a, b)
        if dtype == torch.bool:
            return OPERATIONS["bitwise_or" if sign == "+" else "bitwise_and"](trace, a, b)
        both = natural and _is_natural(a) and _is_natural(b)
        small = sign != "*"
        return trace.write(f"{{a}} {sign} {{b}}", dtype, both and not dtype.is_floating_point,
                           a=trace.operand(a, dtype, small), b=trace.operand(b, dtype, small))  # fmt: skip

    return rule


OPERATIONS |= {"add": _arithmetic("+", True), "sub": _arithmetic("-", False), "mul": _arithmetic("*", True)}


@_rule("rsub")
def _rsub(trace: _Trace, a: Any, b: Any, alpha: Any = 1) -> _Number:
    return OPERATIONS["sub"](trace, b, a, alpha)


def _floating(trace: _Trace, *values: Any) -> torch.dtype:
    dtype = trace.dtype_of(*values)
    return dtype if dtype.is_floating_point else torch.float32


@_rule("div", "true_divide")
def _div(trace: _Trace, a: Any, b: Any, rounding_mode: str | None = None) -> _Number:
    if rounding_mode == "floor":
        return OPERATIONS["floor_divide"](trace, a, b)
    dtype = _floating(trace, a, b) if rounding_mode is None else trace.dtype_of(a, b)
    x, y = trace.operand(a, dtype), trace.operand(b, dtype)
    if rounding_mode == "trunc":
        if dtype.is_floating_point:
            trace.refuse("torch.div of floating numbers with rounding_mode='trunc'")
        return trace.write("{x} // {y}", dtype, x=x, y=y)
    return trace.write("{x} / {y}", dtype, x=x, y=y)


def _floored(floating: str, natural: str, corrected: str) -> Any:
    """Triton divides integers towards zero, torch down.  corrected: what a result is where signs differ and a rest is left."""

    def rule(trace: _Trace, a: Any, b: Any) -> _Number:
        dtype = trace.dtype_of(a, b)
        x, y = trace.operand(a, dtype), trace.operand(b, dtype)
        if dtype.is_floating_point:
            return trace.write(floating, dtype, x=x, y=y)
        if _is_natural(a) and _is_natural(b):
            return trace.write(natural, dtype, True, x=x, y=y)
        whole = f"tl.where(({{x}} % {{y}} != 0) & (({{x}} < 0) != ({{y}} < 0)), {corrected}, {natural})"
        return trace.write(whole, dtype, x=x, y=y)

    return rule


OPERATIONS |= {
    "floor_divide": _floored("tl.floor({x} / {y})", "{x} // {y}", "{x} // {y} - 1"),
    "remainder": _floored("{x} - {y} * tl.floor({x} / {y})", "{x} % {y}", "{x} % {y} + {y}"),
}


def _binary(template: str, natural: Callable[[Iterable[bool]], bool] = all, kind: torch.dtype | None = None) -> Any:
    """A rule of two numbers in one dtype, `kind` or torch's; natural: how many must not be negative for the result not to be."""

    def rule(trace: _Trace, a: Any, b: Any) -> _Number:
        dtype = kind or trace.dtype_of(a, b)
        whole = dtype != torch.bool and not dtype.is_floating_point
        return trace.write(template, dtype, whole and natural(map(_is_natural, (a, b))), a=trace.operand(a, dtype),
                           b=trace.operand(b, dtype))  # fmt: skip

    return rule


for name, sign in {"and": "&", "or": "|", "xor": "^"}.items():
    OPERATIONS |= dict.fromkeys((f"bitwise_{name}", f"__{name}__"), _binary(f"{{a}} {sign} {{b}}"))
    OPERATIONS[f"logical_{name}"] = _binary(f"{{a}} {sign} {{b}}", kind=torch.bool)
OPERATIONS |= dict.fromkeys(("bitwise_left_shift", "__lshift__"), _binary("{a} << {b}"))
OPERATIONS |= dict.fromkeys(("bitwise_right_shift", "__rshift__"), _binary("{a} >> {b}"))
OPERATIONS |= {"maximum": _binary("tl.maximum({a}, {b})", any), "minimum": _binary("tl.minimum({a}, {b})")}


def _comparison(sign: str) -> Any:
    def rule(trace: _Trace, a: Any, b: Any) -> _Number:
        dtype = trace.dtype_of(a, b)
        if dtype == torch.bool:
            dtype = torch.int32
        return trace.write(f"{{a}} {sign} {{b}}", torch.bool, a=trace.operand(a, dtype, True),
                           b=trace.operand(b, dtype, True))  # fmt: skip

    return rule


OPERATIONS |= {
    name: _comparison(sign)
    for name, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items()
}


@_rule("bitwise_not", "logical_not")
def _not(trace: _Trace, a: Any) -> _Number:
    if a.dtype == torch.bool:
        return trace.write("{a} == 0", torch.bool, a=trace.operand(a, torch.int32))
    return trace.write("~{a}", a.dtype, a=trace.operand(a))


@_rule("where")
def _where(trace: _Trace, condition: Any, a: Any, b: Any) -> _Number:
    dtype = trace.dtype_of(a, b)
    natural = not dtype.is_floating_point and _is_natural(a) and _is_natural(b)
    return trace.write("tl.where({c}, {a}, {b})", dtype, natural, c=trace.operand(condition, torch.bool),
                       a=trace.operand(a, dtype), b=trace.operand(b, dtype))  # fmt: skip


@_rule("masked_fill")
def _masked_fill(trace: _Trace, a: Any, mask: Any, value: Any) -> _Number:
    return trace.write("tl.where({c}, {v}, {a})", a.dtype, c=trace.operand(mask, torch.bool), a=trace.operand(a),
                       v=trace.operand(value, a.dtype))  # fmt: skip


@_rule("clamp", "clip", "clamp_min")
def _clamp(trace: _Trace, a: Any, min: Any = None, max: Any = None) -> _Number:
    for name, limit in (("maximum", min), ("minimum", max)):
        a = a if limit is None else OPERATIONS[name](trace, a, limit)
    return a  # type: ignore[no-any-return]


OPERATIONS["clamp_max"] = lambda trace, a, max: _clamp(trace, a, max=max)


@_rule("pow")
def _pow(trace: _Trace, a: Any, b: Any) -> _Number:
    power = trace.taken(b)
    dtype = trace.dtype_of(a, b)
    if isinstance(power, int | float) and power == int(power) and 1 <= power <= 8:
        x = trace.operand(a, dtype)
        return trace.write(" * ".join([x] * int(power)), dtype)
    if not dtype.is_floating_point:
        trace.refuse("torch's pow of integers by something else than 1 to 8")
    if isinstance(power, int | float) and power in (0.5, -0.5, -1):
        return OPERATIONS[{0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}[power]](trace, a)
    base = trace.taken(a)
    if isinstance(base, int | float):
        log = repr(math.log2(base)) if base > 0 else trace.refuse(f"torch's pow of {base}")
    else:
        log = trace.named(f"tl.log2({trace.operand(a, dtype)})")
    return trace.write("tl.exp2({b} * {log})", dtype, b=trace.operand(b, dtype), log=log)


FLOATING = {
    "exp": "tl.exp({a})",
    "exp2": "tl.exp2({a})",
    "expm1": "tl.exp({a}) - 1.0",
    "log": "tl.log({a})",
    "log2": "tl.log2({a})",
    "log10": "tl.log2({a}) * 0.3010299956639812",
    "log1p": "tl.log(1.0 + {a})",
    "sqrt": "tl.sqrt({a})",
    "rsqrt": "tl.rsqrt({a})",
    "sin": "tl.sin({a})",
    "cos": "tl.cos({a})",
    "tan": "tl.sin({a}) / tl.cos({a})",
    "erf": "tl.erf({a})",
    "tanh": "_tanh({a})",
    "sigmoid": "_sigmoid({a})",
    "silu": "{a} * _sigmoid({a})",
    "softplus": "tl.where({a} > 20.0, {a}, tl.log(1.0 + tl.exp({a})))",
    "gelu": "0.5 * {a} * (1.0 + tl.erf({a} * 0.7071067811865476))",
    "reciprocal": "1.0 / {a}",
}
OTHERS = {"abs": "tl.abs({a})", "neg": "-{a}", "relu": "tl.maximum({a}, 0)", "square": "{a} * {a}"}
ROUNDED = {"floor": "tl.floor({a})", "ceil": "tl.ceil({a})", "trunc": "tl.where({a} < 0, tl.ceil({a}), tl.floor({a}))"}
TESTS = {"isnan": "{a} != {a}", "isinf": 'tl.abs({a}) == float("inf")'}


def _unary(template: str, natural: bool = False, result: torch.dtype | None = None) -> Any:
    def rule(trace: _Trace, a: Any) -> _Number:
        return trace.write(template, result or a.dtype, natural, a=trace.operand(a))

    return rule


def _of_floats(template: str) -> Any:
    def rule(trace: _Trace, a: Any) -> _Number:
        dtype = _floating(trace, a)
        return trace.write(template, dtype, a=trace.operand(a, dtype))

    return rule


def _rounded(template: str) -> Any:
    def rule(trace: _Trace, a: Any) -> _Number:
        return trace.write(template, a.dtype, a=trace.operand(a)) if a.dtype.is_floating_point else a

    return rule


OPERATIONS |= {name: _of_floats(template) for name, template in FLOATING.items()}
OPERATIONS |= {name: _unary(template, name in ("abs", "relu")) for name, template in OTHERS.items()}
OPERATIONS |= {name: _rounded(template) for name, template in ROUNDED.items()}
OPERATIONS |= {name: _unary(template, result=torch.bool) for name, template in TESTS.items()}


@_rule("sign", "sgn")
def _sign(trace: _Trace, a: Any) -> _Number:
    sign = "tl.where({a} > 0, 1, tl.where({a} < 0, -1, 0))"
    made = trace.write(sign, torch.int32, a=trace.operand(a))
    return trace.value(trace.operand(made, a.dtype), a.dtype)


@_rule("_to_copy")
def _to(trace: _Trace, a: Any, dtype: torch.dtype | None = None, **_: Any) -> _Number:
    dtype = dtype or a.dtype
    if dtype not in NAMES:
        trace.refuse(f"a number of {dtype}")
    return trace.value(trace.operand(a, dtype), dtype, natural=a.natural and not dtype.is_floating_point)


@_rule("clone", "detach", "alias", "lift_fresh", "lift_fresh_copy")
def _same(trace: _Trace, a: Any, **_: Any) -> _Number:
    return trace.value(a.text, a.dtype, a.natural, a.literal, a.extent, a.row)


@_rule("squeeze", "view", "reshape", "expand", "_unsafe_view")
def _shaped(trace: _Trace, a: Any, shape: Any = (), **_: Any) -> _Number:
    if a.row is not None or tuple(shape):
        trace.refuse("a change of shape")
    return _same(trace, a)


def _filled(number: Any) -> Any:
    def rule(trace: _Trace, a: Any, *given: Any, dtype: torch.dtype | None = None, **_: Any) -> _Number:
        dtype, given = dtype or a.dtype, tuple(each for each in given if not isinstance(each, list | tuple))
        literal = trace.taken(given[0]) if number is None else number
        return trace.value("", dtype, literal=torch.tensor(literal).to(dtype).item())

    return rule


for name, number in {"zeros": 0, "ones": 1, "full": None}.items():
    OPERATIONS |= dict.fromkeys((f"{name}_like", f"new_{name}"), _filled(number))
