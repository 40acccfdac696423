"""A GPU that is not there: its cards, its allocator, what its kernels take."""

from batchwright.simulated.torch_patches.backend import check_torch

check_torch()  # before the modules of this folder import what an older torch does not have
