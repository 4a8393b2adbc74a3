"""What slime and miles have in common: templates of their tables, and the factories."""
