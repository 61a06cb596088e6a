"""The Messages API of Anthropic, on top of the chat room of the OpenAI-compatible server."""
