"""Tokenizer and detokenizer: text to tokens and back."""
