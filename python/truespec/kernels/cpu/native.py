"""Two words of compiled Python: integers behind an address, and calling a kernel by address.

NOTE: importing this module imports numba. Raw addresses, not array views, are used in compiled
code: the reference counts of shared arrays would bounce between cores.
"""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.ir as ir
from numba import types
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

Codegen = Callable[[BaseContext, ir.IRBuilder, Signature, list[ir.Value]], ir.Value]


@intrinsic
def int64s(typing_context: object, address: types.Type) -> tuple[Signature, Codegen]:
    """The int64 array at an address; index it."""
    return types.CPointer(types.int64)(types.int64), _as_pointer


@intrinsic
def int32s(typing_context: object, address: types.Type) -> tuple[Signature, Codegen]:
    """The int32 array at an address; index it."""
    return types.CPointer(types.int32)(types.int64), _as_pointer


@intrinsic
def call(
    typing_context: object, function: types.Type, args: types.Type
) -> tuple[Signature, Codegen]:
    """Call a kernel: i64 address, tuple of i64 arguments -> i64."""

    def codegen(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, values: list[ir.Value]
    ) -> ir.Value:
        address, packed = values
        count = len(signature.args[1])
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word] * count)
        callee = builder.inttoptr(address, kind.as_pointer())
        return builder.call(callee, [builder.extract_value(packed, i) for i in range(count)])

    return types.int64(types.int64, types.UniTuple(types.int64, len(args))), codegen


def _as_pointer(
    context: BaseContext, builder: ir.IRBuilder, signature: Signature, values: list[ir.Value]
) -> ir.Value:
    """An integer as a pointer."""
    kind = context.get_value_type(signature.return_type)
    return builder.inttoptr(values[0], kind)
