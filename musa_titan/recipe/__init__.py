"""Tools around a run: data, configuration."""
