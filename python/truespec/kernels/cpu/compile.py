"""From LLVM IR to addresses of machine code, kept on disk.

The key of a cached object is the kernels' source with the CPU and the compiler's version, so a
changed kernel or another machine never finds a stale one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import llvmlite.ir as ir
import numba

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cpu:
    """What code is made for, in LLVM's names."""

    name: str
    features: str


def host_cpu() -> Cpu:
    """The CPU this process runs on.

    Raises:
        RuntimeError: an x86 CPU without AVX2, FMA or F16C.
    """
    features: dict[str, bool] = dict(llvm.get_host_cpu_features())
    missing = [name for name in ("avx2", "fma", "f16c") if not features.get(name, False)]
    if llvm.get_process_triple().startswith("x86") and missing:
        raise RuntimeError(f"the CPU lacks {', '.join(missing)}: the numba kernels need them")
    text = ",".join(("+" if on else "-") + name for name, on in sorted(features.items()))
    return Cpu(llvm.get_host_cpu_name(), text)


def code_version(cpu: Cpu) -> str:
    """Changes with the kernels' source, the compilers and the CPU."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted([*package.glob("*.py"), *package.parent.glob("*.py")]):
        digest.update(path.read_bytes())
    for text in (numba.__version__, llvmlite.__version__, cpu.name, cpu.features):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:24]


class Compiler:
    """Compiles modules for one CPU and keeps their code alive."""

    def __init__(self, cpu: Cpu, cache_dir: Path, progress: Progress | None = None) -> None:
        """Prepare a compiler.

        Args:
            cpu: the target.
            cache_dir: where objects are kept; created. Where that is impossible a temporary
                directory serves this process.
            progress: told in a few words what is being compiled (not called for cached code).
        """
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.cpu = cpu
        self.progress = progress or (lambda _: None)
        self.directory = self._make_directory(cache_dir / f"cpu-{code_version(cpu)}")
        target = llvm.Target.from_default_triple()
        self._machine = target.create_target_machine(
            cpu=cpu.name, features=cpu.features, opt=3, codemodel="jitdefault", jit=True
        )
        engine_machine = target.create_target_machine(codemodel="jitdefault", jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), engine_machine)

    def load(
        self, name: str, build: Callable[[], ir.Module], functions: Sequence[str]
    ) -> dict[str, int]:
        """Addresses of `functions` of the module `name`, built and compiled unless kept on disk."""
        path = self.directory / f"{name}.o"
        if not path.exists():
            self.progress(f"compiling {name} for {self.cpu.name}, once per machine")
            write_atomically(path, self._compile(build()))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(path.read_bytes()))
        self._engine.finalize_object()
        addresses = {f: int(self._engine.get_function_address(f)) for f in functions}
        assert all(addresses.values()), addresses
        return addresses

    def _make_directory(self, wanted: Path) -> Path:
        """`wanted`, or a temporary directory where it cannot be written."""
        with contextlib.suppress(OSError):  # then it is not writable either
            wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK):
            return wanted
        self.progress(f"cannot write {wanted}: compiled kernels are not kept")
        self._temporary = tempfile.TemporaryDirectory(prefix="truespec-")
        return Path(self._temporary.name)

    def _compile(self, module: ir.Module) -> bytes:
        """Optimise a module and emit its object code."""
        module.triple = llvm.get_default_triple()
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = False
        options.slp_vectorization = False
        options.loop_unrolling = False
        builder = llvm.create_pass_builder(self._machine, options)
        builder.getModulePassManager().run(parsed, builder)
        code: bytes = self._machine.emit_object(parsed)
        return code


def write_atomically(path: Path, data: bytes) -> None:
    """Write so that another process sees the whole file or none."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
