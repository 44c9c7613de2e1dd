"""Kernels of another processor's instruction set, cross-compiled and run under an emulator; and those of an older one.

machine.cpp  the emulated process: calls functions of a library on this process's memory
machine.py   starts it, and has its functions as ctypes does
kernels.py   the project's libraries in it, in the place of those of this processor
plugin.py    a pytest plugin that runs tests that way: `make arm`
less_optimized.py  another one: this processor's own kernels, of any instruction set that it has, compiled in less time
"""
