"""A run: ``prepare`` builds it; ``run`` has folder, record and signals; ``trainer`` has model, data, state and step;
``update`` moves the model; ``scoring`` gives bits per byte; ``summary`` makes the rows."""
