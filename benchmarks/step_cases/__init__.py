"""Published step times of real GPUs, and the workloads that stand for them; run by benchmarks/step_time.py."""
