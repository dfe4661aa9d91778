"""The loop of a run. ``prepare`` builds a run, ``run`` holds its folder, record and signals,
``trainer`` holds model, data and state, ``update`` makes one update, ``scoring`` computes bits
per byte, and ``summary`` makes rows."""
