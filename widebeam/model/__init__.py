"""The Qwen3 network, its weights, its tokenizer and its attention ops."""
