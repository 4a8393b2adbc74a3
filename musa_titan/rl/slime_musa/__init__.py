"""Tables for slime: one for each role of a Ray job."""
