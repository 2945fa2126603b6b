"""What one YAML may say, and what it means."""
