"""GGUF files: read them, and convert them to a folder in Hugging Face layout."""
