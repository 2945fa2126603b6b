"""What a person types: start, check, wait, stop."""
