"""Emitting LLVM IR: vectors of 16 floats, raw addresses, loops.

Knows LLVM's instructions and nothing of models. Every kernel takes and returns 64-bit integers
(addresses, counts, float bits), so that one way of calling fits all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import llvmlite.ir as ir
import numpy as np

LANES = 16
F32 = ir.FloatType()
F16 = ir.HalfType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
BYTE = ir.IntType(8)


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """<lanes x element>."""
    return ir.VectorType(element, lanes)


def i64(value: int) -> ir.Constant:
    """A constant."""
    return ir.Constant(I64, value)


def splat(element: ir.Type, value: float, lanes: int = LANES) -> ir.Constant:
    """A vector constant of one value, rounded to fp32 where it is a float."""
    rounded = float(np.float32(value)) if element == F32 else value
    return ir.Constant(vector(element, lanes), [rounded] * lanes)


class Emit:
    """The body of one function under construction.

    NOTE: floating-point operations carry no fast-math flags, so LLVM neither reorders nor fuses
    them: a result depends on the operations written here and on nothing else.
    """

    def __init__(self, function: ir.Function) -> None:
        """Start at the beginning of `function`."""
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self.module = function.module
        self.args = function.args

    def address(self, base: ir.Value, *terms: ir.Value | int) -> ir.Value:
        """base + the sum of byte offsets."""
        for term in terms:
            base = self.b.add(base, i64(term) if isinstance(term, int) else term)
        return base

    def times(self, value: ir.Value, factor: int) -> ir.Value:
        """value * factor."""
        return self.b.mul(value, i64(factor))

    def load(self, address: ir.Value, kind: ir.Type, align: int = 4) -> ir.Value:
        """The value at an address."""
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=align, typ=kind)

    def store(self, value: ir.Value, address: ir.Value, align: int = 4) -> None:
        """Write a value to an address."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def load_f32x16(self, address: ir.Value) -> ir.Value:
        """16 floats."""
        return self.load(address, vector(F32))

    def broadcast(self, value: ir.Value, lanes: int = LANES) -> ir.Value:
        """A vector of equal lanes."""
        undefined = ir.Constant(vector(value.type, lanes), ir.Undefined)
        single = self.b.insert_element(undefined, value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(
            single, undefined, ir.Constant(vector(I32, lanes), [0] * lanes)
        )

    def load_broadcast(self, address: ir.Value) -> ir.Value:
        """One float in 16 lanes."""
        return self.broadcast(self.load(address, F32))

    def intrinsic(self, name: str, result: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
        """Call one of LLVM's intrinsics, declared on first use."""
        declared = self.module.globals.get(name)
        if declared is None:
            kind = ir.FunctionType(result, [arg.type for arg in args])
            declared = ir.Function(self.module, kind, name)
        return self.b.call(declared, list(args))

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """x * y + z with one rounding, <16 x float>."""
        return self.intrinsic("llvm.fma.v16f32", vector(F32), [x, y, z])

    def prefetch(self, address: ir.Value, *, once: bool = False) -> None:
        """Ask for a cache line that is read soon. Never faults, wherever it points.

        Args:
            once: it need not stay in a cache after that.
        """
        pointer = self.b.inttoptr(address, BYTE.as_pointer())
        hints = [ir.Constant(I32, hint) for hint in (0, 0 if once else 3, 1)]  # read, keep, data
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), [pointer, *hints])

    def f32_from_bits(self, bits: ir.Value) -> ir.Value:
        """The float whose bits are the low half of an i64."""
        return self.b.bitcast(self.b.trunc(bits, I32), F32)

    def variable(self, initial: ir.Value) -> ir.Value:
        """A mutable value (LLVM turns it into registers); read and write with `b.load/b.store`."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(initial.type)
        self.b.store(initial, slot)
        return slot

    def get(self, slot: ir.Value) -> ir.Value:
        """Current value of a variable."""
        return self.b.load(slot)

    def set(self, slot: ir.Value, value: ir.Value) -> None:
        """Change a variable."""
        self.b.store(value, slot)

    @contextmanager
    def loop(
        self, stop: ir.Value | int, start: ir.Value | int = 0, step: int = 1
    ) -> Iterator[ir.Value]:
        """for i in range(start, stop, step): yields i."""
        limit = i64(stop) if isinstance(stop, int) else stop
        slot = self.variable(i64(start) if isinstance(start, int) else start)
        head, body, end = (self.b.append_basic_block(name) for name in ("head", "body", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.get(slot)
        self.b.cbranch(self.b.icmp_signed("<", index, limit), body, end)
        self.b.position_at_end(body)
        yield index
        self.set(slot, self.b.add(index, i64(step)))
        self.b.branch(head)
        self.b.position_at_end(end)

    def switch(self, value: ir.Value, cases: dict[int, Callable[[], None]]) -> None:
        """Run the case that equals `value`, none if there is no such case."""
        end = self.b.append_basic_block("switched")
        choice = self.b.switch(value, end)
        for key, emit_case in cases.items():
            block = self.b.append_basic_block(f"case{key}")
            choice.add_case(i64(key), block)
            self.b.position_at_end(block)
            emit_case()
            self.b.branch(end)
        self.b.position_at_end(end)

    def sum_lanes(self, lanes: ir.Value) -> ir.Value:
        """Sum of 16 lanes in a fixed order: halves onto halves."""
        width = LANES
        while width > 1:
            width //= 2
            low = ir.Constant(vector(I32, width), list(range(width)))
            high = ir.Constant(vector(I32, width), list(range(width, 2 * width)))
            lanes = self.b.fadd(
                self.b.shuffle_vector(lanes, lanes, low), self.b.shuffle_vector(lanes, lanes, high)
            )
        return self.b.extract_element(lanes, ir.Constant(I32, 0))

    def larger(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Lane-wise maximum that keeps `y` where x is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def exp(self, x: ir.Value) -> ir.Value:
        """exp of <16 x float> within 2 ulp, one polynomial of IEEE operations (Cephes expf).

        Arguments are clamped to -86 .. 87; a NaN stays a NaN.
        """
        f32x16 = vector(F32)
        low, high = splat(F32, -86.0), splat(F32, 87.0)
        # Ordered comparisons are false for a NaN, which therefore passes.
        x = self.b.select(self.b.fcmp_ordered("<", x, low), low, x)
        x = self.b.select(self.b.fcmp_ordered(">", x, high), high, x)
        n = self.intrinsic("llvm.rint.v16f32", f32x16, [self.b.fmul(x, splat(F32, 1.44269504))])
        r = self.fma(n, splat(F32, -0.693359375), x)
        r = self.fma(n, splat(F32, 2.12194440e-4), r)
        p = splat(F32, 1.9875691500e-4)
        for c in (
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ):
            p = self.fma(p, r, splat(F32, c))
        p = self.fma(p, self.b.fmul(r, r), self.b.fadd(r, splat(F32, 1.0)))
        # A NaN has no integer; keep the bits of p (a NaN already) then.
        is_number = self.b.fcmp_ordered("==", n, n)
        shift = self.b.select(is_number, n, splat(F32, 0.0))
        exponent = self.b.shl(self.b.fptosi(shift, vector(I32)), splat(I32, 23))
        return self.b.bitcast(self.b.add(self.b.bitcast(p, vector(I32)), exponent), f32x16)


def new_function(module: ir.Module, name: str, num_args: int, *, private: bool = False) -> Emit:
    """A function of `num_args` i64 that returns an i64; `private` ones may be inlined away."""
    function = ir.Function(module, ir.FunctionType(I64, [I64] * num_args), name)
    if private:
        function.linkage = "internal"
    return Emit(function)
