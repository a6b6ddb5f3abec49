"""What a user asks for, and what is returned: parameters and outputs, with the names of vLLM."""
