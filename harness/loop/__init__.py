"""Run: ``prepare`` begins it, ``step`` is one training step and the scoring of a split, ``train_state`` what changes from
step to step, ``run`` what is around the loop of ``train.py``, ``progress`` and ``summary`` what is said on the way and at
the end."""
