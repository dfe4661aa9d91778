"""Configuration to objects, the only place: everything is checked here, before anything is read or written."""
