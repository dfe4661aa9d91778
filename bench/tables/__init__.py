"""Makes tables, figures and a page from rows, with neither torch nor a server."""
