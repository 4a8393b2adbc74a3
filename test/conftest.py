"""What all tests share."""

from hypothesis import settings

# A run repeats, and a slow machine fails no property.
settings.register_profile("musa_titan", deadline=None, derandomize=True)
settings.load_profile("musa_titan")
