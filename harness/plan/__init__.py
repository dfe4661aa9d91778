"""From the configuration to objects. Every key is validated here, before a run reads or writes a
file."""
