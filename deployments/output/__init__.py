"""What a model's output means: text, reasoning and tool calls, and the constraints that it was asked to meet."""
