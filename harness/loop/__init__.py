"""The loop of a run. ``prepare`` builds a run, ``run`` holds its folder, record and signals,
``trainer`` holds model, data and state, ``step`` makes one step, and ``summary`` makes rows."""
