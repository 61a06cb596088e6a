"""Parsers of generated text: tool calls (`tools`) and thoughts (`reasoning`)."""
