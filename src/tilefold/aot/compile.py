"""Compile a @triton.jit or @gluon.jit kernel for a GPU that is not there. All private calls of Triton are here.

Triton's launcher asks the driver which GPU is active; here the target is given, the rest is what `JITFunction.run` does
with `warmup=True`. Pointer arguments may be CPU tensors (only their dtype and address are looked at), also inside
tuples and host tensor descriptors. Tested with triton 3.6.0, 3.7.0, 3.8.0 and 3.9.0; versions outside are refused.
"""

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import JITFunction, create_function_from_signature

from tilefold.aot.targets import Target
from tilefold.aot.versions import triton_version
from tilefold.errors import Unsupported

__all__ = ["Compiled", "Prepared", "compile_prepared", "prepare"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel bound to arguments and target, not yet compiled; `key` changes whenever the compiled code may change."""

    function: Any
    source: Any
    options: Any
    target: Target
    signature: Mapping[str, Any]
    key: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """Everything that is read off a compiled kernel.

    `listings` holds "ptx" and "sass" (NVIDIA) or "amdgcn" (AMD); `assembler_log` is what `ptxas -v` said, empty on AMD.
    `shared_bytes` are static and dynamic shared memory of one program, `tensor_columns` its columns of tensor memory.
    """

    kernel: str
    target: Target
    triton: str
    signature: str
    num_warps: int
    num_stages: int
    shared_bytes: int
    tensor_columns: int
    listings: Mapping[str, str]
    assembler_log: str


def prepare(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], target: Target) -> Prepared:
    """Bind `function` to example arguments for `target`, as a launch `function[grid](*args, **kwargs)` would.

    `kwargs` are kernel arguments by name and launch options (num_warps, num_stages, maxnreg, ...). Raises Unsupported
    for an unknown Triton, for a process in interpreter mode and for anything that is not a plain JIT function.
    """
    version = triton_version()
    if not isinstance(function, JITFunction):
        if knobs.runtime.interpret:
            raise Unsupported(
                "ahead-of-time compilation: TRITON_INTERPRET is on in this process, and the interpreter replaced the "
                "kernel when its module was imported; compile in a process without it (tilefold.aot.jobs.run_jobs)"
            )
        raise Unsupported(
            f"ahead-of-time compilation: got {type(function).__name__}, expected a @triton.jit or @gluon.jit function "
            "(without autotune or heuristics: pass the chosen configuration as kwargs)"
        )
    backend = make_backend(GPUTarget(target.backend, target.arch, target.warp_size))
    launch = dict(kwargs)
    launch["debug"] = launch.get("debug", function.debug) or knobs.runtime.debug
    for knob in ("instrumentation_mode", "fpsan_homomorphic_casts"):  # the second came after 3.6
        if hasattr(knobs.compilation, knob):
            launch[knob] = getattr(knobs.compilation, knob)
    bind: Callable[..., Any] = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, options = bind(*args, **launch)
    options, signature, constants, attributes = function._pack_args(backend, launch, bound, specialization, options)
    source = _source_class(function)(function, signature, constants, attributes)
    compiler = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    parts = (version, target, compiler, [_source_key(value) for value in constants.values()])
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return Prepared(function, source, options, target, signature, key)


def _source_class(function: Any) -> Any:
    """What hands `function` to the compiler; Gluon's is taken from where its functions come from, not imported."""
    return sys.modules[type(function).__module__].GluonASTSource if function.is_gluon() else ASTSource


def _source_key(constant: Any) -> str:
    """A constant as text, functions by the hash of their source, also inside tuples."""
    if isinstance(constant, tuple | list):
        return f"({', '.join(_source_key(part) for part in constant)})"
    return str(getattr(constant, "cache_key", constant))


def compile_prepared(prepared: Prepared) -> Compiled:
    """Compile; takes about a second. Compiler errors pass through.

    Triton's own cache is not read: its key overlooks functions in constexpr tuples, and reports have a cache already.
    """
    target = prepared.target
    with contextlib.redirect_stdout(io.StringIO()) as log, knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True  # what ptxas says with -v, with the flags of this Triton
        kernel = triton.compile(
            prepared.source,
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options=prepared.options.__dict__,
        )
    metadata = kernel.metadata
    if target.backend == "cuda":
        listings = {"ptx": kernel.asm["ptx"], "sass": _disassemble(kernel.asm["cubin"])}
    else:
        listings = {"amdgcn": kernel.asm["amdgcn"]}
    return Compiled(
        kernel=f"{prepared.function.__module__}.{prepared.function.__qualname__}",
        target=target,
        triton=triton_version(),
        signature=", ".join(f"{name}: {_type_text(kind)}" for name, kind in prepared.signature.items()),
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        shared_bytes=metadata.shared,
        tensor_columns=getattr(metadata, "tmem_size", 0) or 0,
        listings=listings,
        assembler_log=log.getvalue() if target.backend == "cuda" else "",
    )


def _type_text(kind: Any) -> str:
    """A signature entry as text; tuples are nested."""
    return f"({', '.join(_type_text(part) for part in kind)})" if isinstance(kind, tuple | list) else str(kind)


def _disassemble(cubin: bytes) -> str:
    """SASS of a cubin, by the nvdisasm that comes with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [_executable(knobs.nvidia.nvdisasm.path), "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _executable(path: str) -> str:
    """`path`, with a clear error when an unpacked wheel lost its execute bits."""
    if not os.access(path, os.X_OK):
        raise Unsupported(
            f"ahead-of-time compilation: {path} is not executable (unpack the wheel with scripts/fetch_triton.py)"
        )
    return path
