"""Hardware of a run: devices and precision, compilation, processes and their parameters,
signals, and the machine."""
