"""From rows to a report: read, refuse, compare, tables, figures, page. Neither torch nor a server is needed."""
