"""Report from rows: read, refuse, compare, tables, figures, page. Neither torch nor a server is needed."""
