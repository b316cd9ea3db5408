"""What threads need below Python: a barrier, a shared counter, one floating-point mode."""

from __future__ import annotations

import llvmlite.binding as llvm
import llvmlite.ir as ir

from .emit import BYTE, I32, I64, Emit, i64, new_function

# name -> number of arguments
SYNC_FUNCTIONS = {"barrier": 4, "fetch_add": 1, "run": 4}
SPINS_BEFORE_YIELD = 4096
MXCSR_DEFAULT = 0x1F80  # exceptions masked, round to nearest, denormals kept


def sync_module() -> ir.Module:
    """A module with the functions of `SYNC_FUNCTIONS`."""
    module = ir.Module("sync")
    _barrier(module)
    _fetch_add(module)
    _run(module)
    return module


def _barrier(module: ir.Module) -> None:
    """barrier(counter, generation, num_threads, yield function): wait until all have come.

    The counter only grows: the g-th barrier of a job (from 1) is passed at g * num_threads. A
    thread that waits long gives its core away, since the one it waits for may need it.
    """
    e = new_function(module, "barrier", SYNC_FUNCTIONS["barrier"])
    counter, generation, num_threads, give_way = e.args
    pointer = e.b.inttoptr(counter, I64.as_pointer())
    target = e.b.mul(generation, num_threads)
    e.b.atomic_rmw("add", pointer, i64(1), "seq_cst")
    spins = e.variable(i64(0))
    wait, again, rest, done = (e.b.append_basic_block(x) for x in ("wait", "again", "rest", "done"))
    e.b.branch(wait)
    e.b.position_at_end(wait)
    arrived = e.b.load_atomic(pointer, "acquire", 8)
    e.b.cbranch(e.b.icmp_signed("<", arrived, target), again, done)
    e.b.position_at_end(again)
    _pause(e)
    spun = e.b.add(e.get(spins), i64(1))
    e.set(spins, spun)
    e.b.cbranch(e.b.icmp_signed(">", spun, i64(SPINS_BEFORE_YIELD)), rest, wait)
    e.b.position_at_end(rest)
    e.b.call(e.b.inttoptr(give_way, ir.FunctionType(I32, []).as_pointer()), [])
    e.b.branch(wait)
    e.b.position_at_end(done)
    e.b.ret(i64(0))


def _fetch_add(module: ir.Module) -> None:
    """fetch_add(counter) -> value before adding one."""
    e = new_function(module, "fetch_add", SYNC_FUNCTIONS["fetch_add"])
    pointer = e.b.inttoptr(e.args[0], I64.as_pointer())
    e.b.ret(e.b.atomic_rmw("add", pointer, i64(1), "seq_cst"))


def _run(module: ir.Module) -> None:
    """run(function, thread, num_threads, record): call under the default floating-point mode.

    NOTE: another library may have set flush-to-zero on one thread only; results must not depend
    on which thread computes them.
    """
    e = new_function(module, "run", SYNC_FUNCTIONS["run"])
    function, thread, num_threads, record = e.args
    kind = ir.FunctionType(I64, [I64] * 3)
    x86 = llvm.get_process_triple().startswith("x86")
    if x86:
        saved, ours = e.b.alloca(I32), e.b.alloca(I32)
        _mxcsr(e, "st", saved)
        e.b.store(ir.Constant(I32, MXCSR_DEFAULT), ours)
        _mxcsr(e, "ld", ours)
    callee = e.b.inttoptr(function, kind.as_pointer())
    result = e.b.call(callee, [thread, num_threads, record])
    if x86:
        _mxcsr(e, "ld", saved)
    e.b.ret(result)


def _mxcsr(e: Emit, direction: str, slot: ir.Value) -> None:
    """Read ("st") or set ("ld") the control register."""
    pointer = e.b.bitcast(slot, BYTE.as_pointer())
    e.intrinsic(f"llvm.x86.sse.{direction}mxcsr", ir.VoidType(), [pointer])


def _pause(e: Emit) -> None:
    """Tell the core that this is a spin loop."""
    if llvm.get_process_triple().startswith("x86"):
        e.intrinsic("llvm.x86.sse2.pause", ir.VoidType(), [])
    elif llvm.get_process_triple().startswith(("aarch64", "arm64")):
        e.intrinsic("llvm.aarch64.hint", ir.VoidType(), [ir.Constant(I32, 1)])
