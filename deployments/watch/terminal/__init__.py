"""What Manta says in a terminal. Never imports Ray: `top` and `explain` start at once."""
