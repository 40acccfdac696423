"""A simulated card: its allocator, its operators, its ranks, and what of torch it replaces."""

from batchwright.simulated.torch_patches.torch_names import check_torch

check_torch()  # before the modules of this folder import what an older torch does not have
