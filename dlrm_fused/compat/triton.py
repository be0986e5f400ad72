"""Private names of Triton, 3.6 to 3.8."""

# The atomic operations by which Triton's interpreter carries out `tl.atomic_*`: on any address, with a memory order, so that
# host code and kernels under the interpreter can signal each other. Python has no such operations of its own.
from triton._C.libtriton import interpreter as host_atomics

__all__ = ["host_atomics"]
