"""What is kept of a request: its ids, its moments, the decisions and their outcomes, a line of a recording."""
