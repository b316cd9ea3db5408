"""The words of compiled Python: integers behind an address, and calling a kernel by address.

NOTE: importing this module imports numba. Raw addresses, not array views, are used in compiled
code: the reference counts of shared arrays would bounce between cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import llvmlite.ir as ir
from numba import carray, njit, types  # type: ignore[attr-defined]  # public all the same
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.extending import intrinsic
from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., object])


class Ints(Protocol):
    """Integers in memory, as compiled code sees them."""

    def __getitem__(self, index: int) -> int: ...

    def __setitem__(self, index: int, value: int) -> None: ...


def _as_pointer(
    context: BaseContext, builder: ir.IRBuilder, signature: Signature, values: list[ir.Value]
) -> ir.Value:
    """An integer as a pointer."""
    kind = context.get_value_type(signature.return_type)  # type: ignore[no-untyped-call]
    return builder.inttoptr(values[0], kind)


def _call(
    context: BaseContext, builder: ir.IRBuilder, signature: Signature, values: list[ir.Value]
) -> ir.Value:
    """A call through an address with the members of a tuple."""
    address, packed = values
    count = len(signature.args[1])
    word = ir.IntType(64)
    callee = builder.inttoptr(address, ir.FunctionType(word, [word] * count).as_pointer())
    return builder.call(callee, [builder.extract_value(packed, i) for i in range(count)])


if TYPE_CHECKING:

    def compiled(function: _Function) -> _Function:
        """Compile with numba."""

    def int64s(address: int) -> Ints:
        """The int64 array at an address."""

    def int32s(address: int) -> Ints:
        """The int32 array at an address."""

    def int16s(address: int) -> Ints:
        """The int16 array at an address."""

    def float32s(address: int) -> Ints:
        """The fp32 array at an address."""

    def array(values: Ints, shape: int | tuple[int, ...]) -> NDArray[Any]:
        """The array view of numbers in memory."""

    def call(function: int, args: tuple[int, ...]) -> int:
        """Call a kernel with i64 arguments."""

else:
    compiled = njit
    array = carray

    @intrinsic
    def int64s(typing_context, address):
        """The int64 array at an address."""
        return types.CPointer(types.int64)(types.int64), _as_pointer

    @intrinsic
    def int32s(typing_context, address):
        """The int32 array at an address."""
        return types.CPointer(types.int32)(types.int64), _as_pointer

    @intrinsic
    def int16s(typing_context, address):
        """The int16 array at an address."""
        return types.CPointer(types.int16)(types.int64), _as_pointer

    @intrinsic
    def float32s(typing_context, address):
        """The fp32 array at an address."""
        return types.CPointer(types.float32)(types.int64), _as_pointer

    @intrinsic
    def call(typing_context, function, args):
        """Call a kernel with i64 arguments."""
        return types.int64(types.int64, types.UniTuple(types.int64, len(args))), _call
