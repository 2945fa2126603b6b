"""The pages of one rank: registered memory, writes and notifications."""
