"""Stand-ins for what a test machine lacks."""
