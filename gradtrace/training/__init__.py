"""``gt.Monitor``: tracing while a model trains."""
