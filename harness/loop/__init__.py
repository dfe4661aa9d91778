"""Run: ``prepare`` begins it; ``run`` is its folder, record and signals; ``trainer`` is model, data, state and step, of which
``update`` is what moves the model; ``scoring`` gives bits per byte; ``progress`` and ``summary`` are what a user sees."""
