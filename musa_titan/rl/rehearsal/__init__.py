"""A model, a task and a reward small enough for a laptop."""
