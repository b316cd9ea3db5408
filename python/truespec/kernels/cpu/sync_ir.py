"""What threads need below Python: waiting for jobs and for each other, one floating-point mode."""

from __future__ import annotations

import llvmlite.binding as llvm
import llvmlite.ir as ir

from .emit import BYTE, I32, I64, Emit, i64, new_function

# name -> number of arguments
SYNC_FUNCTIONS = {"barrier": 4, "wait_for": 3, "fetch_add": 1, "run": 4, "post": 1, "serve": 7}
SPINS_BEFORE_YIELD = 4096
SPINS_BEFORE_SLEEP = 32768  # about 0.6 ms: the next job, also that of the next step, comes sooner
# A mailbox of 64-bit words. First cache lines: written by the poster, by the server, by clocks.
POSTED, FUNCTION, NUM_THREADS, RECORD, TAKEN, ASLEEP = 0, 1, 2, 3, 8, 9
CLOCKS = 16  # four timespecs: elapsed and CPU time at the start of a job, then at its end
MAILBOX_WORDS = 24
MXCSR_DEFAULT = 0x1F80  # exceptions masked, round to nearest, denormals kept


def sync_module() -> ir.Module:
    """A module with the functions of `SYNC_FUNCTIONS`."""
    module = ir.Module("sync")
    _barrier(module)
    _wait_for(module)
    _fetch_add(module)
    run = _run(module)
    _post(module)
    _serve(module, run)
    return module


def _barrier(module: ir.Module) -> None:
    """barrier(counter, generation, num_threads, yield function): wait until all have come.

    The counter only grows: the g-th barrier of a job (from 1) is passed at g * num_threads.
    """
    e = new_function(module, "barrier", SYNC_FUNCTIONS["barrier"])
    counter, generation, num_threads, give_way = e.args
    e.b.atomic_rmw("add", _word(e, counter), i64(1), "seq_cst")
    _wait_until(e, _word(e, counter), e.b.mul(generation, num_threads), give_way)
    e.b.ret(i64(0))


def _wait_for(module: ir.Module) -> None:
    """wait_for(counter, value, yield function): wait until the counter has reached the value."""
    e = new_function(module, "wait_for", SYNC_FUNCTIONS["wait_for"])
    counter, value, give_way = e.args
    _wait_until(e, _word(e, counter), value, give_way)
    e.b.ret(i64(0))


def _wait_until(e: Emit, pointer: ir.Value, target: ir.Value, give_way: ir.Value) -> None:
    """Spin until a counter has reached `target`.

    A thread that waits long gives its core away, since the one it waits for may need it.
    """
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


def _fetch_add(module: ir.Module) -> None:
    """fetch_add(counter) -> value before adding one."""
    e = new_function(module, "fetch_add", SYNC_FUNCTIONS["fetch_add"])
    e.b.ret(e.b.atomic_rmw("add", _word(e, e.args[0]), i64(1), "seq_cst"))


def _run(module: ir.Module) -> ir.Function:
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
    return e.b.function


def _post(module: ir.Module) -> None:
    """post(mailbox) -> 1 if its server is asleep and must be woken, else 0.

    The job's fields are written before.
    """
    e = new_function(module, "post", SYNC_FUNCTIONS["post"])
    mailbox = e.args[0]
    e.b.atomic_rmw("add", _word(e, mailbox, POSTED), i64(1), "seq_cst")
    e.b.ret(e.b.atomic_rmw("xchg", _word(e, mailbox, ASLEEP), i64(0), "seq_cst"))


def _serve(module: ir.Module, run: ir.Function) -> None:
    """serve(mailbox, thread, done counter, clock_gettime, elapsed clock, CPU clock, stopped value).

    Runs jobs as they are posted and counts them in `done`. Returns 0 when none has come for a
    while, then the caller sleeps until woken and calls again; the last argument for a job without
    a function.
    NOTE: announcing sleep and looking for a job once more, against posting and looking for
    sleepers, are sequentially consistent: one of both sides always sees the other.
    """
    e = new_function(module, "serve", SYNC_FUNCTIONS["serve"])
    mailbox, thread, done, clock, elapsed, cpu, stopped = e.args
    posted, asleep = _word(e, mailbox, POSTED), _word(e, mailbox, ASLEEP)
    taken, spins = _word(e, mailbox, TAKEN), e.variable(i64(0))
    names = ("wait", "spin", "doze", "woken", "job", "work", "sleep", "stop")
    wait, spin, doze, woken, job, work, sleep, stop = map(e.b.append_basic_block, names)
    e.b.branch(wait)

    e.b.position_at_end(wait)
    has_job = e.b.icmp_signed("!=", e.b.load_atomic(posted, "acquire", 8), e.b.load(taken))
    e.b.cbranch(has_job, job, spin)
    e.b.position_at_end(spin)
    _pause(e)
    spun = e.b.add(e.get(spins), i64(1))
    e.set(spins, spun)
    e.b.cbranch(e.b.icmp_signed("<", spun, i64(SPINS_BEFORE_SLEEP)), wait, doze)

    e.b.position_at_end(doze)
    e.b.atomic_rmw("xchg", asleep, i64(1), "seq_cst")
    has_job = e.b.icmp_signed("!=", e.b.load_atomic(posted, "seq_cst", 8), e.b.load(taken))
    e.b.cbranch(has_job, woken, sleep)
    e.b.position_at_end(woken)
    still = e.b.atomic_rmw("xchg", asleep, i64(0), "seq_cst")  # 0: the poster wakes us
    e.b.cbranch(e.b.icmp_signed("==", still, i64(1)), job, sleep)

    e.b.position_at_end(job)
    e.b.store(e.b.load_atomic(posted, "acquire", 8), taken)
    function, num, record = (
        e.b.load(_word(e, mailbox, field)) for field in (FUNCTION, NUM_THREADS, RECORD)
    )
    e.b.cbranch(e.b.icmp_signed("==", function, i64(0)), stop, work)
    e.b.position_at_end(work)
    _read_clocks(e, clock, (elapsed, cpu), e.address(mailbox, 8 * CLOCKS))
    e.b.call(run, [function, thread, num, record])
    _read_clocks(e, clock, (elapsed, cpu), e.address(mailbox, 8 * CLOCKS + 32))
    e.b.atomic_rmw("add", _word(e, done), i64(1), "seq_cst")
    e.set(spins, i64(0))
    e.b.branch(wait)

    e.b.position_at_end(sleep)
    e.b.ret(i64(0))
    e.b.position_at_end(stop)
    e.b.ret(stopped)


def _read_clocks(
    e: Emit, clock: ir.Value, clocks: tuple[ir.Value, ir.Value], target: ir.Value
) -> None:
    """Two timespecs one after the other."""
    read = e.b.inttoptr(clock, ir.FunctionType(I32, [I32, I64]).as_pointer())
    for i, which in enumerate(clocks):
        e.b.call(read, [e.b.trunc(which, I32), e.address(target, 16 * i)])


def _word(e: Emit, address: ir.Value, index: int = 0) -> ir.Value:
    """Pointer to a 64-bit word."""
    return e.b.inttoptr(e.address(address, 8 * index), I64.as_pointer())


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
