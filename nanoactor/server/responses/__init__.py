"""OpenAI's Responses API. Requests are converted to chat requests, and chat answers to
responses."""
