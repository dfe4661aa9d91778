"""Device that a run computes on: its device and threads, its processes, the GPU that it holds, the machine under it."""
