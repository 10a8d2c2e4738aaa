"""Moving weights into a live model: sources, plans and the one writer."""
