"""Workshop: where weights change."""
