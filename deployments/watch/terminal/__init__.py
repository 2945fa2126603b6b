"""What Manta says in a terminal. Never imports Ray: its commands start at once."""
