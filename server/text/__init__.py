"""Texts for encoder models: tokens, padded batches, pooled embeddings and scores. Knows no HTTP and no tenant."""
