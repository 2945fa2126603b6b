"""The boards: what each shows, panel by panel."""
