"""Accumulation that equals the big batch, under DDP and FSDP2 too."""
