"""From a model's logits to text: KV cache, sessions, sampling."""
