"""The Messages API of Anthropic, on top of the OpenAI-compatible server's chat completions."""
