"""Parsers of generated text: tool calls (`tools`) and reasoning (`reasoning`)."""
