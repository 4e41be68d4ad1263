"""What a run leaves behind, and how to look at it."""
