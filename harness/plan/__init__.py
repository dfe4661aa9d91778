"""Configuration to objects, the only place: everything is checked here, before anything is read or written.

``build`` makes a run's plan; ``settings`` are the plain sections as values, ``instantiate`` is for nodes with
``_target_``, ``network`` for a variant's layers and the model, ``space`` for a trial's point, ``small`` for checks.
"""
