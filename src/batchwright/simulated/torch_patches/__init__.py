"""Everything that replaces a part of torch while a card is simulated: under one lock, undone on every way out.

Each file lists the names it replaces ("Replaces:") and yields them as `Patch`es; only `patches.TorchPatches` applies
them. `backend.py` is the device, `torch_cuda.py` what torch says about it, and `redirected_calls.py` what a step
calls; `compiled.py`, `inductor.py` and `seen_as_cuda.py` are torch.compile.
"""
