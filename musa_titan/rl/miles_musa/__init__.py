"""Tables for miles: one for each role of a Ray job."""
