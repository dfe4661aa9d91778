"""The command line, composed by Hydra into a job or a sweep. A mistake gives one message and
exit code 2."""
