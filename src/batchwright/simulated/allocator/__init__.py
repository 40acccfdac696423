"""PyTorch's CUDA caching allocator without a card: settings, blocks, segments, snapshots."""
