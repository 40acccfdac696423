"""What operators do on a CUDA card that they do not do elsewhere: kernels, workspaces, number formats."""
