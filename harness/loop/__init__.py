"""The run: ``prepare`` begins it, ``step`` is one training step and the scoring of a split, ``run`` what changes from step
to step, ``job`` what is around the loop of ``train.py``, ``summary`` what is said at the end."""
