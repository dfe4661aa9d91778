"""Configuration to objects, the only place: everything is checked here, before anything is read or written.

``build`` makes a run's plan; ``settings`` are the plain sections as values, ``instantiate`` is for nodes with ``_target_``,
``layers`` for a variant's.
"""
