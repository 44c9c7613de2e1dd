"""An emulated process that has a library, whose functions this process calls as those of ctypes."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import struct
import subprocess
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_IN_REGISTERS = 8  # arguments of each class; more are on the stack
_GROWTH = 4 << 30  # bytes that this process's memory may grow by in any direction
_STACK_GROWTH = 64 << 20
_TRIES = 20


class Function:
    """A function of the library. restype, argtypes: as of ctypes."""

    def __init__(self, machine: Machine, address: int) -> None:
        self.restype: Any = ctypes.c_int
        self.argtypes: Sequence[Any] = ()
        self._machine, self._address = machine, address

    @functools.cached_property
    def _as_parameter_(self) -> Any:
        """The function for native code that calls it with a pointer and takes a pointer, such as XLA."""
        return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(self)

    def __call__(self, *arguments: Any) -> Any:
        """Arguments without a type in argtypes have one of their own, or are integers."""
        types = [*self.argtypes, *[None] * (len(arguments) - len(self.argtypes))]
        integers, floats = [], []
        for argument, kind in zip(arguments, types, strict=True):
            bits, real = _word(argument, kind)
            (floats if real else integers).append(bits)
        result = self._machine.call(self._address, self.restype, integers, floats)
        del arguments  # what they point to lives until here
        return result


def _word(argument: Any, kind: Any) -> tuple[int, bool]:
    """An argument as 64 bits, and True if it belongs in a register of floats."""
    if kind in (ctypes.c_float, ctypes.c_double):
        packed = struct.pack("<f", argument) if kind is ctypes.c_float else struct.pack("<d", argument)
        return int.from_bytes(packed, "little"), True
    if argument is None:
        return 0, False
    if isinstance(argument, ctypes.Array):
        return ctypes.addressof(argument), False
    if isinstance(argument, bytes):
        return ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value or 0, False
    if hasattr(argument, "_obj"):  # of ctypes.byref
        return ctypes.addressof(argument._obj), False
    return operator.index(argument) & 0xFFFFFFFFFFFFFFFF, False


class Machine:
    """A process under the emulator. Attributes are functions of its library."""

    def __init__(self, emulator: Sequence[str], program: Path, library: Path) -> None:
        self._lock = threading.Lock()
        self._functions: dict[str, Function] = {}
        for _ in range(_TRIES):
            self._process = _started([*emulator, str(program), str(library)])
            self._address("malloc")  # an answer: all of the emulator is in its place
            if not _overlap(self._process.pid):
                break
            _end(self._process)
        else:
            raise RuntimeError("the emulator always takes addresses of this process")
        weakref.finalize(self, _end, self._process)

    def __getattr__(self, name: str) -> Function:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._functions:
            address = self._address(name)
            if not address:
                raise AttributeError(f"the library has no function {name}")
            self._functions[name] = Function(self, address)
        return self._functions[name]

    def _address(self, name: str) -> int:
        """Of a function, in the process; 0 if there is none."""
        encoded = name.encode()
        with self._lock:
            return self._ask(struct.pack("<QQ", 0, len(encoded)) + encoded + bytes(-len(encoded) % 8))

    def call(self, function: int, result: Any, integers: Sequence[int], floats: Sequence[int]) -> Any:
        """Call a function at an address of the process. integers, floats: the arguments of each class, 64 bits each."""
        kind = {ctypes.c_float: 1, ctypes.c_double: 2}.get(result, 0)
        registers = [*integers[:_IN_REGISTERS], *[0] * (_IN_REGISTERS - len(integers))]
        reals = [*floats, *[0] * (_IN_REGISTERS - len(floats))]
        stack = integers[_IN_REGISTERS:]
        words = [1, function, kind, *registers, *reals, len(stack), *stack]
        with self._lock:
            bits = self._ask(struct.pack(f"<{len(words)}Q", *words))
        if result is None:
            return None
        if kind:
            return struct.unpack("<f" if kind == 1 else "<d", bits.to_bytes(8, "little")[: 4 * kind])[0]
        return result(bits).value

    def _ask(self, request: bytes) -> int:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None, "both are pipes"
        assert back is not None
        to.write(request)
        to.flush()
        answer = back.read(8)
        if len(answer) < 8:
            raise RuntimeError(f"the emulated process ended with {self._process.wait()}; its message is above")
        return int.from_bytes(answer, "little")


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    # This process's own memory as a file, which a child may use, because access is checked when it is opened.
    memory = os.open("/proc/self/mem", os.O_RDWR)
    try:
        return subprocess.Popen(
            [*command, str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory]
        )
    finally:
        os.close(memory)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _overlap(process: int) -> bool:
    """True if the emulator lies at addresses that this process has or may come to have: pages could not be copied."""
    own, others = _mappings("self"), _mappings(str(process))
    return any(
        begin - growth < end and at < stop + growth
        for begin, stop, name in own
        for at, end, _ in others
        for growth in (_STACK_GROWTH if name == "[stack]" else _GROWTH,)
    )


def _mappings(process: str) -> list[tuple[int, int, str]]:
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    fields = [line.split() for line in lines if "[vsyscall]" not in line]
    return [(*(int(address, 16) for address in first.split("-")), rest[-1]) for first, *rest in fields]  # type: ignore[misc]
